"""Predictions of the cost model: compared with calls on this machine, for larger worlds, and the time of planning."""

from __future__ import annotations

import json
import os
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch_accl_cli._sizes import show_size

from ..build import ROOT, cargo_bench, finish
from ..measure import Cell
from ..networks import SHAPED_BITS
from ..report import Bench, Figures, Plot, Section, as_rows, cells_of
from ..tables import Table, Target, plain

CELLS = cells_of("all_reduce")
CLOSE = 0.2
# Ranks, and ranks of a host; without a network all are on one host.
HERE = {"2 ranks": (2, 2), "4 ranks": (4, 4)}
SHAPED = "4 ranks on 2 hosts, 1 Gbit/s"
LATENCY_TURNS = 200

WORLDS = (16, 64, 256, 1024, 4096, 16384)
RANKS_PER_HOST = 8
LINK = "100Gbit/s,2us"
CURVES = {"simulated_small": (64 << 10, "64 KiB"), "simulated_large": (64 << 20, "64 MiB")}
# An algorithm that takes more than this multiple of the best time is left out of the picture.
OFF_THE_POINT = 100

PLANNED_RANKS = 16384
PLANNED_MS = 10


def collect(bench: Bench) -> dict[str, Any]:
    """Calibrates and measures in the same minutes, since the host may move the cores."""
    accl = bench.shop.accl
    finish([*accl, "info", "--calibrate"], "accl info failed")
    cores = len(os.sched_getaffinity(0))
    predicted, figures = {}, {}
    for place, (ranks, per_host) in HERE.items():
        predicted[place] = simulated(accl, ranks, per_host, min(cores, per_host), CELLS)
        figures[place] = as_rows(bench.figures(ranks, ["accl"], CELLS))
    return {"predicted": predicted, "measured": figures} | {"curves": curves(accl)}


def collect_shaped(bench: Bench) -> dict[str, Any]:
    """Measures the same between two hosts, and predicts with the rate and latency of a plain connection."""
    accl = bench.shop.accl
    finish([*accl, "info", "--calibrate"], "accl info failed")
    with bench.network(SHAPED_BITS) as link:
        rate, latency = statistics.median(link.goodput(3)), link.latency(LATENCY_TURNS)
        named = f"{8 * rate / 1e6:.1f}Mbit/s,{latency * 1e6:.1f}us"
        figures = as_rows(bench.figures(4, ["accl"], CELLS, link.hosts))
    predicted = simulated(accl, 4, 2, max(len(os.sched_getaffinity(0)) // 2, 1), CELLS, named)
    return {"predicted": {SHAPED: predicted}, "measured": {SHAPED: figures}, "link": named}


def simulated(
    accl: Sequence[str], ranks: int, per_host: int, cores: int, cells: Sequence[Cell], link: str = ""
) -> list[dict[str, Any]]:
    """Returns the output of `accl simulate` by size."""
    command = [*accl, "simulate", "--ranks", str(ranks), "--ranks-per-host", str(per_host), "--json"]
    command += ["--cores-per-host", str(cores), "--sizes", ",".join(str(cell.bytes) for cell in cells)]
    said = json.loads(finish(command + (["--link", link] if link else []), "accl simulate failed"))
    by_size: list[dict[str, Any]] = said["predictions"]["all_reduce"]
    return by_size


def curves(accl: Sequence[str]) -> dict[str, list[dict[str, Any]]]:
    """Returns predictions by world size, for the pictures and the table."""
    return {str(ranks): simulated(accl, ranks, RANKS_PER_HOST, RANKS_PER_HOST, CELLS, LINK) for ranks in WORLDS}


def tables(data: dict[str, Any]) -> list[Table]:
    """Returns the error of each prediction, then a table of choices in large worlds."""
    table = Table(["", *(show_size(cell.bytes) for cell in CELLS)])
    for place, rows in data.get("predicted", {}).items():
        figures = Figures(data["measured"][place]["figures"])
        predicted = [row["times_us"][row["chosen"]] for row in rows]
        table.row(f"{place}: predicted, us", map(plain, predicted))
        table.row("measured, us", (figures.entry("accl", cell) for cell in CELLS))
        off = [
            abs(mine / us - 1) if us else None for mine, us in zip(predicted, (figures.us("accl", c) for c in CELLS))
        ]
        table.row("relative error", (Target(value, at_most=CLOSE) for value in off))
    return [table, *([scaled(data["curves"])] if "curves" in data else [])]


def scaled(worlds: dict[str, list[dict[str, Any]]]) -> Table:
    """Returns the choice and its time by ranks and size."""
    table = Table(
        [f"predicted choice, us ({RANKS_PER_HOST} ranks per host, {LINK})", *(show_size(c.bytes) for c in CELLS)]
    )
    for ranks, rows in sorted(worlds.items(), key=lambda world: int(world[0])):
        table.row(f"{int(ranks):,} ranks", (f"{row['chosen']} {plain(row['times_us'][row['chosen']])}" for row in rows))
    return table


def plots(data: dict[str, Any]) -> list[Plot]:
    """Returns the time over ranks, a curve for each algorithm."""
    drawn = []
    for name, (size, title) in CURVES.items():
        index = [cell.bytes for cell in CELLS].index(size)
        found: dict[str, list[tuple[int, float]]] = {}
        for ranks, rows in sorted(data.get("curves", {}).items(), key=lambda world: int(world[0])):
            times = rows[index]["times_us"]
            for algorithm, us in times.items():
                if us <= OFF_THE_POINT * min(times.values()):
                    found.setdefault(algorithm, []).append((int(ranks), us))
        heading = f"all_reduce of {title}, {RANKS_PER_HOST} ranks a host, {LINK}, predicted"
        drawn.append(Plot(name, heading, found, over="ranks"))
    return drawn


def collect_plans(bench: Bench) -> dict[str, Any]:
    """Returns, by collective and algorithm, the parts of planning, from `cargo bench --bench schedules`."""
    bench.say(f"cargo bench --bench schedules, {PLANNED_RANKS} ranks")
    full = os.environ | {"BENCH_SWEEP": "full"}
    cargo_bench("schedules", f"/{PLANNED_RANKS}$", "the schedules cannot be timed", full)
    target = Path(os.environ.get("CARGO_TARGET_DIR", ROOT / "target"))
    plans: dict[str, dict[str, float]] = {}
    for found in (target / "criterion").glob(f"*/{PLANNED_RANKS}/new/estimates.json"):
        part, _, what = found.parts[-4].partition("_")
        ms = json.loads(found.read_text())["median"]["point_estimate"] / 1e6
        plans.setdefault(what, {})[part] = round(ms, 4)
    return {"plans": plans}


def tables_plans(data: dict[str, Any]) -> list[Table]:
    """Returns a table with the longest first."""
    table = Table([f"{PLANNED_RANKS:,} ranks, ms", "build", "lower", "lay out", "total"])
    rows = {
        name: [parts.get(part, 0) for part in ("build", "lower", "layout")]
        for name, parts in data.get("plans", {}).items()
    }
    for name, parts in sorted(rows.items(), key=lambda row: -sum(row[1])):
        table.row(name, [*map(plain, parts), Target(sum(parts), at_most=PLANNED_MS)])
    return [table]


ALL = (
    Section(
        name="predictions",
        title="Predictions",
        text=(
            "all_reduce of float32 in the engine. The prediction is the time that `accl simulate` gives for the "
            "algorithm that it would choose. Calibration and measurement ran within the same minutes. Target: the "
            f"prediction is off by at most {CLOSE:.0%}.\n\n"
            "The second table and the plots predict larger worlds, which were not measured. A curve ends where an "
            f"algorithm takes {OFF_THE_POINT} times as long as the best one."
        ),
        collect=collect,
        tables=tables,
        plots=plots,
    ),
    Section(
        name="predictions_shaped",
        title="Predictions between two hosts",
        text=(
            "The same for two hosts with two ranks each over 1 Gbit/s. The rate and latency of the link were measured "
            "just before, with a plain TCP connection over it."
        ),
        collect=collect_shaped,
        tables=tables,
    ),
    Section(
        name="plans",
        title="Planning",
        text=(
            f"Cost of the first call of a shape on one rank of {PLANNED_RANKS:,}, by algorithm. The call builds its schedule, "
            "lowers it to operations, and resolves their bytes (`cargo bench --bench schedules`, 1 MiB). Target: at most "
            f"{PLANNED_MS} ms in total."
        ),
        collect=collect_plans,
        tables=tables_plans,
    ),
)
