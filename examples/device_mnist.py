#!/usr/bin/env python3
"""Trains a convolutional network on images of 28x28 digits with DistributedDataParallel, over the host path and over a
device.

    python examples/device_mnist.py                                  # two ranks, an engine in software in each
    python examples/device_mnist.py --device none                    # the host path alone
    python examples/device_mnist.py --device emulator://127.0.0.1:5500
    torchrun --nproc-per-node 2 examples/device_mnist.py --mnist ~/data/MNIST/raw

The images are the 1,797 digits of scikit-learn, scaled from 8x8 to 28x28. With --mnist they are MNIST's own, from a
folder with its four IDX files, compressed or not. The device runs the sums of gradients, which DistributedDataParallel
issues bucket by bucket during the backward pass, and the broadcasts at the start. The host computes the network and the
optimizer.
"""

from __future__ import annotations

import gzip
import struct
import sys
from functools import partial
from pathlib import Path

import torch
from device_common import Job, main_of, mean, parser_of, positive, report_training
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

ACCURACY_WANTED = 0.9
SIDE = 28
# First word of an IDX file: unsigned bytes in three dimensions, or in one.
IMAGES, LABELS = 0x0803, 0x0801


class MnistNet(nn.Module):
    """Two convolutions and two linear layers: about 105,000 parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(1, 16, kernel_size=3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(16, 32, kernel_size=3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2),
        )
        self.head = nn.Sequential(nn.Flatten(), nn.Linear(32 * 7 * 7, 64), nn.ReLU(), nn.Linear(64, 10))

    def forward(self, images: Tensor) -> Tensor:
        """Returns class scores of a batch of 1x28x28 images."""
        scores: Tensor = self.head(self.features(images))
        return scores


def digits() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Returns training images and labels, then test images and labels, from scikit-learn; the same split on every
    rank."""
    from sklearn.datasets import load_digits

    raw = load_digits()
    images = torch.tensor(raw.images, dtype=torch.float32).unsqueeze(1) / 16.0
    images = nn.functional.interpolate(images, size=(SIDE, SIDE), mode="bilinear", align_corners=False)
    labels = torch.tensor(raw.target)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    test, train = order[:360], order[360:]
    return images[train], labels[train], images[test], labels[test]


def mnist(folder: Path) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Returns the same from MNIST's files."""
    parts = []
    for part in ("train", "t10k"):
        parts.append(read_idx(folder, f"{part}-images", IMAGES).unsqueeze(1).float() / 255.0)
        parts.append(read_idx(folder, f"{part}-labels", LABELS).long())
    for images, labels in (parts[:2], parts[2:]):
        if images.shape[1:] != (1, SIDE, SIDE) or len(images) != len(labels):
            raise ValueError(
                f"{folder}: expected images of {SIDE}x{SIDE} with a label each, got {tuple(images.shape)} and {len(labels)} labels"
            )
    return parts[0], parts[1], parts[2], parts[3]


def read_idx(folder: Path, name: str, magic: int) -> Tensor:
    """Reads an IDX file of unsigned bytes, compressed by gzip or not."""
    kind = "idx3" if magic == IMAGES else "idx1"
    names = [f"{name}{mark}{kind}-ubyte{packed}" for mark in "-." for packed in ("", ".gz")]
    path = next((folder / name for name in names if (folder / name).is_file()), None)
    if path is None:
        raise FileNotFoundError(f"{folder} has none of {', '.join(names)}")
    data = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    dimensions = magic & 0xFF
    head = 4 * (1 + dimensions)
    if len(data) < head or struct.unpack_from(">I", data)[0] != magic:
        raise ValueError(f"{path}: expected an IDX file of unsigned bytes in {dimensions} dimensions")
    shape = struct.unpack_from(f">{dimensions}I", data, 4)
    if len(data) - head != torch.Size(shape).numel():
        raise ValueError(f"{path} has {len(data) - head} bytes of data, and its header has the shape {shape}")
    return torch.frombuffer(bytearray(data[head:]), dtype=torch.uint8).view(shape)


def train(job: Job) -> None:
    """Trains for some epochs, then measures the accuracy on the test images."""
    args = job.args
    images, labels, test_images, test_labels = mnist(args.mnist) if args.mnist else digits()
    torch.manual_seed(args.seed)
    model = DistributedDataParallel(MnistNet(), bucket_cap_mb=args.bucket_mib)
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    batches = len(labels) // args.batch
    if batches < 1 or args.batch < job.world:
        raise ValueError(f"--batch: expected from {job.world} (ranks) to {len(labels)} (images), got {args.batch}")
    steps = min(args.steps or args.epochs * batches, args.epochs * batches)

    def loss_of(images: Tensor, labels: Tensor) -> Tensor:
        return nn.functional.cross_entropy(model(images), labels)

    with job.progress(steps) as advance:
        for number in range(steps):
            epoch, batch = divmod(number, batches)
            order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(args.seed + epoch))
            # One global batch; each rank takes every world-th image of it.
            chosen = order[batch * args.batch : (batch + 1) * args.batch][job.rank :: job.world]
            loss = job.step(partial(loss_of, images[chosen], labels[chosen]), optimizer)
            advance(f"loss {loss:.4f}")
    with torch.no_grad():
        # Each rank evaluates a share of the test images.
        own = slice(job.rank, None, job.world)
        hits = model.module(test_images[own]).argmax(dim=1) == test_labels[own]
    found = mean([hits.sum().item()])[0] * job.world / len(test_labels)
    job.run.figures["test accuracy"] = f"{found:.4f}"
    job.keep(model.module)
    if not args.steps and found < ACCURACY_WANTED:
        raise RuntimeError(f"accuracy {found:.4f} over {job.run.device} is below {ACCURACY_WANTED}")


def main() -> int:
    """Trains over both paths and compares."""
    parser = parser_of(__doc__ or "")
    parser.add_argument("--mnist", type=Path, metavar="FOLDER", help="MNIST's four IDX files, in place of the digits")
    parser.add_argument("--epochs", type=positive, default=4, help="passes over the images (default: 4)")
    parser.add_argument("--steps", type=positive, help="stop after this many steps, without judging accuracy")
    parser.add_argument("--batch", type=positive, default=64, help="images per step, over all ranks (default: 64)")
    parser.add_argument("--bucket-mib", type=float, default=0.125, help="size of a gradient bucket (default: 0.125)")
    report = report_training(
        "MNIST-shaped network, DistributedDataParallel",
        "forward and backward passes, the optimizer, and calls that the device does not run, such as barriers",
    )
    return main_of(parser, train, report)


if __name__ == "__main__":
    sys.exit(main())
