"""Side inputs: inputs of several layers in addition to the state, such as a mask or the memory of an encoder.

Owns which layer takes which side inputs, how they reach all ranks, and the sum of their gradients over all layers. The
first rank gives them. A layer takes those whose names its `forward` has as arguments, after the arguments of a step.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from inspect import Parameter, signature
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from .._ranks.wire import Wire
from .evaluation import Extra, LayerInputs, Layers, States
from .tree import Form, Leaf, form_of, is_state, ordered

__all__ = ["NO_SIDE", "Side", "SideForm", "names_of_layers", "names_taken", "side_of"]


# Arguments that may be given by their names, and arguments that may be given by their places.
_BY_NAME = (Parameter.POSITIONAL_OR_KEYWORD, Parameter.KEYWORD_ONLY)
_BY_PLACE = (Parameter.POSITIONAL_OR_KEYWORD, Parameter.POSITIONAL_ONLY)


@dataclass(frozen=True)
class SideForm:
    """The form of a batch's side inputs, known to all ranks."""

    names: tuple[str, ...] = ()
    # For each name, the tree structure and its leaves.
    trees: tuple[pytree.TreeSpec, ...] = ()
    leaves: tuple[tuple[Leaf, ...], ...] = ()
    # For each leaf, whether it wants a gradient.
    wants: tuple[tuple[bool, ...], ...] = ()

    def flat(self) -> list[tuple[int, Leaf, bool]]:
        """Returns all leaves: index of the name, form, and whether the leaf wants a gradient."""
        return [
            (index, leaf, wants)
            for index, (leaves, wanted) in enumerate(zip(self.leaves, self.wants))
            for leaf, wants in zip(leaves, wanted)
        ]


NO_SIDE = SideForm()


def side_of(side: dict[str, Any] | None) -> tuple[SideForm, States]:
    """Returns the form of the first rank's side inputs, and all their leaves."""
    if not side:
        return NO_SIDE, []
    if not isinstance(side, dict) or not all(isinstance(name, str) for name in side):
        raise TypeError(f"side inputs are {type(side).__name__}; give a dict from argument names to values")
    names = tuple(sorted(side))
    forms: list[Form] = []
    tensors: States = []
    for name in names:
        forms.append(form_of(side[name], f"the side input `{name}`")[0])
        tensors += pytree.tree_leaves(side[name])
    left = iter(tensors)
    wants = tuple(tuple(is_state(leaf) and leaf.requires_grad for _, leaf in zip(form.leaves, left)) for form in forms)
    return SideForm(names, tuple(form.tree for form in forms), tuple(form.leaves for form in forms), wants), tensors


def names_taken(module: nn.Module, names: Collection[str], step_arguments: int) -> frozenset[str]:
    """Returns the names that a layer's `forward` has as arguments, after the first `step_arguments`."""
    if not names:
        return frozenset()
    # A module that wraps another one takes the inputs of the wrapped one.
    module = getattr(module, "_orig_mod", module)
    if around := getattr(module, "stands_around", None):
        return names_taken(around, names, step_arguments)
    try:
        parameters = list(signature(module.forward).parameters.values())
    except (TypeError, ValueError):
        return frozenset()
    by_name = {parameter.name for parameter in parameters if parameter.kind in _BY_NAME}
    # An argument that the step gives cannot have a second value.
    given = {parameter.name for parameter in [each for each in parameters if each.kind in _BY_PLACE][:step_arguments]}
    if any(parameter.kind is Parameter.VAR_KEYWORD for parameter in parameters):
        return frozenset(names) - (given & by_name)
    return frozenset(names) & (by_name - given)


def names_of_layers(layers: Layers, names: Collection[str]) -> dict[int, frozenset[str]]:
    """Returns the names that each layer of this rank takes."""
    kinds = layers.kinds
    return {layer: names_taken(each, names, kinds[layer].step_arguments) for layer, each in layers.modules.items()}


class Side(LayerInputs):
    """The side inputs of one batch on one rank."""

    def __init__(
        self,
        form: SideForm,
        tensors: States,
        taken: Mapping[int, frozenset[str]],
        device: torch.device,
        wire: Wire,
        micro_batches: int,
        per_sample: Collection[str],
    ) -> None:
        self._form = form
        self._flat = form.flat()
        self._micro_batches = micro_batches
        self._per_sample = frozenset(per_sample)
        # The names that each layer takes.
        self._taken = taken
        self._by_micro_batch: list[States] = []
        self._known: dict[tuple[int, int], Extra] = {}
        self._sums: dict[tuple[int, int], Tensor] = {}
        whole = []
        for place, (_, leaf, _) in enumerate(self._flat):
            if wire.rank == 0:
                tensor = ordered(tensors[place].detach().to(device), leaf)
            else:
                tensor = torch.empty(leaf.shape, dtype=leaf.dtype, device=device, memory_format=leaf.format)
            wire.spread(tensor, f"the side input `{form.names[self._flat[place][0]]}`")
            whole.append(tensor)
        self._by_micro_batch = [
            [self._part(tensor, place, micro) for place, tensor in enumerate(whole)] for micro in range(micro_batches)
        ]

    def again(self) -> Side:
        """Returns the same side inputs for a second run, with separate gradients."""
        other = object.__new__(Side)
        other.__dict__ = self.__dict__ | {"_sums": {}}
        return other

    def of(self, layer: int, micro_batch: int) -> Extra | None:
        taken = self._taken[layer]
        if not taken:
            return None
        key = (layer, micro_batch)
        if key not in self._known:
            places = self._places(layer)
            part = self._by_micro_batch[micro_batch]
            wanted = [position for position, place in enumerate(places) if self._flat[place][2]]
            self._known[key] = Extra([part[place] for place in places], self._joining(layer), wanted)
        return self._known[key]

    def add(self, layer: int, micro_batch: int, gradients: Sequence[Tensor | None]) -> None:
        places = [place for place in self._places(layer) if self._flat[place][2]]
        for place, gradient in zip(places, gradients):
            if gradient is None:
                continue
            part = micro_batch if self._is_split(place) else 0
            # Sums have their own memory, in one layout on all ranks. A gradient may be another owner's tensor, in any
            # layout.
            self._sums.setdefault((place, part), self._zero(place, part)).add_(gradient)

    def gradients(self, wire: Wire) -> list[Tensor | None]:
        """Returns the gradients of all floating-point and complex leaves, summed over all layers, on the first rank.

        All ranks call it together.
        """
        found: list[Tensor | None] = []
        for place, (_, leaf, wants) in enumerate(self._flat):
            if not wants:
                found += [None] if leaf.is_state else []
                continue
            parts = range(self._micro_batches if self._is_split(place) else 1)
            sums = [self._sums.get((place, part), self._zero(place, part)) for part in parts]
            total = torch.cat(sums) if len(sums) > 1 else sums[0]
            wire.sum_on_first(total, "the gradient of a side input")
            found.append(total.to(leaf.dtype))
        return found

    def _places(self, layer: int) -> list[int]:
        taken = self._taken[layer]
        return [place for place, (index, _, _) in enumerate(self._flat) if self._form.names[index] in taken]

    def _joining(self, layer: int) -> Callable[[Sequence[Tensor]], tuple[tuple[Any, ...], dict[str, Any]]]:
        form, taken = self._form, self._taken[layer]

        def arguments(leaves: Sequence[Tensor]) -> tuple[tuple[Any, ...], dict[str, Any]]:
            named, left = {}, iter(leaves)
            for name, tree, own in zip(form.names, form.trees, form.leaves):
                if name in taken:
                    named[name] = pytree.tree_unflatten([next(left) for _ in own], tree)
            return (), named

        return arguments

    def _is_split(self, place: int) -> bool:
        return self._micro_batches > 1 and self._form.names[self._flat[place][0]] in self._per_sample

    def _part(self, tensor: Tensor, place: int, micro_batch: int) -> Tensor:
        return tensor.chunk(self._micro_batches)[micro_batch] if self._is_split(place) else tensor

    def _zero(self, place: int, part: int) -> Tensor:
        like = self._by_micro_batch[part][place]
        return torch.zeros(
            like.shape, dtype=torch.complex128 if like.is_complex() else torch.float64, device=like.device
        )
