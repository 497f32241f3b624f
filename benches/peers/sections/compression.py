"""all_reduce of float32 between two ranks over slow links, raw and compressed, beside gloo and the casts that torch has hooks for."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

from ..contenders import CASTS, CODECS, title_of
from ..report import Bench, Figures, Section, as_rows, cells_of
from ..tables import Bar, Table, ratio

RANKS = 2
# One that is mostly latency on such links, and a bucket of DistributedDataParallel.
CELLS = cells_of("all_reduce", (256 << 10, 25 << 20))
LARGE = CELLS[-1]
RAW = "accl_torch"
COMPRESSED = tuple(f"accl_{codec}" for codec in CODECS)
GLOO = ("gloo", *(f"gloo_{cast}" for cast in CASTS))
GOODPUT_TURNS = 3
# By rate, of each codec: what a model of wire and codec without overlap predicts, and a share of that.
BARS = {
    10**9: ((1.9, 3.7, 6.7, 11.6), 0.9),
    25 * 10**8: ((1.9, 3.3, 5.6, 8.6), 0.85),
    10**10: ((1.6, 2.4, 3.4, 4.2), 0.7),
}


def collect(bench: Bench) -> dict[str, Any]:
    """Everyone, at each rate, and what the link has."""
    found = {}
    for bits in BARS:
        with bench.network(bits) as link:
            before = link.goodput(GOODPUT_TURNS)
            figures = bench.figures(RANKS, (RAW, *COMPRESSED, *GLOO), CELLS, link.hosts)
            goodput = [round(one) for one in (*before, *link.goodput(GOODPUT_TURNS))]
            found[str(bits)] = as_rows(figures) | {"goodput": goodput}
    return {"rates": found}


def tables(data: dict[str, Any]) -> list[Table]:
    """One for each rate: microseconds, then the bars."""
    return [table_of(int(bits), Figures(found["figures"]), found["goodput"]) for bits, found in data["rates"].items()]


def table_of(bits: int, figures: Figures, goodput: Sequence[float]) -> Table:
    """Times how much faster each codec is, for the large tensor."""
    table = figures.table(CELLS, f"2 ranks over {bits / 1e9:g} Gbit/s, us")
    table.caption = f"A plain transfer both ways has {8 * statistics.median(goodput) / 1e6:.0f} Mbit/s each way."
    predicted, share = BARS[bits]
    for name, times in zip(COMPRESSED, predicted):
        faster = ratio(figures.us(RAW, LARGE), figures.us(name, LARGE))
        table.row(f"{title_of(RAW)} / {title_of(name).split(', ')[1]}", ("", Bar(faster, at_least=share * times)))
    best = figures.best(GLOO, LARGE)
    for name in (COMPRESSED[0], COMPRESSED[2]):
        faster = ratio(best[1] if best else None, figures.us(name, LARGE))
        table.row(f"best of gloo and its casts / {title_of(name)}", ("", Bar(faster, at_least=1)))
    return table


SECTION = Section(
    name="compression",
    title="Compressed all_reduce over slow links, two ranks",
    text=(
        "float32 sums. The ranks are in two network namespaces of this machine, each on a core of its own; a token bucket at both "
        "ends limits the link. `accl` compresses by `all_reduce_quantized`, gloo by casts as torch's hooks for "
        "DistributedDataParallel make them; they lose what `accl bench --codec` shows. Bars: at 25 MiB times faster than raw accl, at "
        "least a share (0.9 at 1 Gbit/s, 0.85 at 2.5, 0.7 at 10) of what a model without overlap predicts from fewer bytes and the "
        "codec's speed on a faster core; and faster than the best of gloo."
    ),
    collect=collect,
    tables=tables,
)
