"""Collectives under every calibration of `calibrations/` and under the built-in constants.

The cost model chooses other algorithms under each calibration. Results may depend on the choice only as documented:
exact results are exact, all ranks end with the same bits, and errors of encoded sums stay within their bound.
"""

import contextlib
import os
import runpy
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from support import BACKEND, contributions, expected_reduction, init_group, noise, on_ranks, reduce_op
from support.training import same_on_all
from torch_accl import _native, compression
from torch_accl.compat import cgx
from torch_accl.compression._scope import codecs_of, encoded

pytestmark = pytest.mark.skipif(BACKEND != "accl", reason="about this package only")

HERE = Path(__file__).parent / "calibrations"
FILES = sorted(HERE.glob("*.txt"))
EVERY = pytest.mark.parametrize("calibration", [*map(str, FILES), "off"], ids=[*(path.stem for path in FILES), "off"])

# Elements of a call: one, few, many, and several MiB. Neither 2 nor 3 divides the larger counts.
COUNTS = (1, 1001, 40_001, 1_500_001)

# Sizes of layers sent in one call: small and large layers together, so that the call's size differs from each layer's.
LAYERS = (1000, 40, 2000, 16, 3000, 70_001)

BITS = 8


@contextlib.contextmanager
def group_under(calibration, backend="accl", **options):
    """Creates the default group of these ranks under this calibration, and destroys it at the end."""
    os.environ["ACCL_CALIBRATION"] = calibration
    init_group(backend, **options)
    yield
    dist.destroy_process_group()


def most(tensors):
    """The largest error of an encoded sum of these tensors.

    Each contribution and the sum may be off by half a step of the widest possible bucket. A factor of 1.01 allows for
    rounding in float32.
    """
    steps = [(tensor.max() - tensor.min()).item() / (2**BITS - 1) for tensor in tensors]
    of_sum = (sum(steps) * (2**BITS - 1) + sum(steps)) / (2**BITS - 1)
    return 1.01 * (sum(steps) + of_sum) / 2


def test_the_extreme_files_are_those_of_their_generator():
    written = runpy.run_path(str(HERE / "extremes.py"))["files"]()
    found = {path.name: path.read_text() for path in FILES if path.name.startswith("extreme-")}
    assert found == written, "stale: run `python tests/calibrations/extremes.py`"
    listed = (HERE / "README.md").read_text()
    assert [path.name for path in FILES if f"`{path.name}`" not in listed] == []


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_each_file_makes_the_engine_choose_otherwise_than_usual(path, monkeypatch):
    monkeypatch.setenv("ACCL_CALIBRATION", "off")
    sizes = [4 << shift for shift in range(24)]

    def choices(machine):
        return [row["chosen"] for row in _native.simulate("all_reduce", sizes, (3, 3, 2), None, machine)]

    assert choices(str(path)) != choices(None)


@pytest.mark.slow
@on_ranks(2, 3, init=False)
@EVERY
def test_every_collective_is_exact(rank, world, calibration):
    with group_under(calibration):
        for count in COUNTS:
            given = contributions(world, count, "float32")
            own, total = given[rank], expected_reduction(given, "SUM")
            for op in ("SUM", "AVG", "MAX"):
                result = own.clone()
                dist.all_reduce(result, reduce_op(op))
                assert torch.equal(result, expected_reduction(given, op)), (count, op)
            whole = contributions(world, count, "int64", seed=1)
            result = whole[rank].clone()
            dist.all_reduce(result)
            assert torch.equal(result, expected_reduction(whole, "SUM")), count
            for root in (0, world - 1):
                result = own.clone()
                dist.broadcast(result, root)
                assert torch.equal(result, given[root]), count
                result = own.clone()
                dist.reduce(result, root)
                assert rank != root or torch.equal(result, total), count
                gathered = [torch.empty(count) for _ in range(world)] if rank == root else None
                dist.gather(own, gathered, root)
                assert rank != root or all(map(torch.equal, gathered, given)), count
                result = torch.empty(count)
                dist.scatter(result, given if rank == root else None, root)
                assert torch.equal(result, own), count
            gathered = torch.empty(world * count)
            dist.all_gather_into_tensor(gathered, own)
            assert torch.equal(gathered, torch.cat(given)), count
            blocks = [torch.cat(contributions(world, count, "float32", seed=2 + other)) for other in range(world)]
            result = torch.empty(count)
            dist.reduce_scatter_tensor(result, blocks[rank])
            assert torch.equal(result, expected_reduction(blocks, "SUM").split(count)[rank]), count
            result = torch.empty(world * count)
            dist.all_to_all_single(result, blocks[rank])
            assert torch.equal(result, torch.cat([block.split(count)[rank] for block in blocks])), count
            # Every rank keeps and sends a different number of elements.
            parts = [[block[to : (to + 1) * count // world] for to in range(world)] for block in blocks]
            results = [torch.empty_like(parts[other][rank]) for other in range(world)]
            dist.all_to_all(results, parts[rank])
            assert all(torch.equal(part, parts[other][rank]) for other, part in enumerate(results)), count
            dist.barrier()


@on_ranks(2, 3, init=False)
@EVERY
def test_layers_in_one_call_are_exact_and_the_same_as_alone(rank, world, calibration):
    with group_under(calibration):
        given = [contributions(world, count, "float32", seed=index) for index, count in enumerate(LAYERS)]
        layers = [layer[rank].clone() for layer in given]
        with dist._coalescing_manager():
            for layer in layers:
                dist.all_reduce(layer)
        for layer, all_of_it in zip(layers, given, strict=True):
            assert torch.equal(layer, expected_reduction(all_of_it, "SUM"))
        gathered = [torch.empty(world * count) for count in LAYERS]
        with dist._coalescing_manager():
            for output, all_of_it in zip(gathered, given, strict=True):
                dist.all_gather_into_tensor(output, all_of_it[rank])
        assert all(map(torch.equal, gathered, map(torch.cat, given)))
        scattered = [torch.empty(count) for count in LAYERS]
        blocks = [[layer.repeat(world) for layer in all_of_it] for all_of_it in given]
        with dist._coalescing_manager():
            for output, all_of_it in zip(scattered, blocks, strict=True):
                dist.reduce_scatter_tensor(output, all_of_it[rank])
        for output, all_of_it in zip(scattered, given, strict=True):
            assert torch.equal(output, expected_reduction(all_of_it, "SUM"))


@pytest.mark.slow
@on_ranks(2, 3, init=False)
@EVERY
def test_every_encoded_collective_is_the_same_on_all_and_within_its_bound(rank, world, calibration):
    codec = f"maxmin:{BITS}"
    with group_under(calibration):
        for count in COUNTS[1:]:
            given = noise(world, count, "float32")
            exact, bound = sum(tensor.double() for tensor in given), most(given)
            result = given[rank].clone()
            compression.all_reduce_quantized(result, compression=codec, key="sum", step=0)
            assert same_on_all(result) and 0 < (result - exact).abs().max() <= bound, count
            # The same call gives the same bits again, also as an asynchronous call.
            again = given[rank].clone()
            compression.all_reduce_quantized(again, async_op=True, compression=codec, key="sum", step=0).wait()
            assert torch.equal(again, result), count
            gathered = torch.empty(world * count)
            compression.all_gather_quantized(gathered, given[rank], compression=codec)
            assert same_on_all(gathered) and (gathered - torch.cat(given)).abs().max() <= bound, count
            scattered = torch.empty(count)
            compression.reduce_scatter_quantized(scattered, given[rank].repeat(world), compression=codec)
            assert (scattered - exact).abs().max() <= bound, count
            exchanged = torch.empty(world * count)
            compression.all_to_all_quantized(exchanged, given[rank].repeat(world), compression=codec)
            assert (exchanged - torch.cat(given)).abs().max() <= bound, count


def together(collective, outputs, inputs, ids):
    """Runs one encoded call on several tensors, as the hooks do."""
    codec = f"maxmin:{BITS},bucket=64"
    with encoded(codecs_of(tuple((codec, codec, codec, id) for id in ids)), 0, 0):
        if collective == "all_reduce":
            dist.group.WORLD.allreduce_coalesced(outputs, dist.AllreduceCoalescedOptions()).wait()
        elif collective == "all_gather":
            dist.group.WORLD.allgather_into_tensor_coalesced(outputs, inputs).wait()
        else:
            dist.group.WORLD.reduce_scatter_tensor_coalesced(outputs, inputs).wait()
    return outputs


def in_one_call_and_alone(rank, world, collective, given):
    """Returns the results of layers sent in one call, and the results of one call for each layer."""

    def call(places):
        own = [given[place][rank] for place in places]
        if collective == "all_reduce":
            return together(collective, [layer.clone() for layer in own], None, places)
        if collective == "all_gather":
            return together(collective, [torch.empty(world * layer.numel()) for layer in own], own, places)
        return together(collective, [torch.empty_like(layer) for layer in own], [t.repeat(world) for t in own], places)

    places = range(len(given))
    return call(places), [call([place])[0] for place in places]


@on_ranks(2, 3, init=False)
@EVERY
def test_encoded_layers_in_one_call_are_as_near_as_alone_and_the_same_on_all(rank, world, calibration):
    with group_under(calibration):
        given = [noise(world, count, "float32", seed=index) for index, count in enumerate(LAYERS)]
        for results in in_one_call_and_alone(rank, world, "all_reduce", given):
            assert same_on_all(*results)
            for result, of_layer in zip(results, given, strict=True):
                exact = sum(tensor.double() for tensor in of_layer)
                assert 0 < (result - exact).abs().max() <= most(of_layer)


@on_ranks(2, 3, init=False)
@EVERY
def test_encoded_layers_have_the_same_bits_in_one_call_as_alone_where_it_is_promised(rank, world, calibration):
    with group_under(calibration):
        given = [noise(world, count, "float32", seed=index) for index, count in enumerate(LAYERS)]
        for collective in ("all_gather", "reduce_scatter"):
            whole, alone = in_one_call_and_alone(rank, world, collective, given)
            assert all(map(torch.equal, whole, alone)), collective
    os.environ["ACCL_ALGORITHM"] = "all_reduce=direct"
    with group_under(calibration):
        whole, alone = in_one_call_and_alone(rank, world, "all_reduce", given)
        assert all(map(torch.equal, whole, alone))


@on_ranks(2, 3, init=False, env={"CGX_COMPRESSION_QUANTIZATION_BITS": str(BITS)})
@EVERY
def test_registered_layers_are_within_the_bound_of_each(rank, world, calibration):
    for index, count in enumerate(LAYERS):
        cgx.register_layer(0, index, count, 32 if count == 2000 else 0, 64)
    with group_under(calibration, "cgx"):
        given = noise(world, sum(LAYERS), "float32")
        result = given[rank].clone()
        dist.all_reduce(result)
        assert same_on_all(result)
        parts = zip(*(tensor.split(LAYERS) for tensor in (result, *given)), strict=True)
        for count, (part, *of_layer) in zip(LAYERS, parts, strict=True):
            off = (part - sum(tensor.double() for tensor in of_layer)).abs().max()
            # Sent without compression: layer 2000 by registration (32 bits), layer 16 because it does not exceed the
            # minimum size.
            is_raw = count in (2000, 16)
            assert (off < 1e-6 * world) if is_raw else (0 < off <= most(of_layer)), count
