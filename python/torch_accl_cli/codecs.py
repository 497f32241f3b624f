"""`accl codecs`: the table of codecs."""

from __future__ import annotations

import argparse
from typing import Any

from ._listing import add_json, print_found

__all__ = ["NAME", "SUMMARY", "add_arguments", "run"]

NAME = "codecs"
SUMMARY = "the codecs of compressed calls, and their settings"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the command's arguments."""
    add_json(parser)


def run(given: argparse.Namespace) -> int:
    """Prints the table of codecs."""
    return print_found(given, lambda native: native.codecs(), _show)


def _show(rows: list[dict[str, Any]]) -> str:
    lines = []
    for row in rows:
        feedback = "; only with error feedback" if row["needs_feedback"] else ""
        lines += [row["spelled"], f"    {row['description']}{feedback}"]
        bits = [f"BITS from {row['bits'][0]} to {row['bits'][1]}"] if row["bits"] else []
        buckets = {"bucket": f"bucket ({row['buckets']})"}
        settings = [buckets.get(name, name) for name in row["settings"] if name != "bits"]
        if bits or settings:
            lines.append(f"    Accepts {', '.join([*bits, *settings])}")
    return "\n".join(lines)
