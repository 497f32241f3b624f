"""all_reduce of float32 between two ranks over TCP: over a link as fast as the machine, and over a slow one."""

from __future__ import annotations

import statistics
from typing import Any

from ..measure import Cell
from ..networks import CONGESTION_CONTROL, SHAPED_BITS
from ..report import Bench, Figures, Plot, Section, as_rows, cells_of
from ..tables import Bar, Table, ratio

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
    """Measures all contenders at all sizes."""
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
        table.caption = f"A plain transfer both ways has {8 * goodput / 1e6:.0f} Mbit/s each way ({least} to {most})."
    table.row("accl through torch, share of the plain transfer", (share_of(figures, cell, goodput) for cell in CELLS))
    figures.add_times(table, TIMES_LABEL, "gloo", "accl_torch", CELLS, [TIMES_GLOO_SHAPED] * len(CELLS))
    return [table]


def share_of(figures: Figures, cell: Cell, goodput: float | None) -> Bar | str:
    """Returns accl's share of the goodput: between two ranks, each direction carries as many bytes as the tensor
    has."""
    if cell.bytes < LARGE_BYTES:
        return ""
    us = figures.us("accl_torch", cell)
    return Bar(ratio(cell.bytes / (us * 1e-6) if us else None, goodput), at_least=SHARE_OF_GOODPUT)


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
            "float32 sums. The ranks are in two network namespaces of this machine, which a veth pair joins, each on a core "
            f"of its own; TCP has {CONGESTION_CONTROL} congestion control, Linux's default. So the network is as fast as the "
            "kernel, whose work is on the same cores, and below counts as that of other processes where no rank is billed for "
            "it. Bars: through torch at least "
            f"{TIMES_GLOO[0]} times faster than gloo up to 64 KiB and {TIMES_GLOO[-1]} times at 64 MiB, and no slower between."
        ),
        collect=collect,
        tables=tables,
        plots=plots,
    ),
    Section(
        name="tcp_shaped",
        title="all_reduce over 1 Gbit/s, two ranks",
        text=(
            f"The same over a link that a token bucket at both ends limits to {SHAPED_BITS / 1e9:g} Gbit/s each way. The plain "
            "transfer is one TCP connection that carries 120 MiB each way at once, without any library, before and after the "
            "others are measured; its figure is the slower way's, and the median counts. An all_reduce between two ranks sends "
            f"as many bytes as the tensor has each way. Bars: from 16 MiB on at least {SHARE_OF_GOODPUT:.0%} of the plain "
            "transfer, and nowhere slower than gloo."
        ),
        collect=collect_shaped,
        tables=tables_shaped,
        plots=plots_shaped,
    ),
)
