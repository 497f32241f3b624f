"""The `accl` command: settings, algorithms, and facts about this installation."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from typing import Any


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command; returns the exit status."""
    given = _parser().parse_args(arguments)
    # After the parsing, so that help and usage errors do not wait for torch.
    try:
        from . import _native
    except ImportError as error:
        print(f"accl: {error}", file=sys.stderr)
        return 1
    try:
        found = given.collect(_native)
    except ValueError as error:
        print(error, file=sys.stderr)
        return 1
    print(json.dumps(found, indent=2) if given.json else given.show(found))
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="accl", description="torch-accl: a torch.distributed backend")
    commands = parser.add_subparsers(required=True, metavar="command")
    for name, text, collect, show in (
        ("config", "settings, their values and what they do", _config, _show_config),
        ("algorithms", "the algorithms of each collective", _algorithms, _show_algorithms),
        ("info", "versions and what this machine offers", _info, _show_info),
    ):
        command = commands.add_parser(name, help=text, description=text)
        command.add_argument("--json", action="store_true", help="print JSON")
        command.set_defaults(collect=collect, show=show)
    return parser


def _config(native: Any) -> list[dict[str, Any]]:
    return native.config_rows()


def _show_config(rows: list[dict[str, Any]]) -> str:
    lines = []
    for row in rows:
        changed = "" if row["value"] == row["default"] else f"  (default {row['default'] or 'empty'})"
        agreed = ", equal on all ranks" if row["agreed"] else ""
        lines += [
            f"{row['name']}={row['value']}{changed}",
            f"    {row['effect']}",
            f"    Accepts {row['accepted']}. Per {row['scope']}{agreed}; as an argument: Options({row['option']}=...)",
        ]
    return "\n".join(lines)


def _algorithms(native: Any) -> list[dict[str, Any]]:
    return native.algorithms()


def _show_algorithms(rows: list[dict[str, Any]]) -> str:
    heads = ("collective", "name", "wins")
    widths = [max(len(head), *(len(row[head]) for row in rows)) for head in heads]
    table = [heads, *([row[head] for head in heads] for row in rows)]
    return "\n".join("  ".join(cell.ljust(width) for cell, width in zip(line, widths)).rstrip() for line in table)


def _info(native: Any) -> dict[str, Any]:
    import platform

    import torch

    from ._build_info import BUILT_FOR_TORCH, VERSION

    return {
        "torch_accl": VERSION,
        "built_for_torch": BUILT_FOR_TORCH,
        "torch": torch.__version__,
        "python": platform.python_version(),
        **native.host_facts(),
    }


def _show_info(facts: dict[str, Any]) -> str:
    def text(value: Any) -> str:
        return ", ".join(map(str, value)) if isinstance(value, list) else str(value)

    width = max(map(len, facts))
    return "\n".join(f"{name.ljust(width)}  {text(value)}" for name, value in facts.items())


if __name__ == "__main__":
    sys.exit(main())
