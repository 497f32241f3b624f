"""Creates a process group from the ranks of an MPI communicator, without environment variables.

MPI may start a job together with other programs: `mpirun -n 2 sim : -n 2 python train.py`. The program then splits off a
communicator, whose rank and size become rank and world size. This module owns how ranks learn the address of rank 0's store. MPI is used
for nothing else here.
"""

from __future__ import annotations

import secrets
import socket
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from . import _native
from ._transports import add_finish, find_transports, lend_communicator

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store
    from torch_accl_launch import RankInfo

__all__ = ["Communicator", "init_from_mpi", "store_by_mpi"]

_T = TypeVar("_T")
# Seconds that an address has to accept a connection before the next address is tried; less if the group's timeout is shorter.
_ADDRESS_S = 3.0
_TOKEN = "torch_accl/mpi"
_CANNOT_LEARN = "accl: rank {rank} cannot get the address of rank 0 by MPI: {why}"


class Communicator(Protocol):
    """The methods of `mpi4py.MPI.Comm` that are used here."""

    def Get_rank(self) -> int: ...
    def Get_size(self) -> int: ...
    def bcast(self, obj: _T, root: int = 0) -> _T: ...


def init_from_mpi(
    comm: Communicator, backend: str = "accl", *, timeout: timedelta | None = None, **options: Any
) -> None:
    """Creates torch's default process group from the ranks of an MPI communicator, like `init_process_group` under a launcher.

    The call is collective over the communicator and uses it for one broadcast. The transport `mpi` uses it as well when a
    group first names that transport. The communicator may be freed once no more groups will be created.

    Args:
        comm: an intracommunicator of mpi4py, such as `MPI.COMM_WORLD` or the result of `Split`.
        backend: as for `torch.distributed.init_process_group`.
        timeout: timeout of the group, and maximum time for the ranks to meet; None takes torch's default.
        options: other arguments of `init_process_group`, such as `pg_options`. Not allowed: `store`, `rank`, `world_size`
            and `init_method`.

    Raises:
        TypeError: `comm` is not a communicator, or an option is one that follows from the communicator.
        ValueError: `ACCL_TRANSPORTS` names a transport that is not installed.
        torch.distributed.DistNetworkError: this rank reached rank 0 at none of its addresses.
        torch.distributed.DistBackendError: a transport in `ACCL_TRANSPORTS` cannot be used here; the text says why.
    """
    import torch.distributed as dist
    from torch.distributed.constants import default_pg_timeout

    for name in ("store", "rank", "world_size", "init_method"):
        if name in options:
            raise TypeError(f"init_from_mpi: the communicator determines {name}=; omit it, or use init_process_group")
    if not all(callable(getattr(comm, name, None)) for name in ("Get_rank", "Get_size", "bcast")):
        raise TypeError(f"init_from_mpi: expected an mpi4py communicator, got {type(comm).__name__}")
    # The transport `mpi` sends its messages among these ranks, too. Objects that only mimic a communicator may lack `py2f`.
    if callable(getattr(comm, "py2f", None)):
        lend_communicator(comm)
    # All ranks are in this call, so a transport that all ranks must open together is opened here. Later, some ranks would
    # already be waiting for rank 0.
    find_transports()
    rank, world = comm.Get_rank(), comm.Get_size()
    patience = timeout or default_pg_timeout
    store = _serve(comm, patience) if rank == 0 else _find(rank, comm.bcast(None, root=0), patience)
    if timeout is not None:
        options["timeout"] = timeout
    dist.init_process_group(backend, store=store, rank=rank, world_size=world, **options)


def store_by_mpi(found: RankInfo, timeout: timedelta) -> Store | None:
    """Returns the store in which a launcher's ranks meet; MPI distributes its address.

    On several hosts nothing else may know that address. Collective over the job's ranks. Returns None without the package
    `torch_accl_mpi`, or if rank and world size of MPI differ from `found`.
    """
    from torch.distributed import DistBackendError, DistError

    try:
        import torch_accl_mpi
    except ModuleNotFoundError as why:
        if why.name == "torch_accl_mpi":
            return None
        raise DistBackendError(_CANNOT_LEARN.format(rank=found.rank, why=why)) from why
    except ImportError as why:
        raise DistBackendError(_CANNOT_LEARN.format(rank=found.rank, why=why)) from why
    try:
        comm = torch_accl_mpi.JobCommunicator()
        add_finish(torch_accl_mpi.finish)
        if (comm.Get_rank(), comm.Get_size()) != (found.rank, found.world):
            return None
        return _serve(comm, timeout) if found.rank == 0 else _find(found.rank, comm.bcast(None), timeout)
    except RuntimeError as why:
        if isinstance(why, DistError):
            raise
        raise DistBackendError(_CANNOT_LEARN.format(rank=found.rank, why=why)) from why


def _serve(comm: Communicator, timeout: timedelta) -> Store:
    """Creates the store of rank 0 and broadcasts its addresses, port and token to the other ranks."""
    from torch._C._distributed_c10d import TCPStore

    token = secrets.token_hex(8)
    try:
        store = TCPStore("localhost", 0, None, True, timeout, wait_for_workers=False)
        store.set(_TOKEN, token)
        addresses = _addresses()
    except BaseException as error:
        # The other ranks wait in the broadcast, so it is completed with the error.
        comm.bcast(([], 0, f"{type(error).__name__}: {error}"), root=0)
        raise
    comm.bcast((addresses, store.port, token), root=0)
    return store


def _find(rank: int, message: Any, timeout: timedelta) -> Store:
    from torch._C._distributed_c10d import TCPStore
    from torch.distributed import DistNetworkError

    addresses, port, token = message
    if not addresses:
        raise DistNetworkError(f"accl: rank 0 could not create the store whose address MPI distributes: {token}")
    tried = []
    for address in addresses:
        try:
            # TCPStore would retry an address that does not answer until its timeout, so the address is tried first.
            with socket.create_connection((address, port), timeout=min(_ADDRESS_S, timeout.total_seconds())):
                pass
            store = TCPStore(address, port, None, False, timeout, wait_for_workers=False)
            if store.check([_TOKEN]) and store.get(_TOKEN).decode() == token:
                return store
            tried.append(f"{address}: the store belongs to another job")
        except (OSError, RuntimeError) as error:
            tried.append(f"{address}: {str(error).splitlines()[0]}")
    raise DistNetworkError(
        f"accl: rank {rank} could not connect to rank 0 at any of its addresses, port {port}: {'; '.join(tried)}. "
        "Open this system's ephemeral port range between the hosts, or set MASTER_ADDR and MASTER_PORT for "
        "init_process_group"
    )


def _addresses() -> list[str]:
    """Returns the addresses of this host, those that other hosts may reach first and loopback addresses last."""
    # `host_facts` reads ACCL_TRANSPORTS, and the engine refuses the name of a transport that is not loaded.
    find_transports()
    found = [address.rpartition(":")[0].strip("[]") for address in _native.host_facts()["addresses"]]
    return sorted(dict.fromkeys(found), key=lambda address: address.startswith("127.") or address == "::1")
