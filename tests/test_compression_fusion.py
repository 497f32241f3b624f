"""Gradients sent in calls of at most `fusion_bytes` bytes: which gradients share a call, and that sums stay the
same."""

import os
import re
import time
import warnings

import pytest
import torch
import torch.distributed as dist
from support import BACKEND, init_group, on_ranks
from support.training import Model, batch, contribution, error, same_on_all, train
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch_accl import compression
from torch_accl.compat import cgx
from torch_accl.compression import Compression
from torch_accl.compression._futures import WorkOfSeveral, future_of
from torch_accl.compression._plans import cut

pytestmark = pytest.mark.skipif(BACKEND != "accl", reason="about this package only")

# Size in bytes of each of the model's two compressed matrices.
MATRIX = 4 * 48 * 96

# With these algorithms every rank adds up the encoded contributions of all ranks. With others, the rank that adds up a
# part uses its own contribution unencoded. Which part that is, and which algorithm is chosen, depends on the size of
# the call.
SAME_ALGORITHM = {"ACCL_ALGORITHM": "all_reduce=direct,reduce_scatter=direct"}
CODEC = "maxmin:2,bucket=64,rounding=stochastic"


def net():
    torch.manual_seed(7)
    return Model()


def ddp(settings, **options):
    model = DistributedDataParallel(net(), **options)
    state = compression.CompressionState(settings, model)
    model.register_comm_hook(state, compression.ddp_hook)
    return model, state, watched(state)


def watched(state):
    """Records for each call of the state: bytes of its tensors, number of tensors, whether it was encoded."""
    made, send = [], state.send

    def sending(plan, step, call, *rest):
        def recorded(part, is_encoded):
            sizes = plan.raw_bytes[part.tensors]
            made.append((sum(sizes), len(sizes), is_encoded))
            return call(part, is_encoded)

        return send(plan, step, recorded, *rest)

    state.send = sending
    return made


def test_tensors_are_cut_where_the_next_one_has_no_room():
    def parts(sizes, most):
        return [sizes[part] for part in cut(sizes, most)]

    assert parts([8, 8, 8, 8], None) == [[8, 8, 8, 8]]
    assert parts([8, 8, 8, 8], 32) == [[8, 8, 8, 8]]
    assert parts([8, 8, 8, 8], 31) == [[8, 8, 8], [8]]
    assert parts([8, 8, 8, 8], 8) == parts([8, 8, 8, 8], 4) == [[8], [8], [8], [8]]
    # A tensor above the limit has a call of its own, whatever its neighbours are.
    assert parts([4, 100, 4, 4], 16) == [[4], [100], [4, 4]]
    assert parts([100, 100], 16) == [[100], [100]]
    assert parts([100, 0, 4], 16) == [[100], [0, 4]]
    assert parts([], 16) == [[]]


@pytest.mark.parametrize("wrong", [0, -4, 6, 4096.0, True, "64MiB"])
def test_a_wrong_bound_is_refused(wrong):
    said = f"fusion_bytes is {wrong!r}; expected None or a positive multiple of 4"
    with pytest.raises(ValueError, match=re.escape(said)):
        Compression(fusion_bytes=wrong)


@pytest.mark.slow
@on_ranks(2, 3, fresh=True, env=SAME_ALGORITHM)
@pytest.mark.parametrize("feedback", [False, True])
def test_ddp_has_the_same_bits_in_calls_of_any_size(rank, world, feedback):
    settings = {"layers": {"down": "maxmin:8,bucket=128"}, "error_feedback": feedback, "audit": 16}
    expected, figures = None, None
    # Four steps with one bucket of eight gradients.
    for bound, calls in ((None, [4]), (1 << 20, [4]), (MATRIX + 512, range(5, 32)), (2048, range(5, 32)), (4, [32])):
        model, state, made = ddp(Compression(CODEC, fusion_bytes=bound, **settings))
        weights = train(rank, model)
        assert same_on_all(*weights)
        expected = expected or weights
        assert all(torch.equal(a, b) for a, b in zip(weights, expected, strict=True)), bound
        rows = {row.name: row for row in state.measures()}
        measured = [(row.name, row.calls, row.bits, row.sent_bytes, row.carried) for row in rows.values()]
        figures = figures or measured
        assert measured == figures and state.step == 4
        assert rows["up.weight"].calls == 4 and rows["up.weight"].error > 0 and rows["up.weight"].codec_seconds > 0
        # Each call is within the bound, or has one tensor.
        assert bound is None or all(size <= bound or tensors == 1 for size, tensors, _ in made), made
        assert len(made) in calls and sum(tensors for _, tensors, _ in made) == 32, made
        assert all(is_encoded for *_, is_encoded in made)


@on_ranks(3, fresh=True, env=SAME_ALGORITHM)
def test_buckets_of_ddp_are_cut_one_by_one_and_gradients_may_be_their_views(rank, world):
    options = {"bucket_cap_mb": 0.005, "gradient_as_bucket_view": True}
    settings = {"error_feedback": True, "one_dimensional": True, "min_elements": 1}
    found = []
    for bound in (None, 1024):
        model, _, made = ddp(Compression(CODEC, fusion_bytes=bound, **settings), **options)
        found.append((train(rank, model), len(made)))
    (whole, few), (cut_up, many) = found
    assert all(torch.equal(a, b) for a, b in zip(whole, cut_up, strict=True)) and many > few > 4


@on_ranks(3, fresh=True)
def test_with_the_usual_algorithms_ranks_train_alike_and_near_plain_training(rank, world):
    exact = train(rank, DistributedDataParallel(net()))
    model, *_ = ddp(Compression("maxmin:8", error_feedback=True, fusion_bytes=2048))
    weights = train(rank, model)
    assert same_on_all(*weights)
    assert all(torch.allclose(a, b, atol=2e-3) for a, b in zip(weights, exact, strict=True))
    assert any(not torch.equal(a, b) for a, b in zip(weights, exact, strict=True))


@on_ranks(2, fresh=True)
def test_what_is_not_compressed_is_bounded_too(rank, world):
    exact = train(rank, DistributedDataParallel(net()))
    for settings in ({"codec": "raw"}, {"codec": "maxmin:2", "start_step": 4}):
        model, state, made = ddp(Compression(**settings, fusion_bytes=2048))
        weights = train(rank, model)
        # A sum of two numbers is the same in either order.
        assert all(torch.equal(a, b) for a, b in zip(weights, exact, strict=True))
        assert state.traffic.ratio == 1.0 and len(made) > 4 and not any(is_encoded for *_, is_encoded in made)
        assert sum(size for size, *_ in made) == 4 * sum(p.nbytes for p in model.parameters())


@on_ranks(2, fresh=True)
def test_no_call_waits_for_another(rank, world):
    model, state, _ = ddp(Compression("maxmin:8", fusion_bytes=4))
    train(rank, model, steps=2)
    store, send = dist.distributed_c10d._get_default_store(), state.send
    seen = []

    def sending(plan, step, call):
        works = send(plan, step, call)
        # The other rank has issued none of the calls yet.
        seen.append([work.is_completed() for work in works])
        store.set("all are made", "yes")
        return works

    inputs, targets = batch(rank, 2)
    loss = (model(inputs) - targets).square().mean()
    if rank == 0:
        state.send = sending
    else:
        store.wait(["all are made"])
    loss.backward()
    assert seen == ([[False] * 8] if rank == 0 else [])


@on_ranks(2, fresh=True)
def test_ranks_with_different_bounds_are_named(rank, world):
    model, *_ = ddp(Compression("maxmin:8", fusion_bytes=4096 if rank else None))
    with pytest.raises(RuntimeError) as caught:
        train(rank, model, steps=1)
    assert "rank 0 has fusion_bytes=None, and rank 1 has fusion_bytes=4096" in str(caught.value)


@on_ranks(2, fresh=True, env=SAME_ALGORITHM)
def test_a_state_goes_on_with_another_bound(rank, world):
    settings = {"codec": CODEC, "error_feedback": True}
    expected = train(rank, ddp(Compression(**settings))[0], steps=6)
    first, state, _ = ddp(Compression(**settings, fusion_bytes=4))
    optimizer = torch.optim.SGD(first.parameters(), lr=0.05, momentum=0.9)
    for step in range(6):
        if step == 3:
            saved = state.state_dict()
            model, state, _ = ddp(Compression(**settings, fusion_bytes=MATRIX + 512))
            model.load_state_dict(first.state_dict())
            state.load_state_dict(saved)
            again = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
            again.load_state_dict(optimizer.state_dict())
            first, optimizer = model, again
        inputs, targets = batch(rank, step)
        optimizer.zero_grad()
        (first(inputs) - targets).square().mean().backward()
        optimizer.step()
    assert all(torch.equal(a, b) for a, b in zip(first.parameters(), expected, strict=True))


@on_ranks(2, fresh=True)
def test_ranks_with_fewer_batches_join_those_with_more_in_calls_of_any_size(rank, world):
    model, state, _ = ddp(Compression("maxmin:8,bucket=64", error_feedback=True, fusion_bytes=2048))
    with model.join():
        train(rank, model, steps=3 + 2 * rank)
    assert same_on_all(*(p.detach().clone() for p in model.parameters())) and state.step == 5


@on_ranks(2, fresh=True, env={"ACCL_TRANSPORTS": "tcp", **SAME_ALGORITHM})
def test_auto_chooses_alike_and_predicts_what_happens_in_calls_of_any_size(rank, world, monkeypatch):
    from torch_accl.compression import _auto

    monkeypatch.setattr(_auto, "_times", lambda codecs, *_: {codec: -len(codec) for codec in codecs})
    found = []
    for bound in (None, 2048):
        model, state, made = ddp(Compression("auto", fusion_bytes=bound, audit=8))
        train(rank, model)
        found.append(state.explain())
        row = {row.name: row for row in state.measures()}["up.weight"]
        chosen = state.codec_of("up.weight")
        assert chosen.startswith("maxmin") and row.error == pytest.approx(
            state._choices["up.weight"].errors[chosen], rel=0.7
        )
    assert found[0] == found[1] and len(made) > 4


@pytest.mark.slow
@on_ranks(2, 3, fresh=True, env=SAME_ALGORITHM)
@pytest.mark.parametrize("feedback", [False, True])
def test_fsdp2_has_the_same_bits_in_calls_of_any_size(rank, world, feedback):
    expected = None
    for bound in (None, 1 << 20, 2048, 4):
        model = fully_shard(net())
        state = compression.CompressionState(
            Compression(CODEC, min_elements=64, error_feedback=feedback, start_step=1, fusion_bytes=bound), model
        )
        compression.apply_fsdp2(model, state)
        made = watched(state)
        weights = train(rank, model, steps=1)
        assert not made[0][2]
        weights += train(rank, model)
        expected = expected or weights
        assert same_on_all(*weights)
        for found, wanted in zip(weights, expected, strict=True):
            assert torch.equal(found, wanted), bound
        assert state.step == 5 and len(made) == 5 * {None: 1, 1 << 20: 1, 4: 8}.get(bound, len(made) // 5)
        assert (len(made) > 5) == (bound in (2048, 4))


class Call:
    """A Work whose call completes when the test sets its future."""

    def __init__(self):
        self.future = torch.futures.Future()

    def get_future(self):
        return self.future

    def wait(self, timeout):
        self.waited = timeout
        self.future.wait()

    def is_completed(self):
        return self.future.done()


def test_several_calls_are_done_when_the_last_is_and_have_the_first_error():
    calls = [Call() for _ in range(3)]
    whole = future_of(calls, lambda: "whole")
    calls[2].future.set_result(1)
    calls[0].future.set_result(1)
    assert not whole.done()
    calls[1].future.set_result(1)
    assert whole.wait() == "whole"
    calls = [Call() for _ in range(3)]
    whole, work = future_of(calls, lambda: "whole"), WorkOfSeveral(calls, [])
    calls[2].future.set_exception(ValueError("third"))
    calls[1].future.set_exception(ValueError("second"))
    # A call that is still in flight writes to its tensors.
    assert not whole.done() and not work.is_completed()
    calls[0].future.set_result(1)
    assert whole.done() and work.is_completed()
    with pytest.raises(Exception, match="second"):
        whole.wait()
    with pytest.raises(Exception, match="second"):
        work.wait()


# The CGX compatibility module.

BITS = "CGX_COMPRESSION_QUANTIZATION_BITS"
FUSION = "CGX_FUSION_BUFFER_SIZE_MB"


@on_ranks(2, 3, fresh=True, init=False, env={**SAME_ALGORITHM, BITS: "2"})
def test_the_hook_of_cgx_has_the_same_bits_in_calls_of_any_size(rank, world):
    found = {}
    # The minimum is 2,048 bytes, and the default is 64 MiB.
    for mebibytes, calls in (("", 1), ("64", 1), ("0", 4), ("1", 1)):
        os.environ[FUSION] = mebibytes
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            init_group("cgx")
        model = DistributedDataParallel(net())
        state = cgx.CGXState(None, compression_params={"bucket_size": 64})
        made = watched(state)
        model.register_comm_hook(state, cgx.cgx_hook)
        found[mebibytes] = train(rank, model)
        assert state.traffic.ratio > 2 and same_on_all(*found[mebibytes])
        assert (len(made) > 4) == (calls > 1), (mebibytes, made)
        assert all(size <= 2048 or tensors == 1 for size, tensors, _ in made) or mebibytes != "0", made
        # Biases and norms share a call.
        assert mebibytes != "0" or len(made) < 4 * 8
        dist.destroy_process_group()
    for weights in found.values():
        assert all(torch.equal(a, b) for a, b in zip(weights, found[""], strict=True))


def test_the_buffer_of_cgx_has_64_mebibytes_and_at_least_2048_bytes(monkeypatch):
    from torch_accl.compat._cgx_variables import GroupSettings

    for said, size in (("", 64 << 20), ("0", 2048), ("1", 1 << 20), ("100", 100 << 20)):
        monkeypatch.setenv(FUSION, said)
        assert GroupSettings.now().fusion_bytes == size


@on_ranks(3, fresh=True, init=False, env={**SAME_ALGORITHM, BITS: "4"})
def test_registered_layers_are_summed_in_calls_of_any_size(rank, world):
    counts = (1000, 40, 2000, 100, 300)
    for index, count in enumerate(counts):
        cgx.register_layer(0, index, count, 0 if index else 2, 64)
    results = []
    for mebibytes in ("64", "0"):
        os.environ[FUSION] = mebibytes
        init_group("cgx")
        tensor = contribution(rank, sum(counts))
        before = tensor.clone()
        dist.all_reduce(tensor)
        assert same_on_all(tensor) and error(tensor, before) > 0 and (tensor != before).any()
        later = before.clone()
        work = dist.all_reduce(later, async_op=True)
        assert [whole.shape for whole in work.get_future().wait()] == [later.shape]
        assert work.wait() and work.is_completed() and work.is_success() and torch.equal(later, tensor)
        assert work.result()[0] is later
        results.append(tensor)
        dist.destroy_process_group()
    assert torch.equal(*results)


@on_ranks(2, fresh=True, init=False, env={BITS: "4"})
def test_ranks_with_different_buffers_of_cgx_are_both_named(rank, world):
    os.environ[FUSION] = "0" if rank else "64"
    # The message uses the unit of the variable.
    message = f"rank 0 has {FUSION}=64, and rank 1 has {FUSION}=0; give all ranks the same"
    with pytest.raises(RuntimeError, match=message):
        init_group("cgx")
    init_group("accl")
    model = DistributedDataParallel(net())
    model.register_comm_hook(cgx.CGXState(), cgx.cgx_hook)
    begin = time.monotonic()
    with pytest.raises(RuntimeError, match=message):
        train(rank, model, steps=1)
    assert time.monotonic() - begin < 20
    dist.destroy_process_group()
