"""Runs a part of the tests.

Each matrix runs as few cases as contain every pair of values, or every value, of its parameters once. Of the tests
marked `slow`, every sixth or none runs.

`ACCL_TEST_COVER` selects the part: `all` (the default), `pairs` or `values`. A test with two parameters keeps all of
its cases under `pairs`. `ACCL_TEST_COVER_SEED` decides which of several possible parts runs. The scripts derive this
number from the date of the commit, so every case has its turn over the days, and a commit always gets the same part.
Owns the choice only; `conftest.py` applies it.
"""

import itertools
import random
from collections.abc import Hashable, Iterable, Sequence
from typing import TypeVar

T = TypeVar("T")

STRENGTH = {"values": 1, "pairs": 2}
# One of this many slow tests runs; None means that no slow test runs.
TURNS = {"values": None, "pairs": 6}

# Files whose every case counts: their parameters are rows of a table, not a product of properties.
WHOLE = ("test_surface.py",)


def covering(cases: Sequence[dict[str, Hashable]], strength: int, seed: int) -> list[int]:
    """Returns the indices of few cases that cover every combination of values of `strength` parameters that occurs.

    The choice is greedy and the indices are in ascending order.
    """

    def combinations(case: dict[str, Hashable]) -> set[tuple]:
        return set(itertools.combinations(sorted(case.items()), min(strength, len(case))))

    left = {index: combinations(case) for index, case in enumerate(cases)}
    order = list(left)
    random.Random(seed).shuffle(order)
    missing = set().union(*left.values())
    chosen = []
    while missing:
        # Takes the first of the best cases in a shuffled order: the seed decides between cases that add equally much.
        best = max(order, key=lambda index: len(left[index] & missing))
        chosen.append(best)
        missing -= left[best]
    return sorted(chosen)


def select(items: Iterable[T], cover: str, seed: int) -> tuple[list[T], list[T]]:
    """Returns the pytest items that run and the items that are left out."""
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
    # Numbers come from the whole list, sorted by name, and not from the choice above, whose size changes from day to
    # day. Otherwise a test could miss its turns.
    slow = sorted((item for item in items if item.get_closest_marker("slow")), key=lambda item: item.nodeid)
    turns = TURNS[cover]
    kept.difference_update(id(item) for number, item in enumerate(slow) if turns is None or (number + seed) % turns)
    return [item for item in items if id(item) in kept], [item for item in items if id(item) not in kept]


def _values(item) -> dict[str, Hashable]:
    # Arguments of one mark have one index and count as one value.
    return dict(item.callspec.indices)
