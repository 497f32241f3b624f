"""What it costs that ranks always compare the signatures of their calls: next to a build of the engine that does not."""

from __future__ import annotations

from collections.abc import Iterator
from statistics import median, quantiles
from typing import Any

from torch_accl_cli._sizes import show_size

from ..contenders import title_of
from ..measure import Cell
from ..report import Bench, Figures, Section, as_rows, cells_of
from ..tables import Bar, Table, plain

RANKS = 2
PEERS = RANKS - 1
CHECKED, UNCHECKED = "accl", "accl_unchecked"
CELLS = cells_of("all_reduce", (4, 1 << 10))
# Where the memory of a process lies is chance, and makes more of a difference than what is measured here.
STARTS = 20
PEER_NS = 20


def collect(bench: Bench) -> dict[str, Any]:
    """Both builds, each time in fresh processes."""
    starts = []
    for _ in range(STARTS):
        bench.close()
        starts.append(as_rows(bench.figures(RANKS, (CHECKED, UNCHECKED), CELLS)))
    return {"starts": starts}


def tables(data: dict[str, Any]) -> list[Table]:
    """Nanoseconds of both, then the bars."""
    starts = [Figures(start["figures"]) for start in data.get("starts", [])]
    table = Table([f"{RANKS} ranks, ns", *(show_size(cell.bytes) for cell in CELLS)])
    for name in (CHECKED, UNCHECKED):
        all_turns = [[ns for start in starts for ns in turns_ns(start, name, cell)] for cell in CELLS]
        table.row(title_of(name), (plain(median(turns)) if turns else "" for turns in all_turns))
    found = [[ns for start in starts for ns in differences_ns(start, cell)] for cell in CELLS]
    table.row("difference for each peer", (Bar(median(one) if one else None, at_most=PEER_NS) for one in found))
    table.row("of half of the turns", map(middle_half, found))
    return [table]


def turns_ns(start: Figures, name: str, cell: Cell) -> list[float]:
    """What a call took in each turn of one start."""
    figure = start.by_place.get((name, cell))
    return [1000 * us for us in figure.turns_us] if figure else []


def differences_ns(start: Figures, cell: Cell) -> Iterator[float]:
    """Of turns that followed one another, so that they met the same machine."""
    for checked, unchecked in zip(turns_ns(start, CHECKED, cell), turns_ns(start, UNCHECKED, cell)):
        yield (checked - unchecked) / PEERS


def middle_half(values: list[float]) -> str:
    """The first and the third quartile."""
    if len(values) < 2:
        return ""
    low, _, high = quantiles(values)
    return f"{plain(low)} to {plain(high)}"


SECTION = Section(
    name="signature",
    title="Signature check",
    text=(
        "The first frame of every call has the call's signature (collective, type, operator, algorithm, root, count), which "
        "the receiver compares with its own. The other build, made with `--cfg accl_without_signatures`, sends none in small "
        "messages, compares none and remembers none; by what a frame is matched to its call, and how long it must be, both "
        "compare. all_reduces of float32, each rank on a core of its own. Both builds take turns, and each turn is compared "
        f"with the other's next to it; {STARTS} times the processes are fresh, since it is chance where their memory lies. "
        f"Bar: the median of these differences is at most {PEER_NS} ns for each peer, of which there is one. More ranks were "
        "not measured: where they share cores, a call takes microseconds, which differ from turn to turn by more than the bar."
    ),
    collect=collect,
    tables=tables,
)
