"""all_reduce of float32 between four ranks on two hosts: the gain of the two-level algorithm over flat algorithms."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..libraries import title_of
from ..networks import SHAPED_BITS
from ..report import Bench, Figures, Plot, Section, as_rows, cells_of
from ..tables import Table, Target, ratio

RANKS = 4
CELLS = cells_of("all_reduce")
TWO_LEVEL = "accl_two_level"
# The best flat algorithms on such a link: few steps for small messages, few bytes for large ones.
FLAT = ("accl_recursive_doubling", "accl_ring")
WANTED = ("accl_torch", TWO_LEVEL, *FLAT, "gloo")
TIMES = 1.0


def table_of(figures: Figures, first: str) -> Table:
    """Returns a table: microseconds, then the targets."""
    table = figures.table(CELLS, first)
    best = [figures.best(FLAT, cell) for cell in CELLS]
    table.row("better flat algorithm", (title_of(one[0]).split(", ")[1] if one else "" for one in best))
    add_times(table, "better flat algorithm / two_level", figures, [one[1] if one else None for one in best])
    add_times(table, "gloo / two_level", figures, [figures.us("gloo", cell) for cell in CELLS])
    return table


def add_times(table: Table, label: str, figures: Figures, slow: Sequence[float | None]) -> None:
    """Adds a row with two_level's speed-up."""
    times = (ratio(us, figures.us(TWO_LEVEL, cell)) for us, cell in zip(slow, CELLS))
    table.row(label, (Target(value, at_least=TIMES) for value in times))


def section(name: str, title: str, link: str, text: str, shaped: bool) -> Section:
    """Returns a section for one kind of link."""

    def collect(bench: Bench) -> dict[str, Any]:
        with bench.network(SHAPED_BITS if shaped else None) as made:
            return as_rows(bench.figures(RANKS, WANTED, CELLS, made.hosts))

    def tables(data: dict[str, Any]) -> list[Table]:
        return [table_of(Figures(data["figures"]), f"4 ranks on 2 hosts, {link}, us")]

    def plots(data: dict[str, Any]) -> list[Plot]:
        return [Figures(data["figures"]).plot(name, f"all_reduce, float32, 4 ranks on 2 hosts, {link}", CELLS)]

    return Section(name, title, text + BARS_TEXT, collect, tables, plots)


BARS_TEXT = (
    "Target: `two_level` is faster than gloo, and faster than the better of `recursive_doubling` and `ring`, "
    "which ignore hosts."
)
ALL = (
    section(
        "two_hosts",
        "all_reduce, four ranks on two hosts",
        "veth",
        (
            "Sums of float32. Two network namespaces of this machine, joined by a veth pair, have two ranks each. accl treats a "
            "namespace as a host: it uses shared memory inside and TCP between them. Ranks are not pinned if there are fewer "
            "cores than ranks. "
        ),
        shaped=False,
    ),
    section(
        "two_hosts_shaped",
        "all_reduce, four ranks on two hosts over 1 Gbit/s",
        "1 Gbit/s",
        f"The same over a shaped link: a token bucket at both ends limits it to {SHAPED_BITS / 1e9:g} Gbit/s in each direction. ",
        shaped=True,
    ),
)
