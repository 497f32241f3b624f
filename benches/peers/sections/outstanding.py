"""Asynchronous calls: a hundred outstanding together, compared with a hundred one after the other."""

from __future__ import annotations

from typing import Any

from ..libraries import title_of
from ..measure import Cell
from ..report import Bench, Figures, Section, as_rows
from ..tables import Table, Target, ratio

RANKS = 2
CALLS = 100
BYTES = 1 << 20
# Names as in `src/order.rs`: each of the calls has its own tensor.
BLOCKING = Cell(f"all_reduce*{CALLS}", "float32", BYTES)
TOGETHER = Cell(f"all_reduce&{CALLS}", "float32", BYTES)
OURS = ("accl", "accl_torch")
WANTED = (*OURS, "gloo")


def collect(bench: Bench) -> dict[str, Any]:
    """Measures both."""
    return as_rows(bench.figures(RANKS, WANTED, [BLOCKING, TOGETHER]))


def tables(data: dict[str, Any]) -> list[Table]:
    """Returns a table with a row for each library."""
    figures = Figures(data["figures"])
    table = Table(
        [
            f"2 ranks, {CALLS} x 1 MiB, us",
            "one after the other",
            "outstanding together",
            "together / one after the other",
        ]
    )
    for name in WANTED:
        share = ratio(figures.us(name, TOGETHER), figures.us(name, BLOCKING))
        last = Target(share, at_most=1) if name in OURS else ""
        table.row(title_of(name), [figures.entry(name, BLOCKING), figures.entry(name, TOGETHER), last])
    return [table]


SECTION = Section(
    name="outstanding",
    title="Asynchronous calls",
    text=f"{CALLS} all_reduces of 1 MiB of float32, each on its own tensor. Target: outstanding together they take no longer.",
    collect=collect,
    tables=tables,
)
