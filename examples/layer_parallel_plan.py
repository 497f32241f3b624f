"""Tasks and settings of `layer_parallel_study.py`: ways to solve a net's layers, nets, their data and optimizers.

Trains nothing, and starts no process. Read `TASKS` and `Setting` first.
"""

from __future__ import annotations

import hashlib
import math
import platform
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any, Literal

import layer_parallel_digits
import torch
import torch.distributed as dist
from study_plan import Data, Layer
from torch import Tensor, nn
from torch_accl.layer_parallel import Block, Cycle, LayerParallel, RecurrentParallel, ode, plain, residual

# A gradient error above MOST_OFF, or a convergence factor above MOST_FACTOR, makes a run continue exactly.
MOST_OFF, MOST_FACTOR = 0.5, 1.0


def greatest_factor(mark: dict[str, Any]) -> float:
    """Returns the convergence factor of the pass that converges less; infinity if a factor is not a number."""
    return max(math.inf if mark[key] is None else mark[key] for key in ("forward_factor", "backward_factor"))


def gradient_error(mark: dict[str, Any]) -> float:
    """Returns the relative error of the gradients in the 2-norm; infinity if it is not a number."""
    return math.inf if mark["gradient_error"] is None else mark["gradient_error"]


@dataclass(frozen=True)
class Setting:
    """How the layers are solved in training: mode, levels, coarsening factor, iterations of both passes, and buffer
    layers at both ends.

    With `switch`, a run changes to an exact mode at the first evaluation that indicates it.
    """

    name: str
    mode: Literal["inexact", "exact-forward", "exact-wave"] = "inexact"
    levels: int = 2
    factor: int = 4
    forward: int = 2
    backward: int = 1
    buffer_layers: int = 0
    switch: Literal["never", "factor", "audit"] = "never"

    def is_over(self, mark: dict[str, Any]) -> bool:
        """Returns whether the evaluation `mark` of the net is a reason to continue exactly."""
        if self.switch == "factor":
            return greatest_factor(mark) > MOST_FACTOR
        return self.switch == "audit" and gradient_error(mark) > MOST_OFF

    def solve(self) -> dict[str, Any]:
        """Returns the arguments of every kind of net for this setting."""
        forward, adjoint = (
            Cycle(levels=self.levels, factor=self.factor, iterations=iterations)
            for iterations in (self.forward, self.backward)
        )
        return {"mode": self.mode, "fwd": forward, "bwd": adjoint}


EXACT = Setting("exact", mode="exact-wave")
INEXACT = Setting("inexact")


@dataclass(frozen=True)
class Task:
    """A net, its data, and its training."""

    name: str
    title: str
    text: str
    # Creates a net from its number of steps, a setting and a seed; its weights depend only on the seed. The net belongs
    # to the default group, or to this process alone.
    net: Callable[[int, Setting, int], Net]
    depth: int
    # Returns the data for a net with this number of steps.
    source: Callable[[int], Data]
    optimizer: Callable[[Iterable[Tensor]], torch.optim.Optimizer]
    settings: tuple[Setting, ...]
    batch: int
    # Number of held-out rows that are used.
    held: int
    steps: int
    # Number of steps between two evaluations of the net.
    every: int
    seeds: int
    # Quantity shown in addition to the training loss, and the unit of its axis.
    shown: Literal["accuracy", "loss"]
    unit: Literal["epoch", "batch"]
    # Name of the net's steps.
    layers: str = "layers between head and tail"

    def data(self) -> Data:
        """Returns the data, the same object each time."""
        return self.source(self.depth)

    def quick(self) -> Task:
        """Returns a shallow version with few steps."""
        return replace(self, depth=8, batch=4, held=16, steps=4, every=2, seeds=min(self.seeds, 2))


@cache
def images() -> Data:
    """Returns the digits with the example's split."""
    inputs, targets, held_inputs, held_targets = layer_parallel_digits.digits()
    words = f"{len(targets):,} images of 8x8, {len(held_targets)} held out"
    return Data(inputs, targets, held_inputs, held_targets, words)


def convolutions(depth: int) -> list[Block]:
    """Returns the layers of the example's net."""
    steps = [ode(layer_parallel_digits.block) for _ in range(depth)]
    return [plain(layer_parallel_digits.head), *steps, plain(layer_parallel_digits.tail)]


WIDTH, HEADS, CONTEXT, SYMBOLS = 48, 4, 64, 128
# Width of the recurrent net's state.
HIDDEN = 96


@cache
def topics(context: int) -> Data:
    """Returns the text of Python's `help()` topics as bytes.

    Training windows start anywhere. The last tenth is held out, in windows next to each other.
    """
    from pydoc_data.topics import topics

    text = "\n".join(topics[name] for name in sorted(topics)).encode()
    symbols = torch.frombuffer(bytearray(text), dtype=torch.uint8).long()
    # Bytes outside of ASCII are rare here, and become one symbol.
    symbols[symbols >= SYMBOLS] = 0
    cut = len(symbols) * 9 // 10
    windows = symbols[:cut].unfold(0, context + 1, 1)
    held = symbols[cut:].unfold(0, context + 1, context)
    words = f"{len(text) >> 10} KiB of the help topics of Python {platform.python_version()}, the last tenth held out "
    words += f"(SHA-256 {hashlib.sha256(text).hexdigest()[:12]})"
    return Data(windows[:, :-1], windows[:, 1:], held[:, :-1], held[:, 1:], words)


class Symbols(nn.Module):
    """Maps bytes, and their places in a window, to vectors."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.symbols = nn.Embedding(SYMBOLS, WIDTH)
        self.places = nn.Parameter(0.02 * torch.randn(CONTEXT, WIDTH))

    def forward(self, text: Tensor) -> Tensor:
        """Returns windows of vectors."""
        vectors: Tensor = self.symbols(text) + self.places
        return vectors


def transformer(depth: int) -> list[Block]:
    """Returns pre-norm blocks, each a step with its own skip connection, between an embedding and the scores of the
    next byte."""

    def block(number: int) -> nn.Module:
        """Returns a block with GPT-2's initial weights: the more blocks there are, the less each adds to its input."""
        made = Layer(WIDTH, HEADS)
        for linear in (part for part in made.modules() if isinstance(part, nn.Linear)):
            nn.init.normal_(linear.weight, std=0.02)
            nn.init.zeros_(linear.bias)
        for last in (made.out, made.network[-1]):
            nn.init.normal_(last.weight, std=0.02 / math.sqrt(2 * depth))
        return made

    def scores(number: int) -> nn.Module:
        return nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, SYMBOLS))

    return [plain(Symbols), *(residual(block) for _ in range(depth)), plain(scores)]


class Sequences(RecurrentParallel):
    """A GRU between an embedding and the scores of the next byte.

    All ranks have all weights and get all of the text; each rank works on its part of the windows.
    """

    def __init__(self, setting: Setting, seed: int) -> None:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            symbols, cell, scores = (
                nn.Embedding(SYMBOLS, WIDTH),
                nn.GRU(WIDTH, HIDDEN, batch_first=True),
                nn.Linear(HIDDEN, SYMBOLS),
            )
        super().__init__(cell, seed=seed, **setting.solve())
        self.symbols, self.scores = symbols, scores

    @property
    def layers(self) -> dict[str, nn.Module]:
        """Returns the modules with weights."""
        return {"symbols": self.symbols, "cell": self.cell, "scores": self.scores}

    @property
    def owned(self) -> range:
        """The layers that this rank reports: all on the first rank, since all ranks have the same gradients."""
        return range(len(self.layers) if self.is_first else 0)

    def forward(self, text: Tensor) -> Tensor:
        """Returns scores of the byte after each: in training for this rank's part of the windows, in evaluation for all
        windows on all ranks."""
        outputs, _ = super().forward(self.symbols(self.part(text)))
        if not torch.is_grad_enabled() and self.wire.size > 1:
            whole = outputs.new_zeros(*text.shape, HIDDEN)
            self.part(whole).copy_(outputs)
            dist.all_reduce(whole)
            outputs = whole
        scores: Tensor = self.scores(outputs)
        return scores

    def step(self, text: Tensor, targets: Tensor, loss_fn: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
        """Returns the loss of all windows, and stores its gradients in `.grad`, as in other nets."""
        own = self.part(targets)
        loss = loss_fn(self(text), own) * (own.numel() / targets.numel())
        loss.backward()
        loss = loss.detach()
        if self.wire.size > 1:
            # The cell's gradients are already summed.
            shares = [p.grad for module in (self.symbols, self.scores) for p in module.parameters()]
            for share in (loss, *shares):
                dist.all_reduce(share)
        return loss

    def part(self, windows: Tensor) -> Tensor:
        """Returns this rank's steps of the windows."""
        return windows.tensor_split(self.wire.size, 1)[self.wire.rank]


Net = LayerParallel | Sequences


def stack(layers: Callable[[int], Sequence[Block]], horizon: float, depth: int, setting: Setting, seed: int) -> Net:
    """Returns a net of layers."""
    ends = (setting.buffer_layers, setting.buffer_layers)
    return LayerParallel(layers(depth), horizon=horizon, seed=seed, buffer_layers=ends, **setting.solve())


def adam(parameters: Iterable[Tensor], rate: float) -> torch.optim.Optimizer:
    """Returns Adam with torch's default settings, except for the rate."""
    return torch.optim.Adam(parameters, lr=rate)


# The longest runs come first, so that processes that share the work end at about the same time.
TASKS = (
    Task(
        "transformer",
        "Python's topics, a language model",
        f"a transformer over bytes with pre-norm blocks, width {WIDTH}, windows of {CONTEXT}, Adam, learning rate 0.001, 8 windows a batch",
        partial(stack, transformer, 1.0),
        depth=32,
        source=lambda depth: topics(CONTEXT),
        optimizer=partial(adam, rate=1e-3),
        settings=(
            INEXACT,
            Setting("inexact, buffer layers", buffer_layers=2),
            Setting("inexact, 3 / 2 iterations", forward=3, backward=2),
            Setting("inexact, c = 8", factor=8),
            Setting("switched by its factor", switch="factor"),
            Setting("switched by its audit", switch="audit"),
            Setting("exact forward, inexact gradient", mode="exact-forward"),
            EXACT,
        ),
        batch=8,
        held=128,
        steps=1500,
        every=125,
        seeds=1,
        shown="loss",
        unit="batch",
    ),
    Task(
        "gru",
        "Python's topics, a recurrent language model",
        f"a GRU of width {HIDDEN} over bytes, the loss of all steps, Adam, learning rate 0.003, 8 windows a batch",
        lambda depth, setting, seed: Sequences(setting, seed),
        depth=256,
        source=topics,
        optimizer=partial(adam, rate=3e-3),
        settings=(
            Setting("inexact, 6 / 6 iterations", forward=6, backward=6),
            Setting("inexact, 4 / 3 iterations", forward=4, backward=3),
            Setting("inexact, 3 levels", levels=3),
            INEXACT,
            Setting("switched by its audit", switch="audit"),
            Setting("exact forward, inexact gradient", mode="exact-forward"),
            EXACT,
        ),
        batch=8,
        held=64,
        steps=400,
        every=40,
        seeds=1,
        shown="loss",
        unit="batch",
        layers="steps of a sequence",
    ),
    Task(
        "digits",
        "Digits, a residual net of convolutions",
        "the net of `examples/layer_parallel_digits.py`, Adam, learning rate 0.003, 64 images a batch",
        partial(stack, convolutions, 4.0),
        depth=32,
        source=lambda depth: images(),
        optimizer=partial(adam, rate=3e-3),
        settings=(INEXACT, Setting("inexact, c = 8", factor=8), EXACT),
        batch=64,
        held=300,
        # Eight passes over all images, without those that do not fill a batch.
        steps=8 * 23,
        every=23,
        seeds=3,
        shown="accuracy",
        unit="epoch",
    ),
)
BY_NAME = {task.name: task for task in TASKS}
