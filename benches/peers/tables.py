"""Tables with targets: a target is met or missed by the measured value, before rounding.

Owns the formatting of figures. A rounded value is never on the better side of the exact one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Target:
    """A value and its target. None means that it could not be measured; the target is neither met nor missed then."""

    value: float | None
    at_most: float | None = None
    at_least: float | None = None
    unit: str = ""

    @property
    def met(self) -> bool | None:
        """Whether the target is met; None if there is nothing to compare."""
        if self.value is None:
            return None
        if self.at_most is not None:
            return self.value <= self.at_most
        return self.at_least is None or self.value >= self.at_least

    def __str__(self) -> str:
        if self.met is None:
            return "not measured"
        worse = math.ceil if self.at_most is not None else math.floor
        limit = f"≤ {plain(self.at_most)}" if self.at_most is not None else f"≥ {plain(self.at_least or 0)}"
        verdict = "met" if self.met else "**missed**"
        return f"{plain(self.value or 0, worse)}{self.unit} ({limit}) {verdict}"


Entry = Target | str


@dataclass
class Table:
    """Rows of entries under a head; the first column is for labels."""

    head: Sequence[str]
    rows: list[tuple[str, Sequence[Entry]]] = field(default_factory=list)
    caption: str = ""

    def row(self, label: str, entries: Iterable[Entry]) -> None:
        """Adds a row."""
        self.rows.append((label, list(entries)))

    @property
    def targets(self) -> list[Target]:
        """All targets in the table."""
        return [entry for _, entries in self.rows for entry in entries if isinstance(entry, Target)]

    def lines(self) -> list[str]:
        """Returns the table as Markdown."""
        bold = {label for label, entries in self.rows if any(isinstance(entry, Target) for entry in entries)}
        text = [[f"**{label}**" if label in bold else label, *map(str, entries)] for label, entries in self.rows]
        caption = [self.caption, ""] if self.caption else []
        rule = ["---"] + ["---:"] * (len(self.head) - 1)
        return caption + ["| " + " | ".join(row) + " |" for row in [list(self.head), rule, *text]]


def plain(value: float, rounded: Callable[[float], int] = round) -> str:
    """Returns three digits, rounded by `rounded`."""
    if value == 0:
        return "0"
    step = 10 ** (math.floor(math.log10(abs(value))) - 2)
    # Division leaves rounding errors in a value of at most three digits.
    near = round(value / step)
    scaled = near if math.isclose(near, value / step, rel_tol=1e-9) else rounded(value / step)
    shown = scaled * step
    decimals = max(0, -math.floor(math.log10(step) + 1e-9))
    text = f"{shown:,.{decimals}f}"
    return text.rstrip("0").rstrip(".") if "." in text else text


def ratio(above: float | None, below: float | None) -> float | None:
    """Returns the quotient of two figures; None if one is missing."""
    return None if above is None or below is None else above / max(below, 1e-9)
