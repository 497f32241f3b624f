"""Non-public names of torch's FSDP2 that `apply_fsdp2` and `layer_parallel.step` need, with the versions of torch that have them.

This module owns the table and the objects behind the names. No other module of the package uses FSDP2's internals. Public
interfaces are used where torch has them: `set_custom_reduce_scatter`, whose object also allocates the rows that are reduced, and
`__torch_function__`, which `torch.distributed.all_reduce` calls. torch has no public way to find the parameters of a row, or
the group of replicas.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

__all__ = ["NAMES", "Name", "Rows", "asks_torch_function", "data_groups_of", "parameter_groups", "replicas_of"]


@dataclass(frozen=True)
class Name:
    """An attribute of a torch object.

    Attributes:
        of: owner of the attribute: an FSDP2 `module`, its `state`, a `group` of parameters of the state, a `param` of the group,
            a `mesh`, a `process_group`, or `torch._C`. A `param` must have been gathered once; the `group` of a `mesh` must have
            replicas.
        name: name of the attribute.
        versions: supported versions of torch that have the attribute.
        use: purpose of the attribute.
    """

    of: str
    name: str
    versions: tuple[str, ...]
    use: str


_ALL = ("2.13", "2.14", "2.15")

NAMES = (
    Name("module", "_get_fsdp_state", _ALL, "the state of a module"),
    Name("state", "_fsdp_param_groups", _ALL, "the groups of parameters that are reduced together"),
    Name("group", "fsdp_params", _ALL, "the parameters of a group"),
    Name("group", "mesh_info", _ALL, "the mesh of a group"),
    Name("mesh", "replicate_process_group", _ALL, "the group of replicas"),
    Name("param", "sharded_param", _ALL, "the parameter as the model has it"),
    Name("param", "padded_sharded_param_size", _ALL, "its part of a row"),
    # The parameters of a row: torch 2.15 passes them to the first name; for older versions they follow from the other names.
    Name("group", "_prepare_reduce_scatter_inputs", ("2.15",), "the parameters that are laid out in a row"),
    Name("group", "post_backward", _ALL, "called before a row is laid out"),
    Name("group", "reduce_scatter_unused_params", _ALL, "whether zeros are laid out, too"),
    Name("param", "_unsharded_param", _ALL, "whether it was gathered"),
    Name("param", "unsharded_param", _ALL, "its gradient"),
    Name("param", "unsharded_accumulated_grad", _ALL, "its gradient of passes that were not reduced"),
    # torch's notes on extending it mention this name, although it is not public.
    Name("torch._C", "DisableTorchFunctionSubclass", _ALL, "a row is a plain tensor but for its all_reduce"),
    Name("process_group", "_get_backend", _ALL, "whether a device has the accl backend"),
)


def parameter_groups(model: nn.Module) -> Iterator[tuple[str, Any, list[Any]]]:
    """Yields the FSDP2 modules of a model: name, module, groups of parameters. A shared group is only at its first module."""
    from torch.distributed.fsdp import FSDPModule

    seen: set[int] = set()
    for name, module in model.named_modules():
        if not isinstance(module, FSDPModule):
            continue
        groups = [
            group for group in _get(_get(module, "_get_fsdp_state")(), "_fsdp_param_groups") if id(group) not in seen
        ]
        seen.update(map(id, groups))
        if groups:
            yield name, module, groups


def replicas_of(group: Any) -> dist.ProcessGroup | None:
    """Returns the process group in which a group of parameters is all-reduced; None without replicas."""
    return getattr(_get(group, "mesh_info"), "replicate_process_group", None)


def data_groups_of(group: Any) -> list[dist.ProcessGroup]:
    """Returns the process groups whose ranks have different data: the group of shards and the group of replicas."""
    mesh = _get(group, "mesh_info")
    found = [getattr(mesh, name, None) for name in ("shard_process_group", "replicate_process_group")]
    return [each for each in found if each is not None]


def asks_torch_function() -> bool:
    """Whether `torch.distributed.all_reduce` calls `__torch_function__` of a tensor subclass."""
    probe: Any = _Probe()
    try:
        dist.all_reduce(probe)
    except TypeError:
        # The probe is not a tensor, so nothing was sent.
        return False
    return True


class _Probe:
    @classmethod
    def __torch_function__(cls, *_: Any) -> None:
        return None


class Rows:
    """The parameters whose gradients are in a rank's row, in the order of the row."""

    def __init__(self, group: Any) -> None:
        self._group = group
        self._last: list[Any] | None = None
        prepare: Callable[..., Any] | None = getattr(group, "_prepare_reduce_scatter_inputs", None)
        if prepare is None:
            self._look_before_the_call()
            return

        # torch calls this function with the parameters that it is about to lay out.
        def prepared(params: list[Any], gradients: list[torch.Tensor], world: int) -> Any:
            self._last = list(params)
            return prepare(params, gradients, world)

        group._prepare_reduce_scatter_inputs = prepared

    def _look_before_the_call(self) -> None:
        """Wraps `post_backward` of torch before 2.15, which lays out the parameters that have a gradient at that point."""
        group, post_backward = self._group, _get(self._group, "post_backward")

        def looked(*unused: Any) -> None:
            with_zeros = _get(group, "reduce_scatter_unused_params")
            self._last = [param for param in _get(group, "fsdp_params") if _is_reduced(param, with_zeros)]
            post_backward(*unused)

        group.post_backward = looked

    def last(self) -> tuple[list[torch.Tensor], list[int]]:
        """Returns parameters and elements of the row that is being reduced; all trained parameters if torch passed none."""
        params = self._last
        if params is None:
            params = [param for param in _get(self._group, "fsdp_params") if _get(param, "sharded_param").requires_grad]
        shards = [_get(param, "padded_sharded_param_size").numel() for param in params]
        return [_get(param, "sharded_param") for param in params], shards


def _is_reduced(param: Any, with_zeros: bool) -> bool:
    """Whether FSDP2 of torch before 2.15 reduces a gradient of this parameter in the next call."""
    # Only a parameter that was gathered has this attribute.
    if not hasattr(param, "_unsharded_param"):
        return False
    unsharded = _get(param, "unsharded_param")
    if _get(param, "unsharded_accumulated_grad") is not None or unsharded.grad is not None:
        return True
    return with_zeros and unsharded.requires_grad


def _get(thing: Any, name: str) -> Any:
    """Returns an attribute that is in the table.

    Raises:
        RuntimeError: this torch does not have it.
    """
    try:
        return getattr(thing, name)
    except AttributeError:
        [row] = [row for row in NAMES if row.name == name]
        raise RuntimeError(
            f"apply_fsdp2: torch {torch.__version__} has no {type(thing).__name__}.{name} ({row.use}); use torch 2.13 "
            "to 2.15, or train without apply_fsdp2"
        ) from None
