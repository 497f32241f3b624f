"""Which gradients are all zeros, as the host sees it. Owns nothing else.

Kernels that encode gradients on a device answer the question there, so that the host need not wait.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

__all__ = ["is_zero", "zeros_among"]

# Checking this many elements suffices to recognise nearly every gradient that is not all zeros.
_FIRST = 64


def is_zero(gradient: torch.Tensor) -> bool:
    """Whether all elements are zeros; NaN counts as not zero."""
    row = gradient
    while row.dim() > 1 and row.shape[0]:
        row = row[0]
    return not bool(row[..., :_FIRST].any() if row.dim() else row) and not bool(gradient.any())


def zeros_among(gradients: Sequence[torch.Tensor]) -> set[int]:
    """Returns the indices of gradients that are all zeros."""
    if not gradients or gradients[0].is_cpu:
        return {place for place, gradient in enumerate(gradients) if is_zero(gradient)}
    # One question for all, because each holds the host until the device has computed these gradients.
    are_used = torch.stack([gradient.any() for gradient in gradients]).tolist()
    return {place for place, is_used in enumerate(are_used) if not is_used}
