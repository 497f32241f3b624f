#!/usr/bin/env python3
"""Trains ResNet-50 for a few steps with DistributedDataParallel, over the host path and over a device.

    python examples/device_resnet.py                                  # two ranks, an engine in software in each
    python examples/device_resnet.py --images ~/data/hymenoptera_data/train --side 224 --steps 20
    python examples/device_resnet.py --device emulator://127.0.0.1:5500 --steps 1
    torchrun --nproc-per-node 2 examples/device_resnet.py

The network is defined here: 25.6 million parameters for 1,000 classes, 23.5 million for two, so that each step sends
The network is defined here: 25.6 million parameters for 1,000 classes, 23.5 million for two, so that each step sends
about 94 MB of gradients. The script generates images of discs and stripes, or reads them from a folder with a folder
for each class. The device runs the sums of gradients in buckets of 25 MiB, which may exceed its buffers. It also runs
the broadcasts with which DistributedDataParallel starts each step. The host computes the network and the optimizer.
Each rank has its own batch statistics, and rank 0's are kept.
"""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path

import torch
from device_common import Job, main_of, parser_of, positive, report_training
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

KINDS = (".jpg", ".jpeg", ".png", ".bmp", ".ppm")
# Blocks of each stage and the channels of their middle convolutions.
STAGES = ((3, 64), (4, 128), (6, 256), (3, 512))
EXPANSION = 4
# Mean and deviation of ImageNet, by which inputs of such networks are normalised.
MEAN = torch.tensor([0.485, 0.456, 0.406]).view(3, 1, 1)
DEVIATION = torch.tensor([0.229, 0.224, 0.225]).view(3, 1, 1)


def convolution(inputs: int, outputs: int, kernel: int, stride: int = 1) -> nn.Sequential:
    """Returns a convolution that keeps the size, except for its stride, with normalisation."""
    return nn.Sequential(
        nn.Conv2d(inputs, outputs, kernel, stride=stride, padding=kernel // 2, bias=False), nn.BatchNorm2d(outputs)
    )


class Bottleneck(nn.Module):
    """1x1, 3x3 and 1x1 convolutions, with a shortcut around them."""

    def __init__(self, inputs: int, middle: int, stride: int) -> None:
        super().__init__()
        outputs = middle * EXPANSION
        self.last = nn.BatchNorm2d(outputs)
        self.main = nn.Sequential(
            convolution(inputs, middle, 1),
            nn.ReLU(inplace=True),
            convolution(middle, middle, 3, stride),
            nn.ReLU(inplace=True),
            nn.Conv2d(middle, outputs, 1, bias=False),
        )
        is_same = inputs == outputs and stride == 1
        self.around: nn.Module = nn.Identity() if is_same else convolution(inputs, outputs, 1, stride)

    def forward(self, images: Tensor) -> Tensor:
        """Returns the sum of both branches."""
        return nn.functional.relu(self.last(self.main(images)) + self.around(images))


class ResNet50(nn.Module):
    """The network of 50 layers: a 7x7 convolution, 16 blocks in four stages, and a linear layer."""

    def __init__(self, classes: int) -> None:
        super().__init__()
        self.stem = nn.Sequential(convolution(3, 64, 7, stride=2), nn.ReLU(inplace=True), nn.MaxPool2d(3, 2, 1))
        blocks: list[Bottleneck] = []
        channels = 64
        for stage, (count, middle) in enumerate(STAGES):
            for number in range(count):
                blocks.append(Bottleneck(channels, middle, stride=2 if stage > 0 and number == 0 else 1))
                channels = middle * EXPANSION
        self.blocks = nn.Sequential(*blocks)
        self.head = nn.Linear(channels, classes)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
        for block in blocks:
            # Each block starts as its shortcut alone, so that a deep network learns from its first step on.
            nn.init.zeros_(block.last.weight)

    def forward(self, images: Tensor) -> Tensor:
        """Returns class scores of a batch of colour images."""
        scores: Tensor = self.head(self.blocks(self.stem(images)).mean(dim=(2, 3)))
        return scores


class Shapes:
    """Generated images: a disc or stripes, at any position, in any colours."""

    classes = ("disc", "stripes")

    def __init__(self, side: int, seed: int) -> None:
        self.side, self.seed = side, seed

    def batch(self, numbers: range) -> tuple[Tensor, Tensor]:
        """Returns the images with these numbers and their classes."""
        pairs = [self._image(number) for number in numbers]
        return torch.stack([image for image, _ in pairs]), torch.tensor([label for _, label in pairs])

    def _image(self, number: int) -> tuple[Tensor, int]:
        generator = torch.Generator().manual_seed(self.seed * 1_000_003 + number)
        label = number % 2
        where = torch.linspace(-1, 1, self.side)
        y, x = torch.meshgrid(where, where, indexing="ij")
        a, b, c = (torch.rand(3, generator=generator) - 0.5).tolist()
        mask = (
            ((x - a) ** 2 + (y - b) ** 2 < 0.2) if label == 0 else torch.sin(9 * (x * (1 + a) + y * b * 4) + 6 * c) > 0
        )
        inside, outside = torch.rand(2, 3, 1, 1, generator=generator)
        image = torch.where(mask, inside, outside) + 0.05 * torch.randn(3, self.side, self.side, generator=generator)
        return (image - MEAN) / DEVIATION, label


class Folder:
    """Images of a folder with a folder for each class."""

    def __init__(self, folder: Path, side: int, seed: int) -> None:
        names = sorted(path.name for path in folder.iterdir() if path.is_dir()) if folder.is_dir() else []
        self.classes = tuple(names)
        found = [
            (path, label)
            for label, name in enumerate(names)
            for path in sorted((folder / name).iterdir())
            if path.suffix.lower() in KINDS
        ]
        if not found:
            raise FileNotFoundError(f"{folder} has no folder with images in it; expected one for each class")
        order = torch.randperm(len(found), generator=torch.Generator().manual_seed(seed)).tolist()
        self.files, self.side = [found[number] for number in order], side

    def batch(self, numbers: range) -> tuple[Tensor, Tensor]:
        """Returns the images with these numbers, modulo the number of files, and their classes."""
        chosen = [self.files[number % len(self.files)] for number in numbers]
        return torch.stack([self._read(path) for path, _ in chosen]), torch.tensor([label for _, label in chosen])

    def _read(self, path: Path) -> Tensor:
        # Imported here, because the generated images do not need Pillow.
        from PIL import Image

        with Image.open(path) as image:
            picture = image.convert("RGB").resize((self.side, self.side))
        data = torch.frombuffer(bytearray(picture.tobytes()), dtype=torch.uint8)
        return (data.view(self.side, self.side, 3).permute(2, 0, 1).float() / 255.0 - MEAN) / DEVIATION


def train(job: Job) -> None:
    """Trains for some steps; each rank takes its share of a batch."""
    args = job.args
    source = Folder(args.images, args.side, args.seed) if args.images else Shapes(args.side, args.seed)
    torch.manual_seed(args.seed)
    model = DistributedDataParallel(ResNet50(len(source.classes)), gradient_as_bucket_view=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=args.learning_rate, momentum=0.9)

    def loss_of(images: Tensor, labels: Tensor) -> Tensor:
        return nn.functional.cross_entropy(model(images), labels)

    with job.progress(args.steps) as advance:
        for step in range(args.steps):
            first = (step * job.world + job.rank) * args.batch
            images, labels = source.batch(range(first, first + args.batch))
            loss = job.step(partial(loss_of, images, labels), optimizer)
            advance(f"loss {loss:.4f}")
    parameters = sum(parameter.numel() for parameter in model.parameters())
    job.run.figures["parameters"] = f"{parameters:,}"
    job.run.figures["classes"] = ", ".join(source.classes)
    job.keep(model.module)


def main() -> int:
    """Trains over both paths and compares."""
    parser = parser_of(__doc__ or "")
    parser.add_argument("--images", type=Path, metavar="FOLDER", help="folder with a folder of images for each class")
    parser.add_argument("--side", type=positive, default=64, help="side of the images in pixels (default: 64)")
    parser.add_argument("--batch", type=positive, default=4, help="images per step on each rank (default: 4)")
    parser.add_argument("--steps", type=positive, default=4, help="training steps (default: 4)")
    parser.add_argument("--learning-rate", type=float, default=0.01, help="learning rate of SGD (default: 0.01)")
    report = report_training(
        "ResNet-50, DistributedDataParallel",
        "forward and backward passes, the optimizer, and calls that the device does not run, such as barriers",
    )
    return main_of(parser, train, report)


if __name__ == "__main__":
    sys.exit(main())
