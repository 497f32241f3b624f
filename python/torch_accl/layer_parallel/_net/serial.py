"""The same net on one rank, without a solver.

Owns the loop over layers that exact modes are compared with, and to which a trained net is exported.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn

from .blocks import Block
from .kinds import Kind, kind_of
from .side import names_taken

__all__ = ["Serial"]


class Serial(nn.Module):
    """Layers one after the other, with the result of an `exact-wave`.

    Its parameters have the names of `LayerParallel`, `layers.<number>...`.
    """

    def __init__(
        self, layers: Sequence[nn.Module], kinds: Sequence[Kind], dt: float, ties: Sequence[Sequence[str]] = ()
    ) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)
        for first, *others in ties:
            for other in others:
                holder, _, name = other.rpartition(".")
                setattr(self.get_submodule(holder), name, self.get_parameter(first))
        # Names, because saved modules have them.
        self.kinds = list(kinds)
        self.dt = dt

    def forward(self, x: Any, side: Mapping[str, Any] | None = None) -> Any:
        """Returns the net's output for x and side inputs."""
        for layer, kind_name in zip(self.layers, self.kinds):
            kind = kind_of(kind_name)
            named = {name: side[name] for name in names_taken(layer, side, kind.step_arguments)} if side else {}
            returned = kind.called(layer, 1)(*kind.arguments(x, 1, self.dt), **named)
            x = kind.next_state(x, returned, self.dt)
        return x

    def blocks(self) -> list[Block]:
        """Returns the blocks from which `LayerParallel` is built."""
        return [Block(layer, kind) for layer, kind in zip(self.layers, self.kinds)]
