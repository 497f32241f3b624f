"""The example of layer-parallel training, with its smallest settings."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from support import BACKEND

EXAMPLE = Path(__file__).resolve().parents[1] / "examples" / "layer_parallel_digits.py"

pytestmark = pytest.mark.skipif(BACKEND != "accl", reason="about this package only")


def run(tmp_path, *arguments):
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    command = [sys.executable, *launcher, str(EXAMPLE), "--out", str(tmp_path), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=300)


def test_digits_are_learnt_in_every_mode_and_drawn(tmp_path):
    ended = run(tmp_path, "--layers", "8", "--epochs", "2", "--json")
    assert ended.returncode == 0, ended.stderr
    runs = {found["mode"]: found for found in json.loads(ended.stdout)}
    exact, pipeline, inexact = (runs[mode] for mode in ("exact-wave", "exact-pipeline", "inexact"))
    assert pipeline["losses"] == pytest.approx(exact["losses"], rel=1e-2)
    # From the same weights, and not the same arithmetic.
    assert inexact["losses"][0] == pytest.approx(exact["losses"][0], rel=1e-2)
    assert inexact["losses"] != exact["losses"] and inexact["residuals"] and not exact["residuals"]
    for found in runs.values():
        assert found["losses"][-1] < found["losses"][0] / 2 and found["accuracy"] > 0.5
    assert (tmp_path / "layer_parallel_digits.png").read_bytes().startswith(b"\x89PNG")


def test_a_mode_that_it_does_not_know_is_refused(tmp_path):
    ended = run(tmp_path, "--modes", "fast")
    assert ended.returncode and "--modes: fast is none of exact-wave" in ended.stderr
