"""Times and rates on the command line, such as 2us and 100Gbit/s."""

from __future__ import annotations

import re

from ._wrong import WrongInput

__all__ = ["parse_link", "parse_time"]

# Picoseconds per second.
_SECOND_PS = 10**12
_BITS = {"bit/s": 1, "Kbit/s": 10**3, "Mbit/s": 10**6, "Gbit/s": 10**9, "Tbit/s": 10**12}
_RATES = _BITS | {"MB/s": 8 * 10**6, "GB/s": 8 * 10**9}
_TIMES = {"ns": 10**3, "us": 10**6, "ms": 10**9, "s": 10**12}
_NUMBER = re.compile(r"(\d+(?:\.\d+)?)\s*([a-zA-Z/]+)")


def parse_link(text: str) -> tuple[int, int]:
    """Returns (picoseconds per KiB, latency in picoseconds) of `RATE,TIME`, the argument `--link`."""
    rate, comma, latency = text.partition(",")
    try:
        per_second, way_ps = _quantity(rate, _RATES), _quantity(latency, _TIMES)
        if comma and per_second > 0:
            return max(1, round(8192 * _SECOND_PS / per_second)), round(way_ps)
    except KeyError:
        pass
    raise WrongInput(f"--link: expected RATE,TIME such as 100Gbit/s,2us, got {text!r}")


def parse_time(name: str, text: str) -> int:
    """Returns the picoseconds of the argument called `name`."""
    try:
        return round(_quantity(text, _TIMES))
    except KeyError:
        raise WrongInput(f"{name}: expected a time such as 1.5ms, got {text!r}") from None


def _quantity(text: str, units: dict[str, int]) -> float:
    match = _NUMBER.fullmatch(text.strip())
    if match is None:
        raise KeyError(text)
    return float(match[1]) * units[match[2]]
