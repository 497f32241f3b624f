"""Training as DDP has it: by how much a step is longer for its communication, over accl and over gloo."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

from .. import board
from ..build import SOURCES, Unavailable
from ..contenders import title_of
from ..report import Bench, Section
from ..tables import Bar, Table, plain
from .costs import STARTS, merged, start

PROGRAM = SOURCES / "ddp.py"
RANKS = 2
# As the rank program names them.
CONTENDERS = {"accl": "accl_torch", "gloo": "gloo"}


def collect(bench: Bench) -> dict[str, Any]:
    """The median of the starts."""
    for name in CONTENDERS.values():
        if name not in bench.contenders:
            raise Unavailable(f"{title_of(name)} was left out")
        if reason := bench.shop.missing.get(name):
            raise Unavailable(f"{title_of(name)}: {reason}")
    turns = min(bench.effort.turns, STARTS)
    starts = []
    for turn in range(turns):
        bench.say(f"DDP, start {turn + 1} of {turns}")
        starts.append(ranks(bench))
    return {"steps": merged(starts)}


def ranks(bench: Bench) -> dict[str, float]:
    """One start."""
    names = bench.shop.names
    with tempfile.TemporaryDirectory(prefix="accl-peers-ddp-") as folder:
        board.create(Path(folder) / "board").close()
        found = start([names["python"], str(PROGRAM), folder, names["libraries"]], RANKS, {"OMP_NUM_THREADS": "1"})
    if not found:
        raise Unavailable("a rank has failed")
    return found


def tables(data: dict[str, Any]) -> list[Table]:
    """A column for each way to train."""
    found = data.get("steps", {})
    table = Table(["2 ranks, ms", "without DDP", "gloo", "accl"])

    def entry(name: str) -> str:
        return plain(found[name]) if name in found else ""

    table.row("forward and backward", map(entry, ("plain_step_ms", "gloo_step_ms", "accl_step_ms")))
    ours = Bar(found.get("accl_exposed_ms"), at_most=found.get("gloo_exposed_ms"))
    table.row("exposed communication", ["", entry("gloo_exposed_ms"), ours])
    return [table]


SECTION = Section(
    name="ddp",
    title="DDP, exposed communication",
    text=(
        "The model of `make demo` on batches of its size (32 images on each rank), in DDP with the demo's bucket size. DDP "
        "makes its calls itself, without a hook, and waits for their futures. A step is forward and backward, without "
        "optimizer, and takes as long as on its slower rank. There are two processes, each with one thread for arithmetic and "
        "on a core of its own, which the threads of both backends share. Three copies of the model take turns, in all orders: "
        "without DDP, in DDP over accl, in DDP over gloo. Ranks meet in shared memory before each step, which is not counted. "
        "Exposed is by how much a step takes longer than that without DDP in the same round, hence with DDP's own work, which "
        "is the same over both: the median of 300 rounds, and of the starts, each of fresh processes. Bar: no more than with "
        "gloo."
    ),
    collect=collect,
    tables=tables,
)
