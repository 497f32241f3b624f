"""Transports of other packages: tables of C functions, as `accl_transport.h` describes them."""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any

from . import _native

__all__ = ["get_include", "register_transport"]


def get_include() -> str:
    """The folder that has `accl_transport.h`, for compilers."""
    return str(Path(__file__).parent / "include")


def register_transport(table: Any) -> str:
    """Adds a transport that `ACCL_TRANSPORTS` and `Options(transports=...)` may then name, and returns its name.

    `table` is an `accl_transport_v1` as `accl_transport.h` describes it: a capsule of that name, a `ctypes` pointer, or an
    address. It is trusted: what does not keep its promises can crash the process. Each process of a job registers the
    transport before its first group, and the library with the table stays loaded until the process ends.

    Raises:
        TypeError: `table` is none of these.
        ValueError: the table is of another version or lacks something, or there is a transport of that name.
    """
    if isinstance(table, ctypes._SimpleCData | ctypes._Pointer):
        table = ctypes.cast(table, ctypes.c_void_p).value or 0
    return _native.register_transport(table)
