"""The part of a launcher that torch sees: the variables that torch reads, and its `env://` handler.

torch's rendezvous needs RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT, which torchrun sets. Under other launchers `prepare` sets
RANK, WORLD_SIZE, LOCAL_RANK and LOCAL_WORLD_SIZE where they are unset, and changes no other variable. If MASTER_ADDR is unset, this
module's handler finds rank 0; otherwise torch's own handler is used. This module owns how a store is found, and `meeting` owns
how the ranks of one host meet.
"""

from __future__ import annotations

import fcntl
import importlib
import os
import socket
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qsl, urlparse

from .jobs import job, slurm_job
from .launchers import LaunchError, RankInfo, detect_launcher, expand
from .meeting import Meeting, above_standard_streams, fill_standard_streams, port_of

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store, TCPStore

__all__ = ["find_store", "prepare"]

Rendezvous = Iterator[tuple["Store", int, int]]

_THIS_HOST = "127.0.0.1"
# Key under which rank 0 stores the name of the job.
_JOB = "torch_accl/job"
# Seconds that rank 0 may take to set that key.
_KNOWN_S = 5.0
_LOOK_AGAIN_S = 0.5

# One entry per rendezvous of this process with its job. All ranks of the job have equally many. Rank 0 keeps the socket of its
# first rendezvous open, so that other programs of the job find it.
_meetings: list[socket.socket | None] = []


# Another way to obtain a store, for when the address of rank 0 is not known. It returns None if it is not available either.
_otherwise: list[Callable[[RankInfo, timedelta], Store | None]] = []


def prepare(otherwise: Callable[[RankInfo, timedelta], Store | None] | None = None) -> None:
    """Under a launcher, sets torch's rank variables where they are unset, and wraps torch's `env://` handler.

    If a rank has started the launcher, the variables are inherited from that rank, and are overwritten. If the launcher's
    variables contradict each other, the handler reports it when a group is requested. `otherwise` returns a store if
    neither this module nor MASTER_ADDR gives the address of rank 0.
    """
    if otherwise is not None:
        _otherwise[:] = [otherwise]
    try:
        found = detect_launcher(os.environ)
    except LaunchError:
        pass
    else:
        if found is None:
            return
        said = (
            ("RANK", found.rank),
            ("WORLD_SIZE", found.world),
            ("LOCAL_RANK", found.local_rank),
            ("LOCAL_WORLD_SIZE", found.local_world),
        )
        # The variables are stale if the launcher was started by a rank, from which they are inherited.
        is_stale = any(os.environ.get(name) not in (None, "", str(value)) for name, value in said[:2])
        for name, value in said:
            if value is not None and (is_stale or not os.environ.get(name)):
                os.environ[name] = str(value)
    _wrap_handler()


def _wrap_handler() -> None:
    # `torch.distributed.rendezvous` is a function, so the module of that name must be imported this way.
    rendezvous = importlib.import_module("torch.distributed.rendezvous")
    handlers: dict[str, Callable[..., Rendezvous]] = rendezvous._rendezvous_handlers
    torchs = handlers["env"]
    if getattr(torchs, "is_of_accl", False):
        return

    def handler(url: str, **options: Any) -> Rendezvous:
        # A script that sets MASTER_ADDR may number its ranks as it likes.
        if os.environ.get("MASTER_ADDR"):
            return torchs(url, **options)
        return _meet(url, **options)

    handler.is_of_accl = True  # type: ignore[attr-defined]
    handlers["env"] = handler


def _meet(url: str, timeout: timedelta | None = None, **_: Any) -> Rendezvous:
    from torch.distributed.constants import default_pg_timeout

    found = detect_launcher(os.environ)
    if found is None:
        raise LaunchError(
            "neither MASTER_ADDR nor the variables of a launcher are set; start the ranks with torchrun, mpirun or srun, or set RANK, "
            "WORLD_SIZE, MASTER_ADDR and MASTER_PORT"
        )
    asked = dict(parse_qsl(urlparse(url).query))
    for given, name, value in (("rank", found.rank_name, found.rank), ("world_size", found.world_name, found.world)):
        if given in asked and int(asked[given]) != value:
            raise LaunchError(
                f"init_process_group got {given}={asked[given]}, but {name} is {value}; omit {given}=, or set MASTER_ADDR and MASTER_PORT to use "
                "other ranks than the launcher's"
            )
    yield find_store(found, timeout or default_pg_timeout), found.rank, found.world


def find_store(found: RankInfo, timeout: timedelta) -> Store:
    """Returns the store in which the ranks of a launcher meet without MASTER_ADDR. Collective over all ranks.

    Raises:
        LaunchError: the address of rank 0 cannot be found, or the ranks disagree about the job.
        TimeoutError: not all ranks came in time.
    """
    deadline = time.monotonic() + timeout.total_seconds()
    # torch's stores may get the descriptor of a closed standard stream.
    fill_standard_streams()
    name = job(found.launcher, os.environ)
    kept: socket.socket | None = None
    store: Store
    if found.world == 1:
        store = _listen_here(timeout)
    elif found.is_on_one_host and name is not None:
        store, kept = _on_this_host(found, name, deadline, timeout)
    elif found.launcher in ("Slurm", "PMI") and (step := slurm_job(os.environ)) is not None:
        store = _on_slurms_hosts(found, step, deadline, timeout)
    elif _otherwise and (other := _otherwise[0](found, timeout)) is not None:
        store = other
    else:
        where = "reports no job name" if found.is_on_one_host else "does not report that all ranks are on one host"
        raise LaunchError(
            f"rank {found.rank}: MASTER_ADDR is not set, and {found.launcher} {where}; set MASTER_ADDR to the host of rank 0 and MASTER_PORT to "
            "a free port there, the same for all ranks"
        )
    # Only a successful rendezvous is counted: a retry after a failure uses the same number again.
    if _meetings and kept is not None:
        kept.close()
        kept = None
    _meetings.append(kept)
    return store


def _wanted_port() -> int:
    text = os.environ.get("MASTER_PORT") or "0"
    if not text.isdecimal() or int(text) > 65535:
        raise LaunchError(f"MASTER_PORT={text!r} is not a port; unset it, or set it to a number from 1 to 65535")
    return int(text)


def _listen_here(timeout: timedelta) -> TCPStore:
    """Returns a store that serves only processes of this host."""
    from torch._C._distributed_c10d import TCPStore
    from torch.distributed import DistNetworkError

    if port := _wanted_port():
        try:
            # `multi_tenant`: the store of an earlier group of this process may still use the port.
            return TCPStore(_THIS_HOST, port, None, True, timeout, wait_for_workers=False, multi_tenant=True)
        except DistNetworkError as error:
            raise LaunchError(
                f"rank 0 cannot listen on port {port} ({_first_line(error)}); set MASTER_PORT to a free one, or unset it"
            ) from None
    with above_standard_streams(socket.create_server((_THIS_HOST, 0))) as listener:
        port = listener.getsockname()[1]
        # The store closes the descriptor that it is given, so it gets a duplicate.
        fd = fcntl.fcntl(listener.fileno(), fcntl.F_DUPFD_CLOEXEC, 3)
        return TCPStore(_THIS_HOST, port, None, True, timeout, wait_for_workers=False, master_listen_fd=fd)


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0]


def _connect(host: str, port: int, timeout: timedelta) -> Store:
    from torch._C._distributed_c10d import TCPStore

    return TCPStore(host, port, None, False, timeout, wait_for_workers=False)


def _on_this_host(
    found: RankInfo, name: str, deadline: float, timeout: timedelta
) -> tuple[Store, socket.socket | None]:
    """Returns the store of a rendezvous on one host and, for rank 0, the socket that it keeps open."""
    meeting = Meeting(found, name, len(_meetings), deadline)
    if found.rank:
        return _connect(_THIS_HOST, meeting.fetch_port(), timeout), None
    listener = meeting.open()
    try:
        store = _listen_here(timeout)
        meeting.serve_port(listener, store.port)
    except BaseException:
        listener.close()
        raise
    return store, listener


def _on_slurms_hosts(found: RankInfo, step: str, deadline: float, timeout: timedelta) -> Store:
    """Returns the store of a rendezvous over Slurm's hosts.

    Rank 0 is on the first node of the step, and the port is derived from the step. The store there must belong to the step.
    """
    nodes = expand(os.environ.get("SLURM_STEP_NODELIST") or os.environ.get("SLURM_NODELIST") or "")
    if not nodes:
        raise LaunchError(
            "MASTER_ADDR and SLURM_STEP_NODELIST are not set; set MASTER_ADDR to the host of rank 0 and MASTER_PORT to a free port there"
        )
    if found.rank == 0 and os.environ.get("SLURM_NODEID", "0") != "0":
        raise LaunchError(
            f"rank 0 is on node {os.environ['SLURM_NODEID']} of {os.environ.get('SLURM_STEP_NODELIST')}, but the other ranks expect it on {nodes[0]}; "
            "set MASTER_ADDR to the host of rank 0 and MASTER_PORT to a free port there"
        )
    port = _wanted_port() or port_of(step, len(_meetings))
    who = f"{step}/{found.world}"
    return (
        _serve_step(nodes[0], port, who, deadline, timeout)
        if found.rank == 0
        else _join_step(found, nodes[0], port, who, deadline, timeout)
    )


def _serve_step(node: str, port: int, who: str, deadline: float, timeout: timedelta) -> Store:
    from torch._C._distributed_c10d import TCPStore
    from torch.distributed import DistNetworkError

    while True:
        try:
            # `multi_tenant`: with MASTER_PORT, the store of an earlier group of this process may still use the port.
            store = TCPStore(node, port, None, True, timeout, wait_for_workers=False, multi_tenant=True)
        except DistNetworkError as error:
            # The port may be held by rank 0 of an earlier program of the step, which is about to end.
            if time.monotonic() + _LOOK_AGAIN_S < deadline and _is_of(node, port, who):
                time.sleep(_LOOK_AGAIN_S)
                continue
            raise LaunchError(
                f"rank 0 cannot listen on port {port} ({_first_line(error)}); set MASTER_PORT to a free one, the same for all ranks"
            ) from None
        store.set(_JOB, who)
        store.set(_round(), "")
        return store


def _round() -> str:
    """Returns the key by which rank 0 shows that it has reached the same rendezvous as this rank."""
    return f"{_JOB}/{len(_meetings)}"


def _is_of(node: str, port: int, who: str) -> bool:
    """Whether the store at a port belongs to this step."""
    try:
        store = _connect(node, port, timedelta(seconds=_KNOWN_S))
        return store.check([_JOB]) and store.get(_JOB).decode() == who
    except RuntimeError:
        return False


def _join_step(found: RankInfo, node: str, port: int, who: str, deadline: float, timeout: timedelta) -> Store:
    while True:
        store = _connect(node, port, timeout)
        try:
            theirs = _job_of(store)
            has_been_here = theirs == who and not _is_new(store, found.rank)
        except RuntimeError:
            # The store has just closed, so it belonged to an earlier program.
            theirs, has_been_here = who, True
        if theirs != who:
            raise LaunchError(
                f"rank {found.rank}: port {port} of {node} belongs to another job ({theirs or 'a store without a name'}; this job is {who}); set "
                "MASTER_PORT to a port that is free there, the same for all ranks"
            )
        if not has_been_here and _has_come(store, deadline):
            return store
        # The store belongs to an earlier program of the step: rank 0 of this program has not started its store yet.
        del store
        if time.monotonic() + _LOOK_AGAIN_S >= deadline:
            raise TimeoutError(
                f"rank {found.rank}: rank 0 of {who} did not join the rendezvous at port {port} of {node} within {timeout.total_seconds():.0f} s"
            )
        time.sleep(_LOOK_AGAIN_S)


def _is_new(store: Store, rank: int) -> bool:
    """Whether no earlier program has joined the store as this rank; always true after this process's first rendezvous."""
    return bool(_meetings) or store.add(f"{_JOB}/came/{rank}", 1) == 1


def _has_come(store: Store, deadline: float) -> bool:
    """Whether rank 0 reaches this rendezvous before `deadline`; its store may be there already, for an earlier group."""
    try:
        store.wait([_round()], timedelta(seconds=max(deadline - time.monotonic(), 0.001)))
    except RuntimeError:
        return False
    return True


def _job_of(store: Store) -> str:
    """Returns the job name that rank 0 sets right after it creates its store; an empty string for a store of another program."""
    until = time.monotonic() + _KNOWN_S
    while not store.check([_JOB]):
        if time.monotonic() > until:
            return ""
        time.sleep(0.01)
    return store.get(_JOB).decode()
