"""all_reduce: every operator and dtype against the exact result, coalesced calls, and the rounding of sums."""

import threading
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from support import (
    bound,
    bytes_equal,
    contributions,
    expected_reduction,
    noise,
    on_ranks,
    premul_sum,
    reduce_op,
)
from support.oracle import COMPLEX, FLOAT8, FLOATS, offered

# No world size here divides it; larger than a cache line, smaller than a segment.
COUNT = 1009

# Counts around thresholds: nothing, one element, fewer elements than ranks, a segment, an eager window.
COUNTS = [0, 1, 2, 3, 5, 7, 63, 64, 65, 1023, 4099, 16_384, 16_385, 65_537, 262_147, 1_048_583]


@on_ranks(1, 2, 3)
@pytest.mark.parametrize(("op", "dtype"), offered())
def test_every_operator_and_dtype_gives_the_exact_result(rank, world, op, dtype):
    tensors = contributions(world, COUNT, dtype, op)
    result = tensors[rank].clone()
    dist.all_reduce(result, reduce_op(op))
    assert bytes_equal(result, expected_reduction(tensors, op))


@on_ranks(2, 3, 4)
@pytest.mark.parametrize("count", COUNTS)
def test_every_count_is_summed_exactly(rank, world, count):
    tensors = contributions(world, count, "float32", seed=count)
    result = tensors[rank].clone()
    dist.all_reduce(result)
    assert bytes_equal(result, expected_reduction(tensors, "SUM"))


@on_ranks(2, 3)
@pytest.mark.parametrize("op", ["SUM", "AVG"])
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("count", [33, 100_003])
def test_a_rounded_sum_stays_within_its_bound(rank, world, dtype, op, count):
    tensors = noise(world, count, dtype)
    result = tensors[rank].clone()
    dist.all_reduce(result, reduce_op(op))
    divisor = world if op == "AVG" else 1
    exact = sum(t.to(torch.float64) for t in tensors) / divisor
    # The division of an average rounds once more.
    slack = bound(tensors) / divisor + exact.abs() * torch.finfo(tensors[0].dtype).eps
    assert ((result.to(torch.float64) - exact).abs() <= slack).all()


@on_ranks(2)
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_two_ranks_add_16_bit_floats_in_float32_and_round_once(rank, world, dtype):
    tensors = noise(world, COUNT, dtype)
    result = tensors[rank].clone()
    dist.all_reduce(result)
    assert bytes_equal(result, (tensors[0].float() + tensors[1].float()).to(result.dtype))


@on_ranks(2, 3, 4)
@pytest.mark.parametrize("count", [5, 4099, 300_007])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_all_ranks_end_with_the_same_bits(rank, world, dtype, count):
    result = noise(world, count, dtype)[rank]
    dist.all_reduce(result)
    from_all = [torch.empty_like(result) for _ in range(world)]
    dist.all_gather(from_all, result)
    assert all(bytes_equal(result, other) for other in from_all)


@on_ranks(3)
@pytest.mark.parametrize("count", [9, 50_021])
def test_the_same_call_gives_the_same_bits_every_time(rank, world, count):
    own = noise(world, count, "float32")[rank]
    results = []
    for _ in range(5):
        results.append(own.clone())
        dist.all_reduce(results[-1])
    assert all(bytes_equal(results[0], other) for other in results)


@on_ranks(1, 2, 3)
@pytest.mark.parametrize("dtype", FLOATS)
def test_premul_sum_multiplies_each_contribution_by_a_number(rank, world, dtype):
    tensors = contributions(world, COUNT, dtype)
    result = tensors[rank].clone()
    dist.all_reduce(result, premul_sum(0.5))
    assert bytes_equal(result, expected_reduction([t * 0.5 for t in tensors], "SUM"))


@on_ranks(1, 2, 3)
@pytest.mark.parametrize("dtype", ["float32", "float64", "bfloat16"])
def test_premul_sum_multiplies_each_contribution_by_a_tensor(rank, world, dtype):
    tensors = contributions(world, COUNT, dtype)
    result = tensors[rank].clone()
    dist.all_reduce(result, premul_sum(torch.tensor([0.25], dtype=result.dtype)))
    assert bytes_equal(result, expected_reduction([t * 0.25 for t in tensors], "SUM"))


@on_ranks(2)
def test_premul_sum_uses_the_factor_of_each_rank(rank, world):
    tensors = contributions(world, COUNT, "float32")
    result = tensors[rank].clone()
    dist.all_reduce(result, premul_sum(float(2**rank)))
    assert bytes_equal(result, tensors[0] + 2 * tensors[1])


@on_ranks(1, 2, 3)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int32", "complex64"])
def test_coalesced_tensors_are_each_summed(rank, world, dtype):
    shapes = [(7,), (3, 5), (0,), (), (2, 1, 4), (1001,)]
    groups = [contributions(world, shape, dtype, seed=i) for i, shape in enumerate(shapes)]
    results = [tensors[rank].clone() for tensors in groups]
    dist.all_reduce_coalesced(results)
    for result, tensors in zip(results, groups, strict=True):
        assert bytes_equal(result, expected_reduction(tensors, "SUM"))


@on_ranks(2)
@pytest.mark.parametrize("async_ops", [False, True])
def test_the_coalescing_manager_sums_what_it_collected(rank, world, async_ops):
    groups = [contributions(world, shape, "float32", seed=shape) for shape in (1, 100, 10_007)]
    results = [tensors[rank].clone() for tensors in groups]
    with dist._coalescing_manager(async_ops=async_ops) as manager:
        for result in results:
            dist.all_reduce(result)
    if async_ops:
        manager.wait()
    for result, tensors in zip(results, groups, strict=True):
        assert bytes_equal(result, expected_reduction(tensors, "SUM"))


@on_ranks(1, 2)
def test_the_average_of_bool_is_refused_and_the_group_works_on(rank, world):
    tensor = contributions(world, 8, "bool")[rank]
    with pytest.raises(NotImplementedError, match=r"AVG.*bool|bool.*AVG"):
        dist.all_reduce(tensor, dist.ReduceOp.AVG)
    _still_sums(world)


@on_ranks(1, 2, 3)
def test_the_average_of_integers_is_the_sum_divided_towards_zero(rank, world):
    # Lightning averages counters this way on every backend but gloo.
    for dtype in (torch.int32, torch.int64):
        tensor = torch.tensor([7, -7, 1, -1, 0, 100], dtype=dtype) if rank == 0 else torch.zeros(6, dtype=dtype)
        dist.all_reduce(tensor, dist.ReduceOp.AVG)
        assert tensor.tolist() == [int(x / world) for x in (7, -7, 1, -1, 0, 100)]


@on_ranks(1, 2)
@pytest.mark.parametrize("dtype", FLOAT8)
def test_the_sum_of_float8_is_refused_and_the_group_works_on(rank, world, dtype):
    tensor = contributions(world, 8, dtype)[rank]
    with pytest.raises(NotImplementedError, match=rf"SUM.*{dtype}|{dtype}.*SUM"):
        dist.all_reduce(tensor)
    _still_sums(world)


@on_ranks(1, 2)
@pytest.mark.parametrize("op", ["BAND", "BOR", "BXOR"])
@pytest.mark.parametrize("dtype", FLOATS)
def test_bit_operators_on_floats_are_refused_and_the_group_works_on(rank, world, dtype, op):
    tensor = contributions(world, 8, dtype)[rank]
    with pytest.raises(NotImplementedError, match=rf"{op}.*{dtype}|{dtype}.*{op}"):
        dist.all_reduce(tensor, reduce_op(op))
    _still_sums(world)


@on_ranks(2)
@pytest.mark.parametrize("dtype", COMPLEX)
@pytest.mark.parametrize("op", ["MIN", "MAX"])
def test_complex_numbers_have_no_order_to_reduce_by(rank, world, dtype, op):
    tensor = contributions(world, 8, dtype)[rank]
    with pytest.raises((NotImplementedError, ValueError), match=op):
        dist.reduce(tensor, 0, reduce_op(op))
    _still_sums(world)


def _still_sums(world):
    tensor = torch.ones(3)
    dist.all_reduce(tensor)
    assert tensor.tolist() == [world] * 3


@on_ranks(2, 3)
def test_a_tensor_that_stands_twice_in_a_coalesced_call_is_summed_as_often_as_by_itself(rank, world):
    tensors = contributions(world, 1000, "float32")
    result = tensors[rank].clone()
    dist.all_reduce_coalesced([result, result])
    assert bytes_equal(result, expected_reduction(tensors, "SUM"))


def batch_of(*calls):
    """Returns the work of several calls issued as one batch."""
    backend = dist.group.WORLD._get_backend(torch.device("cpu"))
    backend._start_coalescing()
    for call in calls:
        call()
    return backend._end_coalescing()


@on_ranks(2, fresh=True)
def test_the_work_of_a_batch_behaves_as_one(rank, world):
    sums = [torch.ones(10), torch.ones(20)]
    parts = [torch.empty(2) for _ in range(world)]
    work = batch_of(
        *[lambda tensor=tensor: dist.all_reduce(tensor, async_op=True) for tensor in sums],
        lambda: dist.all_gather(parts, torch.full((2,), float(rank)), async_op=True),
    )
    assert work.wait(timedelta(seconds=20)) and work.is_completed() and work.is_success()
    assert work.exception() is None
    assert [tensor.numel() for tensor in work.result()] == [10, 20, 2, 2]
    values = work.get_future().wait()
    assert [tensor.numel() for tensor in values] == [10, 20, 2, 2]
    assert all((tensor == world).all() for tensor in sums)
    assert all((part == r).all() for r, part in enumerate(parts))


@on_ranks(2, fresh=True)
def test_a_wait_for_a_batch_has_one_deadline(rank, world):
    store = dist.distributed_c10d._get_default_store()
    calls = [lambda: dist.all_reduce(torch.ones(10), async_op=True) for _ in range(5)]
    if rank == 0:
        work = batch_of(*calls)
        start = time.monotonic()
        with pytest.raises(dist.DistBackendError, match="Timed out waiting"):
            work.wait(timedelta(milliseconds=300))
        assert time.monotonic() - start < 1.2
        store.set("expired", "")
    else:
        store.wait(["expired"])
        work = batch_of(*calls)
    assert work.wait()


@on_ranks(2, fresh=True)
@pytest.mark.parametrize("timeout", [timedelta(days=150_000), timedelta.max], ids=["410 years", "the longest"])
def test_a_wait_for_longer_than_clocks_count_waits(rank, world, timeout):
    """A wait for a batch once ended after 1 ms, because nanoseconds of more than 292 years do not fit into 64 bits."""
    store = dist.distributed_c10d._get_default_store()
    tensors = [torch.ones(10) for _ in range(3)]
    if rank == 1:
        store.wait(["waits"])
    work = batch_of(*[lambda tensor=tensor: dist.all_reduce(tensor, async_op=True) for tensor in tensors])
    if rank == 0:
        store.set("waits", "")
    assert work.wait(timeout) and all((tensor == world).all() for tensor in tensors)
    single = dist.all_reduce(torch.ones(3), async_op=True)
    future = single.get_future().then(lambda _: None)
    assert single.wait(timeout)
    future.wait()


@on_ranks(2, fresh=True)
def test_threads_may_batch_at_the_same_time(rank, world):
    groups = [dist.new_group() for _ in range(2)]

    def batches(group):
        for _ in range(50):
            with dist._coalescing_manager(group=group, async_ops=True) as manager:
                tensors = [torch.ones(3) for _ in range(3)]
                for tensor in tensors:
                    dist.all_reduce(tensor, group=group)
            manager.wait()
            assert all((tensor == world).all() for tensor in tensors)

    threads = [threading.Thread(target=batches, args=(group,)) for group in groups]
    [thread.start() for thread in threads]
    [thread.join() for thread in threads]
