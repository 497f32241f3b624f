"""Runs what is built on torch.distributed over the backend and over gloo, in the same processes, and compares."""

import torch
import torch.distributed as dist
from torch.utils import _pytree as pytree

from .oracle import bytes_equal
from .runner import BACKEND, init_group


def over(backend: str, consumer, rank: int, world: int):
    """What `consumer(rank, world)` returns when the default group is one of `backend`."""
    torch.manual_seed(1)
    init_group(backend)
    result = consumer(rank, world)
    dist.barrier()
    dist.destroy_process_group()
    return result


def same_as_gloo(consumer, rank: int, world: int, tolerance: float = 0.0):
    """The consumer returns tensors and numbers, in any nesting: equal bits, or within a relative tolerance.

    With two ranks a sum has one order, so bits are equal wherever both round at the same places. With more ranks the
    orders may differ: each of a step's sums may then be off by (ranks - 1) half units in the last place of the largest
    summand, and the caller derives its tolerance from that and the number of steps.
    """
    mine, theirs = over(BACKEND, consumer, rank, world), over("gloo", consumer, rank, world)
    mine, shape = pytree.tree_flatten(mine)
    theirs, their_shape = pytree.tree_flatten(theirs)
    assert shape == their_shape and mine
    for index, (a, b) in enumerate(zip(mine, theirs, strict=True)):
        a, b = (value if isinstance(value, torch.Tensor) else torch.as_tensor(value) for value in (a, b))
        if tolerance:
            scale = b.abs().max().clamp(min=1e-30)
            assert (a - b).abs().max() <= tolerance * scale, f"value {index} differs by {(a - b).abs().max() / scale}"
        else:
            assert bytes_equal(a, b), f"value {index} differs by {(a.double() - b.double()).abs().max()}"
