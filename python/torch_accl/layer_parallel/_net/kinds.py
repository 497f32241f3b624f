"""The kinds of layers, and the properties in which they differ.

Owns the kinds and their names. Other files ask a kind and compare no names. Does not own layers (`blocks.py`), their
evaluation (`evaluation.py`), or the operations of a step (`crates/accl-multigrid/src/kind.rs`). Read `LayerKind` first;
`docs/adding-a-layer-kind.md` describes the way to a new kind.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from torch import nn
from torch.utils import _pytree as pytree

from .tree import is_state

__all__ = [
    "CUSTOM",
    "KINDS",
    "ODE",
    "PLAIN",
    "RESIDUAL",
    "TIMED",
    "CoarseStep",
    "Kind",
    "LayerKind",
    "functions_of_kinds",
    "kind_of",
]


# The names of the kinds, as users give them and as files keep them.
Kind = Literal["ode", "timed", "residual", "custom", "plain"]


@dataclass(frozen=True)
class LayerKind:
    """How a layer is called, and how its result becomes the next state.

    name: the name under which users give the kind.
    plan_kind: the kind of the native module whose operations make a step.
    is_step: whether the layer is a step of a differential equation. A step keeps the shapes and dtypes of its state, and
        may be part of a coarse step. Other layers may change shapes, dtypes and constants.
    has_dt: whether dt is the length of a step. Otherwise the layer alone determines the length.
    returns_increment: whether the layer computes f of the next state `x + dt * f(x)`. Otherwise it computes the next
        state. An increment may lack integer and bool leaves.
    step_arguments: how many arguments of the layer's `forward` a step gives, the state included. Side inputs may have
        the names of the others.
    """

    name: Kind
    plan_kind: str
    is_step: bool = True
    has_dt: bool = False
    returns_increment: bool = False
    step_arguments: int = 1

    def arguments(self, state: Any, span: int, dt: float) -> tuple[Any, ...]:
        """Returns the positional arguments of a step of length `span * dt`, here the state alone.

        A float among them is a length. A compiled layer gets it as a tensor.
        """
        return (state,)

    def called(self, module: nn.Module, span: int) -> nn.Module:
        """Returns the module that computes a step over `span` layers, here the layer itself.

        Another module must have the layer as its attribute `module`.
        """
        return module

    def next_state(self, state: Any, returned: Any, dt: float) -> Any:
        """Returns the state after a layer of length dt: `state + dt * returned` or `returned`.

        `state` and the result are trees with the same leaves. For a sum, integer and bool leaves stay.
        """
        return _advanced(state, returned, dt) if self.returns_increment else returned

    def weight(self, dt: float) -> float:
        """Returns the factor of the layer's result in the next state: dt for an increment, otherwise 1.

        The gradients of the layer's parameters have the same factor.
        """
        return dt if self.returns_increment else 1.0

    def parts(self, factor: int) -> int:
        """Returns the number of layers that take the place of one in a net with `factor` steps for each step."""
        return factor if self.is_step else 1

    def is_wrapped(self, residual: Literal["scaled", "copied"]) -> bool:
        """Returns whether a net of other steps has each layer in a `Scaled`.

        `residual` is the argument of `refined`. A step with dt needs only another dt.
        """
        return self.is_step and not self.has_dt and residual == "scaled"


class _Timed(LayerKind):
    """A kind whose layers take the length of the step."""

    def arguments(self, state: Any, span: int, dt: float) -> tuple[Any, ...]:
        """Returns `(state, span * dt)`."""
        return state, span * dt


class _Custom(LayerKind):
    """A kind whose layers have a `coarse_step`."""

    def arguments(self, state: Any, span: int, dt: float) -> tuple[Any, ...]:
        """Returns `(state,)` for a fine step, and `(state, span)` for a coarse one."""
        return (state, span) if span > 1 else (state,)

    def called(self, module: nn.Module, span: int) -> nn.Module:
        """Returns the layer for a fine step, and its `coarse_step` for a coarse one."""
        return CoarseStep(module) if span > 1 else module


ODE = LayerKind("ode", "ode", has_dt=True, returns_increment=True)
TIMED = _Timed("timed", "timed", has_dt=True, step_arguments=2)
RESIDUAL = LayerKind("residual", "residual")
CUSTOM = _Custom("custom", "custom")
PLAIN = LayerKind("plain", "plain", is_step=False)

# All kinds by their names.
KINDS: dict[str, LayerKind] = {kind.name: kind for kind in (ODE, TIMED, RESIDUAL, CUSTOM, PLAIN)}


def kind_of(name: str) -> LayerKind:
    """Returns the kind with this name.

    Raises:
        ValueError: no kind has this name.
    """
    if name not in KINDS:
        raise ValueError(f"kind of a layer: expected one of {', '.join(KINDS)}, got {name!r}")
    return KINDS[name]


def functions_of_kinds() -> str:
    """Returns the functions that give a layer its kind, for messages. Each has the name of its kind."""
    *others, last = (f"{name}(f)" for name in KINDS)
    return f"{', '.join(others)} or {last}"


class CoarseStep(nn.Module):
    """A layer's own coarse step as a module."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, *arguments: Any, **named: Any) -> Any:
        return self.module.coarse_step(*arguments, **named)  # type: ignore[operator]


def _advanced(state: Any, increment: Any, dt: float) -> Any:
    """Returns `state + dt * increment`, leaf by leaf.

    Integer and bool leaves stay. An increment may consist of the other leaves alone.
    """
    leaves, tree = pytree.tree_flatten(state)
    changes = pytree.tree_leaves(increment)
    if len(changes) == len(leaves):
        changes = [change for change, leaf in zip(changes, leaves) if is_state(leaf)]
    left = iter(changes)
    moved = [(leaf + dt * next(left)).to(leaf.dtype) if is_state(leaf) else leaf for leaf in leaves]
    return pytree.tree_unflatten(moved, tree)
