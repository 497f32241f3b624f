"""FSDP2, tensor parallelism, DTensor, pipelines and checkpoints give the same results as over gloo."""

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from support import on_ranks
from support.consumers import same_as_gloo
from torch import nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe, ScheduleInterleaved1F1B
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel, parallelize_module

STEPS = 3


class Block(nn.Module):
    """A block whose widths neither 2 nor 3 ranks divide, so that shards are uneven and padded."""

    def __init__(self, width=9, inner=23):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, inner)
        self.down = nn.Linear(inner, width)

    def forward(self, x):
        return x + self.down(torch.relu(self.up(self.norm(x))))


def batch(rank, step, width=9, dtype=torch.float32):
    generator = torch.Generator().manual_seed(1000 * rank + step)
    return torch.randn(5, width, generator=generator).to(dtype)


def full(parameters):
    return [p.full_tensor().detach() if isinstance(p, DTensor) else p.detach().clone() for p in parameters]


def train(rank, model, steps=STEPS, dtype=torch.float32):
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    losses = []
    for step in range(steps):
        optimizer.zero_grad()
        loss = model(batch(rank, step, dtype=dtype)).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach().float())
    return losses, full(model.parameters())


FSDP = {
    "plain": {},
    "no_reshard": {"reshard_after_forward": False},
    "mixed_precision": {"mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)},
    "reduced_in_bfloat16": {"mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)},
}


@pytest.mark.slow
@on_ranks(2, fresh=True, init=False)
@pytest.mark.parametrize("options", list(FSDP))
def test_fsdp2_trains_to_the_same_weights(rank, world, options):
    def consumer(rank, world):
        mesh = init_device_mesh("cpu", (world,))
        model = nn.Sequential(Block(), Block(), nn.Linear(9, 5))
        for layer in model:
            fully_shard(layer, mesh=mesh, **FSDP[options])
        fully_shard(model, mesh=mesh, **FSDP[options])
        return train(rank, model)

    same_as_gloo(consumer, rank, world)


@on_ranks(2, fresh=True, init=False)
def test_fsdp2_with_a_custom_divide_factor_sums_premultiplied_gradients(rank, world):
    # gloo has no PREMUL_SUM, so the result is compared with the average, of which it is a multiple.
    from support import init_group

    def gradients(factor):
        torch.manual_seed(1)
        model = fully_shard(Block().double(), mesh=init_device_mesh("cpu", (world,)))
        if factor:
            model.set_gradient_divide_factor(factor)
        model(batch(rank, 0, dtype=torch.float64)).square().mean().backward()
        return [p.grad.full_tensor() for p in model.parameters()]

    init_group()
    for plain, scaled in zip(gradients(None), gradients(8.0), strict=True):
        assert torch.equal(plain * world, scaled * 8.0)
    dist.destroy_process_group()


@on_ranks(4, fresh=True, init=False)
def test_fsdp2_on_a_mesh_of_replicas_trains_to_the_same_weights(rank, world):
    def consumer(rank, world):
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
        model = fully_shard(Block(), mesh=mesh)
        return train(rank, model)

    same_as_gloo(consumer, rank, world)


@on_ranks(2, fresh=True, init=False)
def test_fsdp2_accumulates_without_synchronisation(rank, world):
    def consumer(rank, world):
        model = fully_shard(Block(), mesh=init_device_mesh("cpu", (world,)))
        for step in range(3):
            model.set_requires_gradient_sync(step == 2)
            model(batch(rank, step)).sum().backward()
        return full([p.grad for p in model.parameters()])

    same_as_gloo(consumer, rank, world)


@pytest.mark.slow
@on_ranks(2, 3, fresh=True, init=False)
def test_tensor_parallel_layers_give_the_same_outputs_and_gradients(rank, world):
    def consumer(rank, world):
        mesh = init_device_mesh("cpu", (world,))
        model = parallelize_module(Block(9, 24).double(), mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
        output = model(batch(0, 0, dtype=torch.float64))
        output.square().sum().backward()
        return output.detach(), full([p.grad for p in model.parameters()])

    same_as_gloo(consumer, rank, world, tolerance=0.0 if world == 2 else 100 * 2**-53)


@on_ranks(2, fresh=True, init=False)
def test_sequence_parallel_layers_give_the_same_outputs_and_gradients(rank, world):
    def consumer(rank, world):
        mesh = init_device_mesh("cpu", (world,))
        plan = {
            "norm": SequenceParallel(sequence_dim=0),
            "up": ColwiseParallel(input_layouts=Shard(0)),
            "down": RowwiseParallel(output_layouts=Shard(0)),
        }
        model = parallelize_module(Block(8, 24), mesh, plan)
        x = distribute_tensor(torch.cat([batch(0, s, 8) for s in range(2)]), mesh, [Shard(0)])
        output = model.down(torch.relu(model.up(model.norm(x))))
        (output.to_local() if isinstance(output, DTensor) else output).square().sum().backward()
        return full([output, *[p.grad for p in model.parameters()]])

    same_as_gloo(consumer, rank, world)


@on_ranks(2, 3, fresh=True, init=False)
@pytest.mark.parametrize("rows", [1, 2, 5, 7])
def test_dtensors_with_uneven_and_empty_shards_are_redistributed_alike(rank, world, rows):
    def consumer(rank, world):
        mesh = init_device_mesh("cpu", (world,))
        values = torch.arange(rows * 5, dtype=torch.float32).view(rows, 5)
        sharded = distribute_tensor(values, mesh, [Shard(0)])
        other = sharded.redistribute(mesh, [Shard(1)])
        whole = other.redistribute(mesh, [Replicate()])
        partial = DTensor.from_local(values * (rank + 1), mesh, [Partial()])
        return [
            sharded.to_local(),
            other.to_local(),
            whole.to_local(),
            sharded.full_tensor(),
            partial.redistribute(mesh, [Shard(0)]).to_local(),
            partial.full_tensor(),
            (sharded @ sharded.t()).full_tensor(),
            sharded.sum().full_tensor(),
        ]

    same_as_gloo(consumer, rank, world)


@pytest.mark.slow
@on_ranks(4, fresh=True, init=False)
def test_tensor_parallel_and_fsdp2_share_a_mesh(rank, world):
    def consumer(rank, world):
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        model = parallelize_module(Block(8, 24), mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
        fully_shard(model, mesh=mesh["dp"])
        loss = model(batch(mesh["dp"].get_local_rank(), 0, 8)).square().mean()
        loss.backward()
        return [loss.detach(), *full([p.grad for p in model.parameters()])]

    same_as_gloo(consumer, rank, world)


@on_ranks(4, fresh=True, init=False)
def test_slices_and_flattened_meshes_have_working_groups(rank, world):
    def consumer(rank, world):
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
        results = []
        for group in (mesh["a"].get_group(), mesh["b"].get_group(), mesh["a", "b"]._flatten().get_group()):
            tensor = torch.tensor([float(rank)])
            dist.all_reduce(tensor, group=group)
            results.append(tensor)
        return results

    same_as_gloo(consumer, rank, world)


SCHEDULES = {"gpipe": ScheduleGPipe, "1f1b": Schedule1F1B, "interleaved_1f1b": ScheduleInterleaved1F1B}


@on_ranks(2, 3, fresh=True, init=False)
@pytest.mark.parametrize("schedule", list(SCHEDULES))
def test_a_pipeline_gives_the_same_losses_and_gradients(rank, world, schedule):
    def consumer(rank, world):
        virtual = 2 if schedule == "interleaved_1f1b" else 1
        layers = [nn.Sequential(nn.Linear(9, 9), nn.Tanh()) for _ in range(world * virtual)]
        mine = [rank + i * world for i in range(virtual)]
        stages = [PipelineStage(layers[i], i, len(layers), torch.device("cpu")) for i in mine]
        runner = SCHEDULES[schedule](
            stages if virtual > 1 else stages[0],
            n_microbatches=2 * world,
            loss_fn=lambda output, target: (output - target).square().mean(),
        )
        rows = 4 * world
        inputs = torch.cat([batch(0, s) for s in range(rows)])[:rows]
        losses = []
        arguments = {"target": inputs.flip(0), "losses": losses} if rank == world - 1 else {}
        runner.step(*([inputs] if rank == 0 else []), **arguments)
        return [torch.zeros(()), *[loss.detach() for loss in losses]], [
            p.grad for i in mine for p in layers[i].parameters()
        ]

    same_as_gloo(consumer, rank, world)


@pytest.mark.slow
@on_ranks(2, 3, fresh=True, init=False)
@pytest.mark.parametrize("how", ["save", "async_save"])
def test_a_checkpoint_comes_back_as_it_was_saved(rank, world, how, tmp_path):
    path = str(tmp_path)

    def consumer(rank, world):
        target = f"{path}/{dist.get_backend()}"
        model = fully_shard(Block(), mesh=init_device_mesh("cpu", (world,)))
        before = full(model.parameters())
        state = {"model": get_model_state_dict(model), "step": 7}
        if how == "save":
            dcp.save(state, checkpoint_id=target)
        else:
            dcp.async_save(state, checkpoint_id=target).result()
        torch.manual_seed(99)
        other = fully_shard(Block(), mesh=init_device_mesh("cpu", (world,)))
        loaded = {"model": get_model_state_dict(other), "step": 0}
        dcp.load(loaded, checkpoint_id=target)
        set_model_state_dict(other, loaded["model"])
        after = full(other.parameters())
        assert loaded["step"] == 7 and all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
        return after

    same_as_gloo(consumer, rank, world)
