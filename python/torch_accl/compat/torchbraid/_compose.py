"""Head, tail and loss on rank 0 alone.

Owns their replacements on the other ranks: None for a module, and for a call a zero whose `backward()` leads to the
net's backward pass.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

__all__ = ["Compose"]


class Compose:
    """Calls its argument on rank 0. On other ranks, a class gives None, and any other callable a tensor with one
    zero."""

    def __init__(self, rank: int) -> None:
        self._rank = rank

    def __call__(self, op: Callable[..., Any] | None, *args: Any, **kwargs: Any) -> Any:
        if self._rank == 0:
            if op is None:
                raise TypeError("comp_op() got None on rank 0; give a callable")
            return op(*args, **kwargs)
        if inspect.isclass(op):
            return None
        tensors = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        device = tensors[0].device if tensors else "cpu"
        dtype = next((tensor.dtype for tensor in tensors if tensor.is_floating_point()), torch.float32)
        zero = torch.zeros(1, dtype=dtype, device=device)
        for tensor in tensors:
            if tensor.requires_grad:
                # Sum no elements: the result is zero whatever the values are, and keeps the graph.
                zero = zero + tensor.flatten()[:0].sum().to(zero.dtype)
        return zero
