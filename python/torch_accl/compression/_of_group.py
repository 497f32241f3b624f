"""The group that a state belongs to, and copies of a state: a pickled state has no group.

This module owns which group a state has and when it is found, pickling and copying. The derived class (`_state.py`) defines
the rest of a state, by `_portable` and `_restore`.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Mapping
from typing import Any, Self

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ._scope import accl_group, devices_of, refuse_device

__all__ = ["OfGroup", "group_of"]

# Version of the pickle format. Pickles of the first format have no version.
VERSION = 1


class OfGroup:
    """An object that belongs to a group.

    Attributes:
        world: number of ranks of the group.
        rank: this rank's number in the group.
    """

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        self._group: dist.ProcessGroup | None = accl_group(group)
        # Types of devices whose tensors the group reduces with accl.
        self._devices = devices_of(self._group)
        self._is_of_default_group = self._group is dist.group.WORLD
        self.world: int = self._group.size()
        self.rank: int = self._group.rank()

    @property
    def process_group(self) -> dist.ProcessGroup:
        """The group of the gradients.

        An unpickled object has no group. If its group was the default group, it takes the current one. Otherwise the caller must
        set this property.

        Raises:
            RuntimeError: the property was not set, or the group's backend is not accl.
        """
        if self._group is None:
            if not self._is_of_default_group:
                raise RuntimeError(
                    f"compression: this state comes from a file and belonged to a group of {self.world} ranks other "
                    "than the default group; set its process_group to that group"
                )
            self.process_group = accl_group(None)
        assert self._group is not None, "set above"
        return self._group

    @process_group.setter
    def process_group(self, group: dist.ProcessGroup | None) -> None:
        found = accl_group(group)
        world, rank = found.size(), found.rank()
        if world != self.world:
            self._leave(self.world, world)
        self._group = found
        self._devices = devices_of(found)
        self._is_of_default_group = found is dist.group.WORLD
        self.world, self.rank = world, rank

    def check_device(self, device: torch.device) -> None:
        """Checks that gradients on this device can be compressed.

        Raises:
            RuntimeError: they cannot, because the group reduces them with another backend or has none for the device.
        """
        group = self.process_group
        if device.type not in self._devices:
            refuse_device(device, group)

    def __getstate__(self) -> dict[str, Any]:
        warnings.warn(
            "compression: process_group is not saved with a state, and neither is a gradient scaler. A loaded state "
            "takes the default group if it belonged to the default group; otherwise set process_group",
            stacklevel=2,
        )
        return {**self._portable(), "version": VERSION}

    def __setstate__(self, saved: Mapping[str, Any]) -> None:
        parts = dict(saved)
        version = parts.pop("version", 0)
        if version > VERSION:
            raise ValueError(
                f"compression: the state was pickled in version {version}; this version of torch_accl supports up to "
                f"{VERSION}"
            )
        self._restore(self._migrated(parts, version))

    def __copy__(self) -> Self:
        return self._with_group({name: _shallow(value) for name, value in self._portable().items()})

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        # The group itself is not copied: the copy belongs to the same group.
        return self._with_group(copy.deepcopy(self._portable(), memo))

    def _with_group(self, parts: Mapping[str, Any]) -> Self:
        made = type(self).__new__(type(self))
        made._restore(parts)
        made._group = self._group
        return made

    def _portable(self) -> dict[str, Any]:
        """Returns the parts for a copy or a pickle, without anything that belongs only to this process."""
        return {**self.__dict__, "_group": None}

    def _migrated(self, parts: dict[str, Any], version: int) -> dict[str, Any]:
        """Converts the parts of an older pickle version to those that `_portable` returns now."""
        return parts

    def _restore(self, parts: Mapping[str, Any]) -> None:
        """Sets the attributes from the parts that `_portable` returned."""
        self.__dict__.update(parts)

    def _leave(self, before: int, now: int) -> None:
        """Called when the group is about to change from `before` to `now` ranks."""


def group_of(model: nn.Module, given: dist.ProcessGroup | None) -> dist.ProcessGroup | None:
    """Returns the group of a model that is wrapped in DistributedDataParallel, otherwise the given group.

    Raises:
        ValueError: the two are different, or parts of the model have different groups.
    """
    found: list[dist.ProcessGroup] = []
    for module in model.modules():
        if isinstance(module, DistributedDataParallel) and module.process_group not in found:
            found.append(module.process_group)
    if len(found) > 1:
        raise ValueError(
            f"compression: parts of the model are wrapped in DistributedDataParallel for different groups: {_ranks(found[0])} and "
            f"{_ranks(found[1])}; create a state for each part"
        )
    if found and given is not None and given is not found[0]:
        raise ValueError(
            f"compression: the model is wrapped in DistributedDataParallel of {_ranks(found[0])}, but process_group "
            f"has {_ranks(given)}; omit process_group"
        )
    return found[0] if found else given


def _ranks(group: dist.ProcessGroup) -> str:
    return f"ranks {', '.join(map(str, dist.get_process_group_ranks(group)))}"


def _shallow(value: Any) -> Any:
    return copy.copy(value) if isinstance(value, (dict, list, set)) else value
