"""The collectives as the benchmark calls them: buffers, the call through torch, and the check of its result.

This module uses no clock and no store. Read `Prepared` first.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from .collectives import COLLECTIVES, ROOT, Collective

__all__ = ["CPU", "Case", "Prepared", "cases"]

CPU = torch.device("cpu")


@dataclass(frozen=True)
class Case:
    """One row of the table, for a given number of ranks."""

    collective: Collective
    dtype: str
    # None for collectives that only move data.
    op: str | None
    # Elements of one rank's block if the call has blocks; otherwise of the buffer.
    count: int
    # Bytes of the largest buffer of the call.
    size_bytes: int

    def __str__(self) -> str:
        reduced = f" {self.op}" if self.op else ""
        return f"{self.collective.name} {self.size_bytes} B {self.dtype}{reduced}"


def cases(collectives: list[str], sizes: list[int], dtypes: list[str], ops: list[str], world: int) -> list[Case]:
    """Returns the requested rows without repetition. A size is rounded down to whole elements per rank, at least one."""
    found: dict[Case, None] = {}
    for collective in (COLLECTIVES[name] for name in collectives):
        if collective.name == "barrier":
            found[Case(collective, "uint8", None, 0, 0)] = None
            continue
        for dtype in dtypes:
            for op in ops if collective.reduces else [None]:
                for size in sizes:
                    parts = world if collective.blocks else 1
                    width = getattr(torch, dtype).itemsize
                    count = max(1, size // (width * parts))
                    found[Case(collective, dtype, op, count, count * width * parts)] = None
    return list(found)


class Prepared:
    """The buffers of a case on one rank.

    `inputs` and `outputs` are the call's blocks, one tensor per block, as the engine describes calls. `through_torch(group)`
    returns the same call through torch's API. Buffers on an accelerator are filled and compared by way of host memory.
    """

    def __init__(self, case: Case, rank: int, world: int, device: torch.device = CPU) -> None:
        self.case, self.rank, self.world, self.device = case, rank, world, device
        self.op = getattr(dist.ReduceOp, (case.op or "sum").upper())
        count, many = case.count, case.count * world
        is_root = rank == ROOT
        whole, parts = self._buffer, self._parts
        # `source` and `target` are the tensors of torch's call, by collective; its blocks are these or parts of them.
        match case.collective.name:
            case "all_reduce" | "reduce" | "broadcast":
                self.source = self.target = whole(count)
                self.inputs, self.outputs = [], [self.target]
            case "all_gather":
                self.source, self.target = whole(count), whole(many)
                self.inputs, self.outputs = [self.source], parts(self.target)
            case "reduce_scatter":
                self.source, self.target = whole(many), whole(count)
                self.inputs, self.outputs = parts(self.source), [self.target]
            case "all_to_all":
                self.source, self.target = whole(many), whole(many)
                self.inputs, self.outputs = parts(self.source), parts(self.target)
            case "gather":
                self.source, self.target = whole(count), whole(many if is_root else 0)
                self.inputs, self.outputs = [self.source], parts(self.target) if is_root else []
            case "scatter":
                self.source, self.target = whole(many if is_root else 0), whole(count)
                self.inputs, self.outputs = parts(self.source) if is_root else [], [self.target]
            case _:
                self.source = self.target = whole(0)
                self.inputs, self.outputs = [], []

    def through_torch(self, group: Any) -> Callable[[], Any]:
        """Returns the call on `group` as a function that can be called repeatedly."""
        source, target, op = self.source, self.target, self.op
        is_root = self.rank == ROOT
        calls: dict[str, Callable[[], Any]] = {
            "all_reduce": lambda: dist.all_reduce(target, op, group=group),
            "reduce": lambda: dist.reduce(target, ROOT, op, group=group),
            "broadcast": lambda: dist.broadcast(target, ROOT, group=group),
            "all_gather": lambda: dist.all_gather_into_tensor(target, source, group=group),
            "reduce_scatter": lambda: dist.reduce_scatter_tensor(target, source, op, group=group),
            "all_to_all": lambda: dist.all_to_all_single(target, source, group=group),
            "gather": lambda: dist.gather(source, self.outputs if is_root else None, ROOT, group=group),
            "scatter": lambda: dist.scatter(target, self.inputs if is_root else None, ROOT, group=group),
            "barrier": lambda: dist.barrier(group=group),
        }
        return calls[self.case.collective.name]

    def in_engine(self) -> dict[str, Any]:
        """Returns the call's arguments for the native module."""
        return {
            "collective": self.case.collective.name,
            "inputs": self.inputs,
            "outputs": self.outputs,
            "op": self.op,
            "root": ROOT,
        }

    def clear(self) -> None:
        """Fills both buffers with zeros, so that repeated sums never overflow the dtype."""
        for buffer in (self.source, self.target):
            buffer.view(torch.uint8).zero_()

    def fill(self) -> None:
        """Fills the source with this rank's values, and the target with zeros if it is another buffer."""
        self.clear()
        _tile(host := self._in_host_memory(), self._pattern(self.rank))
        self._set_source(host)

    def fill_gaussian(self) -> None:
        """Fills the source with normally distributed values of this rank; zeros if the type has none."""
        self.clear()
        if self.source.is_floating_point() and self.source.dtype.itemsize > 1:
            host = self._in_host_memory()
            self._set_source(host.normal_(generator=torch.Generator().manual_seed(self.rank)))

    def synchronize(self) -> None:
        """Waits until the device has done all work; at once on the CPU."""
        if self.device.type != "cpu":
            torch.accelerator.synchronize(self.device)

    def wrong(self) -> int:
        """Returns the number of wrong elements in this rank's target after one call on filled buffers."""
        return sum(self._differing(*part) for part in self._expected())

    def error(self) -> float:
        """Returns the norm of the error divided by the norm of the exact result, in this rank's target after one such call."""
        lost = norm = 0.0
        for found, period, first in self._expected():
            found = found.cpu()
            exact = period.roll(-(first % len(period))).repeat(len(found) // len(period) + 1)[: len(found)].double()
            lost += float((found.double() - exact).square().sum())
            norm += float(exact.square().sum())
        return math.sqrt(lost / norm) if norm else 0.0

    def _expected(self) -> list[tuple[torch.Tensor, torch.Tensor, int]]:
        """Returns the parts of the target. Each has the periodic sequence that it must hold, and the index at which it starts."""
        count, rank = self.case.count, self.rank
        match self.case.collective.name:
            case "all_reduce":
                return [(self.target, self._reduced, 0)]
            case "reduce":
                return [(self.target, self._reduced, 0)] if rank == ROOT else []
            case "reduce_scatter":
                return [(self.target, self._reduced, rank * count)]
            case "broadcast":
                return [(self.target, self._pattern(ROOT), 0)]
            case "scatter":
                return [(self.target, self._pattern(ROOT), rank * count)]
            case "all_gather" | "gather":
                blocks = self.outputs if self.target.numel() else []
                return [(block, self._pattern(r), 0) for r, block in enumerate(blocks)]
            case "all_to_all":
                return [(block, self._pattern(r), rank * count) for r, block in enumerate(self.outputs)]
            case _:
                return []

    def _buffer(self, count: int) -> torch.Tensor:
        dtype = getattr(torch, self.case.dtype)
        return torch.zeros(count * dtype.itemsize, dtype=torch.uint8, device=self.device).view(dtype)

    def _in_host_memory(self) -> torch.Tensor:
        """Returns the source, or a host tensor of its size whose values `_set_source` copies to it."""
        return self.source if self.device.type == "cpu" else torch.empty_like(self.source, device=CPU)

    def _set_source(self, host: torch.Tensor) -> None:
        if host is not self.source:
            # As bytes: not every type can be copied.
            self.source.view(torch.uint8).copy_(host.view(torch.uint8))

    def _parts(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        return list(torch.split(tensor, self.case.count))

    def _pattern(self, rank: int) -> torch.Tensor:
        """Returns one period of the values of `rank`: small integers that every type holds exactly, as well as their sums."""
        # The length is a multiple of 3, of 7 and of the world size. A block in the place of another block has other values.
        index = torch.arange(21 * self.world, dtype=torch.int64, device="cpu")
        value = index % 3 + rank % 2
        turn = (index + rank) % self.world
        match self.case.op:
            case "product":
                # At most three ranks contribute a factor of two.
                value = torch.where((value > 0) & (turn < 3), 2, 1)
            case "sum" | "avg":
                # 64 ranks times 3 stay within the 8 bits of a bfloat16's mantissa.
                value = torch.where(turn < 64, value, 0)
            case None:
                value = index % 7 + 7 * (rank % 8)
        if self.case.dtype == "bool":
            value = value % 2
        if self.case.op is None:
            # Data that is only moved may have any type, and is compared as bytes.
            width = getattr(torch, self.case.dtype).itemsize
            return value.to(torch.uint8).repeat_interleave(width).view(getattr(torch, self.case.dtype))
        return value.to(getattr(torch, self.case.dtype))

    @functools.cached_property
    def _reduced(self) -> torch.Tensor:
        """One period of the exact reduction of the values of all ranks."""
        dtype = getattr(torch, self.case.dtype)
        wide = torch.stack([self._pattern(rank).to(torch.complex128 if dtype.is_complex else torch.float64)
                            for rank in range(self.world)])  # fmt: skip
        if dtype == torch.bool:
            return self._reduced_bools(wide != 0)
        match self.case.op:
            case "sum":
                return _narrow(wide.sum(0), dtype)
            case "avg":
                if dtype.is_floating_point or dtype.is_complex:
                    return _narrow(wide.sum(0) / self.world, dtype)
                # Integer sums wrap, and the fraction of the quotient is dropped.
                return torch.div(_narrow(wide.sum(0), dtype).long(), self.world, rounding_mode="trunc").to(dtype)
            case "product":
                return _narrow(wide.prod(0), dtype)
            case "min":
                return _narrow(wide.amin(0), dtype)
            case "max":
                return _narrow(wide.amax(0), dtype)
        bits = {"band": torch.bitwise_and, "bor": torch.bitwise_or, "bxor": torch.bitwise_xor}[self.case.op or ""]
        return _narrow(functools.reduce(bits, wide.long()), dtype)

    def _reduced_bools(self, rows: torch.Tensor) -> torch.Tensor:
        match self.case.op:
            case "sum" | "max" | "bor":
                return rows.any(0)
            case "bxor":
                return rows.sum(0) % 2 == 1
        return rows.all(0)

    def _differing(self, found: torch.Tensor, period: torch.Tensor, first: int) -> int:
        """Returns the number of elements of `found` that differ from the repeated `period`, starting at element `first`."""
        period, found = period.roll(-(first % len(period))), found.cpu()
        if self.case.op == "avg" and (found.is_floating_point() or found.is_complex()):
            # A mean may be rounded twice: once as a sum in this type, once as a quotient.
            close = torch.finfo(found.dtype).eps
            return _count(found, period, lambda a, b: ~torch.isclose(a, b, rtol=close, atol=0.0))
        return _count(_bits(found), _bits(period), lambda a, b: (a != b).any(-1))


def _narrow(exact: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Converts to the type of the call; integers wrap."""
    return exact.to(dtype) if dtype.is_complex or dtype.is_floating_point else exact.long().to(dtype)


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    """Returns one row of integers per element, so that any type can be compared."""
    width = tensor.dtype.itemsize
    plain = {1: torch.uint8, 2: torch.int16, 4: torch.int32}.get(width, torch.int64)
    return tensor.view(plain).view(-1, width // plain.itemsize)


def _tile(tensor: torch.Tensor, period: torch.Tensor) -> None:
    """Writes the repeated period into the tensor, as bits, so that nothing is converted."""
    tensor, period = _bits(tensor), _bits(period)
    whole = len(tensor) // len(period)
    tensor[: whole * len(period)].view(whole, *period.shape).copy_(period)
    rest = tensor[whole * len(period) :]
    rest.copy_(period[: len(rest)])


def _count(
    found: torch.Tensor, period: torch.Tensor, differ: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
) -> int:
    whole = len(found) // len(period)
    rest = found[whole * len(period) :]
    body = found[: whole * len(period)].view(whole, *period.shape)
    return int(differ(body, period).sum()) + int(differ(rest, period[: len(rest)]).sum())
