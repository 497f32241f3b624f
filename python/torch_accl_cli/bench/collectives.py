"""What is known of each collective by whoever times it, without torch: its blocks, its root, what the busiest rank must move."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

__all__ = ["COLLECTIVES", "ROOT", "Collective"]

# The root of rooted calls.
ROOT = 0


@dataclass(frozen=True)
class Collective:
    """What sets one collective apart from the others."""

    name: str
    # One block for each rank, in the largest buffer of the call.
    blocks: bool
    # What the busiest rank must move for each byte of the largest buffer, by any algorithm.
    bus_factor: Callable[[int], float]
    reduces: bool = False
    # Timed call by call, after a barrier that is not counted: a root that only sends would otherwise be calls ahead.
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
