"""all_to_all: single tensors with equal and given splits, and lists whose tensors differ in size."""

import pytest
import torch
import torch.distributed as dist
from support import bytes_equal, contribution, on_ranks
from support.oracle import MOVED


def block(source, target, shape, dtype="float32"):
    """The block that `source` sends to `target`."""
    return contribution(source, shape, dtype, seed=target)


@on_ranks(1, 2, 3)
@pytest.mark.parametrize("dtype", MOVED)
def test_single_moves_every_dtype_in_equal_blocks(rank, world, dtype):
    sent = torch.cat([block(rank, target, (4, 3), dtype).view(-1) for target in range(world)])
    output = torch.empty_like(sent)
    dist.all_to_all_single(output, sent)
    assert bytes_equal(output, torch.cat([block(source, rank, (4, 3), dtype).view(-1) for source in range(world)]))


@on_ranks(1, 2, 3)
@pytest.mark.parametrize("dtype", MOVED)
def test_lists_move_every_dtype(rank, world, dtype):
    sent = [block(rank, target, (4, 3), dtype) for target in range(world)]
    outputs = [torch.empty_like(sent[0]) for _ in range(world)]
    dist.all_to_all(outputs, sent)
    assert all(bytes_equal(outputs[source], block(source, rank, (4, 3), dtype)) for source in range(world))


@on_ranks(2, 3, 4)
@pytest.mark.parametrize("count", [0, 1, 3, 65, 16_385, 131_101])
def test_single_moves_every_count(rank, world, count):
    sent = torch.cat([block(rank, target, count) for target in range(world)])
    output = torch.zeros_like(sent)
    dist.all_to_all_single(output, sent)
    assert bytes_equal(output, torch.cat([block(source, rank, count) for source in range(world)]))


def uneven(source, target):
    """Number of rows from `source` to `target`: all different, some zero, some large."""
    return 0 if (source + target) % 3 == 2 else 1 + 10 * source + 500 * target


@on_ranks(1, 2, 3, 4)
def test_single_follows_the_given_splits(rank, world):
    into = [uneven(source, rank) for source in range(world)]
    out_of = [uneven(rank, target) for target in range(world)]
    sent = torch.cat([block(rank, target, (rows, 2)) for target, rows in enumerate(out_of)])
    output = torch.zeros(sum(into), 2)
    dist.all_to_all_single(output, sent, into, out_of)
    assert bytes_equal(output, torch.cat([block(source, rank, (rows, 2)) for source, rows in enumerate(into)]))


@on_ranks(2, 3, 4)
@pytest.mark.parametrize("rows", [1, 20_000])
def test_equal_splits_may_be_given_by_some_ranks_only(rank, world, rows):
    splits = [[rows] * world, [rows] * world] if rank % 2 == 0 else []
    sent = torch.cat([block(rank, target, (rows, 2)) for target in range(world)])
    output = torch.zeros_like(sent)
    dist.all_to_all_single(output, sent, *splits)
    assert bytes_equal(output, torch.cat([block(source, rank, (rows, 2)) for source in range(world)]))


@on_ranks(2, 3)
def test_single_lets_a_rank_send_nothing_at_all(rank, world):
    into = [4 if source == 0 else 0 for source in range(world)]
    out_of = [4 if rank == 0 else 0] * world
    sent = torch.cat([block(rank, target, rows) for target, rows in enumerate(out_of)])
    output = torch.zeros(4)
    dist.all_to_all_single(output, sent, into, out_of)
    assert bytes_equal(output, block(0, rank, 4))


@on_ranks(1, 2, 3, 4)
def test_lists_may_hold_tensors_of_any_size(rank, world):
    sent = [block(rank, target, uneven(rank, target)) for target in range(world)]
    outputs = [torch.zeros(uneven(source, rank)) for source in range(world)]
    dist.all_to_all(outputs, sent)
    assert all(bytes_equal(outputs[source], block(source, rank, uneven(source, rank))) for source in range(world))


@on_ranks(2, 3)
def test_lists_may_hold_strided_tensors(rank, world):
    sent = [block(rank, target, (5, 3)).t() for target in range(world)]
    outputs = [torch.zeros(3, 10)[:, ::2] for _ in range(world)]
    dist.all_to_all(outputs, sent)
    assert all(bytes_equal(outputs[source], block(source, rank, (5, 3)).t()) for source in range(world))
