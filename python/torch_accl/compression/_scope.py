"""Encoding of the engine's calls: a setting of the calling thread, in effect while it issues a call."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Backend

from .. import _native

__all__ = [
    "FLOATS",
    "Addresses",
    "Coded",
    "Op",
    "accl_backend",
    "accl_group",
    "check_device",
    "codec_of_group",
    "codecs_of",
    "encoded",
    "exact",
    "has_override",
    "takes_part",
]


# Types that are encoded. All other tensors are sent unchanged.
FLOATS = (torch.float32, torch.float16, torch.bfloat16)

# Type of the operators that torch's calls accept. An operator with a factor (PREMUL_SUM) is a `ReduceOp`.
Op = dist.ReduceOp | dist.ReduceOp.RedOpType

# Addresses of residuals: of contributions, and of sums.
Addresses = tuple[list[int], list[int]]

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
) -> Iterator[None]:
    """Encodes calls that this thread issues inside, and measures them if `stats` is given.

    The memory of `residuals` must stay valid until these calls complete.
    """
    before = _native.encode_calls(_native.Encoding(codecs, seed, step, residuals, stats, one_in))
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


def accl_group(group: dist.ProcessGroup | None) -> dist.ProcessGroup:
    """Returns the group, or the default group for None. Its backend for CPU tensors must be accl.

    Raises:
        RuntimeError: there is no group, or its backend is not accl.
    """
    found = dist.group.WORLD if group is None else group
    if found is None:
        raise RuntimeError("there is no process group; call init_process_group('accl') first")
    backend = _cpu_backend(found)
    if not isinstance(backend, _native.Backend):
        raise RuntimeError(
            f"compression needs a group of the accl backend, but this group has {backend.name()}; "
            "create it with init_process_group('accl') or new_group(backend='accl')"
        )
    return found


def takes_part(group: object) -> bool:
    """Whether this rank is in the group of a call. For ranks outside, `new_group` returns a placeholder instead of a group."""
    return group is not dist.GroupMember.NON_GROUP_MEMBER


def check_device(device: torch.device, group: dist.ProcessGroup) -> None:
    """Checks that gradients on this device can be compressed.

    Raises:
        RuntimeError: they cannot, because the group reduces them with another backend or has none for the device.
    """
    if device.type == "cpu":
        return
    try:
        other = f"the group reduces with {group._get_backend(device).name()}, uncompressed"
    except RuntimeError:
        other = "the group has no backend for"
    raise RuntimeError(
        f"compression supports gradients on the CPU, but these are on {device}, which {other}; train on the CPU, or "
        "omit compression"
    )


def codec_of_group(group: dist.ProcessGroup) -> str | None:
    """Returns the codec that the `Options` of the group name, or None."""
    return accl_backend(group).options.settings.get("compression")


def accl_backend(group: dist.ProcessGroup) -> _native.Backend:
    """Returns the accl backend of a group that `accl_group` returned."""
    backend = _cpu_backend(group)
    assert isinstance(backend, _native.Backend), "`accl_group` has checked the backend"
    return backend


def _cpu_backend(group: dist.ProcessGroup) -> Backend:
    backend = group._get_backend(torch.device("cpu"))
    # With TORCH_DISTRIBUTED_DEBUG=DETAIL, torch wraps the backend in another one.
    wrapped: Backend = getattr(backend, "wrapped_pg", backend)
    return wrapped
