"""Transports of other packages: tables of C functions, as `accl_transport.h` describes them.

This module owns how such a table reaches the engine: by an explicit call, or by the entry point of an installed package when a
setting names the transport.
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
    "find_offload",
    "find_transports",
    "finish_transports",
    "get_include",
    "has_finishes",
    "lend_communicator",
    "register_transport",
]

# Entry point group of packages that have a transport. The entry point has the name of the transport and refers to a function.
# The function is called without arguments and returns the arguments of `register_transport`: a table and `finish`. If ranks
# have met by an MPI communicator, the function gets `communicator=`, the Fortran handle of that communicator.
ENTRY_POINTS = "torch_accl.transports"
_OWN = ("shm", "tcp")
_TRANSPORTS = "transports (ACCL_TRANSPORTS)"
# How to install the transports that come in separate packages of this project.
_PACKAGES = {"mpi": "pip install 'torch-accl[mpi]' on a machine with mpicc"}

_known = set(_OWN)
_finishes: list[Callable[[], None]] = []
_communicator: list[Any] = []
_finding = threading.Lock()


def get_include() -> str:
    """Returns the folder that contains `accl_transport.h`, for a compiler's include path."""
    return str(Path(__file__).parent / "include")


def register_transport(table: Any, *, finish: Callable[[], None] | None = None) -> str:
    """Adds a transport and returns its name. `ACCL_TRANSPORTS` and `Options(transports=...)` may then contain that name.

    `table` is an `accl_transport_v1` as `accl_transport.h` describes it: a capsule of that name, a `ctypes` pointer, or an
    address. The table is trusted: a function that breaks the header's contract can crash the process. Each process of a job
    registers the transport before its first group. The library with the table stays loaded until the process ends.
    `finish` is called at process exit, when all groups have ended and no thread calls the table's functions any more.

    Raises:
        TypeError: `table` is none of these.
        ValueError: the table has another version or lacks something, or a transport of that name exists.
    """
    if isinstance(table, ctypes._SimpleCData | ctypes._Pointer):
        table = ctypes.cast(table, ctypes.c_void_p).value or 0
    name = _native.register_transport(table)
    _known.add(name)
    if finish is not None:
        add_finish(finish)
    return name


def add_finish(finish: Callable[[], None]) -> None:
    """Registers `finish` to be called at process exit; a function that is added several times is called once."""
    if finish not in _finishes:
        _finishes.append(finish)


def finish_transports() -> None:
    """Calls the functions that `add_finish` registered, the last one first. The engine has ended before."""
    while _finishes:
        _finishes.pop()()


def has_finishes() -> bool:
    """Whether any function waits to be called by `finish_transports`."""
    return bool(_finishes)


def lend_communicator(communicator: Any) -> None:
    """Offers this mpi4py communicator to transports that are loaded from now on."""
    _communicator[:] = [communicator]


def announce_transports(names: str | None = None) -> list[EntryPoint]:
    """Lets settings name the transports of installed packages that are not loaded yet. Loads nothing.

    Returns the entry points of the transports in `names`, or in `ACCL_TRANSPORTS` if `names` is None.

    Raises:
        ValueError: a transport is not installed; the message names the package if this project has one.
    """
    text = os.environ.get("ACCL_TRANSPORTS", "") if names is None else names
    parts = [part.strip() for part in text.split(",")]
    setting = _Setting(_TRANSPORTS, text)
    unknown = [part for part in parts if part and part not in _known]
    packages = [package for part in unknown for package in _packages_with(part, setting)[:1]]
    for package in packages:
        _native.announce_transport(package.name)
    return packages


def find_offload(text: str | None = None) -> None:
    """Loads the packages whose libraries run collectives, if a setting names them: `text`, or `ACCL_SIDESTEP` if that is None.

    Raises:
        ValueError, torch.distributed.DistBackendError: as `find_transports`.
    """
    text = os.environ.get("ACCL_SIDESTEP", "") if text is None else text
    named = {part.partition("=")[2].strip() for part in text.split(",")}
    for name in _native.offload_names():
        if name in named:
            _find_once(name, _Setting("sidestep (ACCL_SIDESTEP)", text))


def find_transports(names: str | None = None) -> None:
    """Loads the installed packages whose transports a setting names, unless they are loaded.

    The setting is `names`, or `ACCL_TRANSPORTS` if that is None. A transport may require that all ranks of the job load it
    at the same time.

    Raises:
        ValueError: a transport is not installed; the message names the package if this project has one.
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
    # The engine refuses the unknown name and lists the known ones.
    if not found:
        return
    # An mpi4py communicator is false after it was freed. Its handle then refers to another communicator, or to none.
    if not all(_communicator):
        raise DistBackendError(
            f"accl: transport `{name}` cannot be used: the communicator passed to init_from_mpi was freed; keep it "
            "until the first group that uses this transport is created"
        )
    try:
        table, finish = found[0].load()(**({"communicator": int(_communicator[0].py2f())} if _communicator else {}))
    except (ImportError, RuntimeError, OSError) as why:
        raise DistBackendError(f"accl: transport `{name}` cannot be used: {why}") from why
    register_transport(table, finish=finish)
