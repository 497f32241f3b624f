"""`accl simulate`, and what `accl info` reports about calibration and accelerators."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from support import BACKEND, command_code, run_command, run_script, standin
from torch_accl_cli import info

pytestmark = pytest.mark.skipif(BACKEND != "accl", reason="about this package only")

CALIBRATIONS = Path(__file__).parent / "calibrations"


def accl(*arguments: str, status: int = 0, **env: str) -> subprocess.CompletedProcess:
    ended = run_command(list(arguments), {"ACCL_CALIBRATION": "off"} | env)
    assert ended.returncode == status, ended.stderr
    return ended


@pytest.mark.slow
def test_every_algorithm_has_a_time_and_one_is_chosen():
    arguments = ("--ranks", "4096", "--ranks-per-host", "8", "--link", "100Gbit/s,2us", "--collective", "all")
    document = json.loads(accl("simulate", *arguments, "--sizes", "4,1MiB", "--json").stdout)
    assert (document["ranks"], document["ranks_per_host"], document["cores_per_host"]) == (4096, 8, 8)
    known = {(row["collective"], row["name"]) for row in json.loads(accl("algorithms", "--json").stdout)}
    found = set()
    for collective, predictions in document["predictions"].items():
        assert [row["bytes"] for row in predictions] == ([0] if collective == "barrier" else [4, 1 << 20])
        for row in predictions:
            assert row["chosen"] in row["times_us"] and all(time > 0 for time in row["times_us"].values())
            found |= {(collective, name) for name in row["times_us"]}
    assert found == known


def test_the_table_marks_the_choice_of_each_size():
    printed = accl("simulate", "--ranks", "4", "--sizes", "4-1MiB:x16").stdout.splitlines()
    title, head, *rows = printed
    assert "all_reduce: 4 ranks on 1 hosts" in title and "recursive_doubling" in head
    assert len(rows) == 5 and all(row.count("*") == 1 for row in rows)


def test_columns_of_long_times_stay_apart():
    arguments = ("--ranks", "4096", "--ranks-per-host", "8", "--link", "1Gbit/s,2us", "--sizes", "64MiB")
    _, head, row = accl("simulate", *arguments).stdout.splitlines()
    # The size takes two columns: a number and a unit.
    assert len(row.split()) == len(head.split()) + 1 and len(row.rstrip()) <= len(head), (head, row)


@pytest.mark.slow
def test_a_slower_network_takes_longer_and_constants_come_from_a_file(tmp_path):
    def time_us(*arguments: str) -> float:
        world = ("--ranks", "8", "--ranks-per-host", "1", "--sizes", "64MiB", "--json")
        (row,) = json.loads(accl("simulate", *world, *arguments).stdout)["predictions"]["all_reduce"]
        return row["times_us"][row["chosen"]]

    assert time_us("--link", "1Gbit/s,10us") > time_us("--link", "100Gbit/s,10us")
    slow = tmp_path / "machine.txt"
    slow.write_text("# a slow one\nnetwork_sent_ps_per_kib = 819200000\n")
    assert time_us("--machine", str(slow)) > 10 * time_us()


def test_an_override_is_shown_as_the_choice():
    printed = accl("simulate", "--ranks", "4", "--json", ACCL_ALGORITHM="all_reduce=ring").stdout
    assert {row["chosen"] for row in json.loads(printed)["predictions"]["all_reduce"]} == {"ring"}


@pytest.mark.slow
def test_a_picture_is_drawn(tmp_path):
    pytest.importorskip("matplotlib", reason="matplotlib is not installed")
    picture = tmp_path / "curves.png"
    accl("simulate", "--ranks", "16", "--plot", str(picture))
    assert picture.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--ranks", "0"], "--ranks"),
        (["--ranks", "-3"], "--ranks"),
        (["--ranks", "many"], "--ranks"),
        (["--ranks", "99999999"], "99999999"),
        (["--ranks", "999999999999999999999"], ""),
        (["--ranks", "4", "--ranks-per-host", "0"], "--ranks-per-host"),
        (["--ranks", "4", "--cores-per-host", "-1"], "--cores-per-host"),
        (["--ranks", "4", "--collective", "all_redcue"], "did you mean all_reduce?"),
        (["--ranks", "4", "--sizes", "-5"], "--sizes"),
        (["--ranks", "4", "--sizes", "big"], "--sizes"),
        (["--ranks", "4", "--link", "fast"], "--link"),
        (["--ranks", "4", "--link", "100Gbit/s"], "--link"),
        (["--ranks", "4", "--link", "0Gbit/s,1us"], "--link"),
        (["--ranks", "4", "--link", "1Gbit/s,1parsec"], "--link"),
        (["--ranks", "4", "--machine", "/nowhere/constants"], "/nowhere/constants"),
        (["--ranks", "4", "--machine", "/dev/null"], "/dev/null"),
        (["--ranks", "4", "--plot", "/nowhere/at/all.png"], "--plot"),
        ([], "--ranks"),
    ],
)
def test_nonsense_is_one_sentence_and_status_2(arguments, named):
    ended = accl("simulate", *arguments, status=2)
    assert ended.stdout == "" and len(ended.stderr.splitlines()) == 1 and named in ended.stderr


@pytest.mark.slow
def test_info_measures_once_and_says_from_where(tmp_path):
    env = {"ACCL_CALIBRATION": "auto", "XDG_CACHE_HOME": str(tmp_path)}
    for _ in range(2):
        calibration = json.loads(accl("info", "--json", **env).stdout)["calibration"]
        assert len(calibration["constants"]["shm_sent_ps_per_kib"]) == 5
        # A machine too busy to be measured uses the built-in constants and reports that.
        if calibration["source"] != "built in":
            assert calibration["source"].startswith(str(tmp_path / "torch-accl")) and calibration["age_s"] < 600
            assert len(list((tmp_path / "torch-accl").iterdir())) == 1
    assert "calibration" in accl("info", **env).stdout


@pytest.mark.skipif(torch.accelerator.is_available(), reason="this machine has an accelerator")
def test_info_says_why_there_is_no_accelerator():
    said = "^accelerators +none: (torch finds no device of its type|this torch was built)"
    assert re.search(said, accl("info").stdout, re.MULTILINE)


@pytest.mark.skipif(torch.__version__ < "2.15", reason="the stand-in is written for the interfaces of torch 2.15")
def test_info_names_accelerators_and_the_way_of_their_calls():
    standin.build()
    script = "from support import standin; standin.register(); from torch_accl import cli; cli.main(['info', '--json'])"
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parent)}
    ended = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, timeout=60)
    assert ended.returncode == 0, ended.stderr
    facts = json.loads(ended.stdout)
    assert facts["accelerators"] == ["standin:0", "standin:1"]
    assert facts["accelerator_route"].startswith("staged") and facts["accelerator_codecs"].startswith("on the CPU")
    wanted = "staged, by ACCL_GPU_ROUTE=auto: devices of the type standin do not share memory"
    assert facts["accelerator_route_inside_a_host"] == wanted


def test_info_names_the_setting_of_the_route_inside_a_host():
    tried = "peer memory, tried by the first large collective of a group"
    assert info._route_inside_a_host("cuda", "auto") == f"{tried}; staged if it fails, by ACCL_GPU_ROUTE=auto"
    assert info._route_inside_a_host("cuda", "peer") == f"{tried}; an error if it fails, by ACCL_GPU_ROUTE=peer"
    assert info._route_inside_a_host("cuda", "staged") == "staged, by ACCL_GPU_ROUTE=staged"
    assert info._route_inside_a_host("xpu", "peer").startswith(
        "refused, by ACCL_GPU_ROUTE=peer: devices of the type xpu"
    )


@pytest.mark.slow
def test_a_fresh_start_warns_of_nothing_and_info_names_constants_that_are_not_determined(tmp_path):
    env = {"XDG_CACHE_HOME": str(tmp_path), "ACCL_CALIBRATION": "auto"}
    assert "contradicts" not in accl("info", **env).stderr
    # Constants measured on a two-core Sapphire Rapids, where every measurement leaves these four undetermined.
    path = tmp_path / "machine.txt"
    kept = (CALIBRATIONS / "sapphire-rapids-two-cores.txt").read_text()
    path.write_text(kept + "at_bounds = shm_call_ps, shm_latency_ps, tcp_latency_ps, switch_ps\n")
    ended = accl("info", ACCL_CALIBRATION=str(path))
    assert ended.stderr == ""
    marked = [line.split()[0] for line in ended.stdout.splitlines() if "does not determine" in line]
    assert marked == ["shm_call_ps", "shm_latency_ps", "tcp_latency_ps", "switch_ps"]


# The cache of an earlier version, which kept a measurement that contradicted itself.
DEGENERATE = "shm_call_ps = 0\ntcp_latency_ps = 0\nswitch_ps = 369800\n"


@pytest.mark.slow
def test_a_degenerate_cache_is_measured_again_once(tmp_path):
    env = {"ACCL_CALIBRATION": "auto", "XDG_CACHE_HOME": str(tmp_path)}
    accl("info", "--calibrate", **env)
    (cache,) = (tmp_path / "torch-accl").iterdir()
    cache.write_text(DEGENERATE)
    first = accl("info", "--json", **env)
    constants = json.loads(first.stdout)["calibration"]["constants"]
    assert constants["shm_call_ps"] > 0 and constants["tcp_latency_ps"] > 0
    kept = cache.read_text()
    if kept == DEGENERATE:
        # A machine too busy to be measured replaces these constants by built-in ones and reports that.
        assert "shm_call_ps and tcp_latency_ps cannot be 0" in first.stderr
    else:
        assert json.loads(accl("info", "--json", **env).stdout)["calibration"]["constants"] == constants
        assert cache.read_text() == kept


def test_a_degenerate_file_that_the_user_named_is_used_unchanged_and_reported(tmp_path):
    (tmp_path / "machine.txt").write_text(DEGENERATE)
    ended = accl("info", "--json", ACCL_CALIBRATION=str(tmp_path / "machine.txt"))
    constants = json.loads(ended.stdout)["calibration"]["constants"]
    assert constants["shm_call_ps"] == constants["tcp_latency_ps"] == 0 and constants["switch_ps"] == 369800
    assert (tmp_path / "machine.txt").read_text() == DEGENERATE
    assert "machine.txt: shm_call_ps and tcp_latency_ps cannot be 0" in ended.stderr
    assert "run `accl info --calibrate` to measure again" in ended.stderr


@pytest.mark.slow
def test_info_overwrites_a_garbage_cache_and_measures_again_on_request(tmp_path):
    env = {"ACCL_CALIBRATION": str(tmp_path / "machine.txt")}
    (tmp_path / "machine.txt").write_text("garbage")
    assert json.loads(accl("info", "--json", **env).stdout)["calibration"]["source"] == "built in"
    measured = accl("info", "--calibrate", "--json", **env, status=0).stdout
    assert json.loads(measured)["calibration"]["source"] == str(tmp_path / "machine.txt")
    refused = accl("info", "--calibrate", status=1)
    assert "ACCL_CALIBRATION=off" in refused.stderr


@pytest.mark.slow
@pytest.mark.parametrize("connect_all", [False, True])
def test_info_under_a_launcher_shows_the_ranks_their_links_and_what_they_would_choose(connect_all):
    asked = ["--connect-all"] if connect_all else []

    def ended(*more):
        # Uses the variables that torchrun sets. torchrun itself would load torch for each rank.
        ranks = run_script(command_code(["info", *asked, *more]), world=6, timeout=60)
        assert [rank.exitcode for rank in ranks] == [0] * 6, ranks[0].stderr
        assert not any(rank.stdout for rank in ranks[1:])
        return ranks[0].stdout

    job = json.loads(ended("--json"))
    assert [rank["rank"] for rank in job["ranks"]] == list(range(6)) and len(
        {rank["pid"] for rank in job["ranks"]}
    ) == 6
    unlinked = [[link["rank"] for link in rank["links"] if link["link"] is None] for rank in job["ranks"]]
    # Without --connect-all only the link to the opposite rank may be missing; the barrier may have created it.
    assert (
        unlinked == [[]] * 6 if connect_all else all(far in ([], [(rank + 3) % 6]) for rank, far in enumerate(unlinked))
    )
    links = [link["link"] for rank in job["ranks"] for link in rank["links"] if link["link"] is not None]
    assert links and all(link.startswith(("shm", "tcp")) for link in links)
    known = {row["name"] for row in json.loads(accl("algorithms", "--json").stdout)}
    assert len(job["algorithms"]) == 5
    assert all(name in known for chosen in job["algorithms"].values() for name in chosen.values())
    shown = ended()
    assert shown.count("6 ranks, started by torchrun") == 1 and "all_to_all" in shown


@pytest.mark.slow
def test_info_starts_ranks_of_its_own_and_draws_where_each_may_run():
    from torch_accl_cli._job import show

    cores = len(os.sched_getaffinity(0))
    job = json.loads(accl("info", "--ranks", "2", "--json").stdout)
    assert [rank["rank"] for rank in job["ranks"]] == [0, 1] and all(rank["workers"] == 0 for rank in job["ranks"])
    assert all(rank["cores"] <= cores and rank["host_cores"] for rank in job["ranks"])
    shown = show(job)
    assert "cores by NUMA node" in shown and "  node 0  " in shown and "workers" in shown


def test_the_drawing_of_cores_has_a_line_a_node_and_a_mark_a_core():
    from torch_accl_cli._job import _drawing

    cores = [{"node": number // 40, "cpus": f"{number},{number + 80}"} for number in range(80)]
    cpus = {0: "0-19,80-99", 1: "20-39,100-119", 2: "40-79,120-159", 10: "60-79"}
    ranks = [{"rank": rank, "host": "a", "cpus": own, "host_cores": cores} for rank, own in cpus.items()]
    ranks.append(
        {"rank": 11, "host": "b", "cpus": "0", "host_cores": [{"node": 0, "cpus": "0"}, {"node": 0, "cpus": "1"}]}
    )
    marks = [" 0"] * 20 + [" 1"] * 20 + [" 2"] * 20 + [" *"] * 20
    assert _drawing(ranks)[1:] == [
        "a  node 0  " + " ".join(marks[:32]),
        "           " + " ".join(marks[32:40]),
        "a  node 1  " + " ".join(marks[40:72]),
        "           " + " ".join(marks[72:]),
        "b  node 0  11  .",
    ]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--ranks", "1"], "expected 2 or more"),
        (["--ranks", "2", "--calibrate"], "--calibrate: measures in one process"),
    ],
)
def test_ranks_that_info_cannot_start_are_refused(arguments, said):
    ended = accl("info", *arguments, status=2)
    assert said in ended.stderr and len(ended.stderr.splitlines()) == 1


def test_connect_all_needs_a_launcher():
    ended = accl("info", "--connect-all", status=2)
    assert "torchrun" in ended.stderr and len(ended.stderr.splitlines()) == 1
