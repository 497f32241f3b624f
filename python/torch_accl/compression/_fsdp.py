"""Compression of the reduce_scatter of FSDP2 (`torch.distributed.fsdp.fully_shard`)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import nn

from ._scope import accl_group, encoded
from ._state import State

__all__ = ["apply_fsdp2"]


def apply_fsdp2(model: nn.Module, state: State) -> None:
    """Lets every FSDP2 module in `model` reduce its gradients compressed.

    Args:
        model: a module to which `fully_shard` was applied, as were its parts perhaps.
        state: made of the same model, after `fully_shard`.

    Supports SUM, AVG and PREMUL_SUM. Parameters that the state leaves out travel as they are, in the same call.

    Raises:
        RuntimeError: this torch has no `set_custom_reduce_scatter`, or nothing in the model is sharded.
    """
    try:
        from torch.distributed.fsdp import FSDPModule
    except ImportError:
        raise RuntimeError("this version of torch has no FSDP2") from None
    modules = [module for module in model.modules() if isinstance(module, FSDPModule)]
    if not modules:
        raise RuntimeError("nothing in the model is sharded by FSDP2; call fully_shard first")
    if not hasattr(FSDPModule, "set_custom_reduce_scatter"):
        raise RuntimeError(
            "this version of torch does not let FSDP2 have a reduce_scatter of our own; 2.9 and newer do"
        )
    for module in modules:
        group = module._get_fsdp_state()._fsdp_param_group
        if group is not None:
            module.set_custom_reduce_scatter(_reduce_scatter(state, group))


def _reduce_scatter(state: State, params: object) -> object:
    from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultReduceScatter

    class CompressedReduceScatter(DefaultReduceScatter):
        """Each rank's row is cut into the shards of the module's parameters, which are tensors of one call."""

        calls = 0

        def __call__(
            self,
            output_tensor: torch.Tensor,
            input_tensor: torch.Tensor,
            group: dist.ProcessGroup,
            op: dist.ReduceOp.RedOpType,
            async_op: bool = False,
        ) -> dist.Work | None:
            accl_group(group)
            trained = [param for param in params.fsdp_params if param.sharded_param.requires_grad]
            shards = [param.padded_sharded_param_size.numel() for param in trained]
            check_row(shards, output_tensor.numel())
            parameters = [param.sharded_param for param in trained]
            plan = state.plan(parameters, shards, output_tensor.dtype, group.size())
            step, self.calls = self.calls, self.calls + 1
            state.step = max(state.step, self.calls)
            is_on = state.is_on(plan, step)
            state.count(plan, is_on)
            if not is_on:
                return super().__call__(output_tensor, input_tensor, group, op, async_op)
            outputs = list(output_tensor.split(shards))
            inputs = list(input_tensor.view(group.size(), -1).split(shards, dim=1))
            options = dist.ReduceScatterOptions()
            options.reduceOp = op
            options.asyncOp = async_op
            with encoded(plan.codecs, state.compression.seed, step, plan.residuals):
                # A blocking call is done by now, and has no Work.
                return group.reduce_scatter_tensor_coalesced(outputs, inputs, options)

    return CompressedReduceScatter()


def check_row(shards: Sequence[int], elements: int) -> None:
    """Whether the shards of a module's parameters make up a rank's row.

    Raises:
        RuntimeError: they do not: FSDP2 has laid them out in another way than this version knows.
    """
    if sum(shards) != elements:
        raise RuntimeError(
            f"the shards of a module's parameters have {sum(shards)} elements ({', '.join(map(str, shards))}), and a rank's "
            f"row of the reduce_scatter has {elements}; this version of torch lays gradients out in a way that "
            "torch_accl does not know: train without apply_fsdp2"
        )
