"""Hooks around each evaluation of a layer: they pass extra arguments, time the evaluation, and record input and output.

Owns these hooks. They exist during one forward pass only, so no copy and no checkpoint of a layer has them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils.hooks import RemovableHandle

from ._timers import ContextTimer

__all__ = ["Seen", "Watch", "norm_of"]


@dataclass(frozen=True)
class Seen:
    """The last evaluation of a layer, whose result is the final one: its input and its output."""

    state: Any
    returned: Any


class Watch:
    """Watches layers inside a `with` block. `keep`, if given, receives a `Seen` for each layer by its number."""

    def __init__(
        self,
        layers: Mapping[int, nn.Module],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        timer: ContextTimer | None,
        keep: dict[int, Seen] | None,
    ) -> None:
        self._layers = layers if args or kwargs or timer is not None or keep is not None else {}
        self._args = args
        self._kwargs = kwargs
        self._timer = timer
        self._keep = keep
        self._handles: list[RemovableHandle] = []

    def begin(self) -> None:
        """Registers the hooks."""
        for number, layer in self._layers.items():
            self._handles.append(layer.register_forward_pre_hook(self._before, with_kwargs=True))
            self._handles.append(layer.register_forward_hook(self._after(number)))

    def end(self) -> None:
        """Removes the hooks."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def __enter__(self) -> Watch:
        self.begin()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.end()

    def _before(
        self, layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        if any(
            isinstance(leaf, Tensor) and leaf.requires_grad for leaf in pytree.tree_leaves((self._args, self._kwargs))
        ):
            raise ValueError(
                "an extra argument of forward requires a gradient, which it would not get; detach it, or make it part of the state"
            )
        if self._timer is not None:
            self._timer.start()
        return (*args, *self._args), {**kwargs, **self._kwargs}

    def _after(self, number: int) -> Any:
        def seen(layer: nn.Module, args: tuple[Any, ...], returned: Any) -> None:
            if self._timer is not None:
                self._timer.stop()
            if self._keep is not None:
                self._keep[number] = Seen(_detached(args[0]), _detached(returned))

        return seen


def _detached(value: Any) -> Any:
    return pytree.tree_map(lambda leaf: leaf.detach() if isinstance(leaf, Tensor) else leaf, value)


def norm_of(state: Any) -> float:
    """Returns the 2-norm of a state, over all its floating-point leaves."""
    leaves = [leaf for leaf in pytree.tree_leaves(state) if isinstance(leaf, Tensor) and leaf.is_floating_point()]
    return math.sqrt(sum(float(torch.linalg.vector_norm(leaf, dtype=torch.float64)) ** 2 for leaf in leaves))
