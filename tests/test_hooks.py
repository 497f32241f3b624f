"""Notifications about the end of calls: abort hooks, completion hooks, and the flight recorder, which uses both."""

import json
import os
import pickle
import subprocess
import sys
import tempfile
import threading
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from support import on_ranks
from support.versions import needs
from torch._C import _distributed_c10d as c10d

CPU = torch.device("cpu")


def until(condition, seconds=10.0):
    end = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > end:
            return False
        time.sleep(0.001)
    return True


def hooked(timeout=timedelta(milliseconds=300)):
    """Returns a new group and a list to which its abort hook appends the thread that runs it."""
    group = dist.new_group(timeout=timeout)
    dist.barrier()
    seen = []
    group.register_abort_hook(7, lambda: seen.append(threading.get_ident()))
    return group, seen


@needs("abort hooks")
@on_ranks(2)
@pytest.mark.parametrize("how", ["blocking", "wait", "poll", "sparse"])
def test_abort_hooks_run_before_a_call_that_timed_out_raises(rank, world, how):
    group, seen = hooked()
    assert group.supports_abort_hooks
    if rank == 0:
        if how == "blocking":
            with pytest.raises(dist.DistBackendError, match="(?i)timed out"):
                dist.all_reduce(torch.ones(3), group=group)
        elif how == "sparse":
            with pytest.raises(dist.DistBackendError, match="(?i)timed out"):
                dist.all_reduce(torch.ones(3).to_sparse(), group=group)
        else:
            work = dist.all_reduce(torch.ones(3), group=group, async_op=True)
            if how == "poll":
                assert until(work.is_completed)
            else:
                with pytest.raises(dist.DistBackendError, match="(?i)timed out"):
                    work.wait()
        assert seen
    dist.barrier()


@needs("abort hooks")
@on_ranks(2)
def test_an_abort_hook_that_was_taken_back_does_not_run(rank, world):
    group, seen = hooked()
    group.register_abort_hook(8, lambda: seen.append("second"))
    group.unregister_abort_hook(8)
    group.unregister_abort_hook(99)
    if rank == 0:
        with pytest.raises(dist.DistBackendError, match="(?i)timed out"):
            dist.all_reduce(torch.ones(3), group=group)
        assert seen and "second" not in seen
    dist.barrier()


@needs("abort hooks")
@on_ranks(2)
def test_abort_runs_no_hooks(rank, world):
    group, seen = hooked()
    if rank == 0:
        group._get_backend(CPU).abort()
    dist.barrier()
    assert not seen


@needs("abort hooks")
@on_ranks(2)
def test_abort_hooks_leave_refused_arguments_expired_waits_and_the_end_alone(rank, world):
    group, seen = hooked(timedelta(seconds=20))
    with pytest.raises(ValueError):
        dist.broadcast(torch.ones(3), 99, group=group)
    work = dist.irecv(torch.zeros(3), 1 - rank, group=group)
    with pytest.raises(dist.DistBackendError):
        work.wait(timedelta(milliseconds=50))
    dist.barrier()
    dist.send(torch.ones(3), 1 - rank, group=group)
    work.wait()
    dist.destroy_process_group(group)
    assert not seen


@needs("abort hooks")
@on_ranks(2)
@pytest.mark.parametrize("is_async", [False, True])
def test_a_disagreement_waits_for_no_abort_hook(rank, world, is_async):
    # Abort hooks run only after a timeout. torch's flight recorder takes seconds, while a lost peer or a disagreement
    # is known in milliseconds.
    group, seen = hooked(timedelta(seconds=20))
    op = dist.ReduceOp.SUM if rank == 0 else dist.ReduceOp.MAX
    with pytest.raises(RuntimeError, match="disagree"):
        work = dist.all_reduce(torch.ones(3), op, group=group, async_op=is_async)
        if is_async:
            work.wait()
    dist.barrier()
    assert not seen


@needs("abort hooks")
@on_ranks(2)
def test_an_abort_hook_that_raises_hides_no_error(rank, world):
    group, _ = hooked()

    def fail():
        raise ValueError("told so")

    group.register_abort_hook(9, fail)
    if rank == 0:
        with pytest.raises(dist.DistBackendError, match="(?i)timed out"):
            dist.all_reduce(torch.ones(3), group=group)
    dist.barrier()


def trace(group=None):
    """Returns the flight recorder's entries of accl calls in `group`, oldest first."""
    entries = json.loads(c10d._dump_fr_trace_json(backend="accl")).get("entries", [])
    name = (group or dist.group.WORLD).group_name
    return [entry for entry in entries if entry["process_group"][0] == name]


@needs("completion hooks")
@on_ranks(2)
def test_the_flight_recorder_separates_completed_calls_from_pending_ones(rank, world):
    group = dist.new_group()
    assert group.supports_completion_hooks
    done = dist.all_reduce(torch.ones(3), group=group, async_op=True)
    done.wait()
    polled = dist.all_reduce(torch.ones(3), group=group, async_op=True)
    assert until(polled.is_completed)
    future = dist.all_reduce(torch.ones(3), group=group, async_op=True).get_future()
    future.wait()
    for _ in range(3):
        dist.all_reduce(torch.ones(3), group=group, async_op=True)  # the handle is dropped
    dist.barrier(group)
    hung = dist.irecv(torch.zeros(3), 1 - rank, group=group, tag=5)
    assert until(lambda: [e["state"] for e in trace(group)[:6]] == ["completed"] * 6), trace(group)
    assert trace(group)[-1]["state"] != "completed"
    dist.barrier()
    dist.send(torch.ones(3), 1 - rank, group=group, tag=5)
    hung.wait()
    assert any(entry["state"] == "completed" for entry in trace(group)[7:])


@needs("completion hooks")
@on_ranks(2)
def test_the_flight_recorder_never_calls_a_failed_call_completed_and_knows_durations(rank, world):
    group = dist.new_group(timeout=timedelta(milliseconds=300))
    group._get_backend(CPU)._enable_collectives_timing()
    dist.barrier()
    dist.all_reduce(torch.ones(3), group=group, async_op=True).wait()
    (entry,) = trace(group)
    assert entry["state"] == "completed" and entry["duration_ms"] > 0
    dist.barrier()
    if rank == 0:
        work = dist.all_reduce(torch.ones(3), group=group, async_op=True)
        with pytest.raises(dist.DistBackendError):
            work.wait()
        assert work.is_completed() and not work.is_success()
        assert trace(group)[-1]["state"] != "completed"
    dist.barrier()


@needs("abort hooks")
@on_ranks(2, fresh=True)
def test_a_call_that_times_out_leaves_a_dump_of_the_flight_recorder(rank, world):
    path = os.path.join(tempfile.gettempdir(), f"accl-dump-{os.getpid()}-")
    os.environ["TORCH_FR_DUMP_TEMP_FILE"] = path
    os.environ["TORCH_FR_DUMP_ON_TIMEOUT"] = "1"
    group = dist.new_group(timeout=timedelta(milliseconds=300))
    dist.barrier()
    file = f"{path}{rank}"
    try:
        if rank == 0:
            with pytest.raises(dist.DistBackendError):
                dist.all_reduce(torch.ones(3), group=group)
            with open(file, "rb") as dump:
                entries = pickle.load(dump)["entries"]
            assert entries[-1]["profiling_name"] == "accl:all_reduce" and entries[-1]["state"] != "completed"
    finally:
        if os.path.exists(file):
            os.unlink(file)
    dist.barrier()


@pytest.mark.slow
@needs("abort hooks")
@on_ranks(2, fresh=True)
@pytest.mark.parametrize("is_async", [False, True], ids=["blocking", "asynchronous"])
def test_torchs_analyzer_of_dumps_names_the_rank_that_is_missing(rank, world, is_async, tmp_path):
    os.environ["TORCH_FR_DUMP_TEMP_FILE"] = str(tmp_path / "dump_rank_")
    os.environ["TORCH_FR_DUMP_ON_TIMEOUT"] = "1"
    group = dist.new_group(timeout=timedelta(milliseconds=300))
    dist.all_reduce(torch.ones(3), group=group)
    if rank == 0:
        with pytest.raises(dist.DistBackendError):
            work = dist.all_reduce(torch.ones(5), group=group, async_op=is_async)
            work.wait()
    else:
        # This rank hangs elsewhere, where a user requests a dump from it.
        with open(tmp_path / f"dump_rank_{rank}", "wb") as dump:
            dump.write(c10d._dump_fr_trace(backend="accl"))
    dist.barrier()
    if rank == 0:
        analyzer = "torch.distributed.flight_recorder.fr_trace"
        command = [sys.executable, "-m", analyzer, str(tmp_path), "-p", "dump_rank_"]
        ended = subprocess.run(command, capture_output=True, text=True, timeout=60)
        said = ended.stdout + ended.stderr
        assert ended.returncode == 0, said
        assert (
            "collective: accl:all_reduce" in said and "missing ranks: {1}" in said and "input sizes: [[5]]" in said
        ), said
    dist.barrier()
