"""Every kind of call on tensors of one device, from inputs that all devices get alike.

A kind is a function that issues one call and returns its work and its results. The same function runs on host tensors and on
tensors of a device, so results can be compared bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from support import bytes_equal, contribution


@dataclass
class Call:
    """The inputs of one call: `make` gives the contribution of a rank, on the device of the call."""

    rank: int
    world: int
    count: int
    dtype: str
    put: Callable[[torch.Tensor], torch.Tensor]
    seed: int = 0
    is_strided: bool = False

    def make(self, rank: int | None = None, count: int | None = None, offset: int = 0) -> torch.Tensor:
        """Returns the contribution of a rank, this one by default."""
        whole = contribution(
            self.rank if rank is None else rank,
            self.count if count is None else count,
            self.dtype,
            seed=self.seed + offset,
        )
        return self.laid_out(self.put(whole))

    def empty(self, count: int | None = None) -> torch.Tensor:
        """Returns a tensor for results, filled with bits that no result has by accident."""
        size = self.count if count is None else count
        bits = torch.full((size * _size(self.dtype),), 0x5A, dtype=torch.uint8, device="cpu")
        if self.dtype == "bool":
            bits.fill_(1)
        return self.laid_out(self.put(bits.view(getattr(torch, self.dtype))))

    def laid_out(self, tensor: torch.Tensor) -> torch.Tensor:
        """Returns the tensor, or a strided view with the same values."""
        if not self.is_strided or tensor.numel() < 2:
            return tensor
        wide = tensor.new_zeros((tensor.numel(), 2))
        wide[:, 0] = tensor
        return wide[:, 0]


def _size(dtype: str) -> int:
    return torch.empty(0, dtype=getattr(torch, dtype), device="cpu").element_size()


Issued = tuple[list[Any], list[torch.Tensor]]


def all_reduce(call: Call) -> Issued:
    tensor = call.make()
    return [dist.all_reduce(tensor, async_op=True)], [tensor]


def average(call: Call) -> Issued:
    tensor = call.make()
    return [dist.all_reduce(tensor, dist.ReduceOp.AVG, async_op=True)], [tensor]


def maximum(call: Call) -> Issued:
    tensor = call.make()
    return [dist.all_reduce(tensor, dist.ReduceOp.MAX, async_op=True)], [tensor]


def several(call: Call) -> Issued:
    tensors = [call.make(offset=index) for index in range(3)]
    with dist._coalescing_manager(async_ops=True) as manager:
        for tensor in tensors:
            dist.all_reduce(tensor)
    return [manager], tensors


def broadcast(call: Call) -> Issued:
    tensor = call.make()
    return [dist.broadcast(tensor, call.world - 1, async_op=True)], [tensor]


def reduce(call: Call) -> Issued:
    tensor = call.make()
    work = dist.reduce(tensor, call.world - 1, async_op=True)
    # Only the root has a result.
    return [work], [tensor] if call.rank == call.world - 1 else []


def all_gather(call: Call) -> Issued:
    outputs = [call.empty() for _ in range(call.world)]
    return [dist.all_gather(outputs, call.make(), async_op=True)], outputs


def all_gather_flat(call: Call) -> Issued:
    output = call.empty(call.count * call.world)
    return [dist.all_gather_into_tensor(output, call.make(), async_op=True)], [output]


def gather(call: Call) -> Issued:
    outputs = [call.empty() for _ in range(call.world)] if call.rank == 0 else None
    return [dist.gather(call.make(), outputs, 0, async_op=True)], outputs or []


def scatter(call: Call) -> Issued:
    output = call.empty()
    inputs = [call.make(0, offset=index) for index in range(call.world)] if call.rank == 0 else None
    return [dist.scatter(output, inputs, 0, async_op=True)], [output]


def reduce_scatter(call: Call) -> Issued:
    output = call.empty()
    inputs = [call.make(offset=index) for index in range(call.world)]
    return [dist.reduce_scatter(output, inputs, async_op=True)], [output]


def reduce_scatter_flat(call: Call) -> Issued:
    output = call.empty()
    return [dist.reduce_scatter_tensor(output, call.make(count=call.count * call.world), async_op=True)], [output]


def all_to_all(call: Call) -> Issued:
    outputs = [call.empty() for _ in range(call.world)]
    inputs = [call.make(offset=index) for index in range(call.world)]
    return [dist.all_to_all(outputs, inputs, async_op=True)], outputs


def all_to_all_uneven(call: Call) -> Issued:
    """Rank r sends r + 1 parts to each rank."""
    output = call.empty(call.count * sum(range(1, call.world + 1)))
    given = call.make(count=call.count * call.world * (call.rank + 1))
    sent = [call.count * (call.rank + 1)] * call.world
    got = [call.count * (other + 1) for other in range(call.world)]
    return [dist.all_to_all_single(output, given, got, sent, async_op=True)], [output]


def exchange(call: Call) -> Issued:
    output = call.empty()
    sent = dist.isend(call.make(), (call.rank + 1) % call.world)
    got = dist.irecv(output, (call.rank - 1) % call.world)
    return [sent, got], [output]


def batch(call: Call) -> Issued:
    output = call.empty()
    operations = [
        dist.P2POp(dist.isend, call.make(), (call.rank + 1) % call.world),
        dist.P2POp(dist.irecv, output, (call.rank - 1) % call.world),
    ]
    return list(dist.batch_isend_irecv(operations)), [output]


REDUCE = [all_reduce, average, maximum, several, reduce, reduce_scatter, reduce_scatter_flat]
MOVE = [broadcast, all_gather, all_gather_flat, gather, scatter, all_to_all, all_to_all_uneven, exchange, batch]
# Flat outputs of all ranks must be dense.
DENSE = [all_gather_flat, reduce_scatter_flat, all_to_all_uneven]


def on_host(kind: Any, rank: int, world: int, count: int, dtype: str, seed: int, strided: bool) -> list[torch.Tensor]:
    """Returns the results of the same call on CPU tensors."""
    works, results = kind(Call(rank, world, count, dtype, torch.Tensor.clone, seed, strided))
    for work in works:
        work.wait()
    return list(results)


def check_results(results: list[torch.Tensor], expected: list[torch.Tensor], what: object) -> None:
    """Checks that results on a device have the bits of the results on CPU tensors."""
    for number, (result, wanted) in enumerate(zip(results, expected, strict=True)):
        assert bytes_equal(result.cpu(), wanted), f"result {number} of {what} differs from the result on CPU tensors"
