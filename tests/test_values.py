"""Special numbers and special tensors: NaN, signed zero, denormals, empty, zero-dimensional, strided and lazy views."""

import pytest
import torch
import torch.distributed as dist
from support import bytes_equal, contribution, contributions, expected_reduction, on_ranks, reduce_op
from support.oracle import FLOATS

NAN, INF = float("nan"), float("inf")


@on_ranks(2, 3)
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("op", ["MIN", "MAX"])
@pytest.mark.parametrize("count", [4, 1021])
def test_one_nan_wins_a_minimum_and_a_maximum_on_every_rank(rank, world, op, dtype, count):
    for owner in range(world):
        tensor = torch.full((count,), float(rank), dtype=getattr(torch, dtype))
        tensor[-1] = INF if rank else -INF
        if rank == owner:
            tensor[:2] = NAN
            tensor[-1] = NAN
        dist.all_reduce(tensor, reduce_op(op))
        assert tensor[:2].isnan().all() and tensor[-1].isnan()
        assert (tensor[2:-1] == (0 if op == "MIN" else world - 1)).all()


@on_ranks(2, 3)
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("op", ["MIN", "MAX"])
def test_a_nan_of_any_payload_and_sign_becomes_the_canonical_one(rank, world, op, dtype):
    tensor = torch.zeros(17, dtype=getattr(torch, dtype))
    if rank == 1:
        tensor[:] = -torch.tensor(NAN, dtype=tensor.dtype)
    dist.all_reduce(tensor, reduce_op(op))
    assert bytes_equal(tensor, torch.full_like(tensor, NAN))


@on_ranks(2, 3)
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("minus", [0, 1])
def test_minus_zero_is_below_plus_zero(rank, world, dtype, minus):
    zero = torch.full((67,), -0.0 if rank == minus else 0.0, dtype=getattr(torch, dtype))
    low, high = zero.clone(), zero.clone()
    dist.all_reduce(low, dist.ReduceOp.MIN)
    dist.all_reduce(high, dist.ReduceOp.MAX)
    assert bytes_equal(low, torch.full_like(low, -0.0))
    assert bytes_equal(high, torch.full_like(high, 0.0))


@on_ranks(1, 2, 3)
@pytest.mark.parametrize("dtype", FLOATS)
def test_a_sum_of_minus_zeros_stays_minus_zero(rank, world, dtype):
    tensor = torch.full((67,), -0.0, dtype=getattr(torch, dtype))
    dist.all_reduce(tensor)
    assert bytes_equal(tensor, torch.full_like(tensor, -0.0))


@on_ranks(2, 3)
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("op", ["SUM", "MIN", "MAX", "AVG"])
def test_denormals_survive(rank, world, op, dtype):
    kind = getattr(torch, dtype)
    smallest = torch.finfo(kind).smallest_normal * torch.finfo(kind).eps
    tensor = torch.full((67,), smallest * world, dtype=kind)
    dist.all_reduce(tensor, reduce_op(op))
    expected = smallest * world * (world if op == "SUM" else 1)
    assert expected > 0 and (tensor.to(torch.float64) == expected).all()


@on_ranks(2)
@pytest.mark.parametrize("dtype", FLOATS)
def test_infinities_and_overflow_follow_ieee(rank, world, dtype):
    largest = torch.finfo(getattr(torch, dtype)).max
    mine = ([INF, INF, largest, -largest], [-INF, 1.0, largest, -largest])[rank]
    tensor = torch.tensor(mine, dtype=getattr(torch, dtype))
    dist.all_reduce(tensor)
    assert tensor[0].isnan() and tensor[1:].tolist() == [INF, INF, -INF]


@on_ranks(1, 2, 3)
def test_a_zero_dimensional_tensor_is_one_element(rank, world):
    tensors = contributions(world, (), "float32")
    result = tensors[rank].clone()
    dist.all_reduce(result)
    assert bytes_equal(result, expected_reduction(tensors, "SUM"))
    result = tensors[rank].clone()
    dist.broadcast(result, world - 1)
    assert bytes_equal(result, tensors[world - 1])
    outputs = [torch.empty(()) for _ in range(world)]
    dist.all_gather(outputs, tensors[rank])
    assert all(bytes_equal(a, b) for a, b in zip(outputs, tensors, strict=True))


@on_ranks(1, 2, 3)
@pytest.mark.parametrize("shape", [(0,), (3, 0), (0, 7)])
def test_every_collective_takes_empty_tensors(rank, world, shape):
    empty = torch.empty(shape)
    dist.all_reduce(empty)
    dist.broadcast(empty, 0)
    dist.reduce(empty, 0)
    dist.all_gather([torch.empty(shape) for _ in range(world)], empty)
    dist.gather(empty, [torch.empty(shape) for _ in range(world)] if rank == 0 else None, dst=0)
    dist.scatter(empty, [torch.empty(shape) for _ in range(world)] if rank == 0 else None, src=0)
    dist.reduce_scatter(empty, [torch.empty(shape) for _ in range(world)])
    dist.all_to_all([torch.empty(shape) for _ in range(world)], [torch.empty(shape) for _ in range(world)])
    dist.all_to_all_single(torch.empty(shape), torch.empty(shape), [0] * world, [0] * world) if shape[0] == 0 else None
    assert empty.shape == shape


def _strided(values):
    """Returns a view with the same values in every other element of a larger buffer, and a view of the elements between
    them.
    """
    room = torch.full((*values.shape[:-1], values.shape[-1] * 2), 77, dtype=values.dtype)
    room[..., ::2] = values
    return room[..., ::2], room[..., 1::2]


@on_ranks(1, 2, 3)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8", "complex64"])
def test_all_reduce_of_a_strided_tensor_leaves_its_neighbours_alone(rank, world, dtype):
    tensors = contributions(world, (5, 33), dtype)
    view, between = _strided(tensors[rank])
    dist.all_reduce(view)
    assert bytes_equal(view, expected_reduction(tensors, "SUM"))
    assert (between == 77).all()


@on_ranks(1, 2, 3)
def test_transposed_and_broadcast_inputs_are_read_in_logical_order(rank, world):
    inputs = [contribution(r, (6, 4), "float32").t() for r in range(world)]
    outputs = [_strided(torch.zeros(4, 6))[0] for _ in range(world)]
    dist.all_gather(outputs, inputs[rank])
    assert all(bytes_equal(a, b) for a, b in zip(outputs, inputs, strict=True))
    expanded = torch.tensor([float(rank)]).expand(9)
    outputs = [torch.zeros(9) for _ in range(world)]
    dist.all_gather(outputs, expanded)
    assert [t.tolist() for t in outputs] == [[float(r)] * 9 for r in range(world)]


@on_ranks(2, 3)
def test_rooted_calls_take_strided_tensors(rank, world):
    tensors = [t.t() for t in contributions(world, (6, 4), "float32")]
    view = _strided(tensors[rank])[0]
    dist.broadcast(view, 1)
    assert bytes_equal(view, tensors[1])
    view = _strided(tensors[rank])[0]
    dist.reduce(view, 0)
    if rank == 0:
        assert bytes_equal(view, expected_reduction([t.contiguous() for t in tensors], "SUM"))
    outputs = [_strided(torch.zeros(4, 6))[0] for _ in range(world)]
    dist.gather(tensors[rank], outputs if rank == 0 else None, dst=0)
    if rank == 0:
        assert all(bytes_equal(a, b) for a, b in zip(outputs, tensors, strict=True))
    view = _strided(torch.zeros(4, 6))[0]
    dist.scatter(view, tensors if rank == 0 else None, src=0)
    assert bytes_equal(view, tensors[rank])


@on_ranks(2, 3)
def test_flat_forms_take_strided_tensors(rank, world):
    tensors = contributions(world, (4 * world, 6), "float32")
    output = _strided(torch.zeros(4, 6))[0]
    dist.reduce_scatter_single(output, _strided(tensors[rank])[0])
    assert bytes_equal(output, expected_reduction(tensors, "SUM")[4 * rank : 4 * rank + 4])
    gathered = _strided(torch.zeros(4 * world * world, 6))[0]
    dist.all_gather_single(gathered, _strided(tensors[rank])[0])
    assert bytes_equal(gathered, torch.cat(tensors))
    exchanged = _strided(torch.zeros(4 * world, 6))[0]
    dist.all_to_all_single(exchanged, _strided(tensors[rank])[0])
    assert bytes_equal(exchanged, torch.cat([t[4 * rank : 4 * rank + 4] for t in tensors]))


@on_ranks(2)
def test_a_strided_tensor_may_meet_a_dense_one(rank, world):
    tensors = contributions(world, (5, 33), "float32")
    tensor = _strided(tensors[rank])[0] if rank == 0 else tensors[rank].clone()
    dist.all_reduce(tensor)
    assert bytes_equal(tensor, expected_reduction(tensors, "SUM"))


@on_ranks(1, 2, 3)
def test_negative_views_are_summed_with_their_sign(rank, world):
    tensors = contributions(world, 1009, "float32")
    lazy = torch._neg_view(tensors[rank].clone())
    assert lazy.is_neg()
    dist.all_reduce(lazy)
    # The expected value is not the negative of the sum, whose zeros have the other sign.
    assert bytes_equal(lazy, expected_reduction([-tensor for tensor in tensors], "SUM"))


@on_ranks(1, 2, 3)
def test_negative_views_travel_with_their_sign(rank, world):
    tensors = contributions(world, 1009, "float32")
    outputs = [torch._neg_view(torch.zeros(1009)) if r == 0 else torch.zeros(1009) for r in range(world)]
    dist.all_gather(outputs, torch._neg_view(tensors[rank].clone()))
    assert all(bytes_equal(a, -b) for a, b in zip(outputs, tensors, strict=True))
    lazy = torch._neg_view(tensors[rank].clone())
    dist.broadcast(lazy, 0)
    assert bytes_equal(lazy, -tensors[0])


@on_ranks(1, 2, 3)
@pytest.mark.parametrize("dtype", ["complex64", "complex128"])
def test_conjugate_views_are_resolved(rank, world, dtype):
    # torch itself refuses conjugate views in the calls that it turns into calls on real numbers. These calls reach the
    # backend unchanged.
    tensors = contributions(world, 1009, dtype)
    lazy = tensors[rank].clone().conj()
    assert lazy.is_conj()
    dist.reduce(lazy, 0)
    if rank == 0:
        assert bytes_equal(lazy, expected_reduction([tensor.conj().resolve_conj() for tensor in tensors], "SUM"))
    outputs = [torch.zeros_like(tensors[0]) for _ in range(world)] if rank == 0 else None
    dist.gather(tensors[rank].clone().conj(), outputs, dst=0)
    if rank == 0:
        assert all(bytes_equal(a, b.conj()) for a, b in zip(outputs, tensors, strict=True))


@on_ranks(1, 2, 3)
def test_the_imaginary_part_of_a_conjugate_is_a_negative_strided_view(rank, world):
    tensors = contributions(world, 1009, "complex64")
    own = tensors[rank].clone()
    part = own.conj().imag
    assert part.is_neg() and not part.is_contiguous()
    dist.all_reduce(part)
    assert bytes_equal(part.clone(), expected_reduction([-tensor.imag for tensor in tensors], "SUM"))
    assert bytes_equal(own.real.clone(), tensors[rank].real.clone())


def interleaved(world, width=1):
    """Returns a matrix and its columns in blocks of `width`. The blocks share no element, but their address ranges
    overlap.
    """
    matrix = torch.full((5, world * width), -1.0)
    return matrix, list(matrix.split(width, 1))


COLUMNS = ["all_gather", "gather", "all_to_all", "all_gather_into_tensor", "all_to_all_single", "coalesced", "in_place"]


@on_ranks(2, 3)
@pytest.mark.parametrize("width", [1, 67])
@pytest.mark.parametrize("how", COLUMNS)
def test_outputs_may_be_columns_of_one_matrix(rank, world, how, width):
    """Regression: such outputs were refused, because their address ranges overlap."""
    matrix, columns = interleaved(world, width)
    own = torch.full((5, width), float(rank))
    expected = torch.arange(world).float().repeat_interleave(width).expand(5, -1)
    if how == "all_gather":
        dist.all_gather(columns, own)
    elif how == "gather":
        dist.gather(own, columns if rank == 0 else None, dst=0)
        expected = expected if rank == 0 else torch.full_like(matrix, -1)
    elif how == "all_to_all":
        dist.all_to_all(columns, [own + 10 * to for to in range(world)])
        expected = expected + 10 * rank
    elif how == "all_gather_into_tensor":
        dist.all_gather_into_tensor(matrix.t(), own.t())
    elif how == "all_to_all_single":
        dist.all_to_all_single(matrix.t(), own.t().repeat(world, 1))
    elif how == "coalesced":
        for column in columns:
            column.fill_(rank)
        with dist._coalescing_manager():
            for column in columns:
                dist.all_reduce(column)
        expected = torch.full_like(matrix, sum(range(world)))
    else:
        # The input is one of the outputs.
        columns[rank].copy_(own)
        dist.all_gather(columns, columns[rank])
    assert bytes_equal(matrix, expected.contiguous())


@on_ranks(2)
def test_what_is_sent_may_lie_between_the_outputs(rank, world):
    matrix, (*outputs, _) = interleaved(world + 1)
    matrix[:, -1] = torch.arange(5.0) + 10 * rank
    dist.all_gather(outputs, matrix[:, -1:])
    assert bytes_equal(matrix[:, :world].contiguous(), torch.arange(5.0)[:, None] + 10 * torch.arange(float(world)))
    assert bytes_equal(matrix[:, -1].contiguous(), torch.arange(5.0) + 10 * rank)
    # An output between other outputs is also the input for another rank.
    matrix, columns = interleaved(world)
    matrix.copy_(torch.arange(5.0)[:, None] + 10 * rank + 100 * torch.arange(float(world)))
    dist.all_to_all(columns, list(reversed(columns)))
    sent = [torch.arange(5.0) + 10 * of + 100 * (world - 1 - rank) for of in range(world)]
    assert bytes_equal(matrix, torch.stack(sent, 1))


@on_ranks(2)
def test_outputs_that_have_one_element_in_common_are_refused(rank, world):
    room = torch.zeros(40)
    rows, sent = room.as_strided((5, 3), (7, 1)), [torch.ones(15 if rank == 0 else 6) for _ in range(world)]
    # The view contains the last element of the third row.
    with pytest.raises(ValueError, match="share memory"):
        dist.all_to_all([rows, room.as_strided((2, 3), (7, 1), 16)], sent)
    # The view lies between the rows.
    between = room.as_strided((2, 3), (7, 1), 17)
    dist.all_to_all([rows, between], sent)
    assert (rows == 1).all() and (between == 1).all() and room.sum() == 21


@on_ranks(1, 2)
def test_a_tensor_may_begin_anywhere_in_its_storage(rank, world):
    tensors = contributions(world, 1010, "float16")
    room = tensors[rank].clone()
    dist.all_reduce(room[3:1000])
    assert bytes_equal(room[3:1000], expected_reduction(tensors, "SUM")[3:1000])
    assert bytes_equal(room[:3], tensors[rank][:3]) and bytes_equal(room[1000:], tensors[rank][1000:])


@on_ranks(1, 2)
def test_an_unaligned_storage_is_summed_exactly(rank, world):
    tensors = contributions(world, 501, "float32")
    raw = bytearray(501 * 4 + 1)
    view = torch.frombuffer(raw, dtype=torch.uint8)[1:]
    view.copy_(tensors[rank].view(torch.uint8))
    unaligned = torch.frombuffer(raw, dtype=torch.float32, offset=1)
    dist.all_reduce(unaligned)
    assert bytes_equal(unaligned.clone(), expected_reduction(tensors, "SUM"))


@on_ranks(1, 2)
@pytest.mark.parametrize("memory_format", [torch.channels_last, torch.contiguous_format])
def test_channels_last_tensors_are_summed(rank, world, memory_format):
    tensors = contributions(world, (2, 3, 5, 7), "float32")
    own = tensors[rank].clone(memory_format=memory_format)
    dist.all_reduce(own)
    assert bytes_equal(own, expected_reduction(tensors, "SUM"))


@on_ranks(2)
def test_ranks_may_hold_the_same_tensor_in_different_memory_formats(rank, world):
    tensors = contributions(world, (2, 3, 5, 7), "float32")
    own = tensors[rank].clone(memory_format=torch.channels_last if rank else torch.contiguous_format)
    dist.all_reduce(own)
    assert bytes_equal(own, expected_reduction(tensors, "SUM"))
