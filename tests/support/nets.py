"""Helpers of the tests of layer-parallel nets: batches, a loss, gradients, and a group of one rank."""

import torch
import torch.distributed as dist


def alone():
    """Returns a group that contains this rank only, to run the same net on one rank."""
    return dist.new_subgroups(group_size=1)[0]


def drawn(seed, *shapes, dtype=torch.float32):
    """Returns a tensor of each shape, drawn one after another from the same seed on all ranks."""
    generator = torch.Generator().manual_seed(seed)
    return tuple(torch.randn(shape, generator=generator, dtype=dtype) for shape in shapes)


def squared(y, target):
    """Returns the mean of the squared differences, a loss."""
    return (y - target).square().mean()


def gradients_of(net):
    """Returns the gradient of each parameter of this rank, by name."""
    return {name: parameter.grad for name, parameter in net.named_parameters()}
