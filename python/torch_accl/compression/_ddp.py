"""The communication hook of DistributedDataParallel.

Annotations in this file are objects, not strings: DistributedDataParallel checks the annotations of its hook.
"""

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import GradBucket
from torch._compile import _disable_dynamo

from ._buckets import gradients_of
from ._futures import future_of
from ._plans import Part
from ._scope import exact
from ._state import CompressionState

__all__ = ["ddp_hook"]


def ddp_hook(state: CompressionState, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Averages a bucket of gradients; the state decides which of them are compressed.

    Use it as `DistributedDataParallel.register_comm_hook(state, ddp_hook)`. Gradients are identified by their parameters, so
    the order of buckets and their rebuilding do not matter. Each model needs its own state. Only dense float32, float16 and
    bfloat16 gradients are compressed; others are sent unchanged.

    DistributedDataParallel may use its reducer in Python (`torch._dynamo.config.optimize_ddp = "python_reducer"`). That reducer
    passes gradients one by one, and each is sent in its own call.

    Returns:
        A future of the bucket's buffer, which is overwritten with the averages.

    Raises:
        RuntimeError: a parameter was added to the model after the state was created; gradients are on a device whose tensors the
            group reduces with another backend than accl; or they do not cover the whole bucket. Also if settings of ranks differ,
            or the states that they loaded do not fit together.
    """
    if isinstance(bucket, tuple):
        return _mean_of_one(state, *bucket)
    buffer = bucket.buffer()
    state.check_device(buffer.device)
    if bucket.is_last():
        step, state.step = state.step, state.step + 1
    else:
        step = state.step
    if buffer.is_sparse:
        return _mean_of_sparse(state, buffer)
    memory, gradients = gradients_of(bucket)
    elements = [gradient.numel() for gradient in gradients]
    plan = state.plan(bucket.parameters(), elements, memory.dtype, step, lambda: gradients, state.process_group)
    options = dist.AllreduceCoalescedOptions()
    options.reduceOp = dist.ReduceOp.AVG
    options.asyncOp = True

    def call(part: Part, is_encoded: bool) -> dist.Work:
        tensors = gradients[part.tensors] if is_encoded else [memory[part.elements]]
        return state.process_group.allreduce_coalesced(tensors, options)

    return future_of(state.send(plan, step, call), lambda: buffer, buffer.device)


# The compiler traces the backward pass and its hooks into one graph, and cannot trace calls of the native module.
@_disable_dynamo
def _mean_of_one(
    state: CompressionState, gradient: torch.Tensor, parameter: torch.Tensor
) -> torch.futures.Future[torch.Tensor]:
    """Averages one gradient in place. It waits for the calls itself, because the Python reducer does not wait for the future."""
    state.check_device(gradient.device)
    step = state.next_call(state.name_of(parameter))
    if gradient.is_sparse:
        gradient.copy_(_mean_of_sparse(state, gradient).wait())
        works = []
    else:
        plan = state.plan(
            [parameter], [gradient.numel()], gradient.dtype, step, lambda: [gradient], state.process_group
        )
        options = dist.AllreduceCoalescedOptions()
        options.reduceOp = dist.ReduceOp.AVG
        options.asyncOp = True
        works = state.send(
            plan, step, lambda part, is_encoded: state.process_group.allreduce_coalesced([gradient], options)
        )
    for work in works:
        work.wait()
    return future_of([], lambda: gradient, gradient.device)


def _mean_of_sparse(state: CompressionState, gradient: torch.Tensor) -> torch.futures.Future[torch.Tensor]:
    """Averages the sparse gradient of an embedding with `sparse=True`, uncompressed."""
    options = dist.AllreduceOptions()
    options.asyncOp = True
    mean = gradient / state.world
    with exact():
        work = state.process_group.allreduce([mean], options)
    return future_of([work], lambda: mean)
