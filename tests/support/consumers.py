"""Runs code that builds on torch.distributed over the backend and over gloo, in the same processes, and compares."""

import torch
import torch.distributed as dist
from torch.utils import _pytree as pytree

from .oracle import bytes_equal
from .runner import BACKEND, init_group


def over(backend: str, consumer, rank: int, world: int):
    """Returns the result of `consumer(rank, world)` with a default group of `backend`."""
    torch.manual_seed(1)
    init_group(backend)
    result = consumer(rank, world)
    dist.barrier()
    dist.destroy_process_group()
    return result


def same_as_gloo(consumer, rank: int, world: int, tolerance: float = 0.0):
    """Compares the consumer's results over the backend with its results over gloo.

    The consumer returns tensors and numbers, in any nesting. They must have equal bits, or agree within a relative
    tolerance.

    With two ranks a sum has one order, so bits are equal wherever both backends round at the same places. With more
    ranks the orders may differ. Each of a step's sums may then be off by (ranks - 1) half units in the last place of
    the largest summand. The caller derives its tolerance from that and the number of steps.
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
