"""States of a forward pass, by point.

Owns reading them from the data that a batch keeps for its backward pass. States that are kept for longer are in
`_watch.py`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from ...layer_parallel.extension import Batch, Record, States, moved

__all__ = ["recorded"]


def recorded(batch: Batch) -> dict[int, Any]:
    """Returns the states of this rank's points: those after its layers, and the net's input if its first layer is here.

    Empty after the backward pass.
    """
    numbers = {layer for layer, _ in batch.evaluation.tape}
    points = [number + 1 for number in sorted(numbers)]
    if 0 in numbers:
        points.insert(0, 0)
    found = {}
    for point in points:
        parts = [_state(batch, point, micro_batch) for micro_batch in range(batch.micro_batches)]
        found[point] = parts[0] if len(parts) == 1 else pytree.tree_map(lambda *each: torch.cat(each), *parts)
    return found


def _state(batch: Batch, point: int, micro_batch: int) -> Any:
    record = batch.evaluation.tape.get((point, micro_batch))
    if record is not None:
        states, constants = record.states, record.constants
    else:
        states = _after(batch, point - 1, batch.evaluation.tape[point - 1, micro_batch])
        constants = batch.constants_of(point, micro_batch)
    form = batch.forms[point]
    detached: list[Tensor] = [state.detach().to(leaf.dtype) for state, leaf in zip(states, form.states)]
    return form.joined(detached, constants)


def _after(batch: Batch, layer: int, record: Record) -> States:
    """Returns the states after a layer, which the next rank starts with."""
    if record.graph is None:
        raise RuntimeError(f"the output of layer {layer} was not kept, because the backward pass rebuilds its graph")
    layers = batch.solver.layers
    if not layers.kinds[layer].returns_increment:
        return record.graph.outputs
    pairs = zip(record.states, record.graph.outputs)
    return [moved(state, change.detach(), layers.dt) for state, change in pairs]
