"""The `accl` command: reads the command line and calls the module of the command, one file per command.

A command is a module with `NAME`, `SUMMARY`, `add_arguments(parser)` and `run(given)`, which returns the exit status, and a line
in `COMMANDS`. Its top-level imports must be light, and must not import torch: help and usage errors appear at once, and also
with a torch that is refused. A command that needs the package calls `_package.load_native()` first.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from typing import NoReturn

from torch_accl_launch.meeting import fill_standard_streams

from . import algorithms, bench, codecs, config, device, emulator, info, plan, run, simulate
from ._package import CannotLoad
from ._wrong import WrongInput

__all__ = ["COMMANDS", "main"]

COMMANDS = (config, algorithms, codecs, info, run, bench, simulate, plan, device, emulator)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command. Returns the exit status: 0, 1 if the command failed, 2 if its arguments cannot be carried out."""
    fill_standard_streams()
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    # Another parser reads the emulator's arguments, including `--help`.
    is_emulator = arguments[:1] == [emulator.NAME]
    given = _parser().parse_args(arguments[:1] if is_emulator else arguments)
    try:
        return emulator.run_with(arguments[1:]) if is_emulator else given.run(given)
    except WrongInput as error:
        print(f"accl {given.command}: {error}", file=sys.stderr)
        return 2
    except CannotLoad as error:
        print(f"accl {given.command}: {error}", file=sys.stderr)
        return 1
    except BrokenPipeError:
        # The reader has closed the pipe. Without this redirection Python would report an error when it flushes at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0


class _Parser(argparse.ArgumentParser):
    """Reports an error as one sentence and refers to `--help` instead of printing the usage."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message}; see `{self.prog} --help`\n")


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="accl", description="torch-accl: a torch.distributed backend")
    commands = parser.add_subparsers(required=True, metavar="command", dest="command")
    for command in COMMANDS:
        sub = commands.add_parser(command.NAME, help=command.SUMMARY, description=command.SUMMARY)
        command.add_arguments(sub)
        sub.set_defaults(run=command.run)
    return parser
