"""Cost of additional ranks and groups for ranks that do not use them: counters of the engine, and the creation time of
a first group.

    python -m benches.growth

Owns the tables of docs/scaling.md. The counters come from the Rust bench `growth`, which runs all ranks in one process.
Here each world has its own process, so that none finds memory that another has used. First groups are created through
torch, one process per rank, over accl and gloo alternately.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch_accl  # noqa: F401, loaded before the ranks are forked, so that only the creation of a group is timed
from torch_accl_cli.bench.processes import Failed, run_ranks

from . import blocks
from .cargo import built
from .peers import machine

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "scaling.md"
COMMAND = "make scaling ARGS=--write-docs"

WORLDS = tuple(f"{transport}/{ranks}/" for transport in ("shm", "tcp") for ranks in (2, 8, 32, 128, 256))
FIRST = (2, 4, 8, 16, 24)
TIMEOUT_S = 120
FACTS = ("processor", "cores", "system")


def bench(*, quick: bool) -> Iterator[list[str]]:
    """Yields the output of the Rust bench for each world, and for many groups: the lines of a Markdown table at a time,
    with heads."""
    program = built(ROOT, "growth")
    for what in (*[world for world in WORLDS if not quick or int(world.split("/")[1]) <= 8], "groups"):
        print(f"growth: {what}", file=sys.stderr)
        command = [program, "--bench", what]
        environment = {**os.environ, "ACCL_CALIBRATION": "off"}
        text = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, env=environment).stdout
        yield from (table.splitlines() for table in text.split("\n\n") if table.strip())


def merged(tables: Iterator[list[str]]) -> list[list[str]]:
    """Merges tables with the same head, and drops tables without rows."""
    by_head: dict[str, list[str]] = {}
    for head, line, *rows in tables:
        by_head.setdefault(head, [head, line]).extend(rows)
    return [table for table in by_head.values() if len(table) > 2]


def first_group(backend: str, world: int) -> float:
    """Returns the milliseconds until the last of `world` ranks has its group, from when all have a store and torch is
    loaded."""
    with tempfile.TemporaryDirectory() as folder:

        def body(place: Any, store: Any) -> int:
            torch.set_num_threads(1)
            store.add("ready", 1)
            # Polls instead of using `wait`, whose back-off is longer than the time measured here.
            while store.add("ready", 0) < world:
                time.sleep(0.001)
            begin = time.monotonic()
            dist.init_process_group(
                backend,
                store=dist.PrefixStore("job", store),
                rank=place.rank,
                world_size=world,
                timeout=timedelta(seconds=TIMEOUT_S),
            )
            took = time.monotonic() - begin
            Path(folder, str(place.rank)).write_text(str(took * 1e3))
            dist.barrier()
            dist.destroy_process_group()
            return 0

        if run_ranks(world, TIMEOUT_S, body):
            raise Failed(f"the first group of {world} ranks over {backend}: a rank has failed")
        return max(float(Path(folder, str(rank)).read_text()) for rank in range(world))


def first_groups(*, quick: bool, samples: int) -> list[str]:
    """Returns the table of first groups."""
    lines = ["| ranks | accl, ms | gloo, ms | accl / gloo |", "|---:|---:|---:|---:|"]
    for world in FIRST[: 2 if quick else None]:
        print(f"growth: first group of {world}", file=sys.stderr)
        times = {backend: [] for backend in ("accl", "gloo")}
        for _ in range(samples):
            for backend, taken in times.items():
                taken.append(first_group(backend, world))
        accl, gloo = (statistics.median(taken) for taken in times.values())
        lines.append(f"| {world} | {accl:.0f} | {gloo:.0f} | {accl / gloo:.2f} |")
    return lines


def main() -> int:
    """Measures, prints, and writes the page if asked."""
    parser = argparse.ArgumentParser(prog="python -m benches.growth", description=__doc__.splitlines()[0])
    parser.add_argument("--write-docs", action="store_true", help="also write the tables to docs/scaling.md")
    parser.add_argument("--quick", action="store_true", help="measure small worlds only")
    parser.add_argument(
        "--samples", type=int, default=5, help="number of first groups of each size (default: %(default)s)"
    )
    asked = parser.parse_args()
    try:
        first = first_groups(quick=asked.quick, samples=asked.samples)
        forms, calls, groups = merged(bench(quick=asked.quick))
    except (Failed, subprocess.CalledProcessError) as error:
        print(f"growth: {error}", file=sys.stderr)
        return 1
    tables = {
        "machine": [f"{name}: {value}  " for name, value in machine.facts().items() if name in FACTS],
        "worlds": forms,
        "calls": calls,
        "groups": groups,
        "first": first,
    }
    for name, lines in tables.items():
        print("\n".join(lines), end="\n\n")
        if asked.write_docs:
            blocks.write(PAGE, name, COMMAND, lines)
    return 0


if __name__ == "__main__":
    sys.exit(main())
