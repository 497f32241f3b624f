"""Optimisation by multigrid over the depth of a net (MG/Opt).

The method is from Nash, "A multigrid approach to discretized optimization problems", 2000.

Owns the V-cycle inside a batch: the order in which the nets take steps, the correction, and the line search along the
suggested change. The correction makes a shallower net's objective agree to first order with the deeper net's.
`level_transfer.py` transfers values between two nets.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils import _pytree as pytree

from .._ranks.agreed import agreed
from .._solve.batch import LossFunction
from .._solve.settings import Audits, without_old_keywords
from .._stack import LayerParallel
from .layer_facts import ParameterIndex, check_net, layer_facts, places_of
from .level_transfer import Field, LevelTransfer, combined, copied, dots, move, trained
from .nested import Interpolation, coarsened
from .optimizer_state import Moments
from .refinement import finer

__all__ = ["Correction", "MGOpt"]


# Minimum gain of a correction, as a share of the gain that its slope predicts (Armijo's condition).
_GAIN = 1e-4


@dataclass(frozen=True)
class Correction:
    """Effect of one coarse net on the net above it in a batch; the same on all ranks.

    level: level of the net that was corrected; 0 is the net itself.
    before, after: objective of that net before and after.
    slope: derivative along the suggested change, at the point before it.
    length: share of the change that was made; 0 if no share lowered the objective enough.
    trials: number of shares that were tried.
    """

    level: int
    before: float
    after: float
    slope: float
    length: float
    trials: int


class MGOpt:
    """Trains a net by V-cycles over nets of different depth inside each batch.

    `step` replaces `zero_grad`, `net.step` and `optimizer.step`. It does the following:

    - The net takes steps of its optimiser.
    - A coarse net of every `factor`-th layer starts at the same point and takes steps on the same batch. It minimizes
      its own loss plus a linear term, which gives it the gradient of the deeper net at that point.
    - The change of the coarse net is interpolated. The deeper net takes the first tried share of it that lowers its
      objective enough (Armijo's condition).
    - The deeper net takes steps again.

    The coarse net does the same with a still coarser net.

    net, optimizer: the net to train, on all ranks of the layers, and the optimiser of its parameters. A rank without
        parameters may give None.
    levels: number of nets, including the given one.
    factor: number of layers of one net that make one layer of the next.
    interpolation: interpolation of changes, `"constant"` or `"linear"` in layer time. Gradients are transferred by its
        transpose.
    pre, post: steps of the optimiser before and after a correction.
    coarse: steps of the last net.
    trials: maximum number of shares of a correction that are tried (1, 1/2, 1/4, ...) before it is dropped. Each trial
        takes the work of a batch. The next step uses the gradient of the accepted trial.
    coarse_optimizer: makes the optimiser of a coarse net from its parameters and its level (1, 2, ...). By default each
        coarse optimiser has the class, options and moments of the one above, which are copied in each batch.
    settings: settings that differ in the coarse nets: `mode`, `fwd` and all others that `coarsened` takes except
        `placement`.

    Parameters of the optimiser that do not belong to the net change only in its `pre` and `post` steps. `requires_grad`
    of a parameter must not change later.

    Raises:
        TypeError: `net` is not a `LayerParallel`, or it is wrapped in another module.
        ValueError: an argument is not accepted, or parameters of a step are tied to others.
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
            raise ValueError(
                "placement is not supported: a coarse layer is on the rank of the first layer it stands for; leave it out"
            )
        settings = without_old_keywords(settings, "MGOpt", stop=net._stop, stacklevel=2)
        self._pre, self._post, self._coarse, self._trials = pre, post, coarse, trials
        self._moments: Moments | None = settings.get("moments", "scaled") if coarse_optimizer is None else None
        _, ties = layer_facts(net)
        kinds = net._solver.layers.kinds
        if tied := sorted({layer for group in ties for layer, _ in group if kinds[layer].is_step}):
            raise ValueError(
                f"steps {', '.join(map(str, tied[:5]))}{' ...' if len(tied) > 5 else ''} have tied parameters; only plain layers may have them"
            )
        self._levels = [_Level(net, optimizer, ties)]
        self._trained = _are_trained(net)
        self._transfers: list[LevelTransfer] = []
        # The corrections of the last batch, in the order in which they were made.
        self.corrections: list[Correction] = []
        for level in range(1, levels):
            above = self._levels[-1]
            shown: dict[str, Any] = dict(audit=Audits(), evaluation="exact-wave") | settings
            if coarse_optimizer is None:
                # `coarsened` also returns an optimiser if only another rank gave one.
                found: Any = coarsened(above.net, factor, above.optimizer, placement="kept", **shown)
                made, of_made = found if isinstance(found, tuple) else (found, None)
                if of_made is not None:
                    _keep_own(of_made, made)
            else:
                made = coarsened(above.net, factor, placement="kept", **shown)
                of_made = _made(coarse_optimizer, made, level)
            kinds = made._solver.layers.kinds
            makes, ties = layer_facts(made)
            origins = finer(kinds, makes, factor, is_linear=interpolation == "linear")
            ratios = [float(kind.parts(factor)) for kind in kinds]
            self._transfers.append(LevelTransfer(above.net, made, origins, ratios))
            self._levels.append(_Level(made, of_made, ties))

    @property
    def nets(self) -> list[LayerParallel]:
        """The net and the coarse nets."""
        return [level.net for level in self._levels]

    @property
    def optimizers(self) -> list[Optimizer | None]:
        """The optimisers of the nets."""
        return [level.optimizer for level in self._levels]

    def step(
        self,
        x: Any = None,
        target: Any = None,
        loss_fn: LossFunction | None = None,
        *,
        side: dict[str, Any] | None = None,
    ) -> Tensor:
        """Runs a V-cycle with one batch, on all ranks together. It takes the arguments of `LayerParallel.step`.

        Returns the loss before the cycle, the same on all ranks. The input and the side inputs get no gradients,
        because a batch is evaluated at several points.
        """
        finest = self._levels[0]
        net = finest.net
        self._check_trained()
        audit = net._audit
        batch = _Batch(_still(x), target, loss_fn, _still(side), net._solver.shared.number)
        self.corrections = []
        finest.begin()
        try:
            point = finest.evaluate(batch)
            # A batch is audited or probed only once.
            net._audit = Audits()
            self._cycle(0, point, batch)
        finally:
            net._audit = audit
            for level in self._levels:
                level.net.zero_grad(set_to_none=True)
        return point.shown

    def _check_trained(self) -> None:
        """Raises `ValueError` if `requires_grad` of a parameter has changed.

        Gradients of two nets must match one by one.
        """
        net = self._levels[0].net
        now = _are_trained(net)
        # Layer number plus one; 0 for no layer.
        last = max((layer + 1 for layer, flags in now.items() if flags != self._trained.get(layer)), default=0)
        (last,) = net._wire.together(
            torch.tensor([last], dtype=torch.int64, device=net._wire.device), "the start of a cycle", is_greatest=True
        )
        if last:
            raise ValueError(
                f"requires_grad of the parameters of layer {last - 1} has changed since this MGOpt was created; create a new MGOpt"
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
        """Returns the net's point after the correction by the coarser net."""
        level, below, transfer = self._levels[at], self._levels[at + 1], self._transfers[at]
        start = self._descend(at, point, batch)
        self._cycle(at + 1, start, batch)
        assert below.origin is not None
        changes = combined(below.values(), below.origin, lambda now, before: now - before)
        change = transfer.interpolated(changes)
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
        """Moves the coarser net to the point of the finer net and sets its linear term.

        The gradient of the coarser objective there is the restricted gradient of the finer objective.
        """
        above, below, transfer = self._levels[at], self._levels[at + 1], self._transfers[at]
        transfer.inject()
        if self._moments is not None and above.optimizer is not None and below.optimizer is not None:
            transfer.inject_optimizer(above.optimizer, below.optimizer, self._moments)
        below.begin()
        restricted = transfer.restricted(point.gradients)
        below.correction = None
        found = below.evaluate(batch)
        # Parameters that the coarse net does not use have no gradient there.
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
    # All evaluations draw the random numbers of the batch with this number.
    number: int


@dataclass(frozen=True)
class _Point:
    """Results of an evaluation of a net with its current parameters."""

    # The loss plus the linear term.
    objective: float
    # The loss without the linear term.
    shown: Tensor
    gradients: Field
    # The buffers after the evaluation.
    buffers: list[Tensor]


class _Level:
    """A net of the V-cycle."""

    def __init__(
        self, net: LayerParallel, optimizer: Optimizer | None, ties: Sequence[Sequence[ParameterIndex]]
    ) -> None:
        self.net = net
        # Tied parameters have one gradient, which counts once.
        self._counted = [(layer, place) for group in ties for layer, place in group[1:]]
        self.optimizer = optimizer
        # The linear term: its gradient, and the point where it is zero.
        self.correction: Field | None = None
        self.origin: Field | None = None
        self._buffers: list[Tensor] = []

    def begin(self) -> None:
        """Saves the buffers.

        Each evaluation of a batch starts with them, so that only the last evaluation updates statistics.
        """
        self._buffers = [buffer.clone() for buffer in self.net.buffers()]

    def restore(self, buffers: Sequence[Tensor]) -> None:
        """Sets the buffers."""
        with torch.no_grad():
            for buffer, value in zip(self.net.buffers(), buffers):
                buffer.copy_(value)

    def values(self) -> Field:
        """Returns copies of the parameters."""
        return copied(trained(self.net))

    def move(self, start: Field, change: Field, length: float) -> None:
        """Sets the parameters to `start + length * change`."""
        move(trained(self.net), start, change, length)

    def evaluate(self, batch: _Batch) -> _Point:
        """Evaluates objective and gradients with the current parameters. All ranks call it."""
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
        """Returns the inner product of two fields, in which tied parameters count once."""
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
        """Takes steps of the optimiser, the first with the known gradients of `point`."""
        for number in range(steps):
            if number:
                point = self.evaluate(batch)
            for layer, parameters in trained(self.net).items():
                for parameter, gradient in zip(parameters, point.gradients[layer]):
                    # The gradient is cloned: an optimiser may change it, and the point may be used again.
                    parameter.grad = None if gradient is None else gradient.clone()
            if self.optimizer is not None:
                self.optimizer.step()


def _made(
    coarse_optimizer: Callable[[Iterable[nn.Parameter], int], Optimizer], net: LayerParallel, level: int
) -> Optimizer | None:
    """Makes a coarse net's optimiser; None on ranks without parameters."""

    def make() -> None:
        parameters = list(net.parameters())
        if parameters:
            found.append(coarse_optimizer(parameters, level))

    found: list[Optimizer] = []
    agreed(
        net._wire, f"creating the optimizer of level {level}", "Give a coarse_optimizer that works on all ranks.", make
    )
    return found[0] if found else None


def _are_trained(net: LayerParallel) -> dict[int, list[bool]]:
    """Returns for each layer of this rank which parameters want a gradient."""
    modules = net._solver.layers.modules
    return {layer: [p.requires_grad for p in module.parameters()] for layer, module in modules.items()}


def _keep_own(optimizer: Optimizer, net: LayerParallel) -> None:
    """Removes parameters that do not belong to the net: a coarse optimiser does not change them."""
    own = {id(parameter) for parameter in net.parameters()}
    for group in optimizer.param_groups:
        are_own = [id(parameter) in own for parameter in group["params"]]
        for name in ("params", "param_names"):
            if name in group:
                group[name] = [each for each, is_own in zip(group[name], are_own) if is_own]
    for parameter in [each for each in optimizer.state if isinstance(each, Tensor) and id(each) not in own]:
        del optimizer.state[parameter]


def _still(value: Any) -> Any:
    """Returns the same value with tensors detached."""
    return pytree.tree_map(lambda leaf: leaf.detach() if isinstance(leaf, Tensor) else leaf, value)
