"""Evaluation of layers: temporary (`evaluate_temporary`), final (`evaluate_final`), and backward (`pulled_back`).

Owns the surroundings of a layer's call: its random numbers, its buffers, the graph of a final evaluation, and its
gradients. The plan decides which layer is evaluated where and when. Subclasses of `LayerInputs` give layers further inputs.
"""

from __future__ import annotations

import functools
import sys
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils import _pytree as pytree

from .blocks import drawing_from, mixed
from .device_numbers import generator_of, has_numbers, seed_devices
from .drawing import Drawing, draw_for
from .kinds import LayerKind
from .layer_sums import LayerSum
from .own_generator import own_generator, warn_of_other_threads
from .tree import Form, Leaf, form_of, ordered

__all__ = [
    "Evaluation",
    "Extra",
    "LayerInputs",
    "Layers",
    "Parameters",
    "Record",
    "States",
    "form_returned",
    "keep_freed_memory",
    "parameter_if_any",
    "parameter_of",
    "states_of",
]


States = list[Tensor]

# Just below 32 MiB, the largest block from whose release glibc adapts its thresholds.
_KEPT_BYTES = (32 << 20) - (1 << 16)


# The parameters that want a gradient, each once, and for each layer the names and indices of its own.
Parameters = tuple[list[Tensor], dict[int, list[tuple[str, int]]]]


@dataclass
class Extra:
    """Inputs of one layer in addition to the state.

    `arguments` makes positional and named arguments from the leaves. The positional arguments come before the state.
    """

    leaves: States
    arguments: Callable[[Sequence[Tensor]], tuple[tuple[Any, ...], dict[str, Any]]]
    # Indices of the leaves that want a gradient.
    wanted: Sequence[int] = ()


class LayerInputs:
    """Inputs of layers in addition to the state. This base class has none."""

    def again(self) -> LayerInputs:
        """Returns the same inputs for a second run of the batch, with separate gradients."""
        return self

    def of(self, layer: int, micro_batch: int) -> Extra | None:
        """Returns the inputs of a layer of this rank, or None."""
        return None

    def add(self, layer: int, micro_batch: int, gradients: Sequence[Tensor | None]) -> None:
        """Takes the gradients of the leaves that want one, once per batch for each layer."""

    def made(self, layer: int, micro_batch: int, states: States) -> None:
        """Receives the state after a layer, from its final evaluation."""

    def source(self, layer: int, micro_batch: int) -> States | None:
        """Returns a gradient of the state after a layer that does not come from the layers after it, or None."""
        return None


@dataclass
class Graph:
    """An evaluation that autograd has recorded."""

    inputs: States
    parameters: list[Tensor]
    extras: list[Tensor]
    outputs: States = field(default_factory=list)

    @property
    def leaves(self) -> list[Tensor]:
        """All tensors that may want a gradient."""
        return self.inputs + self.parameters + self.extras


@dataclass
class Record:
    """Data of a layer's final evaluation that its adjoint needs."""

    states: States
    constants: States
    before: Form
    after: Form
    # The graph of the step itself. None if it is recorded again in the adjoint pass.
    graph: Graph | None = None
    # The graphs of coarse steps, by the number of layers that they span.
    coarse: dict[int, Graph] = field(default_factory=dict)
    # Records on coarser meshes of states. All their graphs are in `coarse`.
    meshes: dict[int, Record] = field(default_factory=dict)
    # Copies of the buffers before the evaluation, if the graph is recorded again.
    buffers: dict[str, Tensor] = field(default_factory=dict)
    versions: list[int] = field(default_factory=list)


class Layers:
    """The layers of one rank."""

    def __init__(self, holder: nn.ModuleDict, kinds: Sequence[LayerKind], dt: float, seed: int) -> None:
        self._holder = holder
        self.kinds = kinds
        self.dt = dt
        self.seed = seed
        # The groups of tied parameters, each by layer and name. `ties.py` adds up their gradients. The first of a group
        # stands for all in sums over parameters.
        self.tied: Sequence[Sequence[tuple[int, str]]] = ()
        # Whether gradients of a parameter that several layers share are added in the order of the layers.
        self.are_added_in_order = False
        # The modules that `state` last saw, and how often it found others in their places.
        self._seen: list[weakref.ref[nn.Module]] = []
        self._changes = 0
        # Layers that drew no random numbers in their final evaluations, as far as seen since `state` last changed. In
        # training a layer may draw, and in evaluation not.
        self.quiet: set[int] = set()
        # Layers whose random numbers no recomputation draws again, as far as seen since `state` last changed.
        self.plainly_drawing: set[int] = set()
        self._state = 0

    @property
    def modules(self) -> dict[int, nn.Module]:
        """The current modules by layer number. A user may have replaced a module."""
        return {int(number): module for number, module in self._holder.items()}

    def state(self) -> int:
        """Returns a hash of all that determines the dtypes, shapes and devices of what layers return."""
        modules = list(self._holder.modules())
        if len(modules) != len(self._seen) or any(seen() is not module for seen, module in zip(self._seen, modules)):
            self._seen = [weakref.ref(module) for module in modules]
            self._changes += 1
        now = hash(
            (
                self._changes,
                *(
                    (
                        module.training,
                        *((t.dtype, t.shape, t.device) for t in module._parameters.values() if t is not None),
                        *((t.dtype, t.shape, t.device) for t in module._buffers.values() if t is not None),
                    )
                    for module in modules
                ),
            )
        )
        if now != self._state:
            self._state = now
            self.plainly_drawing.clear()
            self.quiet.clear()
        return now

    def check(self) -> None:
        """Raises `TypeError` for a layer in `fully_shard` by itself, which would leave parameters without gradients."""
        fsdp = sys.modules.get("torch.distributed.fsdp")
        kind = getattr(fsdp, "FSDPModule", None)
        for number, layer in self._holder.items():
            if kind is not None and any(isinstance(module, kind) for module in layer.modules()):
                raise TypeError(
                    f"layer {number} is sharded by itself; apply fully_shard to the whole net, not to its layers"
                )

    def is_counted(self, layer: int) -> bool:
        """Returns whether this rank contributes a layer to sums over all layers."""
        return True

    def parts(self) -> dict[int, list[nn.Parameter]]:
        """Returns the parameters that this rank contributes to sums over all parameters, by layer, each once."""
        seen = self.not_counted()
        found: dict[int, list[nn.Parameter]] = {}
        for layer, module in self.modules.items():
            found[layer] = []
            for parameter in module.parameters():
                if id(parameter) not in seen:
                    found[layer].append(parameter)
                seen.add(id(parameter))
        return found

    def not_counted(self) -> set[int]:
        """Returns the identities of this rank's parameters for which another of their group stands."""
        modules = self.modules
        found: set[int] = set()
        for group in self.tied:
            first, *others = ([parameter_if_any(modules, *member)] for member in group)
            found |= {id(other) for (other,) in others if other is not None and other is not first[0]}
        return found

    def sums(self, of_layer: Mapping[int, Sequence[tuple[str, int]]], *, is_in_parts: bool) -> dict[int, LayerSum]:
        """Returns the sums of parameters that several layers share or that are tied, by the parameters' indices.

        `is_in_parts`: whether each layer gets its gradient in parts, one for each micro-batch.
        """
        if not self.are_added_in_order:
            return {}
        modules = self.modules
        tied = {
            id(parameter_if_any(modules, *member)) for group in self.tied for member in group if member[0] in modules
        }
        of_slot: dict[int, list[int]] = {}
        waiting: set[int] = set()
        for layer, own in of_layer.items():
            for name, slot in own:
                of_slot.setdefault(slot, []).append(layer)
                if tied and id(parameter_of(modules[layer], name)) in tied:
                    waiting.add(slot)
        return {
            slot: LayerSum(sorted(of_layers), is_eager=not is_in_parts and slot not in waiting)
            for slot, of_layers in of_slot.items()
            if len(of_layers) > 1
        }

    def parameters(self) -> Parameters:
        """Returns the parameters that want a gradient, each once.

        Also returns for each layer the names and indices of its own.
        """
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
    """The evaluations of a rank's layers in one batch."""

    def __init__(
        self,
        layers: Layers,
        found: Parameters,
        key: tuple[int, ...],
        device: torch.device,
        *,
        is_recorded: bool,
        leaves_no_trace: bool = False,
        layer_inputs: LayerInputs | None = None,
        keeps_graph: Callable[[int], bool] | None = None,
        is_in_parts: bool = False,
        autocast: tuple[bool, torch.dtype] | None = None,
    ) -> None:
        """is_in_parts: whether the batch is split into micro-batches.
        autocast: whether autocast is on, and its dtype. None: the settings around this call.
        """
        self.layers = layers
        self.leaves_no_trace = leaves_no_trace
        self.modules = layers.modules
        self.device = device
        self.is_recorded = is_recorded
        self.found = found
        self.parameters, self._of_layer = found
        # The accelerators that layers draw on.
        self._drawn_on = [each for each in {device, *(p.device for p in self.parameters)} if has_numbers(each)]
        self.gradients: list[Tensor | None] = [None] * len(self.parameters)
        self.is_in_parts = is_in_parts
        # Gradients that are still added up over layers, by the index of the parameter.
        self.sums = layers.sums(self._of_layer, is_in_parts=is_in_parts)
        self.tape: dict[tuple[int, int], Record] = {}
        self.key = key
        self.layer_inputs = LayerInputs() if layer_inputs is None else layer_inputs
        # Returns whether a layer's graph is kept until the adjoint pass instead of recorded again there. None: all are
        # kept.
        self.keeps_graph = keeps_graph
        self._key = mixed(layers.seed, *key)
        self._seeds: dict[tuple[int, int], int] = {}
        # The layers that have drawn from our own generator.
        self._drew: set[int] = set()
        # The last evaluation and the generators' states after it. None before the first one; empty once the states were
        # compared.
        self._left: tuple[int, int, States] | tuple[()] | None = None
        # The autocast settings of the forward pass; other settings may be active around the backward pass.
        self.autocast = autocast or (torch.is_autocast_enabled(device.type), torch.get_autocast_dtype(device.type))
        self._buffered: dict[int, bool] = {}

    def as_in_forward(self) -> AbstractContextManager[Any]:
        """Inside the context, autocast is as it was around the forward pass."""
        enabled, dtype = self.autocast
        if not enabled and not torch.is_autocast_enabled(self.device.type):
            # A device's package may support no autocast.
            return nullcontext()
        return torch.autocast(self.device.type, dtype, enabled=enabled)

    # ---- forward

    def evaluate_temporary(
        self, layer: int, span: int, micro_batch: int, form: Form, states: States, constants: States
    ) -> Any:
        """Evaluates a layer without a trace: no graph, no change of its buffers. Returns the layer's result."""
        with torch.no_grad():
            extra = self.layer_inputs.of(layer, micro_batch)
            given = [] if extra is None else extra.leaves
            arguments = self._arguments(layer, span, form, states, constants, extra, given)
            quiet, default = self.layers.quiet, torch.default_generator
            if layer in quiet and own_generator() is not None:
                # The layer has never drawn on the CPU, as most layers never do. A comparison of the generator's state
                # is cheaper than watching every operation.
                self._begin_drawing(layer, micro_batch)
                before = default.get_state()
                returned = self._call(layer, span, *arguments, self._copies(layer))
                if torch.equal(before, default.get_state()):
                    return returned
                # The layer or another thread has drawn. The result is dropped, and the layer is watched from now on.
                quiet.discard(layer)
            with self._drawing(layer, micro_batch):
                return self._call(layer, span, *arguments, self._copies(layer))

    def evaluate_final(
        self, layer: int, micro_batch: int, form: Form, after: Form, states: States, constants: States
    ) -> Any:
        """Evaluates a layer finally, with the graph that its adjoint needs if there will be one.

        Returns the layer's result.
        """
        if not self.is_recorded or not self._keeps(layer):
            with torch.no_grad():
                extra = self.layer_inputs.of(layer, micro_batch)
                arguments = self._arguments(
                    layer, 1, form, states, constants, extra, [] if extra is None else extra.leaves
                )
                buffers = self._copies(layer) if self.is_recorded or self.leaves_no_trace else {}
                others = {name: buffer.clone() for name, buffer in buffers.items()} if self.leaves_no_trace else {}
                with self._drawing(layer, micro_batch, is_final=True):
                    returned = self._call(layer, 1, *arguments, others)
            if self.is_recorded:
                record = Record([state.detach() for state in states], constants, form, after, buffers=buffers)
                record.versions = [0 if state.is_inference() else state._version for state in record.states]
                self.tape[layer, micro_batch] = record
            return returned
        record = Record([state.detach() for state in states], constants, form, after)
        record.graph, returned = self._recorded(layer, 1, micro_batch, record, leaves_trace=not self.leaves_no_trace)
        self.tape[layer, micro_batch] = record
        return returned

    def keep(self, layer: int, micro_batch: int, outputs: States) -> States:
        """Takes over the outputs of a final evaluation once they are checked. Returns them without the graph."""
        record = self.tape.get((layer, micro_batch))
        if record is None or record.graph is None:
            return outputs
        record.graph.outputs = outputs
        return [output.detach() for output in outputs]

    def _keeps(self, layer: int) -> bool:
        return self.keeps_graph is None or self.keeps_graph(layer)

    def _recorded(
        self, layer: int, span: int, micro_batch: int, record: Record, *, leaves_trace: bool
    ) -> tuple[Graph, Any]:
        """Records a step. Returns its graph, whose outputs are not checked yet, and the layer's result."""
        own = self._of_layer[layer]
        graph = Graph(
            [state.detach().requires_grad_() for state in record.states],
            [self.parameters[slot] for _, slot in own],
            [],
        )
        others: dict[str, Tensor] = {}
        # A parameter's hook is for its complete gradient, not for the part that this step adds. Aliases have no hooks.
        if any(parameter._backward_hooks for parameter in graph.parameters):
            graph.parameters = [parameter.detach().requires_grad_() for parameter in graph.parameters]
            others = {name: alias for (name, _), alias in zip(own, graph.parameters)}
        if not leaves_trace:
            # The forward pass may have run in `torch.func.functional_call`, whose parameters have left the module
            # since.
            now = dict(self.modules[layer].named_parameters())
            for (name, _), parameter in zip(own, graph.parameters):
                if now.get(name) is not parameter:
                    others.setdefault(name, parameter)
            kept = {name: buffer.clone() for name, buffer in record.buffers.items()}
            others |= kept or self._copies(layer)
        # A repeated evaluation uses the autocast settings of the first, whatever settings are active around the
        # backward pass.
        with torch.enable_grad(), nullcontext() if leaves_trace else self.as_in_forward():
            extra = self.layer_inputs.of(layer, micro_batch)
            given: States = []
            if extra is not None:
                given = [leaf.detach() for leaf in extra.leaves]
                graph.extras = [given[place].requires_grad_() for place in extra.wanted]
            arguments = self._arguments(layer, span, record.before, graph.inputs, record.constants, extra, given)
            with self._drawing(layer, micro_batch, is_final=leaves_trace, has_graph=True):
                return graph, self._call(layer, span, *arguments, others)

    def _arguments(
        self,
        layer: int,
        span: int,
        form: Form,
        states: States,
        constants: States,
        extra: Extra | None,
        given: Sequence[Tensor],
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        state = form.joined(
            [ordered(state.to(leaf.dtype), leaf) for state, leaf in zip(states, form.states)], constants
        )
        first, named = ((), {}) if extra is None else extra.arguments(given)
        own = self.layers.kinds[layer].arguments(state, span, self.layers.dt)
        if any(isinstance(each, float) for each in own) and _is_compiled(self.modules[layer]):
            own = tuple(
                torch.tensor(each, dtype=torch.float64, device="cpu") if isinstance(each, float) else each
                for each in own
            )
        return (*first, *own), named

    def _call(
        self, layer: int, span: int, arguments: tuple[Any, ...], named: dict[str, Any], others: dict[str, Tensor]
    ) -> Any:
        layer_module = self.modules[layer]
        module = self.layers.kinds[layer].called(layer_module, span)
        if module is not layer_module:
            others = {f"module.{name}": tensor for name, tensor in others.items()}
        return functional_call(module, others, arguments, named) if others else module(*arguments, **named)

    def _copies(self, layer: int) -> dict[str, Tensor]:
        """Returns copies of a layer's buffers, for an evaluation that must not change them."""
        if layer not in self._buffered:
            self._buffered[layer] = next(self.modules[layer].buffers(), None) is not None
        if not self._buffered[layer]:
            return {}
        return {name: buffer.clone() for name, buffer in self.modules[layer].named_buffers()}

    @contextmanager
    def _drawing(
        self, layer: int, micro_batch: int, *, is_final: bool = False, has_graph: bool = False
    ) -> Iterator[None]:
        """Inside the context, a layer draws its own random numbers of this batch."""
        self._look_for_other_threads(layer, micro_batch)
        seed = self._begin_drawing(layer, micro_batch)
        if own_generator() is not None and any(_is_compiled(module) for module in self.modules[layer].modules()):
            # Operations of a compiled module cannot be watched one by one. While it runs, the default generator has the
            # layer's seed.
            before = torch.default_generator.get_state()
            torch.default_generator.manual_seed(seed)
            try:
                yield
            finally:
                torch.default_generator.set_state(before)
            return
        plain = self.layers.plainly_drawing
        with drawing_from(seed, has_graph=has_graph, is_followed=has_graph and layer not in plain) as numbers:
            try:
                yield
            finally:
                if has_graph and numbers is not None:
                    (plain.discard if numbers.is_recomputed else plain.add)(layer)
        self._left = (layer, micro_batch, self._default_states()) if self._left is None else ()
        if numbers is None:
            return
        if numbers.has_drawn:
            self._drew.add(layer)
            self.layers.quiet.discard(layer)
        elif is_final and layer not in self._drew:
            self.layers.quiet.add(layer)

    def _begin_drawing(self, layer: int, micro_batch: int) -> int:
        """Seeds the layer and returns the seed. The end of the solve restores the changed state."""
        seed = self._seeds.get((layer, micro_batch))
        if seed is None:
            seed = self._seeds[layer, micro_batch] = mixed(self._key, layer, micro_batch)
        draw_for(Drawing(self._key, layer, micro_batch))
        seed_devices(self._drawn_on, seed)
        return seed

    def _look_for_other_threads(self, layer: int, micro_batch: int) -> None:
        """Warns if another thread draws: our code draws nothing between a layer and the next one.

        Two states are compared once per batch, which is cheap.
        """
        if not self._left:
            return
        before, part, states = self._left
        if (before + 1, micro_batch) == (layer, part):
            if any(not torch.equal(old, new) for old, new in zip(states, self._default_states())):
                warn_of_other_threads()
            self._left = ()
        else:
            # Not the next layer: wait for another pair.
            self._left = None

    def _default_states(self) -> States:
        """Returns the states of the default generators that layers draw from."""
        states = [] if own_generator() is not None else [torch.default_generator.get_state()]
        return [*states, *(generator_of(device).get_state() for device in self._drawn_on)]

    # ---- backward

    def pulled_back(
        self,
        layer: int,
        span: int,
        micro_batch: int,
        cotangents: States,
        *,
        is_final: bool,
        there: Record | None = None,
    ) -> States:
        """Returns the vector-Jacobian product of a layer, or of the layer on a coarser mesh (`there`).

        If `is_final`, the layer's parameters get their gradients.
        """
        record = self.tape[layer, micro_batch] if there is None else there
        source = self.layer_inputs.source(layer, micro_batch)
        if source is not None:
            # A coarse step gets the sources of all states that it spans, as if they were equal.
            cotangents = [cotangent + span * more for cotangent, more in zip(cotangents, source)]
        graph = self.graph_of(layer, span, micro_batch, record, is_kept=there is not None)
        wanted = graph.leaves if is_final else graph.inputs
        outputs, given = [], []
        for output, cotangent in zip(graph.outputs, cotangents):
            if output.requires_grad:
                outputs.append(output)
                given.append(cotangent.to(output.dtype))
        found: Sequence[Tensor | None] = [None] * len(wanted)
        if outputs and wanted:
            found = torch.autograd.grad(outputs, wanted, given, retain_graph=True, allow_unused=True)
        if is_final:
            first, last = len(graph.inputs), len(graph.inputs) + len(graph.parameters)
            self._add(layer, [slot for _, slot in self._of_layer[layer]], found[first:last])
            if graph.extras:
                scale = self._weight(layer)
                extras = [gradient if gradient is None or scale == 1 else gradient * scale for gradient in found[last:]]
                self.layer_inputs.add(layer, micro_batch, extras)
        states = zip(graph.inputs, found)
        return [torch.zeros_like(state) if gradient is None else gradient for state, gradient in states]

    def graph_of(self, layer: int, span: int, micro_batch: int, record: Record, *, is_kept: bool = False) -> Graph:
        """Returns the graph of a step or a coarse step, at the state of the layer's final evaluation."""
        known = record.coarse.get(span) or (record.graph if span == 1 else None)
        if known is not None:
            return known
        if record.versions and record.versions != [0 if s.is_inference() else s._version for s in record.states]:
            raise RuntimeError(
                "its input was changed in place before the backward pass, which evaluates the layer again"
            )
        graph, returned = self._recorded(layer, span, micro_batch, record, leaves_trace=False)
        what = f"layer {layer}, evaluated again for its adjoint,"
        kind = self.layers.kinds[layer]
        graph.outputs, _ = states_of(returned, record.after, what, may_be_states=kind.returns_increment)
        if span > 1 or is_kept:
            record.coarse[span] = graph
        return graph

    def _weight(self, layer: int) -> float:
        """Returns the factor of a layer's gradients. The plan multiplies the layer's result by it, outside of the layer."""
        return self.layers.kinds[layer].weight(self.layers.dt)

    def _add(self, layer: int, slots: Sequence[int], found: Sequence[Tensor | None]) -> None:
        scale = self._weight(layer)
        for slot, gradient in zip(slots, found):
            if gradient is None:
                continue
            if scale != 1.0:
                gradient = gradient * scale
            if slot in self.sums:
                self.sums[slot].add(layer, gradient)
                continue
            before = self.gradients[slot]
            self.gradients[slot] = gradient if before is None else before + gradient

    def by_layer(self, slot: int, layer: int) -> dict[int, Tensor]:
        """Returns the gradients of a parameter by layer. `layer` is one of its layers."""
        if slot in self.sums:
            return self.sums[slot].by_layer
        gradient = self.gradients[slot]
        return {} if gradient is None else {layer: gradient}

    def add_layers(self) -> None:
        """Completes the gradients of parameters that several layers of this rank share."""
        for slot, of_layers in self.sums.items():
            self.gradients[slot] = of_layers.total()
        self.sums.clear()

    def slot_of(self, layer: int, name: str) -> int | None:
        """Returns the index of a parameter, by any of its names, among the parameters that want a gradient.

        None if it wants none.
        """
        parameter = parameter_of(self.modules[layer], name)
        own = self._of_layer[layer]
        return next((slot for other, slot in own if other == name or self.parameters[slot] is parameter), None)

    def gradients_of(self, layer: int) -> list[Tensor | None]:
        """Returns the gradients of a layer's parameters.

        A parameter that several layers share counts for the first of them, also if they are on several ranks.
        """
        if not self.layers.is_counted(layer):
            return []
        first: dict[int, int] = {}
        for other, own in self._of_layer.items():
            for _, slot in own:
                first.setdefault(slot, other)
        return [
            self.gradients[slot]
            for _, slot in self._of_layer.get(layer, [])
            if first[slot] == layer and id(self.parameters[slot]) not in self._not_counted
        ]

    @functools.cached_property
    def _not_counted(self) -> set[int]:
        return self.layers.not_counted()

    def forget(self, layer: int, micro_batch: int) -> None:
        """Releases the graph of a layer."""
        self.tape.pop((layer, micro_batch), None)


def parameter_if_any(modules: Mapping[int, nn.Module], layer: int, name: str) -> Tensor | None:
    """Returns a layer's parameter. None if the layer is on another rank, or was replaced by one without it."""
    try:
        return parameter_of(modules[layer], name) if layer in modules else None
    except AttributeError:
        return None


def parameter_of(module: nn.Module, name: str) -> Tensor:
    """Returns the parameter with this name.

    Inside `torch.func.functional_call` it is the tensor that replaces the parameter.
    """
    path, _, last = name.rpartition(".")
    found = module.get_submodule(path)._parameters.get(last)
    return module.get_parameter(name) if found is None else found


def _is_compiled(module: nn.Module) -> bool:
    """Returns whether a module is compiled.

    Then numbers among its arguments would be compiled in, with one graph per level.
    """
    inner = getattr(module, "stands_around", None)
    return (
        module._compiled_call_impl is not None
        or hasattr(module, "_orig_mod")
        or (inner is not None and _is_compiled(inner))
    )


@functools.cache
def keep_freed_memory() -> None:
    """Makes glibc keep freed memory, because hundreds of states are allocated and freed in a batch.

    glibc returns each freed block to the system, page by page, until it has seen a larger block freed. From then on it
    keeps up to twice that size, 64 MiB at most, and a batch takes a tenth less time. A process that has freed a tensor
    of 30 MB already has this effect.
    """
    torch.empty(_KEPT_BYTES, dtype=torch.uint8, device="cpu")


def states_of(returned: Any, form: Form, who: str, *, may_be_states: bool) -> tuple[States, States]:
    """Returns the states and constants of a layer's result, which must have the form `form`.

    With `may_be_states`, the result may consist of the states alone.
    """
    states, constants = [], []
    for leaf, like in _matched(returned, form, who, may_be_states=may_be_states):
        if not isinstance(leaf, Tensor):
            if may_be_states and not like.is_state:
                continue
            raise TypeError(f"{who} returned {type(leaf).__name__}; expected a tensor {like}")
        if leaf.layout != torch.strided:
            raise TypeError(f"{who} returned a tensor of layout {leaf.layout}; expected a dense one")
        if leaf.shape != like.shape:
            if may_be_states and not like.is_state:
                continue
            raise ValueError(f"{who} returned the shape {list(leaf.shape)}; expected {list(like.shape)}")
        if not like.is_state:
            if leaf.dtype == like.dtype:
                constants.append(leaf)
            elif not may_be_states:
                raise TypeError(f"{who} returned {leaf.dtype}; expected {like.dtype}")
            continue
        if leaf.dtype != like.dtype and torch.promote_types(leaf.dtype, like.dtype) != like.dtype:
            raise TypeError(f"{who} returned {leaf.dtype}; expected {like.dtype}")
        states.append(leaf)
    # An increment has no meaning for integer leaves.
    return states, [] if may_be_states else constants


def _matched(returned: Any, form: Form, who: str, *, may_be_states: bool) -> list[tuple[Any, Leaf]]:
    """Returns the leaves of a result, each with the planned leaf."""
    if form.is_single and isinstance(returned, Tensor):
        return [(returned, form.leaves[0])]
    leaves, tree = pytree.tree_flatten(returned)
    if tree == form.tree:
        return list(zip(leaves, form.leaves))
    if may_be_states and isinstance(returned, Tensor) and len(form.states) == 1:
        return [(returned, form.states[0])]
    # Leaves are matched by their names or indices, in any order.
    found = dict(pytree.tree_flatten_with_path(returned)[0])
    planned = dict(pytree.tree_flatten_with_path(pytree.tree_unflatten(list(form.leaves), form.tree))[0])
    if may_be_states and found.keys() != planned.keys():
        planned = {path: leaf for path, leaf in planned.items() if leaf.is_state}
    if found.keys() != planned.keys():
        raise TypeError(f"{who} returned the structure {tree}; expected {form.tree}")
    return [(found[path], leaf) for path, leaf in planned.items()]


def form_returned(returned: Any, layer: int, name: str) -> Form:
    """Returns the form of a plain layer's result."""
    return form_of(returned, f"the result of layer {layer} ({name})")[0]
