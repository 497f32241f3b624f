"""Sizes in the notation of the command line: `4,1KiB,1MiB`, and ranges such as `4-64MiB:x4`."""

from __future__ import annotations

import re

from ._wrong import WrongInput

__all__ = ["parse_size", "parse_sizes", "show_size"]

# Powers of 1024 and of 1000, as accepted by the ACCL_* settings.
_UNITS = {"": 1, "B": 1, "KIB": 1 << 10, "MIB": 1 << 20, "GIB": 1 << 30, "TIB": 1 << 40}
_UNITS |= {"KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
_SIZE = re.compile(r"(\d+)\s*([a-zA-Z]*)")
_STEP = re.compile(r"[x*](\d+)")
DEFAULT_STEP = 4
ACCEPTED = f"sizes such as 4, 64KiB or 1MiB, and ranges such as 4-64MiB:x{DEFAULT_STEP}"


def parse_sizes(text: str) -> list[int]:
    """Returns the sizes in bytes, in the given order.

    Raises:
        WrongInput: an entry is neither a size nor a range.
    """
    return [size for entry in text.split(",") for size in _entry(entry.strip())]


def parse_size(name: str, text: str) -> int:
    """Returns the bytes of the argument called `name`."""
    size = _bytes(text)
    if size is None:
        raise WrongInput(f"{name}: expected a size such as 64KiB, got {text!r}")
    return size


def _entry(entry: str) -> list[int]:
    ends, _, step = entry.partition(":")
    first, dash, last = ends.partition("-")
    if not dash:
        if step:
            raise WrongInput(f"--sizes: {entry!r} has a step but no range; expected {ACCEPTED}")
        return [_size(entry, entry)]
    low, high, factor = _size(first, entry), _size(last, entry), _factor(step, entry)
    if low > high:
        raise WrongInput(f"--sizes: the range {entry!r} ends before it begins")
    sizes = []
    while low <= high:
        sizes.append(low)
        low *= factor
    return sizes


def _bytes(text: str) -> int | None:
    match = _SIZE.fullmatch(text.strip())
    unit = _UNITS.get(match[2].upper()) if match else None
    return int(match[1]) * unit if match and unit else None


def _size(text: str, entry: str) -> int:
    size = _bytes(text)
    if not size:
        raise WrongInput(f"--sizes: {entry!r} is not a size above zero; expected {ACCEPTED}")
    return size


def _factor(step: str, entry: str) -> int:
    if not step:
        return DEFAULT_STEP
    match = _STEP.fullmatch(step)
    if not match or int(match[1]) < 2:
        raise WrongInput(f"--sizes: the step of {entry!r} is not a factor of at least 2, such as x{DEFAULT_STEP}")
    return int(match[1])


def show_size(size: int) -> str:
    """Returns a size in the largest unit that divides it: `64 KiB` for 65536."""
    for unit, name in ((1 << 40, "TiB"), (1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB")):
        if size and size % unit == 0:
            return f"{size // unit} {name}"
    return f"{size} B"
