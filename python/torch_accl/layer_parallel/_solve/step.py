"""One batch of a net that may be wrapped.

Owns how `step` reaches the net through its wrappers and back. `_model.py` runs the batch.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from .batch import BatchInputs, LossFunction, LossInputs
from .replicas import agree

__all__ = ["step"]


def step(
    model: nn.Module,
    x: Any = None,
    target: Any = None,
    loss_fn: LossFunction | None = None,
    *,
    side: dict[str, Any] | None = None,
    loss_scale: float = 1.0,
) -> Tensor:
    """`LayerParallel.step` for a wrapped net: `model` is a net in DistributedDataParallel or FSDP2.

    The whole batch runs in the wrapper's forward pass, and its backward pass returns each gradient once. Before that,
    replicas compare results: an error in one replica is raised in all, and no replica takes over a gradient. All
    replicas must call it equally often.

    Arguments and result are the same as for `LayerParallel.step`.

    Raises:
        LayerParallelError: the batch failed in this replica or another.
        TypeError: `model` is neither a net nor a wrapper that passes its argument on to one.
    """
    inputs = BatchInputs(x, side, LossInputs(target, loss_fn, loss_scale))
    anchor = model(inputs)
    result = inputs.result
    if result.solver is not None:
        try:
            agree(model, result.solver, result.error)
        finally:
            # The error's traceback refers to the inputs.
            result.error = None
    if not isinstance(anchor, Tensor) or result.loss is None:
        raise TypeError(
            f"step(): expected a LayerParallel, or a wrapper whose forward passes its argument to the net, got {type(model).__name__}"
        )
    anchor.backward()  # type: ignore[no-untyped-call]
    return result.loss
