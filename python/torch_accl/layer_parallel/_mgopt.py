"""Optimisation by multigrid over the depth of a net (MG/Opt; Nash, "A multigrid approach to discretized optimization problems", 2000).

Owns the V-cycle inside a batch: when which net takes a step, the correction that makes a shallower net's objective agree with the deeper one's to first order, and the
search along what it suggests. What goes between two nets is in `_between.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils import _pytree as pytree

from ._agreed import agreed
from ._between import Between, Field, combined, copied, dots, move, trained
from ._carried import Moments
from ._looked import Place, check_net, looked_at, places_of
from ._nested import Interpolation, coarsened
from ._origins import finer
from ._run import LossFunction
from ._stack import LayerParallel

__all__ = ["Correction", "MGOpt"]


# What a correction must gain at least, as a share of what its slope promises (Armijo's condition).
_GAIN = 1e-4


@dataclass(frozen=True)
class Correction:
    """What one coarse net did for the net above it in a batch, the same on all ranks.

    level: of the net that was corrected; 0 is the net itself. before, after: its objective. slope: the derivative along the suggested change, before any of it was
    made. length: the share of the change that was made, 0 if none lowered the objective. trials: how many shares were tried.
    """

    level: int
    before: float
    after: float
    slope: float
    length: float
    trials: int


class MGOpt:
    """Trains a net by V-cycles over nets of different depth inside each batch; `step` takes the place of `zero_grad`, `net.step` and `optimizer.step`.

    A net takes steps of its optimiser; a net of every `factor`-th layer begins where it is, takes steps on the same batch towards less of its own loss plus a linear term
    that gives it the gradient of the deeper net there; what it has changed is interpolated, and as much of it is made as lowers the deeper net's loss; then the
    deeper net takes steps again. The coarse net does the same with one coarser still.

    net, optimizer: what is trained, on all ranks of the layers, and the optimiser of its parameters; a rank without any may give None.
    levels, factor: how many nets there are, the given one among them, and how many layers of one are a layer of the next.
    interpolation: of changes, `"constant"` or `"linear"` in layer time; gradients go the transposed way.
    pre, post: steps of the optimiser before and after a correction; coarse: those of the last net.
    trials: so many shares of a correction are tried, 1, 1/2, 1/4 ..., before none of it is made. Each takes a batch's work; the gradient of the one that is taken is that of the next step.
    coarse_optimizer: makes the optimiser of a coarse net of its parameters and its level (1, 2, ...). By default each has the class, options and moments of the one above, anew in each batch.
    settings: what is to be other in the coarse nets: `mode`, `fwd` and all that `coarsened` takes but `placement`.

    Parameters of the optimiser that are not the net's take part in its `pre` and `post` steps alone. Which parameters want a gradient stays as it is.
    """

    def __init__(
        self,
        net: LayerParallel,
        optimizer: Optimizer | None,
        *,
        levels: int = 2,
        factor: int = 2,
        interpolation: Interpolation = "constant",
        pre: int = 1,
        post: int = 1,
        coarse: int = 2,
        trials: int = 4,
        coarse_optimizer: Callable[[Iterable[nn.Parameter], int], Optimizer] | None = None,
        **settings: Any,
    ) -> None:
        check_net(net)
        for name, value, least in (
            ("levels", levels, 1),
            ("factor", factor, 2),
            ("pre", pre, 0),
            ("post", post, 0),
            ("coarse", coarse, 1),
            ("trials", trials, 1),
        ):
            if value < least:
                raise ValueError(f"{name}={value}: give {least} or more")
        if interpolation not in ("constant", "linear"):
            raise ValueError(f"interpolation={interpolation!r}: give one of constant, linear")
        if "placement" in settings:
            raise ValueError("placement is given; a coarse layer lies with the first of its layers, so leave it out")
        self._pre, self._post, self._coarse, self._trials = pre, post, coarse, trials
        self._moments: Moments | None = settings.get("moments", "scaled") if coarse_optimizer is None else None
        _, ties = looked_at(net)
        kinds = net._solver.layers.kinds
        if tied := sorted({layer for group in ties for layer, _ in group if kinds[layer] != "plain"}):
            raise ValueError(
                f"steps {', '.join(map(str, tied[:5]))}{' ...' if len(tied) > 5 else ''} have parameters that are tied to others; those of plain layers alone may be"
            )
        self._levels = [_Level(net, optimizer, ties)]
        self._trained = _are_trained(net)
        self._between: list[Between] = []
        # Of the last batch, in the order in which they were made.
        self.corrections: list[Correction] = []
        for level in range(1, levels):
            above = self._levels[-1]
            shown: dict[str, Any] = dict(audit_every=0, probe_every=0, evaluation="exact-wave") | settings
            if coarse_optimizer is None:
                # Where another rank gives one.
                found: Any = coarsened(above.net, factor, above.optimizer, placement="kept", **shown)
                made, of_made = found if isinstance(found, tuple) else (found, None)
                if of_made is not None:
                    _keep_own(of_made, made)
            else:
                made = coarsened(above.net, factor, placement="kept", **shown)
                of_made = _made(coarse_optimizer, made, level)
            kinds = made._solver.layers.kinds
            makes, ties = looked_at(made)
            origins = finer(kinds, makes, factor, is_linear=interpolation == "linear")
            ratios = [1.0 if kind == "plain" else float(factor) for kind in kinds]
            self._between.append(Between(above.net, made, origins, ratios))
            self._levels.append(_Level(made, of_made, ties))

    @property
    def nets(self) -> list[LayerParallel]:
        """The net and the coarse ones."""
        return [level.net for level in self._levels]

    @property
    def optimizers(self) -> list[Optimizer | None]:
        """Theirs."""
        return [level.optimizer for level in self._levels]

    def step(
        self,
        x: Any = None,
        target: Any = None,
        loss_fn: LossFunction | None = None,
        *,
        side: dict[str, Any] | None = None,
    ) -> Tensor:
        """A V-cycle with one batch, on all ranks together, given as to `LayerParallel.step`. Returns the loss before it, the same on all ranks.

        The input and the side inputs get no gradients: a batch is evaluated at several points.
        """
        finest = self._levels[0]
        net = finest.net
        self._check_trained()
        every = net._audit_every, net._probe_every
        batch = _Batch(_still(x), target, loss_fn, _still(side), net._solver.shared.number)
        self.corrections = []
        finest.begin()
        try:
            point = finest.evaluate(batch)
            # A batch is audited, or a probe, once.
            net._audit_every = net._probe_every = 0
            self._cycle(0, point, batch)
        finally:
            net._audit_every, net._probe_every = every
            for level in self._levels:
                level.net.zero_grad(set_to_none=True)
        return point.shown

    def _check_trained(self) -> None:
        """Nets of two depths have the same gradients, one by one."""
        net = self._levels[0].net
        now = _are_trained(net)
        # One more than its number, and 0 for none.
        last = max((layer + 1 for layer, flags in now.items() if flags != self._trained.get(layer)), default=0)
        (last,) = net._wire.together(
            torch.tensor([last], dtype=torch.int64, device=net._wire.device), "the start of a cycle", is_greatest=True
        )
        if last:
            raise ValueError(
                f"other parameters of layer {last - 1} want a gradient than when this MGOpt was made; make a new one"
            )

    def _cycle(self, at: int, point: _Point, batch: _Batch) -> None:
        level = self._levels[at]
        if at == len(self._levels) - 1:
            level.relax(point, batch, self._coarse)
            return
        for _ in range(self._pre):
            level.relax(point, batch, 1)
            point = level.evaluate(batch)
        point = self._corrected(at, point, batch)
        level.relax(point, batch, self._post)

    def _corrected(self, at: int, point: _Point, batch: _Batch) -> _Point:
        """Where a net is once the coarser one has been asked."""
        level, below, between = self._levels[at], self._levels[at + 1], self._between[at]
        start = self._descend(at, point, batch)
        self._cycle(at + 1, start, batch)
        assert below.origin is not None
        changes = combined(below.values(), below.origin, lambda now, before: now - before)
        change = between.interpolated(changes)
        slope = level.product(point.gradients, change, "the slope along a correction")
        before, length = level.values(), 1.0
        trials = 0
        try:
            for trials in range(1, self._trials + 1):
                level.move(before, change, length)
                found = level.evaluate(batch)
                if found.objective <= point.objective + _GAIN * length * min(slope, 0.0) and (
                    slope < 0 or found.objective < point.objective
                ):
                    break
                length /= 2
            else:
                found, length = point, 0.0
        except BaseException:
            level.move(before, change, 0.0)
            raise
        if length == 0:
            level.move(before, change, 0.0)
            level.restore(point.buffers)
        self.corrections.append(Correction(at, point.objective, found.objective, slope, length, trials))
        return found

    def _descend(self, at: int, point: _Point, batch: _Batch) -> _Point:
        """Puts the coarser net where a net is, and gives it the linear term; its objective's gradient there is the restricted one."""
        above, below, between = self._levels[at], self._levels[at + 1], self._between[at]
        between.inject()
        if self._moments is not None and above.optimizer is not None and below.optimizer is not None:
            between.inject_optimizer(above.optimizer, below.optimizer, self._moments)
        below.begin()
        restricted = between.restricted(point.gradients)
        below.correction = None
        found = below.evaluate(batch)
        # What the coarse net does not use has no gradient there.
        wanted = combined(restricted, found.gradients, lambda r, _: r)
        below.correction = combined(wanted, found.gradients, lambda r, g: r - g)
        below.origin = below.values()
        return _Point(found.objective, found.shown, wanted, found.buffers)


@dataclass(frozen=True)
class _Batch:
    x: Any
    target: Any
    loss_fn: LossFunction | None
    side: dict[str, Any] | None
    # All evaluations draw the random numbers of this one.
    number: int


@dataclass(frozen=True)
class _Point:
    """What is known of a net where it is."""

    # The loss and the linear term.
    objective: float
    # The loss alone.
    shown: Tensor
    gradients: Field
    # As the evaluation has left them.
    buffers: list[Tensor]


class _Level:
    """One of the nets."""

    def __init__(self, net: LayerParallel, optimizer: Optimizer | None, ties: Sequence[Sequence[Place]]) -> None:
        self.net = net
        # What is tied has one gradient, which counts once.
        self._counted = [(layer, place) for group in ties for layer, place in group[1:]]
        self.optimizer = optimizer
        # The linear term: its gradient, and where it is zero.
        self.correction: Field | None = None
        self.origin: Field | None = None
        self._buffers: list[Tensor] = []

    def begin(self) -> None:
        """Every evaluation of a batch begins with the buffers of now: statistics are taken once, in the last one."""
        self._buffers = [buffer.clone() for buffer in self.net.buffers()]

    def restore(self, buffers: Sequence[Tensor]) -> None:
        """Sets the buffers."""
        with torch.no_grad():
            for buffer, value in zip(self.net.buffers(), buffers):
                buffer.copy_(value)

    def values(self) -> Field:
        """Copies of the parameters."""
        return copied(trained(self.net))

    def move(self, start: Field, change: Field, length: float) -> None:
        """The parameters go this share of a change away from where they were."""
        move(trained(self.net), start, change, length)

    def evaluate(self, batch: _Batch) -> _Point:
        """Objective and gradients of the net where it is; all ranks call it."""
        net = self.net
        net.zero_grad(set_to_none=True)
        self.restore(self._buffers)
        net._solver.shared.number = batch.number
        loss = net.step(batch.x, batch.target, batch.loss_fn, side=batch.side)
        gradients: Field = {layer: [p.grad for p in parameters] for layer, parameters in trained(net).items()}
        net.zero_grad(set_to_none=True)
        objective = float(loss)
        if self.correction is not None:
            assert self.origin is not None
            away = combined(self.values(), self.origin, lambda now, before: now - before)
            objective += self.product(self.correction, away, "the linear term of a coarse objective")
            gradients = combined(gradients, self.correction, lambda g, c: g + c)
        return _Point(objective, loss, gradients, [buffer.clone() for buffer in net.buffers()])

    def product(self, one: Field, other: Field, what: str) -> float:
        """The inner product of two fields, in which what is tied counts once."""
        once = {layer: list(tensors) for layer, tensors in one.items()}
        parameters, modules = trained(self.net), self.net._solver.layers.modules
        for layer, place in self._counted:
            if layer in once:
                again = places_of(modules[layer])[place][1]
                for slot, parameter in enumerate(parameters[layer]):
                    if parameter is again:
                        once[layer][slot] = None
        return dots(self.net, once, other, what)

    def relax(self, point: _Point, batch: _Batch, steps: int) -> None:
        """Steps of the optimiser, the first with the gradients that are known."""
        for number in range(steps):
            if number:
                point = self.evaluate(batch)
            for layer, parameters in trained(self.net).items():
                for parameter, gradient in zip(parameters, point.gradients[layer]):
                    # An optimiser may change it, and who knows the gradient may need it again.
                    parameter.grad = None if gradient is None else gradient.clone()
            if self.optimizer is not None:
                self.optimizer.step()


def _made(
    coarse_optimizer: Callable[[Iterable[nn.Parameter], int], Optimizer], net: LayerParallel, level: int
) -> Optimizer | None:
    """A coarse net's optimiser; ranks without parameters need none."""

    def make() -> None:
        parameters = list(net.parameters())
        if parameters:
            found.append(coarse_optimizer(parameters, level))

    found: list[Optimizer] = []
    agreed(net._wire, f"making the optimizer of level {level}", "Give one that can be made on all ranks.", make)
    return found[0] if found else None


def _are_trained(net: LayerParallel) -> dict[int, list[bool]]:
    """Of this rank's layers, which parameters want a gradient."""
    modules = net._solver.layers.modules
    return {layer: [p.requires_grad for p in module.parameters()] for layer, module in modules.items()}


def _keep_own(optimizer: Optimizer, net: LayerParallel) -> None:
    """Leaves out what is not the net's: it takes no steps of a coarse net."""
    own = {id(parameter) for parameter in net.parameters()}
    for group in optimizer.param_groups:
        are_own = [id(parameter) in own for parameter in group["params"]]
        for name in ("params", "param_names"):
            if name in group:
                group[name] = [each for each, is_own in zip(group[name], are_own) if is_own]
    for parameter in [each for each in optimizer.state if isinstance(each, Tensor) and id(each) not in own]:
        del optimizer.state[parameter]


def _still(value: Any) -> Any:
    """The same without a graph behind it."""
    return pytree.tree_map(lambda leaf: leaf.detach() if isinstance(leaf, Tensor) else leaf, value)
