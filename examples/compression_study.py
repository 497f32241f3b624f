#!/usr/bin/env python3
"""What compressed gradients do to training: three small models, several settings, the same seeds for all of them.

    python examples/compression_study.py

Trains each model in four processes with DistributedDataParallel over accl, once for each setting and seed. With one seed
all settings have the same initial weights and batches, so that what is compared is the difference in final loss, pair by
pair. The data are on the machine: handwritten digits that scikit-learn brings, and the sources of Python's own library.
The exit status is 1 when a setting that must not change the loss does; `--help` says what is judged.
"""

from __future__ import annotations

import os

# Before numpy and torch are loaded: four ranks share the machine, and processes are forked from this one.
os.environ.update(OMP_NUM_THREADS="1", OPENBLAS_NUM_THREADS="1", MKL_NUM_THREADS="1")

import argparse
import hashlib
import json
import math
import platform
import re
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from functools import cache, partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel
from torch_accl import Options, _native, compression
from torch_accl.cli.bench.processes import Failed, run_ranks

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "examples")]

from digits_ddp import DigitsNet, digits

from benches import blocks
from benches.peers import machine
from benches.peers.tables import Bar, Table, plain

RANKS = 4
SEEDS = 5
# What may be sent is then the same on every machine; otherwise a cost model would choose, by the speed of this one.
ALGORITHM = "all_reduce=direct_two_phase"
POINTS = 40
TIMEOUT_S = 120
JUDGED = """\
Judged is the mean loss over the whole training set after the last step, as the difference from the float32 run of the same
seed. There is parity when the mean of the differences is within 2 standard errors of zero, or within a quarter of float32's own
spread over seeds (its standard deviation) if that is more. It must hold for 8 and 4 bits, and for 2 bits with error feedback,
where the optimizer is not Adam; all else is shown."""
DOCS = ROOT / "docs" / "compression"
NAME = "study"
COMMAND = "python examples/compression_study.py --write-docs"
ALT = "Losses on the way, and differences from float32 at the end"


@dataclass(frozen=True)
class Setting:
    """How gradients are compressed; those that must not change the loss are `judged`."""

    name: str
    codec: str | None
    feedback: bool = False
    judged: bool = False

    def compression(self, seed: int) -> compression.Compression | None:
        """None for plain DistributedDataParallel.

        Raises:
            ValueError: this build does not accept it.
        """
        if self.codec is None:
            return None
        return compression.Compression(self.codec, error_feedback=self.feedback, seed=seed)


# Both rows of 2 bits round to nearest, so that nothing but the error feedback differs.
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
    """Examples to train on and to hold out: inputs and targets, a row each."""

    inputs: Tensor
    targets: Tensor
    held_inputs: Tensor
    held_targets: Tensor
    description: str


@dataclass(frozen=True)
class Task:
    """A model, what it is trained on, and how."""

    name: str
    title: str
    text: str
    model: Callable[[], nn.Module]
    data: Callable[[], Data]
    optimizer: Callable[[Iterable[Tensor]], torch.optim.Optimizer]
    # Rows of a step on each rank.
    batch: int
    steps: int
    # Whether parity must hold.
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
        """Scores of the byte behind each of a window's bytes."""
        hidden = self.symbols(text) + self.places
        for layer in self.layers:
            hidden = layer(hidden)
        scores: Tensor = self.head(self.norm(hidden))
        return scores


class Layer(nn.Module):
    """Attention to what came before, and a network of two linear layers."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.before_attention, self.before_network = nn.LayerNorm(width), nn.LayerNorm(width)
        self.mixed, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.network = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, hidden: Tensor) -> Tensor:
        """Windows of vectors, changed."""
        mixed = self.mixed(self.before_attention(hidden)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        seen = functional.scaled_dot_product_attention(mixed[0], mixed[1], mixed[2], is_causal=True)
        hidden = hidden + self.out(seen.transpose(1, 2).flatten(2))
        return hidden + self.network(self.before_network(hidden))


def perceptron() -> nn.Module:
    """64-128-128-10. With weights of He and no biases at first: with torch's own, which are smaller, it stands still for half of
    the steps, and then its loss depends on when it left."""
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
    """The digits as the demo splits them, with pixels in a range."""
    parts = digits()
    inputs, held_inputs = (least + (greatest - least) * part for part in parts[::2])
    words = f"{len(parts[1]):,} images of 8x8 with pixels from {least:g} to {greatest:g}, {len(parts[3])} held out"
    return Data(inputs, parts[1], held_inputs, parts[3], words)


@cache
def sources(train_bytes: int = 128 << 10, held_bytes: int = 32 << 10) -> Data:
    """Python's own library as text: its public modules in the order of their names, as far as they are needed."""
    wanted, text = train_bytes + held_bytes, b""
    for file in sorted(Path(os.__file__).parent.glob("[a-z]*.py")):
        text += file.read_bytes()
        if len(text) > wanted:
            break
    else:
        raise RuntimeError(f"the library of this Python has {len(text):,} bytes of sources; {wanted + 1:,} are needed")
    symbols = torch.frombuffer(bytearray(text[: wanted + 1]), dtype=torch.uint8).long()
    # What is no ASCII is rare here, and all one symbol.
    symbols[symbols >= Language.SYMBOLS] = 0
    windows = [part.view(-1, Language.CONTEXT) for part in (symbols[:-1], symbols[1:])]
    cut = train_bytes // Language.CONTEXT
    words = f"{train_bytes >> 10} KiB of the standard library of Python {platform.python_version()}, "
    words += f"{held_bytes >> 10} KiB held out (SHA-256 {hashlib.sha256(text[: wanted + 1]).hexdigest()[:12]})"
    return Data(windows[0][:cut], windows[1][:cut], windows[0][cut:], windows[1][cut:], words)


def momentum(rate: float) -> Callable[[Iterable[Tensor]], torch.optim.Optimizer]:
    """Gradient descent with momentum 0.9."""
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
    # Adam divides each element by its usual size: noise in those that are small becomes as large as the others. That is known to
    # go badly with error feedback, and is shown.
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


def batches(rows: int, batch: int, steps: int, seed: int) -> Tensor:
    """Which rows each step takes: whole passes in a new order each, without what does not fill a step."""
    generator = torch.Generator().manual_seed(seed)
    whole = rows // batch * batch
    passes = [torch.randperm(rows, generator=generator)[:whole] for _ in range(math.ceil(steps * batch / whole))]
    return torch.cat(passes)[: steps * batch].view(steps, batch)


def loss_of(model: nn.Module, inputs: Tensor, targets: Tensor, reduction: str = "mean") -> tuple[Tensor, Tensor]:
    """Cross entropy, and the scores."""
    scores = model(inputs)
    return functional.cross_entropy(scores.flatten(0, -2), targets.flatten(), reduction=reduction), scores


def train(
    task: Task, setting: Setting, seed: int, steps: int, tick: Callable[[float], None] = lambda loss: None
) -> dict[str, Any]:
    """Trains once on the ranks of the default group; the figures are the same on all of them."""
    rank, world = dist.get_rank(), dist.get_world_size()
    data = task.data()
    torch.manual_seed(seed)
    model = DistributedDataParallel(task.model())
    state = None
    if settings := setting.compression(seed):
        state = compression.State(settings, model)
        model.register_comm_hook(state, compression.ddp_hook)
    optimizer = task.optimizer(model.parameters())
    began, losses = time.perf_counter(), []
    for rows in batches(len(data.targets), task.batch * world, steps, seed):
        own = rows[rank::world]
        loss, _ = loss_of(model, data.inputs[own], data.targets[own])
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        tick(losses[-1])
    seconds = time.perf_counter() - began
    final, _ = evaluate(model.module, data.inputs, data.targets)
    held, accuracy = evaluate(model.module, data.held_inputs, data.held_targets)
    return {
        "setting": setting.name,
        "seed": seed,
        "loss": finite(final),
        "held_out_loss": finite(held),
        "held_out_accuracy": accuracy,
        "fewer_bytes": state.traffic.ratio if state else 1.0,
        "same_weights": same_on_all(model),
        "curve": [finite(value) for value in curve(losses)],
        "seconds": round(seconds, 2),
    }


@torch.no_grad()
def evaluate(model: nn.Module, inputs: Tensor, targets: Tensor) -> tuple[float, float]:
    """Mean loss and share of right answers; each rank takes its part of the rows."""
    rank, world = dist.get_rank(), dist.get_world_size()
    sums = torch.zeros(3, dtype=torch.float64)
    for rows in torch.arange(len(inputs))[rank::world].split(256):
        loss, scores = loss_of(model, inputs[rows], targets[rows], reduction="sum")
        right = (scores.argmax(-1) == targets[rows]).sum()
        sums += torch.tensor([loss.item(), right.item(), targets[rows].numel()], dtype=torch.float64)
    dist.all_reduce(sums)
    return (sums[0] / sums[2]).item(), (sums[1] / sums[2]).item()


def curve(losses: list[float]) -> list[float]:
    """The training loss over all ranks, as means of some steps each."""
    found = torch.tensor(losses, dtype=torch.float64)
    dist.all_reduce(found)
    parts = (found / dist.get_world_size()).tensor_split(min(POINTS, len(losses)))
    return [part.mean().item() for part in parts]


def same_on_all(model: nn.Module) -> bool:
    """Whether all ranks have the same bits."""
    mine = torch.cat([parameter.detach().flatten() for parameter in model.parameters()]).view(torch.int32)
    rows = mine.new_empty(dist.get_world_size() * len(mine))
    dist.all_gather_into_tensor(rows, mine)
    return all(torch.equal(row, mine) for row in rows.split(len(mine)))


def finite(value: float) -> float | None:
    """JSON has no infinity: None for a loss that is none any more."""
    return value if math.isfinite(value) else None


def offered(settings: Sequence[Setting] = SETTINGS) -> tuple[list[Setting], list[str]]:
    """The settings that this build has, and why it lacks the others."""
    known = {row["name"] for row in _native.codecs()}
    found, reasons = [], []
    for setting in settings:
        codec = (setting.codec or "raw").partition(":")[0]
        if codec not in known:
            reasons.append(f"{setting.name}: this build has no codec `{codec}`")
            continue
        try:
            setting.compression(0)
        except ValueError as error:
            reasons.append(f"{setting.name}: refused, {error}")
            continue
        found.append(setting)
    return found, reasons


@dataclass(frozen=True)
class Verdict:
    """How far a setting is from float32 in final loss, over pairs of runs with the same seed."""

    mean: float
    error: float
    # Standard deviation of float32's losses over the seeds.
    spread: float

    @property
    def allowed(self) -> float:
        """The most that the mean may differ."""
        return max(2 * self.error, self.spread / 4)

    @property
    def holds(self) -> bool:
        """Whether there is parity; never for a loss that was lost."""
        return abs(self.mean) <= self.allowed


def verdict(losses: Sequence[float], exact: Sequence[float]) -> Verdict:
    """Of losses of two settings with the same seeds, of which there are at least two."""
    differences = [loss - other for loss, other in zip(losses, exact, strict=True)]
    if not all(map(math.isfinite, differences)):
        return Verdict(math.nan, math.nan, math.nan)
    error = statistics.stdev(differences) / math.sqrt(len(differences))
    return Verdict(statistics.fmean(differences), error, statistics.stdev(exact))


class Found:
    """The runs of one model, by setting."""

    def __init__(self, record: dict[str, Any]) -> None:
        self.runs: dict[str, list[dict[str, Any]]] = {}
        for run in record["runs"]:
            self.runs.setdefault(run["setting"], []).append(run)

    def values(self, setting: str, key: str) -> list[float]:
        """A figure for each seed; not a number where the run was lost."""
        return [math.nan if run[key] is None else run[key] for run in self.runs[setting]]

    def mean(self, setting: str, key: str = "loss") -> float:
        """Over the seeds."""
        return statistics.fmean(self.values(setting, key))

    def verdict(self, setting: str) -> Verdict:
        """Beside float32."""
        return verdict(self.values(setting, "loss"), self.values(EXACT, "loss"))

    def complaints(self, title: str, judges: bool) -> list[str]:
        """What must hold and does not: that ranks agree, and parity where it is judged."""
        found = [
            f"{title}: {setting.name} is {number(one.mean)} from float32, more than {number(one.allowed)}"
            for setting in SETTINGS
            if judges and setting.judged and setting.name in self.runs and not (one := self.verdict(setting.name)).holds
        ]
        differing = [name for name, runs in self.runs.items() if not all(run["same_weights"] for run in runs)]
        return found + [f"{title}: ranks ended with different weights with {name}" for name in differing]


def number(value: float) -> str:
    """Three digits."""
    return plain(value) if math.isfinite(value) else "lost"


def tables(results: dict[str, Any]) -> list[str]:
    """The results as Markdown: a table for each model, and the claims on digits."""
    lines = [JUDGED.replace("\n", " "), ""]
    for task in TASKS:
        if record := results["models"].get(task.name):
            lines += [
                f"**{task.title}**: {task.text}; {record['data']}.",
                "",
                *model_table(Found(record), task.judged).lines(),
                "",
            ]
            lines += [measured(task, record), ""]
    if "digits" in results["models"]:
        lines += ["What tells working error feedback from none, on the digits:", ""]
        lines += [*claims(Found(results["models"]["digits"])).lines(), ""]
    return lines[:-1]


def model_table(found: Found, judges: bool) -> Table:
    """A row for each setting."""
    head = ("", "times fewer bytes", "final loss", "held out: loss", "accuracy", "loss less that of float32", "parity")
    table = Table(head)
    for setting in SETTINGS:
        if setting.name not in found.runs:
            continue
        row: list[Bar | str] = [plain(found.mean(setting.name, "fewer_bytes"))]
        row += [number(found.mean(setting.name, key)) for key in ("loss", "held_out_loss", "held_out_accuracy")]
        if setting.name != EXACT:
            one = found.verdict(setting.name)
            is_lost = math.isnan(one.mean)
            row.append("lost" if is_lost else f"{number(one.mean)} ± {number(2 * one.error)}")
            is_judged = judges and setting.judged and not is_lost
            words = "within" if one.holds else "outside"
            row.append(Bar(abs(one.mean), at_most=one.allowed) if is_judged else f"{words} {number(one.allowed)}")
        table.row(setting.name, row)
    table.rows[0] = (EXACT, [*table.rows[0][1], f"spread {number(statistics.stdev(found.values(EXACT, 'loss')))}", ""])
    return table


def claims(found: Found) -> Table:
    """What other implementations showed on the same network, with their limits."""
    table = Table(("", "mean over seeds"))
    exact = found.mean(EXACT)

    def distance(label: str, setting: str, **limit: float) -> None:
        if setting in found.runs:
            table.row(label, [Bar(abs(found.mean(setting) - exact), **limit)])

    def times(label: str, setting: str, **limit: float) -> None:
        if setting in found.runs:
            table.row(label, [Bar(found.mean(setting) / exact, **limit)])

    distance("2 bits with error feedback, distance from float32", "2 bits, error feedback", at_most=1e-4)
    distance("2 bits without, distance from float32", "2 bits", at_least=3e-4)
    distance("4 bits, distance from float32", "4 bits", at_most=2e-4)
    distance("8 bits, distance from float32", "8 bits", at_most=2e-4)
    times("sign without error feedback, times the loss of float32", "sign", at_least=5)
    times("sign with error feedback, times the loss of float32", "sign, error feedback", at_most=1.2)
    return table


def measured(task: Task, record: dict[str, Any]) -> str:
    """When and with what."""
    words = f"{record['steps']} steps of {RANKS} x {task.batch} rows, {record['seeds']} seeds; "
    words += f"{record['date']}, commit {record['commit']}, torch {record['torch']}, {record['processor']}."
    return " ".join([words, *(f"Left out: {reason}." for reason in record["missing"])])


def draw(results: dict[str, Any], target: Path) -> None:
    """Above the losses on the way, below each seed's difference from float32 at the end; a column for each model."""
    import matplotlib

    matplotlib.use("Agg")
    # Text stays text and names do not change from run to run.
    matplotlib.rcParams.update({"svg.fonttype": "none", "svg.hashsalt": "accl", "font.size": 9})
    from matplotlib import pyplot

    tasks = [task for task in TASKS if task.name in results["models"]]
    figure, grid = pyplot.subplots(2, len(tasks), figsize=(5 * len(tasks), 7.5), layout="constrained", squeeze=False)
    colours = {setting.name: f"C{index}" for index, setting in enumerate(SETTINGS)}
    for task, above, below in zip(tasks, *grid):
        record = results["models"][task.name]
        found = Found(record)
        for name, runs in found.runs.items():
            curves = [[math.nan if value is None else value for value in run["curve"]] for run in runs]
            means = [statistics.fmean(values) for values in zip(*curves)]
            steps = [record["steps"] * (index + 0.5) / len(means) for index in range(len(means))]
            above.plot(steps, means, label=name, color=colours[name], linewidth=2.6 if name == EXACT else 1.1)
        above.set(xlabel="step", ylabel="training loss", yscale="log", title=task.title)
        others = [name for name in found.runs if name != EXACT]
        for place, name in enumerate(others):
            one = found.verdict(name)
            pairs = zip(found.values(name, "loss"), found.values(EXACT, "loss"))
            differences = [loss - exact for loss, exact in pairs]
            below.plot([place] * len(differences), differences, "o", markersize=3, color=colours[name], alpha=0.6)
            below.errorbar(place, one.mean, 2 * one.error, fmt="_", markersize=14, color=colours[name], capsize=5)
        quarter = statistics.stdev(found.values(EXACT, "loss")) / 4
        below.axhspan(-quarter, quarter, color="0.85", zorder=0)
        below.set_xticks(range(len(others)), [name.replace(", ", ",\n") for name in others], rotation=30)
        # A setting that is far off must not hide the others.
        below.set_yscale("symlog", linthresh=max(4 * quarter, 1e-9))
        below.set(ylabel="final loss beside float32, same seed")
    grid[0][0].legend(frameon=False)
    grid[1][0].set_title("grey: a quarter of float32's spread; bars: 2 standard errors", fontsize=8)
    target.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(target, metadata={"Date": None})
    pyplot.close(figure)


class Watch:
    """The progress, on standard error: a bar on a terminal, else a line for each run. Silent but on rank 0."""

    def __init__(self, rank: int, steps: int) -> None:
        console = Console(stderr=True)
        self.is_on, self.is_bar = rank == 0, rank == 0 and console.is_terminal
        columns = (BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("{task.description}"))
        self.bar = Progress(*columns, console=console, disable=not self.is_bar)
        self.task = self.bar.add_task("", total=steps)
        self.words = ""

    def begin(self, words: str) -> None:
        """A run begins."""
        self.words = words

    def tick(self, loss: float) -> None:
        """A step is done."""
        if self.is_bar:
            self.bar.update(self.task, advance=1, description=f"{self.words}, loss {loss:.4f}")

    def end(self, run: dict[str, Any]) -> None:
        """A run is done."""
        if self.is_on and not self.is_bar:
            loss = "lost" if run["loss"] is None else f"{run['loss']:.6f}"
            print(f"{self.words}: loss {loss}, {run['seconds']:.1f} s", file=sys.stderr, flush=True)


def study(
    rank: int, tasks: Sequence[Task], settings: Sequence[Setting], seeds: int, share: float
) -> Iterator[tuple[Task, list[dict[str, Any]]]]:
    """Trains everything that is wanted on the ranks of the default group; each model with its runs."""
    steps = {task.name: steps_of(task, share) for task in tasks}
    watch = Watch(rank, sum(steps.values()) * len(settings) * seeds)
    with watch.bar:
        for task in tasks:
            runs = []
            for seed in range(seeds):
                for setting in settings:
                    watch.begin(f"{task.name}, {setting.name}, seed {seed}")
                    runs.append(train(task, setting, seed, steps[task.name], watch.tick))
                    watch.end(runs[-1])
            yield task, runs


def steps_of(task: Task, share: float) -> int:
    """Steps of a run that is cut to a share of them."""
    return max(2, round(task.steps * share))


def run(place: Any, store: Any, asked: argparse.Namespace, settings: Sequence[Setting], facts: dict[str, Any]) -> int:
    """What a rank does; the exit status, and on rank 0 all that is written."""
    torch.set_num_threads(1)
    # The same program in every run: differences in the weights are then the setting's.
    torch.use_deterministic_algorithms(True)
    dist.init_process_group(
        "accl",
        store=dist.PrefixStore("study", store),
        rank=place.rank,
        world_size=place.world,
        timeout=timedelta(seconds=TIMEOUT_S),
        pg_options=Options(algorithm=ALGORITHM),
    )
    seeds, share = (2, 0.05) if asked.quick else (SEEDS, 1.0)
    results = kept(asked.out)
    for task, runs in study(place.rank, asked.models, settings, seeds, share):
        own = {"seeds": seeds, "steps": steps_of(task, share), "data": task.data().description, "runs": runs}
        results["models"][task.name] = facts | own
        if place.rank == 0:
            # After each model, so that a run that is ended has not been in vain.
            save(results, asked.out)
    dist.destroy_process_group()
    return finish(results, asked) if place.rank == 0 else 0


def facts(missing: list[str]) -> dict[str, Any]:
    """What figures depend on."""
    return {
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
        "commit": machine.commit(),
        "torch": torch.__version__,
        "processor": machine.facts()["processor"],
        "missing": missing,
    }


def kept(folder: Path) -> dict[str, Any]:
    """The results of an earlier run; models that are not trained this time stay as they are."""
    file = folder / f"{NAME}.json"
    return json.loads(file.read_text()) if file.exists() else {"format": 1, "models": {}}


def save(results: dict[str, Any], folder: Path) -> None:
    """Writes the figures; a run is a line."""
    folder.mkdir(parents=True, exist_ok=True)
    text = json.dumps(results, indent=1, allow_nan=False)
    text = re.sub(r"\{[^{}]*\}", lambda inner: re.sub(r"\n\s*", " ", inner[0]), text)
    (folder / f"{NAME}.json").write_text(text + "\n")


def finish(results: dict[str, Any], asked: argparse.Namespace) -> int:
    """Writes the picture and perhaps the page, prints the tables; the exit status."""
    picture = asked.out / f"{NAME}.svg"
    draw(results, picture)
    lines = tables(results)
    print("\n".join(lines))
    if asked.write_docs:
        blocks.write(DOCS.with_suffix(".md"), NAME, COMMAND, [*lines, "", f"![{ALT}]({DOCS.name}/{NAME}.svg)"])
    print(f"picture: {picture}")
    if asked.quick:
        # So few steps and seeds say nothing about a loss; that ranks agree must hold.
        print("nothing is judged after so few steps")
    complaints = [
        complaint
        for task in asked.models
        for complaint in Found(results["models"][task.name]).complaints(
            task.title, judges=task.judged and not asked.quick
        )
    ]
    for complaint in complaints:
        print(complaint, file=sys.stderr)
    return 1 if complaints else 0


def arguments(given: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    words, _, description = (__doc__ or "").partition("\n")
    parser = argparse.ArgumentParser(
        description=words + description, epilog=JUDGED, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--models", type=chosen, default=list(TASKS), metavar="A,B", help="only these: " + ", ".join(BY_NAME)
    )
    parser.add_argument("--quick", action="store_true", help="two seeds and a twentieth of the steps; judges nothing")
    parser.add_argument("--out", type=Path, help="folder of the picture and the figures as JSON (default: demo-output)")
    parser.add_argument(
        "--write-docs", action="store_true", help="write both to docs/compression, and the page's tables"
    )
    parser.add_argument("--page-only", action="store_true", help="train nothing, write from the figures that are there")
    asked = parser.parse_args(given)
    if asked.write_docs and (asked.quick or asked.out):
        parser.error("--write-docs goes with neither --quick nor --out")
    asked.out = DOCS if asked.write_docs else asked.out or Path("demo-output")
    if asked.page_only:
        asked.models = [task for task in asked.models if task.name in kept(asked.out)["models"]]
        if not asked.models:
            parser.error(f"{asked.out / NAME}.json has no such figures yet")
    return asked


def chosen(text: str) -> list[Task]:
    """Models by name."""
    for name in text.split(","):
        if name not in BY_NAME:
            raise argparse.ArgumentTypeError(f"unknown model `{name}`; expected some of {', '.join(BY_NAME)}")
    return [BY_NAME[name] for name in text.split(",")]


def main() -> int:
    """Trains, or writes again what there is; 1 when something that must hold does not."""
    asked = arguments()
    if asked.page_only:
        return finish(kept(asked.out), asked)
    settings, missing = offered()
    for reason in missing:
        print(f"left out: {reason}", file=sys.stderr)
    # Loaded here, once: ranks are forked from this process.
    for task in asked.models:
        task.data()
    known = facts(missing)
    try:
        return run_ranks(RANKS, TIMEOUT_S, lambda place, store: run(place, store, asked, settings, known))
    except Failed as error:
        print(f"compression_study: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main())
