"""One batch, from the user's call to the solver and back.

Owns what autograd sees of a batch: functions whose inputs are the parameters and the user's tensors, in which the
passes run. `_model.py` has modes and settings, and `_solve.py` the solve.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from ._audit import Audit
from ._blocks import undisturbed
from ._net import LayerInputs, Parameters, States
from ._plans import Program
from ._replicas import agree
from ._solve import Norms, Passes, Solve, Solver, split
from ._tree import is_state
from ._unserved import of_backward, of_forward, once, outside_of_transforms
from ._wire import Wire

__all__ = ["BatchPlan", "Everything", "Job", "LossFunction", "Run", "Runs", "Through", "step"]


LossFunction = Callable[[Any, Any], Tensor]


@dataclass(frozen=True)
class BatchPlan:
    """Plans and settings of one batch."""

    mode: str
    forward: Passes
    adjoint: Passes
    micro_batches: int
    # One program for both passes of all micro-batches, for `step`. None if the mode is not a pipeline.
    pipeline: Program | None
    settings: str
    # Whether the forward pass begins with the states of the net's `guess`.
    needs_guess: bool = False
    # Whether the batch has more iterations than others, to measure how they converge.
    is_probe: bool = False
    # How often states become coarser, from the finest level to the coarsest.
    meshes: int = 0
    # Returns whether a layer's graph is kept until the adjoint pass. None: all are kept.
    keeps_graph: Callable[[int], bool] | None = None

    @property
    def is_exact(self) -> bool:
        """Whether the mode has no iterations."""
        return self.mode in ("exact-wave", "exact-pipeline")


class Runs(Protocol):
    """The interface of a net that a batch needs."""

    norms: Norms
    training: bool

    @property
    def wire(self) -> Wire:
        """The ranks."""

    @property
    def current(self) -> Solver:
        """The solver for all batches of the plan."""

    @property
    def anchor(self) -> Tensor:
        """A tensor that wants a gradient."""

    def batch_plan(self, run: Run) -> BatchPlan:
        """Returns how a batch is run."""

    def exact_passes(self) -> tuple[Passes, Passes]:
        """Returns the passes that run the same batch exactly."""

    def settled(self, solve: Solve) -> None:
        """Completes gradients that need several ranks, after both passes. All ranks call it."""

    def is_audited(self, mode: str, number: int) -> bool:
        """Returns whether a batch is to be audited."""

    def take_norms(self, solve: Solve, batch_plan: BatchPlan) -> None:
        """Keeps the norms of a batch whose passes have completed."""

    def take_over(self, audit: Audit) -> None:
        """Keeps an audit and reacts to it."""


def step(
    model: nn.Module,
    x: Any = None,
    target: Any = None,
    loss_fn: LossFunction | None = None,
    *,
    side: dict[str, Any] | None = None,
    loss_scale: float = 1.0,
) -> Tensor:
    """`LayerParallel.step` for a wrapped net: `model` is a net in DistributedDataParallel or FSDP2.

    The whole batch runs in the wrapper's forward pass, and its backward pass returns each gradient once. Before that,
    replicas compare results: an error in one replica is raised in all, and no replica takes over a gradient. All
    replicas must call it equally often.

    Arguments and result are the same as for `LayerParallel.step`.

    Raises:
        LayerParallelError: the batch failed in this replica or another.
        TypeError: `model` is neither a net nor a wrapper that passes its argument on to one.
    """
    job = Job(x, target, loss_fn, side, loss_scale)
    anchor = model(job)
    found = job.found
    if found.net is not None:
        try:
            agree(model, found.net.current, found.error)
        finally:
            # The error's traceback refers to the job.
            found.error = None
    if not isinstance(anchor, Tensor) or found.loss is None:
        raise TypeError(
            f"step(): expected a LayerParallel, or a wrapper whose forward passes its argument to the net, got {type(model).__name__}"
        )
    anchor.backward()  # type: ignore[no-untyped-call]
    return found.loss


class Found:
    """The result of a job, and the net that ran it."""

    def __init__(self) -> None:
        self.net: Runs | None = None
        self.loss: Tensor | None = None
        self.error: Exception | None = None


@dataclass
class Job:
    """A batch of `step`, passed through the modules that wrap the net."""

    x: Any
    target: Any
    loss_fn: LossFunction | None
    side: dict[str, Any] | None
    loss_scale: float
    # A wrapper that casts its arguments makes a new job. The new job shares this object with the first.
    found: Found = field(default_factory=Found)

    def loss_of(self, y: Any, micro_batch: int, micro_batches: int) -> Tensor:
        """Returns a micro-batch's share of the batch's loss, from the output of the micro-batch."""
        assert self.loss_fn is not None
        target = self.target
        if micro_batches > 1:
            target = pytree.tree_map(lambda leaf: leaf.chunk(micro_batches)[micro_batch], target)
        return self.loss_fn(y, target) * (1 / micro_batches) if micro_batches > 1 else self.loss_fn(y, target)

    def wrong(self, wire: Wire, micro_batches: int) -> BaseException | None:
        """Returns the error that keeps the last rank from beginning, or None."""
        if not wire.is_last:
            return None
        if self.loss_fn is None:
            return ValueError("there is no loss_fn; give one on the last rank")
        if self.target is None:
            return ValueError("there is no target; give one on the last rank")
        if isinstance(self.loss_fn, nn.Module) and any(p.requires_grad for p in self.loss_fn.parameters()):
            return ValueError(
                "the loss function has parameters, which would get no gradient; move them to a last plain layer of the net"
            )
        if micro_batches > 1:
            try:
                split(self.target, micro_batches)
            except Exception as error:
                return type(error)(str(error).replace("the input", "the target"))
        return None


class Run:
    """A batch between its forward and its backward pass."""

    def __init__(
        self,
        model: Runs,
        x: Any,
        side: dict[str, Any] | None = None,
        *,
        call: str = "forward()",
        wrong: BaseException | None = None,
    ) -> None:
        self.model = model
        self.wrong = wrong
        self.solver = model.current
        self.found: Parameters = self.solver.layers.parameters()
        self.parameters = self.found[0]
        self.solve: Solve
        # States at the end of the forward pass, for an audit.
        self.states: Sequence[States] = []
        self.audit: Audit | None = None
        self.is_over = False
        self._call = call
        self._x, self._side = x, side
        if call == "step()" and not torch.is_grad_enabled():
            self.wrong = RuntimeError(
                "step() computes gradients, but gradients are disabled here; leave no_grad, or call the net itself"
            )
        if any(parameter.is_meta for parameter in self.parameters):
            self.wrong = RuntimeError(
                "parameters are on the meta device; call to_empty(device=...) and initialize them first"
            )
        try:
            self.solver.layers.check()
        except TypeError as error:
            self.wrong = error
        # Leaves from the user that may want a gradient.
        self.given: list[Tensor] = []
        side_inputs = [side[name] for name in sorted(side)] if isinstance(side, dict) else []
        self.given = [leaf for leaf in pytree.tree_leaves((x, side_inputs)) if is_state(leaf)]
        if model.wire.rank > 0:
            # Inputs of these ranks get no gradient. If the caller asks for one, torch raises after the pass, so no
            # other rank is left waiting in it.
            self.given = [leaf for leaf in self.given if leaf.requires_grad]
        elif x is None:
            self.wrong = self.wrong or ValueError("there is no input; give one on the first rank")
        self.wrong = self.wrong or of_forward([*self.given, *self.parameters])
        self.batch_plan: BatchPlan
        self.batch_plan = model.batch_plan(self)
        self.add(self.batch_plan)

    def add(self, batch_plan: BatchPlan) -> None:
        """Prepares the batch to be run by this plan as well."""
        self.batch_plan = replace(self.batch_plan, meshes=max(self.batch_plan.meshes, batch_plan.meshes))
        if batch_plan.needs_guess and self.solver.shared.guess is None:
            self.wrong = ValueError("Cycle(start='guess') but no guess; give the net one on every rank")

    def key(self) -> int:
        """Returns the key of the first rank's input, which inputs of the same kind share."""
        return self.solver.key_of(self._x, self._side)

    def begun(self, wrong: BaseException | None = None, *, is_recorded: bool) -> AbstractContextManager[Solve]:
        """Opens the solve."""
        batch_plan = self.batch_plan
        settings = f"{batch_plan.settings}; called by {self._call} with gradients {'on' if is_recorded else 'off'}"
        return self.solver.batch(
            self._x,
            self.found,
            settings,
            self.wrong or wrong,
            micro_batches=batch_plan.micro_batches,
            is_recorded=is_recorded,
            side=self._side,
            layer_inputs=self.layer_inputs(is_recorded=is_recorded),
            keeps_graph=batch_plan.keeps_graph,
            meshes=batch_plan.meshes,
            is_training=self.model.training,
        )

    def layer_inputs(self, *, is_recorded: bool) -> LayerInputs | None:
        """Returns inputs of layers in addition to the state, if they are not side inputs; None without any."""
        return None

    def done(self) -> None:
        """Called when the forward pass has completed without an error on any rank."""

    # ---- what autograd sees

    def outputs(self, found: Sequence[States]) -> list[Tensor]:
        """Returns the outputs of the forward pass on this rank."""
        # Ranks without output get a tensor to call `backward()` on.
        return self.solve.shown(found) if found else [self.model.anchor.detach().clone()]

    def tried_outputs(self, found: Sequence[States]) -> list[Tensor]:
        """Returns the same as `outputs`. All ranks raise an error here when the solve closes."""
        batch = self.solve.batch
        try:
            return self.outputs(found) if batch.cause is None else []
        except Exception as error:
            batch.fail(f"the output, batch {batch.number}", error)
            return []

    def value(self, outputs: Sequence[Tensor]) -> Any:
        """Returns the outputs in the form that the user gets."""
        return self.solve.joined(outputs) if self.model.wire.is_last else outputs[0]

    def backward(self, cotangents: Sequence[Tensor | None]) -> list[Tensor | None]:
        """Returns the gradients of the user's tensors, from the gradients of the outputs."""
        solve, model = self.solve, self.model
        given = solve.cut(cotangents) if model.wire.is_last else []
        found = solve.backward(self.batch_plan.adjoint, given)
        model.settled(solve)
        if model.is_audited(self.batch_plan.mode, solve.batch.number):
            # The caller computes the loss, so both runs use the caller's gradient of the output.
            self.audit = solve.audit(self.states, model.exact_passes(), model.settled, lambda *_: given, has_loss=False)
        return self.of_given(solve, found)

    def of_given(self, solve: Solve, found: Sequence[States]) -> list[Tensor | None]:
        """Returns the gradients of the user's tensors, including the states before the first layer."""
        if not found:
            return [None] * len(self.given)
        return [*solve.together(found), *solve.side_gradients]


class Through(torch.autograd.Function):
    """Autograd function of a net: the forward pass, and in its backward pass the adjoint."""

    @staticmethod
    def forward(ctx: Any, run: Run, anchor: Tensor, given: int, *tensors: Tensor) -> tuple[Tensor, ...]:
        with run.begun(is_recorded=True) as solve:
            run.solve = solve
            found = solve.forward(run.batch_plan.forward)
            # Aliases, because an output tensor refers to its graph, which refers to `run`.
            run.states = [[state.detach() for state in states] for states in found]
            outputs = run.tried_outputs(found)
        run.done()
        run.model.norms = solve.norms
        ctx.run, ctx.given = run, given
        ctx.set_materialize_grads(False)
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor | None) -> tuple[Tensor | None, ...]:
        run: Run = ctx.run
        if run.is_over:
            raise RuntimeError(
                "backward() of a layer-parallel net a second time: the values saved by its layers are freed; run forward again"
            )
        run.is_over = True
        refusal = of_backward(cotangents)
        if refusal is not None:
            # Other ranks learn of the refusal at the end of the pass. This rank runs it with zeros.
            run.solve.batch.fail(f"the backward pass, batch {run.solve.batch.number}", refusal)
            cotangents = (None,) * len(cotangents)
        with torch.no_grad(), outside_of_transforms(), undisturbed():
            inputs = run.backward(cotangents)
            run.solver.close(run.solve)
        run.model.take_norms(run.solve, run.batch_plan)
        if run.audit is not None:
            run.model.take_over(run.audit)
        return None, None, None, *inputs, *run.solve.batch.evaluation.gradients


class Everything(torch.autograd.Function):
    """Autograd function of a whole batch.

    Its forward pass runs both passes of the net, and its backward pass returns the gradients.
    """

    @staticmethod
    def forward(ctx: Any, run: Run, job: Job, anchor: Tensor, given: int, *tensors: Tensor) -> Tensor:
        model, batch_plan = run.model, run.batch_plan
        audit: Audit | None = None
        with run.begun(job.wrong(model.wire, batch_plan.micro_batches), is_recorded=True) as solve:
            run.solve = solve
            found: list[States] = []
            if batch_plan.pipeline is not None:
                inputs = solve.pipeline(batch_plan.pipeline, job.loss_of, job.loss_scale)
            else:
                found = solve.forward(batch_plan.forward)
                cotangents = [solve.lost(0, states, job.loss_of, job.loss_scale) for states in found]
                inputs = solve.backward(batch_plan.adjoint, cotangents)
            model.settled(solve)
            if model.is_audited(batch_plan.mode, solve.batch.number):

                def lost(again: Solve, outputs: Sequence[States]) -> list[States]:
                    return [again.lost(0, states, job.loss_of, job.loss_scale) for states in outputs]

                audit = solve.audit(found, model.exact_passes(), model.settled, lost, has_loss=True)
        run.done()
        model.take_norms(solve, batch_plan)
        if audit is not None:
            model.take_over(audit)
        job.found.loss = solve.known_loss
        ctx.gradients = [*run.of_given(solve, inputs), *solve.batch.evaluation.gradients]
        return anchor.detach().clone()

    @staticmethod
    @once
    def backward(ctx: Any, scale: Tensor) -> tuple[Tensor | None, ...]:
        gradients: list[Tensor | None] = ctx.gradients
        by = float(scale)
        if by != 1.0:
            gradients = [None if gradient is None else gradient * by for gradient in gradients]
        return None, None, None, None, *gradients
