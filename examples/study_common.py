"""Shared code of the training studies: the order of batches, progress, facts, and the file of figures.

Owns neither models nor settings, and trains nothing.
"""

from __future__ import annotations

import json
import math
import re
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from torch import Tensor

from benches.peers import machine


def batches(rows: int, batch: int, steps: int, seed: int) -> Tensor:
    """Returns the rows of each step: complete passes, each in a new order, without rows that do not fill a step."""
    generator = torch.Generator().manual_seed(seed)
    whole = rows // batch * batch
    passes = [torch.randperm(rows, generator=generator)[:whole] for _ in range(math.ceil(steps * batch / whole))]
    return torch.cat(passes)[: steps * batch].view(steps, batch)


def finite(value: float) -> float | None:
    """Returns the value, or None for NaN and infinity, which JSON does not have."""
    return value if math.isfinite(value) else None


class Watch:
    """Shows progress on standard error: a bar on a terminal, else a line for each run. One process has the bar."""

    def __init__(self, steps: int, *, has_bar: bool, has_lines: bool) -> None:
        console = Console(stderr=True)
        self.is_bar = has_bar and console.is_terminal
        self.is_lines = has_lines and not console.is_terminal
        columns = (BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("{task.description}"))
        self.bar = Progress(*columns, console=console, disable=not self.is_bar)
        self.task = self.bar.add_task("", total=steps)
        self.words = ""

    def begin(self, words: str) -> None:
        """Starts a run."""
        self.words = words

    def tick(self, loss: float) -> None:
        """Records a step."""
        if self.is_bar:
            self.bar.update(self.task, advance=1, description=f"{self.words}, loss {loss:.4f}")

    def reach(self, steps: int) -> None:
        """Sets the number of steps done, including those by other processes."""
        if self.is_bar:
            self.bar.update(self.task, completed=steps)

    def end(self, run: dict[str, Any]) -> None:
        """Ends a run."""
        if self.is_lines:
            loss = "lost" if run["loss"] is None else f"{run['loss']:.6f}"
            print(f"{self.words}: loss {loss}, {run['seconds']:.1f} s", file=sys.stderr, flush=True)


def facts() -> dict[str, Any]:
    """Returns the conditions that figures depend on."""
    return {
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
        "commit": machine.commit(),
        "torch": torch.__version__,
        "processor": machine.facts()["processor"],
    }


def kept(folder: Path, name: str, parts: str) -> dict[str, Any]:
    """Returns the results of an earlier run; parts that are not trained now stay unchanged."""
    file = folder / f"{name}.json"
    return json.loads(file.read_text()) if file.exists() else {"format": 1, parts: {}}


def save(results: dict[str, Any], folder: Path, name: str) -> None:
    """Writes the figures; a run is a line."""
    folder.mkdir(parents=True, exist_ok=True)
    text = json.dumps(results, indent=1, allow_nan=False)
    text = re.sub(r"\{[^{}]*\}", lambda inner: re.sub(r"\n\s*", " ", inner[0]), text)
    (folder / f"{name}.json").write_text(text + "\n")
