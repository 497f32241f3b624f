"""Data parallelism combined with layer parallelism, by torchbraid's names.

Owns the division of ranks, samples and gradients. Communication is in `_communicator.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from .. import _mpi as MPI
from .._communicator import Comm
from .._mailbox import device_of
from .._world import communicator_of

__all__ = ["Partioner", "Partition", "average_gradients", "split_communicator"]


def split_communicator(comm: Any, splitting: int) -> tuple[Comm, Comm]:
    """Returns the communicators of data parallelism and of layer parallelism. Collective.

    The first has `splitting` successive ranks, the second every `splitting`-th rank.

    Raises:
        ValueError: the number of ranks is not a multiple of `splitting`.
    """
    whole = communicator_of(comm)
    if splitting < 1 or whole.size % splitting:
        raise ValueError(f"split_communicator: {whole.size} ranks cannot be cut into groups of {splitting}")
    rank = whole.rank
    return whole.Split(rank // splitting, rank), whole.Split(rank % splitting, rank)


def average_gradients(model: nn.Module, comm_dp: Any) -> None:
    """Replaces each gradient by its mean over the ranks of `comm_dp`, with one reduction for each type and device.

    A gradient that only some ranks have counts as zero on the others. Collective.
    """
    comm = communicator_of(comm_dp)
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if comm.size == 1 or not parameters:
        return
    group = comm.group
    assert group is not None, "a communicator of several ranks has a group"
    flags = [parameter.grad is not None for parameter in parameters]
    is_there = torch.tensor(flags, dtype=torch.uint8, device=device_of(group))
    comm.Allreduce(MPI.IN_PLACE, is_there, MPI.MAX)
    buckets: dict[tuple[torch.dtype, torch.device], list[nn.Parameter]] = {}
    for parameter, wanted in zip(parameters, is_there.tolist()):
        if wanted:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            buckets.setdefault((parameter.grad.dtype, parameter.grad.device), []).append(parameter)
    for bucket in buckets.values():
        gradients = [parameter.grad for parameter in bucket if parameter.grad is not None]
        flat = torch.cat([gradient.detach().flatten() for gradient in gradients])
        comm.Allreduce(MPI.IN_PLACE, flat, MPI.SUM)
        flat /= comm.size
        for gradient, mean in zip(gradients, torch.split(flat, [gradient.numel() for gradient in gradients])):
            gradient.detach().copy_(mean.view(gradient.shape))


class Partition:
    """The samples of a data set with the given indices."""

    def __init__(self, data: Any, index: Sequence[int]) -> None:
        self.data = data
        self.index = index

    def __len__(self) -> int:
        return len(self.index)

    def __getitem__(self, index: int) -> Any:
        return self.data[self.index[index]]


class Partioner:
    """Cuts a data set, shuffled by `seed`, into `procs` parts: batches of `batch_size` go to the parts round-robin.

    The order is torchbraid's, which numpy makes of the seed. The global random generators of numpy and torch are not
    used.
    """

    def __init__(self, data: Any, procs: int, seed: int, batch_size: int) -> None:
        # The sequence of `RandomState` for a seed never changes.
        from numpy.random import RandomState

        self.data = data
        order: list[int] = RandomState(seed).permutation(len(data)).tolist()
        batches = [order[first : first + batch_size] for first in range(0, len(order), batch_size)]
        self.partitions = [[number for batch in batches[rank::procs] for number in batch] for rank in range(procs)]

    def get_partion(self, rank: int) -> Partition:
        """Returns the part of a rank."""
        return Partition(self.data, self.partitions[rank])

    get_partition = get_partion
