"""Compression of FSDP2's traffic between replicas, and the torch internals that it needs."""

import ast
import inspect

import pytest
import torch
import torch.distributed as dist
from support import gloo_group, on_ranks, versions
from support.training import Model, batch, error, residuals_of, same_on_all, train
from torch import nn
from torch.distributed._composable.replicate_with_fsdp import replicate
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch_accl import compression
from torch_accl.compression import Compression, _fsdp, _torch_names


def made(apply, **options):
    torch.manual_seed(7)
    model = Model()
    for layer in (model.up, model.down):
        apply(layer, **options)
    return apply(model, **options)


def mesh_of(replicas, shards):
    return init_device_mesh("cpu", (replicas, shards), mesh_dim_names=("replicate", "shard"))


def compressed(settings, model):
    state = compression.CompressionState(settings, model)
    compression.apply_fsdp2(model, state)
    return model, state


def backward(rank, model, number=0):
    inputs, targets = batch(rank, number)
    (model(inputs) - targets).square().mean().backward()


def gradients(rank, model, number=0):
    """Returns the whole gradients of one step, by name."""
    model.zero_grad()
    backward(rank, model, number)
    return {name: p.grad.full_tensor() for name, p in model.named_parameters()}


SETTINGS = Compression("maxmin:8,bucket=64", min_elements=64, exclude=["down"])


def check_only_what_is_said_is_coarse(coarse, exact):
    for name, gradient in exact.items():
        is_coarse = name in ("up.weight", "head.weight")
        found = error(coarse[name], gradient)
        assert (1e-4 < found < 0.03) if is_coarse else found < 1e-6, (name, found)


@on_ranks(2, fresh=True)
def test_the_all_reduce_between_replicas_of_fsdp2_is_compressed(rank, world):
    # No model is sharded here, so the all_reduce between replicas is the only communication.
    mesh = mesh_of(world, 1)
    exact = gradients(rank, made(fully_shard, mesh=mesh))
    model, state = compressed(SETTINGS, made(fully_shard, mesh=mesh))
    coarse = gradients(rank, model)
    assert same_on_all(*coarse.values())
    check_only_what_is_said_is_coarse(coarse, exact)
    assert [row.name for row in state.measures() if row.calls] == ["up.weight (replicas)", "head.weight (replicas)"]
    assert state.traffic.ratio > 1.5 and state.step == 1


@on_ranks(2, 3, fresh=True)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_modules_that_fsdp2_replicates_are_compressed(rank, world, dtype):
    policy = MixedPrecisionPolicy(param_dtype=torch.float32, reduce_dtype=dtype)
    exact = gradients(rank, made(replicate, mp_policy=policy))
    model, state = compressed(SETTINGS, made(replicate, mp_policy=policy))
    coarse = gradients(rank, model)
    assert same_on_all(*coarse.values())
    for name in ("up.weight", "head.weight"):
        assert 0 < error(coarse[name], exact[name]) < 0.05, name
        assert not torch.equal(coarse[name], exact[name])
    rows = {row.name: row for row in state.measures()}
    assert rows["up.weight (replicas)"].calls == 1 and rows["up.weight (replicas)"].error > 0
    assert rows["up.bias (replicas)"].codec is None


@pytest.mark.slow
@on_ranks(4, fresh=True)
def test_both_calls_of_a_mesh_of_replicas_are_compressed_and_measured(rank, world):
    mesh = mesh_of(2, 2)
    exact = gradients(rank, made(fully_shard, mesh=mesh))
    model, state = compressed(SETTINGS, made(fully_shard, mesh=mesh))
    coarse = gradients(rank, model)
    assert same_on_all(*coarse.values())
    check_only_what_is_said_is_coarse(coarse, exact)
    rows = {row.name: row for row in state.measures() if row.calls}
    assert set(rows) == {name + leg for name in ("up.weight", "head.weight") for leg in ("", " (replicas)")}
    elements = model.up.weight.numel()
    assert rows["up.weight"].raw_bytes == 4 * elements and rows["up.weight (replicas)"].raw_bytes == 2 * elements
    assert "up.weight (replicas)" in state.summary()


@pytest.mark.slow
@on_ranks(4, fresh=True)
def test_residuals_between_replicas_are_by_shard(rank, world):
    mesh = mesh_of(2, 2)

    def found(settings):
        model = made(fully_shard, mesh=mesh)
        state = None if settings is None else compressed(settings, model)[1]
        return train(rank, model, steps=24), state

    exact, _ = found(None)
    distances = {}
    for feedback in (False, True):
        settings = Compression("maxmin:2,bucket=64,rounding=nearest", error_feedback=feedback)
        weights, state = found(settings)
        assert same_on_all(*weights)
        distances[feedback] = sum((a - b).square().sum() for a, b in zip(weights, exact, strict=True)).sqrt().item()
    assert distances[True] < distances[False] / 1.5, distances
    saved = residuals_of(state)
    assert saved["residuals"]["up.weight"].shape == (2, 48 * 48)
    assert saved["residuals"]["up.weight (replicas)"].shape == (1, 48 * 48)
    assert all(loss.abs().sum() > 0 for loss in saved["residuals"].values())
    model, again = compressed(settings, made(fully_shard, mesh=mesh))
    again.load_state_dict(state.state_dict())
    backward(rank, model)
    assert not torch.equal(
        residuals_of(again)["residuals"]["up.weight (replicas)"], saved["residuals"]["up.weight (replicas)"]
    )


@pytest.mark.slow
@on_ranks(4, fresh=True)
def test_a_mesh_of_replicas_has_the_same_bits_in_calls_of_any_size(rank, world):
    mesh, found = mesh_of(2, 2), []
    for most in (None, 4096, 4):
        settings = Compression("maxmin:8,bucket=64", min_elements=64, fusion_bytes=most)
        model, _ = compressed(settings, made(fully_shard, mesh=mesh))
        found.append(gradients(rank, model))
    for others in found[1:]:
        for name, gradient in found[0].items():
            # A sum of two contributions has one order in every call. What a rank encodes of the sum does depend on the
            # call.
            assert error(others[name], gradient) < 0.03, name


@pytest.mark.slow
@on_ranks(4, fresh=True)
def test_replicas_choose_their_codecs_by_themselves(rank, world):
    model, state = compressed(Compression("auto", min_elements=64), made(fully_shard, mesh=mesh_of(2, 2)))
    assert same_on_all(*train(rank, model, steps=2))
    explanation = state.explain()
    assert "up.weight: " in explanation and "up.weight (replicas): " in explanation


@pytest.mark.slow
@on_ranks(4, fresh=True)
def test_gradients_that_wait_for_their_all_reduce_are_sums_of_all_steps(rank, world):
    mesh, found = mesh_of(2, 2), []
    for settings in (None, SETTINGS):
        model = made(fully_shard, mesh=mesh)
        state = None if settings is None else compressed(settings, model)[1]
        for number in range(3):
            model.set_requires_all_reduce(number == 2)
            backward(rank, model, number)
        found.append({name: p.grad.full_tensor() for name, p in model.named_parameters()})
    check_only_what_is_said_is_coarse(found[1], found[0])
    rows = {row.name: row.calls for row in state.measures()}
    assert rows["up.weight"] == 3 and rows["up.weight (replicas)"] == 1


@on_ranks(2, fresh=True)
@pytest.mark.parametrize("replicas", [1, 2])
def test_what_a_hook_of_the_user_sends_stays_exact(rank, world, replicas):
    mesh = mesh_of(2, 1) if replicas == 2 else init_device_mesh("cpu", (2,))
    sent = []

    def hook(reduced):
        mine = torch.arange(reduced.numel(), dtype=torch.float32).mul_(rank + 1).div_(7)
        reduced.copy_(mine)
        dist.all_reduce(reduced)
        sent.append(torch.equal(reduced, mine / (rank + 1) + mine / (rank + 1) * 2))
        assert type(mine + 1) is torch.Tensor and type(reduced + 1) is torch.Tensor

    torch.manual_seed(7)
    model = fully_shard(Model(), mesh=mesh)
    model.set_all_reduce_hook(hook)
    compressed(Compression("maxmin:2,bucket=64", min_elements=1), model)
    backward(rank, model)
    assert sent == [True]
    assert all(type(p.grad.to_local()) is torch.Tensor for p in model.parameters())


@on_ranks(2, fresh=True)
def test_modules_that_are_sharded_together_are_one(rank, world):
    torch.manual_seed(7)
    model = Model()
    fully_shard([model.up, model.down])
    fully_shard(model)
    exact = gradients(rank, model)
    _, state = compressed(Compression("maxmin:8,bucket=64", min_elements=64), model)
    coarse = gradients(rank, model)
    assert state._calls == {"": 1, "up": 1}
    assert 1e-4 < error(coarse["down.weight"], exact["down.weight"]) < 0.03


@on_ranks(2, fresh=True)
def test_replicas_with_different_settings_are_named(rank, world):
    model, _ = compressed(Compression(f"maxmin:{4 + rank}"), made(fully_shard, mesh=mesh_of(2, 1)))
    with pytest.raises(RuntimeError, match="rank 0 has codec='maxmin:4,.* and rank 1 has codec='maxmin:5,"):
        backward(rank, model)


@on_ranks(2, fresh=True)
def test_a_torch_without_a_way_to_the_all_reduce_is_refused(rank, world):
    model = made(fully_shard, mesh=mesh_of(2, 1))
    state = compression.CompressionState(SETTINGS, model)
    plain = dist.all_reduce

    def takes_tensors_only(tensor, *_, **__):
        raise TypeError(f"expected a tensor, not {tensor!r}")

    dist.all_reduce = takes_tensors_only
    try:
        with pytest.raises(
            RuntimeError, match=r"apply_fsdp2: gradients of module '' .* does not call __torch_function__"
        ):
            compression.apply_fsdp2(model, state)
    finally:
        dist.all_reduce = plain
    # If torch no longer has a name, the error reports the name and the running torch.
    assert _torch_names.asks_torch_function()
    with pytest.raises(RuntimeError, match=r"has no object\.fsdp_params \(the parameters of a group\)"):
        _torch_names._get(object(), "fsdp_params")


@on_ranks(2, fresh=True)
def test_replicas_of_another_backend_are_refused(rank, world):
    group = gloo_group()
    mesh = torch.distributed.device_mesh.DeviceMesh.from_group(group, "cpu")
    model = made(replicate, mesh=mesh)
    with pytest.raises(RuntimeError, match="needs a group of the accl backend, but this group has gloo"):
        compression.apply_fsdp2(model, compression.CompressionState(SETTINGS, model))


@on_ranks(2, fresh=True)
def test_a_module_whose_parameters_have_several_meshes_is_refused(rank, world):
    from torch.distributed.fsdp._fully_shard._fsdp_common import FSDPMeshInfo, ShardPlacementResult

    other = FSDPMeshInfo(mesh_of(world, 1)["shard"], shard_mesh_dim=0)
    torch.manual_seed(7)
    model = Model()
    own = set(model.up.parameters())
    fully_shard(model, shard_placement_fn=lambda p: ShardPlacementResult(None, other) if p in own else None)
    with pytest.raises(RuntimeError, match=r"module '' are sharded over 2 meshes, .* call fully_shard separately"):
        compression.apply_fsdp2(model, compression.CompressionState(SETTINGS, model))


@on_ranks(1, fresh=True)
def test_names_of_torch_that_are_not_public_are_those_of_the_table(rank, world):
    sharded, replicated = fully_shard(nn.Linear(4, 4), mesh=mesh_of(1, 1)), replicate(nn.Linear(4, 4))
    for module in (sharded, replicated):
        module(torch.ones(1, 4)).sum().backward()
        state = module._get_fsdp_state()
        [group] = state._fsdp_param_groups
        things = {
            "module": module,
            "state": state,
            "group": group,
            "mesh": group.mesh_info,
            "param": group.fsdp_params[0],
            "process_group": dist.group.WORLD,
            "torch._C": torch._C,
        }
        for row in _torch_names.NAMES:
            assert hasattr(things[row.of], row.name) == (versions.NAME in row.versions), row
    assert _torch_names.asks_torch_function()
    # The public names exist too.
    for name in ("set_custom_reduce_scatter", "set_all_reduce_hook", "set_requires_all_reduce"):
        assert hasattr(sharded, name)


def test_no_other_name_of_torch_is_used_that_is_not_public():
    known = {row.name for row in _torch_names.NAMES}
    for module in (_fsdp, _torch_names):
        for node in ast.walk(ast.parse(inspect.getsource(module))):
            names = [node.attr] if isinstance(node, ast.Attribute) else []
            if isinstance(node, ast.ImportFrom) and node.module.startswith("torch"):
                names = [*node.module.split("."), *(alias.name for alias in node.names)]
            own = isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "self"
            found = {name for name in names if name.startswith("_") and not name.startswith("__") and not own}
            assert found - {"_C"} <= known, (module.__name__, found)
