"""Runs collectives of host tensors on the stand-in for an accelerator, so that tests of values become tests of staging.

`install` wraps the methods of `ProcessGroup`: a call's tensors are moved to the device with their strides, offsets and
shared storages, and its results are copied back when the call has been waited for. Bodies of tests do not change, and
neither do the results that they expect. `ACCL_TEST_ORDER` selects the order of the device's streams, or `peer` with
a random one; `cuda` selects a card instead, which all ranks share.
"""

import functools
import os
import threading
from typing import Any

import torch
import torch.distributed as dist

from . import standin

METHODS = [
    "broadcast",
    "allreduce",
    "allreduce_coalesced",
    "reduce",
    "allgather",
    "_allgather_base",
    "allgather_coalesced",
    "allgather_into_tensor_coalesced",
    "all_gather_single",
    "all_gather_single_coalesced",
    "all_to_all_single",
    "gather_single",
    "gather_into_tensor",
    "reduce_scatter_single",
    "reduce_scatter_single_coalesced",
    "gather",
    "scatter",
    "reduce_scatter",
    "_reduce_scatter_base",
    "reduce_scatter_tensor_coalesced",
    "alltoall",
    "alltoall_base",
    "send",
    "recv",
    "recv_anysource",
]


# The device type to which tensors are moved.
_device = "standin"


class Moved:
    """The tensors of one call on the device."""

    def __init__(self) -> None:
        self.storages: dict[int, Any] = {}
        self.pairs: list[tuple[torch.Tensor, torch.Tensor]] = []

    def move(self, value: Any) -> Any:
        """Returns the value with its host tensors on the device. Tensors that share storage there share it here."""
        if isinstance(value, list | tuple):
            return type(value)(self.move(item) for item in value)
        if not isinstance(value, torch.Tensor) or not _is_plain(value):
            return value
        storage = value.untyped_storage()
        if storage.data_ptr() not in self.storages or not storage.data_ptr():
            with torch.no_grad():
                whole = torch.empty(0, dtype=torch.uint8).set_(storage, 0, (storage.nbytes(),))
                self.storages[storage.data_ptr()] = whole.to(_device).untyped_storage()
        there = torch.empty(0, dtype=value.dtype, device=_device)
        there.set_(self.storages[storage.data_ptr()], value.storage_offset(), value.shape, value.stride())
        there = there.conj() if value.is_conj() else there
        there = there._neg_view() if value.is_neg() else there
        self.pairs.append((value, there))
        return there

    def copy_back(self) -> None:
        """Gives the host tensors the values of those on the device."""
        pairs, self.pairs = self.pairs, []
        with torch.no_grad():
            for here, there in pairs:
                # An expanded tensor can only be read.
                if not any(stride == 0 and size > 1 for size, stride in zip(here.shape, here.stride(), strict=True)):
                    try:
                        here.detach().copy_(there)
                    except NotImplementedError:
                        # torch does not copy packed types.
                        here.view(torch.uint8).copy_(there.view(torch.uint8))


def _is_plain(tensor: torch.Tensor) -> bool:
    return (
        type(tensor) in (torch.Tensor, torch.nn.Parameter)
        and tensor.device.type == "cpu"
        and tensor.layout == torch.strided
    )


class Waiting:
    """A work that copies results back when it has been waited for."""

    def __init__(self, work: Any, moved: list[Moved]) -> None:
        self._work, self._moved = work, moved

    def wait(self, *arguments: Any) -> Any:
        result = self._work.wait(*arguments)
        for moved in self._moved:
            moved.copy_back()
        return result

    def __getattr__(self, name: str) -> Any:
        return getattr(self._work, name)


# Calls of open batches, by thread.
_batches: dict[int, list[Moved]] = {}


def install(order: str, rank: int) -> None:
    """Registers the device, and wraps the methods for the life of this process. In the order `mixed`, ranks with even
    numbers keep their tensors in host memory. In the order `peer`, ranks read each other's device memory.
    """
    if order == "cuda":
        global _device
        _device = order
        torch.cuda.set_device(0)
    else:
        module = standin.register("random" if order in ("mixed", "peer") else order, seed=rank)
        if order == "peer":
            standin.lend_driver(module)
            os.environ.update(ACCL_EAGER_BYTES="0", ACCL_GPU_ROUTE="peer")
    if order == "mixed" and rank % 2 == 0:
        return
    group = dist.ProcessGroup
    for name in METHODS:
        if hasattr(group, name):
            setattr(group, name, _wrapped(getattr(group, name)))
    start, end = group._start_coalescing, group._end_coalescing

    def start_batch(self: Any, *arguments: Any) -> None:
        start(self, *arguments)
        _batches[threading.get_ident()] = []

    def end_batch(self: Any, *arguments: Any) -> Any:
        return Waiting(end(self, *arguments), _batches.pop(threading.get_ident(), []))

    group._start_coalescing, group._end_coalescing = start_batch, end_batch


def _wrapped(method: Any) -> Any:
    @functools.wraps(method)
    def call(group: Any, *arguments: Any, **options: Any) -> Any:
        if f"{_device}:accl" not in str(dist.get_backend_config(group)):
            return method(group, *arguments, **options)
        moved = Moved()
        arguments, options = moved.move(arguments), {key: moved.move(value) for key, value in options.items()}
        work = method(group, *arguments, **options)
        if threading.get_ident() in _batches:
            _batches[threading.get_ident()].append(moved)
        elif work is None:
            moved.copy_back()
        return work if work is None else Waiting(work, [moved])

    return call
