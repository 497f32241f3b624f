"""The ranks of the job, and the creation of torch's default group.

Owns `COMM_WORLD` and `COMM_SELF`, and the conversion of a communicator that a script passes. `torch_accl_launch`
detects launchers.
"""

from __future__ import annotations

import atexit
import os
import sys
import threading
from collections.abc import Callable
from typing import Any

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch_accl_launch import detect_launcher

from ..._from_mpi import init_from_mpi
from ._communicator import Comm
from ._mailbox import flush_all, flush_at_exit

__all__ = ["COMM_SELF", "COMM_WORLD", "begin", "communicator_of", "end", "has_ended"]

_ENDED = threading.Event()
_USUAL_BACKEND = "accl"


def begin(backend: str | None = None) -> None:
    """Creates torch's default group from the launcher's variables, if there are several ranks and no group. Collective.

    Raises:
        ValueError: a group with another backend exists.
        torch_accl_launch.LaunchError: the launcher's variables contradict one another.
    """
    if dist.is_initialized():
        if backend is not None and dist.get_backend() != backend.lower() and backend.lower() not in _backends():
            raise ValueError(
                f"MPI.Init({backend!r}): the existing group has the backend {_backends()}; call MPI.Init first, and do not call init_process_group"
            )
        return
    _ENDED.clear()
    if _has_other_ranks():
        # accl serves the CPU and all accelerators, however many ranks share a GPU. NCCL is left to the script to name.
        dist.init_process_group(backend or _USUAL_BACKEND)
        if "accl" not in _backends():
            atexit.register(_end_at_exit)


def end(flush: Callable[[], None] = flush_all) -> None:
    """Waits with `flush` until this rank's messages are sent, and destroys torch's groups."""
    _ENDED.set()
    if dist.is_initialized():
        try:
            flush()
        finally:
            dist.destroy_process_group()


def has_ended() -> bool:
    """Returns whether `end` was called since the group was created."""
    return _ENDED.is_set() and not dist.is_initialized()


def _has_other_ranks() -> bool:
    found = detect_launcher(os.environ)
    return found is not None and found.world > 1


def _end_at_exit() -> None:
    """Destroys the groups, as MPI does at exit. A group of gloo that still exists then may abort the process."""
    end(flush_at_exit)


def _backends() -> str:
    return str(dist.get_backend_config())


def _world() -> dist.ProcessGroup | None:
    if has_ended() and _has_other_ranks():
        # Another group would wait for ranks that may have exited.
        raise RuntimeError("MPI.COMM_WORLD after MPI.Finalize(): move the call before Finalize, or call MPI.Init first")
    begin()
    return dist.group.WORLD if dist.is_initialized() else None


COMM_WORLD = Comm(_world, "COMM_WORLD")
COMM_SELF = Comm(lambda: None, "COMM_SELF")


def communicator_of(given: Any) -> Comm:
    """Converts a script's argument to a communicator: a communicator of this package's `MPI`, torch's group or mesh, or
    a communicator of mpi4py with all ranks or this one alone.

    Raises:
        TypeError: it is none of them.
        ValueError: its ranks are not the ranks that torch has.
    """
    if isinstance(given, Comm):
        return given
    if isinstance(given, DeviceMesh):
        if given.ndim != 1:
            raise ValueError(
                f"the mesh has {given.ndim} dimensions; give the one dimension for the layers, such as mesh['lp']"
            )
        given = given.get_group()
    if isinstance(given, dist.ProcessGroup):
        group = given
        return COMM_WORLD if group is dist.group.WORLD else Comm(lambda: group, "group")
    if not all(callable(getattr(given, name, None)) for name in ("Get_rank", "Get_size")):
        raise TypeError(
            f"expected a communicator of torch_accl.compat.torchbraid.MPI, or one of mpi4py, got {type(given).__name__}"
        )
    return _of_mpi(given)


def _of_mpi(given: Any) -> Comm:
    mpi4py = sys.modules.get("mpi4py.MPI")
    if mpi4py is not None and given == mpi4py.COMM_SELF:
        return COMM_SELF
    size, rank = given.Get_size(), given.Get_rank()
    found = detect_launcher(os.environ)
    if not dist.is_initialized() and size > 1 and (found is None or found.world == size):
        init_from_mpi(given, _USUAL_BACKEND)
    world, own = COMM_WORLD.Get_size(), COMM_WORLD.Get_rank()
    if size != world:
        raise ValueError(
            f"a communicator of {size} {'rank' if size == 1 else 'ranks'} was given, but torch.distributed has a world of {world}: mpi4py counts only the "
            "ranks that MPI's own launcher started, and torch must create groups of fewer ranks. Use `from torch_accl.compat.torchbraid import MPI` "
            "instead of mpi4py's"
        )
    if rank != own:
        raise ValueError(
            f"rank {rank} of a communicator was given on rank {own} of torch.distributed; both must number ranks alike. Use `from "
            "torch_accl.compat.torchbraid import MPI` instead of mpi4py's"
        )
    return COMM_WORLD
