"""The state of a hook: its group and device, saved and copied states, and a gradient scaler."""

import copy
import io
import pickle
import warnings

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch_accl
from support import BACKEND, gloo_group, init_group, on_ranks
from support.training import Model, batch, same_on_all, train
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch_accl import compression
from torch_accl.compat import cgx
from torch_accl.compression import Compression

pytestmark = pytest.mark.skipif(BACKEND != "accl", reason="about this package only")

# Keeps bucket boundaries fixed. They decide which part a rank adds up itself, and so the last bits.
FIXED = {"find_unused_parameters": True}
FEEDBACK = Compression("maxmin:2,bucket=64,rounding=nearest", error_feedback=True)


def model(seed=7):
    torch.manual_seed(seed)
    return Model()


def compressed(settings, net=None, wrapper=None, **options):
    ddp = DistributedDataParallel(net or model(), **(wrapper or {}))
    state = compression.CompressionState(settings, ddp, **options)
    ddp.register_comm_hook(state, compression.ddp_hook)
    return ddp, state


def steps(rank, net, which, optimizer=None):
    optimizer = optimizer or torch.optim.SGD(net.parameters(), lr=0.05)
    for step in which:
        inputs, targets = batch(rank, step)
        optimizer.zero_grad()
        (net(inputs) - targets).square().mean().backward()
        optimizer.step()


def losses(state):
    """Returns the state's residuals of contributions, by name."""
    [(_, _, contributions, _)] = state.state_dict()["residuals"].values()
    return dict(contributions)


# ---- group and device


class One(nn.Module):
    """A model whose gradient is its input."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(64, 64))

    def forward(self, x):
        return (self.weight * x).sum()


@on_ranks(4, fresh=True)
def test_gradients_of_a_model_of_a_subgroup_are_averaged_over_it(rank, world):
    pair = [dist.new_group([0, 1]), dist.new_group([2, 3])][rank // 2]
    net = DistributedDataParallel(One(), process_group=pair)
    state = compression.CompressionState(Compression("maxmin:8"), net)
    net.register_comm_hook(state, compression.ddp_hook)
    net(torch.full((64, 64), float(rank))).backward()
    assert torch.equal(net.module.weight.grad, torch.full((64, 64), 0.5 if rank < 2 else 2.5))
    assert state.process_group is pair and state.world == 2


@on_ranks(4, fresh=True)
def test_a_group_that_is_not_that_of_the_model_is_refused(rank, world):
    pair = [dist.new_group([0, 1]), dist.new_group([2, 3])][rank // 2]
    net = DistributedDataParallel(One(), process_group=pair)
    assert compression.CompressionState(Compression(), net, pair).process_group is pair
    with pytest.raises(ValueError, match="DistributedDataParallel of ranks .* but process_group has ranks"):
        compression.CompressionState(Compression(), net, dist.group.WORLD)
    # The model may also be inside another module.
    assert compression.CompressionState(Compression(), nn.Sequential(net)).process_group is pair
    both = nn.ModuleList([net, DistributedDataParallel(One())])
    for given in (None, pair):
        with pytest.raises(ValueError, match="create a state for each"):
            compression.CompressionState(Compression(), both, given)
    # The default is the group of all ranks, as in torch.
    assert compression.CompressionState(Compression(), One()).process_group is dist.group.WORLD
    assert compression.CompressionState(Compression(), One(), pair).process_group is pair


@on_ranks(2, fresh=True)
def test_a_model_of_another_backend_is_refused_when_the_state_is_made(rank, world):
    net = DistributedDataParallel(One(), process_group=gloo_group())
    with pytest.raises(RuntimeError, match="needs a group of the accl backend, but this group has gloo"):
        compression.CompressionState(Compression(), net)


@on_ranks(1, fresh=True)
def test_parameters_on_another_device_are_refused_when_the_state_is_made(rank, world):
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode(allow_non_fake_inputs=True):
        net = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8, device="cuda"))
    with pytest.raises(
        RuntimeError,
        match=r"tensors that accl reduces, but these are on cuda:0, which the group reduces with gloo, uncompressed",
    ):
        compression.CompressionState(Compression(), net, gloo_group("cpu:accl,cuda:gloo"))
    # accl serves the device in such a group.
    compression.CompressionState(Compression(), net, dist.new_group(backend="cpu:accl,cuda:accl"))
    # A parameter without memory may still get its memory on the CPU.
    compression.CompressionState(Compression(), nn.Linear(8, 8, device="meta"))


# ---- saved states


@on_ranks(3, fresh=True)
def test_a_state_of_one_rank_that_all_loaded_is_an_error_on_all(rank, world):
    ddp, state = compressed(FEEDBACK)
    steps(rank, ddp, range(2))
    saved = [state.state_dict()]
    dist.broadcast_object_list(saved, src=1)
    ddp, state = compressed(FEEDBACK)
    state.load_state_dict(saved[0])
    with pytest.raises(RuntimeError) as caught:
        steps(rank, ddp, range(2, 3))
    message = str(caught.value)
    assert f"rank {rank} cannot go on" in message and "rank 0 loaded the residuals of rank 1" in message, message
    assert "rank 2 loaded the residuals of rank 1" in message and "each rank" in message, message


@on_ranks(3, fresh=True)
def test_states_of_different_steps_are_an_error_on_all(rank, world):
    ddp, state = compressed(FEEDBACK)
    steps(rank, ddp, range(2))
    saved = state.state_dict()
    steps(rank, ddp, range(2, 3))
    later = state.state_dict()
    for which in ([saved, saved, later], [later, None, later]):
        ddp, state = compressed(FEEDBACK)
        if which[rank] is not None:
            state.load_state_dict(which[rank])
        with pytest.raises(RuntimeError) as caught:
            steps(rank, ddp, range(1))
        first, second = (0, 2) if which[1] is not None else (0, 1)
        message = str(caught.value)
        for other in (first, second):
            step = 0 if which[other] is None else which[other]["step"]
            assert f"rank {other} is at step {step}" in message, message


@on_ranks(2, fresh=True)
def test_a_state_that_carries_nothing_over_is_that_of_every_rank(rank, world):
    ddp, state = compressed(Compression("maxmin:4"))
    steps(rank, ddp, range(2))
    saved = [state.state_dict()]
    dist.broadcast_object_list(saved)
    ddp, state = compressed(Compression("maxmin:4"))
    state.load_state_dict(saved[0])
    steps(rank, ddp, range(2, 4))
    assert state.step == 4


@on_ranks(1, fresh=True)
def test_a_saved_state_of_another_format_is_refused(rank, world):
    _, state = compressed(FEEDBACK)
    saved = state.state_dict()
    unversioned = {name: value for name, value in saved.items() if name != "version"}
    for wrong in ({**saved, "version": 99}, unversioned):
        with pytest.raises(ValueError, match=r"in version (99|None); this version of torch_accl supports version 2"):
            state.load_state_dict(wrong)


@on_ranks(2, fresh=True)
def test_a_saved_state_with_a_codec_that_there_is_not_is_refused_with_its_name(rank, world):
    _, state = compressed(FEEDBACK)
    saved = state.state_dict()
    choice = {"codec": "later:4", "errors": {}, "times": {}}
    decided = ("raw", "later:4", "later:4")
    for wrong in ({"decided": (("up.weight", decided),)}, {"choices": (("up.weight", choice),)}):
        with pytest.raises(ValueError, match="codec that this version of torch_accl does not support .*`later`"):
            state.load_state_dict({**saved, **wrong})
    assert state.codec_of("up.weight").startswith("maxmin:2"), "what was refused changes nothing"


@pytest.mark.filterwarnings("ignore:compression. process_group is not saved")
@on_ranks(2, fresh=True)
def test_what_was_pickled_in_a_newer_version_is_refused_and_in_an_older_one_read(rank, world):
    ddp, state = compressed(FEEDBACK)
    steps(rank, ddp, range(2))
    parts = state.__getstate__()
    assert parts["version"] == 1 and parts["compression"].__getstate__()["version"] == 2
    made = compression.CompressionState.__new__(compression.CompressionState)
    with pytest.raises(ValueError, match="pickled in version 2; this version of torch_accl supports up to 1"):
        made.__setstate__({**parts, "version": 2})
    # A state as it was pickled before it had a version number.
    older = {name: value for name, value in parts.items() if name != "version"}
    older["_losses"], older["_losses_of_sums"] = older.pop("_residuals"), older.pop("_residuals_of_sums")
    made.__setstate__(older)
    for name, residual in losses(state).items():
        assert torch.equal(losses(made)[name], residual)


def test_settings_pickled_in_a_newer_version_are_refused_and_in_an_older_one_read():
    parts = FEEDBACK.__getstate__()
    made = Compression.__new__(Compression)
    with pytest.raises(ValueError, match="saved in version 3; this version of torch_accl supports up to 2"):
        made.__setstate__({**parts, "version": 3})
    with pytest.raises(
        ValueError, match="compression: saved settings are not accepted: codec: .*unknown codec `later`"
    ):
        made.__setstate__({**parts, "codec": "later:4"})
    made.__setstate__({name: value for name, value in parts.items() if name != "version"})
    assert made == FEEDBACK == pickle.loads(pickle.dumps(FEEDBACK)) == copy.deepcopy(FEEDBACK)
    # Settings that name no codec still use the codec of their group.
    assert pickle.loads(pickle.dumps(Compression())).of_group("bf16").codec == "bf16"


def test_settings_pickled_with_old_names_are_loaded_without_a_warning():
    settings = Compression("maxmin:4", reduce="bf16", result="maxmin:8", intra_node="bf16")
    parts = settings.__getstate__()
    for old, new in (("up", "reduce"), ("down", "result"), ("inner", "intra_node")):
        parts[old] = parts.pop(new)
    for version in ({}, {"version": 1}):
        made = Compression.__new__(Compression)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            made.__setstate__({**{name: value for name, value in parts.items() if name != "version"}, **version})
        assert made == settings and made.__getstate__() == settings.__getstate__()


@on_ranks(2, fresh=True)
def test_a_saved_state_goes_through_a_file_without_code(rank, world):
    ddp, state = compressed(FEEDBACK)
    steps(rank, ddp, range(2))
    file = io.BytesIO()
    torch.save(state.state_dict(), file)
    file.seek(0)
    saved = torch.load(file, weights_only=True)
    _, other = compressed(FEEDBACK)
    other.load_state_dict(saved)
    for name, loss in losses(state).items():
        assert torch.equal(losses(other)[name], loss)
    assert not same_on_all(losses(other)["up.weight"])


def sharded(seed=7):
    net = model(seed)
    for layer in (net.up, net.down):
        fully_shard(layer)
    net = fully_shard(net)
    state = compression.CompressionState(Compression("maxmin:2,bucket=64", min_elements=64, error_feedback=True), net)
    compression.apply_fsdp2(net, state)
    return net, state


@pytest.mark.slow
@on_ranks(3, fresh=True)
@pytest.mark.parametrize("kind", ["ddp", "fsdp2"])
def test_a_distributed_checkpoint_keeps_what_every_rank_carries_over(rank, world, kind, tmp_path):
    made = (lambda: compressed(FEEDBACK, wrapper=FIXED)) if kind == "ddp" else sharded
    net, state = made()
    steps(rank, net, range(3))
    dcp.save({"model": net.state_dict(), "compression": state}, checkpoint_id=tmp_path)
    kept = losses(state)
    again, other = made()
    weights = again.state_dict()
    dcp.load({"model": weights, "compression": other}, checkpoint_id=tmp_path)
    again.load_state_dict(weights)
    assert kept and all(torch.equal(losses(other)[name], loss) for name, loss in kept.items())
    assert other.step == 3 and not same_on_all(kept["up.weight"])
    for each in (net, again):
        steps(rank, each, range(3, 5))
    assert all(torch.equal(a, b) for a, b in zip(losses(state).values(), losses(other).values(), strict=True))


# ---- copies


@on_ranks(2, fresh=True)
def test_a_model_with_a_hook_is_saved_and_loaded_whole(rank, world):
    ddp, state = compressed(FEEDBACK, wrapper=FIXED)
    steps(rank, ddp, range(2))
    file = io.BytesIO()
    with pytest.warns(UserWarning, match="process_group is not saved"):
        torch.save(ddp, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=False)
    [(hook, other)] = loaded._comm_hooks
    assert hook is compression.ddp_hook and other.step == 2
    assert other.process_group is dist.group.WORLD and other.codec_of("up.weight").startswith("maxmin:2")
    assert [row.name for row in other.measures()] == [row.name for row in state.measures()]
    assert other.measures() == state.measures() and other.traffic == state.traffic
    # Copies of DistributedDataParallel have no hook until one is registered, as in torch.
    loaded.register_comm_hook(other, hook)
    for net in (ddp, loaded):
        steps(rank, net, range(2, 5))
    assert all(torch.equal(a, b) for a, b in zip(ddp.parameters(), loaded.parameters(), strict=True))
    assert all(torch.equal(losses(state)[name], loss) for name, loss in losses(other).items())


@on_ranks(2, fresh=True)
def test_a_pickled_state_of_one_rank_that_all_loaded_is_an_error_on_all(rank, world):
    ddp, state = compressed(FEEDBACK)
    steps(rank, ddp, range(2))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        texts = [pickle.dumps((ddp.module, state))]
    dist.broadcast_object_list(texts)
    net, loaded = pickle.loads(texts[0])
    again = DistributedDataParallel(net)
    again.register_comm_hook(loaded, compression.ddp_hook)
    with pytest.raises(RuntimeError, match=rf"rank {rank} cannot go on, since rank 1 loaded the residuals of rank 0"):
        steps(rank, again, range(2, 3))


@on_ranks(2, fresh=True)
def test_deep_copies_and_averaged_models_of_a_model_with_a_hook_work(rank, world):
    ddp, _ = compressed(FEEDBACK, wrapper=FIXED)
    steps(rank, ddp, range(2))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        copied = copy.deepcopy(ddp)
        averaged = torch.optim.swa_utils.AveragedModel(ddp)
    [(hook, other)] = copied._comm_hooks
    copied.register_comm_hook(other, hook)
    for net in (ddp, copied):
        steps(rank, net, range(2, 4))
    assert all(torch.equal(a, b) for a, b in zip(ddp.parameters(), copied.parameters(), strict=True))
    averaged.update_parameters(ddp)
    averaged.update_parameters(ddp)
    assert averaged(batch(rank, 0)[0]).shape == (8, 5)


@on_ranks(4, fresh=True)
def test_a_copy_in_the_process_keeps_its_group_and_a_loaded_state_is_given_one(rank, world):
    pair = [dist.new_group([0, 1]), dist.new_group([2, 3])][rank // 2]
    other = gloo_group()
    net = DistributedDataParallel(model(), process_group=pair)
    state = compression.CompressionState(FEEDBACK, net)
    net.register_comm_hook(state, compression.ddp_hook)
    steps(rank, net, range(2))
    for copied in (copy.copy(state), copy.deepcopy(state)):
        assert copied.process_group is pair and copied.world == 2
        kept = losses(state)["up.weight"]
        copied.rescale(2.0)
        assert torch.equal(losses(state)["up.weight"], kept) and torch.equal(losses(copied)["up.weight"], 2 * kept)
    with pytest.warns(UserWarning, match="process_group is not saved"):
        text = pickle.dumps(state)
    loaded = pickle.loads(text)
    # The default group would be the wrong one.
    with pytest.raises(RuntimeError, match="set its process_group"):
        _ = loaded.process_group
    with pytest.raises(RuntimeError, match="this group has gloo"):
        loaded.process_group = other
    loaded.process_group = pair
    assert loaded.process_group is pair and torch.equal(losses(loaded)["up.weight"], losses(state)["up.weight"])


@on_ranks(2, fresh=True)
def test_a_state_from_a_file_takes_the_default_group_that_there_is_when_it_is_used(rank, world):
    _, state = compressed(FEEDBACK)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        text = pickle.dumps(state)
    dist.destroy_process_group()
    loaded = pickle.loads(text)
    with pytest.raises(RuntimeError, match=r"call init_process_group\('accl'\)"):
        _ = loaded.process_group
    assert loaded.step == 0
    init_group()
    assert loaded.process_group is dist.group.WORLD


@on_ranks(2, fresh=True)
def test_a_state_of_cgx_is_copied_with_what_its_setters_said(rank, world):
    ddp = DistributedDataParallel(model(), **FIXED)
    state = cgx.CGXState(None, compression_params={"bits": 8, "bucket_size": 64})
    ddp.register_comm_hook(state, cgx.cgx_hook)
    steps(rank, ddp, range(1))
    place = [layer.numel for layer in state.layers[0]].index(96 * 48)
    state.set_quantization_bits(0, place, 2)
    copied = copy.deepcopy(ddp)
    [(hook, other)] = copied._comm_hooks
    assert other.layers == state.layers and other.layers[0][place].bits == 2
    copied.register_comm_hook(other, hook)
    for net in (ddp, copied):
        steps(rank, net, range(1, 4))
    assert all(torch.equal(a, b) for a, b in zip(ddp.parameters(), copied.parameters(), strict=True))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert pickle.loads(pickle.dumps(state)).step == state.step


# ---- settings of the group


@on_ranks(2, fresh=True, env={"ACCL_CODEC": "maxmin:6"})
def test_a_hook_that_names_no_codec_takes_that_of_its_group(rank, world):
    group = dist.new_group(pg_options=torch_accl.Options(compression="maxmin:8,bucket=64"))
    net = DistributedDataParallel(model(), process_group=group)
    for given in (None, Compression(), Compression(error_feedback=True)):
        state = compression.CompressionState(given, net)
        assert state.codec_of("up.weight").startswith("maxmin:8,bucket=64,"), given
        assert state.compression.error_feedback == (given is not None and given.error_feedback)
    assert compression.CompressionState(model=net).codec_of("up.weight").startswith("maxmin:8,bucket=64,")
    assert compression.CompressionState(Compression("maxmin:3"), net).codec_of("up.weight").startswith("maxmin:3,")
    # For a group without a codec setting, the variable applies.
    assert compression.CompressionState(None, model()).codec_of("up.weight").startswith("maxmin:6,")
    # Explicit calls behave the same.
    tensor = torch.linspace(-1, 1, 5000)
    compression.all_reduce_quantized(tensor, group=group, compression=Compression(audit=16), key="k")
    assert compression.call_measures(group)[0].codec.startswith("maxmin:8,bucket=64,")
    with pytest.raises(TypeError, match="model"):
        compression.CompressionState(Compression())


@on_ranks(2, fresh=True)
def test_what_a_group_of_all_calls_says_reaches_a_hook(rank, world):
    dist.destroy_process_group()
    init_group(pg_options=torch_accl.Options(compression="bf16"))
    ddp, state = compressed(None)
    steps(rank, ddp, range(1))
    assert {row.codec for row in state.measures()} == {"bf16", None}


# ---- gradient scaler


@on_ranks(2, fresh=True)
@pytest.mark.parametrize("kind", ["ddp", "fsdp2"])
def test_residuals_follow_the_scale_of_a_gradient_scaler(rank, world, kind):
    class Scaler:
        scale, asked = 8.0, 0

        def get_scale(self):
            self.asked += 1
            return self.scale

    def trained(scale_of, scaler, rescale=None):
        if kind == "ddp":
            net, state = compressed(FEEDBACK, scaler=scaler)
        else:
            net = fully_shard(model())
            state = compression.CompressionState(FEEDBACK, net, scaler=scaler)
            compression.apply_fsdp2(net, state)
        for step in range(4):
            if scaler is not None:
                scaler.scale = scale_of[step]
            if rescale is not None and step:
                state.rescale(scale_of[step] / scale_of[step - 1])
            inputs, targets = batch(rank, step)
            ((net(inputs) - targets).square().mean() * scale_of[step]).backward()
            net.zero_grad()
        return state

    scales = [8.0, 8.0, 2.0, 4.0]
    scaler = Scaler()
    found, by_hand = trained(scales, scaler), trained(scales, None, rescale=True)
    assert scaler.asked == 4
    assert all(torch.equal(loss, losses(by_hand)[name]) for name, loss in losses(found).items())
    # Scaling by a power of two does not change the significand.
    plain = losses(trained([1.0] * 4, None))
    assert all(torch.equal(loss, 4.0 * plain[name]) for name, loss in losses(found).items())
    # A loaded state knows the scale of its residuals.
    again = compression.CompressionState(FEEDBACK, model(), scaler=scaler)
    again.load_state_dict(found.state_dict())
    scaler.scale = 16.0
    again.see_scale(again.step)
    assert all(torch.equal(loss, 4.0 * losses(found)[name]) for name, loss in losses(again).items())


@on_ranks(1, fresh=True)
def test_a_gradient_scaler_of_torch_is_taken_and_other_things_are_not(rank, world):
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    state = compression.CompressionState(FEEDBACK, model(), scaler=scaler)
    assert state.scaler is scaler and copy.deepcopy(state).scaler is scaler
    with pytest.raises(TypeError, match="scaler must have get_scale, as torch.amp.GradScaler has, not float"):
        compression.CompressionState(FEEDBACK, model(), scaler=4.0)


# ---- figures


@on_ranks(2, fresh=True)
def test_bits_are_of_the_type_that_travels(rank, world):
    net = fully_shard(model(), mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16))
    state = compression.CompressionState(Compression("maxmin:8,bucket=64,meta=bfloat16", min_elements=64), net)
    compression.apply_fsdp2(net, state)
    train(rank, net, steps=2)
    [row] = [row for row in state.measures() if row.name == "up.weight"]
    # 8 bits, plus 32 bits for each 64 elements, plus a header of 16 bytes for each rank's part.
    assert row.bits == pytest.approx(8.5, abs=0.2)
    assert row.raw_bytes == 2 * 2 * 48 * 96


# ---- names


def test_the_old_name_of_compressed_calls_works_and_is_a_warning():
    with pytest.warns(
        DeprecationWarning, match=r"Options\(scope=\.\.\.\) is deprecated; use Options\(compressed_calls=\.\.\.\)"
    ):
        options = torch_accl.Options(compression="maxmin:8", scope="all")
    assert options.settings == torch_accl.Options(compression="maxmin:8", compressed_calls="all").settings
    assert "compressed_calls='all'" in repr(options)
    with pytest.raises(ValueError, match="old name of compressed_calls; give one of them"):
        torch_accl.Options(scope="all", compressed_calls="all")


def test_the_old_name_of_the_state_works_and_is_a_warning():
    with pytest.warns(DeprecationWarning, match=r"compression\.State is deprecated; use compression\.CompressionState"):
        assert compression.State is compression.CompressionState
    with pytest.raises(AttributeError, match="has no attribute 'Statement'"):
        _ = compression.Statement
    assert not hasattr(compression, "no_such_name")
