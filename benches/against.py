"""Compares collectives of this tree and another commit: alternating runs of both builds, and the ratio of their times.

    python3 -m benches.against REVISION

Owns the pairing. Each commit's own Rust bench `collectives` defines a call and times it. This program runs it for half
a second at a time, this tree and the other alternately, and successive pairs start with different builds. Both run with
the built-in constants, so that the choice of an algorithm differs only where the code differs. The ratio of a case, and
its times, come from the median pair. The interval lies between two of the sorted ratios, and contains the true median
with a probability of at least 95 %, for any distribution. A case whose whole interval lies above 1.02 is a loss, and
the command fails. torch is not needed.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from .cargo import built

ROOT = Path(__file__).resolve().parents[1]
BUILDS = ROOT / "target" / "against"
CASES = tuple(
    f"all_reduce/auto/{transport}/2/{size}"
    for transport in ("shm", "tcp")
    for size in (4, 1024, 65536, 1048576, 67108864)
)
LOSS = 1.02
CONFIDENCE = 0.95
TIMEOUT_S = 120


def git(*words: str) -> str:
    """Returns the output of a git command."""
    return subprocess.run(["git", *words], cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True).stdout.strip()


def checked_out(revision: str) -> Path:
    """Returns a folder with the files of a commit, which is kept for later runs."""
    commit = git("rev-parse", "--verify", f"{revision}^{{commit}}")
    tree = BUILDS / commit[:12]
    if not tree.exists():
        BUILDS.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=BUILDS) as folder:
            archive = Path(folder, "archive.tar")
            git("archive", "--output", str(archive), commit)
            files = Path(folder, "files")
            files.mkdir()
            subprocess.run(["tar", "-xf", archive, "-C", files], check=True)
            files.rename(tree)
    return tree


def nanoseconds(program: str, case: str, seconds: float) -> float:
    """Returns the median time of one call in nanoseconds, measured for `seconds`."""
    command = [
        program,
        "--bench",
        f"^{case}$",
        "--noplot",
        "--warm-up-time",
        str(seconds / 4),
        "--measurement-time",
        str(seconds),
    ]
    environment = {**os.environ, "BENCH_SWEEP": "full", "ACCL_CALIBRATION": "off"}
    done = subprocess.run(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=TIMEOUT_S
    )
    group, _, size = case.rpartition("/")
    estimates = Path(program).parents[2] / "criterion" / group.replace("/", "_") / size / "new" / "estimates.json"
    if done.returncode or not estimates.exists():
        raise SystemExit(f"{program} has not timed {case}:\n{done.stdout[-2000:]}")
    return json.loads(estimates.read_text())["median"]["point_estimate"]


def interval(values: list[float]) -> tuple[float, float]:
    """Returns two of the values that enclose the median of their distribution with probability `CONFIDENCE`, or else
    the outermost two."""
    values, count = sorted(values), len(values)
    # The number of values below the median is distributed like the number of heads in `count` coin tosses.
    outside, cut = 0.0, 0
    while cut < (count - 1) // 2:
        outside += 2 * math.comb(count, cut) / 2**count
        if outside > 1 - CONFIDENCE:
            break
        cut += 1
    cut = max(cut - 1, 0)
    return values[cut], values[count - 1 - cut]


def compared(programs: list[str], case: str, pairs: int, seconds: float) -> dict[str, Any]:
    """Returns the times of both builds in one case, their ratio, and its interval."""
    for program in programs:
        nanoseconds(program, case, seconds / 4)
    turns = []
    for turn in range(pairs):
        order = programs if turn % 2 == 0 else programs[::-1]
        times = {program: nanoseconds(program, case, seconds) for program in order}
        turns.append([times[program] for program in programs])
    low, high = interval([here / there for here, there in turns])
    # Take times from the median pair. Cores may be near each other in one turn and far in the next, so separate medians
    # would not belong together.
    here, there = sorted(turns, key=lambda pair: pair[0] / pair[1])[pairs // 2]
    return {"case": case, "here_ns": here, "there_ns": there, "ratio": here / there, "low": low, "high": high}


def line(row: dict[str, Any]) -> str:
    """Returns a row of the table."""
    verdict = "loss" if row["low"] > LOSS else "gain" if row["high"] < 1 else ""
    times = f"{row['here_ns'] / 1e3:.2f} | {row['there_ns'] / 1e3:.2f}"
    return f"| {row['case']} | {times} | {row['ratio']:.3f} | {row['low']:.3f} to {row['high']:.3f} | {verdict} |"


def main() -> int:
    """Runs the command line."""
    parser = argparse.ArgumentParser(prog="python -m benches.against", description=__doc__.splitlines()[0])
    parser.add_argument("revision", help="commit to compare with")
    parser.add_argument(
        "--pairs", type=int, default=31, help="number of turns of both builds for each case (default: %(default)s)"
    )
    parser.add_argument(
        "--seconds", type=float, default=0.5, help="seconds that a turn measures (default: %(default)s)"
    )
    parser.add_argument(
        "--cases", nargs="+", default=CASES, metavar="ID", help="cases to compare, such as all_reduce/auto/shm/2/4"
    )
    parser.add_argument("--json", action="store_true", help="print the figures as one JSON document")
    asked = parser.parse_args()
    programs = [built(tree, "collectives") for tree in (ROOT, checked_out(asked.revision))]
    if not asked.json:
        print(
            f"| case | here, us | {asked.revision}, us | ratio | interval | |\n|---|---:|---:|---:|---|---|", flush=True
        )
    rows = []
    for number, case in enumerate(asked.cases, 1):
        print(f"{number}/{len(asked.cases)} {case}", file=sys.stderr, flush=True)
        rows.append(compared(programs, case, asked.pairs, asked.seconds))
        if not asked.json:
            print(line(rows[-1]), flush=True)
    if asked.json:
        print(json.dumps(rows, indent=1))
    return int(any(row["low"] > LOSS for row in rows))


if __name__ == "__main__":
    sys.exit(main())
