"""Replicas of a net, each on its own ranks, in DistributedDataParallel, FSDP2 or FullyShardedDataParallel.

Owns that a batch which fails in one replica fails in all. Otherwise the other replicas would wait in the reduction of
gradients, and the failed replica's next batch would be reduced with their last.
"""

from __future__ import annotations

import sys
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from .._ranks.failures import LayerParallelError, described
from .._ranks.wire import Wire
from .solver import Solver

__all__ = ["agree"]


# For each model given to `step`: its class, which FSDP2 changes, and the groups that connect its replicas.
_known: WeakKeyDictionary[nn.Module, tuple[type, list[dist.ProcessGroup]]] = WeakKeyDictionary()
# Maximum number of failed replicas that are shown.
_SHOWN = 3


def agree(model: nn.Module, solver: Solver, error: BaseException | None) -> None:
    """Raises on all replicas if the batch failed in any. All replicas call it together.

    `error` is the failure of this replica, or None.

    Raises:
        LayerParallelError: what failed, with replica, ranks and cause. If all replicas have the same error, it is
            raised unchanged.
        BaseException: this replica's own interrupt, after the other replicas know of it.
    """
    try:
        _agree(model, solver, error)
    finally:
        # The error must not refer to itself through this frame.
        del error


def _agree(model: nn.Module, solver: Solver, error: BaseException | None) -> None:
    # If a process is lost, its ranks cannot answer.
    is_lost = isinstance(error, dist.DistError)
    groups = [] if is_lost else _groups_of(model)
    what = f"comparing the results of replicas, before batch {solver.shared.number}"
    has_failed = int(error is not None)
    for group in groups:
        wire = Wire(group)
        numbers = torch.tensor([has_failed], dtype=torch.int64, device=wire.device)
        [has_failed] = wire.together(numbers, what, is_greatest=True)
    if not has_failed:
        return
    if not groups:
        assert error is not None
        try:
            raise error
        finally:
            del error
    cause = None if error is None else str(error) if isinstance(error, LayerParallelError) else described(error)
    found = [(solver.replica, solver.wire.ranks, cause, solver.shared.number)]
    for group in groups:
        found = [each for part in Wire(group).gathered(found) for each in part]
    # A replica that failed before its batch began has counted one batch less.
    solver.shared.number = max(number for *_, number in found)
    failed = sorted((replica, ranks, cause) for replica, ranks, cause, _ in found if cause is not None)
    are_alike = len(failed) == len(found) and len({cause for *_, cause in failed}) == 1
    if error is not None and (are_alike or not isinstance(error, Exception)):
        try:
            raise error
        finally:
            del error
    shown = [
        f"replica {replica} (ranks {', '.join(map(str, ranks))}) failed: {cause}" for replica, ranks, cause in failed
    ]
    more = f"; and {len(shown) - _SHOWN} more replicas" if len(shown) > _SHOWN else ""
    raise LayerParallelError(
        f"no replica accumulated gradients of this batch: {'; '.join(shown[:_SHOWN])}{more}"
    ) from error


def _groups_of(model: nn.Module) -> list[dist.ProcessGroup]:
    kind, found = _known.get(model, (None, []))
    if kind is not type(model):
        found = [group for group in _found_groups(model) if group.size() > 1]
        _known[model] = type(model), found
    # In `join()`, a replica without remaining data takes part only in the reductions that `join()` knows.
    if found and any(getattr(getattr(module, "_join_config", None), "enable", False) for module in _wrappers(model)):
        return []
    return found


def _found_groups(model: nn.Module) -> list[dist.ProcessGroup]:
    found = [module.process_group for module in _wrappers(model)]
    if "torch.distributed.fsdp" in sys.modules:
        from ...compression._torch_names import data_groups_of, parameter_groups

        found += [each for *_, groups in parameter_groups(model) for group in groups for each in data_groups_of(group)]
    return list({id(group): group for group in found}.values())


def _wrappers(model: nn.Module) -> list[Any]:
    fully_sharded: Any = getattr(sys.modules.get("torch.distributed.fsdp"), "FullyShardedDataParallel", ())
    return [module for module in model.modules() if isinstance(module, (DistributedDataParallel, fully_sharded))]
