"""all_reduce of sparse COO tensors on CPU, as DDP calls it for sparse embeddings. Sizes may differ between ranks."""

import resource
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from support import BACKEND, on_ranks, run_ranks
from support.runner import check


def rows_of(rank, count, width=3, total=50, dtype=torch.float32, seed=0):
    generator = torch.Generator().manual_seed(seed * 100 + rank)
    indices = torch.randint(0, total, (1, count), generator=generator)
    values = torch.randint(-8, 9, (count, width), generator=generator).to(dtype)
    return torch.sparse_coo_tensor(indices, values, (total, width))


@on_ranks(1, 2, 3)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_rows_are_added_where_they_meet(rank, world, dtype):
    tensors = [rows_of(r, 5, dtype=dtype) for r in range(world)]
    result = tensors[rank].clone()
    dist.all_reduce(result)
    assert result.is_sparse
    assert torch.equal(result.to_dense(), sum(t.to_dense() for t in tensors))


@on_ranks(2, 3)
def test_ranks_may_bring_different_numbers_of_rows_and_none(rank, world):
    tensors = [rows_of(r, 40 * r) for r in range(world)]
    result = tensors[rank].clone()
    dist.all_reduce(result)
    assert torch.equal(result.to_dense(), sum(t.to_dense() for t in tensors))


@on_ranks(2)
def test_all_ranks_may_bring_nothing(rank, world):
    result = rows_of(rank, 0)
    dist.all_reduce(result)
    assert result.to_dense().abs().sum() == 0


@on_ranks(2)
def test_several_sparse_calls_may_be_in_flight(rank, world):
    sets = [[rows_of(r, 7 + i, seed=i) for r in range(world)] for i in range(5)]
    results = [tensors[rank].clone() for tensors in sets]
    works = [dist.all_reduce(result, async_op=True) for result in results]
    for work in works:
        work.wait()
    for result, tensors in zip(results, sets, strict=True):
        assert torch.equal(result.to_dense(), sum(t.to_dense() for t in tensors))


@on_ranks(2)
def test_two_sparse_dimensions_are_kept(rank, world):
    tensors = [torch.sparse_coo_tensor([[0, r + 1, 3], [r, 1, 2]], [1.0, 2.0, 3.0], (5, 4)) for r in range(world)]
    result = tensors[rank].clone()
    dist.all_reduce(result)
    assert result.sparse_dim() == 2
    assert torch.equal(result.to_dense(), sum(t.to_dense() for t in tensors))


@on_ranks(2)
def test_other_operators_on_sparse_tensors_are_refused_and_the_group_works_on(rank, world):
    with pytest.raises((NotImplementedError, ValueError, RuntimeError), match="(?i)sparse|sum"):
        dist.all_reduce(rows_of(rank, 3), dist.ReduceOp.MAX)
    tensor = torch.ones(3)
    dist.all_reduce(tensor)
    assert tensor.tolist() == [world] * 3


@on_ranks(1, 2)
def test_a_sparse_result_has_another_version(rank, world):
    # The result has new index and value tensors. Autograd may have saved the old ones.
    result = rows_of(rank, 3)
    before = result._version
    dist.all_reduce(result)
    assert result._version > before
    with torch.inference_mode():
        dist.all_reduce(rows_of(rank, 3))


def error_of_sum(rank, tensor, how):
    """Returns the message of the error that the sum raises, and the seconds that it took. Checks that later calls of
    the group are refused.
    """
    start = time.monotonic()
    with pytest.raises((RuntimeError, MemoryError)) as raised:
        if how == "blocking":
            dist.all_reduce(tensor)
        else:
            dist.all_reduce(tensor, async_op=True).wait()
    seconds = time.monotonic() - start
    with pytest.raises((RuntimeError, MemoryError)):
        dist.barrier()
    return str(raised.value), seconds


@pytest.mark.skipif(BACKEND != "accl", reason="gloo waits for its timeout")
@pytest.mark.parametrize("how", ["blocking", "async"])
def test_a_sparse_sum_for_which_one_rank_has_no_memory_ends_on_all_ranks(how):
    def body(rank):
        dist.barrier()
        if rank == 0:
            tensor = torch.sparse_coo_tensor([[0]], torch.ones(1, 100_000_000), (1, 100_000_000))
        else:
            tensor = torch.sparse_coo_tensor(
                torch.empty((1, 0), dtype=torch.long), torch.empty(0, 100_000_000), (1, 100_000_000)
            )
            pages = int(Path("/proc/self/statm").read_text().split()[0])
            limit = pages * resource.getpagesize() + (200 << 20)
            resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
        return error_of_sum(rank, tensor, how)

    (first, seconds), (message, _) = check(run_ranks(body, 2))
    assert "memory" in message and "memory" in first and "rank 1" in first, (first, message)
    assert seconds < 8


@pytest.mark.skipif(BACKEND != "accl", reason="panics of the native module")
@pytest.mark.parametrize(("how", "function"), [("async", "group_spawn"), ("blocking", "group_call")])
def test_a_sparse_sum_that_does_not_begin_on_one_rank_ends_on_all_ranks(how, function):
    from torch_accl import _native

    def body(rank):
        dist.barrier()
        # The abort of the group may overtake a third rank's part of the barrier. Rank 1 therefore waits until all ranks
        # have passed.
        store = dist.distributed_c10d._get_default_store()
        store.set(f"past the barrier {rank}", "yes")
        if rank == 1:
            store.wait([f"past the barrier {other}" for other in range(3)])
            _native._panic_for_test(function)
        return error_of_sum(rank, rows_of(rank, 5), how)

    for message, seconds in check(run_ranks(body, 3)):
        assert f"panic in {function}" in message, message
        assert seconds < 8
