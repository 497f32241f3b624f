"""Costs of a backend outside of its calls: import, start, creation of groups, idling, and slowdown of other work."""

from __future__ import annotations

import json
import os
import socket
import statistics
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

from ..jobs import HERE, Host
from ..report import Bench, Section
from ..tables import Table, Target, plain

PROGRAM = Path(__file__).resolve().parents[1] / "ranks" / "costs.py"
BACKENDS = {"accl": "accl_torch", "gloo": "gloo"}
RANKS = 2
LIMIT_S = 120
# Few starts, because each takes seconds.
STARTS = 5
IMPORT_MS, INIT_MS, SUB_GROUP_MS, IDLE_US, SLOWDOWN = 5, 50, 2, 0, 1.03


def collect(bench: Bench) -> dict[str, Any]:
    """Returns, for each backend, the medians over starts of the slowest rank's measurements."""
    found: dict[str, Any] = {}
    python, turns = bench.shop.names["python"], min(bench.effort.turns, STARTS)
    for backend, library in BACKENDS.items():
        if library not in bench.libraries or library in bench.shop.missing:
            continue
        starts = []
        for turn in range(turns):
            bench.say(f"{backend}, start {turn + 1} of {turns}")
            starts.append(start([python, str(PROGRAM), "group", backend], RANKS))
        found[backend] = merged(starts)
    if "accl" in found:
        found["accl"] |= merged([start([python, str(PROGRAM), "import", "accl"], 1) for _ in range(turns)])
    return {"backends": found}


def start(command: list[str], ranks: int, environment: Mapping[str, str] = MappingProxyType({})) -> dict[str, float]:
    """Runs the ranks of one start; returns each measurement of the slowest rank."""
    answers = answers_of(command, ranks, environment)
    return {name: max(answer[name] for answer in answers) for name in answers[0] if all(name in one for one in answers)}


def answers_of(
    command: list[str],
    ranks: int,
    environment: Mapping[str, str],
    hosts: Sequence[Host] = HERE,
    limit_s: float = LIMIT_S,
) -> list[dict[str, Any]]:
    """Runs the ranks of one start, each as `command RANK PORT`. Returns the JSON output of each, empty for a rank that
    failed."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    processes = [
        subprocess.Popen(
            hosts[rank * len(hosts) // ranks].command([*command, str(rank), port]),
            env=os.environ | environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        for rank in range(ranks)
    ]
    try:
        return [json.loads(process.communicate(timeout=limit_s)[0] or "{}") for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()


def merged(starts: list[dict[str, float]]) -> dict[str, float]:
    """Returns the median of each measurement."""
    return {
        name: statistics.median(one[name] for one in starts) for name in starts[0] if all(name in one for one in starts)
    }


def tables(data: dict[str, Any]) -> list[Table]:
    """Returns a table with a row for each measurement."""
    found = data["backends"]
    ours, gloo = found.get("accl", {}), found.get("gloo", {})
    table = Table(["2 ranks", "gloo", "accl"])

    def row(label: str, name: str, at_most: float | None) -> None:
        theirs = plain(gloo[name]) if name in gloo else ""
        mine = Target(ours.get(name), at_most=at_most) if at_most is not None else plain(ours.get(name, 0))
        table.row(label, [theirs, mine])

    row("`import torch`, ms", "import_torch_ms", None)
    row("`import torch_accl` in addition, ms", "import_ms", IMPORT_MS)
    row("`init_process_group` without the store, ms", "init_ms", INIT_MS)
    row("first all_reduce, 4 B, ms", "first_call_ms", None)
    row("sub-group, create and destroy, ms", "sub_group_ms", SUB_GROUP_MS)
    row("processor time in 2 s without calls, all threads but the caller's, us", "idle_us", IDLE_US)
    row("matrix product between calls / without calls", "product", SLOWDOWN)
    return [table]


SECTION = Section(
    name="costs",
    title="Costs outside calls",
    text=(
        "Each start consists of two fresh processes that share all cores. A figure is the median of the starts; "
        "the slower rank determines the value of a start. The store exists before `init_process_group` is timed.\n\n"
        "The matrix product is of 384 x 384 float32, by OpenMP with one thread for each core of a rank's share. "
        "The calls between products are all_reduces of 64 KiB of bfloat16. Products with and without calls "
        "alternate."
    ),
    collect=collect,
    tables=tables,
)
