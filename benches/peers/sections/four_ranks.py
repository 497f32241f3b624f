"""all_reduce of float32 between four ranks, usually on a machine with two cores: a waiting rank must yield its core."""

from __future__ import annotations

from typing import Any

from ..report import Bench, Figures, Plot, Section, as_rows, cells_of
from ..tables import Table, Target

RANKS = 4
CELLS = cells_of("all_reduce")
WANTED = (
    *("accl", "sketch", "openmpi", "mpich", "intelmpi"),
    *("accl_torch", "gloo", "noop", "noop_yielding", "deepspeed"),
)
TIMES_GLOO = (20, 100, 100, 100, 20, 4, 4)
# Limit at 4 bytes: OF_NOOP times the no-op backend, plus OF_C_BASELINE times the C baseline.
OF_NOOP = 2
OF_C_BASELINE = 3


def collect(bench: Bench) -> dict[str, Any]:
    """Measures all libraries at all sizes."""
    return as_rows(bench.figures(RANKS, WANTED, CELLS))


def tables(data: dict[str, Any]) -> list[Table]:
    """Returns one table: microseconds, then the targets."""
    figures = Figures(data["figures"])
    table = figures.table(CELLS, "4 ranks, us")
    figures.add_times(table, "gloo / accl, both through torch", "gloo", "accl_torch", CELLS, TIMES_GLOO)
    small = CELLS[0]
    noop, c_baseline = figures.us("noop", small), figures.us("sketch", small)
    target = Target(None)
    if noop is not None and c_baseline is not None:
        target = Target(figures.us("accl_torch", small), at_most=OF_NOOP * noop + OF_C_BASELINE * c_baseline)
    table.row("accl through torch, us", [target, *([""] * (len(CELLS) - 1))])
    return [table]


def plots(data: dict[str, Any]) -> list[Plot]:
    """Returns the curves."""
    return [Figures(data["figures"]).plot("four_ranks", "all_reduce, float32, 4 ranks", CELLS)]


SECTION = Section(
    name="four_ranks",
    title="all_reduce, four ranks",
    text=(
        "Sums of float32. Ranks are not pinned if there are fewer cores than ranks. The C baseline yields its "
        "core after 20 polls; here it is for small messages only.\n\n"
        "Open MPI gets the hint that it is oversubscribed. The other libraries get no such hint, and neither does accl.\n\n"
        "The no-op ranks do not depend on each other and keep their cores for whole time slices. The yielding "
        "variant shows the time of torch if a core changes hands in every call, as it must in a collective.\n\n"
        "Targets:\n\n"
        "* Through torch, accl is faster than gloo by the given factor.\n"
        f"* At 4 B through torch, accl takes at most {OF_NOOP} x the no-op backend + {OF_C_BASELINE} x the C baseline."
    ),
    collect=collect,
    tables=tables,
    plots=plots,
)
