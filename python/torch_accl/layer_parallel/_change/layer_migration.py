"""Transfer of layers to other ranks, together with their optimiser entries.

Owns that each layer is sent once from its rank to each rank that needs it, as bytes, and arrives on that rank's device.
Layers that stay are not copied here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from .._net.pickled import loaded, saved
from .._ranks.agreed import agreed, exchange
from .._ranks.failures import described
from .._stack import LayerParallel
from .optimizer_state import Entry, entries_of
from .refinement import Origin

__all__ = ["MovingLayer", "migrated_layers", "named"]


_MOVING = "Layers that move to another rank must be picklable; placement='kept' keeps all layers on their ranks."


@dataclass
class MovingLayer:
    """A layer, and the optimiser's entry for each of its parameters."""

    module: nn.Module
    entries: list[Entry]


def migrated_layers(
    net: LayerParallel, optimizer: Optimizer | None, origins: Sequence[Origin], owners: Sequence[int]
) -> dict[int, MovingLayer]:
    """Returns the layers from which this rank's new layers are made, its own and others that their ranks send.

    `owners` has the rank of each new layer.
    """
    wire, before, modules = net._wire, net._plans.net, net._solver.layers.modules
    needed = sorted({(layer, to) for origin, to in zip(origins, owners) for layer in origin.sources})
    moves = [(layer, before.owner(layer), to) for layer, to in needed if before.owner(layer) != to]

    def moving(layer: int) -> MovingLayer:
        return MovingLayer(modules[layer], entries_of(optimizer, modules[layer].parameters()))

    packed: dict[int, bytes] = {}

    def pack() -> dict[int, int]:
        for layer in {layer for layer, source, _ in moves if source == wire.rank}:
            packed[layer] = named(layer, net._solver.names, "sent", lambda: saved(moving(layer)))  # noqa: B023
        return {layer: len(data) for layer, data in packed.items()}

    lengths = {k: v for each in agreed(wire, "packing layers", _MOVING, pack) for k, v in each.items()}
    sends = [
        (to, torch.frombuffer(bytearray(packed[layer]), dtype=torch.uint8).to(wire.device))
        for layer, source, to in moves
        if source == wire.rank
    ]
    coming = {
        layer: (source, torch.empty(lengths[layer], dtype=torch.uint8, device=wire.device))
        for layer, source, to in moves
        if to == wire.rank
    }
    exchange(wire, sends, list(coming.values()), "sending layers to other ranks")
    found = {layer: moving(layer) for layer, to in needed if to == wire.rank and layer in modules}

    def unpack() -> None:
        for layer, (_, data) in coming.items():
            arrived = data.cpu().numpy().tobytes()
            found[layer] = named(
                layer,
                net._solver.names,
                "received",
                lambda: loaded(arrived, modules.values()),  # noqa: B023
            )

    agreed(wire, "unpacking layers", _MOVING, unpack)
    return found


def named(layer: int, names: Sequence[str], what: str, call: Callable[[], Any]) -> Any:
    """Runs `call`; an error names the layer."""
    try:
        return call()
    except Exception as error:
        raise RuntimeError(f"layer {layer} ({names[layer]}) cannot be {what}: {described(error)}") from error
