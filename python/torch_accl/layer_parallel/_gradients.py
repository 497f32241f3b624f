"""What is done with the gradients of all layers together.

Owns norms over ranks, which are those of one rank by a bit: summed layer by layer, in their order.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ._model import Model

__all__ = ["clip_grad_norm_"]


def clip_grad_norm_(net: Model, max_norm: float, norm_type: float = 2.0, *, error_if_nonfinite: bool = False) -> Tensor:
    """`torch.nn.utils.clip_grad_norm_` over all layers of a net, on all of its ranks together. Returns the norm before, the same on all."""
    if norm_type <= 0:
        raise ValueError(f"norm_type={norm_type}: give more than 0, or inf")
    wire, solver = net.wire, net.solver
    count = len(solver.plans.net.layers)
    powers = [0.0] * count
    for layer, module in solver.layers.parts().items():
        found = [p.grad for p in module.parameters() if p.grad is not None]
        if found:
            norm = float(torch.nn.utils.get_total_norm(found, norm_type).double())
            powers[layer] = norm if math.isinf(norm_type) else norm**norm_type
    known = wire.known(powers, "clipping gradients")
    total = max(known) if math.isinf(norm_type) else sum(known) ** (1 / norm_type)
    if any(math.isnan(power) for power in known):
        total = math.nan
    if error_if_nonfinite and not math.isfinite(total):
        raise RuntimeError(f"the total norm of the gradients of all layers is {total}; it cannot be clipped")
    scale = max_norm / (total + 1e-6)
    if not scale >= 1:
        for parameter in net.parameters():
            if parameter.grad is not None:
                parameter.grad.mul_(scale)
    return torch.tensor(total)
