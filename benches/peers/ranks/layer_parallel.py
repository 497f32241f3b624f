"""One of two ranks that run a batch of a net of 64 convolutional blocks by several methods alternately.

Methods are: in one process, multigrid over layers, and pipelines, both accl's and torch's. Started as
`layer_parallel.py FOLDER LIBRARIES ROUNDS RANK PORT`; prints one JSON object, the same on both ranks. It has the time
of each round, the error of each method, and the costs for predictions. FOLDER has the board on which ranks meet,
LIBRARIES has the output of `build.py`.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from statistics import median
from typing import Any

# Pin before torch starts threads, which inherit the affinity: each rank has a core of its own.
RANK, PORT = int(sys.argv[4]), int(sys.argv[5])
RANKS = 2
CORES = sorted(os.sched_getaffinity(0))
OWN = {CORES[RANK % len(CORES)]}
os.sched_setaffinity(0, OWN)

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from ddp import meeting  # noqa: E402
from torch import Tensor, nn  # noqa: E402
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe  # noqa: E402
from torch_accl.layer_parallel import Cycle, LayerParallel, ode  # noqa: E402

LAYERS, CHANNELS, SIDE, BATCH = 64, 8, 28, 32
DT = 1 / LAYERS
FACTORS = (4, 8, 16)
BACKENDS = ("accl", "gloo")
FORWARD, BACKWARD = 2, 1
MICRO_BATCHES = 4
WARM_UP = 1
# Messages of each kind in a round.
MESSAGES = 10
TIMEOUT = timedelta(seconds=60)

Seconds = tuple[float, float]
Ran = tuple[list[Tensor], float | None]


@dataclass
class Method:
    """One method to run a batch.

    `run` returns the output in parts, where there is one, and the end of the forward pass, or None if it cannot be
    separated.
    """

    run: Callable[[], Ran]
    # Only the first rank runs; the other one sleeps meanwhile.
    is_alone: bool = False
    threads: int = 1


def main() -> None:
    """Measures one start."""
    meet = meeting(Path(sys.argv[1]), Path(sys.argv[2]), RANK)
    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", PORT, RANKS, RANK == 0, TIMEOUT)
    dist.init_process_group("gloo", store=store, rank=RANK, world_size=RANKS, timeout=TIMEOUT)
    groups = {backend: dist.new_group(backend=backend, timeout=TIMEOUT) for backend in BACKENDS}
    alone = dist.new_subgroups(group_size=1)[0]
    blocks, x, gradient = [block(number) for number in range(LAYERS)], *images()
    methods = {**in_one_process(blocks, x, gradient, alone), **of_two(blocks, x, gradient, groups)}
    [y], _ = methods["serial"].run()
    right = y, gradients(blocks)
    errors = {name: error(method, blocks, right) for name, method in methods.items()}
    rounds = []
    for turn in range(WARM_UP + int(sys.argv[3])):
        took = a_round(turn, methods, blocks, meet)
        rounds.append((took, costs(blocks, x, gradient, groups["accl"], meet)))
    rounds = rounds[WARM_UP:]
    found = {
        "ms": {name: slowest([took[name] for took, _ in rounds]) for name in methods},
        "errors": errors,
        "costs_us": of_ranks([cost for _, cost in rounds]),
    }
    dist.destroy_process_group()
    print(json.dumps(found))


# ---- the net


def block(number: int) -> nn.Module:
    """Returns a block, whose output times DT is added to the state. Each block has its own weights, the same on all
    ranks."""
    made = nn.Sequential(
        nn.Conv2d(CHANNELS, CHANNELS, 3, padding=1), nn.ReLU(), nn.Conv2d(CHANNELS, CHANNELS, 3, padding=1), nn.ReLU()
    )
    generator = torch.Generator().manual_seed(1000 + number)
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.copy_((2 * torch.rand(parameter.shape, generator=generator) - 1) / (9 * CHANNELS) ** 0.5)
    return made


def images() -> tuple[Tensor, Tensor]:
    """Returns the input, and the gradient of the output."""
    torch.manual_seed(1)
    shape = (BATCH, CHANNELS, SIDE, SIDE)
    return torch.randn(shape), torch.randn(shape) / BATCH


def mean_over_batch(y: Tensor, target: Tensor) -> Tensor:
    """Returns a loss whose gradient is `gradient`, for the target BATCH * gradient, also of micro-batches."""
    return (y * target).sum() / y.shape[0]


# ---- the methods


def in_one_process(blocks: Sequence[nn.Module], x: Tensor, gradient: Tensor, alone: Any) -> dict[str, Method]:
    """Returns the methods that run on the first rank alone."""

    def serial() -> Ran:
        y = x
        for layer in blocks:
            y = y + DT * layer(y)
        middle = time.perf_counter()
        y.backward(gradient)
        return [y.detach()], middle

    net = LayerParallel([ode(layer) for layer in blocks], group=alone)
    methods = {"serial": Method(serial, is_alone=True), "threads": Method(serial, is_alone=True, threads=len(CORES))}
    for factor in FACTORS:
        methods[f"one rank {factor}"] = Method(multigrid(net, factor, x, gradient), is_alone=True)
    return methods


def of_two(blocks: Sequence[nn.Module], x: Tensor, gradient: Tensor, groups: dict[str, Any]) -> dict[str, Method]:
    """Returns the methods of both ranks. All use the same modules, so that no method has better placed weights than
    another."""
    nets = {name: LayerParallel([ode(layer) for layer in blocks], group=group) for name, group in groups.items()}
    methods = {}
    for factor in FACTORS:
        for backend, net in nets.items():
            methods[f"{backend} {factor}"] = Method(multigrid(net, factor, x, gradient))
    methods["wave"] = Method(wave(nets["accl"], x, gradient))
    target = BATCH * gradient
    for schedule in ("gpipe", "1f1b"):
        net = LayerParallel(
            [ode(layer) for layer in blocks],
            group=groups["accl"],
            mode="exact-pipeline",
            micro_batches=MICRO_BATCHES,
            schedule=schedule,
        )
        methods[schedule] = Method(pipeline(net, x, target))
    share = LAYERS // RANKS
    stage = Stage(blocks[RANK * share : (RANK + 1) * share])
    for name, kind in (("torch gpipe", ScheduleGPipe), ("torch 1f1b", Schedule1F1B)):
        placed = PipelineStage(stage, RANK, RANKS, torch.device("cpu"), group=groups["accl"])
        runner = kind(placed, n_microbatches=MICRO_BATCHES, loss_fn=mean_over_batch)
        methods[name] = Method(torch_pipeline(runner, x, target))
    return methods


class Stage(nn.Module):
    """A rank's share of the net, as a stage of torch's pipelines."""

    def __init__(self, blocks: Sequence[nn.Module]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(blocks)

    def forward(self, y: Tensor) -> Tensor:
        for layer in self.blocks:
            y = y + DT * layer(y)
        return y


def multigrid(net: LayerParallel, factor: int, x: Tensor, gradient: Tensor) -> Callable[[], Ran]:
    """Returns a run with two levels and F-relaxation."""
    fwd, bwd = Cycle(factor=factor, iterations=FORWARD), Cycle(factor=factor, iterations=BACKWARD)

    def run() -> Ran:
        net.mode, net.fwd, net.bwd = "inexact", fwd, bwd
        return both_passes(net, x, gradient)

    return run


def wave(net: LayerParallel, x: Tensor, gradient: Tensor) -> Callable[[], Ran]:
    """Returns a run of one rank after the other."""

    def run() -> Ran:
        net.mode = "exact-wave"
        return both_passes(net, x, gradient)

    return run


def both_passes(net: LayerParallel, x: Tensor, gradient: Tensor) -> Ran:
    """Runs both passes; the gradient of the output is given."""
    y = net(x)
    middle = time.perf_counter()
    y.backward(*[gradient] * net.is_last)
    return [y.detach()], middle


def pipeline(net: LayerParallel, x: Tensor, target: Tensor) -> Callable[[], Ran]:
    """Returns a run of accl's pipeline."""

    def run() -> Ran:
        outputs: list[Tensor] = []

        def loss(y: Tensor, target: Tensor) -> Tensor:
            outputs.append(y.detach())
            return mean_over_batch(y, target)

        net.step(x, target, loss)
        return outputs, None

    return run


def torch_pipeline(runner: Any, x: Tensor, target: Tensor) -> Callable[[], Ran]:
    """Returns a run of torch's pipeline."""

    def run() -> Ran:
        if RANK == 0:
            runner.step(x)
            return [], None
        return [runner.step(target=target, losses=[])], None

    return run


# ---- measurements


def a_round(
    turn: int, methods: dict[str, Method], blocks: Sequence[nn.Module], meet: Callable[[], object]
) -> dict[str, Seconds]:
    """Returns, for each method on this rank, the seconds until the end of the forward pass and until the end."""
    names = list(methods)
    # The order changes, so that no method always follows the same one.
    start = turn // 2 % len(names)
    names = (names[start:] + names[:start])[:: -1 if turn % 2 else 1]
    took = {}
    for name in names:
        forget(blocks)
        took[name] = timed(methods[name], meet)
    return took


def timed(method: Method, meet: Callable[[], object]) -> Seconds:
    """Times one run."""
    # Ranks first sleep in a barrier, and then meet by polling.
    dist.barrier()
    if method.is_alone and RANK:
        return 0.0, 0.0
    if not method.is_alone:
        meet()
    with threads(method.threads):
        begin = time.perf_counter()
        _, middle = method.run()
        end = time.perf_counter()
    return (end if middle is None else middle) - begin, end - begin


@contextmanager
def threads(count: int) -> Iterator[None]:
    """Runs arithmetic on `count` threads, on as many cores."""
    if count == 1:
        yield
        return
    os.sched_setaffinity(0, CORES)
    torch.set_num_threads(count)
    yield
    torch.set_num_threads(1)
    os.sched_setaffinity(0, OWN)


def slowest(rounds: list[Seconds]) -> dict[str, list[float]]:
    """Returns milliseconds of the forward pass and of both passes, each on its slower rank."""
    every = torch.tensor(rounds, dtype=torch.float64)
    dist.all_reduce(every, op=dist.ReduceOp.MAX)
    forward, together = (1000 * every).round(decimals=3).T.tolist()
    return {"forward": forward, "sum": together}


def error(method: Method, blocks: Sequence[nn.Module], right: tuple[Tensor, list[Tensor]]) -> dict[str, float]:
    """Returns the relative errors of the output and of all parameters' gradients, in the 2-norm."""
    squares = torch.zeros(2, 2, dtype=torch.float64)
    dist.barrier()
    if not (method.is_alone and RANK):
        forget(blocks)
        with threads(method.threads):
            outputs, _ = method.run()
        for gradient, of in zip(gradients(blocks), right[1]):
            if gradient is not None:
                squares[0] += squared(gradient, of)
        if method.is_alone or RANK == RANKS - 1:
            squares[1] = squared(torch.cat(outputs), right[0])
    dist.all_reduce(squares)
    return {name: (off / norm) ** 0.5 for name, (off, norm) in zip(("gradient", "output"), squares.tolist())}


def gradients(blocks: Sequence[nn.Module]) -> list[Tensor | None]:
    """Returns the gradients of all parameters; None for parameters of other ranks."""
    return [parameter.grad for layer in blocks for parameter in layer.parameters()]


def squared(found: Tensor, right: Tensor) -> Tensor:
    """Returns the squared norms of the difference and of the reference."""
    return torch.stack([(found - right).double().square().sum(), right.double().square().sum()]).detach()


def forget(blocks: Sequence[nn.Module]) -> None:
    """Deletes all gradients."""
    for layer in blocks:
        layer.zero_grad(set_to_none=True)


# ---- costs for predictions


def costs(
    blocks: Sequence[nn.Module], x: Tensor, gradient: Tensor, group: Any, meet: Callable[[], object]
) -> dict[str, float]:
    """Returns microseconds of a layer and of adding two states while all ranks compute, the same while one computes,
    and of messages."""
    share = LAYERS // RANKS
    mine = blocks[RANK * share : (RANK + 1) * share]
    dist.barrier()
    meet()
    found = layer_costs(mine, x, gradient)
    dist.barrier()
    alone = dict.fromkeys(found, 0.0) if RANK else layer_costs(mine, x, gradient)
    dist.barrier()
    return {**found, **{f"alone {name}": us for name, us in alone.items()}, **message_costs(x, group)}


def layer_costs(layers: Sequence[nn.Module], x: Tensor, gradient: Tensor) -> dict[str, float]:
    """Returns the mean times of some layers, each at a state that has just been computed, as in a sweep."""
    spent = {"plain": 0.0, "recorded": 0.0, "input_vjp": 0.0, "full_vjp": 0.0}
    adding, count = 0.0, 0
    kept: list[tuple[Tensor, Tensor, list[Tensor]]] = []

    def forward(layer: nn.Module, y: Tensor) -> Tensor:
        with torch.no_grad():
            return layer(y)

    def recorded(layer: nn.Module, y: Tensor) -> Tensor:
        given = y.detach().requires_grad_()
        out = layer(given)
        kept.append((given, out, list(layer.parameters())))
        return out.detach()

    def input_vjp(layer: tuple[Tensor, Tensor, list[Tensor]], w: Tensor) -> Tensor:
        given, out, _ = layer
        return torch.autograd.grad(out, [given], w, retain_graph=True)[0]

    def full_vjp(layer: tuple[Tensor, Tensor, list[Tensor]], w: Tensor) -> Tensor:
        given, out, parameters = layer
        return torch.autograd.grad(out, [given, *parameters], w, retain_graph=True)[0]

    for name, call, state in (
        ("plain", forward, x),
        ("recorded", recorded, x),
        ("input_vjp", input_vjp, gradient),
        ("full_vjp", full_vjp, gradient),
    ):
        for layer in kept[::-1] if name.endswith("vjp") else layers:
            begin = time.perf_counter()
            change = call(layer, state)
            middle = time.perf_counter()
            # The same operation as in a walk over a net where DT is a power of two.
            state = torch.add(state, change, alpha=DT)
            end = time.perf_counter()
            spent[name] += middle - begin
            adding, count = adding + end - middle, count + 1
    return {name: 1e6 * seconds / len(layers) for name, seconds in spent.items()} | {"add": 1e6 * adding / count}


def message_costs(x: Tensor, group: Any) -> dict[str, float]:
    """Returns the time that a rank needs to send a tiny message. The first rank also returns half a round trip of it,
    and of a state."""
    (empty, message), (state, _) = (trips(tensor, group) for tensor in (torch.zeros(1), x.clone()))
    return {"message": message, "empty_trip": 0.0 if RANK else empty, "state_trip": 0.0 if RANK else state}


def trips(tensor: Tensor, group: Any) -> tuple[float, float]:
    """Returns half a round trip, and the time that a rank needs to send."""
    took, sending = [], []
    for _ in range(MESSAGES):
        coming = dist.irecv(torch.empty_like(tensor), group=group, group_src=1 - RANK)
        dist.barrier(group=group)
        begin = time.perf_counter()
        if RANK:
            coming.wait()
        posted = time.perf_counter()
        leaving = dist.isend(tensor, group=group, group_dst=1 - RANK)
        sent = time.perf_counter()
        if not RANK:
            coming.wait()
        took.append((time.perf_counter() - begin) / 2)
        sending.append(sent - posted)
        leaving.wait()
    return 1e6 * median(took), 1e6 * median(sending)


def of_ranks(rounds: list[dict[str, float]]) -> dict[str, list[list[float]]]:
    """Returns, by cost, the rounds of each rank."""
    mine = torch.tensor([list(each.values()) for each in rounds], dtype=torch.float64)
    every = [torch.empty_like(mine) for _ in range(RANKS)]
    dist.all_gather(every, mine)
    return {name: [of[:, at].round(decimals=2).tolist() for of in every] for at, name in enumerate(rounds[0])}


if __name__ == "__main__":
    main()
