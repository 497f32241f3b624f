"""Part `stream`: steps of DDP and FSDP2 whose hooks call `block_current_stream()`, next to hooks that call `wait()`.

The first lets the host go on while calls are in flight, the second holds it until they are enqueued. The figures go to the page;
they have no target. Results of both are compared, and with torch's own reduction.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch._dynamo  # FSDP2 loads it, which takes seconds: load it once here, not in every rank
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from .bench import Bench, Times
from .ranks import on_a_card
from .report import Report, over_ranks

WAYS = ("wait()", "block_current_stream()")


def run(report: Report, kind: str, is_tiny: bool) -> None:
    other = "gloo" if kind == "cuda" else "accl"
    for name, body in (("DDP", ddp_steps), ("FSDP2", fsdp2_steps)):

        def measured(name: str = name, body: Callable[..., Any] = body) -> Any:
            rounds = 3 if is_tiny else 15
            times = over_ranks(on_a_card(lambda device: body(Bench(device, other, is_tiny), rounds=rounds), kind))
            for way, seconds in times.items():
                report.figure(f"{name} step with {way}", 1e3 * seconds, "ms")
            return times

        report.case(f"steps of {name}", measured)


def _follow(work: Any, way: str) -> None:
    """Makes the current stream follow the call, in one of two ways."""
    if way == "wait()":
        work.wait()
    else:
        work.block_current_stream()


def _net(is_tiny: bool) -> nn.Module:
    """A net that computes about as long as it sends."""
    width, layers = (64, 3) if is_tiny else (2048, 8)
    parts: list[nn.Module] = []
    for _ in range(layers):
        parts += [nn.Linear(width, width), nn.ReLU()]
    return nn.Sequential(*parts)


def _inputs(bench: Bench, is_tiny: bool) -> torch.Tensor:
    rows, width = (4, 64) if is_tiny else (1024, 2048)
    generator = torch.Generator().manual_seed(dist.get_rank())
    return bench.device.put(torch.randn(rows, width, generator=generator))


def ddp_steps(bench: Bench, rounds: int) -> Times:
    inputs = _inputs(bench, bench.is_tiny)

    # DDP reads annotations of a hook, and knows none that are text.
    def hook(way, bucket):  # type: ignore[no-untyped-def]
        tensor = bucket.buffer().div_(dist.get_world_size())
        _follow(dist.all_reduce(tensor, async_op=True), way)
        done: torch.futures.Future[torch.Tensor] = torch.futures.Future()
        done.set_result(tensor)
        return done

    def made(way: str | None) -> DistributedDataParallel:
        torch.manual_seed(2)
        net = DistributedDataParallel(bench.device_net(_net(bench.is_tiny)))
        if way is not None:
            net.register_comm_hook(way, hook)
        return net

    return _measured(bench, {way: made(way) for way in (*WAYS, None)}, inputs, rounds)


def fsdp2_steps(bench: Bench, rounds: int) -> Times:
    inputs = _inputs(bench, bench.is_tiny)
    mesh = init_device_mesh(bench.device.kind, (dist.get_world_size(),))

    def made(way: str | None) -> nn.Module:
        torch.manual_seed(2)
        net = bench.device_net(_net(bench.is_tiny))
        for layer in [*net.children(), net]:
            if layer is net or isinstance(layer, nn.Linear):
                fully_shard(layer, mesh=mesh)
                if way is not None and isinstance(layer, nn.Linear):
                    layer.set_custom_all_gather(_Gather(way))
                    layer.set_custom_reduce_scatter(_Scatter(way))
        return net

    return _measured(bench, {way: made(way) for way in (*WAYS, None)}, inputs, rounds)


class _Comm:
    def __init__(self, way: str) -> None:
        self.way = way

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return torch.empty(*size, dtype=dtype, device=device)


class _Gather(_Comm):
    def __call__(self, output_tensor: Any, input_tensor: Any, group: Any, async_op: bool = False) -> Any:
        work = dist.all_gather_into_tensor(output_tensor, input_tensor, group=group, async_op=True)
        if async_op:
            return work
        return _follow(work, self.way)


class _Scatter(_Comm):
    def __call__(self, output_tensor: Any, input_tensor: Any, group: Any, op: Any, async_op: bool = False) -> Any:
        work = dist.reduce_scatter_tensor(output_tensor, input_tensor, op=op, group=group, async_op=True)
        if async_op:
            return work
        return _follow(work, self.way)


def _measured(bench: Bench, nets: dict[str | None, nn.Module], inputs: torch.Tensor, rounds: int) -> Times:
    """Times steps of each net in turn, once their gradients are known to agree."""

    def step(net: nn.Module) -> None:
        net.zero_grad()
        net(inputs).square().mean().backward()
        bench.device.synchronize()

    found = {}
    for way, net in nets.items():
        step(net)
        gradient = next(net.parameters()).grad
        assert gradient is not None
        found[way] = (gradient.to_local() if hasattr(gradient, "to_local") else gradient).cpu().clone()
    for way in WAYS:
        assert torch.allclose(found[way], found[None], rtol=1e-4, atol=1e-6), (
            f"gradients with {way} are not torch's own"
        )
    names = {way or "torch's own calls": functools.partial(step, net) for way, net in nets.items()}
    return bench.alternating(names, rounds)
