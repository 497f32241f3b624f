"""The cost of comparing call signatures between ranks, against a build of the engine that does not compare them."""

from __future__ import annotations

from collections.abc import Iterator
from statistics import median, quantiles
from typing import Any

from torch_accl_cli._sizes import show_size

from ..libraries import title_of
from ..measure import Cell
from ..report import Bench, Figures, Section, as_rows, cells_of
from ..tables import Table, Target, plain

RANKS = 2
PEERS = RANKS - 1
CHECKED, UNCHECKED = "accl", "accl_unchecked"
CELLS = cells_of("all_reduce", (4, 1 << 10))
# The location of a process's memory is random, and matters more than the difference measured here.
STARTS = 20
PEER_NS = 20


def collect(bench: Bench) -> dict[str, Any]:
    """Measures both builds, each time in fresh processes."""
    starts = []
    for _ in range(STARTS):
        bench.close()
        starts.append(as_rows(bench.figures(RANKS, (CHECKED, UNCHECKED), CELLS)))
    return {"starts": starts}


def tables(data: dict[str, Any]) -> list[Table]:
    """Returns a table: nanoseconds of both, then the targets."""
    starts = [Figures(start["figures"]) for start in data.get("starts", [])]
    table = Table([f"{RANKS} ranks, ns", *(show_size(cell.bytes) for cell in CELLS)])
    for name in (CHECKED, UNCHECKED):
        all_turns = [[ns for start in starts for ns in turns_ns(start, name, cell)] for cell in CELLS]
        table.row(title_of(name), (plain(median(turns)) if turns else "" for turns in all_turns))
    found = [[ns for start in starts for ns in differences_ns(start, cell)] for cell in CELLS]
    table.row("median difference per peer", (Target(median(one) if one else None, at_most=PEER_NS) for one in found))
    table.row("middle half of the differences", map(middle_half, found))
    return [table]


def turns_ns(start: Figures, name: str, cell: Cell) -> list[float]:
    """Returns the time of a call in each turn of one start, in nanoseconds."""
    figure = start.by_place.get((name, cell))
    return [1000 * us for us in figure.turns_us] if figure else []


def differences_ns(start: Figures, cell: Cell) -> Iterator[float]:
    """Yields differences of successive turns, which ran under the same conditions."""
    for checked, unchecked in zip(turns_ns(start, CHECKED, cell), turns_ns(start, UNCHECKED, cell)):
        yield (checked - unchecked) / PEERS


def middle_half(values: list[float]) -> str:
    """Returns the first and the third quartile as text."""
    if len(values) < 2:
        return ""
    low, _, high = quantiles(values)
    return f"{plain(low)} to {plain(high)}"


SECTION = Section(
    name="signature",
    title="Signature check",
    text=(
        "The first frame of every call has the call's signature: collective, type, operator, algorithm, root and "
        "count. The receiver compares it with its own signature. The other build (`--cfg "
        "accl_without_signatures`) sends no signature in small messages, and neither compares nor stores "
        "signatures. Both builds check to which call a frame belongs, and how long it is.\n\n"
        "The calls are all_reduces of float32, with each rank on its own core. Both builds run alternately, and "
        f"each turn is compared with the adjacent turn of the other build. The processes are started {STARTS} "
        "times, because the random location of their memory affects the times.\n\n"
        f"Target: the median difference is at most {PEER_NS} ns for each peer, of which there is one. More ranks "
        "were not measured: if they share cores, a call takes microseconds, which vary between turns by more than "
        "the target."
    ),
    collect=collect,
    tables=tables,
)
