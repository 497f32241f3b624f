"""Sizes at which 32-bit arithmetic overflows. The tests run only where enough memory is free."""

import pytest
import torch
import torch.distributed as dist
from support import on_ranks

GIB = 1 << 30
BEYOND_INT32 = 2**31 + 4097


def need_memory(gib: float):
    with open("/proc/meminfo") as file:
        available = next(int(line.split()[1]) * 1024 for line in file if line.startswith("MemAvailable"))
    if available < gib * GIB:
        pytest.skip(f"needs {gib} GiB of free memory, {available / GIB:.1f} are there")


def pattern(position: int) -> int:
    return position * 7 % 100


def check_ends(tensor, factor: int):
    """Checks a few elements on both sides of every position at which a 31-bit or 32-bit count could wrap."""
    for position in (0, 1, 4095, 2**30, 2**31 - 2, 2**31 - 1, 2**31, 2**31 + 1, tensor.numel() - 1):
        assert tensor[position].item() == pattern(position) * factor % 256


def filled():
    block = torch.tensor([pattern(p) for p in range(100)], dtype=torch.uint8)
    return block.repeat(BEYOND_INT32 // 100 + 1)[:BEYOND_INT32]


@pytest.mark.slow
@pytest.mark.large
@on_ranks(2, fresh=True, deadline=120)
def test_all_reduce_of_more_than_2_to_the_31_elements(rank, world):
    need_memory(5.0 * world)
    tensor = filled()
    dist.all_reduce(tensor)
    check_ends(tensor, world)


@pytest.mark.slow
@pytest.mark.large
@on_ranks(2, fresh=True, deadline=120)
def test_broadcast_of_more_than_2_to_the_31_elements(rank, world):
    need_memory(5.0 * world)
    tensor = filled() if rank == 0 else torch.zeros(BEYOND_INT32, dtype=torch.uint8)
    dist.broadcast(tensor, 0)
    check_ends(tensor, 1)


@pytest.mark.slow
@pytest.mark.large
@on_ranks(2, fresh=True, deadline=120)
def test_send_of_more_than_2_to_the_31_elements(rank, world):
    need_memory(5.0 * world)
    if rank == 0:
        dist.send(filled(), 1)
    else:
        tensor = torch.zeros(BEYOND_INT32, dtype=torch.uint8)
        dist.recv(tensor, 0)
        check_ends(tensor, 1)


@on_ranks(2, 3)
@pytest.mark.parametrize("mib", [16, 64])
def test_messages_much_larger_than_any_buffer_arrive_whole(rank, world, mib):
    count = mib * (1 << 18) + 1
    tensor = torch.arange(count, dtype=torch.int32) * (rank + 1)
    dist.all_reduce(tensor)
    factor = world * (world + 1) // 2
    assert torch.equal(tensor, torch.arange(count, dtype=torch.int32) * factor)
