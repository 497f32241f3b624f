"""all_reduce: every operator and dtype against the exact result, coalesced calls, and the rounding of 16-bit sums."""

import pytest
import torch
import torch.distributed as dist
from support import bound, bytes_equal, contribution, expected_reduction, on_ranks, premul_sum, reduce_op
from support.oracle import COMPLEX, FLOAT8, FLOATS, INTEGERS, offered

# No world divides 1000 + 7; it is more than a cache line and less than a segment.
COUNT = 1007


def inputs(world, shape, dtype, op="SUM", seed=0):
    return [contribution(r, shape, dtype, op, seed) for r in range(world)]


@on_ranks(1, 2, 3)
@pytest.mark.parametrize(("op", "dtype"), offered())
def test_every_operator_and_dtype_gives_the_exact_result(rank, world, op, dtype):
    tensors = inputs(world, COUNT, dtype, op)
    result = tensors[rank].clone()
    dist.all_reduce(result, reduce_op(op))
    assert bytes_equal(result, expected_reduction(tensors, op))
