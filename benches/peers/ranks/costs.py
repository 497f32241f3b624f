"""One of two ranks that measure costs of a backend outside of its calls.

Started as `costs.py WHAT BACKEND RANK PORT`; prints one JSON object. Each start is a fresh process: in a second start
everything would be loaded.
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
# A product takes some milliseconds; a call is short compared with it.
SIDE = 384
PRODUCTS = 60
ROUNDS = 7
CALL_BYTES = 64 << 10


def main() -> None:
    """Measures one thing."""
    what, backend, rank, port = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
    print(json.dumps(import_costs() if what == "import" else group_costs(backend, rank, port)))


def import_costs() -> dict[str, float]:
    """Returns the milliseconds of `import torch`, and of `import torch_accl` after it."""
    begin = time.perf_counter()
    import torch  # noqa: F401

    loaded = time.perf_counter()
    import torch_accl  # noqa: F401

    return {"import_torch_ms": ms(loaded - begin), "import_ms": ms(time.perf_counter() - loaded)}


def group_costs(backend: str, rank: int, port: int) -> dict[str, float]:
    """Returns the costs of the default group, of a sub-group, of idling, and for a matrix product between calls."""
    import torch
    import torch.distributed as dist

    store = dist.TCPStore("127.0.0.1", port, RANKS, rank == 0, timedelta(seconds=60))
    # The timed part must not wait for the other rank to load torch.
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
    # No more threads than cores: otherwise products slow each other down whenever ranks start them together.
    torch.set_num_threads(max(len(os.sched_getaffinity(0)) // RANKS, 1))
    found["product"] = product_slowdown(torch, dist)
    dist.destroy_process_group()
    return found


def sub_group_ms(dist) -> float:
    """Returns the milliseconds to create a group of all ranks and to destroy it."""
    times = []
    for _ in range(GROUPS):
        begin = time.perf_counter()
        dist.destroy_process_group(dist.new_group(list(range(RANKS))))
        times.append(time.perf_counter() - begin)
    return ms(median(times))


def idle_us() -> float:
    """Returns the processor time of all threads but this one while no call is made, in microseconds."""
    before = others_ns()
    time.sleep(IDLE_S)
    return (others_ns() - before) / 1000


def others_ns() -> int:
    """Returns the time that the other threads of this process have run, in nanoseconds."""
    mine = os.getpid()
    total = 0
    for task in Path("/proc/self/task").iterdir():
        if int(task.name) != mine:
            total += int((task / "schedstat").read_text().split()[0])
    return total


def product_slowdown(torch, dist) -> float:
    """Returns the time of a matrix product between calls over its time without calls, measured alternately."""
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
    return median(with_calls for with_calls, _ in rounds) / median(alone for _, alone in rounds)


def ms(seconds: float) -> float:
    """Converts seconds to milliseconds."""
    return seconds * 1000


if __name__ == "__main__":
    main()
