"""Compares this tree and another commit: alternating runs of both builds, and the ratio of their times.

    python3 -m benches.against REVISION

Each case runs for half a second at a time, this tree and the other alternately, and successive pairs start with
different builds. Both run with the built-in constants, so that the choice of an algorithm differs only where the code
differs. The ratio of a case, and its times, come from the median pair. The interval lies between two of the sorted
ratios, and contains the true median with a probability of at least 95 %, for any distribution. A case whose whole
interval lies above 1.02 is a loss, and the command fails.

Owns the command line and the kinds of cases. The kinds are timed in `engine.py`, `through_torch.py` and `imports.py`.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

from . import engine, imports, through_torch
from .pairs import LOSS, Timer, compared, line
from .trees import ROOT, checked_out

Timers = Callable[[list[Path], str], AbstractContextManager[list[Timer]]]

# By the first part of a case's name; all others are the engine's.
KINDS: dict[str, Timers] = {"torch": through_torch.timers, "import": imports.timers}

ENGINE = tuple(
    f"all_reduce/auto/{transport}/2/{size}"
    for transport in ("shm", "tcp")
    for size in (4, 1024, 65536, 1048576, 67108864)
)
TORCH = (
    "import",
    "torch/all_reduce/shm/2/4",
    "torch/all_reduce/tcp/2/4",
    "torch/all_reduce/shm/2/1048576",
    "torch/barrier/shm/2/0",
)


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
        "--cases",
        nargs="+",
        default=[*ENGINE, *TORCH],
        metavar="ID",
        help="cases to compare, such as all_reduce/auto/shm/2/4, torch/all_reduce/shm/2/4 and import; `engine` and "
        "`torch` stand for all default cases of that kind",
    )
    parser.add_argument("--json", action="store_true", help="print the figures as one JSON document")
    asked = parser.parse_args()
    groups = {"engine": ENGINE, "torch": TORCH}
    cases = [case for name in asked.cases for case in groups.get(name, (name,))]
    trees = [ROOT, checked_out(asked.revision)]
    if not asked.json:
        print(
            f"| case | here, us | {asked.revision}, us | ratio | interval | |\n|---|---:|---:|---:|---|---|", flush=True
        )
    rows = []
    for number, case in enumerate(cases, 1):
        print(f"{number}/{len(cases)} {case}", file=sys.stderr, flush=True)
        with KINDS.get(case.partition("/")[0], engine.timers)(trees, case) as timers:
            rows.append(compared(timers, case, asked.pairs, asked.seconds))
        if not asked.json:
            print(line(rows[-1]), flush=True)
    if asked.json:
        print(json.dumps(rows, indent=1))
    return int(any(row["low"] > LOSS for row in rows))


if __name__ == "__main__":
    sys.exit(main())
