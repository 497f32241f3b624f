"""Messages of a solve over a process group, or without one on a single rank.

Owns how states are sent: leaf by leaf, in order for each pair of ranks and pass, by `isend` and `irecv` of any backend.
Also owns the three small reductions of a solve. They are of integers, so nothing rounds or compresses them. Their
tensors are on the CPU if the group serves it, because reading them from another device would stop this thread.
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

# Tags distinguish the passes. A backend without tags runs one pass at a time.
TAGS = {"forward": 0, "adjoint": 1}

# Backends that put all messages of two ranks into one stream of the device, in the order of their calls. A receive there
# holds up later sends.
_IN_ONE_STREAM = ("nccl", "xccl")
# Backends that send from CPU memory only, although torch registers them for other devices as well.
_OF_THE_CPU = ("gloo",)


class Wire:
    """The ranks that a net lies on."""

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        self.group = group
        self.rank = 0 if group is None else group.rank()
        self.size = 1 if group is None else group.size()
        # Results of `route` by device type.
        self._routes: dict[str, str] = {}

    @property
    def is_last(self) -> bool:
        """Whether this rank has the output."""
        return self.rank == self.size - 1

    @property
    def ranks(self) -> list[int]:
        """The ranks in the default process group."""
        return [0] if self.group is None else dist.get_process_group_ranks(self.group)

    def __deepcopy__(self, memo: dict[int, Any]) -> Wire:
        """Returns the object itself: a copy of the net has the same ranks."""
        return self

    @property
    def device(self) -> torch.device:
        """The device of small messages."""
        if self.group is None:
            return torch.device("cpu")
        devices = self.group._device_types
        cpu = torch.device("cpu")
        return cpu if cpu in devices or not devices else devices[0]

    @property
    def device_types(self) -> list[str]:
        """The types of devices whose tensors the group sends; only the CPU without a group."""
        return ["cpu"] if self.group is None else sorted(each.type for each in self.group._device_types)

    def route(self, device: torch.device) -> str | None:
        """Returns a name of the backend that sends tensors of a device; None if there is none.

        Devices of one backend have the same name. Tensors of one message may be on any of them.
        """
        if self.group is None or self.size == 1:
            return ""
        if device.type not in self._routes:
            kinds = self.device_types
            if device.type not in kinds or (device.type != "cpu" and self._backend_of(device) in _OF_THE_CPU):
                return None
            backend = self.group._get_backend(device)
            # The CPU comes first: ranks may have other devices.
            self._routes[device.type] = next(
                kind
                for kind in sorted(kinds, key=lambda kind: (kind != "cpu", kind))
                if self.group._get_backend(torch.device(kind)) is backend
            )
        return self._routes[device.type]

    def is_in_one_stream(self, device: torch.device) -> bool:
        """Returns whether a receive of a tensor of this device holds up sends to the same rank that are issued later."""
        return self._backend_of(device) in _IN_ONE_STREAM

    def _backend_of(self, device: torch.device) -> str:
        """Returns the name of the backend for a device; empty if there is none."""
        pairs = (each.partition(":") for each in self.backends.split(","))
        return {kind: backend for kind, _, backend in pairs}.get(device.type, "")

    @property
    def backends(self) -> str:
        """The backends of the group by device, as in `cpu:accl,cuda:nccl`; empty without a group."""
        return "" if self.group is None else dist.get_backend_config(self.group)

    def send(self, tensor: Tensor, to: int, pass_: str) -> dist.Work:
        """Starts a send. The tensor must not change until the send completes."""
        work = dist.isend(_flat(tensor), group=self.group, group_dst=to, tag=TAGS[pass_])
        assert work is not None
        return work

    def receive(self, tensor: Tensor, source: int, pass_: str) -> dist.Work:
        """Starts a receive."""
        work = dist.irecv(_flat(tensor), group=self.group, group_src=source, tag=TAGS[pass_])
        assert work is not None
        return work

    def together(self, numbers: Tensor, what: str, *, is_greatest: bool = False) -> list[int]:
        """Returns the sums of integers over all ranks, or their maxima with `is_greatest`."""
        work = self._reduce(numbers, dist.ReduceOp.MAX if is_greatest else dist.ReduceOp.SUM)
        if work is not None:
            tried(what, work.wait)
        found: list[int] = numbers.tolist()
        return found

    def known(self, numbers: Sequence[float], what: str) -> list[float]:
        """Makes numbers known to all ranks, to the bit. Each number must be zero on all ranks but one."""
        return numbers_of(self.together(torch.tensor(bits_of(numbers), dtype=torch.int64, device=self.device), what))

    def add_up(self, numbers: Tensor) -> dist.Work | None:
        """Starts to sum integers over all ranks, in place. Returns None without a group."""
        return self._reduce(numbers, dist.ReduceOp.SUM)

    def _reduce(self, numbers: Tensor, operator: Any) -> dist.Work | None:
        if self.group is None:
            return None
        return dist.all_reduce(numbers, operator, group=self.group, async_op=True)

    def spread(self, tensor: Tensor, what: str, source: int = 0) -> None:
        """Copies one rank's tensor to all ranks, in place, byte by byte."""
        if self.group is not None and tensor.numel() > 0:
            flat = _flat(tensor).reshape(-1)
            work = dist.broadcast(flat.view(torch.uint8), group=self.group, group_src=source, async_op=True)
            assert work is not None
            tried(what, work.wait)

    def sum_on_first(self, tensor: Tensor, what: str) -> None:
        """Sums over all ranks, in place on the first.

        `tensor` is in double precision, which compression of the group does not change.
        """
        if self.group is not None:
            work = dist.reduce(_flat(tensor), op=dist.ReduceOp.SUM, group=self.group, group_dst=0, async_op=True)
            assert work is not None
            tried(what, work.wait)

    def sum_on_all(self, tensor: Tensor, what: str) -> None:
        """Sums over all ranks, in place on all. `tensor` is in double precision."""
        work = self._reduce(_flat(tensor), dist.ReduceOp.SUM)
        if work is not None:
            tried(what, work.wait)

    def gathered(self, mine: Any) -> list[Any]:
        """Returns one object of each rank, on all ranks."""
        if self.group is None:
            return [mine]
        of_all: list[Any] = [None] * self.size
        dist.all_gather_object(of_all, mine, group=self.group)
        return of_all

    def pass_on(self, mine: Any, source: int) -> Any:
        """Returns one rank's object on all ranks."""
        if self.group is None:
            return mine
        objects = [mine]
        dist.broadcast_object_list(objects, group=self.group, group_src=source)
        return objects[0]


def _flat(tensor: Tensor) -> Tensor:
    """Returns the elements as a backend takes them: dense and real."""
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor)
    # A tensor that is dense in another order is sent in that order. The other side has the same order.
    if not tensor.is_contiguous():
        order = sorted(range(tensor.dim()), key=tensor.stride, reverse=True)
        tensor = tensor.permute(order)
    return tensor


def tried(what: str, call: Callable[[], _T]) -> _T:
    """Runs a call of the group, and adds `what` to the text of its error."""
    try:
        return call()
    except RuntimeError as error:
        raise type(error)(f"{error} [{what}]") from error


def bits_of(numbers: Sequence[float]) -> list[int]:
    """Returns the bits of floats as integers. Sums with zeros leave them unchanged."""
    return list(struct.unpack(f"<{len(numbers)}q", struct.pack(f"<{len(numbers)}d", *numbers)))


def numbers_of(bits: Sequence[int]) -> list[float]:
    """Returns the floats whose bits these integers are: the inverse of `bits_of`."""
    return list(struct.unpack(f"<{len(bits)}d", struct.pack(f"<{len(bits)}q", *bits)))
