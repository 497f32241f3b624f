"""Reproducible sums: the same bits whatever computes them, and near the exact sums."""

import itertools
import os
import time

import pytest
import torch
import torch.distributed as dist
from support import init_group, on_ranks
from support.training import Model, contribution, same_on_all
from torch.nn.parallel import DistributedDataParallel
from torch_accl import Options, compression
from torch_accl.compression import Reproducible

FLOATS = (torch.float32, torch.float16, torch.bfloat16)
ALGORITHMS = (
    "direct",
    "direct_two_phase",
    "recursive_doubling",
    "rabenseifner",
    "ring",
    "double_binary_tree",
    "circulant",
)
COUNTS = (1, 2, 7, 511, 512, 513, 5003, 200_000)


def top_of(bits, world):
    return min((2 ** (bits - 1) - 1) // world, 2**22)


def expected(contributions, bits=8, bucket=512, is_mean=False):
    """Computes the sum as the head of `_reproducible.py` describes it.

    float64 holds the products of 16-bit integers exactly.
    """
    dtype, count, world = contributions[0].dtype, contributions[0].numel(), len(contributions)
    padded = [torch.nn.functional.pad(one.float(), (0, -count % bucket)).view(-1, bucket) for one in contributions]
    greatest = torch.stack([rows.abs().amax(1, keepdim=True) for rows in padded]).amax(0)
    unit = (greatest / top_of(bits, world)).clamp(min=2.0**-100)
    levels = sum((rows / unit).round().double() for rows in padded)
    scale = (unit.double() if bits == 32 else unit) / (world if is_mean else 1)
    sums = levels * scale.double()
    return (sums.float() if bits < 32 else sums).view(-1)[:count].to(dtype)


def group_of(algorithm, **settings):
    return dist.new_group(pg_options=Options(algorithm=f"all_reduce={algorithm}", **settings))


@pytest.mark.slow
@on_ranks(2, 3, 4)
def test_every_algorithm_has_the_same_bits(rank, world):
    for algorithm in ALGORITHMS:
        group = group_of(algorithm)
        for count, dtype in itertools.product(COUNTS, FLOATS):
            everyone = [contribution(other, count).to(dtype) for other in range(world)]
            tensor = everyone[rank].clone()
            assert compression.all_reduce_reproducible(tensor, group=group) is None
            assert torch.equal(tensor, expected(everyone)), (algorithm, count, dtype)


@on_ranks(4, 6, init=False)
def test_hosts_make_no_difference(rank, world):
    os.environ["ACCL_HOST_ID"] = "abc"[rank // 2]
    init_group()
    everyone = [contribution(other) for other in range(world)]
    for group in (None, group_of("two_level"), group_of("ring")):
        tensor = everyone[rank].clone()
        compression.all_reduce_reproducible(tensor, group=group)
        assert torch.equal(tensor, expected(everyone))
    dist.destroy_process_group()


@on_ranks(4)
def test_it_does_not_matter_which_rank_has_what_and_who_is_late(rank, world):
    everyone = [contribution(other) for other in range(world)]
    results = []
    for shift in range(world):
        time.sleep(0.05 * ((rank * 7 + shift) % 3))
        tensor = everyone[(rank + shift) % world].clone()
        compression.all_reduce_reproducible(tensor)
        results.append(tensor)
    assert all(torch.equal(result, results[0]) for result in results)
    assert same_on_all(results[0])


@on_ranks(3)
@pytest.mark.parametrize("bits", [8, 16, 32])
def test_bits_and_buckets_bound_the_error(rank, world, bits):
    for bucket, op in itertools.product((8, 64, 8192), (dist.ReduceOp.SUM, dist.ReduceOp.AVG)):
        everyone = [contribution(other) for other in range(world)]
        tensor = everyone[rank].clone()
        compression.all_reduce_reproducible(tensor, op, bits=bits, bucket=bucket)
        is_mean = op == dist.ReduceOp.AVG
        assert torch.equal(tensor, expected(everyone, bits, bucket, is_mean))
        exact = sum(one.double() for one in everyone) / (world if is_mean else 1)
        unit = torch.stack(everyone).abs().max().double() / top_of(bits, world)
        bound = unit / 2 * (1 if is_mean else world) + exact.abs().max() * 2.0**-22
        assert (tensor.double() - exact).abs().max() <= bound


@on_ranks(2, 3)
def test_what_is_not_finite_makes_its_bucket_nan_on_all_ranks(rank, world):
    for bad in (torch.inf, -torch.inf, torch.nan, -torch.nan):
        everyone = [contribution(other, 2000) for other in range(world)]
        everyone[1][700] = bad
        tensor = everyone[rank].clone()
        compression.all_reduce_reproducible(tensor)
        assert tensor[512:1024].isnan().all()
        rest = [torch.cat([one[:512], one[1024:]]) for one in everyone]
        assert torch.equal(torch.cat([tensor[:512], tensor[1024:]]), expected(rest))


@on_ranks(2)
def test_extremes_keep_their_sums(rank, world):
    zeros = torch.zeros(600)
    compression.all_reduce_reproducible(zeros)
    assert torch.equal(zeros, torch.zeros(600))
    for scale in (2.0**-90, 1.0, 2.0**120):
        everyone = [contribution(other, 600) * scale for other in range(world)]
        tensor = everyone[rank].clone()
        compression.all_reduce_reproducible(tensor, bits=16)
        assert torch.equal(tensor, expected(everyone, 16))
        assert (tensor / scale - sum(everyone) / scale).abs().max() < 1e-3
    largest = torch.full((600,), torch.finfo(torch.float32).max)
    compression.all_reduce_reproducible(largest, dist.ReduceOp.AVG, bits=32)
    assert torch.equal(largest, torch.full((600,), torch.finfo(torch.float32).max))


@on_ranks(2)
def test_a_rank_that_flushes_denormals_ends_with_the_same_bits(rank, world):
    tensor = torch.full((600,), 1e-39)
    tensor[:100] = 1e-27
    torch.set_flush_denormal(rank == 1)
    try:
        compression.all_reduce_reproducible(tensor)
    finally:
        torch.set_flush_denormal(False)
    assert same_on_all(tensor)
    assert tensor[:100].gt(1.9e-27).all()
    assert torch.equal(tensor[100:], torch.zeros(500))


@on_ranks(2, 4)
def test_any_shape_and_calls_that_are_not_waited_for(rank, world):
    everyone = [contribution(other, 60_000).view(200, 300) for other in range(world)]
    apart = everyone[rank].clone().t()
    works = [compression.all_reduce_reproducible(apart, async_op=True)]
    tensors = [everyone[rank].clone() for _ in range(4)]
    works += [compression.all_reduce_reproducible(tensor, async_op=True) for tensor in tensors]
    for work in reversed(works):
        assert work.wait()
        assert work.is_completed() and work.is_success()
    assert torch.equal(apart, expected([one.t().reshape(-1) for one in everyone]).view(300, 200))
    assert all(torch.equal(tensor, expected([one.view(-1) for one in everyone]).view(200, 300)) for tensor in tensors)
    assert works[1].result()[0].data_ptr() == tensors[0].data_ptr()
    assert works[1].get_future().wait()[0].data_ptr() == tensors[0].data_ptr()
    empty = torch.empty(0)
    compression.all_reduce_reproducible(empty)


@on_ranks(1)
def test_one_rank_keeps_what_it_has(rank, world):
    tensor = contribution(0)
    compression.all_reduce_reproducible(tensor)
    assert torch.equal(tensor, contribution(0))


@on_ranks(3)
def test_ranks_that_are_not_of_the_group_take_no_part(rank, world):
    group = dist.new_group([0, 2])
    tensor = contribution(rank)
    if rank == 1:
        with pytest.warns(UserWarning, match="not"):
            assert compression.all_reduce_reproducible(tensor, group=group) is None
        assert torch.equal(tensor, contribution(1))
    else:
        compression.all_reduce_reproducible(tensor, group=group)
        assert torch.equal(tensor, expected([contribution(0), contribution(2)]))


@on_ranks(3)
@pytest.mark.parametrize(("name", "usual", "other"), [("bits", 8, 32), ("bucket", 512, 504)])
def test_ranks_with_different_settings_fail_with_the_difference(rank, world, name, usual, other):
    sentence = f"since ranks have different settings: {name} from {min(usual, other)} to {max(usual, other)}; give all"
    with pytest.raises(RuntimeError, match=sentence):
        compression.all_reduce_reproducible(contribution(rank, 500), **{name: other if rank == 1 else usual})
    # The group stays usable.
    tensor = contribution(rank)
    compression.all_reduce_reproducible(tensor)
    assert same_on_all(tensor)


@on_ranks(1)
def test_wrong_input_is_refused_by_name(rank, world):
    call = compression.all_reduce_reproducible
    for wrong, sentence in (
        ({"bits": 7}, "bits is 7; expected 8, 16 or 32"),
        ({"bits": 64}, "bits is 64"),
        ({"bits": "four"}, "bits is 'four'"),
        ({"bits": True}, "bits is True"),
        ({"bucket": 0}, "bucket is 0; expected a multiple of 8 from 8 to 8192"),
        ({"bucket": 12}, "bucket is 12"),
        ({"bucket": 8200}, "bucket is 8200"),
        ({"op": dist.ReduceOp.MAX}, "reproducible sum: expected SUM or AVG"),
    ):
        with pytest.raises(ValueError, match=sentence):
            call(torch.zeros(8), **wrong)
    for tensor, sentence in (
        (torch.zeros(8, dtype=torch.int32), r"torch.int32 \(strided\)"),
        (torch.zeros(8, dtype=torch.float64), "torch.float64"),
        (torch.eye(8).to_sparse(), r"torch.float32 \(sparse_coo\)"),
        (torch.zeros(8, device="meta"), "on meta, which the group has no backend for"),
    ):
        with pytest.raises(ValueError, match=sentence):
            call(tensor)


@on_ranks(2, 3, fresh=True)
def test_models_train_alike_however_gradients_travel(rank, world):
    def train(group, bucket_cap_mb):
        torch.manual_seed(0)
        model = DistributedDataParallel(Model(), process_group=group, bucket_cap_mb=bucket_cap_mb)
        model.register_comm_hook(Reproducible(process_group=group), compression.reproducible_hook)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(4):
            optimizer.zero_grad()
            inputs = contribution(rank, 8 * 48, seed=step).view(8, 48)
            model(inputs).square().mean().backward()
            optimizer.step()
        return torch.cat([parameter.detach().view(-1) for parameter in model.parameters()])

    torch.use_deterministic_algorithms(True)
    weights = [
        train(group_of(algorithm), size)
        for algorithm, size in (("ring", 25), ("direct", 0.01), ("double_binary_tree", 0.002))
    ]
    from torch._dynamo import config

    # torch's reducer in Python has no buckets: it passes one gradient at a time.
    with config.patch(optimize_ddp="python_reducer"):
        weights.append(train(group_of("ring"), 25))
    assert all(torch.equal(one, weights[0]) for one in weights)
    assert same_on_all(weights[0])
