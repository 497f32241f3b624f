"""Loads the package `torch_accl` for the commands that need it.

The commands are outside `torch_accl`, because importing any of its modules imports torch first.
"""

from __future__ import annotations

import contextlib
from typing import Any

__all__ = ["CannotLoad", "load_native"]


class CannotLoad(Exception):
    """One sentence on why the package or torch cannot be loaded; the exit status is 1."""


def load_native() -> Any:
    """Returns the native module. Settings may then name the transports of installed packages, which are not loaded.

    Raises:
        CannotLoad: torch is missing, broken, or has another version than this installation was built for.
    """
    try:
        from torch_accl import _native
        from torch_accl._transports import announce_transports
    # A torch with missing libraries raises an OSError, a torch with a broken plug-in a RuntimeError.
    except (ImportError, OSError, RuntimeError) as error:
        raise CannotLoad(" ".join(str(error).split()) or type(error).__name__) from error
    # The commands that read the settings refuse a transport that is not installed.
    with contextlib.suppress(ValueError):
        announce_transports()
    return _native
