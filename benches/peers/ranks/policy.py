"""One of two ranks that reduce a gradient alternately by two methods, as a hook of DistributedDataParallel does.

The pairs are audited and not audited, and the codec that `auto` chooses and raw. Started as `policy.py FOLDER TRANSPORT
RANK PORT`; FOLDER has the store of the ranks, and PORT is ignored. Prints one JSON object, the same on both ranks.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from statistics import median

RANKS = 2
# Sides of a square of float32, with the number of rounds: for 1, 4, 16 and 64 MiB.
SIDES = {512: 200, 1024: 100, 2048: 60, 4096: 30}
WARM_UP = 5


def main() -> None:
    """Measures one start."""
    folder, transport, rank = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) >= RANKS:
        # Pin before torch starts threads, which inherit the affinity.
        os.sched_setaffinity(0, [cores[rank]])
    import torch
    import torch.distributed as dist
    import torch_accl

    torch.set_num_threads(1)
    dist.init_process_group(
        "accl",
        init_method=f"file://{folder / 'store'}",
        rank=rank,
        world_size=RANKS,
        timeout=timedelta(seconds=120),
        pg_options=torch_accl.Options(transports=transport),
    )
    found = {str(4 * side * side): measure(torch, side, rounds) for side, rounds in SIDES.items()}
    dist.destroy_process_group()
    print(json.dumps(found))


def measure(torch, side: int, rounds: int) -> dict[str, object]:
    """Returns both comparisons for a gradient of one size."""
    from torch_accl.compression import Compression

    calls = {
        "audited": Compression("maxmin:4"),
        "unaudited": Compression("maxmin:4", audit=0),
        "auto": Compression("auto"),
        "raw": Compression("raw"),
    }
    reduces, states = {}, {}
    # All reduce the same memory: its location changes times by some per cent.
    buffer = torch.randn(side * side)
    for name, settings in calls.items():
        states[name], reduces[name] = reduction(torch, settings, buffer, side)
    audited = turns(torch, {name: reduces[name] for name in ("audited", "unaudited")}, rounds)
    chosen = turns(torch, {name: reduces[name] for name in ("raw", "auto")}, rounds)
    codec = states["auto"].codec_of("weight") or "raw"
    return {"audit": median(audited), "auto": median(chosen), "codec": codec.partition(",")[0]}


def reduction(torch, settings, buffer: object, side: int) -> tuple[object, Callable[[], object]]:
    """Returns a state, and a function that reduces a gradient stored in the buffer."""
    from bucket import Bucket
    from torch_accl import compression

    model = torch.nn.Linear(side, side, bias=False)
    state = compression.CompressionState(settings, model)
    bucket = Bucket(buffer, buffer.view(side, side), model.weight)
    return state, lambda: compression.ddp_hook(state, bucket).wait()


def turns(torch, reduces: dict[str, Callable[[], object]], rounds: int) -> list[float]:
    """Returns, for each round, the time of the first method over the time of the second, each on its slower rank."""
    import torch.distributed as dist

    times: dict[str, list[float]] = {name: [] for name in reduces}
    for turn in range(WARM_UP + rounds):
        # The order changes, so that neither method always runs first.
        for name in list(reduces)[:: 1 if turn % 2 else -1]:
            dist.barrier()
            begin = time.perf_counter()
            reduces[name]()
            took = time.perf_counter() - begin
            if turn >= WARM_UP:
                times[name].append(took)
    every = torch.tensor(list(times.values()), dtype=torch.float64)
    dist.all_reduce(every, op=dist.ReduceOp.MAX)
    return (every[0] / every[1]).tolist()


if __name__ == "__main__":
    main()
