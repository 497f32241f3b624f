"""Compares the engine's choice of algorithm with the best algorithm that `accl bench --try-all` finds."""

from __future__ import annotations

import json
from typing import Any

from torch_accl_cli._sizes import show_size

from ..build import finish
from ..report import Bench, Section
from ..tables import Table, Target

RANKS = (2, 4)
COLLECTIVES = ("all_reduce", "reduce_scatter", "all_gather", "broadcast")
SIZES = ("4", "1KiB", "16KiB", "64KiB", "1MiB", "16MiB")
# Limit: TIMES times the best algorithm's time, plus MORE_US microseconds.
TIMES, MORE_US = 1.1, 0.2
LIMIT_S = 600


def collect(bench: Bench) -> dict[str, Any]:
    """Returns the output of the command by number of ranks, without the rounds."""
    found = {}
    for ranks in RANKS:
        bench.say(f"accl bench --try-all, {ranks} ranks")
        command = [*bench.shop.accl, "bench", *COLLECTIVES, "--try-all", "--json"]
        command += ["--sizes", ",".join(SIZES), "--ranks", str(ranks), "--alternations", str(bench.effort.turns)]
        cells = json.loads(finish(command, "accl bench failed", LIMIT_S))["cells"]
        found[str(ranks)] = [summary(cell) for cell in cells]
    return {"choices": found}


def summary(cell: dict[str, Any]) -> dict[str, Any]:
    """Returns the part of a cell that the tables need."""
    best = cell["best"]
    return {
        "collective": cell["collective"],
        "bytes": cell["size_bytes"],
        "chosen": cell["algorithm"],
        "best": best,
        "us": round(cell["choice"]["time_us"], 3),
        "best_us": round(cell["algorithms"][best]["time_us"], 3),
    }


def tables(data: dict[str, Any]) -> list[Table]:
    """Returns a table for each number of ranks: the choice's time relative to its limit."""
    return [table_of(int(ranks), cells) for ranks, cells in data.get("choices", {}).items()]


def table_of(ranks: int, cells: list[dict[str, Any]]) -> Table:
    """Returns a table with a row of targets for each collective, and a row with the choices."""
    # Collectives with blocks measure one block per rank at the smallest size.
    columns = sorted({cell["bytes"] for cell in cells if cell["collective"] == COLLECTIVES[0]})
    table = Table([f"{ranks} ranks, choice / limit", *map(show_size, columns)])
    for collective in COLLECTIVES:
        mine = [cell for cell in cells if cell["collective"] == collective]
        table.row(collective, map(target_of, mine))
        table.row("chosen", (named(cell) for cell in mine))
    return table


def target_of(cell: dict[str, Any]) -> Target:
    """Returns the choice's time relative to its limit."""
    return Target(cell["us"] / (TIMES * cell["best_us"] + MORE_US), at_most=1)


def named(cell: dict[str, Any]) -> str:
    """Returns the choice, and the best algorithm if it is another."""
    return cell["chosen"] if cell["chosen"] == cell["best"] else f"{cell['chosen']} (best: {cell['best']})"


SECTION = Section(
    name="choice",
    title="Choice of the algorithm",
    text=(
        "`accl bench --try-all` measures float32 in the engine: the choice and every algorithm, alternately. "
        f"Target: the choice takes at most {TIMES} times the best algorithm's time plus {MORE_US} us. Figures are "
        "shares of this limit. If an entry names no other algorithm, the choice is the best one, measured twice. "
        "A figure above 1 is then noise of the machine."
    ),
    collect=collect,
    tables=tables,
)
