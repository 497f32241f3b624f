"""Tables and pictures of `layer_parallel_study.py`, from the file of figures.

Owns the definition of a departure from the exact run. Trains nothing.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from layer_parallel_plan import EXACT, MOST_FACTOR, MOST_OFF, TASKS, Task, gradient_error, greatest_factor

from benches.peers.pictures import save
from benches.peers.tables import Table, plain

# A run has departed if its loss is this much above the loss of the exact run of the same seed.
DEPARTED = 0.05

SAID = f"""\
Figures are means over seeds, with minimum and maximum if there are several. *Held out* is evaluated exactly, *by iterations* by the iterations
of inexact training. The training loss is a mean over the batches between two looks. A run *departs* at the first look from which its training
loss stays more than {DEPARTED:g} above the exact run's loss, with the same seed. *Factor above {MOST_FACTOR:g}* is the first look at which
the convergence factor of a pass exceeded this value. *Gradient off by {MOST_OFF:g}* is the first look at which the relative error of the
gradients, in the 2-norm, exceeded this value."""


class Found:
    """The runs of one study, by setting."""

    def __init__(self, record: dict[str, Any]) -> None:
        self.record = record
        self.runs: dict[str, list[dict[str, Any]]] = {}
        for run in record["runs"]:
            self.runs.setdefault(run["setting"], []).append(run)

    def last(self, setting: str, key: str) -> list[float]:
        """Returns a figure of the last evaluation, for each seed."""
        return [number(run["marks"][-1][key]) for run in self.runs[setting]]

    def difference(self, setting: str, key: str) -> list[float]:
        """Returns its difference from the exact run of the same seed."""
        return [value - exact for value, exact in zip(self.last(setting, key), self.last(EXACT.name, key), strict=True)]

    def departed(self, setting: str) -> list[int | None]:
        """Returns, for each seed, the batch from which on the loss stays away from the exact run's; None if it does
        not."""
        found = []
        for run, exact in zip(self.runs[setting], self.runs[EXACT.name], strict=True):
            first = None
            for mark, other in zip(run["marks"][1:], exact["marks"][1:], strict=True):
                # NaN counts as above everything.
                is_near = number(mark["loss"]) - number(other["loss"]) <= DEPARTED
                first = None if is_near else first if first is not None else mark["step"]
            found.append(first)
        return found

    def first(self, setting: str, is_seen: Callable[[dict[str, Any]], bool]) -> list[int | None]:
        """Returns, for each seed, the first evaluation for which `is_seen` holds; None if there is none."""
        return [next((mark["step"] for mark in run["marks"] if is_seen(mark)), None) for run in self.runs[setting]]

    def over_seeds(self, setting: str, key: str) -> list[tuple[int, float, float, float]]:
        """Returns the course of a figure: batch, mean, least, greatest."""
        rows = []
        for marks in zip(*(run["marks"] for run in self.runs[setting])):
            values = [number(mark[key]) for mark in marks]
            rows.append((marks[0]["step"], statistics.fmean(values), min(values), max(values)))
        return [row for row in rows if math.isfinite(row[1])]


def number(value: float | None) -> float:
    """Returns the value; NaN for None."""
    return math.nan if value is None else value


def tables(results: dict[str, Any], picture: Callable[[Task], str] | None = None) -> list[str]:
    """Returns the results as Markdown: a table for each study, and its picture if asked."""
    lines = [SAID.replace("\n", " "), ""]
    for task in TASKS:
        if record := results["studies"].get(task.name):
            lines += [f"**{task.title}**: {task.text}; {record['data']}.", ""]
            lines += [*table(Found(record), task).lines(), "", measured(record, task), ""]
            if picture is not None:
                lines += [f"![{task.title}: losses, convergence factors and errors of gradients]({picture(task)})", ""]
    return lines[:-1]


def table(found: Found, task: Task) -> Table:
    """Returns a table with a row for each setting, the exact one first."""
    is_share = task.shown == "accuracy"
    key = f"held_{task.shown}"
    head = ("", "training loss", f"held out: {task.shown}", "by iterations", "minus exact", "departs at batch")
    made = Table((*head, f"factor above {MOST_FACTOR:g}", f"gradient off by {MOST_OFF:g}", "exact from batch"))
    names = [EXACT.name, *(name for name in found.runs if name != EXACT.name)]
    for name in names:
        row = [spread(found.last(name, "loss")), spread(found.last(name, key), is_share=is_share)]
        row.append(spread(found.last(name, f"inexact_{key}"), is_share=is_share))
        row += (
            ["", ""]
            if name == EXACT.name
            else [spread(found.difference(name, key), is_share=is_share), steps(found.departed(name))]
        )
        row.append(steps(found.first(name, lambda mark: greatest_factor(mark) > MOST_FACTOR)))
        row.append(steps(found.first(name, lambda mark: gradient_error(mark) > MOST_OFF)))
        switched = [run["switched"] for run in found.runs[name]]
        row.append(steps(switched) if any(step is not None for step in switched) else "")
        made.row(name, row)
    return made


def spread(values: Sequence[float], *, is_share: bool = False) -> str:
    """Returns the mean, and the range if there are several values, as text."""
    if not all(map(math.isfinite, values)):
        return "lost"
    shown = (lambda value: f"{value:.1%}") if is_share else plain
    mean = shown(statistics.fmean(values))
    return mean if len(values) == 1 else f"{mean} ({shown(min(values))} to {shown(max(values))})"


def steps(found: Iterable[int | None]) -> str:
    """Returns batches, one for each seed, as text."""
    return ", ".join("never" if step is None else f"{step:,}" for step in dict.fromkeys(found))


def measured(record: dict[str, Any], task: Task) -> str:
    """Returns the date and conditions of the measurement as text."""
    seeds = "1 seed" if record["seeds"] == 1 else f"{record['seeds']} seeds"
    words = f"{record['depth']} {task.layers}, {record['steps']:,} batches, a look every {record['every']}, {seeds}; "
    return words + f"{record['date']}, commit {record['commit']}, torch {record['torch']}, {record['processor']}."


def draw(record: dict[str, Any], task: Task, target: Path) -> None:
    """Draws training loss, held-out results, convergence factors and errors of gradients: means over seeds, with
    ranges."""
    import matplotlib

    matplotlib.use("Agg")
    # Keep text as text, and names the same in every run.
    matplotlib.rcParams.update({"svg.fonttype": "none", "svg.hashsalt": "accl", "font.size": 9})
    from matplotlib import pyplot

    found = Found(record)
    figure, ((loss, held), (factor, off)) = pyplot.subplots(2, 2, figsize=(11, 7.5), layout="constrained")
    per = record["every"] if task.unit == "epoch" else 1

    def line(axes: Any, name: str, key: str, style: str = "-", **look: Any) -> None:
        rows = found.over_seeds(name, key)
        places = [row[0] / per for row in rows]
        axes.plot(places, [row[1] for row in rows], style, **look)
        if record["seeds"] > 1:
            axes.fill_between(
                places, [row[2] for row in rows], [row[3] for row in rows], color=look["color"], alpha=0.15, linewidth=0
            )

    for index, name in enumerate([EXACT.name, *(name for name in found.runs if name != EXACT.name)]):
        look = {
            "color": "black" if name == EXACT.name else f"C{index - 1}",
            "linewidth": 2.2 if name == EXACT.name else 1.2,
        }
        line(loss, name, "loss", label=name, **look)
        line(held, name, f"held_{task.shown}", **look)
        line(held, name, f"inexact_held_{task.shown}", "--", **look)
        line(factor, name, "forward_factor", "--", **look)
        line(factor, name, "backward_factor", **look)
        line(off, name, "gradient_error", **look)
        for run in found.runs[name]:
            if run["switched"] is not None:
                seen = next((mark for mark in run["marks"][1:] if mark["step"] == run["switched"]), None)
                if seen is not None:
                    loss.plot(run["switched"] / per, number(seen["loss"]), "o", color=look["color"])
    for axes, limit in ((factor, MOST_FACTOR), (off, MOST_OFF)):
        axes.axhline(limit, color="0.6", linewidth=0.8, zorder=0)
        axes.set_yscale("log")
    loss.set(title="training loss; dots: exact from here on", yscale="log" if task.shown == "accuracy" else "linear")
    held.set(title=f"held-out {task.shown}, evaluated exactly; dashed: by iterations")
    factor.set(title="convergence factor of the adjoint; dashed: of the forward pass")
    off.set(title="error of the gradients, relative")
    for axes in (loss, held, factor, off):
        axes.set_xlabel(task.unit)
    loss.legend(frameon=False)
    target.parent.mkdir(parents=True, exist_ok=True)
    save(figure, target)
    pyplot.close(figure)
