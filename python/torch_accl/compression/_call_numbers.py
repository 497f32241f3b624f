"""Sequence numbers of explicit calls whose caller gave no step.

Random numbers of a call, and the elements that an audit compares, depend on this number. It must be the same on all ranks.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from weakref import WeakKeyDictionary

import torch.distributed as dist

__all__ = ["MOST_KEYS", "CallNumbers", "call_numbers"]

# Maximum number of keys of a group whose calls are counted.
MOST_KEYS = 4096


class CallNumbers:
    """Call numbers by group and key.

    All ranks of a group issue the same calls in it, so their numbers agree. Calls in other groups do not change them.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        # For each group: numbers by key, the most recently used key last, and the number at which a new key starts.
        self._groups: WeakKeyDictionary[dist.ProcessGroup, tuple[OrderedDict[str, int], list[int]]] = (
            WeakKeyDictionary()
        )

    def of(self, group: dist.ProcessGroup, key: str) -> int:
        """Returns the number of the next call on this key."""
        with self._lock:
            numbers, first = self._of_group(group)
            return numbers.get(key, first[0])

    def count(self, group: dist.ProcessGroup, key: str) -> None:
        """Records that a call on this key was issued with the next number."""
        with self._lock:
            numbers, first = self._of_group(group)
            numbers[key] = numbers.get(key, first[0]) + 1
            numbers.move_to_end(key)
            if len(numbers) > MOST_KEYS:
                # A dropped key that returns must not repeat any of its numbers.
                first[0] = max(first[0], numbers.popitem(last=False)[1])

    def _of_group(self, group: dist.ProcessGroup) -> tuple[OrderedDict[str, int], list[int]]:
        found = self._groups.get(group)
        if found is None:
            found = self._groups[group] = OrderedDict(), [0]
        return found


call_numbers = CallNumbers()
