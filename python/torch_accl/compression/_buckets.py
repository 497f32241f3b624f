"""The gradients in a bucket of DistributedDataParallel.

Owns how a bucket's memory is cut into them. The result of a hook is the bucket's own buffer, whatever is made of it here.
"""

from __future__ import annotations

import torch
from torch._C._distributed_c10d import GradBucket

__all__ = ["gradients_of"]


def gradients_of(bucket: GradBucket) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """The memory of a bucket of dense gradients, of their type, and its parts, one after the other.

    torch gives the memory of complex gradients as real numbers, and cuts it as if each complex one were a single real one.

    Raises:
        RuntimeError: the parts are not the whole memory.
    """
    buffer, parts, parameters = bucket.buffer(), bucket.gradients(), bucket.parameters()
    as_real = not buffer.is_complex() and any(parameter.is_complex() for parameter in parameters)
    elements = [part.numel() for part in (parameters if as_real else parts)]
    if sum(elements) * (2 if as_real else 1) != buffer.numel():
        numbers = f"{sum(elements)} {'complex ' if as_real else ''}elements ({', '.join(map(str, elements))})"
        raise RuntimeError(
            f"gradients of bucket {bucket.index()} have {numbers}, and the bucket has {buffer.numel()} of {buffer.dtype}: this version of "
            "torch lays them out in a way that torch_accl does not know; train without this hook"
        )
    if not as_real:
        return buffer, parts
    # Not `view_as_complex`, of which autocast makes a copy in float32.
    buffer = buffer.view(buffer.dtype.to_complex())
    cut = buffer.split_with_sizes(elements)
    return buffer, [part.view(parameter.shape) for part, parameter in zip(cut, parameters, strict=True)]
