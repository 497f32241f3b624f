"""`make bench-peers`: measures the requested sections, stores the results, writes the page.

Sections that are not measured in this run stay on the page unchanged, with their own date.
"""

from __future__ import annotations

import json
import os
import re
import signal
import sys
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from . import machine
from .arguments import parse
from .build import ROOT, Unavailable, Workshop, make_c_baseline
from .measure import FULL, QUICK, Effort
from .placement import Placement
from .progress import Progress
from .report import Bench, as_rows, closing
from .sections import BY_NAME


def main() -> int:
    """Runs the command; returns its exit code."""
    asked = parse(sys.argv[1:])
    # SIGTERM raises an exception, so that no stopped rank is left behind.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    if asked.selftest:
        from .selftest import run

        return run()
    from . import page

    kept = asked.output / "performance" / "results.json"
    results = json.loads(kept.read_text()) if kept.exists() else {"sections": {}}
    if not asked.page_only:
        effort = QUICK if asked.quick else FULL
        with Progress() as progress:
            shop = Workshop(ROOT / ".make" / "peers" / "build", progress.say, online=not asked.offline)
            shop.prepare(asked.libraries)
            bench = Bench(shop, effort, asked.libraries, progress.say, progress.tick)
            with closing(bench):
                bench.placement = watch(shop, asked.exchange_ns, progress.say)
                for name in asked.sections:
                    progress.say(BY_NAME[name].title)
                    fresh = record(bench, name)
                    if reason := fresh["data"].get("unmeasured"):
                        # Keep the earlier measurement.
                        progress.say(f"not measured: {reason}")
                        results["sections"].setdefault(name, fresh)
                    else:
                        results["sections"][name] = fresh
                    save(results, kept)
    print(page.write(results, asked.output))
    return 0


def record(bench: Bench, name: str) -> dict[str, Any]:
    """Measures a section, and returns its results with all conditions that they depend on."""
    bench.versions, bench.missing, bench.ticks = {}, {}, (0, 0, 0)
    try:
        data = BY_NAME[name].collect(bench)
    except Unavailable as why:
        data = as_rows([]) | {"unmeasured": str(why)}
    total, others, stolen = bench.ticks
    return {
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
        "commit": machine.commit(),
        "effort": words(bench.effort),
        "machine": machine.facts(),
        "versions": bench.versions,
        "missing": bench.missing,
        "placement": bench.placement.as_json() if bench.placement else None,
        # Measured only while libraries take turns.
        "load": {"others": others / total, "stolen": stolen / total} if total else None,
        "data": data,
    }


def watch(shop: Workshop, wanted_ns: float | None, say: Callable[[str], None]) -> Placement | None:
    """Returns a `Placement` if there are two cores, after building the C baseline `c_baseline` if needed; None for one
    core."""
    if "sketch" not in shop.names:
        make_c_baseline(shop)
    if len(os.sched_getaffinity(0)) < 2:
        say("one core: its placement by the host is not checked")
        return None
    return Placement(shop.names, wanted_ns, say)


def words(effort: Effort) -> str:
    """Returns the effort as text for the page."""
    return f"{effort.turns} turns of about {effort.turn_s * 1000:.0f} ms"


def save(results: dict[str, Any], kept: Path) -> None:
    """Saves after each section, so that an aborted run keeps its results. A figure is a line."""
    kept.parent.mkdir(parents=True, exist_ok=True)
    text = json.dumps(results, indent=1, sort_keys=True)
    kept.write_text(re.sub(r"\{[^{}]*\}", lambda inner: re.sub(r"\n\s*", " ", inner[0]), text) + "\n")


if __name__ == "__main__":
    sys.exit(main())
