"""Verdicts, tables and the picture of `compression_study.py`, from the file of results.

Owns the definition of parity. Trains nothing.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from study_plan import EXACT, RANKS, SETTINGS, TASKS, Task

from benches.peers.pictures import save
from benches.peers.tables import Table, Target, plain

JUDGED = """\
The criterion is the mean loss over the whole training set after the last step, minus the loss of float32 with the same
seed. Parity holds if the mean difference is at most the larger of 2 standard errors and a quarter of float32's standard deviation
over seeds. After ± stand 2 standard errors. With optimizers other than Adam, parity must hold for 8 and 4 bits, and for 2 bits
with error feedback. All other results are shown, not judged."""


@dataclass(frozen=True)
class Verdict:
    """Difference of a setting from float32 in final loss, over pairs of runs with the same seed."""

    mean: float
    error: float
    # Standard deviation of float32's losses over the seeds.
    spread: float

    @property
    def allowed(self) -> float:
        """The maximum absolute mean difference."""
        return max(2 * self.error, self.spread / 4)

    @property
    def holds(self) -> bool:
        """Whether there is parity; false for a run whose loss was lost."""
        return abs(self.mean) <= self.allowed


def verdict(losses: Sequence[float], exact: Sequence[float]) -> Verdict:
    """Returns the verdict on the losses of two settings with the same seeds, of which there are at least two."""
    differences = [loss - other for loss, other in zip(losses, exact, strict=True)]
    if not all(map(math.isfinite, differences)):
        return Verdict(math.nan, math.nan, math.nan)
    error = statistics.stdev(differences) / math.sqrt(len(differences))
    return Verdict(statistics.fmean(differences), error, statistics.stdev(exact))


class Found:
    """The runs of one model, by setting."""

    def __init__(self, record: dict[str, Any]) -> None:
        self.runs: dict[str, list[dict[str, Any]]] = {}
        for run in record["runs"]:
            self.runs.setdefault(run["setting"], []).append(run)

    def values(self, setting: str, key: str) -> list[float]:
        """Returns a figure for each seed; NaN where the run was lost."""
        return [math.nan if run[key] is None else run[key] for run in self.runs[setting]]

    def mean(self, setting: str, key: str = "loss") -> float:
        """Returns the mean over the seeds."""
        return statistics.fmean(self.values(setting, key))

    def verdict(self, setting: str) -> Verdict:
        """Returns the comparison with float32."""
        return verdict(self.values(setting, "loss"), self.values(EXACT, "loss"))

    def complaints(self, title: str, judges: bool) -> list[str]:
        """Returns the requirements that are not met: ranks must agree, and parity must hold where it is judged."""
        found = [
            f"{title}: {setting.name} differs from float32 by {number(one.mean)}; expected at most {number(one.allowed)}"
            for setting in SETTINGS
            if judges and setting.judged and setting.name in self.runs and not (one := self.verdict(setting.name)).holds
        ]
        differing = [name for name, runs in self.runs.items() if not all(run["same_weights"] for run in runs)]
        return found + [f"{title}: ranks have different weights after training with {name}" for name in differing]


def number(value: float) -> str:
    """Returns three digits as text."""
    return plain(value) if math.isfinite(value) else "lost"


def tables(results: dict[str, Any]) -> list[str]:
    """Returns the results as Markdown: a table for each model, and the claims on digits."""
    lines = [JUDGED.replace("\n", " "), ""]
    for task in TASKS:
        if record := results["models"].get(task.name):
            lines += [f"**{task.title}**: {task.text}; {record['data']}.", ""]
            lines += [*model_table(Found(record), task.judged).lines(), "", measured(task, record), ""]
    if "digits" in results["models"]:
        lines += ["Checks of error feedback, on the digits:", ""]
        lines += [*claims(Found(results["models"]["digits"])).lines(), ""]
    return lines[:-1]


def model_table(found: Found, judges: bool) -> Table:
    """Returns a table with a row for each setting."""
    head = ("", "times fewer bytes", "final loss", "held out: loss", "accuracy", "loss minus float32's loss", "parity")
    table = Table(head)
    for setting in SETTINGS:
        if setting.name not in found.runs:
            continue
        row: list[Target | str] = [plain(found.mean(setting.name, "fewer_bytes"))]
        row += [number(found.mean(setting.name, key)) for key in ("loss", "held_out_loss", "held_out_accuracy")]
        if setting.name != EXACT:
            one = found.verdict(setting.name)
            is_lost = math.isnan(one.mean)
            row.append("lost" if is_lost else f"{number(one.mean)} ± {number(2 * one.error)}")
            if not (judges and setting.judged):
                row.append(f"{'within' if one.holds else 'outside'} {number(one.allowed)}")
            else:
                row.append("lost: **missed**" if is_lost else Target(abs(one.mean), at_most=one.allowed))
        table.row(setting.name, row)
    table.rows[0] = (EXACT, [*table.rows[0][1], f"spread {number(statistics.stdev(found.values(EXACT, 'loss')))}", ""])
    return table


def claims(found: Found) -> Table:
    """Returns a table of results that other implementations showed on the same network, with their limits."""
    table = Table(("", "mean over seeds"))
    exact = found.mean(EXACT)

    def claim(label: str, setting: str, figure: Callable[[float], float], **limit: float) -> None:
        if setting in found.runs:
            value = figure(found.mean(setting))
            table.row(label, [Target(value, **limit) if math.isfinite(value) else "lost"])

    def distance(label: str, setting: str, **limit: float) -> None:
        claim(f"{label}, distance from float32", setting, lambda loss: abs(loss - exact), **limit)

    def times(label: str, setting: str, **limit: float) -> None:
        claim(f"{label}, times the loss of float32", setting, lambda loss: loss / exact, **limit)

    distance("2 bits with error feedback", "2 bits, error feedback", at_most=1e-4)
    distance("2 bits without", "2 bits", at_least=3e-4)
    distance("4 bits", "4 bits", at_most=2e-4)
    distance("8 bits", "8 bits", at_most=2e-4)
    times("sign without error feedback", "sign", at_least=5)
    times("sign with error feedback", "sign, error feedback", at_most=1.2)
    return table


def measured(task: Task, record: dict[str, Any]) -> str:
    """Returns the date and conditions of the measurement as text."""
    words = f"{record['steps']} steps of {RANKS} x {task.batch} rows, {record['seeds']} seeds; "
    words += f"{record['date']}, commit {record['commit']}, torch {record['torch']}, {record['processor']}."
    return " ".join([words, *(f"Left out: {reason}." for reason in record["missing"])])


def draw(results: dict[str, Any], target: Path) -> None:
    """Draws the losses during training above, and each seed's difference from float32 at the end below; a column for
    each model."""
    import matplotlib

    matplotlib.use("Agg")
    # Keep text as text, and names the same in every run.
    matplotlib.rcParams.update({"svg.fonttype": "none", "svg.hashsalt": "accl", "font.size": 9})
    from matplotlib import pyplot

    tasks = [task for task in TASKS if task.name in results["models"]]
    figure, grid = pyplot.subplots(2, len(tasks), figsize=(5 * len(tasks), 7.5), layout="constrained", squeeze=False)
    colours = {setting.name: f"C{index}" for index, setting in enumerate(SETTINGS)}
    for task, above, below in zip(tasks, *grid):
        record = results["models"][task.name]
        found = Found(record)
        for name, runs in found.runs.items():
            curves = [[math.nan if value is None else value for value in run["curve"]] for run in runs]
            means = [statistics.fmean(values) for values in zip(*curves)]
            steps = [record["steps"] * (index + 0.5) / len(means) for index in range(len(means))]
            above.plot(steps, means, label=name, color=colours[name], linewidth=2.6 if name == EXACT else 1.1)
        above.set(xlabel="step", ylabel="training loss", yscale="log", title=task.title)
        others = [name for name in found.runs if name != EXACT]
        for place, name in enumerate(others):
            one = found.verdict(name)
            pairs = zip(found.values(name, "loss"), found.values(EXACT, "loss"))
            differences = [loss - exact for loss, exact in pairs]
            below.plot([place] * len(differences), differences, "o", markersize=3, color=colours[name], alpha=0.6)
            below.errorbar(place, one.mean, 2 * one.error, fmt="_", markersize=14, color=colours[name], capsize=5)
        quarter = statistics.stdev(found.values(EXACT, "loss")) / 4
        below.axhspan(-quarter, quarter, color="0.85", zorder=0)
        below.set_xticks(
            range(len(others)),
            [name.replace(", ", ",\n") for name in others],
            rotation=40,
            ha="right",
            rotation_mode="anchor",
        )
        # A setting that is far off must not hide the others.
        below.set_yscale("symlog", linthresh=max(4 * quarter, 1e-9))
        below.set(ylabel="final loss minus float32's, same seed")
    grid[0][0].legend(frameon=False)
    grid[1][0].set_title("grey: a quarter of float32's spread; bars: 2 standard errors", fontsize=8)
    target.parent.mkdir(parents=True, exist_ok=True)
    save(figure, target)
    pyplot.close(figure)
