"""`accl emulator`: collective engines (CCLO) in software, with the sockets of the ACCL project's emulator.

The command line belongs to the program `accl-emulator`, which the native module contains. That program prints its own help.
"""

from __future__ import annotations

import argparse
import os
import signal
from collections.abc import Sequence

from ._package import load_native

__all__ = ["NAME", "SUMMARY", "add_arguments", "run", "run_with"]

NAME = "emulator"
SUMMARY = "collective engines (CCLO) in software, for hosts that speak the protocol of ACCL's emulator"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds nothing: the arguments after the command's name are read by the emulator."""


def run(given: argparse.Namespace) -> int:
    """Runs the emulator with default arguments."""
    return run_with([])


def run_with(arguments: Sequence[str]) -> int:
    """Runs the emulator until a signal ends it. Returns the exit status."""
    native = load_native()
    # Python's handler would only record the signal, and wait until the native code returns.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    status: int = native.run_emulator([os.fsdecode(argument) for argument in arguments])
    return status
