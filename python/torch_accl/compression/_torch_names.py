"""Names of torch's FSDP2 that are not public and that `apply_fsdp2` needs, with the versions of torch that have them.

Owns the table, and the objects behind the names: nothing else in the package touches the inside of FSDP2. Where torch has a public way it is
taken: `set_custom_reduce_scatter`, whose object also allocates the rows that are reduced, and `__torch_function__`, which
`torch.distributed.all_reduce` asks. What torch does not tell is which parameters a row has, and which group replicas have.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

__all__ = ["NAMES", "Name", "Rows", "asks_torch_function", "parameter_groups", "replicas_of"]


@dataclass(frozen=True)
class Name:
    """An attribute of an object of torch.

    Attributes:
        of: whose it is: an FSDP2 `module`, its `state`, a `group` of parameters of the state, a `param` of the group, or the `mesh`
            of a group that has replicas.
        name: of the attribute.
        since: the first version of torch that has it, of those that are served.
        use: what it is for.
    """

    of: str
    name: str
    since: tuple[int, int]
    use: str


NAMES = (
    Name("module", "_get_fsdp_state", (2, 13), "the state of a module"),
    Name("state", "_fsdp_param_groups", (2, 13), "the groups of parameters that are reduced together"),
    Name("group", "fsdp_params", (2, 13), "the parameters of a group"),
    Name("group", "mesh_info", (2, 13), "the mesh of a group"),
    Name(
        "group", "_prepare_reduce_scatter_inputs", (2, 15), "which parameters a row has; before, all that are trained"
    ),
    Name("mesh", "replicate_process_group", (2, 13), "the group of replicas"),
    Name("param", "sharded_param", (2, 13), "the parameter as the model has it"),
    Name("param", "padded_sharded_param_size", (2, 13), "its part of a row"),
)


def parameter_groups(model: nn.Module) -> Iterator[tuple[str, Any, list[Any]]]:
    """The modules of FSDP2 in a model, with their names and groups of parameters; those that share a group once, by the first."""
    from torch.distributed.fsdp import FSDPModule

    seen = set()
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
    """The process group in which a group of parameters is all-reduced; None without replicas."""
    return getattr(_get(group, "mesh_info"), "replicate_process_group", None)


def asks_torch_function() -> bool:
    """Whether `torch.distributed.all_reduce` leaves a tensor of a class of ours to that class."""
    try:
        dist.all_reduce(_Probe())  # type: ignore[arg-type]
    except TypeError:
        # The probe is no tensor: nothing was sent.
        return False
    return True


class _Probe:
    @classmethod
    def __torch_function__(cls, *_: Any) -> None:
        return None


class Rows:
    """The parameters whose gradients are in a rank's row, in their order there."""

    def __init__(self, group: Any) -> None:
        self._group = group
        self._last: list[Any] | None = None
        prepare: Callable[..., Any] | None = getattr(group, "_prepare_reduce_scatter_inputs", None)
        if prepare is None:
            return

        # What torch is about to lay out, it says here.
        def prepared(params: list[Any], gradients: list[torch.Tensor], world: int) -> Any:
            self._last = list(params)
            return prepare(params, gradients, world)

        group._prepare_reduce_scatter_inputs = prepared

    def last(self) -> tuple[list[torch.Tensor], list[int]]:
        """Of the row that is being reduced, parameters and elements; of an older torch, all that are trained."""
        params = self._last
        if params is None:
            params = [param for param in _get(self._group, "fsdp_params") if _get(param, "sharded_param").requires_grad]
        shards = [_get(param, "padded_sharded_param_size").numel() for param in params]
        return [_get(param, "sharded_param") for param in params], shards


def _get(thing: Any, name: str) -> Any:
    """An attribute that is in the table.

    Raises:
        RuntimeError: this torch does not have it.
    """
    try:
        return getattr(thing, name)
    except AttributeError:
        [row] = [row for row in NAMES if row.name == name]
        raise RuntimeError(
            f"apply_fsdp2: torch {torch.__version__} has no {type(thing).__name__}.{name} ({row.use}); it is known of torch 2.13 to 2.15, "
            "so take one of these, or train without apply_fsdp2"
        ) from None
