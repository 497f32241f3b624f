"""Transfer between a net and one with fewer layers, in both directions.

Owns the injection of a layer's parameters and buffers, the interpolation of changes, and the restriction of gradients,
which is the transpose of the interpolation. A coarse layer lies on the rank of the first of its fine layers, so only
tensors that cross a boundary between ranks are sent.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from .._net.scaled import Scaled
from .._ranks.agreed import exchange
from .._ranks.wire import Wire
from .._stack import LayerParallel
from .optimizer_state import Moments, interpolate, moved_state, options_of, wide
from .refinement import Origin

__all__ = [
    "Field",
    "LevelTransfer",
    "added",
    "combined",
    "copied",
    "dependents",
    "dots",
    "exchanged",
    "move",
    "product_of",
    "trained",
]


# For each layer of this rank, one tensor per trained parameter, in order; None where there is no tensor.
Field = dict[int, list[Tensor | None]]


def trained(net: LayerParallel) -> dict[int, list[nn.Parameter]]:
    """Returns the parameters that want a gradient, for each layer of this rank."""
    modules = net._solver.layers.modules
    return {layer: [p for p in module.parameters() if p.requires_grad] for layer, module in modules.items()}


def copied(parameters: Mapping[int, Sequence[Tensor]]) -> Field:
    """Returns copies of the current values."""
    return {layer: [p.detach().clone() for p in each] for layer, each in parameters.items()}


def combined(one: Field, other: Field, how: Callable[[Tensor, Tensor], Tensor]) -> Field:
    """Combines two fields tensor by tensor; None where either field has None."""
    return {
        layer: [None if a is None or b is None else how(a, b) for a, b in zip(tensors, other[layer])]
        for layer, tensors in one.items()
    }


@torch.no_grad()
def move(parameters: Mapping[int, Sequence[Tensor]], start: Field, change: Field, length: float) -> None:
    """Sets the parameters to `start + length * change`."""
    for layer, each in parameters.items():
        for parameter, value, way in zip(each, start[layer], change[layer]):
            if value is not None:
                parameter.copy_(value if way is None or length == 0 else value + way * length)


def dependents(origins: Sequence[Origin]) -> tuple[dict[int, int], dict[int, list[tuple[int, float]]]]:
    """Inverts `origins`, which has one entry for each layer of the finer net.

    Returns two maps from each layer of the coarser net: to the first finer layer that comes from it, and to all finer
    layers that depend on it, in order, each with its weight.
    """
    first: dict[int, int] = {}
    shares: dict[int, list[tuple[int, float]]] = {}
    for layer, origin in enumerate(origins):
        first.setdefault(origin.layer, layer)
        for source in origin.sources:
            share = origin.share if source == origin.towards else 1.0 - origin.share
            shares.setdefault(source, []).append((layer, share))
    return first, shares


def dots(net: LayerParallel, one: Field, other: Field, what: str) -> float:
    """Returns the inner product of two fields over all ranks.

    The result is the same on all ranks. It has the same bits for any number of ranks.
    """
    numbers = [0.0] * len(net._plans.net.layers)
    for layer, tensors in one.items():
        found = [product_of(a, b) for a, b in zip(tensors, other[layer]) if a is not None and b is not None]
        if found:
            numbers[layer] = float(torch.stack(found).sum())
    return sum(net._wire.known(numbers, what))


def product_of(one: Tensor, other: Tensor) -> Tensor:
    """Returns the inner product of two tensors in float64. Complex tensors count as their real and imaginary parts."""
    x, y = (torch.view_as_real(t) if t.is_complex() else t for t in (one.detach(), other.detach()))
    return torch.dot(x.double().flatten(), y.double().flatten())


def _block_of(module: nn.Module) -> nn.Module:
    return module.block if isinstance(module, Scaled) else module


class LevelTransfer:
    """A net, a net with fewer layers, and the origin of each layer of the finer net in the coarser one (`origins`)."""

    def __init__(
        self, fine: LayerParallel, coarse: LayerParallel, origins: Sequence[Origin], ratios: Sequence[float]
    ) -> None:
        self.fine, self.coarse = fine, coarse
        self._origins = origins
        # For each coarse layer, the size of its gradients relative to the gradients of its first fine layer.
        self._ratios = ratios
        self._first, self._shares = dependents(origins)

    # ---- from the fine net to the coarse net

    def inject(self) -> None:
        """Copies parameters and buffers of the first fine layers to the coarse layers."""
        modules, finer = self.coarse._solver.layers.modules, self.fine._solver.layers.modules
        with torch.no_grad():
            for layer, module in modules.items():
                first = finer[self._first[layer]]
                for old, new in zip(module.parameters(), first.parameters()):
                    old.copy_(new)
                for buffer, other in zip(module.buffers(), first.buffers()):
                    buffer.copy_(other)
                # Training flags are copied too. One of the two modules may be wrapped in `Scaled`.
                for part, other_part in zip(_block_of(module).modules(), _block_of(first).modules()):
                    part.training = other_part.training
                module.training = first.training
        for own, others in ((self.coarse, self.fine), (self.coarse.layers, self.fine.layers)):
            own.training = others.training

    def inject_optimizer(self, fine: Optimizer, coarse: Optimizer, moments: Moments) -> None:
        """Copies the options of groups and the state of each parameter to the coarse optimiser.

        Moments `"scaled"` are multiplied to fit the coarse layer's larger gradients.
        """
        for group, other in zip(coarse.param_groups, fine.param_groups):
            group.update(copy.deepcopy(options_of(other)))
        modules, finer = self.coarse._solver.layers.modules, self.fine._solver.layers.modules
        for layer, module in modules.items():
            first = finer[self._first[layer]]
            for old, new in zip(module.parameters(), first.parameters()):
                if new in fine.state and moments != "none":
                    ratio = self._ratios[layer] if moments == "scaled" else 1.0
                    coarse.state[old] = moved_state(type(fine), fine.state[new], None, 0.0, ratio, new.shape)
                else:
                    coarse.state.pop(old, None)

    def restricted(self, gradients: Field) -> Field:
        """Returns gradients of the coarse net's parameters, as if the fine net's parameters were interpolated from them.

        This is the transpose of `interpolated`.
        """
        fine, coarse = trained(self.fine), trained(self.coarse)
        moves = [
            (layer, self.fine.owner(layer), self.coarse.owner(source))
            for layer, origin in enumerate(self._origins)
            for source in origin.sources
        ]
        own: Field = {
            layer: [torch.zeros_like(p) if g is None else g for g, p in zip(gradients[layer], parameters)]
            for layer, parameters in fine.items()
        }
        like = {layer: parameters for source, parameters in coarse.items() for layer, _ in self._shares[source]}
        there = exchanged(self.fine._wire, moves, own, like, "sending gradients to the coarse net")
        found: Field = {}
        for source, parameters in coarse.items():
            sums: list[Tensor | None] = [None] * len(parameters)
            # Sums are in the order of layers, so they do not depend on the placement.
            for layer, share in self._shares[source]:
                sums = [added(total, tensor, share) for total, tensor in zip(sums, there[layer])]
            found[source] = [None if s is None else s.to(p.dtype) for s, p in zip(sums, parameters)]
        return found

    # ---- from the coarse net to the fine net

    def interpolated(self, changes: Field) -> Field:
        """Returns the changes of the fine net's parameters that changes of the coarse net's parameters make."""
        moves = [
            (source, self.coarse.owner(source), self.fine.owner(layer))
            for layer, origin in enumerate(self._origins)
            for source in origin.sources
        ]
        fine = trained(self.fine)
        like = {source: fine[layer] for layer in fine for source in self._origins[layer].sources}
        there = exchanged(self.fine._wire, moves, changes, like, "sending changes to the fine net")
        found: Field = {}
        for layer in fine:
            origin = self._origins[layer]
            own = there[origin.layer]
            if origin.towards is None:
                found[layer] = list(own)
                continue
            pairs = zip(own, there[origin.towards])
            found[layer] = [None if a is None or b is None else interpolate(a, b, origin.share) for a, b in pairs]
        return found


def added(total: Tensor | None, tensor: Tensor | None, share: float) -> Tensor | None:
    """Returns `total + share * tensor` in a wide dtype.

    A `total` of None is zero, and a `tensor` of None adds nothing.
    """
    if tensor is None:
        return total
    part = tensor.detach().to(wide(tensor.dtype))
    part = part if share == 1.0 else part * share
    return part if total is None else total + part


def exchanged(
    wire: Wire,
    moves: Sequence[tuple[int, int, int]],
    own: Field,
    like: Mapping[int, Sequence[Tensor]],
    what: str,
) -> Field:
    """Returns this rank's tensors together with the tensors of layers that other ranks send.

    `moves` has a layer, its source rank and its destination rank. `like` has tensors with the shapes and dtypes of a
    layer's tensors.
    """
    once = sorted({(layer, source, to) for layer, source, to in moves if source != to})
    sends, receives = [], []
    found: Field = dict(own)
    for layer, source, to in once:
        if source == wire.rank:
            sends += [(to, tensor) for tensor in own[layer] if tensor is not None]
        elif to == wire.rank:
            made: list[Tensor] = [torch.empty(p.shape, dtype=p.dtype, device=p.device) for p in like[layer]]
            receives += [(source, tensor) for tensor in made]
            found[layer] = list(made)
    exchange(wire, sends, receives, what)
    return found
