"""When residuals are added to gradients: never to a gradient of zeros, and at the latest when the gradient is sent uncompressed.

DistributedDataParallel reduces zeros for a parameter that no rank has used, and discards the result. A rank cannot know the
gradients of other ranks. Therefore a gradient of zeros is sent without its residual, which waits for the next gradient. The
engine does the same for sums that are zeros. `_residuals.py` owns where residuals are kept.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from ._plans import Plan
from ._residuals import ResidualStore
from ._scope import Op
from ._zeros import is_zero

__all__ = ["flush_residuals"]


def flush_residuals(
    plan: Plan, gradients: Sequence[torch.Tensor], residuals: ResidualStore, op: Op, ranks: int
) -> None:
    """Adds residuals that the plan's encodings no longer use to this rank's contributions.

    `op` combines the contributions of `ranks` ranks. The residual of a sum is added to the contribution residual of the rank that
    completed the sum, if the contribution is still encoded. The residual of a contribution that is no longer encoded is added
    to the gradient itself. Each is added once.
    """
    divisor = ranks if op == dist.ReduceOp.AVG else 1
    # Contributions are multiplied by the factor before they are encoded.
    has_factor = op == dist.ReduceOp.PREMUL_SUM
    factor = float(op.factor) if has_factor and isinstance(op, dist.ReduceOp) else 1.0
    for place in list(plan.unplaced_residuals):
        name, gradient, is_raw = plan.names[place], gradients[place], plan.chosen[place] is None
        if is_raw and is_zero(gradient):
            continue
        plan.unplaced_residuals.remove(place)
        residuals.move_sum(name, divisor)
        # The residual is absent if another plan of the same gradient has sent it.
        if is_raw and (residual := residuals.take_contribution(name)) is not None:
            gradient.detach().add_(residual.view(gradient.shape).to(gradient.device), alpha=1 / factor)
