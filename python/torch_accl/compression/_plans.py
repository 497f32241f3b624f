"""How the tensors that a hook passes are encoded, and which of them are sent in one call.

This module owns plans and how they are split into calls. `_state.py` owns the codec of a parameter, and `_residuals.py`
its residuals.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from .. import _native
from ._measures import Totals
from ._residuals import ResidualsOfCall
from ._scope import codecs_of
from ._settings import RAW, Codec

__all__ = ["Part", "Plan", "cut", "plan_of"]


@dataclass
class Part:
    """Consecutive tensors of a plan that are sent in one call."""

    tensors: slice
    # Range of the tensors' elements within one block.
    elements: slice
    codecs: _native.Codecs | None = None
    # With error feedback.
    residuals: ResidualsOfCall | None = None
    stats: _native.ErrorStats | None = None


@dataclass
class Plan:
    """How the tensors that a hook passes at once are encoded; without codecs they are sent unchanged."""

    names: list[str]
    chosen: list[Codec | None]
    # Bytes of each tensor of a call: unchanged, and as encoded for summing.
    raw_bytes: list[int]
    sent_bytes: list[int]
    parts: tuple[Part, ...]
    # Whether `codec="auto"` has not chosen the codecs of some tensors yet.
    is_waiting: bool = False
    # How often the tensors were sent compressed, and the measurements up to the last check of the figures.
    calls: int = 0
    checked_totals: list[Totals] = field(default_factory=list)
    # Returns this rank's gradients for the call that is about to be issued.
    contributions: Callable[[], Sequence[torch.Tensor]] | None = None
    # Indices of tensors with residuals that their encodings no longer use.
    unplaced_residuals: list[int] = field(default_factory=list)
    # Bytes of an unencoded element.
    item_bytes: int = 4

    @property
    def is_encoded(self) -> bool:
        """Whether any tensor is encoded. Then all tensors are sent through codecs; those sent unchanged use `raw`."""
        return any(self.chosen)

    def totals(self) -> list[Totals]:
        """Returns the measurements of each tensor."""
        found = [part.stats for part in self.parts if part.stats is not None]
        return [Totals().plus(measured) for stats in found for measured in stats.read()]


def plan_of(
    names: list[str],
    chosen: list[Codec | None],
    ids: Sequence[int],
    elements: Sequence[int],
    dtype: torch.dtype,
    blocks: int = 1,
    most_bytes: int | None = None,
) -> Plan:
    """Returns the plan for tensors with these codecs.

    `elements` are the elements of each tensor in one block; a call has `blocks` blocks. Tensors are grouped into calls of at
    most `most_bytes` unencoded bytes.
    """
    raw = [blocks * count * dtype.itemsize for count in elements]
    parts, sent = [], []
    for tensors in cut(raw, most_bytes):
        first = sum(elements[: tensors.start])
        part = Part(tensors, slice(first, first + sum(elements[tensors])))
        if any(chosen):
            coded = zip(chosen[tensors], ids[tensors], strict=True)
            part.codecs = codecs_of(tuple((*(codec or (RAW, RAW, RAW)), id) for codec, id in coded))
            kind = str(dtype).removeprefix("torch.")
            counts = enumerate(elements[tensors])
            sent += [blocks * part.codecs.encoded_bytes(place, kind, count)[0] for place, count in counts]
        parts.append(part)
    return Plan(names, chosen, raw, sent or raw, tuple(parts), item_bytes=dtype.itemsize)


def cut(sizes: Sequence[int], most: int | None) -> list[slice]:
    """Groups tensors of these sizes into calls of at most `most` (None: one call). A larger tensor gets its own call."""
    if most is None:
        return [slice(0, len(sizes))]
    parts, first, room = [], 0, most
    for position, size in enumerate(sizes):
        if size > room and position > first:
            parts.append(slice(first, position))
            first, room = position, most
        room -= size
    return [*parts, slice(first, len(sizes))]
