"""Cases of the engine: each commit's own Rust bench `collectives` defines a call and times it. torch is not needed."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from ..cargo import built
from .pairs import Timer

TIMEOUT_S = 120


@contextmanager
def timers(trees: list[Path], case: str) -> Iterator[list[Timer]]:
    """Yields functions that time a case, such as `all_reduce/auto/shm/2/4`."""
    yield [partial(nanoseconds, built(tree, "collectives"), case) for tree in trees]


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
    return float(json.loads(estimates.read_text())["median"]["point_estimate"])
