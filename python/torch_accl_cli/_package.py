"""The package behind the command, for those commands that need it.

The command stands beside `torch_accl` and not in it, since importing anything of that package imports torch first.
"""

from __future__ import annotations

import contextlib
from typing import Any

__all__ = ["CannotLoad", "load_native"]


class CannotLoad(Exception):
    """One sentence on why the package, or torch, cannot be loaded; the exit status is 1."""


def load_native() -> Any:
    """The native module. Settings may name the transports of installed packages, which are not loaded.

    Raises:
        CannotLoad: torch is missing, broken, or another one than this installation was built for.
    """
    try:
        from torch_accl import _native
        from torch_accl._transports import announce_transports
    # A torch whose libraries are missing raises an OSError, and one with a broken plug-in a RuntimeError.
    except (ImportError, OSError, RuntimeError) as error:
        raise CannotLoad(" ".join(str(error).split()) or type(error).__name__) from error
    # What is not installed is refused by those commands that read the settings.
    with contextlib.suppress(ValueError):
        announce_transports()
    return _native
