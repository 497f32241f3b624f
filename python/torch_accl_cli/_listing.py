"""Common parts of the commands that print facts: `--json`, and errors as one sentence."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from typing import Any

from ._package import load_native

__all__ = ["add_json", "print_found"]


def add_json(parser: argparse.ArgumentParser) -> None:
    """Adds the argument `--json`."""
    parser.add_argument("--json", action="store_true", help="print JSON")


def print_found(given: argparse.Namespace, collect: Callable[[Any], Any], show: Callable[[Any], str]) -> int:
    """Prints what `collect` returns for the native module, as JSON or formatted by `show`. Returns the exit status."""
    native = load_native()
    try:
        found = collect(native)
    except ValueError as error:
        print(error, file=sys.stderr)
        return 1
    print(json.dumps(found, indent=2) if given.json else show(found))
    return 0
