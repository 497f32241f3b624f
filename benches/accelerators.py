"""Figures of calls on tensors of a GPU, from the results of `tests/gpu`.

    python -m benches.accelerators gpu-results/results.json                # print the tables
    python -m benches.accelerators gpu-results/results.json --write-docs   # also write them to docs/performance/accelerators.md

Owns the tables of docs/performance/accelerators.md. Measures nothing. Refuses results of the stand-in for an accelerator and of
tiny runs, whose figures mean nothing.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from . import blocks

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "performance" / "accelerators.md"
COMMAND = "python -m benches.accelerators RESULTS --write-docs"
NAME = "figures"
# Parts of `tests/gpu` that measure.
MEASURING = ("bench", "peer", "codecs", "stream")
NONE = "There is no figure yet: no run on a GPU has been written here."


def tables(results: Mapping[str, Any] | None) -> Iterator[str]:
    """Yields the lines of the page's block.

    Raises:
        ValueError: the results are not of a whole run on a card, or have no figure.
    """
    if results is None:
        yield NONE
        return
    if results.get("device") != "cuda" or results.get("is_tiny"):
        kind = "a tiny run" if results.get("device") == "cuda" else f"the device {results.get('device')}"
        raise ValueError(
            f"the results come from {kind}, and a page has figures of a GPU only; run it on one, without --tiny"
        )
    figures = {name: results["parts"].get(name, {}).get("figures", []) for name in MEASURING}
    if not any(figures.values()):
        raise ValueError(f"the results have no figure; run the parts {', '.join(MEASURING)}")
    yield from _machine(results)
    targets = [row for rows in figures.values() for row in rows if "target" in row]
    if targets:
        yield from ("", "| with a target | measured | target | |", "|---|---|---|---|")
        for row in targets:
            bound = f"{'at least' if row['at_least'] else 'at most'} {row['target']:g} {row['unit']}"
            yield f"| {row['name']} | {row['value']:.3g} {row['unit']} | {bound} | {'met' if row['met'] else '**missed**'} |"
    others = [row for rows in figures.values() for row in rows if "target" not in row]
    if others:
        yield from ("", "| figure | measured |", "|---|---|")
        for row in others:
            yield f"| {row['name']} | {row['value']:.4g} {row['unit']} |"
    yield from _proof(results)


def _machine(results: Mapping[str, Any]) -> Iterator[str]:
    machine = results["machine"]
    rows = {
        "card": machine.get("device"),
        "driver; generation and width of its PCIe link": machine.get("driver"),
        "processor": f"{machine.get('processor')}, {machine.get('cores')} cores",
        "torch; CUDA; Python": f"{machine.get('torch')}; {machine.get('cuda')}; {machine.get('python')}",
        "measured": f"{results.get('date')}, commit {results.get('commit')}",
    }
    yield from ("| machine | |", "|---|---|")
    for name, value in rows.items():
        yield f"| {name} | {value} |"


def _proof(results: Mapping[str, Any]) -> Iterator[str]:
    """Yields what passed in the same run."""
    yield from ("", "| part | passed | failed | skipped |", "|---|---|---|---|")
    for name, part in results["parts"].items():
        cases = part.get("cases", [])
        number = [sum(row["outcome"] == kind for row in cases) for kind in ("pass", "fail", "skip")]
        whole = "" if part.get("is_whole") else " (ended early)"
        yield f"| `{name}`{whole} | {number[0]} | {number[1]} | {number[2]} |"


def main() -> int:
    """Prints the tables of a run's results, and writes the page if asked."""
    parser = argparse.ArgumentParser(prog="python -m benches.accelerators", description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "results", type=Path, help="results.json of tests/gpu/run.py, or 'none' for a page without figures"
    )
    parser.add_argument("--write-docs", action="store_true", help=f"also write the tables to {PAGE.relative_to(ROOT)}")
    asked = parser.parse_args()
    try:
        results = None if str(asked.results) == "none" else json.loads(asked.results.read_text())
        lines = list(tables(results))
    except (OSError, ValueError) as error:
        print(f"error: {asked.results}: {error}", file=sys.stderr)
        return 2
    print("\n".join(lines))
    if asked.write_docs:
        blocks.write(PAGE, NAME, COMMAND, lines)
    return 0


if __name__ == "__main__":
    sys.exit(main())
