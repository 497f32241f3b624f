"""all_reduce of float32 between two ranks, compared with every peer, with gloo, and with torch's own cost."""

from __future__ import annotations

from typing import Any

from ..report import Bench, Figures, Plot, Section, as_rows, cells_of
from ..tables import Table, Target

RANKS = 2
CELLS = cells_of("all_reduce")
WANTED = (
    *("accl", "sketch", "openmpi", "mpich", "intelmpi", "oneccl"),
    *("accl_torch", "gloo", "noop", "deepspeed"),
)
PEERS = ("openmpi", "mpich", "intelmpi", "oneccl", "deepspeed")
SHARE_OF_BEST = (0.6, 0.5, 0.5, 0.7, 0.7, 0.4, 0.42)
TIMES_GLOO = (15, 25, 20, 15, 8, 8, 5)
# Limit through torch: the time of the no-op backend, plus OVERHEAD_US, plus OF_ENGINE times the engine's.
OVERHEAD_US = 1.0
OF_ENGINE = 1.3


def collect(bench: Bench) -> dict[str, Any]:
    """Measures all libraries at all sizes."""
    return as_rows(bench.figures(RANKS, WANTED, CELLS))


def tables(data: dict[str, Any]) -> list[Table]:
    """Returns one table: microseconds, then the targets."""
    figures = Figures(data["figures"])
    table = figures.table(CELLS, "2 ranks, us")
    figures.add_best(table, PEERS, CELLS, SHARE_OF_BEST)
    figures.add_times(table, "gloo / accl, both through torch", "gloo", "accl_torch", CELLS, TIMES_GLOO)
    table.row("accl through torch, us", (torch_target(figures, cell) for cell in CELLS))
    return [table]


def torch_target(figures: Figures, cell: Any) -> Target:
    """Returns accl's time through torch, with its limit as target."""
    noop, engine = figures.us("noop", cell), figures.us("accl", cell)
    if noop is None or engine is None:
        return Target(None)
    return Target(figures.us("accl_torch", cell), at_most=noop + OVERHEAD_US + OF_ENGINE * engine)


def plots(data: dict[str, Any]) -> list[Plot]:
    """Returns the curves."""
    return [Figures(data["figures"]).plot("all_reduce", "all_reduce, float32, 2 ranks", CELLS)]


SECTION = Section(
    name="all_reduce",
    title="all_reduce, two ranks",
    text=(
        "Sums of float32, with each rank on its own core. Targets:\n\n"
        "* The engine takes at most the given share of the best other library's time. DeepSpeed's op counts as a "
        "library, although it is called as a torch op. The C baseline does not count, because it can do nothing "
        "else.\n"
        "* Through torch, accl is faster than gloo by the given factor.\n"
        f"* Through torch, accl takes at most the time of the no-op backend + {OVERHEAD_US:g} us + {OF_ENGINE:g} x "
        "the engine."
    ),
    collect=collect,
    tables=tables,
    plots=plots,
)
