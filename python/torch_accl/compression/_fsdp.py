"""Compression of the reduce_scatter of FSDP2 (`torch.distributed.fsdp.fully_shard`)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ._plans import Part
from ._scope import accl_group
from ._state import State
from ._together import WorkOfSeveral

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
    for name, module in model.named_modules():
        group = module._get_fsdp_state()._fsdp_param_group if isinstance(module, FSDPModule) else None
        if group is not None:
            module.set_custom_reduce_scatter(_reduce_scatter(state, name, group))


def _reduce_scatter(state: State, module: str, group: Any) -> object:
    from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultReduceScatter

    laid_out = _Row(group)

    class CompressedReduceScatter(DefaultReduceScatter):
        """Each rank's row is cut into the shards of the module's parameters, which are tensors of a call."""

        def __call__(
            self,
            output_tensor: torch.Tensor,
            input_tensor: torch.Tensor,
            group: dist.ProcessGroup,
            op: dist.ReduceOp.RedOpType,
            async_op: bool = False,
        ) -> dist.Work | None:
            accl_group(group)
            params = laid_out.parameters()
            shards = [param.padded_sharded_param_size.numel() for param in params]
            check_row(shards, output_tensor.numel())
            parameters = [param.sharded_param for param in params]
            step = state.next_call(module)

            def inputs() -> list[torch.Tensor]:
                return list(input_tensor.view(group.size(), -1).split(shards, dim=1))

            plan = state.plan(parameters, shards, output_tensor.dtype, step, inputs, group, group.size())
            # Of all calls, and laid out once; torch's own takes the whole.
            is_whole = len(plan.parts) == 1 and not plan.is_encoded
            blocks, outputs = ([], []) if is_whole else (inputs(), list(output_tensor.split(shards)))
            options = dist.ReduceScatterOptions()
            options.reduceOp = op
            # Several calls are under way together, whoever waits for them.
            options.asyncOp = async_op or len(plan.parts) > 1

            def call(part: Part, is_encoded: bool) -> dist.Work | None:
                if not is_encoded and len(plan.parts) == 1:
                    return super(CompressedReduceScatter, self).__call__(
                        output_tensor, input_tensor, group, op, async_op
                    )
                own = part.tensors
                return group.reduce_scatter_tensor_coalesced(outputs[own], blocks[own], options)

            works = state.send(plan, step, call)
            if len(plan.parts) == 1:
                return works[0] if works else None
            work = WorkOfSeveral(works, [output_tensor])
            if async_op:
                return work
            work.wait()
            return None

    return CompressedReduceScatter()


class _Row:
    """The parameters of a module whose gradients are in a rank's row, in their order there."""

    def __init__(self, group: Any) -> None:
        self._group = group
        self._last: list[Any] | None = None
        prepare = getattr(group, "_prepare_reduce_scatter_inputs", None)
        if prepare is None:
            return

        # What torch is about to lay out, it says here.
        def prepared(params: list[Any], gradients: list[torch.Tensor], world: int) -> Any:
            self._last = list(params)
            return prepare(params, gradients, world)

        group._prepare_reduce_scatter_inputs = prepared

    def parameters(self) -> list[Any]:
        """Of the call that is being made; of an older torch, all that are trained."""
        if self._last is not None:
            return self._last
        return [param for param in self._group.fsdp_params if param.sharded_param.requires_grad]


def check_row(shards: Sequence[int], elements: int) -> None:
    """Whether the shards of a module's parameters make up a rank's row.

    Raises:
        RuntimeError: they do not: FSDP2 has laid them out in another way than this version knows.
    """
    if sum(shards) != elements:
        raise RuntimeError(
            f"the shards of a module's parameters have {sum(shards)} elements ({', '.join(map(str, shards))}), and a rank's "
            f"row of the reduce_scatter has {elements}: either some of them had no gradient in this backward pass, or this version "
            "of torch lays gradients out in a way that torch_accl does not know; use all parameters, or train without apply_fsdp2"
        )
