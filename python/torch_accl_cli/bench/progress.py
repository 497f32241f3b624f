"""Progress of a run on standard error, only on a terminal: a bar if rich is installed, otherwise one line per case."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

__all__ = ["Watch", "progress", "unseen"]

# Shows a case while the `with` block runs. Outside the block the terminal is free for the table.
Watch = Callable[[Any], AbstractContextManager[object]]


def unseen() -> Watch:
    """Returns a watch that shows nothing."""
    return nullcontext


def progress(total: int) -> Watch:
    """Returns a watch that shows each of `total` cases while it runs."""
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
    # The bar is drawn only when a case begins: a drawing thread would use the core of a measured rank. Table rows are not
    # printed through the bar, because it would wrap them at the width of the terminal.
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
