"""Gradients on a device that another backend would reduce uncompressed are refused by name.

`test_compression_on_devices.py` has the devices that accl serves.
"""

import types

import pytest
import torch
import torch.distributed as dist
from support import gloo_group, on_ranks
from support.training import Model
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch_accl import compression
from torch_accl.compat import cgx
from torch_accl.compression import Compression

# Error message on a machine with such a device. A fake tensor has all of the device but the memory.
REFUSAL = r"on cuda:0, which the group reduces with gloo, uncompressed; move them, omit compression, or create"


def elsewhere(*shape):
    with FakeTensorMode():
        return torch.empty(*shape, device="cuda")


def bucket_of(buffer):
    parts = {"buffer": buffer, "is_last": True, "index": 0, "parameters": [], "gradients": [buffer]}
    return types.SimpleNamespace(**{name: lambda value=value: value for name, value in parts.items()})


def mixed_group():
    return gloo_group("cpu:accl,cuda:gloo")


@on_ranks(2, fresh=True)
@pytest.mark.parametrize("kind", ["state", "cgx"])
def test_a_bucket_of_ddp_on_another_device_is_refused(rank, world, kind):
    group = mixed_group()
    state = (
        compression.CompressionState(Compression("maxmin:4"), Model(), group)
        if kind == "state"
        else cgx.CGXState(group)
    )
    hook = compression.ddp_hook if kind == "state" else cgx.cgx_hook
    with pytest.raises(RuntimeError, match=REFUSAL):
        hook(state, bucket_of(elsewhere(5000)))
    # The hook sent nothing, and counts nothing as sent.
    assert (state.step, state.traffic.raw) == (0, 0)
    dist.barrier(group)


@on_ranks(2, fresh=True)
def test_a_model_on_another_device_is_refused_where_the_state_is_made(rank, world):
    with FakeTensorMode():
        model = nn.Linear(64, 64, device="cuda")
    with pytest.raises(RuntimeError, match=REFUSAL):
        compression.CompressionState(Compression("maxmin:4"), model, mixed_group())
    with pytest.raises(RuntimeError, match="on cuda:0, which the group has no backend for; move them"):
        compression.CompressionState(Compression("maxmin:4"), model, dist.new_group(backend="cpu:accl"))
    compression.CompressionState(Compression("maxmin:4"), nn.Linear(64, 64, device="meta"))


@on_ranks(2, fresh=True)
def test_rows_of_fsdp2_on_another_device_are_refused(rank, world):
    from torch_accl.compression._fsdp import _Reduction
    from torch_accl.compression._torch_names import parameter_groups

    model, group = fully_shard(Model()), mixed_group()
    state = compression.CompressionState(Compression("maxmin:4"), model)
    [(name, _, [parameters])] = parameter_groups(model)
    reduction = _Reduction(state, name, parameters)
    for call in (
        lambda: reduction(elsewhere(100), elsewhere(200), group, dist.ReduceOp.AVG),
        lambda: reduction._all_reduce(elsewhere(100), dist.ReduceOp.AVG, group, False),
    ):
        with pytest.raises(RuntimeError, match=REFUSAL):
            call()
    assert state.traffic.raw == 0 and not state._calls


@on_ranks(2, fresh=True)
def test_a_model_that_is_sharded_over_other_devices_is_refused_by_apply_fsdp2(rank, world):
    model = fully_shard(Model(), mesh=DeviceMesh.from_group(mixed_group(), "cpu"))
    state = compression.CompressionState(Compression("maxmin:4"), model)
    # With parameters offloaded to the CPU, only their mesh shows where gradients are reduced.
    mesh = next(model.parameters()).device_mesh
    mesh._device_type = "cuda"
    try:
        with pytest.raises(RuntimeError, match="on cuda, which the group reduces with gloo, uncompressed"):
            compression.apply_fsdp2(model, state)
    finally:
        mesh._device_type = "cpu"


@on_ranks(2, fresh=True)
def test_buckets_on_the_cpu_of_a_group_with_several_backends_are_compressed(rank, world):
    group = mixed_group()
    torch.manual_seed(7)
    ddp = DistributedDataParallel(Model(), process_group=group)
    state = compression.CompressionState(Compression("maxmin:4"), ddp, group)
    ddp.register_comm_hook(state, compression.ddp_hook)
    ddp(torch.ones(2, 48)).sum().backward()
    assert state.traffic.ratio > 2
