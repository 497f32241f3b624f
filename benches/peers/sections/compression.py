"""all_reduce of float32 over slow links, raw and compressed, compared with gloo and torch's compression hooks."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ..libraries import BY_NAME, CASTS, CODECS, HOOKS, title_of
from ..report import Bench, Figures, Section, as_rows, cells_of
from ..tables import Table, Target, ratio

# One size that is mostly latency on such links, and one of a bucket of DistributedDataParallel.
CELLS = cells_of("all_reduce", (256 << 10, 25 << 20))
LARGE = CELLS[-1]
RAW = "accl_torch"
COMPRESSED = tuple(f"accl_{codec}" for codec in CODECS)
GLOO = ("gloo", *(f"gloo_{smaller}" for smaller in (*CASTS, *HOOKS)))
# The rows of gloo whose result is near the sum for any tensor.
NEAR = GLOO[:-1]
GOODPUT_TURNS = 3


@dataclass(frozen=True)
class Net:
    """Ranks on separate hosts, whose links have `bits` bits a second."""

    bits: int
    ranks: int
    # Predicted speed-up of each codec over raw by a model of wire and codec without overlap, and the share of it to
    # reach.
    predicted: tuple[float, ...]
    share: float

    @property
    def name(self) -> str:
        """Key in the file of results."""
        return f"{self.ranks}x{self.bits}"


NETS = (
    Net(10**9, 2, (1.9, 3.7, 6.7, 11.6), 0.9),
    Net(10**9, 4, (2.0, 3.7, 7.0, 12.3), 0.9),
    Net(25 * 10**8, 2, (1.9, 3.3, 5.6, 8.6), 0.85),
    Net(25 * 10**8, 4, (1.9, 3.5, 6.1, 9.7), 0.85),
    Net(10**10, 2, (1.6, 2.4, 3.4, 4.2), 0.7),
)


def collect(bench: Bench) -> dict[str, Any]:
    """Measures all libraries on each net, with the goodput of the link and the bytes sent over it."""
    found = {}
    everyone = (RAW, *COMPRESSED, *GLOO)
    for net in NETS:
        with bench.network(net.bits, net.ranks) as link:
            before = link.goodput(GOODPUT_TURNS)
            figures = bench.figures(net.ranks, everyone, CELLS, link.hosts)
            sent = bench.sent(everyone, LARGE, link)
            goodput = [round(one) for one in (*before, *link.goodput(GOODPUT_TURNS))]
            found[net.name] = as_rows(figures) | {"goodput": goodput, "sent": sent}
    return {"nets": found}


def tables(data: dict[str, Any]) -> list[Table]:
    """Returns a table for each net: microseconds and bytes, then the targets."""
    found = data["nets"]
    return [
        table_of(net, Figures(found[net.name]["figures"]), found[net.name]["goodput"], found[net.name]["sent"])
        for net in NETS
        if net.name in found
    ]


def table_of(net: Net, figures: Figures, goodput: Sequence[float], sent: dict[str, int]) -> Table:
    """Returns a table with the speed-up of each codec for the large tensor."""
    heads = ["256 KiB, us", "25 MiB, us", "25 MiB, MB sent"]
    table = Table([f"{net.ranks} ranks, {net.bits / 1e9:g} Gbit/s", *heads])
    table.caption = (
        f"A plain transfer in both directions between two ranks reaches {8 * statistics.median(goodput) / 1e6:.0f} Mbit/s in "
        "each direction. Bytes of a call are counted by the interface of the first rank."
    )
    for name in figures.libraries(CELLS):
        entries = [figures.entry(name, cell) for cell in CELLS]
        table.row(BY_NAME[name].title, (*entries, f"{sent[name] / 1e6:.2f}" if name in sent else ""))
    for name, times in zip(COMPRESSED, net.predicted):
        faster = ratio(figures.us(RAW, LARGE), figures.us(name, LARGE))
        fewer = f"{sent[RAW] / sent[name]:.2f}" if {RAW, name} <= sent.keys() else ""
        label = f"{title_of(RAW)} / {title_of(name).split(', ')[1]}"
        table.row(label, ("", Target(faster, at_least=net.share * times), fewer))
    best = figures.best(NEAR, LARGE)
    for name in (COMPRESSED[0], COMPRESSED[2]):
        faster = ratio(best[1] if best else None, figures.us(name, LARGE))
        table.row(f"best of gloo without PowerSGD / {title_of(name)}", ("", Target(faster, at_least=1), ""))
    return table


SECTION = Section(
    name="compression",
    title="Compressed all_reduce over slow links",
    text=(
        "Sums of float32. Each rank is in its own network namespace of this machine. Two ranks have a core each; "
        "four ranks share two cores. A token bucket at each rank's end limits its link.\n\n"
        "accl compresses by `all_reduce_quantized`. gloo compresses like torch's hooks for "
        "DistributedDataParallel: by casts, by gathering the bytes of all ranks (`int8`), and by PowerSGD of rank "
        "1. The result of PowerSGD is near the sum only if the matrix has nearly that rank. `accl bench --codec` "
        "shows the loss of the codecs.\n\n"
        "Targets at 25 MiB:\n\n"
        "* Compressed accl is faster than raw accl by at least a share of a predicted factor. The share is 0.9 at 1 Gbit/s, "
        "0.85 at 2.5 and 0.7 at 10. The prediction uses the bytes and the codec's speed on a faster core, without overlap.\n"
        "* Compressed accl is faster than the best variant of gloo whose result is near the sum of any tensor."
    ),
    collect=collect,
    tables=tables,
)
