"""broadcast, all_gather, gather and scatter: every dtype arrives bit for bit, in every form of the call."""

import pytest
import torch
import torch.distributed as dist
from support import bytes_equal, contribution, contributions, on_ranks
from support.oracle import MOVED
from support.versions import needs

COUNTS = [0, 1, 2, 3, 63, 65, 16_385, 262_147]


@on_ranks(1, 2, 3)
@pytest.mark.parametrize("dtype", MOVED)
def test_broadcast_moves_every_dtype(rank, world, dtype):
    for root in range(world):
        sent = contribution(root, 1009, dtype)
        tensor = sent.clone() if rank == root else torch.empty_like(sent)
        dist.broadcast(tensor, root)
        assert bytes_equal(tensor, sent)


@on_ranks(2, 3, 4)
@pytest.mark.parametrize("count", COUNTS)
def test_broadcast_moves_every_count_from_every_root(rank, world, count):
    for root in range(world):
        sent = contribution(root, count, "int64", seed=count)
        tensor = sent.clone() if rank == root else torch.zeros_like(sent)
        dist.broadcast(tensor, root)
        assert bytes_equal(tensor, sent)


@on_ranks(1, 2, 3)
@pytest.mark.parametrize("dtype", MOVED)
def test_all_gather_moves_every_dtype(rank, world, dtype):
    tensors = contributions(world, (7, 11), dtype)
    outputs = [torch.empty_like(t) for t in tensors]
    dist.all_gather(outputs, tensors[rank])
    assert all(bytes_equal(a, b) for a, b in zip(outputs, tensors, strict=True))


@on_ranks(1, 2, 3)
@pytest.mark.parametrize("dtype", MOVED)
def test_all_gather_single_moves_every_dtype(rank, world, dtype):
    tensors = contributions(world, (7, 11), dtype)
    output = torch.empty((world * 7, 11), dtype=tensors[0].dtype)
    dist.all_gather_single(output, tensors[rank])
    assert all(bytes_equal(output[7 * r : 7 * r + 7], tensors[r]) for r in range(world))


@on_ranks(2, 3, 4)
@pytest.mark.parametrize("count", COUNTS)
def test_all_gather_single_moves_every_count(rank, world, count):
    tensors = contributions(world, count, "int32", seed=count)
    output = torch.zeros(world * count, dtype=torch.int32)
    dist.all_gather_single(output, tensors[rank])
    assert bytes_equal(output, torch.cat(tensors))


@on_ranks(2, 3)
def test_all_gather_single_fills_a_stacked_output(rank, world):
    tensors = contributions(world, (3, 5), "float32")
    output = torch.empty(world, 3, 5)
    dist.all_gather_single(output, tensors[rank])
    assert bytes_equal(output, torch.stack(tensors))


@on_ranks(2, 3)
def test_the_input_of_an_all_gather_may_be_a_view_of_its_output(rank, world):
    tensors = contributions(world, 777, "float32")
    output = torch.zeros(world * 777)
    own = output[rank * 777 : (rank + 1) * 777]
    own.copy_(tensors[rank])
    dist.all_gather_single(output, own)
    assert bytes_equal(output, torch.cat(tensors))


@on_ranks(2, 3)
def test_all_gather_takes_tensors_whose_sizes_differ_between_ranks(rank, world):
    tensors = [contribution(r, 5 + 1000 * r, "float32") for r in range(world)]
    outputs = [torch.empty_like(t) for t in tensors]
    dist.all_gather(outputs, tensors[rank])
    assert all(bytes_equal(a, b) for a, b in zip(outputs, tensors, strict=True))


@on_ranks(1, 2, 3)
def test_all_gather_coalesced_fills_every_list(rank, world):
    sets = [contributions(world, shape, "float32", seed=i) for i, shape in enumerate([(3,), (2, 2), (), (0,), (4099,)])]
    outputs = [[torch.zeros_like(tensors[0]) for tensors in sets] for _ in range(world)]
    dist.all_gather_coalesced(outputs, [tensors[rank] for tensors in sets])
    for r in range(world):
        assert all(bytes_equal(a, tensors[r]) for a, tensors in zip(outputs[r], sets, strict=True))


@on_ranks(1, 2, 3)
@pytest.mark.parametrize("async_ops", [False, True])
def test_coalesced_all_gathers_fill_every_output(rank, world, async_ops):
    sets = [contributions(world, count, "bfloat16", seed=count) for count in (1, 17, 4099)]
    outputs = [torch.zeros(world * tensors[0].numel(), dtype=torch.bfloat16) for tensors in sets]
    with dist._coalescing_manager(async_ops=async_ops) as manager:
        for output, tensors in zip(outputs, sets, strict=True):
            dist.all_gather_single(output, tensors[rank])
    if async_ops:
        manager.wait()
    for output, tensors in zip(outputs, sets, strict=True):
        assert bytes_equal(output, torch.cat(tensors))


@on_ranks(1, 2, 3)
@pytest.mark.parametrize("dtype", MOVED)
def test_gather_brings_every_dtype_to_every_root(rank, world, dtype):
    tensors = contributions(world, (5, 3), dtype)
    for root in range(world):
        outputs = [torch.empty_like(t) for t in tensors] if rank == root else None
        dist.gather(tensors[rank], outputs, dst=root)
        if rank == root:
            assert all(bytes_equal(a, b) for a, b in zip(outputs, tensors, strict=True))


@on_ranks(1, 2, 3)
@pytest.mark.parametrize("dtype", MOVED)
def test_scatter_takes_every_dtype_from_every_root(rank, world, dtype):
    tensors = contributions(world, (5, 3), dtype)
    for root in range(world):
        output = torch.empty_like(tensors[0])
        dist.scatter(output, tensors if rank == root else None, src=root)
        assert bytes_equal(output, tensors[rank])


@on_ranks(2, 3, 4)
@pytest.mark.parametrize("count", COUNTS)
def test_gather_and_scatter_move_every_count(rank, world, count):
    tensors = contributions(world, count, "float32", seed=count)
    outputs = [torch.zeros(count) for _ in range(world)] if rank == 1 else None
    dist.gather(tensors[rank], outputs, dst=1)
    if rank == 1:
        assert all(bytes_equal(a, b) for a, b in zip(outputs, tensors, strict=True))
    back = torch.zeros(count)
    dist.scatter(back, outputs, src=1)
    assert bytes_equal(back, tensors[rank])


@on_ranks(2, 3)
def test_what_is_sent_is_left_as_it_was(rank, world):
    own = contribution(rank, 70_001, "float32")
    sent = own.clone()
    dist.all_gather([torch.empty_like(own) for _ in range(world)], sent)
    dist.gather(sent, [torch.empty_like(own) for _ in range(world)] if rank == 0 else None, dst=0)
    dist.scatter(torch.empty_like(own), [sent] * world if rank == 0 else None, src=0)
    assert bytes_equal(own, sent)


@on_ranks(2)
@pytest.mark.parametrize("dtype", ["float4_e2m1fn_x2", "uint1", "uint4", "int3", "bits1x8", "bits8", "bits16"])
def test_packed_types_travel_as_bytes(rank, world, dtype):
    # torch can neither copy nor compare tensors of most of these dtypes.
    sent = torch.arange(4096, dtype=torch.int16).view(torch.uint8)
    got = sent.clone() if rank == 0 else torch.zeros_like(sent)
    dist.broadcast(got.view(getattr(torch, dtype)), 0)
    assert torch.equal(got, sent)
    with pytest.raises(NotImplementedError, match="is not defined for"):
        dist.all_reduce(got.view(getattr(torch, dtype)))
    dist.barrier()


@needs("gather_single")
@on_ranks(1, 2, 3)
@pytest.mark.parametrize("dtype", ["float32", "int16", "bool"])
@pytest.mark.parametrize("async_op", [False, True])
def test_gather_single_brings_all_blocks_to_the_root_in_one_tensor(rank, world, dtype, async_op):
    for root in range(world):
        sent = contributions(world, 1009, dtype, seed=root)
        output = torch.empty(1009 * world, dtype=sent[0].dtype) if rank == root else None
        work = dist.gather_single(sent[rank], output, dst=root, async_op=async_op)
        if async_op:
            work.wait()
        if rank == root:
            assert bytes_equal(output, torch.cat(sent))


@needs("gather_single")
@on_ranks(2)
def test_gather_single_takes_strided_and_stacked_outputs_and_refuses_other_sizes(rank, world):
    sent = [torch.full((3, 4), float(r)) for r in range(world)]
    output = torch.zeros(3 * world, 8)[:, ::2]
    dist.gather_single(sent[rank], output if rank == 0 else None)
    stacked = torch.zeros(world, 3, 4)
    dist.gather_single(sent[rank], stacked if rank == 0 else None)
    if rank == 0:
        assert torch.equal(output, torch.cat(sent)) and torch.equal(stacked, torch.stack(sent))
        with pytest.raises(ValueError, match="gather.*size"):
            dist.gather_single(torch.ones(3), torch.ones(3 * world + 1))
    value = dist.gather_single(sent[rank], output if rank == 0 else None, async_op=True).get_future().wait()
    assert len(value) == (1 if rank == 0 else 0)
    dist.barrier()
