"""Compressed calls and hooks: the same bits on all ranks, near the exact result, while other calls stay exact."""

import dataclasses
import warnings
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
import torch_accl
from support import gloo_group, init_group, on_ranks
from support.training import Model, batch, contribution, error, same_on_all, train
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch_accl import _native, compression
from torch_accl.compression import Compression

FLOATS = (torch.float32, torch.float16, torch.bfloat16)
CODECS = (
    "raw",
    "bf16",
    "maxmin:8",
    "maxmin:4,bucket=64",
    "maxmin:2,bucket=64",
    "maxmin:8,meta=float16,skip_incomplete",
)


# Twice the error of one encoding of Gaussian data, plus the error of rounding to the type.
BOUNDS = {"raw": 0.005, "bf16": 0.01, "maxmin:8": 0.03, "maxmin:4,bucket=64": 0.3, "maxmin:2,bucket=64": 2.0}


@on_ranks(1, 2, 3, 4)
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("codec", CODECS)
def test_all_reduce_ends_with_the_same_bits_near_the_exact_sum(rank, world, codec, dtype):
    for op in (dist.ReduceOp.SUM, dist.ReduceOp.AVG, dist._make_nccl_premul_sum(0.5)):
        tensor = contribution(rank).to(dtype)
        exact = sum(contribution(other).to(dtype).double() for other in range(world))
        exact /= world if op == dist.ReduceOp.AVG else 1 if op == dist.ReduceOp.SUM else 2
        assert compression.all_reduce_quantized(tensor, op, compression=codec) is None
        assert same_on_all(tensor)
        assert error(tensor, exact) < BOUNDS.get(codec, 0.03)


@on_ranks(3)
def test_what_is_no_sum_of_floats_stays_exact(rank, world):
    integers = torch.arange(100) + rank
    compression.all_reduce_quantized(integers, compression="maxmin:1")
    assert integers.tolist() == [3 * element + 3 for element in range(100)]
    doubles = contribution(rank).double()
    compression.all_reduce_quantized(doubles, compression="maxmin:1")
    torch.testing.assert_close(doubles, sum(contribution(other).double() for other in range(world)))
    largest = contribution(rank)
    compression.all_reduce_quantized(largest, dist.ReduceOp.MAX, compression="maxmin:1")
    assert torch.equal(largest, torch.stack([contribution(other) for other in range(world)]).amax(0))


@on_ranks(2)
def test_complex_and_sparse_tensors_stay_exact(rank, world):
    def number(other):
        return torch.complex(contribution(other), contribution(other, seed=1))

    result = number(rank)
    compression.all_reduce_quantized(result, compression="maxmin:1")
    torch.testing.assert_close(result, sum(map(number, range(world))))
    gathered = torch.empty(world * 5003, dtype=result.dtype)
    compression.all_gather_quantized(gathered, number(rank), compression="maxmin:1")
    assert torch.equal(gathered, torch.cat([number(other) for other in range(world)]))
    sparse = torch.diag(contribution(rank)[:2000]).to_sparse()
    compression.all_reduce_quantized(sparse, compression="maxmin:1")
    exact = sum(contribution(other)[:2000] for other in range(world))
    torch.testing.assert_close(sparse.to_dense().diagonal(), exact)


@on_ranks(2, fresh=True, init=False, env={"TORCH_DISTRIBUTED_DEBUG": "DETAIL"})
def test_calls_and_hooks_work_with_detailed_debugging(rank, world):
    dist.set_debug_level_from_env()
    init_group()
    tensor = contribution(rank)
    compression.all_reduce_quantized(tensor, compression="maxmin:8")
    assert 0 < error(tensor, sum(contribution(other) for other in range(world))) < 0.03
    ddp, _ = compressed_ddp(Compression("maxmin:8"), models())
    assert same_on_all(*train(rank, ddp, steps=1))
    dist.destroy_process_group()


@on_ranks(3)
def test_other_calls_stay_exact_among_compressed_ones(rank, world):
    expected = contribution(rank)
    dist.all_reduce(expected)
    for _ in range(3):
        first = compression.all_reduce_quantized(contribution(rank), async_op=True, compression="maxmin:2")
        metric = contribution(rank)
        second = dist.all_reduce(metric, async_op=True)
        first.wait()
        second.wait()
        assert torch.equal(metric, expected)
    # A refused call has no effect on later calls.
    with pytest.raises(ValueError, match="expanded"):
        compression.all_reduce_quantized(torch.ones(1, 4).expand(4, 4))
    metric = contribution(rank)
    dist.all_reduce(metric)
    assert torch.equal(metric, expected)


@on_ranks(3)
def test_random_numbers_depend_on_seed_step_and_key_and_on_nothing_else(rank, world):
    def result(seed=0, step=0, key="a"):
        tensor = contribution(rank)
        settings = Compression("maxmin:3,rounding=stochastic", seed=seed)
        compression.all_reduce_quantized(tensor, compression=settings, step=step, key=key)
        return tensor

    first = result()
    assert torch.equal(result(), first)
    for other in (result(seed=1), result(step=1), result(key="b")):
        assert not torch.equal(other, first)


@on_ranks(3)
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_blocks_are_scattered_gathered_and_exchanged(rank, world, dtype):
    count = 1037
    inputs = [contribution(other, world * count).to(dtype) for other in range(world)]
    output = torch.empty(count, dtype=dtype)
    compression.reduce_scatter_quantized(output, inputs[rank], compression="maxmin:8")
    exact = sum(tensor.double() for tensor in inputs)[rank * count : (rank + 1) * count]
    assert error(output, exact) < 0.02
    gathered = torch.empty(world * count, dtype=dtype)
    compression.all_gather_quantized(gathered, inputs[rank][:count].contiguous(), compression="maxmin:8")
    assert same_on_all(gathered)
    assert error(gathered, torch.cat([tensor[:count] for tensor in inputs])) < 0.02
    exchanged = torch.empty(world * count, dtype=dtype)
    compression.all_to_all_quantized(exchanged, inputs[rank], compression="maxmin:8")
    exact = torch.cat([tensor[rank * count : (rank + 1) * count] for tensor in inputs])
    assert error(exchanged, exact) < 0.02
    own = slice(rank * count, (rank + 1) * count)
    assert torch.equal(exchanged[own], exact[own])


@on_ranks(2)
def test_a_tensor_of_any_layout_and_size_is_compressed(rank, world):
    for shape in [(), (1,), (7,), (0,), (3, 5, 7)]:
        tensor = torch.full(shape, 1.5 + rank)
        compression.all_reduce_quantized(tensor)
        assert torch.equal(tensor, torch.full(shape, 4.0))
    whole = contribution(rank, 64 * 48).view(64, 48)
    exact = sum(contribution(other, 64 * 48).view(64, 48)[:, ::3] for other in range(world))
    before = whole.clone()
    part = whole[:, ::3]
    compression.all_reduce_quantized(part, compression="maxmin:8")
    assert error(part, exact) < 0.02 and same_on_all(part)
    assert torch.equal(whole[:, 1::3], before[:, 1::3])


@on_ranks(3)
def test_a_nan_of_one_rank_spoils_its_bucket_on_all(rank, world):
    tensor = contribution(rank, 1000)
    if rank == 1:
        tensor[70] = torch.nan
    compression.all_reduce_quantized(tensor, compression="maxmin:4,bucket=64")
    assert tensor.isnan().nonzero().flatten().tolist() == list(range(64, 128))


WRONG = {
    "maxmin": "expected the number of bits",
    "maxmin:0": "bits is 0; expected 1 to 8",
    "maxmin:9": "bits is 9; expected 1 to 8",
    "maxmin:four": "bits is `four`; expected a number",
    "maxmin:4,bucket=0": "bucket is 0; expected a multiple of 8 from 8 to 8192",
    "maxmin:4,bucket=7": "bucket is 7",
    "maxmin:4,rounding=up": "rounding is `up`; expected nearest, stochastic or correlated",
    "maxmin:4,bukket=8": "did you mean `bucket`",
    "int4": "unknown codec `int4`",
}


@pytest.mark.parametrize("codec", list(WRONG))
def test_a_wrong_codec_is_refused_where_it_is_given(codec):
    for given in ({"codec": codec}, {"result": codec}, {"layers": {"head": codec}}):
        with pytest.raises(ValueError) as caught:
            Compression(**given)
        assert WRONG[codec] in str(caught.value) and next(iter(given)) in str(caught.value)


@pytest.mark.parametrize(
    "given",
    [
        {"min_elements": -1},
        {"start_step": 1.5},
        {"seed": -1},
        {"exclude": "head"},
        {"exclude": [1]},
        {"codec": 4},
        {"codec": None},
        {"intra_node": None},
        {"layers": {"head": None}},
        {"one_dimensional": "no"},
        {"error_feedback": 1},
    ],
)
def test_a_wrong_setting_is_named(given):
    with pytest.raises(ValueError, match=next(iter(given))):
        Compression(**given)


OLD_NAMES = {"up": "reduce", "down": "result", "inner": "intra_node"}


@pytest.mark.parametrize(("old", "new"), OLD_NAMES.items(), ids=list(OLD_NAMES))
def test_an_old_name_of_a_setting_works_and_warns(old, new):
    for given in ({old: "bf16"}, {old: "bf16", "codec": "maxmin:8"}):
        with pytest.warns(DeprecationWarning) as caught:
            made = Compression(**given)
        [warning] = caught
        assert str(warning.message) == f"Compression({old}=...) is deprecated; use Compression({new}=...)"
        assert warning.filename == __file__
        assert made == Compression(**{OLD_NAMES.get(name, name): value for name, value in given.items()})
    with pytest.warns(DeprecationWarning, match=f"Compression.{old} is deprecated; use Compression.{new}"):
        assert getattr(made, old) == "bf16"
    with pytest.warns(DeprecationWarning, match=f"use Compression.{new}=...."):
        assert getattr(replace(Compression(), **{old: "bf16"}), new) == "bf16"
    with pytest.raises(dataclasses.FrozenInstanceError):
        setattr(made, old, "raw")


@pytest.mark.parametrize(("old", "new"), OLD_NAMES.items(), ids=list(OLD_NAMES))
def test_an_old_name_with_the_new_one_is_refused(old, new):
    with pytest.raises(ValueError, match=f"^{old} is the old name of {new}; give one of them$"):
        Compression(**{old: "bf16", new: "maxmin:8"})
    names = [field.name for field in dataclasses.fields(Compression)]
    before = ["maxmin:4", None, None, "raw"][: names.index(new)]
    with pytest.raises(ValueError, match=f"^{old} is the old name of {new}"):
        Compression(*before, "bf16", **{old: "maxmin:8"})


@on_ranks(2, fresh=True)
def test_ranks_with_different_settings_are_both_named(rank, world):
    with pytest.raises(dist.DistError) as caught:
        compression.all_reduce_quantized(contribution(rank), compression=f"maxmin:{4 + rank}")
    for part in ("rank 0 with maxmin:4,bucket=512", "rank 1 with maxmin:5,bucket=512", "same compression settings"):
        assert part in str(caught.value)


@on_ranks(2, fresh=True)
def test_a_rank_that_does_not_compress_is_named(rank, world):
    with pytest.raises(dist.DistError, match="rank 1 with no codec"):
        if rank == 0:
            compression.all_reduce_quantized(contribution(rank))
        else:
            dist.all_reduce(contribution(rank))


@on_ranks(2)
def test_a_group_of_another_backend_is_refused(rank, world):
    group = gloo_group()
    with pytest.raises(RuntimeError, match="needs a group of the accl backend, but this group has gloo"):
        compression.all_reduce_quantized(torch.ones(4), group=group)


# Fresh ranks, because torch's coalescing manager keeps a call that raised.
@on_ranks(2, fresh=True)
def test_calls_that_cannot_be_compressed_say_so(rank, world):
    with pytest.raises(ValueError, match="on meta, which the group has no backend for"):
        compression.all_reduce_quantized(torch.ones(4, device="meta"))
    for wrong in ({"key": 5}, {"step": -1}, {"step": 1.5}, {"step": 1 << 64}):
        with pytest.raises(ValueError, match=f"{next(iter(wrong))} is {next(iter(wrong.values()))}; expected"):
            compression.all_reduce_quantized(torch.ones(4), **wrong)
    with pytest.raises(RuntimeError, match="coalescing manager"):
        with dist._coalescing_manager():
            compression.all_reduce_quantized(torch.ones(4))


@on_ranks(2, fresh=True)
def test_a_rank_outside_of_the_group_takes_no_part(rank, world):
    group = dist.new_group([0])
    tensor = torch.ones(4)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert compression.all_reduce_quantized(tensor, group=group) is None
    assert torch.equal(tensor, torch.ones(4))


@on_ranks(1, fresh=True, init=False)
def test_without_a_group_it_is_said_how_to_make_one(rank, world):
    with pytest.raises(RuntimeError, match=r"call init_process_group\('accl'\)"):
        compression.all_reduce_quantized(torch.ones(4))


@on_ranks(3)
def test_a_group_may_compress_all_its_calls(rank, world):
    group = dist.new_group(pg_options=torch_accl.Options(compression="maxmin:8", compressed_calls="all"))
    exact = sum(contribution(other).double() for other in range(world))
    tensor = contribution(rank)
    dist.all_reduce(tensor, group=group)
    assert same_on_all(tensor) and 0 < error(tensor, exact) < 0.03
    handle = dist.all_reduce(tensor, op=dist.ReduceOp.AVG, group=group, async_op=True)
    handle.wait()
    assert same_on_all(tensor) and error(tensor, exact) < 0.05
    gathered = torch.empty(world * 5003)
    dist.all_gather_into_tensor(gathered, contribution(rank), group=group)
    assert same_on_all(gathered) and not torch.equal(gathered[:5003], contribution(0))
    # Small tensors, other operators and other types are exact.
    for tensor, op in (
        (contribution(rank, 1000), "SUM"),
        (contribution(rank), "MAX"),
        (torch.arange(5000) + rank, "SUM"),
    ):
        expected = tensor.clone()
        dist.all_reduce(expected, getattr(dist.ReduceOp, op))
        dist.all_reduce(tensor, getattr(dist.ReduceOp, op), group=group)
        assert torch.equal(tensor, expected)
    tensor = contribution(rank)
    dist.broadcast(tensor, 1, group=group)
    assert torch.equal(tensor, contribution(1))


@on_ranks(2)
@pytest.mark.parametrize("async_op", [False, True])
def test_sparse_tensors_stay_exact_in_a_group_that_compresses_all(rank, world, async_op):
    group = dist.new_group(pg_options=torch_accl.Options(compression="maxmin:2", compressed_calls="all"))
    total = (contribution(0, 2000) + contribution(1, 2000)).diag()
    sparse = contribution(rank, 2000).diag().to_sparse()
    work = dist.all_reduce(sparse, group=group, async_op=async_op)
    if async_op:
        work.wait()
    assert torch.equal(sparse.to_dense(), total)


@on_ranks(2, fresh=True, env={"ACCL_CODEC": "maxmin:2,bucket=64"})
def test_a_variable_sets_the_default_and_compresses_nothing_by_itself(rank, world):
    exact = sum(contribution(other) for other in range(world))
    tensor = contribution(rank)
    dist.all_reduce(tensor)
    assert torch.equal(tensor, exact)
    tensor = contribution(rank)
    compression.all_reduce_quantized(tensor)
    assert 0.2 < error(tensor, exact) < 2
    assert Compression().codec.startswith("maxmin:2,bucket=64")
    group = dist.new_group(pg_options=torch_accl.Options(compression="maxmin:8"))
    tensor = contribution(rank)
    compression.all_reduce_quantized(tensor, group=group)
    assert error(tensor, exact) < 0.03


@on_ranks(1, fresh=True, init=False, env={"ACCL_CODEC": "maxmin:12"})
def test_a_wrong_default_is_refused_when_the_group_is_made(rank, world):
    with pytest.raises(ValueError, match="bits is 12; expected 1 to 8"):
        dist.init_process_group("accl", store=dist.HashStore(), rank=0, world_size=1)


def test_a_wrong_option_is_refused():
    with pytest.raises(ValueError, match="bits is 0"):
        torch_accl.Options(compression="maxmin:0")
    with pytest.raises(ValueError, match="expected a codec such as 'maxmin:4'"):
        torch_accl.Options(compression=4)
    with pytest.raises(ValueError, match="compressed_calls: value `most` is not accepted; expected hooks or all"):
        torch_accl.Options(compressed_calls="most")


def models(count=1):
    made = []
    for index in range(count):
        torch.manual_seed(7 + index)
        made.append(Model())
    return made if count > 1 else made[0]


def compressed_ddp(settings, model, **options):
    ddp = DistributedDataParallel(model, **options)
    state = compression.CompressionState(settings, ddp)
    ddp.register_comm_hook(state, compression.ddp_hook)
    return ddp, state


DDP = {
    "plain": {},
    "many_buckets": {"bucket_cap_mb": 0.005},
    "bucket_views": {"bucket_cap_mb": 0.01, "gradient_as_bucket_view": True},
    "static_graph": {"static_graph": True},
    "unused_parameters_looked_for": {"find_unused_parameters": True},
}


@on_ranks(3, fresh=True)
@pytest.mark.parametrize("options", list(DDP))
def test_ddp_trains_alike_on_all_ranks_and_near_plain_training(rank, world, options):
    exact = train(rank, DistributedDataParallel(models(), **DDP[options]))
    ddp, state = compressed_ddp(Compression("maxmin:8"), models(), **DDP[options])
    weights = train(rank, ddp)
    assert same_on_all(*weights)
    assert all(torch.allclose(a, b, atol=2e-3) for a, b in zip(weights, exact, strict=True))
    assert any(not torch.equal(a, b) for a, b in zip(weights, exact, strict=True))
    assert state.step == 4
    large = sum(p.numel() for p in ddp.parameters() if p.dim() > 1 and p.numel() >= 1024)
    everything = 4 * sum(p.numel() for p in ddp.parameters())
    assert state.traffic.raw == 4 * everything
    # One byte per element, the metadata of buckets, the headers of tiles, and the parameters sent without compression.
    assert state.traffic.sent / 4 == pytest.approx(everything - 3 * large, rel=0.03)


@on_ranks(2, fresh=True)
def test_a_hook_without_codec_and_one_that_has_not_begun_give_what_plain_training_gives(rank, world):
    exact = train(rank, DistributedDataParallel(models()))
    for settings in (Compression("raw"), Compression("maxmin:2", start_step=4), Compression(min_elements=10**6)):
        ddp, state = compressed_ddp(settings, models())
        assert all(torch.equal(a, b) for a, b in zip(train(rank, ddp), exact, strict=True))
        assert state.traffic.ratio == 1.0
    ddp, state = compressed_ddp(Compression("maxmin:2", start_step=3), models())
    assert not all(torch.equal(a, b) for a, b in zip(train(rank, ddp), exact, strict=True))


@on_ranks(2, 3, fresh=True)
@pytest.mark.parametrize("feedback", [False, True])
def test_ranks_with_fewer_batches_join_those_with_more(rank, world, feedback):
    def joined(ddp):
        with ddp.join():
            return train(rank, ddp, steps=3 + 2 * rank)

    exact = joined(DistributedDataParallel(models()))
    settings = Compression("maxmin:8,bucket=64", error_feedback=feedback)
    ddp, state = compressed_ddp(settings, models())
    joined(ddp)
    # A rank that has joined sends zeros, and at the end gets the weights of the last rank to join.
    weights = [p.detach().clone() for p in ddp.parameters()]
    assert same_on_all(*weights) and state.step == 3 + 2 * (world - 1)
    dist.broadcast_object_list(shared := [exact], world - 1)
    assert all(torch.allclose(a, b, atol=4e-3) for a, b in zip(weights, shared[0], strict=True))
    assert any(not torch.equal(a, b) for a, b in zip(weights, shared[0], strict=True))


@on_ranks(2, fresh=True)
def test_layers_are_chosen_by_name(rank, world):
    settings = Compression(
        "maxmin:4", layers={"*.weight": "maxmin:8", "down": "maxmin:2,bucket=64", "head": "raw"}, exclude=["up"]
    )
    ddp, state = compressed_ddp(settings, models())
    found = {name.removeprefix("module."): None for name, _ in ddp.named_parameters()}
    for name in found:
        found[name] = state.codec_of(name)
    assert found["up.weight"].startswith("maxmin:8") and found["up.bias"] is None
    assert found["down.weight"].startswith("maxmin:2,bucket=64") and found["down.bias"].startswith("maxmin:2")
    assert found["head.weight"] is None and found["head.bias"] is None and found["norm.bias"] is None
    assert same_on_all(*train(rank, ddp))


@on_ranks(2)
def test_a_name_that_fits_nothing_is_a_warning(rank, world):
    with pytest.warns(UserWarning, match="'haed' matches no parameter") as caught:
        compression.CompressionState(Compression(layers={"haed": "raw", "head": "raw"}, exclude=["norm"]), models())
    assert len(caught) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        compression.CompressionState(Compression(exclude=["*.bias"]), models())


class Sparse(nn.Module):
    """An embedding with sparse gradients before layers that are compressed."""

    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(50, 48, sparse=True)
        self.layers = Model()

    def forward(self, x):
        return self.layers(self.table((x[:, 0].abs() * 10).long() % 50) + x)


@on_ranks(2, fresh=True)
def test_sparse_gradients_travel_as_they_are(rank, world):
    found = []
    for hooked in (False, True):
        torch.manual_seed(7)
        ddp = DistributedDataParallel(Sparse())
        if hooked:
            ddp.register_comm_hook(compression.CompressionState(Compression("raw"), ddp), compression.ddp_hook)
        found.append(train(rank, ddp, steps=2))
    assert all(torch.allclose(a, b, atol=1e-6) for a, b in zip(*found, strict=True))


@on_ranks(2, fresh=True)
def test_an_unused_layer_is_no_error_where_ddp_looks_for_it(rank, world):
    class Unused(Model):
        def __init__(self):
            super().__init__()
            self.idle = nn.Linear(48, 48)

    torch.manual_seed(7)
    ddp, _ = compressed_ddp(Compression("maxmin:8", error_feedback=True), Unused(), find_unused_parameters=True)
    assert same_on_all(*train(rank, ddp))


@on_ranks(2, fresh=True)
def test_hooks_say_what_travels_as_it_is_also_where_all_calls_are_compressed(rank, world):
    exact = train(rank, DistributedDataParallel(models()))
    group = dist.new_group(pg_options=torch_accl.Options(compression="maxmin:2", compressed_calls="all"))
    ddp = DistributedDataParallel(models(), process_group=group)
    state = compression.CompressionState(Compression("maxmin:2", start_step=4), ddp, group)
    ddp.register_comm_hook(state, compression.ddp_hook)
    assert all(torch.equal(a, b) for a, b in zip(train(rank, ddp), exact, strict=True))


def contribution_residuals(saved):
    """Returns the rank's residuals of contributions in a `state_dict`, by name."""
    [(_, _, losses, _)] = saved["residuals"].values()
    return dict(losses)


@on_ranks(2, fresh=True)
def test_the_default_type_does_not_change_residuals(rank, world):
    ddp, state = compressed_ddp(Compression("maxmin:2,bucket=64", error_feedback=True), models())
    torch.set_default_dtype(torch.bfloat16)
    train_float32 = [tensor.float() for tensor in batch(rank, 0)]
    (ddp(train_float32[0]) - train_float32[1]).square().mean().backward()
    saved = state.state_dict()
    assert all(loss.dtype is torch.float32 for loss in contribution_residuals(saved).values())
    own = (rank, saved["step"], tuple((name, loss[:, :10]) for name, loss in contribution_residuals(saved).items()), ())
    state.load_state_dict({**saved, "residuals": {f"rank {rank}": own}})
    with pytest.raises(RuntimeError, match=r"the residual of .* load a state of the same model"):
        (ddp(train_float32[0]) - train_float32[1]).square().mean().backward()


@on_ranks(2, fresh=True)
def test_two_models_have_a_state_each(rank, world):
    settings = Compression("maxmin:4,bucket=64"), Compression("maxmin:8")
    alone = [train(rank, compressed_ddp(own, model)[0]) for own, model in zip(settings, models(2), strict=True)]
    pairs = [compressed_ddp(own, model)[0] for own, model in zip(settings, models(2), strict=True)]
    optimizers = [torch.optim.SGD(ddp.parameters(), lr=0.05, momentum=0.9) for ddp in pairs]
    for step in range(4):
        for ddp, optimizer in zip(pairs, optimizers, strict=True):
            inputs, targets = batch(rank, step)
            optimizer.zero_grad()
            (ddp(inputs) - targets).square().mean().backward()
            optimizer.step()
        metric = torch.ones(100)
        dist.all_reduce(metric)
        assert torch.equal(metric, torch.full((100,), 2.0))
    for ddp, weights in zip(pairs, alone, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(ddp.parameters(), weights, strict=True))


@on_ranks(2, fresh=True)
def test_ranks_whose_hooks_differ_fail_in_the_backward_pass(rank, world):
    ddp, _ = compressed_ddp(Compression("maxmin:8" if rank else "maxmin:4"), models())
    with pytest.raises(RuntimeError) as caught:
        train(rank, ddp, steps=1)
    message = str(caught.value)
    assert f"rank {rank} cannot go on" in message and "seed" not in message
    assert "rank 0 has codec='maxmin:4," in message and "rank 1 has codec='maxmin:8," in message


@on_ranks(2, fresh=True)
def test_a_parameter_that_came_later_is_an_error(rank, world):
    model = models()
    state = compression.CompressionState(Compression(), model)
    model.down = nn.Linear(96, 48)
    ddp = DistributedDataParallel(model)
    ddp.register_comm_hook(state, compression.ddp_hook)
    with pytest.raises(RuntimeError, match=r"shape \((48|48, 96)\).*create a new state"):
        train(rank, ddp, steps=1)


def distance(weights, others):
    """Root of the sum of squared differences."""
    return sum((a - b).double().square().sum() for a, b in zip(weights, others, strict=True)).sqrt().item()


@on_ranks(2, 3, fresh=True)
def test_error_feedback_brings_two_bits_nearer_to_plain_training(rank, world):
    exact = train(rank, DistributedDataParallel(models()), steps=24)
    found = {}
    for feedback in (False, True):
        settings = Compression("maxmin:2,bucket=64,rounding=nearest", error_feedback=feedback)
        weights = train(rank, compressed_ddp(settings, models())[0], steps=24)
        assert same_on_all(*weights)
        found[feedback] = distance(weights, exact)
    assert found[True] < found[False] / 1.5, found


# Equal bits need `direct`. DistributedDataParallel orders its first bucket differently from later ones, and other
# algorithms split a call by that order.
@on_ranks(2, fresh=True, env={"ACCL_ALGORITHM": "all_reduce=direct"})
def test_a_state_that_was_saved_goes_on_as_if_it_had_not_been(rank, world):
    settings = Compression("maxmin:2,bucket=64", error_feedback=True)
    # Bucket boundaries decide which part a rank adds up itself, and so the last bits. They stay fixed here.
    fixed = {"find_unused_parameters": True}
    through, _ = compressed_ddp(settings, models(), **fixed)
    expected = train(rank, through, steps=6)
    # The same six steps in two halves, each with a plain optimizer of its own.
    first, state = compressed_ddp(settings, models(), **fixed)
    optimizer = torch.optim.SGD(first.parameters(), lr=0.05, momentum=0.9)

    def steps(ddp, optimizer, which):
        for step in which:
            inputs, targets = batch(rank, step)
            optimizer.zero_grad()
            (ddp(inputs) - targets).square().mean().backward()
            optimizer.step()

    steps(first, optimizer, range(3))
    saved = state.state_dict()
    assert saved["step"] == 3 and set(contribution_residuals(saved)) == {"up.weight", "down.weight"}
    # A part that a rank adds up itself is not encoded, and may be all of a layer.
    assert any(loss.abs().sum() > 0 for loss in contribution_residuals(saved).values())
    second, state = compressed_ddp(settings, models(), **fixed)
    second.load_state_dict(first.state_dict())
    state.load_state_dict(saved)
    again = torch.optim.SGD(second.parameters(), lr=0.05, momentum=0.9)
    again.load_state_dict(optimizer.state_dict())
    steps(second, again, range(3, 6))
    assert all(torch.equal(a, b) for a, b in zip(second.parameters(), expected, strict=True))
    before = contribution_residuals(state.state_dict())["up.weight"]
    state.rescale(0.5)
    assert torch.equal(contribution_residuals(state.state_dict())["up.weight"], before / 2)
    for wrong in (0.0, -1.0, float("nan"), float("inf")):
        with pytest.raises(ValueError, match="factor is .*; expected a positive number"):
            state.rescale(wrong)
    with pytest.warns(UserWarning, match="residuals of 3 ranks cannot be distributed to 2 ranks"):
        state.load_state_dict({**saved, "world": 3})
    assert state.step == 3 and not contribution_residuals(state.state_dict())


def test_error_feedback_with_one_bit_is_refused():
    for given in ({"codec": "maxmin:1"}, {"result": "maxmin:1,bucket=64"}, {"layers": {"head": "maxmin:1"}}):
        Compression(**given)
        with pytest.raises(ValueError, match="error_feedback: with maxmin:1 it diverges"):
            Compression(**given, error_feedback=True)


def test_error_feedback_with_one_bit_of_a_rotation_is_refused():
    with pytest.raises(ValueError, match="error_feedback: with hadamard:1 it diverges"):
        Compression("hadamard:1", error_feedback=True)


LOSSY = ({"codec": "sign"}, {"result": "sign,bucket=64"}, {"intra_node": "topk:5"}, {"layers": {"head": "topk:2"}})


@pytest.mark.parametrize("given", LOSSY, ids=["codec", "result", "intra_node", "layers"])
def test_what_needs_error_feedback_is_refused_by_hooks_without_it(given):
    with pytest.raises(ValueError, match=r"(sign|topk:\d),bucket=\d+,meta=float32 loses .* set error_feedback=True"):
        Compression(**given)
    Compression(**given, error_feedback=True)


@on_ranks(3, fresh=True)
def test_a_single_call_takes_every_codec_and_all_ranks_end_alike(rank, world):
    parts = [contribution(r) for r in range(world)]
    exact = torch.stack(parts).double().sum(0)
    for row in _native.codecs():
        codec = f"{row['name']}:4" if "bits" in row["settings"] else row["name"]
        result = parts[rank].clone()
        compression.all_reduce_quantized(result, compression=codec)
        # Relative error: below 1 (a result of zeros) where feedback is needed, else twice the error of four bits.
        limit = 1.0 if row["needs_feedback"] else 0.3
        assert same_on_all(result) and error(result, exact) < limit, codec


FSDP = {
    "plain": {},
    "mixed_precision": {"mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)},
    "reduced_in_bfloat16": {"mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)},
}


def sharded(options):
    model = models()
    for layer in (model.up, model.down):
        fully_shard(layer, **options)
    return fully_shard(model, **options)


@pytest.mark.slow
@on_ranks(3, fresh=True)
@pytest.mark.parametrize("options", list(FSDP))
def test_fsdp2_trains_near_plain_training(rank, world, options):
    exact = train(rank, sharded(FSDP[options]))
    model = sharded(FSDP[options])
    settings = Compression("maxmin:8,bucket=64", min_elements=64, error_feedback=options == "plain")
    state = compression.CompressionState(settings, model)
    compression.apply_fsdp2(model, state)
    weights = train(rank, model)
    assert same_on_all(*weights)
    assert all(torch.allclose(a, b, atol=4e-3) for a, b in zip(weights, exact, strict=True))
    assert any(not torch.equal(a, b) for a, b in zip(weights, exact, strict=True))
    assert state.step == 4 and state.traffic.ratio > 1.5


class Partly(nn.Module):
    """A module with one frozen parameter and one unused layer."""

    def __init__(self):
        super().__init__()
        self.idle = nn.Linear(48, 48)
        self.first = nn.Linear(48, 48)
        self.frozen = nn.Parameter(torch.ones(48), requires_grad=False)
        self.norm = nn.LayerNorm(48)
        self.second = nn.Linear(48, 5)

    def forward(self, x):
        return self.second(self.norm(self.first(x) * self.frozen))


@on_ranks(2, fresh=True)
def test_fsdp2_rows_have_the_parameters_that_torch_puts_there(rank, world):
    found = []
    for settings in (None, Compression("maxmin:2,bucket=64", exclude=["second", "norm"], min_elements=64)):
        torch.manual_seed(7)
        model = fully_shard(Partly())
        if settings is not None:
            compression.apply_fsdp2(model, compression.CompressionState(settings, model))
        inputs, targets = batch(rank, 0)
        (model(inputs) - targets).square().mean().backward()
        found.append({name: p.grad.full_tensor() for name, p in model.named_parameters() if p.grad is not None})
    exact, coarse = found
    assert exact.keys().isdisjoint({"frozen", "idle.weight", "idle.bias"})
    for name, gradient in exact.items():
        # Excluded parameters are exact, whatever precedes them in the row.
        assert torch.equal(coarse[name], gradient) == (name != "first.weight"), name


def compressed_fsdp2(settings, model):
    state = compression.CompressionState(settings, model)
    compression.apply_fsdp2(model, state)
    return model, state


@pytest.mark.slow
@on_ranks(4, fresh=True)
@pytest.mark.parametrize("feedback", [False, True])
def test_fsdp2_over_replicas_trains_near_plain_training(rank, world, feedback):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    exact = train(rank, sharded({"mesh": mesh}))
    settings = Compression("maxmin:8,bucket=64", min_elements=64, error_feedback=feedback)
    model, state = compressed_fsdp2(settings, sharded({"mesh": mesh}))
    weights = train(rank, model)
    assert same_on_all(*weights)
    assert all(torch.allclose(a, b, atol=4e-3) for a, b in zip(weights, exact, strict=True))
    assert any(not torch.equal(a, b) for a, b in zip(weights, exact, strict=True))
    assert state.step == 4 and state.traffic.ratio > 1.5


@pytest.mark.slow
@on_ranks(3, fresh=True)
def test_fsdp2_divides_by_the_factor_that_it_was_given(rank, world):
    def gradients(settings, factor):
        model = sharded({})
        if settings is not None:
            compressed_fsdp2(settings, model)
        for module in (model.up, model.down, model):
            module.set_gradient_divide_factor(factor)
        inputs, targets = batch(rank, 0)
        (model(inputs) - targets).square().mean().backward()
        return {name: p.grad.full_tensor() for name, p in model.named_parameters()}

    # With the number of ranks as factor, torch uses AVG; with any other factor it uses PREMUL_SUM.
    for factor in (3.0, 1.0, 0.5, 7.0):
        exact = gradients(None, factor)
        coarse = gradients(Compression("maxmin:8,bucket=64", exclude=["norm"], min_elements=64), factor)
        for name, gradient in exact.items():
            if "norm" in name or "bias" in name:
                # Three numbers, added in another order.
                assert torch.allclose(coarse[name], gradient, rtol=1e-5, atol=1e-7), name
            else:
                assert 1e-4 < error(coarse[name], gradient) < 0.03, name


@on_ranks(2, fresh=True)
def test_fsdp2_sums_gradients_over_steps_that_are_not_reduced(rank, world):
    found = []
    for settings in (None, Compression("maxmin:8,bucket=64", min_elements=64)):
        model = sharded({})
        state = None if settings is None else compressed_fsdp2(settings, model)[1]
        for number in range(3):
            model.set_requires_gradient_sync(number == 2)
            inputs, targets = batch(rank, number)
            (model(inputs) - targets).square().mean().backward()
        found.append({name: p.grad.full_tensor() for name, p in model.named_parameters()})
    assert state.step == 1
    assert 0 < error(found[1]["up.weight"], found[0]["up.weight"]) < 0.03
    assert torch.equal(found[1]["up.bias"], found[0]["up.bias"])


@on_ranks(2, fresh=True)
def test_a_state_of_fsdp2_goes_on_where_it_was(rank, world):
    def made():
        model = sharded({})
        state = compression.CompressionState(
            Compression("maxmin:4,bucket=64", min_elements=64, error_feedback=True), model
        )
        compression.apply_fsdp2(model, state)
        return model, state

    model, state = made()
    train(rank, model, steps=3)
    saved = state.state_dict()
    assert saved["step"] == 3 and dict(saved["calls"]) == {"": 3, "up": 3, "down": 3}
    model, state = made()
    state.load_state_dict(saved)
    train(rank, model, steps=2)
    assert state.step == 5 and set(dict(state.state_dict()["calls"]).values()) == {5}


@on_ranks(2, fresh=True)
def test_what_is_not_sharded_is_refused(rank, world):
    state = compression.CompressionState(Compression(), models())
    with pytest.raises(RuntimeError, match="call fully_shard first"):
        compression.apply_fsdp2(models(), state)


def test_shards_that_do_not_make_up_a_row_are_refused():
    from torch_accl.compression._fsdp import check_row

    check_row([3, 4], 7)
    with pytest.raises(RuntimeError, match=r"7 elements \(3, 4\).*has 8"):
        check_row([3, 4], 8)
