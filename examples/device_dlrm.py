#!/usr/bin/env python3
"""Trains a recommendation model like DLRM, with embedding tables spread over the ranks, over the host path and over a
device.

    python examples/device_dlrm.py                                  # two ranks, an engine in software in each
    python examples/device_dlrm.py --ranks 3 --tables 6 --batch 510 --steps 10
    python examples/device_dlrm.py --device 'emulator://127.0.0.1:5500?design=cyt_rdma'
    torchrun --nproc-per-node 2 examples/device_dlrm.py

Each rank holds some of the embedding tables whole and a share of each batch. One all_to_all sends the indices of all
samples to the tables, and another returns the rows to the samples. In the backward pass, one sends the gradients of
rows to the tables. The two small networks, below and above, are copies on all ranks; DistributedDataParallel sums their
gradients. The device runs all of these collectives, but an all_to_all only if the device uses RDMA and all ranks hold
the same number of tables. The host computes the networks, the tables' look-ups and the optimizers. The script generates
the samples: a click follows from the rows of hidden tables.
"""

from __future__ import annotations

import sys
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from device_common import Job, main_of, parser_of, positive, report_training
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

DENSE = 13


class Exchange(torch.autograd.Function):
    """An all_to_all of blocks, whose gradient is sent back the same way."""

    @staticmethod
    def forward(context: Any, blocks: Tensor, gives: list[int], takes: list[int]) -> Tensor:
        """Sends `gives[r]` rows of `blocks` to rank r, and receives `takes[r]` rows from it."""
        context.sizes = (gives, takes)
        return exchange(blocks, gives, takes)

    @staticmethod
    def backward(context: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        """Sends the gradients of received rows back to their ranks."""
        gives, takes = context.sizes
        return exchange(gradients[0].contiguous(), takes, gives), None, None


def exchange(blocks: Tensor, gives: list[int], takes: list[int]) -> Tensor:
    """Runs an all_to_all along the first dimension. Even blocks are passed without sizes, since a device accepts no
    others."""
    result = blocks.new_empty(sum(takes), *blocks.shape[1:])
    is_even = len(set(gives + takes)) == 1
    dist.all_to_all_single(result, blocks, None if is_even else takes, None if is_even else gives)
    return result


class Tables(nn.Module):
    """The embedding tables of this rank, and the look-up in all tables."""

    def __init__(self, tables: int, rows: int, width: int, rank: int, world: int) -> None:
        super().__init__()
        self.counts = [tables // world + (other < tables % world) for other in range(world)]
        self.rank, self.width = rank, width
        # Each table has its own seed, so its initial values do not depend on the ranks.
        first = sum(self.counts[:rank])
        self.own = nn.ModuleList()
        for number in range(first, first + self.counts[rank]):
            table = nn.Embedding(rows, width)
            generator = torch.Generator().manual_seed(number)
            table.weight.data = torch.randn(rows, width, generator=generator) / width**0.5
            self.own.append(table)

    def forward(self, indices: Tensor) -> Tensor:
        """Returns the rows of this rank's samples (samples x tables x width) for their indices (tables x samples)."""
        samples = indices.shape[1]
        world, own = len(self.counts), self.counts[self.rank]
        takes = [own] * world
        # Get all ranks' indices into this rank's tables, then look up the rows.
        asked = exchange(indices, self.counts, takes).view(world, own, samples)
        found = [table(asked[:, number]) for number, table in enumerate(self.own)]
        rows = torch.stack(found, dim=1) if found else torch.empty(world, 0, samples, self.width, requires_grad=True)
        back: Tensor = Exchange.apply(rows.reshape(world * own, samples, self.width), takes, self.counts)
        return back.transpose(0, 1)


class Networks(nn.Module):
    """The part that is the same on all ranks: a network for dense features, and one for their interactions with the
    rows."""

    def __init__(self, tables: int, width: int) -> None:
        super().__init__()
        self.below = nn.Sequential(nn.Linear(DENSE, 64), nn.ReLU(), nn.Linear(64, width), nn.ReLU())
        pairs = (tables + 1) * tables // 2
        self.above = nn.Sequential(nn.Linear(width + pairs, 64), nn.ReLU(), nn.Linear(64, 1))
        first, second = torch.tril_indices(tables + 1, tables + 1, offset=-1)
        self.pairs: tuple[Tensor, Tensor] = (first, second)

    def forward(self, dense: Tensor, rows: Tensor) -> Tensor:
        """Returns a logit for each sample: whether it is a click."""
        below = self.below(dense)
        vectors = torch.cat([below.unsqueeze(1), rows], dim=1)
        products = torch.bmm(vectors, vectors.transpose(1, 2))[:, self.pairs[0], self.pairs[1]]
        logits: Tensor = self.above(torch.cat([below, products], dim=1)).squeeze(1)
        return logits


class Clicks:
    """Samples, the same on every rank."""

    def __init__(self, tables: int, rows: int, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.seed, self.tables, self.rows = seed, tables, rows
        self.hidden = torch.randn(tables, rows, generator=generator)
        self.dense = torch.randn(DENSE, generator=generator) / DENSE**0.5

    def batch(self, step: int, samples: int) -> tuple[Tensor, Tensor, Tensor]:
        """Returns dense features, indices (tables x samples) and clicks of a whole batch."""
        generator = torch.Generator().manual_seed(self.seed * 100_003 + step)
        dense = torch.randn(samples, DENSE, generator=generator)
        # A few rows are requested often, as in real data.
        indices = (torch.rand(self.tables, samples, generator=generator) ** 3 * self.rows).long()
        score = self.hidden.gather(1, indices).sum(0) / self.tables**0.5 + dense @ self.dense
        return dense, indices, (score > 0).float()


def train(job: Job) -> None:
    """Trains for some steps; keeps this rank's tables and the networks."""
    args = job.args
    if args.batch % job.world:
        raise ValueError(f"--batch: expected a multiple of the {job.world} ranks, got {args.batch}")
    clicks = Clicks(args.tables, args.rows, args.seed)
    tables = Tables(args.tables, args.rows, args.width, job.rank, job.world)
    torch.manual_seed(args.seed)
    networks = DistributedDataParallel(Networks(args.tables, args.width))
    optimizer = torch.optim.SGD(
        [{"params": networks.parameters()}, {"params": tables.parameters(), "lr": args.learning_rate * args.width}],
        lr=args.learning_rate,
    )
    each = args.batch // job.world
    own = slice(job.rank * each, (job.rank + 1) * each)

    def loss_of(step: int) -> Tensor:
        dense, indices, wanted = clicks.batch(step, args.batch)
        rows = tables(indices[:, own].contiguous())
        # Gradients of networks are averaged over the ranks. Gradients of rows come from all ranks and are added, so
        # divide them.
        rows.register_hook(lambda gradient: gradient / job.world)
        return nn.functional.binary_cross_entropy_with_logits(networks(dense[own], rows), wanted[own])

    with job.progress(args.steps) as advance:
        for step in range(args.steps):
            loss = job.step(partial(loss_of, step), optimizer)
            advance(f"loss {loss:.4f}")
    with torch.no_grad():
        dense, indices, wanted = clicks.batch(-1, 4096 // job.world * job.world)
        share = len(wanted) // job.world
        test = slice(job.rank * share, (job.rank + 1) * share)
        hits = (networks.module(dense[test], tables(indices[:, test].contiguous())) > 0) == (wanted[test] > 0)
    right = hits.sum()
    dist.all_reduce(right)
    job.run.figures["clicks foretold"] = f"{right.item() / len(wanted):.4f}"
    job.run.figures["tables a rank"] = "/".join(map(str, tables.counts))
    job.keep(networks.module, tables)


def main() -> int:
    """Trains over both paths and compares."""
    parser = parser_of(__doc__ or "")
    parser.add_argument("--tables", type=positive, default=8, help="embedding tables, over all ranks (default: 8)")
    parser.add_argument("--rows", type=positive, default=1000, help="rows of each table (default: 1000)")
    parser.add_argument("--width", type=positive, default=16, help="elements of a row (default: 16)")
    parser.add_argument("--batch", type=positive, default=512, help="samples a step, over all ranks (default: 512)")
    parser.add_argument("--steps", type=positive, default=300, help="training steps (default: 300)")
    parser.add_argument("--learning-rate", type=float, default=0.1, help="learning rate of the networks (default: 0.1)")
    report = report_training(
        "DLRM-like model, tables spread over the ranks",
        "the networks, look-ups of rows, the optimizer, and calls that this device does not run",
    )
    return main_of(parser, train, report)


if __name__ == "__main__":
    sys.exit(main())
