"""Plots of time and bus bandwidth over size, one row of plots per collective. Needs matplotlib."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from .report import Cell

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["draw"]


def draw(cells: list[Cell], path: Path) -> None:
    """Writes the picture; the suffix of the file name selects its format.

    Raises:
        OSError: the file cannot be written.
    """
    from matplotlib.figure import Figure

    names = list(dict.fromkeys(cell.case.collective.name for cell in cells if cell.case.size_bytes))
    figure = Figure(figsize=(11, 4 * max(1, len(names))), layout="constrained")
    pictures = figure.subplots(max(1, len(names)), 2, squeeze=False)
    for name, (left, right) in zip(names, pictures):
        mine = [cell for cell in cells if cell.case.collective.name == name]
        _lines(left, mine, lambda cell, who: cell.timed[who].time_us)
        _lines(right, mine, lambda cell, who: cell.busbw(who))
        left.set(title=f"{name}, {mine[0].world} ranks: time", ylabel="time (us)", yscale="log")
        right.set(title=f"{name}, {mine[0].world} ranks: bus bandwidth", ylabel="busbw (GB/s)")
        for picture in (left, right):
            picture.set_xscale("log", base=2)
            picture.set_xlabel("size (B)")
            picture.grid(alpha=0.3)
            picture.legend()
    figure.savefig(path)


def _lines(picture: Axes, cells: list[Cell], value: Callable[[Cell, str], float]) -> None:
    points: dict[str, list[tuple[int, float]]] = {}
    for cell in cells:
        for who, timed in cell.timed.items():
            if timed.refused is None:
                label = " ".join(filter(None, (who, cell.case.dtype, cell.case.op)))
                points.setdefault(label, []).append((cell.case.size_bytes, value(cell, who)))
    for label, pairs in points.items():
        picture.plot(*zip(*sorted(pairs)), marker="o", markersize=4, label=label)
