"""What a layer of a layer-parallel net is to the solver.

Owns the five kinds, and that a layer is built from a seed of its own. How a layer is evaluated is in `_net.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import nn

from ._drawing import draw_for, drawn_for
from ._own import OwnNumbers, own_generator, with_own_generator

__all__ = [
    "Block",
    "Kind",
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


Kind = Literal["ode", "timed", "residual", "custom", "plain"]
Builder = Callable[[int], nn.Module]

_WORD = (1 << 64) - 1


@dataclass(frozen=True)
class Block:
    """A layer: what it computes, and how a coarse step is made of it."""

    module: nn.Module | Builder
    kind: Kind = "plain"
    is_apart: bool = False

    def apart(self) -> Block:
        """The same, as an interval of its own on every level: never part of a coarse step."""
        return replace(self, is_apart=True)


def ode(f: nn.Module | Builder) -> Block:
    """A step `x + dt * f(x)`; a coarse step takes a longer dt. `f`: a module, or a function of the layer's number that builds it."""
    return Block(f, "ode")


def timed(f: nn.Module | Builder) -> Block:
    """A step `f(x, dt)`, which takes the length of the step, a float, itself; a compiled one gets it as a tensor, so that one graph serves all levels."""
    return Block(f, "timed")


def residual(block: nn.Module | Builder) -> Block:
    """A step `block(x)` that holds its own skip connection, as transformer blocks do. A coarse step over n layers is `x + n * (block(x) - x)`."""
    return Block(block, "residual")


def custom(layer: nn.Module | Builder) -> Block:
    """A step `layer(x)` with a coarse step of its own, `layer.coarse_step(x, n)` over n layers: where one of the others would not converge, as an implicit step does."""
    return Block(layer, "custom")


def plain(layer: nn.Module | Builder) -> Block:
    """A layer `layer(x)` that is no step: a head, a tail, or one that changes shapes. So is a module that stands in the list by itself."""
    return Block(layer, "plain")


def mixed(*numbers: int) -> int:
    """64 bits of several whole numbers (splitmix64, Steele, Lea and Flood 2014)."""
    state = 0
    for number in numbers:
        state = (state ^ (number & _WORD)) + 0x9E3779B97F4A7C15 & _WORD
        state = (state ^ state >> 30) * 0xBF58476D1CE4E5B9 & _WORD
        state = (state ^ state >> 27) * 0x94D049BB133111EB & _WORD
        state ^= state >> 31
    return state


def built(block: Block, number: int, seed: int) -> nn.Module:
    """The module of a block; what builds one does so with random numbers that depend on the seed and its number alone."""
    if isinstance(block.module, nn.Module):
        return block.module
    with seeded(mixed(seed, number)):
        module = block.module(number)
    if not isinstance(module, nn.Module):
        raise TypeError(
            f"layer {number}: what was to build it returned {type(module).__name__}; return a torch.nn.Module"
        )
    return module


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """torch's random numbers come from this seed meanwhile, and go on afterwards as if nothing had been."""
    has_cuda = torch.cuda.is_available()
    if has_cuda:
        torch.cuda.init()  # type: ignore[no-untyped-call]
    with undisturbed(), drawing_from(seed):
        if has_cuda:
            torch.cuda.manual_seed(seed)
        yield


@contextmanager
def drawing_from(seed: int, *, has_graph: bool = False, is_followed: bool = False) -> Iterator[OwnNumbers | None]:
    """A CPU's random numbers of this thread come from this seed meanwhile. Gives what watches over them, if they do not come from the default generator.

    `has_graph`: autograd records, and may recompute. `is_followed`: the default generator goes along, from which a recomputation draws.
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
    """What was drawn meanwhile leaves no trace in torch's random numbers, and layers do not draw from those of other threads."""
    evaluation = drawn_for()
    cuda = torch.cuda.get_rng_state() if torch.cuda.is_initialized() else None  # type: ignore[no-untyped-call]
    with with_own_generator() as is_shared:
        # Of what is shared, only other threads draw.
        before = None if is_shared else torch.random.get_rng_state()
        try:
            yield
        finally:
            draw_for(evaluation)
            if before is not None:
                torch.random.set_rng_state(before)
            if cuda is not None:
                torch.cuda.set_rng_state(cuda)
