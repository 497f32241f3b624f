"""Step numbers of calls that pass none: the same on all ranks of a group, whatever else a rank does."""

import pytest
import torch
import torch.distributed as dist
import torch_accl
from support import BACKEND, on_ranks
from support.training import contribution, error, same_on_all
from torch_accl import compression
from torch_accl.compression import Compression, _call_numbers

pytestmark = pytest.mark.skipif(BACKEND != "accl", reason="about this package only")

COUNT = 20_000


def alone(rank, world):
    """Returns a group that contains only this rank."""
    return [dist.new_group([other]) for other in range(world)][rank]


def summed(rank, step=None, group=None, key="k", codec="maxmin:4,rounding=stochastic"):
    tensor = contribution(rank, COUNT)
    compression.all_reduce_quantized(tensor, group=group, compression=Compression(codec, seed=3), key=key, step=step)
    return tensor


@on_ranks(2, fresh=True)
def test_an_audit_compares_the_same_elements_after_a_call_on_a_group_of_one_rank(rank, world):
    own = alone(rank, world)
    if rank == 1:
        compression.all_reduce_quantized(contribution(rank), group=own)
    settings = Compression("maxmin:8,bucket=128", audit=8)
    exact = sum(contribution(other, COUNT).double() for other in range(world))
    for _ in range(3):
        tensor = contribution(rank, COUNT)
        compression.all_reduce_quantized(tensor, compression=settings, key="k")
    [row] = compression.call_measures()
    assert row.error == pytest.approx(error(tensor, exact) ** 2, rel=0.2) and row.error < 1e-3


@on_ranks(3, fresh=True)
def test_correlated_errors_balance_after_a_call_on_a_group_of_one_rank(rank, world):
    own = alone(rank, world)
    for _ in range(rank):
        summed(rank, group=own)

    codec = "maxmin:4,rounding=correlated"
    assert torch.equal(summed(rank, codec=codec), summed(rank, 0, codec=codec))


@on_ranks(2, fresh=True)
def test_calls_are_counted_by_group_and_key(rank, world):
    other = dist.new_group()
    for step in range(3):
        assert torch.equal(summed(rank), summed(rank, step))
        # None of these calls counts for this group and key.
        summed(rank, key="another")
        summed(rank, step=77)
        summed(rank, group=other)
    assert torch.equal(summed(rank, group=other), summed(rank, 3, group=other))


@on_ranks(2, fresh=True)
def test_every_collective_on_a_key_counts(rank, world):
    gathered = torch.empty(world * COUNT)
    compression.all_gather_quantized(gathered, contribution(rank, COUNT), compression="maxmin:8", key="k")
    assert torch.equal(summed(rank), summed(rank, 1))


@on_ranks(2, fresh=True)
def test_a_call_that_was_refused_on_one_rank_does_not_count(rank, world):
    if rank == 1:
        for wrong in (
            lambda: compression.all_reduce_quantized(torch.ones(1).expand(COUNT), key="k"),
            lambda: compression.all_reduce_quantized(torch.ones(4), compression="int4", key="k"),
            lambda: compression.all_reduce_quantized(torch.ones(4, device="meta"), key="k"),
            lambda: compression.all_gather_quantized(torch.ones(7), torch.ones(4), key="k"),
            lambda: compression.all_to_all_quantized(torch.ones(4), torch.ones(4), [1, 1], [3, 1], key="k"),
        ):
            with pytest.raises((ValueError, RuntimeError)):
                wrong()
    assert torch.equal(summed(rank), summed(rank, 0))


@on_ranks(2, fresh=True)
def test_a_dropped_key_does_not_repeat_its_numbers(rank, world, monkeypatch):
    monkeypatch.setattr(_call_numbers, "MOST_KEYS", 3)
    summed(rank)
    for key in ("a", "b", "c", "d"):
        summed(rank, key=key)
    # The key's first number was used before, and is not used again.
    found = summed(rank)
    assert not torch.equal(found, summed(rank, 0)) and same_on_all(found)


@on_ranks(2, fresh=True)
def test_a_refused_call_does_not_count_where_all_calls_are_compressed(rank, world):
    options = torch_accl.Options(compression="maxmin:4,rounding=stochastic", compressed_calls="all")
    groups = [dist.new_group(pg_options=options) for _ in range(2)]
    if rank == 1:
        for wrong in (
            lambda: dist.all_reduce(torch.ones(1).expand(COUNT), group=groups[1]),
            lambda: dist.all_gather_into_tensor(torch.ones(2 * COUNT + 2), torch.ones(COUNT), group=groups[1]),
            lambda: dist.all_gather(
                [torch.ones(COUNT), torch.ones(COUNT).double()], torch.ones(COUNT), group=groups[1]
            ),
            lambda: dist.reduce_scatter(torch.ones(COUNT), [torch.ones(COUNT), torch.ones(2 * COUNT)], group=groups[1]),
        ):
            with pytest.raises((ValueError, TypeError, RuntimeError)):
                wrong()
    found = []
    for group in groups:
        tensor = contribution(rank, COUNT)
        dist.all_reduce(tensor, group=group)
        found.append(tensor)
    assert torch.equal(*found)


REFUSED = {
    "all_reduce": lambda: compression.all_reduce_quantized(torch.ones(4)),
    "reduce_scatter": lambda: compression.reduce_scatter_quantized(torch.ones(2), torch.ones(4)),
    "all_gather": lambda: compression.all_gather_quantized(torch.ones(4), torch.ones(2)),
    "all_to_all": lambda: compression.all_to_all_quantized(torch.ones(4), torch.ones(4)),
    "reproducible": lambda: compression.all_reduce_reproducible(torch.ones(4)),
    "device": lambda: compression.all_reduce_quantized(torch.ones(4, device="meta")),
    "key": lambda: compression.all_reduce_quantized(torch.ones(4), key=5),
    "codec": lambda: compression.all_reduce_quantized(torch.ones(4), compression="int4"),
    "bits": lambda: compression.all_reduce_reproducible(torch.ones(4), bits=5),
}


@on_ranks(2, fresh=True)
@pytest.mark.parametrize("device", [None, torch.device("cpu")], ids=str)
@pytest.mark.parametrize("call", list(REFUSED))
def test_a_refusal_inside_the_coalescing_manager_leaves_nothing_behind(rank, world, call, device):
    group = dist.new_group()
    for used in (None, group):
        with pytest.raises((ValueError, RuntimeError)):
            with dist._coalescing_manager(used, device):
                if used is None:
                    REFUSED[call]()
                else:
                    compression.all_reduce_quantized(torch.ones(4), group=used)
        # Later calls run, and the manager works.
        tensor = torch.ones(4)
        dist.all_reduce(tensor, group=used)
        assert torch.equal(tensor, torch.full((4,), 2.0))
        tensors = [torch.ones(4), torch.ones(8)]
        with dist._coalescing_manager(used):
            for each in tensors:
                dist.all_reduce(each, group=used)
        assert all(bool((each == 2).all()) for each in tensors)
