"""Figures of the explicit calls: near values computed outside, listed by key, and absent for calls without a codec."""

import gc
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from support import BACKEND, gloo_group, on_ranks
from support.training import contribution, error, same_on_all
from torch_accl import compression
from torch_accl.compression import Compression, _call_measures
from torch_accl.compression._futures import WorkOfSeveral
from torch_accl.compression._scope import codecs_of, encoded
from torch_accl.compression._settings import tensor_id

pytestmark = pytest.mark.skipif(BACKEND != "accl", reason="about this package only")


def rows(group=None):
    return {(row.collective, row.key): row for row in compression.call_measures(group)}


def test_the_longest_timeout_is_passed_on_to_each_of_several_calls():
    class Done(dist.Work):
        def wait(self, timeout):
            waited.append(timeout)

    waited = []
    assert WorkOfSeveral([Done(), Done()], []).wait(timedelta.max)
    assert len(waited) == 2 and all(timeout > timedelta.max / 2 for timeout in waited)


@on_ranks(3, fresh=True)
def test_all_reduces_are_reported_by_key_with_their_error_if_audited(rank, world):
    assert compression.call_measures() == [] and len(compression.call_summary().splitlines()) == 1
    settings = Compression("maxmin:4,bucket=128", audit=2)
    lost = square = 0.0
    exact = sum(contribution(other, 40000).double() for other in range(world))
    for step in range(5):
        tensor = contribution(rank, 40000)
        compression.all_reduce_quantized(tensor, compression=settings, key="audited", step=step)
        lost, square = lost + (tensor - exact).square().sum().item(), square + exact.square().sum().item()
        work = compression.all_reduce_quantized(
            contribution(rank, 1000).bfloat16(), dist.ReduceOp.AVG, async_op=True, compression="maxmin:8", key="plain"
        )
        work.wait()
    compression.all_reduce_quantized(contribution(rank), dist._make_nccl_premul_sum(0.5), compression="bf16")
    found = rows()
    assert list(found) == [("all_reduce", "audited"), ("all_reduce", "plain"), ("all_reduce", "")]
    row = found["all_reduce", "audited"]
    assert row.calls == 5 and row.codec.startswith("maxmin:4,bucket=128")
    assert row.error == pytest.approx(lost / square, rel=0.1) and row.compared == pytest.approx(100_000, rel=0.1)
    assert row.raw_bytes == 5 * 160_000 and row.bits == pytest.approx(4.5, abs=0.1)
    assert 8 * row.sent_bytes == pytest.approx(row.bits * 5 * 40000)
    assert row.codec_seconds > 0 and row.not_finite == row.too_large == 0 and same_on_all(torch.tensor([row.error]))
    row = found["all_reduce", "plain"]
    assert row.calls == 5 and row.raw_bytes == 10_000 and row.error is None and row.compared == 0
    assert 8 < row.bits < 9.5 and row.codec_seconds > 0
    assert found["all_reduce", ""].calls == 1 and found["all_reduce", ""].codec == "bf16"
    table = compression.call_summary().splitlines()
    assert table[0].split()[:4] == ["collective", "key", "codec", "calls"] and len(table) == 4
    assert table[1].split()[:5] == [
        "all_reduce",
        "audited",
        "maxmin:4",
        "5",
        f"{found['all_reduce', 'audited'].bits:.2f}",
    ]


@on_ranks(3, fresh=True)
def test_scattered_gathered_and_exchanged_tensors_are_reported_too(rank, world):
    count = 2048
    settings = Compression("maxmin:8,bucket=64", result="maxmin:4,bucket=64", audit=4)
    whole = contribution(rank, world * count)
    output = torch.empty(count)
    compression.reduce_scatter_quantized(output, whole, compression=settings, key="w")
    exact = sum(contribution(other, world * count).double() for other in range(world))
    lost = error(output, exact[rank * count : (rank + 1) * count]) ** 2
    gathered = torch.empty(world * count)
    compression.all_gather_quantized(gathered, output, compression=settings, key="w")
    exchanged = torch.empty(world * count)
    compression.all_to_all_quantized(exchanged, whole, compression=settings, key="w")
    # Rows of two elements, with a different number of rows for each rank.
    sizes = [64 * (1 + other) for other in range(world)]
    uneven = torch.empty(world * 64 * (1 + rank), 2)
    matrix = contribution(rank, 2 * sum(sizes)).view(-1, 2)
    compression.all_to_all_quantized(uneven, matrix, [64 * (1 + rank)] * world, sizes, compression=settings, key="u")
    found = rows()
    scattered, collected, sent = (found[name, "w"] for name in ("reduce_scatter", "all_gather", "all_to_all"))
    assert (scattered.calls, collected.calls, sent.calls) == (1, 1, 1)
    assert scattered.raw_bytes == 4 * world * count and scattered.error == pytest.approx(lost, rel=0.5)
    assert collected.raw_bytes == 4 * count and sent.raw_bytes == 4 * (world - 1) * count
    assert found["all_to_all", "u"].raw_bytes == 8 * (sum(sizes) - sizes[rank])
    assert scattered.bits == pytest.approx(9, abs=0.1)
    assert collected.bits == pytest.approx(5, abs=0.1) == pytest.approx(sent.bits, abs=0.1)
    assert scattered.codec.startswith("maxmin:8") and collected.codec.startswith("maxmin:4")
    # These calls add nothing up, so they have no error figure.
    assert collected.error is sent.error is None and collected.codec_seconds > 0 and sent.codec_seconds > 0


@on_ranks(2, fresh=True)
def test_nan_buckets_are_reported_by_the_rank_that_sent_them(rank, world):
    tensor = contribution(rank)
    if rank == 1:
        tensor[[3, 1000]] = float("inf")
    gathered = torch.empty(2 * 5003)
    compression.all_gather_quantized(gathered, tensor, compression="maxmin:4,bucket=64")
    large = torch.full((640,), 1e30)
    large[::2] = -1e30
    compression.all_gather_quantized(torch.empty(1280), large, compression="maxmin:4,bucket=64,meta=float16", key="big")
    assert rows()["all_gather", ""].not_finite == 2 * rank and rows()["all_gather", ""].too_large == 0
    assert rows()["all_gather", "big"].too_large == 10 and "NaN buckets" in compression.call_summary()


@on_ranks(2, fresh=True)
def test_uncompressed_and_failed_calls_are_not_reported(rank, world):
    for tensor, how in (
        (torch.arange(100), {}),
        (contribution(rank).double(), {}),
        (contribution(rank), {"op": dist.ReduceOp.MAX}),
        (contribution(rank), {"compression": "raw"}),
        (torch.view_as_complex(contribution(rank, 5000).view(-1, 2)), {}),
        (torch.diag(contribution(rank, 100)).to_sparse(), {}),
    ):
        compression.all_reduce_quantized(tensor, **how)
    with pytest.raises(ValueError, match="expanded"):
        compression.all_reduce_quantized(torch.ones(1, 4).expand(4, 4))
    alone = [dist.new_group([other]) for other in range(world)][rank]
    compression.all_reduce_quantized(contribution(rank), group=alone)
    assert rows() == rows(alone) == {}
    compression.all_reduce_quantized(contribution(rank), compression=Compression("maxmin:8", audit=0))
    assert rows()["all_reduce", ""].calls == 1 and rows()["all_reduce", ""].error is None


@on_ranks(2, fresh=True)
def test_groups_have_figures_of_their_own_that_go_with_them(rank, world):
    before = len(_call_measures._rows)
    group = dist.new_group()
    compression.all_reduce_quantized(contribution(rank), group=group, key="a")
    compression.all_reduce_quantized(contribution(rank), key="b")
    assert list(rows(group)) == [("all_reduce", "a")] and list(rows()) == [("all_reduce", "b")]
    dist.destroy_process_group(group)
    del group
    gc.collect()
    assert len(_call_measures._rows) == before + 1
    other = gloo_group()
    with pytest.raises(RuntimeError, match="this group has gloo"):
        compression.call_measures(other)


@on_ranks(2, fresh=True)
def test_the_key_that_was_used_longest_ago_is_forgotten(rank, world, monkeypatch):
    monkeypatch.setattr(_call_measures, "MOST_ROWS", 3)
    for key in "abcad":
        compression.all_reduce_quantized(contribution(rank, 100), key=key)
    assert [key for _, key in rows()] == ["c", "a", "d"] and rows()["all_reduce", "a"].calls == 2


@on_ranks(3, fresh=True)
def test_being_measured_changes_no_bit(rank, world):
    codec = "maxmin:3,bucket=64,rounding=stochastic"
    expected, tensor = contribution(rank), contribution(rank)
    with encoded(codecs_of((("raw", codec, codec, tensor_id("k")),)), 7, 5):
        dist.all_reduce(expected)
    compression.all_reduce_quantized(tensor, compression=Compression(codec, seed=7, audit=0), step=5, key="k")
    assert torch.equal(tensor, expected) and rows()["all_reduce", "k"].codec_seconds > 0


@on_ranks(2, fresh=True)
def test_ranks_that_do_not_audit_alike_get_an_error(rank, world):
    settings = Compression("maxmin:4", audit=1024) if rank else "maxmin:4"
    with pytest.raises(dist.DistError, match=r"ranks disagree on call \d+: rank \d called all_reduce"):
        compression.all_reduce_quantized(contribution(rank), compression=settings)
    assert compression.call_measures() == []
