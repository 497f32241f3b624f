"""Results of a run: table rows as they are measured, in the style of nccl-tests, and one JSON document.

This module owns the figures derived from times (bandwidths, ratios, the verdict on a choice) and their format. It measures
nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from .cases import Case
from .measure import Timed

__all__ = ["CHOICE", "AlgorithmTable", "BackendTable", "Cell", "as_json"]

# A choice is good if its time is at most GOOD_RATIO times the best algorithm's time plus GOOD_EXTRA_US microseconds.
GOOD_RATIO = 1.1
GOOD_EXTRA_US = 0.2
# Name of the engine's own choice, among the names of forced algorithms.
CHOICE = "accl"


@dataclass(frozen=True)
class Cell:
    """One case and its measurements; `timed` has `accl` and the other contestants by name."""

    case: Case
    world: int
    algorithm: str
    timed: dict[str, Timed]

    @property
    def wrong(self) -> int:
        """Number of wrong elements of all contestants."""
        return sum(timed.wrong for timed in self.timed.values())

    def algbw(self, name: str) -> float:
        """Returns bytes of the largest buffer divided by time, in GB/s."""
        return self.case.size_bytes / self.timed[name].time_us / 1000

    def busbw(self, name: str) -> float:
        """Returns `algbw` times the collective's bus factor, in GB/s."""
        return self.algbw(name) * self.case.collective.bus_factor(self.world)

    def ratio(self, name: str) -> float:
        """Returns the contestant's time divided by accl's time."""
        return self.timed[name].time_us / self.timed[CHOICE].time_us

    @property
    def best(self) -> str:
        """Name of the fastest forced algorithm."""
        return min((name for name in self.timed if name != CHOICE), key=lambda name: self.timed[name].time_us)

    @property
    def is_good(self) -> bool:
        """Whether the engine's choice is about as fast as the best algorithm."""
        return self.timed[CHOICE].time_us <= GOOD_RATIO * self.timed[self.best].time_us + GOOD_EXTRA_US


class BackendTable:
    """Table of accl's figures, with time and ratio of each peer and codec."""

    def __init__(self, peers: list[str], codecs: list[str]) -> None:
        self.peers, self.codecs = peers, codecs

    def head(self) -> list[str]:
        """Returns two lines: column names and units."""
        names, units = [], []
        for peer in self.peers:
            names.append(f"{peer:>10} {'ratio':>7} {'#wrong':>6}")
            units.append(f"{'(us)':>10} {'':>7} {'':>6}")
        for codec in self.codecs:
            names.append(f"{codec:>{_width(codec)}} {'ratio':>7} {'error':>8}")
            units.append(f"{'(us)':>{_width(codec)}} {'':>7} {'':>8}")
        return [
            "#" + " ".join([_HEAD, f"{'time':>10} {'algbw':>7} {'busbw':>7} {'#wrong':>6}", *names])[1:],
            "#" + " ".join([_UNITS, f"{'(us)':>10} {'(GB/s)':>7} {'(GB/s)':>7} {'':>6}", *units])[1:].rstrip(),
        ]

    def row(self, cell: Cell) -> str:
        """Returns the line of a cell."""
        mine = cell.timed[CHOICE]
        parts = [
            _case(cell),
            f"{_us(mine.time_us)} {cell.algbw(CHOICE):7.2f} {cell.busbw(CHOICE):7.2f} {mine.wrong:6d}",
        ]
        for peer in self.peers:
            timed = cell.timed[peer]
            if timed.refused:
                parts.append(f"{'refused':>10} {'-':>7} {'-':>6}")
            else:
                parts.append(f"{_us(timed.time_us)} {cell.ratio(peer):7.2f} {timed.wrong:6d}")
        for codec in self.codecs:
            timed = cell.timed[codec]
            parts.append(f"{_us(timed.time_us):>{_width(codec)}} {cell.ratio(codec):7.2f} {timed.error:8.1e}")
        return " ".join(parts)

    def last(self, cells: list[Cell]) -> list[str]:
        """Returns the lines that follow the table."""
        refusals = {
            f"# {name} refused {cell.case.collective.name} of {cell.case.dtype}: {timed.refused}": None
            for cell in cells
            for name, timed in cell.timed.items()
            if timed.refused
        }
        return [*refusals, *_wrong_values(cells)]


class AlgorithmTable:
    """Table of the engine's choice and the best of all algorithms."""

    def head(self) -> list[str]:
        """Returns two lines: column names and units."""
        return [
            "#" + f"{_HEAD} {'time':>10} {'best':>18} {'time':>10} {'ratio':>6} {'good':>4} {'#wrong':>6}"[1:],
            "#" + f"{_UNITS} {'(us)':>10} {'':>18} {'(us)':>10}"[1:],
        ]

    def row(self, cell: Cell) -> str:
        """Returns the line of a cell."""
        mine, best = cell.timed[CHOICE].time_us, cell.timed[cell.best].time_us
        good = "yes" if cell.is_good else "no"
        return f"{_case(cell)} {_us(mine)} {cell.best:>18} {_us(best)} {mine / best:6.2f} {good:>4} {cell.wrong:6d}"

    def last(self, cells: list[Cell]) -> list[str]:
        """Returns the lines that follow the table."""
        good = sum(cell.is_good for cell in cells)
        verdict = (
            f"# {good} of {len(cells)} cells: the engine's choice takes at most {GOOD_RATIO} times the best algorithm's time plus "
            f"{GOOD_EXTRA_US} us"
        )
        return [*_wrong_values(cells), verdict]


_HEAD = f"{'size':>12} {'count':>12} {'type':>14} {'redop':>7} {'algorithm':>18}"
_UNITS = f"{'(B)':>12} {'(elements)':>12} {'':>14} {'':>7} {'':>18}"


def _case(cell: Cell) -> str:
    case = cell.case
    return f"{case.size_bytes:12d} {case.count:12d} {case.dtype:>14} {case.op or 'none':>7} {cell.algorithm:>18}"


def _width(codec: str) -> int:
    return max(10, len(codec))


def _us(value: float) -> str:
    return f"{value:10.2f}" if value < 1e5 else f"{value:10.0f}"


def _wrong_values(cells: list[Cell]) -> list[str]:
    wrong = sum(cell.wrong for cell in cells)
    return [f"# {wrong} wrong values"] if wrong else []


def as_json(cell: Cell, is_try_all: bool) -> dict[str, Any]:
    """Returns a cell as plain values, with every round."""
    case = cell.case
    found: dict[str, Any] = {
        "collective": case.collective.name,
        "size_bytes": case.size_bytes,
        "count": case.count,
        "dtype": case.dtype,
        "op": case.op,
        "algorithm": cell.algorithm,
    }
    runs = {name: _timed_as_json(cell, name) for name in cell.timed}
    if not is_try_all:
        return found | {"backends": runs}
    choice = runs.pop(CHOICE)
    return found | {"choice": choice, "algorithms": runs, "best": cell.best, "choice_is_good": cell.is_good}


def _timed_as_json(cell: Cell, name: str) -> dict[str, Any]:
    timed = cell.timed[name]
    if timed.refused:
        return {"refused": timed.refused}
    found = {
        "time_us": timed.time_us,
        "rounds_us": timed.rounds_us,
        "iterations": timed.iterations,
        "algbw_gb_per_s": cell.algbw(name),
        "busbw_gb_per_s": cell.busbw(name),
        "wrong": timed.wrong,
    }
    if timed.error is not None:
        found["error"] = timed.error
    return found if name == CHOICE else found | {"ratio": cell.ratio(name)}
