"""The bundle for a machine with a GPU: packed, unpacked and run here, where it finds none, and its parts on the stand-in."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from gpu import report, run
from peers import one_card
from support import BACKEND
from torch_accl import _gate

ROOT = Path(__file__).resolve().parents[1]
sys.path.append(str(ROOT))

from benches import accelerators, blocks

pytestmark = pytest.mark.skipif(BACKEND != "accl", reason="about this package only")
NEEDS_STANDIN = pytest.mark.skipif(
    torch.__version__ < "2.15", reason="the stand-in is written for the interfaces of torch 2.15"
)


def ended(*command, environment=None, timeout=150):
    return subprocess.run(
        [str(word) for word in command],
        env=os.environ | (environment or {}),
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )


@pytest.fixture(scope="module")
def bundle(tmp_path_factory):
    """The folder of an unpacked bundle with the installed package."""
    place = tmp_path_factory.mktemp("bundle")
    made = ended(ROOT / ".ci" / "gpu_bundle", "--installed", place, environment={"VENV": sys.prefix})
    assert made.returncode == 0, made.stderr
    ended("tar", "--extract", "--file", place / "torch-accl-gpu.tar.gz", "--directory", place)
    return place / "torch-accl-gpu"


def test_a_bundle_says_that_there_is_no_gpu_and_succeeds(bundle, tmp_path):
    found = ended(
        sys.executable, bundle / "run.py", "--out", tmp_path, environment={"CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": ""}
    )
    assert (found.returncode, found.stderr) == (0, "")
    assert found.stdout == f"no GPU: torch {torch.__version__} finds none on this machine; nothing is run\n"
    assert not list(tmp_path.iterdir())


def test_a_bundle_whose_module_does_not_fit_the_torch_is_an_error(bundle, tmp_path):
    other = shutil.copytree(bundle, tmp_path / "other")
    [module] = (other / "site" / "torch_accl").glob("_native*.so")
    module.rename(module.with_name(module.name.replace(_gate.minor_of(torch.__version__).replace(".", "_"), "9_9")))
    found = ended(sys.executable, other / "run.py", environment={"PYTHONPATH": ""})
    assert found.returncode == 1 and found.stdout == ""
    assert "error: the package does not load here: ImportError: torch_accl was built for torch 9.9" in found.stderr


@NEEDS_STANDIN
@pytest.mark.parametrize(
    "parts", [["order", "codecs"], ["bench", "stream"], ["end", "suite"], ["jobs", "peer"]], ids="-".join
)
def test_each_part_runs_on_the_stand_in(bundle, tmp_path, parts):
    command = [
        sys.executable,
        bundle / "run.py",
        "--device",
        "standin",
        "--tiny",
        "--part",
        ",".join(parts),
        "--out",
        tmp_path,
    ]
    # The stand-in that the other tests have compiled.
    (bundle / "target").is_symlink() or (bundle / "target").symlink_to(ROOT / "target")
    found = ended(*command, environment={"PYTHONPATH": ""})
    log = (tmp_path / "log.txt").read_text()
    assert found.returncode == 0, found.stdout + found.stderr + log
    assert {path.name for path in tmp_path.iterdir()} == {"results.json", "log.txt"}
    results = json.loads((tmp_path / "results.json").read_text())
    assert list(results["parts"]) == parts and results["device"] == "standin" and results["is_tiny"]
    for name, part in results["parts"].items():
        assert part["is_whole"] and part["cases"], name
        for case in part["cases"]:
            assert case["outcome"] == "pass" or case["reason"], (name, case)
        passed = [case["name"] for case in part["cases"] if case["outcome"] == "pass"]
        # What a part skips here depends on the package (jobs) or needs a card.
        assert len(passed) >= len(part["cases"]) / 2 or name == "jobs", (name, part["cases"])
    if "bench" in parts:
        with pytest.raises(
            ValueError, match="the results come from the device standin, and a page has figures of a GPU only"
        ):
            list(accelerators.tables(results))
        assert len(results["parts"]["bench"]["figures"]) >= 10 and len(results["parts"]["stream"]["figures"]) >= 4
    if "peer" in parts:
        check_part_peer(results["parts"]["peer"])


def check_part_peer(part):
    """Checks that collectives were by peer, and that each timed call has its ratio and both times."""
    cases = {case["name"]: case for case in part["cases"]}
    skipped = [name for name, case in cases.items() if case["outcome"] == "skip"]
    assert skipped == ["next to NCCL over sockets"]
    assert cases["ranks read each other's memory in a trial"]["found"] == {"refusal": "", "auto": "peer"}
    found = cases["every collective gives the bits of CPU tensors [world 2]"]["found"]
    assert found["by peer"] > 0 and found["staged"] == 0
    assert len(part["figures"]) == 3 * 5 and all(figure["value"] > 0 for figure in part["figures"])


def test_a_part_that_ends_early_fails_the_run_and_keeps_what_it_found(tmp_path, monkeypatch):
    asked = run._arguments(["--out", str(tmp_path), "--part", "order", "--device", "standin"])
    broken = tmp_path / "python"
    (broken / "gpu").mkdir(parents=True)
    (broken / "gpu" / "__init__.py").write_text("")
    (broken / "gpu" / "part.py").write_text(
        "import json, os, sys\n"
        "json.dump({'cases': [{'name': 'a', 'outcome': 'pass'}], 'is_whole': False}, open(sys.argv[5], 'w'))\n"
        "print('the last words', flush=True)\n"
        "os.kill(os.getpid(), 9)\n"
    )
    with open(tmp_path / "log.txt", "w") as log:
        part = run._run("order", asked, {**os.environ, "PYTHONPATH": str(broken)}, log)
    assert part["cases"] == [{"name": "a", "outcome": "pass"}]
    assert part["reason"] == "the part's process ended with status -9"
    assert "the last words" in (tmp_path / "log.txt").read_text()
    text = "\n".join(report.summary({"device": "cuda", "machine": {}, "parts": {"order": part}}))
    assert "order: 1 pass; 0 s; NOT WHOLE: the part's process ended with status -9" in text


def test_a_part_writes_each_case_at_once_and_skips_what_it_has_no_time_for(tmp_path):
    found = report.Report("order", tmp_path / "a.json", 1.0, {"device": "cuda"})

    def fails():
        raise AssertionError("result 3 differs\nmore")

    def skips():
        raise report.Skip("no card")

    assert found.case("good", lambda: {"a": 1}, least_seconds=0)
    assert not found.case("bad", fails, least_seconds=0)
    assert not found.case("none", skips, least_seconds=0)
    assert not found.case("late", fails)
    found.figure("time", 3.0, "us", 2.0)
    found.figure("ratio", 5.0, "x", 4.0, at_least=True)
    data = json.loads((tmp_path / "a.json").read_text())
    assert [case["outcome"] for case in data["cases"]] == ["pass", "fail", "skip", "skip"] and not data["is_whole"]
    assert data["cases"][1]["reason"] == "result 3 differs" and "more" in data["cases"][1]["output"]
    assert data["cases"][3]["reason"].startswith("the part's limit leaves")
    assert [figure["met"] for figure in data["figures"]] == [False, True]
    assert found.end() == 1 and json.loads((tmp_path / "a.json").read_text())["is_whole"]


def test_a_summary_has_failures_and_reasons_in_at_most_a_hundred_lines():
    cases = [{"name": f"case {i}", "outcome": "skip", "reason": "no time", "seconds": 0} for i in range(300)]
    cases += [{"name": "bad", "outcome": "fail", "reason": "differs", "seconds": 0}]
    part = {"is_whole": True, "seconds": 3.0, "cases": cases, "figures": []}
    lines = report.summary({"device": "cuda", "machine": {"torch": "2.11"}, "parts": {"order": part}})
    assert "  FAILED order: bad: differs" in lines
    assert "  skipped order: case 0 and 299 more: no time" in lines and len(lines) == 4
    part["figures"] = [{"name": str(i), "value": 1.0, "unit": "us"} for i in range(200)]
    lines = report.summary({"device": "cuda", "machine": {}, "parts": {"order": part}})
    assert len(lines) == 100 and lines[-1] == "  105 lines more: see the results"


def test_an_unknown_part_is_refused_by_name(capsys):
    with pytest.raises(SystemExit):
        run._arguments(["--part", "order,speed"])
    assert (
        "unknown part speed; expected order, peer, codecs, bench, end, jobs, suite, stream" in capsys.readouterr().err
    )


def test_all_parts_together_take_eight_minutes_at_most():
    assert sum(run.SECONDS.values()) <= 480 and set(run.SECONDS) == set(run.PARTS)
    assert run.ALONE + run.GRACE < 540


def test_results_of_a_card_become_the_tables_of_the_page():
    figures = [
        {"name": "all_reduce", "value": 1.1, "unit": "x", "target": 1.25, "at_least": False, "met": True},
        {"name": "gloo over accl", "value": 2.0, "unit": "x", "target": 4.0, "at_least": True, "met": False},
        {"name": "host", "value": 12.345, "unit": "ms"},
    ]
    results = {
        "device": "cuda",
        "is_tiny": False,
        "machine": {"device": "a card", "cores": 16},
        "parts": {"bench": {"is_whole": True, "figures": figures, "cases": [{"outcome": "pass"}]}},
    }
    lines = list(accelerators.tables(results))
    assert "| all_reduce | 1.1 x | at most 1.25 x | met |" in lines
    assert "| gloo over accl | 2 x | at least 4 x | **missed** |" in lines
    assert "| host | 12.35 ms |" in lines and "| `bench` | 1 | 0 | 0 |" in lines
    with pytest.raises(ValueError, match="a tiny run"):
        list(accelerators.tables(results | {"is_tiny": True}))
    with pytest.raises(ValueError, match="the results have no figure"):
        list(accelerators.tables(results | {"parts": {}}))


def test_the_page_has_the_block_that_the_command_writes():
    page = accelerators.PAGE.read_text()
    assert (
        blocks.replaced(page, accelerators.NAME, accelerators.COMMAND, accelerators.tables(None)).count(
            accelerators.NONE
        )
        == 1
    )


def test_a_module_for_a_torch_that_is_too_old_is_refused_unless_tests_ask_for_it(monkeypatch):
    monkeypatch.delenv("ACCL_TEST_OLD_TORCH", raising=False)
    text = _gate.refusal("2.11.0+cu130", ["2.11"])
    assert text is not None and text.startswith(
        "torch 2.11.0+cu130 is older than torch 2.13, the oldest that torch_accl supports"
    )
    monkeypatch.setenv("ACCL_TEST_OLD_TORCH", "1")
    assert _gate.refusal("2.11.0+cu130", ["2.11"]) is None
    assert _gate.refusal("2.12.0", ["2.11"]) is not None
    assert run.FIRST_TORCH == _gate._FIRST and run.OLD_TORCH == _gate._OLD_TORCH


def test_every_card_of_the_stock_suite_is_card_0():
    with one_card.Mapped():
        assert torch.device("cuda", 1) == torch.device("cuda:0") == torch.device("cuda:3")
        assert torch.device("cuda").index is None and torch.device("cpu", 0).type == "cpu"
    assert torch.device("cuda", 1).index == 1

    def to(*args, **kwargs):
        return args, kwargs

    def narrow(*args, **kwargs):
        return args, kwargs

    mapped = one_card.Mapped().__torch_function__
    assert mapped(to, (), ("tensor", 2, True), {"device": 3}) == (("tensor", 0, True), {"device": 0})
    assert mapped(narrow, (), ("tensor", 2, "cuda:1"), {"dim": 3}) == (("tensor", 2, "cuda:0"), {"dim": 3})
    assert [one_card.on_card_0(each) for each in ("cuda:2", "cuda", "cpu", 1)] == ["cuda:0", "cuda", "cpu", 1]
    script = (
        "import torch; from peers import one_card; one_card.install(3); "
        "assert torch.cuda.device_count() == torch.accelerator.device_count() == 3; "
        "from torch.nn.parallel import distributed; "
        "assert [distributed._get_device_index(each, True) for each in (2, torch.device('cuda:1'), -1)] == [0, 0, -1]"
    )
    found = ended(sys.executable, "-c", script, environment={"PYTHONPATH": str(ROOT / "tests")})
    assert found.returncode == 0, found.stderr


@pytest.mark.skipif(not torch.cuda._is_compiled(), reason="this torch was built without CUDA")
def test_ranks_of_a_process_that_has_counted_cards_cannot_use_them_and_that_is_found():
    script = (
        "import torch; from peers import one_card; before = one_card.is_spoilt(); torch._C._cuda_getDeviceCount(); "
        "assert (before, one_card.is_spoilt()) == (False, True)"
    )
    found = ended(sys.executable, "-c", script, environment={"PYTHONPATH": str(ROOT / "tests")})
    assert found.returncode == 0, found.stderr
