"""How the tensors that a hook hands over are encoded, and which of them travel together.

Owns plans and how they are cut into calls. Which codec a parameter has, and what is carried over of it, is said by `_state.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from .. import _native
from ._measures import Totals
from ._scope import Addresses, codecs_of
from ._settings import RAW, Codec

__all__ = ["Part", "Plan", "cut", "plan_of"]


@dataclass
class Part:
    """Tensors of a plan, one after the other, that travel in a call."""

    tensors: slice
    # Their elements, of those of a block.
    elements: slice
    codecs: _native.Codecs | None = None
    # Of residuals, with error feedback, and the tensors that are there.
    addresses: Addresses | None = None
    residuals: tuple[torch.Tensor, ...] = ()
    stats: _native.ErrorStats | None = None


@dataclass
class Plan:
    """How the tensors that a hook hands over at once are encoded; without codecs they travel as they are."""

    names: list[str]
    chosen: list[Codec | None]
    # Bytes of each tensor of a call: as it is, and as it is sent to be added up.
    raw_bytes: list[int]
    sent_bytes: list[int]
    parts: tuple[Part, ...]
    # Whether codecs of some are still to be chosen.
    is_waiting: bool = False
    # How often its tensors were sent compressed, and what was measured until the last look at it.
    calls: int = 0
    looked_at: list[Totals] = field(default_factory=list)
    # This rank's gradients of the call that is about to be made.
    contributions: Callable[[], Sequence[torch.Tensor]] | None = None
    # Places of tensors that have carried over what their encodings have no place for.
    owed: list[int] = field(default_factory=list)
    # Bytes of an element as it is.
    item_bytes: int = 4

    @property
    def is_encoded(self) -> bool:
        """Whether any tensor is; then all are sent by codecs, those that travel as they are by `raw`."""
        return any(self.chosen)

    def totals(self) -> list[Totals]:
        """What was measured of each tensor."""
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
    """How tensors are encoded by these codecs, of which each of so many blocks has so many elements each, and which travel in
    calls of at most so many bytes."""
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
    """Tensors of these sizes in calls of at most `most` (None: in one); one that is larger has a call of its own."""
    if most is None:
        return [slice(0, len(sizes))]
    parts, first, room = [], 0, most
    for position, size in enumerate(sizes):
        if size > room and position > first:
            parts.append(slice(first, position))
            first, room = position, most
        room -= size
    return [*parts, slice(first, len(sizes))]
