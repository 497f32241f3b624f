"""`accl info`: facts about this installation and this machine."""

from __future__ import annotations

import argparse
from typing import Any

from ._listing import add_json, print_found

NAME = "info"
SUMMARY = "versions and what this machine offers"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the command's arguments."""
    add_json(parser)


def run(given: argparse.Namespace) -> int:
    """Prints the facts."""
    return print_found(given, facts, _show)


def facts(native: Any) -> dict[str, Any]:
    """Versions, and what a process of this machine would offer its peers."""
    import platform

    import torch

    from .._build_info import BUILT_FOR_TORCH, VERSION

    return {
        "torch_accl": VERSION,
        "built_for_torch": BUILT_FOR_TORCH,
        "torch": torch.__version__,
        "python": platform.python_version(),
        **native.host_facts(),
    }


def _show(facts: dict[str, Any]) -> str:
    def text(value: Any) -> str:
        return ", ".join(map(str, value)) if isinstance(value, list) else str(value)

    width = max(map(len, facts))
    return "\n".join(f"{name.ljust(width)}  {text(value)}" for name, value in facts.items())
