"""Transports of other packages: tables of C functions, as `accl_transport.h` describes them.

Owns how such a table gets to the engine: by hand, or by the entry point of an installed package when a setting names the transport.
"""

from __future__ import annotations

import ctypes
import os
import threading
from collections.abc import Callable
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import Any, NamedTuple

from . import _native

__all__ = [
    "ENTRY_POINTS",
    "add_finish",
    "announce_transports",
    "find_sidestep",
    "find_transports",
    "finish_transports",
    "get_include",
    "has_finishes",
    "lend_communicator",
    "register_transport",
]

# Group of the entry points of packages that have a transport: the name is the transport's, and what it names is called without arguments
# and returns the arguments of `register_transport`: a table and `finish`. Where ranks have met by an MPI communicator, it gets
# `communicator=`, which is its handle in Fortran.
ENTRY_POINTS = "torch_accl.transports"
_OWN = ("shm", "tcp")
_TRANSPORTS = "transports (ACCL_TRANSPORTS)"
# Transports that come in packages of this project, for people who have not installed them.
_PACKAGES = {"mpi": "pip install 'torch-accl[mpi]' on a machine with mpicc"}

_known = set(_OWN)
_finishes: list[Callable[[], None]] = []
_communicator: list[Any] = []
_finding = threading.Lock()


def get_include() -> str:
    """The folder that has `accl_transport.h`, for compilers."""
    return str(Path(__file__).parent / "include")


def register_transport(table: Any, *, finish: Callable[[], None] | None = None) -> str:
    """Adds a transport that `ACCL_TRANSPORTS` and `Options(transports=...)` may then name, and returns its name.

    `table` is an `accl_transport_v1` as `accl_transport.h` describes it: a capsule of that name, a `ctypes` pointer, or an
    address. It is trusted: what does not keep its promises can crash the process. Each process of a job registers the
    transport before its first group, and the library with the table stays loaded until the process ends. `finish` is called as
    the process ends, when its groups have ended and nobody calls the table's functions any more.

    Raises:
        TypeError: `table` is none of these.
        ValueError: the table is of another version or lacks something, or there is a transport of that name.
    """
    if isinstance(table, ctypes._SimpleCData | ctypes._Pointer):
        table = ctypes.cast(table, ctypes.c_void_p).value or 0
    name = _native.register_transport(table)
    _known.add(name)
    if finish is not None:
        add_finish(finish)
    return name


def add_finish(finish: Callable[[], None]) -> None:
    """Has `finish` called as the process ends, once however often it is given."""
    if finish not in _finishes:
        _finishes.append(finish)


def finish_transports() -> None:
    """Ends the transports that want it, the last first: the engine has ended."""
    while _finishes:
        _finishes.pop()()


def has_finishes() -> bool:
    """Whether a transport wants to be ended."""
    return bool(_finishes)


def lend_communicator(communicator: Any) -> None:
    """Transports that are found from now on may use this MPI communicator, one of mpi4py."""
    _communicator[:] = [communicator]


def announce_transports(names: str | None = None) -> list[EntryPoint]:
    """Lets settings name the transports of installed packages that are yet to be loaded, and returns where those begin: of `names`, or else
    `ACCL_TRANSPORTS`. Loads nothing.

    Raises:
        ValueError: a transport is not installed; where a package of this project has it, the text says which.
    """
    text = os.environ.get("ACCL_TRANSPORTS", "") if names is None else names
    parts = [part.strip() for part in text.split(",")]
    setting = _Setting(_TRANSPORTS, text)
    unknown = [part for part in parts if part and part not in _known]
    packages = [package for part in unknown for package in _packages_with(part, setting)[:1]]
    for package in packages:
        _native.announce_transport(package.name)
    return packages


def find_sidestep(text: str | None = None) -> None:
    """Loads the package whose library does collectives, if a setting names it: `text`, or else `ACCL_SIDESTEP`.

    Raises:
        ValueError, torch.distributed.DistBackendError: as `find_transports`.
    """
    text = os.environ.get("ACCL_SIDESTEP", "") if text is None else text
    if any(part.strip().endswith("=mpi") for part in text.split(",")):
        _find_once("mpi", _Setting("sidestep (ACCL_SIDESTEP)", text))


def find_transports(names: str | None = None) -> None:
    """Loads the installed packages whose transports a setting names, unless that was done: `names`, or else `ACCL_TRANSPORTS`.

    A transport may want all ranks of the job to do so at once.

    Raises:
        ValueError: there is no such transport; where a package of this project has it, the text says which.
        torch.distributed.DistBackendError: the package's transport cannot be used here; the text says why.
    """
    text = os.environ.get("ACCL_TRANSPORTS", "") if names is None else names
    for name in (part.strip() for part in text.split(",")):
        if name:
            _find_once(name, _Setting(_TRANSPORTS, text))


class _Setting(NamedTuple):
    """A setting that names a transport, for messages."""

    name: str
    value: str


def _packages_with(name: str, setting: _Setting) -> list[EntryPoint]:
    found = list(entry_points(group=ENTRY_POINTS, name=name))
    if not found and name in _PACKAGES:
        raise ValueError(
            f"accl: {setting.name}: value `{setting.value}` is not accepted (transport `{name}` is not installed: {_PACKAGES[name]})"
        )
    return found


def _find_once(name: str, setting: _Setting) -> None:
    if name not in _known:
        with _finding:
            if name not in _known:
                _find(name, setting)


def _find(name: str, setting: _Setting) -> None:
    from torch.distributed import DistBackendError

    found = _packages_with(name, setting)
    # The engine says which there are.
    if not found:
        return
    # One of mpi4py is false once it was freed, and its handle is that of another one then, or of none.
    if not all(_communicator):
        raise DistBackendError(
            f"accl: transport `{name}` cannot be used: the communicator that init_from_mpi was given was freed; keep it until the first "
            "group that uses this transport is made"
        )
    try:
        table, finish = found[0].load()(**({"communicator": int(_communicator[0].py2f())} if _communicator else {}))
    except (ImportError, RuntimeError, OSError) as why:
        raise DistBackendError(f"accl: transport `{name}` cannot be used: {why}") from why
    register_transport(table, finish=finish)
