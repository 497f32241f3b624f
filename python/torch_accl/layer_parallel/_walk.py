"""Walking one rank's list of a plan.

Owns the values on their way through the list, when receives are posted, that a rank on which something goes wrong walks on with zeros, and
what an error of the group is told to be about. What an operation means is in the crate `accl-multigrid`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ._failures import described
from ._net import Evaluation, States, states_of
from ._plans import Lot, Program, Receive
from ._tree import Form, Leaf, ordered
from ._wire import Wire, tried

__all__ = ["Batch", "Walk"]


# So many receives are posted before their place in the list: who sends a state needs not wait for us to come there.
_AHEAD = 3
# Squares of float32 are added up in rows of so many, and the rows in float64.
_ROW = 512

# Gives the gradient of the loss of a micro-batch's output.
Loss = Callable[[int, States], States]


@dataclass
class Batch:
    """What all walks of one batch share."""

    number: int
    forms: Sequence[Form]
    names: Sequence[str]
    device: torch.device
    evaluation: Evaluation
    segment: Callable[[int], int]
    micro_batches: int
    constants: dict[Lot, States] = field(default_factory=dict)
    # What went wrong first on this rank.
    cause: str | None = None
    error: BaseException | None = None

    def fail(self, where: str, error: BaseException) -> None:
        """Remembers the first thing that goes wrong."""
        if self.cause is None:
            self.cause, self.error = f"{where}: {described(error)}", error


class Walk:
    """One rank's way through a program."""

    def __init__(self, program: Program, batch: Batch, wire: Wire, loss: Loss | None = None) -> None:
        self.program = program
        self.batch = batch
        self.wire = wire
        self.norms: dict[int, float] = {}
        self._loss_of = loss
        self._values: dict[int, States] = {}
        self._coming: dict[int, _Coming] = {}
        self._leaving: list[tuple[list[dist.Work], States]] = []
        self._posted = 0
        self._received = 0
        # What part of the solve it is in: name, level, iteration.
        self._part: tuple[str, int, int] = ("start", 0, 0)
        self._squares: Tensor | None = None
        self._reductions: dict[int, tuple[Tensor, dist.Work | None]] = {}

    def run(self, inputs: Sequence[States]) -> list[States]:
        """All of it; the inputs of this rank, and its outputs, are in the order that the plan has them."""
        self._values.update(zip(self.program.inputs, inputs))
        self._post_ahead()
        todo = {name: getattr(self, f"_{name}") for name in {op[0] for op in self.program.ops}}
        for position, op in enumerate(self.program.ops):
            if op[0] == "send":
                self._send(position, *op[1:])
            else:
                todo[op[0]](*op[1:])
        outputs = [self._read(value) for value in self.program.outputs]
        for works, _ in self._leaving:
            self._wait(works, "sending")
        return outputs

    # ---- what operations are

    def _phase(self, name: str, level: int, iteration: int) -> None:
        self._part = (name, level, iteration)

    def _eval(self, pass_: str, layer: int, span: int, micro_batch: int, src: int, dst: int, is_final: bool) -> None:
        states = self._read(src)
        if self.batch.cause is None:
            try:
                if pass_ == "forward":
                    self._values[dst] = self._forward(layer, span, micro_batch, states, is_final)
                else:
                    evaluation = self.batch.evaluation
                    self._values[dst] = evaluation.pulled_back(layer, micro_batch, states, is_final=is_final)
                return
            except Exception as error:
                self.batch.fail(f"layer {layer} ({self.batch.names[layer]}), {pass_} pass, {self._where()}", error)
        self._values[dst] = self._zeros(dst)

    def _forward(self, layer: int, span: int, micro_batch: int, states: States, is_final: bool) -> States:
        batch, evaluation = self.batch, self.batch.evaluation
        form, after = batch.forms[layer], batch.forms[layer + 1]
        constants = batch.constants.get((batch.segment(layer), micro_batch), [])
        before = [state._version for state in states]
        if is_final:
            returned = evaluation.for_good(layer, micro_batch, form, states, constants)
        else:
            returned = evaluation.for_now(layer, span, micro_batch, form, states, constants)
        if any(state._version != version for state, version in zip(states, before)):
            raise RuntimeError("it changes its input in place; let it work on a copy (of activations: inplace=False)")
        kind = evaluation.layers.kinds[layer]
        found, made = states_of(returned, after, layer, batch.names[layer], may_be_states=kind == "ode")
        if kind == "plain" and after.has_constants:
            self._keep_constants((batch.segment(layer + 1), micro_batch), made)
        if is_final:
            found = evaluation.keep(layer, micro_batch, found)
        # An increment stays as it is: what is added to a state takes its form there.
        return found if kind == "ode" else [self._worked(state, leaf) for state, leaf in zip(found, after.states)]

    def _keep_constants(self, lot: Lot, made: States) -> None:
        known = self.batch.constants.setdefault(lot, made)
        if known is not made and not all(torch.equal(a, b) for a, b in zip(known, made)):
            raise RuntimeError(
                "whole numbers that it returns depend on the state, which changes from iteration to iteration; such a net "
                "needs an exact mode"
            )

    def _advance(self, span: int, src: int, increment: int, dst: int) -> None:
        scale = span * self.batch.evaluation.layers.dt
        moved = []
        for state, change, leaf in zip(self._read(src), self._read(increment), self._form(dst).states):
            if change.dtype == state.dtype:
                # Two roundings, as in `x + dt * f(x)`.
                moved.append(ordered(torch.mul(change, scale).add_(state), leaf))
            else:
                moved.append(ordered((state + change * scale).to(state.dtype), leaf))
        self._values[dst] = moved

    def _stretch(self, span: int, src: int, stepped: int, dst: int) -> None:
        pairs = zip(self._read(src), self._read(stepped))
        self._values[dst] = [torch.sub(b, a).mul_(span).add_(a) for a, b in pairs]

    def _add(self, a: int, b: int, dst: int) -> None:
        self._values[dst] = [x + y for x, y in zip(self._read(a), self._read(b))]

    def _subtract(self, a: int, b: int, dst: int) -> None:
        self._values[dst] = [x - y for x, y in zip(self._read(a), self._read(b))]

    def _square_norm(self, interval: int, a: int, b: int) -> None:
        if self._squares is None:
            self._squares = torch.zeros(self.program.plan.intervals, dtype=torch.float64)
        self._squares[interval] = sum(square_norm(x - y) for x, y in zip(self._read(a), self._read(b)))

    def _post_norm(self, iteration: int) -> None:
        squares, self._squares = self._squares, None
        if squares is None:
            squares = torch.zeros(self.program.plan.intervals, dtype=torch.float64)
        # As whole numbers: each is zero on all ranks but one, and nothing rounds or compresses it.
        bits = squares.view(torch.int64).to(self.wire.device)
        self._reductions[iteration] = (bits, self._tried("adding up a norm", lambda: self.wire.add_up(bits)))

    def _await_norm(self, iteration: int) -> None:
        bits, work = self._reductions.pop(iteration)
        if work is not None:
            self._wait([work], "adding up a norm")
        # In the order of intervals, on however many ranks.
        self.norms[iteration] = sum(bits.cpu().view(torch.float64).tolist()) ** 0.5

    def _loss(self, micro_batch: int, src: int, dst: int) -> None:
        states = self._read(src)
        if self.batch.cause is None and self._loss_of is not None:
            try:
                self._values[dst] = self._loss_of(micro_batch, states)
                return
            except Exception as error:
                self.batch.fail(f"the loss, batch {self.batch.number}, micro-batch {micro_batch}", error)
        self._values[dst] = self._zeros(dst)

    def _send(self, position: int, pass_: str, to: int, value: int) -> None:
        tensors = self._read(value)
        if (lot := self.program.carrying.get(position)) is not None:
            tensors = self._constants(lot, value) + tensors
        what = f"sending the state of point {self.program.points[value]} to rank {to} of the layers"
        works = self._tried(what, lambda: [self.wire.send(tensor, to, pass_) for tensor in tensors])
        # What leaves must stay as it is, whoever else needs it no more.
        self._leaving = [kept for kept in self._leaving if not all(work.is_completed() for work in kept[0])]
        self._leaving.append((works, tensors))

    def _recv(self, pass_: str, source: int, value: int) -> None:
        self._received += 1
        self._post_ahead()

    def _free(self, value: int) -> None:
        if value in self._coming:
            self._read(value)
        self._values.pop(value, None)

    def _forget(self, layer: int, micro_batch: int) -> None:
        self.batch.evaluation.forget(layer, micro_batch)

    # ---- values

    def _read(self, value: int) -> States:
        if value in self._coming:
            coming = self._coming.pop(value)
            receive = coming.receive
            point = self.program.points[value]
            self._wait(coming.works, f"receiving the state of point {point} from rank {receive.source} of the layers")
            if receive.lot is not None:
                self.batch.constants.setdefault(receive.lot, coming.constants)
            self._values[value] = coming.states
        return self._values[value]

    def _form(self, value: int) -> Form:
        return self.batch.forms[self.program.points[value]]

    def _worked(self, state: Tensor, leaf: Leaf) -> Tensor:
        """A state as the solver works on it."""
        return ordered(state.to(leaf.work_dtype(is_exact=self.program.is_exact)), leaf)

    def _zeros(self, value: int) -> States:
        return [tensor.zero_() for tensor in self._empty(self._form(value).states)]

    def _empty(self, leaves: Sequence[Leaf]) -> States:
        is_exact, device = self.program.is_exact, self.batch.device
        return [
            torch.empty(leaf.shape, dtype=leaf.work_dtype(is_exact=is_exact), device=device, memory_format=leaf.format)
            for leaf in leaves
        ]

    def _constants(self, lot: Lot, value: int) -> States:
        leaves = [leaf for leaf in self._form(value).leaves if not leaf.is_state]
        if lot in self.batch.constants:
            return self.batch.constants[lot]
        # The layer that makes them has failed.
        return [tensor.zero_() for tensor in self._empty(leaves)]

    # ---- messages

    def _post_ahead(self) -> None:
        while self._posted < min(self._received + _AHEAD, len(self.program.receives)):
            receive = self.program.receives[self._posted]
            self._posted += 1
            form = self._form(receive.value)
            states = self._empty(form.states)
            constants = (
                self._empty([leaf for leaf in form.leaves if not leaf.is_state]) if receive.lot is not None else []
            )
            what = f"receiving from rank {receive.source} of the layers"
            works = self._tried(
                what,
                lambda: [self.wire.receive(tensor, receive.source, receive.pass_) for tensor in constants + states],  # noqa: B023
            )
            self._coming[receive.value] = _Coming(receive, works, states, constants)

    def _wait(self, works: Sequence[dist.Work], what: str) -> None:
        self._tried(what, lambda: [work.wait() for work in works])

    def _tried(self, what: str, call: Callable[[], Any]) -> Any:
        return tried(f"{what}, {self._where()}", call)

    def _where(self) -> str:
        name, level, iteration = self._part
        return f"{name}, level {level}, iteration {iteration}, batch {self.batch.number}"


@dataclass
class _Coming:
    """A state that is on its way here."""

    receive: Receive
    works: list[dist.Work]
    states: States
    constants: States


def square_norm(tensor: Tensor) -> float:
    """The square of a tensor's 2-norm."""
    if tensor.dtype in (torch.float64, torch.complex128):
        return float(torch.linalg.vector_norm(tensor)) ** 2
    flat = torch.view_as_real(tensor).flatten() if tensor.is_complex() else tensor.flatten()
    whole = flat.numel() // _ROW * _ROW
    rows = torch.linalg.vector_norm(flat[:whole].view(-1, _ROW), dim=1).double().square().sum()
    rest = torch.linalg.vector_norm(flat[whole:], dtype=torch.float64).square()
    return float(rows + rest)
