#!/usr/bin/env python3
"""Effects of compressed gradients on training: small models, several settings, the same seeds for all settings.

    python examples/compression_study.py

Trains each model in four processes with DistributedDataParallel over accl, once for each setting and seed. With one
seed all settings have the same initial weights and batches, so final losses are compared pair by pair. The data are on
the machine: handwritten digits from scikit-learn, and the sources of Python's own library. The exit status is 1 if a
setting that must not change the loss does change it; `--help` describes the criterion. `study_plan.py` has the models
and settings, `study_report.py` the verdicts.
"""

from __future__ import annotations

import os

# Set before numpy and torch are loaded: four ranks share the machine, and processes are forked from this one.
os.environ.update(OMP_NUM_THREADS="1", OPENBLAS_NUM_THREADS="1", MKL_NUM_THREADS="1")

import argparse
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel
from torch_accl import Options, _native, compression
from torch_accl_cli.bench.processes import Failed, run_ranks

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "examples")]

from study_common import Watch, batches, facts, finite, kept, save
from study_plan import BY_NAME, RANKS, SETTINGS, TASKS, Setting, Task
from study_report import JUDGED, Found, draw, tables

from benches import blocks

SEEDS, QUICK_SEEDS = 5, 2
QUICK_SHARE = 0.05
# A fixed algorithm sends the same messages on every machine; a cost model would choose one by this machine's speed.
ALGORITHM = "all_reduce=direct_two_phase"
POINTS = 40
TIMEOUT_S = 120
DOCS = ROOT / "docs" / "compression"
PAGE = ROOT / "docs" / "compression-accuracy.md"
NAME = "study"
COMMAND = "make study ARGS=--write-docs"
ALT = "Losses during training, and differences from float32 at the end"


def loss_of(model: nn.Module, inputs: Tensor, targets: Tensor, reduction: str = "mean") -> tuple[Tensor, Tensor]:
    """Returns the cross entropy, and the scores."""
    scores = model(inputs)
    return functional.cross_entropy(scores.flatten(0, -2), targets.flatten(), reduction=reduction), scores


def train(
    task: Task, setting: Setting, seed: int, steps: int, tick: Callable[[float], None] = lambda loss: None
) -> dict[str, Any]:
    """Trains once on the ranks of the default group; the figures are the same on all ranks."""
    rank, world = dist.get_rank(), dist.get_world_size()
    data = task.data()
    torch.manual_seed(seed)
    model = DistributedDataParallel(task.model())
    state = None
    if settings := setting.compression(seed):
        state = compression.CompressionState(settings, model)
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
    """Returns the mean loss and the share of correct answers; each rank evaluates its part of the rows."""
    rank, world = dist.get_rank(), dist.get_world_size()
    sums = torch.zeros(3, dtype=torch.float64)
    for rows in torch.arange(len(inputs))[rank::world].split(256):
        loss, scores = loss_of(model, inputs[rows], targets[rows], reduction="sum")
        right = (scores.argmax(-1) == targets[rows]).sum()
        sums += torch.tensor([loss.item(), right.item(), targets[rows].numel()], dtype=torch.float64)
    dist.all_reduce(sums)
    return (sums[0] / sums[2]).item(), (sums[1] / sums[2]).item()


def curve(losses: list[float]) -> list[float]:
    """Returns the training loss over all ranks, as means over groups of steps."""
    found = torch.tensor(losses, dtype=torch.float64)
    dist.all_reduce(found)
    parts = (found / dist.get_world_size()).tensor_split(min(POINTS, len(losses)))
    return [part.mean().item() for part in parts]


def same_on_all(model: nn.Module) -> bool:
    """Returns whether the weights of all ranks have the same bits."""
    mine = torch.cat([parameter.detach().flatten() for parameter in model.parameters()]).view(torch.int32)
    rows = mine.new_empty(dist.get_world_size() * len(mine))
    dist.all_gather_into_tensor(rows, mine)
    return all(torch.equal(row, mine) for row in rows.split(len(mine)))


def offered(settings: Sequence[Setting] = SETTINGS) -> tuple[list[Setting], list[str]]:
    """Returns the settings that this build offers, and the reasons why others are missing."""
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


def study(
    rank: int, tasks: Sequence[Task], settings: Sequence[Setting], seeds: int, share: float
) -> Iterator[tuple[Task, list[dict[str, Any]]]]:
    """Trains all models on the ranks of the default group; yields each model with its runs."""
    steps = {task.name: steps_of(task, share) for task in tasks}
    watch = Watch(sum(steps.values()) * len(settings) * seeds, has_bar=rank == 0, has_lines=rank == 0)
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
    """Returns the steps of a run that is shortened to a share of them."""
    return max(2, round(task.steps * share))


def run(place: Any, store: Any, asked: argparse.Namespace, settings: Sequence[Setting], facts: dict[str, Any]) -> int:
    """Runs a rank. Returns the exit status; rank 0 also writes all results."""
    torch.set_num_threads(1)
    # Every run is deterministic, so differences in the weights come from the setting.
    torch.use_deterministic_algorithms(True)
    dist.init_process_group(
        "accl",
        store=dist.PrefixStore("study", store),
        rank=place.rank,
        world_size=place.world,
        timeout=timedelta(seconds=TIMEOUT_S),
        pg_options=Options(algorithm=ALGORITHM),
    )
    share = QUICK_SHARE if asked.quick else 1.0
    results = kept(asked.out, NAME, "models")
    for task, runs in study(place.rank, asked.models, settings, asked.seeds, share):
        own = {"seeds": asked.seeds, "steps": steps_of(task, share), "data": task.data().description, "runs": runs}
        results["models"][task.name] = facts | own
        if place.rank == 0:
            # Saved after each model, so that an aborted run keeps its results.
            save(results, asked.out, NAME)
    dist.destroy_process_group()
    return finish(results, asked) if place.rank == 0 else 0


def block(results: dict[str, Any]) -> list[str]:
    """Returns the page's block for the results."""
    return [*tables(results), "", f"![{ALT}]({DOCS.name}/{NAME}.svg)"]


def finish(results: dict[str, Any], asked: argparse.Namespace) -> int:
    """Writes the picture and, if asked, the page, and prints the tables. Returns the exit status."""
    picture = asked.out / f"{NAME}.svg"
    draw(results, picture)
    print("\n".join(tables(results)))
    if asked.write_docs:
        blocks.write(PAGE, NAME, COMMAND, block(results))
    print(f"picture: {picture}")
    if asked.quick:
        # After so few steps and seeds, losses mean nothing, but ranks must still agree.
        print("nothing is judged, because there are too few steps")
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
    """Parses the command line."""
    words, _, description = (__doc__ or "").partition("\n")
    parser = argparse.ArgumentParser(
        description=words + description, epilog=JUDGED, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--models", type=chosen, default=list(TASKS), metavar="A,B", help="models to train: " + ", ".join(BY_NAME)
    )
    parser.add_argument("--seeds", type=int, metavar="N", help=f"runs of each setting, at least 2 (default: {SEEDS})")
    parser.add_argument("--quick", action="store_true", help="two seeds and a twentieth of the steps; judges nothing")
    parser.add_argument("--out", type=Path, help="folder for picture and figures as JSON (default: demo-output)")
    parser.add_argument("--write-docs", action="store_true", help="write both to docs/compression, and update the page")
    parser.add_argument("--page-only", action="store_true", help="train nothing; write from existing figures")
    asked = parser.parse_args(given)
    if asked.write_docs and (asked.quick or asked.out):
        parser.error("--write-docs cannot be combined with --quick or --out")
    asked.seeds = (QUICK_SEEDS if asked.quick else SEEDS) if asked.seeds is None else asked.seeds
    if asked.seeds < 2:
        parser.error("--seeds: expected at least 2, because one difference has no spread")
    asked.out = DOCS if asked.write_docs else asked.out or Path("demo-output")
    if asked.page_only:
        asked.models = [task for task in asked.models if task.name in kept(asked.out, NAME, "models")["models"]]
        if not asked.models:
            parser.error(f"{asked.out / NAME}.json has no figures of these models; run without --page-only first")
    return asked


def chosen(text: str) -> list[Task]:
    """Parses a list of models by name."""
    for name in text.split(","):
        if name not in BY_NAME:
            raise argparse.ArgumentTypeError(f"unknown model `{name}`; expected one or more of {', '.join(BY_NAME)}")
    return [BY_NAME[name] for name in text.split(",")]


def main() -> int:
    """Trains, or writes existing results again. Returns 1 if a requirement is not met."""
    asked = arguments()
    if asked.page_only:
        return finish(kept(asked.out, NAME, "models"), asked)
    settings, missing = offered()
    for reason in missing:
        print(f"left out: {reason}", file=sys.stderr)
    # Loaded here once, because ranks are forked from this process.
    for task in asked.models:
        task.data()
    known = facts() | {"missing": missing}
    try:
        return run_ranks(RANKS, TIMEOUT_S, lambda place, store: run(place, store, asked, settings, known))
    except Failed as error:
        print(f"compression_study: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main())
