"""Evaluating layers: for now, for good, and the other way.

Owns what surrounds a call of a layer: its random numbers, its buffers, the graph of an evaluation for good, and the gradients that come of it.
Which layer is evaluated at what, and when, is in the plan.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils import _pytree as pytree

from ._blocks import Kind, draw_from, mixed
from ._tree import Form, Leaf, form_of, ordered

__all__ = ["Evaluation", "Layers", "Parameters", "States", "form_returned", "keep_freed_memory", "states_of"]


States = list[Tensor]

# Just below what glibc learns from.
_KEPT_BYTES = (32 << 20) - (1 << 16)


# Those that want a gradient, each once, and for each layer the names and places of its own.
Parameters = tuple[list[Tensor], dict[int, list[tuple[str, int]]]]


@dataclass
class Record:
    """What evaluating a layer for good has left for its adjoint."""

    inputs: States
    outputs: States
    parameters: list[Tensor]
    slots: list[int]


class Layers:
    """The layers of one rank."""

    def __init__(self, holder: nn.ModuleDict, kinds: Sequence[Kind], dt: float, seed: int) -> None:
        self._holder = holder
        self.kinds = kinds
        self.dt = dt
        self.seed = seed

    @property
    def modules(self) -> dict[int, nn.Module]:
        """By their numbers, as they are now: somebody may have put another one in a place."""
        return {int(number): module for number, module in self._holder.items()}

    def state(self) -> int:
        """What the types and shapes depend on that layers return: another number is another state."""
        return hash(
            tuple(
                (
                    module.training,
                    *(parameter.dtype for parameter in module._parameters.values() if parameter is not None),
                )
                for module in self._holder.modules()
            )
        )

    def check(self) -> None:
        """Raises for what would leave parameters without gradients."""
        fsdp = sys.modules.get("torch.distributed.fsdp")
        kind = getattr(fsdp, "FSDPModule", None)
        for number, layer in self._holder.items():
            if kind is not None and any(isinstance(module, kind) for module in layer.modules()):
                raise TypeError(
                    f"layer {number} is in fully_shard by itself; give the whole net to fully_shard, and none of its layers"
                )

    def parameters(self) -> Parameters:
        """Those that want a gradient, each once, and for each layer the names and places of its own."""
        places: dict[int, int] = {}
        found: list[Tensor] = []
        of_layer: dict[int, list[tuple[str, int]]] = {}
        for layer, module in self.modules.items():
            mine = of_layer[layer] = []
            for name, parameter in module.named_parameters():
                if parameter.requires_grad:
                    if id(parameter) not in places:
                        places[id(parameter)] = len(found)
                        found.append(parameter)
                    mine.append((name, places[id(parameter)]))
        return found, of_layer


class Evaluation:
    """What one batch does with the layers of a rank."""

    def __init__(
        self,
        layers: Layers,
        found: Parameters,
        key: tuple[int, ...],
        device: torch.device,
        *,
        is_recorded: bool,
        leaves_no_trace: bool = False,
    ) -> None:
        self.layers = layers
        self.leaves_no_trace = leaves_no_trace
        self.modules = layers.modules
        self.device = device
        self.is_recorded = is_recorded
        self.found = found
        self.parameters, self._of_layer = found
        self.gradients: list[Tensor | None] = [None] * len(self.parameters)
        self.tape: dict[tuple[int, int], Record] = {}
        self.key = key
        self._key = mixed(layers.seed, *key)
        self._buffered: dict[int, bool] = {}

    # ---- forward

    def for_now(self, layer: int, span: int, micro_batch: int, form: Form, states: States, constants: States) -> Any:
        """What a layer returns; it leaves no trace."""
        module = self.modules[layer]
        with torch.no_grad(), self._random(layer, micro_batch):
            arguments = self._arguments(layer, span, form, states, constants)
            if self._has_buffers(layer):
                copies = {name: buffer.clone() for name, buffer in module.named_buffers()}
                return functional_call(module, copies, arguments)
            return module(*arguments)

    def for_good(self, layer: int, micro_batch: int, form: Form, states: States, constants: States) -> Any:
        """What a layer returns, with the graph that its adjoint needs if there will be one."""
        module = self.modules[layer]
        with self._random(layer, micro_batch):
            if not self.is_recorded:
                with torch.no_grad():
                    return module(*self._arguments(layer, 1, form, states, constants))
            inputs = [state.detach().requires_grad_() for state in states]
            own = self._of_layer[layer]
            parameters = [self.parameters[slot] for _, slot in own]
            with torch.enable_grad():
                arguments = self._arguments(layer, 1, form, inputs, constants)
                # A hook of a parameter is for the gradient that it gets in the end, and for no part of it.
                others: dict[str, Tensor] = {}
                if any(parameter._backward_hooks for parameter in parameters):
                    parameters = [parameter.detach().requires_grad_() for parameter in parameters]
                    others = {name: alias for (name, _), alias in zip(own, parameters)}
                if self.leaves_no_trace and self._has_buffers(layer):
                    others |= {name: buffer.clone() for name, buffer in module.named_buffers()}
                returned = functional_call(module, others, arguments) if others else module(*arguments)
            self.tape[layer, micro_batch] = Record(inputs, [], parameters, [slot for _, slot in own])
            return returned

    def keep(self, layer: int, micro_batch: int, outputs: States) -> States:
        """Takes over what was returned for good, once it is known to be in order; gives it without the graph."""
        record = self.tape.get((layer, micro_batch))
        if record is None:
            return outputs
        record.outputs = outputs
        return [output.detach() for output in outputs]

    def _arguments(self, layer: int, span: int, form: Form, states: States, constants: States) -> tuple[Any, ...]:
        given = [ordered(state.to(leaf.dtype), leaf) for state, leaf in zip(states, form.states)]
        state = form.joined(given, constants)
        return (state, span * self.layers.dt) if self.layers.kinds[layer] == "timed" else (state,)

    def _has_buffers(self, layer: int) -> bool:
        if layer not in self._buffered:
            self._buffered[layer] = next(self.modules[layer].buffers(), None) is not None
        return self._buffered[layer]

    @contextmanager
    def _random(self, layer: int, micro_batch: int) -> Iterator[None]:
        # The generator of the CPU is put back when the solve is over.
        draw_from(mixed(self._key, layer, micro_batch), has_cuda=self.device.type == "cuda")
        yield

    # ---- the other way

    def pulled_back(self, layer: int, micro_batch: int, cotangents: States, *, is_final: bool) -> States:
        """The vector-Jacobian product of a layer; for good, its parameters get their gradients."""
        record = self.tape[layer, micro_batch]
        wanted = record.inputs + record.parameters if is_final else record.inputs
        outputs, given = [], []
        for output, cotangent in zip(record.outputs, cotangents):
            if output.requires_grad:
                outputs.append(output)
                given.append(cotangent.to(output.dtype))
        found: Sequence[Tensor | None] = [None] * len(wanted)
        if outputs and wanted:
            found = torch.autograd.grad(outputs, wanted, given, retain_graph=True, allow_unused=True)
        if is_final:
            self._add(layer, record.slots, found[len(record.inputs) :])
        states = zip(record.inputs, found)
        return [torch.zeros_like(state) if gradient is None else gradient for state, gradient in states]

    def _add(self, layer: int, slots: Sequence[int], found: Sequence[Tensor | None]) -> None:
        # The plan goes from the increment to the state by a product that the layer does not know of.
        scale = self.layers.dt if self.layers.kinds[layer] == "ode" else 1.0
        for slot, gradient in zip(slots, found):
            if gradient is None:
                continue
            if scale != 1.0:
                gradient = gradient * scale
            before = self.gradients[slot]
            self.gradients[slot] = gradient if before is None else before + gradient

    def gradients_of(self, layer: int) -> list[Tensor | None]:
        """Those of a layer's parameters; of what several layers share, those of the first."""
        first: dict[int, int] = {}
        for other, own in self._of_layer.items():
            for _, slot in own:
                first.setdefault(slot, other)
        return [self.gradients[slot] for _, slot in self._of_layer.get(layer, []) if first[slot] == layer]

    def forget(self, layer: int, micro_batch: int) -> None:
        """Lets the graph of a layer go."""
        self.tape.pop((layer, micro_batch), None)


@functools.cache
def keep_freed_memory() -> None:
    """States come and go by the hundred. glibc gives each back to the system, page by page, until it has seen a larger block freed: from then on it keeps
    up to twice as much, 64 MiB at most, and a batch takes a tenth less time. Whoever has freed a tensor of 30 MB has that already.
    """
    torch.empty(_KEPT_BYTES, dtype=torch.uint8)


def states_of(returned: Any, form: Form, who: str, *, may_be_states: bool) -> tuple[States, States]:
    """The states and constants of what a layer has returned, which must look like `form`; with `may_be_states` it may be that of its states alone."""
    states, constants = [], []
    for leaf, like in _matched(returned, form, who, may_be_states=may_be_states):
        if not isinstance(leaf, Tensor):
            if may_be_states and not like.is_state:
                continue
            raise TypeError(f"{who} returned {type(leaf).__name__}, where a tensor {like} was planned")
        if leaf.layout != torch.strided:
            raise TypeError(f"{who} returned a tensor of layout {leaf.layout}, and states are dense")
        if leaf.shape != like.shape:
            if may_be_states and not like.is_state:
                continue
            raise ValueError(f"{who} returned the shape {list(leaf.shape)}, and {list(like.shape)} was planned")
        if not like.is_state:
            if leaf.dtype == like.dtype:
                constants.append(leaf)
            elif not may_be_states:
                raise TypeError(f"{who} returned {leaf.dtype}, and {like.dtype} was planned")
            continue
        if leaf.dtype != like.dtype and torch.promote_types(leaf.dtype, like.dtype) != like.dtype:
            raise TypeError(f"{who} returned {leaf.dtype}, and {like.dtype} was planned")
        states.append(leaf)
    # An increment says nothing of whole numbers.
    return states, [] if may_be_states else constants


def _matched(returned: Any, form: Form, who: str, *, may_be_states: bool) -> list[tuple[Any, Leaf]]:
    """The leaves of what was returned, with what they are to be like."""
    leaves, tree = pytree.tree_flatten(returned)
    if tree == form.tree:
        return list(zip(leaves, form.leaves))
    if may_be_states and isinstance(returned, Tensor) and len(form.states) == 1:
        return [(returned, form.states[0])]
    # By their names or places, in whatever order.
    found = dict(pytree.tree_flatten_with_path(returned)[0])
    planned = dict(pytree.tree_flatten_with_path(pytree.tree_unflatten(list(form.leaves), form.tree))[0])
    if may_be_states and found.keys() != planned.keys():
        planned = {path: leaf for path, leaf in planned.items() if leaf.is_state}
    if found.keys() != planned.keys():
        raise TypeError(f"{who} returned another structure than planned: {tree}, and it is to be {form.tree}")
    return [(found[path], leaf) for path, leaf in planned.items()]


def form_returned(returned: Any, layer: int, name: str) -> Form:
    """The form of what a plain layer has returned."""
    return form_of(returned, f"what layer {layer} ({name}) returned")[0]
