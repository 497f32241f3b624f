"""all_reduce of float32 between two ranks over TCP: over a link as fast as the machine, and over a slow one."""

from __future__ import annotations

import statistics
from typing import Any

from ..measure import Cell
from ..networks import CONGESTION_CONTROL, SHAPED_BITS
from ..report import Bench, Figures, Plot, Section, as_rows, cells_of
from ..tables import Table, Target, ratio

RANKS = 2
CELLS = cells_of("all_reduce")
WANTED = ("accl", "accl_torch", "gloo")
TIMES_GLOO = (6, 6, 6, 6, 1, 1, 1.3)
TIMES_GLOO_SHAPED = 1
# Share of a plain TCP connection's rate both ways at once, for messages whose start costs nothing.
LARGE_BYTES = 16 << 20
SHARE_OF_GOODPUT = 0.95
# Turns before the cells, and after them.
GOODPUT_TURNS = 5


def collect(bench: Bench) -> dict[str, Any]:
    """Measures all libraries at all sizes."""
    with bench.network() as link:
        return as_rows(bench.figures(RANKS, WANTED, CELLS, link.hosts))


def collect_shaped(bench: Bench) -> dict[str, Any]:
    """Measures the same over a shaped link, and the link's goodput."""
    with bench.network(SHAPED_BITS) as link:
        before = link.goodput(GOODPUT_TURNS)
        figures = bench.figures(RANKS, WANTED, CELLS, link.hosts)
        goodput = [round(one) for one in (*before, *link.goodput(GOODPUT_TURNS))]
        return as_rows(figures) | {"goodput": goodput}


def tables(data: dict[str, Any]) -> list[Table]:
    """Returns one table: microseconds, then the targets."""
    figures = Figures(data["figures"])
    table = figures.table(CELLS, "2 ranks over a network, us")
    figures.add_times(table, TIMES_LABEL, "gloo", "accl_torch", CELLS, TIMES_GLOO)
    return [table]


def tables_shaped(data: dict[str, Any]) -> list[Table]:
    """Returns the same with the link's goodput."""
    figures = Figures(data["figures"])
    table = figures.table(CELLS, "2 ranks over 1 Gbit/s, us")
    goodput = statistics.median(data["goodput"]) if data.get("goodput") else None
    if goodput:
        least, most = (f"{8 * value / 1e6:.0f}" for value in (min(data["goodput"]), max(data["goodput"])))
        table.caption = f"A plain transfer in both directions reaches {8 * goodput / 1e6:.0f} Mbit/s in each direction ({least} to {most})."
    table.row("accl through torch, share of the plain transfer", (share_of(figures, cell, goodput) for cell in CELLS))
    figures.add_times(table, TIMES_LABEL, "gloo", "accl_torch", CELLS, [TIMES_GLOO_SHAPED] * len(CELLS))
    return [table]


def share_of(figures: Figures, cell: Cell, goodput: float | None) -> Target | str:
    """Returns accl's share of the goodput: between two ranks, each direction carries as many bytes as the tensor
    has."""
    if cell.bytes < LARGE_BYTES:
        return ""
    us = figures.us("accl_torch", cell)
    return Target(ratio(cell.bytes / (us * 1e-6) if us else None, goodput), at_least=SHARE_OF_GOODPUT)


def plots(data: dict[str, Any]) -> list[Plot]:
    """Returns the curves."""
    return [Figures(data["figures"]).plot("tcp", "all_reduce, float32, 2 ranks over a network", CELLS)]


def plots_shaped(data: dict[str, Any]) -> list[Plot]:
    """Returns the curves."""
    return [Figures(data["figures"]).plot("tcp_shaped", "all_reduce, float32, 2 ranks over 1 Gbit/s", CELLS)]


TIMES_LABEL = "gloo / accl, both through torch"
ALL = (
    Section(
        name="tcp",
        title="all_reduce over a network, two ranks",
        text=(
            "Sums of float32. The ranks are in two network namespaces of this machine, joined by a veth pair. Each "
            f"rank is on its own core. TCP uses {CONGESTION_CONTROL} congestion control, the default of Linux.\n\n"
            "The network is as fast as the kernel, which works on the same cores. Kernel time that is billed to no "
            "rank counts below as time of other processes.\n\n"
            "Targets through torch, compared with gloo:\n\n"
            f"* accl is at least {TIMES_GLOO[0]} times as fast up to 64 KiB.\n"
            f"* accl is at least {TIMES_GLOO[-1]} times as fast at 64 MiB.\n"
            "* accl is not slower between these sizes."
        ),
        collect=collect,
        tables=tables,
        plots=plots,
    ),
    Section(
        name="tcp_shaped",
        title="all_reduce over 1 Gbit/s, two ranks",
        text=(
            f"The same over a shaped link: a token bucket at both ends limits it to {SHAPED_BITS / 1e9:g} Gbit/s in each "
            "direction. An all_reduce between two ranks sends as many bytes in each direction as the tensor has.\n\n"
            "The plain transfer is one TCP connection without any library, which sends 120 MiB in each direction at "
            "once. It is measured before and after the libraries. Its figure is the median over the turns of the "
            "slower direction.\n\n"
            "Targets:\n\n"
            f"* From 16 MiB on, accl reaches at least {SHARE_OF_GOODPUT:.0%} of the plain transfer.\n"
            "* accl is never slower than gloo."
        ),
        collect=collect_shaped,
        tables=tables_shaped,
        plots=plots_shaped,
    ),
)
