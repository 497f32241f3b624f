"""States that become coarser themselves on coarser levels: fewer pixels, or fewer elements.

Owns how a state gets to another mesh and back, and what it looks like there. On which levels it does is in `_cycle.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from ._net import States, states_of
from ._tree import Form, Leaf, form_of, ordered, zeros

__all__ = ["Meshes", "Spatial"]


@dataclass(frozen=True)
class Spatial:
    """How states become coarser and finer.

    coarsen: from a state to one with fewer elements; what there is nothing to be made coarser of, as the output of a tail, it returns as it is.
    refine: `refine(x, like)`, the other way: x as a state that looks like `like`, whose values do not count. Both should be linear; of differences and cotangents they are
        called as well as of states. Whole numbers and bools among the leaves are made coarser by `coarsen`, and those that `refine` returns do not count.
    """

    coarsen: Callable[[Any], Any]
    refine: Callable[[Any, Any], Any]

    # What a net asks; `mesh` is the finer one of both, and 0 the finest.

    def to_coarser(self, x: Any, mesh: int) -> Any:
        """A state on the next coarser mesh."""
        return self.coarsen(x)

    def to_finer(self, x: Any, like: Any, mesh: int) -> Any:
        """A state on the next finer mesh."""
        return self.refine(x, like)


class Meshes:
    """What the states of all points look like on each mesh, and the way from one to the other."""

    def __init__(self, spatial: Spatial | None, forms: Sequence[Form], count: int, device: torch.device) -> None:
        self._spatial = spatial
        self._device = device
        # By mesh, then by point.
        self.forms: list[Sequence[Form]] = [forms]
        for mesh in range(count):
            known = {form: self._coarser_form(form, mesh) for form in dict.fromkeys(self.forms[-1])}
            self.forms.append([known[form] for form in self.forms[-1]])

    def _coarser_form(self, form: Form, mesh: int) -> Form:
        made, _, _ = form_of(self._coarser(form.joined(*zeros(form, self._device)), mesh), "what `coarsen` returned")
        # Under autocast states may come out narrower; they stay what they are.
        leaves = tuple(
            replace(leaf, dtype=like.dtype) if leaf.is_state and like.is_state else leaf
            for leaf, like in zip(made.leaves, form.leaves)
        )
        if made.tree != form.tree or [leaf.dtype for leaf in leaves] != [leaf.dtype for leaf in form.leaves]:
            text = f"`coarsen` made {made} of {form}; return as many leaves, with values of the same types"
            raise ValueError(text)
        return Form(leaves, made.tree)

    def _coarser(self, x: Any, mesh: int) -> Any:
        if self._spatial is None:
            raise ValueError(
                "Cycle(coarser=...) and no `spatial`; give the net functions that make states coarser and finer"
            )
        with torch.no_grad():
            return self._spatial.to_coarser(x, mesh)

    def form(self, point: int, mesh: int) -> Form:
        """Of the state of a point."""
        return self.forms[mesh][point]

    def coarsened(self, point: int, mesh: int, states: States, constants: States) -> tuple[States, States]:
        """States and constants on the next coarser mesh than the one that is given."""
        before, after = self.forms[mesh][point], self.forms[mesh + 1][point]
        found = self._coarser(before.joined(states, constants), mesh)
        return _worked(found, after, states, f"`coarsen`, of the state of point {point},")

    def refined(self, point: int, mesh: int, states: States, constants: States) -> States:
        """States on the next finer mesh than the one that is given."""
        assert self._spatial is not None
        before, after = self.forms[mesh][point], self.forms[mesh - 1][point]
        like = after.joined(*(self._nothing(leaves) for leaves in (after.states, after.constants)))
        with torch.no_grad():
            found = self._spatial.to_finer(before.joined(states, constants), like, mesh - 1)
        return _worked(found, after, states, f"`refine`, of the state of point {point},")[0]

    def _nothing(self, leaves: Sequence[Leaf]) -> States:
        """Zeros that take no room, and cannot be written to."""
        return [torch.zeros((), dtype=leaf.dtype, device=self._device).expand(leaf.shape) for leaf in leaves]


def _worked(returned: Any, form: Form, like: States, who: str) -> tuple[States, States]:
    """What a function returned of states that are worked on in wider types than the net's."""
    types = iter(state.dtype for state in like)
    wide = Form(tuple(replace(leaf, dtype=next(types)) if leaf.is_state else leaf for leaf in form.leaves), form.tree)
    states, constants = states_of(returned, wide, who, may_be_states=False)
    # Under autocast it may be narrower.
    return [ordered(state.to(leaf.dtype), leaf) for state, leaf in zip(states, wide.states)], constants
