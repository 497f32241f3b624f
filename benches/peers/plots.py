"""Curves over sizes."""

from __future__ import annotations

from pathlib import Path

from torch_accl_cli._sizes import show_size

from .libraries import LIBRARIES
from .pictures import save
from .report import Plot

# accl's curves are thick; a library has the same colour in every plot.
OURS = ("accl engine", "accl through torch")


def draw(plot: Plot, target: Path) -> None:
    """Writes one plot."""
    import matplotlib

    matplotlib.use("Agg")
    # Keep text as text, and names the same in every run.
    matplotlib.rcParams.update({"svg.fonttype": "none", "svg.hashsalt": "accl", "font.size": 9})
    from matplotlib import pyplot

    colours = {one.title: f"C{index}" for index, one in enumerate(LIBRARIES)}
    figure, axes = pyplot.subplots(figsize=(8, 4.6), layout="constrained")
    for title, points in plot.curves.items():
        if points:
            width, marker = (2.6, 5) if title in OURS else (1.2, 3)
            colour = colours.get(title)
            axes.plot(*zip(*points), marker="o", label=title, color=colour, linewidth=width, markersize=marker)
    axes.set(xscale="log", yscale="log", xlabel=plot.over, ylabel="microseconds per call", title=plot.title)
    sizes = sorted({size for points in plot.curves.values() for size, _ in points})
    axes.set_xticks(sizes, [show_size(size) if plot.over == "size" else f"{size:,}" for size in sizes])
    axes.minorticks_off()
    axes.grid(alpha=0.3)
    axes.legend(loc="center left", bbox_to_anchor=(1, 0.5), frameon=False)
    save(figure, target)
    pyplot.close(figure)
