"""Tasks and settings of `compression_study.py`: settings of compression, models, their data and optimizers.

Trains nothing, and starts no process. Read `TASKS` and `SETTINGS` first.
"""

from __future__ import annotations

import hashlib
import os
import platform
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cache, partial
from itertools import pairwise
from pathlib import Path

import torch
from digits_ddp import DigitsNet, digits
from torch import Tensor, nn
from torch.nn import functional
from torch_accl import compression

RANKS = 4


@dataclass(frozen=True)
class Setting:
    """How gradients are compressed; settings that must not change the loss are `judged`."""

    name: str
    codec: str | None
    feedback: bool = False
    judged: bool = False

    def compression(self, seed: int) -> compression.Compression | None:
        """Returns the compression; None for plain DistributedDataParallel.

        Raises:
            ValueError: this build does not accept the codec.
        """
        if self.codec is None:
            return None
        return compression.Compression(self.codec, error_feedback=self.feedback, seed=seed)


# Both settings with 2 bits round to nearest, so that they differ only in the error feedback.
SETTINGS = (
    Setting("float32", None),
    Setting("bf16", "bf16"),
    Setting("8 bits", "maxmin:8", judged=True),
    Setting("4 bits", "maxmin:4", judged=True),
    Setting("4 bits, buckets of 64", "maxmin:4,bucket=64", judged=True),
    Setting("2 bits", "maxmin:2,rounding=nearest"),
    Setting("2 bits, error feedback", "maxmin:2,rounding=nearest", feedback=True, judged=True),
    Setting("sign", "sign"),
    Setting("sign, error feedback", "sign", feedback=True),
)
EXACT = SETTINGS[0].name


@dataclass(frozen=True)
class Data:
    """Training and held-out examples: inputs and targets, a row each."""

    inputs: Tensor
    targets: Tensor
    held_inputs: Tensor
    held_targets: Tensor
    description: str


@dataclass(frozen=True)
class Task:
    """A model, its data, and its training."""

    name: str
    title: str
    text: str
    model: Callable[[], nn.Module]
    data: Callable[[], Data]
    optimizer: Callable[[Iterable[Tensor]], torch.optim.Optimizer]
    # Rows of a step on each rank.
    batch: int
    steps: int
    # Whether parity with float32 must hold.
    judged: bool = True


class Language(nn.Module):
    """A transformer that predicts the next byte: two layers of width 64, about 119,000 parameters."""

    WIDTH, HEADS, CONTEXT, SYMBOLS = 64, 4, 32, 128

    def __init__(self) -> None:
        super().__init__()
        self.symbols = nn.Embedding(self.SYMBOLS, self.WIDTH)
        self.places = nn.Parameter(0.02 * torch.randn(self.CONTEXT, self.WIDTH))
        self.layers = nn.ModuleList(Layer(self.WIDTH, self.HEADS) for _ in range(2))
        self.norm = nn.LayerNorm(self.WIDTH)
        self.head = nn.Linear(self.WIDTH, self.SYMBOLS)

    def forward(self, text: Tensor) -> Tensor:
        """Returns scores of the byte behind each of a window's bytes."""
        hidden = self.symbols(text) + self.places
        for layer in self.layers:
            hidden = layer(hidden)
        scores: Tensor = self.head(self.norm(hidden))
        return scores


class Layer(nn.Module):
    """Causal attention, and a network of two linear layers."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.before_attention, self.before_network = nn.LayerNorm(width), nn.LayerNorm(width)
        self.mixed, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.network = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, hidden: Tensor) -> Tensor:
        """Returns the changed windows of vectors."""
        mixed = self.mixed(self.before_attention(hidden)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        seen = functional.scaled_dot_product_attention(mixed[0], mixed[1], mixed[2], is_causal=True)
        hidden = hidden + self.out(seen.transpose(1, 2).flatten(2))
        return hidden + self.network(self.before_network(hidden))


def perceptron() -> nn.Module:
    """Returns a network 64-128-128-10 with He initialisation and zero biases.

    With torch's smaller initial weights the loss would stay constant for half of the steps, and then depend on when it
    starts to fall.
    """
    sizes = (64, 128, 128)
    hidden = [part for a, b in pairwise(sizes) for part in (nn.Linear(a, b), nn.ReLU())]
    layers = nn.Sequential(nn.Flatten(), *hidden, nn.Linear(sizes[-1], 10))
    for layer in layers:
        if isinstance(layer, nn.Linear):
            nn.init.kaiming_normal_(layer.weight, nonlinearity="relu")
            nn.init.zeros_(layer.bias)
    return layers


@cache
def images(least: float, greatest: float) -> Data:
    """Returns the digits with the demo's split, and pixels in a range."""
    parts = digits()
    inputs, held_inputs = (least + (greatest - least) * part for part in parts[::2])
    words = f"{len(parts[1]):,} images of 8x8 with pixels from {least:g} to {greatest:g}, {len(parts[3])} held out"
    return Data(inputs, parts[1], held_inputs, parts[3], words)


@cache
def sources(train_bytes: int = 128 << 10, held_bytes: int = 32 << 10) -> Data:
    """Returns the text of Python's own library: its public modules in the order of their names, as far as they are
    needed."""
    wanted, text = train_bytes + held_bytes, b""
    for file in sorted(Path(os.__file__).parent.glob("[a-z]*.py")):
        text += file.read_bytes()
        if len(text) > wanted:
            break
    else:
        raise RuntimeError(
            f"this Python's library has {len(text):,} bytes of sources; expected at least {wanted + 1:,}"
        )
    symbols = torch.frombuffer(bytearray(text[: wanted + 1]), dtype=torch.uint8).long()
    # Bytes outside of ASCII are rare here, and become one symbol.
    symbols[symbols >= Language.SYMBOLS] = 0
    windows = [part.view(-1, Language.CONTEXT) for part in (symbols[:-1], symbols[1:])]
    cut = train_bytes // Language.CONTEXT
    words = f"{train_bytes >> 10} KiB of the standard library of Python {platform.python_version()}, "
    words += f"{held_bytes >> 10} KiB held out (SHA-256 {hashlib.sha256(text[: wanted + 1]).hexdigest()[:12]})"
    return Data(windows[0][:cut], windows[1][:cut], windows[0][cut:], windows[1][cut:], words)


def momentum(rate: float) -> Callable[[Iterable[Tensor]], torch.optim.Optimizer]:
    """Returns gradient descent with momentum 0.9."""
    return lambda parameters: torch.optim.SGD(parameters, lr=rate, momentum=0.9)


TASKS = (
    Task(
        "digits",
        "Digits, a network of linear layers",
        "64-128-128-10, momentum 0.9, learning rate 0.05",
        perceptron,
        partial(images, -0.5, 0.5),
        momentum(0.05),
        batch=16,
        steps=400,
    ),
    Task(
        "convolutions",
        "Digits, a convolutional network",
        "the network of `examples/digits_ddp.py`, 53,000 parameters, momentum 0.9, learning rate 0.05",
        DigitsNet,
        partial(images, 0.0, 2.0),
        momentum(0.05),
        batch=16,
        steps=400,
    ),
    Task(
        "language",
        "Python sources, a language model",
        "a transformer of two layers over bytes, 119,000 parameters, momentum 0.9, learning rate 0.1",
        Language,
        sources,
        momentum(0.1),
        batch=8,
        steps=300,
    ),
    # Adam divides each element by its usual size, so noise in small elements becomes as large as in others. This is
    # known to fail with error feedback, and is shown.
    Task(
        "language_adam",
        "Python sources, with Adam",
        "the same transformer, Adam, learning rate 0.001",
        Language,
        sources,
        lambda parameters: torch.optim.Adam(parameters, lr=1e-3),
        batch=8,
        steps=300,
        judged=False,
    ),
)
BY_NAME = {task.name: task for task in TASKS}
