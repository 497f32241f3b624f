"""reduce and reduce_scatter: operators, dtypes, roots, uneven and coalesced forms. Inputs stay unchanged."""

import functools
import itertools

import pytest
import torch
import torch.distributed as dist
from support import bytes_equal, contributions, expected_reduction, noise, on_ranks, premul_sum, reduce_op
from support.oracle import offered

COUNT = 1009


@on_ranks(1, 2, 3)
@pytest.mark.parametrize(("op", "dtype"), offered())
def test_the_root_of_a_reduce_has_the_exact_result(rank, world, op, dtype):
    tensors = contributions(world, COUNT, dtype, op)
    root = world - 1
    result = tensors[rank].clone()
    dist.reduce(result, root, reduce_op(op))
    if rank == root:
        assert bytes_equal(result, expected_reduction(tensors, op))


@on_ranks(2, 3, 4)
@pytest.mark.parametrize("count", [0, 1, 5, 16_385, 300_007])
def test_every_rank_can_be_the_root_of_a_reduce(rank, world, count):
    for root in range(world):
        tensors = contributions(world, count, "float32", seed=root)
        result = tensors[rank].clone()
        dist.reduce(result, root)
        if rank == root:
            assert bytes_equal(result, expected_reduction(tensors, "SUM"))


@on_ranks(3, 4)
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_rows_that_collect_add_16_bit_floats_in_float32_by_rank_and_round_once(rank, world, dtype):
    import torch_accl

    rows = "all_reduce=direct_two_phase_collected", "reduce_scatter=direct_collected", "reduce=flat_collected"
    group = dist.new_group(pg_options=torch_accl.Options(algorithm=list(rows)))
    # 1,009 elements give parts of unequal size. With 20,000 elements, several parts share a segment.
    for count, (op, divisor) in itertools.product((3, 1009, 20_000), (("SUM", 1), ("AVG", world))):
        tensors = noise(world, world * count, dtype)
        total = functools.reduce(torch.add, [tensor.float() for tensor in tensors]) / divisor
        expected = total.to(tensors[0].dtype)
        whole, at_root = tensors[rank].clone(), tensors[rank].clone()
        dist.all_reduce(whole, reduce_op(op), group)
        assert bytes_equal(whole, expected)
        for root in range(world):
            at_root.copy_(tensors[rank])
            dist.reduce(at_root, root, reduce_op(op), group)
            assert rank != root or bytes_equal(at_root, expected)
        block = torch.empty(count, dtype=whole.dtype)
        dist.reduce_scatter_tensor(block, tensors[rank], reduce_op(op), group)
        assert bytes_equal(block, expected[rank * count : (rank + 1) * count])
    dist.destroy_process_group(group)


@on_ranks(2, 3)
def test_a_reduce_leaves_the_tensors_of_other_ranks_alone(rank, world):
    own = contributions(world, 70_001, "float32")[rank]
    result = own.clone()
    dist.reduce(result, 0)
    if rank != 0:
        assert bytes_equal(result, own)


@on_ranks(2, 3)
def test_reduce_takes_a_premultiplied_sum(rank, world):
    tensors = contributions(world, COUNT, "float64")
    result = tensors[rank].clone()
    dist.reduce(result, 0, premul_sum(0.5))
    if rank == 0:
        assert bytes_equal(result, expected_reduction([t * 0.5 for t in tensors], "SUM"))


@on_ranks(1, 2, 3)
@pytest.mark.parametrize(("op", "dtype"), offered())
def test_reduce_scatter_gives_each_rank_its_exact_block(rank, world, op, dtype):
    blocks = [contributions(world, 101, dtype, op, seed=block) for block in range(world)]
    inputs = [blocks[block][rank] for block in range(world)]
    untouched = [t.clone() for t in inputs]
    output = torch.empty_like(inputs[0])
    dist.reduce_scatter(output, inputs, reduce_op(op))
    assert bytes_equal(output, expected_reduction(blocks[rank], op))
    assert all(bytes_equal(a, b) for a, b in zip(inputs, untouched, strict=True))


@on_ranks(1, 2, 3)
@pytest.mark.parametrize(("op", "dtype"), offered())
def test_reduce_scatter_single_gives_each_rank_its_exact_block(rank, world, op, dtype):
    tensors = contributions(world, (world * 7, 13), dtype, op)
    own = tensors[rank].clone()
    output = torch.empty_like(own[:7])
    dist.reduce_scatter_single(output, own, reduce_op(op))
    assert bytes_equal(output, expected_reduction(tensors, op)[rank * 7 : rank * 7 + 7])
    assert bytes_equal(own, tensors[rank])


@on_ranks(2, 3, 4)
@pytest.mark.parametrize("count", [0, 1, 2, 63, 16_385, 262_147])
def test_reduce_scatter_single_is_exact_for_every_count(rank, world, count):
    tensors = contributions(world, world * count, "float32", seed=count)
    output = torch.empty(count)
    dist.reduce_scatter_single(output, tensors[rank])
    assert bytes_equal(output, expected_reduction(tensors, "SUM")[rank * count : (rank + 1) * count])


@on_ranks(2, 3)
@pytest.mark.parametrize("empty_block", [False, True])
def test_reduce_scatter_takes_blocks_of_different_sizes(rank, world, empty_block):
    sizes = [0 if empty_block and block == 0 else 3 + 1000 * block for block in range(world)]
    blocks = [contributions(world, size, "float32", seed=block) for block, size in enumerate(sizes)]
    output = torch.empty(sizes[rank])
    dist.reduce_scatter(output, [blocks[block][rank] for block in range(world)])
    assert bytes_equal(output, expected_reduction(blocks[rank], "SUM"))


@on_ranks(2, 3)
def test_reduce_scatter_single_takes_a_premultiplied_sum(rank, world):
    tensors = contributions(world, world * 50, "bfloat16")
    output = torch.empty(50, dtype=torch.bfloat16)
    dist.reduce_scatter_single(output, tensors[rank], premul_sum(0.25))
    expected = expected_reduction([t * 0.25 for t in tensors], "SUM")
    assert bytes_equal(output, expected[rank * 50 : rank * 50 + 50])


@on_ranks(1, 2, 3)
@pytest.mark.parametrize("async_ops", [False, True])
def test_coalesced_reduce_scatters_give_each_rank_its_blocks(rank, world, async_ops):
    counts = [1, 17, 4099]
    sets = [contributions(world, world * count, "float32", seed=count) for count in counts]
    outputs = [torch.empty(count) for count in counts]
    with dist._coalescing_manager(async_ops=async_ops) as manager:
        for output, tensors in zip(outputs, sets, strict=True):
            dist.reduce_scatter_single(output, tensors[rank])
    if async_ops:
        manager.wait()
    for output, tensors, count in zip(outputs, sets, counts, strict=True):
        assert bytes_equal(output, expected_reduction(tensors, "SUM")[rank * count : (rank + 1) * count])


@on_ranks(2, 3)
def test_the_output_of_a_reduce_scatter_may_be_a_view_of_its_input(rank, world):
    tensors = contributions(world, world * 501, "float32")
    own = tensors[rank].clone()
    output = own[rank * 501 : (rank + 1) * 501]
    dist.reduce_scatter_single(output, own)
    assert bytes_equal(output, expected_reduction(tensors, "SUM")[rank * 501 : (rank + 1) * 501])
