"""What of a launcher torch sees: the variables that it reads, and its `env://` handler.

torch's rendezvous wants RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT, which torchrun sets. Under other launchers `prepare` sets the first
two and their local kin where they are unset, which is its only change of the environment; and its handler finds rank 0 by itself where
MASTER_ADDR is unset. With it, torch's own serves. Owns how a store is found; how ranks meet is in `meeting`.
"""

from __future__ import annotations

import importlib
import os
import socket
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qsl, urlparse

from .jobs import job, slurm_job
from .meeting import Meeting, port_of
from .places import LaunchError, Place, expand, place

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

__all__ = ["find_store", "prepare"]

Rendezvous = Iterator[tuple["Store", int, int]]

_THIS_HOST = "127.0.0.1"
# The key under which rank 0 names the job.
_JOB = "torch_accl/job"

# How often this process has met the others of its job. All of them count alike.
_meetings: list[int] = []


def prepare() -> None:
    """Under a launcher: sets what is unset of torch's rank variables, and puts ourselves before torch's `env://` handler.

    What the launcher's variables contradict is said by the handler, when somebody wants a group.
    """
    try:
        found = place(os.environ)
    except LaunchError:
        pass
    else:
        if found is None:
            return
        for name, value in (
            ("RANK", found.rank),
            ("WORLD_SIZE", found.world),
            ("LOCAL_RANK", found.local_rank),
            ("LOCAL_WORLD_SIZE", found.local_world),
        ):
            if value is not None and not os.environ.get(name):
                os.environ[name] = str(value)
    _wrap_handler()


def _wrap_handler() -> None:
    # The package has a function of that name.
    rendezvous = importlib.import_module("torch.distributed.rendezvous")
    handlers: dict[str, Callable[..., Rendezvous]] = rendezvous._rendezvous_handlers
    torchs = handlers["env"]
    if getattr(torchs, "is_of_accl", False):
        return

    def handler(url: str, **options: Any) -> Rendezvous:
        # Once a script has set it, whatever it has called the ranks is its own matter.
        if os.environ.get("MASTER_ADDR"):
            return torchs(url, **options)
        return _meet(url, **options)

    handler.is_of_accl = True  # type: ignore[attr-defined]
    handlers["env"] = handler


def _meet(url: str, timeout: timedelta | None = None, **_: Any) -> Rendezvous:
    from torch.distributed.constants import default_pg_timeout

    found = place(os.environ)
    if found is None:
        raise LaunchError(
            "neither MASTER_ADDR nor the variables of a launcher are set; start the ranks with torchrun, mpirun or srun, or set RANK, "
            "WORLD_SIZE, MASTER_ADDR and MASTER_PORT"
        )
    asked = dict(parse_qsl(urlparse(url).query))
    for given, name, value in (("rank", found.rank_name, found.rank), ("world_size", found.world_name, found.world)):
        if given in asked and int(asked[given]) != value:
            raise LaunchError(
                f"init_process_group was given {given}={asked[given]}, and {name} is {value}; leave {given}= away, or set MASTER_ADDR and "
                "MASTER_PORT for ranks that are not the launcher's"
            )
    yield find_store(found, timeout or default_pg_timeout), found.rank, found.world


def find_store(found: Place, timeout: timedelta) -> Store:
    """The store in which the ranks of a launcher meet, without MASTER_ADDR. Collective over all of them.

    Raises:
        LaunchError: nothing says where rank 0 is, or the ranks have different ideas of the job.
        TimeoutError: not all ranks came in time.
    """
    _meetings.append(len(_meetings))
    times = _meetings[-1]
    name = job(os.environ)
    if found.world == 1:
        return _listen_here(timeout)[0]
    if found.is_on_one_host and name is not None:
        return _on_this_host(found, name, times, timeout)
    if (step := slurm_job(os.environ)) is not None and found.launcher in ("Slurm", "PMI"):
        return _on_slurms_hosts(found, step, times, timeout)
    where = "names no job" if found.is_on_one_host else "does not say that all ranks are on one host"
    raise LaunchError(
        f"rank {found.rank}: MASTER_ADDR is not set, and {found.launcher} {where}; set MASTER_ADDR to the host of rank 0 and MASTER_PORT to a "
        "free port there, the same for all ranks"
    )


def _wanted_port() -> int:
    text = os.environ.get("MASTER_PORT") or "0"
    if not text.isdecimal() or int(text) > 65535:
        raise LaunchError(f"MASTER_PORT={text!r} is not a port; unset it, or set it to a number from 1 to 65535")
    return int(text)


def _listen_here(timeout: timedelta) -> tuple[Store, int]:
    """A store that serves the processes of this host alone, and its port."""
    from torch._C._distributed_c10d import TCPStore

    port = _wanted_port()
    try:
        listener = socket.create_server((_THIS_HOST, port))
    except OSError as error:
        raise LaunchError(
            f"rank 0 cannot listen on port {port} ({error.strerror}); set MASTER_PORT to a free one, or unset it"
        ) from None
    with listener:
        port = listener.getsockname()[1]
        # The store closes what it is given.
        fd = os.dup(listener.fileno())
        return TCPStore(_THIS_HOST, port, None, True, timeout, wait_for_workers=False, master_listen_fd=fd), port


def _connect(host: str, port: int, timeout: timedelta) -> Store:
    from torch._C._distributed_c10d import TCPStore

    return TCPStore(host, port, None, False, timeout, wait_for_workers=False)


def _on_this_host(found: Place, name: str, times: int, timeout: timedelta) -> Store:
    meeting = Meeting(found, name, times, time.monotonic() + timeout.total_seconds())
    if found.rank:
        return _connect(_THIS_HOST, meeting.ask(), timeout)
    with meeting.open() as listener:
        store, port = _listen_here(timeout)
        meeting.tell(listener, port)
    return store


def _on_slurms_hosts(found: Place, step: str, times: int, timeout: timedelta) -> Store:
    """Rank 0 is on the first node of the step, at a port that follows from the step; who answers there must be of it."""
    from torch._C._distributed_c10d import TCPStore
    from torch.distributed import DistNetworkError

    nodes = expand(os.environ.get("SLURM_STEP_NODELIST") or os.environ.get("SLURM_NODELIST") or "")
    if not nodes:
        raise LaunchError(
            "MASTER_ADDR and SLURM_STEP_NODELIST are not set; set MASTER_ADDR to the host of rank 0 and MASTER_PORT to a free port there"
        )
    if found.rank == 0 and os.environ.get("SLURM_NODEID", "0") != "0":
        raise LaunchError(
            f"rank 0 is on node {os.environ['SLURM_NODEID']} of {os.environ.get('SLURM_STEP_NODELIST')}, and the others look for it on {nodes[0]}; set "
            "MASTER_ADDR to its host and MASTER_PORT to a free port there"
        )
    port = _wanted_port() or port_of(step, times)
    if found.rank == 0:
        try:
            store = TCPStore(nodes[0], port, None, True, timeout, wait_for_workers=False)
        except DistNetworkError as error:
            why = str(error).partition("\n")[0]
            raise LaunchError(
                f"rank 0 cannot listen on port {port} ({why}); set MASTER_PORT to a free one, the same for all ranks"
            ) from None
        store.set(_JOB, f"{step}/{found.world}")
        return store
    found_there = _connect(nodes[0], port, timeout)
    if (theirs := found_there.get(_JOB).decode()) != f"{step}/{found.world}":
        raise LaunchError(
            f"rank {found.rank}: port {port} of {nodes[0]} is that of another job ({theirs}, and this is {step}/{found.world}); set MASTER_PORT to a "
            "port that is free there, the same for all ranks"
        )
    return found_there
