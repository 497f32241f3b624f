"""The evaluation that draws random numbers: its layer, batch and micro-batch.

Owns what a layer may know about its own evaluation. The caller that evaluates a layer (`evaluation.py`) sets it, and seeds
torch's generator there.
"""

from __future__ import annotations

from contextvars import ContextVar

__all__ = ["Drawing", "draw_for", "drawn_for"]


class Drawing:
    """An evaluation of a layer.

    `key` depends on the net's seed, the batch and the data-parallel replica, but not on iteration and level.
    """

    __slots__ = ("calls", "key", "layer", "micro_batch")

    def __init__(self, key: int, layer: int, micro_batch: int) -> None:
        self.key = key
        self.layer = layer
        self.micro_batch = micro_batch
        # Number of modules in the layer that have asked so far. Each of them draws its own numbers.
        self.calls = 0


_now: ContextVar[Drawing | None] = ContextVar("torch_accl_drawing", default=None)


def drawn_for() -> Drawing | None:
    """Returns the evaluation that the caller is part of, or None outside of an evaluation."""
    return _now.get()


def draw_for(what: Drawing | None) -> None:
    """Makes the caller part of this evaluation, or of none, until the next call."""
    _now.set(what)
