"""A few steps of data-parallel training, as on any cluster: the script names no hosts, addresses or launchers."""

from __future__ import annotations

import torch
import torch.distributed as dist
import torch_accl  # noqa: F401
from torch.nn.parallel import DistributedDataParallel

STEPS = 3


def main() -> None:
    """Trains; rank 0 prints the result."""
    dist.init_process_group("accl")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    torch.set_num_threads(1)
    model = DistributedDataParallel(torch.nn.Linear(1024, 256))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    inputs = torch.randn(world, 32, 1024)
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss = model(inputs[rank]).square().mean()
        loss.backward()
        optimizer.step()
    # Check that all ranks have the same parameters.
    sums = torch.stack([parameter.detach().double().sum() for parameter in model.parameters()])
    all_sums = [torch.empty_like(sums) for _ in range(world)]
    dist.all_gather(all_sums, sums)
    if rank == 0:
        agree = all(torch.equal(one, sums) for one in all_sums)
        print(f"{world} ranks, parameters {'agree' if agree else 'DIFFER'}; linked by {'; '.join(links())}", flush=True)
    dist.destroy_process_group()


def links() -> list[str]:
    """Returns the transports by which this rank reaches the others."""
    group = dist.group.WORLD
    assert group is not None
    ranks = group._get_backend(torch.device("cpu")).snapshot()["ranks"]
    return [one["link"] for one in ranks if one["rank"] != dist.get_rank() and one["link"]]


if __name__ == "__main__":
    main()
