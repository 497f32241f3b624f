"""The examples of layer-parallel training with their smallest settings."""

import itertools
import json
from pathlib import Path

import pytest
from support import BACKEND, run_file

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"

pytestmark = pytest.mark.skipif(BACKEND != "accl", reason="about this package only")


def start(example, *arguments, ranks=2):
    return run_file(EXAMPLES / example, *arguments, world=ranks, timeout=150)


def run(tmp_path, *arguments):
    return start("layer_parallel_digits.py", "--out", str(tmp_path), *arguments)


@pytest.mark.slow
def test_digits_are_learnt_in_every_mode_and_drawn(tmp_path):
    ended = run(tmp_path, "--layers", "8", "--epochs", "2", "--json")
    assert ended.returncode == 0, ended.stderr
    runs = {found["mode"]: found for found in json.loads(ended.stdout)}
    exact, pipeline, inexact = (runs[mode] for mode in ("exact-wave", "exact-pipeline", "inexact"))
    assert pipeline["losses"] == pytest.approx(exact["losses"], rel=1e-2)
    # All modes begin with the same weights, but the inexact mode computes differently.
    assert inexact["losses"][0] == pytest.approx(exact["losses"][0], rel=1e-2)
    assert inexact["losses"] != exact["losses"] and inexact["residuals"] and not exact["residuals"]
    for found in runs.values():
        assert found["losses"][-1] < found["losses"][0] / 2 and found["accuracy"] > 0.5
    assert (tmp_path / "layer_parallel_digits.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
def test_a_mode_that_it_does_not_know_is_refused(tmp_path):
    ended = run(tmp_path, "--modes", "fast")
    assert ended.returncode and "--modes: unknown fast; expected one or more of exact-wave" in ended.stderr


@pytest.mark.slow
def test_nested_iteration_is_studied_with_the_same_work_for_every_way(tmp_path):
    arguments = ["--quick", "--json", "--plot", str(tmp_path / "a" / "nested.png")]
    ended = start("layer_parallel_nested.py", *arguments)
    assert ended.returncode == 0, ended.stderr
    runs = {found["name"]: found for found in json.loads(ended.stdout)}
    assert list(runs) == ["constant", "linear", "deepest"]
    assert (tmp_path / "a" / "nested.png").read_bytes().startswith(b"\x89PNG")
    assert "2 -> 4 -> 8 steps" in ended.stderr and "deepest" in ended.stderr
    for found in runs.values():
        assert set(found["depths"]) == ({8} if found["name"] == "deepest" else {2, 4, 8})
        assert found["work"] == sorted(found["work"]) and found["losses"][-1] < found["losses"][0] / 2
        assert abs(found["work"][-1] - runs["deepest"]["work"][-1]) < 8
        assert found["accuracies"][-1] > 0.5
    # A net that has just become deeper is about as good as the net before it.
    pairs = list(zip(runs["constant"]["depths"], runs["constant"]["losses"]))
    jumps = [(a, b) for a, b in itertools.pairwise(pairs) if a[0] != b[0]]
    assert len(jumps) == 2 and all(after < 1.5 * before for (_, before), (_, after) in jumps)
    # One rank gives the same figures to the last digit.
    alone = start("layer_parallel_nested.py", *arguments, "--ways", "linear", ranks=1)
    assert alone.returncode == 0, alone.stderr
    assert json.loads(alone.stdout) == [runs["linear"]]


def test_depths_that_are_no_multiples_are_refused():
    ended = start("layer_parallel_nested.py", "--depths", "8,12", ranks=1)
    assert ended.returncode and "--depths: expected each to be a multiple of the one before, got 8, 12" in ended.stderr
