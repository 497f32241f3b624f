"""The origin of each layer when a net is made deeper or shallower.

Owns the two rules, for refining and for coarsening, and the criterion that layers are alike. It moves nothing.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from torch import nn

from .._net.kinds import LayerKind
from .._net.scaled import Scaled
from .._net.tree import digest
from .._solve.plans import Net

__all__ = ["Origin", "coarser", "finer", "following", "make_of"]


# The number of a control point in the name of a parameter.
_NUMBER = re.compile(r"(?<=\bcontrol_points\.)\d+")


@dataclass(frozen=True)
class Origin:
    """A new layer is a copy of `layer`.

    Its parameters are interpolated by `share` towards `towards`, if that is not None.
    """

    layer: int
    towards: int | None = None
    share: float = 0.0

    @property
    def sources(self) -> tuple[int, ...]:
        """All layers that the new layer comes from."""
        return (self.layer,) if self.towards is None else (self.layer, self.towards)


def finer(kinds: Sequence[LayerKind], makes: Sequence[int], factor: int, *, is_linear: bool) -> list[Origin]:
    """Returns the origins for a net with `factor` layers for each step.

    Every `factor`-th step is a copy, so that coarsening gives the same net again.
    """
    found = []
    for layer, kind in enumerate(kinds):
        after = layer + 1
        has_neighbour = is_linear and after < len(kinds) and makes[after] == makes[layer]
        for part in range(kind.parts(factor)):
            found.append(Origin(layer, after, part / factor) if has_neighbour and part else Origin(layer))
    return found


def coarser(kinds: Sequence[LayerKind], makes: Sequence[int], factor: int) -> list[Origin]:
    """Returns the origins for a net of every `factor`-th step."""
    found: list[Origin] = []
    layer = 0
    while layer < len(kinds):
        if not kinds[layer].is_step:
            found.append(Origin(layer))
            layer += 1
            continue
        end = layer + 1
        while end < len(kinds) and makes[end] == makes[layer]:
            end += 1
        if (end - layer) % factor:
            raise ValueError(
                f"factor={factor} does not divide the {end - layer} equal steps from layer {layer} to {end - 1}; give a factor that "
                "divides every run of layers with the same classes, shapes and types"
            )
        found += [Origin(first) for first in range(layer, end, factor)]
        layer = end
    return found


def following(net: Net, origins: Sequence[Origin]) -> list[int]:
    """Returns the number of layers of each rank if all layers stay on the rank of the layer that they come from."""
    counts = [0] * net.ranks
    for origin in origins:
        counts[net.owner(origin.layer)] += 1
    return counts


def make_of(module: nn.Module, kind: LayerKind) -> int:
    """Returns a number that two layers share if they are alike except for the values of their parameters."""
    classes = [f"{type(each).__module__}.{type(each).__qualname__}" for each in module.modules()]
    # Control points have other numbers in each layer of a spline.
    parameters = [
        (_NUMBER.sub("", name), list(parameter.shape), str(parameter.dtype), parameter.requires_grad)
        for name, parameter in module.named_parameters()
    ]
    by = str(module.by) if isinstance(module, Scaled) else "1"
    return digest(repr((kind.name, by, classes, parameters)).encode())
