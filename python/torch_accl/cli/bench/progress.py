"""How far a run is: on standard error, on a terminal only; a bar where rich is installed, else a line for each case."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def progress(total: int) -> Iterator[Callable[[Any], None]]:
    """Gives a function to call with each case that begins."""
    if not sys.stderr.isatty():
        yield lambda case: None
    elif importlib.util.find_spec("rich") is None:
        begun = iter(range(1, total + 1))
        yield lambda case: print(f"{next(begun)} of {total}: {case}", file=sys.stderr)
    else:
        with _bar(total) as begin:
            yield begin


@contextmanager
def _bar(total: int) -> Iterator[Callable[[Any], None]]:
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("{task.description}")
    # Drawn only between cases: a thread that draws would take the core of a rank that is measured.
    bar = Progress(
        *columns,
        console=Console(stderr=True),
        auto_refresh=False,
        transient=True,
        redirect_stdout=sys.stdout.isatty(),
        redirect_stderr=False,
    )
    with bar:
        task = bar.add_task("", total=total)
        begun = iter(range(total))

        def begin(case: Any) -> None:
            bar.update(task, completed=next(begun), description=str(case), refresh=True)

        yield begin
