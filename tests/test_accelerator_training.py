"""Training programs on tensors of an accelerator, on the stand-in, have the bits of the same programs on CPU tensors.

Each test runs its program on CPU tensors, and then on the stand-in with its streams early, late and at random. Programs
fetch their batches on a stream of their own, as training does.
"""

import contextlib
import functools
import random
import time

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
import torch.distributed.checkpoint as dcp
from support import init_group, on_ranks, standin
from support.consumers import Branches, same_as_host
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.distributed.algorithms.join import Join
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FullyShardedDataParallel,
    MixedPrecisionPolicy,
    ShardingStrategy,
    fully_shard,
)
from torch.distributed.nn import functional as differentiable
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe, ScheduleInterleaved1F1B
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

STEPS = 3

pytestmark = pytest.mark.skipif(
    torch.__version__ < "2.15", reason="the stand-in is written for the interfaces of torch 2.15"
)


@pytest.fixture(autouse=True, scope="module")
def module():
    """Compiles the stand-in once."""
    standin.build()


class Batches:
    """Batches of a rank, each fetched on a stream of its own while the one before is used."""

    def __init__(self, rank, device, width=12, count=STEPS):
        self._host = [self._values(rank, step, width) for step in range(count)]
        self._device = device
        self._stream = None if device.type == "cpu" else torch.Stream(device)
        self._next = self._fetch()

    @staticmethod
    def _values(rank, step, width):
        generator = torch.Generator().manual_seed(1000 * rank + step)
        return torch.randn(6, width, generator=generator), torch.randn(6, 5, generator=generator)

    def _fetch(self):
        if not self._host:
            return None
        values = self._host.pop(0)
        if self._stream is None:
            return values
        with self._stream:
            return [value.pin_memory().to(self._device, non_blocking=True) for value in values]

    def __iter__(self):
        return self

    def __next__(self):
        if self._next is None:
            raise StopIteration
        if self._stream is not None:
            current = torch.accelerator.current_stream()
            current.wait_stream(self._stream)
            for value in self._next:
                value.record_stream(current)
        batch, self._next = self._next, self._fetch()
        return batch


class Centred(nn.Module):
    """Subtracts a running mean, which is a buffer."""

    def __init__(self, width):
        super().__init__()
        self.register_buffer("mean", torch.zeros(width))

    def forward(self, x):
        with torch.no_grad():
            self.mean.mul_(0.9).add_(x.mean(0) * 0.1)
        return x - self.mean


def net():
    return nn.Sequential(nn.Linear(12, 33), nn.ReLU(), nn.Linear(33, 65), Centred(65), nn.Tanh(), nn.Linear(65, 5))


def values(parameters):
    return [p.full_tensor().detach() if isinstance(p, DTensor) else p.detach().clone() for p in parameters]


def train(model, batches, optimizer=None):
    """Trains, and returns losses, parameters and buffers."""
    # Without `foreach`, whose order of operations would differ between the host and the device.
    optimizer = optimizer or torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, foreach=False)
    losses = []
    for inputs, targets in batches:
        optimizer.zero_grad()
        loss = (model(inputs) - targets).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return losses, values(model.parameters()), [buffer.clone() for buffer in model.buffers()]


# --- DistributedDataParallel ---

OPTIONS = {
    "plain": {},
    "many_buckets": {"bucket_cap_mb": 0.001},
    "bucket_views": {"bucket_cap_mb": 0.002, "gradient_as_bucket_view": True},
    "static_graph": {"static_graph": True, "bucket_cap_mb": 0.002},
    "unused_parameters_looked_for": {"find_unused_parameters": True},
    "no_buffers": {"broadcast_buffers": False},
}


@on_ranks(2, 3, fresh=True, init=False)
@pytest.mark.parametrize("options", list(OPTIONS))
def test_ddp_trains_to_the_weights_of_the_host(rank, world, options):
    def program(rank, world, device):
        ddp = DistributedDataParallel(net().to(device), **OPTIONS[options])
        return train(ddp, Batches(rank, device))

    same_as_host(program, rank, world)


@on_ranks(2, fresh=True, init=False)
@pytest.mark.parametrize("backend", ["cpu:gloo,standin:accl", "standin:accl,cpu:accl"])
def test_ddp_trains_in_a_group_with_a_backend_for_each_device(rank, world, backend):
    def program(rank, world, device):
        return train(DistributedDataParallel(net().to(device), bucket_cap_mb=0.002), Batches(rank, device))

    same_as_host(program, rank, world, backend)


@on_ranks(3, fresh=True, init=False)
def test_ddp_with_a_device_for_each_rank_trains_to_the_weights_of_the_host(rank, world):
    def program(rank, world, device):
        model = net().to(device)
        ids = None if device.type == "cpu" else [device.index]
        ddp = DistributedDataParallel(model, device_ids=ids, bucket_cap_mb=0.002)
        # DDP copies the batches of the host to its device.
        inputs = Batches(rank, torch.device("cpu"))
        return train(ddp, ((x, y.to(device)) for x, y in inputs))

    same_as_host(program, rank, world, index=rank % 2)


@on_ranks(2, fresh=True, init=False)
def test_ddp_with_unused_parameters_trains_to_the_weights_of_the_host(rank, world):
    def program(rank, world, device):
        ddp = DistributedDataParallel(Branches().to(device), find_unused_parameters=True)
        return train(ddp, Batches(rank, device, count=4))

    same_as_host(program, rank, world)


@on_ranks(2, fresh=True, init=False)
@pytest.mark.parametrize("views", [False, True])
def test_ddp_without_synchronisation_of_some_steps_accumulates_as_on_the_host(rank, world, views):
    def program(rank, world, device):
        ddp = DistributedDataParallel(net().to(device), gradient_as_bucket_view=views)
        batches = Batches(rank, device)
        with ddp.no_sync():
            for _ in range(2):
                ddp(next(batches)[0]).sum().backward()
        ddp(next(batches)[0]).sum().backward()
        return [p.grad.clone() for p in ddp.parameters()]

    same_as_host(program, rank, world)


@on_ranks(2, 3, fresh=True, init=False)
def test_ddp_joins_ranks_with_different_numbers_of_batches_as_on_the_host(rank, world):
    def program(rank, world, device):
        ddp = DistributedDataParallel(nn.Linear(12, 5).to(device), bucket_cap_mb=0.0001)
        with ddp.join():
            return train(ddp, Batches(rank, device, count=1 + 2 * rank))

    same_as_host(program, rank, world)


HOOKS = {
    "allreduce": lambda ddp: ddp.register_comm_hook(None, default_hooks.allreduce_hook),
    "fp16": lambda ddp: ddp.register_comm_hook(None, default_hooks.fp16_compress_hook),
    "bf16_around_allreduce": lambda ddp: ddp.register_comm_hook(
        None, default_hooks.bf16_compress_wrapper(default_hooks.allreduce_hook)
    ),
    "built_in_fp16": lambda ddp: ddp._register_builtin_comm_hook(dist.BuiltinCommHookType.FP16_COMPRESS),
    "powersgd": lambda ddp: ddp.register_comm_hook(
        powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=2, start_powerSGD_iter=2, min_compression_rate=0.5),
        powerSGD_hook.powerSGD_hook,
    ),
}


@on_ranks(2, fresh=True, init=False)
@pytest.mark.parametrize("hook", list(HOOKS))
def test_a_stock_communication_hook_trains_to_the_weights_of_the_host(rank, world, hook):
    def program(rank, world, device):
        ddp = DistributedDataParallel(net().to(device), bucket_cap_mb=25 if hook == "powersgd" else 0.004)
        HOOKS[hook](ddp)
        return train(ddp, Batches(rank, device, count=4))

    # PowerSGD multiplies matrices of other layouts on the device, and rounds differently.
    same_as_host(program, rank, world, tolerance=1e-4 if hook == "powersgd" else 0.0)


@on_ranks(2, fresh=True, init=False)
def test_a_hook_with_two_gathers_trains_to_the_weights_of_the_host(rank, world):
    def program(rank, world, device):
        def hook(state, bucket):
            tensor = bucket.buffer()
            scale = tensor.abs().max() / 127
            packed = (tensor / scale).round().to(torch.int8)
            packs = [torch.empty_like(packed) for _ in range(world)]
            scales = [torch.empty(1, device=device) for _ in range(world)]
            gathered = dist.all_gather(scales, scale.view(1), async_op=True).get_future()

            def gather_values(future):
                future.value()
                return dist.all_gather(packs, packed, async_op=True).get_future().wait()

            def average(future):
                future.value()
                return sum(p.float() * s for p, s in zip(packs, scales, strict=True)) / world

            return gathered.then(gather_values).then(average)

        ddp = DistributedDataParallel(net().to(device))
        ddp.register_comm_hook(None, hook)
        return train(ddp, Batches(rank, device))

    same_as_host(program, rank, world)


@on_ranks(2, fresh=True, init=False)
@pytest.mark.parametrize("views", [False, True])
def test_the_zero_redundancy_optimizer_trains_to_the_weights_of_the_host(rank, world, views):
    def program(rank, world, device):
        ddp = DistributedDataParallel(net().to(device), gradient_as_bucket_view=views)
        optimizer = ZeroRedundancyOptimizer(
            ddp.parameters(), torch.optim.Adam, parameters_as_bucket_view=views, lr=0.01, foreach=False
        )
        result = train(ddp, Batches(rank, device), optimizer)
        optimizer.consolidate_state_dict(to=0)
        moments = (
            [s["exp_avg"].cpu() for s in optimizer.state_dict()["state"].values()] if rank == 0 else [torch.zeros(1)]
        )
        return result, moments

    same_as_host(program, rank, world)


@on_ranks(2, fresh=True, init=False)
def test_zero_and_ddp_join_together_as_on_the_host(rank, world):
    def program(rank, world, device):
        ddp = DistributedDataParallel(nn.Linear(12, 5).to(device))
        optimizer = ZeroRedundancyOptimizer(ddp.parameters(), torch.optim.SGD, lr=0.01, foreach=False)
        with Join([ddp, optimizer]):
            return train(ddp, Batches(rank, device, count=2 + rank), optimizer)[1]

    same_as_host(program, rank, world)


@on_ranks(2, fresh=True, init=False)
@pytest.mark.parametrize("order", standin.ORDERS)
def test_batch_normalisation_over_ranks_is_that_of_the_whole_batch(rank, world, order):
    # torch has the kernels for CUDA alone, so a stand-in needs its own, and there is no program on CPU tensors.
    standin.register(order, rank + 1)
    kernels = standin.batch_norm_kernels()
    init_group()
    torch.manual_seed(1)
    inputs = [torch.randn(4 + 3 * r, 6, dtype=torch.float64) for r in range(world)]
    whole = nn.BatchNorm1d(6, dtype=torch.float64)
    whole(torch.cat(inputs)).square().sum().backward()
    model = nn.SyncBatchNorm.convert_sync_batchnorm(nn.BatchNorm1d(6, dtype=torch.float64)).to("standin")
    ddp = DistributedDataParallel(model, device_ids=[0])
    for parameter in model.parameters():
        parameter.register_hook(lambda gradient: gradient * world)
    ddp(inputs[rank].to("standin")).square().sum().backward()
    for mine, theirs in zip(model.parameters(), whole.parameters(), strict=True):
        torch.testing.assert_close(mine.grad.cpu(), theirs.grad)
    for mine, theirs in zip(model.buffers(), whole.buffers(), strict=True):
        torch.testing.assert_close(mine.cpu(), theirs)
    del kernels


# --- FSDP2 ---


class Block(nn.Module):
    """A block whose widths neither 2 nor 3 ranks divide, so that shards are uneven and padded."""

    def __init__(self, width=12, inner=23):
        super().__init__()
        self.up = nn.Linear(width, inner)
        self.down = nn.Linear(inner, width)

    def forward(self, x):
        return x + self.down(torch.relu(self.up(x)))


def sharded(mesh, prefetches=False, **options):
    model = nn.Sequential(Block(), Block(), Block(), nn.Linear(12, 5)).to(mesh.device_type)
    layers = list(model)
    for layer in layers:
        fully_shard(layer, mesh=mesh, **options)
    model = fully_shard(model, mesh=mesh, **options)
    if prefetches:
        for index, layer in enumerate(layers):
            layer.set_modules_to_forward_prefetch(layers[index + 1 : index + 3])
            layer.set_modules_to_backward_prefetch(layers[max(index - 2, 0) : index][::-1])
    return model


def adam(model):
    return torch.optim.AdamW(model.parameters(), lr=0.01, foreach=False)


FSDP = {
    "plain": {},
    "no_reshard": {"reshard_after_forward": False},
    "prefetches": {"prefetches": True},
    "mixed_precision": {"mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)},
    "reduced_in_bfloat16": {"mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)},
}


@on_ranks(2, 3, fresh=True, init=False)
@pytest.mark.parametrize("options", list(FSDP))
def test_fsdp2_trains_to_the_weights_of_the_host(rank, world, options):
    def program(rank, world, device):
        model = sharded(init_device_mesh(device.type, (world,)), **FSDP[options])
        return train(model, Batches(rank, device), adam(model))

    same_as_host(program, rank, world)


@on_ranks(2, fresh=True, init=False)
@pytest.mark.parametrize("pinned", [True, False])
def test_fsdp2_with_parameters_in_host_memory_trains_to_the_weights_of_the_host(rank, world, pinned):
    def program(rank, world, device):
        policy = {"offload_policy": CPUOffloadPolicy(pin_memory=pinned)} if device.type != "cpu" else {}
        model = sharded(init_device_mesh(device.type, (world,)), **policy)
        optimizer = adam(model)
        for inputs, targets in Batches(rank, device):
            optimizer.zero_grad()
            (model(inputs) - targets).square().mean().backward()
            optimizer.step()
        state = get_model_state_dict(model)
        return [value.to(device).full_tensor() for value in state.values()]

    same_as_host(program, rank, world, "cpu:gloo,standin:accl" if pinned else None)


@pytest.mark.slow
@on_ranks(4, fresh=True, init=False)
def test_fsdp2_on_a_mesh_of_replicas_trains_to_the_weights_of_the_host(rank, world):
    def program(rank, world, device):
        mesh = init_device_mesh(device.type, (2, 2), mesh_dim_names=("replicate", "shard"))
        model = sharded(mesh)
        return train(model, Batches(rank, device), adam(model))

    same_as_host(program, rank, world)


@on_ranks(2, fresh=True, init=False)
def test_fsdp2_accumulates_without_synchronisation_as_on_the_host(rank, world):
    def program(rank, world, device):
        model = sharded(init_device_mesh(device.type, (world,)))
        for step, (inputs, _) in enumerate(Batches(rank, device)):
            model.set_requires_gradient_sync(step == 2)
            model(inputs).sum().backward()
        return values([p.grad for p in model.parameters()])

    same_as_host(program, rank, world)


@on_ranks(2, fresh=True, init=False)
def test_fsdp2_gathers_parameters_ahead_as_on_the_host(rank, world):
    def program(rank, world, device):
        model = sharded(init_device_mesh(device.type, (world,)))
        handles = [layer.unshard(async_op=True) for layer in model]
        inputs, _ = next(Batches(rank, device))
        for handle in handles:
            handle.wait()
        whole = [p.detach().clone() for p in model[0].parameters()]
        model(inputs).square().mean().backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 0.1, foreach=False)
        return whole, norm.full_tensor(), values([p.grad for p in model.parameters()])

    same_as_host(program, rank, world)


# --- FSDP1 ---


@on_ranks(2, fresh=True, init=False)
@pytest.mark.parametrize("strategy", ["FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD"])
def test_fsdp1_trains_to_the_weights_of_the_host(rank, world, strategy):
    def program(rank, world, device):
        whole = nn.Sequential(Block(), Block(), nn.Linear(12, 5)).to(device)
        layers = [FullyShardedDataParallel(block, **options(device)) for block in whole[:2]]
        model = FullyShardedDataParallel(nn.Sequential(*layers, whole[2]), **options(device))
        losses, _, _ = train(model, Batches(rank, device), adam(model))
        with FullyShardedDataParallel.summon_full_params(model):
            return losses, [p.detach().clone() for p in model.parameters()]

    def options(device):
        return {
            "device_id": device,
            "sharding_strategy": ShardingStrategy[strategy],
            "use_orig_params": strategy == "FULL_SHARD",
            "forward_prefetch": True,
        }

    # FSDP1 keeps its flat parameters in cycles that no collector breaks.
    same_as_host(program, rank, world, kept=("device_bytes",))


# --- tensor parallelism, DTensor and meshes ---


@on_ranks(2, 3, fresh=True, init=False)
def test_tensor_parallel_layers_give_the_outputs_and_gradients_of_the_host(rank, world):
    def program(rank, world, device):
        mesh = init_device_mesh(device.type, (world,))
        plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
        model = parallelize_module(Block(12, 24).to(device), mesh, plan)
        output = model(next(Batches(0, device))[0])
        output.square().sum().backward()
        return output.detach(), values([p.grad for p in model.parameters()])

    same_as_host(program, rank, world)


@on_ranks(2, fresh=True, init=False)
@pytest.mark.parametrize("local", [True, False])
def test_sequence_parallel_layers_give_the_outputs_and_gradients_of_the_host(rank, world, local):
    def program(rank, world, device):
        mesh = init_device_mesh(device.type, (world,))
        plan = {
            "0": SequenceParallel(sequence_dim=0),
            "1": ColwiseParallel(input_layouts=Shard(0)),
            "3": RowwiseParallel(output_layouts=Shard(0), use_local_output=local),
        }
        layers = [nn.Dropout(0.0), nn.Linear(12, 24), nn.Tanh(), nn.Linear(24, 12)]
        model = parallelize_module(nn.Sequential(*layers).to(device), mesh, plan)
        part = next(Batches(0, device))[0].chunk(world)[rank]
        output = model(DTensor.from_local(part.contiguous(), mesh, [Shard(0)]))
        output.square().sum().backward()
        return values([output]), values([p.grad for p in model.parameters()])

    same_as_host(program, rank, world)


@on_ranks(2, 3, fresh=True, init=False)
@pytest.mark.parametrize("rows", [6, 7, 1])
def test_dtensors_are_redistributed_as_on_the_host(rank, world, rows):
    def program(rank, world, device):
        mesh = init_device_mesh(device.type, (world,))
        whole = torch.arange(rows * 5, dtype=torch.float32).view(rows, 5).to(device)
        parts = distribute_tensor(whole, mesh, [Shard(0)])
        other = parts.redistribute(mesh, [Shard(1)])
        partial = DTensor.from_local(whole * (rank + 1), mesh, [Partial()])
        # Operations use results for which nothing has waited.
        later = [parts.redistribute(mesh, [Replicate()], async_op=True) for _ in range(2)]
        return [
            parts.to_local(),
            other.to_local(),
            other.redistribute(mesh, [Replicate()]).to_local(),
            parts.full_tensor(),
            partial.redistribute(mesh, [Shard(0)]).to_local(),
            partial.full_tensor(),
            DTensor.from_local(whole + rank, mesh, [Partial("max")]).full_tensor(),
            (parts @ parts.t()).full_tensor(),
            parts.sum().full_tensor(),
            (later[1] + later[0]).full_tensor(),
        ]

    same_as_host(program, rank, world)


@pytest.mark.slow
@on_ranks(4, fresh=True, init=False)
def test_tensor_parallel_and_fsdp2_share_a_mesh_as_on_the_host(rank, world):
    def program(rank, world, device):
        mesh = init_device_mesh(device.type, (2, 2), mesh_dim_names=("dp", "tp"))
        plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
        model = parallelize_module(Block(12, 24).to(device), mesh["tp"], plan)
        fully_shard(model, mesh=mesh["dp"])
        loss = model(next(Batches(mesh["dp"].get_local_rank(), device))[0]).square().mean()
        loss.backward()
        return loss.detach(), values([p.grad for p in model.parameters()])

    same_as_host(program, rank, world)


@on_ranks(4, fresh=True, init=False)
def test_groups_of_slices_and_flattened_meshes_work_as_on_the_host(rank, world):
    def program(rank, world, device):
        mesh = init_device_mesh(device.type, (2, 2), mesh_dim_names=("a", "b"))
        groups = [mesh["a"].get_group(), mesh["b"].get_group(), mesh["a", "b"]._flatten().get_group()]
        tensors = [torch.full((1000,), float(rank + index), device=device) for index in range(3)]
        # Calls of several groups are in flight together.
        works = [
            dist.all_reduce(tensor, group=group, async_op=True) for tensor, group in zip(tensors, groups, strict=True)
        ]
        for work in reversed(works):
            work.wait()
        return tensors

    same_as_host(program, rank, world)


# --- pipelines ---

SCHEDULES = {"gpipe": ScheduleGPipe, "1f1b": Schedule1F1B, "interleaved_1f1b": ScheduleInterleaved1F1B}


class Scaled(nn.Module):
    """A layer without products of matrices, which torch rounds differently on the stand-in."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(9))
        self.bias = nn.Parameter(torch.randn(9))

    def forward(self, x):
        return (x * self.weight + self.bias).tanh()


@on_ranks(2, 3, fresh=True, init=False)
@pytest.mark.parametrize("schedule", list(SCHEDULES))
def test_a_pipeline_gives_the_losses_and_gradients_of_the_host(rank, world, schedule):
    def program(rank, world, device):
        virtual = 2 if schedule == "interleaved_1f1b" else 1
        layers = [Scaled().to(device) for _ in range(world * virtual)]
        mine = [rank + i * world for i in range(virtual)]
        stages = [PipelineStage(layers[i], i, len(layers), device) for i in mine]
        runner = SCHEDULES[schedule](
            stages if virtual > 1 else stages[0],
            n_microbatches=2 * world,
            loss_fn=lambda output, target: (output - target).square().mean(),
        )
        inputs = torch.randn(4 * world, 9, generator=torch.Generator().manual_seed(5)).to(device)
        losses = []
        for _ in range(2):
            arguments = {"target": inputs.flip(0), "losses": losses} if rank == world - 1 else {}
            runner.step(*([inputs] if rank == 0 else []), **arguments)
        return [torch.zeros(()), *[loss.detach() for loss in losses]], [
            p.grad.clone() for i in mine for p in layers[i].parameters()
        ]

    same_as_host(program, rank, world)


# --- collectives as training uses them ---

FUNCTIONAL = {
    "all_reduce": lambda x, group: funcol.all_reduce(x, "sum", group),
    "all_reduce_avg": lambda x, group: funcol.all_reduce(x, "avg", group),
    "all_reduce_coalesced": lambda x, group: sum(funcol.all_reduce_coalesced([x, x * 2], "sum", group)),
    "all_gather_tensor": lambda x, group: funcol.all_gather_tensor(x, 0, group),
    "all_gather_along_dim_1": lambda x, group: funcol.all_gather_tensor(x, 1, group),
    "all_gather_coalesced": lambda x, group: sum(funcol.all_gather_into_tensor_coalesced([x, x * 2], group)),
    "reduce_scatter_tensor": lambda x, group: funcol.reduce_scatter_tensor(x, "sum", 0, group),
    "reduce_scatter_coalesced": lambda x, group: sum(
        funcol.reduce_scatter_tensor_coalesced([x, x * 2], "sum", [0, 0], group)
    ),
    "all_to_all_single": lambda x, group: funcol.all_to_all_single(x, None, None, group),
    "broadcast": lambda x, group: funcol.broadcast(x, 1, group),
    "permute": lambda x, group: funcol.permute_tensor(x.view(-1), [1, 0], group),
}


def steps(device, body):
    """Runs the body, on the device within a stream of its own, behind which the caller's stream then is."""
    if device.type == "cpu":
        return body()
    stream, current = torch.Stream(device), torch.accelerator.current_stream()
    stream.wait_stream(current)
    with stream:
        result = body()
    current.wait_stream(stream)
    return result


@on_ranks(2, fresh=True, init=False)
@pytest.mark.parametrize("call", list(FUNCTIONAL))
def test_functional_collectives_give_the_values_of_the_host(rank, world, call):
    def program(rank, world, device):
        def x(factor):
            return torch.arange(24, dtype=torch.float32, device=device).view(4, 6) * (rank + factor)

        issue = functools.partial(FUNCTIONAL[call], group=dist.group.WORLD)
        used = issue(x(1)).sin() + 1
        waited = funcol.wait_tensor(issue(x(2)))
        several = [issue(x(factor)) for factor in range(4, 7)]
        elsewhere = steps(device, lambda: [y * 2 for y in reversed(several)])
        return used, waited, elsewhere

    same_as_host(program, rank, world)


@pytest.mark.slow
@on_ranks(2, fresh=True, init=False, deadline=90)
def test_compiled_functional_collectives_give_the_values_of_the_host(rank, world):
    def program(rank, world, device):
        results = []
        for call in FUNCTIONAL.values():
            torch._dynamo.reset()

            def step(x, call=call):
                return call(x * 2, dist.group.WORLD).sin() + 1

            x = torch.arange(24, dtype=torch.float32, device=device).view(4, 6) * (rank + 1)
            results.append(torch.compile(step, backend="aot_eager", fullgraph=True)(x))
        return results

    same_as_host(program, rank, world)


@on_ranks(2, fresh=True, init=False)
def test_gradients_flow_through_differentiable_collectives_as_on_the_host(rank, world):
    def program(rank, world, device):
        x = (torch.arange(8.0, device=device).view(4, 2) + rank).requires_grad_()
        a = funcol.all_gather_tensor_autograd(x, 0, dist.group.WORLD)
        b = funcol.reduce_scatter_tensor_autograd(a, "sum", 0, dist.group.WORLD)
        c = funcol.all_to_all_single_autograd(b, None, None, dist.group.WORLD)
        c.square().sum().backward()
        return c.detach(), x.grad

    same_as_host(program, rank, world)


@on_ranks(2, fresh=True, init=False)
def test_gradients_flow_through_torch_distributed_nn_as_on_the_host(rank, world):
    def program(rank, world, device):
        x = (torch.arange(6.0, device=device) + rank).requires_grad_()
        y = differentiable.all_reduce(x * 2)
        gathered = torch.stack(list(differentiable.all_gather(y)))
        places = [torch.empty(6, device=device) for _ in range(world)]
        moved = torch.stack(differentiable.all_to_all(places, list(gathered)))
        part = differentiable.reduce_scatter(torch.empty(6, device=device), list(moved))
        part.square().sum().backward()
        return moved.detach(), part.detach(), x.grad

    same_as_host(program, rank, world)


@on_ranks(2, fresh=True, init=False)
def test_everything_works_with_detailed_debugging_on_a_device(rank, world):
    dist.set_debug_level(dist.DebugLevel.DETAIL)

    def program(rank, world, device):
        tensor = torch.full((5,), rank + 1.0, device=device)
        dist.all_reduce(tensor)
        outputs = [torch.empty(5, device=device) for _ in range(world)]
        dist.all_gather(outputs, tensor + rank)
        whole, part = torch.empty(5 * world, device=device), torch.empty(5, device=device)
        dist.all_gather_single(whole, tensor * rank)
        dist.reduce_scatter_single(part, whole)
        into = torch.empty_like(tensor)
        for work in dist.batch_isend_irecv(
            [dist.P2POp(dist.isend, tensor, 1 - rank), dist.P2POp(dist.irecv, into, 1 - rank)]
        ):
            work.wait()
        dist.barrier()
        result = train(DistributedDataParallel(net().to(device)), Batches(rank, device))
        return tensor, outputs, whole, part, into, result

    same_as_host(program, rank, world)
    with pytest.raises(RuntimeError, match="(?i)mismatch|detected"):
        init_group()
        dist.all_reduce(torch.ones(5 + rank, device="standin"))


@on_ranks(2, 3, fresh=True, init=False)
def test_gathered_shards_are_prefetched_and_freed_as_on_the_host(rank, world):
    """A sharded layer by hand: the next parameters are gathered, and gradients are scattered, while the stream computes."""

    def program(rank, world, device):
        count, layers = 1500, 5
        shards = [torch.randn(count, generator=torch.Generator().manual_seed(10 * rank + i)) for i in range(layers)]
        shards = [shard.to(device) for shard in shards]

        def gather(index):
            whole = torch.empty(count * world, device=device)
            return whole, dist.all_gather_single(whole, shards[index], async_op=True)

        ahead, x, reduced = gather(0), torch.ones(count * world, device=device), []
        for index in range(layers):
            whole, work = ahead
            ahead = gather(index + 1) if index + 1 < layers else None
            work.wait()
            x = (x * whole).tanh()
            del whole, work
            part = torch.empty(count, device=device)
            # The input is dropped, and memory of its size is used at once.
            reduced.append((part, dist.reduce_scatter_single(part, x * (index + 1), async_op=True)))
            torch.full((count * world,), -1.0, device=device)
        for _, work in reduced:
            work.wait()
        return x, [part for part, _ in reduced]

    same_as_host(program, rank, world)


@on_ranks(2, 3, fresh=True, init=False)
@pytest.mark.parametrize("backend", [None, "cpu:gloo,standin:accl", "standin:accl"])
def test_objects_are_sent_through_the_memory_of_the_device(rank, world, backend):
    standin.register("random", rank + 1)
    init_group(backend)
    mine = {"rank": rank, "tensor": torch.arange(rank + 1), "text": "x" * (100 * rank)}
    everything = [None] * world
    dist.all_gather_object(everything, mine)
    assert [one["rank"] for one in everything] == list(range(world))
    assert [one["tensor"].numel() for one in everything] == list(range(1, world + 1))
    sent = [mine, rank] if rank == 1 else [None, None]
    dist.broadcast_object_list(sent, 1, device=torch.device("standin"))
    assert sent[1] == 1 and len(sent[0]["text"]) == 100
    got = [None]
    dist.scatter_object_list(got, [f"to {r}" for r in range(world)] if rank == 0 else None, 0)
    assert got == [f"to {rank}"]
    gathered = [None] * world if rank == 0 else None
    dist.gather_object(there := torch.full((3,), float(rank), device="standin"), gathered, 0)
    if rank == 0:
        assert [tensor.cpu().tolist() for tensor in gathered] == [[float(r)] * 3 for r in range(world)]
        assert {tensor.device for tensor in gathered} == {there.device}
    if rank < 2:
        objects = [None] if rank else [mine]
        (dist.recv_object_list if rank else dist.send_object_list)(objects, 1 - rank, device=torch.device("standin"))
        assert objects[0]["rank"] == 0
    dist.destroy_process_group()


@on_ranks(2, 3, fresh=True, init=False)
def test_batches_of_messages_arrive_as_on_the_host(rank, world):
    def program(rank, world, device):
        right, left = (rank + 1) % world, (rank - 1) % world
        results = []
        for count in (3, 1000, 70_000):
            x = torch.arange(count, dtype=torch.float32, device=device) + rank
            for _ in range(world):
                into = torch.empty_like(x)
                operations = [dist.P2POp(dist.isend, x, right), dist.P2POp(dist.irecv, into, left)]
                works = dist.batch_isend_irecv(operations[:: 1 if rank % 2 else -1])
                for work in works:
                    work.wait()
                # The sent tensor is overwritten, as in a ring.
                x.copy_(into + 1)
            results.append(x)
        return results

    same_as_host(program, rank, world)


# --- checkpoints ---


@pytest.mark.slow
@on_ranks(2, 3, fresh=True, init=False)
@pytest.mark.parametrize("backend", [None, "cpu:gloo,standin:accl"])
@pytest.mark.parametrize("how", ["save", "async_save"])
def test_a_checkpoint_comes_back_as_it_was_saved(rank, world, how, backend, tmp_path):
    standin.register("random", rank + 1)
    init_group(backend)
    torch.manual_seed(1)
    mesh = init_device_mesh("standin", (world,))
    device = torch.device("standin", 0)

    def state_of(model, optimizer, step):
        return {
            "model": get_model_state_dict(model),
            "optimizer": get_optimizer_state_dict(model, optimizer),
            "step": step,
        }

    model = sharded(mesh)
    optimizer = adam(model)
    train(model, Batches(rank, device), optimizer)
    before = values(model.parameters())
    state = state_of(model, optimizer, 7)
    if how == "save":
        dcp.save(state, checkpoint_id=str(tmp_path))
    else:
        # Training goes on while a thread writes the checkpoint. A backend that serves training and this thread in one order
        # of calls needs a group for each.
        group = None if backend else dist.new_group()
        saved = dcp.async_save(state, checkpoint_id=str(tmp_path), process_group=group)
        train(model, Batches(rank, device), optimizer)
        saved.result()
    train(model, Batches(rank, device), optimizer)
    torch.manual_seed(99)
    other = sharded(mesh)
    other_optimizer = adam(other)
    loaded = state_of(other, other_optimizer, 0)
    dcp.load(loaded, checkpoint_id=str(tmp_path))
    set_model_state_dict(other, loaded["model"])
    set_optimizer_state_dict(other, other_optimizer, loaded["optimizer"])
    assert loaded["step"] == 7
    for a, b in zip(before, values(other.parameters()), strict=True):
        assert a.cpu().equal(b.cpu())
    dist.destroy_process_group()


# --- programs by chance ---


def issue(kind, tensor, base, group, me, root, step):
    """Issues a call of a group on this rank's tensor. Returns the output or outputs, the expected values, and the work.

    `base` has the values of each rank of the group.
    """
    world = len(base)
    part, right, left = len(base[0]) // world, (me + 1) % world, (me - 1) % world
    options = {"group": group, "async_op": True}
    new = functools.partial(torch.empty, device=tensor.device)
    if kind == "all_reduce":
        return tensor, sum(base), dist.all_reduce(tensor, **options)
    if kind == "broadcast":
        return tensor, base[root], dist.broadcast(tensor, group_src=root, **options)
    if kind == "reduce":
        return tensor, sum(base) if me == root else base[me], dist.reduce(tensor, group_dst=root, **options)
    if kind == "gather":
        outputs = [new(len(one)) for one in base] if me == root else None
        return outputs or [], base if me == root else [], dist.gather(tensor, outputs, group_dst=root, **options)
    if kind == "scatter":
        inputs = [one.to(tensor.device) for one in base] if me == root else None
        return tensor, base[me], dist.scatter(tensor, inputs, group_src=root, **options)
    if kind == "all_gather":
        outputs = [new(len(one)) for one in base]
        return outputs, base, dist.all_gather(outputs, tensor, **options)
    if kind == "reduce_scatter":
        output = new(part)
        work = dist.reduce_scatter_single(output, tensor.contiguous(), **options)
        return output, sum(base)[me * part : (me + 1) * part], work
    if kind == "all_to_all":
        # The sizes differ from pair to pair, and some are zero.
        sizes = [[(3 * to + 2 * me + step) % 4 * part // 4 for to in range(world)] for me in range(world)]
        output = new(sum(row[me] for row in sizes))
        sent = tensor[: sum(sizes[me])].contiguous()
        blocks = [base[r][sum(sizes[r][:me]) :][: sizes[r][me]] for r in range(world)]
        work = dist.all_to_all_single(output, sent, [row[me] for row in sizes], sizes[me], **options)
        return output, torch.cat(blocks), work
    if kind == "batch":
        with dist._coalescing_manager(group=group, device=tensor.device, async_ops=True) as batch:
            outputs = [tensor, tensor * 2]
            for output in outputs:
                dist.all_reduce(output, group=group)
        return outputs, [sum(base), sum(base) * 2], batch
    output = new(len(base[0]))
    dist.isend(tensor, group_dst=right, group=group, tag=step)
    return output, base[left], dist.irecv(output, group_src=left, group=group, tag=step)


KINDS = [
    "all_reduce",
    "broadcast",
    "reduce",
    "gather",
    "scatter",
    "all_gather",
    "reduce_scatter",
    "all_to_all",
    "batch",
]


def check(how, stream, work, output, expected, what):
    """Waits for a call in one of several ways, and compares what the stream then sees."""
    with contextlib.nullcontext() if stream is None else stream:
        if how == "future" and hasattr(work, "get_future"):
            work.get_future().wait()
        elif how == "poll" and hasattr(work, "is_completed"):
            while not work.is_completed():
                time.sleep(0)
        else:
            work.wait()
        pairs = zip(output, expected, strict=True) if isinstance(output, list) else [(output, expected)]
        assert all(mine.cpu().equal(theirs) for mine, theirs in pairs), what


@on_ranks(3, fresh=True, init=False)
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("order", standin.ORDERS)
def test_random_programs_over_several_groups_and_devices_give_the_results_of_the_host(rank, world, order, seed):
    module = standin.register(order, 3 * seed + rank)
    init_group()
    members = [[0, 1, 2], [0, 1, 2], [0, 2], [1, 2]]
    groups = [dist.group.WORLD, *(dist.new_group(ranks) for ranks in members[1:])]
    # All ranks issue the same calls. Devices, streams, and the ways and order of waits are a rank's own.
    program, mine = random.Random(seed), random.Random(100 * seed + rank)
    streams = [[torch.Stream(torch.device("standin", device)) for _ in range(3)] for device in (0, 1)]
    with standin.nothing_is_lost(module):
        pending = []
        for step in range(50):
            which, kind = program.randrange(4), program.choice([*KINDS, "ring"])
            count, root = program.choice([0, 1, 5, 300, 5000, 100_000]), program.randrange(2)
            ranks = members[which]
            if rank not in ranks:
                continue
            base = [torch.arange(count * len(ranks), dtype=torch.float32) % 11 + r + step for r in ranks]
            index = mine.choice([0, 0, 1, None])
            device = torch.device("cpu") if index is None else torch.device("standin", index)
            made, seen = (None, None) if index is None else mine.choices(streams[index], k=2)
            with contextlib.nullcontext() if made is None else made:
                tensor = base[ranks.index(rank)].clone().to(device)
                if count and mine.random() < 0.3:
                    tensor = tensor.repeat_interleave(2)[::2]
                call = issue(kind, tensor, base, groups[which], ranks.index(rank), root, step)
            output, expected, work = call
            pending.append((seen, work, output, expected, (step, kind, count, str(device), which)))
            del tensor, call, output, work
            mine.shuffle(pending)
            while len(pending) > mine.choice([0, 3, 6]):
                check(mine.choice(["wait", "future", "poll"]), *pending.pop())
        while pending:
            check(mine.choice(["wait", "future", "poll"]), *pending.pop())
        dist.barrier()
    counts = module.counts()
    assert (counts["pageable"], counts["wrong_device"], counts["after_free"]) == (0, 0, 0), counts
