"""States that become coarser on coarser levels: fewer pixels, or fewer elements.

Owns the transfer of a state to another mesh and back, and its form there. `_solve/cycle.py` says on which levels states
become coarser.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from .evaluation import States, states_of
from .tree import Form, Leaf, form_of, ordered, zeros

__all__ = ["Meshes", "Spatial"]


@dataclass(frozen=True)
class Spatial:
    """Functions that make states coarser and finer.

    coarsen: returns a state with fewer elements. It returns a state that it cannot make coarser, such as the output of
        a tail, unchanged.
    refine: `refine(x, like)`, the opposite direction: returns x as a state with the form of `like`. The values of
        `like` have no meaning.

    Both functions should be linear, because they are also called with differences and cotangents. `coarsen` also makes
    integer and bool leaves coarser; those that `refine` returns are ignored.
    """

    coarsen: Callable[[Any], Any]
    refine: Callable[[Any, Any], Any]

    # A net calls these methods. `mesh` is the finer of both meshes; 0 is the finest of all.

    def to_coarser(self, x: Any, mesh: int) -> Any:
        """Returns a state on the next coarser mesh."""
        return self.coarsen(x)

    def to_finer(self, x: Any, like: Any, mesh: int) -> Any:
        """Returns a state on the next finer mesh."""
        return self.refine(x, like)


class Meshes:
    """The form of all points' states on each mesh, and the transfer between meshes."""

    def __init__(self, spatial: Spatial | None, forms: Sequence[Form], count: int, device: torch.device) -> None:
        self._spatial = spatial
        self._device = device
        # By mesh, then by point.
        self.forms: list[Sequence[Form]] = [forms]
        for mesh in range(count):
            known = {form: self._coarser_form(form, mesh) for form in dict.fromkeys(self.forms[-1])}
            self.forms.append([known[form] for form in self.forms[-1]])

    def _coarser_form(self, form: Form, mesh: int) -> Form:
        made, _, _ = form_of(self._coarser(form.joined(*zeros(form, self._device)), mesh), "the result of `coarsen`")
        # Under autocast, `coarsen` may return narrower dtypes. States keep their dtypes.
        leaves = tuple(
            replace(leaf, dtype=like.dtype) if leaf.is_state and like.is_state else leaf
            for leaf, like in zip(made.leaves, form.leaves)
        )
        if made.tree != form.tree or [leaf.dtype for leaf in leaves] != [leaf.dtype for leaf in form.leaves]:
            text = f"`coarsen` returned {made} for {form}; return the same number of leaves with the same dtypes"
            raise ValueError(text)
        return Form(leaves, made.tree)

    def _coarser(self, x: Any, mesh: int) -> Any:
        if self._spatial is None:
            raise ValueError(
                "Cycle(coarser=...) but no `spatial`; give the net functions that coarsen and refine states"
            )
        with torch.no_grad():
            return self._spatial.to_coarser(x, mesh)

    def form(self, point: int, mesh: int) -> Form:
        """Returns the form of a point's state on a mesh."""
        return self.forms[mesh][point]

    def coarsened(self, point: int, mesh: int, states: States, constants: States) -> tuple[States, States]:
        """Returns states and constants on the mesh that is next coarser than `mesh`."""
        before, after = self.forms[mesh][point], self.forms[mesh + 1][point]
        found = self._coarser(before.joined(states, constants), mesh)
        return _worked(found, after, states, f"`coarsen` of the state of point {point}")

    def refined(self, point: int, mesh: int, states: States, constants: States) -> States:
        """Returns states on the mesh that is next finer than `mesh`."""
        assert self._spatial is not None
        before, after = self.forms[mesh][point], self.forms[mesh - 1][point]
        like = after.joined(*(self._nothing(leaves) for leaves in (after.states, after.constants)))
        with torch.no_grad():
            found = self._spatial.to_finer(before.joined(states, constants), like, mesh - 1)
        return _worked(found, after, states, f"`refine` of the state of point {point}")[0]

    def _nothing(self, leaves: Sequence[Leaf]) -> States:
        """Returns zeros that take no memory and cannot be written to."""
        return [torch.zeros((), dtype=leaf.dtype, device=self._device).expand(leaf.shape) for leaf in leaves]


def _worked(returned: Any, form: Form, like: States, who: str) -> tuple[States, States]:
    """Returns the states and constants of a function's result.

    States may be computed in wider dtypes than the net's.
    """
    types = iter(state.dtype for state in like)
    wide = Form(tuple(replace(leaf, dtype=next(types)) if leaf.is_state else leaf for leaf in form.leaves), form.tree)
    states, constants = states_of(returned, wide, who, may_be_states=False)
    # Under autocast, the result may be narrower.
    return [ordered(state.to(leaf.dtype), leaf) for state, leaf in zip(states, wide.states)], constants
