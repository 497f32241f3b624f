"""Writes docs/performance.md from the file of results: no figure on the page is typed by hand. Owns the page's order
and words."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from .libraries import LIBRARIES
from .plots import draw
from .sections import SECTIONS
from .tables import Target

INTRODUCTION = """\
# Performance

This page compares the speed of accl with other libraries. `make bench-peers` writes it from `performance/results.json`; do
not edit it by hand. `benches/README.md` explains how to run the benchmarks and how to add to them.

Figures:

* A figure is the median of at least five turns. Libraries are timed alternately within one run; idle ones are stopped
  (SIGSTOP).
* A turn is the median of its batches of calls, and a batch is as slow as its slowest rank.
* Before a library is timed in a cell, the result of one call is checked.
* Times are in microseconds (us). Sizes refer to the largest buffer of the call.
* A host may move the cores of a virtual machine, which changes all times. So the C baseline exchanges 4 bytes before and
  after each turn. Only turns between two exchanges of the usual best time count, as long as there are enough of them.
* `~` marks a figure whose slowest turn took more than 1.5 times the fastest. It also marks a figure if more than half of its
  turns ran while the host had moved the cores.
* Targets are compared before rounding. Values are rounded to the worse side."""


def write(results: dict[str, Any], docs: Path) -> Path:
    """Writes the page and its plots below `docs`."""
    folder = docs / "performance"
    folder.mkdir(parents=True, exist_ok=True)
    for former in folder.glob("*.svg"):
        former.unlink()
    records = [
        (section, results["sections"][section.name]) for section in SECTIONS if section.name in results["sections"]
    ]
    parts = [[INTRODUCTION]]
    targets: list[tuple[str, list[Target]]] = []
    for section, record in records:
        tables = section.tables(record["data"])
        targets.append((section.title, [target for table in tables for target in table.targets]))
        lines = [f"## {section.title}", "", section.text, ""]
        for table in tables:
            lines += [*table.lines(), ""]
        if reason := record["data"].get("unmeasured"):
            parts.append([*lines, f"This section could not be measured on {record['date']}: {reason}."])
            continue
        for plot in section.plots(record["data"]):
            draw(plot, folder / f"{plot.name}.svg")
            lines += [f"![{plot.title}](performance/{plot.name}.svg)", ""]
        when = f"Measured {record['date']} at commit {record['commit']}, {record['effort']}."
        lines.append(" ".join(filter(None, [when, load(record["load"]), placement(record["placement"])])))
        parts.append(lines)
    parts[1:1] = [summary(targets), setting([record for _, record in records])]
    page = docs / "performance.md"
    page.write_text("\n\n".join("\n".join(part).strip() for part in parts) + "\n")
    return page


def load(found: dict[str, float] | None) -> str:
    """Returns a sentence on the load by others; empty if libraries did not take turns."""
    if found is None:
        return ""
    return (
        f"Meanwhile other processes used {found['others']:.1%} of the cores, and the host took {found['stolen']:.1%}."
    )


def placement(found: dict[str, Any] | None) -> str:
    """Returns a sentence on the placement of the cores."""
    if found is None:
        return "The machine had one core."
    if len(found["seen"]) == 1:
        return f"Two cores exchanged 4 bytes in {found['usual_ns']} ns."
    seen = ", ".join(f"{one['ns']} ns ({one['share']:.0%} of the time)" for one in found["seen"])
    return (
        f"Two cores exchanged 4 bytes in {seen}. So the host moves the cores. "
        f"Turns count if an exchange takes about {found['usual_ns']} ns."
    )


def summary(targets: Iterable[tuple[str, list[Target]]]) -> list[str]:
    """Returns a table of the number of targets (`Target`) that are met."""
    lines = ["| | targets met | missed | not measured |", "|---|---:|---:|---:|"]
    for title, found in targets:
        counts = [sum(target.met is verdict for target in found) for verdict in (True, False, None)]
        lines.append(f"| {title} | " + " | ".join(map(str, counts)) + " |")
    return lines


def setting(records: list[dict[str, Any]]) -> list[str]:
    """Returns tables of the machine and of the libraries."""
    lines = ["## Machines and libraries", ""]
    machines = []
    for record in records:
        if record["machine"] not in machines:
            machines.append(record["machine"])
    for machine in machines:
        lines += ["| | |", "|---|---|", *(f"| {name} | {value} |" for name, value in machine.items()), ""]
    if len(machines) > 1:
        lines += ["Sections were measured on different machines. Each table above describes one of them.", ""]
    lines += ["| library | version | called | settings |", "|---|---|---|---|"]
    for one in LIBRARIES:
        versions = dict.fromkeys(record["versions"][one.name] for record in records if one.name in record["versions"])
        if versions:
            lines.append(f"| {one.title} | {'; '.join(versions)} | {one.level.value} | {one.note} |")
    reasons = dict.fromkeys(
        (one.title, record["missing"][one.name])
        for record in records
        for one in LIBRARIES
        if one.name in record["missing"]
    )
    if reasons:
        lines += ["", "Libraries that could not be measured, or not completely:", ""]
        lines += [f"* {title}, {reason}" for title, reason in reasons]
    return lines
