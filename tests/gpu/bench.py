"""Part `bench`: times of calls on tensors of one card that two processes share, next to bare copies and to gloo.

Each figure has its target, and a figure that misses it is no failure: nothing here asserts a time. What is compared takes
turns in the same processes. Results are checked once before they are timed. On the stand-in the figures mean nothing, and
`benches/accelerators.py` refuses to write them to a page. Order of streams is not its subject: see `order.py`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from support import gloo_group
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from .device import Device
from .ranks import RANKS, on_a_card
from .report import Report, over_ranks

MIB = 1 << 20
Times = Mapping[str, Sequence[float]]


def run(report: Report, kind: str, is_tiny: bool) -> None:
    # gloo does not know the stand-in. There accl takes its place, so that the program is the same.
    other = "gloo" if kind == "cuda" else "accl"

    def measured(body: Callable[..., Any], **facts: Any) -> list[Any]:
        return on_a_card(lambda device: body(Bench(device, other, is_tiny), **facts), kind)

    def large(size: int) -> Mapping[str, Any]:
        times = over_ranks(measured(large_calls, size=size, rounds=3 if is_tiny else 15))
        longer = max(times["host"], times["copies"])
        report.figure(
            f"all_reduce of {_text(size)}: times the longer of host call and copies", times["accl"] / longer, "x", 1.25
        )
        for name, seconds in times.items():
            report.figure(f"all_reduce of {_text(size)}: {name}", 1e3 * seconds, "ms")
        return times

    def small() -> Mapping[str, Any]:
        times = over_ranks(measured(small_calls, rounds=20 if is_tiny else 1000))
        report.figure(
            "all_reduce of 4 KiB: times copy out, synchronise, copy in", times["accl"] / times["copies"], "x", 1.5
        )
        for name, seconds in times.items():
            report.figure(f"all_reduce of 4 KiB: {name}", 1e6 * seconds, "us")
        return times

    def next_to_gloo(size: int) -> Mapping[str, Any]:
        times = over_ranks(measured(both_backends, size=size, rounds=3 if is_tiny else 7 if size >= 16 * MIB else 31))
        target = 4.0 if size >= MIB else 3.0
        report.figure(
            f"all_reduce of {_text(size)}: gloo over accl", times[other] / times["accl"], "x", target, at_least=True
        )
        for name in times:
            report.figure(f"all_reduce of {_text(size)}, next to gloo: {name}", 1e6 * times[name], "us")
        return times

    def host_time() -> Mapping[str, Any]:
        times = over_ranks(measured(host_times, size=(MIB if is_tiny else 64 * MIB), rounds=3 if is_tiny else 15))
        report.figure("host time of an asynchronous all_reduce of 64 MiB", 1e6 * times["issue"], "us", 200)
        report.figure("host time of wait() once it is enqueued", 1e6 * times["wait"], "us", 20)
        return times

    def behind_computing() -> Mapping[str, Any]:
        times = over_ranks(measured(processor_times, rounds=2 if is_tiny else 7))
        more = times["with the call"] - times["without"]
        report.figure("processor time of a call behind 100 ms of computing", 1e3 * more, "ms", 2)
        return times

    def data_parallel() -> Mapping[str, Any]:
        times = over_ranks(measured(ddp_steps, rounds=3 if is_tiny else 11))
        report.figure("DDP step, communication not hidden: accl over gloo", times["accl"] / times[other], "x", 0.5)
        for name, seconds in times.items():
            report.figure(f"DDP step: {name}", 1e3 * seconds, "ms")
        return times

    for size in [MIB // 16] if is_tiny else [64 * MIB, 256 * MIB]:
        report.case(f"large calls, {_text(size)}", lambda: large(size))
    report.case("small blocking calls", small)
    for size in [4096] if is_tiny else [4096, 65536, 256 << 10, MIB, 16 * MIB, 64 * MIB]:
        report.case(f"next to gloo, {_text(size)}", lambda: next_to_gloo(size))
    report.case("host time", host_time)
    report.case("behind computing", behind_computing)
    report.case("DistributedDataParallel", data_parallel)


def _text(size: int) -> str:
    return f"{size // MIB} MiB" if size >= MIB else f"{size // 1024} KiB"


class Bench:
    """One rank of a measurement."""

    def __init__(self, device: Device, other: str, is_tiny: bool) -> None:
        self.device, self.other, self.is_tiny = device, other, is_tiny

    def other_group(self) -> Any:
        """Returns a group of the backend to compare with, for host memory and the device."""
        name = self.other
        return gloo_group(f"cpu:{name},{self.device.kind}:{name}")

    def device_net(self, net: nn.Module) -> nn.Module:
        """Returns the net with its parameters on the device."""
        return net.to(self.device.kind)

    def alternating(self, parts: Mapping[str, Callable[[], object]], rounds: int) -> Times:
        """Times each part in turn, after all ranks have met. One round is not counted."""
        times: dict[str, list[float]] = {name: [] for name in parts}
        for number in range(rounds + 1):
            # Each round begins with another part.
            names = list(parts)
            first = number % len(names)
            for name in names[first:] + names[:first]:
                self.device.synchronize()
                dist.barrier()
                begin = time.perf_counter()
                parts[name]()
                taken = time.perf_counter() - begin
                if number:
                    times[name].append(taken)
        return times


def _checked(tensor: torch.Tensor, reduce: Callable[[torch.Tensor], object]) -> None:
    """Checks the sum of one call by `reduce`."""
    rank = dist.get_rank()
    tensor.copy_(torch.arange(tensor.numel(), device="cpu", dtype=torch.float32).remainder_(1000).add_(rank))
    before = tensor.cpu().clone()
    reduce(tensor)
    wanted = RANKS * before + (1 if rank == 0 else -1)
    assert tensor.cpu().equal(wanted), "a sum is wrong"


def _fill(tensor: torch.Tensor, rank: int) -> None:
    """Fills a tensor so that a hundred sums stay finite: one rank has numbers of about 1e-30, and the sums double."""
    generator = torch.Generator(device="cpu").manual_seed(rank)
    tensor.copy_(torch.rand(tensor.numel(), generator=generator, device="cpu").mul_(1e-30))


def large_calls(bench: Bench, size: int, rounds: int) -> Times:
    device, count, rank = bench.device, size // 4, dist.get_rank()
    there, other = torch.empty(count, device=device.kind), torch.empty(count, device=device.kind)
    host, source = device.pinned(count), device.pinned(count)
    for tensor in (there, host):
        _checked(tensor, dist.all_reduce)
    for tensor in (there, other, host, source):
        _fill(tensor, rank)
    out, into = device.stream(), device.stream()

    def accl() -> None:
        dist.all_reduce(there)
        device.synchronize()

    def on_host() -> None:
        dist.all_reduce(host)

    def copies() -> None:
        with out:
            source.copy_(there, non_blocking=True)
        with into:
            other.copy_(host, non_blocking=True)
        out.synchronize()
        into.synchronize()

    return bench.alternating({"accl": accl, "host": on_host, "copies": copies}, rounds)


def small_calls(bench: Bench, rounds: int) -> Times:
    device = bench.device
    there, host = torch.empty(1024, device=device.kind), device.pinned(1024)
    _checked(there, dist.all_reduce)
    calls = 0

    def accl() -> None:
        nonlocal calls
        dist.all_reduce(there)
        calls += 1

    def copies() -> None:
        host.copy_(there, non_blocking=True)
        device.current_stream().synchronize()
        there.copy_(host, non_blocking=True)

    times: dict[str, list[float]] = {"accl": [], "copies": []}
    for _ in range(max(1, rounds // 100)):
        _fill(there, dist.get_rank())
        for name, taken in bench.alternating({"accl": accl, "copies": copies}, min(rounds, 100)).items():
            times[name] += taken
    return times


def both_backends(bench: Bench, size: int, rounds: int) -> Times:
    device, group = bench.device, bench.other_group()
    tensors = [torch.empty(size // 4, device=device.kind) for _ in range(2)]
    _checked(tensors[0], dist.all_reduce)
    _checked(tensors[1], lambda tensor: dist.all_reduce(tensor, group=group))
    for tensor in tensors:
        _fill(tensor, dist.get_rank())

    def accl() -> None:
        dist.all_reduce(tensors[0])
        device.synchronize()

    def other() -> None:
        dist.all_reduce(tensors[1], group=group)
        device.synchronize()

    if bench.other == "accl":
        return {"accl": bench.alternating({"other": other}, rounds)["other"]}
    return bench.alternating({"accl": accl, bench.other: other}, rounds)


def host_times(bench: Bench, size: int, rounds: int) -> Times:
    device = bench.device
    tensor = torch.empty(size // 4, device=device.kind)
    _checked(tensor, dist.all_reduce)
    _fill(tensor, dist.get_rank())
    times: dict[str, list[float]] = {"issue": [], "wait": []}
    for number in range(rounds + 1):
        device.synchronize()
        dist.barrier()
        begin = time.perf_counter()
        work = dist.all_reduce(tensor, async_op=True)
        issued = time.perf_counter() - begin
        future = work.get_future()
        until = time.monotonic() + 60
        # The future completes when the call is enqueued.
        while not future.done() and time.monotonic() < until:
            time.sleep(0.0005)
        begin = time.perf_counter()
        work.wait()
        waited = time.perf_counter() - begin
        if number:
            times["issue"].append(issued)
            times["wait"].append(waited)
    return times


def processor_times(bench: Bench, rounds: int) -> Times:
    device = bench.device
    tensor = torch.empty(MIB, device=device.kind)
    _checked(tensor, dist.all_reduce)
    _fill(tensor, dist.get_rank())
    times: dict[str, list[float]] = {"with the call": [], "without": []}
    for number in range(rounds + 1):
        for name, taken in times.items():
            device.synchronize()
            dist.barrier()
            begin = time.process_time()
            device.compute(100)
            work = dist.all_reduce(tensor, async_op=True) if name == "with the call" else None
            # A synchronisation of the device would spin, so this thread sleeps until all is through. Kernels of both processes
            # share the card's time.
            time.sleep(0.02 if bench.is_tiny else 0.4)
            used = time.process_time() - begin
            if work is not None:
                work.wait()
            if number:
                taken.append(used)
    return times


class Wide(nn.Module):
    """Much to reduce and little to compute."""

    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width, bias=False) for _ in range(layers))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def ddp_steps(bench: Bench, rounds: int) -> Times:
    device = bench.device
    width, layers = (64, 2) if bench.is_tiny else (2048, 8)
    steps: dict[str, Callable[[], object]] = {}
    first: list[torch.Tensor] = []
    groups = {"accl": dist.group.WORLD, bench.other: bench.other_group()}
    for name, group in groups.items():
        torch.manual_seed(1)
        model = DistributedDataParallel(Wide(width, layers).to(device.kind), process_group=group)
        x = torch.randn(1, width, generator=torch.Generator().manual_seed(dist.get_rank())).to(device.kind)

        def step(model: DistributedDataParallel = model, x: torch.Tensor = x) -> None:
            model.zero_grad()
            model(x).square().mean().backward()
            device.synchronize()

        step()
        first.append(model.module.layers[0].weight.grad.cpu())
        steps[name] = step
    assert all(torch.allclose(first[0], other) for other in first), "gradients differ between backends"
    return bench.alternating(steps, rounds)
