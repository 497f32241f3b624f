"""An optimiser whose parameters have become others.

Owns what of it belongs to each parameter, how moments follow from others, and that a rank's new optimiser has the class, the options and the groups of the
one before. Which parameter comes from which is in `_nested.py`.
"""

from __future__ import annotations

import copy
import inspect
import pickle
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

__all__ = [
    "Carried",
    "Entry",
    "Made",
    "Moments",
    "between",
    "described_optimizer",
    "entries_of",
    "moved_state",
    "options_of",
    "remade",
    "wide",
]


Moments = Literal["scaled", "copied", "none"]

# With which power of a gradient's size each of these grows. What is not here does not depend on it, as far as is known.
_POWERS = {
    "momentum_buffer": 1,
    "exp_avg": 1,
    "exp_inf": 1,
    "grad_avg": 1,
    "prev": 1,
    "exp_avg_sq": 2,
    "max_exp_avg_sq": 2,
    "square_avg": 2,
    "sum": 2,
    "variance": 2,
    "row_var": 2,
    "col_var": 2,
}
# Its momentum is of gradients that have been divided by their size.
_OTHER_POWERS: dict[type, dict[str, int]] = {torch.optim.RMSprop: {"momentum_buffer": 0}}


@dataclass
class Entry:
    """What an optimiser has for a parameter: its group's place and options, and its state. Of one that it does not have, nothing."""

    group: int | None = None
    options: dict[str, Any] = field(default_factory=dict)
    state: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Made:
    """How an optimiser is made again, by whoever has none: its class and defaults in bytes, if they can be."""

    name: str
    has_names: bool
    pickled: bytes | None

    def loaded(self) -> tuple[type[Optimizer], dict[str, Any]]:
        """The class and the defaults."""
        assert self.pickled is not None
        kind, defaults = pickle.loads(self.pickled)
        return kind, defaults


@dataclass
class Carried:
    """A parameter of the new net, under its name, with what it takes over."""

    name: str
    parameter: nn.Parameter
    entry: Entry


def described_optimizer(optimizer: Optimizer | None) -> Made | None:
    """What other ranks must know of an optimiser."""
    if optimizer is None:
        return None
    if not isinstance(optimizer, Optimizer):
        raise TypeError(f"optimizer is {type(optimizer).__name__}; give a torch.optim.Optimizer")
    if isinstance(optimizer, torch.optim.LBFGS):
        raise TypeError("LBFGS has one state for all parameters, which cannot be carried over; take another optimizer")
    kind = type(optimizer)
    try:
        pickled = pickle.dumps((kind, optimizer.defaults))
    except Exception:
        pickled = None
    has_names = any("param_names" in group for group in optimizer.param_groups)
    return Made(f"{kind.__module__}.{kind.__qualname__}", has_names, pickled)


def entries_of(optimizer: Optimizer | None, parameters: Iterable[nn.Parameter]) -> list[Entry]:
    """One for each parameter."""
    if optimizer is None:
        return [Entry() for _ in parameters]
    places = {id(parameter): at for at, group in enumerate(optimizer.param_groups) for parameter in group["params"]}
    options = [options_of(group) for group in optimizer.param_groups]
    entries = []
    for parameter in parameters:
        at = places.get(id(parameter))
        state = optimizer.state.get(parameter, {})
        entries.append(Entry() if at is None else Entry(at, options[at], dict(state)))
    return entries


def options_of(group: Mapping[str, Any]) -> dict[str, Any]:
    """All of a group but what it is a group of."""
    return {name: value for name, value in group.items() if name not in ("params", "param_names")}


def between(a: Tensor, b: Tensor, share: float) -> Tensor:
    """The share of the way from one tensor to another; where both are equal, the same bits. What are no fractions stay."""
    if not (a.is_floating_point() or a.is_complex()):
        return a
    dtype = wide(a.dtype)
    x, y = a.detach().to(dtype), b.detach().to(dtype)
    return (x + (y - x) * share).to(a.dtype)


def wide(dtype: torch.dtype) -> torch.dtype:
    """What is computed in: 16 bits and fewer would lose what lies between."""
    if dtype == torch.complex32:
        return torch.complex64
    return torch.float32 if dtype.is_floating_point and dtype.itemsize < 4 else dtype


def moved_state(
    kind: type[Optimizer],
    own: Mapping[str, Any],
    other: Mapping[str, Any] | None,
    share: float,
    ratio: float,
    shape: torch.Size,
) -> dict[str, Any]:
    """A parameter's state, from that of one or two others, where its gradients are `ratio` times as large as theirs."""
    found = {}
    for name, value in own.items():
        if not isinstance(value, Tensor):
            found[name] = copy.deepcopy(value)
            continue
        theirs = other.get(name) if other is not None else None
        if isinstance(theirs, Tensor) and value.shape == shape == theirs.shape:
            value = between(value, theirs, share)
        power = _power(kind, name)
        value = value.detach().clone()
        if ratio != 1 and power and (value.is_floating_point() or value.is_complex()):
            value.mul_(ratio**power)
        found[name] = value
    return found


def _power(kind: type[Optimizer], name: str) -> int:
    for known, powers in _OTHER_POWERS.items():
        if issubclass(kind, known) and name in powers:
            return powers[name]
    return _POWERS.get(name, 0)


def remade(
    kind: type[Optimizer],
    defaults: Mapping[str, Any],
    groups: Sequence[Mapping[str, Any]],
    own: set[int],
    carried: Sequence[Carried],
    states: Mapping[Tensor, Any],
    *,
    has_names: bool,
    has_states: bool,
) -> Optimizer:
    """An optimiser for other parameters. `groups` and `states` are those of this rank's optimiser before; of its parameters those in `own`, by their
    identities, are replaced, and others, which were never the net's, stay."""
    kept: list[dict[str, Any]] = []
    members: list[list[tuple[str, Tensor]]] = []
    for group in groups:
        names = group.get("param_names", [""] * len(group["params"]))
        kept.append(options_of(group))
        members.append([(name, p) for name, p in zip(names, group["params"]) if id(p) not in own])
    for each in carried:
        entry = each.entry
        if entry.group is None:
            continue
        order = sorted(range(len(kept)), key=lambda at: at != entry.group)
        at = next((at for at in order if _are_equal(kept[at], entry.options)), len(kept))
        if at == len(kept):
            kept.append(entry.options)
            members.append([])
        members[at].append((each.name, each.parameter))
    made: list[dict[str, Any]] = []
    for options, group_members in zip(kept, members):
        group_made = {**copy.deepcopy(options), "params": [parameter for _, parameter in group_members]}
        if has_names:
            group_made["param_names"] = [name for name, _ in group_members]
        made.append(group_made)
    wanted = inspect.signature(kind).parameters
    accepted = {name: copy.deepcopy(value) for name, value in defaults.items() if name in wanted}
    optimizer = kind(made or [{"params": [], **({"param_names": []} if has_names else {})}], **accepted)
    foreign = {id(parameter) for group_members in members for _, parameter in group_members}
    for parameter, state in states.items():
        if id(parameter) in foreign and id(parameter) not in own:
            optimizer.state[parameter] = copy.deepcopy(state)
    if has_states:
        for each in carried:
            if each.entry.group is not None and each.entry.state:
                optimizer.state[each.parameter] = each.entry.state
    return optimizer


def _are_equal(one: Any, other: Any) -> bool:
    """Also of what has tensors in it."""
    if isinstance(one, Tensor) or isinstance(other, Tensor):
        return (
            isinstance(one, Tensor)
            and isinstance(other, Tensor)
            and one.dtype == other.dtype
            and torch.equal(one.cpu(), other.cpu())
        )
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(_are_equal(one[name], other[name]) for name in one)
    if isinstance(one, list | tuple) and isinstance(other, list | tuple):
        return len(one) == len(other) and all(_are_equal(*pair) for pair in zip(one, other))
    return bool(one == other)
