"""The transport `mpi` of torch-accl, built against the MPI library of this site.

torch_accl loads this package when a setting names the transport (`ACCL_TRANSPORTS=mpi`), through the entry point
`torch_accl.transports`; there is nothing to import by hand.

Environment:
    ACCL_MPI_THREAD_LEVEL: the level of thread support to ask MPI for: `multiple` (the default), `serialized`, `funneled`
        or `single`. Below `serialized` one thread makes all calls.
    ACCL_MPI_EXCLUSIVE: `1` says that nobody else calls MPI from the first group on, so that an MPI that was started with
        `MPI_THREAD_SERIALIZED` may be used. Threads of torch-accl call it at any time.
    ACCL_MPI_TIMEOUT: seconds that the start of MPI may take, and its end in a process that ends by an error; 60 unless set.
    ACCL_MPI_EXIT_TIMEOUT: seconds for which a process that ends waits for the others of its job, 1800 unless set.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

from torch_accl_launch import place
from torch_accl_launch.jobs import job as job_name

from . import _native

__all__ = ["Job", "JobCommunicator", "finish", "job", "library", "transport"]

# Which process has which place in the job: for those that a rank starts, which inherit what its launcher has said.
_PLACE = "TORCH_ACCL_MPI_PLACE"
# What the variables for times are unless they are set.
_SECONDS = {"ACCL_MPI_TIMEOUT": 60.0, "ACCL_MPI_EXIT_TIMEOUT": 1800.0}
# How long an end may take whose beginning was none.
_BROKEN_END_S = 10.0


class Job(NamedTuple):
    """The MPI job as this process sees it."""

    library: str
    """The MPI library's name and version."""
    rank: int
    """Of this process among those of the job."""
    size: int
    """How many processes the job has."""
    thread_level: str
    """What the library provides: `single`, `funneled`, `serialized` or `multiple`."""
    is_shared: bool
    """Somebody else has started MPI, and ends it."""


def library() -> str:
    """The MPI library that this package was built against and has loaded: name and version."""
    return _native.library()


def job() -> Job:
    """The MPI job of this process.

    Raises:
        RuntimeError: the transport was not opened in this process.
    """
    return Job(*_native.job())


def transport(communicator: int | None = None) -> tuple[int, Callable[[], None]]:
    """Starts MPI, unless that was done, and returns what `torch_accl.register_transport` takes: the address of the transport's table of C
    functions, and what is called as the process ends.

    Args:
        communicator: whose processes the frames travel between, by its handle in Fortran (`comm.py2f()`), where the script has started
            MPI; those of the whole job if not given. All of its processes have to call this.

    Raises:
        RuntimeError: MPI cannot be used as it is; the text says why and what to do.
        ValueError: a variable of the environment has a value that it cannot have.
    """
    level, exclusive = os.environ.get("ACCL_MPI_THREAD_LEVEL", "multiple").strip().lower(), _flag("ACCL_MPI_EXCLUSIVE")
    timeout, _ = _seconds("ACCL_MPI_TIMEOUT"), _seconds("ACCL_MPI_EXIT_TIMEOUT")
    _claim_place()
    try:
        address = _native.start(
            size=_launched(), level=level, exclusive=exclusive, communicator=communicator, timeout=timeout
        )
    except RuntimeError:
        # Whoever goes on without has yet to end what has begun, or launchers take the process for one that has crashed.
        atexit.register(_finish_quietly)
        raise
    return address, finish


def _claim_place() -> None:
    """Refuses a process that has its place in the job from the rank that has started it: MPI knows one process of each."""
    found = place(os.environ)
    name = f"{job_name(found.launcher, os.environ)}/{found.rank}" if found is not None else "none"
    holder, _, held = os.environ.get(_PLACE, "").partition(" ")
    if held == name and holder != str(os.getpid()):
        raise RuntimeError(
            f"process {holder} has the place of this one in the MPI job, as its parent; use other transports in what a rank starts "
            "(ACCL_TRANSPORTS=tcp in such a process)"
        )
    os.environ[_PLACE] = f"{os.getpid()} {name}"


class JobCommunicator:
    """The processes of the job, with the part of mpi4py's interface that ranks need to meet. Starts MPI, unless that was done."""

    def __init__(self) -> None:
        transport()
        self._job = job()

    def Get_rank(self) -> int:
        return self._job.rank

    def Get_size(self) -> int:
        return self._job.size

    def bcast(self, obj: Any, root: int = 0) -> Any:
        """What rank 0 gives, at all: anything that JSON knows, up to 4,000 bytes of it.

        Raises:
            ValueError: `root` is another one.
            RuntimeError: not all processes of the job have come within `ACCL_MPI_TIMEOUT`.
        """
        if root != 0:
            raise ValueError(f"only rank 0 can tell the others something, not {root}")
        return json.loads(_native.broadcast(json.dumps(obj).encode(), _seconds("ACCL_MPI_TIMEOUT")))


def finish() -> None:
    """Ends MPI where this package has started it: a fence for all processes of the job. torch_accl calls it as the process ends.

    A process whose peers do not come to their ends has no way to end MPI: it says so and exits with status 1, after the
    time that `ACCL_MPI_EXIT_TIMEOUT` gives, or `ACCL_MPI_TIMEOUT` where it ends by an error.
    """
    error = sys.exc_info()[1] or getattr(sys, "last_value", None)
    ends_well = error is None or isinstance(error, SystemExit)
    try:
        _native.finish(_seconds("ACCL_MPI_EXIT_TIMEOUT" if ends_well else "ACCL_MPI_TIMEOUT"))
    except RuntimeError as why:
        text = f"torch_accl_mpi: MPI_Finalize was given up: {why}; this process ends with status 1\n"
        os.write(sys.__stderr__.fileno() if sys.__stderr__ else 2, text.encode())
        os._exit(1)


def _finish_quietly() -> None:
    with contextlib.suppress(RuntimeError):
        _native.finish(_BROKEN_END_S)


def _launched() -> int | None:
    """How many processes the launcher has started, if anybody says so."""
    value = os.environ.get("WORLD_SIZE", "")
    return int(value) if value.isdecimal() else None


def _flag(name: str) -> bool:
    value = os.environ.get(name, "0").strip().lower()
    if value not in ("0", "1", "false", "true", "no", "yes", "off", "on", ""):
        raise ValueError(f"{name}: value `{value}` is not accepted; expected 0 or 1")
    return value in ("1", "true", "yes", "on")


def _seconds(name: str) -> float:
    value = os.environ.get(name) or str(_SECONDS[name])
    try:
        seconds = float(value)
    except ValueError:
        seconds = -1.0
    if not 0.0 < seconds < 1e9:
        raise ValueError(f"{name}: value `{value}` is not accepted; expected a number of seconds above 0")
    return seconds
