"""Pairs of turns: both builds time one case alternately, and the ratio of their times gets an interval.

Owns the pairing and the judgement. It does not know how a case is timed.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

LOSS = 1.02
CONFIDENCE = 0.95

# Times a case for some seconds, and returns nanoseconds.
Timer = Callable[[float], float]


def interval(values: list[float]) -> tuple[float, float]:
    """Returns two of the values that enclose the median of their distribution with probability `CONFIDENCE`, or else
    the outermost two."""
    values, count = sorted(values), len(values)
    # The number of values below the median is distributed like the number of heads in `count` coin tosses.
    outside, cut = 0.0, 0
    while cut < (count - 1) // 2:
        outside += 2 * math.comb(count, cut) / 2**count
        if outside > 1 - CONFIDENCE:
            break
        cut += 1
    cut = max(cut - 1, 0)
    return values[cut], values[count - 1 - cut]


def compared(timers: list[Timer], case: str, pairs: int, seconds: float) -> dict[str, Any]:
    """Returns the times of both builds in one case, their ratio, and its interval."""
    for timer in timers:
        timer(seconds / 4)
    turns = []
    for turn in range(pairs):
        order = timers if turn % 2 == 0 else timers[::-1]
        times = {timer: timer(seconds) for timer in order}
        turns.append([times[timer] for timer in timers])
    low, high = interval([here / there for here, there in turns])
    # Take times from the median pair. Cores may be near each other in one turn and far in the next, so separate medians
    # would not belong together.
    here, there = sorted(turns, key=lambda pair: pair[0] / pair[1])[pairs // 2]
    return {"case": case, "here_ns": here, "there_ns": there, "ratio": here / there, "low": low, "high": high}


def line(row: dict[str, Any]) -> str:
    """Returns a row of the table."""
    verdict = "loss" if row["low"] > LOSS else "gain" if row["high"] < 1 else ""
    times = f"{row['here_ns'] / 1e3:.2f} | {row['there_ns'] / 1e3:.2f}"
    return f"| {row['case']} | {times} | {row['ratio']:.3f} | {row['low']:.3f} to {row['high']:.3f} | {verdict} |"
