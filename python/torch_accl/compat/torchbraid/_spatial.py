"""States that become coarser between levels, as torchbraid's users say it: three functions that are told the level, and the levels.

Owns what they mean as a `Spatial` of `torch_accl.layer_parallel`, whose functions are not told where they are. When they are called is that one's matter.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from ...layer_parallel import Spatial
from ...layer_parallel._failures import described
from ...layer_parallel._solve import Solver
from ...layer_parallel._tree import Form, is_state

__all__ = ["Levels", "levels_of"]

# The shapes of the tensors of a state.
_Shapes = tuple[torch.Size, ...]

_FUNCTIONS = "spatial_ref_funcs=(coarsen, refine, shape)"


class Levels:
    """torchbraid's functions as what makes states coarser on each of `levels`, which are sorted: 0 is the way from the finest level to the next.

    `coarsen` and `refine` are called for each tensor of a state, with the level. Which one that is is known by the shapes; where states of several levels look alike,
    the functions have to do the same on all of these.
    """

    def __init__(self, functions: Sequence[Callable[..., Any]], levels: Sequence[int]) -> None:
        self._coarsen, self._refine, self._shape = functions
        self.levels = list(levels)
        # Of the net, when there is one: it knows the states of its finest level.
        self.solver: Solver | None = None
        # By shapes: how often a state that looks so may have become coarser already.
        self._meshes: dict[_Shapes, set[int]] = {}
        # Of which batches the states are among these.
        self._seen: list[Sequence[Form]] = []

    def spatial(self) -> Spatial:
        """For a net."""
        return Spatial(self.coarsen, self.refine)

    # ---- what a net calls

    def coarsen(self, x: Any) -> Any:
        """A state on the next coarser mesh."""
        shapes = _shapes_of(x)
        meshes = self._meshes_of(shapes)
        found = self._alike(
            "coarsen", shapes, meshes, lambda level: pytree.tree_map(lambda leaf: self._coarser(leaf, level), x)
        )
        self._meshes.setdefault(_shapes_of(found), set()).update(mesh + 1 for mesh in meshes)
        return found

    def refine(self, x: Any, like: Any) -> Any:
        """A state on the next finer mesh, where states look like `like`."""
        meshes = self._meshes_of(_shapes_of(like))

        def finer(level: int) -> Any:
            leaves, tree = pytree.tree_flatten(x)
            others = pytree.tree_leaves(like)
            # Whole numbers are known there.
            pairs = [(leaf, other) for leaf, other in zip(leaves, others)]
            found = [self._finer(leaf, level) if is_state(leaf) else other for leaf, other in pairs]
            return pytree.tree_unflatten(found, tree)

        return self._alike("refine", _shapes_of(x), meshes, finer)

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
                f"{_FUNCTIONS}: shape returned {said!r} of {given} on level {level}; return a list of lengths"
            ) from None
        if not isinstance(found, Tensor) or list(found.shape) != wanted:
            shown = list(found.shape) if isinstance(found, Tensor) else type(found).__name__
            raise ValueError(
                f"{_FUNCTIONS}: of a state {given} on level {level} coarsen returned {shown}, and shape said {wanted}; let both say the same"
            )
        return found

    def _finer(self, leaf: Tensor, level: int) -> Any:
        return _called("refine", list(leaf.shape), level, lambda: self._refine(leaf, level))

    # ---- where a state is

    def _meshes_of(self, shapes: _Shapes) -> list[int]:
        known = [] if self.solver is None else [forms for forms, _ in self.solver._forms.values()]
        if len(known) != len(self._seen) or any(one is not other for one, other in zip(known, self._seen)):
            self._seen = list(known)
            for form in {form for forms in known for form in forms}:
                self._meshes.setdefault(tuple(leaf.shape for leaf in form.leaves), set()).add(0)
        # Of the coarsest mesh nobody asks.
        return sorted(mesh for mesh in self._meshes.get(shapes, ()) if mesh < len(self.levels)) or [0]

    def _alike(self, name: str, shapes: _Shapes, meshes: Sequence[int], call: Callable[[int], Any]) -> Any:
        """What all levels give that a state may be on."""
        levels = [self.levels[mesh] for mesh in meshes]
        found = call(levels[0])
        for level in levels[1:]:
            if not _is_same(found, call(level)):
                shown = " and ".join(str(list(shape)) for shape in shapes)
                raise NotImplementedError(
                    f"{_FUNCTIONS}: {name} does on level {level} with a state {shown} something else than on level {levels[0]}, and states of both levels look like "
                    "that; let it do the same on these levels, or let their states have different shapes"
                )
        return found


def levels_of(
    spatial_ref_funcs: Sequence[Callable[..., Any]] | None, levels_to_coarsen: Iterable[int] | None
) -> Levels | None:
    """What two arguments of `LayerParallel` mean; None where no state is to become coarser.

    Raises:
        ValueError: one is given and not the other, or there are levels that cannot be.
        TypeError: the functions are not three.
    """
    levels = None if levels_to_coarsen is None else _whole(levels_to_coarsen)
    if spatial_ref_funcs is None:
        if levels:
            raise ValueError(
                f"LayerParallel(levels_to_coarsen={levels}) and no spatial_ref_funcs; give {_FUNCTIONS} as well, or leave the levels away"
            )
        return None
    functions = list(spatial_ref_funcs)
    if len(functions) != 3 or not all(callable(function) for function in functions):
        raise TypeError(
            f"LayerParallel(spatial_ref_funcs=...) has {len(functions)} {'entry' if len(functions) == 1 else 'entries'}; give three functions: coarsen(tensor, level), "
            "refine(tensor, level), and shape(list of lengths, level), the shape that coarsen makes of such a tensor"
        )
    if levels is None:
        raise ValueError(
            f"LayerParallel({_FUNCTIONS}) and no levels_to_coarsen; give the levels, as [0] for the way from the finest level to the next"
        )
    return Levels(functions, levels) if levels else None


def _whole(given: Iterable[int]) -> list[int]:
    try:
        levels = sorted({operator.index(level) for level in given})
    except TypeError:
        levels = [-1]
    if any(level < 0 for level in levels):
        raise ValueError(
            f"LayerParallel(levels_to_coarsen={given!r}): give a list of levels from 0, the way from the finest level to the next"
        )
    return levels


def _called(name: str, shape: Sequence[int], level: int, call: Callable[[], Any]) -> Any:
    try:
        return call()
    except Exception as error:
        raise RuntimeError(
            f"{_FUNCTIONS}: {name} failed on level {level} with a tensor {list(shape)}: {described(error)}; of what cannot be made coarser, it returns what it is given"
        ) from error


def _shapes_of(x: Any) -> _Shapes:
    return tuple(leaf.shape for leaf in pytree.tree_leaves(x) if isinstance(leaf, Tensor))


def _is_same(one: Any, other: Any) -> bool:
    return all(
        torch.equal(a, b) or torch.equal(a.nan_to_num(), b.nan_to_num())
        if isinstance(a, Tensor) and isinstance(b, Tensor) and a.shape == b.shape
        else a is b
        for a, b in zip(pytree.tree_leaves(one), pytree.tree_leaves(other))
    )
