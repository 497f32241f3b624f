"""Random numbers of layers while other threads draw from torch's default generator, which the whole process shares.

Owns the detection of other threads, and the generator from which layers then draw. So their masks do not depend on
other threads, and other threads draw their own numbers. The own generator gives the same bits as the default one.
"""

from __future__ import annotations

import functools
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

__all__ = ["SEEDING_THEMSELVES", "OwnNumbers", "own_generator", "warn_of_other_threads", "with_own_generator"]


# Operators that are tagged as random but do not draw from a default generator.
SEEDING_THEMSELVES: set[str] = set()

_now: ContextVar[torch.Generator | None] = ContextVar("torch_accl_own_generator", default=None)


def own_generator() -> torch.Generator | None:
    """Returns the generator that replaces the default generator for layers on a CPU.

    None while this thread is the only one.
    """
    return _now.get()


@contextmanager
def with_own_generator() -> Iterator[bool]:
    """Inside the context, layers draw from their own generator if there are other threads. Yields whether there are."""
    # `_current_frames` has one entry for each thread that runs Python.
    has_others = len(sys._current_frames()) > 1
    token = _now.set(torch.Generator("cpu") if has_others else None)
    try:
        yield has_others
    finally:
        _now.reset(token)


class OwnNumbers(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Makes random operations of this thread on a CPU draw from one generator."""

    def __init__(self, generator: torch.Generator, *, has_graph: bool = False) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._generator = generator
        self._has_graph = has_graph
        # The default generator's state while it follows the own generator.
        self._followed: Tensor | None = None
        # Whether numbers were drawn that a backward pass draws again, as in a checkpoint. Such code saves the default
        # generator's state.
        self.is_recomputed = False
        # Whether any numbers were drawn.
        self.has_drawn = False

    @contextmanager
    def followed(self) -> Iterator[None]:
        """Inside the context, the default generator has the own generator's state.

        This is for code that saves the default generator's state and draws from it again.
        """
        before = torch.default_generator.get_state()
        self._follow()
        try:
            yield
        finally:
            self._check_followed()
            self._followed = None
            torch.default_generator.set_state(before)

    def _follow(self) -> None:
        self._followed = self._generator.get_state()
        torch.default_generator.set_state(self._followed)

    def _check_followed(self) -> None:
        if (
            self.is_recomputed
            and self._followed is not None
            and not torch.equal(self._followed, torch.default_generator.get_state())
        ):
            warn_of_other_threads()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if not _is_random(func) or not _is_on_cpu(args, kwargs):
            return func(*args, **kwargs)
        self.has_drawn = True
        given = [each for each in (kwargs.get("generator"), *args) if isinstance(each, torch.Generator)]
        if any(not _is_default(generator) for generator in given):
            # The layer has chosen a generator itself.
            return func(*args, **kwargs)
        # A layer that passes the default generator draws the same numbers as a layer that passes none.
        kwargs.pop("generator", None)
        args = tuple(self._generator if isinstance(each, torch.Generator) else each for each in args)
        if self._has_graph and _is_recomputed():
            self.is_recomputed = True
            if self._followed is None:
                raise RuntimeError(
                    "it draws random numbers in a checkpoint for the first time, while other threads run; run the batch again, which will then succeed"
                )
        if self._followed is None:
            return self._drawn(func, args, kwargs)
        self._check_followed()
        try:
            return self._drawn(func, args, kwargs)
        finally:
            self._follow()

    def _drawn(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        if func is torch.ops.aten.native_dropout.default:
            return self._dropout(*args, **kwargs)
        if any(each is self._generator for each in args):
            return func(*args, **kwargs)
        taking = _taking_generator(func)
        if taking is not None:
            return taking(*args, **kwargs, generator=self._generator)
        with self:
            found = func.decompose(*args, **kwargs)
        return self._swapped(lambda: func(*args, **kwargs)) if found is NotImplemented else found

    def _dropout(self, x: Tensor, p: float, train: bool | None) -> tuple[Tensor, Tensor]:
        """Dropout as torch computes it on a CPU, but with a generator."""
        if train is False:
            return x.clone(), torch.ones_like(x, dtype=torch.bool)
        mask = torch.empty_like(x, dtype=torch.bool).bernoulli_(1 - p, generator=self._generator)
        return x.mul(mask).mul_(0.0 if p == 1 else 1 / (1 - p)), mask

    def _swapped(self, call: Callable[[], Any]) -> Any:
        """Runs an operation that takes no generator.

        While it runs, the default generator has the own generator's state.
        """
        default = torch.default_generator
        before = default.get_state()
        default.set_state(self._generator.get_state())
        try:
            return call()
        finally:
            self._generator.set_state(default.get_state())
            default.set_state(before)


def _is_recomputed() -> bool:
    """Returns whether the running code will be recomputed, in a forward pass that autograd records.

    A sign of it is that `torch.utils.checkpoint` has set hooks of saved tensors, or records nothing.
    """
    return not torch.is_grad_enabled() or torch._C._autograd._top_saved_tensors_default_hooks(False) is not None


def _is_default(generator: torch.Generator) -> bool:
    """Returns whether it is the CPU's default generator. A dispatch mode gets another Python object for it."""
    return bool(generator._cdata == torch.default_generator._cdata)  # type: ignore[attr-defined]


@functools.cache
def _is_random(func: Any) -> bool:
    return torch.Tag.nondeterministic_seeded in func.tags and func.name() not in SEEDING_THEMSELVES


@functools.cache
def _taking_generator(func: Any) -> Any:
    """Returns the operation, or an overload of it, that takes a `generator`; None if there is none."""
    own = {argument.name for argument in func._schema.arguments}
    if "generator" in own:
        return func
    packet = func.overloadpacket
    for name in packet.overloads():
        other = getattr(packet, name)
        if {argument.name for argument in other._schema.arguments} == own | {"generator"}:
            return other
    return None


def _is_on_cpu(args: Any, kwargs: dict[str, Any]) -> bool:
    device = kwargs.get("device")
    if device is None:
        device = next((each.device for each in (*args, *kwargs.values()) if isinstance(each, Tensor)), "cpu")
    return torch.device(device).type == "cpu"


@functools.cache
def warn_of_other_threads() -> None:
    """Warns once in a process."""
    warnings.warn(
        "layer-parallel training: another thread draws from torch's default generator while layers are evaluated. Dropout "
        "masks then differ between iterations, and that thread's numbers repeat; give that thread a torch.Generator of its own",
        stacklevel=2,
    )
