"""One of two ranks under mpirun that compare the transport `mpi` with its MPI library, alternately in the same process.

Started as `mpi_frames.py LIBRARY TURNS carried|stepped BYTES...`, where LIBRARY is compiled from `frames.c`. `carried`
measures the transport and its sums of BYTES, `stepped` collectives that MPI runs as a whole. Rank 0 prints one JSON
object.
"""

from __future__ import annotations

import ctypes
import json
import os
import socket
import sys
import time
from collections.abc import Callable
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
import torch_accl
import torch_accl_mpi
from costs import idle_us

FRAME_BYTES = 64 << 10
HEAD_BYTES = 40
ADDRESS_BYTES = 1024
# Time after which everything in flight has ended, in seconds.
SETTLED_S = 0.5
# Sizes of a turn: round trips, frames in a row and their rounds, and bytes that are summed.
TRIPS, FRAMES, ROWS = 2000, 512, 4
SUMMED_BYTES = 512 << 20
# Collectives that MPI runs as a whole, in the order of `nonblocking_us`.
STEPPED = ("all_reduce", "broadcast", "all_gather")


def main() -> None:
    """Measures one start."""
    measured = ctypes.CDLL(sys.argv[1])
    turns = int(sys.argv[2])
    for function in (measured.frames_us, measured.messages_us, measured.all_reduce_us, measured.nonblocking_us):
        function.restype = ctypes.c_double
    dist.init_process_group("accl")
    rank = dist.get_rank()
    pin(rank)
    torch.set_num_threads(1)
    found = stepped(measured, turns) if sys.argv[3] == "stepped" else carried(measured, rank, turns)
    if rank == 0:
        print(json.dumps(found), flush=True)
    dist.destroy_process_group()


def stepped(measured: ctypes.CDLL, turns: int) -> dict[str, Any]:
    """Measures collectives that MPI runs as a whole for a group, and MPI's own."""
    group = dist.new_group(pg_options=torch_accl.Options(sidestep="all=mpi"))
    return {
        f"{name}_{size}_us": by_turns(turns, *whole(measured, group, which, size))
        for which, name in enumerate(STEPPED)
        for size in map(int, sys.argv[4:])
    }


def carried(measured: ctypes.CDLL, rank: int, turns: int) -> dict[str, Any]:
    """Measures the transport and the MPI messages that it uses."""
    link = connected(measured, rank)

    def frames(size: int, count: int, rounds: int) -> float:
        taken: float = measured.frames_us(*link, rank, ctypes.c_size_t(size), count, rounds)
        if taken < 0:
            raise SystemExit(f"the link has failed: {taken}")
        return taken

    def messages(size: int, count: int, rounds: int) -> float:
        taken: float = measured.messages_us(rank, ctypes.c_size_t(size), count, rounds)
        return taken

    found: dict[str, Any] = {
        "library": torch_accl_mpi.library().splitlines()[0].split(",")[0].replace("\t", " ").strip(),
        "thread_level": torch_accl_mpi.job().thread_level,
        "trip_us": by_turns(turns, lambda: frames(0, 1, TRIPS), lambda: messages(HEAD_BYTES, 1, TRIPS)),
        "row_us": by_turns(
            turns,
            lambda: frames(FRAME_BYTES, FRAMES, ROWS),
            lambda: messages(FRAME_BYTES + HEAD_BYTES, FRAMES, ROWS),
        ),
    }
    found["bytes_per_us"] = [FRAMES * FRAME_BYTES / us for us in found.pop("row_us")]
    for size in map(int, sys.argv[4:]):
        found[f"all_reduce_{size}_us"] = by_turns(turns, *sums(measured, size))
    dist.barrier()
    time.sleep(SETTLED_S)
    found["idle_us"] = idle_us()
    return found


def pin(rank: int) -> None:
    """Pins each rank to its own core, if there are enough."""
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) > rank:
        os.sched_setaffinity(0, {cores[rank]})


def connected(measured: ctypes.CDLL, rank: int) -> tuple[Any, Any]:
    """Returns the transport's table, and a link to the other rank in addition to the group's links."""
    store = dist.distributed_c10d._get_default_store()
    table = ctypes.c_void_p(torch_accl_mpi.transport()[0])
    link, address, length = (
        ctypes.c_void_p(),
        ctypes.create_string_buffer(ADDRESS_BYTES),
        ctypes.c_size_t(ADDRESS_BYTES),
    )
    most = ctypes.c_size_t(FRAME_BYTES)
    theirs = store.get("address 0") if rank == 1 else b""
    opened = (
        theirs,
        ctypes.c_size_t(len(theirs)),
        most,
        ctypes.byref(link),
        address,
        ctypes.byref(length),
    )
    if measured.open_link(table, *opened) != 0:
        raise SystemExit("the transport cannot open a link")
    store.set(f"address {rank}", address.raw[: length.value])
    if rank == 0:
        theirs = store.get("address 1")
        if measured.connect_link(table, link, theirs, ctypes.c_size_t(len(theirs)), most) != 0:
            raise SystemExit("the transport cannot connect a link")
    carrier = met(rank, store)
    carrier.setblocking(False)
    measured.attach_link(table, link, carrier.detach())
    dist.barrier()
    return table, link


def met(rank: int, store: dist.Store) -> socket.socket:
    """Returns a TCP connection between the two ranks."""
    if rank == 0:
        with socket.create_server(("127.0.0.1", 0)) as server:
            store.set("carrier", str(server.getsockname()[1]))
            return server.accept()[0]
    return socket.create_connection(("127.0.0.1", int(store.get("carrier"))))


def by_turns(turns: int, *ways: Callable[[], float]) -> list[float]:
    """Returns the median of each method over all turns, after an untimed one."""
    taken = [[way() for way in ways] for _ in range(turns + 1)][1:]
    return [median(figures) for figures in zip(*taken)]


def sums(measured: ctypes.CDLL, size: int) -> list[Callable[[], float]]:
    """Returns an all_reduce through torch over the transport, and MPI's own."""
    data = torch.zeros(size // 4)
    rounds = rounds_of(size)

    def through_torch() -> float:
        dist.barrier()
        begin = time.perf_counter()
        for _ in range(rounds):
            dist.all_reduce(data)
        return (time.perf_counter() - begin) / rounds * 1e6

    def by_mpi() -> float:
        taken: float = measured.all_reduce_us(
            ctypes.c_void_p(data.data_ptr()),
            ctypes.c_size_t(data.numel()),
            ctypes.c_int(rounds),
        )
        return taken

    return [through_torch, by_mpi]


def whole(measured: ctypes.CDLL, group: dist.ProcessGroup, which: int, size: int) -> list[Callable[[], float]]:
    """Returns a collective that MPI runs as a whole for a group, and MPI's own."""
    data, into = torch.zeros(size // 4), torch.empty(size // 4)
    half = data[: size // 8]
    rounds = rounds_of(size)
    calls: list[Callable[[], object]] = [
        lambda: dist.all_reduce(data, group=group),
        lambda: dist.broadcast(data, 0, group=group),
        lambda: dist.all_gather_into_tensor(into, half, group=group),
    ]

    def through_torch() -> float:
        dist.barrier()
        begin = time.perf_counter()
        for _ in range(rounds):
            calls[which]()
        return (time.perf_counter() - begin) / rounds * 1e6

    def by_mpi() -> float:
        places = (ctypes.c_void_p(data.data_ptr()), ctypes.c_void_p(into.data_ptr()))
        taken: float = measured.nonblocking_us(which, *places, ctypes.c_size_t(data.numel()), ctypes.c_int(rounds))
        return taken

    return [through_torch, by_mpi]


def rounds_of(size: int) -> int:
    """Returns the number of collectives of a size in a turn."""
    return max(SUMMED_BYTES // size // 2, 2) if size > (1 << 20) else 100


if __name__ == "__main__":
    main()
