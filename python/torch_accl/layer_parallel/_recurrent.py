"""A recurrent net over ranks, each of which has a part of the sequence.

Owns that every step is a layer with the same weights, which all ranks have. Also owns the inputs of the steps, their
outputs with the outputs' gradients, and the sum of the weights' gradients over all ranks. `_net/cells.py` defines what a
cell computes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.func import functional_call
from torch.utils import _pytree as pytree

from torch_accl import _native

from ._model import Mode, Model, Schedule, group_of, replica_of
from ._net.blocks import mixed, seeded
from ._net.cells import CoarseCell, FinalCell, PreparedCell, Stepped, stepped
from ._net.copies import Copied, Copies
from ._net.evaluation import Evaluation, Extra, LayerInputs, Layers, Parameters, States
from ._net.kinds import CUSTOM, PLAIN
from ._net.tree import Form, is_state, ordered, zeros
from ._ranks.failures import LayerParallelError, described, sentence
from ._ranks.wire import Wire
from ._solve.batch import Batch, BatchInputs, BatchPlan, LossFunction
from ._solve.cycle import Cycle
from ._solve.plans import Net, Plans
from ._solve.settings import Audits, Stop, with_old_keywords
from ._solve.solver import Shared, Solver
from ._solve.step import step
from ._solve.unserved import of_forward

__all__ = ["RecurrentParallel"]

# Maximum number of sequence lengths whose plans are kept.
_REMEMBERED = 64


@with_old_keywords
class RecurrentParallel(Model):
    """A recurrent net whose sequence is spread over ranks, all of which work on it at once.

    cell: `nn.GRU` or `nn.LSTM` (any number of layers, batch first), their cells, or a module as `layer_parallel.Cell`
        describes it, with a `coarse_step` for the inexact modes. All ranks have the same weights, and get the same
        gradients.
    tail: a module that takes the last step's output, on the last rank. Its parameters belong to that rank.
    mesh, group: the ranks that the sequence lies on, in order. Every rank gives its own part of it, of any length.

    All other arguments have the same meaning as in `LayerParallel`; every step is a layer.

    Raises:
        TypeError: the cell lacks a method of `layer_parallel.Cell`.
        ValueError: an argument is not accepted, the cell is bidirectional, has `proj_size` or does not have the batch
            first, or ranks have different cells.
    """

    instead_of_pickling = "net.state_dict(), or net.cell and net.tail, which are ordinary modules"

    def __init__(
        self,
        cell: nn.Module,
        tail: nn.Module | None = None,
        *,
        mesh: DeviceMesh | None = None,
        group: dist.ProcessGroup | Literal["alone"] | None = None,
        seed: int = 0,
        mode: Mode = "inexact",
        fwd: Cycle = Cycle(),  # noqa: B008  it is frozen
        bwd: Cycle = Cycle(iterations=1),  # noqa: B008
        micro_batches: int | None = None,
        schedule: Schedule = "1f1b",
        checkpoint: bool = False,
        auto_modes: Sequence[Mode] | None = None,
        stop: Stop = Stop(),  # noqa: B008
        replica: int | None = None,
        audit: Audits = Audits(),  # noqa: B008
    ) -> None:
        super().__init__(
            Wire(group_of(mesh, group)),
            mode=mode,
            fwd=fwd,
            bwd=bwd,
            micro_batches=micro_batches,
            schedule=schedule,
            checkpoint=checkpoint,
            auto_modes=auto_modes,
            stop=stop,
            audit=audit,
        )
        self.cell = cell
        self.tail = tail if self._wire.is_last else None
        steps = stepped(cell)
        self._steps = (steps,)
        self._steps_tail = (Tail(steps, self.tail),)
        self._seen: tuple[nn.Module | None, ...] = (self.cell, self.tail)
        self._seed = seed
        self._replica = replica_of(self._wire.ranks) if replica is None else replica
        self._shared = Shared()
        # The state after the last step of the last batch: the owner's rank, form, device, and on the owner the state
        # itself.
        self._last: tuple[int, Form, torch.device, tuple[States, States] | None] | None = None
        # A solver for each division of a sequence among the ranks. Several batches may be in flight.
        self._solvers: dict[tuple[int, ...], Solver] = {}
        self._solver = self._solver_of((1,) * self._wire.size)
        self._settings += f"; cell {type(cell).__name__}; seed {seed}"
        self.mode = mode
        self._compare_cells()

    def copied(self) -> list[Copied]:
        """Returns the cell's parameters."""
        ranks = tuple(range(self._wire.size))
        return [Copied(f"cell.{name}", ranks, [parameter]) for name, parameter in self.cell.named_parameters()]

    def _compare_cells(self) -> None:
        """Raises `ValueError` on all ranks if cells differ."""
        if self._wire.size == 1:
            return
        shapes = [
            f"{name} {parameter.dtype}{list(parameter.shape)}" for name, parameter in self.cell.named_parameters()
        ]
        of_all = self._wire.gathered(shapes)
        for rank, theirs in enumerate(of_all):
            if theirs != of_all[0]:
                raise ValueError(
                    f"ranks 0 and {rank} of the layers have cells with different parameters: {', '.join(of_all[0])}, and {', '.join(theirs)}; give all ranks the same cell"
                )
        if shapes:
            remedy = "set the same torch seed on all ranks before building the cell, or give all ranks the same weights"
            # Values may round: one seed gives other last bits on another processor, and a rank may save its own cell
            # after a step of the optimizer.
            self._copies = Copies(self._wire, self.copied, remedy, may_round=True)
            self._copies.check("building the net")

    @property
    def step_cell(self) -> nn.Module:
        """The cell in the form in which it is stepped."""
        return self._steps[0]

    def check_mode(self, mode: Mode, cycles: Mapping[str, Cycle] | None = None) -> None:
        super().check_mode(mode, cycles)
        if mode in ("inexact", "converged", "exact-forward") and not isinstance(self.step_cell, CoarseCell):
            raise ValueError(
                f"mode={mode!r} of a cell {type(self.step_cell).__name__} without `coarse_step`; add that method, or use exact-wave or exact-pipeline"
            )

    def check_cycle(self, cycle: Cycle) -> None:
        """Does nothing: the number of levels depends on the length of a sequence."""

    # ---- a batch

    def step(  # type: ignore[override]
        self,
        x: Any,
        target: Any = None,
        loss_fn: LossFunction | None = None,
        *,
        state: Any = None,
        loss_scale: float = 1.0,
    ) -> Tensor:
        """Runs forward, loss and backward of one batch, on all ranks together, and adds the gradients to `.grad`.

        x: each rank's own part of the sequence, of shape (batch, steps, ...), or a tuple, list or dict of such tensors.
            The batch is the same on all ranks; a rank may have no steps.
        target, loss_fn: read on the last rank. The loss takes the last step's output, through `tail`.
        state: state before the first step, read on the first rank; by default the cell's own.
        loss_scale: factor of the gradients, for a gradient scaler.

        Returns the detached loss without `loss_scale`, the same on all ranks.

        Raises:
            LayerParallelError: a rank's input, cell, tail or loss failed. All ranks raise it, and no gradient is added.
            ValueError: ranks have different batches, or the sequence has no steps; all ranks raise it.
        """
        return step(self, x, target, loss_fn, side={"state": state}, loss_scale=loss_scale)

    def forward(self, x: Any, state: Any = None) -> Any:  # type: ignore[override]
        """Returns the outputs of this rank's steps, of shape (batch, steps, ...), and a second value.

        On the last rank, the second value is the last step's output through `tail`; on the others it is a meaningless
        number.
        All ranks call `backward()` on a value that depends on at least one of the two. The gradients are the gradients
        of the sum of these values.
        """
        return super().forward(x, {"state": state})

    def last_state(self) -> Any:
        """Returns the state after the last step of the last batch, detached, on all ranks. All ranks call it together.

        Give it as `state` of the next window to continue from there. It has the form that torch's module returns: `h`
        or `(h, c)` of all layers, of shape (layers, batch, hidden). For `GRUCell` and `LSTMCell` the shape is (batch,
        hidden). Any other cell has its own form.

        Raises:
            RuntimeError: no batch has been run.
        """
        if self._last is None:
            raise RuntimeError("last_state() before the first batch; call step() or the net itself first")
        owner, form, device, mine = self._last
        states, constants = zeros(form, device) if mine is None else mine
        for tensor in (*states, *constants):
            self._wire.spread(tensor, "the state after the last step", owner)
        state = form.joined([state.clone() for state in states], [constant.clone() for constant in constants])
        return self.step_cell.returned(state) if isinstance(self.step_cell, Stepped) else state

    def evaluate(self, x: Any, target: Any = None, loss_fn: LossFunction | None = None, *, state: Any = None) -> Any:  # type: ignore[override]
        return super().evaluate(x, target, loss_fn, side={"state": state})

    def new_batch(self, inputs: BatchInputs, call: str) -> Batch:
        """Returns a batch without a plan. Ranks exchange their numbers of steps."""
        refusal: BaseException | None = None
        rows, count = -1, -1
        try:
            rows, count = _sizes_of(inputs.x)
            self._look_at_modules()
        except Exception as error:
            refusal = error
        self._solver = self._solver_of(self._counts(rows, count, refusal))
        return SequenceBatch(self, inputs, call)

    def _look_at_modules(self) -> None:
        """Rebuilds the steps if the user has replaced the cell or the tail."""
        seen = (self.cell, self.tail)
        if any(a is not b for a, b in zip(seen, self._seen)):
            steps = stepped(self.cell)
            self._steps, self._steps_tail = (steps,), (Tail(steps, self.tail),)
            self._seen = seen
            self._solvers.clear()
            if self._copies is not None:
                self._copies.is_new = True

    def _counts(self, rows: int, count: int, refusal: BaseException | None) -> tuple[int, ...]:
        """Returns the number of steps of each rank. All ranks call it together."""
        what = f"the start of batch {self._shared.number}"
        # Numbers are equal on all ranks if the maximum of each is the negative of the maximum of its negative.
        header = [count, -count, rows, -rows, int(refusal is not None)]
        header += [] if self._copies is None else self._copies.numbers()
        numbers = torch.tensor(header, dtype=torch.int64, device=self._wire.device)
        most, least, most_rows, least_rows, has_failed, *copies = self._wire.together(numbers, what, is_greatest=True)
        if has_failed:
            cause = None if refusal is None else f"{what}: {described(refusal)}"
            raise LayerParallelError(sentence(self._wire.gathered(cause))) from refusal
        if most_rows != -least_rows:
            of_all = self._wire.gathered(rows)
            raise ValueError(f"the ranks' parts of the sequence have {of_all} rows; give all ranks the same batch")
        if self._copies is not None:
            self._copies.settle(copies, what)
        counts = (most,) * self._wire.size if most == -least else tuple(self._wire.gathered(count))
        if sum(counts) == 0:
            raise ValueError("the sequence has no steps; give at least one step on some rank")
        return counts

    def _solver_of(self, counts: tuple[int, ...]) -> Solver:
        if counts not in self._solvers:
            if len(self._solvers) >= _REMEMBERED:
                self._solvers.pop(next(iter(self._solvers)))
            layers = ((CUSTOM, False),) * sum(counts) + ((PLAIN, True),)
            tail = self._steps_tail[0]
            names = [type(self.cell).__name__] * sum(counts)
            names.append("output" if tail.tail is None else type(tail.tail).__name__)
            self._solvers[counts] = Solver(
                self._wire,
                Plans(Net(layers, (*counts[:-1], counts[-1] + 1)), self._wire.rank),
                Steps(self, self.step_cell, tail, self._seed, counts),
                names,
                self._replica,
                self._shared,
            )
        return self._solvers[counts]

    def settle(self, batch: Batch) -> None:
        """Sums the cell's gradients over the whole sequence, the same on all ranks."""
        evaluation = batch.evaluation
        sequence = evaluation.layer_inputs
        assert isinstance(sequence, Inputs)
        try:
            sequence.finish(evaluation)
        except Exception as error:
            batch.fail(f"the gradients of inputs, batch {batch.number}", error)
        layers = batch.solver.layers
        assert isinstance(layers, Steps)
        slots = layers.shared()
        parameters = [evaluation.parameters[slot] for slot in slots]
        found = [evaluation.gradients[slot] for slot in slots]
        wide = [
            torch.zeros_like(parameter, dtype=_wide(parameter)) if gradient is None else gradient.to(_wide(parameter))
            for parameter, gradient in zip(parameters, found)
        ]
        if not wide:
            return
        counts = torch.tensor([float(gradient is not None) for gradient in found], dtype=torch.float64, device="cpu")
        flat = torch.cat(
            [
                counts.to(wide[0].device),
                *(torch.view_as_real(w).flatten() if w.is_complex() else w.flatten() for w in wide),
            ]
        )
        self._wire.sum_on_all(flat, f"adding up the gradients of batch {batch.number}")
        has = flat[: len(slots)].tolist()
        at = len(slots)
        for slot, parameter, count in zip(slots, parameters, has):
            size = parameter.numel() * (2 if parameter.is_complex() else 1)
            part, at = flat[at : at + size], at + size
            if count:
                whole = (
                    torch.view_as_complex(part.view(*parameter.shape, 2))
                    if parameter.is_complex()
                    else part.view(parameter.shape)
                )
                evaluation.gradients[slot] = whole.to(parameter.dtype)

    def batch_plan(self, batch: Batch) -> BatchPlan:
        """Returns how a batch is run. The names of trained parameters are compared between ranks too."""
        batch_plan = super().batch_plan(batch)
        if self._wire.size == 1:
            return batch_plan
        trained = [name for name, parameter in self.cell.named_parameters() if parameter.requires_grad]
        shown = f"trained {' '.join(trained)}; guess {self.guess is not None}"
        return replace(batch_plan, settings=f"{batch_plan.settings}; {shown}")

    def batch_plan_of(self, mode: Mode, *, may_probe: bool = True) -> BatchPlan:
        """Returns how a batch is run in a mode, with as many levels as its length allows."""
        before = self._cycles
        self._cycles = {name: self._fitting(cycle) for name, cycle in before.items()}
        try:
            return super().batch_plan_of(mode, may_probe=may_probe)
        finally:
            self._cycles = before

    def _fitting(self, cycle: Cycle) -> Cycle:
        layers, factors = self._plans.net.specs, cycle.factors()
        while factors:
            try:
                _native.layer_levels(layers, factors)
                break
            except ValueError:
                factors = factors[:-1]
        levels = len(factors) + 1
        return (
            cycle if levels == cycle.levels else replace(cycle, levels=levels, factor=tuple(factors) if factors else 2)
        )


def _wide(parameter: Tensor) -> torch.dtype:
    return torch.complex128 if parameter.is_complex() else torch.float64


def _sizes_of(x: Any) -> tuple[int, int]:
    """Returns the number of rows and of steps."""
    leaves = pytree.tree_leaves(x)
    if not leaves or any(not isinstance(leaf, Tensor) or leaf.dim() < 2 for leaf in leaves):
        raise ValueError("there is no input; give every rank its part of the sequence, of shape (batch, steps, ...)")
    shapes = {tuple(leaf.shape[:2]) for leaf in leaves}
    if len(shapes) > 1:
        raise ValueError(f"the input has leaves of {sorted(shapes)} rows and steps; give all leaves the same numbers")
    return leaves[0].shape[0], leaves[0].shape[1]


class Tail(nn.Module):
    """The output of the last step, and the tail after it."""

    def __init__(self, cell: nn.Module, tail: nn.Module | None) -> None:
        super().__init__()
        # A tuple hides the cell from torch, so that its parameters are not the tail's.
        self._cell = (cell,)
        self.tail = tail

    def forward(self, state: Any) -> Any:
        cell = self._cell[0]
        output: Any = cell.final(state) if isinstance(cell, FinalCell) else cell.output(state)  # type: ignore[operator]
        return output if self.tail is None else self.tail(output)


class Steps(Layers):
    """The steps of one rank, all the same module, and on the last rank the tail."""

    def __init__(self, model: RecurrentParallel, cell: nn.Module, tail: Tail, seed: int, counts: Sequence[int]) -> None:
        kinds = [CUSTOM] * sum(counts) + [PLAIN]
        super().__init__(nn.ModuleDict({"cell": cell, "tail": tail}), kinds, 1.0, seed)
        self.cell, self._tail = cell, tail
        self._rank = model.wire.rank
        self._is_last = model.wire.is_last
        first = sum(counts[: self._rank])
        # The steps of this rank.
        self.own = range(first, first + counts[self._rank])
        self.end = sum(counts)

    @property
    def modules(self) -> dict[int, nn.Module]:
        """The modules by layer number."""
        found: dict[int, nn.Module] = dict.fromkeys(self.own, self.cell)
        if self._is_last:
            found[self.end] = self._tail
        return found

    def parts(self) -> dict[int, list[nn.Parameter]]:
        """Returns the cell's parameters on the first rank, and the tail's parameters that are not the cell's."""
        own = list(self.cell.parameters())
        found = {0: own} if self._rank == 0 else {}
        if self._is_last:
            known = {id(parameter) for parameter in own}
            found[self.end] = [parameter for parameter in self._tail.parameters() if id(parameter) not in known]
        return found

    def is_counted(self, layer: int) -> bool:
        """Returns True for the tail, and on the first rank for all steps.

        All ranks have the same gradients of the cell.
        """
        return layer == self.end or self._rank == 0

    def check(self) -> None:
        """Does nothing: no step can be sharded by itself."""

    def parameters(self) -> Parameters:
        """Returns the parameters that want a gradient: the cell's first, once for all steps."""
        found: list[Tensor] = []
        names: list[tuple[str, int]] = []
        for name, parameter in self.cell.named_parameters():
            if parameter.requires_grad:
                names.append((name, len(found)))
                found.append(parameter)
        of_layer: dict[int, list[tuple[str, int]]] = dict.fromkeys(self.own, names)
        if self._is_last:
            known = {id(parameter): place for place, parameter in enumerate(found)}
            of_layer[self.end] = []
            for name, parameter in self._tail.named_parameters():
                if parameter.requires_grad:
                    if id(parameter) not in known:
                        known[id(parameter)] = len(found)
                        found.append(parameter)
                    of_layer[self.end].append((name, known[id(parameter)]))
        return found, of_layer

    def shared(self) -> range:
        """Returns the indices of the cell's parameters."""
        return range(sum(parameter.requires_grad for parameter in self.cell.parameters()))


class Inputs(LayerInputs):
    """The inputs of this rank's steps in one batch, and the gradients of the inputs and of the outputs."""

    def __init__(
        self,
        steps: Steps,
        cell: nn.Module,
        x: Any,
        micro_batches: int,
        parameters: Sequence[Tensor],
        *,
        is_recorded: bool,
    ) -> None:
        self._steps, self._cell = steps, cell
        self._is_recorded = is_recorded
        self._parameters = list(parameters)
        self._leaves, self._tree = pytree.tree_flatten(x)
        self._given = [
            leaf.detach().requires_grad_(is_recorded and leaf.requires_grad) if is_state(leaf) else leaf
            for leaf in self._leaves
        ]
        rows = self._leaves[0].shape[0]
        if rows % micro_batches:
            raise ValueError(f"the input has {rows} rows, not divisible by {micro_batches} micro-batches")
        self._rows = rows // micro_batches
        with torch.set_grad_enabled(is_recorded):
            self._aliases = list(self._parameters)
            first = pytree.tree_unflatten([leaf.transpose(0, 1) for leaf in self._given], self._tree)
            prepared = self._prepared(first)
        self._ready, self._ready_tree = pytree.tree_flatten(prepared)
        # The first dimension is the steps, so that the input of a step is contiguous.
        self._lent = [leaf.detach().contiguous() for leaf in self._ready]
        self._wanted = [place for place, leaf in enumerate(self._ready) if leaf.requires_grad]
        self._gradients: dict[int, Tensor] = {}
        self._states: dict[tuple[int, int], States] = {}
        self._sources: dict[tuple[int, int], States] = {}
        self.of_input: list[Tensor | None] = []

    def _prepared(self, x: Any) -> Any:
        if not isinstance(self._cell, PreparedCell) or not self._steps.own:
            return x
        if not any(parameter._backward_hooks for parameter in self._parameters):
            return self._cell.prepare(x)
        # A parameter's hook is for its complete gradient, not for the part from `prepare`.
        self._aliases = [parameter.detach().requires_grad_() for parameter in self._parameters]
        names = [name for name, parameter in self._cell.named_parameters() if parameter.requires_grad]
        return functional_call(
            _Preparing(self._cell), {f"cell.{name}": alias for name, alias in zip(names, self._aliases)}, (x,)
        )

    def again(self) -> Inputs:
        """Returns the same inputs for a second run, with separate gradients but the same gradients of outputs."""
        other = object.__new__(Inputs)
        other.__dict__ = self.__dict__ | {"_gradients": {}, "_states": {}}
        return other

    def of(self, layer: int, micro_batch: int) -> Extra | None:
        if layer not in self._steps.own:
            return None
        at = layer - self._steps.own.start
        rows = slice(micro_batch * self._rows, (micro_batch + 1) * self._rows)
        return Extra(
            [leaf[at, rows] for leaf in self._lent], self._arguments, self._wanted if self._is_recorded else ()
        )

    def _arguments(self, leaves: Sequence[Tensor]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        return (pytree.tree_unflatten(list(leaves), self._ready_tree),), {}

    def add(self, layer: int, micro_batch: int, gradients: Sequence[Tensor | None]) -> None:
        at = layer - self._steps.own.start
        rows = slice(micro_batch * self._rows, (micro_batch + 1) * self._rows)
        for place, gradient in zip(self._wanted, gradients):
            if gradient is not None:
                if place not in self._gradients:
                    self._gradients[place] = torch.zeros_like(self._lent[place])
                self._gradients[place][at, rows] = gradient

    def made(self, layer: int, micro_batch: int, states: States) -> None:
        if layer in self._steps.own:
            self._states[layer, micro_batch] = states

    def source(self, layer: int, micro_batch: int) -> States | None:
        return self._sources.get((layer, micro_batch))

    def finish(self, evaluation: Evaluation) -> None:
        """Propagates gradients of the steps' inputs to the net's input, and to the parameters that `prepare` used."""
        asked = [leaf for leaf in self._given if is_state(leaf) and leaf.requires_grad]
        ready = [self._ready[place] for place in self._gradients]
        has_steps = len(self._steps.own) > 0
        self.of_input = [
            None if has_steps or not leaf.requires_grad else torch.zeros_like(leaf)
            for leaf in self._given
            if is_state(leaf)
        ]
        if not ready or not (asked or self._aliases):
            return
        wanted = asked + self._aliases
        found = torch.autograd.grad(ready, wanted, list(self._gradients.values()), retain_graph=True, allow_unused=True)
        left = iter(found[: len(asked)])
        self.of_input = [next(left) if leaf.requires_grad else None for leaf in self._given if is_state(leaf)]
        for slot, gradient in enumerate(found[len(asked) :]):
            if gradient is not None:
                before = evaluation.gradients[slot]
                evaluation.gradients[slot] = gradient if before is None else before + gradient

    # ---- outputs

    def after(self, layer: int, batch: Batch) -> tuple[States, States]:
        """Returns the detached state after one of this rank's steps, all micro-batches together, and its constants."""
        micro_batches = range(batch.micro_batches)
        states = batch.together([self._states[layer, micro] for micro in micro_batches])
        constants = batch.together([batch.constants_of(layer + 1, micro) for micro in micro_batches])
        leaves = batch.forms[layer + 1].states
        # Tensors are dense, because they are sent.
        return [ordered(state.detach().to(leaf.dtype), leaf) for state, leaf in zip(states, leaves)], constants

    def outputs(self, batch: Batch, output: Callable[[Any], Tensor]) -> Tensor:
        """Returns the outputs of this rank's steps, with the graph back to their states."""
        if not self._steps.own:
            kind = _dtype_of_state(self._leaves[0], self._steps.cell)
            return torch.zeros(self._leaves[0].shape[0], 0, dtype=kind, device=self._leaves[0].device)
        by_step = []
        for layer in self._steps.own:
            form = batch.forms[layer + 1]
            parts = []
            for micro in range(batch.micro_batches):
                states = [state.detach().to(leaf.dtype) for state, leaf in zip(self._states[layer, micro], form.states)]
                if self._is_recorded:
                    states = [state.requires_grad_() for state in states]
                    self._states[layer, micro] = states
                parts.append(output(form.joined(states, batch.constants_of(layer + 1, micro))))
            by_step.append(parts[0] if len(parts) == 1 else torch.cat(parts))
        return torch.stack(by_step, 1)

    def take_sources(self, outputs: Tensor, cotangent: Tensor | None) -> None:
        """Converts the gradient of the outputs to gradients of their states.

        The adjoint pass adds them to the gradients from the next steps.
        """
        if cotangent is None or not outputs.requires_grad:
            return
        keys = list(self._states)
        flat = [state for key in keys for state in self._states[key]]
        found = iter(torch.autograd.grad(outputs, flat, cotangent, allow_unused=True))
        for key in keys:
            parts = [next(found) for _ in self._states[key]]
            self._sources[key] = [torch.zeros_like(s) if g is None else g for s, g in zip(self._states[key], parts)]


class _Preparing(nn.Module):
    """A cell's `prepare` as a module."""

    def __init__(self, cell: nn.Module) -> None:
        super().__init__()
        self.cell = cell

    def forward(self, x: Any) -> Any:
        return self.cell.prepare(x)  # type: ignore[operator]


class SequenceBatch(Batch):
    """A batch of sequences. The input of its first layer is the state before the first step."""

    def __init__(self, net: RecurrentParallel, inputs: BatchInputs, call: str) -> None:
        steps = net.current.layers
        assert isinstance(steps, Steps)
        self._net, self._steps, self._input = net, steps, inputs.x
        state = None if inputs.side is None else inputs.side.get("state")
        first: Any = None
        refusal: Exception | None = None
        if net.wire.rank == 0:
            first = state
            try:
                if state is None:
                    leaf = pytree.tree_leaves(inputs.x)[0]
                    kind = _dtype_of_state(leaf, net.step_cell)
                    first = net.step_cell.initial(leaf.shape[0], kind, leaf.device)  # type: ignore[operator]
                elif isinstance(net.step_cell, Stepped):
                    first = net.step_cell.taken(state)
            except Exception as error:
                refusal = error
        super().__init__(
            net.current,
            replace(inputs, x=first, side=None),
            call=call,
            is_training=net.training,
            settle=net.settle,
            on_end=net._take_results,
            refusal=refusal,
        )
        self._of_state = len(self.given)
        sequence = [leaf for leaf in pytree.tree_leaves(inputs.x) if is_state(leaf)]
        self.given += sequence
        self.refusal = self.refusal or of_forward(sequence)
        self._sequence: Inputs
        self._outputs: Tensor

    def prepare(self, *, is_recorded: bool) -> None:
        # Random numbers that are drawn here depend on the seed and the batch, as all others do.
        number = self.solver.shared.due(is_training=self.is_training)
        with seeded(
            mixed(self._steps.seed, number, self.solver.replica, self._steps.own.start, int(not self.is_training))
        ):
            self.layer_inputs = self._sequence = Inputs(
                self._steps,
                self._net.step_cell,
                self._input,
                self.micro_batches,
                [self.parameters[place] for place in self._steps.shared()],
                is_recorded=is_recorded,
            )

    def forward_is_over(self) -> None:
        layer = self._steps.end - 1
        owner, form = self.solver.plans.net.owner(layer), self.whole(self.forms[layer + 1])
        mine: tuple[States, States] | None = None
        if owner == self.solver.wire.rank:
            mine = self._sequence.after(layer, self)
        self._net._last = (owner, form, self.device, mine)

    def outputs(self, outputs: Sequence[States]) -> list[Tensor]:
        with torch.set_grad_enabled(self._sequence._is_recorded):
            self._outputs = self._sequence.outputs(self, self._net.step_cell.output)  # type: ignore[arg-type]
        return [self._outputs.detach(), *super().outputs(outputs)]

    def value(self, outputs: Sequence[Tensor]) -> Any:
        return outputs[0], super().value(outputs[1:])

    def cotangents_of_result(self, cotangents: Sequence[Tensor | None]) -> list[States]:
        try:
            self._sequence.take_sources(self._outputs, cotangents[0])
        except Exception as error:
            self.fail(f"the gradients of outputs, batch {self.number}", error)
        return super().cotangents_of_result(cotangents[1:])

    def gradients_of_given(self, gradients: Sequence[States]) -> list[Tensor | None]:
        states: list[Tensor | None] = [*self.together(gradients)] if gradients else [None] * self._of_state
        return [*states, *self._sequence.of_input]


def _dtype_of_state(leaf: Tensor, cell: nn.Module) -> torch.dtype:
    """Returns the type of the first state of a sequence: the input's, or if that is whole numbers, the type of the cell's parameters."""
    tensors = [leaf, *cell.parameters()]
    return next(
        (tensor.dtype for tensor in tensors if tensor.is_floating_point() or tensor.is_complex()), torch.float32
    )
