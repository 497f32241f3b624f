"""Every reduction kernel, compared with a loop over the same memory that computes almost nothing."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

from ..build import cargo_bench
from ..report import Bench, Section
from ..tables import Bar, Entry, Table, plain

PLACES = {"DRAM": 0.9, "L2": 0.8}
FORMS = {"in_place": "y = y op x", "pair": "z = x op y", "many": "z = a op b op c op d"}
COMMAND = "cargo bench --package accl-benches --bench kernel_shares"

Row = dict[str, Any]


def collect(bench: Bench) -> dict[str, Any]:
    """Runs all kernels of all instruction sets of this machine once."""
    bench.say(COMMAND)
    return {"kernels": json.loads(cargo_bench("kernel_shares", "--json", "the kernels cannot be timed"))}


def tables(data: dict[str, Any]) -> list[Table]:
    """Returns a summary of the targets, then tables of each kernel for the instruction set that is chosen here."""
    rows: list[Row] = data.get("kernels", [])
    isas = list(dict.fromkeys(row["isa"] for row in rows))
    if not isas:
        return []
    found = {
        (isa, place, form): [row for row in rows if (row["isa"], row["place"], row["form"]) == (isa, place, form)]
        for isa in reversed(isas)
        for place in PLACES
        for form in FORMS
    }
    # The last instruction set is the best.
    chosen = [(place, form, some) for (isa, place, form), some in found.items() if isa == isas[-1]]
    return [summary(found), *(kernels(isas[-1], place, form, some) for place, form, some in chosen)]


def summary(found: Mapping[tuple[str, str, str], Sequence[Row]]) -> Table:
    """Returns a table with a row for each instruction set, place and form."""
    table = Table(["instruction set, place, form", "the loop, GB/s", "at their bar", "median share", "least"])
    for (isa, place, form), rows in found.items():
        worst = min(rows, key=lambda row: row["share"])
        entries = [
            plain(median(row["loop_gb_s"] for row in rows)),
            f"{sum(row['share'] >= PLACES[place] for row in rows)} of {len(rows)}",
            plain(median(row["share"] for row in rows)),
            f"{plain(worst['share'])} {worst['op']} {worst['dtype']}",
        ]
        table.row(f"{isa}, {place}, {FORMS[form]}", entries)
    return table


def kernels(isa: str, place: str, form: str, rows: Sequence[Row]) -> Table:
    """Returns a table of each kernel's share, by type and operator."""
    shares = {(row["dtype"], row["op"]): row["share"] for row in rows}
    ops = list(dict.fromkeys(row["op"] for row in rows))
    table = Table([f"{isa}, {place}, {FORMS[form]}", *ops])
    for dtype in dict.fromkeys(row["dtype"] for row in rows):
        table.row(dtype, (entry(shares.get((dtype, op)), PLACES[place]) for op in ops))
    return table


def entry(share: float | None, bar: float) -> Entry:
    """Returns an entry; blank where an operator has no meaning for a type."""
    return "" if share is None else Bar(share, at_least=bar)


SECTION = Section(
    name="kernels",
    title="Kernels",
    text=(
        "One core, no messages: each reduction kernel by turns with a loop that reads and writes the same memory with the same "
        "vectors and only puts bits together (`|`). A share is the kernel's rate over the loop's, the median of eleven pairs of "
        "turns. DRAM: buffers of 32 MiB; L2: of 64 KiB, all of a call within the cache. Bars: 0.9 of the loop's rate from DRAM, "
        "0.8 from L2, for the instruction set that is chosen on this machine; others are listed below it. SUM of scaled "
        f"contributions (PREMUL_SUM) is the kernel of SUM. GB/s count the bytes of the result. (`{COMMAND}`)"
    ),
    collect=collect,
    tables=tables,
)
