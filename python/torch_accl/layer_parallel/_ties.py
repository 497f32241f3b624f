"""Parameters that are one and lie on several ranks, as an embedding and the last layer of a language model.

Owns which ones are tied, that they begin with the same values, and the sum of their gradients, which all of them get. Only the ranks that have some of them take part.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ._failures import described
from ._net import Evaluation
from ._wire import Wire, tried

__all__ = ["Ties", "shared_names"]


@dataclass(frozen=True)
class _Member:
    """One of the tied parameters: `layers.<layer>.<name>`, and who has it."""

    layer: int
    name: str
    owner: int


class Ties:
    """The groups of tied parameters of a net."""

    def __init__(
        self, groups: Sequence[Sequence[str]], owner: Callable[[int], int], modules: dict[int, nn.Module], wire: Wire
    ) -> None:
        self._wire = wire
        self._groups = [[_member(name, owner) for name in group] for group in groups]
        if not self._groups:
            return
        self._check(modules)
        for group in self._groups:
            self._begin_alike(group, modules)

    @property
    def names(self) -> list[list[str]]:
        """Of each group."""
        return [[f"layers.{member.layer}.{member.name}" for member in group] for group in self._groups]

    def add_up(self, evaluation: Evaluation, what: str) -> None:
        """Every one gets the sum of all gradients of its group, added up in the order in which they are named."""
        for group in self._groups:
            own = {
                member: slot
                for member in group
                if member.owner == self._wire.rank and (slot := _slot(evaluation, member)) is not None
            }
            if not own:
                continue
            counted: dict[int, _Member] = {}
            for member, slot in own.items():
                counted.setdefault(slot, member)
            mine = {member: evaluation.gradients[slot] for slot, member in counted.items()}
            of_all = self._exchanged(group, mine, evaluation, own, what)
            total: Tensor | None = None
            for member in group:
                gradient = of_all.get(member)
                if gradient is not None:
                    total = gradient if total is None else total + gradient
            for slot in counted:
                evaluation.gradients[slot] = total

    def _exchanged(
        self,
        group: Sequence[_Member],
        mine: dict[_Member, Tensor | None],
        evaluation: Evaluation,
        own: dict[_Member, int],
        what: str,
    ) -> dict[_Member, Tensor | None]:
        """The gradients of all members: each rank sends its own to the others that have some."""
        wire = self._wire
        like = evaluation.parameters[next(iter(own.values()))]
        others = sorted({member.owner for member in group} - {wire.rank})
        works = []
        kept = []
        for member in (member for member in group if member.owner == wire.rank):
            gradient = mine.get(member)
            sent = torch.zeros_like(like) if gradient is None else gradient.contiguous()
            # Of what is one parameter under two names, the second has none of its own.
            flag = torch.tensor([int(gradient is not None)], device=like.device)
            kept += [sent, flag]
            works += [wire.send(tensor, to, "adjoint") for to in others for tensor in (flag, sent)]
        found: dict[_Member, Tensor | None] = dict(mine)
        coming = []
        for member in (member for member in group if member.owner != wire.rank):
            flag, room = torch.zeros(1, dtype=torch.int64, device=like.device), torch.empty_like(like)
            works += [wire.receive(tensor, member.owner, "adjoint") for tensor in (flag, room)]
            coming.append((member, flag, room))
        tried(f"adding up the gradients of tied parameters, {what}", lambda: [work.wait() for work in works])
        for member, flag, room in coming:
            found[member] = room if int(flag) else None
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
                raise ValueError(f"tie={names}: they differ in shape or type: {shown}")

    def _begin_alike(self, group: Sequence[_Member], modules: dict[int, nn.Module]) -> None:
        """The first one's values become those of all."""
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
    """The groups of names of what is one parameter in layers of several ranks, where all of these are given as modules."""
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
            raise ValueError(f"tie: {name!r} is of layer {layer}, which there is not") from None
    raise ValueError(f"tie: {name!r} names no parameter; give names such as 'layers.0.weight'")


def _slot(evaluation: Evaluation, member: _Member) -> int | None:
    return evaluation.slot_of(member.layer, member.name)
