"""Part `suite`: the tests of PyTorch's own distributed suite that need a GPU, over accl and over gloo, all ranks on card 0.

`tests/peers` runs the suite and maps every card to card 0 (`one_card.py`). Both backends run at the same time, in shards:
a test takes seconds, most of them to create contexts. A test that gloo passes and accl does not is a failure. On the stand-in,
which the suite does not know, a few tests of CPU tensors run, so that this module is tested.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from peers import compare
from peers.suite import GRACE_S

from .report import Report, Skip

TESTS = Path(__file__).resolve().parents[1]
BASELINES = TESTS / "peers" / "baseline"
BACKENDS = ("accl", "gloo")
# The error in a traceback, of a test or of one of its ranks.
ERROR = re.compile(r"^(?:\w+\.)*\w*(?:Error|Exception): .*", re.MULTILINE)
# What has been found is reported, however late it is.
ALWAYS = float("-inf")
SHARDS = 6
# Tests of the run on the stand-in.
FEW = ["test_all_reduce_sum", "test_barrier", "test_broadcast", "test_send_recv"]


def run(report: Report, kind: str, is_tiny: bool) -> None:
    report.case("tests that need a GPU", lambda: compared(report, kind), least_seconds=20)


def compared(report: Report, kind: str) -> Mapping[str, Any]:
    is_card = kind == "cuda"
    names = gpu_tests(torch.__version__) if is_card else FEW
    shards = SHARDS if is_card else 1
    # A test that has begun may take GRACE_S longer.
    seconds = max(15.0, report.seconds_left() - GRACE_S - 5)
    until = time.monotonic() + seconds + GRACE_S + 3
    runs = {backend: _run(backend, names, shards, is_card, seconds) for backend in BACKENDS}
    found = {backend: _gathered(*runs[backend], until=until) for backend in BACKENDS}
    known = compare.known("accl", torch.__version__, False)
    both = found["accl"].keys() & found["gloo"].keys()
    passed = {backend: {name for name in both if tests[name]["outcome"] == "pass"} for backend, tests in found.items()}
    lost = sorted(passed["gloo"] - passed["accl"] - known.keys())
    left_out = [name for name in names if name not in both]
    counts = {
        backend: {kind: sum(test["outcome"] == kind for test in tests.values()) for kind in compare.KINDS}
        for backend, tests in found.items()
    }
    if left_out:
        # A torch of another version may also lack some of them.
        report.case(
            "tests left out",
            lambda: _skip(f"{len(left_out)} of {len(names)} did not run on both: no time, or this torch lacks them"),
            least_seconds=ALWAYS,
        )
    for name in lost:
        report.case(f"lost: {name}", lambda: _fail(found["accl"][name]), least_seconds=ALWAYS)
    reasons: dict[str, int] = {}
    for name in both:
        if found["accl"][name]["outcome"] == "skip":
            reason = _first_line(found["accl"][name])
            reasons[reason] = reasons.get(reason, 0) + 1
    bad = {name: _first_line(found["accl"][name]) for name in both if found["accl"][name]["outcome"] in compare.BAD}
    result = {
        "counts": counts,
        "lost": lost,
        "gained": sorted(passed["accl"] - passed["gloo"]),
        "not run on both": left_out,
        "skips": reasons,
        "failed here and on gloo": {name: text for name, text in bad.items() if name not in lost},
    }
    print(json.dumps(result, indent=1), flush=True)
    assert passed["gloo"], (
        f"of {len(both)} tests none passes over gloo, so nothing can be compared: {next(iter(bad.values()), '')}"
    )
    return result


def _skip(reason: str) -> None:
    raise Skip(reason)


def _fail(test: Mapping[str, Any]) -> None:
    raise AssertionError(f"passes on gloo, here {test['outcome']}: {_first_line(test)}\n{test['reason'][-5000:]}")


def _first_line(test: Mapping[str, Any]) -> str:
    """Returns the error that a test ended with, or the first line of its reason."""
    errors = ERROR.findall(test["reason"])
    return str(errors[-1] if errors else (test["reason"].splitlines() or ["no reason"])[0])[:300]


def gpu_tests(version: str) -> list[str]:
    """Returns the tests that a machine without a GPU skips over gloo, from the stored baseline."""
    path = BASELINES / f"gloo-torch{compare.minor(version)}-world2.json"
    # A torch that is older than all baselines has about the tests of the oldest.
    path = path if path.exists() else sorted(BASELINES.glob("gloo-torch*-world2.json"))[0]
    return sorted(compare.named(compare.load(path), "skip"))


def _run(
    backend: str, names: list[str], shards: int, is_card: bool, seconds: float
) -> tuple[list[subprocess.Popen[str]], list[Path]]:
    """Starts the suite over a backend, in processes that share its tests."""
    folder = Path(tempfile.mkdtemp(prefix="accl-suite-"))
    processes, paths = [], []
    for number in range(shards):
        paths.append(folder / f"{number}.json")
        command = [sys.executable, "-m", "peers", "--backend", backend, "--world", "2", "--baseline", "none"]
        command += [
            "--select",
            f"^({'|'.join(names)})$",
            "--json",
            str(paths[-1]),
            "--shard",
            f"{number + 1}/{shards}",
            "--timeout",
            "60",
        ]
        command += ["--seconds", str(seconds), *(["--one-card"] if is_card else [])]
        processes.append(
            subprocess.Popen(
                command, cwd=TESTS, text=True, stdout=sys.stdout, stderr=subprocess.STDOUT, start_new_session=True
            )
        )
    return processes, paths


def _gathered(processes: list[subprocess.Popen[str]], paths: list[Path], until: float) -> dict[str, dict[str, Any]]:
    """Waits for the processes, and returns the tests that they have run, by name."""
    try:
        for process in processes:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(1.0, until - time.monotonic()))
    finally:
        for process in processes:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    tests: dict[str, dict[str, Any]] = {}
    for path in paths:
        if path.exists():
            tests |= compare.load(path)["tests"]
    return tests
