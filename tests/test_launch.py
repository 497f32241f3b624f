"""One script under every launcher: ranks from the launcher's variables, and a rendezvous without an address.

`launchers/` contains the variables that launchers set, recorded from each launcher. A launcher that is installed is run
as well.
"""

import json
import os
import socket
import threading
import time
from pathlib import Path

import pytest
from support import BACKEND, launchers
from support.scripts import free_port, run_script, start_script
from torch_accl_launch import LaunchError, RankInfo, detect_launcher, jobs, meeting
from torch_accl_launch.launchers import expand, expand_counts

pytestmark = pytest.mark.skipif(BACKEND != "accl", reason="about this package only")

RECORDINGS = {
    path.stem: json.loads(path.read_text())["ranks"] for path in (Path(__file__).parent / "launchers").glob("*.json")
}

# Expected launcher name, then local rank and local world size of ranks 0, 1 and 2. A recording without ranks has
# `None`.
ON_ONE_HOST = [(0, 3), (1, 3), (2, 3)]
EXPECTED = {
    "intel": ("PMI", ON_ONE_HOST),
    "mpich": ("PMI", ON_ONE_HOST),
    "mpich_in_salloc": ("PMI", ON_ONE_HOST),
    # MPICH assigns ranks to the two hosts in turn.
    "mpich_two_hosts": ("PMI", [(0, 2), (0, 1), (1, 2)]),
    "openmpi": ("Open MPI", ON_ONE_HOST),
    "openmpi_in_salloc": ("Open MPI", ON_ONE_HOST),
    "openmpi_two_hosts": ("Open MPI", [(0, 2), (1, 2), (0, 1)]),
    "salloc": None,
    "sbatch": None,
    "srun_one_node": ("Slurm", ON_ONE_HOST),
    "srun_pmi2": ("PMI", [(0, 2), (1, 2), (0, 1)]),
    "srun_pmix": ("Slurm", ON_ONE_HOST),
    "srun_two_nodes": ("Slurm", [(0, 2), (1, 2), (0, 1)]),
    "torchrun": ("torchrun", ON_ONE_HOST),
    "torchrun_in_srun": ("torchrun", ON_ONE_HOST),
}


def summary(found: RankInfo) -> tuple:
    return found.launcher, found.rank, found.world, (found.local_rank, found.local_world)


@pytest.mark.parametrize("name", sorted(RECORDINGS))
def test_a_recorded_environment_gives_each_rank_its_place(name):
    found = [detect_launcher(environment) for environment in RECORDINGS[name]]
    if EXPECTED[name] is None:
        assert found == [None] * len(found)
        return
    launcher, local = EXPECTED[name]
    assert [summary(one) for one in found] == [(launcher, rank, 3, local[rank]) for rank in range(3)]
    assert all(one.is_on_one_host == (local == ON_ONE_HOST) for one in found)


@pytest.mark.parametrize("name", sorted(name for name, expected in EXPECTED.items() if expected))
def test_copies_of_a_launchers_rank_change_nothing(name):
    for environment in RECORDINGS[name]:
        before = detect_launcher(environment)
        copied = environment | {"RANK": str(before.rank), "WORLD_SIZE": str(before.world)}
        assert summary(detect_launcher(copied)) == summary(before)


def test_a_job_has_one_name_for_its_ranks_and_another_one_for_the_next():
    for name, launcher in {
        "openmpi": "Open MPI",
        "srun_one_node": "Slurm",
        "srun_pmi2": "PMI",
        "srun_pmix": "Slurm",
    }.items():
        assert len({jobs.job(launcher, environment) for environment in RECORDINGS[name]}) == 1
    first, second = (RECORDINGS[name][0] for name in ("srun_one_node", "srun_two_nodes"))
    assert jobs.job("Slurm", first) != jobs.job("Slurm", second)


def test_two_jobs_of_open_mpi_in_containers_with_equal_process_numbers_have_two_names():
    environment = RECORDINGS["openmpi"][0]
    servers = [{"PMIX_SERVER_URI2": f"1.0;tcp4://127.0.0.1:{port}"} for port in (55581, 42115)]
    assert len({jobs.job("Open MPI", environment | server) for server in servers}) == 2


def test_ranks_of_a_script_that_names_them_itself_have_no_job_of_the_launcher_around_them():
    assert jobs.job("torchrun", RECORDINGS["openmpi"][0]) is None


def test_a_launcher_that_a_rank_starts_counts_and_not_the_copies_of_that_ranks_numbers():
    outer, inner = RECORDINGS["srun_one_node"][0], RECORDINGS["openmpi"][2]
    outer = outer | {"SLURM_STEP_NUM_TASKS": "1", "SLURM_STEP_TASKS_PER_NODE": "1", "SLURM_TASKS_PER_NODE": "1"}
    copies = {"RANK": "0", "WORLD_SIZE": "1"}
    assert summary(detect_launcher(outer | copies | inner))[:3] == ("Open MPI", 2, 3)
    # If the script itself sets `RANK` and `WORLD_SIZE`, its values take precedence.
    assert summary(detect_launcher(outer | inner | {"RANK": "4", "WORLD_SIZE": "5"}))[:3] == ("torchrun", 4, 5)
    code = "import os, torch_accl; print(*[os.environ[name] for name in ('RANK', 'WORLD_SIZE', 'LOCAL_RANK', 'LOCAL_WORLD_SIZE')])"
    started = launchers.UNSET | outer | inner | copies | {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    (rank,) = run_script(code, 1, env=started)
    assert rank.stdout.split() == ["2", "3", "2", "3"], rank.stderr


def test_nested_mpi_launchers_are_refused_because_the_inner_one_is_unknown():
    both = RECORDINGS["openmpi"][0] | RECORDINGS["mpich"][1]
    with pytest.raises(
        LaunchError, match="OMPI_COMM_WORLD_RANK=0 and PMI_RANK=1 come from two nested launchers"
    ) as caught:
        detect_launcher(both)
    # The remedy helps in both directions.
    for outer, inner in (("OMPI_COMM_WORLD_RANK", "mpich"), ("PMI_RANK", "openmpi")):
        assert f"`env -u {outer} mpirun ...`" in str(caught.value)
        found = detect_launcher({name: value for name, value in both.items() if name != outer})
        assert summary(found) == summary(detect_launcher(RECORDINGS[inner][inner == "mpich"]))


def test_a_batch_script_that_a_rank_has_submitted_is_no_rank():
    names = ("SLURM_STEP_ID", "SLURM_STEP_NUM_TASKS", "SLURM_STEP_TASKS_PER_NODE")
    stale = {name: RECORDINGS["srun_two_nodes"][0][name] for name in names}
    assert detect_launcher(RECORDINGS["sbatch"][0] | stale) is None


MPI = {"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2"}
STEP = {"SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0", "SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "2"}


@pytest.mark.parametrize(
    ("environment", "said"),
    {
        "no_number": ({"PMI_RANK": "one", "PMI_SIZE": "2"}, ["PMI_RANK='one' is not a number"]),
        "beyond_the_world": ({"PMI_RANK": "2", "PMI_SIZE": "2"}, ["PMI_RANK=2", "PMI_SIZE=2"]),
        "two_ranks": (MPI | {"PMIX_RANK": "0"}, ["OMPI_COMM_WORLD_RANK=1", "PMIX_RANK=0", "contradict"]),
        "torchs_rank": (MPI | {"RANK": "0"}, ["RANK=0", "OMPI_COMM_WORLD_RANK=1", "contradict"]),
        "torchs_world": (MPI | {"WORLD_SIZE": "4"}, ["WORLD_SIZE=4", "OMPI_COMM_WORLD_SIZE=2", "contradict"]),
        "local_rank": (MPI | {"OMPI_COMM_WORLD_LOCAL_RANK": "1", "OMPI_COMM_WORLD_LOCAL_SIZE": "1"}, ["LOCAL_RANK=1"]),
        "local_world": (MPI | {"OMPI_COMM_WORLD_LOCAL_SIZE": "3"}, ["OMPI_COMM_WORLD_LOCAL_SIZE=3", "SIZE=2"]),
    }.values(),
    ids=lambda value: "" if isinstance(value, dict) else None,
)
def test_what_contradicts_within_a_family_is_named(environment, said):
    with pytest.raises(LaunchError) as raised:
        detect_launcher(environment)
    text = str(raised.value)
    assert all(part in text for part in said) and "set" in text and "\n" not in text


@pytest.mark.parametrize(
    "environment",
    [
        {},
        {"RANK": "0"},
        {"WORLD_SIZE": "2"},
        {"PMI_RANK": "0"},
        {"PMIX_RANK": "0", "PMIX_NAMESPACE": "x"},
        # Step IDs of an interactive salloc shell, of a batch script, and an empty one.
        STEP | {"SLURM_STEP_ID": str(0xFFFFFFFA)},
        STEP | {"SLURM_STEP_ID": str(0xFFFFFFFB)},
        STEP | {"SLURM_STEP_ID": ""},
    ],
    ids=str,
)
def test_half_a_family_is_no_launcher(environment):
    assert detect_launcher(environment) is None


def test_another_familys_numbers_contradict_nothing():
    assert summary(detect_launcher(STEP | MPI)) == ("Open MPI", 1, 2, (None, None))
    assert summary(detect_launcher(STEP | MPI | {"RANK": "3", "WORLD_SIZE": "5"})) == ("torchrun", 3, 5, (None, None))


def test_lists_of_hosts_and_counts_are_read_as_slurm_writes_them():
    assert expand("a1") == ["a1"]
    assert expand("a[1-3,07],b,c[09-11]-x") == ["a1", "a2", "a3", "a07", "b", "c09-x", "c10-x", "c11-x"]
    assert expand("r[1-2]n[1,3]") == ["r1n1", "r1n3", "r2n1", "r2n3"]
    assert expand("") == []
    assert expand_counts("2(x3),1") == [2, 2, 2, 1]
    assert expand_counts("4") == [4] and expand_counts("2(y)") == []


SUM = """
import os, torch, torch_accl
import torch.distributed as dist
for _ in range(2):
    dist.init_process_group("accl")
    tensor = torch.tensor([dist.get_rank() + 1.0])
    dist.all_reduce(tensor)
    dist.destroy_process_group()
names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
# A single write: several ranks share the pipe.
said = [*(os.environ[name] for name in names), str(tensor.item()), os.environ.get("MASTER_ADDR") or "no address"]
os.write(1, (" ".join(said) + chr(10)).encode())
"""


# Job identifiers that no other job on this machine has.
ALONE = {"PMIX_NAMESPACE": str(os.getpid()), "SLURM_JOB_ID": str(os.getpid())}


def by_name(environments: list[dict[str, str]], **others: str) -> dict[str, list[str]]:
    """Returns environment variables as `run_script` takes them: for each name, a list with one value per rank."""
    names = set().union(launchers.UNSET, *environments, others)
    whole = [launchers.UNSET | environment | others for environment in environments]
    return {name: [one.get(name, "") for one in whole] for name in names}


@pytest.mark.parametrize(
    "name",
    sorted(
        name
        for name, expected in EXPECTED.items()
        if expected and expected[1] == ON_ONE_HOST and "torchrun" not in name
    ),
)
def test_ranks_of_one_host_meet_without_an_address_again_and_again(name):
    ranks = run_script(SUM, 3, env=by_name(RECORDINGS[name], **ALONE))
    assert [rank.exitcode for rank in ranks] == [0] * 3, "\n".join(rank.stderr for rank in ranks)
    for number, rank in enumerate(ranks):
        assert rank.stdout == f"{number} 3 {number} 3 6.0 no address\n"


@pytest.mark.slow
@pytest.mark.parametrize("has_port", [False, True], ids=["", "port"])
@pytest.mark.parametrize("name", ["srun_two_nodes", "srun_pmi2"])
def test_ranks_of_a_step_on_several_nodes_meet_on_its_first_again_and_again(name, has_port):
    # The ranks meet on the first node, so this machine must be able to resolve its name.
    others = {"SLURM_STEP_NODELIST": "localhost,a2"} | ({"MASTER_PORT": str(free_port())} if has_port else {})
    ranks = run_script(SUM, 3, env=by_name(RECORDINGS[name], **ALONE, **others))
    assert [rank.exitcode for rank in ranks] == [0] * 3, "\n".join(rank.stderr for rank in ranks)
    assert [rank.stdout.split()[4] for rank in ranks] == ["6.0"] * 3


REFUSED = """
import torch_accl, sys
import torch.distributed as dist
from datetime import timedelta
try:
    dist.init_process_group("accl", timeout=timedelta(seconds={seconds}){more})
except Exception as error:
    print(type(error).__name__, isinstance(error, ValueError), error, file=sys.stderr)
    sys.exit(3)
"""


def refusal(environments: list[dict[str, str]], seconds: float = 20, more: str = "", **others: str) -> list[str]:
    """Runs ranks that must be refused and returns the last line that each prints on standard error."""
    code = REFUSED.format(seconds=seconds, more=more and f", {more}")
    ranks = run_script(code, len(environments), env=by_name(environments, **others))
    assert [rank.exitcode for rank in ranks] == [3] * len(ranks), "\n".join(rank.stdout + rank.stderr for rank in ranks)
    return [rank.stderr.strip().splitlines()[-1] for rank in ranks]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["mpich_two_hosts", "openmpi_two_hosts"])
def test_ranks_on_several_hosts_that_no_launcher_names_are_asked_for_an_address(name):
    for text in refusal(RECORDINGS[name]):
        assert text.startswith("LaunchError True") and "set MASTER_ADDR to the host of rank 0 and MASTER_PORT" in text
        assert ("Open MPI" in text) == ("openmpi" in name)


@pytest.mark.slow
def test_a_rank_or_a_world_that_was_given_and_is_not_the_launchers_is_named():
    (text,) = refusal([MPI], more="rank=0, world_size=2")
    assert "rank=0" in text and "RANK is 1" in text
    (text,) = refusal([MPI], more="rank=1, world_size=3")
    assert "world_size=3" in text and "SIZE is 2" in text


@pytest.mark.slow
def test_who_waits_for_a_rank_that_does_not_come_says_which_one():
    alone = {"OMPI_COMM_WORLD_LOCAL_SIZE": "2", "PMIX_NAMESPACE": f"alone-{os.getpid()}"}
    (text,) = refusal([MPI | alone | {"OMPI_COMM_WORLD_RANK": "0"}], seconds=1)
    assert text.startswith("TimeoutError") and "rank 1 of 2 did not join" in text and "MASTER_ADDR" in text
    (text,) = refusal([MPI | alone], seconds=1)
    assert text.startswith("TimeoutError") and "rank 0 did not join the rendezvous" in text


@pytest.mark.slow
def test_an_occupied_port_is_named():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        (text,) = refusal([MPI | {"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "1"}], MASTER_PORT=port)
    assert f"port {port}" in text and "MASTER_PORT" in text
    (text,) = refusal([MPI | {"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "1"}], MASTER_PORT="many")
    assert "MASTER_PORT='many' is not a port" in text


@pytest.mark.slow
def test_the_port_of_another_slurm_job_is_refused():
    from torch._C._distributed_c10d import TCPStore

    port = free_port()
    store = TCPStore("localhost", port, None, True, wait_for_workers=False)
    store.set("torch_accl/job", "slurm-6.0/3")
    (text,) = refusal([RECORDINGS["srun_two_nodes"][1]], SLURM_STEP_NODELIST="localhost,a2", MASTER_PORT=str(port))
    assert "another job" in text and "slurm-6.0" in text and str(port) in text
    (text,) = refusal([RECORDINGS["srun_two_nodes"][0]], SLURM_STEP_NODELIST="localhost,a2", MASTER_PORT=str(port))
    assert f"rank 0 cannot listen on port {port}" in text


@pytest.mark.slow
def test_a_second_program_of_a_slurm_step_does_not_meet_the_first_ones_store():
    code = """
import os, time, torch, torch_accl
import torch.distributed as dist
dist.init_process_group("accl")
tensor = torch.ones(1)
dist.all_reduce(tensor)
dist.destroy_process_group()
print(tensor.item(), flush=True)
# Rank 0 of the first program is still busy while rank 1 runs the second program.
if os.environ["SLURM_PROCID"] == "0" and os.environ["TAIL"]:
    time.sleep(2)
"""
    of_two = {"SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_TASKS_PER_NODE": "1(x2)", "SLURM_TASKS_PER_NODE": "1(x2)"}
    port = str(free_port())

    def begin(rank: int, tail: str):
        own = RECORDINGS["srun_two_nodes"][rank] | of_two | {"SLURM_NODEID": str(rank), "SLURM_LOCALID": "0"}
        others = {"SLURM_STEP_NODELIST": "localhost,a2", "MASTER_PORT": port, "TAIL": tail}
        return start_script(code, 1, env=launchers.UNSET | own | others)[0]

    first = [begin(rank, "1") for rank in range(2)]
    assert first[1].wait() == 0, first[1].stderr
    ahead = begin(1, "")
    assert first[0].wait() == 0, first[0].stderr
    second = [begin(0, ""), ahead]
    for rank in [*first, *second]:
        assert rank.wait() == 0, rank.stderr
        assert rank.stdout.strip() == "2.0"


@pytest.mark.slow
def test_a_store_without_a_name_at_the_port_of_a_slurm_job_is_not_waited_for():
    from torch._C._distributed_c10d import TCPStore

    port = free_port()
    _store = TCPStore("localhost", port, None, True, wait_for_workers=False)
    start = time.monotonic()
    others = {"SLURM_STEP_NODELIST": "localhost,a2", "MASTER_PORT": str(port)}
    (text,) = refusal([RECORDINGS["srun_two_nodes"][1]], seconds=60, **others)
    assert "belongs to another job (a store without a name" in text and time.monotonic() - start < 40


@pytest.mark.slow
def test_with_an_address_torchs_own_handler_serves_whatever_a_script_calls_its_ranks():
    code = """
import os, torch, torch_accl
import torch.distributed as dist
rank = int(os.environ["GIVEN"])
dist.init_process_group("accl", rank=rank, world_size=2)
tensor = torch.ones(1)
dist.all_reduce(tensor)
dist.destroy_process_group()
print(tensor.item())
"""
    # This is the situation of mp.spawn in the single task of `srun -n 1`.
    one = MPI | {"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "1"}
    address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    ranks = run_script(code, 2, env=by_name([one | {"GIVEN": "0"}, one | {"GIVEN": "1"}], **address))
    assert [rank.stdout.strip() for rank in ranks] == ["2.0"] * 2, "\n".join(rank.stderr for rank in ranks)


@pytest.mark.slow
def test_without_a_launcher_an_import_changes_nothing():
    code = """
import os
import torch.distributed, importlib
handlers = importlib.import_module("torch.distributed.rendezvous")._rendezvous_handlers
for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
    del os.environ[name]
before = dict(os.environ), dict(handlers)
import torch_accl
print((dict(os.environ), dict(handlers)) == before)
"""
    (rank,) = run_script(code, 1)
    assert rank.stdout.strip() == "True", rank.stderr


def ranks_of(world: int) -> list[RankInfo]:
    return [RankInfo("PMI", rank, world, rank, world) for rank in range(world)]


def fetching(answers: list, *meetings: meeting.Meeting) -> list[threading.Thread]:
    """Starts one thread per meeting, in which a rank asks for the port. Each thread appends the answer, or the error
    text, to `answers`.
    """

    def ask(one: meeting.Meeting) -> None:
        try:
            answers.append(one.fetch_port())
        except (LaunchError, TimeoutError) as error:
            answers.append(str(error))

    threads = [threading.Thread(target=ask, args=(one,)) for one in meetings]
    for thread in threads:
        thread.start()
    return threads


def test_a_meeting_survives_who_comes_with_nonsense_and_serves_each_rank_once():
    job, deadline, answers = f"test-{os.getpid()}", time.monotonic() + 20, []
    host, *others = [meeting.Meeting(one, job, 0, deadline) for one in ranks_of(3)]
    with host.open() as listener:
        for words in (b"", b"{}\n", b"[1]\n", b"nonsense\n", b'{"rank": "x", "world": 3}\n', b"half a li"):
            with socket.socket(socket.AF_UNIX) as stranger:
                stranger.connect(listener.getsockname())
                stranger.sendall(words)
        with pytest.raises(LaunchError, match="another process has opened it as rank 0 of this job"):
            meeting.Meeting(ranks_of(3)[0], job, 0, deadline).open()
        threads = fetching(answers, *others)
        host.serve_port(listener, 4711)
        for thread in threads:
            thread.join()
    assert answers == [4711, 4711]


def test_who_comes_when_all_have_met_is_of_another_job_and_waits_for_its_own_rank_0():
    job, deadline, answers = f"late-{os.getpid()}", time.monotonic() + 20, []
    host, other = [meeting.Meeting(one, job, 0, deadline) for one in ranks_of(2)]
    with host.open() as listener:
        (thread,) = fetching(answers, other)
        host.serve_port(listener, 4711)
        thread.join()
        late = meeting.Meeting(ranks_of(2)[1], job, 0, time.monotonic() + 0.5)
        (thread,) = fetching(answers, late)
        thread.join()
        with pytest.raises(LaunchError, match="another process has opened it as rank 0"):
            meeting.Meeting(ranks_of(2)[0], job, 0, deadline).open()
    assert answers[0] == 4711 and "rank 0 did not join the rendezvous" in answers[1]


def test_more_ranks_than_the_queue_has_room_for_all_meet():
    world, answers = 64, []
    job, deadline = f"many-{os.getpid()}", time.monotonic() + 30
    host, *others = [meeting.Meeting(one, job, 0, deadline) for one in ranks_of(world)]
    with host.open() as listener:
        listener.listen(1)
        threads = fetching(answers, *others)
        host.serve_port(listener, 4711)
        for thread in threads:
            thread.join()
    assert answers == [4711] * (world - 1)


OTHER_IDEAS = {
    "world": "rank 1 has world size 2, rank 0 has world size 3",
    "program": "rank 1 runs /b.py, rank 0 runs /a.py",
}


@pytest.mark.parametrize("what", sorted(OTHER_IDEAS))
def test_ranks_with_different_jobs_fail_on_both_sides(what, monkeypatch):
    job, deadline, answers = f"{what}-{os.getpid()}", time.monotonic() + 20, []
    programs = {"MainThread": "/a.py"} if what == "program" else {}
    monkeypatch.setattr(meeting, "program", lambda: programs.get(threading.current_thread().name, "/b.py"))
    host = meeting.Meeting(ranks_of(3)[0], job, 0, deadline)
    with host.open() as listener:
        (thread,) = fetching(answers, meeting.Meeting(ranks_of(2 if what == "world" else 3)[1], job, 0, deadline))
        with pytest.raises(LaunchError, match=OTHER_IDEAS[what]):
            host.serve_port(listener, 4711)
        thread.join()
    assert OTHER_IDEAS[what] in answers[0]


def test_a_job_may_have_a_name_of_any_length():
    long = meeting.Meeting(ranks_of(1)[0], "prterun-" + "host." * 60 + "-1@1", 0, time.monotonic() + 20)
    long.open().close()


@pytest.mark.parametrize("name", sorted(launchers.COMMANDS))
def test_a_script_runs_under_a_launcher_that_is_installed(name, tmp_path):
    ended = launchers.run_under(name, SUM, 3, tmp_path)
    assert ended.returncode == 0, ended.stderr
    assert sorted(ended.stdout.splitlines()) == [f"{rank} 3 {rank} 3 6.0 no address" for rank in range(3)]
