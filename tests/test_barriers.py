"""barrier and monitored barrier, with the times and messages that torch's own suite checks."""

import re
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from support import on_ranks
from support.versions import monitored_barrier


@on_ranks(1, 2, 3, 4)
def test_no_rank_leaves_a_barrier_before_the_last_has_entered(rank, world):
    for late in range(world):
        dist.barrier()
        if rank == late:
            time.sleep(0.1)
        # All processes of a host read the same clock.
        entered = torch.tensor([time.monotonic()], dtype=torch.float64)
        dist.barrier()
        left = time.monotonic()
        dist.all_reduce(entered, dist.ReduceOp.MAX)
        assert left >= entered.item()


@on_ranks(2, 3, 4)
@pytest.mark.parametrize("how", ["blocking", "wait", "future"])
def test_a_barrier_comes_after_earlier_asynchronous_calls_of_the_group(rank, world, how):
    for count in (10, 1000, 100_000):
        for _ in range(10):
            tensors = [torch.full((count,), float(i)) for i in range(16)]
            works = [dist.all_reduce(tensor, async_op=True) for tensor in tensors]
            if how == "blocking":
                dist.barrier()
            elif how == "wait":
                dist.barrier(async_op=True).wait()
            else:
                dist.barrier(async_op=True).get_future().wait()
            wrong = [i for i, tensor in enumerate(tensors) if (tensor != i * world).any()]
            assert not wrong, (count, wrong)
            for work in works:
                work.wait()


@on_ranks(2, 3)
def test_a_barrier_comes_after_earlier_asynchronous_sums_of_sparse_tensors(rank, world):
    for _ in range(20):
        rows = torch.arange(500) * 2 + rank
        tensor = torch.sparse_coo_tensor(rows[None], torch.ones(500, 64), (2000, 64))
        work = dist.all_reduce(tensor, async_op=True)
        dist.barrier()
        assert tensor.is_coalesced() and float(tensor.values().sum()) == 500 * 64 * world
        work.wait()


@on_ranks(2, 3)
def test_an_asynchronous_barrier_completes_after_the_last_has_entered(rank, world):
    dist.barrier()
    if rank == 0:
        time.sleep(0.2)
    work = dist.barrier(async_op=True)
    if rank == 1:
        assert not work.is_completed()
    work.wait()
    assert work.is_completed() and work.is_success()


@on_ranks(2, 3)
def test_barriers_of_subgroups_concern_only_their_members(rank, world):
    group = dist.new_group([0, 1])
    if rank < 2:
        for _ in range(3):
            dist.barrier(group)


@pytest.mark.slow
@on_ranks(2, 3, fresh=True)
def test_a_barrier_that_times_out_says_so_within_a_tenth_of_a_second(rank, world):
    group = dist.new_group(timeout=timedelta(seconds=1))
    dist.barrier()
    if rank == 0:
        start = time.monotonic()
        with pytest.raises(dist.DistBackendError, match=" (Timed out|closed|timeout) ") as caught:
            dist.barrier(group)
        elapsed = time.monotonic() - start
        assert 0.95 <= elapsed <= 1.15
        assert re.search(r"Timed out waiting 1000ms", str(caught.value))
    else:
        time.sleep(1.3)
    dist.barrier()


@on_ranks(2, fresh=True)
def test_a_barrier_that_times_out_names_the_missing_rank(rank, world):
    group = dist.new_group(timeout=timedelta(milliseconds=300))
    dist.barrier()
    if rank == 0:
        with pytest.raises(dist.DistBackendError, match=r"rank 1\b"):
            dist.barrier(group)
    else:
        time.sleep(0.6)
    dist.barrier()


@on_ranks(1, 2, 3, 4)
@pytest.mark.parametrize("wait_all_ranks", [False, True])
def test_a_monitored_barrier_passes_when_all_come(rank, world, wait_all_ranks):
    for _ in range(3):
        monitored_barrier(timeout=timedelta(seconds=10), wait_all_ranks=wait_all_ranks)


@on_ranks(2, 3)
def test_a_monitored_barrier_holds_everybody_until_the_last_comes(rank, world):
    dist.barrier()
    if rank == world - 1:
        time.sleep(0.2)
    entered = torch.tensor([time.monotonic()], dtype=torch.float64)
    monitored_barrier(timeout=timedelta(seconds=10))
    left = time.monotonic()
    dist.all_reduce(entered, dist.ReduceOp.MAX)
    assert left >= entered.item()


@pytest.mark.slow
@on_ranks(3, fresh=True)
def test_a_monitored_barrier_names_the_first_missing_rank_and_the_group_works_on(rank, world):
    timeout = timedelta(milliseconds=400)
    if rank == 0:
        with pytest.raises(RuntimeError, match="Rank 1 failed to pass monitoredBarrier"):
            monitored_barrier(timeout=timeout)
    elif rank == 2:
        sentence = (
            "Rank 2 successfully reached monitoredBarrier, but received errors while waiting for send/recv from rank 0"
        )
        with pytest.raises(RuntimeError, match=sentence):
            monitored_barrier(timeout=timeout)
    else:
        time.sleep(1.0)
    tensor = torch.ones(3)
    dist.all_reduce(tensor)
    assert tensor.tolist() == [3] * 3


@pytest.mark.slow
@on_ranks(4, fresh=True)
def test_a_monitored_barrier_that_waits_for_all_names_all_missing_ranks(rank, world):
    timeout = timedelta(milliseconds=400)
    if rank == 0:
        with pytest.raises(RuntimeError, match="Ranks 1, 2 failed to pass monitoredBarrier"):
            monitored_barrier(timeout=timeout, wait_all_ranks=True)
    elif rank == 3:
        with pytest.raises(RuntimeError, match="Rank 3 successfully reached monitoredBarrier"):
            monitored_barrier(timeout=timeout, wait_all_ranks=True)
    else:
        time.sleep(1.0)


@on_ranks(2, fresh=True)
def test_a_monitored_barrier_with_no_time_fails_at_once_on_rank_0(rank, world):
    if rank == 0:
        start = time.monotonic()
        with pytest.raises(RuntimeError, match="Rank 0 timed out in monitoredBarrier"):
            monitored_barrier(timeout=timedelta(seconds=0))
        assert time.monotonic() - start < 1.0
    else:
        time.sleep(0.2)


@on_ranks(2, 3)
def test_a_monitored_barrier_works_on_a_subgroup(rank, world):
    group = dist.new_group([0, 1])
    if rank < 2:
        monitored_barrier(group, timeout=timedelta(seconds=10))
