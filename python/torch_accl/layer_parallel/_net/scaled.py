"""A residual block whose step is longer or shorter than the block's own.

Owns the module that wraps such a block. Steps of other kinds need only another dt.
"""

from __future__ import annotations

from fractions import Fraction
from typing import Any

from torch import Tensor, nn
from torch.utils import _pytree as pytree

from .side import names_taken
from .tree import is_state

__all__ = ["Scaled", "scaled"]


class Scaled(nn.Module):
    """`x + by * (block(x) - x)`: a block with its own skip connection, for the share `by` of its step.

    `refined` wraps each `residual` or `custom` layer in one, so that two halves compute about the same as the layer.
    Integer and bool leaves stay as the block returns them. If the step is longer than the block's own, a block with a
    `coarse_step` computes it.
    """

    def __init__(self, block: nn.Module, by: float | Fraction) -> None:
        super().__init__()
        self.block = block
        # A fraction, so that three thirds of a step are exactly one step.
        self.by = Fraction(by)

    @property
    def stands_around(self) -> nn.Module:
        """The module whose side inputs this one takes."""
        return self.block

    # Because of the slash, side inputs may have the names of arguments.
    def forward(self, x: Any, /, **side: Any) -> Any:
        """Returns the state after the step."""
        if self.by > 1 and hasattr(self.block, "coarse_step"):
            return self.coarse_step(x, 1, **side)
        leaves, tree = pytree.tree_flatten(self.block(x, **self._taken(side)))
        before, same = pytree.tree_flatten(x)
        if tree != same:
            # Leaves are matched by their names or indices, in any order.
            found = dict(pytree.tree_flatten_with_path(x)[0])
            paths = [path for path, _ in pytree.tree_flatten_with_path(pytree.tree_unflatten(leaves, tree))[0]]
            if found.keys() != set(paths):
                raise TypeError(
                    f"{type(self.block).__name__} returned the structure {tree}; expected its input's structure {same}"
                )
            before = [found[path] for path in paths]
        by = float(self.by)
        return pytree.tree_unflatten([_moved(old, new, by) for old, new in zip(before, leaves)], tree)

    def coarse_step(self, x: Any, n: int, /, **side: Any) -> Any:
        """Returns the state after n steps, from the block's own coarse step.

        That function may get a fraction of a step.
        """
        span = n * self.by
        step: Any = self.block.coarse_step
        return step(x, int(span) if span.denominator == 1 else float(span), **self._taken(side))

    def _taken(self, side: dict[str, Any]) -> dict[str, Any]:
        return {name: side[name] for name in names_taken(self.block, side, 1)}

    def extra_repr(self) -> str:
        """Text that `print` shows in addition to the block."""
        return f"by={self.by}"


def _moved(old: Any, new: Any, by: float) -> Any:
    if not isinstance(new, Tensor) or not is_state(new):
        return new
    return old + by * (new - old)


def scaled(block: nn.Module, by: Fraction) -> nn.Module:
    """Returns a block for a share of its step. A `Scaled` that already wraps the block is replaced, not nested."""
    if isinstance(block, Scaled):
        by, block = by * block.by, block.block
    return block if by == 1 else Scaled(block, by)
