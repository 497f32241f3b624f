"""Tied parameters that lie on several ranks, such as an embedding and the last layer of a language model.

Owns which parameters are tied, that they start with the same values, and the sum of their gradients, which all of them
get. Only ranks that have some of them take part. `copies.py` keeps them equal.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from .._ranks.failures import described
from .._ranks.wire import Wire, tried
from .copies import Copied
from .evaluation import Evaluation, parameter_of

__all__ = ["Ties", "shared_names"]


@dataclass(frozen=True)
class _Member:
    """One of the tied parameters, `layers.<layer>.<name>`, and the rank that has it."""

    layer: int
    name: str
    owner: int


@dataclass(frozen=True)
class _Part:
    """A member's contribution: its gradient, and whether it wants one."""

    gradient: Tensor | None
    is_trained: bool


class Ties:
    """The groups of tied parameters of a net."""

    def __init__(
        self, groups: Sequence[Sequence[str]], owner: Callable[[int], int], modules: dict[int, nn.Module], wire: Wire
    ) -> None:
        self._wire = wire
        self._groups = [[_member(name, owner) for name in group] for group in _merged(groups)]
        if not self._groups:
            return
        self._check(modules)
        for group in self._groups:
            self._begin_alike(group, modules)

    @property
    def names(self) -> list[list[str]]:
        """The names of each group's parameters."""
        return [[f"layers.{member.layer}.{member.name}" for member in group] for group in self._groups]

    @property
    def not_counted(self) -> set[tuple[int, str]]:
        """All parameters but the first of each group, by layer and name. Sums over parameters count a group once."""
        return {(member.layer, member.name) for group in self._groups for member in group[1:]}

    def copied(self, modules: dict[int, nn.Module]) -> list[Copied]:
        """Returns each group as a parameter of which ranks have copies, with this rank's copies."""
        found = []
        for group, names in zip(self._groups, self.names):
            own = [
                parameter_of(modules[member.layer], member.name) for member in group if member.owner == self._wire.rank
            ]
            mine = list({id(parameter): parameter for parameter in own}.values())
            found.append(Copied(", ".join(names), tuple(sorted({member.owner for member in group})), mine))
        return found

    def add_up(self, evaluation: Evaluation, what: str) -> None:
        """Gives every parameter the sum of all gradients of its group, added in the order of the group's names.

        Raises `ValueError` if some of a group want a gradient and others do not.
        """
        brought = [
            self._bring(group, own, evaluation, what)
            for group in self._groups
            if (own := [member for member in group if member.owner == self._wire.rank])
        ]
        # All groups exchange their gradients before an error is raised, because other ranks take part in other groups.
        for group, slots, of_all in brought:
            names = ", ".join(f"layers.{member.layer}.{member.name}" for member in group)
            if len({part.is_trained for part in of_all.values()}) > 1:
                raise ValueError(f"tied parameters {names} differ in requires_grad; set it alike for all of them")
            total: Tensor | None = None
            for member in group:
                gradient = of_all[member].gradient
                if gradient is not None:
                    total = gradient if total is None else total + gradient
            for slot in slots:
                evaluation.gradients[slot] = total

    def _bring(
        self, group: Sequence[_Member], own: Sequence[_Member], evaluation: Evaluation, what: str
    ) -> tuple[Sequence[_Member], set[int], dict[_Member, _Part]]:
        """Returns a group, the indices of this rank's gradients, and the contributions of all members."""
        mine: dict[_Member, _Part] = {}
        slots: set[int] = set()
        for member in own:
            slot = evaluation.slot_of(member.layer, member.name)
            gradient = None
            # If one parameter has two names, only the first one contributes a gradient.
            if slot is not None and slot not in slots:
                slots.add(slot)
                gradient = evaluation.gradients[slot]
            mine[member] = _Part(gradient, slot is not None)
        like = parameter_of(evaluation.modules[own[0].layer], own[0].name)
        return group, slots, self._exchanged(group, mine, like, what)

    def _exchanged(
        self, group: Sequence[_Member], mine: dict[_Member, _Part], like: Tensor, what: str
    ) -> dict[_Member, _Part]:
        """Exchanges contributions: each rank sends its own to the other ranks of the group.

        Returns the contributions of all members.
        """
        wire = self._wire
        others = sorted({member.owner for member in group} - {wire.rank})
        works = []
        kept = []
        coming = []
        for member in group:
            if member.owner == wire.rank:
                part = mine[member]
                gradient = part.gradient
                sent = torch.zeros(like.shape, dtype=like.dtype, device=like.device)
                if gradient is not None:
                    sent.copy_(gradient)
                facts = [int(gradient is not None), int(part.is_trained)]
                flags = torch.tensor(facts, dtype=torch.int64, device=like.device)
                kept += [sent, flags]
                works += [wire.send(tensor, to, "adjoint") for to in others for tensor in (flags, sent)]
            else:
                flags = torch.zeros(2, dtype=torch.int64, device=like.device)
                room = torch.empty(like.shape, dtype=like.dtype, device=like.device)
                works += [wire.receive(tensor, member.owner, "adjoint") for tensor in (flags, room)]
                coming.append((member, flags, room))
        tried(f"adding up the gradients of tied parameters, {what}", lambda: [work.wait() for work in works])
        found = dict(mine)
        for member, flags, room in coming:
            has, is_trained = flags.tolist()
            found[member] = _Part(room if has else None, bool(is_trained))
        return found

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


def shared_names(modules: Sequence[Any], owner: Callable[[int], int]) -> list[list[str]]:
    """Returns the groups of names of one parameter in layers of several ranks, if all of these are given as modules."""
    names: dict[int, list[str]] = {}
    owners: dict[int, set[int]] = {}
    for layer, module in enumerate(modules):
        if isinstance(module, nn.Module):
            for name, parameter in module.named_parameters():
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
