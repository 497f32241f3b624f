"""Shared code of the device examples: ranks, the group of each run, the device's calls, the table and the verdict.

An example runs its body in the same processes, from the same seed, once on the host path and once with the device. It
compares the two runs. Start with `main_of`. The body gets a `Job`, fills its `Run`, and does not depend on the path.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from torch import Tensor, nn
from torch.distributed.rendezvous import rendezvous
from torch_accl import Backend, Options
from torch_accl_cli.bench.processes import Failed, run_ranks

TIMEOUT_S = 120
HOST = "none"
# With more than two ranks a device may add in another order. That changes the last bits of sums, and training amplifies
# the difference: weights may differ by SPREAD_OF_ORDER of the largest. With float16 on the wire, weights diverge, and
# the last losses may differ by SPREAD_OF_HALF of the first one.
SPREAD_OF_ORDER = 1e-2
SPREAD_OF_HALF = 0.05


@dataclass
class Run:
    """Results of the body over one path.

    `weights` are compared between the runs in the body's order. So is `exact`, which must have the same bits in any
    order of sums.
    """

    device: str
    losses: list[float] = field(default_factory=list)
    step_ms: list[float] = field(default_factory=list)
    weights: Tensor = field(default_factory=lambda: torch.empty(0))
    exact: Tensor = field(default_factory=lambda: torch.empty(0))
    figures: dict[str, str] = field(default_factory=dict)
    seconds: float = 0.0
    collectives: int = 0
    calls: dict[str, int] = field(default_factory=dict)
    line: str = ""


@dataclass
class Job:
    """One rank of a run.

    Attributes:
        run: the results to fill.
        args: the command line.
        console: output of rank 0; silent on the others.
    """

    run: Run
    args: argparse.Namespace
    console: Console
    rank: int
    world: int

    @contextmanager
    def progress(self, total: int) -> Iterator[Callable[[str], None]]:
        """Shows a progress bar on rank 0. Yields a function to call after each step, with a text for it. Adds the
        block's time to the run."""
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        name = "host" if self.run.device == HOST else self.run.device
        with Progress(*columns, console=self.console, disable=self.rank != 0) as bar:
            task = bar.add_task(name, total=total)
            begin = time.perf_counter()
            yield lambda text: bar.update(task, advance=1, description=f"{name}  {text}")
            self.run.seconds += time.perf_counter() - begin

    def step(self, loss_of: Callable[[], Tensor], optimizer: torch.optim.Optimizer) -> float:
        """Times forward pass, backward pass and optimizer; returns the loss."""
        begin = time.perf_counter()
        optimizer.zero_grad(set_to_none=True)
        loss = loss_of()
        loss.backward()
        optimizer.step()
        self.run.step_ms.append((time.perf_counter() - begin) * 1e3)
        self.run.losses.append(loss.item())
        return self.run.losses[-1]

    def keep(self, *modules: nn.Module) -> None:
        """Copies the weights, for the comparison with the other run."""
        states = [value for module in modules for value in module.state_dict().values()]
        self.run.weights = torch.cat([value.detach().double().flatten() for value in states])


# Reports the runs on each rank; returns the exit status.
Report = Callable[[list[Run], argparse.Namespace, Console, int], int]


def parser_of(text: str, ranks: int = 2) -> argparse.ArgumentParser:
    """Returns a parser with the arguments of all examples."""
    parser = argparse.ArgumentParser(description=text, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--device",
        default="sim",
        help="device URL: none (only the host path), sim (an engine in each rank's process), emulator://HOST:PORT, or any other that "
        "torch_accl.Options(device=...) accepts (default: sim)",
    )
    parser.add_argument(
        "--ranks", type=positive, default=ranks, help=f"processes to start, without torchrun (default: {ranks})"
    )
    parser.add_argument("--seed", type=int, default=20, help="seed of weights and data (default: 20)")
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    return parser


def positive(text: str) -> int:
    """Parses a number of at least 1."""
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"expected at least 1, got {number}")
    return number


def main_of(parser: argparse.ArgumentParser, body: Callable[[Job], None], report: Report) -> int:
    """Runs the body on all ranks, over the host path and over the device; returns the worst rank's exit status."""
    args = parser.parse_args()
    try:
        Options(device=args.device)
    except ValueError as error:
        parser.error(str(error))
    try:
        if "RANK" in os.environ:
            store, rank, world = next(rendezvous("env://"))
            return _be_rank(rank, world, store, args, body, report)
        return run_ranks(
            args.ranks,
            TIMEOUT_S,
            lambda place, store: _be_rank(place.rank, place.world, store, args, body, report),
        )
    except (Failed, RuntimeError, NotImplementedError, ValueError, OSError) as error:
        print(error, file=sys.stderr)
        return 1


def _be_rank(
    rank: int,
    world: int,
    store: dist.Store,
    args: argparse.Namespace,
    body: Callable[[Job], None],
    report: Report,
) -> int:
    torch.set_num_threads(1)
    # Both runs are deterministic, so a difference in the weights comes from the device.
    torch.use_deterministic_algorithms(True)
    console = Console(quiet=rank != 0)
    runs = []
    for number, device in enumerate(dict.fromkeys((HOST, args.device))):
        torch.manual_seed(args.seed)
        job = Job(Run(device), args, console, rank, world)
        dist.init_process_group(
            "accl",
            store=dist.PrefixStore(f"run {number}", store),
            rank=rank,
            world_size=world,
            pg_options=Options(device=device, timeout=timedelta(seconds=TIMEOUT_S)),
        )
        try:
            body(job)
            job.run.collectives = backend_of_all().snapshot()["group"]["collectives"]
            job.run.line, job.run.calls = calls_now()
            job.run.step_ms = slowest(job.run.step_ms)
            job.run.losses = mean(job.run.losses)
        finally:
            dist.destroy_process_group()
        runs.append(job.run)
    # Ranks may hold different weights, such as embedding tables, so one rank's failure counts for all.
    store.set(f"verdict {rank}", str(report(runs, args, console, world)))
    return max(int(store.get(f"verdict {other}")) for other in range(world))


def backend_of_all() -> Backend:
    """Returns the backend of the default group."""
    backend: Backend = dist.distributed_c10d._get_default_group()._get_backend(torch.device("cpu"))
    return backend


def calls_now() -> tuple[str, dict[str, int]]:
    """Returns the device's line of the group's description, and its calls so far: `{"all_reduce float32 SUM": 6}`."""
    line = next((line for line in backend_of_all().describe().splitlines() if line.startswith("device ")), "")
    found = re.search(r": \d+ calls: (.*)$", line)
    parts = found[1].split(", ") if found else []
    return line, {name: int(count) for name, count in (part.rsplit(" ", 1) for part in parts)}


def slowest(times: list[float]) -> list[float]:
    """Returns the elementwise maximum over the ranks."""
    most = torch.tensor(times, dtype=torch.float64)
    dist.all_reduce(most, op=dist.ReduceOp.MAX)
    result: list[float] = most.tolist()
    return result


def mean(values: list[float]) -> list[float]:
    """Returns the elementwise mean over the ranks."""
    total = torch.tensor(values, dtype=torch.float64)
    dist.all_reduce(total)
    result: list[float] = (total / dist.get_world_size()).tolist()
    return result


def median(values: list[float]) -> float:
    """Returns the middle value; 0 for an empty list."""
    return float(torch.tensor(values, dtype=torch.float64).median()) if values else 0.0


def verdict_of(runs: list[Run], world: int) -> tuple[bool, str]:
    """Returns whether the last run's results are as expected from the first run, and a sentence about it."""
    first, last = runs[0], runs[-1]
    if len(runs) == 1:
        return True, "nothing to compare, because only the host path ran"
    if not torch.equal(first.exact, last.exact):
        return False, f"{int((first.exact != last.exact).sum())} elements of results differ from the host path"
    also = "the same results and " if len(first.exact) else ""
    if torch.equal(first.weights, last.weights):
        return True, f"{also or 'the same '}weights as over the host path, bit for bit"
    difference = (first.weights - last.weights).abs().max().item() / max(first.weights.abs().max().item(), 1e-30)
    if "compression=fp16" in last.device:
        tails = [mean_of(run.losses[len(run.losses) * 3 // 4 :]) for run in (first, last)]
        spread = abs(tails[0] - tails[1]) / first.losses[0]
        return (
            spread <= SPREAD_OF_HALF,
            f"{also}last losses that differ by {spread:.3g} of the first (expected: at most {SPREAD_OF_HALF:g}; float16 on the wire loses "
            "bits)",
        )
    if world <= 2:
        return (
            False,
            f"weights differ by up to {difference:.3g} of the largest weight, although sums of two ranks are exact in either order",
        )
    return (
        difference <= SPREAD_OF_ORDER,
        f"{also}weights that differ by up to {difference:.3g} of the largest (expected: at most {SPREAD_OF_ORDER:g}; sums of "
        f"{world} ranks depend on their order)",
    )


def mean_of(values: list[float]) -> float:
    """Returns the mean."""
    return sum(values) / len(values)


def report_training(title: str, host_only: str) -> Report:
    """Returns a report of training runs: a table, the device's calls, the verdict. `host_only` names work that always
    stays on the host."""

    def report(runs: list[Run], args: argparse.Namespace, console: Console, world: int) -> int:
        table = Table(title=f"{title}, {world} ranks")
        table.add_column("")
        for run in runs:
            table.add_column("host path" if run.device == HOST else run.device, justify="right")
        table.add_row("first loss", *(f"{run.losses[0]:.5f}" for run in runs))
        table.add_row("last loss", *(f"{run.losses[-1]:.5f}" for run in runs))
        for name in runs[0].figures:
            table.add_row(name, *(run.figures[name] for run in runs))
        table.add_row("step, median of the slowest rank", *(f"{median(run.step_ms):.1f} ms" for run in runs))
        table.add_row("all steps", *(f"{run.seconds:.1f} s" for run in runs))
        table.add_row("collectives", *(str(run.collectives) for run in runs))
        table.add_row("collectives on the device", *(str(sum(run.calls.values())) for run in runs))
        console.print(table)
        return conclude(runs, args, console, world, host_only)

    return report


def conclude(runs: list[Run], args: argparse.Namespace, console: Console, world: int, host_only: str) -> int:
    """Prints where the work was done and what was verified, and writes the figures. Returns 1 if a result is wrong."""
    run = runs[-1]
    is_good, sentence = verdict_of(runs, world)
    if run.device != HOST:
        done = ", ".join(f"{name} {count}" for name, count in run.calls.items())
        on_host = run.collectives - sum(run.calls.values())
        console.print(f"On the device: {done or 'nothing'}.")
        console.print(f"On the host: {on_host} collectives; {host_only}.")
        if world > 1 and not run.calls:
            is_good, sentence = False, f"the device ran no collectives: {run.line or 'the group has no device'}"
    console.print(f"Verified: {sentence}." if is_good else f"[red]Wrong: {sentence}.[/red]")
    if args.json and not console.quiet:
        figures: list[dict[str, Any]] = [
            {
                "device": run.device,
                "losses": run.losses,
                "step_ms": median(run.step_ms),
                "collectives": run.collectives,
                "calls": run.calls,
                **run.figures,
            }
            for run in runs
        ]
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(json.dumps({"verdict": sentence, "is_good": is_good, "runs": figures}, indent=1) + "\n")
    return 0 if is_good else 1
