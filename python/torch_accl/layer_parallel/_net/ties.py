"""Tied parameters that lie on several ranks, such as an embedding and the last layer of a language model.

Owns which parameters are tied, that they start with the same values, and the sum of their gradients, which all of them
get. Only ranks that have some of them take part. `copies.py` keeps them equal.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from .._ranks.failures import described
from .._ranks.wire import Wire, tried
from .copies import Copied
from .evaluation import Evaluation, parameter_if_any
from .layer_sums import added

__all__ = ["Ties", "shared_names"]


@dataclass(frozen=True)
class _Member:
    """One of the tied parameters, `layers.<layer>.<name>`, and the rank that has it."""

    layer: int
    name: str
    owner: int

    @property
    def full_name(self) -> str:
        """The name in the net."""
        return f"layers.{self.layer}.{self.name}"


# Largest number of parameters of a group that messages name.
_SHOWN = 4
# Flags of a group: some of its parameters want a gradient, and some do not.
_TRAINED, _FIXED = 1, 2


class _Sum:
    """The sum of a group's gradients on one rank.

    It comes from the next higher rank of the group, gets this rank's gradients, and goes to the next lower rank. The
    lowest rank's sum is the result, which goes back in the same way. So each rank sends and receives at most two
    tensors, and the order of the sum does not depend on the ranks.
    """

    def __init__(self, group: Sequence[_Member], evaluation: Evaluation, wire: Wire) -> None:
        self.group = group
        owners = sorted({member.owner for member in group})
        at = owners.index(wire.rank)
        self.higher = owners[at + 1] if at + 1 < len(owners) else None
        self.lower = owners[at - 1] if at else None
        self.total: Tensor | None = None
        self.trained = 0
        # Flags are read at once, which for a device's tensor would stop this thread.
        self._device_of_flags = wire.device
        # The indices of this rank's gradients.
        self.slots: set[int] = set()
        # This rank's gradients by layer and index.
        self._parts: dict[tuple[int, int], Tensor] = {}
        for member, self._like in _found(group, evaluation.modules, wire):
            self._take(member, evaluation)

    def _take(self, member: _Member, evaluation: Evaluation) -> None:
        slot = evaluation.slot_of(member.layer, member.name)
        self.trained |= _FIXED if slot is None else _TRAINED
        # If one parameter has several names, its gradients count once.
        if slot is None or slot in self.slots:
            return
        self.slots.add(slot)
        for layer, gradient in evaluation.by_layer(slot, member.layer).items():
            self._parts[layer, slot] = gradient

    def room(self) -> tuple[Tensor, Tensor]:
        """Returns room for a rank's flags and sum."""
        like = self._like
        flags = torch.zeros(2, dtype=torch.int64, device=self._device_of_flags)
        return flags, torch.zeros(like.shape, dtype=like.dtype, device=like.device)

    def add(self) -> None:
        """Adds this rank's gradients to the higher rank's sum."""
        # A sum may be changed in place, but not a gradient, which may be another owner's tensor.
        is_sum = self.total is not None
        for key in sorted(self._parts, reverse=True):
            part = self._parts.pop(key)
            if self.total is None:
                self.total = part
            elif is_sum and self.total.layout == torch.strided:
                self.total.add_(part)
            else:
                self.total, is_sum = added(self.total, part), True
        is_alone = self.higher is None and self.lower is None
        if not is_alone and self.total is not None and self.total.layout != torch.strided:
            # Ranks send dense tensors, and all of them get the same gradient.
            self.total = self.total.to_dense()

    def learn(self, flags: Tensor, total: Tensor) -> None:
        """Takes over another rank's sum."""
        has_gradient, trained = flags.tolist()
        self.trained |= trained
        self.total = total if has_gradient else None

    def message(self) -> tuple[Tensor, Tensor]:
        """Returns the flags and the sum as another rank receives them."""
        flags, total = self.room()
        flags.copy_(torch.tensor([int(self.total is not None), self.trained], dtype=torch.int64, device="cpu"))
        if self.total is not None:
            total.copy_(self.total)
        return flags, total


def _exchange(sums: Sequence[_Sum], wire: Wire) -> None:
    """Completes the sums of this rank's groups. All ranks have their groups in the same order."""

    def receive(source: int | None, pass_: str, each: _Sum) -> Callable[[], None]:
        """Starts to receive a sum. Returns the function that waits for it."""
        if source is None:
            return lambda: None
        room = each.room()
        arriving = [wire.receive(tensor, source, pass_) for tensor in room]

        def wait() -> None:
            for work in arriving:
                work.wait()
            each.learn(*room)

        return wait

    def send(to: int, pass_: str, each: _Sum) -> None:
        message = each.message()
        kept.extend(message)
        works.extend(wire.send(tensor, to, pass_) for tensor in message)

    works: list[dist.Work] = []
    # Keeps the tensors alive until they are sent.
    kept: list[Tensor] = []
    # All sums go down before any goes up, so no rank waits for a rank that waits for it.
    for each, wait in [(each, receive(each.higher, "adjoint", each)) for each in sums]:
        wait()
        each.add()
        if each.lower is not None:
            send(each.lower, "adjoint", each)
    for each, wait in [(each, receive(each.lower, "forward", each)) for each in sums]:
        wait()
        if each.higher is not None:
            send(each.higher, "forward", each)
    for work in works:
        work.wait()


class Ties:
    """The groups of tied parameters of a net."""

    def __init__(
        self, groups: Sequence[Sequence[str]], owner: Callable[[int], int], modules: dict[int, nn.Module], wire: Wire
    ) -> None:
        self._wire = wire
        self._groups = [[_member(name, owner) for name in group] for group in _merged(groups)]
        # The ranks that have each group.
        self._owners = [tuple(sorted({member.owner for member in group})) for group in self._groups]
        if not self._groups:
            return
        self._check(modules)
        for group in self._groups:
            self._begin_alike(group, modules)

    @functools.cached_property
    def names(self) -> list[list[str]]:
        """The names of each group's parameters."""
        return [[member.full_name for member in group] for group in self._groups]

    def names_in(self, modules: Mapping[int, nn.Module]) -> list[list[str]]:
        """Returns the names of each group's parameters that these layers have. A layer may have been replaced."""
        groups = [
            [each.full_name for each in group if parameter_if_any(modules, each.layer, each.name) is not None]
            for group in self._groups
        ]
        return [names for names in groups if len(names) > 1]

    @property
    def members(self) -> list[list[tuple[int, str]]]:
        """The parameters of each group, by layer and name."""
        return [[(member.layer, member.name) for member in group] for group in self._groups]

    def copied(self, modules: dict[int, nn.Module]) -> list[Copied]:
        """Returns each group as a parameter of which ranks have copies, with this rank's copies."""
        found = []
        for group, owners in zip(self._groups, self._owners):
            own = {id(parameter): parameter for _, parameter in _found(group, modules, self._wire)}
            found.append(Copied(_shown(group), owners, list(own.values())))
        return found

    def add_up(self, evaluation: Evaluation, what: str) -> None:
        """Gives every parameter the sum of all gradients of its group, added from the last layer to the first.

        Raises `ValueError` if some of a group want a gradient and others do not.
        """
        sums = [
            _Sum(group, evaluation, self._wire)
            for group in self._groups
            if any(member.owner == self._wire.rank for member in group)
        ]
        tried(f"adding up the gradients of tied parameters, {what}", lambda: _exchange(sums, self._wire))
        # All groups exchange their gradients before an error is raised, because other ranks take part in other groups.
        for each in sums:
            if each.trained == _TRAINED | _FIXED:
                raise ValueError(
                    f"tied parameters {_shown(each.group)} differ in requires_grad; set it alike for all of them"
                )
            for slot in each.slots:
                evaluation.gradients[slot] = each.total
                evaluation.sums.pop(slot, None)

    def _check(self, modules: dict[int, nn.Module]) -> None:
        mine: dict[Any, Any] = {}
        for group in self._groups:
            for member in (member for member in group if member.owner == self._wire.rank):
                try:
                    parameter = modules[member.layer].get_parameter(member.name)
                    mine[member.layer, member.name] = (list(parameter.shape), str(parameter.dtype))
                except Exception as error:
                    mine[member.layer, member.name] = described(error)
        known = {key: value for part in self._wire.gathered(mine) for key, value in part.items()}
        for group, names in zip(self._groups, self.names):
            if len(set(names)) < 2:
                raise ValueError(f"tie={names}: give at least two names of parameters")
            looks = [known[member.layer, member.name] for member in group]
            for name, look in zip(names, looks):
                if isinstance(look, str):
                    raise ValueError(f"tie={names}: there is no parameter {name} ({look})")
            if any(look != looks[0] for look in looks):
                shown = ", ".join(
                    f"{name} {dtype.removeprefix('torch.')}{shape}" for name, (shape, dtype) in zip(names, looks)
                )
                raise ValueError(f"tie={names}: the parameters differ in shape or type: {shown}")

    def _begin_alike(self, group: Sequence[_Member], modules: dict[int, nn.Module]) -> None:
        """Copies the first parameter's values to all others."""
        wire, first = self._wire, group[0]
        own = [modules[member.layer].get_parameter(member.name) for member in group if member.owner == wire.rank]
        own = [parameter for parameter in own if not parameter.is_meta]
        with torch.no_grad():
            if first.owner == wire.rank and own:
                for to in sorted({member.owner for member in group} - {wire.rank}):
                    wire.send(own[0].detach().contiguous(), to, "forward").wait()
            elif own:
                room = torch.empty_like(own[0], memory_format=torch.contiguous_format)
                wire.receive(room, first.owner, "forward").wait()
                own[0].copy_(room)
            for other in own[1:]:
                if other is not own[0]:
                    other.copy_(own[0])


def _found(group: Sequence[_Member], modules: Mapping[int, nn.Module], wire: Wire) -> list[tuple[_Member, Tensor]]:
    """Returns this rank's parameters of a group. Layers that were replaced by others without the parameter are left out.

    Raises `AttributeError` if this rank has none of its parameters any more.
    """
    own = [member for member in group if member.owner == wire.rank]
    found = [(member, parameter_if_any(modules, member.layer, member.name)) for member in own]
    known = [(member, parameter) for member, parameter in found if parameter is not None]
    if own and not known:
        raise AttributeError(
            f"this rank no longer has {own[0].full_name}, which is tied to parameters of other layers; replace a layer by one with the same parameters"
        )
    return known


def _shown(group: Sequence[_Member]) -> str:
    """Returns the names of a group's parameters, at most one for each rank if there are more than a few."""
    if len(group) > _SHOWN:
        group = list({member.owner: member for member in reversed(group)}.values())[::-1]
    return ", ".join(member.full_name for member in group)


def shared_names(modules: Sequence[Any], owner: Callable[[int], int]) -> list[list[str]]:
    """Returns the groups of names of one parameter in layers of several ranks, if all of these are given as modules."""
    names: dict[int, list[str]] = {}
    owners: dict[int, set[int]] = {}
    for layer, module in enumerate(modules):
        if isinstance(module, nn.Module):
            for name, parameter in module.named_parameters(remove_duplicate=False):
                names.setdefault(id(parameter), []).append(f"layers.{layer}.{name}")
                owners.setdefault(id(parameter), set()).add(owner(layer))
    return [group for key, group in names.items() if len(owners[key]) > 1]


def _member(name: str, owner: Callable[[int], int]) -> _Member:
    parts = name.split(".", 2)
    if len(parts) == 3 and parts[0] == "layers" and parts[1].isdecimal():
        layer = int(parts[1])
        try:
            return _Member(layer, parts[2], owner(layer))
        except IndexError:
            raise ValueError(f"tie: {name!r} names layer {layer}, which does not exist") from None
    raise ValueError(f"tie: {name!r} names no parameter; give names such as 'layers.0.weight'")


def _merged(groups: Sequence[Sequence[str]]) -> list[list[str]]:
    """Merges groups that have a name in common."""
    found: list[list[str]] = []
    for group in groups:
        names = list(dict.fromkeys(group))
        for other in [known for known in found if set(known) & set(names)]:
            names = list(dict.fromkeys(other + names))
            found.remove(other)
        found.append(names)
    return found
