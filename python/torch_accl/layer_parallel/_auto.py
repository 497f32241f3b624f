"""Which mode is fastest for a kind of batch.

Owns the measurement that the simulator of plans goes by, and the choice. Layers are timed while all ranks compute, since alone they are faster.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ._net import Beside, Evaluation, Record, States
from ._plans import Program
from ._solve import Solve
from ._tree import Form
from ._wire import Wire

__all__ = ["Candidate", "Choice", "Measured", "chosen", "measured"]


# So long every rank computes for its times, in seconds, and each layer at least so often.
_SPAN = 0.2
_LEAST_TURNS = 3
_TURNS_OF_MESSAGES = 7
# An inexact mode is taken if it is faster by more than this.
_WORTH = 1.03

# Plain, recorded, vector-Jacobian product of the input, and of everything, in picoseconds.
Times = tuple[int, int, int, int]


@dataclass(frozen=True)
class Choice:
    """The mode that was chosen for a kind of batch, and how many seconds each one was predicted to take."""

    mode: str
    seconds: dict[str, float]


@dataclass(frozen=True)
class Candidate:
    """A mode, and the plans that a batch in it goes by, one after the other."""

    mode: str
    programs: tuple[Program, ...]
    micro_batches: int = 1


@dataclass(frozen=True)
class Measured:
    """What the simulator wants to know of a net, the same on all ranks: times of all layers with a whole batch and with a micro-batch, bytes of states, and rates."""

    whole: list[Times]
    part: list[Times]
    state: list[int]
    # Thousandths of bytes and of a layer's time on each coarser mesh of states.
    shares: list[tuple[int, int]]
    # As `LayerPlan.simulate` has them: adding up, a message, its latency, its bytes, a norm.
    rates: tuple[int, int, int, int, int]


def chosen(candidates: Sequence[Candidate], known: Measured) -> Choice:
    """The fastest. The first candidate is taken unless another one is faster by some."""
    seconds = {candidate.mode: _predicted(candidate, known) for candidate in candidates}
    mode = candidates[0].mode
    for other, time_taken in seconds.items():
        if time_taken * _WORTH < seconds[mode]:
            mode = other
    return Choice(mode, seconds)


def _predicted(candidate: Candidate, known: Measured) -> float:
    parts = candidate.micro_batches
    times = known.whole if parts == 1 else known.part
    state = [max(size // parts, 1) for size in known.state]
    total = sum(program.plan.simulate(times, state, known.rates, known.shares)[0] for program in candidate.programs)
    return total / 1e12


def measured(solve: Solve, micro_batches: int) -> Measured | None:
    """Measures on all ranks together, in a solve that does nothing else. Nothing, if a layer of any rank does not take what it is measured with."""
    batch, wire = solve.batch, solve.solver.wire
    evaluation = batch.evaluation
    evaluation.leaves_no_trace = True
    state = [_bytes_of(form) for form in batch.forms]
    layers = len(batch.names)
    rates = _rates(wire, max(state), batch.device)
    # What layers are given beside the state is cut for whole batches.
    is_alone = type(evaluation.beside) is Beside
    meshes = len(batch.meshes.forms)
    # A whole batch on each mesh, and a micro-batch on the finest.
    kinds = [(1, mesh) for mesh in range(meshes)]
    if micro_batches > 1 and is_alone:
        kinds.append((micro_batches, 0))
    found = {kind: [0] * (4 * layers + 1) for kind in kinds}
    for (parts, mesh), numbers in found.items():
        wire.together(torch.zeros(1, dtype=torch.int64, device=wire.device), "measuring layers")
        try:
            for layer, times in _own_times(solve, evaluation, parts, mesh).items():
                numbers[4 * layer : 4 * layer + 4] = times
        except Exception:
            numbers[-1] = 1
    of_all = {
        kind: wire.together(torch.tensor(numbers, dtype=torch.int64, device=wire.device), "measuring layers")
        for kind, numbers in found.items()
    }
    if any(numbers[-1] for numbers in of_all.values()):
        return None
    lists = {
        kind: [(n[4 * layer], n[4 * layer + 1], n[4 * layer + 2], n[4 * layer + 3]) for layer in range(layers)]
        for kind, n in of_all.items()
    }
    whole = lists[1, 0]
    part = lists.get((micro_batches, 0), whole)
    if micro_batches > 1 and not is_alone:
        part = [(a // micro_batches, b // micro_batches, c // micro_batches, d // micro_batches) for a, b, c, d in part]
    shares = []
    for mesh in range(1, meshes):
        steps = [layer for layer in range(layers) if any(lists[1, mesh][layer])]
        on_mesh, on_finest = (sum(sum(times[layer][:3]) for layer in steps) for times in (lists[1, mesh], whole))
        size = sum(_bytes_of(form) for form in batch.meshes.forms[mesh])
        shares.append((1000 * size // max(sum(state), 1), 1000 * on_mesh // max(on_finest, 1)))
    return Measured(whole, part, state, shares, rates)


def _bytes_of(form: Form) -> int:
    return sum(leaf.shape.numel() * leaf.dtype.itemsize for leaf in form.leaves)


def _own_times(solve: Solve, evaluation: Evaluation, parts: int, mesh: int) -> dict[int, Times]:
    """Of this rank's layers; those that look alike are timed once, and plain ones on the finest mesh alone."""
    batch, kinds = solve.batch, evaluation.layers.kinds
    forms = batch.meshes.forms[mesh]
    alike: dict[Any, list[int]] = {}
    for layer, module in evaluation.modules.items():
        if mesh > 0 and kinds[layer] == "plain":
            continue
        shapes = tuple(parameter.shape for parameter in module.parameters())
        key = (
            type(module),
            str(module),
            shapes,
            kinds[layer],
            forms[layer],
            forms[layer + 1],
        )
        alike.setdefault(key, []).append(layer)
    turns: dict[int, list[Times]] = {layers[0]: [] for layers in alike.values()}
    begin = time.perf_counter()
    while turns and (time.perf_counter() - begin < _SPAN or any(len(found) < _LEAST_TURNS for found in turns.values())):
        for layer, found in turns.items():
            found.append(
                _times(
                    evaluation,
                    layer,
                    _part(forms[layer], parts),
                    _part(forms[layer + 1], parts),
                    batch.device,
                )
            )
    typical = {layer: tuple(int(statistics.median(each)) for each in zip(*found)) for layer, found in turns.items()}
    return {layer: typical[layers[0]] for layers in alike.values() for layer in layers}  # type: ignore[misc]


def _times(evaluation: Evaluation, layer: int, before: Form, after: Form, device: torch.device) -> Times:
    states, constants = _some(before, device)
    plain, _ = _timed(lambda: evaluation.for_now(layer, 1, 0, before, states, constants))
    record = Record(states, constants, before, after)
    recorded, graph = _timed(lambda: evaluation.graph_of(layer, 1, 0, record))
    outputs = [output for output in graph.outputs if output.requires_grad]
    given = [torch.ones_like(output) for output in outputs]

    def pulled(wanted: Sequence[Tensor]) -> int:
        if not outputs or not wanted:
            return 0
        return _timed(lambda: torch.autograd.grad(outputs, wanted, given, retain_graph=True, allow_unused=True))[0]

    return plain, recorded, pulled(graph.inputs), pulled(graph.leaves)


def _timed(call: Callable[[], Any]) -> tuple[int, Any]:
    begin = time.perf_counter_ns()
    found = call()
    return (time.perf_counter_ns() - begin) * 1000, found


def _part(form: Form, parts: int) -> Form:
    """The form of a micro-batch's state."""
    if parts == 1:
        return form
    leaves = tuple(replace(leaf, shape=torch.Size((leaf.shape[0] // parts, *leaf.shape[1:]))) for leaf in form.leaves)
    return Form(leaves, form.tree)


def _some(form: Form, device: torch.device) -> tuple[States, States]:
    """States and constants of a form. Zeros may be faster than what comes in earnest."""
    states = [
        torch.randn(leaf.shape, dtype=leaf.dtype, device=device).contiguous(memory_format=leaf.format)
        for leaf in form.states
    ]
    constants = [torch.zeros(leaf.shape, dtype=leaf.dtype, device=device) for leaf in form.constants]
    return states, constants


def _rates(wire: Wire, state: int, device: torch.device) -> tuple[int, int, int, int, int]:
    """Picoseconds, as the slowest rank has found them."""
    a, b = (torch.zeros(max(state // 4, 1), dtype=torch.float32, device=device) for _ in range(2))
    add = min(_timed(lambda: a + b)[0] for _ in range(_TURNS_OF_MESSAGES)) * 1024 // max(state, 1)
    message = latency = wire_per_kib = norm = 0
    if wire.size > 1:
        small = torch.zeros(1, dtype=torch.float32, device=device)
        first = _exchanges(wire, small)
        whole = _exchanges(wire, a)
        message, latency = first[0], first[1]
        wire_per_kib = max(whole[1] - latency, 0) * 1024 // max(state, 1)
        counted = torch.zeros(1, dtype=torch.int64, device=wire.device)
        norm = min(
            _timed(lambda: wire.together(counted.clone(), "measuring messages"))[0] for _ in range(_TURNS_OF_MESSAGES)
        )
    found = torch.tensor([add, message, latency, wire_per_kib, norm], dtype=torch.int64, device=wire.device)
    known = wire.together(found, "measuring messages", is_greatest=True)
    return known[0], known[1], known[2], known[3], known[4]


def _exchanges(wire: Wire, tensor: Tensor) -> tuple[int, int]:
    """Of neighbours in pairs: what beginning to send takes, and half of the way there and back."""
    other = wire.rank ^ 1
    if other >= wire.size:
        return 0, 0
    room = torch.empty_like(tensor)
    begins, ways = [], []
    for _ in range(_TURNS_OF_MESSAGES):
        start = time.perf_counter_ns()
        coming = wire.receive(room, other, "forward")
        if wire.rank < other:
            sent, work = _timed(lambda: wire.send(tensor, other, "forward"))
            coming.wait()
        else:
            coming.wait()
            sent, work = _timed(lambda: wire.send(tensor, other, "forward"))
        work.wait()
        begins.append(sent)
        ways.append((time.perf_counter_ns() - start) * 500)
    return min(begins), min(ways)
