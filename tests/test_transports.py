"""The same calls over every transport, ring size and algorithm, with the same bits. No files are left behind."""

import contextlib
import glob
import hashlib
import os
import re
import signal

import pytest
import torch
import torch.distributed as dist
from support import (
    BACKEND,
    bytes_equal,
    contributions,
    expected_reduction,
    init_group,
    noise,
    on_ranks,
    run_ranks,
    run_script,
)
from support.runner import check
from support.versions import monitored_barrier

pytestmark = pytest.mark.skipif(BACKEND != "accl", reason="about this package only")

SETTINGS = {
    "shm": {"ACCL_TRANSPORTS": "shm"},
    "tcp": {"ACCL_TRANSPORTS": "tcp"},
    "tcp_over_loopback": {"ACCL_TRANSPORTS": "tcp", "ACCL_SOCKET_IFNAME": "lo"},
    "smallest_rings": {"ACCL_RING_BYTES": "16KiB", "ACCL_SEGMENT_BYTES": "1KiB"},
    "smallest_segments_over_tcp": {"ACCL_TRANSPORTS": "tcp", "ACCL_SEGMENT_BYTES": "1KiB"},
    "large_segments": {"ACCL_SEGMENT_BYTES": "4MiB", "ACCL_RING_BYTES": "16MiB"},
    "nothing_eager": {"ACCL_EAGER_BYTES": "0"},
    "no_spinning": {"ACCL_SPIN_US": "0"},
    "no_shared_memory_allowed": {"ACCL_SHM_LIMIT": "0"},
    "little_shared_memory_allowed": {"ACCL_SHM_LIMIT": "300KiB"},
    "deterministic": {"ACCL_DETERMINISTIC": "1"},
}


@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_a_group_describes_its_links(transport):
    def body(rank):
        dist.barrier()
        return os.getpid(), dist.group.WORLD._get_backend(torch.device("cpu")).describe()

    (first, text), (second, _) = check(run_ranks(body, 2, env=SETTINGS[transport]))
    lines = text.splitlines()
    assert lines[1:3] == ["rank 0", "world 2"] and first != second
    assert len(lines) == 4 and lines[3].startswith("rank 1 (host ") and f"pid {second}): {transport}" in lines[3], text


@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_a_line_printed_without_standard_streams_reaches_no_descriptor_of_the_group(transport):
    """Regression: a process that starts without standard streams reuses their descriptors. The event bitmap of a rank
    had descriptor 1, and a printed line overwrote it.
    """

    def body(rank):
        for stream in (0, 1, 2):
            os.close(stream)
        init_group()
        received = torch.zeros(3)
        for step in range(3):
            for stream in (1, 2):
                with contextlib.suppress(OSError):
                    os.write(stream, b"a line, long enough to be in the way of something\n" * 20)
            dist.all_reduce(torch.ones(70000))
            if rank == 0:
                dist.send(torch.full((3,), float(step)), 1)
            else:
                dist.recv(received, 0)
                assert received.tolist() == [step] * 3
        for stream in (0, 1, 2):
            with pytest.raises(OSError, match="Bad file descriptor"):
                os.fstat(stream)

    check(run_ranks(body, 2, init=False, env={"ACCL_TRANSPORTS": transport, "ACCL_WORKER_COUNT": "1"}, deadline=10))


def test_links_are_made_when_they_are_needed_or_all_at_once_when_asked():
    def unlinked(rank):
        text = dist.group.WORLD._get_backend(torch.device("cpu")).describe()
        return [int(re.match(r"rank (\d+)", line)[1]) for line in text.splitlines()[3:] if line.endswith("no link yet")]

    def body(rank):
        # With 6 ranks, the ranks at distance 1, 2 and 4 are linked at the start. Only the rank at distance 3 is not.
        first = unlinked(rank)
        # A barrier creates links, so all ranks look before any rank enters it.
        store = dist.distributed_c10d._get_default_store()
        store.set(f"looked/{rank}", "")
        store.wait([f"looked/{each}" for each in range(6)])
        dist.monitored_barrier()
        if rank == 1:
            dist.group.WORLD._get_backend(torch.device("cpu")).eager_connect_single_device(torch.device("cpu"))
            assert unlinked(rank) == []
        dist.monitored_barrier()
        if rank == 2:
            dist.send(torch.full((3,), 7.0), 5)
        elif rank == 5:
            received = torch.zeros(3)
            dist.recv(received, 2)
            assert received.tolist() == [7.0] * 3
        return first

    assert check(run_ranks(body, 6)) == [[(rank + 3) % 6] for rank in range(6)]


def medley(rank, world):
    """Runs every kind of call and checks it. Returns a digest of the rounded results."""
    digest = hashlib.sha256()
    for count in (0, 1, 1000, 300_007):
        tensors = contributions(world, count, "float32", seed=count)
        result = tensors[rank].clone()
        dist.all_reduce(result)
        assert bytes_equal(result, expected_reduction(tensors, "SUM"))
        for root in range(world):
            result = tensors[rank].clone()
            dist.broadcast(result, root)
            assert bytes_equal(result, tensors[root])
            result = tensors[rank].clone()
            dist.reduce(result, root)
            if rank == root:
                assert bytes_equal(result, expected_reduction(tensors, "SUM"))
            outputs = [torch.empty(count) for _ in range(world)] if rank == root else None
            dist.gather(tensors[rank], outputs, dst=root)
            back = torch.empty(count)
            dist.scatter(back, outputs, src=root)
            assert bytes_equal(back, tensors[rank])
        flat = torch.empty(world * count)
        dist.all_gather_single(flat, tensors[rank])
        assert bytes_equal(flat, torch.cat(tensors))
        part = torch.empty(count)
        dist.reduce_scatter_single(part, flat)
        assert bytes_equal(part, tensors[rank] * world)
        moved = torch.empty(world * count)
        dist.all_to_all_single(moved, tensors[rank].repeat(world))
        assert bytes_equal(moved, flat)
        monitored_barrier()
        receive = dist.irecv(back, (rank - 1) % world) if world > 1 else None
        if receive:
            dist.send(tensors[rank], (rank + 1) % world)
            receive.wait()
            assert bytes_equal(back, tensors[(rank - 1) % world])
        rounded = noise(world, count, "float32")[rank]
        dist.all_reduce(rounded)
        digest.update(rounded.numpy().tobytes())
    works = [dist.all_reduce(torch.ones(50_000), async_op=True) for _ in range(20)]
    for work in works:
        work.wait()
    dist.barrier()
    return digest.hexdigest()


@pytest.mark.parametrize("setting", list(SETTINGS))
@pytest.mark.parametrize("world", [2, 3])
def test_everything_works_with(setting, world):
    digests = check(run_ranks(lambda rank: medley(rank, world), world, env=SETTINGS[setting]))
    assert len(set(digests)) == 1


@pytest.mark.slow
@pytest.mark.parametrize("world", [2, 3, 4])
def test_the_bits_are_the_same_over_every_transport_and_on_every_run(world):
    digests = set()
    for transport in ("shm", "tcp", "shm"):
        env = {"ACCL_TRANSPORTS": transport, "ACCL_DETERMINISTIC": "1"}
        digests.update(check(run_ranks(lambda rank: medley(rank, world), world, env=env)))
    assert len(digests) == 1


@pytest.mark.parametrize(("world", "hosts"), [(2, "ab"), (4, "aabb"), (4, "abab"), (3, "aab"), (4, "aaab")])
def test_ranks_of_several_hosts_use_both_transports(world, hosts):
    def body(rank):
        os.environ["ACCL_HOST_ID"] = hosts[rank]
        init_group()
        digest = medley(rank, world)
        dist.destroy_process_group()
        return digest

    assert len(set(check(run_ranks(body, world, init=False)))) == 1


def test_a_host_without_shared_memory_warns_once_and_uses_tcp():
    outcomes = run_ranks(lambda rank: medley(rank, 2), 2, env={"ACCL_SHM_LIMIT": "0"})
    check(outcomes)
    warned = [line for outcome in outcomes for line in outcome.output.splitlines() if "tcp" in line]
    assert 1 <= len(warned) <= 2, [outcome.output for outcome in outcomes]


def test_the_log_names_transport_and_algorithm():
    outcomes = run_ranks(lambda rank: medley(rank, 2), 2, env={"ACCL_LOG": "info"})
    check(outcomes)
    for outcome in outcomes:
        assert "shm" in outcome.output and "all_reduce" in outcome.output, outcome.output[:2000]


def test_the_log_names_addresses():
    outcomes = run_ranks(lambda rank: dist.barrier(), 2, env={"ACCL_LOG": "info", "ACCL_TRANSPORTS": "tcp"})
    check(outcomes)
    for outcome in outcomes:
        assert re.search(r"tcp \S+:\d+ -> \S+:\d+", outcome.output), outcome.output[:2000]


@pytest.mark.parametrize("transport", ["shm", "tcp"])
@pytest.mark.parametrize("level", ["debug", "trace"])
def test_the_log_follows_calls_and_at_trace_their_frames(level, transport):
    def body(rank):
        for _ in range(3):
            dist.all_reduce(torch.ones(3))
        works = [dist.all_reduce(torch.ones(5_000), async_op=True) for _ in range(2)]
        for work in works:
            work.wait()
        dist.send(torch.ones(7), 1) if rank == 0 else dist.recv(torch.ones(7), 0)

    outcomes = run_ranks(body, 2, env={"ACCL_LOG": level, **SETTINGS[transport]})
    check(outcomes)
    for rank, outcome in enumerate(outcomes):
        lines = outcome.output.splitlines()
        ended = [line for line in lines if re.search(rf"ended.* rank={rank} call=\"all_reduce\"", line)]
        seqs = [int(re.search(r"seq=(\d+)", line)[1]) for line in ended]
        # The thread that made the progress logs the end of an asynchronous call. The lines have any order, but all come
        # before the process exits.
        assert sorted(seqs) == list(range(5)), outcome.output
        assert all(re.search(r" us=\d+", line) for line in ended)
        begun = [line for line in lines if "begun" in line and 'call="all_reduce"' in line]
        assert begun and all(re.search(r"bytes=\d+ algorithm=\"\w+\"", line) for line in begun), begun
        message = "send" if rank == 0 else "recv"
        assert any(re.search(rf'begun.* call="{message}" .*peer={1 - rank}', line) for line in lines), outcome.output
        frames = [line for line in lines if re.search(r"(sent|received) peer=.* kind=\w+ .*seq=\d+ edge=\d+", line)]
        assert bool(frames) == (level == "trace")


def test_a_quiet_run_prints_nothing():
    # An implausible calibration is logged, so calibration is off here.
    outcomes = run_ranks(lambda rank: medley(rank, 2), 2, env={"ACCL_CALIBRATION": "off"})
    check(outcomes)
    assert [outcome.output for outcome in outcomes] == ["", ""]


def test_nothing_is_left_in_a_file_system_even_by_killed_ranks():
    def places():
        return {path for pattern in ("/dev/shm/*", "/tmp/*accl*", "/run/*accl*") for path in glob.glob(pattern)}

    def body(rank):
        dist.all_reduce(torch.ones(100_000))
        os.kill(os.getpid(), signal.SIGKILL)

    before = places()
    run_ranks(body, 2)
    assert {path for path in places() - before if "store" not in path} == set()


def check_collective(collective, rank, world, group):
    for count in (1, 777, 100_003):
        tensors = contributions(world, count, "float32", seed=count)
        total = expected_reduction(tensors, "SUM")
        result, flat = tensors[rank].clone(), torch.zeros(world * count)
        for root in range(world) if collective in ("broadcast", "reduce", "gather", "scatter") else [0]:
            if collective == "all_reduce":
                dist.all_reduce(result, group=group)
                assert bytes_equal(result, total)
            elif collective == "broadcast":
                result = tensors[rank].clone()
                dist.broadcast(result, root, group=group)
                assert bytes_equal(result, tensors[root])
            elif collective == "reduce":
                result = tensors[rank].clone()
                dist.reduce(result, root, group=group)
                assert bytes_equal(result, total if rank == root else tensors[rank])
            elif collective == "all_gather":
                dist.all_gather_single(flat, result, group=group)
                assert bytes_equal(flat, torch.cat(tensors))
            elif collective == "reduce_scatter":
                dist.reduce_scatter_single(result, tensors[rank].repeat(world), group=group)
                assert bytes_equal(result, total)
            elif collective == "gather":
                outputs = [torch.zeros(count) for _ in range(world)] if rank == root else None
                dist.gather(tensors[rank], outputs, dst=root, group=group)
                assert rank != root or all(bytes_equal(a, b) for a, b in zip(outputs, tensors, strict=True))
            elif collective == "scatter":
                dist.scatter(result, tensors if rank == root else None, src=root, group=group)
                assert bytes_equal(result, tensors[rank])
            elif collective == "all_to_all":
                dist.all_to_all_single(flat, torch.cat([tensors[rank]] * world), group=group)
                assert bytes_equal(flat, torch.cat(tensors))
            elif collective == "barrier":
                dist.barrier(group)


COLLECTIVES = [
    "all_reduce",
    "reduce_scatter",
    "all_gather",
    "broadcast",
    "reduce",
    "gather",
    "scatter",
    "all_to_all",
    "barrier",
]


@on_ranks(2, 3, 4, fresh=True, init=False)
@pytest.mark.parametrize("hosts", ["one_host", "two_hosts"])
@pytest.mark.parametrize("collective", COLLECTIVES)
def test_every_algorithm_that_can_run_gives_the_exact_result(rank, world, collective, hosts):
    import torch_accl
    from torch_accl import _native

    if hosts == "two_hosts":
        os.environ["ACCL_HOST_ID"] = "ab"[rank % 2]
    init_group()
    ran = 0
    for row in _native.algorithms():
        if row["collective"] != collective:
            continue
        try:
            group = dist.new_group(pg_options=torch_accl.Options(algorithm=f"{collective}={row['name']}"))
        except ValueError as error:
            # Only algorithms that need several hosts may be refused, and only on one host.
            assert row["name"] == "two_level" and hosts == "one_host" and "two_level" in str(error), error
            continue
        check_collective(collective, rank, world, group)
        ran += 1
    assert ran
    dist.barrier()
    dist.destroy_process_group()


SMALL = """
import torch, torch.distributed as dist
dist.init_process_group("accl")
for count in (1, 1000, 300_000):
    tensor = torch.ones(count)
    dist.all_reduce(tensor)
    assert (tensor == 2).all()
dist.barrier()
dist.destroy_process_group()
print("done")
"""


@pytest.mark.parametrize("limit", [{"RLIMIT_FSIZE": 4096}, {"RLIMIT_FSIZE": 200_000}, {"RLIMIT_NOFILE": 48}], ids=str)
def test_a_process_with_tight_limits_falls_back_and_never_dies_of_a_signal(limit):
    for script in run_script(SMALL, world=2, limits=limit):
        assert (script.exitcode, script.stdout) == (0, "done\n"), script.stderr
