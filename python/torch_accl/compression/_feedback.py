"""When what is carried over is sent: not with a gradient that may be thrown away, and at the latest with one that travels as it is.

DistributedDataParallel reduces zeros for a parameter that no rank has used, and throws the result away. A rank cannot know what the
others have, so a gradient of zeros goes without what is carried over, which waits for the next one. Sums that are zeros do the same in
the engine. Where what is carried is kept, by which names, is said by `_state.py`.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from ._plans import Plan
from ._scope import Addresses, Op

__all__ = ["give_back", "is_zero", "of_used"]

# Elements that tell of nearly every gradient that it is not zeros.
_FIRST = 64


def is_zero(gradient: torch.Tensor) -> bool:
    """Whether all elements are zeros; a NaN is none."""
    row = gradient
    while row.dim() > 1 and row.shape[0]:
        row = row[0]
    return not bool(row[..., :_FIRST].any() if row.dim() else row) and not bool(gradient.any())


def of_used(addresses: Addresses, gradients: Sequence[torch.Tensor]) -> Addresses:
    """The addresses of a call's tensors, without those of contributions that are zeros."""
    unused = {place for place, gradient in enumerate(gradients) if is_zero(gradient)}
    if not unused:
        return addresses
    contributions, sums = addresses
    count = len(gradients)
    return [0 if place % count in unused else address for place, address in enumerate(contributions)], sums


def give_back(
    plan: Plan,
    gradients: Sequence[torch.Tensor],
    residuals: dict[str, torch.Tensor],
    residuals_of_sums: dict[str, torch.Tensor],
    op: Op,
    ranks: int,
) -> None:
    """Adds to a rank's contributions what is carried over and that a plan's encodings have no place for any more.

    What was lost of sums, which `op` makes of so many `ranks`, goes to what is carried over of the contribution of who finished them, where that
    is encoded still. What is carried over of a contribution that is not goes to the gradient itself. Both once.
    """
    divisor = ranks if op == dist.ReduceOp.AVG else 1
    # Contributions are encoded after they are multiplied.
    has_factor = op == dist.ReduceOp.PREMUL_SUM
    factor = float(op.factor) if has_factor and isinstance(op, dist.ReduceOp) else 1.0
    for place in list(plan.owed):
        name, gradient, is_raw = plan.names[place], gradients[place], plan.chosen[place] is None
        if is_raw and is_zero(gradient):
            continue
        plan.owed.remove(place)
        of_sum = residuals_of_sums.pop(name, None)
        if of_sum is not None:
            # There is one of contributions wherever there is one of sums, but in a state that somebody has made.
            residuals.setdefault(name, torch.zeros_like(of_sum)).add_(of_sum, alpha=divisor)
        # Gone, if it was sent with another plan of the same gradient.
        if is_raw and name in residuals:
            gradient.detach().add_(residuals.pop(name).view(gradient.shape), alpha=1 / factor)
