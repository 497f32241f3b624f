"""Tensors and a model for tests of compression, and comparisons of ranks' results."""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor


def contribution(rank, count=5003, seed=0):
    return torch.randn(count, generator=torch.Generator().manual_seed(100 * seed + rank))


def same_on_all(*tensors):
    """Whether all ranks have the same bits."""
    for tensor in tensors:
        mine = tensor.detach().contiguous().view(torch.uint8)
        rows = mine.new_empty(dist.get_world_size(), mine.numel())
        dist.all_gather_into_tensor(rows.view(-1), mine.view(-1))
        if not all(torch.equal(row, mine.view(-1)) for row in rows):
            return False
    return True


def error(result, exact):
    """Norm of the error divided by the norm of the exact result."""
    return ((result.double() - exact.double()).norm() / exact.double().norm()).item()


class Model(nn.Module):
    """Two layers that are large enough to be compressed, and small layers that are not."""

    def __init__(self):
        super().__init__()
        self.up = nn.Linear(48, 96)
        self.norm = nn.LayerNorm(96)
        self.down = nn.Linear(96, 48)
        self.head = nn.Linear(48, 5)

    def forward(self, x):
        return self.head(torch.relu(self.down(self.norm(torch.relu(self.up(x))))))


def batch(rank, step):
    """Inputs and targets of a rank's model."""
    generator = torch.Generator().manual_seed(1000 * rank + step)
    return torch.randn(8, 48, generator=generator), torch.randn(8, 5, generator=generator)


def train(rank, model, steps=4):
    """Trains for `steps` steps and returns the whole parameters."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    for step in range(steps):
        inputs, targets = batch(rank, step)
        optimizer.zero_grad()
        (model(inputs) - targets).square().mean().backward()
        optimizer.step()
    return [p.full_tensor() if isinstance(p, DTensor) else p.detach().clone() for p in model.parameters()]


def residuals_of(state):
    """Copies of the error-feedback residuals that a compression state holds: of contributions and of sums, by name."""
    residuals, residuals_of_sums = state._residual_store.copies()
    return {
        "residuals": residuals,
        "residuals_of_sums": residuals_of_sums,
    }


def decide(state, codecs):
    """Sets the codecs of parameters from now on, as a compression state does itself after measuring errors."""
    state._decided.update(codecs)
    state._keep_figures(state._plans)
