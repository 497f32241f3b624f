#!/usr/bin/env python3
"""Trains a deep residual net on handwritten digits with its layers spread over the ranks, exactly and by multigrid, and
compares the runs.

    torchrun --nproc-per-node=2 examples/layer_parallel_digits.py
    torchrun --nproc-per-node=4 examples/layer_parallel_digits.py --layers 64 --factor 8

The digits ship inside scikit-learn (1,797 real 8x8 images), so nothing is downloaded. All runs start from the same
weights and use the same batches. The picture shows their losses, and the residual norms, which show the error of each
batch's last forward pass.
"""

import argparse
import json
import time
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

import torch
import torch.distributed as dist
import torch_accl  # noqa: F401  registers the backend
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from torch import Tensor, nn
from torch_accl.layer_parallel import Cycle, LayerParallel, ode, plain

MODES = ("exact-wave", "exact-pipeline", "inexact")


@dataclass
class Run:
    """Results of one training."""

    mode: str
    losses: list[float] = field(default_factory=list)
    step_ms: list[float] = field(default_factory=list)
    # Last residual norm of each batch's forward pass.
    residuals: list[float] = field(default_factory=list)
    accuracy: float = 0.0


def head(number: int) -> nn.Module:
    """Maps an image to channels."""
    return nn.Sequential(nn.Conv2d(1, 12, 3, padding=1), nn.ReLU())


def block(number: int) -> nn.Module:
    """Computes the increment of one step."""
    return nn.Sequential(nn.Conv2d(12, 12, 3, padding=1), nn.Tanh(), nn.Conv2d(12, 12, 3, padding=1))


def tail(number: int) -> nn.Module:
    """Maps channels to digits."""
    return nn.Sequential(nn.AvgPool2d(2), nn.Flatten(), nn.Linear(12 * 16, 10))


def digits() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Returns 1,497 images and labels for training, and 300 for testing."""
    from sklearn.datasets import load_digits

    data = load_digits()
    images = torch.tensor(data.images, dtype=torch.float32).unsqueeze(1) / 16
    labels = torch.tensor(data.target)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    train, test = order[300:], order[:300]
    return images[train], labels[train], images[test], labels[test]


def train(args: argparse.Namespace, mode: str, console: Console) -> Run:
    """Trains once; collective."""
    run = Run(mode)
    net = LayerParallel(
        [plain(head), *(ode(block) for _ in range(args.layers)), plain(tail)],
        horizon=args.horizon,
        seed=args.seed,
        mode=mode,  # type: ignore[arg-type]
        fwd=Cycle(factor=args.factor, iterations=2),
        bwd=Cycle(factor=args.factor, iterations=1),
    )
    images, labels, test_images, test_labels = digits()
    optimizer = torch.optim.Adam(net.parameters(), lr=args.learning_rate)
    batches = len(labels) // args.batch
    with Progress(console=console, disable=not net.is_first) as progress:
        task = progress.add_task(mode, total=args.epochs * batches)
        for epoch in range(args.epochs):
            order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(args.seed + epoch))
            for batch in range(batches):
                chosen = order[batch * args.batch : (batch + 1) * args.batch]
                begin = time.perf_counter()
                optimizer.zero_grad()
                loss = net.step(images[chosen], labels[chosen], nn.functional.cross_entropy)
                optimizer.step()
                run.step_ms.append((time.perf_counter() - begin) * 1e3)
                run.losses.append(float(loss))
                run.residuals.extend(list(net.norms.forward.values())[-1:])
                progress.update(task, advance=1, description=f"{mode}  loss {run.losses[-1]:.4f}")
    net.eval()
    with torch.no_grad():
        y = net(test_images)
    right = torch.tensor([float((y.argmax(1) == test_labels).sum()) if net.is_last else 0.0])
    dist.all_reduce(right)
    run.accuracy = float(right) / len(test_labels)
    return run


def draw(runs: list[Run], path: Path) -> None:
    """Draws losses and residual norms."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(10, 4), layout="constrained")
    for run in runs:
        left.plot(run.losses, label=f"{run.mode} ({run.accuracy:.1%})", linewidth=1)
        if run.residuals:
            right.semilogy(run.residuals, label=run.mode, linewidth=1)
    left.set(xlabel="batch", ylabel="loss", yscale="log")
    right.set(xlabel="batch", ylabel="last residual norm of the forward pass")
    left.legend()
    right.legend()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def main() -> None:
    """Trains in each mode, and shows the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--modes", default=",".join(MODES), help="modes to run (default: %(default)s)")
    parser.add_argument("--layers", type=int, default=32, help="steps of the net")
    parser.add_argument("--factor", type=int, default=4, help="steps of the net per coarse step")
    parser.add_argument("--horizon", type=float, default=4.0, help="total time of all steps")
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--learning-rate", type=float, default=3e-3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--backend", default="accl")
    parser.add_argument("--json", action="store_true", help="print the runs as JSON")
    parser.add_argument("--out", type=Path, default=Path("demo-output"), help="folder for the picture")
    args = parser.parse_args()
    modes = args.modes.split(",")
    if unknown := [mode for mode in modes if mode not in MODES]:
        parser.error(f"--modes: unknown {', '.join(unknown)}; expected one or more of {', '.join(MODES)}")
    dist.init_process_group(args.backend)
    torch.set_num_threads(1)
    console = Console(stderr=args.json)
    runs = [train(args, mode, console) for mode in modes]
    if dist.get_rank() == 0:
        path = args.out / "layer_parallel_digits.png"
        draw(runs, path)
        if args.json:
            print(json.dumps([vars(run) for run in runs]))
        table = Table(title=f"{args.layers} layers on {dist.get_world_size()} ranks")
        for column in ("mode", "test accuracy", "last loss", "step, median ms", "residual, median"):
            table.add_column(column, justify="right")
        for run in runs:
            residual = f"{median(run.residuals):.2e}" if run.residuals else "exact"
            table.add_row(
                run.mode, f"{run.accuracy:.1%}", f"{run.losses[-1]:.4f}", f"{median(run.step_ms):.1f}", residual
            )
        console.print(table)
        console.print(f"picture: {path}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
