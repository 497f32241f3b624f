"""all_reduce of float32 between ranks of one host, raw and compressed: the cost of compression where it saves no
time."""

from __future__ import annotations

from typing import Any

from torch_accl_cli._sizes import show_size

from ..libraries import title_of
from ..report import Bench, Figures, Section, as_rows, cells_of
from ..tables import Table, Target, ratio

RANKS = 2
SIZES = (64 << 10, 256 << 10, 1 << 20, 4 << 20, 16 << 20, 64 << 20)
CELLS = cells_of("all_reduce", SIZES)
RAW = "accl_torch"
CAST = "accl_all_bf16"
EVERYONE = (RAW, CAST, "accl_all_maxmin:8", "accl_all_maxmin:4", "accl_bf16", "gloo", "gloo_bf16")


def collect(bench: Bench) -> dict[str, Any]:
    """Measures all libraries in turn."""
    return as_rows(bench.figures(RANKS, EVERYONE, CELLS))


def tables(data: dict[str, Any]) -> list[Table]:
    """Returns a table: microseconds, then the target."""
    figures = Figures(data["figures"])
    table = Table(["2 ranks on one host, us", *map(show_size, SIZES)])
    for name in EVERYONE:
        table.row(title_of(name), (figures.entry(name, cell) for cell in CELLS))
    shares = (ratio(figures.us(CAST, cell), figures.us(RAW, cell)) for cell in CELLS)
    table.row("all calls bf16 / raw", (Target(share, at_most=1.3) for share in shares))
    return [table]


SECTION = Section(
    name="compression_shm",
    title="Compressed all_reduce on one host",
    text=(
        "Sums of float32 over shared memory, with each rank on its own core. There are no slow links on which "
        "fewer bytes would save time. Target: `bf16`, which only casts, takes at most 1.3 times as long as raw."
    ),
    collect=collect,
    tables=tables,
)
