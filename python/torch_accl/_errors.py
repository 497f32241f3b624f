"""Exceptions for arguments that a call refuses.

For an invalid argument gloo raises a RuntimeError, and Python a ValueError or TypeError. Scripts catch either, so each class
here derives from both. The native module raises them; all other exceptions that it raises are classes of torch or Python.
"""

from __future__ import annotations

__all__ = ["InvalidArgumentError", "InvalidTypeError"]


class InvalidArgumentError(ValueError, RuntimeError):
    """An argument of a call has a value that the call does not accept. The call had no effect, and the group stays usable."""


class InvalidTypeError(TypeError, RuntimeError):
    """A tensor has a device or layout that the call does not accept. The call had no effect, and the group stays usable."""


for _kind in (InvalidArgumentError, InvalidTypeError):
    _kind.__module__ = "torch_accl"
