"""The results of one part: cases, which pass, fail or are skipped with a reason, and figures.

Owns the form of a part's JSON. The file is complete after each case, so that a part that is ended has results, too. Knows
nothing of torch.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

# Number of characters kept of the output of a case that failed.
KEPT = 6000


class Skip(Exception):
    """Ends a case that cannot run here. Its text is the reason."""


class Report:
    """Collects the results of a part and writes them to `path`."""

    def __init__(self, part: str, path: Path, seconds: float, facts: Mapping[str, Any]) -> None:
        self._path = path
        self._begin = time.monotonic()
        self._until = self._begin + seconds
        self._data: dict[str, Any] = {"part": part, **facts, "is_whole": False, "cases": [], "figures": []}
        self._write()

    def seconds_left(self) -> float:
        """Seconds until the part's limit; negative after it."""
        return self._until - time.monotonic()

    def case(self, name: str, run: Callable[[], Mapping[str, Any] | None], least_seconds: float = 5.0) -> bool:
        """Runs one case and keeps its outcome. Returns whether it passed.

        If less than `least_seconds` are left of the part's limit, the case is skipped.
        """
        begin = time.monotonic()
        row: dict[str, Any] = {"name": name, "outcome": "pass"}
        print(f"-- {name}", flush=True)
        try:
            if self.seconds_left() < least_seconds:
                raise Skip(f"the part's limit leaves {max(0.0, self.seconds_left()):.0f} s")
            found = run()
            if found:
                row["found"] = dict(found)
        except Skip as skip:
            row |= {"outcome": "skip", "reason": str(skip)}
        except Exception as error:
            text = "".join(traceback.format_exception(error))
            first = str(error).strip().splitlines() or [type(error).__name__]
            row |= {"outcome": "fail", "reason": first[0], "output": text[-KEPT:]}
            print(text, file=sys.stderr, flush=True)
        row["seconds"] = round(time.monotonic() - begin, 2)
        self._data["cases"].append(row)
        reason = f": {row['reason']}" if "reason" in row else ""
        print(f"   {row['outcome']}, {row['seconds']} s{reason}", flush=True)
        self._write()
        return bool(row["outcome"] == "pass")

    def figure(
        self,
        name: str,
        value: float,
        unit: str,
        target: float | None = None,
        at_least: bool = False,
        **facts: Any,
    ) -> None:
        """Keeps a measured value. A target is the most that it may be, or the least with `at_least`."""
        row: dict[str, Any] = {"name": name, "value": value, "unit": unit, **facts}
        if target is not None:
            row |= {"target": target, "at_least": at_least, "met": value >= target if at_least else value <= target}
        self._data["figures"].append(row)
        self._write()

    def end(self) -> int:
        """Marks the results as whole. Returns the part's exit status: 1 if a case failed."""
        self._data["is_whole"] = True
        self._write()
        return int(any(row["outcome"] == "fail" for row in self._data["cases"]))

    def _write(self) -> None:
        self._data["seconds"] = round(time.monotonic() - self._begin, 1)
        partial = self._path.with_suffix(f".{os.getpid()}")
        partial.write_text(json.dumps(self._data, indent=1) + "\n")
        partial.replace(self._path)


def check(outcomes: Sequence[Any], *ranks: int) -> None:
    """Raises an error that shows all ranks, unless these ranks have succeeded; all ranks by default."""
    wanted = [outcome for outcome in outcomes if outcome.rank in ranks or not ranks]
    bad = next((outcome for outcome in wanted if outcome.status != "ok"), None)
    if bad is None:
        return
    last = (bad.trace.strip().splitlines() or [bad.status])[-1]
    raise AssertionError("\n".join([f"rank {bad.rank}: {last}", *(outcome.describe() for outcome in outcomes)]))


def over_ranks(times: Sequence[Mapping[str, Sequence[float]]]) -> dict[str, float]:
    """Returns the median of each of several alternating measurements. A turn takes as long as on its slowest rank."""
    return {
        name: statistics.median(max(turns) for turns in zip(*(rank[name] for rank in times), strict=True))
        for name in times[0]
    }


def summary(results: Mapping[str, Any], limit: int = 100) -> list[str]:
    """Returns the lines that a run ends with: figures, failures, and all skips with their reasons. At most `limit` lines."""
    head = [f"== {results['machine'].get('device', results['device'])}: torch {results['machine'].get('torch')}"]
    figures: list[str] = []
    failed: list[str] = []
    skipped: dict[tuple[str, str], list[str]] = {}
    for name, part in results["parts"].items():
        cases = part.get("cases", [])
        number = {kind: sum(row["outcome"] == kind for row in cases) for kind in ("pass", "fail", "skip")}
        counts = ", ".join(f"{count} {kind}" for kind, count in number.items() if count) or "no case"
        ended = "" if part.get("is_whole") else f"; NOT WHOLE: {part.get('reason', 'the part was ended')}"
        head.append(f"{name}: {counts}; {part.get('seconds', 0):.0f} s{ended}")
        for row in part.get("figures", []):
            met = "" if "met" not in row else f" (target {_bound(row)}: {'met' if row['met'] else 'MISSED'})"
            figures.append(f"  {name}: {row['name']}: {row['value']:.4g} {row['unit']}{met}")
        failed += [f"  FAILED {name}: {row['name']}: {row['reason']}" for row in cases if row["outcome"] == "fail"]
        for row in cases:
            if row["outcome"] == "skip":
                skipped.setdefault((name, row["reason"]), []).append(row["name"])
    skips = [
        f"  skipped {part}: {names[0] if len(names) == 1 else f'{names[0]} and {len(names) - 1} more'}: {reason}"
        for (part, reason), names in skipped.items()
    ]
    lines = [line if len(line) <= 240 else line[:237] + "..." for line in [*head, *failed, *figures, *skips]]
    if len(lines) > limit:
        lines = [*lines[: limit - 1], f"  {len(lines) - limit + 1} lines more: see the results"]
    return lines


def _bound(row: Mapping[str, Any]) -> str:
    return f"{'at least' if row['at_least'] else 'at most'} {row['target']:g}"
