"""Part `jobs`: compressed and layer-parallel training on tensors of the device gives the bits of CPU tensors.

A card computes other bits than a processor, so these jobs compute with integers and halves, which no float32 rounds: what
remains is what the package does to the numbers. What the package refuses on the device is a skip, with its words as the reason.
Speed is not its subject.
"""

from __future__ import annotations

import contextlib
import os
import re
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch._dynamo  # optimizers and nets load it, which takes seconds: load it once here, not in every rank
import torch.distributed as dist
from support import bytes_equal, init_group, run_ranks, versions
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch_accl import compression
from torch_accl.compat import cgx
from torch_accl.compat import torchbraid as facade
from torch_accl.compat.cgx_utils import CGXState, cgx_hook
from torch_accl.layer_parallel import Cycle, LayerParallel, ode

from .device import Device
from .report import Report, Skip, check

if versions.MINOR < (2, 13):
    # Only these tests have such a torch (decision 69). FSDP2 has one group of parameters per module there, and lays out no zeros.
    from torch.distributed.fsdp._fully_shard import _fsdp_param_group, _fsdp_state

    _fsdp_state.FSDPState._fsdp_param_groups = property(
        lambda state: [state._fsdp_param_group] if state._fsdp_param_group else []
    )
    _fsdp_param_group.FSDPParamGroup.reduce_scatter_unused_params = False

STEPS = 3
# How the package refuses tensors that are not on the CPU.
REFUSAL = re.compile(r"on the CPU|CPU tensors|No backend type associated|has no backend")

Job = Callable[[str, int, int], list[torch.Tensor]]


def run(report: Report, kind: str, is_tiny: bool) -> None:
    jobs: list[tuple[str, str, Job]] = [
        ("quantized calls", "accl", quantized_calls),
        ("DDP with ddp_hook", "accl", ddp),
        ("DDP with reproducible_hook", "accl", ddp_reproducible),
        ("FSDP2 with apply_fsdp2", "accl", fsdp2),
        ("a script of torch_cgx: group cgx, CGXState, cgx_hook", "cgx", cgx_script),
        ("a script of torch_cgx: register_layer, plain sums", "cgx", cgx_layers),
        ("LayerParallel, exact", "accl", layer_parallel_exact),
        ("LayerParallel, multigrid", "accl", layer_parallel_multigrid),
        ("the facade torchbraid", "accl", torchbraid),
    ]
    for world in [2] if is_tiny else [2, 3]:
        for name, backend, job in jobs:
            report.case(f"{name} [world {world}]", lambda: compared(job, kind, backend, world))


def compared(job: Job, kind: str, backend: str, world: int) -> None:
    """Runs the job on CPU tensors and on tensors of the device, in the same ranks, and compares the results."""

    def body(rank: int) -> str | None:
        Device(kind, seed=rank)
        init_group(backend)
        expected = job("cpu", rank, world)
        try:
            found = job(kind, rank, world)
        except (RuntimeError, ValueError, TypeError) as error:
            # What is refused is refused on all ranks, before anything is sent.
            if REFUSAL.search(str(error)):
                return str(error).splitlines()[0]
            raise
        assert len(found) == len(expected) > 0
        for number, (a, b) in enumerate(zip(found, expected, strict=True)):
            assert bytes_equal(a.cpu(), b), (
                f"result {number} differs by {(a.cpu().double() - b.double()).abs().max():.3g}"
            )
        dist.barrier()
        dist.destroy_process_group()
        return None

    outcomes = run_ranks(body, world, init=False, deadline=60)
    check(outcomes)
    refused = [str(outcome.value) for outcome in outcomes if outcome.value]
    if refused:
        assert len(refused) == world, f"{len(refused)} of {world} ranks refused: {refused[0]}"
        raise Skip(f"refused: {refused[0]}")


# --- jobs ---


def numbers(kind: str, shape: tuple[int, ...], seed: int, largest: int = 3) -> torch.Tensor:
    """Returns small integers as float32, the same on every device."""
    generator = torch.Generator(device="cpu").manual_seed(seed)
    return torch.randint(-largest, largest + 1, shape, generator=generator, device="cpu").float().to(kind)


def exact_net(kind: str) -> nn.Sequential:
    """A net whose gradients are sums of products of small integers."""
    net = nn.Sequential(nn.Linear(48, 96), nn.ReLU(), nn.Linear(96, 48), nn.ReLU(), nn.Linear(48, 5))
    with torch.no_grad():
        for number, parameter in enumerate(net.parameters()):
            parameter.copy_(numbers("cpu", tuple(parameter.shape), number, 2))
    return net.to(kind)


def backward(net: nn.Module, kind: str, rank: int, step: int) -> None:
    net.zero_grad()
    inputs = numbers(kind, (8, 48), 1000 * rank + step)
    (net(inputs) * numbers(kind, (8, 5), 500 + 1000 * rank + step)).sum().backward()


def gradients(net: nn.Module) -> list[torch.Tensor]:
    found = []
    for parameter in net.parameters():
        gradient = parameter.grad
        assert gradient is not None
        found.append((gradient.full_tensor() if isinstance(gradient, DTensor) else gradient).detach().cpu().clone())
    return found


def steps(net: nn.Module, kind: str, rank: int) -> list[torch.Tensor]:
    """Returns the gradients of some steps. Weights stay, so that every gradient is exact before it is encoded."""
    found = []
    for step in range(STEPS):
        backward(net, kind, rank, step)
        found += gradients(net)
    return found


def quantized_calls(kind: str, rank: int, world: int) -> list[torch.Tensor]:
    found = []
    for codec in ("maxmin:4", "maxmin:8,bucket=64", "bf16"):
        tensor = numbers(kind, (50_003,), rank, 1000)
        compression.all_reduce_quantized(tensor, compression=codec, step=0)
        output = torch.empty(30_000, device=kind)
        compression.reduce_scatter_quantized(
            output, numbers(kind, (30_000 * world,), rank + 7, 1000), compression=codec, step=1
        )
        gathered = torch.empty(20_000 * world, device=kind)
        compression.all_gather_quantized(gathered, numbers(kind, (20_000,), rank + 9, 1000), compression=codec, step=2)
        found += [tensor, output, gathered]
    return found


def ddp(kind: str, rank: int, world: int) -> list[torch.Tensor]:
    net = DistributedDataParallel(exact_net(kind), bucket_cap_mb=0.01)
    settings = compression.Compression("maxmin:4,bucket=64", min_elements=64, error_feedback=True)
    net.register_comm_hook(compression.CompressionState(settings, net), compression.ddp_hook)
    return steps(net, kind, rank)


def ddp_reproducible(kind: str, rank: int, world: int) -> list[torch.Tensor]:
    net = DistributedDataParallel(exact_net(kind))
    net.register_comm_hook(compression.Reproducible(), compression.reproducible_hook)
    return steps(net, kind, rank)


def fsdp2(kind: str, rank: int, world: int) -> list[torch.Tensor]:
    net = exact_net(kind)
    mesh = init_device_mesh(kind, (world,))
    for layer in (net[0], net[2]):
        fully_shard(layer, mesh=mesh)
    fully_shard(net, mesh=mesh)
    state = compression.CompressionState(compression.Compression("maxmin:8,bucket=64", min_elements=64), net)
    compression.apply_fsdp2(net, state)
    return steps(net, kind, rank)


@contextlib.contextmanager
def variables(**values: str) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def cgx_script(kind: str, rank: int, world: int) -> list[torch.Tensor]:
    """What the README of torch_cgx shows, with the imports of this package."""
    net = DistributedDataParallel(exact_net(kind))
    state = CGXState(None, layer_min_size=64, compression_params={"bits": 4, "bucket_size": 1024})
    net.register_comm_hook(state, cgx_hook)
    return steps(net, kind, rank)


def cgx_layers(kind: str, rank: int, world: int) -> list[torch.Tensor]:
    with variables(CGX_COMPRESSION_QUANTIZATION_BITS="4", CGX_COMPRESSION_BUCKET_SIZE="512"), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        cgx.reset()
        cgx.register_layer(0, 0, 3000, 4, 512)
        cgx.register_layer(0, 1, 2000, 8, 128)
        found = []
        for step in range(STEPS):
            tensor = numbers(kind, (5000,), rank + 10 * step, 1000)
            dist.all_reduce(tensor)
            found.append(tensor)
        cgx.reset()
    return found


class Half(nn.Module):
    """A step of an ODE net: x + dt * relu(W x), with W of small integers."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4, bias=False)
        with torch.no_grad():
            self.linear.weight.copy_(numbers("cpu", (4, 4), 40 + number, 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.linear(x))


def _layer_parallel(kind: str, cycle: Any) -> list[torch.Tensor]:
    options = {} if cycle is None else {"fwd": cycle, "bwd": cycle}
    net = LayerParallel([ode(lambda number: Half(number).to(kind)) for _ in range(8)], horizon=4.0, **options)
    x = numbers(kind, (4, 4), 3)
    target = numbers(kind, (4, 4), 4)
    loss = net.step(x, target, lambda y, wanted: (y * wanted).sum())
    return [loss.detach(), *(parameter.grad for parameter in net.parameters() if parameter.grad is not None)]


def layer_parallel_exact(kind: str, rank: int, world: int) -> list[torch.Tensor]:
    return _layer_parallel(kind, None)


def layer_parallel_multigrid(kind: str, rank: int, world: int) -> list[torch.Tensor]:
    return _layer_parallel(kind, Cycle(levels=2, factor=2, iterations=1))


def torchbraid(kind: str, rank: int, world: int) -> list[torch.Tensor]:
    made = iter(range(100))
    net = facade.LayerParallel(
        facade.MPI.COMM_WORLD, lambda: Half(next(made)), 8, Tf=4.0, max_fwd_levels=2, max_bwd_levels=2, max_iters=1
    ).to(kind)
    compose = net.comp_op()
    x = numbers(kind, (4, 4), 3)
    y = net(x)
    compose(lambda output: (output * numbers(kind, (4, 4), 4)).sum(), y).backward()
    return [torch.zeros(1), *(parameter.grad for parameter in net.parameters() if parameter.grad is not None)]
