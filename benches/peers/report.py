"""The definition of a section, and the tools for it. A section is one file of `sections/`: cells to measure, tables
with a target (`Target`) for each of its claims, and plots. `sections/__init__.py` lists the sections.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch_accl_cli._sizes import show_size

from . import networks
from .build import Workshop
from .jobs import HERE, Host, Job, JobSet
from .libraries import BY_NAME, LIBRARIES
from .machine import Quiet
from .measure import Cell, Effort, Figure, attempt, make_calls, measure
from .placement import Placement
from .tables import Table, Target, plain, ratio

SIZES = (4, 1 << 10, 16 << 10, 64 << 10, 1 << 20, 16 << 20, 64 << 20)
# Figures whose turns differ by more than this factor are marked.
STEADY = 1.5


@dataclass
class Bench:
    """Tools of a section: the libraries, and one set of jobs at a time."""

    shop: Workshop
    effort: Effort
    libraries: Sequence[str]
    say: Callable[[str], None]
    tick: Callable[[Cell, str], None]
    placement: Placement | None = None
    job_set: JobSet | None = None
    versions: dict[str, str] = field(default_factory=dict)
    missing: dict[str, str] = field(default_factory=dict)
    # Ticks of all cores, of other processes, and taken by the host.
    ticks: tuple[float, ...] = (0, 0, 0)

    def figures(
        self, ranks: int, wanted: Sequence[str], cells: Iterable[Cell], hosts: Sequence[Host] = HERE
    ) -> list[Figure]:
        """Measures cells with the libraries in `wanted` that take part in this run."""
        if self.job_set is None or (self.job_set.ranks, self.job_set.hosts) != (ranks, hosts):
            self.close()
            self.job_set = JobSet(ranks, self.say, hosts)
        taking_part = [name for name in wanted if name in self.libraries]
        self.job_set.start([name for name in taking_part if name not in self.shop.missing], self.shop.names)
        jobs = [*self.job_set.jobs.values(), *([self.placement.job] if self.placement else [])]
        quiet = Quiet(rank.pid for job in jobs for rank in job.members)
        figures = measure(self.job_set, cells, taking_part, self.effort, self.tick, self.placement)
        self.ticks = tuple(map(sum, zip(self.ticks, quiet.figures())))
        self.versions |= {name: self.job_set.versions[name] for name in taking_part if name in self.job_set.versions}
        for name in taking_part:
            reason = self.shop.missing.get(name) or self.job_set.missing.get(name)
            if reason:
                self.missing[name] = f"with {self.job_set.words}: {reason}"
        return figures

    def sent(self, wanted: Sequence[str], cell: Cell, link: networks.Link) -> dict[str, int]:
        """Returns the bytes that a call puts on the wire at one end of the link, for each library running there."""

        def of_a_call(job: Job) -> float:
            before = link.sent()
            made = make_calls(job, cell)
            return (link.sent() - before) / made

        job_set = self.job_set
        if job_set is None:
            return {}
        found = {name: attempt(job_set, name, of_a_call) for name in wanted if name in job_set.jobs}
        return {name: round(sent) for name, sent in found.items() if sent is not None}

    @contextlib.contextmanager
    def network(self, bits: int | None = None, ends: int = 2) -> Iterator[networks.Link]:
        """Creates a link to measure over; jobs on its hosts end before it is removed."""
        with networks.joined(bits, ends) as link:
            try:
                yield link
            finally:
                self.close()

    def close(self) -> None:
        """Ends all jobs."""
        if self.job_set:
            self.job_set.__exit__()
        self.job_set = None

    def end(self) -> None:
        """Ends all jobs and the placement probe."""
        self.close()
        if self.placement:
            self.placement.close()


@dataclass(frozen=True)
class Plot:
    """Curves over sizes: for each library (bytes, microseconds). `over` names another quantity for the first
    number."""

    name: str
    title: str
    curves: dict[str, list[tuple[int, float]]]
    over: str = "size"


@dataclass(frozen=True)
class Section:
    """One part of the page."""

    name: str
    title: str
    # How it was measured, and its targets; Markdown.
    text: str
    # Returns the data for the file of results.
    collect: Callable[[Bench], dict[str, Any]]
    # Return tables and plots from that data.
    tables: Callable[[dict[str, Any]], list[Table]]
    plots: Callable[[dict[str, Any]], list[Plot]] = lambda data: []


class Figures:
    """Figures by library and cell."""

    def __init__(self, rows: Iterable[dict[str, Any]]) -> None:
        self.all = [Figure.from_json(row) for row in rows]
        self.by_place = {(one.library, one.cell): one for one in self.all}
        self.cells = list(dict.fromkeys(one.cell for one in self.all))

    def us(self, library: str, cell: Cell) -> float | None:
        """Returns microseconds; None if not measured."""
        figure = self.by_place.get((library, cell))
        return figure.us if figure else None

    def entry(self, library: str, cell: Cell) -> str:
        """Returns the entry for a table; a tilde marks turns that differed much, or ran while cores were moved."""
        figure = self.by_place.get((library, cell))
        if not figure:
            return ""
        doubtful = figure.spread > STEADY or 2 * figure.unusual > len(figure.turns_us)
        return ("~" if doubtful else "") + plain(figure.us)

    def best(self, libraries: Iterable[str], cell: Cell) -> tuple[str, float] | None:
        """Returns the fastest of some libraries, and its microseconds; None if none was measured."""
        found = [(us, name) for name in libraries if (us := self.us(name, cell)) is not None]
        return (min(found)[1], min(found)[0]) if found else None

    def libraries(self, cells: Iterable[Cell]) -> list[str]:
        """Returns the libraries with a figure in one of these cells, in the order of the table of libraries."""
        have = {name for name, cell in self.by_place if cell in set(cells)}
        return [one.name for one in LIBRARIES if one.name in have]

    def table(self, cells: Sequence[Cell], first: str) -> Table:
        """Returns a table of all libraries' figures in these cells, in microseconds."""
        table = Table([first, *(show_size(cell.bytes) for cell in cells)])
        for name in self.libraries(cells):
            table.row(BY_NAME[name].title, (self.entry(name, cell) for cell in cells))
        return table

    def add_best(
        self,
        table: Table,
        libraries: Sequence[str],
        cells: Sequence[Cell],
        share: Sequence[float],
        whose: str = "best other library",
    ) -> None:
        """Adds a row with the best of some libraries, and a row with the engine's share of its time, with a target for
        each cell."""
        best = [self.best(libraries, cell) for cell in cells]
        table.row(whose, (BY_NAME[one[0]].title if one else "" for one in best))
        shares = (
            Target(ratio(self.us("accl", cell), one[1] if one else None), at_most=target)
            for cell, one, target in zip(cells, best, share)
        )
        table.row(f"accl engine / {whose}", shares)

    def add_times(
        self, table: Table, label: str, slow: str, fast: str, cells: Sequence[Cell], targets: Sequence[float]
    ) -> None:
        """Adds a row with the speed-up of one library over another, with a target for each cell."""

        times = (ratio(self.us(slow, cell), self.us(fast, cell)) for cell in cells)
        table.row(label, (Target(value, at_least=target) for value, target in zip(times, targets)))

    def plot(self, name: str, title: str, cells: Sequence[Cell]) -> Plot:
        """Returns the curves of all libraries over these cells."""
        curves = {
            BY_NAME[one].title: [(cell.bytes, us) for cell in cells if (us := self.us(one, cell)) is not None]
            for one in self.libraries(cells)
        }
        return Plot(name, title, curves)


def cells_of(collective: str, sizes: Sequence[int] = SIZES, dtype: str = "float32") -> list[Cell]:
    """Returns a cell for each size."""
    return [Cell(collective, dtype, size) for size in sizes]


def as_rows(figures: Iterable[Figure]) -> dict[str, Any]:
    """Returns the part of figures that goes into the file of results."""
    return {"figures": [figure.as_json() for figure in figures]}


@contextlib.contextmanager
def closing(bench: Bench) -> Iterator[Bench]:
    """Ends all processes in any case."""
    try:
        yield bench
    finally:
        bench.end()
