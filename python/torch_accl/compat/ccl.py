"""torch-ccl by its own name, on accl: `from torch_accl.compat import ccl` replaces `import oneccl_bindings_for_pytorch`
or `import torch_ccl`.

Importing registers the backend name `ccl` for tensors of the CPU and of accelerators. It also sets `PMI_RANK` and `PMI_SIZE` if they are unset and
the launcher uses other names. Scripts copy them to `RANK` and `WORLD_SIZE`:

    from torch_accl.compat import ccl

    os.environ["RANK"] = os.environ.get("PMI_RANK", "0")
    os.environ["WORLD_SIZE"] = os.environ.get("PMI_SIZE", "1")
    dist.init_process_group("ccl")  # MASTER_ADDR may be omitted

A group of that name is a group of accl. It uses oneCCL's variables `CCL_LOG_LEVEL`, `CCL_WORKER_COUNT`,
`CCL_WORKER_AFFINITY` and `CCL_KVS_IFACE`. It also uses those that choose algorithms, such as `CCL_ALLREDUCE`, where
accl has the algorithm. Options and variables of accl take precedence over them. Other variables have no effect, and
rank 0 lists those that are set once. In the profiler its calls have torch-ccl's names (`Options(profile_names="ccl")`).

`ProcessGroupCCL(store, rank, size)`, which is also `torch.distributed.ProcessGroupCCL`, is such a group outside of
torch's list of groups.

Several things that torch-ccl refuses work: send and recv, sub-groups, AVG and the bit operators, reduce_scatter.
`docs/migrating-torch-ccl.md` has a table.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch._C._distributed_c10d import Store, _DistributedBackendOptions
from torch.distributed.distributed_c10d import default_pg_timeout
from torch_accl_launch import LaunchError, detect_launcher

from .. import _native
from .._errors import InvalidArgumentError
from .._register import connect, options_of, register_name, serve_devices
from ._ccl_variables import settings_of, without_effect

__all__ = ["NAME", "ProcessGroupCCL"]

NAME = "ccl"

# Phrases of accl's errors, and torch-ccl's phrases in their place, which scripts may match.
_PHRASES = {
    "invalid root rank": "unexpected rank",
    "the same type": "Tensors are not equal in data type",
    "invalid tensor type": "Tensors are not equal in data type",
}

# Non-empty once the variables without effect were listed, which happens once per process.
_has_listed: list[bool] = []


def _create_group(group: Any, pg_options: _native.BackendOptions | None) -> _native.Backend:
    """Creates one rank's backend of a group; torch calls this on every rank of it.

    Raises:
        ValueError: a variable has a value that oneCCL does not accept.
    """
    options = options_of(group, pg_options)
    options.settings = {**settings_of(os.environ), **options.settings}
    # Launchers give all ranks the same variables, so only one rank warns.
    if group.group_rank == 0 and not _has_listed and (names := without_effect(os.environ)):
        _has_listed.append(True)
        warnings.warn(f"ccl: these variables of oneCCL have no effect on accl: {', '.join(names)}", stacklevel=2)
    return connect(group, options)


@contextmanager
def _phrased() -> Iterator[None]:
    """Adds torch-ccl's phrase to the error of a refused argument."""
    try:
        yield
    except InvalidArgumentError as error:
        found = [theirs for ours, theirs in _PHRASES.items() if ours in str(error)]
        if not found:
            raise
        raise InvalidArgumentError(f"{error} ({found[0]})") from None


class ProcessGroupCCL(dist.ProcessGroup):
    """A group of `size` ranks that meet in `store`, outside of torch's list of groups. Creating it is collective.

    Args:
        store: where the ranks meet; one store serves one group.
        rank: this rank.
        size: the number of ranks.
        timeout: of a call; None is torch's default, 30 minutes.

    Calls accept tensors of the CPU and of accelerators, and return a `Work`; `shutdown()` ends the group.
    """

    def __init__(self, store: Store, rank: int, size: int, timeout: timedelta | None = None) -> None:
        if not 0 <= rank < size:
            raise ValueError(f"ProcessGroupCCL(rank={rank}, size={size}): expected a rank from 0 to size - 1")
        super().__init__(rank, size)
        # Keep the store: groups are assigned to a job by the store's address, which no other store may reuse.
        self._store = store
        wanted = _DistributedBackendOptions()
        wanted.store, wanted.group_rank, wanted.group_size = store, rank, size
        wanted.timeout = default_pg_timeout if timeout is None else timeout
        wanted.group_id = NAME  # type: ignore[assignment]
        serve_devices(self, _create_group(wanted, None), NAME)
        self._set_default_backend(dist.ProcessGroup.BackendType.CUSTOM)

    # Each method calls torch's in a frame of its own name, by which torch recognises a call from the overriding method.

    def broadcast(self, *args: Any, **kwargs: Any) -> Any:
        """See `ProcessGroup`; a refused root or type adds torch-ccl's phrase to the error. The same holds for the other
        methods."""
        with _phrased():
            return super().broadcast(*args, **kwargs)

    def allreduce_coalesced(self, *args: Any, **kwargs: Any) -> Any:
        """See `ProcessGroup`. Results are there when it returns, for the current stream of an accelerator, because
        scripts for torch-ccl read the tensors at once."""
        work = super().allreduce_coalesced(*args, **kwargs)
        # A blocking call has no work, and is complete already.
        if work is not None:
            work.wait()
        return work

    def reduce(self, *args: Any, **kwargs: Any) -> Any:
        """See `ProcessGroup`."""
        with _phrased():
            return super().reduce(*args, **kwargs)

    def gather(self, *args: Any, **kwargs: Any) -> Any:
        """See `ProcessGroup`."""
        with _phrased():
            return super().gather(*args, **kwargs)

    def scatter(self, *args: Any, **kwargs: Any) -> Any:
        """See `ProcessGroup`."""
        with _phrased():
            return super().scatter(*args, **kwargs)

    def allgather(self, *args: Any, **kwargs: Any) -> Any:
        """See `ProcessGroup`."""
        with _phrased():
            return super().allgather(*args, **kwargs)

    def _allgather_base(self, *args: Any, **kwargs: Any) -> Any:
        with _phrased():
            return super()._allgather_base(*args, **kwargs)

    def reduce_scatter(self, *args: Any, **kwargs: Any) -> Any:
        """See `ProcessGroup`."""
        with _phrased():
            return super().reduce_scatter(*args, **kwargs)

    def _reduce_scatter_base(self, *args: Any, **kwargs: Any) -> Any:
        with _phrased():
            return super()._reduce_scatter_base(*args, **kwargs)


def _fill_pmi() -> None:
    """Sets the variables that scripts for torch-ccl read, if the launcher uses other names."""
    try:
        found = detect_launcher(os.environ)
    except LaunchError:
        # Creating a group raises this error again.
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
register_name(NAME, _create_group)
# torch-ccl puts its class here.
dist.ProcessGroupCCL = ProcessGroupCCL  # type: ignore[attr-defined]
