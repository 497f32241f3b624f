#!/usr/bin/env python3
"""Issues every collective over the host path and over a device, and trains a toy model over both.

    python examples/device_collectives.py                                  # two ranks, an engine in software in each
    python examples/device_collectives.py --device 'sim://?design=udp' --ranks 3
    python examples/device_collectives.py --device emulator://127.0.0.1:5500
    torchrun --nproc-per-node 2 examples/device_collectives.py

The table has the median time of each call over both paths, and the number of calls that the device ran. The device runs
collectives of equal blocks: moves of every type, and sums of float16, float32, float64, int32 and int64. The table also
has other operators, uneven blocks, barriers, sends and receives: the host runs these, without any change to the
program. Results are compared bit for bit. The numbers are small integers, so that sums are exact in any order.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist
from device_common import HOST, Job, Run, calls_now, conclude, main_of, median, parser_of, positive, slowest
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel


@dataclass
class Case:
    """A call: `call` issues it with a tensor as input, and returns the result."""

    name: str
    call: Callable[[Job, Tensor], Tensor]


def numbers(rank: int, count: int) -> Tensor:
    """Returns integers that depend on the rank, as float32."""
    return (torch.arange(count) * (rank + 3) % 251 - 125).float()


def in_place(call: Callable[[Tensor], object]) -> Callable[[Job, Tensor], Tensor]:
    """Returns a call that leaves its result in its tensor."""

    def made(job: Job, own: Tensor) -> Tensor:
        tensor = own.clone()
        call(tensor)
        return tensor

    return made


def reduce(job: Job, own: Tensor) -> Tensor:
    """Reduces to the last rank; other ranks return their input, because their result is undefined."""
    tensor = own.clone()
    dist.reduce(tensor, job.world - 1)
    return tensor if job.rank == job.world - 1 else own


def all_gather(job: Job, own: Tensor) -> Tensor:
    """Gathers one tensor from all ranks."""
    tensor = own.new_empty(job.world * own.numel())
    dist.all_gather_into_tensor(tensor, own)
    return tensor


def all_gather_uneven(job: Job, own: Tensor) -> Tensor:
    """Gathers tensors of several sizes from all ranks."""
    sizes = [own.numel() // (other + 1) for other in range(job.world)]
    parts = [own.new_empty(size) for size in sizes]
    dist.all_gather(parts, own[: sizes[job.rank]].clone())
    return torch.cat(parts)


def gather(job: Job, own: Tensor) -> Tensor:
    """Gathers to rank 0."""
    parts = [torch.empty_like(own) for _ in range(job.world)] if job.rank == 0 else None
    dist.gather(own, parts, 0)
    return torch.cat(parts) if parts else own


def scatter(job: Job, own: Tensor) -> Tensor:
    """Scatters from rank 0."""
    tensor = torch.empty_like(own)
    dist.scatter(tensor, [own + other for other in range(job.world)] if job.rank == 0 else None, 0)
    return tensor


def reduce_scatter(job: Job, own: Tensor) -> Tensor:
    """Returns the sum of this rank's block."""
    tensor = torch.empty_like(own)
    dist.reduce_scatter_tensor(tensor, torch.cat([own + other for other in range(job.world)]))
    return tensor


def all_to_all(job: Job, own: Tensor) -> Tensor:
    """Exchanges a block between each pair of ranks."""
    given = torch.cat([own + other for other in range(job.world)])
    tensor = torch.empty_like(given)
    dist.all_to_all_single(tensor, given)
    return tensor


def pass_on(job: Job, own: Tensor) -> Tensor:
    """Sends to the next rank, and receives from the previous one."""
    tensor = torch.empty_like(own)
    to, source = (job.rank + 1) % job.world, (job.rank - 1) % job.world
    for work in dist.batch_isend_irecv([dist.P2POp(dist.isend, own, to), dist.P2POp(dist.irecv, tensor, source)]):
        work.wait()
    return tensor


CASES = [
    Case("all_reduce", in_place(dist.all_reduce)),
    Case("all_reduce of int64", lambda job, own: in_place(dist.all_reduce)(job, own.long())),
    Case("all_reduce, MAX", in_place(lambda tensor: dist.all_reduce(tensor, dist.ReduceOp.MAX))),
    Case("all_reduce of bfloat16", lambda job, own: in_place(dist.all_reduce)(job, (own % 8).bfloat16())),
    Case("reduce", reduce),
    Case("broadcast", in_place(lambda tensor: dist.broadcast(tensor, 0))),
    Case("all_gather", all_gather),
    Case("all_gather, uneven", all_gather_uneven),
    Case("gather", gather),
    Case("scatter", scatter),
    Case("reduce_scatter", reduce_scatter),
    Case("all_to_all", all_to_all),
    Case("send and receive", pass_on),
    Case("barrier", in_place(lambda tensor: dist.barrier())),
]
TOY = "toy model, a step"


class ToyModel(nn.Module):
    """Two linear layers, which DistributedDataParallel puts into several buckets of `BUCKET_MIB`."""

    BUCKET_MIB = 0.1

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(128, 512), nn.ReLU(), nn.Linear(512, 64))

    def forward(self, rows: Tensor) -> Tensor:
        """Returns the layers' output for some rows."""
        result: Tensor = self.layers(rows)
        return result


def every_call(job: Job) -> None:
    """Issues every call several times, and trains the toy model."""
    args, run = job.args, job.run
    own = numbers(job.rank, args.elements)
    kept = []
    with job.progress((len(CASES) + 1) * args.repeat) as advance:
        for case in CASES:
            before, times = sum(calls_now()[1].values()), []
            for _ in range(args.repeat):
                begin = time.perf_counter()
                result = case.call(job, own)
                times.append((time.perf_counter() - begin) * 1e3)
                advance(case.name)
            run.figures[f"{case.name}: calls"] = str(sum(calls_now()[1].values()) - before)
            run.figures[f"{case.name}: ms"] = f"{median(slowest(times)):.3f}"
            kept.append(result.double().flatten())
        model = DistributedDataParallel(ToyModel(), bucket_cap_mb=ToyModel.BUCKET_MIB)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)

        def loss_of(rows: Tensor, wanted: Tensor) -> Tensor:
            return nn.functional.mse_loss(model(rows), wanted)

        before = sum(calls_now()[1].values())
        for step in range(args.repeat):
            generator = torch.Generator().manual_seed(1000 * step + job.rank)
            rows, wanted = torch.randn(32, 128, generator=generator), torch.randn(32, 64, generator=generator)
            job.step(partial(loss_of, rows, wanted), optimizer)
            advance(TOY)
    run.figures[f"{TOY}: calls"] = str(sum(calls_now()[1].values()) - before)
    run.figures[f"{TOY}: ms"] = f"{median(slowest(run.step_ms)):.3f}"
    job.keep(model)
    run.exact = torch.cat(kept)


def report(runs: list[Run], args: argparse.Namespace, console: Console, world: int) -> int:
    """Prints a line for each call, then the verdict."""
    table = Table(title=f"Collectives of {args.elements:,} elements a rank, {args.repeat} calls each, {world} ranks")
    table.add_column("")
    for run in runs:
        table.add_column("host path" if run.device == HOST else run.device, justify="right")
    if len(runs) > 1:
        table.add_column("calls on the device", justify="right")
    for name in (*(case.name for case in CASES), TOY):
        row = [f"{run.figures[f'{name}: ms']} ms" for run in runs]
        if len(runs) > 1:
            calls = runs[1].figures[f"{name}: calls"]
            row.append("host" if calls == "0" else calls)
        table.add_row(name, *row)
    console.print(table)
    return conclude(runs, args, console, world, "rows that the table marks host, the model's passes and its optimizer")


def main() -> int:
    """Runs both paths and compares."""
    parser = parser_of(__doc__ or "")
    parser.add_argument("--elements", type=positive, default=100_000, help="elements of each rank (default: 100000)")
    parser.add_argument("--repeat", type=positive, default=10, help="number of times to issue each call (default: 10)")
    return main_of(parser, every_call, report)


if __name__ == "__main__":
    sys.exit(main())
