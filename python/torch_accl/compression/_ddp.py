"""The communication hook of DistributedDataParallel.

Its annotations are objects: DistributedDataParallel compares them.
"""

import torch
import torch.distributed as dist

from ._scope import encoded
from ._state import State

__all__ = ["ddp_hook"]


def ddp_hook(state: State, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Averages a bucket of gradients, those compressed that the state says.

    For `DistributedDataParallel.register_comm_hook(state, ddp_hook)`. It knows gradients by their parameters, so that the
    order of buckets and their making anew do not matter; several models have a state each.

    Raises:
        RuntimeError: a parameter came into the model after the state was made.
    """
    parameters, gradients = bucket.parameters(), bucket.gradients()
    plan = state.plan(parameters, [gradient.numel() for gradient in gradients], bucket.buffer().dtype)
    is_on = state.is_on(plan, state.step)
    state.count(plan, is_on)
    options = dist.AllreduceCoalescedOptions()
    options.reduceOp = dist.ReduceOp.AVG
    options.asyncOp = True
    if is_on:
        with encoded(plan.codecs, state.compression.seed, state.step, plan.residuals):
            work = state.process_group.allreduce_coalesced(gradients, options)
    else:
        work = state.process_group.allreduce_coalesced([bucket.buffer()], options)
    if bucket.is_last():
        state.step += 1
    buffer = bucket.buffer()
    return work.get_future().then(lambda future: _result(future, buffer))


def _result(future: torch.futures.Future, buffer: torch.Tensor) -> torch.Tensor:
    # An error of the call is raised here, and reaches the backward pass.
    future.value()
    return buffer
