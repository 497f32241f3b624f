"""Layers whose parameters are a B-spline in time.

Owns the coefficients of the spline, the control points that this rank's layers need, and the module that interpolates a
layer's parameters. `ties.py` adds up the gradients of a control point over ranks, and `layer_sums.py` over the layers of
a rank.
"""

from __future__ import annotations

import copy
import functools
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.func import functional_call

from .._ranks.failures import described
from .blocks import Block, mixed, seeded
from .kinds import CoarseStep, functions_of_kinds
from .tree import is_state

__all__ = ["Interpolated", "Section", "Spline", "coefficients", "share_control_points"]


# The name, shape and dtype of each parameter.
Form = list[tuple[str, list[int], torch.dtype]]
# A reference to an object that no longer exists.
_NOTHING = weakref.ref(type("_Nothing", (), {})())
# Distinguishes the seed of a control point from the seed of a layer with the same number.
_SEED = 0x5EED


@dataclass(frozen=True)
class Spline:
    """Several layers whose parameters are a B-spline in time: few sets of parameters determine the parameters of many layers.

    It stands in the list of layers and takes the place of `layers` entries. Layer i of them is at the time
    `i * (control_points - degree) / layers`, in units of the distance of two knots. Its parameters are the sum of
    `degree + 1` control points, each times the value of its basis function at that time (uniform knots; Cox 1972,
    de Boor 1972). Layers on several ranks use the same control point, and it gets the sum of their gradients. Buffers
    are not interpolated: each layer has its own.

    layer: a layer of any kind, such as `ode(f)`, with a function that builds a module from the number of a control
        point. Parameters must have the same names, shapes and dtypes for all numbers, and a floating-point or complex
        dtype.
    layers: number of layers.
    control_points: number of sets of parameters, from `degree + 1` to `layers + degree`.
    degree: degree of the polynomials, at least 0. 0 makes the parameters constant between knots, and 1 linear.

    Raises:
        TypeError: `layer` is no layer, or it has a module instead of a function.
        ValueError: a number is not accepted.
    """

    layer: Block
    layers: int
    control_points: int
    degree: int = 1

    def __post_init__(self) -> None:
        if not isinstance(self.layer, Block):
            raise TypeError(f"Spline(layer={type(self.layer).__name__}): give {functions_of_kinds()}")
        if isinstance(self.layer.module, nn.Module):
            raise TypeError(
                f"Spline: the layer has a module, {type(self.layer.module).__name__}; give a function that builds one from the number of a control point"
            )
        for name, least in (("layers", 1), ("control_points", 1), ("degree", 0)):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise ValueError(f"Spline({name}={value!r}): give an integer of at least {least}")
        least, most = self.degree + 1, self.layers + self.degree
        if not least <= self.control_points <= most:
            amount = "few" if self.control_points < least else "many"
            raise ValueError(
                f"Spline(control_points={self.control_points}) has too {amount} control points for {self.layers} layers and degree {self.degree}; give {least} to {most}"
            )

    def location(self, layer: int) -> tuple[int, tuple[float, ...]]:
        """Returns the first control point of a layer, and the coefficients of it and of the ones after it."""
        time = Fraction(layer * (self.control_points - self.degree), self.layers)
        first = int(time)
        return first, coefficients(time - first, self.degree)


@dataclass
class Section:
    """The layers of one spline in a net, and the control points that this rank has built."""

    spline: Spline
    # Number of the first layer in the net.
    first: int
    seed: int
    _points: dict[int, _ControlPoint] = field(default_factory=dict)

    def blocks(self) -> list[Block]:
        """Returns one block for each layer."""
        layer = self.spline.layer
        build = functools.partial(self._built)
        functools.update_wrapper(build, layer.module, assigned=("__name__",), updated=())
        return [Block(build, layer.kind, layer.is_apart)] * self.spline.layers

    def form(self) -> tuple[int, Form] | None:
        """Returns the number of a control point that this rank has built, and its form. None if it has built none."""
        return next(((number, point.form) for number, point in self._points.items()), None)

    def check(self, number: int, form: Form, other: int, others: Form) -> None:
        """Raises `ValueError` if two control points have different forms."""
        if form != others:
            raise ValueError(
                f"control point {number} of the spline from layer {self.first} has the parameters {_shown(form)}, and control point {other} has "
                f"{_shown(others)}; build all of them with the same names, shapes and dtypes"
            )

    def members(self, names: Sequence[str], owner: Callable[[int], int]) -> list[list[str]]:
        """Returns the groups of names of parameters that are one on several ranks. On a rank, layers share it."""
        groups = []
        spline = self.spline
        of_point: list[list[int]] = [[] for _ in range(spline.control_points)]
        for layer in range(spline.layers):
            point, _ = spline.location(layer)
            for used in of_point[point : point + spline.degree + 1]:
                used.append(self.first + layer)
        for point, used in enumerate(of_point):
            if len({owner(layer) for layer in used}) > 1:
                groups += [[f"layers.{layer}.control_points.{point}.{name}" for layer in used] for name in names]
        return groups

    def _built(self, number: int) -> nn.Module:
        first, values = self.spline.location(number - self.first)
        points = {point: self._point(point) for point in range(first, first + len(values))}
        try:
            block = copy.deepcopy(points[first].block)
        except Exception as error:
            raise TypeError(
                f"the module of control point {first} cannot be copied for each layer: {described(error)}"
            ) from error
        cls = _InterpolatedCustom if hasattr(block, "coarse_step") else Interpolated
        modules = {point: each.parameters for point, each in points.items()}
        return cls(block, modules, values, points[first].first_names, self.first)

    def _point(self, number: int) -> _ControlPoint:
        if number not in self._points:
            known = self.form()
            point = _ControlPoint(number, self._build(number), self._points)
            if known is not None:
                self.check(number, point.form, *known)
            self._points[number] = point
        return self._points[number]

    def _build(self, number: int) -> nn.Module:
        build = self.spline.layer.module
        assert not isinstance(build, nn.Module)
        with seeded(mixed(self.seed, self.first, number, _SEED)):
            return build(number)


class _ControlPoint:
    """A control point: its parameters, in modules of the same names, and the module without them."""

    def __init__(self, number: int, block: Any, others: Mapping[int, _ControlPoint]) -> None:
        if not isinstance(block, nn.Module):
            raise TypeError(
                f"the function that builds control point {number} returned {type(block).__name__}; return a torch.nn.Module"
            )
        named = dict(block.named_parameters())
        self.identities = {id(parameter) for parameter in named.values()}
        for other, each in others.items():
            if block is each.block or self.identities & each.identities:
                raise TypeError(
                    f"the function that builds control points returned the same module or parameter for {other} and {number}; build a new one for each"
                )
        for name, parameter in named.items():
            if not is_state(parameter):
                raise TypeError(
                    f"control point {number}: the parameter {name} is {parameter.dtype}, which cannot be interpolated; make it a buffer"
                )
        of_parameter = {id(parameter): name for name, parameter in named.items()}
        self.form: Form = [(name, list(each.shape), each.dtype) for name, each in named.items()]
        # All names of the parameters, each with the first name of the same parameter.
        self.first_names = {
            name: of_parameter[id(parameter)] for name, parameter in block.named_parameters(remove_duplicate=False)
        }
        self.parameters = nn.Module()
        for name, parameter in named.items():
            *path, last = name.split(".")
            module = self.parameters
            for part in path:
                if part not in module._modules:
                    module.add_module(part, nn.Module())
                module = module.get_submodule(part)
            module.register_parameter(last, parameter)
        for module in block.modules():
            for name in module._parameters:
                module._parameters[name] = None
            if isinstance(module, nn.RNNBase):
                _empty(module)
        self.block: nn.Module = block


class Interpolated(nn.Module):
    """A layer whose parameters are interpolated between control points.

    block: the layer without parameters, with buffers of its own.
    control_points: the parameters of each control point by its number, shared with other layers.
    coefficients: the coefficient of each control point.
    spline: the number of the spline's first layer in the net for which it was built.
    """

    def __init__(
        self,
        block: nn.Module,
        control_points: dict[int, nn.Module],
        coefficients: Sequence[float],
        first_names: dict[str, str],
        spline: int,
    ) -> None:
        super().__init__()
        self.block = block
        self.control_points = nn.ModuleDict({str(number): each for number, each in control_points.items()})
        self.coefficients = tuple(coefficients)
        self.spline = spline
        self._first_names = first_names

    @property
    def stands_around(self) -> nn.Module:
        """The module whose side inputs this one takes."""
        return self.block

    def interpolated(self) -> dict[str, Tensor]:
        """Returns the layer's parameters by name, each with the shape and dtype of a control point's."""
        used = [
            (coefficient, dict(point.named_parameters()))
            for coefficient, point in zip(self.coefficients, self.control_points.values())
            if coefficient
        ]
        names = list(used[0][1])
        if len(used) == 1:
            # One basis function alone has the value 1.
            found = used[0][1]
        else:
            given = [point[name] for _, point in used for name in names]
            sums = _Combination.apply(tuple(coefficient for coefficient, _ in used), *given)
            found = dict(zip(names, sums))
        return {name: found[first] for name, first in self._first_names.items()}

    def forward(self, *arguments: Any, **named: Any) -> Any:
        """Returns the block's result with the interpolated parameters."""
        with _filled(self.block):
            return functional_call(self.block, self.interpolated(), arguments, named)


def share_control_points(layer: nn.Module, known: dict[tuple[int, str], nn.Module]) -> None:
    """Replaces the control points in a copy of a layer by the known ones, and adds the others to the known ones.

    Control points are known by their spline and number. Copies of one control point have equal values.
    """
    for module in layer.modules():
        if isinstance(module, Interpolated):
            for number, point in list(module.control_points.items()):
                module.control_points[number] = known.setdefault((module.spline, number), point)


class _Combination(torch.autograd.Function):
    """Linear combinations of several lists of tensors: one result for each index. Each is computed in one tensor."""

    @staticmethod
    def forward(ctx: Any, coefficients: tuple[float, ...], *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.coefficients = coefficients
        count = len(tensors) // len(coefficients)
        found = [tensor * coefficients[0] for tensor in tensors[:count]]
        for place, coefficient in enumerate(coefficients[1:], start=1):
            for total, tensor in zip(found, tensors[place * count :]):
                total.add_(tensor, alpha=coefficient)
        return tuple(found)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        wanted = iter(ctx.needs_input_grad[1:])
        return None, *(
            gradient * coefficient if next(wanted) else None
            for coefficient in ctx.coefficients
            for gradient in gradients
        )


class _InterpolatedCustom(Interpolated):
    """A layer with its own coarse step."""

    def coarse_step(self, *arguments: Any, **named: Any) -> Any:
        """Returns the block's coarse step with the interpolated parameters."""
        parameters = {f"module.{name}": each for name, each in self.interpolated().items()}
        with _filled(self.block):
            return functional_call(CoarseStep(self.block), parameters, arguments, named)


def coefficients(time: Fraction, degree: int) -> tuple[float, ...]:
    """Returns the values of the `degree + 1` uniform B-spline basis functions that are not zero between two knots.

    `time` is the time since the knot before it, in units of the distance of two knots. The recursion is Cox's and de
    Boor's, in fractions, so that the values are exact before they are rounded to floats.
    """
    values = [Fraction(1)]
    for order in range(1, degree + 1):
        saved = Fraction(0)
        for place in range(order):
            share = values[place] / order
            values[place] = saved + (place + 1 - time) * share
            saved = (time + order - place - 1) * share
        values.append(saved)
    return tuple(map(float, values))


@contextmanager
def _filled(block: nn.Module) -> Iterator[None]:
    """Inside the context, torch's recurrent modules notice that their parameters are other ones.

    They keep a list of their parameters in addition, which the end of the context empties.
    """
    recurrent = [module for module in block.modules() if isinstance(module, nn.RNNBase)]
    for module in recurrent:
        # A reference that leads to no tensor makes torch fill the list again.
        module._flat_weight_refs = [_NOTHING] * len(module._flat_weights_names)
    try:
        yield
    finally:
        for module in recurrent:
            _empty(module)


def _empty(module: nn.RNNBase) -> None:
    module._flat_weights = [None] * len(module._flat_weights_names)


def _shown(form: Form) -> str:
    return ", ".join(f"{name} {str(dtype).removeprefix('torch.')}{shape}" for name, shape, dtype in form) or "none"
