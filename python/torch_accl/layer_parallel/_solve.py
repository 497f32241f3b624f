"""One batch through the net, on all ranks together.

Owns how a solve opens and closes: it compares what must be the same on all ranks and agrees on the forms of all states.
It raises an error of one rank on all. Between opening and closing, all ranks walk their lists.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from ._agreed import agreed
from ._audit import Audit, audit_of, figures, relative
from ._blocks import undisturbed
from ._copies import Copies, hash_of
from ._failures import LayerParallelError, described, sentence
from ._net import Evaluation, LayerInputs, Layers, Parameters, States, form_returned, keep_freed_memory, states_of
from ._plans import Plans, Program
from ._side import NO_SIDE, Side, SideForm, names_taken, side_of
from ._spatial import Meshes, Spatial
from ._tree import Form, digest, form_of, ordered, packed, zeros
from ._walk import Batch, Walk
from ._wire import Wire, bits_of, numbers_of

__all__ = ["Converging", "Guess", "Norms", "Passes", "Shared", "Solve", "Solver", "split"]


# Maximum number of kinds of input whose forms are kept.
_REMEMBERED = 256
_LEAST = -(1 << 63)
# Number of batches at the beginning in which the first and the last rank's inputs are compared, if both have one.
_LOOKED_AT = 2
# Batch numbers are compared modulo this number, so that sums of their squares do not overflow.
_COMPARED = 1 << 20
# dtypes of losses.
_DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)

# Returns a micro-batch's share of the batch's loss, from its output, its number and the number of micro-batches.
Loss = Callable[[Any, int, int], Tensor]
# Returns the state of a point, before the batch is known.
Guess = Callable[[int], Any]
# A residual norm has stalled if it is at least this share of the norm before.
_STALLED = 0.9


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
class Converging:
    """A pass that continues until its residual is small.

    `first` and `more` end with states of C-points, and `last` is the final sweep.
    """

    first: Program
    more: Program
    last: Program
    # Replaces the whole pass if more iterations do not help.
    exact: Program
    # tolerance: share of the first norm at which the pass has converged. limit: maximum number of iterations.
    tolerance: float
    limit: int
    # Numbers of iterations of `first` and of each `more`.
    iterations: tuple[int, int]

    @property
    def is_exact(self) -> bool:
        """Whether no state is ever a difference of other states."""
        return self.first.is_exact

    @property
    def coarsest(self) -> int:
        """The coarsest mesh that states are on."""
        return max(self.first.coarsest, self.more.coarsest)


Passes = Program | Converging


class _Inputs(Protocol):
    """A function that returns a pass's first values on this rank, in the dtypes in which the pass works."""

    def __call__(self, *, is_exact: bool) -> list[States]: ...


@dataclass
class Shared:
    """State that several solvers of a net share."""

    # Number of the next batch; the first rank's count is used.
    number: int = 0
    # Gives the first states of C-points if a cycle begins with a guess.
    guess: Guess | None = None
    # Names of the side inputs that are split into micro-batches.
    per_sample: Collection[str] = ()
    # Number of the next batch in evaluation.
    evaluations: int = 0
    # Makes states coarser on coarser levels; None without it.
    spatial: Spatial | None = None

    def due(self, *, is_training: bool) -> int:
        """Returns the number of the next batch.

        Evaluation has its own count, so it does not change later training batches.
        """
        return self.number if is_training else self.evaluations


@dataclass
class _Kind:
    """Data that batches of one kind share.

    That is the forms of states and side inputs, and meshes by how often states become coarser.
    """

    forms: list[Form]
    side: SideForm
    meshes: dict[int, Meshes] = field(default_factory=dict)


class Solver:
    """A rank's data for all batches of one plan."""

    def __init__(
        self, wire: Wire, plans: Plans, layers: Layers, names: Sequence[str], replica: int, shared: Shared | None = None
    ) -> None:
        self.wire = wire
        self.replica = replica
        self.shared = Shared() if shared is None else shared
        self.plans = plans
        self.layers = layers
        self.names = names
        # Copies of parameters that several ranks have. None if there are none, or the net itself compares them.
        self.copies: Copies | None = None
        self._kinds: dict[int, _Kind] = {}
        # State of the layers that the kinds hold for.
        self._state = 0
        keep_freed_memory()

    @contextmanager
    def batch(
        self,
        x: Any,
        found: Parameters,
        settings: str,
        wrong: BaseException | None,
        *,
        micro_batches: int,
        is_recorded: bool,
        side: dict[str, Any] | None = None,
        layer_inputs: LayerInputs | None = None,
        keeps_graph: Callable[[int], bool] | None = None,
        meshes: int = 0,
        is_training: bool = True,
    ) -> Iterator[Solve]:
        """Opens a solve, and closes it at the end of the context.

        `x` and `side` are read on the first rank. `wrong` is an error that keeps this rank from beginning.
        """
        with undisturbed():
            solve = self._open(
                x,
                side,
                found,
                settings,
                wrong,
                micro_batches,
                layer_inputs,
                keeps_graph,
                meshes,
                is_recorded=is_recorded,
                is_training=is_training,
            )
            yield solve
            self.close(solve)

    def close(self, solve: Solve) -> None:
        """Closes a solve or one of its passes.

        All ranks then know the loss, and an error of any rank is raised on all.
        """
        batch = solve.batch
        # All are integers. Loss and dtype are zero on all ranks but one, so that sums are exact.
        # Batch numbers are equal on all ranks if the mean of their squares is the square of their mean.
        numbers = [batch.number % _COMPARED, (batch.number % _COMPARED) ** 2]
        status = torch.tensor(
            [int(batch.cause is not None), *bits_of([solve.loss]), solve.loss_dtype, *numbers],
            dtype=torch.int64,
            device=self.wire.device,
        )
        failed, bits, solve.loss_dtype, first, second = self.wire.together(status, f"the end of batch {batch.number}")
        if failed:
            # A layer may return other forms than before, although its parameters do not show it. The next batch
            # determines the forms again.
            self._kinds.clear()
            causes = self.wire.gathered(batch.cause)
            if batch.error is not None and not isinstance(batch.error, Exception):
                # An interrupt or another request to end this process.
                raise batch.error
            raise LayerParallelError(sentence(causes)) from batch.error
        if first**2 != self.wire.size * second:
            of_all = self.wire.gathered(batch.number)
            raise LayerParallelError(
                f"ranks of the layers are at different batches: {of_all}; call backward() of several batches in the same order on all ranks"
            )
        (solve.loss,) = numbers_of([bits])

    def _open(
        self,
        x: Any,
        side: dict[str, Any] | None,
        found: Parameters,
        settings: str,
        wrong: BaseException | None,
        micro_batches: int,
        layer_inputs: LayerInputs | None,
        keeps_graph: Callable[[int], bool] | None,
        meshes: int,
        *,
        is_recorded: bool,
        is_training: bool,
    ) -> Solve:
        wire, form, side_form = self.wire, None, NO_SIDE
        side_tensors: States = []
        by_micro_batch: list[tuple[States, States]] = []
        settings = f"{settings}; {'; '.join(_autocast())}"
        mine = digest(settings.encode())
        state = self.layers.state()
        due = self.shared.due(is_training=is_training)
        seen = self._seen(x) if is_training and due < _LOOKED_AT else None
        header = [mine, -mine, int(wrong is not None), _LEAST, _LEAST, int(state != self._state)]
        header += [_LEAST, _LEAST] if seen is None else [seen, -seen]
        header += [] if self.copies is None else self.copies.numbers()
        if wire.rank == 0 and wrong is None:
            try:
                form, by_micro_batch = split(x, micro_batches)
                side_form, side_tensors = side_of(side)
                _check_parts(side_form, self.shared.per_sample, micro_batches)
                header[3] = digest(packed((form, side_form, _autocast(), self.plans.net.counts)))
            except Exception as error:
                wrong, header[2] = error, 1
        if wire.rank == 0:
            header[4] = due
        numbers = torch.tensor(header, dtype=torch.int64, device=wire.device)
        what = f"the start of batch {due}"
        most, least, has_failed, key, number, has_changed, one, other, *copies = wire.together(
            numbers, what, is_greatest=True
        )
        if has_failed:
            cause = None if wrong is None else f"{what}: {described(wrong)}"
            raise LayerParallelError(sentence(wire.gathered(cause))) from wrong
        if most != -least:
            raise ValueError(_difference(wire.gathered(settings)))
        if self.copies is not None:
            self.copies.settle(copies, what)
        if is_training:
            self.shared.number = number + 1
        else:
            self.shared.evaluations = number + 1
        if one not in (_LEAST, -other) and wire.rank == 0:
            warnings.warn(
                f"layer-parallel training, batch {number}: the last rank's input differs from the first rank's, but the target is compared with the output for the first rank's input. Give all ranks of the layers "
                "the same batches in the same order, by a seeded generator or a sampler with the data-parallel rank. Or give None as input on all ranks but the first",
                stacklevel=2,
            )
        if has_changed:
            # If the layers of any rank have changed, the forms may have changed too.
            self._kinds.clear()
            self._state = state
        given = [
            tensor for micro_batch_part in by_micro_batch[:1] for tensor in (*micro_batch_part[0], *micro_batch_part[1])
        ]
        device = given[0].device if given else _device(self.layers)
        if key not in self._kinds:
            form, side_form = wire.pass_on((form, side_form), 0)
            self._check_names(side_form)
        else:
            side_form = self._kinds[key].side
        if side_form.names:
            layer_inputs = Side(
                side_form, side_tensors, self.layers.modules, device, wire, micro_batches, self.shared.per_sample
            )
        evaluation = Evaluation(
            self.layers,
            found,
            (number, self.replica) if is_training else (number, self.replica, 1),
            device,
            is_recorded=is_recorded,
            layer_inputs=layer_inputs,
            keeps_graph=keeps_graph,
        )
        if key not in self._kinds:
            assert form is not None
            self._remember(key, _Kind(self._forms_from(form, by_micro_batch, evaluation), side_form))
        kind = self._kinds[key]
        forms = kind.forms
        if micro_batches > 1 and any(not leaf.shape for leaf in forms[-1].leaves):
            raise ValueError(
                "the net returns a scalar, but results of micro-batches are joined along a batch dimension; use another mode"
            )
        return Solve(
            self,
            Batch(
                number,
                forms,
                self.names,
                device,
                evaluation,
                self.plans.segment,
                micro_batches,
                self._on_meshes(kind, meshes, device),
            ),
            by_micro_batch,
        )

    def _seen(self, x: Any) -> int | None:
        """Returns a hash of the input on the first and the last rank, for which equal batches give equal hashes; else None."""
        if self.wire.size == 1 or not (self.wire.rank == 0 or self.wire.is_last):
            return None
        leaves = pytree.tree_leaves(x)
        if not leaves or any(not isinstance(leaf, Tensor) or not leaf.dim() or leaf.is_meta for leaf in leaves):
            return None
        try:
            return digest(repr([(leaf.shape, hash_of(leaf)) for leaf in leaves]).encode())
        except Exception:
            return None

    def _on_meshes(self, kind: _Kind, count: int, device: torch.device) -> Meshes:
        # Whether meshes are known is the same on all ranks.
        if count in kind.meshes:
            return kind.meshes[count]
        if count == 0:
            # No function of the user is called.
            kind.meshes[0] = Meshes(None, kind.forms, 0, device)
            return kind.meshes[0]
        made: list[Meshes] = []

        def make() -> int:
            made.append(Meshes(self.shared.spatial, kind.forms, count, device))
            return digest(packed(made[0].forms[1:]))

        remedy = "Functions of `spatial` must work on all ranks."
        of_all = agreed(self.wire, "coarsening states", remedy, make, is_for_all=True)
        if len(set(of_all)) > 1:
            raise ValueError(
                "`coarsen` returns different shapes on different ranks of the layers; give all ranks the same functions"
            )
        kind.meshes[count] = made[0]
        return made[0]

    def key_of(self, x: Any, side: dict[str, Any] | None) -> int:
        """Returns the key that batches of one kind share."""
        form, _ = split(x, 1)
        return digest(packed((form, side_of(side)[0], _autocast(), self.plans.net.counts)))

    def _check_names(self, side_form: SideForm) -> None:
        """Raises `ValueError` for a side input that no layer takes, which is usually a misspelt name."""
        if not side_form.names:
            return
        mine = {name for module in self.layers.modules.values() for name in names_taken(module, side_form.names)}
        unknown = set(side_form.names).difference(*self.wire.gathered(mine))
        if unknown:
            names = ", ".join(f"`{name}`" for name in sorted(unknown))
            raise ValueError(f"no layer's forward has an argument {names}; layers take side inputs by argument name")

    def _remember(self, key: int, kind: _Kind) -> None:
        # All ranks forget the same kind, because they have run the same batches.
        if len(self._kinds) >= _REMEMBERED:
            self._kinds.pop(next(iter(self._kinds)))
        self._kinds[key] = kind

    def _forms_from(
        self, form: Form, by_micro_batch: Sequence[tuple[States, States]], evaluation: Evaluation
    ) -> list[Form]:
        """Returns the form of each point's state.

        Only plain layers change it, and their owners evaluate them to find it.
        """
        forms = [form]
        for layer, (kind, _) in enumerate(self.plans.net.layers):
            if not kind.is_step:
                owner = self.plans.net.owner(layer)
                tried: Form | str | None = None
                error: Exception | None = None
                if owner == self.wire.rank:
                    try:
                        given = (
                            by_micro_batch[0] if layer == 0 and by_micro_batch else zeros(form, _device(self.layers))
                        )
                        returned = evaluation.evaluate_temporary(layer, 1, 0, form, *given)
                        tried = form_returned(returned, layer, self.names[layer])
                        packed(tried)
                    except Exception as caught:
                        tried, error = described(caught), caught
                tried = self.wire.pass_on(tried, owner)
                if not isinstance(tried, Form):
                    text = (
                        f"rank {owner} of the layers: layer {layer} ({self.names[layer]}) cannot take {form}: {tried}"
                    )
                    raise LayerParallelError(text) from error
                form = tried
            forms.append(form)
        return forms


class Solve:
    """One batch in progress."""

    def __init__(self, solver: Solver, batch: Batch, by_micro_batch: Sequence[tuple[States, States]]) -> None:
        self.solver = solver
        self.batch = batch
        self.norms = Norms()
        self.loss = 0.0
        # Index in `_DTYPES`.
        self.loss_dtype = 0
        # States and constants of each micro-batch, on the first rank.
        self._by_micro_batch = by_micro_batch
        # Gradients of the side inputs, on the first rank, after both passes.
        self.side_gradients: list[Tensor | None] = []

    @property
    def output_form(self) -> Form:
        """Form of the last layer's result for a micro-batch."""
        return self.batch.forms[-1]

    @property
    def returned_form(self) -> Form:
        """Form of the net's result, all micro-batches together."""
        return self.whole(self.output_form)

    def whole(self, form: Form) -> Form:
        """Returns the form of all micro-batches together, from the form of one."""
        count = self.batch.micro_batches
        if count == 1:
            return form
        leaves = [replace(leaf, shape=torch.Size((leaf.shape[0] * count, *leaf.shape[1:]))) for leaf in form.leaves]
        return Form(tuple(leaves), form.tree)

    @property
    def known_loss(self) -> Tensor:
        """The loss, in the dtype that it has on the last rank."""
        return torch.tensor(self.loss, dtype=_DTYPES[self.loss_dtype], device="cpu")

    def forward(self, passes: Passes) -> list[States]:
        """Returns the states of the last point for each micro-batch, on the last rank."""
        outputs, self.norms.forward, self.norms.forward_end = self._pass(passes, self._inputs)
        return outputs

    def backward(self, passes: Passes, cotangents: Sequence[States]) -> list[States]:
        """Returns the gradient of the input, on the first rank.

        `cotangents` is the gradient of the last point's states, on the last rank.
        """
        leaves = self.output_form.states

        def given(*, is_exact: bool) -> list[States]:
            return [
                [c.to(leaf.work_dtype(is_exact=is_exact)) for c, leaf in zip(micro_batch_part, leaves)]
                for micro_batch_part in cotangents
            ]

        outputs, self.norms.backward, self.norms.backward_end = self._pass(passes, given)
        return outputs

    def _pass(self, passes: Passes, inputs: _Inputs) -> tuple[list[States], dict[int, float], str | None]:
        """Runs a pass. Returns its outputs, the norms by iteration, and why it ended."""
        batch, wire = self.batch, self.solver.wire
        given = inputs(is_exact=passes.is_exact)
        if isinstance(passes, Program):
            walk = Walk(passes, batch, wire)
            return walk.run(given, self._guesses(passes)), walk.norms, None
        walk = Walk(passes.first, batch, wire)
        states = walk.run(given, self._guesses(passes.first))
        norms = dict(walk.norms)
        done, step = passes.iterations
        # All ranks know the same norms to the bit, so they end alike.
        while (end := _end_of(list(norms.values()), passes.tolerance)) is None and done + step <= passes.limit:
            walk = Walk(passes.more, batch, wire)
            states = walk.run(given, states)
            norms |= {iteration + done: norm for iteration, norm in walk.norms.items()}
            done += step
        if end == "stalled":
            return Walk(passes.exact, batch, wire).run(inputs(is_exact=passes.exact.is_exact)), norms, end
        return Walk(passes.last, batch, wire).run(given, states), norms, end or "limit"

    def _guesses(self, program: Program) -> list[States]:
        """Returns the states with which a program begins in addition to its input."""
        found = []
        for value in program.guesses:
            point = program.points[value]
            form = self.batch.forms[point]
            states, _ = zeros(form, self.batch.device)
            guess = self.solver.shared.guess
            if self.batch.cause is None and guess is not None:
                try:
                    given, _ = states_of(guess(point), form, f"the guess of point {point}", may_be_states=True)
                    states = [
                        ordered(state.detach().to(self.batch.device, leaf.dtype), leaf)
                        for state, leaf in zip(given, form.states)
                    ]
                except BaseException as error:
                    self.batch.fail(f"the guess of point {point}, batch {self.batch.number}", error)
            found.append([state.to(leaf.work_dtype(is_exact=False)) for state, leaf in zip(states, form.states)])
        return found

    def compared(self, passes: tuple[Passes, Passes], loss: Loss) -> tuple[float, float, float]:
        """Returns the losses of a batch solved in two ways, and the second output's relative error in the 2-norm."""
        losses: list[float] = []
        outputs: list[list[States]] = []
        for way in passes:
            # Each run makes its own constants.
            self.batch.constants.clear()
            self.batch.coarse_constants.clear()
            outputs.append(self.forward(way))
            losses.append(0.0)
            for states in outputs[-1]:
                if self.batch.cause is None:
                    try:
                        losses[-1] = float(self._value(0, self.shown([states]), loss))
                    except BaseException as error:
                        self.batch.fail(f"the loss, batch {self.batch.number}", error)
        numbers = [*losses, 0.0, 0.0]
        if outputs[0]:
            numbers[2:] = figures(list(zip(outputs[1][0], outputs[0][0])))[:2]
        exact, other, difference, square = self.solver.wire.known(numbers, f"the figures of batch {self.batch.number}")
        return exact, other, relative(difference, square)

    def settle(self) -> None:
        """Sums the gradients of side inputs over all layers. All ranks call it after both passes."""
        layer_inputs = self.batch.evaluation.layer_inputs
        if isinstance(layer_inputs, Side):
            self.side_gradients = layer_inputs.gradients(self.solver.wire)

    def pipeline(self, program: Program, loss: Loss, scale: float) -> list[States]:
        """Runs both passes of all micro-batches. Returns the gradients of the inputs, on the first rank."""
        walk = Walk(program, self.batch, self.solver.wire, lambda micro, states: self._lost(micro, states, loss, scale))
        return walk.run(self._inputs(is_exact=program.is_exact))

    def lost(self, micro_batch: int, states: States, loss: Loss, scale: float) -> States:
        """Returns the gradient of the loss for the last point's states, times `scale`. Adds the loss to the sum."""
        if self.batch.cause is None:
            try:
                return self._lost(micro_batch, states, loss, scale)
            except BaseException as error:
                self.batch.fail(f"the loss, batch {self.batch.number}", error)
        return [torch.zeros_like(state) for state in states]

    def _value(self, micro_batch: int, outputs: States, loss: Loss) -> Tensor:
        """Returns the loss of the outputs."""
        y = self.output_form.joined(outputs, self._constants_at_end(micro_batch))
        found = loss(y, micro_batch, self.batch.micro_batches)
        if not isinstance(found, Tensor) or found.numel() != 1:
            shown = f"the shape {list(found.shape)}" if isinstance(found, Tensor) else type(found).__name__
            raise ValueError(f"the loss function returned {shown}; it must return a tensor with one element")
        return found

    def _lost(self, micro_batch: int, states: States, loss: Loss, scale: float) -> States:
        with torch.enable_grad():
            leaves = self.output_form.states
            outputs = [state.detach().to(leaf.dtype).requires_grad_() for state, leaf in zip(states, leaves)]
            found = self._value(micro_batch, outputs, loss)
            self._check_leaves(found, outputs)
            # The scale is applied to the loss itself, because it keeps the gradients below it from underflow.
            gradients = torch.autograd.grad(found, outputs, torch.full_like(found, scale), allow_unused=True)
        self.loss += float(found)
        self.loss_dtype = _DTYPES.index(found.dtype) if found.dtype in _DTYPES else 0
        return [torch.zeros_like(o) if g is None else g for o, g in zip(outputs, gradients)]

    def _check_leaves(self, found: Tensor, outputs: Sequence[Tensor]) -> None:
        """Raises `ValueError` if the loss depends on another parameter, which would get no gradient."""
        own = {id(output) for output in outputs}
        todo, seen = [] if found.grad_fn is None else [found.grad_fn], set()
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

    def audit(
        self,
        found: Sequence[States],
        exact: tuple[Passes, Passes],
        settled: Callable[[Solve], None],
        cotangents_of: Callable[[Solve, Sequence[States]], Sequence[States]],
        *,
        has_loss: bool,
    ) -> Audit:
        """Runs the batch again exactly, with the same random numbers and without a trace, and compares.

        All ranks call it after both passes. `cotangents_of` returns the gradients of the outputs from the solve and its
        outputs, with the solve's loss if there is one.
        """
        first = self.batch.evaluation
        again = Solve(self.solver, self.batch.again(), self._by_micro_batch)
        right = again.forward(exact[0])
        again.backward(exact[1], cotangents_of(again, right))
        settled(again)
        if again.batch.error is not None:
            self.batch.fail(f"the audit, {again.batch.cause}", again.batch.error)
        layers = range(len(self.batch.names))
        numbers = [0.0] * (4 * len(layers) + 4)
        for layer in layers:
            mine = first.gradients_of(layer)
            pairs = list(zip(mine, again.batch.evaluation.gradients_of(layer)))
            numbers[4 * layer : 4 * layer + 4] = [*figures(pairs), figures([(None, gradient) for gradient in mine])[1]]
        if found:
            numbers[-4:] = [self.loss, again.loss, *figures(list(zip(found[0], right[0])))[:2]]
        known = self.solver.wire.known(numbers, f"the audit of batch {self.batch.number}")
        return audit_of(self.batch.number, known, list(self.norms.forward.values()), has_loss=has_loss)

    # ---- what callers see

    def shown(self, found: Sequence[States]) -> States:
        """Returns the states of the last point in the net's dtypes, all micro-batches together."""
        states = self.together(found)
        return [state.to(leaf.dtype) for state, leaf in zip(states, self.output_form.states)]

    def together(self, by_micro_batch: Sequence[States]) -> States:
        """Concatenates the states of all micro-batches."""
        return (
            list(by_micro_batch[0])
            if len(by_micro_batch) == 1
            else [torch.cat(parts) for parts in zip(*by_micro_batch)]
        )

    def joined(self, states: Sequence[Tensor]) -> Any:
        """Returns the net's result from its states."""
        by_micro_batch = [self._constants_at_end(micro) for micro in range(self.batch.micro_batches)]
        return self.output_form.joined(states, self.together(by_micro_batch))

    def output(self, found: Sequence[States]) -> Any:
        """Returns the net's result from the states of the last point."""
        return self.joined(self.shown(found))

    def cut(self, cotangents: Sequence[Tensor | None]) -> list[States]:
        """Returns the gradient of the net's result for each micro-batch; zeros where nothing depends on the result."""
        count = self.batch.micro_batches
        by_micro_batch: list[States] = [[] for _ in range(count)]
        for cotangent, leaf in zip(cotangents, self.output_form.states):
            if cotangent is None:
                shape = torch.Size((leaf.shape[0] * count, *leaf.shape[1:])) if count > 1 else leaf.shape
                cotangent = torch.zeros(shape, dtype=leaf.dtype, device=self.batch.device)
            for micro_batch_part, part in zip(by_micro_batch, cotangent.chunk(count) if count > 1 else [cotangent]):
                micro_batch_part.append(ordered(part, leaf))
        return by_micro_batch

    def _constants_at_end(self, micro_batch: int) -> States:
        plans = self.solver.plans
        return self.batch.constants.get((plans.segment(len(plans.net.layers)), micro_batch), [])

    def _inputs(self, *, is_exact: bool) -> list[States]:
        inputs = []
        leaves = self.batch.forms[0].states
        for micro_batch, (states, constants) in enumerate(self._by_micro_batch):
            self.batch.constants[0, micro_batch] = constants
            inputs.append([s.detach().to(leaf.work_dtype(is_exact=is_exact)) for s, leaf in zip(states, leaves)])
        return inputs


def split(x: Any, micro_batches: int) -> tuple[Form, list[tuple[States, States]]]:
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


def _end_of(norms: Sequence[float], tolerance: float) -> str | None:
    """Returns why a solve with these norms ends, or None if it continues."""
    if not norms:
        return None
    if norms[-1] <= tolerance * norms[0]:
        return "converged"
    # An iteration that does not help may be followed by one that does, so two must stall.
    has_stalled = len(norms) > 2 and all(not norms[-i] < _STALLED * norms[-i - 1] for i in (1, 2))
    return "stalled" if has_stalled or not math.isfinite(norms[-1]) else None


def _check_parts(form: SideForm, per_sample: Collection[str], micro_batches: int) -> None:
    for index, leaf, _ in form.flat():
        name = form.names[index]
        if micro_batches > 1 and name in per_sample and (not leaf.shape or leaf.shape[0] % micro_batches):
            raise ValueError(
                f"the side input `{name}` has a leaf {leaf}, whose first dimension is not divisible by {micro_batches} micro-batches"
            )


def _device(layers: Layers) -> torch.device:
    for module in layers.modules.values():
        for parameter in module.parameters():
            return parameter.device
    return torch.device("cpu")


def _autocast() -> tuple[str, ...]:
    """Returns the autocast settings, which change the dtypes that layers return."""
    return tuple(
        f"autocast of {kind} {torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else 'off'}"
        for kind in ("cpu", "cuda")
    )


def _difference(of_all: Sequence[str]) -> str:
    """Describes how the settings of another rank differ from the first rank's."""
    other = next(rank for rank, settings in enumerate(of_all) if settings != of_all[0])
    theirs, ours = of_all[other].split("; "), of_all[0].split("; ")
    pairs = [f"`{a}` and `{b}`" for a, b in zip(ours, theirs) if a != b] or ["their number"]
    return f"ranks 0 and {other} of the layers differ in {', '.join(pairs)}; all ranks must build the same net and issue the same calls"
