"""Collectives on Python objects, which torch builds from byte tensors."""

import torch
import torch.distributed as dist
from support import on_ranks


def thing(rank):
    return {"rank": rank, "text": "x" * (rank * 1000), "tensor": torch.full((3,), rank).tolist(), "none": None}


@on_ranks(1, 2, 3)
def test_all_gather_object_brings_every_object_to_every_rank(rank, world):
    everything = [None] * world
    dist.all_gather_object(everything, thing(rank))
    assert everything == [thing(r) for r in range(world)]


@on_ranks(1, 2, 3)
def test_gather_object_brings_every_object_to_the_root(rank, world):
    root = world - 1
    everything = [None] * world if rank == root else None
    dist.gather_object(thing(rank), everything, dst=root)
    if rank == root:
        assert everything == [thing(r) for r in range(world)]


@on_ranks(1, 2, 3)
def test_broadcast_object_list_replaces_the_list_of_every_rank(rank, world):
    objects = [thing(7), "text", 42] if rank == 0 else [None] * 3
    dist.broadcast_object_list(objects, src=0)
    assert objects == [thing(7), "text", 42]


@on_ranks(1, 2, 3)
def test_scatter_object_list_gives_each_rank_its_own(rank, world):
    mine = [None]
    dist.scatter_object_list(mine, [thing(r) for r in range(world)] if rank == 0 else None, src=0)
    assert mine == [thing(rank)]


@on_ranks(2, 3)
def test_send_object_list_reaches_its_receiver(rank, world):
    if rank == 0:
        dist.send_object_list([thing(1), None], dst=world - 1)
    elif rank == world - 1:
        objects = [0, 0]
        assert dist.recv_object_list(objects, src=0) == 0
        assert objects == [thing(1), None]
