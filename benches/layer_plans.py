"""Predicted speed-ups of layer-parallel training on worlds too large to measure here: up to 4,096 layers on up to 4,096
ranks.

    python -m benches.layer_plans

Owns the tables of docs/layer-parallel/tuning.md, and the closed formula that is printed next to the plans. Nothing is computed
or sent; the crate `accl-multigrid` determines how long a plan takes.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from torch_accl_cli._layer_plans import Costs, Planner, Setting
from torch_accl_cli._package import load_native

from . import blocks

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "layer-parallel" / "tuning.md"
COMMAND = "make layer-plans ARGS=--write-docs"
NAME = "speed-ups"

LAYERS = (64, 256, 1024, 4096)
WORLDS = tuple(1 << power for power in range(1, 13))
# Factor and levels, by number of layers.
SINGLE = {64: ((4, 2), (8, 2), (16, 2)), 256: ((4, 3), (16, 2)), 1024: ((8, 3),), 4096: ((8, 3),)}
FORWARD, BACKWARD = 2, 1
# F-relaxation on the finest level, FCF on the levels between.
RELAX = (0, 1)
# Time of a layer's forward pass in picoseconds; its backward pass takes twice as long.
LAYER_PS = 1_000_000
SLOW = 2
SLOW_LAYERS = 1024


def closed(layers: int, ranks: int, setting: Setting) -> float | None:
    """Returns the speed-up by counting evaluations, each part of a cycle after the other; None if ranks have less than
    an interval of the finest level."""
    factor, levels = setting.factor, setting.levels
    if ranks * factor > layers:
        return None
    steps = [layers / factor**level for level in range(levels)]

    def sweep(level: int, least: int) -> float:
        return max(steps[level] * least / factor / ranks, least)

    between = sum(sweep(level, factor - 1) for level in range(1, levels - 1))
    start = steps[-1] + between
    cycle = start
    for level in range(levels - 1):
        relaxed = 1 + RELAX[min(level, len(RELAX) - 1)]
        # Coarse steps that form the problem of the next level.
        cycle += relaxed * sweep(level, factor) + max(steps[level + 1] / ranks, 1)
    final = sweep(0, factor)
    forward = start + (setting.forward - 1) * cycle + final
    backward = start + (setting.backward - 1) * cycle + final
    return 3 * layers / (forward + 2 * backward)


class Net(Planner):
    """A net of equal layers on `ranks` ranks."""

    def __init__(self, layers: int, ranks: int, latency: int = 0) -> None:
        times = (LAYER_PS, LAYER_PS, 2 * LAYER_PS, 2 * LAYER_PS)
        super().__init__(load_native(), ranks, Costs([times] * layers, 1, latency=latency), RELAX)

    def speedup(self, setting: Setting) -> float:
        """Returns the speed-up of a step over one process."""
        return self.costs.serial / sum(self.time(setting))

    def best(self) -> tuple[float, Setting]:
        """Returns the fastest setting with its speed-up; of equal ones, the one with the fewest levels, then with the
        smallest factor."""
        found = [(self.speedup(setting), setting) for setting in self.multigrid(FORWARD, BACKWARD)]
        return max(found, key=lambda each: (each[0], -each[1].levels, -each[1].factor))

    def best_closed(self) -> tuple[float, Setting] | None:
        """Returns the same by the formula; None if it applies to no setting."""
        every = self.multigrid(FORWARD, BACKWARD)
        found = [(value, setting) for setting in every if (value := closed(len(self.layers), self.ranks, setting))]
        return max(found, key=lambda each: (each[0], -each[1].levels, -each[1].factor), default=None)


def tables(layers: Sequence[int] = LAYERS, worlds: Sequence[int] = WORLDS) -> Iterator[str]:
    """Yields the lines of the page's block."""
    yield from (*head("best setting", worlds),)
    for count in layers:
        yield from best(f"{count:,} layers", count, worlds)
    if SLOW_LAYERS in layers:
        yield from best(f"{SLOW_LAYERS:,} layers, a message takes as long as {SLOW} layers", SLOW_LAYERS, worlds, SLOW)
    yield ""
    yield from (*head("one setting", worlds),)
    for count in layers:
        for factor, levels in SINGLE[count]:
            setting = Setting("multigrid", factor, levels, FORWARD, BACKWARD)
            entries = [
                shown(Net(count, ranks).speedup(setting), closed(count, ranks, setting)) if ranks <= count else ""
                for ranks in worlds
            ]
            yield row(f"{count:,} layers, factor {factor}, {levels} levels", entries)


def best(label: str, count: int, worlds: Sequence[int], slow: int = 0) -> Iterator[str]:
    """Yields two rows: the best speed-ups, and their settings. The formula ignores messages."""
    print(f"layer plans: {label}", file=sys.stderr)
    nets = [Net(count, ranks, slow * LAYER_PS) for ranks in worlds if ranks <= count]
    found = [(net.best(), None if slow else net.best_closed()) for net in nets]
    rest = [""] * (len(worlds) - len(nets))
    yield row(label, [shown(mine[0], formula[0] if formula else None) for mine, formula in found] + rest)
    yield row("factor, levels", [f"{mine[1].factor}, {mine[1].levels}" for mine, _ in found] + rest)


def head(label: str, worlds: Sequence[int]) -> tuple[str, str]:
    """Returns the head of a table."""
    return row(label, [f"{ranks:,} ranks" for ranks in worlds]), "|---" * (len(worlds) + 1) + "|"


def row(label: str, entries: Sequence[str]) -> str:
    """Returns a row of a table."""
    return "| " + " | ".join([label, *entries]) + " |"


def shown(predicted: float, formula: float | None) -> str:
    """Returns the speed-up of the plan and, in brackets, of the formula."""
    return plain(predicted) + (f" ({plain(formula)})" if formula is not None else "")


def plain(value: float) -> str:
    """Returns the value with one decimal, below 2 with two."""
    return f"{value:.2f}" if value < 2 else f"{value:.1f}"


def main() -> int:
    """Plans, prints, and writes the page if asked."""
    parser = argparse.ArgumentParser(prog="python -m benches.layer_plans", description=__doc__.splitlines()[0])
    parser.add_argument(
        "--write-docs", action="store_true", help="also write the tables to docs/layer-parallel/tuning.md"
    )
    asked = parser.parse_args()
    lines = list(tables())
    print("\n".join(lines))
    if asked.write_docs:
        blocks.write(PAGE, NAME, COMMAND, lines)
    return 0


if __name__ == "__main__":
    sys.exit(main())
