#!/usr/bin/env python3
"""Trains a small CNN on handwritten digits with DistributedDataParallel, once over each backend, and compares the runs.

    torchrun --nproc-per-node=2 examples/digits_ddp.py
    torchrun --nproc-per-node=2 examples/digits_ddp.py --backends accl --device sim

The digits ship inside scikit-learn (1,797 real 8x8 images), so nothing is downloaded. All runs start from the same seed
in the same processes: the group is destroyed and created again with the next backend. `MEASURED` defines the measured
quantities, and is printed under the table.
"""

import argparse
import datetime
import json
import os
import re
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

import torch
import torch.distributed as dist
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

ACCURACY_WANTED = 0.97
MEASURED = {
    "step time": "median over all steps of the slowest rank's time for forward, backward and optimizer",
    "communication time": "time to reduce the gradient buckets of one step again, after the training, with nothing else "
    "running; median of the slowest rank's time over 200 such rounds",
    "bytes moved": "gradient bytes handed to all_reduce by one rank, over the whole run",
    "same weights": "every parameter bit for bit equal to the first run's, after the last step",
    "calls of the device": "collectives that the rank's collective engine ran in the whole run; the host ran the others",
}


@dataclass
class Run:
    """Results of one backend's training."""

    backend: str
    losses: list[float] = field(default_factory=list)
    step_ms: list[float] = field(default_factory=list)
    communication_ms: list[float] = field(default_factory=list)
    moved_bytes: int = 0
    accuracy: float = 0.0
    seconds: float = 0.0
    weights: Tensor = field(default_factory=lambda: torch.empty(0))
    device_calls: int = 0


class DigitsNet(nn.Module):
    """Two convolutions and two linear layers: about 53,000 parameters, several gradient buckets at 64 KiB."""

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(1, 16, kernel_size=3, padding=1),
            nn.ReLU(),
            nn.Conv2d(16, 32, kernel_size=3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2),
        )
        self.head = nn.Sequential(nn.Flatten(), nn.Linear(32 * 4 * 4, 96), nn.ReLU(), nn.Linear(96, 10))

    def forward(self, images: Tensor) -> Tensor:
        """Returns class scores of a batch of 1x8x8 images."""
        scores: Tensor = self.head(self.features(images))
        return scores


def counted_all_reduce(buckets: list[int], bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
    """A DDP communication hook that averages each bucket by one all_reduce, and records its number of elements.

    DDP calls it as soon as a bucket is full, while the rest of the backward pass still runs.
    """
    buffer = bucket.buffer().div_(dist.get_world_size())
    buckets.append(buffer.numel())
    return dist.all_reduce(buffer, async_op=True).get_future().then(lambda done: done.value()[0])


def communication_times(buckets: list[int], rounds: int = 200) -> list[float]:
    """Returns milliseconds per round of reducing float32 buckets of these sizes, all in flight at once as in DDP."""
    buffers = [torch.zeros(size) for size in buckets]
    times = []
    for _ in range(rounds):
        dist.barrier()
        begin = time.perf_counter()
        for work in [dist.all_reduce(buffer, async_op=True) for buffer in buffers]:
            work.wait()
        times.append((time.perf_counter() - begin) * 1e3)
    return times


def digits() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Returns training images and labels, then test images and labels; the same split on every rank."""
    # Imported here, because importing the model alone needs no data.
    from sklearn.datasets import load_digits

    raw = load_digits()
    images = torch.tensor(raw.images, dtype=torch.float32).unsqueeze(1) / 16.0
    labels = torch.tensor(raw.target)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    test, train = order[:360], order[360:]
    return images[train], labels[train], images[test], labels[test]


def train(backend: str, args: argparse.Namespace, console: Console, device: str | None = None) -> Run:
    """Trains from the seed over one backend, on the ranks of this torchrun job; on `device` if given."""
    run = Run(backend if device is None else f"{backend}, {device.partition(':')[0]}")
    timeout = datetime.timedelta(seconds=120)
    if device is None:
        dist.init_process_group(backend, timeout=timeout)
    else:
        import torch_accl

        dist.init_process_group(backend, timeout=timeout, pg_options=torch_accl.Options(device=device))
    try:
        rank, world = dist.get_rank(), dist.get_world_size()
        images, labels, test_images, test_labels = digits()
        torch.manual_seed(args.seed)
        buckets: list[int] = []
        model = DistributedDataParallel(DigitsNet(), bucket_cap_mb=0.0625)
        model.register_comm_hook(buckets, counted_all_reduce)
        optimizer = torch.optim.Adam(model.parameters(), lr=args.learning_rate)
        batches = len(labels) // args.batch
        begin = time.perf_counter()
        with progress_bar(console, rank) as progress:
            task = progress.add_task(f"{run.backend:>5}", total=args.epochs * batches)
            for epoch in range(args.epochs):
                order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(args.seed + epoch))
                for batch in range(batches):
                    # One global batch; each rank takes every world-th image of it.
                    chosen = order[batch * args.batch : (batch + 1) * args.batch][rank::world]
                    run.moved_bytes += 4 * sum(buckets)
                    buckets.clear()
                    start = time.perf_counter()
                    loss = nn.functional.cross_entropy(model(images[chosen]), labels[chosen])
                    optimizer.zero_grad(set_to_none=True)
                    loss.backward()
                    optimizer.step()
                    run.step_ms.append((time.perf_counter() - start) * 1e3)
                    run.losses.append(loss.item())
                    progress.update(task, advance=1, description=f"{run.backend:>5}  loss {run.losses[-1]:.4f}")
        run.seconds = time.perf_counter() - begin
        run.moved_bytes += 4 * sum(buckets)
        run.communication_ms = communication_times(buckets)
        if device is not None:
            run.device_calls = calls_of_device()
        summarise(run, model, test_images, test_labels)
    finally:
        dist.destroy_process_group()
    return run


def calls_of_device() -> int:
    """Returns the number of collectives that this rank's device has run."""
    group = dist.distributed_c10d._get_default_group()
    facts: str = group._get_backend(torch.device("cpu")).describe()  # type: ignore[attr-defined]
    found = re.search(r"^device .*: (\d+) calls", facts, re.MULTILINE)
    return int(found[1]) if found else 0


def summarise(run: Run, model: nn.Module, images: Tensor, labels: Tensor) -> None:
    """Averages the losses over the ranks, takes the slowest rank's times, tests, and copies the weights."""
    losses = torch.tensor(run.losses, dtype=torch.float64)
    dist.all_reduce(losses)
    run.losses = (losses / dist.get_world_size()).tolist()
    run.step_ms = slowest(run.step_ms)
    run.communication_ms = slowest(run.communication_ms)
    with torch.no_grad():
        correct = (model(images).argmax(dim=1) == labels).double().mean()
    # The minimum over all ranks: they hold the same weights, so a difference would show here.
    dist.all_reduce(correct, op=dist.ReduceOp.MIN)
    run.accuracy = correct.item()
    run.weights = torch.cat([parameter.detach().flatten() for parameter in model.parameters()]).clone()


def slowest(times: list[float]) -> list[float]:
    """Returns the elementwise maximum over the ranks."""
    most = torch.tensor(times, dtype=torch.float64)
    dist.all_reduce(most, op=dist.ReduceOp.MAX)
    result: list[float] = most.tolist()
    return result


def progress_bar(console: Console, rank: int) -> Progress:
    """Returns a progress bar, shown on rank 0 only."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    return Progress(*columns, console=console, disable=rank != 0)


def median(values: list[float]) -> float:
    """Returns the middle value."""
    return float(torch.tensor(values, dtype=torch.float64).median())


def report(run: Run, first: Run) -> dict[str, object]:
    """Returns the figures of one run, compared with the first one."""
    difference = (run.weights - first.weights).abs().max().item()
    return {
        "backend": run.backend,
        "accuracy": run.accuracy,
        "final_loss": sum(run.losses[-20:]) / len(run.losses[-20:]),
        "step_ms": median(run.step_ms),
        "communication_ms": median(run.communication_ms),
        "moved_bytes": run.moved_bytes,
        "seconds": run.seconds,
        "same_weights": torch.equal(run.weights, first.weights),
        "largest_weight_difference": difference,
        "device_calls": run.device_calls,
    }


def print_table(rows: list[dict[str, object]], console: Console) -> None:
    """Prints one column per run, one line per figure."""
    table = Table(title="Handwritten digits, DistributedDataParallel")
    table.add_column("")
    for row in rows:
        table.add_column(str(row["backend"]), justify="right")

    def line(title: str, key: str, form: str) -> None:
        table.add_row(title, *(form.format(row[key]) for row in rows))

    line("test accuracy", "accuracy", "{:.4f}")
    line("final loss (mean of 20 steps)", "final_loss", "{:.5f}")
    line("step time", "step_ms", "{:.2f} ms")
    line("communication time per step", "communication_ms", "{:.2f} ms")
    line("bytes moved", "moved_bytes", "{:,}")
    line("training", "seconds", "{:.1f} s")
    first = rows[0]["backend"]
    table.add_row(
        f"same weights as {first}",
        "-",
        *("yes, bit for bit" if row["same_weights"] else "no" for row in rows[1:]),
    )
    table.add_row("largest weight difference", "-", *(f"{row['largest_weight_difference']:.3g}" for row in rows[1:]))
    if any(row["device_calls"] for row in rows):
        line("calls of the device", "device_calls", "{:,}")
    console.print(table)
    for name, meaning in MEASURED.items():
        console.print(f"[dim]{name}: {meaning}[/dim]")


def draw(runs: list[Run], path: Path) -> None:
    """Draws loss curves on the left, times on the right."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(11, 4.2), layout="constrained")
    for index, run in enumerate(runs):
        # Curves of runs with equal weights coincide, so later ones are thinner and dashed.
        left.plot(
            run.losses, label=run.backend, linewidth=3.0 - 1.8 * min(index, 1), linestyle="-" if not index else "--"
        )
    left.set(xlabel="step", ylabel="training loss", yscale="log", title="Loss")
    left.legend()
    kinds = ("step", "communication")
    width = 0.8 / len(runs)
    for index, run in enumerate(runs):
        values = [median(run.step_ms), median(run.communication_ms)]
        bars = right.bar([kind + index * width for kind in range(len(kinds))], values, width, label=run.backend)
        right.bar_label(bars, fmt="%.2f")
    right.set_xticks([kind + width * (len(runs) - 1) / 2 for kind in range(len(kinds))], kinds)
    right.set(ylabel="median ms per step", title="Time")
    right.legend()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)


def arguments() -> argparse.Namespace:
    """Parses the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backends", default="accl,gloo", help="backends, in order (default: accl,gloo)")
    parser.add_argument(
        "--device", help="train once more over accl, with a device such as sim or emulator://localhost:5500"
    )
    parser.add_argument("--epochs", type=int, default=20, help="passes over the images (default: 20)")
    parser.add_argument("--batch", type=int, default=64, help="images per step, over all ranks (default: 64)")
    parser.add_argument("--learning-rate", type=float, default=2e-3, help="learning rate of Adam (default: 0.002)")
    parser.add_argument("--seed", type=int, default=20, help="seed of weights and batches (default: 20)")
    parser.add_argument("--out", type=Path, default=Path("demo-output"), help="folder for the picture")
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    return parser.parse_args()


def main() -> int:
    """Trains once per backend; returns 1 if a run stays below the wanted accuracy."""
    args = arguments()
    if "RANK" not in os.environ:
        print("start this with: torchrun --nproc-per-node=2 examples/digits_ddp.py", file=sys.stderr)
        return 2
    torch.set_num_threads(1)
    # Every run is deterministic, so differences in the weights come from the backend.
    torch.use_deterministic_algorithms(True)
    console = Console()
    runs = [train(backend, args, console) for backend in args.backends.split(",")]
    if args.device:
        runs.insert(1, train("accl", args, console, args.device))
    if os.environ["RANK"] == "0":
        rows = [report(run, runs[0]) for run in runs]
        print_table(rows, console)
        picture = args.out / "digits_ddp.png"
        draw(runs, picture)
        console.print(f"picture: {picture}")
        if args.json:
            args.json.parent.mkdir(parents=True, exist_ok=True)
            args.json.write_text(json.dumps(rows, indent=1) + "\n")
    if args.device and not runs[1].device_calls:
        console.print(f"the device {args.device} ran no collectives")
        return 1
    low = [run for run in runs if run.accuracy < ACCURACY_WANTED]
    for run in low:
        console.print(f"{run.backend}: accuracy {run.accuracy:.4f} is below {ACCURACY_WANTED}")
    return 1 if low else 0


if __name__ == "__main__":
    sys.exit(main())
