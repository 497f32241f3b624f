"""A warning for optimizers that do not work well with gradients of one bit."""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

__all__ = ["watch_for_adam"]

_ADAMS = tuple(
    getattr(torch.optim, name) for name in ("Adam", "AdamW", "Adamax", "NAdam", "RAdam") if hasattr(torch.optim, name)
)


def watch_for_adam(parameters: Iterable[torch.Tensor], codec: str) -> None:
    """Warns if the first optimizer that steps any of these parameters is a variant of Adam."""
    # Only the ids of the parameters are kept, and only until that step.
    wanted = {id(parameter) for parameter in parameters}

    def before_step(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        if wanted.isdisjoint(id(parameter) for group in optimizer.param_groups for parameter in group["params"]):
            return
        handle.remove()
        if isinstance(optimizer, _ADAMS):
            warnings.warn(
                f"compression: {codec} with error feedback is used with {type(optimizer).__name__}, which then "
                "computes second moments from decoded gradients. This is not 1-bit Adam, which is not supported: use "
                "SGD with momentum, or 4 bits and more",
                stacklevel=3,
            )

    handle = register_optimizer_step_pre_hook(before_step)
