"""The transport `mpi`: whole jobs under mpirun, over the MPI library for which the package was built.

`make test-mpi` builds the package for each library and lists the builds in ACCL_TEST_MPI: `name=mpirun:folder,...`.
Every job is a process tree of its own, and every test waits for one job at most.
"""

import json
import os
import subprocess
import sys
import textwrap
import time
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import pytest
from support import BACKEND

pytestmark = pytest.mark.skipif(BACKEND != "accl", reason="about this package only")

# Open MPI's mpirun refuses to run as root without these variables.
ROOT_MAY = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
LIMIT_S = 90
# Prefix of the lines that ranks print for their test. Libraries print to the same stream.
SAID = "said: "


@dataclass
class Library:
    """An MPI library, its launcher, and the folder with the package that was built for it."""

    name: str
    mpirun: str
    folder: str

    def launch(self, world: int) -> list[str]:
        """Returns the command that starts `world` ranks of the program that follows it. This suite has more ranks than
        cores.
        """
        options = ["--oversubscribe", "--bind-to", "none"] if self.name == "openmpi" else []
        return [self.mpirun, *options, "-n", str(world)]

    def shared_object(self) -> str:
        return {"openmpi": "libmpi.so.40", "mpich": "libmpich.so.12"}[self.name]


def libraries() -> list[Library]:
    text = os.environ.get("ACCL_TEST_MPI", "")
    found = []
    for part in filter(None, text.split(",")):
        name, _, rest = part.partition("=")
        mpirun, _, folder = rest.partition(":")
        found.append(Library(name, mpirun, folder))
    return found


@pytest.fixture(params=libraries() or [None], ids=lambda library: library.name if library else "none")
def library(request):
    if request.param is None:
        pytest.skip("ACCL_TEST_MPI names no MPI library: make test-mpi builds the transport and sets it")
    return request.param


@dataclass
class Job:
    status: int
    stdout: str
    stderr: str
    seconds: float

    def said(self) -> list:
        """Returns the objects that ranks have printed as JSON, in no particular order."""
        return [json.loads(line.removeprefix(SAID)) for line in self.stdout.splitlines() if line.startswith(SAID)]

    def check(self) -> "Job":
        assert self.status == 0, f"status {self.status}\n{self.stdout}\n{self.stderr}"
        return self


PRELUDE = """
import json, os, signal, sys, time
import torch
import torch.distributed as dist
import torch_accl

def say(what):
    # A single write: ranks share the pipe.
    os.write(1, ("said: " + json.dumps(what) + "\\n").encode())

def backend():
    return dist.group.WORLD._get_backend(torch.device("cpu"))
"""


def run(library: Library, code: str, world: int = 2, launch: list[str] | None = None, **env: str) -> Job:
    """Runs a script on `world` ranks of one job."""
    command = launch if launch is not None else library.launch(world)
    # The job must not inherit the launcher and package variables of this process.
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(("OMPI_", "PMI", "ACCL_"))}
    paths = os.pathsep.join(filter(None, [library.folder, os.environ.get("PYTHONPATH")]))
    begin = time.monotonic()
    ended = subprocess.run(
        [*command, sys.executable, "-c", PRELUDE + textwrap.dedent(code)],
        env={**inherited, **ROOT_MAY, "PYTHONPATH": paths, "ACCL_TRANSPORTS": "mpi", **env},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
    )
    return Job(ended.returncode, ended.stdout, ended.stderr, time.monotonic() - begin)


ALL_COLLECTIVES = """
dist.init_process_group("accl")
rank, world = dist.get_rank(), dist.get_world_size()
for count in (0, 1, 7, 1000, 65_537, 1_500_000):
    values = torch.arange(count, dtype=torch.float32) + rank
    dist.all_reduce(values)
    assert torch.equal(values, world * torch.arange(count, dtype=torch.float32) + sum(range(world))), count
pieces = [torch.empty(5) for _ in range(world)]
dist.all_gather(pieces, torch.full((5,), float(rank)))
assert [piece[0].item() for piece in pieces] == list(range(world))
sent = torch.arange(4.0 * world) + 100 * rank
got = torch.empty_like(sent)
dist.all_to_all_single(got, sent)
assert [got[4 * peer].item() for peer in range(world)] == [100.0 * peer + 4 * rank for peer in range(world)]
if rank == 0:
    for peer in range(1, world):
        dist.send(torch.full((300_000,), float(peer)), peer, tag=3)
else:
    values = torch.empty(300_000)
    dist.recv(values, 0, tag=3)
    assert values.eq(rank).all()
group = dist.new_group([0, world - 1])
if rank in (0, world - 1):
    values = torch.ones(10)
    dist.all_reduce(values, group=group)
    assert values.eq(len({0, world - 1})).all()
works = [dist.all_reduce(torch.ones(1 << size), async_op=True) for size in range(18)]
for work in works:
    work.wait()
text = backend().describe()
# No rank leaves the group before this barrier.
dist.barrier()
dist.destroy_process_group()
say({"rank": rank, "describe": text})
"""


@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("level", ["multiple", "serialized", "funneled"])
def test_collectives_over_mpi_are_right_at_every_level_of_thread_support(library, world, level):
    job = run(library, ALL_COLLECTIVES, world, ACCL_MPI_THREAD_LEVEL=level).check()
    said = job.said()
    assert sorted(each["rank"] for each in said) == list(range(world))
    assert all(": mpi, " in each["describe"] for each in said), said
    # UCX warns about messages that no rank has received, Open MPI about requests that are left.
    assert "WARN" not in job.stdout + job.stderr, job.stdout + job.stderr


def test_groups_come_and_go_in_one_process_though_mpi_cannot_start_twice(library):
    job = run(
        library,
        """
        for turn in range(3):
            dist.init_process_group("accl")
            values = torch.ones(10)
            dist.all_reduce(values)
            assert values.eq(2).all()
            dist.destroy_process_group()
        import torch_accl_mpi
        found = torch_accl_mpi.job()
        say([found.rank, found.size, found.thread_level, found.is_shared])
        """,
    ).check()
    assert sorted(job.said()) == [[0, 2, "multiple", False], [1, 2, "multiple", False]]


def test_compressed_calls_travel_over_mpi(library):
    job = run(
        library,
        """
        dist.init_process_group("accl")
        values = torch.randn(1_000_000, generator=torch.Generator().manual_seed(dist.get_rank()))
        exact = values.clone()
        dist.all_reduce(exact)
        group = dist.new_group(pg_options=torch_accl.Options(compression="maxmin:8", compressed_calls="all"))
        dist.all_reduce(values, group=group)
        error = (values - exact).abs().max().item()
        digest = values.sum().item()
        dist.destroy_process_group()
        say([error, digest])
        """,
    ).check()
    (first, one), (_, other) = job.said()
    assert 0 < first < 0.2 and one == other


def test_idle_ranks_use_no_processor_and_are_woken(library):
    job = run(
        library,
        """
        dist.init_process_group("accl")
        dist.all_reduce(torch.ones(1))
        time.sleep(0.2)
        if dist.get_rank() == 1:
            # Meanwhile rank 0 sleeps in the all_reduce below.
            time.sleep(1.0)
        before = time.process_time()
        dist.all_reduce(torch.ones(1))
        spent = time.process_time() - before
        before = time.process_time()
        time.sleep(1.0)
        idle = time.process_time() - before
        rank = dist.get_rank()
        dist.destroy_process_group()
        say({"rank": rank, "waiting": spent, "idle": idle})
        """,
    ).check()
    for each in job.said():
        assert each["idle"] < 0.05, each
        assert each["waiting"] < 0.3, each


def test_a_rank_that_is_killed_is_named_by_the_others(library):
    if library.name == "mpich":
        pytest.skip("hydra kills the others within milliseconds, so nobody is left to say anything")
    job = run(
        library,
        """
        dist.init_process_group("accl")
        dist.all_reduce(torch.ones(10))
        if dist.get_rank() == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        before = time.monotonic()
        try:
            dist.all_reduce(torch.ones(1000))
        except dist.DistNetworkError as error:
            say([time.monotonic() - before, str(error)])
            raise
        """,
    )
    assert job.status != 0
    [(seconds, text)] = job.said()
    assert "rank 1" in text and "closed the link or died" in text, text
    assert seconds < 5
    assert job.seconds < 60


def test_a_rank_that_leaves_in_good_order_while_others_call_is_no_hang(library):
    job = run(
        library,
        """
        dist.init_process_group("accl")
        dist.all_reduce(torch.ones(10))
        if dist.get_rank() == 1:
            sys.exit(0)
        try:
            dist.all_reduce(torch.ones(1000))
        except dist.DistNetworkError as error:
            say(str(error))
        """,
    ).check()
    assert "rank 1" in job.stdout and "has left the group" in job.stdout, job.stdout
    assert job.seconds < 60


def test_a_process_whose_peers_do_not_end_gives_up_after_the_time_it_has(library):
    job = run(
        library,
        """
        dist.init_process_group("accl")
        dist.all_reduce(torch.ones(10))
        rank = dist.get_rank()
        dist.destroy_process_group()
        if rank == 1:
            time.sleep(30)
        """,
        ACCL_MPI_EXIT_TIMEOUT="2",
    )
    assert job.status != 0
    assert "MPI_Finalize was given up: not all processes of the MPI job reached their exit" in job.stderr
    assert job.seconds < 25


SHARED = """
import ctypes, json, os
mpi = ctypes.CDLL({library!r}, mode=ctypes.RTLD_GLOBAL)
provided = ctypes.c_int(-1)
mpi.MPI_Init_thread(None, None, {level}, ctypes.byref(provided))
"""
# Thread levels, which mpi.h of each library numbers alike.
SERIALIZED, MULTIPLE = 2, 3


def run_shared(library: Library, level: int, code: str, world: int = 2, **env: str) -> Job:
    """Runs, like `run`, a script that has started MPI itself. In it, `mpi` is the library and `provided` the thread
    level that MPI granted.
    """
    return run(
        library, SHARED.format(library=library.shared_object(), level=level) + textwrap.dedent(code), world, **env
    )


def test_an_mpi_that_the_script_has_started_is_shared_and_left_to_it(library):
    job = run_shared(
        library,
        MULTIPLE,
        """
        dist.init_process_group("accl")
        values = torch.ones(1000)
        dist.all_reduce(values)
        assert values.eq(2).all()
        import torch_accl_mpi
        assert torch_accl_mpi.job().is_shared
        dist.destroy_process_group()
        finalized = ctypes.c_int(-1)
        mpi.MPI_Finalized(ctypes.byref(finalized))
        assert finalized.value == 0
        assert mpi.MPI_Finalize() == 0
        say(["ended"])
        """,
    ).check()
    assert job.said() == [["ended"]] * 2 and "WARN" not in job.stdout + job.stderr, job.stdout + job.stderr


def test_ranks_of_a_communicator_have_frames_of_their_own_while_others_do_something_else(library, tmp_path):
    """Simulates `mpirun -n 1 sim : -n 2 python train.py` in one script: rank 0 only takes part in splitting the
    communicator.
    """
    meeting = tmp_path / "meeting"
    job = run_shared(
        library,
        MULTIPLE,
        """
        import pickle
        if LIBRARY == "openmpi":
            mpi.MPI_Comm_f2c.restype = Handle = ctypes.c_void_p
            whole = Handle(mpi.MPI_Comm_f2c(0))
        else:
            # Handles of MPICH are integers, the same as in Fortran.
            Handle = ctypes.c_int
            whole = Handle(0x44000000)
        rank = ctypes.c_int()
        mpi.MPI_Comm_rank(whole, ctypes.byref(rank))
        part = Handle()
        mpi.MPI_Comm_split(whole, int(rank.value > 0), rank, ctypes.byref(part))

        class Part:
            def Get_rank(self):
                return rank.value - 1

            def Get_size(self):
                return 2

            def py2f(self):
                return mpi.MPI_Comm_c2f(part) if LIBRARY == "openmpi" else part.value

            def bcast(self, obj, root=0):
                # Through a file: this test is not about broadcasts.
                if self.Get_rank() == root:
                    with open(MEET + ".new", "wb") as file:
                        pickle.dump(obj, file)
                    os.rename(MEET + ".new", MEET)
                    return obj
                while not os.path.exists(MEET):
                    time.sleep(0.01)
                with open(MEET, "rb") as file:
                    return pickle.load(file)

        if rank.value > 0:
            torch_accl.init_from_mpi(Part())
            values = torch.full((1000,), float(rank.value))
            dist.all_reduce(values)
            import torch_accl_mpi
            found = torch_accl_mpi.job()
            say([values[0].item(), found.rank, found.size, ": mpi, " in backend().describe()])
            dist.destroy_process_group()
        mpi.MPI_Finalize()
        """.replace("LIBRARY", repr(library.name)).replace("MEET", repr(str(meeting))),
        3,
    ).check()
    assert sorted(job.said()) == [[3.0, 0, 2, True], [3.0, 1, 2, True]]


def test_an_mpi_that_the_script_finalises_too_early_is_an_error_and_no_crash(library):
    job = run_shared(
        library,
        MULTIPLE,
        """
        dist.init_process_group("accl")
        dist.all_reduce(torch.ones(10))
        dist.barrier()
        mpi.MPI_Finalize()
        try:
            dist.all_reduce(torch.ones(10))
        except dist.DistError as error:
            say([str(error)])
        """,
    ).check()
    texts = [text for [text] in job.said()]
    assert len(texts) == 2 and any("MPI was finalised by the code that started it" in text for text in texts), texts


@pytest.mark.parametrize("exclusive", ["0", "1"])
def test_an_mpi_at_a_lower_level_is_shared_only_on_the_users_word(library, exclusive):
    job = run_shared(
        library,
        SERIALIZED,
        """
        if provided.value != 2:
            say({"provided": provided.value})
            mpi.MPI_Finalize()
            sys.exit(0)
        try:
            dist.init_process_group("accl")
            dist.all_reduce(torch.ones(10))
            dist.destroy_process_group()
            say({"error": None})
        except dist.DistBackendError as error:
            say({"error": str(error)})
        mpi.MPI_Finalize()
        """,
        ACCL_MPI_EXCLUSIVE=exclusive,
    ).check()
    for each in job.said():
        if "provided" in each:
            pytest.skip(f"{library.name} provides level {each['provided']} where level 2 was asked for")
        if exclusive == "1":
            assert each["error"] is None
        else:
            assert "mpi4py.rc.thread_level" in each["error"] and "ACCL_MPI_EXCLUSIVE=1" in each["error"]


@pytest.mark.parametrize("transports", ["mpi", "shm,tcp"])
@pytest.mark.parametrize("level", ["multiple", "funneled"])
def test_ranks_of_several_hosts_learn_by_mpi_where_rank_0_is(library, transports, level):
    """Each rank appears to be alone on its host. These launchers report nothing else about hosts."""
    apart = (
        "OMPI_COMM_WORLD_LOCAL_SIZE=1 OMPI_COMM_WORLD_LOCAL_RANK=0 MPI_LOCALNRANKS=1 MPI_LOCALRANKID=0 "
        'PMIX_LOCAL_RANK=0 exec "$@"'
    )
    launch = [*library.launch(3), "sh", "-c", apart, "sh"]
    job = run(
        library,
        """
        for turn in range(2):
            dist.init_process_group("accl")
            values = torch.ones(10)
            dist.all_reduce(values)
            dist.destroy_process_group()
            say([turn, values[0].item(), os.environ["LOCAL_WORLD_SIZE"], "MASTER_ADDR" in os.environ])
        """,
        launch=launch,
        ACCL_TRANSPORTS=transports,
        ACCL_MPI_THREAD_LEVEL=level,
    ).check()
    assert sorted(job.said()) == sorted([[turn, 3.0, "1", False] for turn in range(2)] * 3)


def test_a_job_without_mpirun_is_refused_with_the_reason(library):
    launch = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--no-python"]
    job = run(library, 'dist.init_process_group("accl")', launch=launch)
    assert job.status != 0
    assert "sees a job of 1 where the launcher has started 2" in job.stderr
    assert "DistBackendError" in job.stderr and "mpirun" in job.stderr


def test_an_mpi_library_that_is_not_the_launchers_is_refused_with_the_reason(library):
    others = [other for other in libraries() if other.name != library.name]
    if not others:
        pytest.skip("only one MPI library is tested")
    mixed = Library(library.name, library.mpirun, others[0].folder)
    job = run(mixed, 'dist.init_process_group("accl")')
    assert job.status != 0
    assert "sees a job of 1 where the launcher has started 2" in job.stderr
    assert "mpicc that belongs to the launcher" in job.stderr


@pytest.mark.parametrize("how", ["fork", "spawn"])
def test_a_child_of_a_rank_has_no_place_in_the_job(library, how, tmp_path):
    """The child has inherited all variables that name a rank in the job. Frames that it sent would count as the rank's
    own.
    """
    script = tmp_path / "child.py"
    script.write_text(
        PRELUDE
        + textwrap.dedent(
            """
            import torch.multiprocessing as mp

            def child():
                store = dist.TCPStore("127.0.0.1", 0, 1, True)
                try:
                    dist.init_process_group("accl", store=store, rank=0, world_size=1)
                    say("a group")
                except dist.DistBackendError as error:
                    say(str(error))

            if __name__ == "__main__":
                dist.init_process_group("accl")
                dist.all_reduce(torch.ones(10))
                context = mp.get_context(sys.argv[1])
                if sys.argv[1] == "fork":
                    if os.fork() == 0:
                        # The child has a copy of the parent's torch, but not the parent's group.
                        import torch_accl_mpi
                        try:
                            torch_accl_mpi.transport()
                        except RuntimeError as error:
                            say(str(error))
                        os._exit(0)
                    os.wait()
                else:
                    process = context.Process(target=child)
                    process.start()
                    process.join()
                values = torch.ones(10)
                dist.all_reduce(values)
                assert values.eq(2).all()
                dist.destroy_process_group()
                say("well")
            """
        )
    )
    job = run(
        library, f"import runpy; sys.argv = ['child.py', {how!r}]; runpy.run_path({str(script)!r}, run_name='__main__')"
    ).check()
    said = job.said()
    assert said.count("well") == 2, said
    refused = [text for text in said if text != "well"]
    assert len(refused) == 2 and all("which already has its rank in the MPI job" in text for text in refused), said


def test_a_forked_child_makes_no_links_over_its_parents_mpi(library):
    job = run(
        library,
        """
        from datetime import timedelta
        dist.init_process_group("accl")
        dist.all_reduce(torch.ones(10))
        rank = dist.get_rank()
        store = dist.TCPStore("127.0.0.1", 0, None, True) if rank == 0 else None
        port = [store.port if rank == 0 else None]
        dist.broadcast_object_list(port)
        if os.fork() == 0:
            from torch_accl import _register
            class Group:
                pass
            group = Group()
            group.store = dist.TCPStore("127.0.0.1", port[0], None, False)
            group.group_rank, group.group_size = rank, 2
            group.timeout, group.group_id, group.global_ranks_in_group = timedelta(seconds=10), "children", []
            try:
                _register.create_backend(group, None).allreduce([torch.ones(10)]).wait()
                say("a group")
            except Exception as error:
                say(type(error).__name__ + ": " + str(error))
            os._exit(0)
        for turn in range(50):
            values = torch.full((1000,), float(turn))
            dist.all_reduce(values)
            assert values.eq(2 * turn).all()
        os.wait()
        dist.destroy_process_group()
        say("well")
        """,
    ).check()
    said = job.said()
    assert said.count("well") == 2 and "a group" not in said, said


def test_a_rank_that_sleeps_is_woken_by_one_that_makes_no_further_call(library):
    """The frame may cross the receiver's message that it is asleep."""
    job = run(
        library,
        """
        dist.init_process_group("accl")
        rank = dist.get_rank()
        store = dist.distributed_c10d._get_default_store()
        dist.all_reduce(torch.zeros(1))
        for turn in range(20):
            # Odd turns: longer than a rank polls before it sleeps. Even turns: sometimes about as long.
            time.sleep(0.05 if turn % 2 else 0.0002 * turn)
            if rank == 0:
                dist.send(torch.ones(1), 1)
                store.wait([f"got {turn}"])
            else:
                time.sleep(0.0001 * turn)
                dist.recv(torch.zeros(1), 0)
                store.set(f"got {turn}", "")
        dist.destroy_process_group()
        say("well")
        """,
    ).check()
    assert job.said() == ["well"] * 2
    assert job.seconds < 60


def test_a_rank_that_ends_waits_for_one_that_has_more_to_do(library):
    job = run(
        library,
        """
        dist.init_process_group("accl")
        dist.all_reduce(torch.ones(10))
        rank = dist.get_rank()
        dist.destroy_process_group()
        if rank == 0:
            time.sleep(4)
            say("the checkpoint is written")
        """,
        ACCL_MPI_TIMEOUT="2",
    ).check()
    assert job.said() == ["the checkpoint is written"]


def test_options_name_the_transport_without_starting_it(library):
    job = run(
        library,
        """
        options = torch_accl.Options(transports="mpi,tcp")
        import torch_accl_mpi
        try:
            torch_accl_mpi.job()
        except RuntimeError as error:
            say(str(error))
        dist.init_process_group("accl", pg_options=options)
        dist.all_reduce(torch.ones(10))
        say(backend().describe())
        # No rank leaves the group before this barrier.
        dist.barrier()
        dist.destroy_process_group()
        """,
        ACCL_TRANSPORTS="tcp",
    ).check()
    said = job.said()
    assert sum("MPI was not started" in text for text in said) == 2
    assert sum(": mpi, " in text for text in said) == 2, said


@pytest.mark.parametrize(
    ("name", "value", "text"),
    [
        ("ACCL_MPI_THREAD_LEVEL", "high", "expected one of single, funneled, serialized, multiple"),
        ("ACCL_MPI_EXCLUSIVE", "perhaps", "expected 0 or 1"),
        ("ACCL_MPI_TIMEOUT", "soon", "a number of seconds above 0"),
        ("ACCL_MPI_EXIT_TIMEOUT", "-1", "a number of seconds above 0"),
    ],
)
def test_a_value_that_a_variable_cannot_have_is_refused(library, name, value, text):
    job = run(library, 'dist.init_process_group("accl")', 1, **{name: value})
    assert job.status != 0 and name in job.stderr and text in job.stderr, job.stderr


def test_without_the_package_the_transport_is_refused_with_what_would_install_it(monkeypatch):
    import torch_accl

    # Hide the package, which a developer may have installed into this environment.
    monkeypatch.setattr("torch_accl._transports.entry_points", lambda **_: [])
    with pytest.raises(ValueError, match=r"transport `mpi` is not installed: pip install 'torch-accl\[mpi\]'"):
        torch_accl.Options(transports="mpi,tcp")


def test_a_transport_whose_package_cannot_be_loaded_is_an_error_that_says_why(monkeypatch):
    import torch.distributed as dist
    from torch_accl._transports import find_transports

    class Broken:
        def load(self):
            raise ImportError("libmpi.so.40: cannot open shared object file")

    monkeypatch.setattr("torch_accl._transports.entry_points", lambda **_: [Broken()])
    with pytest.raises(dist.DistBackendError, match=r"transport `mpi` cannot be used: libmpi.so.40: cannot open"):
        find_transports("mpi")


def test_a_package_whose_library_is_missing_is_named_also_where_ranks_meet_by_it(tmp_path, monkeypatch):
    import torch.distributed as dist
    from torch_accl._from_mpi import store_by_mpi
    from torch_accl_launch import RankInfo

    package = tmp_path / "torch_accl_mpi"
    package.mkdir()
    (package / "__init__.py").write_text("raise ImportError('libmpi.so.40: cannot open shared object file')")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "torch_accl_mpi", raising=False)
    own = RankInfo("Open MPI", 0, 2)
    with pytest.raises(
        dist.DistBackendError, match=r"cannot get the address of rank 0 by MPI: libmpi.so.40: cannot open"
    ):
        store_by_mpi(own, timedelta(seconds=1))


def test_a_communicator_that_was_freed_is_not_used(monkeypatch):
    import torch.distributed as dist
    from torch_accl import _transports

    class Freed:
        def __bool__(self):
            return False

        def py2f(self):
            raise AssertionError("its handle is another one's by now")

    class Package:
        def load(self):
            return lambda **_: pytest.fail("it is not to be loaded")

    monkeypatch.setattr("torch_accl._transports.entry_points", lambda **_: [Package()])
    monkeypatch.setattr(_transports, "_communicator", [])
    _transports.lend_communicator(Freed())
    with pytest.raises(dist.DistBackendError, match="communicator passed to init_from_mpi was freed"):
        _transports.find_transports("mpi")


def test_the_folder_of_each_library_has_the_entry_point(library):
    found = list(Path(library.folder).glob("torch_accl_mpi-*.dist-info/entry_points.txt"))
    assert len(found) == 1 and "[torch_accl.transports]" in found[0].read_text()


# Runs each collective through MPI and on the host path, so that the results can be compared. The collectives that MPI
# does not accept are among them.
SIDESTEPPED = """
rank, world = dist.get_rank(), dist.get_world_size()

def results(group):
    yes = dist.get_global_rank(group, world - 1)
    torch.manual_seed(rank)
    for count in (0, 1, 1000, 300_000):
        for dtype in (torch.float32, torch.int64, torch.complex64, torch.uint8, torch.bfloat16, torch.bool):
            mine = torch.randint(0, 2 if dtype == torch.bool else 3, (count,)).to(dtype)
            if dtype != torch.bool:
                total = mine.clone()
                dist.all_reduce(total, group=group)
                yield total
                total = mine.clone()
                dist.reduce(total, yes, group=group)
                if rank == world - 1:
                    yield total
                part = torch.empty(count, dtype=dtype)
                dist.reduce_scatter_tensor(part, torch.cat([mine] * world), group=group)
                yield part
            same = mine.clone()
            dist.broadcast(same, yes, group=group)
            yield same
            flat = torch.empty(count * world, dtype=dtype)
            dist.all_gather_into_tensor(flat, mine, group=group)
            yield flat
            apart = [torch.empty(count, dtype=dtype) for _ in range(world)]
            dist.all_gather(apart, mine, group=group)
            yield torch.cat(apart)
            apart = [torch.empty(count, dtype=dtype) for _ in range(world)]
            dist.gather(mine, apart if rank == world - 1 else None, yes, group=group)
            yield torch.cat(apart) if rank == world - 1 else flat
            part = torch.empty(count, dtype=dtype)
            given = [mine.roll(at) for at in range(world)]
            dist.scatter(part, given if rank == world - 1 else None, yes, group=group)
            yield part
            sent, got = torch.cat([mine] * world), torch.empty(count * world, dtype=dtype)
            dist.all_to_all_single(got, sent, group=group)
            yield got
    for op in (dist.ReduceOp.MIN, dist.ReduceOp.MAX, dist.ReduceOp.PRODUCT):
        for dtype in (torch.int32, torch.float64):
            total = torch.arange(1, 100).to(dtype) + rank
            dist.all_reduce(total, op, group=group)
            yield total
    total = torch.tensor([rank, 5, 255], dtype=torch.int32)
    dist.all_reduce(total, dist.ReduceOp.BXOR, group=group)
    yield total
    # A tensor with every second element must be packed.
    wide = torch.arange(2000.0) + rank
    dist.all_reduce(wide[::2], group=group)
    yield wide
    dist.barrier(group=group)

def done(group):
    # "mpi does all_reduce, ...: 12 so far"
    lines = [line for line in group._get_backend(torch.device("cpu")).describe().splitlines() if line.startswith("mpi does ")]
    return int(lines[0].split(": ")[1].split()[0]) if lines else 0

def compared(by_mpi, by_host):
    # One list after the other, because ranks have different numbers of results.
    pairs = list(zip(list(results(by_mpi)), list(results(by_host)), strict=True))
    assert all(torch.equal(a, b) for a, b in pairs), [index for index, (a, b) in enumerate(pairs) if not torch.equal(a, b)]
    return len(pairs)
"""


@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("level", ["multiple", "serialized", "funneled"])
def test_collectives_that_mpi_does_give_what_the_host_gives(library, world, level):
    job = run(
        library,
        """
        dist.init_process_group("accl")
        """
        + textwrap.indent(SIDESTEPPED, " " * 8)
        + """
        by_host = dist.new_group(pg_options=torch_accl.Options(sidestep="all=host"))
        compared(dist.group.WORLD, by_host)
        # A second group of all ranks. It gets its own communicator only if threads may wait there (level "multiple").
        again = dist.new_group()
        compared(again, by_host)
        works = [dist.all_reduce(torch.ones(1 << size), async_op=True, group=group) for size in range(18) for group in (None, again)]
        for work in works:
            work.wait()
        counts = [done(dist.group.WORLD), done(again), done(by_host)]
        dist.barrier()
        dist.destroy_process_group()
        say(counts)
        """,
        world,
        ACCL_MPI_THREAD_LEVEL=level,
        ACCL_TRANSPORTS="shm,tcp",
        ACCL_SIDESTEP="all=mpi",
    ).check()
    said = job.said()
    assert len(said) == world and all(each == said[0] for each in said), said
    first, again, by_host = said[0]
    assert first > 150 and by_host == 0, said
    assert again == (first if level == "multiple" else 0), said
    assert "WARN" not in job.stdout + job.stderr or level != "multiple", job.stdout + job.stderr


def test_groups_of_some_ranks_and_of_frames_over_mpi_side_step_as_well(library):
    job = run(
        library,
        """
        dist.init_process_group("accl")
        rank = dist.get_rank()
        pairs = [dist.new_group([0, 1]), dist.new_group([1, 2]), dist.new_group([2, 0])]
        # Each rank issues its calls in another order: the first use of a communicator does not block other groups.
        mine = [group for group in (pairs[rank], pairs[rank - 1])]
        works = [(dist.all_reduce(values, async_op=True, group=group), values) for group in mine for values in [torch.full((5000,), rank + 1.0)]]
        for work, _ in works:
            work.wait()
        sums = [values[0].item() for _, values in works]
        dist.barrier()
        dist.destroy_process_group()
        say([rank, sums])
        """,
        3,
        ACCL_SIDESTEP="all_reduce=mpi",
    ).check()
    assert sorted(job.said()) == [[0, [3.0, 4.0]], [1, [5.0, 3.0]], [2, [4.0, 5.0]]]


def test_ranks_that_disagree_learn_of_it_and_never_wait_in_mpi(library):
    job = run(
        library,
        """
        dist.init_process_group("accl")
        try:
            if dist.get_rank() == 0:
                dist.all_reduce(torch.ones(1000))
            else:
                dist.broadcast(torch.ones(1000), 0)
        except dist.DistBackendError as error:
            say(str(error))
        """,
        ACCL_SIDESTEP="all=mpi",
    ).check()
    assert len(job.said()) == 2 and all("ranks disagree on call 0" in text for text in job.said()), job.said()
    assert job.seconds < 60


# Rank 1 is stopped (SIGSTOP) while MPI runs an all_reduce of both ranks. From then on, the memory of the call must not
# be reused.
STANDS_STILL = """
import threading
from datetime import timedelta
dist.init_process_group("accl", timeout=timedelta(seconds=4))
pids = [None, None]
dist.all_gather_object(pids, os.getpid())
values = torch.ones(40_000_000)
store = dist.distributed_c10d._get_default_store()
if dist.get_rank() == 1:
    work = dist.all_reduce(values, async_op=True)
    store.set("here", "1")
    work.wait()
    time.sleep(60)

def stop_the_other():
    store.wait(["here"])
    # MPI starts the sum soon, and needs many times as long as this sleep.
    time.sleep(0.01)
    os.kill(pids[1], signal.SIGSTOP)

def report(error, before):
    text, place = str(error) or type(error).__name__, values.data_ptr()
    # If the memory was freed, the next tensor of this size mostly gets its address.
    globals().pop("work", None)
    globals().pop("values")
    others = [torch.empty(40_000_000) for _ in range(3)]
    say([time.monotonic() - before, text, all(other.data_ptr() != place for other in others)])
    os.kill(pids[1], signal.SIGKILL)
    os._exit(3)
"""


def test_a_rank_that_stands_still_in_a_collective_of_mpi_is_a_timeout_and_the_memory_stays(library):
    job = run(
        library,
        STANDS_STILL
        + """
work = dist.all_reduce(values, async_op=True)
stop_the_other()
before = time.monotonic()
try:
    work.wait()
except RuntimeError as error:
    found = error.with_traceback(None)
report(found, before)
""",
        ACCL_SIDESTEP="all_reduce=mpi",
        ACCL_TRANSPORTS="shm,tcp",
    )
    [(seconds, text, stays)] = job.said()
    assert 2 < seconds < 12 and "Timed out" in text and "mpi has not completed it" in text, (seconds, text)
    assert "never freed" in text and stays, text
    assert job.status != 0


def test_an_interrupt_in_a_collective_of_mpi_ends_it_and_the_memory_stays(library):
    job = run(
        library,
        STANDS_STILL
        + """
def interrupt():
    stop_the_other()
    time.sleep(0.5)
    os.kill(os.getpid(), signal.SIGINT)

threading.Thread(target=interrupt).start()
before = time.monotonic()
try:
    dist.all_reduce(values)
except KeyboardInterrupt as error:
    found = error.with_traceback(None)
report(found, before)
""",
        ACCL_SIDESTEP="all_reduce=mpi",
        ACCL_TRANSPORTS="shm,tcp",
    )
    [(seconds, text, stays)] = job.said()
    assert seconds < 4 and text == "KeyboardInterrupt" and stays, (seconds, text, stays)
    assert job.status != 0


def test_a_side_step_without_the_package_is_refused_by_its_setting(monkeypatch):
    from torch_accl._transports import find_offload

    monkeypatch.setattr("torch_accl._transports.entry_points", lambda **_: [])
    monkeypatch.setattr("torch_accl._transports._known", {"shm", "tcp"})
    find_offload("broadcast=host,all_gather")
    with pytest.raises(
        ValueError,
        match=r"sidestep \(ACCL_SIDESTEP\): value `all=mpi` is not accepted \(transport `mpi` is not installed",
    ):
        find_offload("all=mpi")
