"""One batch on one rank: inputs, plan, states, and results.

`Batch` is made for each call of `step`, `forward` or `evaluate`. `opening.py` opens and closes it, on all ranks together;
`passes.py` runs its passes; `autograd.py` shows it to autograd. Owns the data that these share, the loss, and the form in
which a caller gets the results. One part has a file of its own: `Evaluation` in `_net/evaluation.py` evaluates this rank's layers.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from .._net.evaluation import Evaluation, LayerInputs, Parameters, States
from .._net.side import Side
from .._net.spatial import Meshes
from .._net.tree import Form, form_of, is_state, ordered, zeros
from .._ranks.failures import described
from .._ranks.wire import Wire
from .audit import Audit
from .plans import ConstantsKey, Passes, Program
from .solver import Solver
from .unserved import of_forward

__all__ = ["Batch", "BatchInputs", "BatchPlan", "LossFunction", "LossInputs", "MicroBatch", "Norms", "split"]


LossFunction = Callable[[Any, Any], Tensor]
# States and constants of the input of a micro-batch.
MicroBatch = tuple[States, States]
# dtypes of losses.
_DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


@dataclass
class Norms:
    """Residual norms of the last solve, by iteration.

    The residual is the difference between the states of C-points and the states that their layers compute.
    """

    forward: dict[int, float] = field(default_factory=dict)
    backward: dict[int, float] = field(default_factory=dict)
    # Why a converging pass ended: `"converged"`, `"stalled"` or `"limit"`. None for other passes.
    forward_end: str | None = None
    backward_end: str | None = None


@dataclass(frozen=True)
class BatchPlan:
    """Plans and settings of one batch."""

    mode: str
    forward: Passes
    adjoint: Passes
    # The passes that run the same batch exactly, forward and adjoint.
    exact: tuple[Passes, Passes]
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
    # Every batch in training whose number is divisible by this is run a second time, exactly. 0: none is.
    audit_every: int = 0

    @property
    def is_exact(self) -> bool:
        """Whether the mode has no iterations."""
        return self.mode in ("exact-wave", "exact-pipeline")


class Result:
    """Result of `step` for its caller, which may have wrapped the net."""

    def __init__(self) -> None:
        # None until a net has got the inputs.
        self.solver: Solver | None = None
        self.loss: Tensor | None = None
        self.error: BaseException | None = None


class LossInputs:
    """The user's part of a loss: the target, the function, and a factor of the loss.

    It is no dataclass: a wrapper with mixed precision casts the fields of dataclasses, but the loss belongs to the
    caller.
    """

    def __init__(self, target: Any = None, loss_fn: LossFunction | None = None, scale: float = 1.0) -> None:
        self.target = target
        self.loss_fn = loss_fn
        self.scale = scale

    def of(self, y: Any, micro_batch: int, micro_batches: int) -> Tensor:
        """Returns a micro-batch's share of the batch's loss, from the output of the micro-batch."""
        assert self.loss_fn is not None
        target = self.target
        if micro_batches > 1:
            target = pytree.tree_map(lambda leaf: leaf.chunk(micro_batches)[micro_batch], target)
        return self.loss_fn(y, target) * (1 / micro_batches) if micro_batches > 1 else self.loss_fn(y, target)

    def refusal(self, wire: Wire, micro_batches: int) -> BaseException | None:
        """Returns the error that keeps the last rank from computing the loss, or None."""
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


@dataclass
class BatchInputs:
    """All that a user gives for one batch. `step` passes it through the modules that wrap the net."""

    x: Any
    side: dict[str, Any] | None = None
    # A wrapper that casts its arguments makes new inputs. They share these objects with the first.
    loss: LossInputs = field(default_factory=LossInputs)
    result: Result = field(default_factory=Result)


class Batch:
    """One batch on one rank, from the user's call to the gradients.

    A batch gets its plan by `use`. `_opening.opened` then sets the attributes that are the same on all ranks.
    """

    # Set by `begin`.
    number: int
    forms: Sequence[Form]
    device: torch.device
    evaluation: Evaluation
    meshes: Meshes
    # The parts of the input, on the first rank.
    by_micro_batch: Sequence[MicroBatch]
    # Set by `use`.
    plan: BatchPlan

    def __init__(
        self,
        solver: Solver,
        inputs: BatchInputs,
        *,
        call: str,
        is_training: bool,
        settle: Callable[[Batch], None],
        on_end: Callable[[Batch], None],
        refusal: BaseException | None = None,
    ) -> None:
        """`refusal` is an error that keeps this rank from beginning.

        settle: completes gradients that need several ranks, after both passes. All ranks call it.
        on_end: called once both passes have completed without an error on any rank.
        """
        self.solver = solver
        self.inputs = inputs
        self.call = call
        self.is_training = is_training
        self.settle = settle
        self.on_end = on_end
        self.refusal = refusal
        self.found: Parameters = solver.layers.parameters()
        self.parameters = self.found[0]
        # Inputs of layers in addition to the state, if they are not side inputs; None without any.
        self.layer_inputs: LayerInputs | None = None
        # States at the end of the forward pass, for an audit.
        self.states: Sequence[States] = []
        self.audit: Audit | None = None
        self.is_over = False
        if call == "step()" and not torch.is_grad_enabled():
            self.refusal = RuntimeError(
                "step() computes gradients, but gradients are disabled here; leave no_grad, or call the net itself"
            )
        if any(parameter.is_meta for parameter in self.parameters):
            self.refusal = RuntimeError(
                "parameters are on the meta device; call to_empty(device=...) and initialize them first"
            )
        try:
            solver.layers.check()
        except TypeError as error:
            self.refusal = error
        # Leaves from the user that may want a gradient.
        x, side = inputs.x, inputs.side
        # Side inputs that are not a dict of names are refused when the batch opens, on all ranks.
        is_named = isinstance(side, dict) and all(isinstance(name, str) for name in side)
        side_inputs = [side[name] for name in sorted(side)] if side and is_named else []
        self.given = [leaf for leaf in pytree.tree_leaves((x, side_inputs)) if is_state(leaf)]
        if solver.wire.rank > 0:
            # Inputs of these ranks get no gradient. If the caller asks for one, torch raises after the pass, so no
            # other rank is left waiting in it.
            self.given = [leaf for leaf in self.given if leaf.requires_grad]
        elif x is None:
            self.refusal = self.refusal or ValueError("there is no input; give one on the first rank")
        if self.refusal is None and any(leaf.is_meta for leaf in self.given):
            self.refusal = ValueError("an input is on the meta device, so it has no values; give a tensor on a device")
        self.refusal = self.refusal or of_forward([*self.given, *self.parameters])

    # ---- before the passes

    def use(self, plan: BatchPlan) -> None:
        """Sets the plan that the batch is run by."""
        self.plan = plan
        self.prepare_for(plan)

    def prepare_for(self, plan: BatchPlan) -> None:
        """Prepares the batch to be run by this plan too."""
        self.plan = replace(self.plan, meshes=max(self.plan.meshes, plan.meshes))
        if plan.needs_guess and self.solver.shared.guess is None:
            self.refusal = ValueError("Cycle(start='guess') but no guess; give the net one on every rank")

    def prepare(self, *, is_recorded: bool) -> None:
        """Prepares this rank's inputs, before ranks agree on the batch."""

    def begin(
        self,
        number: int,
        forms: Sequence[Form],
        device: torch.device,
        evaluation: Evaluation,
        meshes: Meshes,
        by_micro_batch: Sequence[MicroBatch],
    ) -> None:
        """Sets what all ranks have agreed on, and clears all results."""
        self.number, self.forms, self.device = number, forms, device
        self.evaluation, self.meshes, self.by_micro_batch = evaluation, meshes, by_micro_batch
        self.constants: dict[ConstantsKey, States] = {}
        # Constants on coarser meshes, by key and mesh.
        self.coarse_constants: dict[tuple[ConstantsKey, int], States] = {}
        self.norms = Norms()
        self.loss = 0.0
        # Index in `_DTYPES`.
        self.loss_dtype = 0
        # Gradients of the side inputs, on the first rank, after both passes.
        self.side_gradients: list[Tensor | None] = []
        # The first error on this rank, described and as raised.
        self.cause: str | None = None
        self.error: BaseException | None = None

    def again(self) -> Batch:
        """Returns the same batch for a second run, which leaves no trace."""
        first = self.evaluation
        evaluation = Evaluation(
            first.layers,
            first.found,
            first.key,
            self.device,
            is_recorded=True,
            leaves_no_trace=True,
            layer_inputs=first.layer_inputs.again(),
            keeps_graph=first.keeps_graph,
            is_in_parts=first.is_in_parts,
            autocast=first.autocast,
        )
        batch = copy.copy(self)
        batch.begin(self.number, self.forms, self.device, evaluation, self.meshes, self.by_micro_batch)
        return batch

    # ---- during the passes

    @property
    def micro_batches(self) -> int:
        """Number of micro-batches."""
        return self.plan.micro_batches

    @property
    def is_audited(self) -> bool:
        """Whether the batch is run a second time, exactly."""
        every = self.plan.audit_every
        return self.is_training and every > 0 and not self.plan.is_exact and self.number % every == 0

    def fail(self, where: str, error: BaseException) -> None:
        """Remembers an error unless there is an earlier one. Closing the batch raises it on all ranks."""
        if self.cause is None:
            self.cause, self.error = f"{where}: {described(error)}", error

    def first_states(self, *, is_exact: bool) -> list[States]:
        """Returns the input's states for each micro-batch, on the first rank, in the dtypes in which the pass works."""
        inputs = []
        leaves = self.forms[0].states
        for micro_batch, (states, constants) in enumerate(self.by_micro_batch):
            self.constants[0, micro_batch] = constants
            inputs.append([s.detach().to(leaf.work_dtype(is_exact=is_exact)) for s, leaf in zip(states, leaves)])
        return inputs

    def constants_of(self, point: int, micro_batch: int, mesh: int = 0) -> States:
        """Returns the constants that belong to the state of a point."""
        constants_key = (self.solver.plans.segment(point), micro_batch)
        found = self.constants.get(constants_key, [])
        if mesh == 0 or not found:
            return found
        if (constants_key, mesh) not in self.coarse_constants:
            before = self.constants_of(point, micro_batch, mesh - 1)
            states, _ = zeros(self.meshes.form(point, mesh - 1), self.device)
            self.coarse_constants[constants_key, mesh] = self.meshes.coarsened(point, mesh - 1, states, before)[1]
        return self.coarse_constants[constants_key, mesh]

    def add_side_gradients(self) -> None:
        """Sums the gradients of side inputs over all layers. All ranks call it after both passes."""
        layer_inputs = self.evaluation.layer_inputs
        if isinstance(layer_inputs, Side):
            self.side_gradients = layer_inputs.gradients(self.solver.wire)

    # ---- the loss

    @property
    def known_loss(self) -> Tensor:
        """The loss, in the dtype that it has on the last rank."""
        return torch.tensor(self.loss, dtype=_DTYPES[self.loss_dtype], device="cpu")

    def loss_of(self, micro_batch: int, outputs: States) -> Tensor:
        """Returns a micro-batch's share of the loss, from the states of the last point."""
        y = self.output_form.joined(outputs, self._last_constants(micro_batch))
        loss = self.inputs.loss.of(y, micro_batch, self.micro_batches)
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            shown = f"the shape {list(loss.shape)}" if isinstance(loss, Tensor) else type(loss).__name__
            raise ValueError(f"the loss function returned {shown}; it must return a tensor with one element")
        return loss

    def gradients_of_loss(self, micro_batch: int, states: States) -> States:
        """Returns the gradient of the loss for the last point's states, times the loss scale. Adds the loss to the sum."""
        with torch.enable_grad():
            leaves = self.output_form.states
            outputs = [state.detach().to(leaf.dtype).requires_grad_() for state, leaf in zip(states, leaves)]
            loss = self.loss_of(micro_batch, outputs)
            _check_leaves(loss, outputs)
            # The scale is applied to the loss itself, because it keeps the gradients below it from underflow.
            scale = torch.full_like(loss, self.inputs.loss.scale)
            gradients = torch.autograd.grad(loss, outputs, scale, allow_unused=True)
        self.loss += float(loss)
        self.loss_dtype = _DTYPES.index(loss.dtype) if loss.dtype in _DTYPES else 0
        return [torch.zeros_like(o) if g is None else g for o, g in zip(outputs, gradients)]

    def tried_gradients_of_loss(self, outputs: Sequence[States]) -> list[States]:
        """Returns the same for the outputs of a whole batch. After an error they are zeros."""
        gradients = []
        for states in outputs:
            of_states: States | None = None
            if self.cause is None:
                try:
                    of_states = self.gradients_of_loss(0, states)
                except BaseException as error:
                    self.fail(f"the loss, batch {self.number}", error)
            gradients.append([torch.zeros_like(state) for state in states] if of_states is None else of_states)
        return gradients

    # ---- the net's result

    @property
    def output_form(self) -> Form:
        """Form of the last layer's result for a micro-batch."""
        return self.forms[-1]

    @property
    def returned_form(self) -> Form:
        """Form of the net's result, all micro-batches together."""
        return self.whole(self.output_form)

    def whole(self, form: Form) -> Form:
        """Returns the form of all micro-batches together, from the form of one."""
        count = self.micro_batches
        if count == 1:
            return form
        leaves = [replace(leaf, shape=torch.Size((leaf.shape[0] * count, *leaf.shape[1:]))) for leaf in form.leaves]
        return Form(tuple(leaves), form.tree)

    def together(self, by_micro_batch: Sequence[States]) -> States:
        """Concatenates the states of all micro-batches."""
        if len(by_micro_batch) == 1:
            return list(by_micro_batch[0])
        return [torch.cat(parts) for parts in zip(*by_micro_batch)]

    def last_states(self, outputs: Sequence[States]) -> States:
        """Returns the states of the last point in the net's dtypes, all micro-batches together."""
        states = self.together(outputs)
        return [state.to(leaf.dtype) for state, leaf in zip(states, self.output_form.states)]

    def cut(self, cotangents: Sequence[Tensor | None]) -> list[States]:
        """Returns the gradient of the net's result for each micro-batch; zeros where nothing depends on the result."""
        count = self.micro_batches
        by_micro_batch: list[States] = [[] for _ in range(count)]
        for cotangent, leaf in zip(cotangents, self.output_form.states):
            if cotangent is None:
                shape = torch.Size((leaf.shape[0] * count, *leaf.shape[1:])) if count > 1 else leaf.shape
                cotangent = torch.zeros(shape, dtype=leaf.dtype, device=self.device)
            for micro_batch_part, part in zip(by_micro_batch, cotangent.chunk(count) if count > 1 else [cotangent]):
                micro_batch_part.append(ordered(part, leaf))
        return by_micro_batch

    def _last_constants(self, micro_batch: int) -> States:
        return self.constants_of(len(self.solver.plans.net.layers), micro_batch)

    # ---- what autograd sees

    def outputs(self, outputs: Sequence[States]) -> list[Tensor]:
        """Returns the tensors that the caller gets on this rank, from the states of the last point."""
        # Ranks without output get a tensor to call `backward()` on.
        return self.last_states(outputs) if outputs else [torch.zeros((), dtype=torch.float32, device="cpu")]

    def tried_outputs(self, outputs: Sequence[States]) -> list[Tensor]:
        """Returns the same as `outputs`. All ranks raise an error here when the batch closes."""
        try:
            return self.outputs(outputs) if self.cause is None else []
        except Exception as error:
            self.fail(f"the output, batch {self.number}", error)
            return []

    def value(self, outputs: Sequence[Tensor]) -> Any:
        """Returns these tensors in the form that the caller gets."""
        if not self.solver.wire.is_last:
            return outputs[0]
        by_micro_batch = [self._last_constants(micro) for micro in range(self.micro_batches)]
        return self.output_form.joined(outputs, self.together(by_micro_batch))

    def forward_is_over(self) -> None:
        """Called when the forward pass has completed without an error on any rank."""

    def cotangents_of_result(self, cotangents: Sequence[Tensor | None]) -> list[States]:
        """Returns the gradient of the net's result for each micro-batch, from the gradients of `outputs`."""
        return self.cut(cotangents) if self.solver.wire.is_last else []

    def gradients_of_given(self, gradients: Sequence[States]) -> list[Tensor | None]:
        """Returns the gradients of the user's tensors, from the gradients of the states before the first layer."""
        if not gradients:
            return [None] * len(self.given)
        found = [*self.together(gradients), *self.side_gradients]
        # Side inputs may be on another device than the states.
        return [
            gradient if gradient is None else gradient.to(given.device) for gradient, given in zip(found, self.given)
        ]


def split(x: Any, micro_batches: int) -> tuple[Form, list[MicroBatch]]:
    """Returns the form of a micro-batch of an input, and the states and constants of each micro-batch."""
    if micro_batches == 1:
        form, states, constants = form_of(x, "the input")
        return form, [(states, constants)]
    rows: set[int] = set()
    for leaf in pytree.tree_leaves(x):
        if isinstance(leaf, Tensor):
            if leaf.dim() == 0 or leaf.shape[0] % micro_batches:
                text = f"the input has a leaf of shape {list(leaf.shape)}, whose first dimension is not divisible by {micro_batches} micro-batches; give another `micro_batches`, or a loader with drop_last=True"
                raise ValueError(text)
            rows.add(leaf.shape[0])
    if len(rows) > 1:
        raise ValueError(
            f"the input has leaves of {sorted(rows)} rows, but micro-batches are parts of one batch; give all leaves the same number"
        )
    parts = [pytree.tree_map(lambda leaf: leaf.chunk(micro_batches)[micro], x) for micro in range(micro_batches)]  # noqa: B023
    formed = [form_of(part, "the input") for part in parts]
    return formed[0][0], [(states, constants) for _, states, constants in formed]


def _check_leaves(loss: Tensor, outputs: Sequence[Tensor]) -> None:
    """Raises `ValueError` if the loss depends on another parameter, which would get no gradient."""
    own = {id(output) for output in outputs}
    todo, seen = [] if loss.grad_fn is None else [loss.grad_fn], set()
    while todo:
        node = todo.pop()
        if node in seen:
            continue
        seen.add(node)
        variable = getattr(node, "variable", None)
        if variable is not None and id(variable) not in own:
            raise ValueError(
                "the loss depends on a parameter outside the net, which would get no gradient; move its module to a last plain "
                "layer of the net"
            )
        todo += [after for after, _ in node.next_functions if after is not None]
