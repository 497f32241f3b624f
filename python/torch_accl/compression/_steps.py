"""The numbers of explicit calls that were given none.

What is random in a call, and which elements an audit compares, goes by its number: it must be the same on all ranks.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from weakref import WeakKeyDictionary

import torch.distributed as dist

__all__ = ["MOST_KEYS", "Steps", "steps"]

# Keys of a group whose calls are counted.
MOST_KEYS = 4096


class Steps:
    """The numbers of calls, by group and key: all ranks of a group make the same calls in it, and what a rank does elsewhere is
    nothing to them."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        # Of each group: numbers by key, the one that was used last at the end, and where a new key begins.
        self._groups: WeakKeyDictionary[dist.ProcessGroup, tuple[OrderedDict[str, int], list[int]]] = (
            WeakKeyDictionary()
        )

    def of(self, group: dist.ProcessGroup, key: str) -> int:
        """The number of the next call on this key."""
        with self._lock:
            numbers, first = self._of_group(group)
            return numbers.get(key, first[0])

    def count(self, group: dist.ProcessGroup, key: str) -> None:
        """A call on this key was made by the next number."""
        with self._lock:
            numbers, first = self._of_group(group)
            numbers[key] = numbers.get(key, first[0]) + 1
            numbers.move_to_end(key)
            if len(numbers) > MOST_KEYS:
                # If it comes again, it has none of the numbers that it had.
                first[0] = max(first[0], numbers.popitem(last=False)[1])

    def _of_group(self, group: dist.ProcessGroup) -> tuple[OrderedDict[str, int], list[int]]:
        found = self._groups.get(group)
        if found is None:
            found = self._groups[group] = OrderedDict(), [0]
        return found


steps = Steps()
