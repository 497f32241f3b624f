"""A rank's data for all batches that are solved with one division of the layers.

Owns the data alone: ranks, plans, layers, and the forms of states that batches of one kind share. `opening.py` fills it
while a batch opens, and `batch.py` has the data of one batch.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from .._net.copies import Copies
from .._net.evaluation import Layers, keep_freed_memory
from .._net.side import SideForm
from .._net.spatial import Meshes, Spatial
from .._net.tree import Form
from .._ranks.wire import Wire
from .plans import Plans

__all__ = ["Guess", "KindOfBatch", "Shared", "Solver"]


# Maximum number of kinds of batches whose forms are kept.
_REMEMBERED = 256

# Returns the state of a point, before the batch is known.
Guess = Callable[[int], Any]


@dataclass
class Shared:
    """State that several solvers of a net share."""

    # Number of the next batch; the first rank's count is used.
    number: int = 0
    # Gives the first states of C-points if a cycle begins with a guess.
    guess: Guess | None = None
    # Names of the side inputs that are split into micro-batches.
    per_sample: Collection[str] = ()
    # Number of the next batch in evaluation.
    evaluations: int = 0
    # Makes states coarser on coarser levels; None without it.
    spatial: Spatial | None = None

    def due(self, *, is_training: bool) -> int:
        """Returns the number of the next batch.

        Evaluation has its own count, so it does not change later training batches.
        """
        return self.number if is_training else self.evaluations


@dataclass
class KindOfBatch:
    """Data that batches of one kind share: all that inputs of the same shapes and dtypes determine."""

    # Forms of the states, by point.
    forms: list[Form]
    side: SideForm
    # By how often states become coarser.
    meshes: dict[int, Meshes] = field(default_factory=dict)


class Solver:
    """A rank's data for all batches of one division of the layers."""

    def __init__(
        self, wire: Wire, plans: Plans, layers: Layers, names: Sequence[str], replica: int, shared: Shared | None = None
    ) -> None:
        self.wire = wire
        self.replica = replica
        self.shared = Shared() if shared is None else shared
        self.plans = plans
        self.layers = layers
        self.names = names
        # Copies of parameters that several ranks have. None if there are none, or the net itself compares them.
        self.copies: Copies | None = None
        self.kinds: dict[int, KindOfBatch] = {}
        # State of the layers that the kinds hold for.
        self.state_of_kinds = 0
        keep_freed_memory()

    @property
    def device(self) -> torch.device | None:
        """The device of this rank's parameters, or of its buffers. None without any."""
        for module in self.layers.modules.values():
            for tensor in itertools.chain(module.parameters(), module.buffers()):
                return tensor.device
        return None

    def remember(self, key: int, kind: KindOfBatch) -> None:
        """Keeps the data of a kind of batch. All ranks forget the same kinds, because they have run the same batches."""
        if len(self.kinds) >= _REMEMBERED:
            self.kinds.pop(next(iter(self.kinds)))
        self.kinds[key] = kind
