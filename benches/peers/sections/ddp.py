"""Training with DDP: how much longer a step takes for its communication, over accl and over gloo."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from pathlib import Path
from statistics import median
from types import MappingProxyType
from typing import Any

from .. import board
from ..build import SOURCES, Unavailable
from ..libraries import title_of
from ..report import Bench, Section
from ..tables import Table, Target, plain
from .costs import STARTS, merged, start

PROGRAM = SOURCES / "ddp.py"
RANKS = 2
WORKERS = ("auto", "0", "1", "2")
WORKER_STARTS, OF_BEST = 11, 1.03
# Contenders by their names in the rank program.
LIBRARIES = {"accl": "accl_torch", "gloo": "gloo"}


def collect(bench: Bench) -> dict[str, Any]:
    """Returns the medians over the starts."""
    for name in LIBRARIES.values():
        if name not in bench.libraries:
            raise Unavailable(f"{title_of(name)} was not selected")
        if reason := bench.shop.missing.get(name):
            raise Unavailable(f"{title_of(name)}: {reason}")
    turns = min(bench.effort.turns, STARTS)
    starts = []
    for turn in range(turns):
        bench.say(f"DDP, start {turn + 1} of {turns}")
        starts.append(ranks(bench))
    return {"steps": merged(starts), "workers": workers(bench)}


def workers(bench: Bench) -> dict[str, float]:
    """Returns the median step of the wide model by number of worker threads. Starts alternate in changing order."""
    steps: dict[str, list[float]] = {count: [] for count in WORKERS}
    turns = min(bench.effort.turns, WORKER_STARTS)
    for turn in range(turns):
        bench.say(f"DDP with 0 to 2 workers, start {turn + 1} of {turns}")
        for at in range(len(WORKERS)):
            count = WORKERS[(turn + at) % len(WORKERS)]
            steps[count].append(ranks(bench, "wide", {"ACCL_WORKER_COUNT": count})["accl_step_ms"])
    return {count: median(found) for count, found in steps.items()}


def ranks(bench: Bench, model: str = "demo", environment: Mapping[str, str] = MappingProxyType({})) -> dict[str, float]:
    """Runs one start."""
    names = bench.shop.names
    with tempfile.TemporaryDirectory(prefix="accl-peers-ddp-") as folder:
        board.create(Path(folder) / "board").close()
        command = [names["python"], str(PROGRAM), folder, names["libraries"], model]
        found = start(command, RANKS, {"OMP_NUM_THREADS": "1", **environment})
    if not found:
        raise Unavailable("a rank has failed")
    return found


def tables(data: dict[str, Any]) -> list[Table]:
    """Returns a table with a column for each method to train, and a table by number of worker threads."""
    found = data.get("steps", {})
    table = Table(["2 ranks, ms", "without DDP", "gloo", "accl"])

    def entry(name: str) -> str:
        return plain(found[name]) if name in found else ""

    table.row("forward and backward", map(entry, ("plain_step_ms", "gloo_step_ms", "accl_step_ms")))
    ours = Target(found.get("accl_exposed_ms"), at_most=found.get("gloo_exposed_ms"))
    table.row("exposed communication", ["", entry("gloo_exposed_ms"), ours])
    steps = data.get("workers", {})
    if not steps:
        return [table]
    by_workers = Table(["2 ranks, ms", *(f"`ACCL_WORKER_COUNT={count}`" for count in WORKERS), "`auto` / best other"])
    best = min(steps[count] for count in WORKERS if count != "auto")
    by_workers.row(
        "forward and backward, 25 MB of gradients",
        [*(plain(steps[count]) for count in WORKERS), Target(steps["auto"] / best, at_most=OF_BEST, unit=" times")],
    )
    return [table, by_workers]


SECTION = Section(
    name="ddp",
    title="DDP, exposed communication",
    text=(
        "The model is the model of `make demo`, with the demo's batches (32 images on each rank) and its DDP "
        "bucket size. DDP issues its calls itself, without a hook, and waits for their futures. A step is forward "
        "and backward without an optimizer. The slower rank determines its time.\n\n"
        "There are two processes on one core each. Each process has one thread for arithmetic, which shares the "
        "core with the threads of both backends. Three copies of the model alternate in all orders: without DDP, "
        "in DDP over accl, and in DDP over gloo. Before each step, ranks meet in shared memory, which is not "
        "counted.\n\n"
        "Exposed communication is the additional time of a step, compared with the step without DDP in the same "
        "round. It includes DDP's own work, which is the same over both backends. A figure is the median of 300 "
        "rounds, and then of the starts in fresh processes. Target: at most the value of gloo.\n\n"
        "The second table is for a model of six layers of 1,024 by 1,024, in DDP over accl with default settings. "
        "Ranks are not pinned, and the columns differ in the number of worker threads. Starts alternate in "
        "changing order; figures are medians of 11 starts of 20 steps. Target: `auto`, the default, is the best "
        "or within 3 %."
    ),
    collect=collect,
    tables=tables,
)
