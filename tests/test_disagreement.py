"""Ranks that disagree get a catchable error that names both ranks and both calls; no rank hangs."""

import time

import pytest
import torch
import torch.distributed as dist
from support import on_ranks


def ones(count=5, dtype=torch.float32):
    return torch.ones(count, dtype=dtype)


def parts(count=5):
    return [ones(count) for _ in range(dist.get_world_size())]


def flat(count=5):
    return ones(count * dist.get_world_size())


# The call of all other ranks, the call of the last rank, and a text for each call that every message must contain.
CASES = {
    "kind_all_reduce_broadcast": (
        lambda: dist.all_reduce(ones()),
        lambda: dist.broadcast(ones(), 0),
        "all_reduce",
        "broadcast",
    ),
    "kind_all_reduce_all_gather": (
        lambda: dist.all_reduce(ones()),
        lambda: dist.all_gather_single(flat(), ones()),
        "all_reduce",
        "all_gather",
    ),
    "kind_all_reduce_barrier": (lambda: dist.all_reduce(ones()), lambda: dist.barrier(), "all_reduce", "barrier"),
    "kind_reduce_scatter_all_to_all": (
        lambda: dist.reduce_scatter_single(ones(), flat()),
        lambda: dist.all_to_all_single(flat(), flat()),
        "reduce_scatter",
        "all_to_all",
    ),
    "kind_barrier_broadcast": (lambda: dist.barrier(), lambda: dist.broadcast(ones(), 0), "barrier", "broadcast"),
    "kind_reduce_gather": (
        lambda: dist.reduce(ones(), 0),
        lambda: dist.gather(ones(), parts() if dist.get_rank() == 0 else None, dst=0),
        "reduce",
        "gather",
    ),
    "dtype": (lambda: dist.all_reduce(ones()), lambda: dist.all_reduce(ones(dtype=torch.int32)), "float32", "int32"),
    "dtype_of_equal_width_broadcast": (
        lambda: dist.broadcast(ones(), 0),
        lambda: dist.broadcast(ones(dtype=torch.int32), 0),
        "float32",
        "int32",
    ),
    "operator": (lambda: dist.all_reduce(ones()), lambda: dist.all_reduce(ones(), dist.ReduceOp.MAX), "SUM", "MAX"),
    "operator_reduce_scatter": (
        lambda: dist.reduce_scatter_single(ones(), flat()),
        lambda: dist.reduce_scatter_single(ones(), flat(), dist.ReduceOp.AVG),
        "SUM",
        "AVG",
    ),
    "root_broadcast": (lambda: dist.broadcast(ones(), 0), lambda: dist.broadcast(ones(), 1), "root 0", "root 1"),
    "root_reduce": (lambda: dist.reduce(ones(), 0), lambda: dist.reduce(ones(), 1), "root 0", "root 1"),
    "root_gather": (
        lambda: dist.gather(ones(), parts() if dist.get_rank() == 0 else None, dst=0),
        lambda: dist.gather(ones(), parts() if dist.get_rank() == 1 else None, dst=1),
        "root 0",
        "root 1",
    ),
    "size": (lambda: dist.all_reduce(ones(5)), lambda: dist.all_reduce(ones(6)), "5", "6"),
    "size_large": (lambda: dist.all_reduce(ones(500_000)), lambda: dist.all_reduce(ones(4)), "500000", "4"),
    "size_broadcast": (lambda: dist.broadcast(ones(5), 0), lambda: dist.broadcast(ones(6), 0), "5", "6"),
    "size_broadcast_large": (
        lambda: dist.broadcast(ones(900_001), 0),
        lambda: dist.broadcast(ones(900_000), 0),
        "900001",
        "900000",
    ),
    "size_all_gather": (
        lambda: dist.all_gather_single(flat(5), ones(5)),
        lambda: dist.all_gather_single(flat(6), ones(6)),
        "elements",
        "all_gather",
    ),
    "size_reduce_scatter": (
        lambda: dist.reduce_scatter_single(ones(5), flat(5)),
        lambda: dist.reduce_scatter_single(ones(6), flat(6)),
        "elements",
        "reduce_scatter",
    ),
    "size_empty_against_full": (lambda: dist.all_reduce(ones(0)), lambda: dist.all_reduce(ones(3)), "0", "3"),
    "size_scatter": (
        lambda: dist.scatter(ones(5), parts(5) if dist.get_rank() == 0 else None, src=0),
        lambda: dist.scatter(ones(6), parts(6) if dist.get_rank() == 0 else None, src=0),
        "5",
        "6",
    ),
    "tensors_of_a_coalesced_call": (
        lambda: dist.group.WORLD.allreduce_coalesced([ones(3), ones(4)]).wait(),
        lambda: dist.group.WORLD.allreduce_coalesced([ones(4), ones(3)]).wait(),
        "all_reduce",
        "all_reduce",
    ),
}


def first_error(calls):
    """Runs the calls until one raises, and returns its message. If a call returns early, a later call reports its
    error."""
    for call in calls:
        try:
            call()
        except dist.DistBackendError as error:
            return str(error)
    raise AssertionError("no call raised")


@on_ranks(2, 3, fresh=True)
@pytest.mark.parametrize("case", list(CASES))
def test_ranks_that_disagree_all_raise_and_name_both_ranks_and_calls(rank, world, case):
    majority, minority, ours, theirs = CASES[case]
    start = time.monotonic()
    mine = minority if rank == world - 1 else majority
    message = first_error([mine, *[lambda: dist.all_reduce(ones())] * 3])
    assert time.monotonic() - start < 5
    named = [r for r in range(world) if f"rank {r}" in message]
    assert world - 1 in named and len(named) >= 2, message
    assert ours in message and theirs in message, message
    assert "Traceback" not in message
    with pytest.raises(dist.DistBackendError):
        dist.all_reduce(ones())
    dist.destroy_process_group()


@on_ranks(2, fresh=True)
def test_other_groups_work_on_after_a_disagreement_in_one(rank, world):
    one, other = dist.new_group(), dist.new_group()
    dist.barrier()
    with pytest.raises(dist.DistBackendError):
        dist.all_reduce(ones(5 + rank), group=one)
    for group in (other, None):
        tensor = ones()
        dist.all_reduce(tensor, group=group)
        assert (tensor == 2).all()


@on_ranks(2, fresh=True)
def test_asynchronous_calls_that_disagree_raise_in_wait(rank, world):
    work = dist.all_reduce(ones(5 + rank), async_op=True)
    with pytest.raises(dist.DistBackendError, match=r"rank 0\b[\s\S]*rank 1\b|rank 1\b[\s\S]*rank 0\b"):
        work.wait()
    with pytest.raises(RuntimeError):
        work.get_future().wait()
    assert work.is_completed() and not work.is_success()


@on_ranks(2, fresh=True)
@pytest.mark.parametrize("by", ["call", "destroy"])
def test_a_broadcast_root_that_returned_early_gets_the_disagreement_later(rank, world, by):
    group = dist.new_group()
    dist.barrier()
    if rank == 0:
        with pytest.raises(dist.DistBackendError) as caught:
            dist.broadcast(ones(5), 0, group=group)
            time.sleep(0.3)
            if by == "call":
                dist.all_reduce(ones(), group=group)
            else:
                dist.destroy_process_group(group)
        assert "5" in str(caught.value) and "6" in str(caught.value)
    else:
        with pytest.raises(dist.DistBackendError, match="rank 0"):
            dist.broadcast(ones(6), 0, group=group)
    dist.barrier()


@on_ranks(2, fresh=True)
@pytest.mark.parametrize(("sent", "received"), [(5, 4), (4, 5), (300_000, 5), (5, 300_000)])
def test_a_message_of_another_size_than_expected_is_an_error_on_the_receiver(rank, world, sent, received):
    if rank == 0:
        try:
            dist.send(ones(sent), 1)
            dist.barrier()
        except dist.DistBackendError as error:
            assert "rank 1" in str(error)
        else:
            raise AssertionError("nothing was raised")
    else:
        with pytest.raises(dist.DistBackendError, match=rf"(?s)rank 0\b.*{sent}|{sent}.*rank 0\b") as caught:
            dist.recv(ones(received), 0)
        assert str(received) in str(caught.value)


@on_ranks(2, fresh=True)
def test_a_message_of_another_dtype_than_expected_is_an_error_on_the_receiver(rank, world):
    if rank == 0:
        try:
            dist.send(ones(5), 1)
            dist.barrier()
        except dist.DistBackendError:
            pass
        else:
            raise AssertionError("nothing was raised")
    else:
        with pytest.raises(dist.DistBackendError, match="(?s)float32.*int32|int32.*float32"):
            dist.recv(ones(5, torch.int32), 0)


@on_ranks(2, fresh=True)
@pytest.mark.parametrize("count", [3, 100_000])
def test_splits_that_two_ranks_see_differently_are_an_error_on_both(rank, world, count):
    # Rank 0 sends `count` rows to rank 1, which expects one row more.
    into = [count, count] if rank == 0 else [count + 1, count]
    with pytest.raises(dist.DistBackendError, match=r"(?s)rank 0\b.*rank 1\b|rank 1\b.*rank 0\b"):
        dist.all_to_all_single(ones(sum(into)), ones(2 * count), into, [count, count])
        dist.all_reduce(ones())


@on_ranks(2, fresh=True, deadline=20)
def test_a_rank_that_makes_one_call_more_is_named_when_the_time_is_up(rank, world):
    from datetime import timedelta

    group = dist.new_group(timeout=timedelta(milliseconds=500))
    dist.all_reduce(ones(), group=group)
    if rank == 0:
        with pytest.raises(dist.DistBackendError, match=r"(?s)all_reduce.*rank 1\b"):
            dist.all_reduce(ones(), group=group)
    dist.barrier()


@on_ranks(3, fresh=True)
def test_a_timeout_names_every_rank_that_stayed_away(rank, world):
    from datetime import timedelta

    group = dist.new_group(timeout=timedelta(milliseconds=500))
    dist.barrier()
    if rank != 2:
        with pytest.raises(dist.DistBackendError, match=r"(?s)all_reduce.*rank 2\b") as caught:
            dist.all_reduce(ones(), group=group)
        assert "500" in str(caught.value)
    dist.barrier()
