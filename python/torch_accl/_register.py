"""Registration with torch.distributed, and the process's engine."""

from __future__ import annotations

import atexit
from typing import Any

import torch.distributed as dist

from . import _native
from ._options import Options

__all__ = ["NAME", "create_backend", "register"]

NAME = "accl"

_runtime = _native.Runtime()


def register() -> None:
    """Registers the backend with torch.distributed; again and again is fine. Also the entry point of torch's plug-ins."""
    if NAME.upper() not in dist.Backend._plugins:
        dist.Backend.register_backend(NAME, create_backend, extended_api=True, devices=["cpu"])


def create_backend(group: Any, pg_options: _native.BackendOptions | None) -> _native.Backend:
    """Makes one rank's backend of a group; torch calls this on every rank of it.

    `group` is torch's description of the group: store, rank, size, timeout, name, global ranks.
    """
    if pg_options is None:
        pg_options = Options()
    if not isinstance(pg_options, _native.BackendOptions):
        raise TypeError(f"pg_options must be a torch_accl.Options, not {type(pg_options).__name__}")
    options = _native.BackendOptions()
    options.settings = pg_options.settings
    own_timeout = getattr(pg_options, "timeout", None)
    options._timeout = group.timeout if own_timeout is None else own_timeout
    options.group_name = group.group_id
    options.global_ranks_in_group = list(group.global_ranks_in_group)
    return _runtime.create_backend(group.store, group.group_rank, group.group_size, options)


# A process may end without destroy_process_group: the peers learn of it at once, and no thread of ours outlives Python.
atexit.register(_runtime.shutdown)
