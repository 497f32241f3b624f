"""The communication hook of DistributedDataParallel.

Its annotations are objects: DistributedDataParallel compares them.
"""

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import GradBucket
from torch._compile import _disable_dynamo

from ._buckets import gradients_of
from ._plans import Part
from ._scope import check_device, exact
from ._state import CompressionState
from ._together import future_of

__all__ = ["ddp_hook"]


def ddp_hook(state: CompressionState, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Averages a bucket of gradients, those compressed that the state says.

    For `DistributedDataParallel.register_comm_hook(state, ddp_hook)`. It knows gradients by their parameters, so that the
    order of buckets and their making anew do not matter; several models have a state each.

    Where DistributedDataParallel's reducer is the one in Python (`torch._dynamo.config.optimize_ddp = "python_reducer"`), it hands over
    gradients one by one, and each is a call of its own.

    Raises:
        RuntimeError: a parameter came into the model after the state was made, gradients are not on the CPU, or they are not the whole bucket.
    """
    if isinstance(bucket, tuple):
        return _mean_of_one(state, *bucket)
    buffer = bucket.buffer()
    check_device(buffer.device, state.process_group)
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

    return future_of(state.send(plan, step, call), lambda: buffer)


# The compiler makes one graph of the backward pass and of hooks, and a call of ours is nothing that it can look into.
@_disable_dynamo
def _mean_of_one(
    state: CompressionState, gradient: torch.Tensor, parameter: torch.Tensor
) -> torch.futures.Future[torch.Tensor]:
    """Averages a gradient where it is: nobody waits for the future."""
    check_device(gradient.device, state.process_group)
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
    future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    future.set_result(gradient)
    return future


def _mean_of_sparse(state: CompressionState, gradient: torch.Tensor) -> torch.futures.Future[torch.Tensor]:
    """The gradient of an embedding with `sparse=True`, which travels as it is."""
    options = dist.AllreduceOptions()
    options.asyncOp = True
    mean = gradient / state.world
    with exact():
        work = state.process_group.allreduce([mean], options)
    return future_of([work], lambda: mean)
