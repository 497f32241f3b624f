"""Spatial coarsening in torchbraid's form: three functions that get the level, and the levels.

Owns their translation to a `Spatial` of `torch_accl.layer_parallel`, which decides when they are called.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from torch import Tensor
from torch.utils import _pytree as pytree

from ...layer_parallel import Spatial
from ...layer_parallel.extension import described, is_state

__all__ = ["Levels", "levels_of"]

_FUNCTIONS = "spatial_ref_funcs=(coarsen, refine, shape)"


class Levels(Spatial):
    """torchbraid's functions as a `Spatial` that makes states coarser from each of `levels`, which are sorted, to the
    next; 0 is the finest level.

    The functions are called for each tensor of a state, with the level.
    """

    levels: list[int]

    def __init__(self, functions: Sequence[Callable[..., Any]], levels: Sequence[int]) -> None:
        # The overridden methods below pass the level, which the base class does not.
        self._coarsen, self._refine, self._shape = functions
        super().__init__(self._coarsen, self._refine)
        self.levels = list(levels)

    def to_coarser(self, x: Any, mesh: int) -> Any:
        """Returns a state on the next coarser mesh."""
        return pytree.tree_map(lambda leaf: self._coarser(leaf, self.levels[mesh]), x)

    def to_finer(self, x: Any, like: Any, mesh: int) -> Any:
        """Returns a state on the next finer mesh."""
        leaves, tree = pytree.tree_flatten(x)
        # Leaves that are not part of the state, such as integers, are taken from the finer mesh.
        pairs = zip(leaves, pytree.tree_leaves(like))
        found = [self._finer(leaf, self.levels[mesh]) if is_state(leaf) else other for leaf, other in pairs]
        return pytree.tree_unflatten(found, tree)

    # ---- the user's functions

    def _coarser(self, leaf: Any, level: int) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        given = list(leaf.shape)
        found = _called("coarsen", given, level, lambda: self._coarsen(leaf, level))
        said = _called("shape", given, level, lambda: self._shape(list(given), level))
        try:
            wanted = [operator.index(length) for length in said]
        except TypeError:
            raise TypeError(
                f"{_FUNCTIONS}: shape returned {said!r} for {given} on level {level}; return a list of lengths"
            ) from None
        if not isinstance(found, Tensor) or list(found.shape) != wanted:
            shown = list(found.shape) if isinstance(found, Tensor) else type(found).__name__
            raise ValueError(
                f"{_FUNCTIONS}: for a state {given} on level {level} coarsen returned {shown}, but shape returned {wanted}; make both agree"
            )
        return found

    def _finer(self, leaf: Tensor, level: int) -> Any:
        return _called("refine", list(leaf.shape), level, lambda: self._refine(leaf, level))


def levels_of(
    spatial_ref_funcs: Sequence[Callable[..., Any]] | None, levels_to_coarsen: Iterable[int] | None
) -> Levels | None:
    """Returns the `Levels` for two arguments of `LayerParallel`; None if no state is to become coarser.

    Raises:
        ValueError: only one of the two is given, or a level is invalid.
        TypeError: there are not exactly three functions.
    """
    levels = None if levels_to_coarsen is None else _whole(levels_to_coarsen)
    if spatial_ref_funcs is None:
        if levels:
            raise ValueError(
                f"LayerParallel(levels_to_coarsen={levels}) but no spatial_ref_funcs; also give {_FUNCTIONS}, or leave the levels out"
            )
        return None
    functions = list(spatial_ref_funcs)
    if len(functions) != 3 or not all(callable(function) for function in functions):
        raise TypeError(
            f"LayerParallel(spatial_ref_funcs=...) has {len(functions)} {'entry' if len(functions) == 1 else 'entries'}; give three functions: coarsen(tensor, level), "
            "refine(tensor, level), and shape(list of lengths, level), the shape that coarsen returns for such a tensor"
        )
    if levels is None:
        raise ValueError(
            f"LayerParallel({_FUNCTIONS}) but no levels_to_coarsen; give the levels, such as [0] for the step from the finest level to the next"
        )
    return Levels(functions, levels) if levels else None


def _whole(given: Iterable[int]) -> list[int]:
    try:
        levels = sorted({operator.index(level) for level in given})
    except TypeError:
        levels = [-1]
    if any(level < 0 for level in levels):
        raise ValueError(
            f"LayerParallel(levels_to_coarsen={given!r}): give a list of levels of at least 0, where 0 is the step from the finest level to the next"
        )
    return levels


def _called(name: str, shape: Sequence[int], level: int, call: Callable[[], Any]) -> Any:
    try:
        return call()
    except Exception as error:
        raise RuntimeError(
            f"{_FUNCTIONS}: {name} failed on level {level} with a tensor {list(shape)}: {described(error)}; if a tensor cannot be coarsened, the function must return its argument unchanged"
        ) from error
