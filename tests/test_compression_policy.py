"""Decisions during training, and measurements: the same on all ranks, and near values computed outside."""

import copy
import math
import re
import warnings

import pytest
import torch
import torch.distributed as dist
from support import on_ranks
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch_accl import _native, compression
from torch_accl.compression import Compression, _auto, _state
from torch_accl.compression._codecs import facts


class Model(nn.Module):
    """A model large enough for the audit to compare many of its elements."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(64, 512)
        self.second = nn.Linear(512, 64)

    def forward(self, x):
        return self.second(torch.relu(self.first(x)))


def model():
    torch.manual_seed(5)
    return Model()


def compressed(settings, net=None):
    ddp = DistributedDataParallel(net or model())
    state = compression.CompressionState(settings, ddp)
    ddp.register_comm_hook(state, compression.ddp_hook)
    return ddp, state


def gradients(rank, ddp, step):
    """Runs one backward pass and returns the gradients."""
    generator = torch.Generator().manual_seed(1000 * rank + step)
    ddp.zero_grad()
    ddp(torch.randn(32, 64, generator=generator)).square().mean().backward()
    return {name: parameter.grad.clone() for name, parameter in ddp.named_parameters()}


def same_on_all(value):
    found = [None] * dist.get_world_size()
    dist.all_gather_object(found, value)
    return all(one == found[0] for one in found)


def by_name(state):
    return {row.name: row for row in state.measures()}


@on_ranks(3, fresh=True)
def test_the_error_of_each_parameter_is_reported(rank, world):
    settings = Compression("maxmin:4,bucket=128", layers={"second.weight": "maxmin:2,bucket=64"}, audit=2)
    ddp, state = compressed(settings)
    plain = DistributedDataParallel(model())
    assert state.measures() == []
    error, square = {}, {}
    for step in range(10):
        exact, found = gradients(rank, plain, step), gradients(rank, ddp, step)
        for name in exact:
            error[name] = error.get(name, 0) + (found[name] - exact[name]).double().square().sum().item()
            square[name] = square.get(name, 0) + exact[name].double().square().sum().item()
    rows = by_name(state)
    assert list(rows) == ["first.weight", "first.bias", "second.weight", "second.bias"]
    for name in ("first.weight", "second.weight"):
        row, known = rows[name], error["module." + name] / square["module." + name]
        assert row.calls == 10 and row.codec.startswith("maxmin:4" if name == "first.weight" else "maxmin:2")
        assert row.error == pytest.approx(known, rel=0.1)
        # On average the audit compares half of the elements.
        assert row.compared == pytest.approx(10 * 32768 / 2, rel=0.1)
        assert row.raw_bytes == 10 * 4 * 32768 and row.sent_bytes * 32 == pytest.approx(row.bits * row.raw_bytes)
        assert row.bits == pytest.approx(4.5 if name == "first.weight" else 3.0, abs=0.1)
        assert row.codec_seconds > 0 and row.carried is None and row.not_finite == row.too_large == 0
    assert rows["first.bias"].codec is None and rows["first.bias"].error is None and rows["first.bias"].calls == 0
    assert same_on_all([row.error for row in rows.values()])
    table = state.summary().splitlines()
    assert table[0].split()[:4] == ["parameter", "codec", "calls", "bits"] and len(table) == 5
    assert re.search(r"second.weight +maxmin:2 +10 +3.0", table[3])


@pytest.mark.parametrize(
    ("codec", "one_in"),
    [("maxmin:8", 1024), ("maxmin:4,bucket=512", 1940), ("maxmin:2,bucket=512", 3765), ("bf16", 1024)],
)
def test_the_usual_audit_is_a_small_part_of_elements_and_of_bytes(codec, one_in):
    count = 1 << 20
    sent, _ = _native.Codecs([("raw", codec, codec, 0)]).encoded_bytes(0, "float32", count)
    usual = Compression(codec).one_in(4 * count, sent)
    assert usual == pytest.approx(one_in, rel=0.005)
    assert 4 * count / usual <= sent / 250
    assert [Compression(codec, audit=audit).one_in(4 * count, sent) for audit in (7, 0)] == [7, 0]


@on_ranks(2, fresh=True)
def test_an_audit_of_nothing_compares_nothing_and_leaves_the_rest(rank, world):
    ddp, state = compressed(Compression("maxmin:4", audit=0))
    gradients(rank, ddp, 0)
    row = by_name(state)["first.weight"]
    assert row.calls == 1 and row.compared == 0 and row.error is None and row.codec_seconds > 0


@on_ranks(2, fresh=True)
def test_buckets_that_became_nan_are_reported(rank, world):
    ddp, state = compressed(Compression("maxmin:4,meta=float16"))
    with torch.no_grad():
        ddp.module.first.weight[7, 3] = math.inf if rank == 1 else 1.0
    gradients(rank, ddp, 0)
    nan_count = sum(row.not_finite for row in state.measures())
    assert nan_count > 0 and "NaN buckets" in state.summary()


@on_ranks(2, fresh=True)
def test_an_error_beyond_the_limit_ends_compression_of_that_parameter_on_all_ranks(rank, world, monkeypatch):
    monkeypatch.setattr(_state, "CHECK_EVERY", 5)
    settings = Compression("maxmin:8", layers={"second.weight": "maxmin:1,bucket=512"}, error_limit=0.1, audit=8)
    ddp, state = compressed(settings)
    plain = DistributedDataParallel(model())
    warned = []
    for step in range(14):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            found = gradients(rank, ddp, step)
        warned += [(step, str(warning.message)) for warning in caught]
        exact = gradients(rank, plain, step)
    # Step 6 and not 5, because DistributedDataParallel rebuilds its buckets after the first step.
    assert [step for step, _ in warned] == [6], warned
    assert "sums of second.weight with maxmin:1" in warned[0][1] and "error_limit 0.1" in warned[0][1]
    assert torch.equal(found["module.second.weight"], exact["module.second.weight"])
    assert not torch.equal(found["module.first.weight"], exact["module.first.weight"])
    assert state.codec_of("second.weight") is None and state.codec_of("first.weight").startswith("maxmin:8")
    rows = by_name(state)
    assert rows["second.weight"].calls == 6 and rows["second.weight"].error > 0.1 and rows["first.weight"].calls == 14
    # The decision is saved with the state.
    again = compressed(settings)[1]
    again.load_state_dict(state.state_dict())
    assert again.codec_of("second.weight") is None


@on_ranks(2, fresh=True)
def test_bits_are_raised_where_residuals_grow(rank, world, monkeypatch):
    monkeypatch.setattr(_state, "CHECK_EVERY", 10)
    # With two bits, large buckets and one value above all others, an encoding loses many times the gradient.
    settings = Compression("maxmin:2,bucket=8192,rounding=stochastic", error_feedback=True, exclude=["first"])
    ddp, state = compressed(settings)

    def step(number):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            ddp.zero_grad()
            weight = ddp.module.second.weight
            scale = torch.full_like(weight, 1e-3)
            scale.view(-1)[::4096] = 1.0
            noise = torch.randn(weight.shape, generator=torch.Generator().manual_seed(number + 100 * rank))
            out = ddp(torch.ones(1, 64))
            ((weight * scale * noise).sum() + 0 * out.sum()).backward()
        return [str(warning.message) for warning in caught]

    warned = [message for number in range(40) for message in step(number)]
    assert warned and all("the residual of second.weight is" in message for message in warned), warned
    assert "maxmin:2,bucket=8192" in warned[0] and "the parameter uses maxmin:3,bucket=8192" in warned[0]
    # One warning for each raise: every warning names another number of bits.
    assert len(warned) == len({message.split("the parameter uses ")[1] for message in warned})
    assert int(state.codec_of("second.weight")[len("maxmin:")]) == 2 + len(warned)
    assert all(float(re.search(r"is ([0-9.e+]+) times its gradient", message)[1]) > 10 for message in warned)
    assert same_on_all(state.codec_of("second.weight"))


@on_ranks(2, fresh=True)
def test_residuals_are_reported(rank, world):
    ddp, state = compressed(Compression("maxmin:2,bucket=64,rounding=nearest", error_feedback=True))
    for step in range(5):
        gradients(rank, ddp, step)
    ratio = by_name(state)["first.weight"].carried
    assert 0.05 < ratio < 2


TCP = {"ACCL_TRANSPORTS": "tcp"}


@pytest.mark.slow
@on_ranks(3, fresh=True, env=TCP)
def test_auto_takes_what_is_fastest_within_the_budget_and_stays_with_it(rank, world, monkeypatch):
    # The times are fixed, because times measured here would show nothing about links.
    times = {
        "raw": 32.0,
        "bf16": 16.0,
        "maxmin:8,bucket=512": 8.0,
        "maxmin:4,bucket=128": 4.5,
        "maxmin:2,bucket=64": 3.0,
    }
    measured = []

    def measure(codecs, size, dtype, group, device):
        measured.append(list(codecs))
        return {codec: times[codec] for codec in codecs}

    monkeypatch.setattr(_auto, "_times", measure)
    for budget, expected in ((0.05, "maxmin:4"), (1e-3, "maxmin:8"), (1e-5, "bf16"), (1e-9, None), (0.9, "maxmin:2")):
        ddp, state = compressed(Compression("auto", error_budget=budget, start_step=2, audit=64))
        assert "nothing is chosen before" in state.explain()
        plain = DistributedDataParallel(model())
        for step in range(2):
            exact, found = gradients(rank, plain, step), gradients(rank, ddp, step)
            assert all(torch.allclose(exact[name], found[name], rtol=1e-5, atol=1e-9) for name in exact)
        for step in range(2, 6):
            gradients(rank, ddp, step)
        chosen = state.codec_of("first.weight")
        assert chosen is None if expected is None else chosen.startswith(expected)
        assert state.codec_of("first.bias") is None
        assert same_on_all([state.codec_of("first.weight"), state.explain()])
        row = by_name(state).get("first.weight")
        if expected is not None:
            assert row.calls == 4 and row.error < budget
            # The predicted error is the measured error.
            assert row.error == pytest.approx(state._choices["first.weight"].errors[chosen], rel=0.3)
        line = state.explain().splitlines()[0]
        assert line.startswith(f"first.weight: {chosen or 'raw'} (raw 32.00 ns an element with error 0, bf16 16.00 ns")
        saved = copy.deepcopy(state.state_dict())
        again = compressed(Compression("auto", error_budget=budget, start_step=2))[1]
        again.load_state_dict(saved)
        assert again.codec_of("first.weight") == chosen and again.explain() == state.explain()
    # Times are measured once for each state and call size, not for each bucket or step. Two bits are measured only
    # where the budget was raised.
    assert [len(codecs) for codecs in measured] == [4, 4, 4, 4, 5]


@on_ranks(2, fresh=True, env=TCP)
def test_auto_measures_times_and_chooses_nothing_that_is_not_worth_it(rank, world):
    found = _auto._times(["raw", "maxmin:4,bucket=128"], 4096, torch.float32, dist.group.WORLD)
    assert same_on_all(found) and all(0.01 < nanos < 1e4 for nanos in found.values())
    gradient = {"w": torch.randn(5000, generator=torch.Generator().manual_seed(rank))}
    codecs = ["raw", "bf16", "maxmin:8,bucket=512", "maxmin:4,bucket=128"]
    same = {(4096, torch.float32, codec): 7.0 for codec in codecs}
    choice = _auto.choose(["w"], gradient, Compression("auto"), dist.group.WORLD, same)
    assert choice["w"].codec == "raw"


@pytest.mark.parametrize(
    ("elements", "most_bytes", "timed"),
    [
        ([1], None, 1 << 12),
        ([3000, 2000], None, 1 << 12),
        ([10_000], None, 1 << 14),
        ([40_000, 60_000], None, 1 << 16),
        ([300_000], None, 1 << 18),
        ([300_000], 40_000, 1 << 18),
        ([10_000] * 40, 40_000, 1 << 14),
        ([10_000_000], None, 1 << 20),
    ],
)
def test_auto_times_calls_of_about_the_size_that_it_decides_about(elements, most_bytes, timed):
    for dtype in (torch.float32, torch.bfloat16):
        bound = most_bytes and most_bytes * dtype.itemsize // 4
        assert _auto.timed_elements([count * dtype.itemsize for count in elements], dtype, bound) == timed


@on_ranks(2, fresh=True, env=TCP)
def test_auto_chooses_for_small_and_for_large_calls_by_their_own_times(rank, world, monkeypatch):
    # A codec that packs bits pays off where bytes dominate the time, and not where latency does.
    asked = []

    def measure(codecs, size, dtype, group, device):
        asked.append(size)
        return {codec: 2.0 if (codec == "raw") == (size > 1 << 14) else 1.0 for codec in codecs}

    monkeypatch.setattr(_auto, "_times", measure)
    times = {}
    for count, is_large in ((4096, False), (1 << 20, True), (4100, False)):
        gradient = {"w": torch.randn(count, generator=torch.Generator().manual_seed(rank))}
        choice = _auto.choose(["w"], gradient, Compression("auto"), dist.group.WORLD, times)
        assert (choice["w"].codec != "raw") == is_large
    assert asked == [1 << 12, 1 << 20]


@on_ranks(2, fresh=True)
def test_auto_packs_no_bits_in_shared_memory(rank, world):
    ddp, state = compressed(Compression("auto"))
    gradients(rank, ddp, 0)
    assert set(state._choices["first.weight"].errors) == {"raw", "bf16"}
    assert state.codec_of("first.weight") in (None, "bf16")


@on_ranks(2, fresh=True, env=TCP)
def test_auto_waits_for_gradients_that_are_not_zero(rank, world, monkeypatch):
    monkeypatch.setattr(_state, "CHECK_EVERY", 3)
    monkeypatch.setattr(
        _auto, "_times", lambda codecs, *_: {codec: len(codecs) - index for index, codec in enumerate(codecs)}
    )
    ddp, state = compressed(Compression("auto"))
    first = ddp.module.first.weight
    for step in range(5):
        scale = 0.0 if step < 2 else 1.0
        ddp.zero_grad()
        (scale * ddp(torch.ones(4, 64)).square().mean()).backward()
        assert (state.codec_of("first.weight") is None) == (step < 3), step
        assert first.grad.isfinite().all()


@on_ranks(2, fresh=True)
def test_parts_of_fsdp2_are_measured(rank, world):
    mesh = dist.device_mesh.init_device_mesh("cpu", (world,))
    net = model()
    fully_shard(net, mesh=mesh)
    state = compression.CompressionState(Compression("maxmin:4,bucket=64", audit=4), net)
    compression.apply_fsdp2(net, state)
    for step in range(3):
        net(torch.randn(8, 64, generator=torch.Generator().manual_seed(step + 10 * rank))).square().mean().backward()
    rows = by_name(state)
    assert rows["first.weight"].calls == 3 and 1e-4 < rows["first.weight"].error < 0.05
    assert rows["first.weight"].bits == pytest.approx(5, abs=0.1)


@on_ranks(2, fresh=True)
@pytest.mark.parametrize("kind", ["Adam", "AdamW", "SGD"])
def test_one_bit_with_error_feedback_under_adam_is_a_warning(rank, world, kind):
    ddp, _ = compressed(Compression("sign,bucket=64", error_feedback=True))
    other = torch.optim.Adam(model().parameters(), lr=0.01)
    optimizer = getattr(torch.optim, kind)(ddp.parameters(), lr=0.01)
    warned = []
    for step in range(3):
        gradients(rank, ddp, step)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            other.step()
            optimizer.step()
        warned += [str(warning.message) for warning in caught]
    assert len(warned) == (kind != "SGD"), warned
    assert all(
        f"is used with {kind}," in message and "1-bit Adam, which is not supported" in message for message in warned
    )


@on_ranks(2)
def test_a_codec_that_loses_more_than_there_is_is_a_warning(rank, world):
    with pytest.warns(UserWarning, match="maxmin:1,.* likely to diverge"):
        compression.CompressionState(Compression("maxmin:4", layers={"first": "maxmin:1"}), model())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        compression.CompressionState(Compression("maxmin:2"), model())


@pytest.mark.parametrize(
    ("codec", "expected"),
    [
        ("maxmin:2,bucket=64,meta=float32,rounding=nearest", "maxmin:3,bucket=64,meta=float32,rounding=nearest"),
        ("absmax:7,bucket=8", "absmax:8,bucket=8,meta=float32,rounding=nearest"),
        ("maxmin:8,bucket=64", "bf16"),
        # In large buckets 2 bits lose more than the sign does.
        ("sign,bucket=64,meta=float32", "maxmin:3,bucket=64,meta=float32,rounding=nearest"),
        ("topk:5,bucket=512", "topk:4,bucket=512,meta=float32"),
        # With 6 to 8 bits, one of 64 elements is kept.
        ("topk:8,bucket=64", "topk:5,bucket=64,meta=float32"),
        ("topk:1,bucket=512", "bf16"),
        ("mxfp4", "bf16"),
        ("bf16", "raw"),
        ("raw", None),
    ],
)
def test_the_finer_codec(codec, expected):
    assert facts(codec).next_finer == expected


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"error_limit": 0}, "error_limit is 0; expected a number above 0"),
        ({"error_limit": 0.1, "audit": 0}, "not known with audit=0"),
        ({"error_budget": -1}, "error_budget is -1; expected a number above 0"),
        ({"audit": -1}, "audit is -1; expected a number of at least 0"),
        ({"codec": "auto", "result": "maxmin:8"}, "omit reduce and result"),
        ({"codec": "automatic"}, "unknown codec `automatic`"),
    ],
)
def test_wrong_settings_are_refused(settings, said):
    with pytest.raises(ValueError, match=re.escape(said)):
        Compression(**settings)


@on_ranks(2)
def test_auto_is_for_models(rank, world):
    with pytest.raises(ValueError, match="name a codec for this call"):
        compression.all_reduce_quantized(torch.ones(10), compression=Compression("auto"))


@on_ranks(2, fresh=True)
@pytest.mark.parametrize(
    ("setting", "values"), [("audit", (1024, 512)), ("start_step", (0, 5)), ("exclude", (("a",), ()))]
)
def test_settings_that_differ_are_named_on_all_ranks(rank, world, setting, values):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        ddp, _ = compressed(Compression("maxmin:4", **{setting: values[rank]}))
    with pytest.raises(RuntimeError) as caught:
        gradients(rank, ddp, 0)
    assert f"rank 0 has {setting}={values[0]!r}, and rank 1 has {setting}={values[1]!r}" in str(caught.value)
