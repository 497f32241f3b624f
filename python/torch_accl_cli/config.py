"""`accl config`: the table of settings."""

from __future__ import annotations

import argparse
from typing import Any

from ._listing import add_json, print_found

__all__ = ["NAME", "SUMMARY", "add_arguments", "run"]

NAME = "config"
SUMMARY = "settings, their values and their effects"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the command's arguments."""
    add_json(parser)


def run(given: argparse.Namespace) -> int:
    """Prints the table of settings."""
    return print_found(given, _rows, _show)


def _rows(native: Any) -> list[dict[str, Any]]:
    from torch_accl._transports import announce_transports

    announce_transports()
    rows: list[dict[str, Any]] = native.config_rows()
    return rows


def _show(rows: list[dict[str, Any]]) -> str:
    lines = []
    for row in rows:
        changed = "" if row["value"] == row["default"] else f"  (default {row['default'] or 'empty'})"
        agreed = ", equal on all ranks" if row["agreed"] else ""
        lines += [
            f"{row['name'] or '(no variable)'}={row['value']}{changed}",
            f"    {row['effect']}",
            f"    Accepts {row['accepted']}. Per {row['scope']}{agreed}; as an argument: Options({row['option']}=...)",
        ]
    return "\n".join(lines)
