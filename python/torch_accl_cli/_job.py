"""Facts that `accl info` shows under a launcher: the ranks of the job, their links, and the algorithms that they would choose.

This module owns the rendezvous of the ranks and the tables. Facts about links come from the backend's snapshot. Read `find`
first.
"""

from __future__ import annotations

import collections
import os
import socket
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore
from torch_accl import Backend

from .bench.cases import Prepared, cases
from .bench.rank_info import RankInfo, leave, meet
from .run.layout import numbers, ranges, topology

__all__ = ["find", "show"]

TIMEOUT_S = 60
COLLECTIVES = ["all_reduce", "reduce_scatter", "all_gather", "broadcast", "all_to_all"]
# Label of the number of worker threads in the backend's description.
_WORKERS = "threads for parts of large calls"
_CORES_A_LINE = 32
SIZES = [4, 4 << 10, 64 << 10, 1 << 20, 16 << 20]


def find(rank_info: RankInfo, connect_all: bool) -> dict[str, Any]:
    """Returns the facts of all ranks on rank 0; other ranks get them without `algorithms`. Collective over all ranks.

    Raises:
        WrongInput: no setting or launcher gives the address of rank 0.
        RuntimeError, ValueError: as `init_process_group`.
    """
    store = meet(rank_info, TIMEOUT_S)
    dist.init_process_group(
        "accl",
        store=PrefixStore("info", store),
        rank=rank_info.rank,
        world_size=rank_info.world,
        timeout=timedelta(seconds=TIMEOUT_S),
    )
    group = dist.group.WORLD
    assert group is not None, "the default process group was created just now"
    backend = group._get_backend(torch.device("cpu"))
    assert isinstance(backend, Backend), "torch has wrapped the backend in another one"
    if connect_all:
        backend.eager_connect_single_device(torch.device("cpu"))
    # Every rank waits here until all are connected, and in the following gather until all have taken their facts.
    dist.barrier()
    ranks: list[Any] = [None] * rank_info.world
    dist.all_gather_object(ranks, _of_this_rank(rank_info, backend))
    choices = _choices(backend, rank_info) if rank_info.rank == 0 else {}
    dist.destroy_process_group()
    leave(store, rank_info.rank, rank_info.world)
    return {"launcher": rank_info.launcher, "world": rank_info.world, "ranks": ranks, "algorithms": choices}


def show(job: dict[str, Any]) -> str:
    """Returns the facts as tables."""
    ranks = [
        [
            str(one["rank"]),
            one["host"],
            str(one["pid"]),
            str(one["cores"]),
            str(one["workers"]),
            _summary(one["links"]),
            f"{one['shared_memory_kib']} KiB",
        ]
        for one in job["ranks"]
    ]
    sizes = [_size(size) for size in SIZES]
    choices = [[name, *chosen.values()] for name, chosen in job["algorithms"].items()]
    return "\n".join(
        [
            f"{job['world']} ranks, started by {job['launcher']}",
            "",
            *_table(["rank", "host", "pid", "cores", "workers", "links", "shared memory"], ranks),
            "",
            *_drawing(job["ranks"]),
            "",
            *_table(["algorithm of", *sizes], choices),
        ]
    )


def _of_this_rank(rank_info: RankInfo, backend: Backend) -> dict[str, Any]:
    others = [one for one in backend.snapshot()["ranks"] if one["rank"] != rank_info.rank]
    described = dict(line.partition(": ")[::2] for line in backend.describe().splitlines())
    cpus = os.sched_getaffinity(0)
    return {
        "rank": rank_info.rank,
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "cores": len(cpus),
        # Number of worker threads, not counting the caller's thread, and the CPUs that this process may use.
        "workers": int(described.get(_WORKERS, "0")),
        "cpus": ranges(cpus),
        "host_cores": [{"node": core.node, "cpus": ranges(core.threads)} for core in topology(_online())],
        "links": [{"rank": one["rank"], "link": one["link"]} for one in others],
        "shared_memory_kib": _shared_kib(),
    }


def _online() -> list[int]:
    return numbers(Path("/sys/devices/system/cpu/online").read_text())


def _drawing(ranks: list[dict[str, Any]]) -> list[str]:
    """Returns one line per host and NUMA node, in which each core shows the rank that may use it."""
    lines = ["cores by NUMA node, each with the rank that may use it (* for several, . for none)"]
    for host in dict.fromkeys(one["host"] for one in ranks):
        of_host = [(one["rank"], set(numbers(one["cpus"]))) for one in ranks if one["host"] == host]
        cores = next(one["host_cores"] for one in ranks if one["host"] == host)
        width = max(len(str(rank)) for rank, _ in of_host)
        for node in dict.fromkeys(core["node"] for core in cores):
            marks = [_mark(set(numbers(core["cpus"])), of_host).rjust(width) for core in cores if core["node"] == node]
            head = f"{host}  node {node}"
            for first in range(0, len(marks), _CORES_A_LINE):
                lines.append(f"{head}  {' '.join(marks[first : first + _CORES_A_LINE])}")
                head = " " * len(head)
    return lines


def _mark(cpus: set[int], ranks: list[tuple[int, set[int]]]) -> str:
    users = [rank for rank, own in ranks if own & cpus]
    return "." if not users else str(users[0]) if len(users) == 1 else "*"


def _choices(backend: Backend, rank_info: RankInfo) -> dict[str, dict[str, str]]:
    """Returns the algorithm of a float32 call, by collective and size in bytes."""
    found: dict[str, dict[str, str]] = {}
    for case in cases(COLLECTIVES, SIZES, ["float32"], ["sum"], rank_info.world):
        name = backend.algorithm_of(**Prepared(case, rank_info.rank, rank_info.world).in_engine())
        found.setdefault(case.collective.name, {})[str(case.size_bytes)] = name
    return found


def _shared_kib() -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssShmem:"):
            return int(line.split()[1])
    return 0


def _summary(links: list[dict[str, Any]]) -> str:
    """Returns the number of links of each kind, such as `none yet 1, shm 3, tcp 4`."""
    kinds = collections.Counter(link["link"].split()[0].rstrip(",") if link["link"] else "none yet" for link in links)
    return ", ".join(f"{kind} {count}" for kind, count in sorted(kinds.items()))


def _size(size: int) -> str:
    for unit, name in ((1 << 20, "MiB"), (1 << 10, "KiB")):
        if size >= unit:
            return f"{size // unit} {name}"
    return f"{size} B"


def _table(head: list[str], rows: list[list[str]]) -> list[str]:
    widths = [max(len(row[column]) for row in [head, *rows]) for column in range(len(head))]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip() for row in [head, *rows]]
