"""`accl algorithms`: the table of algorithms."""

from __future__ import annotations

import argparse
from typing import Any

from ._listing import add_json, print_found

__all__ = ["NAME", "SUMMARY", "add_arguments", "run"]

NAME = "algorithms"
SUMMARY = "the algorithms of each collective"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the command's arguments."""
    add_json(parser)


def run(given: argparse.Namespace) -> int:
    """Prints the table of algorithms."""
    return print_found(given, lambda native: native.algorithms(), _show)


def _show(rows: list[dict[str, Any]]) -> str:
    heads = ("collective", "name", "wins")
    widths = [max(len(head), *(len(row[head]) for row in rows)) for head in heads]
    table = [heads, *([row[head] for head in heads] for row in rows)]
    return "\n".join("  ".join(cell.ljust(width) for cell, width in zip(line, widths)).rstrip() for line in table)
