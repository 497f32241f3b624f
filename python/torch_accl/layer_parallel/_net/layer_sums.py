"""Sums of gradients over the layers that share a parameter.

Owns the order of such a sum: from the last layer to the first, as a backward pass on one rank would add. So the bits do
not depend on how layers lie on ranks, nor on the order in which a solve reaches them.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

__all__ = ["LayerSum", "added"]


class LayerSum:
    """The gradient of one parameter that several layers of a rank share.

    layers: the layers, in ascending order.
    is_eager: whether a gradient is added as soon as the gradients of all later layers are there, and then released. Each
        layer may then give only one gradient. Otherwise gradients are kept by layer.
    """

    def __init__(self, layers: Iterable[int], *, is_eager: bool) -> None:
        self._due = list(layers)
        self._is_eager = is_eager
        self._total: Tensor | None = None
        # Whether the total is a tensor of its own, instead of a layer's gradient.
        self._is_own = False
        # Gradients that are not part of the total, by layer.
        self.by_layer: dict[int, Tensor] = {}

    def add(self, layer: int, gradient: Tensor) -> None:
        """Adds a layer's gradient, or a micro-batch's share of it."""
        before = self.by_layer.get(layer)
        self.by_layer[layer] = gradient if before is None else before + gradient
        while self._is_eager and self._due and self._due[-1] in self.by_layer:
            self._total = self._total_with(self.by_layer.pop(self._due.pop()))

    def total(self) -> Tensor | None:
        """Returns the sum, or None without gradients."""
        for layer in sorted(self.by_layer, reverse=True):
            self._total = self._total_with(self.by_layer.pop(layer))
        return self._total

    def _total_with(self, part: Tensor) -> Tensor:
        if self._total is None:
            return part
        if not self._is_own or self._total.layout != torch.strided:
            # A gradient may be another owner's tensor, so the first sum is a new one.
            self._is_own = True
            return added(self._total, part)
        return self._total.add_(part)


def added(total: Tensor, part: Tensor) -> Tensor:
    """Returns the sum of two gradients, each dense or sparse."""
    # torch adds a sparse tensor to a dense one, but not a dense one to a sparse one.
    return part + total if total.layout != torch.strided else total + part
