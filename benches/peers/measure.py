"""The time of a call: libraries take turns, and the figure of a cell is the median of its turns.

A turn is several batches of calls. Its figure is the median batch, and the time of a batch is its slowest rank's. A
rooted call is a batch of its own, after an untimed meeting. It lasts from the start of the root to the end of the last
rank: otherwise a root that only sends would get several calls ahead. Owns that definition and the number of calls in a
turn.
"""

from __future__ import annotations

import itertools
import re
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any, TypeVar

from torch_accl_cli.bench.collectives import COLLECTIVES

from . import board
from .jobs import Job, JobSet, Lost, Refused
from .placement import Placement

# Batches in a turn of calls that follow one another.
BATCHES = 11
# Resolution of the clock and of a meeting: a probe must last longer to show how many calls fill a turn.
PROBE_NS = 2_000_000
# Minimum calls in a turn of slow calls.
LEAST_CALLS = 3
# A turn that does not count is repeated, until a library has used this multiple of its planned time in a cell.
MOST_TRIES = 5
# Minimum turns for calls so slow that three take much longer than a turn.
LEAST_TURNS = 5
MOST_ROOTED = 2000

T = TypeVar("T")


@dataclass(frozen=True)
class Effort:
    """Length and number of turns."""

    turn_s: float
    turns: int


# Turns are short, since a host may move cores about ten times a second.
FULL = Effort(turn_s=0.02, turns=9)
QUICK = Effort(turn_s=0.01, turns=5)
# For a test of the machinery, which ignores times.
TINY = Effort(turn_s=0.001, turns=2)


@dataclass(frozen=True)
class Cell:
    """A call that all libraries make."""

    collective: str
    dtype: str
    bytes: int

    @property
    def is_rooted(self) -> bool:
        """Whether its calls are timed one by one."""
        return COLLECTIVES[re.split("[*&]", self.collective)[0]].rooted

    @property
    def words(self) -> str:
        """The cell as text in orders."""
        return f"{self.collective} {self.dtype} {self.bytes}"


@dataclass(frozen=True)
class Figure:
    """Times of one library in one cell, in microseconds."""

    cell: Cell
    library: str
    ranks: int
    turns_us: tuple[float, ...]
    # Number of these turns that ran while the cores were not placed as usual.
    unusual: int = 0

    @property
    def us(self) -> float:
        """The median of the turns."""
        return statistics.median(self.turns_us)

    @property
    def spread(self) -> float:
        """The slowest turn over the fastest."""
        return max(self.turns_us) / max(min(self.turns_us), 1e-6)

    def as_json(self) -> dict[str, object]:
        """Returns the row for the file of results."""
        turns = [round(turn, 4) for turn in self.turns_us]
        who = {"contender": self.library, "ranks": self.ranks, "unusual": self.unusual}
        return {**asdict(self.cell), **who, "turns_us": turns}

    @staticmethod
    def from_json(row: dict[str, Any]) -> Figure:
        """Returns a figure from a row of the file of results."""
        cell = Cell(row["collective"], row["dtype"], row["bytes"])
        return Figure(cell, row["contender"], row["ranks"], tuple(row["turns_us"]), row["unusual"])


@dataclass
class Turns:
    """Times of a library's turns, in microseconds: those that count, and spare ones for when these are too few."""

    wanted: int
    left_s: float
    usual: list[float] = field(default_factory=list)
    other: list[float] = field(default_factory=list)

    @staticmethod
    def of(effort: Effort) -> Turns:
        """Returns a record without turns."""
        return Turns(effort.turns, effort.turns * effort.turn_s * MOST_TRIES)

    @property
    def wants_more(self) -> bool:
        """Whether another turn is due: there are too few, or too few that count and time is left."""
        all_turns = len(self.usual) + len(self.other)
        return all_turns < self.wanted or (len(self.usual) < self.wanted and self.left_s > 0)

    def spend(self, seconds: float) -> None:
        """Subtracts a turn's time, including waiting, from the time left."""
        self.left_s -= seconds
        if self.left_s < 0:
            self.wanted = min(self.wanted, max(LEAST_TURNS, len(self.usual)))

    def figure(self, cell: Cell, library: str, ranks: int) -> Figure:
        """Returns the figure of the turns that count."""
        spare = self.other[: max(self.wanted - len(self.usual), 0)]
        return Figure(cell, library, ranks, (*self.usual, *spare), len(spare))


@dataclass
class Shape:
    """How the calls of a library's turn are divided."""

    batches: int
    calls: int
    meet: bool


def measure(
    job_set: JobSet,
    cells: Iterable[Cell],
    wanted: Sequence[str],
    effort: Effort,
    tick: Callable[[Cell, str], None],
    placement: Placement | None = None,
) -> list[Figure]:
    """Measures every cell with every running library. A library that fails is left out from then on."""
    figures = []
    for cell in cells:
        shapes: dict[str, Shape] = {}
        turns: dict[str, Turns] = {}
        for name in wanted:
            if name in job_set.jobs:
                shape = attempt(job_set, name, partial(prepare, cell=cell, effort=effort))
                if shape:
                    shapes[name], turns[name] = shape, Turns.of(effort)
        order = list(shapes)
        for turn in itertools.count():
            # Rotate the order, since each library finds the caches and the clock as the one before left them.
            start = turn % max(len(order), 1)
            going = [name for name in order[start:] + order[:start] if turns[name].wants_more]
            if not going:
                break
            for name in going:
                tick(cell, name)
                began = time.monotonic()
                before = placement is None or placement.wait(turns[name].left_s)
                took = attempt(job_set, name, partial(run, cell=cell, shape=shapes[name]))
                if took is None:
                    order.remove(name)
                    continue
                stayed = before and (placement is None or placement.is_usual())
                (turns[name].usual if stayed else turns[name].other).append(took / 1000)
                turns[name].spend(time.monotonic() - began)
        figures += [turns[name].figure(cell, name, job_set.ranks) for name in order]
    return figures


def attempt(job_set: JobSet, name: str, body: Callable[[Job], T]) -> T | None:
    """Returns the result; None if the library does not have the call, or fails, after which it is left out."""
    try:
        return body(job_set.jobs[name])
    except Refused:
        return None
    except Lost as why:
        job_set.drop(name, str(why))
        return None


def prepare(job: Job, cell: Cell, effort: Effort) -> Shape:
    """Checks one result, then finds how many calls fill a turn."""
    job.order(f"check {cell.words}")
    rooted = cell.is_rooted
    shape = Shape(1, 1, meet=rooted)
    while True:
        took_ns = max(run(job, cell, shape) * (shape.batches if rooted else shape.calls), 1)
        calls = shape.batches * shape.calls
        if took_ns >= PROBE_NS or calls >= 1 << 20 or (rooted and calls >= MOST_ROOTED):
            break
        # Increase in steps: first calls are slower than later ones.
        more = min(max(2 * PROBE_NS // int(took_ns), 2), 32) * calls
        shape = Shape(min(more, MOST_ROOTED), 1, True) if rooted else Shape(1, more, False)
    fitting = max(int(effort.turn_s * 1e9 * calls / took_ns), LEAST_CALLS)
    if rooted:
        return Shape(min(fitting, MOST_ROOTED), 1, True)
    batches = min(fitting, BATCHES)
    return Shape(batches, fitting // batches, False)


def run(job: Job, cell: Cell, shape: Shape) -> float:
    """Runs one turn; returns nanoseconds per call."""
    job.order(f"run {cell.words} {shape.batches} {shape.calls} {int(shape.meet)}")
    spans = job.spans(shape.batches)
    took = [batch_ns(cell, [spans[rank][batch] for rank in range(job.ranks)]) for batch in range(shape.batches)]
    return statistics.median(took) / shape.calls


def make_calls(job: Job, cell: Cell) -> int:
    """Makes a few untimed calls; returns their number."""
    job.order(f"run {cell.words} 1 {LEAST_CALLS} 0")
    # Includes the calls with which a rank warms up.
    return LEAST_CALLS + LEAST_CALLS // 10 + 1


def batch_ns(cell: Cell, ranks: Sequence[board.Span]) -> int:
    """Returns the time of a batch: of the slowest rank, or for a rooted call from the root's start to the last end."""
    if cell.is_rooted:
        return max(end for _, end in ranks) - ranks[0][0]
    return max(end - begin for begin, end in ranks)
