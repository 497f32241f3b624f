"""Nested iteration: makes a trained net deeper, or shallower, for the same differential equation.

Owns how a new layer and its optimiser entries are made. `refinement.py` decides which layer comes from which, and
`layer_migration.py` sends layers to other ranks.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from typing import Any, Literal, TypeVar, overload

import torch
from torch import nn
from torch.optim import Optimizer

from .._net.blocks import Block
from .._net.scaled import scaled
from .._net.spline import Interpolated, share_control_points
from .._ranks.agreed import agreed
from .._solve.settings import without_old_keywords
from .._solve.solver import Guess
from .._stack import LayerParallel
from .layer_facts import ParameterIndex, check_net, layer_facts, places_of, slots_of
from .layer_migration import MovingLayer, migrated_layers, named
from .optimizer_state import (
    Entry,
    Made,
    Moments,
    NewParameter,
    described_optimizer,
    interpolate,
    moved_state,
    remade,
)
from .refinement import Origin, coarser, finer, following

__all__ = ["Interpolation", "coarsened", "refined"]


Interpolation = Literal["constant", "linear"]
AnyOptimizer = TypeVar("AnyOptimizer", bound=Optimizer)

_NOTHING = "Nothing was changed; fix the cause and repeat the call."


@overload
def refined(
    net: LayerParallel,
    factor: int,
    optimizer: None = None,
    *,
    interpolation: Interpolation = "constant",
    residual: Literal["scaled", "copied"] = "scaled",
    moments: Moments = "scaled",
    **settings: Any,
) -> LayerParallel: ...


@overload
def refined(
    net: LayerParallel,
    factor: int,
    optimizer: AnyOptimizer,
    *,
    interpolation: Interpolation = "constant",
    residual: Literal["scaled", "copied"] = "scaled",
    moments: Moments = "scaled",
    **settings: Any,
) -> tuple[LayerParallel, AnyOptimizer]: ...


def refined(
    net: LayerParallel,
    factor: int,
    optimizer: Optimizer | None = None,
    *,
    interpolation: Interpolation = "constant",
    residual: Literal["scaled", "copied"] = "scaled",
    moments: Moments = "scaled",
    **settings: Any,
) -> LayerParallel | tuple[LayerParallel, Optimizer]:
    """Returns a net with `factor` shorter steps for each step, and the optimiser for it.

    Each new step has a `factor`-th of the length. All ranks call it together. `net` itself does not change.

    interpolation: `"constant"` copies the parameters of a step to its new layers. `"linear"` interpolates from the step
        to the next one, among neighbours of the same classes, shapes and types. Plain layers and all buffers are
        copied.
    residual: treatment of `residual` and `custom` layers, whose steps have no dt. `"scaled"` wraps each in a `Scaled`
        with `by=1/factor`, so that the net computes about the same. `"copied"` copies them, so that the net has
        `factor` times the increments.
    optimizer: gives the class, the options of each parameter's group, and the state. A rank without parameters may give
        None where others give an optimiser; it gets one as well. Parameters that do not belong to the net stay in it.
    moments: a layer that is one of `factor` has gradients a `factor`-th as large. `"scaled"` scales moments as if
        gradients had always been of that size, `"copied"` keeps them, and `"none"` drops them.
    settings: settings that differ from `net`: `placement`, `fwd` and all others that `LayerParallel` takes except its
        ranks, and `evaluation`. `placement="kept"` leaves new layers on the rank of the step that they come from. That
        is the default if the net's placement is a list. `buffer_layers` replaces the marks of layers that are apart.
        Without it, layers that come from a layer that is apart are apart.

    Returns the net, or the net and its optimiser if any rank gives one.

    Raises:
        TypeError: `net` is not a `LayerParallel`, or it is wrapped in another module.
        ValueError: an argument is not accepted, or ranks give different arguments.
        LayerParallelError: building or sending a layer failed on some rank; all ranks raise it.
    """
    request = _Request("refined", factor, interpolation, residual, moments, settings)
    return _answer(*_derived(net, request, optimizer))


@overload
def coarsened(
    net: LayerParallel,
    factor: int,
    optimizer: None = None,
    *,
    residual: Literal["scaled", "copied"] = "scaled",
    moments: Moments = "scaled",
    **settings: Any,
) -> LayerParallel: ...


@overload
def coarsened(
    net: LayerParallel,
    factor: int,
    optimizer: AnyOptimizer,
    *,
    residual: Literal["scaled", "copied"] = "scaled",
    moments: Moments = "scaled",
    **settings: Any,
) -> tuple[LayerParallel, AnyOptimizer]: ...


def coarsened(
    net: LayerParallel,
    factor: int,
    optimizer: Optimizer | None = None,
    *,
    residual: Literal["scaled", "copied"] = "scaled",
    moments: Moments = "scaled",
    **settings: Any,
) -> LayerParallel | tuple[LayerParallel, Optimizer]:
    """The converse of `refined`: returns a net of every `factor`-th step, with steps `factor` times as long.

    For a refined net, with either interpolation, the result is the net before refinement. `factor` must divide every
    run of steps with the same classes, shapes and types. A layer is apart if one of the layers that it replaces was.
    Otherwise as `refined`.
    """
    request = _Request("coarsened", factor, "constant", residual, moments, settings)
    return _answer(*_derived(net, request, optimizer))


def _answer(net: LayerParallel, optimizer: Optimizer | None) -> LayerParallel | tuple[LayerParallel, Optimizer]:
    return net if optimizer is None else (net, optimizer)


@dataclass(frozen=True)
class _Request:
    """The arguments of a call, the same on all ranks."""

    call: Literal["refined", "coarsened"]
    factor: int
    interpolation: Interpolation
    residual: Literal["scaled", "copied"]
    moments: Moments
    settings: Mapping[str, Any]

    def check(self) -> None:
        """Raises `ValueError` for invalid arguments."""
        if isinstance(self.factor, bool) or not isinstance(self.factor, int) or self.factor < 1:
            raise ValueError(f"factor={self.factor!r}: give an integer of at least 1")
        choices = {
            "interpolation": ("constant", "linear"),
            "residual": ("scaled", "copied"),
            "moments": ("scaled", "copied", "none"),
        }
        for name, known in choices.items():
            if getattr(self, name) not in known:
                raise ValueError(f"{name}={getattr(self, name)!r}: give one of {', '.join(known)}")
        for name in ("mesh", "group"):
            if name in self.settings:
                raise ValueError(f"{name} is not supported: the net stays on its ranks; leave it out")

    def check_layers(self, modules: Iterable[nn.Module]) -> None:
        """Raises `ValueError` for layers that cannot be changed in this way."""
        if self.interpolation == "linear" and any(
            isinstance(each, Interpolated) for module in modules for each in module.modules()
        ):
            raise ValueError(
                f"{self.call}(interpolation='linear'): the net has layers of a Spline, whose parameters are between control points already; use interpolation='constant'"
            )

    def without_old_keywords(self, net: LayerParallel) -> _Request:
        """Returns the request with new keywords in the place of old ones, which change the net's own settings."""
        # The warning is for the caller of `refined` or `coarsened`.
        renamed = without_old_keywords(self.settings, self.call, audit=net._audit, stop=net._stop, stacklevel=6)
        return replace(self, settings=renamed)

    def __str__(self) -> str:
        shown = ", ".join(f"{name}={_shown(self.settings[name])}" for name in sorted(self.settings))
        return (
            f"{self.call}(factor={self.factor!r}, interpolation={self.interpolation}, residual={self.residual}, moments={self.moments}"
            f"{', ' if shown else ''}{shown})"
        )

    @property
    def ratio(self) -> float:
        """Size of a step's gradient, relative to the gradient of the layer that the step comes from."""
        return 1 / self.factor if self.call == "refined" else float(self.factor)

    @property
    def by(self) -> Fraction:
        """Length of a new step, relative to the step of the layer that it comes from."""
        return Fraction(1, self.factor) if self.call == "refined" else Fraction(self.factor)

    def origins(self, net: LayerParallel, makes: Sequence[int]) -> list[Origin]:
        """Returns the origin of each layer of the new net."""
        kinds = net._solver.layers.kinds
        if self.call == "coarsened":
            return coarser(kinds, makes, self.factor)
        return finer(kinds, makes, self.factor, is_linear=self.interpolation == "linear")


def _shown(value: Any) -> str:
    """Returns a setting as text that is the same on every rank."""
    if callable(value):
        return getattr(value, "__qualname__", type(value).__name__)
    return repr(sorted(value)) if isinstance(value, set | frozenset) else repr(value)


def _derived(
    net: LayerParallel, request: _Request, optimizer: Optimizer | None
) -> tuple[LayerParallel, Optimizer | None]:
    check_net(net)
    wire = net._wire
    what = f"{request.call}()"

    def asked() -> tuple[str, Made | None, bool]:
        nonlocal request
        request = request.without_old_keywords(net)
        request.check()
        request.check_layers(net._solver.layers.modules.values())
        return str(request), described_optimizer(optimizer), any(True for _ in net.parameters())

    of_all = agreed(wire, what, _NOTHING, asked, is_for_all=True)
    others = sorted({each for each, _, _ in of_all})
    if len(others) > 1:
        raise ValueError(
            f"ranks of the layers issued different calls: {others[0]} and {others[1]}; issue the same call on all ranks"
        )
    made = _optimizer_of_all([(each, has_any) for _, each, has_any in of_all], optimizer)
    makes, ties = layer_facts(net)
    origins = request.origins(net, makes)
    shape = _shaped(net, request, origins)
    sources = migrated_layers(net, optimizer, origins, shape.owners)
    cls, defaults = _class_of(optimizer, made)
    tied: dict[int, set[int]] = {}
    for layer, place in (member for group in ties for member in group):
        tied.setdefault(layer, set()).add(place)
    kept: list[_Layers] = []

    def build() -> dict[tuple[int, int], str]:
        kept.append(_copied(net, request, cls, origins, shape.owners, sources, tied))
        return {
            (number, place): f"layers.{number}.{places_of(module)[place][0]}"
            for number, module in kept[0].modules.items()
            for place in tied.get(origins[number].layer, ())
        }

    names = {key: name for each in agreed(wire, what, _NOTHING, build) for key, name in each.items()}
    settings = {"tie": _followed(ties, origins, names)} | shape.settings
    new = _made(_blocks(net, request, shape, origins, kept[0]), settings)
    # The new net continues the count of batches, which random numbers and audits depend on.
    new._solver.shared.number = net._solver.shared.number
    new.training, new.layers.training = net.training, net.layers.training
    if cls is None or made is None:
        return new, None
    optimizers: list[Optimizer] = []

    def build_optimizer() -> None:
        optimizers.append(
            remade(
                cls,
                defaults,
                [] if optimizer is None else optimizer.param_groups,
                {id(parameter) for parameter in net.parameters()},
                kept[0].new_parameters,
                {} if optimizer is None else optimizer.state,
                has_names=made.has_names,
                has_states=request.moments != "none",
            )
        )

    agreed(wire, f"{what}, creating the optimizer", _NOTHING, build_optimizer)
    return new, optimizers[0]


def _followed(
    ties: Sequence[Sequence[ParameterIndex]], origins: Sequence[Origin], names: Mapping[tuple[int, int], str]
) -> list[list[str]]:
    """Returns the groups of tied names in the new net: each group's members come from one tied group of the old net."""
    groups = []
    for group in ties:
        members = [
            names[number, place]
            for layer, place in group
            for number, origin in enumerate(origins)
            if origin.layer == layer
        ]
        if len(members) > 1:
            groups.append(members)
    return groups


def _optimizer_of_all(of_all: Sequence[tuple[Made | None, bool]], own: Optimizer | None) -> Made | None:
    """Returns the optimiser that all ranks have, or None. A rank without parameters does not need one yet."""
    given = [made for made, _ in of_all if made is not None]
    if not given:
        return None
    names = sorted({made.name for made in given})
    if len(names) > 1:
        raise ValueError(
            f"ranks of the layers gave optimizers of {names[0]} and {names[1]}; give all ranks the same class"
        )
    without = [rank for rank, (made, has_any) in enumerate(of_all) if made is None]
    for rank in without:
        if of_all[rank][1]:
            raise ValueError(
                f"rank {rank} of the layers has parameters but gave no optimizer, while other ranks gave one; give one on all ranks"
            )
    usable = [made for made in given if made.pickled is not None]
    if without and not usable:
        raise ValueError(
            f"rank {without[0]} of the layers gave no optimizer, but {names[0]} cannot be pickled; give all ranks one, with an empty group on ranks "
            "without parameters"
        )
    return (usable or given)[0]


@dataclass(frozen=True)
class _Shape:
    """Shape of the new net: the owner of each layer, the layers that are apart, and the settings."""

    owners: list[int]
    are_apart: list[bool]
    settings: dict[str, Any]


def _shaped(net: LayerParallel, request: _Request, origins: Sequence[Origin]) -> _Shape:
    before = net._plans.net
    settings = _settings_of(net) | dict(request.settings)
    placement = settings["placement"]
    if placement == "kept" or ("placement" not in request.settings and not isinstance(placement, str)):
        settings["placement"] = following(before, origins)
    are_apart = [False] * len(origins)
    if "buffer_layers" not in settings:
        ends = [origin.layer for origin in origins[1:]] + [len(before.layers)]
        for at, (origin, end) in enumerate(zip(origins, ends)):
            are_apart[at] = any(apart for _, apart in before.layers[origin.layer : max(end, origin.layer + 1)])
    # A net of empty layers computes the placement, and raises for wrong settings before any layer is sent.
    kinds = net._solver.layers.kinds
    hollow = [
        Block(lambda number: nn.Identity(), kinds[origin.layer].name, apart)
        for origin, apart in zip(origins, are_apart)
    ]
    if "guess" not in request.settings and net.guess is not None:
        settings["guess"] = _guess_of(net.guess, [*(origin.layer for origin in origins), len(before.layers)])
    made = _made(hollow, settings | {"tie": ()})
    return _Shape([made.owner(layer) for layer in range(len(origins))], are_apart, settings)


def _made(blocks: Sequence[Block], settings: Mapping[str, Any]) -> LayerParallel:
    own = dict(settings)
    evaluation = own.pop("evaluation")
    made = LayerParallel(blocks, **own)
    made.evaluation = evaluation
    return made


def _guess_of(guess: Guess, points: Sequence[int]) -> Guess:
    """Returns a guess that translates points of the new net to points of the old one."""
    return lambda point: guess(points[point])


def _settings_of(net: LayerParallel) -> dict[str, Any]:
    """Returns the settings with which another net like this one is built."""
    return dict(
        group="alone" if net._wire.group is None else net._wire.group,
        horizon=net._horizon,
        seed=net._solver.layers.seed,
        mode=net.mode,
        evaluation=net.evaluation,
        fwd=net.fwd,
        bwd=net.bwd,
        spatial=net._solver.shared.spatial,
        placement=net._placement,
        # None unless the user has given it: then the loss may not be a mean over micro-batches.
        micro_batches=net._micro_batches if net._may_be_cut else None,
        schedule=net._schedule,
        side_per_sample=net._solver.shared.per_sample,
        checkpoint=net._checkpoint,
        auto_modes=net._auto_modes,
        stop=net._stop,
        replica=net._solver.replica,
        audit=net._audit,
    )


# ---- the new net


@dataclass
class _Layers:
    """New layers of this rank, and the optimiser entries of their parameters."""

    modules: dict[int, nn.Module]
    new_parameters: list[NewParameter]
    # Control points of splines, which layers share.
    control_points: dict[tuple[int, str], nn.Module] = field(default_factory=dict)


def _copied(
    net: LayerParallel,
    request: _Request,
    cls: type[Optimizer] | None,
    origins: Sequence[Origin],
    owners: Sequence[int],
    sources: Mapping[int, MovingLayer],
    tied: Mapping[int, Collection[int]],
) -> _Layers:
    kinds, names, made = net._solver.layers.kinds, net._solver.names, _Layers({}, [])
    for number, (origin, owner) in enumerate(zip(origins, owners)):
        if owner != net._wire.rank:
            continue
        kind, own = kinds[origin.layer], sources[origin.layer]
        other = None if origin.towards is None else sources[origin.towards]
        module = named(origin.layer, names, "copied", lambda: copy.deepcopy(own.module))  # noqa: B023
        # Tied parameters keep their values, because interpolation would make them differ.
        fixed = slots_of(module, tied.get(origin.layer, ()))
        if other is not None:
            _mix(module, other.module, origin.share, fixed)
        share_control_points(module, made.control_points)
        is_scaled = kind.is_wrapped(request.residual)
        if is_scaled:
            module = scaled(module, request.by)
        made.modules[number] = module
        if cls is not None:
            ratio = request.ratio if (kind.has_dt or is_scaled) and request.moments != "copied" else 1.0
            known = {id(each.parameter) for each in made.new_parameters} if made.control_points else set()
            found = _new_parameters(cls, number, module, own, other, origin.share, ratio, fixed)
            made.new_parameters += [each for each in found if id(each.parameter) not in known]
    return made


def _blocks(
    net: LayerParallel, request: _Request, shape: _Shape, origins: Sequence[Origin], own: _Layers
) -> list[Block]:
    kinds, names = net._solver.layers.kinds, net._solver.names
    blocks = []
    for number, (origin, is_apart) in enumerate(zip(origins, shape.are_apart)):
        kind = kinds[origin.layer]
        absent = _absent("Scaled" if kind.is_wrapped(request.residual) else names[origin.layer])
        blocks.append(Block(own.modules.get(number, absent), kind.name, is_apart))
    return blocks


def _class_of(optimizer: Optimizer | None, made: Made | None) -> tuple[type[Optimizer] | None, Mapping[str, Any]]:
    """Returns the class and defaults of the new optimiser."""
    if made is None:
        return None, {}
    return made.loaded() if optimizer is None else (type(optimizer), optimizer.defaults)


def _absent(name: str) -> Callable[[int], nn.Module]:
    """Returns a builder that takes the place of a layer of another rank."""

    def absent(number: int) -> nn.Module:
        raise RuntimeError(f"layer {number} is on another rank")

    absent.__name__ = name
    return absent


def _mix(module: nn.Module, other: nn.Module, share: float, fixed: Collection[int]) -> None:
    with torch.no_grad():
        for slot, (parameter, theirs) in enumerate(zip(module.parameters(), other.parameters())):
            if slot not in fixed:
                parameter.copy_(interpolate(parameter, theirs, share))


def _new_parameters(
    cls: type[Optimizer],
    number: int,
    module: nn.Module,
    own: MovingLayer,
    other: MovingLayer | None,
    share: float,
    ratio: float,
    fixed: Collection[int],
) -> list[NewParameter]:
    """Returns the parameters of a new layer, each with its optimiser entry."""
    found = []
    others: Sequence[Entry | None] = [None] * len(own.entries) if other is None else other.entries
    for slot, ((name, parameter), entry, towards) in enumerate(zip(module.named_parameters(), own.entries, others)):
        theirs = None if towards is None or slot in fixed else towards.state
        # Tied parameters get the sum of their gradients, however many they are, so their gradients keep their size.
        size = 1.0 if slot in fixed else ratio
        state = moved_state(cls, entry.state, theirs, share, size, parameter.shape)
        found.append(NewParameter(f"layers.{number}.{name}", parameter, Entry(entry.group, entry.options, state)))
    return found
