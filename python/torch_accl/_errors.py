"""Exceptions for arguments that a call refuses.

gloo refuses what is wrong with a RuntimeError, Python with a ValueError or TypeError, and scripts catch either: these are
both. Raised by the native module; everything else that it raises is a class of torch or of Python.
"""

from __future__ import annotations

__all__ = ["InvalidArgumentError", "InvalidTypeError"]


class InvalidArgumentError(ValueError, RuntimeError):
    """An argument of a call has a value that the call does not take. The call did nothing and the group works on."""


class InvalidTypeError(TypeError, RuntimeError):
    """A tensor of a call has a device or layout that the call does not take. The call did nothing and the group works on."""


for _kind in (InvalidArgumentError, InvalidTypeError):
    _kind.__module__ = "torch_accl"
