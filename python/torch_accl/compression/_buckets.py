"""The gradients in a bucket of DistributedDataParallel.

This module owns how a bucket's memory is cut into gradients. A hook returns the bucket's own buffer, not the tensors made here.
"""

from __future__ import annotations

import torch
from torch._C._distributed_c10d import GradBucket

__all__ = ["gradients_of"]


def gradients_of(bucket: GradBucket) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Returns the memory of a bucket of dense gradients in their own type, and its parts in memory order.

    torch exposes the memory of complex gradients as real numbers, but cuts it as if each complex number were one real number.

    Raises:
        RuntimeError: the parts do not cover the whole memory.
    """
    buffer, parts, parameters = bucket.buffer(), bucket.gradients(), bucket.parameters()
    as_real = not buffer.is_complex() and any(parameter.is_complex() for parameter in parameters)
    elements = [part.numel() for part in (parameters if as_real else parts)]
    if sum(elements) * (2 if as_real else 1) != buffer.numel():
        numbers = f"{sum(elements)} {'complex ' if as_real else ''}elements ({', '.join(map(str, elements))})"
        raise RuntimeError(
            f"gradients of bucket {bucket.index()} have {numbers}, but the bucket has {buffer.numel()} of "
            f"{buffer.dtype}: torch_accl does not support the layout of this version of torch; train without this hook"
        )
    if not as_real:
        return buffer, parts
    # `view_as_complex` is not used: autocast would make it copy the data to float32.
    buffer = buffer.view(buffer.dtype.to_complex())
    cut = buffer.split_with_sizes(elements)
    return buffer, [part.view(parameter.shape) for part, parameter in zip(cut, parameters, strict=True)]
