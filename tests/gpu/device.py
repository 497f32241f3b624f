"""A card, or the stand-in for an accelerator: the little in which they differ for tests.

Owns busy streams, memory that other threads allocate and free, and what a rank does first. Calls of c10d are the same on
both and are not here.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import re
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from support import standin

KINDS = ("cuda", "standin")


class Device:
    """The device of one rank. All ranks use the same card."""

    def __init__(self, kind: str, order: str = "random", seed: int = 1) -> None:
        """Makes the first use of the device in this process, which therefore must be a rank, not a parent of ranks."""
        self.kind = kind
        self._module: Any = None
        if kind == "standin":
            self._module = standin.register(order, seed)
        else:
            torch.cuda.set_device(0)
            torch.cuda.init()

    @property
    def is_card(self) -> bool:
        return self._module is None

    @property
    def module(self) -> Any:
        """The module that controls the stand-in."""
        assert self._module is not None, "a card has no such module"
        return self._module

    def compute(self, milliseconds: float) -> None:
        """Keeps the current stream busy for this time; on the stand-in, for this many steps."""
        if self.is_card:
            torch.cuda._sleep(int(milliseconds * _cycles_per_millisecond()))
        else:
            self.module.compute(int(milliseconds))

    def put(self, tensor: torch.Tensor) -> torch.Tensor:
        """Returns a copy of a host tensor on the device."""
        return tensor.to(self.kind)

    def pinned(self, count: int) -> torch.Tensor:
        """Returns a float32 tensor in pinned host memory."""
        return torch.empty(count, device="cpu").pin_memory()

    def stream(self) -> Any:
        return torch.Stream(self.kind)

    def current_stream(self) -> Any:
        return torch.accelerator.current_stream()

    def synchronize(self) -> None:
        torch.accelerator.synchronize()

    @contextlib.contextmanager
    def disturbed(self) -> Iterator[None]:
        """While active, other threads return the caching allocator's memory and allocate and free memory of the device."""
        stop = threading.Event()
        errors: list[BaseException] = []

        def repeat(step: Callable[[], object]) -> None:
            try:
                while not stop.is_set():
                    step()
                    time.sleep(0.001)
            except BaseException as error:
                errors.append(error)

        steps = [torch.cuda.empty_cache, allocate_and_free] if self.is_card else [self._allocate]
        threads = [threading.Thread(target=repeat, args=(step,)) for step in steps]
        for thread in threads:
            thread.start()
        try:
            yield
        finally:
            stop.set()
            for thread in threads:
                thread.join(30)
        if errors:
            raise errors[0]

    def _allocate(self) -> torch.Tensor:
        return torch.full((70_000,), -1.0, device=self.kind)

    def used_bytes(self) -> int:
        """Bytes of tensors on the device that this process holds."""
        self.synchronize()
        return int(torch.cuda.memory_allocated() if self.is_card else self.module.counts()["device_bytes"])


@functools.cache
def _cycles_per_millisecond() -> float:
    """Cycles of `torch.cuda._sleep` in a millisecond, measured once per process."""
    cycles = 20_000_000
    times = []
    for _ in range(3):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        torch.cuda._sleep(cycles)
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end))
    return float(cycles / min(times))


def allocate_and_free() -> None:
    """Calls `cudaMalloc` and `cudaFree`, which wait for all work of the device."""
    runtime = _runtime()
    memory = ctypes.c_void_p()
    _check(runtime.cudaMalloc(ctypes.byref(memory), ctypes.c_size_t(1 << 20)), "cudaMalloc")
    _check(runtime.cudaFree(memory), "cudaFree")


def freed_tensor(count: int) -> torch.Tensor:
    """Returns a float32 tensor over memory of the card that was freed: a kernel on it accesses an illegal address."""
    runtime = _runtime()
    memory = ctypes.c_void_p()
    _check(runtime.cudaMalloc(ctypes.byref(memory), ctypes.c_size_t(1 << 28)), "cudaMalloc")

    class Array:
        __cuda_array_interface__ = {
            "shape": (count,),
            "typestr": "<f4",
            "data": (memory.value, False),
            "version": 3,
            "stream": None,
        }

    tensor = torch.as_tensor(Array(), device="cuda")
    _check(runtime.cudaFree(memory), "cudaFree")
    return tensor


@functools.cache
def _runtime() -> Any:
    """The CUDA runtime that torch has loaded into this process."""
    with open("/proc/self/maps") as maps:
        found = re.search(r"(/\S*libcudart[^/\s]*\.so[^/\s]*)", maps.read())
    if found is None:
        raise RuntimeError("torch has loaded no libcudart into this process")
    return ctypes.CDLL(found[1])


def _check(status: int, what: str) -> None:
    if status:
        raise RuntimeError(f"{what} returned error {status}")
