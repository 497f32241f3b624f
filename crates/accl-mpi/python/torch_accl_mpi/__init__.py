"""The transport `mpi` of torch-accl, built against the MPI library of this site.

torch_accl loads this package when a setting names the transport (`ACCL_TRANSPORTS=mpi`), through the entry point
`torch_accl.transports`. Users do not need to import it.

Environment:
    ACCL_MPI_THREAD_LEVEL: requested level of MPI thread support: `multiple` (the default), `serialized`, `funneled` or
        `single`. Below `serialized` one thread makes all MPI calls.
    ACCL_MPI_EXCLUSIVE: `1` promises that no other code calls MPI from the first group on. Then an MPI that was started
        with `MPI_THREAD_SERIALIZED` can be used. Threads of torch-accl call MPI at any time.
    ACCL_MPI_TIMEOUT: maximum seconds for the start of MPI, and for its end in a process that exits with an error;
        default 60.
    ACCL_MPI_EXIT_TIMEOUT: maximum seconds that an exiting process waits for the other processes of its job; default
        1800.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

from torch_accl_launch import detect_launcher
from torch_accl_launch.jobs import job as job_name

from . import _native

__all__ = ["Job", "JobCommunicator", "finish", "job", "library", "transport"]

# Environment variable with the holder of a place in the job. A process that a rank starts inherits it, and also the
# launcher's variables.
_PLACE = "TORCH_ACCL_MPI_PLACE"
# Defaults of the variables for times, in seconds.
_SECONDS = {"ACCL_MPI_TIMEOUT": 60.0, "ACCL_MPI_EXIT_TIMEOUT": 1800.0}
# Maximum seconds for ending MPI after a failed start.
_BROKEN_END_S = 10.0


class Job(NamedTuple):
    """The MPI job as this process sees it."""

    library: str
    """Name and version of the MPI library."""
    rank: int
    """Rank of this process in the job."""
    size: int
    """Number of processes in the job."""
    thread_level: str
    """The level of thread support that the library provides: `single`, `funneled`, `serialized` or `multiple`."""
    is_shared: bool
    """Whether other code has started MPI, and ends it."""


def library() -> str:
    """Returns name and version of the MPI library that this package was built against and has loaded."""
    return _native.library()


def job() -> Job:
    """Returns the MPI job of this process.

    Raises:
        RuntimeError: the transport was not opened in this process.
    """
    return Job(*_native.job())


def transport(communicator: int | None = None) -> tuple[int, Callable[[], None]]:
    """Starts MPI, unless it was started before. Returns the arguments of `torch_accl.register_transport`: the address
    of the transport's table of C functions, and the function to call when the process exits.

    Args:
        communicator: the Fortran handle (`comm.py2f()`) of a communicator, if the script has started MPI. Frames are
            sent between its processes, and all of them must call this function. Default: all processes of the job.

    Raises:
        RuntimeError: MPI cannot be used; the text has the reason and the remedy.
        ValueError: an environment variable has an invalid value.
    """
    level, exclusive = os.environ.get("ACCL_MPI_THREAD_LEVEL", "multiple").strip().lower(), _flag("ACCL_MPI_EXCLUSIVE")
    timeout, _ = _seconds("ACCL_MPI_TIMEOUT"), _seconds("ACCL_MPI_EXIT_TIMEOUT")
    _claim_place()
    try:
        address = _native.start(
            size=_launched(), level=level, exclusive=exclusive, communicator=communicator, timeout=timeout
        )
    except RuntimeError:
        # A script may continue without this transport. It must still end MPI, or launchers take the process for a
        # crashed one.
        atexit.register(_finish_quietly)
        raise
    return address, finish


def _claim_place() -> None:
    """Refuses a process that inherited its place in the job from the rank that started it.

    MPI allows only one process per place.
    """
    found = detect_launcher(os.environ)
    name = f"{job_name(found.launcher, os.environ)}/{found.rank}" if found is not None else "none"
    holder, _, held = os.environ.get(_PLACE, "").partition(" ")
    if held == name and holder != str(os.getpid()):
        raise RuntimeError(
            f"this process was started by process {holder}, which already has its rank in the MPI job; use other transports in processes "
            "that a rank starts (ACCL_TRANSPORTS=tcp)"
        )
    os.environ[_PLACE] = f"{os.getpid()} {name}"


class JobCommunicator:
    """The processes of the job, with the part of mpi4py's interface that rendezvous needs. Starts MPI if needed."""

    def __init__(self) -> None:
        transport()
        self._job = job()

    def Get_rank(self) -> int:
        return self._job.rank

    def Get_size(self) -> int:
        return self._job.size

    def bcast(self, obj: Any, root: int = 0) -> Any:
        """Returns rank 0's `obj` on all ranks: any JSON value of up to 4,000 bytes.

        Raises:
            ValueError: `root` is not 0.
            RuntimeError: not all processes of the job called this within `ACCL_MPI_TIMEOUT`.
        """
        if root != 0:
            raise ValueError(f"bcast: expected root 0, got {root}")
        return json.loads(_native.broadcast(json.dumps(obj).encode(), _seconds("ACCL_MPI_TIMEOUT")))


def finish() -> None:
    """Ends MPI if this package has started it: a fence for all processes of the job. torch_accl calls this when the
    process exits.

    If the other processes do not reach their ends, this process cannot end MPI. It prints a message and exits with
    status 1, after `ACCL_MPI_EXIT_TIMEOUT` seconds, or `ACCL_MPI_TIMEOUT` if it exits with an error.
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
    """Returns the number of processes that the launcher has started, or `None` if it is unknown."""
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
