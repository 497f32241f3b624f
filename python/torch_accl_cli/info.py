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
    parser.add_argument("--calibrate", action="store_true", help="measure the constants of the cost model anew")


def run(given: argparse.Namespace) -> int:
    """Prints the facts."""
    return print_found(given, lambda native: facts(native, given.calibrate), _show)


def facts(native: Any, calibrate: bool) -> dict[str, Any]:
    """Versions, what a process of this machine would offer its peers, and the constants by which it would choose."""
    import platform

    import torch

    built_for = native.built_for()
    return {
        "torch_accl": built_for["version"],
        "built_for_torch": ".".join(built_for["torch"].split(".")[:2]),
        "torch": torch.__version__,
        "python": platform.python_version(),
        **native.host_facts(),
        "calibration": native.calibration(calibrate),
    }


def _show(facts: dict[str, Any]) -> str:
    def text(value: Any) -> str:
        return ", ".join(map(str, value)) if isinstance(value, list) else str(value)

    calibration = facts["calibration"]
    age = "" if calibration["age_s"] is None else f", written {_age(calibration['age_s'])} ago"
    shown = {**facts, "calibration": calibration["source"] + age}
    shown |= {f"  {name}": value for name, value in calibration["constants"].items()}
    width = max(map(len, shown))
    return "\n".join(f"{name.ljust(width)}  {text(value)}" for name, value in shown.items())


def _age(seconds: int) -> str:
    for unit, name in ((86400, "days"), (3600, "hours"), (60, "minutes")):
        if seconds >= 2 * unit:
            return f"{seconds // unit} {name}"
    return f"{seconds} seconds"
