"""Execution of one rank's part of a program.

Owns the values during execution, the posting of receives, and the context that is added to errors of the group. Also
owns that a rank with an error continues with zeros. The crate `accl-multigrid` defines the operations. Start at
`run_program`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from .._net.evaluation import Record, States, states_of
from .._net.tree import Form, Leaf, ordered, zeros
from .._ranks.wire import tried
from .batch import Batch
from .plans import ConstantsKey, Program, Receive

__all__ = ["moved", "run_program"]


# Number of receives that are posted before their position in the list, so that a sender does not wait for this rank.
_AHEAD = 3
_WIDE = (torch.float32, torch.float64)
# Squares of float32 are summed in rows of this length, and the rows in float64.
_ROW = 512


def run_program(
    program: Program, batch: Batch, inputs: Sequence[States], guesses: Sequence[States] = ()
) -> tuple[list[States], dict[int, float]]:
    """Executes this rank's part of a program, on all ranks together.

    Inputs, guesses and outputs of this rank are in the plan's order. An operation `loss` gives the gradient of the
    batch's loss.

    Returns the outputs, or the states of C-points of a program without a final sweep, and residual norms by iteration.
    """
    walk = _Walk(program, batch)
    return walk.run(inputs, guesses), walk.norms


class _Walk:
    """The values while a program is executed, and its operations."""

    def __init__(self, program: Program, batch: Batch) -> None:
        self.program = program
        self.batch = batch
        self.wire = batch.solver.wire
        self.norms: dict[int, float] = {}
        self._values: dict[int, States] = {}
        self._coming: dict[int, _Coming] = {}
        self._leaving: list[tuple[list[dist.Work], States]] = []
        self._posted = 0
        self._received = 0
        # The current phase of the solve: name, level, iteration.
        self._part: tuple[str, int, int] = ("start", 0, 0)
        self._squares: Tensor | None = None
        self._reductions: dict[int, tuple[Tensor, dist.Work | None]] = {}

    def run(self, inputs: Sequence[States], guesses: Sequence[States] = ()) -> list[States]:
        self._values.update(zip(self.program.inputs, inputs))
        self._values.update(zip(self.program.guesses, guesses))
        self._post_ahead()
        todo = {name: getattr(self, f"_{name}") for name in {op[0] for op in self.program.ops}}
        for position, op in enumerate(self.program.ops):
            if op[0] == "send":
                self._send(position, *op[1:])
            else:
                todo[op[0]](*op[1:])
        outputs = [self._read(value) for value in self.program.outputs + self.program.states]
        for works, _ in self._leaving:
            self._wait(works, "sending")
        return outputs

    # ---- operations

    def _phase(self, name: str, level: int, iteration: int) -> None:
        self._part = (name, level, iteration)

    def _eval(self, pass_: str, layer: int, span: int, micro_batch: int, src: int, dst: int, is_final: bool) -> None:
        states = self._read(src)
        evaluation = self.batch.evaluation

        def found() -> States:
            mesh = self.program.meshes[src]
            if pass_ == "forward":
                return self._forward(layer, span, micro_batch, mesh, states, is_final)
            there = self._on_mesh(layer, micro_batch, mesh) if mesh > 0 else None
            pulled = evaluation.pulled_back(layer, span, micro_batch, states, is_final=is_final, there=there)
            # This pass may work in another dtype than the pass before.
            return [self._worked(state, leaf) for state, leaf in zip(pulled, self._form(dst).states)]

        self._make(dst, lambda: f"layer {layer} ({self.batch.solver.names[layer]}), {pass_} pass", found)

    def _make(self, dst: int, what: Callable[[], str], found: Callable[[], States]) -> None:
        """Makes a value of this rank. After an error the value is zeros, so that no rank waits for it."""
        if self.batch.cause is None:
            try:
                self._values[dst] = found()
                return
            # An interrupt, too, is raised only after other ranks have received what they wait for.
            except BaseException as error:
                self.batch.fail(f"{what()}, {self._where()}", error)
        self._values[dst] = self._zeros(dst)

    def _on_mesh(self, layer: int, micro_batch: int, mesh: int) -> Record:
        """Returns the record of a layer's final evaluation, on a coarser mesh."""
        record = self.batch.evaluation.tape[layer, micro_batch]
        if mesh not in record.meshes:
            finer = record if mesh == 1 else self._on_mesh(layer, micro_batch, mesh - 1)
            meshes = self.batch.meshes
            states, constants = meshes.coarsened(layer, mesh - 1, finer.states, finer.constants)
            record.meshes[mesh] = Record(states, constants, meshes.form(layer, mesh), meshes.form(layer + 1, mesh))
        return record.meshes[mesh]

    def _forward(self, layer: int, span: int, micro_batch: int, mesh: int, states: States, is_final: bool) -> States:
        batch, evaluation = self.batch, self.batch.evaluation
        form, after = batch.meshes.form(layer, mesh), batch.meshes.form(layer + 1, mesh)
        constants = batch.constants_of(layer, micro_batch, mesh)
        # Tensors created in inference mode have no version counter.
        extra = evaluation.layer_inputs.of(layer, micro_batch)
        lent = states if extra is None else states + extra.leaves
        before = [(state, state._version) for state in lent if not state.is_inference()]
        if is_final:
            returned = evaluation.evaluate_final(layer, micro_batch, form, after, states, constants)
        else:
            returned = evaluation.evaluate_temporary(layer, span, micro_batch, form, states, constants)
        if any(state._version != version for state, version in before):
            raise RuntimeError(
                "the layer changes its input in place; let it work on a copy (for activations: inplace=False)"
            )
        kind = batch.solver.layers.kinds[layer]
        who = f"layer {layer} ({batch.solver.names[layer]})"
        found, made = states_of(returned, after, who, may_be_states=kind.returns_increment)
        if any(state.device != self.batch.device for state in found):
            raise ValueError(
                f"the layer returned a tensor on {found[0].device}, but its input is on {self.batch.device}"
            )
        if not kind.is_step:
            self._keep_constants((batch.solver.plans.segment(layer + 1), micro_batch), made)
        elif any(made_ is not given and not torch.equal(made_, given) for made_, given in zip(made, constants)):
            raise ValueError("the layer changes an integer leaf, which only plain layers may do")
        if is_final:
            found = evaluation.keep(layer, micro_batch, found)
            evaluation.layer_inputs.made(layer, micro_batch, found)
        # An increment keeps its form. When it is added to a state, the result takes the state's form.
        if kind.returns_increment:
            return found
        return [self._worked(state, leaf) for state, leaf in zip(found, after.states)]

    def _keep_constants(self, constants_key: ConstantsKey, made: States) -> None:
        if not made:
            return
        known = self.batch.constants.setdefault(constants_key, made)
        if known is not made and not all(torch.equal(a, b) for a, b in zip(known, made)):
            raise RuntimeError(
                "integers that the layer returns depend on the state, which changes between iterations; such a net "
                "needs an exact mode"
            )

    def _advance(self, span: int, src: int, increment: int, dst: int) -> None:
        scale = span * self.batch.solver.layers.dt
        parts = zip(self._read(src), self._read(increment), self._form(dst).states)
        self._make(
            dst, self._sum, lambda: [ordered(moved(state, change, scale), leaf) for state, change, leaf in parts]
        )

    def _stretch(self, span: int, src: int, stepped: int, dst: int) -> None:
        pairs = zip(self._read(src), self._read(stepped))
        self._make(dst, self._sum, lambda: [moved(a, torch.sub(b, a), span) for a, b in pairs])

    def _coarsen(self, src: int, dst: int) -> None:
        self._to_mesh(src, dst, "coarsening")

    def _refine(self, src: int, dst: int) -> None:
        self._to_mesh(src, dst, "refining")

    def _to_mesh(self, src: int, dst: int, what: str) -> None:
        point, mesh, batch = self.program.points[src], self.program.meshes[src], self.batch
        states = self._read(src)

        def found() -> States:
            constants = batch.constants_of(point, 0, mesh) or zeros(self._form(src), batch.device)[1]
            if what == "coarsening":
                return batch.meshes.coarsened(point, mesh, states, constants)[0]
            return batch.meshes.refined(point, mesh, states, constants)

        self._make(dst, lambda: f"{what} the state of point {point}", found)

    def _add(self, a: int, b: int, dst: int) -> None:
        pairs = list(zip(self._read(a), self._read(b)))
        self._make(dst, self._sum, lambda: [x + y for x, y in pairs])

    def _subtract(self, a: int, b: int, dst: int) -> None:
        pairs = list(zip(self._read(a), self._read(b)))
        self._make(dst, self._sum, lambda: [x - y for x, y in pairs])

    def _sum(self) -> str:
        return "adding states"

    def _square_norm(self, interval: int, a: int, b: int) -> None:
        # The squares stay on the states' device until the norm is reduced: each read of a value would stop this thread.
        if self._squares is None:
            self._squares = torch.zeros(self.program.plan.intervals, dtype=torch.float64, device=self.batch.device)
        self._squares[interval] = sum(square_norm(x - y) for x, y in zip(self._read(a), self._read(b)))

    def _post_norm(self, iteration: int) -> None:
        squares, self._squares = self._squares, None
        if squares is None:
            squares = torch.zeros(self.program.plan.intervals, dtype=torch.float64, device="cpu")
        # The squares are sent as integers. Each is zero on all ranks but one, so nothing rounds or compresses them.
        bits = squares.view(torch.int64).to(self.wire.device)
        self._reductions[iteration] = (bits, self._tried("reducing a norm", lambda: self.wire.add_up(bits)))

    def _await_norm(self, iteration: int) -> None:
        bits, work = self._reductions.pop(iteration)
        if work is not None:
            self._wait([work], "reducing a norm")
        # The sum is in the order of intervals, for any number of ranks.
        self.norms[iteration] = sum(bits.cpu().view(torch.float64).tolist()) ** 0.5

    def _loss(self, micro_batch: int, src: int, dst: int) -> None:
        states = self._read(src)
        what = f"the loss of micro-batch {micro_batch}"
        self._make(dst, lambda: what, lambda: self.batch.gradients_of_loss(micro_batch, states))

    def _send(self, position: int, pass_: str, to: int, value: int) -> None:
        form = self._form(value)
        # The receiver's buffers have the memory format of the leaves.
        tensors = [ordered(state, leaf) for state, leaf in zip(self._read(value), form.states)]
        if (constants_key := self.program.carrying.get(position)) is not None:
            tensors = self._constants(constants_key, value) + tensors
        what = f"sending the state of point {self.program.points[value]} to rank {to} of the layers"
        works = self._tried(what, lambda: [self.wire.send(tensor, to, pass_) for tensor in tensors])
        # The tensors are kept until the send completes, even if no other code needs them.
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
            if receive.constants_key is not None:
                self.batch.constants.setdefault(receive.constants_key, coming.constants)
            self._values[value] = coming.states
        return self._values[value]

    def _form(self, value: int) -> Form:
        return self.batch.meshes.form(self.program.points[value], self.program.meshes[value])

    def _constant_leaves(self, value: int) -> list[Leaf]:
        """Returns the constants that are sent. They are on the finest mesh; each rank makes coarser ones from them."""
        return self.batch.forms[self.program.points[value]].constants

    def _worked(self, state: Tensor, leaf: Leaf) -> Tensor:
        """Returns a state in the dtype and memory format in which the solver works."""
        return ordered(state.to(leaf.work_dtype(is_exact=self.program.is_exact)), leaf)

    def _zeros(self, value: int) -> States:
        return [tensor.zero_() for tensor in self._empty(self._form(value).states)]

    def _empty(self, leaves: Sequence[Leaf]) -> States:
        is_exact, device = self.program.is_exact, self.batch.device
        return [
            torch.empty(leaf.shape, dtype=leaf.work_dtype(is_exact=is_exact), device=device, memory_format=leaf.format)
            for leaf in leaves
        ]

    def _constants(self, constants_key: ConstantsKey, value: int) -> States:
        leaves = self._constant_leaves(value)
        if constants_key in self.batch.constants:
            return [ordered(constant, leaf) for constant, leaf in zip(self.batch.constants[constants_key], leaves)]
        # The layer that makes the constants has failed.
        return [tensor.zero_() for tensor in self._empty(leaves)]

    # ---- messages

    def _post_ahead(self) -> None:
        while self._posted < min(self._received + _AHEAD, len(self.program.receives)):
            receive = self.program.receives[self._posted]
            self._posted += 1
            form = self._form(receive.value)
            states = self._empty(form.states)
            constants = self._empty(self._constant_leaves(receive.value)) if receive.constants_key is not None else []
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
    """A state that is being received."""

    receive: Receive
    works: list[dist.Work]
    states: States
    constants: States


def moved(state: Tensor, change: Tensor, scale: float) -> Tensor:
    """Returns `state + scale * change` in the state's dtype, rounded after the product and after the sum."""
    if change.dtype != state.dtype:
        return (state + change * scale).to(state.dtype)
    # A product with a power of two does not round, unless the result is subnormal. Then one pass over memory gives the
    # same.
    if state.dtype in _WIDE and math.frexp(scale)[0] == 0.5:
        return torch.add(state, change, alpha=scale)
    return torch.mul(change, scale).add_(state)


def square_norm(tensor: Tensor) -> Tensor:
    """Returns the square of a tensor's 2-norm in float64, on its device."""
    if tensor.dtype in (torch.float64, torch.complex128):
        norm: Tensor = torch.linalg.vector_norm(tensor)
        return norm.square()
    flat = torch.view_as_real(tensor).flatten() if tensor.is_complex() else tensor.flatten()
    whole = flat.numel() // _ROW * _ROW
    rows: Tensor = torch.linalg.vector_norm(flat[:whole].view(-1, _ROW), dim=1).double().square().sum()
    rest: Tensor = torch.linalg.vector_norm(flat[whole:], dtype=torch.float64).square()
    return rows + rest
