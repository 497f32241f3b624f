"""all_reduce of 16-bit floats, as in tensor-parallel inference, compared with float32 of the same bytes."""

from __future__ import annotations

from typing import Any

from torch_accl_cli._sizes import show_size

from ..libraries import title_of
from ..measure import Cell
from ..report import Bench, Figures, Section, as_rows, cells_of
from ..tables import Table, Target, ratio

RANKS = 2
SIZES = (8 << 10, 16 << 10, 64 << 10, 256 << 10, 1 << 20)
HALVES = ("bfloat16", "float16")
DTYPES = ("float32", *HALVES)
OURS = ("accl", "accl_torch")
WANTED = (*OURS, "gloo", "deepspeed")


def collect(bench: Bench) -> dict[str, Any]:
    """Measures all types at each size in succession, so that they run under the same conditions."""
    return as_rows(
        bench.figures(RANKS, WANTED, [Cell("all_reduce", dtype, size) for size in SIZES for dtype in DTYPES])
    )


def tables(data: dict[str, Any]) -> list[Table]:
    """Returns a table: microseconds of each type, then the targets."""
    figures = Figures(data["figures"])
    table = Table(["2 ranks, us", *map(show_size, SIZES)])
    for name in figures.libraries(figures.cells):
        for dtype in DTYPES:
            row = cells_of("all_reduce", SIZES, dtype)
            if any(figures.us(name, cell) is not None for cell in row):
                table.row(f"{title_of(name)}, {dtype}", (figures.entry(name, cell) for cell in row))
    for name in OURS:
        for dtype in HALVES:
            table.row(f"{dtype} / float32, {title_of(name)}", (target(figures, name, dtype, size) for size in SIZES))
    return [table]


def target(figures: Figures, name: str, dtype: str, size: int) -> Target:
    """Returns the time relative to float32 of the same bytes."""
    half, full = (figures.us(name, Cell("all_reduce", each, size)) for each in (dtype, "float32"))
    return Target(ratio(half, full), at_most=1)


SECTION = Section(
    name="sixteen_bits",
    title="16-bit floats",
    text="Sums of bfloat16 and float16 between two ranks. Target: the same number of bytes takes no longer than in float32.",
    collect=collect,
    tables=tables,
)
