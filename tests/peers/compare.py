"""What a run means: counts, known failures, targets, and what is lost or gained against the gloo baseline.

Reads and writes the JSON of a run. Loads neither torch nor the suite.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

KINDS = ("pass", "skip", "fail", "error", "timeout")
BAD = ("fail", "error", "timeout")

# Tests that fail for a reason outside the backend. A known failure that passes is reported, so that the row goes away.
KNOWN = {
    "accl": {
        "test_ddp_logging_data_cpu": "wants torch's type name for every plug-in backend (custom) to equal get_backend()",
    },
}

# (passes, skips, known failures) of the whole suite on a machine without a GPU, by backend and world.
TARGETS = {
    "accl": {2: (99, 185, 1), 3: (99, 185, 1), 4: (102, 182, 1)},
}


def counts(tests: dict[str, dict[str, Any]]) -> dict[str, int]:
    """How many tests ended in which way."""
    return {kind: sum(test["outcome"] == kind for test in tests.values()) for kind in KINDS}


def named(run: dict[str, Any], *kinds: str) -> set[str]:
    """The tests of a run that ended in one of `kinds`."""
    return {name for name, test in run["tests"].items() if test["outcome"] in kinds}


def load(path: Path) -> dict[str, Any]:
    """A run written earlier."""
    run: dict[str, Any] = json.loads(path.read_text())
    return run


def save(run: dict[str, Any], path: Path) -> None:
    """Writes a run, sorted, so that two of them can be compared by eye."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(run, indent=1, sort_keys=True) + "\n")


def slim(run: dict[str, Any]) -> dict[str, Any]:
    """A run without times and texts: what is kept in the repository as a baseline."""
    tests = {name: {"outcome": test["outcome"]} for name, test in run["tests"].items()}
    return {key: value for key, value in run.items() if key != "seconds"} | {"tests": tests}


def reusable(baseline: dict[str, Any], torch_version: str, world: int, gpus: int) -> bool:
    """Whether an earlier baseline says something about this torch, world and machine."""
    return minor(baseline["torch"]) == minor(torch_version) and baseline["world"] == world and baseline["gpus"] == gpus


def minor(version: str) -> str:
    """`2.15.0+cu132` is `2.15`."""
    return ".".join(version.split("+")[0].split(".")[:2])


@dataclass
class Verdict:
    """The comparison of one run; `bad` is empty when it may pass as a gate."""

    lines: list[str] = field(default_factory=list)
    bad: list[str] = field(default_factory=list)


def judge(run: dict[str, Any], baseline: dict[str, Any] | None) -> Verdict:
    """Compares a run with the baseline, the known failures and, when it is a whole one, with the targets."""
    verdict = Verdict()
    known = KNOWN.get(run["backend"], {})
    broken = named(run, *BAD)
    for name in sorted(broken - known.keys()):
        verdict.bad.append(f"{name}: {run['tests'][name]['outcome']}")
    for name in sorted(broken & known.keys()):
        verdict.lines.append(f"known failure {name}: {known[name]}")
    for name in sorted(named(run, "pass") & known.keys()):
        verdict.bad.append(f"{name} passes now; remove its row from KNOWN in tests/peers/compare.py")
    if baseline is not None:
        common = run["tests"].keys() & baseline["tests"].keys()
        lost = (named(baseline, "pass") - named(run, "pass")) & common - known.keys()
        gained = (named(run, "pass") - named(baseline, "pass")) & common
        verdict.lines.append(f"passes here and not on gloo ({len(gained)}): {', '.join(sorted(gained)) or 'none'}")
        verdict.lines.append(f"passes on gloo and not here ({len(lost)}): {', '.join(sorted(lost)) or 'none'}")
        verdict.bad += [
            f"{name}: passes on gloo, here {run['tests'][name]['outcome']}" for name in sorted(lost - broken)
        ]
    target = TARGETS.get(run["backend"], {}).get(run["world"])
    if target and run["whole"] and run["gpus"] == 0:
        number = counts(run["tests"])
        got = (number["pass"], number["skip"], len(broken & known.keys()))
        text = "pass {}, skip {}, known failures {}".format(*got)
        if got == target:
            verdict.lines.append(f"target met: {text}")
        else:
            verdict.bad.append("{}; the target is pass {}, skip {}, known failures {}".format(text, *target))
    return verdict
