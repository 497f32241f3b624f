"""Compression of the gradients that FSDP2 sends (`torch.distributed.fsdp.fully_shard`, and `replicate`, which is built on it).

FSDP2 sends gradients in two calls. The ranks that share a model run a reduce_scatter, which torch lets a user replace. With
replicas, each shard is all-reduced between the replicas, and torch has no hook for that call. But the object that replaces
the reduce_scatter also allocates the row of gradients that is reduced. It allocates a tensor subclass, and
`torch.distributed.all_reduce` asks the subclass first (`__torch_function__`). For all other operations the row, and any
tensor made from it, is a plain tensor.

This module owns both calls. `_torch_names.py` owns what must be known of torch's internals.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import distributed_c10d
from torch.distributed.tensor import DTensor

from ._futures import WorkOfSeveral
from ._plans import Part, Plan
from ._scope import Op, accl_group
from ._state import REPLICAS, CompressionState
from ._torch_names import Rows, asks_torch_function, parameter_groups, replicas_of

__all__ = ["apply_fsdp2"]


def apply_fsdp2(model: nn.Module, state: CompressionState) -> None:
    """Makes every FSDP2 module in `model` reduce its gradients compressed, also between replicas.

    Args:
        model: a module to which `fully_shard` or FSDP2's `replicate` was applied; it may have been applied to its parts, too.
        state: the state, created from the same model after that.

    SUM, AVG and PREMUL_SUM are supported. Parameters that the state leaves out are sent uncompressed, in the same call. On a
    mesh with replicas both calls are compressed: the reduce_scatter, and the all_reduce of shards between replicas. The latter
    has separate rows in `CompressionState.measures`.

    Raises:
        RuntimeError: nothing in the model is sharded or replicated by FSDP2; a module has several meshes; a module's group reduces
            gradients on the mesh's device with another backend than accl; or this torch lacks a needed name, which the message
            states.
    """
    try:
        from torch.distributed.fsdp import FSDPModule
    except ImportError:
        raise RuntimeError("this version of torch has no FSDP2") from None
    if not any(isinstance(module, FSDPModule) for module in model.modules()):
        raise RuntimeError("nothing in the model is sharded by FSDP2; call fully_shard first")
    if not hasattr(FSDPModule, "set_custom_reduce_scatter"):
        raise RuntimeError(
            "this version of torch does not support a custom reduce_scatter in FSDP2; use torch 2.13 or newer"
        )
    found = list(parameter_groups(model))
    # All modules are checked before any is changed.
    for name, module, groups in found:
        if len(groups) > 1:
            raise RuntimeError(
                f"apply_fsdp2: parameters of module {name!r} are sharded over {len(groups)} meshes, and torch does not "
                "support a custom reduce_scatter for such a module; call fully_shard separately for each part that "
                "has another mesh"
            )
        _check_groups(name, module, groups[0])
    for name, module, [group] in found:
        module.set_custom_reduce_scatter(_Reduction(state, name, group))


def _check_groups(name: str, module: nn.Module, group: Any) -> None:
    """Refuses a module whose gradients would be sent uncompressed."""
    replicas = replicas_of(group)
    # The meshes are checked, not the parameters: offloaded parameters are on another device than their reduced gradients.
    meshes = list({each.device_mesh: None for each in module.parameters() if isinstance(each, DTensor)})
    if replicas is not None:
        accl_group(replicas, torch.device(meshes[0].device_type) if meshes else None)
        if not asks_torch_function():
            raise RuntimeError(
                f"apply_fsdp2: gradients of module {name!r} cannot be compressed between replicas, because all_reduce "
                f"of torch {torch.__version__} does not call __torch_function__; use torch 2.13 to 2.15, or train "
                "without apply_fsdp2"
            )
    for mesh in meshes:
        accl_group(mesh.get_group(0), torch.device(mesh.device_type))


class _Reduction:
    """Replacement for the reduce_scatter of a module; its interface is `Comm` and `ReduceScatter` of FSDP2."""

    def __init__(self, state: CompressionState, module: str, group: Any) -> None:
        self._state = state
        self._module = module
        self._rows = Rows(group)
        replicas = replicas_of(group)
        self._has_replicas = replicas is not None and replicas.size() > 1

    def allocate(self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Allocates a row of gradients, for one rank or for all. With replicas the row carries its own all_reduce."""
        row = torch.empty(*size, dtype=dtype, device=device)
        if not self._has_replicas:
            return row
        of_replica = row.as_subclass(_RowOfReplica)
        of_replica.between_replicas = self._all_reduce
        return of_replica

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        op: Op,
        async_op: bool = False,
    ) -> dist.Work | None:
        """Runs the reduce_scatter. Each rank's row is split into the shards of the module's parameters, one tensor per shard."""
        output_tensor, input_tensor = _plain(output_tensor), _plain(input_tensor)
        accl_group(group, output_tensor.device)
        parameters, shards = self._rows.last()
        check_row(shards, output_tensor.numel())
        step = self._state.next_call(self._module)

        def inputs() -> list[torch.Tensor]:
            return list(input_tensor.view(group.size(), -1).split_with_sizes(shards, dim=1))

        plan = self._state.plan(parameters, shards, output_tensor.dtype, step, inputs, group, group.size())
        # The split tensors serve all calls. A single uncompressed call uses torch's own function on the whole tensors.
        is_whole = len(plan.parts) == 1 and not plan.is_encoded
        blocks, outputs = ([], []) if is_whole else (inputs(), list(output_tensor.split_with_sizes(shards)))
        options = dist.ReduceScatterOptions()
        options.reduceOp = op
        # Several calls are in flight together, even if the caller blocks.
        options.asyncOp = async_op or len(plan.parts) > 1

        def call(part: Part, is_encoded: bool) -> dist.Work | None:
            if not is_encoded and len(plan.parts) == 1:
                return dist.reduce_scatter_tensor(output_tensor, input_tensor, op, group, async_op)
            own = part.tensors
            return group.reduce_scatter_tensor_coalesced(outputs[own], blocks[own], options)

        return _ended(plan, self._state.send(plan, step, call, op, group.size()), output_tensor, async_op)

    def _all_reduce(
        self,
        row: torch.Tensor,
        op: Op = dist.ReduceOp.SUM,
        group: dist.ProcessGroup | None = None,
        async_op: bool = False,
    ) -> dist.Work | None:
        """Runs the all_reduce of this rank's shards between replicas, one tensor per shard."""
        group = accl_group(group, row.device)
        parameters, shards = self._rows.last()
        check_row(shards, row.numel())
        step = self._state.next_call(self._module + REPLICAS)
        tensors = list(row.view(-1).split_with_sizes(shards))
        plan = self._state.plan(parameters, shards, row.dtype, step, lambda: tensors, group, leg=REPLICAS)
        options = dist.AllreduceCoalescedOptions()
        options.reduceOp = op
        options.asyncOp = async_op or len(plan.parts) > 1

        def call(part: Part, is_encoded: bool) -> dist.Work | None:
            if not is_encoded and len(plan.parts) == 1:
                return dist.all_reduce(row, op, group, async_op)
            return group.allreduce_coalesced(tensors[part.tensors], options)

        return _ended(plan, self._state.send(plan, step, call, op, group.size()), row, async_op)


class _RowOfReplica(torch.Tensor):
    """A row whose first all_reduce runs `between_replicas`. Calls that a user's hook issues on it later are not compressed."""

    between_replicas: Callable[..., dist.Work | None]

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        with torch._C.DisableTorchFunctionSubclass():
            if func is distributed_c10d.all_reduce and args and isinstance(args[0], cls):
                between_replicas = args[0].__dict__.pop("between_replicas", None)
                if between_replicas is not None:
                    return between_replicas(_plain(args[0]), *args[1:], **kwargs)
            return func(*args, **kwargs)


def _plain(tensor: torch.Tensor) -> torch.Tensor:
    """Returns a plain tensor on the same memory."""
    return tensor.as_subclass(torch.Tensor)


def _ended(plan: Plan, works: list[dist.Work], result: torch.Tensor, async_op: bool) -> dist.Work | None:
    if len(plan.parts) == 1:
        return works[0] if works else None
    work = WorkOfSeveral(works, [result])
    if async_op:
        return work
    work.wait()
    return None


def check_row(shards: Sequence[int], elements: int) -> None:
    """Checks that the shards of a module's parameters make up a rank's row.

    Raises:
        RuntimeError: they do not, because FSDP2 has laid them out in a way that this version does not know.
    """
    if sum(shards) != elements:
        raise RuntimeError(
            f"the shards of a module's parameters have {sum(shards)} elements ({', '.join(map(str, shards))}), but a "
            f"rank's row of gradients has {elements}: either some parameters had no gradient in this backward pass, or "
            "torch_accl does not support the gradient layout of this version of torch; use all parameters, or train "
            "without apply_fsdp2"
        )
