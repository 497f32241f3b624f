"""A recurrent net on torchbraid's API, as its users would write it after changing the imports.

Sequences are spread over several ranks; tail and loss are on rank 0. `test_compat_torchbraid.py` runs this script on
two ranks. Rank 0 prints its results as JSON at the end.
"""

import argparse
import json
from timeit import default_timer as timer

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch_accl.compat import torchbraid
from torch_accl.compat.torchbraid import MPI

CLASSES = 4


class ImplicitGRU(nn.Module):
    """A layer of a GRU whose step is implicit in time; the same on all ranks."""

    def __init__(self, input_size, hidden_size, seed=20):
        super().__init__()
        torch.manual_seed(seed)
        self.of_input = nn.Linear(input_size, 3 * hidden_size)
        self.of_state = nn.Linear(hidden_size, 3 * hidden_size)

    def reduceX(self, x):
        return self.of_input(x).chunk(3, 1)

    def fastForward(self, level, tstart, tstop, reduced, h_prev):
        dt, h = tstop - tstart, h_prev[0][0]
        xr, xz, xn = reduced
        hr, hz, hn = self.of_state(h).chunk(3, 1)
        n = torch.tanh(xn + torch.sigmoid(xr + hr) * hn)
        share = dt * (1 - torch.sigmoid(xz + hz))
        return (((h + share * n) / (1 + share)).unsqueeze(0),)

    def forward(self, level, tstart, tstop, x, h_prev):
        return self.fastForward(level, tstart, tstop, self.reduceX(x), h_prev)


class Sequences(torch.utils.data.TensorDataset):
    """Sequences whose angle depends on the class and oscillates over time, with noise.

    Rank 0 creates the sequences and gives each rank one part of them.
    """

    def __init__(self, comm, count, length, seed):
        if comm.Get_rank() == 0:
            generator = torch.Generator().manual_seed(seed)
            targets = torch.randint(CLASSES, (count,), generator=generator)
            angle = 1.57 * targets[:, None] + 0.2 * torch.arange(length).sin()
            x = torch.stack((angle.sin(), angle.cos(), torch.arange(length).cos().expand(count, -1)), 2)
            x += 0.5 * torch.randn(x.shape, generator=generator)
            parts = [(part.contiguous(), targets) for part in x.chunk(comm.Get_size(), 1)]
        else:
            parts = None
        super().__init__(*comm.scatter(parts, root=0))


class ParallelNet(nn.Module):
    def __init__(self, args, local_steps):
        super().__init__()
        self.hidden = args.hidden
        cell = ImplicitGRU(3, args.hidden)
        self.parallel_gru = torchbraid.GRU_Parallel(
            MPI.COMM_WORLD,
            cell,
            local_steps,
            args.hidden,
            1,
            args.Tf,
            max_fwd_levels=args.lp_max_levels,
            max_bwd_levels=args.lp_max_levels,
            max_iters=args.lp_max_iters,
        )
        self.parallel_gru.setFwdMaxIters(args.lp_fwd_max_iters)
        self.parallel_gru.setPrintLevel(0)
        self.parallel_gru.setCFactor({-1: args.lp_cfactor})
        self.parallel_gru.setSkipDowncycle(True)
        self.parallel_gru.setNumRelax(1)
        self.parallel_gru.setFwdNumRelax(1, level=0)
        self.parallel_gru.setBwdNumRelax(0, level=0)
        compose = self.compose = self.parallel_gru.comp_op()
        self.close_gru = compose(nn.Linear, args.hidden, CLASSES)

    def forward(self, x):
        h = torch.zeros(1, x.size(0), self.hidden)
        hn = self.parallel_gru(x, h)
        return self.compose(self.close_gru, hn[-1, :, :])


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--length", type=int, default=24)
    parser.add_argument("--hidden", type=int, default=20)
    parser.add_argument("--Tf", type=float, default=24.0)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--lr", type=float, default=0.1)
    parser.add_argument("--lp-max-levels", type=int, default=2)
    parser.add_argument("--lp-max-iters", type=int, default=1)
    parser.add_argument("--lp-fwd-max-iters", type=int, default=2)
    parser.add_argument("--lp-cfactor", type=int, default=4)
    args = parser.parse_args()

    comm = MPI.COMM_WORLD
    rank, procs = comm.Get_rank(), comm.Get_size()
    comm.Barrier()
    torch.manual_seed(1)
    train_set, test_set = Sequences(comm, 330, args.length, 1), Sequences(comm, 100, args.length, 2)
    train_loader = torch.utils.data.DataLoader(train_set, batch_size=50)
    test_loader = torch.utils.data.DataLoader(test_set, batch_size=50)
    torch.manual_seed(1)
    model = ParallelNet(args, args.length // procs)
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.9)

    losses, start = [], timer()
    model.train()
    for _ in range(args.epochs):
        for data, target in train_loader:
            optimizer.zero_grad()
            loss = model.compose(nn.CrossEntropyLoss(), model(data), target)
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    seconds = timer() - start
    stats = model.parallel_gru.getFwdStats(), model.parallel_gru.getBwdStats()
    model.eval()
    correct = 0
    with torch.no_grad():
        for data, target in test_loader:
            output = model(data)
            if rank == 0:
                correct += output.argmax(1).eq(target).sum().item()
    weights = comm.gather(model.parallel_gru.GRU_models.of_input.weight.detach())
    if rank == 0:
        shown = {
            "procs": procs,
            "losses": losses,
            "correct": correct,
            "of": len(test_set),
            "seconds": seconds,
            "alike": all(F.mse_loss(weight, weights[0]).item() == 0 for weight in weights),
            "stats": stats,
        }
        print(json.dumps(shown))


if __name__ == "__main__":
    main()
