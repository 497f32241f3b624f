#!/usr/bin/env python3
"""Nested iteration: trains a shallow net on handwritten digits and deepens it repeatedly.

Compares this with training the deepest net from the start.

    torchrun --nproc-per-node=1 examples/layer_parallel_nested.py
    torchrun --nproc-per-node=2 examples/layer_parallel_nested.py --mode inexact

The digits ship inside scikit-learn (1,797 real 8x8 images), so nothing is downloaded. All runs of a seed use the same
batches and the same amount of work. Work is counted in layer evaluations: a layer's forward and backward pass over the
batch of one training step, in any mode. A step of a net of 64 steps is 64 of them. The picture shows loss and accuracy
against work.
"""

import argparse
import json
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from statistics import mean, stdev

# Set before torch is loaded: ranks share the machine.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
import torch.distributed as dist
import torch_accl  # noqa: F401  registers the backend
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from torch import Tensor, nn
from torch_accl.layer_parallel import Cycle, LayerParallel, ode, plain, refined

CHANNELS = 8
# Number of training images on which the loss is evaluated, always the same ones.
LOOKED_AT = 500
MODES = ("exact-wave", "exact-pipeline", "inexact")
# The first two interpolate a shallower net.
WAYS = ("constant", "linear", "deepest")


@dataclass
class Run:
    """Results of one training."""

    name: str
    seed: int
    # Steps of the optimizer, each with one batch.
    steps: int = 0
    # For each evaluation: layer evaluations so far, steps of the net, loss over some training images, share of correct
    # test images.
    work: list[int] = field(default_factory=list)
    depths: list[int] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    accuracies: list[float] = field(default_factory=list)


@dataclass
class Digits:
    """Images and labels for training and for testing."""

    images: Tensor
    labels: Tensor
    test_images: Tensor
    test_labels: Tensor


def head(number: int) -> nn.Module:
    """Maps an image to channels."""
    return nn.Sequential(nn.Conv2d(1, CHANNELS, 3, padding=1), nn.ReLU())


def block(number: int) -> nn.Module:
    """Computes the increment of one step."""
    return nn.Sequential(
        nn.Conv2d(CHANNELS, CHANNELS, 3, padding=1), nn.Tanh(), nn.Conv2d(CHANNELS, CHANNELS, 3, padding=1)
    )


def tail(number: int) -> nn.Module:
    """Maps channels to digits."""
    return nn.Sequential(nn.AvgPool2d(2), nn.Flatten(), nn.Linear(CHANNELS * 16, 10))


def digits() -> Digits:
    """Returns 1,497 images for training, and 300 for testing."""
    from sklearn.datasets import load_digits

    data = load_digits()
    images = torch.tensor(data.images, dtype=torch.float32).unsqueeze(1) / 16
    labels = torch.tensor(data.target)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    train, test = order[300:], order[:300]
    return Digits(images[train], labels[train], images[test], labels[test])


def batches(data: Digits, size: int, seed: int) -> Iterator[Tensor]:
    """Yields the rows of one batch after the other, without end."""
    generator = torch.Generator().manual_seed(seed)
    while True:
        order = torch.randperm(len(data.labels), generator=generator)
        yield from order[: len(order) // size * size].split(size)


def net_of(args: argparse.Namespace, steps: int, seed: int) -> LayerParallel:
    """Returns a net before training."""
    return LayerParallel(
        [plain(head), *(ode(block) for _ in range(steps)), plain(tail)],
        horizon=args.horizon,
        seed=seed,
        mode=args.mode,
        fwd=Cycle(factor=args.factor, iterations=2),
        bwd=Cycle(factor=args.factor, iterations=1),
    )


@torch.no_grad()
def look(run: Run, net: LayerParallel, data: Digits, work: int, steps: int) -> None:
    """Evaluates the net and adds the results to the run; collective."""
    net.eval()
    found = torch.zeros(2, dtype=torch.float64)
    y, y_test = net(data.images[:LOOKED_AT]), net(data.test_images)
    if net.is_last:
        found[0] = nn.functional.cross_entropy(y, data.labels[:LOOKED_AT])
        found[1] = (y_test.argmax(1) == data.test_labels).double().mean()
    dist.all_reduce(found)
    net.train()
    run.work.append(work)
    run.depths.append(steps)
    run.losses.append(float(found[0]))
    run.accuracies.append(float(found[1]))


def train(args: argparse.Namespace, data: Digits, name: str, seed: int, tick: Callable[[Run, int], None]) -> Run:
    """Trains once; collective. `deepest` starts with the deepest net; the other runs reach it by interpolation."""
    run, work = Run(name, seed), 0
    per_epoch = len(data.labels) // args.batch
    depths = [args.depths[-1]] if name == "deepest" else args.depths
    budgets = (
        [sum(args.depths) * args.epochs * per_epoch]
        if name == "deepest"
        else [steps * args.epochs * per_epoch for steps in args.depths]
    )
    # Work between two evaluations: a part of an epoch of the deepest net.
    interval = max(1, args.depths[-1] * per_epoch // args.looks)
    net = net_of(args, depths[0], seed)
    optimizer: torch.optim.Optimizer = torch.optim.Adam(net.parameters(), lr=args.learning_rate)
    rows = batches(data, args.batch, seed)
    next_look = interval
    for steps, budget in zip(depths, budgets):
        if steps != depths[0]:
            factor = steps // depths[depths.index(steps) - 1]
            look(run, net, data, work, steps // factor)
            net, optimizer = refined(net, factor, optimizer, interpolation=name, moments=args.moments)
        look(run, net, data, work, steps)
        end = work + budget
        while work + steps <= end:
            chosen = next(rows)
            optimizer.zero_grad()
            net.step(data.images[chosen], data.labels[chosen], nn.functional.cross_entropy)
            optimizer.step()
            run.steps += 1
            work += steps
            tick(run, steps)
            if work >= next_look:
                look(run, net, data, work, steps)
                next_look = (work // interval + 1) * interval
    if run.work[-1] != work:
        look(run, net, data, work, depths[-1])
    return run


def spread(values: list[float], shown: str) -> str:
    """Returns a mean, and the standard deviation if there are several values."""
    text = format(mean(values), shown)
    return f"{text} ± {format(stdev(values), shown)}" if len(values) > 1 else text


def first_below(run: Run, loss: float) -> int | None:
    """Returns the work until a run's deepest net reaches a loss; None if it does not."""
    deepest = max(run.depths)
    return next(
        (work for work, found, steps in zip(run.work, run.losses, run.depths) if steps == deepest and found <= loss),
        None,
    )


def table_of(runs: list[Run], depths: list[int]) -> Table:
    """Returns a table with a row for each way to train."""
    table = Table(title=f"{' -> '.join(map(str, depths))} steps, all with the same work")
    for column in (
        "way",
        "layer evaluations",
        "optimizer steps",
        "last loss",
        "test accuracy",
        "work to reach deepest's last loss",
    ):
        table.add_column(column, justify="right")
    wanted = {run.seed: run.losses[-1] for run in runs if run.name == "deepest"}
    for name in dict.fromkeys(run.name for run in runs):
        own = [run for run in runs if run.name == name]
        needed = [first_below(run, wanted[run.seed]) for run in own if run.seed in wanted]
        shares = [work / run.work[-1] for work, run in zip(needed, own) if work is not None]
        shown = "-" if not wanted else f"{len(shares)} of {len(own)} seeds"
        if shares:
            shown = f"{spread(shares, '.0%')} ({shown})"
        table.add_row(
            name,
            f"{own[0].work[-1]:,}",
            f"{own[0].steps:,}",
            spread([run.losses[-1] for run in own], ".4f"),
            spread([run.accuracies[-1] for run in own], ".1%"),
            shown,
        )
    return table


def draw(runs: list[Run], path: Path) -> None:
    """Draws loss and accuracy against work: a line for each seed, in the colour of its way."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(11, 4.2), layout="constrained")
    names = list(dict.fromkeys(run.name for run in runs))
    for run in runs:
        colour, label = f"C{names.index(run.name)}", run.name if run.seed == runs[0].seed else None
        left.plot(run.work, run.losses, color=colour, label=label, linewidth=1, alpha=0.8)
        right.plot(run.work, run.accuracies, color=colour, label=label, linewidth=1, alpha=0.8)
    nested = next((run for run in runs if run.name != "deepest"), None)
    if nested is not None:
        pairs = zip(nested.work, nested.depths, nested.depths[1:])
        for work in [work for work, before, after in pairs if before != after]:
            for axes in (left, right):
                axes.axvline(work, color="0.8", linewidth=0.8, zorder=0)
    left.set(xlabel="layer evaluations", ylabel=f"loss over {LOOKED_AT} training images", yscale="log")
    right.set(xlabel="layer evaluations", ylabel="share of test images classified correctly", ylim=(0.5, 1.0))
    left.legend()
    right.legend()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def arguments() -> argparse.Namespace:
    """Parses the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--depths", default="8,16,32,64", help="steps of the nets, each a multiple of the one before")
    parser.add_argument(
        "--epochs", type=int, default=4, help="epochs of each depth; a run of only the deepest net gets the same work"
    )
    parser.add_argument("--seeds", type=int, default=3, help="runs of each way")
    parser.add_argument("--ways", default=",".join(WAYS), help="ways to run (default: %(default)s)")
    parser.add_argument(
        "--moments", default="scaled", choices=("scaled", "copied", "none"), help="Adam's moments in a deeper net"
    )
    parser.add_argument("--mode", default="exact-wave", choices=MODES)
    parser.add_argument("--factor", type=int, default=4, help="steps of the net per coarse step in inexact mode")
    parser.add_argument("--horizon", type=float, default=4.0, help="total time of all steps")
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--learning-rate", type=float, default=3e-3)
    parser.add_argument("--looks", type=int, default=2, help="tests of the nets per epoch of the deepest net")
    parser.add_argument("--backend", default="accl")
    parser.add_argument("--quick", action="store_true", help="2 -> 4 -> 8 steps, an epoch each, one seed")
    parser.add_argument("--json", action="store_true", help="print the runs as JSON")
    parser.add_argument("--plot", type=Path, default=Path("demo-output/layer_parallel_nested.png"), metavar="FILE")
    args = parser.parse_args()
    if args.quick:
        args.depths, args.epochs, args.seeds = "2,4,8", 1, 1
    try:
        args.depths = [int(steps) for steps in args.depths.split(",")]
    except ValueError:
        parser.error(f"--depths: expected a comma-separated list of numbers, got {args.depths}")
    if any(b % a or b == a for a, b in zip(args.depths, args.depths[1:])) or min(args.depths) < 1:
        parser.error(
            f"--depths: expected each to be a multiple of the one before, got {', '.join(map(str, args.depths))}"
        )
    args.ways = args.ways.split(",")
    if unknown := [name for name in args.ways if name not in WAYS]:
        parser.error(f"--ways: unknown {', '.join(unknown)}; expected one or more of {', '.join(WAYS)}")
    return args


def main() -> None:
    """Trains in each way, and shows the results."""
    args = arguments()
    dist.init_process_group(args.backend)
    torch.set_num_threads(1)
    is_first = dist.get_rank() == 0
    console = Console(stderr=args.json)
    data = digits()
    total = len(args.ways) * args.seeds * sum(args.depths) * args.epochs * (len(data.labels) // args.batch)
    runs = []
    with Progress(console=console, disable=not is_first) as progress:
        task = progress.add_task("", total=total)

        def tick(run: Run, steps: int) -> None:
            words = f"{run.name}, seed {run.seed}, {steps} steps, loss {run.losses[-1]:.4f}"
            progress.update(task, advance=steps, description=words)

        for seed in range(args.seeds):
            for name in args.ways:
                runs.append(train(args, data, name, seed, tick))
    if is_first:
        draw(runs, args.plot)
        if args.json:
            print(json.dumps([vars(run) for run in runs]))
        console.print(table_of(runs, args.depths))
        console.print(f"picture: {args.plot}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
