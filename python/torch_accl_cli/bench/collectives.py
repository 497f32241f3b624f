"""Facts about each collective that a benchmark needs, without torch: its blocks, its root, and its bus factor."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

__all__ = ["COLLECTIVES", "ROOT", "Collective"]

# Root of calls that have one.
ROOT = 0


@dataclass(frozen=True)
class Collective:
    """Properties of one collective."""

    name: str
    # Whether the largest buffer of the call has one block per rank.
    blocks: bool
    # Bytes that the busiest rank must move per byte of the largest buffer, with any algorithm. The argument is the world size.
    bus_factor: Callable[[int], float]
    reduces: bool = False
    # Whether it has a root. Such calls are timed one by one, each after an untimed barrier: a root that only sends would
    # otherwise run ahead of the other ranks.
    rooted: bool = False


COLLECTIVES = {
    row.name: row
    for row in (
        Collective("all_reduce", False, lambda n: 2 * (n - 1) / n, reduces=True),
        Collective("reduce_scatter", True, lambda n: (n - 1) / n, reduces=True),
        Collective("all_gather", True, lambda n: (n - 1) / n),
        Collective("broadcast", False, lambda n: 1.0, rooted=True),
        Collective("reduce", False, lambda n: 1.0, reduces=True, rooted=True),
        Collective("gather", True, lambda n: (n - 1) / n, rooted=True),
        Collective("scatter", True, lambda n: (n - 1) / n, rooted=True),
        Collective("all_to_all", True, lambda n: (n - 1) / n),
        Collective("barrier", False, lambda n: 0.0),
    )
}
