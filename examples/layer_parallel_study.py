#!/usr/bin/env python3
"""Effects of inexact layer-parallel training on what a net learns.

Compares runs from the same weights, on the same batches, exactly and by multigrid.

    python examples/layer_parallel_study.py
    torchrun --nproc-per-node=2 examples/layer_parallel_study.py

A net of convolutions learns the handwritten digits of scikit-learn. A transformer with many blocks, and a GRU on long
windows, learn the text of Python's own help. During training each run is evaluated: its losses, computed exactly and by
the iterations of its training; the error of its gradients relative to exact ones; and its convergence factor. That
factor is the ratio of the last two residual norms of a batch with twice the iterations. Above 1, more iterations do not
help. Two runs continue exactly once the factor, or the error of the gradients, is too large.

Results have the same bits on any number of ranks, except that the GRU's differ by rounding, because ranks add its
gradients. So processes share the runs here, each with all layers of its nets, which is faster than one run on all of
them. Under torchrun and other launchers each net lies on all ranks. `layer_parallel_plan.py` has nets and settings,
`layer_parallel_report.py` tables and pictures.
"""

from __future__ import annotations

import os

# Set before numpy and torch are loaded: processes share the machine, and are forked from this one.
os.environ.update(OMP_NUM_THREADS="1", OPENBLAS_NUM_THREADS="1", MKL_NUM_THREADS="1")

import argparse
import json
import math
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch_accl  # noqa: F401  registers the backend
from torch import Tensor
from torch.nn import functional
from torch_accl_cli.bench.processes import Failed, run_ranks

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "examples")]

from layer_parallel_plan import BY_NAME, TASKS, Net, Setting, Task
from layer_parallel_report import draw, tables
from study_common import Watch, batches, facts, finite, kept, save

from benches import blocks

TIMEOUT_S = 600
# Seconds between two updates of the bar by its process, while it waits for the others.
GLANCE_S = 0.5
DOCS = ROOT / "docs" / "layer-parallel"
NAME = "study"
COMMAND = "make study-layers ARGS=--write-docs"

Job = tuple[Task, Setting, int]


def loss_of(scores: Tensor, targets: Tensor) -> Tensor:
    """Returns the cross entropy."""
    return functional.cross_entropy(scores.flatten(0, -2), targets.flatten())


def train(task: Task, setting: Setting, seed: int, tick: Callable[[float], None] = lambda loss: None) -> dict[str, Any]:
    """Trains once, on the ranks of the default group or in this process alone; the figures are the same on all
    ranks."""
    data = task.data()
    net = task.net(task.depth, setting, seed)
    optimizer = task.optimizer(net.parameters())
    order = batches(len(data.targets), task.batch, task.steps, seed)
    began, losses, marks, switched = time.perf_counter(), [], [], None
    for step in range(task.steps + 1):
        # Evaluates before the first step and after the last one as well.
        if step % task.every == 0 or step == task.steps:
            rows = order[min(step, task.steps - 1)]
            mark = look(net, data.inputs[rows], data.targets[rows])
            marks.append({"step": step, "loss": mean(losses), **mark, **learnt(net, task)})
            losses = []
            if switched is None and setting.is_over(mark):
                net.mode, switched = "exact-wave", step
        if step == task.steps:
            break
        rows = order[step]
        optimizer.zero_grad()
        loss = net.step(data.inputs[rows], data.targets[rows], loss_of)
        optimizer.step()
        losses.append(float(loss))
        tick(losses[-1])
    return {
        "setting": setting.name,
        "seed": seed,
        "loss": marks[-1]["loss"],
        "switched": switched,
        "seconds": round(time.perf_counter() - began, 2),
        "marks": marks,
    }


def mean(losses: Sequence[float]) -> float | None:
    """Returns the mean; None without losses."""
    return finite(sum(losses) / len(losses)) if losses else None


# ---- evaluation of a net


@contextmanager
def solved(net: Net, mode: str, times: int = 1) -> Iterator[None]:
    """Changes the mode of a net inside the block, and multiplies its iterations by `times`."""
    before = net.mode, net.fwd, net.bwd
    net.mode = mode  # type: ignore[assignment]
    if times > 1:
        # At least three iterations, because the first has no norm and a ratio needs two norms.
        net.fwd, net.bwd = (replace(cycle, iterations=max(times * cycle.iterations, 3)) for cycle in before[1:])
    try:
        yield
    finally:
        net.mode, net.fwd, net.bwd = before


def look(net: Net, inputs: Tensor, targets: Tensor) -> dict[str, float | None]:
    """Returns convergence factors of both passes, and the error of a batch's gradients. Keeps no gradients.

    In normal training, a net's `Audits` measure the same; here exact runs are measured as well.
    """
    usual = "exact-forward" if net.mode == "exact-forward" else "inexact"
    with solved(net, "inexact", times=2):
        gradients(net, inputs, targets)
    factors = [factor(norms) for norms in (net.norms.forward, net.norms.backward)]
    with solved(net, usual):
        found = gradients(net, inputs, targets)
    with solved(net, "exact-wave"):
        exact = gradients(net, inputs, targets)
    return {"forward_factor": factors[0], "backward_factor": factors[1], **error(net, found, exact)}


def gradients(net: Net, inputs: Tensor, targets: Tensor) -> list[Tensor]:
    """Returns the gradients of this rank's layers, one row for each."""
    net.zero_grad()
    net.step(inputs, targets, loss_of)
    found = [
        torch.cat([parameter.grad.flatten().double() for parameter in layer.parameters() if parameter.grad is not None])
        for layer in net.layers.values()
    ]
    net.zero_grad()
    return found


def factor(norms: dict[int, float]) -> float | None:
    """Returns the ratio of the last two residual norms."""
    before, last = list(norms.values())[-2:]
    return finite(last / before) if before else 0.0


def error(net: Net, found: Sequence[Tensor], exact: Sequence[Tensor]) -> dict[str, float | None]:
    """Returns the relative error of the gradients in the 2-norm, and the cosine of the angle to the exact gradients."""
    layers = torch.tensor(max(net.owned, default=-1) + 1)
    if dist.is_initialized():
        dist.all_reduce(layers, op=dist.ReduceOp.MAX)
    sums = torch.zeros(int(layers), 4, dtype=torch.float64)
    for layer, a, b in zip(net.owned, found, exact):
        sums[layer] = torch.stack([(a - b).square().sum(), b.square().sum(), a.square().sum(), torch.dot(a, b)])
    if dist.is_initialized():
        # Each row is zero on all ranks but one, so sums have the same bits on any number of ranks.
        dist.all_reduce(sums)
    difference, right, own, product = sums.sum(0).tolist()
    length = math.sqrt(right * own)
    return {
        "gradient_error": finite(math.sqrt(difference / right)) if right > 0 else None,
        "cosine": finite(product / length) if length > 0 else None,
    }


def learnt(net: Net, task: Task) -> dict[str, float | None]:
    """Returns loss and accuracy on held-out data, evaluated exactly and by the iterations of inexact training."""
    found: dict[str, float | None] = {}
    net.eval()
    found["held_loss"], found["held_accuracy"] = evaluate(net, task)
    net.evaluation = "inexact"
    found["inexact_held_loss"], found["inexact_held_accuracy"] = evaluate(net, task)
    net.evaluation = "exact-wave"
    net.train()
    return found


@torch.no_grad()
def evaluate(net: Net, task: Task) -> tuple[float | None, float | None]:
    """Returns the mean loss and the share of correct answers."""
    data = task.data()
    # `task.held` rows, spread evenly over the held-out data.
    rows = torch.linspace(0, len(data.held_targets) - 1, min(task.held, len(data.held_targets))).long()
    sums = torch.zeros(3, dtype=torch.float64)
    for inputs, targets in zip(data.held_inputs[rows].split(64), data.held_targets[rows].split(64)):
        scores = net(inputs)
        if net.is_last:
            right = (scores.argmax(-1) == targets).sum()
            loss = loss_of(scores, targets) * targets.numel()
            sums += torch.tensor([loss.item(), right.item(), targets.numel()], dtype=torch.float64)
    if dist.is_initialized():
        dist.broadcast(sums, src=dist.get_world_size() - 1)
    loss, right, count = sums.tolist()
    return finite(loss / count), finite(right / count)


# ---- all runs


def jobs_of(tasks: Sequence[Task], seeds: int | None) -> list[Job]:
    """Returns all runs to train."""
    return [(task, setting, seed) for task in tasks for seed in range(seeds or task.seeds) for setting in task.settings]


class Records:
    """The file of figures. A study is saved once all of its runs are complete, so that an aborted program keeps
    complete studies."""

    def __init__(self, jobs: Sequence[Job], folder: Path, known: dict[str, Any]) -> None:
        self.jobs, self.folder, self.known = jobs, folder, known
        self.results = kept(folder, NAME, "studies")
        self.runs: dict[int, dict[str, Any]] = {}

    def add(self, number: int, run: dict[str, Any]) -> None:
        """Adds a run."""
        self.runs[number] = run
        task = self.jobs[number][0]
        numbers = [other for other, job in enumerate(self.jobs) if job[0] is task]
        if all(other in self.runs for other in numbers):
            own = {
                "seeds": len({self.jobs[other][2] for other in numbers}),
                "steps": task.steps,
                "every": task.every,
                "depth": task.depth,
                "data": task.data().description,
                "runs": [self.runs[other] for other in numbers],
            }
            self.results["studies"][task.name] = self.known | own
            save(self.results, self.folder, NAME)


def together(jobs: Sequence[Job], records: Records) -> None:
    """Does all runs, each on all ranks of the default group."""
    is_first = dist.get_rank() == 0
    watch = Watch(sum(task.steps for task, _, _ in jobs), has_bar=is_first, has_lines=is_first)
    with watch.bar:
        for number, job in enumerate(jobs):
            run = watched(job, watch, watch.tick)
            if is_first:
                records.add(number, run)


def run_shared(place: Any, store: Any, jobs: Sequence[Job], records: Records) -> None:
    """Does runs that no other process has started; the first process collects all results."""
    watch = Watch(sum(task.steps for task, _, _ in jobs), has_bar=place.rank == 0, has_lines=True)

    def tick(loss: float) -> None:
        watch.tick(loss)
        watch.reach(store.add("steps", 1))

    def take_over() -> None:
        if place.rank == 0:
            for number in range(len(jobs)):
                if number not in records.runs and store.check([f"run {number}"]):
                    records.add(number, json.loads(store.get(f"run {number}")))

    with watch.bar:
        while (number := store.add("begun", 1) - 1) < len(jobs):
            store.set(f"run {number}", json.dumps(watched(jobs[number], watch, tick)))
            take_over()
        while place.rank == 0 and len(records.runs) < len(jobs):
            time.sleep(GLANCE_S)
            watch.reach(store.add("steps", 0))
            take_over()


def watched(job: Job, watch: Watch, tick: Callable[[float], None]) -> dict[str, Any]:
    """Does a run, and shows its progress."""
    task, setting, seed = job
    watch.begin(f"{task.name}, {setting.name}, seed {seed}")
    run = train(task, setting, seed, tick)
    watch.end(run)
    return run


def prepare() -> None:
    """Makes every run deterministic, so that differences in the weights come from the setting."""
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)


# ---- the command


def block(results: dict[str, Any]) -> list[str]:
    """Returns the page's block for the figures."""
    return tables(results, lambda task: f"{NAME}-{task.name}.svg")


def finish(results: dict[str, Any], asked: argparse.Namespace) -> int:
    """Draws, writes and prints the results."""
    for task in asked.tasks:
        picture = asked.plot / f"{NAME}-{task.name}.svg"
        draw(results["studies"][task.name], task, picture)
        print(f"picture: {picture}", file=sys.stderr)
    if asked.json:
        print(json.dumps(results, allow_nan=False))
    else:
        print("\n".join(tables(results)))
    if asked.write_docs:
        blocks.write(DOCS / f"{NAME}.md", NAME, COMMAND, block(results))
    return 0


def arguments(given: Sequence[str] | None = None) -> argparse.Namespace:
    """Parses the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = [*(task.name for task in TASKS), "all"]
    parser.add_argument("--study", choices=names, default="all", help="study to run (default: %(default)s)")
    parser.add_argument(
        "--seeds",
        type=int,
        metavar="N",
        help=f"runs of each setting (default: {', '.join(f'{task.name} {task.seeds}' for task in TASKS)})",
    )
    parser.add_argument("--quick", action="store_true", help="a few steps of shallow nets; their losses mean nothing")
    parser.add_argument("--json", action="store_true", help="print the figures as JSON, instead of tables")
    parser.add_argument(
        "--plot", type=Path, metavar="DIR", help="folder for the pictures and the figures (default: demo-output)"
    )
    parser.add_argument(
        "--processes", type=int, metavar="N", help="processes that share the runs (default: one for each usable core)"
    )
    parser.add_argument("--write-docs", action="store_true", help="write to docs/layer-parallel, and update the page")
    parser.add_argument("--page-only", action="store_true", help="train nothing; write from existing figures")
    asked = parser.parse_args(given)
    if asked.write_docs and (asked.quick or asked.plot):
        parser.error("--write-docs cannot be combined with --quick or --plot")
    for name in ("seeds", "processes"):
        if getattr(asked, name) is not None and getattr(asked, name) < 1:
            parser.error(f"--{name}: expected 1 or more")
    asked.tasks = list(TASKS) if asked.study == "all" else [BY_NAME[asked.study]]
    if asked.quick:
        asked.tasks = [task.quick() for task in asked.tasks]
    asked.plot = DOCS if asked.write_docs else asked.plot or Path("demo-output")
    if asked.page_only:
        asked.tasks = [task for task in asked.tasks if task.name in kept(asked.plot, NAME, "studies")["studies"]]
        if not asked.tasks:
            parser.error(f"{asked.plot / NAME}.json has no figures of these studies; run without --page-only first")
    return asked


def main() -> int:
    """Trains and shows the results, or shows existing results again."""
    asked = arguments()
    if asked.page_only:
        return finish(kept(asked.plot, NAME, "studies"), asked)
    jobs = jobs_of(asked.tasks, asked.seeds)
    # Loaded here once, because processes are forked from this one.
    for task in asked.tasks:
        task.data()
    records = Records(jobs, asked.plot, facts())
    prepare()
    if "RANK" in os.environ and "WORLD_SIZE" in os.environ:
        dist.init_process_group("accl", timeout=timedelta(seconds=TIMEOUT_S))
        is_first = dist.get_rank() == 0
        together(jobs, records)
        dist.destroy_process_group()
        return finish(records.results, asked) if is_first else 0

    def body(place: Any, store: Any) -> int:
        run_shared(place, store, jobs, records)
        return finish(records.results, asked) if place.rank == 0 else 0

    processes = asked.processes or len(os.sched_getaffinity(0))
    try:
        return run_ranks(min(processes, len(jobs)), TIMEOUT_S, body)
    except Failed as error_:
        print(f"layer_parallel_study: {error_}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main())
