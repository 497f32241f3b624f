"""A residual block whose step is longer or shorter than the block's own.

Owns the module that stands around such a block. What steps of other kinds need for that is their dt alone.
"""

from __future__ import annotations

from fractions import Fraction
from typing import Any

from torch import Tensor, nn
from torch.utils import _pytree as pytree

from ._side import names_taken
from ._tree import is_state

__all__ = ["Scaled", "scaled"]


class Scaled(nn.Module):
    """`x + by * (block(x) - x)`: a block with its own skip connection, for the share `by` of its step.

    `refined` puts one around each `residual` or `custom` layer, so that two of the halves make about what the layer made. Leaves of whole numbers stay as the
    block returns them. A block that has a `coarse_step` is asked for it where the step is longer than its own.
    """

    def __init__(self, block: nn.Module, by: float | Fraction) -> None:
        super().__init__()
        self.block = block
        # A fraction, so that a third of a step three times is a step.
        self.by = Fraction(by)

    @property
    def stands_around(self) -> nn.Module:
        """Whose side inputs it takes."""
        return self.block

    def forward(self, x: Any, **side: Any) -> Any:
        """The state after the step."""
        if self.by > 1 and hasattr(self.block, "coarse_step"):
            return self.coarse_step(x, 1, **side)
        leaves, tree = pytree.tree_flatten(self.block(x, **self._taken(side)))
        before, same = pytree.tree_flatten(x)
        if tree != same:
            # By their names or places, in whatever order.
            found = dict(pytree.tree_flatten_with_path(x)[0])
            paths = [path for path, _ in pytree.tree_flatten_with_path(pytree.tree_unflatten(leaves, tree))[0]]
            if found.keys() != set(paths):
                raise TypeError(
                    f"{type(self.block).__name__} returned another structure than it was given: {tree}, and it is to be {same}"
                )
            before = [found[path] for path in paths]
        by = float(self.by)
        return pytree.tree_unflatten([_moved(old, new, by) for old, new in zip(before, leaves)], tree)

    def coarse_step(self, x: Any, n: int, **side: Any) -> Any:
        """The state after n steps, by the block's own coarse step, which may be asked for a fraction."""
        span = n * self.by
        step: Any = self.block.coarse_step
        return step(x, int(span) if span.denominator == 1 else float(span), **self._taken(side))

    def _taken(self, side: dict[str, Any]) -> dict[str, Any]:
        return {name: side[name] for name in names_taken(self.block, side)}

    def extra_repr(self) -> str:
        """What `print` shows besides the block."""
        return f"by={self.by}"


def _moved(old: Any, new: Any, by: float) -> Any:
    if not isinstance(new, Tensor) or not is_state(new):
        return new
    return old + by * (new - old)


def scaled(block: nn.Module, by: Fraction) -> nn.Module:
    """A block for a share of its step; what stood around it before does not pile up."""
    if isinstance(block, Scaled):
        by, block = by * block.by, block.block
    return block if by == 1 else Scaled(block, by)
