"""Nested iteration over nets of increasing depth (two by default), then MG/Opt, on torchbraid's API.

A script as torchbraid's users would write it after changing the imports. `test_compat_torchbraid.py` runs it on two
ranks. Rank 0 prints its results as JSON at the end.
"""

import argparse
import contextlib
import io
import json

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch_accl.compat import torchbraid
from torch_accl.compat.torchbraid import MPI
from torch_accl.compat.torchbraid.mgopt import mgopt_solver, root_print
from torch_accl.compat.torchbraid.utils import getDevice

SIDE = 8
CLASSES = 4


class Images(torch.utils.data.Dataset):
    """A fixed template for each class, with noise."""

    def __init__(self, count, seed):
        generator = torch.Generator().manual_seed(seed)
        templates = torch.randn(CLASSES, 1, SIDE, SIDE, generator=torch.Generator().manual_seed(0))
        self.targets = torch.randint(CLASSES, (count,), generator=generator)
        self.images = templates[self.targets] + 0.5 * torch.randn(count, 1, SIDE, SIDE, generator=generator)

    def __len__(self):
        return len(self.images)

    def __getitem__(self, index):
        return self.images[index], self.targets[index]


class OpenLayer(nn.Module):
    def __init__(self, channels):
        super().__init__()
        self.conv = nn.Conv2d(1, channels, 3, padding=1)

    def forward(self, x):
        return F.relu(self.conv(x))


class StepLayer(nn.Module):
    def __init__(self, channels):
        super().__init__()
        self.conv = nn.Conv2d(channels, channels, 3, padding=1)

    def forward(self, x):
        y = self.conv(x)
        y.tanh_()
        return y


class CloseLayer(nn.Module):
    def __init__(self, channels):
        super().__init__()
        self.fc = nn.Linear(channels * SIDE * SIDE, CLASSES)

    def forward(self, x):
        return self.fc(torch.flatten(x, 1))


class ParallelNet(nn.Module):
    def __init__(self, channels=4, global_steps=8, Tf=1.0, max_fwd_levels=1, max_bwd_levels=1, max_iters=1, cfactor=2):
        super().__init__()
        self.parallel_nn = torchbraid.LayerParallel(
            MPI.COMM_WORLD,
            lambda: StepLayer(channels),
            global_steps,
            Tf,
            max_fwd_levels=max_fwd_levels,
            max_bwd_levels=max_bwd_levels,
            max_iters=max_iters,
        )
        self.parallel_nn.setPrintLevel(0, True)
        self.parallel_nn.setCFactor(cfactor)
        self.parallel_nn.setSkipDowncycle(True)
        self.parallel_nn.setMinCoarse(2)
        compose = self.compose = self.parallel_nn.comp_op()
        self.open_nn = compose(OpenLayer, channels)
        self.close_nn = compose(CloseLayer, channels)

    def forward(self, x):
        x = self.compose(self.open_nn, x)
        x = self.parallel_nn(x)
        return self.compose(self.close_nn, x)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--ni-levels", type=int, default=2)
    parser.add_argument("--ni-rfactor", type=int, default=2)
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--lp-levels", type=int, default=1)
    parser.add_argument("--lp-iters", type=int, default=2)
    args = parser.parse_args()
    procs, rank = MPI.COMM_WORLD.Get_size(), MPI.COMM_WORLD.Get_rank()
    device, _ = getDevice(MPI.COMM_WORLD)

    # Each rank shuffles in its own order; only the order of rank 0 counts.
    train_loader = torch.utils.data.DataLoader(Images(120, 1), batch_size=20, shuffle=True)
    test_loader = torch.utils.data.DataLoader(Images(60, 2), batch_size=20, shuffle=True)
    ni_steps = np.array([args.steps // args.ni_rfactor ** (args.ni_levels - i - 1) for i in range(args.ni_levels)])
    networks = [
        (
            "Factory",
            {
                "global_steps": steps,
                "max_iters": args.lp_iters,
                "max_fwd_levels": args.lp_levels,
                "max_bwd_levels": args.lp_levels,
            },
        )
        for steps in np.flip(ni_steps)
    ]
    optims = [("pytorch_adam", {"lr": 0.003, "betas": (0.9, 0.999), "eps": 1e-08}) for _ in ni_steps]
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        mgopt = mgopt_solver(device=device)
        mgopt.initialize_with_nested_iteration(
            lambda level, **kwargs: ParallelNet(**kwargs),
            ni_steps,
            train_loader,
            test_loader,
            networks,
            interp_params="tb_parallel_get_injection_interp_params",
            epochs=1,
            log_interval=3,
            mgopt_printlevel=1,
            optims=optims,
            seed=1,
            preserve_optim=True,
            zero_init_guess=0,
        )
        mgopt.options_used()
        losses = mgopt.mgopt_solve(
            train_loader,
            test_loader,
            epochs=args.epochs,
            log_interval=3,
            mgopt_tol=0,
            mgopt_iter=1,
            nrelax_pre=1,
            nrelax_post=1,
            nrelax_coarse=3,
            mgopt_printlevel=1,
            mgopt_levels=args.ni_levels,
            line_search=("tb_simple_backtrack_ls", {"ls_params": {"n_line_search": 6, "alpha": 1.0, "c1": 0.0001}}),
            restrict_params="tb_parallel_get_injection_restrict_params",
            restrict_grads="tb_parallel_get_injection_restrict_params",
            preserve_optim=True,
        )
        root_print(rank, 1, 1, mgopt)
        mgopt.options_used()
    text = said.getvalue()
    if rank == 0:
        right = [int(line.split(" right")[0].split()[-3]) for line in text.splitlines() if " right (" in line]
        shown = {
            "procs": procs,
            "losses": losses,
            "lengths": mgopt.levels[0].out_ls_step,
            "levels": [level.model.parallel_nn.fwd_app.num_steps for level in mgopt.levels],
            "right": right,
            "of": len(test_loader.dataset),
            "text": text,
        }
        print(json.dumps(shown))


if __name__ == "__main__":
    main()
