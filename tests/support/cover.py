"""Runs a part of the tests. Of each matrix: as few cases as have every pair of values, or every value, of its parameters once.
Of the tests marked `slow`: every sixth, or none.

`ACCL_TEST_COVER` says which part: `all` (the default), `pairs` or `values`. A test with two parameters keeps all of its cases under `pairs`.
Which of several parts is chosen depends on `ACCL_TEST_COVER_SEED`, a number that the scripts take from the date of the commit: over the days
every case has its turn, and a commit always gets the same part. Owns the choice only; `conftest.py` applies it.
"""

import itertools
import random
from collections.abc import Hashable, Iterable, Sequence
from typing import TypeVar

T = TypeVar("T")

STRENGTH = {"values": 1, "pairs": 2}
# Of so many slow tests one is run; no number: none of them.
TURNS = {"values": None, "pairs": 6}

# Of these every case counts: what they hold is a table of its own, not a product of properties.
WHOLE = ("test_surface.py",)


def covering(cases: Sequence[dict[str, Hashable]], strength: int, seed: int) -> list[int]:
    """The indices of as few cases as a greedy choice finds that have every combination of `strength` parameters' values which
    occurs, in ascending order."""

    def combinations(case: dict[str, Hashable]) -> set[tuple]:
        return set(itertools.combinations(sorted(case.items()), min(strength, len(case))))

    left = {index: combinations(case) for index, case in enumerate(cases)}
    order = list(left)
    random.Random(seed).shuffle(order)
    missing = set().union(*left.values())
    chosen = []
    while missing:
        # The first of the best in a shuffled order: the seed decides between cases that add as much.
        best = max(order, key=lambda index: len(left[index] & missing))
        chosen.append(best)
        missing -= left[best]
    return sorted(chosen)


def select(items: Iterable[T], cover: str, seed: int) -> tuple[list[T], list[T]]:
    """The items of pytest that are run and those that are left out."""
    items = list(items)
    if cover == "all":
        return items, []
    if cover not in STRENGTH:
        raise ValueError(f"ACCL_TEST_COVER={cover}: expected all, pairs or values")
    matrices: dict[str, list[T]] = {}
    for item in items:
        matrices.setdefault(item.nodeid.split("[")[0], []).append(item)
    kept: set[int] = set()
    for cases in matrices.values():
        wanted = range(len(cases))
        if all(hasattr(case, "callspec") for case in cases) and cases[0].path.name not in WHOLE:
            wanted = covering([_values(case) for case in cases], STRENGTH[cover], seed)
        kept.update(id(cases[index]) for index in wanted)
    # Numbered before the choice above, whose size changes from day to day, and whatever the order: else a test could miss its turns.
    slow = sorted((item for item in items if item.get_closest_marker("slow")), key=lambda item: item.nodeid)
    turns = TURNS[cover]
    kept.difference_update(id(item) for number, item in enumerate(slow) if turns is None or (number + seed) % turns)
    return [item for item in items if id(item) in kept], [item for item in items if id(item) not in kept]


def _values(item) -> dict[str, Hashable]:
    # Arguments of one mark have one index and are one value.
    return dict(item.callspec.indices)
