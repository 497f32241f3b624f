"""The other collectives between two ranks, compared with gloo through torch, and with the best MPI at engine level."""

from __future__ import annotations

from typing import Any

from torch_accl_cli.bench.collectives import COLLECTIVES

from ..measure import Cell
from ..report import SIZES, Bench, Figures, Section, as_rows, cells_of
from ..tables import Table

RANKS = 2
WANTED = ("accl", "openmpi", "mpich", "intelmpi", "oneccl", "accl_torch", "gloo", "noop")
PEERS = ("openmpi", "intelmpi")
# Each rank's part has at least one element.
PARTED = tuple(max(size, 4 * RANKS) for size in SIZES)
# A barrier has no size; its cell has a size for which ranks can create a buffer.
BARRIER = (4,)
SIZES_OF = {
    "reduce_scatter": PARTED,
    "all_gather": PARTED,
    "broadcast": SIZES,
    "all_to_all": PARTED,
    "barrier": BARRIER,
}
SMALL_BYTES = 64 << 10
TIMES_GLOO_SMALL = 10
TIMES_GLOO_LARGE = 1
SHARE_OF_BEST = 1.0


def cells(collective: str) -> list[Cell]:
    """Returns the cells of one collective."""
    return cells_of(collective, SIZES_OF[collective])


def table_of(figures: Figures, collective: str) -> Table:
    """Returns a table: microseconds, then the targets."""
    row = cells(collective)
    table = figures.table(row, f"{collective}, us")
    if collective == "barrier":
        table.head = [table.head[0], "2 ranks"]
    figures.add_best(table, PEERS, row, [SHARE_OF_BEST] * len(row), "better of Open MPI and Intel MPI")
    targets = [TIMES_GLOO_SMALL if cell.bytes <= SMALL_BYTES else TIMES_GLOO_LARGE for cell in row]
    figures.add_times(table, "gloo / accl, both through torch", "gloo", "accl_torch", row, targets)
    return table


def section(collective: str) -> Section:
    """Returns a section for one collective."""

    def collect(bench: Bench) -> dict[str, Any]:
        return as_rows(bench.figures(RANKS, WANTED, cells(collective)))

    def tables(data: dict[str, Any]) -> list[Table]:
        return [table_of(Figures(data["figures"]), collective)]

    how = ROOTED_TEXT if COLLECTIVES[collective].rooted else ""
    return Section(
        collective,
        f"{collective}, two ranks",
        f"float32, with each rank on its own core. {how}{BARS_TEXT}",
        collect,
        tables,
    )


ROOTED_TEXT = (
    "Calls are timed one by one. Before each call, ranks meet in shared memory, which is not counted. A call "
    "lasts from the start of the root to the end of the last rank. "
)
BARS_TEXT = (
    "Targets:\n\n"
    "* The engine takes no longer than the better of Open MPI and Intel MPI.\n"
    f"* Through torch, accl is at least {TIMES_GLOO_SMALL} times as fast as gloo up to 64 KiB, and faster "
    "above."
)
ALL = tuple(section(collective) for collective in SIZES_OF)
