"""The user interface of every layer-parallel net.

Owns modes, cycles, audits, and the methods that run a batch: `step`, `forward` with `backward`, and `evaluate`.
`_stack.py` and `_recurrent.py` define the layers, and `_solve/batch.py` is the way into a batch.
"""

from __future__ import annotations

import contextlib
import copy
import math
import warnings
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal, NoReturn, Self

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from torch_accl import _native

from ._net.copies import Copied, Copies
from ._net.tree import Form
from ._ranks.wire import Wire
from ._solve.audit import Audit, Excess, Probe, factor_of
from ._solve.auto import Candidate, Choice, chosen, measured
from ._solve.autograd import ForwardPass, WholeBatch
from ._solve.batch import Batch, BatchInputs, BatchPlan, LossFunction, LossInputs, Norms
from ._solve.cycle import Cycle, check_backward, check_type, check_whole
from ._solve.opening import key_of, opened
from ._solve.passes import compare_losses, run_forward
from ._solve.plans import Converging, Passes, Plans, Program
from ._solve.resumed import SolverState
from ._solve.settings import Audits, Stop
from ._solve.solver import Guess, Solver
from ._solve.step import step
from ._solve.unserved import TRACED, outside_of_transforms, refuse_traced

__all__ = ["MODES", "WAVE", "Evaluated", "Mode", "Model", "Schedule", "group_of", "replica_of"]


Mode = Literal["inexact", "exact-forward", "converged", "exact-wave", "exact-pipeline", "auto"]
MODES: tuple[Mode, ...] = ("inexact", "exact-forward", "converged", "exact-wave", "exact-pipeline", "auto")
Schedule = Literal["1f1b", "gpipe"]
WAVE = Cycle(levels=1)
_KEPT_AUDITS = 1000


@dataclass(frozen=True)
class Evaluated:
    """Losses of a batch that is not trained on: exact, and as the training mode computes it.

    loss: exact loss.
    mode_loss: loss as the training mode computes it; of `"exact-pipeline"` and `"auto"`, that is an exact wave.
    output_error: relative error of the training mode's output, in the 2-norm.
    """

    loss: float
    mode_loss: float
    output_error: float


class Model(nn.Module):
    """A net whose layers are spread over ranks."""

    # The object to save instead, for an error message.
    instead_of_pickling: ClassVar[str]

    def __init__(
        self,
        wire: Wire,
        *,
        mode: Mode,
        fwd: Cycle,
        bwd: Cycle,
        micro_batches: int | None,
        schedule: Schedule,
        checkpoint: bool,
        auto_modes: Sequence[Mode] | None,
        stop: Stop,
        audit: Audits,
    ) -> None:
        super().__init__()
        self._wire = wire
        # A tensor that wants a gradient, for ranks that have no other. It is on the CPU, also if the net is built on the
        # meta device.
        self._anchor = torch.zeros((), dtype=torch.float32, device="cpu", requires_grad=True)
        check_type("fwd", fwd, Cycle, "Cycle(factor=4)")
        check_type("stop", stop, Stop, "Stop(tolerance=1e-4)")
        check_type("audit", audit, Audits, "Audits(every=100)")
        check_type("checkpoint", checkpoint, bool, "True")
        if micro_batches is not None:
            check_whole(type(self).__name__, micro_batches=micro_batches)
        self._can_be_cut = True
        self.norms = Norms()
        # Form of the last batch's output, known to all ranks.
        self.output_form: Form | None = None
        self._cycles = {"forward": fwd, "adjoint": bwd}
        self._schedule = schedule
        self._micro_batches = wire.size if micro_batches is None else micro_batches
        # A loss may be a mean over micro-batches only if the user has given their number.
        self._may_be_cut = micro_batches is not None
        usual: tuple[Mode, ...] = (
            ("exact-wave", "inexact") if micro_batches is None else ("exact-wave", "exact-pipeline", "inexact")
        )
        self._auto_modes = usual if auto_modes is None else tuple(auto_modes)
        if any(mode not in MODES or mode in ("auto", "converged") for mode in self._auto_modes):
            raise ValueError(f"auto_modes={list(self._auto_modes)}: give some of {', '.join(MODES[:2] + MODES[3:5])}")
        if not self._auto_modes:
            raise ValueError("auto_modes is empty; give at least one mode")
        self._choices: dict[int, Choice] = {}
        # State of the layers that the choices hold for. None: the state at the next batch.
        self._state_of_choices: int | None = None
        # The choice for the last batch in the mode `"auto"`.
        self.choice: Choice | None = None
        if self._micro_batches < 1:
            raise ValueError(f"micro_batches={micro_batches}: give 1 or more")
        if schedule not in ("1f1b", "gpipe"):
            raise ValueError(f"schedule={schedule!r}: give 1f1b or gpipe")
        check_backward(bwd)
        self._audit, self._stop, self._checkpoint = audit, stop, checkpoint
        self.probes: deque[Probe] = deque(maxlen=_KEPT_AUDITS)
        # The last audits, the newest last.
        self.audits: deque[Audit] = deque(maxlen=_KEPT_AUDITS)
        self._mode: Mode = mode
        self._evaluation: Mode = "exact-wave"
        # Copies of parameters that several ranks have; None if there are none.
        self._copies: Copies | None = None
        self.register_load_state_dict_post_hook(_compared)  # type: ignore[no-untyped-call]
        # How the net was built, for the comparison between ranks.
        self._settings = f"audit {audit}; stop {stop}; checkpoint {checkpoint}; auto_modes {self._auto_modes}"
        self._solver: Solver

    # ---- the net as an object

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        raise TypeError(
            f"a {type(self).__name__} cannot be pickled, because it holds a process group and only this rank's layers; save {self.instead_of_pickling}"
        )

    def __copy__(self) -> Self:
        made = self.__class__.__new__(self.__class__)
        made.__setstate__(self.__dict__.copy())  # type: ignore[no-untyped-call]
        return made

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        made = memo[id(self)] = self.__class__.__new__(self.__class__)
        made.__setstate__(copy.deepcopy(self.__dict__, memo))  # type: ignore[no-untyped-call]
        return made

    def compile(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Raises: layers can be compiled, the net as a whole cannot.

        Raises:
            NotImplementedError: always.
        """
        raise NotImplementedError(TRACED)

    # ---- the ranks and the solver

    @property
    def wire(self) -> Wire:
        """The ranks."""
        return self._wire

    @property
    def solver(self) -> SolverState:
        """The state that a resumed run needs in addition to weights and the optimizer.

        `net.solver.state_dict()` and `net.solver.load_state_dict(state)` work as for an optimizer.
        """
        return SolverState(self)

    @property
    def current(self) -> Solver:
        """The solver of the last batch's plan."""
        return self._solver

    @property
    def _plans(self) -> Plans:
        return self._solver.plans

    # ---- parameters of which several ranks have a copy

    def copied(self) -> list[Copied]:
        """Returns the parameters with copies. The list is the same on all ranks, except for the tensors."""
        return []

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Calls the module as torch does.

        Before that, remembers FSDP2's shards while the parameters still hold them.
        """
        if self._copies is not None:
            self._copies.look()
        return super().__call__(*args, **kwargs)

    # ---- settings

    @property
    def mode(self) -> Mode:
        """The mode in which batches run. Change it on all ranks; parameters and optimiser state stay where they are."""
        return self._mode

    @mode.setter
    def mode(self, mode: Mode) -> None:
        self.check_mode(mode)
        self._mode = mode

    @property
    def evaluation(self) -> Mode:
        """The mode in which batches run in evaluation, by default `"exact-wave"`."""
        return self._evaluation

    @evaluation.setter
    def evaluation(self, mode: Mode) -> None:
        self.check_evaluation(mode)
        self._evaluation = mode

    def check_evaluation(self, mode: Mode, cycles: Mapping[str, Cycle] | None = None) -> None:
        """Raises `ValueError` for a mode that evaluation cannot use."""
        self.check_mode(mode, cycles)
        if mode in ("exact-pipeline", "auto"):
            raise ValueError(f"evaluation={mode!r}: give one of the other modes")

    def check_mode(self, mode: Mode, cycles: Mapping[str, Cycle] | None = None) -> None:
        """Raises `ValueError` for a mode that does not exist, or that this net cannot use with `cycles`.

        `cycles` of None are the net's own.
        """
        cycles = self._cycles if cycles is None else cycles
        if mode not in MODES:
            raise ValueError(f"mode={mode!r}: give one of {', '.join(MODES)}")
        if mode == "auto":
            for other in self._auto_modes:
                self.check_mode(other, cycles)
        if mode in ("inexact", "converged"):
            self.check_cycle(cycles["forward"])
        if mode in ("inexact", "converged", "exact-forward"):
            self.check_cycle(cycles["adjoint"])

    def check_cycle(self, cycle: Cycle) -> None:
        """Raises `ValueError` for more levels than the net has, or for coarser states without `spatial`."""
        _native.layer_levels(self._plans.net.specs, cycle.factors())
        if any(cycle.coarser_levels()) and self._solver.shared.spatial is None:
            raise ValueError(
                f"Cycle(coarser={cycle.coarser}) of a net without `spatial`; give it functions that coarsen and refine states"
            )

    @property
    def fwd(self) -> Cycle:
        """The cycle of the forward pass where it is not exact."""
        return self._cycles["forward"]

    @fwd.setter
    def fwd(self, cycle: Cycle) -> None:
        check_type("fwd", cycle, Cycle, "Cycle(factor=4)")
        self.check_cycle(cycle)
        self._cycles["forward"] = cycle

    @property
    def bwd(self) -> Cycle:
        """The cycle of the backward pass where it is not exact."""
        return self._cycles["adjoint"]

    @bwd.setter
    def bwd(self, cycle: Cycle) -> None:
        check_backward(cycle)
        self.check_cycle(cycle)
        self._cycles["adjoint"] = cycle

    @property
    def batch(self) -> int:
        """The number of the next batch in training.

        Random numbers, audits and probes depend on it. `net.solver.state_dict()` contains it, with the other state that
        a resumed run needs.
        """
        return self._solver.shared.number

    @batch.setter
    def batch(self, number: int) -> None:
        check_whole("net", batch=number)
        if number < 0:
            raise ValueError(f"batch={number}: give a batch number of at least 0")
        self._solver.shared.number = number

    @property
    def guess(self) -> Guess | None:
        """A function from the number of a point to a state of the same form. None without a guess.

        A solve with `Cycle(start="guess")` begins with its states. Each rank calls it for the C-points after its own
        layers.
        """
        return self._solver.shared.guess

    @guess.setter
    def guess(self, guess: Guess | None) -> None:
        if guess is not None and not callable(guess):
            raise TypeError(f"guess is {type(guess).__name__}; give a function from the number of a point to a state")
        self._solver.shared.guess = guess

    @property
    def is_first(self) -> bool:
        """Whether this rank gives the input."""
        return self._wire.rank == 0

    @property
    def is_last(self) -> bool:
        """Whether this rank has the output, the target and the loss."""
        return self._wire.is_last

    # ---- audits

    def _take_audit(self, audit: Audit) -> None:
        """Keeps an audit and reacts to it. All ranks have the same figures, so they react alike."""
        self.audits.append(audit)
        if audit.exact_loss is not None and not math.isfinite(audit.exact_loss):
            # No mode would improve this.
            self._change(
                "warn",
                f"{audit}: the exact loss is not finite either",
                "lower the learning rate, or look for the cause in the data and the loss",
            )
        elif not audit.gradient_error <= self._audit.limit:
            self._change(
                self._audit.on_excess, f"{audit}: the gradient error exceeds the limit of {self._audit.limit:.2%}"
            )

    def _take_results(self, batch: Batch) -> None:
        """Keeps the norms and the audit of a batch whose passes have completed, and reacts to them."""
        self._take_norms(batch)
        if batch.audit is not None:
            self._take_audit(batch.audit)

    def _take_norms(self, batch: Batch) -> None:
        """Keeps the norms of a batch. Reacts to them if the batch was a probe."""
        norms = self.norms = batch.norms
        if "limit" in (norms.forward_end, norms.backward_end) and self.is_first:
            warnings.warn(
                f"layer-parallel training, mode converged: a solve reached max_iterations={self._stop.max_iterations} before its tolerance, so gradients are inexact; raise max_iterations or "
                "use an exact mode (net.norms.forward_end and backward_end name the pass)",
                stacklevel=2,
            )
        self._can_be_cut = self._is_divided(batch)
        if not batch.plan.is_probe:
            return
        forward, backward = (factor_of(list(each.values())) for each in (norms.forward, norms.backward))
        probe = Probe(batch.number, forward, backward)
        self.probes.append(probe)
        if not probe.factor < 1:
            self._change(self._audit.on_stall, str(probe), "use an exact mode, as more iterations do not help")

    def _change(self, what: Excess, why: str, remedy: str = "use more iterations or an exact mode") -> None:
        if what == "more":
            self._cycles = {
                name: replace(cycle, iterations=cycle.iterations + 1) for name, cycle in self._cycles.items()
            }
            fwd, bwd = self._cycles["forward"].iterations, self._cycles["adjoint"].iterations
            remedy = f"later batches use {fwd} forward and {bwd} backward iterations"
        elif what == "exact":
            # The exact mode is a wave if batches like this one cannot be split, or if the loss may not be a mean over
            # micro-batches.
            self.mode = "exact-pipeline" if self._may_be_cut and self._can_be_cut else "exact-wave"
            remedy = f"later batches use mode {self._mode}"
        if self.is_first:
            warnings.warn(f"layer-parallel training, {why}; {remedy}", stacklevel=2)

    # ---- a batch

    def step(
        self,
        x: Any = None,
        target: Any = None,
        loss_fn: LossFunction | None = None,
        *,
        side: dict[str, Any] | None = None,
        loss_scale: float = 1.0,
    ) -> Tensor:
        """Runs forward, loss and backward of one batch, on all ranks together, and adds the gradients to `.grad`.

        x: input, read on the first rank: a tensor, or a tuple, list or dict of tensors. `"exact-pipeline"` splits
            them along their first dimension into micro-batches.
        target: read on the last rank, and split as x is.
        loss_fn: read on the last rank. `loss_fn(output, target)` returns a tensor with one element. It has no
            parameters. With `"exact-pipeline"`, the loss is the mean over micro-batches.
        side: side inputs by the names of the layers' arguments, read on the first rank.
        loss_scale: factor of the gradients, for a gradient scaler.

        Returns the detached loss without `loss_scale`, the same on all ranks. For a wrapper such as
        DistributedDataParallel, call `layer_parallel.step` instead.

        Raises:
            LayerParallelError: a rank's input, layer or loss failed. All ranks raise it, and no gradient is added.
        """
        return step(self, x, target, loss_fn, side=side, loss_scale=loss_scale)

    def forward(self, x: Any = None, side: dict[str, Any] | None = None) -> Any:
        """Evaluates the net for x, which is read on the first rank.

        The last rank gets the output. The other ranks get a meaningless number to call `backward()` on.
        In training, the passes are solved as the mode says, and a pipeline completes all of forward before backward. In
        evaluation everything is exact, unless `evaluation` says otherwise.

        Raises:
            LayerParallelError: a rank's input or layer failed; all ranks raise it.
            NotImplementedError: the call is being compiled, exported or traced.
        """
        refuse_traced()
        with outside_of_transforms():
            return self._batch(x, side)

    def _batch(self, x: Any, side: dict[str, Any] | None) -> Any:
        if isinstance(x, BatchInputs):
            return self._step(x)
        batch = self._new_batch(BatchInputs(x, side))
        if torch.is_grad_enabled():
            outputs = ForwardPass.apply(batch, self._anchor, *batch.given, *batch.parameters)
        else:
            with opened(batch, is_recorded=False):
                outputs = batch.tried_outputs(run_forward(batch, batch.plan.forward))
            batch.forward_is_over()
            outputs = [output.detach() for output in outputs]
        self.norms, self.output_form = batch.norms, batch.returned_form
        return batch.value(outputs)

    def _step(self, inputs: BatchInputs) -> Tensor:
        """Runs a whole batch. Returns a tensor whose backward pass returns the gradients."""
        result = inputs.result
        try:
            batch = self._new_batch(inputs, call="step()")
            anchor: Tensor = WholeBatch.apply(batch, self._anchor, *batch.given, *batch.parameters)
            return anchor
        except BaseException as error:
            # The forward pass of a wrapper must complete in all replicas alike. `step` raises the error, and an interrupt.
            result.error = error
            return self._anchor.detach().clone().requires_grad_()
        finally:
            result.solver = self._solver

    @torch.no_grad()
    def evaluate(
        self,
        x: Any = None,
        target: Any = None,
        loss_fn: LossFunction | None = None,
        *,
        side: dict[str, Any] | None = None,
    ) -> Evaluated:
        """Returns the loss of a batch in evaluation, on all ranks: exact, and as the training mode computes it.

        It takes the arguments of `step`.

        Raises:
            RuntimeError: the net is in training; call `eval()` before.
            LayerParallelError: a rank's input, layer or loss failed; all ranks raise it.
        """
        if self.training:
            raise RuntimeError("evaluate() of a net in training mode; call eval() first, and train() afterwards")
        batch = self._new_batch(BatchInputs(x, side, LossInputs(target, loss_fn)), call="evaluate()")
        trained = self.batch_plan_of(self._mode if self._mode not in ("exact-pipeline", "auto") else "exact-wave")
        batch.prepare_for(trained)
        # Ranks compare the training mode's settings too.
        batch.plan = replace(batch.plan, settings=f"{batch.plan.settings}; the training mode's {trained.settings}")
        with opened(batch, is_recorded=False, refusal=batch.inputs.loss.refusal(self._wire, 1)):
            return Evaluated(*compare_losses(batch, batch.plan.exact[0], trained.forward))

    def _new_batch(self, inputs: BatchInputs, *, call: str = "forward()") -> Batch:
        """Returns a batch with its plan."""
        batch = self.new_batch(inputs, call)
        batch.use(self.batch_plan(batch))
        return batch

    def new_batch(self, inputs: BatchInputs, call: str) -> Batch:
        """Returns a batch without a plan."""
        return Batch(
            self._solver,
            inputs,
            call=call,
            is_training=self.training,
            settle=self.settle,
            on_end=self._take_results,
        )

    def settle(self, batch: Batch) -> None:
        """Completes gradients that need several ranks, after both passes. All ranks call it."""
        batch.add_side_gradients()

    def batch_plan(self, batch: Batch) -> BatchPlan:
        """Returns how a batch is run."""
        mode = self._mode if self.training else self._evaluation
        return self.batch_plan_of(self._fastest(batch) if mode == "auto" else mode)

    def _fastest(self, batch: Batch) -> Mode:
        """Returns the fastest mode for batches like this one.

        The first batch of a kind is measured on all ranks, and rank 0 chooses.
        """
        wire, key = self._wire, -1
        state = self._solver.layers.state()
        if wire.rank == 0:
            # If the input has no key, the error is reported when the batch begins.
            with contextlib.suppress(Exception):
                key = key_of(self._solver, batch.inputs.x, batch.inputs.side)
        has_changed = self._state_of_choices not in (None, state)
        numbers = torch.tensor([key, int(has_changed)], dtype=torch.int64, device=wire.device)
        key, is_other = wire.together(numbers, "choosing a mode", is_greatest=True)
        if is_other:
            self._choices.clear()
        self._state_of_choices = state
        if key < 0:
            return "exact-wave"
        if key not in self._choices:
            found: Choice | None = None
            if len(self._auto_modes) > 1:
                meshes = max(sum(cycle.coarser_levels()) for cycle in (self.fwd, self.bwd))
                batch.plan = replace(self.batch_plan_of("exact-wave"), meshes=meshes)
                number = self._solver.shared.number
                # The batch opens a second time for its passes.
                with opened(batch, is_recorded=True):
                    parts = self._parts(batch)
                    known = measured(batch, parts)
                self._solver.shared.number = number
                candidates = self._candidates(batch, parts)
                found = chosen(candidates, known) if wire.rank == 0 and known is not None and candidates else None
                found = wire.pass_on(found, 0)
            # If the net cannot be measured, the batch runs in the first mode. That run reports the error, if there is
            # one.
            self._choices[key] = found or Choice(self._auto_modes[0], {})
        self.choice = self._choices[key]
        mode: Mode = self.choice.mode  # type: ignore[assignment]
        return mode

    def _parts(self, batch: Batch) -> int:
        """Returns the number of micro-batches, or 0 if a batch like this one cannot be split into them."""
        return self._micro_batches if "exact-pipeline" in self._auto_modes and self._is_divided(batch) else 0

    def _is_divided(self, batch: Batch) -> bool:
        rows = {leaf.shape[0] if leaf.shape else 0 for form in batch.forms for leaf in form.leaves}
        return len(rows) == 1 and rows != {0} and not min(rows) % self._micro_batches

    def _candidates(self, batch: Batch, parts: int) -> list[Candidate]:
        found = []
        for mode in self._auto_modes:
            try:
                batch_plan = self.batch_plan_of(mode, may_probe=False)
            except ValueError:
                # This net, or a sequence of this length, has no plan in this mode.
                continue
            if batch_plan.pipeline is None:
                programs = (batch_plan.forward, batch_plan.adjoint)
                found.append(Candidate(mode, tuple(each for each in programs if isinstance(each, Program))))
            elif parts and not self._wire.is_in_one_stream(batch.device):
                found.append(Candidate(mode, (batch_plan.pipeline,), parts))
        return found

    def _is_probe(self, mode: Mode) -> bool:
        number = self._solver.shared.number
        is_due = self._audit.probe_every > 0 and number % self._audit.probe_every == 0 and self.training
        return is_due and mode in ("inexact", "exact-forward")

    def batch_plan_of(self, mode: Mode, *, may_probe: bool = True) -> BatchPlan:
        """Returns how a batch is run in a mode."""
        plans, micro_batches, pipeline = self._plans, 1, None
        fwd, bwd = self._cycles["forward"], self._cycles["adjoint"]
        forward_starts_with_a_guess = (
            mode in ("inexact", "converged") and fwd.start == "guess" and len(fwd.factors()) > 0
        )
        if is_probe := may_probe and self._is_probe(mode):
            # At least three iterations, so that there are two norms.
            fwd, bwd = (replace(cycle, iterations=max(2 * cycle.iterations, 3)) for cycle in (fwd, bwd))
        exact: tuple[Passes, Passes] = plans.solve("forward", WAVE), plans.solve("adjoint", WAVE)
        forward, adjoint = exact
        if mode == "exact-pipeline":
            micro_batches = self._micro_batches
            forward, adjoint = plans.pipeline("forward", micro_batches), plans.pipeline("adjoint", micro_batches)
            pipeline = plans.pipeline(self._schedule, micro_batches)
        elif mode == "converged":
            forward, adjoint = self._converging("forward", fwd), self._converging("adjoint", bwd)
        elif mode != "exact-wave":
            adjoint = plans.solve("adjoint", bwd)
            forward = plans.solve("forward", fwd) if mode == "inexact" else forward
        shown = f"mode {mode}; fwd {fwd}; bwd {bwd}; micro_batches {micro_batches}; schedule {self._schedule}; training {self.training}"
        keeps = (
            self._kept(bwd if mode in ("inexact", "converged", "exact-forward") else WAVE) if self._checkpoint else None
        )
        return BatchPlan(
            mode=mode,
            forward=forward,
            adjoint=adjoint,
            exact=exact,
            micro_batches=micro_batches,
            pipeline=pipeline,
            settings=f"{self._settings}; {shown}",
            needs_guess=forward_starts_with_a_guess,
            is_probe=is_probe,
            keeps_graph=None if keeps is None else keeps.__contains__,
            meshes=max(forward.coarsest, adjoint.coarsest),
            audit_every=self._audit.every,
        )

    def _converging(self, pass_: str, cycle: Cycle) -> Passes:
        plans = self._plans
        if not cycle.factors():
            return plans.solve(pass_, cycle)
        if cycle.norms == "none":
            raise ValueError("Cycle(norms='none') in mode converged, which needs norms; give lagged or blocking")
        return Converging(
            first=plans.solve(pass_, cycle, is_whole=False),
            more=plans.solve(pass_, cycle, iterations=1, start="guess", is_whole=False),
            last=plans.solve(pass_, cycle, iterations=0, start="guess"),
            tolerance=self._stop.tolerance,
            exact=plans.solve(pass_, WAVE),
            limit=self._stop.max_iterations,
            iterations=(cycle.iterations, 1),
        )

    def _kept(self, cycle: Cycle) -> frozenset[int]:
        """Returns the layers whose graphs the coarse steps of the adjoint pass use repeatedly."""
        factors = cycle.factors()
        if not factors:
            return frozenset()
        return frozenset(_native.layer_levels(self._plans.net.specs, factors)[1][:-1])


# ---- construction


def _compared(net: Model, incompatible: Any) -> None:
    """Compares loaded parameters on all ranks."""
    if net._copies is not None:
        what = "load_state_dict() of a net with copied parameters (all ranks of the layers must call it together)"
        net._copies.check(what)


def replica_of(ranks: Sequence[int]) -> int:
    """Returns the index of a group among the groups of equal size and stride into which all ranks are divided.

    `ranks` are the ranks of the group in the default process group.
    """
    if len(ranks) < 2:
        return ranks[0]
    stride = ranks[1] - ranks[0]
    return ranks[0] if stride < 1 else ranks[0] % stride + ranks[0] // (stride * len(ranks)) * stride


def group_of(mesh: DeviceMesh | None, group: dist.ProcessGroup | Literal["alone"] | None) -> dist.ProcessGroup | None:
    """Returns the group of ranks that the layers lie on, from a user's arguments. None: this rank alone."""
    if isinstance(group, str) and group != "alone":
        raise ValueError(f"group={group!r}: give a process group, or 'alone' for this rank by itself")
    if mesh is not None and group is not None:
        raise ValueError("mesh and group are both given; give one of them")
    if mesh is not None:
        check_type("mesh", mesh, DeviceMesh, "init_device_mesh('cpu', (4,))")
        if mesh.ndim != 1:
            raise ValueError(
                f"the mesh has {mesh.ndim} dimensions; give the one dimension for the layers, such as mesh['lp']"
            )
        return mesh.get_group()
    if group is not None:
        if isinstance(group, str):
            return None
        check_type("group", group, dist.ProcessGroup, "dist.new_group(ranks)")
        return group
    return dist.group.WORLD if dist.is_initialized() else None
