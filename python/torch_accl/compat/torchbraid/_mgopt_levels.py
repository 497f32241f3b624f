"""The levels of torchbraid's MG/Opt: one model each, whose layers lie on all ranks and whose head and tail lie on the
first.

Owns a model's objective and gradients on a batch, and the transfer between two models. Options are in
`_mgopt_options.py`, the V-cycle is in `_mgopt_cycle.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils import _pytree as pytree

from ...layer_parallel import LayerParallelError
from ...layer_parallel.extension import (
    Field,
    Model,
    added,
    combined,
    copied,
    dependents,
    described,
    exchanged,
    finer,
    generator_of,
    has_numbers,
    interpolate,
    layer_facts,
    move,
    product_of,
    trained,
)
from ._communicator import Comm
from ._compose import Compose
from ._layer_parallel import LayerParallel
from ._mgopt_options import Criterion, Restriction

__all__ = ["Batch", "Draws", "Level", "Point", "Transfer", "model_of", "on_device"]

# Key in place of a layer's number for parameters and buffers outside of the layers, on any rank.
_NO_LAYER = -1
# Weights of a coarse layer's previous neighbour, itself and its next neighbour.
_STENCIL = (0.25, 0.5, 0.25)


def model_of(made: Any) -> nn.Module:
    """Returns a model that MG/Opt can use as one level.

    Raises:
        TypeError: it has no `LayerParallel` as `parallel_nn`, or more than one layer-parallel net.
    """
    inner = getattr(made, "parallel_nn", None)
    if not isinstance(made, nn.Module) or not isinstance(inner, LayerParallel):
        raise TypeError(
            f"model_factory returned {type(made).__name__}"
            + (f" whose parallel_nn is {type(inner).__name__}" if isinstance(made, nn.Module) else "")
            + "; return a module with a LayerParallel of this package as its `parallel_nn`"
        )
    others = [name for name, each in made.named_modules() if isinstance(each, Model) and each is not inner.body]
    if others:
        raise TypeError(
            f"{type(made).__name__} has a second layer-parallel net, `{others[0]}`; give each level only one"
        )
    return made


# ---- a batch


class Draws:
    """The state of torch's random generators now, so that several evaluations draw the same numbers in heads and
    tails."""

    def __init__(self, device: torch.device) -> None:
        # A device of a tensor has its index.
        known = torch.empty(0, dtype=torch.uint8, device=device).device
        self._generators = [torch.default_generator, *([generator_of(known)] if has_numbers(known) else [])]
        self._states = [generator.get_state() for generator in self._generators]

    def again(self) -> None:
        """Sets the generators back to this state."""
        for generator, state in zip(self._generators, self._states):
            generator.set_state(state)


@dataclass(frozen=True)
class Batch:
    """A batch, on which all levels train."""

    x: Any
    target: Any
    # Number of the batch: all evaluations draw the random numbers of this batch.
    number: int
    draws: Draws


@dataclass(frozen=True)
class Point:
    """The result of an evaluation of a level."""

    # The loss plus the linear term.
    objective: float
    gradients: Field
    # Values of the buffers after the evaluation.
    buffers: list[Tensor]


class Level:
    """A model, its optimizer, its loss, and the linear term that makes its objective agree with the finer one."""

    def __init__(self, model: nn.Module, criterion: Criterion, optimizer: Optimizer | None) -> None:
        self.model = model
        self.criterion = criterion
        self.optimizer = optimizer
        inner = model.parallel_nn
        assert isinstance(inner, LayerParallel)
        self.body, self.dt = inner.body, inner.dt
        self.comm: Comm = inner.ranks
        self._compose: Compose = getattr(model, "compose", inner.comp_op())
        # The linear term: its gradient, and the parameters where it is zero.
        self.correction: Field | None = None
        self.origin: Field | None = None
        self._buffers: list[Tensor] = []
        self._makes = layer_facts(self.body)[0] if criterion.continuity else []

    # ---- parameters and buffers

    def trained(self) -> dict[int, list[nn.Parameter]]:
        """Returns the parameters that require a gradient, by layer."""
        return {
            **trained(self.body),
            _NO_LAYER: [p for p in self._outside_of_layers(self.model.parameters()) if p.requires_grad],
        }

    def tensors(self, kind: Literal["parameters", "buffers"]) -> dict[int, list[Tensor]]:
        """Returns all parameters, or buffers, by layer."""
        layers = self.body.solver.layers.modules
        found: dict[int, list[Tensor]] = {number: list(getattr(each, kind)()) for number, each in layers.items()}
        return {**found, _NO_LAYER: self._outside_of_layers(getattr(self.model, kind)())}

    def _outside_of_layers(self, tensors: Iterable[Any]) -> list[Any]:
        """Returns the tensors that belong to no layer."""
        inside = {id(tensor) for tensor in (*self.body.parameters(), *self.body.buffers())}
        return [tensor for tensor in tensors if id(tensor) not in inside]

    def values(self) -> Field:
        """Returns copies of the trained parameters."""
        return copied(self.trained())

    def move(self, start: Field, change: Field, length: float) -> None:
        """Sets the parameters to `start` plus `length` times `change`."""
        move(self.trained(), start, change, length)

    @torch.no_grad()
    def set(self, field: Field) -> None:
        """Sets the trained parameters to these values."""
        for layer, parameters in self.trained().items():
            for parameter, value in zip(parameters, field[layer]):
                if value is not None:
                    parameter.copy_(value)

    def begin(self) -> None:
        """Saves the buffers. Every evaluation of a batch starts with them, so that only the last one updates
        statistics."""
        self._buffers = [buffer.clone() for buffer in self.model.buffers()]

    @torch.no_grad()
    def restore(self, buffers: Sequence[Tensor]) -> None:
        """Sets the buffers to these values."""
        for buffer, value in zip(self.model.buffers(), buffers):
            buffer.copy_(value)

    def product(self, one: Field, other: Field, what: str) -> float:
        """Returns the inner product of two fields over all ranks. It is the same on all ranks, and the part of the
        layers does not depend on the number of ranks."""
        layers = len(self.body.solver.layers.kinds)
        numbers = [0.0] * (layers + self.comm.size)
        for layer, tensors in one.items():
            found = [product_of(a, b) for a, b in zip(tensors, other[layer]) if a is not None and b is not None]
            if found:
                numbers[layers + self.comm.rank if layer == _NO_LAYER else layer] = float(torch.stack(found).sum())
        return sum(self.body.wire.known(numbers, what))

    # ---- a batch

    def evaluate(self, batch: Batch) -> Point:
        """Returns objective and gradients at the current parameters, in training mode. Collective."""
        self._again(batch)
        objective = self.learn(batch.x, batch.target)
        gradients: Field = {layer: [p.grad for p in each] for layer, each in self.trained().items()}
        self.model.zero_grad(set_to_none=True)
        if self.correction is not None:
            objective += self._linear()
            gradients = combined(gradients, self.correction, lambda g, c: g + c)
        return Point(objective, gradients, [buffer.clone() for buffer in self.model.buffers()])

    @torch.no_grad()
    def objective(self, batch: Batch) -> float:
        """Returns the objective at the current parameters, without gradients. Collective."""
        self._again(batch)
        _, value, _ = self._lost(batch.x, batch.target)
        return value + (0.0 if self.correction is None else self._linear())

    def _again(self, batch: Batch) -> None:
        self.model.train()
        self.restore(self._buffers)
        self.body.solver.shared.number = batch.number
        batch.draws.again()

    def learn(self, x: Any, target: Any) -> float:
        """Returns the loss of a batch, the same on all ranks, and replaces the gradients by the loss's."""
        self.model.zero_grad(set_to_none=True)
        loss, value, _ = self._lost(x, target)
        loss.backward()  # type: ignore[no-untyped-call]
        if self.criterion.continuity:
            self._smooth()
        return value

    def tested(self, x: Any, target: Any) -> tuple[float, Any]:
        """Returns the loss of a batch on all ranks, and the output, which is valid on the first rank; computes no
        gradients."""
        _, value, output = self._lost(x, target)
        return value, output

    def _lost(self, x: Any, target: Any) -> tuple[Tensor, float, Any]:
        output = self.model(x)
        loss: Any = None
        error: Exception | None = None
        try:
            loss = self._compose(self.criterion.loss, output, target)
            value = float(loss.detach())
        except Exception as caught:
            error, value = caught, 0.0
        # A failure on the first rank alone would leave the other ranks waiting in their backward passes.
        value, cause = self.comm.bcast((value, None if error is None else described(error)))
        if cause is not None or error is not None:
            raise LayerParallelError(f"the loss failed on rank 0: {cause or error}") from error
        if self.criterion.continuity:
            value += self._roughness()
        return loss, value, output

    def _linear(self) -> float:
        assert self.correction is not None and self.origin is not None
        away = combined(self.values(), self.origin, lambda now, before: now - before)
        return self.product(self.correction, away, "the linear term of a coarse objective")

    # ---- the term that makes neighbouring layers alike

    def _neighbours(self) -> dict[int, list[Sequence[Tensor | None]]]:
        """Returns, for each of this rank's layers, the parameters of the previous and the next layer; empty where that
        layer has another make."""
        body, own = self.body, trained(self.body)
        pairs = [
            (layer, other)
            for layer, make in enumerate(self._makes)
            for other in (layer - 1, layer + 1)
            if 0 <= other < len(self._makes) and self._makes[other] == make
        ]
        moves = [(other, body.owner(other), body.owner(layer)) for layer, other in pairs]
        like = {other: own[layer] for layer, other in pairs if layer in own}
        mine: Field = {layer: list(parameters) for layer, parameters in own.items()}
        there = exchanged(body.wire, moves, mine, like, "parameters of neighbours")
        known = set(pairs)
        return {
            layer: [there[other] if (layer, other) in known else () for other in (layer - 1, layer + 1)]
            for layer in own
        }

    def _scale(self) -> float:
        return self.criterion.continuity / (4 * self.dt)

    @torch.no_grad()
    def _roughness(self) -> float:
        """Returns the term: the scaled sum over all pairs of neighbours."""
        own, numbers = trained(self.body), [0.0] * len(self._makes)
        for layer, (_, after) in self._neighbours().items():
            for mine, other in zip(own[layer], after):
                numbers[layer] += float((mine - other).double().square().sum()) if other is not None else 0.0
        return self._scale() * sum(self.body.wire.known(numbers, "the difference of neighbours"))

    @torch.no_grad()
    def _smooth(self) -> None:
        """Adds the gradients of the term."""
        own = trained(self.body)
        for layer, sides in self._neighbours().items():
            for side in sides:
                for mine, other in zip(own[layer], side):
                    if other is not None and mine.grad is not None:
                        mine.grad.add_(mine - other, alpha=2 * self._scale())

    # ---- steps

    def relax(self, point: Point | None, batch: Batch, steps: int, say: Callable[[float], None]) -> Point | None:
        """Does steps of the optimizer, the first with the gradients of `point` if given. Returns the point before the
        last step."""
        assert self.optimizer is not None
        for number in range(steps):
            if number or point is None:
                point = self.evaluate(batch)
            say(point.objective)
            self.follow(point.gradients)
        return point

    def follow(self, gradients: Field) -> None:
        """Does a step of the optimizer with these gradients."""
        assert self.optimizer is not None
        for layer, parameters in self.trained().items():
            for parameter, gradient in zip(parameters, gradients[layer]):
                parameter.grad = gradient
        self.optimizer.step()
        self.model.zero_grad(set_to_none=True)


class Transfer:
    """The transfer between a level and the next coarser one, each of whose steps stands for `factor` of the finer
    one's.

    Layers may lie on any ranks. Creating it is collective.

    Raises:
        ValueError: the two nets do not fit together.
    """

    def __init__(self, fine: Level, coarse: Level, factor: int, interpolation: str) -> None:
        self._fine, self._coarse = fine, coarse
        (makes, ties), (below, others) = layer_facts(fine.body), layer_facts(coarse.body)
        kinds = coarse.body.solver.layers.kinds
        if ties or others:
            raise ValueError(
                "layers share parameters, which MG/Opt cannot restrict; give each layer its own parameters"
            )
        self._origins = finer(kinds, below, factor, is_linear=interpolation == "linear")
        if len(self._origins) != len(makes) or any(makes[at] != below[o.layer] for at, o in enumerate(self._origins)):
            raise ValueError(
                f"a level has {len(makes)} layers, and the next coarser level has {len(below)}; for a factor of {factor} in ni_steps the level should have {len(self._origins)}. Layers must have "
                "the same classes, shapes and types in the same order, and single layers once; let model_factory make as many layers as ni_steps gives"
            )
        self._first, self._shares = dependents(self._origins)
        # Whether a layer continues a run of steps of one make; false for a run's first step and for single layers.
        self._has_before = [at > 0 and kind.is_step and below[at] == below[at - 1] for at, kind in enumerate(kinds)]
        wrong = [
            rank
            for rank, is_same in enumerate(fine.comm.allgather(_outside_forms(fine) == _outside_forms(coarse)))
            if not is_same
        ]
        if wrong:
            raise ValueError(
                f"on rank {wrong[0]} two levels differ in the parameters outside their layers; let model_factory make heads and tails of the same shapes"
            )

    def interpolated(self, field: Field) -> Field:
        """Interpolates the coarse level's parameters, or a change of them, to the fine level."""
        origins = self._origins
        there = self._fetched(field, self._coarse, self._fine, {at: o.sources for at, o in enumerate(origins)})
        found: Field = {_NO_LAYER: _copies(field[_NO_LAYER])}
        for layer in self._fine.body.solver.layers.modules:
            origin = origins[layer]
            own = there[origin.layer]
            pairs = zip(own, own if origin.towards is None else there[origin.towards])
            found[layer] = [
                None if a is None or b is None else a.clone() if a is b else interpolate(a, b, origin.share)
                for a, b in pairs
            ]
        return found

    def restricted(self, field: Field, how: Restriction) -> Field:
        """Restricts the fine level's parameters, or gradients, to the coarse level; a missing one counts as zero."""
        filled: Field = {
            layer: [torch.zeros_like(p) if t is None else t for t, p in zip(field[layer], parameters)]
            for layer, parameters in self._fine.trained().items()
        }
        shares = {layer: self._parts(layer, how) for layer in self._first}
        sources = {layer: tuple(source for source, _ in parts) for layer, parts in shares.items()}
        there = self._fetched(filled, self._fine, self._coarse, sources)
        found: Field = {_NO_LAYER: _copies(filled[_NO_LAYER])}
        for layer, parameters in trained(self._coarse.body).items():
            sums: list[Tensor | None] = [None] * len(parameters)
            # Summed in the order of layers, so that the result does not depend on where they lie.
            for source, share in shares[layer]:
                sums = [added(total, tensor, share) for total, tensor in zip(sums, there[source])]
            found[layer] = [None if s is None else s.to(p.dtype, copy=True) for s, p in zip(sums, parameters)]
        return found

    def _parts(self, layer: int, how: Restriction) -> list[tuple[int, float]]:
        """Returns the fine layers that make up a coarse one, and the weight of each."""
        if how == "transposed":
            return self._shares[layer]
        first = self._first[layer]
        if how == "injection" or not self._has_before[layer]:
            return [(first, 1.0)]
        return list(zip((first - 1, first, first + 1), _STENCIL))

    def initialize(self) -> None:
        """Sets the fine level's parameters to the interpolated coarse ones, and its buffers to copies."""
        for kind in ("parameters", "buffers"):
            values: Field = {layer: list(each) for layer, each in self._coarse.tensors(kind).items()}
            like = self._fine.tensors(kind)
            sources = {at: o.sources if kind == "parameters" else (o.layer,) for at, o in enumerate(self._origins)}
            there = self._fetched(values, self._coarse, self._fine, sources, like)
            with torch.no_grad():
                for layer, tensors in like.items():
                    if layer == _NO_LAYER:
                        for tensor, value in zip(tensors, values[_NO_LAYER], strict=True):
                            tensor.copy_(value) if value is not None else None
                        continue
                    origin = self._origins[layer]
                    is_mixed = kind == "parameters" and origin.towards is not None
                    others = there[origin.towards if is_mixed and origin.towards is not None else origin.layer]
                    for tensor, value, other in zip(tensors, there[origin.layer], others):
                        if value is not None and other is not None:
                            tensor.copy_(interpolate(value, other, origin.share) if is_mixed else value)

    def _fetched(
        self,
        field: Field,
        source: Level,
        target: Level,
        sources: Mapping[int, Sequence[int]],
        like: Mapping[int, Sequence[Tensor]] | None = None,
    ) -> Field:
        """Returns the tensors of other ranks' layers together with this rank's own. `sources` lists the source layers
        of each target layer."""
        moves = [(at, source.body.owner(at), target.body.owner(to)) for to, each in sources.items() for at in each]
        wanted = target.trained() if like is None else like
        shapes = {at: wanted[to] for to, each in sources.items() if to in wanted for at in each}
        own = {layer: tensors for layer, tensors in field.items() if layer != _NO_LAYER}
        return exchanged(source.body.wire, moves, own, shapes, "transferring between two levels")


def _outside_forms(level: Level) -> list[tuple[torch.Size, torch.dtype, bool]]:
    """Returns shape, type and `requires_grad` of a model's parameters and buffers outside of the layers."""
    tensors = [tensor for kind in ("parameters", "buffers") for tensor in level.tensors(kind)[_NO_LAYER]]
    return [(tensor.shape, tensor.dtype, tensor.requires_grad) for tensor in tensors]


def _copies(tensors: Sequence[Tensor | None]) -> list[Tensor | None]:
    return [None if tensor is None else tensor.detach().clone() for tensor in tensors]


def on_device(value: Any, device: torch.device) -> Any:
    """Moves the tensors of a batch to the model's device."""
    return pytree.tree_map(lambda leaf: leaf.to(device) if isinstance(leaf, Tensor) else leaf, value)
