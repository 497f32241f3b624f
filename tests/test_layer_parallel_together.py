"""Layer-parallel nets under other wrappers: sharded over replicas, and with compressed gradients."""

import pytest
import torch
import torch.distributed as dist
from support import on_ranks
from support.nets import drawn, squared
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch_accl import compression, layer_parallel
from torch_accl.layer_parallel import Cycle, LayerParallel, ode, plain


def small(number, width=32):
    torch.manual_seed(number)
    return nn.Sequential(nn.Linear(width, width), nn.Tanh())


def layers(dtype=torch.float32):
    blocks = [plain(small(50)), *(ode(small(number)) for number in range(8)), plain(small(51))]
    for block in blocks:
        block.module.to(dtype)
    return blocks


def batch(rows=8, dtype=torch.float32, width=32):
    return tuple(each.to(dtype) for each in drawn(7, (rows, width), (rows, width)))


def replicas():
    """Returns the mesh of two replicas with two ranks each, and the index of this rank's replica."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "lp"))
    return mesh, mesh.get_local_rank("dp")


@pytest.mark.slow
@on_ranks(4)
@pytest.mark.parametrize("mode", ["inexact", "exact-wave"])
def test_replicas_whose_gradients_are_compressed_stay_the_same_by_a_bit(rank, world, mode):
    mesh, dp = replicas()
    net = LayerParallel(layers(), mesh=mesh["lp"], mode=mode, fwd=Cycle(factor=2), bwd=Cycle(factor=2))
    wrapped = DistributedDataParallel(net, process_group=mesh["dp"].get_group())
    state = compression.CompressionState(
        compression.Compression("maxmin:8", min_elements=1), wrapped, mesh["dp"].get_group()
    )
    wrapped.register_comm_hook(state, compression.ddp_hook)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    x, target = batch()
    mine = slice(4 * dp, 4 * dp + 4)
    losses = []
    for _ in range(12):
        optimizer.zero_grad()
        losses.append(float(layer_parallel.step(wrapped, x[mine], target[mine], squared)))
        optimizer.step()
    assert losses[-1] < losses[0]
    flat = torch.cat([parameter.detach().flatten() for parameter in net.parameters()])
    both = [torch.empty_like(flat) for _ in range(2)]
    dist.all_gather(both, flat, group=mesh["dp"].get_group())
    assert torch.equal(*both)


@pytest.mark.slow
@on_ranks(4)
@pytest.mark.parametrize("mode", ["inexact", "exact-wave", "exact-pipeline"])
@pytest.mark.parametrize("way", ["step", "backward"])
def test_a_net_whose_replicas_share_its_parameters_trains_like_one_net(rank, world, mode, way):
    mesh, dp = replicas()
    cycles = dict(fwd=Cycle(factor=2, iterations=9), bwd=Cycle(factor=2, iterations=9))
    alone = dist.new_subgroups(group_size=1)[0]
    one = LayerParallel(layers(torch.float64), group=alone, mode="exact-wave")
    net = LayerParallel(layers(torch.float64), mesh=mesh["lp"], mode=mode, micro_batches=2, **cycles)
    fully_shard(net, mesh=mesh["dp"], reshard_after_forward=False)
    assert all(isinstance(parameter, DTensor) for parameter in net.parameters())
    optimizers = [torch.optim.Adam(model.parameters(), lr=0.01) for model in (one, net)]
    x, target = batch(dtype=torch.float64)
    mine = slice(4 * dp, 4 * dp + 4)
    for _ in range(3):
        for optimizer in optimizers:
            optimizer.zero_grad()
        one.step(x, target, squared)
        if way == "step":
            layer_parallel.step(net, x[mine], target[mine], squared)
        else:
            y = net(x[mine])
            (squared(y, target[mine]) if net.is_last else y).backward()
        for optimizer in optimizers:
            optimizer.step()
    for name, parameter in net.named_parameters():
        # Each replica has half of the rows of the parameter.
        torch.testing.assert_close(
            parameter.to_local(), one.get_parameter(name).chunk(2)[dp].detach(), rtol=1e-6, atol=1e-8
        )


@on_ranks(2)
def test_a_layer_that_is_sharded_by_itself_is_refused_on_all_ranks(rank, world):
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("lp", "dp"))
    net = LayerParallel(layers(), mesh=mesh["lp"])
    if rank == 0:
        fully_shard(net.layers["1"], mesh=mesh["dp"])
    with pytest.raises(layer_parallel.LayerParallelError, match="rank 0 .*layer 1 is sharded by itself"):
        net.step(*batch(), squared)


class Failing(nn.Module):
    """A layer that raises while `fails` is set."""

    def __init__(self, number):
        super().__init__()
        self.inner = small(number)
        self.fails = False

    def forward(self, x):
        if self.fails:
            raise ArithmeticError("no luck")
        return self.inner(x)


def wrapped_in(way, net, mesh):
    if way == "ddp":
        return DistributedDataParallel(net, process_group=mesh["dp"].get_group())
    return fully_shard(net, mesh=mesh["dp"], reshard_after_forward=False)


@pytest.mark.slow
@on_ranks(4)
@pytest.mark.parametrize("way", ["ddp", "fsdp2"])
def test_a_batch_that_fails_in_one_replica_fails_in_all_and_is_left_out(rank, world, way):
    mesh, dp = replicas()
    nets, wrapped, optimizers = [], [], []
    for _ in range(2):
        blocks = [plain(Failing(50)), *(ode(small(number)) for number in range(4)), plain(small(51))]
        nets.append(LayerParallel(blocks, mesh=mesh["lp"], mode="exact-wave"))
        wrapped.append(wrapped_in(way, nets[-1], mesh))
        optimizers.append(torch.optim.SGD(nets[-1].parameters(), lr=0.1, momentum=0.9))
    x, target = batch()
    mine = slice(4 * dp, 4 * dp + 4)
    failing, calm = wrapped

    def broken(y, target):
        raise ArithmeticError("no loss")

    def run(model, optimizer, loss_fn=squared):
        optimizer.zero_grad()
        layer_parallel.step(model, x[mine], target[mine], loss_fn)
        optimizer.step()

    # After an evaluation, FSDP2 may leave whole parameters in place. Their state then does not show how they are
    # sharded.
    nets[0].eval()
    with torch.no_grad():
        nets[0](x[mine])
    nets[0].train()
    for number in range(6):
        if number == 1 and "0" in nets[0].layers:
            nets[0].layers["0"].fails = dp == 1
        if number == 1:
            with pytest.raises(
                layer_parallel.LayerParallelError,
                match=r"^no replica accumulated gradients of this batch: replica 1 \(ranks 2, 3\) failed: rank 0 of the layers failed in .*layer 0 .*no luck",
            ):
                run(failing, optimizers[0])
            assert all(parameter.grad is None for parameter in nets[0].parameters())
            if "0" in nets[0].layers:
                nets[0].layers["0"].fails = False
        if number == 2:
            with pytest.raises(
                layer_parallel.LayerParallelError, match=r"replica 0 \(ranks 0, 1\) failed: rank 1 .*no loss"
            ):
                run(failing, optimizers[0], broken if dp == 0 else squared)
        if number == 3:
            # This error occurs before the batch begins.
            if dp == 1:
                nets[0].mode = "inexact" if rank == 2 else "exact-pipeline"
            with pytest.raises(
                layer_parallel.LayerParallelError,
                match=r"replica 1 \(ranks 2, 3\) failed: ValueError: ranks 0 and 1 of the layers differ in `mode inexact",
            ):
                run(failing, optimizers[0])
            nets[0].mode = "exact-wave"
        if number == 4:
            # An error that all ranks have is raised unchanged.
            nets[0].mode = "inexact" if rank % 2 else "exact-wave"
            with pytest.raises(ValueError, match="ranks 0 and 1 of the layers differ"):
                run(failing, optimizers[0])
            nets[0].mode = "exact-wave"
        run(failing, optimizers[0])
        run(calm, optimizers[1])
    for one, other in zip(*(net.state_dict().values() for net in nets), strict=True):
        one, other = (each.to_local() if isinstance(each, DTensor) else each for each in (one, other))
        assert torch.equal(one, other)


@on_ranks(2)
def test_a_replica_without_batches_left_joins_in_nothing_but_reductions(rank, world):
    net = LayerParallel(layers(), group="alone", mode="exact-wave")
    wrapped = DistributedDataParallel(net)
    x, target = batch()
    with wrapped.join():
        for _ in range(1 + rank):
            layer_parallel.step(wrapped, x, target, squared)
    assert all(parameter.grad is not None for parameter in net.parameters())
