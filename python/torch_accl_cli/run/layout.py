"""The choice of cores for each rank of a host.

This module owns the order of cores and their distribution over ranks. It handles no processes. `topology` reads the cores of this
host; tests supply others.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

__all__ = ["Core", "Placement", "numbers", "ranges", "share_out", "topology"]


@dataclass(frozen=True, order=True)
class Core:
    """A physical core, with the hardware threads of it that this process may use."""

    node: int
    package: int
    number: int
    threads: tuple[int, ...]


@dataclass(frozen=True)
class Placement:
    """Hardware threads, number of cores and NUMA nodes of a rank; no threads if the rank is not bound."""

    threads: tuple[int, ...] = ()
    cores: int = 0
    nodes: tuple[int, ...] = ()


def topology(allowed: Iterable[int], system: Path = Path("/sys/devices/system")) -> list[Core]:
    """Returns the cores of which this process may use a hardware thread, grouped by NUMA node."""
    node_of = {
        thread: int(folder.name.removeprefix("node"))
        for folder in sorted((system / "node").glob("node[0-9]*"))
        for thread in numbers(_read(folder / "cpulist"))
    }
    cores: dict[tuple[int, int, int], list[int]] = {}
    for thread in sorted(allowed):
        at = system / f"cpu/cpu{thread}/topology"
        package, number = _read(at / "physical_package_id") or "0", _read(at / "core_id") or str(thread)
        cores.setdefault((node_of.get(thread, 0), int(package), int(number)), []).append(thread)
    return sorted(Core(*key, tuple(threads)) for key, threads in cores.items())


def share_out(cores: Sequence[Core], ranks: int) -> list[Placement]:
    """Returns the cores of each rank: equally many whole cores, in sequence, without crossing NUMA nodes if possible.

    If there are more ranks than cores, no rank is bound: some ranks would share a core while others have one alone.
    """
    each = len(cores) // ranks
    if each == 0:
        return [Placement()] * ranks
    # Ranks are divided over the nodes if they divide evenly and each node has enough cores. Then no rank spans two nodes.
    nodes: dict[int, list[Core]] = {}
    for core in cores:
        nodes.setdefault(core.node, []).append(core)
    groups = [list(cores)]
    if ranks % len(nodes) == 0 and all(len(own) >= ranks // len(nodes) for own in nodes.values()):
        groups = list(nodes.values())
    elif len(nodes) % ranks == 0:
        of = len(nodes) // ranks
        listed = list(nodes.values())
        groups = [[core for own in listed[first : first + of] for core in own] for first in range(0, len(listed), of)]
    in_group = ranks // len(groups)
    return [_placement(own) for group in groups for own in _parts(group, in_group)]


def _parts(cores: list[Core], ranks: int) -> list[list[Core]]:
    each = len(cores) // ranks
    return [cores[rank * each : (rank + 1) * each] for rank in range(ranks)]


def _placement(cores: list[Core]) -> Placement:
    threads = tuple(sorted(thread for core in cores for thread in core.threads))
    return Placement(threads, len(cores), tuple(sorted({core.node for core in cores})))


def numbers(text: str) -> list[int]:
    """Returns the numbers in a list such as `0-3,8`. Any other text raises a ValueError."""
    found: list[int] = []
    for part in filter(None, text.strip().split(",")):
        match = re.fullmatch(r"([0-9]+)(?:-([0-9]+))?", part.strip())
        if match is None:
            raise ValueError(f"{part!r} is not a number or a range such as 0-3")
        found += range(int(match[1]), int(match[2] or match[1]) + 1)
    return found


def ranges(found: Iterable[int]) -> str:
    """Returns the shortest list that `numbers` reads as these numbers."""
    parts: list[tuple[int, int]] = []
    for number in sorted(set(found)):
        if parts and parts[-1][1] == number - 1:
            parts[-1] = parts[-1][0], number
        else:
            parts.append((number, number))
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in parts)


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""
