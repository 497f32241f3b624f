"""Part `peer`: ranks read each other's memory of the card, with the bits of CPU tensors, and next to staged calls.

The first case is the trial of a group. If it says no, its words are the reason with which all other cases are skipped. The
bits are compared before anything is timed, and a case whose collectives were staged fails. `tests/test_gpu_peers.py` has the
same questions for a stand-in of the driver, and more: errors, settings and lost ranks.
"""

from __future__ import annotations

import itertools
import os
import re
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
import torch_accl

from . import calls
from .bench import Bench
from .calls import Call, check_results, on_host
from .device import Device
from .ranks import RANKS, on_a_card
from .report import Report, Skip, over_ranks

MIB = 1 << 20
PEER = {"gpu_route": "peer"}
# Collectives of every size are by reference.
ALL = PEER | {"eager_bytes": 0}
MESSAGES = [calls.exchange, calls.batch]
COLLECTIVES = [kind for kind in [*calls.REDUCE, *calls.MOVE] if kind not in MESSAGES]


def run(report: Report, kind: str, is_tiny: bool) -> None:
    refusals: list[str] = []

    def ranks(
        body: Callable[..., Any], number: int = RANKS, options: Mapping[str, Any] = ALL, **facts: Any
    ) -> list[Any]:
        if refusals:
            raise Skip(refusals[0])
        # Streams of the stand-in run at random while bits are compared, and early while calls are timed.
        order = "random" if options is ALL else "early"
        return on_a_card(
            lambda device: body(device, **facts), kind, number, has_kernels=True, order=order, options=options
        )

    def trial() -> Mapping[str, Any]:
        found = ranks(tried)
        if refusal := found[0]["refusal"]:
            refusals.append(refusal)
            raise Skip(refusal)
        return dict(found[0])

    # Without an agreement, no other case can run.
    if not report.case("ranks read each other's memory in a trial", trial) and not refusals:
        refusals.append("the trial has failed")
    for world in [2] if is_tiny else [2, 3]:
        for name, body, facts in _cases(is_tiny):
            report.case(f"{name} [world {world}]", lambda: ranks(body, world, **facts)[0])
    report.case("sub-groups have their own trials [world 3]", lambda: ranks(sub_groups, 3)[0])
    for name in TIMED:

        def timed(name: str = name) -> Mapping[str, Any]:
            sizes = [MIB] if is_tiny else [MIB, 64 * MIB]
            found = ranks(times, options=PEER, name=name, sizes=sizes, rounds=3 if is_tiny else 15)
            return _figures(report, name, [over_ranks(of_size) for of_size in zip(*found, strict=True)], sizes)

        report.case(f"{name}, by peer next to staged", timed)

    def nccl() -> Mapping[str, Any]:
        if kind != "cuda" or not dist.is_nccl_available():
            raise Skip("needs a card, and a torch with NCCL")
        found = ranks(next_to_nccl, options=PEER, size=MIB if is_tiny else 64 * MIB, rounds=3 if is_tiny else 15)
        if isinstance(found[0], str):
            raise Skip(found[0])
        medians = over_ranks(found)
        for name in ("all_gather", "all_reduce"):
            ratio = medians[f"{name} nccl"] / medians[name]
            report.figure(f"{name} of 64 MiB: NCCL over sockets, over peer", ratio, "x", 1.0, at_least=True)
        return medians

    report.case("next to NCCL over sockets", nccl)


def _cases(is_tiny: bool) -> list[tuple[str, Callable[..., Any], Mapping[str, Any]]]:
    return [
        ("every collective gives the bits of CPU tensors", every_collective, {"is_tiny": is_tiny}),
        ("results in the place of their contributions", in_place, {}),
        ("collectives in flight together, behind computing", together, {"rounds": 2 if is_tiny else 10}),
        ("messages give the bits of CPU tensors", messages, {}),
    ]


def _figures(report: Report, name: str, medians: list[dict[str, float]], sizes: list[int]) -> Mapping[str, Any]:
    found = {}
    for size, of_size in zip(sizes, medians, strict=True):
        text = f"{name} of {size // MIB} MiB"
        # The targets of decision 74.
        target = 3.0 if size == 64 * MIB and name in ("all_gather", "send") else None
        report.figure(f"{text}: staged over peer", of_size["staged"] / of_size["peer"], "x", target, at_least=True)
        for route, seconds in of_size.items():
            report.figure(f"{text}: {route}", 1e3 * seconds, "ms")
            found[f"{text}: {route}"] = seconds
    return found


def _described(device: Device, group: Any = None) -> str:
    """Returns the backend's line about tensors of accelerators."""
    backend = (group or dist.group.WORLD)._get_backend(torch.device(device.kind))
    text = str(getattr(backend, "wrapped_pg", backend).describe())
    return next((line for line in text.splitlines() if line.startswith("tensors of accelerators")), "no bytes so far")


def _bytes(device: Device, group: Any = None) -> dict[str, int]:
    """Returns the bytes of calls on tensors of the device, by peer and staged."""
    found = re.search(r"(\d+) bytes by peer, (\d+) bytes staged", _described(device, group))
    return {"by peer": int(found[1]), "staged": int(found[2])} if found else {"by peer": 0, "staged": 0}


def _all_by_peer(device: Device, group: Any = None) -> dict[str, int]:
    """Returns the bytes, none of which may be staged."""
    counts = _bytes(device, group)
    assert counts["by peer"] and not counts["staged"], f"some collectives were staged: {_described(device, group)}"
    return counts


def tried(device: Device) -> dict[str, str]:
    """Makes the trial under the route `peer`, which raises the driver's words, and under `auto`, which logs them."""
    tensor = torch.ones(100_000, device=device.kind)
    refusal = ""
    try:
        dist.all_reduce(tensor)
        assert (tensor.cpu() == dist.get_world_size()).all(), "a sum is wrong"
    except NotImplementedError as error:
        refusal = str(error).strip().splitlines()[0]
    auto = dist.new_group(pg_options=torch_accl.Options(gpu_route="auto"))
    tensor = torch.ones(100_000, device=device.kind)
    dist.all_reduce(tensor, group=auto)
    assert (tensor.cpu() == dist.get_world_size()).all(), "a sum of the route auto is wrong"
    way = "staged" if refusal else "peer"
    assert f"peer memory {way}," in _described(device, auto), f"expected {way}: {_described(device, auto)}"
    return {"refusal": refusal, "auto": way}


def every_collective(device: Device, is_tiny: bool) -> dict[str, int]:
    rank, world = dist.get_rank(), dist.get_world_size()
    # Below and above a tile of 1 MiB.
    sizes = [1000, 300_001] if is_tiny else [1, 1000, 70_001, 300_001, 3_000_001]
    dtypes = ["float32", "int64"] if is_tiny else ["float32", "bfloat16", "float16", "float64", "int32", "uint8"]
    seed = 0
    for dtype, count, kind in itertools.product(dtypes, sizes, COLLECTIVES):
        # Large calls need memory of every rank and time: few dtypes show what they show.
        if count > 100_000 and dtype not in ("float32", "bfloat16"):
            continue
        seed += 1
        strided = kind not in calls.DENSE and seed % 3 == 0
        expected = on_host(kind, rank, world, count, dtype, seed, strided)
        device.compute(0.3)
        works, results = kind(Call(rank, world, count, dtype, device.put, seed, strided))
        for work in works:
            work.wait()
        check_results(results, expected, (kind.__name__, dtype, count, strided))
    return _all_by_peer(device)


def in_place(device: Device) -> dict[str, int]:
    rank, world = dist.get_rank(), dist.get_world_size()

    def program(put: Callable[[torch.Tensor], torch.Tensor]) -> list[torch.Tensor]:
        results = []
        for count in (1000, 400_000):
            row = Call(rank, world, count * world, "float32", put).make()
            dist.all_gather_into_tensor(row, row.chunk(world)[rank])
            sums = Call(rank, world, count * world, "float32", put, seed=3).make()
            dist.reduce_scatter_tensor(sums.chunk(world)[rank], sums)
            results += [row, sums.chunk(world)[rank].clone()]
        return results

    check_results(program(device.put), program(torch.Tensor.clone), "results in place")
    return _all_by_peer(device)


def together(device: Device, rounds: int) -> dict[str, int]:
    rank, world = dist.get_rank(), dist.get_world_size()
    kinds = [calls.all_reduce, calls.all_gather_flat, calls.reduce_scatter, calls.all_to_all, calls.broadcast]
    with device.disturbed():
        for round_ in range(rounds):
            issued = []
            for number, kind in enumerate(kinds):
                count = (1000, 500_000)[(round_ + number) % 2]
                expected = on_host(kind, rank, world, count, "float32", round_, False)
                device.compute(5)
                issued.append((kind(Call(rank, world, count, "float32", device.put, round_)), expected, kind.__name__))
            for (works, results), expected, name in issued:
                for work in works:
                    work.wait()
                check_results(results, expected, (name, round_))
    return _all_by_peer(device)


def messages(device: Device) -> dict[str, int]:
    """Checks the bits of messages by any route. Returns their bytes, so that results show the route."""
    rank, world = dist.get_rank(), dist.get_world_size()
    for count, kind in itertools.product((1000, 70_001, 3_000_001), MESSAGES):
        expected = on_host(kind, rank, world, count, "float32", count, False)
        device.compute(0.3)
        works, results = kind(Call(rank, world, count, "float32", device.put, count))
        for work in works:
            work.wait()
        check_results(results, expected, (kind.__name__, count))
    return _bytes(device)


def sub_groups(device: Device) -> dict[str, int]:
    rank, world = dist.get_rank(), dist.get_world_size()
    counts = {}
    for members in ([0, world - 1], list(range(world))):
        group = dist.new_group(members, pg_options=torch_accl.Options(**ALL))
        if rank in members:
            for count in (1000, 400_000):
                host = Call(rank, world, count, "float32", torch.Tensor.clone).make()
                there = device.put(host)
                for tensor in (host, there):
                    dist.all_reduce(tensor, group=group)
                    dist.broadcast(tensor, members[-1], group=group)
                check_results([there], [host], f"a group of the ranks {members}")
            counts[str(members)] = _all_by_peer(device, group)["by peer"]
        dist.barrier()
        if rank in members:
            dist.destroy_process_group(group)
    return counts


def _all_gather(device: Device, size: int, group: Any) -> Callable[[], object]:
    mine, all_ = torch.ones(size // 4, device=device.kind), torch.empty(RANKS * size // 4, device=device.kind)
    return lambda: dist.all_gather_into_tensor(all_, mine, group=group)


def _all_reduce(device: Device, size: int, group: Any) -> Callable[[], object]:
    tensor = torch.zeros(size // 4, device=device.kind)
    return lambda: dist.all_reduce(tensor, group=group)


def _reduce_scatter(device: Device, size: int, group: Any) -> Callable[[], object]:
    all_, mine = torch.ones(size // 4, device=device.kind), torch.empty(size // 4 // RANKS, device=device.kind)
    return lambda: dist.reduce_scatter_tensor(mine, all_, group=group)


def _broadcast(device: Device, size: int, group: Any) -> Callable[[], object]:
    tensor = torch.ones(size // 4, device=device.kind)
    return lambda: dist.broadcast(tensor, 0, group=group)


def _send(device: Device, size: int, group: Any) -> Callable[[], object]:
    tensor = torch.ones(size // 4, device=device.kind)
    return lambda: dist.send(tensor, 1, group=group) if dist.get_rank() == 0 else dist.recv(tensor, 0, group=group)


# all_gather has this many bytes from each rank, the others in all.
TIMED = {
    "all_gather": _all_gather,
    "all_reduce": _all_reduce,
    "reduce_scatter": _reduce_scatter,
    "broadcast": _broadcast,
    "send": _send,
}


def times(device: Device, name: str, sizes: list[int], rounds: int) -> list[Mapping[str, Any]]:
    """Times a call over a group of each route, in turn. Returns the times of each size."""
    staged = dist.new_group(pg_options=torch_accl.Options(gpu_route="staged"))
    found = []
    for size in sizes:
        parts = {}
        for route, group in (("peer", dist.group.WORLD), ("staged", staged)):
            call = TIMED[name](device, size, group)

            def whole(call: Callable[[], object] = call) -> None:
                call()
                device.synchronize()

            whole()
            parts[route] = whole
        found.append(Bench(device, "accl", False).alternating(parts, rounds))
    assert not _bytes(device, staged)["by peer"], f"expected staged calls: {_described(device, staged)}"
    if name != "send":
        _all_by_peer(device)
    return found


def next_to_nccl(device: Device, size: int, rounds: int) -> Mapping[str, Any] | str:
    """Times calls next to NCCL, which may use sockets alone. Returns the reason if NCCL does not take two ranks on a card."""
    sockets = {"NCCL_P2P_DISABLE": "1", "NCCL_SHM_DISABLE": "1", "NCCL_IB_DISABLE": "1", "NCCL_SOCKET_IFNAME": "lo"}
    os.environ.update(sockets)
    nccl = dist.new_group(backend="nccl")
    parts = {}
    for name, make in (("all_gather", _all_gather), ("all_reduce", _all_reduce)):
        for suffix, group in (("", dist.group.WORLD), (" nccl", nccl)):
            call = make(device, size, group)

            def whole(call: Callable[[], object] = call) -> None:
                call()
                device.synchronize()

            try:
                whole()
            except RuntimeError as error:
                if group is nccl and "Duplicate GPU" in str(error):
                    return "NCCL refuses two ranks on one card: Duplicate GPU detected"
                raise
            parts[name + suffix] = whole
    return Bench(device, "accl", False).alternating(parts, rounds)
