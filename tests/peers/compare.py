"""Evaluates a run: counts, known failures, targets, and which tests are lost or gained against the gloo baseline.

Reads and writes the JSON of a run. Loads neither torch nor the suite.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

KINDS = ("pass", "skip", "fail", "error", "timeout")
BAD = ("fail", "error", "timeout")

# Tests that fail for a reason outside the backend. If a known failure passes, the run fails, so that its row is
# removed.
KNOWN = {
    "accl": {
        "test_ddp_logging_data_cpu": "wants torch's type name for every plug-in backend (custom) to equal get_backend()",
    },
}

# Tests of `dist.monitored_barrier`. Before this version torch refuses it to every backend name but gloo. The group
# itself has the method, so a run with --direct-monitored-barrier must pass these tests.
MONITORED_BARRIER_SINCE = (2, 14)
MONITORED_BARRIER = {
    f"test_monitored_barrier_{test}": "dist.monitored_barrier of torch before 2.14 refuses every name but gloo"
    for test in ("gloo", "gloo_subgroup")
}

# (passes, skips, known failures) of the whole suite on a machine without a GPU, by backend and world.
TARGETS = {
    "accl": {2: (99, 185, 1), 3: (99, 185, 1), 4: (102, 182, 1)},
}
# The same counts where torch refuses `dist.monitored_barrier` by backend name.
TARGETS_WITHOUT_MONITORED_BARRIER = {
    "accl": {2: (97, 185, 3), 3: (97, 185, 3), 4: (100, 182, 3)},
}


def _refuses_monitored_barrier(torch_version: str, direct: bool) -> bool:
    return not direct and tuple(map(int, minor(torch_version).split("."))) < MONITORED_BARRIER_SINCE


def known(backend: str, torch_version: str, direct_monitored_barrier: bool) -> dict[str, str]:
    """The known failures of a backend on a torch version, with their reasons."""
    rows = KNOWN.get(backend, {})
    if rows and _refuses_monitored_barrier(torch_version, direct_monitored_barrier):
        return rows | MONITORED_BARRIER
    return rows


def target(backend: str, torch_version: str, world: int, direct_monitored_barrier: bool) -> tuple[int, int, int] | None:
    """The counts that a whole run must reach (passes, skips, known failures), or None if the tables set no target."""
    refused = _refuses_monitored_barrier(torch_version, direct_monitored_barrier)
    table = TARGETS_WITHOUT_MONITORED_BARRIER if refused else TARGETS
    return table.get(backend, {}).get(world)


def counts(tests: dict[str, dict[str, Any]]) -> dict[str, int]:
    """The number of tests per outcome."""
    return {kind: sum(test["outcome"] == kind for test in tests.values()) for kind in KINDS}


def named(run: dict[str, Any], *kinds: str) -> set[str]:
    """The tests of a run whose outcome is one of `kinds`."""
    return {name for name, test in run["tests"].items() if test["outcome"] in kinds}


def load(path: Path) -> dict[str, Any]:
    """Reads a run that was written earlier."""
    run: dict[str, Any] = json.loads(path.read_text())
    return run


def save(run: dict[str, Any], path: Path) -> None:
    """Writes a run with sorted keys, so that two runs can be compared by eye."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(run, indent=1, sort_keys=True) + "\n")


def slim(run: dict[str, Any]) -> dict[str, Any]:
    """Returns a run without times and texts, as the repository stores a baseline."""
    tests = {name: {"outcome": test["outcome"]} for name, test in run["tests"].items()}
    return {key: value for key, value in run.items() if key != "seconds"} | {"tests": tests}


def reusable(baseline: dict[str, Any], torch_version: str, world: int, gpus: int) -> bool:
    """Whether an earlier baseline applies to this torch version, world and machine."""
    return minor(baseline["torch"]) == minor(torch_version) and baseline["world"] == world and baseline["gpus"] == gpus


def minor(version: str) -> str:
    """Shortens a version to major and minor: `2.15.0+cu132` becomes `2.15`."""
    return ".".join(version.split("+")[0].split(".")[:2])


@dataclass
class Verdict:
    """The comparison of one run. If `bad` is empty, the run passes as a gate."""

    lines: list[str] = field(default_factory=list)
    bad: list[str] = field(default_factory=list)


def judge(run: dict[str, Any], baseline: dict[str, Any] | None) -> Verdict:
    """Compares a run with the baseline and the known failures, and a whole run also with the targets."""
    verdict = Verdict()
    failing = known(run["backend"], run["torch"], run["direct_monitored_barrier"])
    broken = named(run, *BAD)
    for name in sorted(broken - failing.keys()):
        verdict.bad.append(f"{name}: {run['tests'][name]['outcome']}")
    for name in sorted(broken & failing.keys()):
        verdict.lines.append(f"known failure {name}: {failing[name]}")
    for name in sorted(named(run, "pass") & failing.keys()):
        verdict.bad.append(f"{name} passes now; remove its row from tests/peers/compare.py")
    if baseline is not None:
        common = run["tests"].keys() & baseline["tests"].keys()
        lost = (named(baseline, "pass") - named(run, "pass")) & common - failing.keys()
        gained = (named(run, "pass") - named(baseline, "pass")) & common
        verdict.lines.append(f"passes here and not on gloo ({len(gained)}): {', '.join(sorted(gained)) or 'none'}")
        verdict.lines.append(f"passes on gloo and not here ({len(lost)}): {', '.join(sorted(lost)) or 'none'}")
        verdict.bad += [
            f"{name}: passes on gloo, here {run['tests'][name]['outcome']}" for name in sorted(lost - broken)
        ]
    wanted = target(run["backend"], run["torch"], run["world"], run["direct_monitored_barrier"])
    if wanted and run["whole"] and run["gpus"] == 0:
        number = counts(run["tests"])
        got = (number["pass"], number["skip"], len(broken & failing.keys()))
        text = "pass {}, skip {}, known failures {}".format(*got)
        if got == wanted:
            verdict.lines.append(f"target met: {text}")
        else:
            verdict.bad.append("{}; the target is pass {}, skip {}, known failures {}".format(text, *wanted))
    return verdict
