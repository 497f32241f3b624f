"""The layers of a list, each with its kind.

Owns the functions that give a layer its kind, and the rule that each layer is built from its own seed. `kinds.py` owns
the kinds, and `evaluation.py` evaluates layers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, replace

import torch
from torch import nn

from .device_numbers import all_devices, kept_numbers, seed_devices
from .drawing import draw_for, drawn_for
from .kinds import CUSTOM, ODE, PLAIN, RESIDUAL, TIMED, Kind
from .own_generator import OwnNumbers, own_generator, with_own_generator

__all__ = [
    "Block",
    "built",
    "custom",
    "drawing_from",
    "mixed",
    "ode",
    "plain",
    "residual",
    "seeded",
    "timed",
    "undisturbed",
]


Builder = Callable[[int], nn.Module]

_WORD = (1 << 64) - 1


@dataclass(frozen=True)
class Block:
    """A layer: its module, and how a coarse step is made from it."""

    module: nn.Module | Builder
    kind: Kind = "plain"
    is_apart: bool = False

    def apart(self) -> Block:
        """Returns the same layer as its own interval on every level: it is never part of a coarse step."""
        return replace(self, is_apart=True)


def ode(f: nn.Module | Builder) -> Block:
    """A step `x + dt * f(x)`; a coarse step takes a longer dt.

    `f`: a module, or a function that builds one from the layer's number.
    """
    return Block(f, ODE.name)


def timed(f: nn.Module | Builder) -> Block:
    """A step `f(x, dt)` that takes the length of the step itself, as a float.

    A compiled module gets dt as a tensor, so that one graph serves all levels.
    """
    return Block(f, TIMED.name)


def residual(block: nn.Module | Builder) -> Block:
    """A step `block(x)` with its own skip connection, as in transformer blocks.

    A coarse step over n layers is `x + n * (block(x) - x)`.
    """
    return Block(block, RESIDUAL.name)


def custom(layer: nn.Module | Builder) -> Block:
    """A step `layer(x)` with its own coarse step, `layer.coarse_step(x, n)` over n layers.

    It is for layers with which the other kinds would not converge, such as an implicit step.
    """
    return Block(layer, CUSTOM.name)


def plain(layer: nn.Module | Builder) -> Block:
    """A layer `layer(x)` that is not a step: a head, a tail, or a layer that changes shapes.

    A module in the list without a kind is a plain layer too.
    """
    return Block(layer, PLAIN.name)


def mixed(*numbers: int) -> int:
    """Mixes integers into 64 bits (splitmix64, Steele, Lea and Flood 2014)."""
    state = 0
    for number in numbers:
        state = (state ^ (number & _WORD)) + 0x9E3779B97F4A7C15 & _WORD
        state = (state ^ state >> 30) * 0xBF58476D1CE4E5B9 & _WORD
        state = (state ^ state >> 27) * 0x94D049BB133111EB & _WORD
        state ^= state >> 31
    return state


def built(block: Block, number: int, seed: int) -> nn.Module:
    """Returns the module of a block.

    A function that builds one draws random numbers that depend only on the seed and the layer's number.
    """
    if isinstance(block.module, nn.Module):
        return block.module
    with seeded(mixed(seed, number)):
        module = block.module(number)
    if not isinstance(module, nn.Module):
        raise TypeError(
            f"layer {number}: the function that builds it returned {type(module).__name__}; return a torch.nn.Module"
        )
    return module


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Inside the context, torch's random numbers come from this seed, on the CPU and on all devices of the accelerator.

    Afterwards they continue as if nothing had been drawn.
    """
    with undisturbed(), drawing_from(seed):
        # If a device's package does not show generators, modules that draw on the CPU can still be built.
        with suppress(NotImplementedError):
            seed_devices(all_devices(), seed)
        yield


@contextmanager
def drawing_from(seed: int, *, has_graph: bool = False, is_followed: bool = False) -> Iterator[OwnNumbers | None]:
    """Inside the context, this thread's random numbers on the CPU come from this seed.

    Yields the `OwnNumbers` that watches the draws, or None if they come from the default generator.

    has_graph: autograd records, and may recompute.
    is_followed: the default generator follows the own generator, because a recomputation draws from the default one.
    """
    own = own_generator()
    if own is None:
        torch.default_generator.manual_seed(seed)
        yield None
        return
    own.manual_seed(seed)
    numbers = OwnNumbers(own, has_graph=has_graph)
    with numbers.followed() if is_followed else nullcontext(), numbers:
        yield numbers


@contextmanager
def undisturbed() -> Iterator[None]:
    """Inside the context, draws leave no trace in torch's random numbers.

    Layers do not draw from the random numbers of other threads.
    """
    evaluation = drawn_for()
    with kept_numbers(), with_own_generator() as is_shared:
        # If other threads run, only they draw from the default generator, so its state is not restored.
        before = None if is_shared else torch.random.get_rng_state()
        try:
            yield
        finally:
            draw_for(evaluation)
            if before is not None:
                torch.random.set_rng_state(before)
