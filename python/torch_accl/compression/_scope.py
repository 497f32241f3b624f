"""Encoding of the engine's calls: a setting of the calling thread, in effect while it issues a call."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import lru_cache
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Backend

from .. import _native
from .._errors import InvalidArgumentError

__all__ = [
    "CPU",
    "FLOATS",
    "Addresses",
    "Coded",
    "OnDevice",
    "Op",
    "accl_backend",
    "accl_group",
    "codec_of_group",
    "codecs_of",
    "devices_of",
    "encoded",
    "exact",
    "has_override",
    "host_all_reduce",
    "refuse_device",
    "takes_part",
]


CPU = torch.device("cpu")

# Types that are encoded. All other tensors are sent unchanged.
FLOATS = (torch.float32, torch.float16, torch.bfloat16)

# Type of the operators that torch's calls accept. An operator with a factor (PREMUL_SUM) is a `ReduceOp`.
Op = dist.ReduceOp | dist.ReduceOp.RedOpType

# Addresses of residuals: of contributions, and of sums.
Addresses = tuple[list[int], list[int]]

# What the engine needs for residuals on a device: for each contribution the address of a byte on the device that is 0 if its
# residual is not used, and a function that moves the residuals to host memory and returns their addresses there.
OnDevice = tuple[list[int], Callable[[], Addresses]]

# The codecs of one tensor (inside hosts, for parts of sums, for results), and the number that selects its random numbers.
Coded = tuple[str, str, str, int]


@lru_cache(maxsize=1024)
def codecs_of(tensors: tuple[Coded, ...]) -> _native.Codecs:
    """Returns the engine's codecs for the tensors of a call."""
    return _native.Codecs(list(tensors))


@contextmanager
def encoded(
    codecs: _native.Codecs,
    seed: int,
    step: int,
    residuals: Addresses | None = None,
    stats: _native.ErrorStats | None = None,
    one_in: int = 0,
    on_device: OnDevice | None = None,
) -> Iterator[None]:
    """Encodes calls that this thread issues inside, and measures them if `stats` is given.

    The memory of `residuals` must stay valid until the futures of these calls complete. Residuals on a device need `on_device`.
    """
    before = _native.encode_calls(_native.Encoding(codecs, seed, step, residuals, stats, one_in, on_device))
    try:
        yield
    finally:
        _native.encode_calls(before)


@contextmanager
def exact() -> Iterator[None]:
    """Sends calls that this thread issues inside unchanged, even in a group that encodes all calls."""
    before = _native.encode_calls(_native.Encoding.none())
    try:
        yield
    finally:
        _native.encode_calls(before)


def has_override() -> bool:
    """Whether this thread is inside `encoded` or `exact`."""
    said = _native.encode_calls(None)
    _native.encode_calls(said)
    return said is not None


def accl_group(group: dist.ProcessGroup | None, device: torch.device | None = None) -> dist.ProcessGroup:
    """Returns the group, or the default group for None. It must reduce tensors on `device` (None: on any device) with accl.

    Raises:
        RuntimeError: there is no group, or it has another backend than accl for the device, or none.
    """
    found = dist.group.WORLD if group is None else group
    if found is None:
        raise RuntimeError("there is no process group; call init_process_group('accl') first")
    if device is None:
        accl_backend(found)
    elif not isinstance(_backend(found, device), _native.Backend):
        refuse_device(device, found)
    return found


def takes_part(group: object) -> bool:
    """Whether this rank is in the group of a call. For ranks outside, `new_group` returns a placeholder instead of a group."""
    return group is not dist.GroupMember.NON_GROUP_MEMBER


def devices_of(group: dist.ProcessGroup) -> frozenset[str]:
    """Returns the types of devices whose tensors the group reduces with accl."""
    return frozenset(each.type for each in group._device_types if isinstance(_backend(group, each), _native.Backend))


def refuse_device(device: torch.device, group: dist.ProcessGroup) -> NoReturn:
    """Reports that tensors on this device cannot be compressed in the group.

    Raises:
        InvalidArgumentError: always. It says which backend reduces them instead.
    """
    backend = _backend(group, device)
    if device.type == "cpu":
        raise _not_accl(backend)
    other = "has no backend for" if backend is None else f"reduces with {backend.name()}, uncompressed"
    raise InvalidArgumentError(
        f"compression needs tensors that accl reduces, but these are on {device}, which the group {other}; move them, "
        f"omit compression, or create the group with accl for {device.type}"
    )


def codec_of_group(group: dist.ProcessGroup, device: torch.device = CPU) -> str | None:
    """Returns the codec that the `Options` of the group name, or None. `device` is as for `accl_backend`."""
    return accl_backend(group, device).options.settings.get("compression")


def accl_backend(group: dist.ProcessGroup, device: torch.device = CPU) -> _native.Backend:
    """Returns the accl backend of a group: the one for tensors on `device`, otherwise the one for any other device.

    Raises:
        RuntimeError: the group has no backend of accl.
    """
    backend = _backend(group, device)
    if isinstance(backend, _native.Backend):
        return backend
    for each in group._device_types:
        other = _backend(group, each)
        if isinstance(other, _native.Backend):
            return other
    raise _not_accl(backend)


def host_all_reduce(
    tensor: torch.Tensor, op: dist.ReduceOp.RedOpType, group: dist.ProcessGroup, async_op: bool = False
) -> dist.Work | None:
    """Works like `torch.distributed.all_reduce` of host memory, also in a group in which accl serves other devices only."""
    if isinstance(_backend(group, CPU), _native.Backend):
        return dist.all_reduce(tensor, op, group, async_op)
    options = dist.AllreduceOptions()
    options.reduceOp = op
    options.asyncOp = async_op
    # torch's stub of a backend lacks its collectives.
    backend: Any = accl_backend(group)
    work: dist.Work | None = backend.allreduce([tensor], options)
    return work


def _backend(group: dist.ProcessGroup, device: torch.device) -> Backend | None:
    """Returns the backend for tensors on a device; None if there is none."""
    try:
        backend = group._get_backend(device)
    except RuntimeError:
        return None
    # With TORCH_DISTRIBUTED_DEBUG=DETAIL, torch wraps the backend in another one.
    wrapped: Backend = getattr(backend, "wrapped_pg", backend)
    return wrapped


def _not_accl(backend: Backend | None) -> RuntimeError:
    name = "no backend for the CPU" if backend is None else backend.name()
    return RuntimeError(
        f"compression needs a group of the accl backend, but this group has {name}; "
        "create it with init_process_group('accl') or new_group(backend='accl')"
    )
