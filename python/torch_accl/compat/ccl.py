"""torch-ccl by its own name, on accl: `from torch_accl.compat import ccl`, where a script has `import oneccl_bindings_for_pytorch` or
`import torch_ccl`.

Importing registers the backend name `ccl`, for CPU tensors, and sets `PMI_RANK` and `PMI_SIZE` where they are unset and a launcher has
said them otherwise, since scripts copy them to `RANK` and `WORLD_SIZE`:

    from torch_accl.compat import ccl

    os.environ["RANK"] = os.environ.get("PMI_RANK", "0")
    os.environ["WORLD_SIZE"] = os.environ.get("PMI_SIZE", "1")
    dist.init_process_group("ccl")  # MASTER_ADDR may be left away

A group of that name is one of accl. Of oneCCL's variables it heeds `CCL_LOG_LEVEL`, `CCL_WORKER_COUNT`, `CCL_KVS_IFACE`, and those that choose
algorithms, `CCL_ALLREDUCE` and its kin, where accl has the algorithm; options and variables of accl win over them. Others have no effect, and
rank 0 lists those that are set once. In the profiler its calls have torch-ccl's names (`Options(profile_names="ccl")`).

What torch-ccl refuses works: send and recv, sub-groups, AVG and the bit operators, reduce_scatter; `docs/migrating.md` has a table.
"""

from __future__ import annotations

import os
import warnings
from typing import Any

import torch.distributed as dist
from torch_accl_launch import LaunchError, place

from .. import _native
from .._register import connect, options_of
from ._ccl_variables import settings_of, without_effect

__all__ = ["NAME"]

NAME = "ccl"

# Whether what has no effect was listed. Once for a process.
_has_listed: list[bool] = []


def _create_group(group: Any, pg_options: _native.BackendOptions | None) -> _native.Backend:
    """Makes one rank's backend of a group; torch calls this on every rank of it.

    Raises:
        ValueError: a variable is not what oneCCL takes.
    """
    options = options_of(group, pg_options)
    options.settings = {**settings_of(os.environ), **options.settings}
    # Launchers give all ranks the same variables, and one of them says so.
    if group.group_rank == 0 and not _has_listed and (names := without_effect(os.environ)):
        _has_listed.append(True)
        warnings.warn(f"ccl: these variables of oneCCL have no effect on accl: {', '.join(names)}", stacklevel=2)
    return connect(group, options)


def _fill_pmi() -> None:
    """What scripts for torch-ccl look for, under launchers that call it otherwise."""
    try:
        found = place(os.environ)
    except LaunchError:
        # Who makes a group hears of it.
        return
    if found is not None:
        known = {
            "PMI_RANK": found.rank,
            "PMI_SIZE": found.world,
            "MPI_LOCALRANKID": found.local_rank,
            "MPI_LOCALNRANKS": found.local_world,
        }
        for name, value in known.items():
            if value is not None and not os.environ.get(name):
                os.environ[name] = str(value)


_fill_pmi()
if NAME.upper() not in dist.Backend._plugins:
    dist.Backend.register_backend(NAME, _create_group, extended_api=True, devices=["cpu"])
