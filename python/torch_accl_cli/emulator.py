"""`accl emulator`: collective engines (CCLO) in software, behind the sockets of the ACCL project's emulator.

The command line is the one of the program `accl-emulator`, which is in the native module and says itself what it takes.
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
    """Adds nothing: what stands behind the command's name is not for this parser."""


def run(given: argparse.Namespace) -> int:
    """Runs it with the default arguments."""
    return run_with([])


def run_with(arguments: Sequence[str]) -> int:
    """Runs it until a signal ends it; returns the exit status."""
    native = load_native()
    # Python would note the signal and wait for the native code to return.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    status: int = native.run_emulator([os.fsdecode(argument) for argument in arguments])
    return status
