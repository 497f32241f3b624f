"""Messages of a solve over a process group, or over none.

Owns how states travel: leaf by leaf, in order for each pair of ranks and pass, by `isend` and `irecv` of whatever backend there is; and the
three small reductions of a solve, which are of whole numbers, so that nothing rounds or compresses them.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

__all__ = ["Wire", "bits_of", "numbers_of", "tried"]


_T = TypeVar("_T")

# Passes are told apart by their tags. A backend that knows no tags runs one pass at a time.
TAGS = {"forward": 0, "adjoint": 1}


class Wire:
    """The ranks that a net lies on."""

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        self.group = group
        self.rank = 0 if group is None else group.rank()
        self.size = 1 if group is None else group.size()

    @property
    def is_last(self) -> bool:
        """Whether this rank has the output."""
        return self.rank == self.size - 1

    @property
    def ranks(self) -> list[int]:
        """Their numbers among all."""
        return [0] if self.group is None else dist.get_process_group_ranks(self.group)

    def __deepcopy__(self, memo: dict[int, Any]) -> Wire:
        """The same ranks."""
        return self

    @property
    def device(self) -> torch.device:
        """Where small messages lie."""
        if self.group is None:
            return torch.device("cpu")
        devices = self.group._device_types
        cpu = torch.device("cpu")
        return cpu if cpu in devices or not devices else devices[0]

    def send(self, tensor: Tensor, to: int, pass_: str) -> dist.Work:
        """Begins to send; the tensor stays as it is until that is over."""
        work = dist.isend(_flat(tensor), group=self.group, group_dst=to, tag=TAGS[pass_])
        assert work is not None
        return work

    def receive(self, tensor: Tensor, source: int, pass_: str) -> dist.Work:
        """Begins to receive."""
        work = dist.irecv(_flat(tensor), group=self.group, group_src=source, tag=TAGS[pass_])
        assert work is not None
        return work

    def together(self, numbers: Tensor, what: str, *, is_greatest: bool = False) -> list[int]:
        """Whole numbers of all ranks: their sums, or the greatest."""
        work = self._reduce(numbers, dist.ReduceOp.MAX if is_greatest else dist.ReduceOp.SUM)
        if work is not None:
            tried(what, work.wait)
        found: list[int] = numbers.tolist()
        return found

    def known(self, numbers: Sequence[float], what: str) -> list[float]:
        """Numbers of which each is zero on all ranks but one, on all of them, to the bit."""
        return numbers_of(self.together(torch.tensor(bits_of(numbers), dtype=torch.int64, device=self.device), what))

    def add_up(self, numbers: Tensor) -> dist.Work | None:
        """Whole numbers of all ranks are added up in place."""
        return self._reduce(numbers, dist.ReduceOp.SUM)

    def _reduce(self, numbers: Tensor, operator: Any) -> dist.Work | None:
        if self.group is None:
            return None
        return dist.all_reduce(numbers, operator, group=self.group, async_op=True)

    def spread(self, tensor: Tensor, what: str, source: int = 0) -> None:
        """One rank's tensor, byte by byte, on all ranks in its place."""
        if self.group is not None and tensor.numel() > 0:
            flat = _flat(tensor).reshape(-1)
            work = dist.broadcast(flat.view(torch.uint8), group=self.group, group_src=source, async_op=True)
            assert work is not None
            tried(what, work.wait)

    def sum_on_first(self, tensor: Tensor, what: str) -> None:
        """The sum over all ranks, in place on the first. In double precision, which no compression of the group touches."""
        if self.group is not None:
            work = dist.reduce(_flat(tensor), op=dist.ReduceOp.SUM, group=self.group, group_dst=0, async_op=True)
            assert work is not None
            tried(what, work.wait)

    def sum_on_all(self, tensor: Tensor, what: str) -> None:
        """The same on all."""
        work = self._reduce(_flat(tensor), dist.ReduceOp.SUM)
        if work is not None:
            tried(what, work.wait)

    def gathered(self, mine: Any) -> list[Any]:
        """One object of each rank, on all of them."""
        if self.group is None:
            return [mine]
        of_all: list[Any] = [None] * self.size
        dist.all_gather_object(of_all, mine, group=self.group)
        return of_all

    def pass_on(self, mine: Any, source: int) -> Any:
        """An object of one rank, on all of them."""
        if self.group is None:
            return mine
        objects = [mine]
        dist.broadcast_object_list(objects, group=self.group, group_src=source)
        return objects[0]


def _flat(tensor: Tensor) -> Tensor:
    """The same elements as a backend takes them: dense, real."""
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor)
    # What is dense in another order travels in that; the other side has the same.
    if not tensor.is_contiguous():
        order = sorted(range(tensor.dim()), key=tensor.stride, reverse=True)
        tensor = tensor.permute(order)
    return tensor


def tried(what: str, call: Callable[[], _T]) -> _T:
    """Calls the group; an error of it is told what for."""
    try:
        return call()
    except RuntimeError as error:
        raise type(error)(f"{error} [{what}]") from error


def bits_of(numbers: Sequence[float]) -> list[int]:
    """As whole numbers, which add up to themselves with zeros."""
    return list(struct.unpack(f"<{len(numbers)}q", struct.pack(f"<{len(numbers)}d", *numbers)))


def numbers_of(bits: Sequence[int]) -> list[float]:
    """The other way."""
    return list(struct.unpack(f"<{len(bits)}d", struct.pack(f"<{len(bits)}q", *bits)))
