"""Runs code that builds on torch.distributed twice in the same processes, and compares.

`same_as_gloo` runs it over the backend and over gloo. `same_as_host` runs it on tensors of an accelerator and on CPU
tensors.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.utils import _pytree as pytree

from . import standin
from .oracle import bytes_equal
from .runner import BACKEND, init_group


class Branches(nn.Module):
    """Uses one of two branches, a different one on every rank and step."""

    def __init__(self):
        super().__init__()
        self.branches = nn.ModuleList(nn.Linear(12, 5) for _ in range(2))
        self.step = 0

    def forward(self, inputs):
        self.step += 1
        return self.branches[(dist.get_rank() + self.step // 2) % 2](inputs)


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
    _compare(over(BACKEND, consumer, rank, world), over("gloo", consumer, rank, world), tolerance)


def same_as_host(
    consumer,
    rank: int,
    world: int,
    backend: str | None = None,
    tolerance: float = 0.0,
    index: int = 0,
    kept: tuple[str, ...] = (),
):
    """Compares the results of `consumer(rank, world, device)` on device `index` of the stand-in with its results on CPU
    tensors.

    The bits must be equal, or agree within a relative tolerance, with the streams of the stand-in early, late and at
    random. Nothing may stay in the memory of the device, and no fault may be counted. `kept` names counters of things that
    torch itself keeps after the program.
    """
    module = standin.register()
    torch.accelerator.set_device_index(index)
    init_group(backend)
    results = {}
    for order in ("host", *standin.ORDERS):
        torch.manual_seed(1)
        if order == "host":
            results[order] = consumer(rank, world, torch.device("cpu"))
            continue
        module.set_order(order, rank + 1)
        # torch itself makes non-blocking copies of pageable memory, such as DDP's check of parameters.
        with standin.nothing_is_lost(module, but=("pageable", *kept)):
            result = consumer(rank, world, torch.device("standin", index))
            # Copies, because results in pinned memory would count as lost.
            results[order] = pytree.tree_map_only(torch.Tensor, lambda value: value.detach().cpu().clone(), result)
            del result
            dist.barrier()
        _compare(results[order], results["host"], tolerance, f"order {order}: ")
    counts = module.counts()
    assert (counts["wrong_device"], counts["after_free"]) == (0, 0), counts
    dist.destroy_process_group()


def _compare(mine, theirs, tolerance: float, where: str = ""):
    mine, shape = pytree.tree_flatten(mine)
    theirs, their_shape = pytree.tree_flatten(theirs)
    assert shape == their_shape and mine, f"{where}{shape} and {their_shape}"
    for index, (a, b) in enumerate(zip(mine, theirs, strict=True)):
        a, b = (value if isinstance(value, torch.Tensor) else torch.as_tensor(value) for value in (a, b))
        if tolerance:
            scale = b.abs().max().clamp(min=1e-30)
            assert (a - b).abs().max() <= tolerance * scale, (
                f"{where}value {index} differs by {(a - b).abs().max() / scale}"
            )
        else:
            assert bytes_equal(a, b), f"{where}value {index} differs by {(a.double() - b.double()).abs().max()}"
