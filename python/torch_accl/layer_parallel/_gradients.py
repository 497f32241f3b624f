"""Operations on the gradients of all layers together.

Owns norms over ranks that equal the norm of one rank to the bit, because they are summed layer by layer, in order. Also
owns that all ranks of a net skip the same steps.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from ._model import Model

__all__ = ["GradScaler", "clip_grad_norm_"]


def clip_grad_norm_(net: Model, max_norm: float, norm_type: float = 2.0, *, error_if_nonfinite: bool = False) -> Tensor:
    """`torch.nn.utils.clip_grad_norm_` over all layers of a net, on all of its ranks together.

    Returns the norm before clipping, the same on all ranks: one element on the CPU, float32, or float64 if a layer has
    float64 gradients.

    Raises:
        ValueError: `norm_type` is not above 0.
        RuntimeError: the norm is not finite, with `error_if_nonfinite`.
    """
    if norm_type <= 0:
        raise ValueError(f"norm_type={norm_type}: give a number above 0, or inf")
    wire, solver = net.wire, net.current
    count = len(solver.plans.net.layers)
    powers = [0.0] * count
    # For each layer, whether its norm has 64 bits.
    are_wide = [0.0] * count
    for layer, parameters in solver.layers.parts().items():
        found = [parameter.grad for parameter in parameters if parameter.grad is not None]
        if found:
            of_layer = torch.nn.utils.get_total_norm(found, norm_type)
            are_wide[layer] = float(of_layer.dtype == torch.float64)
            norm = float(of_layer.double())
            powers[layer] = norm if math.isinf(norm_type) else norm**norm_type
    numbers = wire.known([*powers, *are_wide], "clipping gradients")
    known, is_wide = numbers[:count], any(numbers[count:])
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
    return torch.tensor(total, dtype=torch.float64 if is_wide else torch.float32, device="cpu")


class GradScaler(torch.amp.GradScaler):
    """`torch.amp.GradScaler` for the layers of a net, on all of its ranks.

    If a gradient of any rank is infinite or NaN, all ranks skip the step and change the scale alike. On all ranks
    together, call `net.step(..., loss_scale=scaler.get_scale())`, then `scaler.step(optimizer)` and `scaler.update()`.
    Other arguments are torch's.
    """

    def __init__(self, net: Model, device: str = "cpu", **settings: Any) -> None:
        super().__init__(device, **settings)
        self._net = net

    def get_scale(self) -> float:
        """Returns the factor of the next gradients. Initializes the scale if needed, as `scale(loss)` would."""
        if self.is_enabled() and self._scale is None:
            self._lazy_init_scale_growth_tracker(torch.device(self._device))
        scale: float = super().get_scale()
        return scale

    def unscale_(self, optimizer: torch.optim.Optimizer) -> None:
        """Divides an optimizer's gradients by the scale, and checks whether the gradients of all ranks are finite."""
        # A rank without a loss has not initialized the scale yet.
        self.get_scale()
        super().unscale_(optimizer)
        if not self.is_enabled():
            return
        found = self._per_optimizer_states[id(optimizer)]["found_inf_per_device"]
        wire = self._net.wire
        mine = any(float(value) > 0 for value in found.values())
        [count] = wire.together(
            torch.tensor([int(mine)], dtype=torch.int64, device=wire.device), "checking for infinite gradients"
        )
        # One entry, where the scale is: torch would read entries of other devices before they are copied. A rank without
        # gradients has none, and needs one to learn the result.
        found.clear()
        device = torch.device(self._device)
        found[device] = torch.full((), float(count > 0), dtype=torch.float32, device=device)

    def step(self, optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> float | None:
        """Steps, unless a gradient of any rank is infinite or NaN."""
        if self.is_enabled() and not self._per_optimizer_states[id(optimizer)]["found_inf_per_device"]:
            self.unscale_(optimizer)
        return super().step(optimizer, *args, **kwargs)
