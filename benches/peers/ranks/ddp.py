"""One of two ranks that train a model: the demo's, alternately without DDP, with DDP over accl and over gloo, or a wide
one with DDP over accl.

Started as `ddp.py FOLDER LIBRARIES demo|wide RANK PORT`; prints one JSON object, the same on both ranks. FOLDER has the
board on which ranks meet, LIBRARIES has the output of `build.py`.
"""

from __future__ import annotations

import ctypes
import itertools
import json
import os
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from statistics import median

RANKS = 2
BACKENDS = ("accl", "gloo")
PLAIN = "plain"
# From the demo: images of a batch on each rank, and a bucket size that splits its gradients into several buckets.
IMAGES = 32
BUCKET_MB = 0.0625
ROUNDS = 300
WARM_UP = 30
# The wide model: inputs and outputs of a layer, number of layers, and rounds.
WIDTH, LAYERS, WIDE_ROUNDS = 1024, 6, 20


def main() -> None:
    """Measures one start."""
    folder, libraries, is_wide = Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3] == "wide"
    rank, port = int(sys.argv[4]), int(sys.argv[5])
    cores = sorted(os.sched_getaffinity(0))
    # The wide model is not pinned: its worker threads use all cores.
    if len(cores) >= RANKS and not is_wide:
        # Pin before torch starts threads, which inherit the affinity.
        os.sched_setaffinity(0, [cores[rank]])
    meet = meeting(folder, libraries, rank)
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", port, RANKS, rank == 0, timedelta(seconds=60))
    dist.init_process_group("gloo", store=store, rank=rank, world_size=RANKS)
    if is_wide:
        times = slowest(torch, dist, turns({"accl": wide_step(torch, dist)}, meet, WIDE_ROUNDS // 4, WIDE_ROUNDS))
        found = {"accl_step_ms": 1000 * median(times["accl"])}
    else:
        steps = {name: step_of(models) for name, models in variants(torch, dist).items()}
        found = figures(slowest(torch, dist, turns(steps, meet, WARM_UP, ROUNDS)))
    dist.destroy_process_group()
    print(json.dumps(found))


def meeting(folder: Path, libraries: Path, rank: int) -> Callable[[], object]:
    """Returns a function that returns when both ranks have called it, without using a backend."""
    library = ctypes.CDLL(str(libraries / "board.so"))
    library.open_board.restype = ctypes.c_void_p
    memory = ctypes.c_void_p(library.open_board(str(folder / "board").encode()))
    return lambda: library.meet(memory, rank, RANKS)


def variants(torch, dist) -> dict[str, object]:
    """Returns the model alone, and in DDP over a group of each backend; all have the same weights."""
    sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "examples"))
    from digits_ddp import DigitsNet
    from torch.nn.parallel import DistributedDataParallel

    def model() -> object:
        torch.manual_seed(20)
        return DigitsNet()

    groups = {backend: dist.new_group(backend=backend) for backend in BACKENDS}
    wrapped = {
        backend: DistributedDataParallel(model(), process_group=group, bucket_cap_mb=BUCKET_MB)
        for backend, group in groups.items()
    }
    return {PLAIN: model(), **wrapped}


def wide_step(torch, dist) -> Callable[[], float]:
    """Returns a step: a forward and backward pass of a model with 25 MB of gradients, in DDP with its defaults. It
    returns its seconds."""
    from torch.nn.parallel import DistributedDataParallel

    torch.manual_seed(20)
    layers = [layer for _ in range(LAYERS) for layer in (torch.nn.Linear(WIDTH, WIDTH), torch.nn.ReLU())]
    model = DistributedDataParallel(torch.nn.Sequential(*layers), process_group=dist.new_group(backend="accl"))
    images = torch.rand(IMAGES, WIDTH)

    def step() -> float:
        begin = time.perf_counter()
        model(images).square().mean().backward()
        took = time.perf_counter() - begin
        model.zero_grad(set_to_none=True)
        return took

    return step


def step_of(model) -> Callable[[], float]:
    """Returns a step: a forward and backward pass over the same images. It returns its seconds."""
    import torch

    generator = torch.Generator().manual_seed(20)
    images = torch.rand(IMAGES, 1, 8, 8, generator=generator)
    labels = torch.randint(10, (IMAGES,), generator=generator)

    def step() -> float:
        begin = time.perf_counter()
        torch.nn.functional.cross_entropy(model(images), labels).backward()
        took = time.perf_counter() - begin
        model.zero_grad(set_to_none=True)
        return took

    return step


def turns(
    steps: dict[str, Callable[[], float]], meet: Callable[[], object], warm_up: int, rounds: int
) -> dict[str, list[float]]:
    """Returns the seconds of each step in each round. The order changes, so that no step always follows the same
    one."""
    orders = list(itertools.permutations(steps))
    times: dict[str, list[float]] = {name: [] for name in steps}
    for turn in range(warm_up + rounds):
        for name in orders[turn % len(orders)]:
            meet()
            took = steps[name]()
            if turn >= warm_up:
                times[name].append(took)
    return times


def slowest(torch, dist, times: dict[str, list[float]]) -> dict[str, list[float]]:
    """Returns the times of each step on its slower rank."""
    every = torch.tensor(list(times.values()), dtype=torch.float64)
    dist.all_reduce(every, op=dist.ReduceOp.MAX)
    return dict(zip(times, every.tolist()))


def figures(times: dict[str, list[float]]) -> dict[str, float]:
    """Returns the milliseconds of each step, and its difference to the step of the same round without DDP."""
    found = {f"{name}_step_ms": 1000 * median(steps) for name, steps in times.items()}
    for backend in BACKENDS:
        longer = [step - plain for step, plain in zip(times[backend], times[PLAIN])]
        found[f"{backend}_exposed_ms"] = 1000 * median(longer)
    return found


if __name__ == "__main__":
    main()
