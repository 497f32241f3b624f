"""The passes of a batch, on all ranks together.

Owns which programs a pass executes, one after the other, and what a second run of a batch is compared with. `walk.py`
executes a program, and `batch.py` has the data.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Protocol

from torch import Tensor

from .._net.evaluation import States, states_of
from .._net.tree import ordered, zeros
from .audit import Audit, audit_of, figures, relative
from .batch import Batch
from .plans import Passes, Program
from .walk import run_program

__all__ = ["compare_losses", "run_forward", "run_rest", "run_step"]


# A residual norm has stalled if it is at least this share of the norm before.
_STALLED = 0.9


class _Inputs(Protocol):
    """A function that returns a pass's first values on this rank, in the dtypes in which the pass works."""

    def __call__(self, *, is_exact: bool) -> list[States]: ...


def run_forward(batch: Batch, passes: Passes) -> list[States]:
    """Returns the states of the last point for each micro-batch, on the last rank."""
    outputs, batch.norms.forward, batch.norms.forward_end = _run(batch, passes, batch.first_states)
    return outputs


def run_backward(batch: Batch, passes: Passes, cotangents: Sequence[States]) -> list[States]:
    """Returns the gradient of the input, on the first rank.

    `cotangents` is the gradient of the last point's states, on the last rank.
    """
    leaves = batch.output_form.states

    def given(*, is_exact: bool) -> list[States]:
        return [
            [c.to(leaf.work_dtype(is_exact=is_exact)) for c, leaf in zip(micro_batch_part, leaves)]
            for micro_batch_part in cotangents
        ]

    outputs, batch.norms.backward, batch.norms.backward_end = _run(batch, passes, given)
    return outputs


def run_pipeline(batch: Batch, program: Program) -> list[States]:
    """Runs both passes of all micro-batches. Returns the gradients of the inputs, on the first rank."""
    return run_program(program, batch, batch.first_states(is_exact=program.is_exact))[0]


def run_rest(batch: Batch, cotangents: Sequence[Tensor | None]) -> list[States]:
    """Runs the backward pass of a forward pass that the caller continued, with what follows it.

    `cotangents` are the gradients of `batch.outputs`. Returns the gradients of the inputs, on the first rank.
    """
    of_result = batch.cotangents_of_result(cotangents)
    gradients = run_backward(batch, batch.plan.adjoint, of_result)
    batch.settle(batch)
    if batch.is_audited:
        # The caller computes the loss, so both runs use the caller's gradient of the output.
        batch.audit = audited(batch, batch.states, lambda *_: of_result, has_loss=False)
    return gradients


def run_step(batch: Batch) -> list[States]:
    """Runs both passes and the loss, with what follows them. Returns the gradients of the inputs, on the first rank."""
    plan = batch.plan
    outputs: list[States] = []
    if plan.pipeline is not None:
        gradients = run_pipeline(batch, plan.pipeline)
    else:
        outputs = run_forward(batch, plan.forward)
        gradients = run_backward(batch, plan.adjoint, batch.tried_gradients_of_loss(outputs))
    batch.settle(batch)
    if batch.is_audited:
        batch.audit = audited(batch, outputs, Batch.tried_gradients_of_loss, has_loss=True)
    return gradients


def audited(
    batch: Batch,
    outputs: Sequence[States],
    cotangents_of: Callable[[Batch, Sequence[States]], Sequence[States]],
    *,
    has_loss: bool,
) -> Audit:
    """Runs the batch again exactly, with the same random numbers and without a trace, and compares.

    All ranks call it after both passes. `cotangents_of` returns the gradients of the second run's outputs, from that run
    and the outputs.
    """
    again = batch.again()
    forward, adjoint = batch.plan.exact
    # The batch may be audited in the user's backward pass, outside of autocast.
    with again.evaluation.as_in_forward():
        exact_outputs = run_forward(again, forward)
        run_backward(again, adjoint, cotangents_of(again, exact_outputs))
    batch.settle(again)
    if again.error is not None:
        batch.fail(f"the audit, {again.cause}", again.error)
    layers = range(len(batch.solver.names))
    numbers = [0.0] * (4 * len(layers) + 4)
    for layer in layers:
        gradients = batch.evaluation.gradients_of(layer)
        pairs = list(zip(gradients, again.evaluation.gradients_of(layer)))
        square = figures([(None, gradient) for gradient in gradients])[1]
        numbers[4 * layer : 4 * layer + 4] = [*figures(pairs), square]
    if outputs:
        numbers[-4:] = [batch.loss, again.loss, *figures(list(zip(outputs[0], exact_outputs[0])))[:2]]
    known = batch.solver.wire.known(numbers, f"the audit of batch {batch.number}")
    return audit_of(batch.number, known, list(batch.norms.forward.values()), has_loss=has_loss)


def compare_losses(batch: Batch, exact: Passes, other: Passes) -> tuple[float, float, float]:
    """Solves the batch in two ways.

    Returns the exact loss, the other loss, and the relative error of the other output in the 2-norm.
    """
    losses: list[float] = []
    outputs: list[list[States]] = []
    for passes in (exact, other):
        # Each run makes its own constants.
        batch.constants.clear()
        batch.coarse_constants.clear()
        outputs.append(run_forward(batch, passes))
        losses.append(0.0)
        for states in outputs[-1]:
            if batch.cause is None:
                try:
                    losses[-1] = float(batch.loss_of(0, batch.last_states([states])))
                except BaseException as error:
                    batch.fail(f"the loss, batch {batch.number}", error)
    numbers = [*losses, 0.0, 0.0]
    if outputs[0]:
        numbers[2:] = figures(list(zip(outputs[1][0], outputs[0][0])))[:2]
    first, second, difference, square = batch.solver.wire.known(numbers, f"the figures of batch {batch.number}")
    return first, second, relative(difference, square)


def _run(batch: Batch, passes: Passes, inputs: _Inputs) -> tuple[list[States], dict[int, float], str | None]:
    """Runs a pass. Returns its outputs, the norms by iteration, and why it ended."""
    given = inputs(is_exact=passes.is_exact)
    if isinstance(passes, Program):
        return *run_program(passes, batch, given, _guesses(batch, passes)), None
    states, norms = run_program(passes.first, batch, given, _guesses(batch, passes.first))
    done, step = passes.iterations
    # All ranks know the same norms to the bit, so they end alike.
    while (end := _end_of(list(norms.values()), passes.tolerance)) is None and done + step <= passes.limit:
        states, more = run_program(passes.more, batch, given, states)
        norms = norms | {iteration + done: norm for iteration, norm in more.items()}
        done += step
    if end == "stalled":
        return run_program(passes.exact, batch, inputs(is_exact=passes.exact.is_exact))[0], norms, end
    return run_program(passes.last, batch, given, states)[0], norms, end or "limit"


def _guesses(batch: Batch, program: Program) -> list[States]:
    """Returns the states with which a program begins in addition to its input."""
    guesses = []
    for value in program.guesses:
        point = program.points[value]
        form = batch.forms[point]
        states, _ = zeros(form, batch.device)
        guess = batch.solver.shared.guess
        if batch.cause is None and guess is not None:
            try:
                given, _ = states_of(guess(point), form, f"the guess of point {point}", may_be_states=True)
                states = [
                    ordered(state.detach().to(batch.device, leaf.dtype), leaf)
                    for state, leaf in zip(given, form.states)
                ]
            except BaseException as error:
                batch.fail(f"the guess of point {point}, batch {batch.number}", error)
        guesses.append([state.to(leaf.work_dtype(is_exact=False)) for state, leaf in zip(states, form.states)])
    return guesses


def _end_of(norms: Sequence[float], tolerance: float) -> str | None:
    """Returns why a solve with these norms ends, or None if it continues."""
    if not norms:
        return None
    if norms[-1] <= tolerance * norms[0]:
        return "converged"
    # An iteration that does not help may be followed by one that does, so two must stall.
    has_stalled = len(norms) > 2 and all(not norms[-i] < _STALLED * norms[-i - 1] for i in (1, 2))
    return "stalled" if has_stalled or not math.isfinite(norms[-1]) else None
