"""Runs parts on the card of this machine, each in a process of its own, and writes all results to one JSON and one log.

    python run.py                       # all parts, the most important one first
    python run.py --part order,bench
    python run.py --device standin --tiny

Without a card it says "no GPU" and exits with 0. In a bundle (`.ci/gpu_bundle`) the package is in the folder `site`; in the
repository the installed package is used. Owns the order of parts and their time limits. Imports neither torch nor the parts.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import IO, Any

HERE = Path(__file__).resolve().parent
# This file is in the root of a bundle, and in tests/gpu of the repository.
ROOT = HERE if (HERE / "tests").is_dir() else HERE.parents[1]
SITE = ROOT / "site"
sys.path.insert(0, str(ROOT / "tests"))

from gpu.part import PARTS
from gpu.report import summary

# Seconds that each part gets in a run of all parts: 8 minutes together.
SECONDS = {"order": 100, "peer": 60, "codecs": 50, "bench": 105, "end": 35, "jobs": 50, "suite": 50, "stream": 30}
# Seconds that a part gets by itself.
ALONE = 500
# Seconds that a part may take to end after its limit. Then it is killed.
GRACE = 30
# The oldest torch that users can have. Older ones are for the tests of this folder alone.
FIRST_TORCH = (2, 13)
OLD_TORCH = "ACCL_TEST_OLD_TORCH"

PROBE = """
import json, os, sys
import torch
if tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2]) < tuple(json.loads(sys.argv[1])):
    os.environ[sys.argv[2]] = "1"
facts = {"torch": torch.__version__, "cuda": torch.version.cuda, "old": sys.argv[2] in os.environ, "cards": 0}
import torch_accl
facts["package"] = os.path.dirname(torch_accl.__file__)
if torch.cuda.is_available():
    card = torch.cuda.get_device_properties(0)
    facts |= {"cards": torch.cuda.device_count(), "device": card.name, "capability": f"{card.major}.{card.minor}"}
    facts |= {"memory_bytes": card.total_memory}
print(json.dumps(facts))
"""


def main(words: list[str] | None = None) -> int:
    asked = _arguments(words)
    facts, why = _probe(_environment(False))
    if facts is None:
        print(f"error: the package does not load here: {why}", file=sys.stderr)
        return 1
    if asked.device == "cuda" and not facts["cards"]:
        print(f"no GPU: torch {facts['torch']} finds none on this machine; nothing is run")
        return 0
    asked.out.mkdir(parents=True, exist_ok=True)
    results: dict[str, Any] = {
        "device": asked.device,
        "is_tiny": asked.tiny,
        "date": time.strftime("%Y-%m-%d"),
        "commit": _commit(),
        "machine": _machine() | {key: value for key, value in facts.items() if key != "package"},
        "parts": {},
    }
    environment = _environment(facts["old"])
    status = 0
    path = asked.out / "results.json"
    with open(asked.out / "log.txt", "w") as log:
        for name in asked.part:
            results["parts"][name] = part = _run(name, asked, environment, log)
            failed = any(case["outcome"] == "fail" for case in part.get("cases", []))
            status |= int(failed or not part.get("is_whole"))
            path.write_text(json.dumps(results, indent=1) + "\n")
    lines = summary(results)
    print("\n".join(lines))
    print(f"results: {path}; output: {asked.out / 'log.txt'}")
    return status


def _arguments(words: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="run.py", description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "--part", type=_parts, default=list(PARTS), metavar="NAME[,NAME]", help=f"of {', '.join(PARTS)}"
    )
    parser.add_argument("--device", choices=("cuda", "standin"), default="cuda", help="default: cuda")
    parser.add_argument("--tiny", action="store_true", help="a little of each case, to test the parts themselves")
    parser.add_argument(
        "--out", type=Path, default=Path("gpu-results"), help="folder for the results (default: gpu-results)"
    )
    parser.add_argument(
        "--seconds", type=float, help=f"limit of each part (default: {SECONDS}, {ALONE} for a single part)"
    )
    parser.add_argument("--verbose", action="store_true", help="also print the output of the parts")
    return parser.parse_args(words)


def _parts(text: str) -> list[str]:
    names = text.split(",")
    for name in names:
        if name not in PARTS:
            raise argparse.ArgumentTypeError(f"unknown part {name}; expected {', '.join(PARTS)}")
    return names


def _environment(is_old: bool) -> dict[str, str]:
    """The environment of a part: the bundle's package, if this is a bundle, and the tests."""
    paths = [str(SITE)] if SITE.is_dir() else []
    paths += [str(ROOT / "tests")]
    if before := os.environ.get("PYTHONPATH"):
        paths.append(before)
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths), "PYTHONUNBUFFERED": "1"}
    if is_old:
        environment[OLD_TORCH] = "1"
    return environment


def _probe(environment: dict[str, str]) -> tuple[dict[str, Any] | None, str]:
    command = [sys.executable, "-c", PROBE, json.dumps(FIRST_TORCH), OLD_TORCH]
    # torch loads backends when it is imported, before it can be asked for its version.
    environment = environment | {"TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
    found = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False, cwd=ROOT)
    if found.returncode:
        return None, (found.stderr.strip().splitlines() or ["no message"])[-1]
    facts: dict[str, Any] = json.loads(found.stdout.splitlines()[-1])
    return facts, ""


def _machine() -> dict[str, Any]:
    """Facts of the machine that figures depend on."""
    model = ""
    with contextlib.suppress(OSError), open("/proc/cpuinfo") as lines:
        model = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "")
    driver = ""
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        query = [
            "nvidia-smi",
            "--query-gpu=driver_version,pcie.link.gen.max,pcie.link.width.max",
            "--format=csv,noheader",
        ]
        driver = subprocess.run(query, capture_output=True, text=True, timeout=30, check=True).stdout.strip()
    return {
        "processor": model,
        "cores": len(os.sched_getaffinity(0)),
        "kernel": platform.release(),
        "driver": driver,
        "python": platform.python_version(),
    }


def _commit() -> str:
    """The commit that the tests are from."""
    with contextlib.suppress(OSError):
        return (ROOT / "COMMIT").read_text().strip()
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        command = ["git", "describe", "--always", "--dirty"]
        return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()
    return ""


def _run(name: str, asked: argparse.Namespace, environment: dict[str, str], log: IO[str]) -> dict[str, Any]:
    """Runs one part to its end or its limit. Returns its results."""
    seconds = asked.seconds or (ALONE if len(asked.part) == 1 else SECONDS[name])
    path = asked.out.resolve() / f".{name}.json"
    path.unlink(missing_ok=True)
    command = [sys.executable, "-m", "gpu.part", name, "--device", asked.device, "--json", str(path)]
    command += ["--seconds", str(seconds), *(["--tiny"] if asked.tiny else [])]
    print(f"== {name}, at most {seconds:.0f} s", flush=True)
    log.write(f"== {name}\n")
    log.flush()
    begin = time.monotonic()
    before = os.path.getsize(log.name)
    child = subprocess.Popen(
        command,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=log,
        stderr=subprocess.STDOUT,
        start_new_session=True,
        cwd=ROOT,
    )
    reason = ""
    try:
        code = child.wait(seconds + GRACE)
        if code not in (0, 1):
            reason = f"the part's process ended with status {code}"
    except subprocess.TimeoutExpired:
        reason = f"the part did not end within {seconds + GRACE:.0f} s"
    finally:
        # The part leads a process group, and its ranks are in it.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)
        child.wait()
    found: dict[str, Any] = {"cases": [], "figures": [], "seconds": round(time.monotonic() - begin, 1)}
    with contextlib.suppress(OSError, ValueError):
        found = json.loads(path.read_text())
    path.unlink(missing_ok=True)
    if not found.get("is_whole"):
        found["reason"] = reason or "the part's process ended before its last case"
    with open(log.name, "rb") as written:
        written.seek(before)
        text = written.read().decode(errors="replace")
    if asked.verbose or not found.get("is_whole"):
        print("\n".join(text.splitlines()[-20 if not asked.verbose else None :]))
    return found


if __name__ == "__main__":
    sys.exit(main())
