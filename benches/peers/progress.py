"""Progress on stderr: a live status line on a terminal, else a line for each step."""

from __future__ import annotations

import sys
import time
from types import TracebackType

from torch_accl_cli._sizes import show_size

from .libraries import title_of
from .measure import Cell


class Progress:
    """A context manager; `say` reports steps, `tick` turns."""

    def __init__(self) -> None:
        self.began = time.monotonic()
        self.status = None
        self.cell: Cell | None = None
        if sys.stderr.isatty():
            from rich.console import Console

            self.status = Console(stderr=True).status("")

    def __enter__(self) -> Progress:
        if self.status:
            self.status.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.status:
            self.status.stop()

    def say(self, text: str) -> None:
        """Reports a step with a line."""
        line = f"{self.minutes()} {text}"
        if self.status:
            self.status.console.print(line, highlight=False, markup=False)
        else:
            print(line, file=sys.stderr, flush=True)

    def tick(self, cell: Cell, library: str) -> None:
        """Reports the start of a turn."""
        text = f"{cell.collective} {cell.dtype} {show_size(cell.bytes)}"
        if self.status:
            self.status.update(f"{self.minutes()} {text}: {title_of(library)}")
        elif cell != self.cell:
            print(f"{self.minutes()} {text}", file=sys.stderr, flush=True)
        self.cell = cell

    def minutes(self) -> str:
        """Returns the time since the start as minutes and seconds."""
        seconds = int(time.monotonic() - self.began)
        return f"{seconds // 60}:{seconds % 60:02}"
