"""How far a run is: on standard error, on a terminal only; a bar where rich is installed, else a line for each case."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

__all__ = ["Watch", "progress", "unseen"]

# Shows a case while the block runs; outside of it the terminal is free for the table.
Watch = Callable[[Any], AbstractContextManager[object]]


def unseen() -> Watch:
    """Shows nothing."""
    return nullcontext


def progress(total: int) -> Watch:
    """Shows each of `total` cases in its turn."""
    if not sys.stderr.isatty():
        return unseen()
    if importlib.util.find_spec("rich") is None:
        return _lines(total)
    return _bar(total)


def _lines(total: int) -> Watch:
    turns = iter(range(1, total + 1))

    def watch(case: Any) -> AbstractContextManager[object]:
        print(f"{next(turns)} of {total}: {case}", file=sys.stderr, flush=True)
        return nullcontext()

    return watch


def _bar(total: int) -> Watch:
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("{task.description}")
    # Drawn only when a case begins: a thread that draws would take the core of a rank that is measured. Rows pass by
    # it, since it would break them at the width of the terminal.
    bar = Progress(
        *columns,
        console=Console(stderr=True),
        auto_refresh=False,
        transient=True,
        redirect_stdout=False,
        redirect_stderr=False,
    )
    task = bar.add_task("", total=total)

    @contextmanager
    def watch(case: Any) -> Iterator[None]:
        with bar:
            bar.update(task, description=str(case), refresh=True)
            yield
            bar.advance(task)

    return watch
