"""The same net on one rank, without a solver.

Owns the loop over layers that exact modes are compared with, and to which a trained net is exported.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn
from torch.utils import _pytree as pytree

from ._blocks import Block, Kind
from ._side import names_taken
from ._tree import is_state

__all__ = ["Serial", "advanced"]


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
        self.kinds = list(kinds)
        self.dt = dt

    def forward(self, x: Any, side: Mapping[str, Any] | None = None) -> Any:
        """Returns the net's output for x and side inputs."""
        for layer, kind in zip(self.layers, self.kinds):
            named = {name: side[name] for name in names_taken(layer, side)} if side else {}
            # All kinds but `ode` return the state after the layer.
            returned = layer(x, self.dt, **named) if kind == "timed" else layer(x, **named)
            x = advanced(x, returned, self.dt) if kind == "ode" else returned
        return x

    def blocks(self) -> list[Block]:
        """Returns the blocks from which `LayerParallel` is built."""
        return [Block(layer, kind) for layer, kind in zip(self.layers, self.kinds)]


def advanced(state: Any, increment: Any, dt: float) -> Any:
    """Returns `state + dt * increment`, leaf by leaf.

    Integer and bool leaves stay. An increment may consist of the other leaves alone.
    """
    leaves, tree = pytree.tree_flatten(state)
    changes = pytree.tree_leaves(increment)
    if len(changes) == len(leaves):
        changes = [change for change, leaf in zip(changes, leaves) if is_state(leaf)]
    left = iter(changes)
    moved = [(leaf + dt * next(left)).to(leaf.dtype) if is_state(leaf) else leaf for leaf in leaves]
    return pytree.tree_unflatten(moved, tree)
