"""An image classifier on torchbraid's API, with an ODE net over ranks and head, tail and loss on rank 0.

The images are random and resemble MNIST's. The script is written as torchbraid's users would write it after
changing the imports. `test_compat_torchbraid.py` runs it under torchrun and mpirun. Rank 0 prints its results as JSON
at the end.
"""

import argparse
import json
import statistics
from timeit import default_timer as timer

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch_accl.compat import torchbraid
from torch_accl.compat.torchbraid import MPI
from torch_accl.compat.torchbraid.mgopt import compute_levels, root_print

SIDE = 12
CLASSES = 10


class Images(torch.utils.data.Dataset):
    """A smooth template for each class, shifted and with noise."""

    def __init__(self, count, seed):
        generator = torch.Generator().manual_seed(seed)
        coarse = torch.randn(CLASSES, 1, 4, 4, generator=torch.Generator().manual_seed(0))
        templates = F.interpolate(coarse, size=(SIDE, SIDE), mode="bicubic")
        self.targets = torch.randint(CLASSES, (count,), generator=generator)
        shifts = torch.randint(-1, 2, (count,), generator=generator)
        images = [templates[target].roll(int(shift), 2) for target, shift in zip(self.targets, shifts)]
        self.images = torch.stack(images) + 0.3 * torch.randn(count, 1, SIDE, SIDE, generator=generator)

    def __len__(self):
        return len(self.images)

    def __getitem__(self, index):
        return self.images[index], self.targets[index]


class Open(nn.Module):
    def __init__(self, channels):
        super().__init__()
        self.channels = channels

    def forward(self, x):
        return x.repeat(1, self.channels, 1, 1)


class Step(nn.Module):
    def __init__(self, channels):
        super().__init__()
        self.conv1 = nn.Conv2d(channels, channels, 3, padding=1)
        self.norm = torchbraid.LPBatchNorm2d(channels)
        self.conv2 = nn.Conv2d(channels, channels, 3, padding=1)

    def forward(self, x):
        return F.relu(self.conv2(F.relu(self.norm(self.conv1(x)))))


class Close(nn.Module):
    def __init__(self, channels):
        super().__init__()
        self.fc = nn.Linear(channels * SIDE * SIDE, CLASSES)

    def forward(self, x):
        return F.log_softmax(self.fc(torch.flatten(x, 1)), dim=1)


class ParallelNet(nn.Module):
    def __init__(self, args, comm_lp=MPI.COMM_WORLD):
        super().__init__()
        channels = args.channels
        self.comm_lp = comm_lp
        self.parallel_nn = torchbraid.LayerParallel(
            comm_lp,
            lambda: Step(channels),
            args.steps,
            args.Tf,
            max_fwd_levels=args.lp_max_levels,
            max_bwd_levels=args.lp_max_levels,
            max_iters=2,
            user_mpi_buf=args.lp_user_mpi_buf,
        )
        self.parallel_nn.setBwdMaxIters(args.lp_bwd_max_iters)
        self.parallel_nn.setFwdMaxIters(args.lp_fwd_max_iters)
        self.parallel_nn.setPrintLevel(0, True)
        self.parallel_nn.setPrintLevel(0, False)
        self.parallel_nn.setCFactor(args.lp_cfactor)
        self.parallel_nn.setSkipDowncycle(True)
        self.parallel_nn.setBwdRelaxOnlyCG(0)
        self.parallel_nn.setFwdRelaxOnlyCG(0)
        self.parallel_nn.setNumRelax(1)
        self.parallel_nn.setNumRelax(0, level=0)

        compose = self.compose = self.parallel_nn.comp_op()
        self.open_nn = compose(Open, channels)
        self.close_nn = compose(Close, channels)

    def serial(self):
        whole = self.parallel_nn.buildSequentialOnRoot()
        return nn.Sequential(self.open_nn, whole, self.close_nn) if self.comm_lp.Get_rank() == 0 else None

    def forward(self, x):
        x = self.compose(self.open_nn, x)
        x = self.parallel_nn(x)
        return self.compose(self.close_nn, x)


def train(rank, args, model, loader, optimizer, epoch, device):
    losses, times = [], []
    model.train()
    criterion = nn.CrossEntropyLoss()
    for batch, (data, target) in enumerate(loader):
        start = timer()
        data, target = data.to(device), target.to(device)
        optimizer.zero_grad()
        loss = model.compose(criterion, model(data), target)
        loss.backward()
        optimizer.step()
        times.append(timer() - start)
        losses.append(loss.item())
        root_print(rank, 1, 1, f"epoch {epoch} batch {batch} loss {loss.item():.6f}")
    return losses, times


def test(rank, model, loader, device):
    model.eval()
    correct, total = 0, 0.0
    criterion = nn.CrossEntropyLoss()
    with torch.no_grad():
        for data, target in loader:
            data, target = data.to(device), target.to(device)
            output = model(data)
            total += model.compose(criterion, output, target).item()
            if rank == 0:
                correct += output.argmax(dim=1, keepdim=True).eq(target.view(-1, 1)).sum().item()
    return correct, total


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=16)
    parser.add_argument("--channels", type=int, default=4)
    parser.add_argument("--Tf", type=float, default=1.0)
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--lr", type=float, default=0.02)
    parser.add_argument("--lp-max-levels", type=int, default=0)
    parser.add_argument("--lp-bwd-max-iters", type=int, default=1)
    parser.add_argument("--lp-fwd-max-iters", type=int, default=2)
    parser.add_argument("--lp-cfactor", type=int, default=4)
    parser.add_argument("--lp-user-mpi-buf", action="store_true")
    parser.add_argument("--timers", default="")
    args = parser.parse_args()
    if args.lp_max_levels < 1:
        args.lp_max_levels = compute_levels(args.steps, 3, args.lp_cfactor)

    comm = MPI.COMM_WORLD
    rank, procs = comm.Get_rank(), comm.Get_size()
    device, host = torchbraid.utils.getDevice(comm=comm)
    torch.manual_seed(torchbraid.utils.seed_from_rank(1, rank))

    # The last batch of each loader is smaller.
    train_set, test_set = Images(330, 1), Images(130, 2)
    train_loader = torch.utils.data.DataLoader(train_set, batch_size=50, shuffle=False)
    test_loader = torch.utils.data.DataLoader(test_set, batch_size=50, shuffle=False)

    model = ParallelNet(args).to(device)
    if args.timers:
        model.parallel_nn.fwd_app.setTimerFile(f"{args.timers}_fwd")
        model.parallel_nn.bwd_app.setTimerFile(f"{args.timers}_bwd")
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.9)

    losses, times, correct = [], [], []
    for epoch in range(1, args.epochs + 1):
        found, took = train(rank, args, model, train_loader, optimizer, epoch, device)
        losses += found
        times += took
        stats = model.parallel_nn.getFwdStats(), model.parallel_nn.getBwdStats()
        correct.append(test(rank, model, test_loader, device)[0])
    timers = model.parallel_nn.getTimersString()
    serial = model.serial()
    comm.Barrier()
    if rank == 0:
        serial.eval()
        with torch.no_grad():
            right = sum(serial(data).argmax(1).eq(target).sum().item() for data, target in test_loader)
        shown = {
            "procs": procs,
            "losses": losses,
            "correct": correct,
            "of": len(test_set),
            "serial_correct": right,
            "seconds": statistics.mean(times),
            "stats": stats,
            "timers": timers,
            "device": str(device),
            "host": str(host),
        }
        print(json.dumps(shown))


if __name__ == "__main__":
    main()
