"""Timers by name, and the table of their measurements.

Owns clocks and the table's text. The callers decide what is timed.
"""

from __future__ import annotations

import statistics
import time
from types import TracebackType

__all__ = ["ContextTimer", "ContextTimerManager"]


class ContextTimer:
    """Times each run of a `with` block separately."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.times: list[float] = []
        self._began: float | None = None

    def __enter__(self) -> ContextTimer:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def start(self) -> None:
        """Starts a measurement."""
        self._began = time.perf_counter()

    def stop(self) -> None:
        """Ends a measurement; does nothing if none was started."""
        if self._began is not None:
            self.times.append(time.perf_counter() - self._began)
            self._began = None

    def getName(self) -> str:
        """Returns the timer's name."""
        return self.name

    def isTiming(self) -> bool:
        """Returns whether a measurement is running."""
        return self._began is not None

    def getTimes(self) -> list[float]:
        """Returns the measurements, in seconds."""
        return self.times


class ContextTimerManager:
    """Timers by their names."""

    def __init__(self) -> None:
        self.timers: dict[str, ContextTimer] = {}

    def resetTimers(self) -> None:
        """Deletes all timers."""
        self.timers = {}

    def timer(self, name: str) -> ContextTimer:
        """Returns the timer of this name; a new one if there is none."""
        return self.timers.setdefault(name, ContextTimer(name))

    def getTimers(self) -> list[ContextTimer]:
        """Returns all timers."""
        return list(self.timers.values())

    def getResultString(self, prefix: str = "") -> str:
        """Returns a table of the timers whose names begin with `prefix`: the count, and the sum, mean and standard
        deviation in seconds."""
        rows = [
            (name, timer.times)
            for name, timer in sorted(self.timers.items())
            if name.startswith(prefix) and timer.times
        ]
        width = max(len("timer"), *(len(name) for name, _ in rows)) if rows else len("timer")
        lines = [f"  {'timer':<{width}} | {'count':>8} | {'total':>12} | {'mean':>12} | {'stdev':>12}"]
        lines.append("  " + "-" * (len(lines[0]) - 2))
        for name, times in rows:
            deviation = statistics.stdev(times) if len(times) > 1 else 0.0
            lines.append(
                f"  {name:<{width}} | {len(times):>8d} | {sum(times):>12.4e} | {statistics.fmean(times):>12.4e} | {deviation:>12.4e}"
            )
        return "\n".join(lines) + "\n"
