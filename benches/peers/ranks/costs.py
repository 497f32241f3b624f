"""One of two ranks that measure what a backend costs beside its calls: started as `costs.py WHAT BACKEND RANK PORT`, and
prints one JSON object. Starts in a fresh process each time: a second start would find everything loaded.
"""

from __future__ import annotations

import json
import os
import sys
import time
from datetime import timedelta
from pathlib import Path
from statistics import median

RANKS = 2
GROUPS = 50
IDLE_S = 2.0
# A product takes some milliseconds, a call is small next to it.
SIDE = 384
PRODUCTS = 60
ROUNDS = 7
CALL_BYTES = 64 << 10


def main() -> None:
    """Measures one thing."""
    what, backend, rank, port = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
    print(json.dumps(import_costs() if what == "import" else group_costs(backend, rank, port)))


def import_costs() -> dict[str, float]:
    """Milliseconds of `import torch`, and of what we add."""
    begin = time.perf_counter()
    import torch  # noqa: F401

    loaded = time.perf_counter()
    import torch_accl  # noqa: F401

    return {"import_torch_ms": ms(loaded - begin), "import_ms": ms(time.perf_counter() - loaded)}


def group_costs(backend: str, rank: int, port: int) -> dict[str, float]:
    """Of the default group, of a sub-group, of doing nothing, and for a product beside."""
    import torch
    import torch.distributed as dist

    store = dist.TCPStore("127.0.0.1", port, RANKS, rank == 0, timedelta(seconds=60))
    # What follows shall not wait for the other rank to load torch.
    store.set(f"here{rank}", "")
    store.wait([f"here{other}" for other in range(RANKS)])
    begin = time.perf_counter()
    dist.init_process_group(backend, store=store, rank=rank, world_size=RANKS)
    made = time.perf_counter()
    tensor = torch.ones(1)
    dist.all_reduce(tensor)
    found = {"init_ms": ms(made - begin), "first_call_ms": ms(time.perf_counter() - made)}
    found["sub_group_ms"] = sub_group_ms(dist)
    found["idle_us"] = idle_us()
    # No more threads than cores: with more, products slow each other down whenever ranks begin them together.
    torch.set_num_threads(max(len(os.sched_getaffinity(0)) // RANKS, 1))
    found["product"] = product_slowdown(torch, dist)
    dist.destroy_process_group()
    return found


def sub_group_ms(dist) -> float:
    """To create a group of all ranks and to destroy it."""
    times = []
    for _ in range(GROUPS):
        begin = time.perf_counter()
        dist.destroy_process_group(dist.new_group(list(range(RANKS))))
        times.append(time.perf_counter() - begin)
    return ms(median(times))


def idle_us() -> float:
    """Processor time of all threads but this one while nothing is called."""
    before = others_ns()
    time.sleep(IDLE_S)
    return (others_ns() - before) / 1000


def others_ns() -> int:
    """Time that the other threads of this process have run, in nanoseconds."""
    mine = os.getpid()
    total = 0
    for task in Path("/proc/self/task").iterdir():
        if int(task.name) != mine:
            total += int((task / "schedstat").read_text().split()[0])
    return total


def product_slowdown(torch, dist) -> float:
    """Time of a matrix product between calls over that without calls, by turns."""
    left, right = torch.rand(SIDE, SIDE), torch.rand(SIDE, SIDE)
    data = torch.zeros(CALL_BYTES // 2, dtype=torch.bfloat16)

    def products(calls: bool) -> float:
        times = []
        dist.barrier()
        for _ in range(PRODUCTS):
            begin = time.perf_counter()
            torch.mm(left, right)
            times.append(time.perf_counter() - begin)
            if calls:
                dist.all_reduce(data)
        return median(times)

    products(True)
    rounds = [(products(True), products(False)) for _ in range(ROUNDS)]
    return median(beside for beside, _ in rounds) / median(alone for _, alone in rounds)


def ms(seconds: float) -> float:
    """Milliseconds."""
    return seconds * 1000


if __name__ == "__main__":
    main()
