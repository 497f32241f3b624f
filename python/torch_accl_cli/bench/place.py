"""Where a process stands among the ranks of a run: what a launcher says in the environment, and how the ranks meet."""

from __future__ import annotations

import os
import re
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING

from .._wrong import WrongInput

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

__all__ = ["Place", "leave", "meet", "place_given"]

# Launcher, and its variables for the rank, the number of ranks, and the ranks on this host. In a batch script of Slurm
# that srun did not start, the number of tasks of the step is missing.
_LAUNCHERS = (
    ("torchrun", "RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"),
    ("mpirun", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE"),
    ("mpirun", "PMI_RANK", "PMI_SIZE", "MPI_LOCALNRANKS"),
    ("srun", "SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_STEP_TASKS_PER_NODE"),
)
# What names one start of a launcher on one host.
_RUN_IDS = (("PMIX_NAMESPACE",), ("SLURM_JOB_ID", "SLURM_STEP_ID"))


@dataclass(frozen=True)
class Place:
    """A rank among `world`; `launcher` started it."""

    rank: int
    world: int
    launcher: str
    # None: the launcher does not say.
    local_world: int | None = None


def place_given() -> Place | None:
    """The place that a launcher gave this process; None without a launcher.

    Raises:
        WrongInput: its variables are not numbers.
    """
    for launcher, rank, world, local in _LAUNCHERS:
        if rank in os.environ and world in os.environ:
            return Place(_number(rank), _number(world), launcher, _local_world(os.environ.get(local, "")))
    return None


def meet(place: Place, timeout_s: float) -> Store:
    """The store in which the ranks of a launcher meet.

    Raises:
        WrongInput: the ranks are on several hosts and nothing says where rank 0 is.
    """
    from torch._C._distributed_c10d import PrefixStore, TCPStore

    timeout = timedelta(seconds=timeout_s)
    host, port = os.environ.get("MASTER_ADDR"), os.environ.get("MASTER_PORT")
    if host and port:
        is_master = place.rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
        store = TCPStore(host, _number("MASTER_PORT"), None, is_master, timeout, wait_for_workers=False)
        return PrefixStore(f"bench/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)
    if place.local_world != place.world:
        raise WrongInput(
            f"{place.launcher} started ranks on several hosts and not all know where rank 0 is: give all of them "
            "MASTER_ADDR (its host) and MASTER_PORT (a free port there)"
        )
    return _meet_on_this_host(place, timeout)


def leave(store: Store, rank: int, world: int) -> None:
    """The last thing that is said over a store. Rank 0, which may own it, leaves last."""
    if rank:
        # Nothing is answered to it.
        store.set(f"left/{rank}", "")
    elif world > 1:
        store.wait([f"left/{other}" for other in range(1, world)])


def _meet_on_this_host(place: Place, timeout: timedelta) -> Store:
    """Rank 0 leaves the port of its store in a file until all have read it."""
    from torch._C._distributed_c10d import TCPStore

    file = Path(tempfile.gettempdir()) / f"accl-bench-{os.getuid()}-{_run_id()}"
    if place.rank == 0:
        store = TCPStore("127.0.0.1", 0, None, True, timeout, wait_for_workers=False)
        # Whole at once: who finds it can read it.
        draft = file.with_suffix(f".{os.getpid()}")
        draft.write_text(str(store.port))
        draft.rename(file)
    else:
        store = TCPStore("127.0.0.1", _port_left_in(file, timeout), None, False, timeout, wait_for_workers=False)
    store.add("met", 1)
    if place.rank == 0:
        try:
            _until(lambda: store.add("met", 0) == place.world, timeout, f"not all {place.world} ranks have come")
        finally:
            file.unlink()
    return store


def _port_left_in(file: Path, timeout: timedelta) -> int:
    _until(file.exists, timeout, "rank 0 has not come")
    if file.stat().st_uid != os.getuid():
        raise WrongInput(f"{file} belongs to another user; set TMPDIR to a folder of your own")
    return int(file.read_text())


def _until(holds: Callable[[], bool], timeout: timedelta, otherwise: str) -> None:
    deadline = time.monotonic() + timeout.total_seconds()
    while not holds():
        if time.monotonic() > deadline:
            raise TimeoutError(f"{otherwise} within {timeout.total_seconds():g} s")
        time.sleep(0.01)


def _run_id() -> str:
    """The same for all ranks of one start on this host, and for no other."""
    for names in _RUN_IDS:
        if all(name in os.environ for name in names):
            return re.sub(r"[^\w.-]", "_", "-".join(os.environ[name] for name in names))
    # All ranks have one parent, whose number may have been used before but not with this start.
    parent = os.getppid()
    return f"{parent}-{Path(f'/proc/{parent}/stat').read_text().rpartition(')')[2].split()[19]}"


def _number(name: str) -> int:
    try:
        return int(os.environ[name])
    except ValueError:
        raise WrongInput(f"{name}={os.environ[name]!r} is not a number") from None


def _local_world(text: str) -> int | None:
    # Slurm writes "2" for one host and "2(x3)" or "2,1" for several.
    return int(text) if text.isdecimal() else None
