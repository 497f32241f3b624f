"""Every reduction kernel, compared with a loop over the same memory that computes almost nothing."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

from ..build import cargo_bench
from ..report import Bench, Section
from ..tables import Entry, Table, Target, plain

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
    table = Table(["instruction set, memory, form", "loop, GB/s", "targets met", "median share", "least share"])
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


def entry(share: float | None, target: float) -> Entry:
    """Returns an entry; blank where an operator has no meaning for a type."""
    return "" if share is None else Target(share, at_least=target)


SECTION = Section(
    name="kernels",
    title="Kernels",
    text=(
        "One core, without messages. Each reduction kernel alternates with a loop that reads and writes the same "
        "memory with the same vectors. The loop only combines bits (`|`). A share is the kernel's rate divided by "
        "the loop's rate: the median of eleven pairs of turns.\n\n"
        "* DRAM: buffers of 32 MiB. L2: buffers of 64 KiB, so that all data of a call is in the cache.\n"
        "* GB/s count the bytes of the result.\n"
        "* SUM of scaled contributions (PREMUL_SUM) uses the kernel of SUM.\n\n"
        "Targets for the instruction set that is chosen on this machine: 0.9 of the loop's rate from DRAM, and "
        f"0.8 from L2. The first table also lists the other instruction sets. (`{COMMAND}`)"
    ),
    collect=collect,
    tables=tables,
)
