"""Whose random numbers are being drawn: which layer is evaluated, for which batch and micro-batch.

Owns what a layer may know of that while it is evaluated. Who evaluates says it (`_net.py`); torch's generator is seeded there, too.
"""

from __future__ import annotations

from contextvars import ContextVar

__all__ = ["Drawing", "draw_for", "drawn_for"]


class Drawing:
    """An evaluation of a layer. `key` is of the net's seed, the batch and the data-parallel replica; iteration and level do not count."""

    __slots__ = ("calls", "key", "layer", "micro_batch")

    def __init__(self, key: int, layer: int, micro_batch: int) -> None:
        self.key = key
        self.layer = layer
        self.micro_batch = micro_batch
        # How many modules in the layer have asked so far, of which each draws for itself.
        self.calls = 0


_now: ContextVar[Drawing | None] = ContextVar("torch_accl_drawing", default=None)


def drawn_for() -> Drawing | None:
    """The evaluation that the caller is part of; None outside of any."""
    return _now.get()


def draw_for(what: Drawing | None) -> None:
    """From now on the caller is part of this evaluation, or of none."""
    _now.set(what)
