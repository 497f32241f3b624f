"""Cases through torch: two processes call `torch.distributed` with each commit's wheel.

Each commit's own rank program (`benches/peers/ranks/torch_rank.py`) defines the call. The ranks of both commits are
started once, and the ranks that are not timed are stopped. Owns how a case names its call.
"""

from __future__ import annotations

import signal
import statistics
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path

from ..peers import jobs, measure
from ..peers.build import Workshop, compile_board
from ..peers.libraries import Level, Library
from .pairs import Timer
from .trees import BUILDS, installed

# Calls that are timed together, as a time.
TURN = measure.Effort(turn_s=0.02, turns=1)


@contextmanager
def timers(trees: list[Path], case: str) -> Iterator[list[Timer]]:
    """Yields functions that time a case, such as `torch/all_reduce/shm/2/4`: collective, transport, ranks, bytes."""
    _, collective, transport, ranks, size = case.split("/")
    shop = Workshop(BUILDS / "board", print, online=False)
    compile_board(shop)
    cell = measure.Cell(collective, "float32", int(size))
    with ExitStack() as ends:
        timed: list[Timer] = []
        for name, tree in zip(("here", "there"), trees, strict=True):
            library = Library(
                name,
                name,
                Level.TORCH,
                ("{python}", str(tree / "benches" / "peers" / "ranks" / "torch_rank.py")),
                ("accl", "{libraries}"),
                environment={
                    "OMP_NUM_THREADS": "1",
                    "PYTHONPATH": str(installed(tree)),
                    "ACCL_TRANSPORTS": transport,
                    "ACCL_CALIBRATION": "off",
                },
            )
            job = jobs.Job(library, int(ranks), True, shop.names)
            ends.callback(job.close)
            try:
                job.gather(time.monotonic() + jobs.START_S)
                job.signal(signal.SIGSTOP)
                shape = measure.prepare(job, cell, TURN)
            except jobs.Lost as why:
                raise SystemExit(f"{tree} has not timed {case}: {why} ({job.last_words()})") from None
            timed.append(partial(nanoseconds, job, cell, shape))
        yield timed


def nanoseconds(job: jobs.Job, cell: measure.Cell, shape: measure.Shape, seconds: float) -> float:
    """Returns the median time of one call in nanoseconds, measured for `seconds`."""
    until = time.monotonic() + seconds
    found: list[float] = []
    while not found or time.monotonic() < until:
        found.append(measure.run(job, cell, shape))
    return statistics.median(found)
