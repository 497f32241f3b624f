"""An optimiser whose parameters are replaced by others.

Owns the optimiser's entry for each parameter, and how moments follow from other moments. Also owns that a rank's new
optimiser has the class, the options and the groups of the old one. `nested.py` decides which parameter comes from
which.
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
    "Entry",
    "Made",
    "Moments",
    "NewParameter",
    "described_optimizer",
    "entries_of",
    "interpolate",
    "moved_state",
    "options_of",
    "remade",
    "wide",
]


Moments = Literal["scaled", "copied", "none"]

# The power of the gradient's size with which each state grows. As far as known, other states do not depend on it.
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
# RMSprop's momentum adds up gradients that were already divided by their size.
_OTHER_POWERS: dict[type, dict[str, int]] = {torch.optim.RMSprop: {"momentum_buffer": 0}}


@dataclass
class Entry:
    """An optimiser's entry for a parameter: index and options of its group, and its state.

    Fields keep their defaults if the optimiser does not have the parameter.
    """

    group: int | None = None
    options: dict[str, Any] = field(default_factory=dict)
    state: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Made:
    """A description from which a rank without an optimiser can build one.

    pickled: class and defaults, or None if they cannot be pickled.
    """

    name: str
    has_names: bool
    pickled: bytes | None

    def loaded(self) -> tuple[type[Optimizer], dict[str, Any]]:
        """Returns the class and the defaults."""
        assert self.pickled is not None
        kind, defaults = pickle.loads(self.pickled)
        return kind, defaults


@dataclass
class NewParameter:
    """A parameter of the new net, its name, and the optimiser's entry that it takes over."""

    name: str
    parameter: nn.Parameter
    entry: Entry


def described_optimizer(optimizer: Optimizer | None) -> Made | None:
    """Returns what other ranks must know about an optimiser; None without one."""
    if optimizer is None:
        return None
    if not isinstance(optimizer, Optimizer):
        raise TypeError(f"optimizer is {type(optimizer).__name__}; give a torch.optim.Optimizer")
    if isinstance(optimizer, torch.optim.LBFGS):
        raise TypeError("LBFGS has one state for all parameters, which cannot be transferred; use another optimizer")
    kind = type(optimizer)
    try:
        pickled = pickle.dumps((kind, optimizer.defaults))
    except Exception:
        pickled = None
    has_names = any("param_names" in group for group in optimizer.param_groups)
    return Made(f"{kind.__module__}.{kind.__qualname__}", has_names, pickled)


def entries_of(optimizer: Optimizer | None, parameters: Iterable[nn.Parameter]) -> list[Entry]:
    """Returns one entry for each parameter."""
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
    """Returns all options of a group, without its parameters and their names."""
    return {name: value for name, value in group.items() if name not in ("params", "param_names")}


def interpolate(a: Tensor, b: Tensor, share: float) -> Tensor:
    """Interpolates from `a` to `b` by `share`. Where both are equal, the result has the same bits.

    Integer and bool tensors return `a`.
    """
    if not (a.is_floating_point() or a.is_complex()):
        return a
    dtype = wide(a.dtype)
    x, y = a.detach().to(dtype), b.detach().to(dtype)
    return (x + (y - x) * share).to(a.dtype)


def wide(dtype: torch.dtype) -> torch.dtype:
    """Returns the dtype to compute in: floats of 16 bits or fewer would lose the values in between."""
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
    """Returns a parameter's state, made from the state of one or two other parameters.

    The parameter's gradients are `ratio` times as large as the gradients of the others.
    """
    found = {}
    for name, value in own.items():
        if not isinstance(value, Tensor):
            found[name] = copy.deepcopy(value)
            continue
        theirs = other.get(name) if other is not None else None
        if isinstance(theirs, Tensor) and value.shape == shape == theirs.shape:
            value = interpolate(value, theirs, share)
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
    new_parameters: Sequence[NewParameter],
    states: Mapping[Tensor, Any],
    *,
    has_names: bool,
    has_states: bool,
) -> Optimizer:
    """Builds an optimiser for other parameters.

    groups, states: groups and states of this rank's old optimiser.
    own: identities (`id`) of the old optimiser's parameters that `new_parameters` replaces. Other parameters never belonged to
        the net, and stay.
    """
    kept: list[dict[str, Any]] = []
    members: list[list[tuple[str, Tensor]]] = []
    for group in groups:
        names = group.get("param_names", [""] * len(group["params"]))
        kept.append(options_of(group))
        members.append([(name, p) for name, p in zip(names, group["params"]) if id(p) not in own])
    for each in new_parameters:
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
        for each in new_parameters:
            if each.entry.group is not None and each.entry.state:
                optimizer.state[each.parameter] = each.entry.state
    return optimizer


def _are_equal(one: Any, other: Any) -> bool:
    """Compares values that may contain tensors."""
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
