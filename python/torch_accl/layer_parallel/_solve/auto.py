"""The choice of the fastest mode for a kind of batch.

Owns the measurements that the simulator of plans uses, and the choice. Layers are timed while all ranks compute,
because they are faster when only one rank computes. Times of a device contain its work, not only the start of it.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from .._net.device_numbers import has_numbers
from .._net.evaluation import Evaluation, LayerInputs, Record, States
from .._net.tree import Form
from .._ranks.wire import Wire
from .batch import Batch
from .plans import Program

__all__ = ["Candidate", "Choice", "Measured", "chosen", "measured"]


# Every rank measures its layers for at least this time, in seconds, and each layer at least this number of times.
_SPAN = 0.2
_LEAST_TURNS = 3
_TURNS_OF_MESSAGES = 7
# A mode replaces an earlier candidate only if it is faster by more than this factor.
_WORTH = 1.03

# Times of a layer in picoseconds: not recorded, recorded, vector-Jacobian product for the input, and for everything.
Times = tuple[int, int, int, int]


@dataclass(frozen=True)
class Choice:
    """The mode that was chosen for a kind of batch, and the predicted seconds of each candidate."""

    mode: str
    seconds: dict[str, float]


@dataclass(frozen=True)
class Candidate:
    """A mode, and the plans that a batch in this mode runs one after the other."""

    mode: str
    programs: tuple[Program, ...]
    micro_batches: int = 1


@dataclass(frozen=True)
class Measured:
    """Measurements of a net that the simulator needs, the same on all ranks.

    whole, part: times of all layers, with a whole batch and with a micro-batch.
    state: bytes of the state of each point.
    """

    whole: list[Times]
    part: list[Times]
    state: list[int]
    # For each coarser mesh of states, its share of the finest mesh's bytes and of its layer times, in thousandths.
    shares: list[tuple[int, int]]
    # Rates as `LayerPlan.simulate` takes them, in picoseconds: an addition per KiB, the start of a message, its
    # latency, its time per KiB, and a norm.
    rates: tuple[int, int, int, int, int]


def chosen(candidates: Sequence[Candidate], known: Measured) -> Choice:
    """Returns the fastest mode. An earlier candidate is kept unless a later one is faster by more than `_WORTH`."""
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


def measured(batch: Batch, micro_batches: int) -> Measured | None:
    """Measures a net on all ranks together, in an open batch that does nothing else.

    Returns None if a layer of any rank raises for the input that it is measured with.
    """
    wire, evaluation = batch.solver.wire, batch.evaluation
    evaluation.leaves_no_trace = True
    state = [_bytes_of(form) for form in batch.forms]
    layers = len(batch.solver.names)
    rates = _rates(wire, max(state), batch.device)
    # Additional inputs are cut for whole batches, so micro-batches can be timed only if layers take the state alone.
    is_alone = type(evaluation.layer_inputs) is LayerInputs
    meshes = len(batch.meshes.forms)
    # A whole batch is timed on each mesh, a micro-batch on the finest mesh only.
    kinds = [(1, mesh) for mesh in range(meshes)]
    if micro_batches > 1 and is_alone:
        kinds.append((micro_batches, 0))
    found = {kind: [0] * (4 * layers + 1) for kind in kinds}
    for (parts, mesh), numbers in found.items():
        wire.together(torch.zeros(1, dtype=torch.int64, device=wire.device), "measuring layers")
        try:
            for layer, times in _own_times(batch, parts, mesh).items():
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


def _own_times(batch: Batch, parts: int, mesh: int) -> dict[int, Times]:
    """Returns the times of this rank's layers. Layers that look alike are timed once.

    Plain layers are timed on the finest mesh only.
    """
    evaluation, kinds = batch.evaluation, batch.solver.layers.kinds
    forms = batch.meshes.forms[mesh]
    alike: dict[Any, list[int]] = {}
    for layer, module in evaluation.modules.items():
        if mesh > 0 and not kinds[layer].is_step:
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
    plain, _ = _timed(device, lambda: evaluation.evaluate_temporary(layer, 1, 0, before, states, constants))
    record = Record(states, constants, before, after)
    recorded, graph = _timed(device, lambda: evaluation.graph_of(layer, 1, 0, record))
    outputs = [output for output in graph.outputs if output.requires_grad]
    given = [torch.ones_like(output) for output in outputs]

    def pulled(wanted: Sequence[Tensor]) -> int:
        if not outputs or not wanted:
            return 0
        return _timed(
            device, lambda: torch.autograd.grad(outputs, wanted, given, retain_graph=True, allow_unused=True)
        )[0]

    return plain, recorded, pulled(graph.inputs), pulled(graph.leaves)


def _timed(device: torch.device, call: Callable[[], Any]) -> tuple[int, Any]:
    """Returns the time of a call with its work on a device, in picoseconds, and the call's result."""
    _finish(device)
    begin = time.perf_counter_ns()
    found = call()
    _finish(device)
    return (time.perf_counter_ns() - begin) * 1000, found


def _finish(device: torch.device) -> None:
    """Waits for the work of a device."""
    if has_numbers(device):
        torch.accelerator.synchronize(device)


def _part(form: Form, parts: int) -> Form:
    """Returns the form of a micro-batch's state."""
    if parts == 1:
        return form
    leaves = tuple(replace(leaf, shape=torch.Size((leaf.shape[0] // parts, *leaf.shape[1:]))) for leaf in form.leaves)
    return Form(leaves, form.tree)


def _some(form: Form, device: torch.device) -> tuple[States, States]:
    """Returns random states and zero constants of a form.

    States are not zero, because zeros may compute faster than real values.
    """
    states = [
        torch.randn(leaf.shape, dtype=leaf.dtype, device=device).contiguous(memory_format=leaf.format)
        for leaf in form.states
    ]
    constants = [torch.zeros(leaf.shape, dtype=leaf.dtype, device=device) for leaf in form.constants]
    return states, constants


def _rates(wire: Wire, state: int, device: torch.device) -> tuple[int, int, int, int, int]:
    """Returns the rates in picoseconds, each the maximum over all ranks. `state` is the size of a state in bytes."""
    a, b = (torch.zeros(max(state // 4, 1), dtype=torch.float32, device=device) for _ in range(2))
    add = min(_timed(device, lambda: a + b)[0] for _ in range(_TURNS_OF_MESSAGES)) * 1024 // max(state, 1)
    message = latency = wire_per_kib = norm = 0
    if wire.size > 1:
        small = torch.zeros(1, dtype=torch.float32, device=device)
        first = _exchanges(wire, small)
        whole = _exchanges(wire, a)
        message, latency = first[0], first[1]
        wire_per_kib = max(whole[1] - latency, 0) * 1024 // max(state, 1)
        counted = torch.zeros(1, dtype=torch.int64, device=wire.device)
        norm = min(
            _timed(wire.device, lambda: wire.together(counted.clone(), "measuring messages"))[0]
            for _ in range(_TURNS_OF_MESSAGES)
        )
    found = torch.tensor([add, message, latency, wire_per_kib, norm], dtype=torch.int64, device=wire.device)
    known = wire.together(found, "measuring messages", is_greatest=True)
    return known[0], known[1], known[2], known[3], known[4]


def _exchanges(wire: Wire, tensor: Tensor) -> tuple[int, int]:
    """Exchanges a tensor between neighbours in pairs.

    Returns the time to start a send, and half of the round-trip time, in picoseconds. A rank without a partner returns
    zeros.
    """
    other = wire.rank ^ 1
    if other >= wire.size:
        return 0, 0
    room = torch.empty_like(tensor)
    begins, ways = [], []

    def send() -> dist.Work:
        start = time.perf_counter_ns()
        work = wire.send(tensor, other, "forward")
        begins.append((time.perf_counter_ns() - start) * 1000)
        return work

    for _ in range(_TURNS_OF_MESSAGES):
        _finish(tensor.device)
        start = time.perf_counter_ns()
        # The lower rank's send is issued before its receive: some backends run the messages of two ranks in that order.
        sent = send() if wire.rank < other else None
        wire.receive(room, other, "forward").wait()
        (send() if sent is None else sent).wait()
        _finish(tensor.device)
        ways.append((time.perf_counter_ns() - start) * 500)
    return min(begins), min(ways)
