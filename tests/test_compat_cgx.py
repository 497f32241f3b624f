"""Scripts of torch_cgx after changing the import: its variables, functions and hook; its own tests are the minimum."""

import functools
import os
import threading
import warnings

import pytest
import torch
import torch.distributed as dist
import torch_accl
from support import BACKEND, gloo_group, init_group, on_ranks, run_script
from support.training import Model, contribution, error, same_on_all
from support.versions import MINOR, NAME
from torch import nn
from torch.distributed import _functional_collectives as functional
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch_accl import compression
from torch_accl.compat import cgx
from torch_accl.compression import Compression

pytestmark = pytest.mark.skipif(BACKEND != "accl", reason="about this package only")

BITS = "CGX_COMPRESSION_QUANTIZATION_BITS"
BUCKET = "CGX_COMPRESSION_BUCKET_SIZE"
SKIP = "CGX_COMPRESSION_SKIP_INCOMPLETE_BUCKETS"
MINIMAL = "CGX_COMPRESSION_MINIMAL_SIZE"
FLOATS = (torch.float32, torch.float16, torch.bfloat16)


def cgx_ranks(*worlds, **env):
    """Runs the body on ranks with a default group of backend cgx, with these environment variables."""

    def decorate(body):
        return on_ranks(*worlds, init=False, env=env)(in_cgx_group(body))

    return decorate


def in_cgx_group(body):
    @functools.wraps(body)
    def with_group(**arguments):
        init_group("cgx")
        body(**arguments)
        dist.destroy_process_group()

    return with_group


def exact_sum(world, count=5003, dtype=torch.float32):
    """The exact sum, in float64, of all ranks' contributions in `dtype`."""
    return sum(contribution(other, count).to(dtype).double() for other in range(world))


def summed(tensor, **how):
    """Returns the sum over all ranks, computed on a copy."""
    tensor = tensor.clone()
    dist.all_reduce(tensor, **how)
    return tensor


def encoded_with(codec, tensor, group):
    """Returns the sum as encoded by `codec`, whatever the variables say."""
    tensor = tensor.clone()
    # An audit would send additional data and so change the size of the call.
    compression.all_reduce_quantized(tensor, group=group, compression=Compression(codec, inner=codec, audit=0))
    return tensor


@cgx_ranks(2)
def test_a_group_keeps_its_store_and_splits_or_says_that_this_torch_cannot(rank, world):
    group = dist.group.WORLD
    store = group.get_group_store()
    store.set(f"of {rank}", "here")
    assert store.get(f"of {1 - rank}") == b"here"
    if MINOR < (2, 14):
        with pytest.raises(NotImplementedError, match=f"torch {NAME}.*create one with new_group"):
            group.split_group([0, 1])
        return
    whole = group.split_group([0, 1])
    tensor = torch.ones(8)
    whole.allreduce([tensor]).wait()
    assert tensor.tolist() == [2.0] * 8


# CGX's own tests: exact results where CGX is exact, and its error bound elsewhere.


@cgx_ranks(1, 2, 3, 4)
def test_sums_of_constants_are_exact(rank, world):
    for bits in (2, 4, 8):
        os.environ[BITS] = str(bits)
        for dtype in (*FLOATS, torch.int32):
            for count in (1, 2, 8, 128, 1024, 10**6):
                tensor = summed(torch.full((count,), rank + 1, dtype=dtype))
                assert torch.equal(tensor, torch.full((count,), world * (world + 1) // 2, dtype=dtype)), (bits, count)


@pytest.mark.slow
@cgx_ranks(2, 3)
@pytest.mark.parametrize("bucket", [64, 512, 2048])
def test_sums_of_ramps_keep_within_the_bound_of_cgx(rank, world, bucket):
    os.environ[BUCKET] = str(bucket)
    for bits in (2, 3, 4, 6, 8):
        os.environ[BITS] = str(bits)
        for count in (128, 1024, 1025, 16384, 10**6):
            ramp = torch.arange(count, dtype=torch.float32)
            exact = ramp * (world * (world + 1) // 2)
            bound = 2 * min(bucket, count) / (2**bits - 1) * world * (world + 1)
            found = [summed(ramp * (rank + 1)) for _ in range(10 if count < 10**6 else 2)]
            assert all(torch.equal(again, found[0]) for again in found)
            assert (found[0] - exact).abs().max() < bound, (bits, count)
            # At so few bits a step is coarse enough to change every ramp.
            if bits <= 4:
                assert (found[0] - exact).abs().max() > bound / 64, (bits, count)
            assert same_on_all(found[0])


@cgx_ranks(3)
def test_variables_are_read_at_every_call(rank, world):
    exact = exact_sum(world)
    plain = summed(contribution(rank))
    assert error(plain, exact) < 1e-6
    errors = {}
    for bits in (8, 4, 32, 2, 9, 1):
        os.environ[BITS] = str(bits)
        result = summed(contribution(rank))
        assert same_on_all(result)
        errors[bits] = error(result, exact)
        assert (bits > 8) == torch.equal(result, plain)
    assert 0 < errors[8] < errors[4] / 8 < errors[2] / 16 < errors[1] / 16
    os.environ[BITS] = " 4 "
    by_bucket = []
    for bucket in (64, 512, 2048):
        os.environ[BUCKET] = str(bucket)
        by_bucket.append(error(summed(contribution(rank)), exact))
    assert 0 < by_bucket[0] < by_bucket[1] < by_bucket[2]
    os.environ[BITS] = os.environ[BUCKET] = ""
    assert torch.equal(summed(contribution(rank)), plain)


@cgx_ranks(2)
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_encoding_is_to_the_nearest_level_with_metadata_of_the_tensors_type(rank, world, dtype):
    other = dist.new_group(backend="accl")
    tensor = contribution(rank).to(dtype)
    kind = str(dtype).removeprefix("torch.")
    for bits in (1, 2, 4, 8):
        os.environ[BITS] = str(bits)
        codec = f"maxmin:{bits},bucket=512,meta={kind},rounding=nearest"
        assert torch.equal(summed(tensor), encoded_with(codec, tensor, other)), bits
    os.environ[BUCKET], os.environ[SKIP] = "2048", "1"
    codec = f"maxmin:8,bucket=2048,meta={kind},rounding=nearest,skip_incomplete"
    assert torch.equal(summed(tensor), encoded_with(codec, tensor, other))
    os.environ[SKIP] = "-1"
    assert torch.equal(summed(tensor), encoded_with(codec.removesuffix(",skip_incomplete"), tensor, other))


@cgx_ranks(2, CGX_COMPRESSION_QUANTIZATION_BITS="1")
def test_what_is_no_sum_of_floats_in_one_tensor_travels_as_it_is(rank, world):
    other = dist.new_group(backend="accl")
    calls = [
        (contribution(rank), dist.ReduceOp.AVG),
        (contribution(rank), dist.ReduceOp.MAX),
        (contribution(rank).double(), dist.ReduceOp.SUM),
        (torch.arange(5000) + rank, dist.ReduceOp.SUM),
        (torch.view_as_complex(contribution(rank, 5000).view(-1, 2)), dist.ReduceOp.SUM),
        # Not larger than the minimal size.
        (contribution(rank, 16), dist.ReduceOp.SUM),
    ]
    for tensor, op in calls:
        assert torch.equal(summed(tensor, op=op), summed(tensor, op=op, group=other))
    first, second = contribution(rank), contribution(rank, 100)
    with dist._coalescing_manager():
        dist.all_reduce(first)
        dist.all_reduce(second)
    assert torch.equal(first, summed(contribution(rank), group=other))
    tensor = contribution(rank)
    dist.broadcast(tensor, 1)
    assert torch.equal(tensor, contribution(1))
    output = torch.empty(2500)
    dist.reduce_scatter_tensor(output, contribution(rank, 5000))
    exact = torch.empty(2500)
    dist.reduce_scatter_tensor(exact, contribution(rank, 5000), group=other)
    assert torch.equal(output, exact)


@cgx_ranks(2, CGX_COMPRESSION_QUANTIZATION_BITS="2")
@pytest.mark.parametrize("mode", [torch.inference_mode, torch.no_grad])
def test_complex_numbers_are_added_exactly_however_they_were_made(rank, world, mode):
    with mode():
        exact = sum(contribution(other, 5000) for other in range(world)).view(-1, 2)
        as_view = torch.view_as_complex(contribution(rank, 5000).view(-1, 2))
        for tensor in (as_view, as_view.clone(), as_view.reshape(50, 50), as_view.clone()[::2]):
            wanted = torch.view_as_complex(exact)
            wanted = wanted[::2] if tensor.numel() == 1250 else wanted.view(tensor.shape)
            dist.all_reduce(tensor)
            assert torch.equal(tensor, wanted)
            as_view.copy_(torch.view_as_complex(contribution(rank, 5000).view(-1, 2)))
        real = contribution(rank, 5000)
        dist.all_reduce(real)
        assert not torch.equal(real, exact.flatten()), "real numbers are compressed as before"


@cgx_ranks(2, CGX_COMPRESSION_QUANTIZATION_BITS="2", CGX_COMPRESSION_MINIMAL_SIZE="100")
def test_layers_of_no_more_than_the_minimal_size_travel_as_they_are(rank, world):
    for count, is_exact in ((100, True), (101, False)):
        assert (error(summed(contribution(rank, count)), exact_sum(world, count)) < 1e-6) == is_exact
    # A group reads the variable when it is created.
    os.environ[MINIMAL] = "0"
    assert error(summed(contribution(rank, 100)), exact_sum(world, 100)) < 1e-6
    small = dist.new_group()
    for count, is_exact in ((15, True), (16, False)):
        result = summed(contribution(rank, count), group=small)
        assert (error(result, exact_sum(world, count)) < 1e-6) == is_exact


@cgx_ranks(3, CGX_COMPRESSION_QUANTIZATION_BITS="4")
def test_every_way_of_calling_is_compressed_alike(rank, world):
    expected = summed(contribution(rank))
    assert 0.01 < error(expected, exact_sum(world)) < 0.3
    tensor = contribution(rank)
    work = dist.all_reduce(tensor, async_op=True)
    assert work.wait() and work.is_completed() and torch.equal(tensor, expected)
    tensor = contribution(rank)
    assert dist.group.WORLD.allreduce(tensor).get_future().wait()[0] is not None
    assert torch.equal(tensor, expected)
    tensor = contribution(rank)
    dist.group.WORLD.allreduce(tensors=[tensor], opts=dist.AllreduceOptions()).wait()
    assert torch.equal(tensor, expected)
    tensor = contribution(rank)
    dist.group.WORLD.allreduce([tensor], dist.ReduceOp.SUM).wait()
    assert torch.equal(tensor, expected)
    # This call and the next one come from C++.
    result = functional.all_reduce(contribution(rank), "sum", dist.group.WORLD)
    assert torch.equal(functional.wait_tensor(result), expected)
    strided = torch.zeros(5003, 2)
    strided[:, 0] = contribution(rank)
    dist.all_reduce(strided[:, 0])
    assert torch.equal(strided[:, 0], expected) and not strided[:, 1].any()


@cgx_ranks(2, CGX_COMPRESSION_QUANTIZATION_BITS="1")
def test_what_a_caller_says_of_compression_counts(rank, world):
    other = dist.new_group(backend="accl")
    tensor = contribution(rank)
    compression.all_reduce_quantized(tensor, compression="maxmin:8")
    expected = contribution(rank)
    compression.all_reduce_quantized(expected, compression="maxmin:8", group=other)
    assert torch.equal(tensor, expected)
    compression.CompressionState(Compression(), nn.Linear(2, 2))
    # A hook of torch_accl's own also counts as a hook.
    assert torch.equal(summed(contribution(rank)), summed(contribution(rank), group=other))


@cgx_ranks(2)
def test_a_call_that_blocks_lets_other_threads_run(rank, world):
    store = dist.distributed_c10d._get_default_store()
    for number, call in enumerate(
        (
            lambda: dist.barrier(),
            lambda: dist.all_reduce(torch.ones(100)),
            lambda: dist.broadcast(torch.ones(100), 1),
            lambda: dist.recv(torch.ones(3), 1) if rank == 0 else dist.send(torch.ones(3), 0),
        )
    ):
        if rank == 0:
            thread = threading.Thread(target=call)
            thread.start()
            store.set(f"go{number}", "on")
            thread.join()
        else:
            store.wait([f"go{number}"])
            call()


# Groups.


@cgx_ranks(3)
def test_groups_are_made_split_off_and_made_again(rank, world):
    assert dist.get_backend() == "cgx" and isinstance(dist.group.WORLD, dist.ProcessGroup)
    assert isinstance(dist.group.WORLD._get_backend(torch.device("cpu")), torch_accl.Backend)
    os.environ[BITS] = "2"
    pair = dist.new_group([0, 2])
    if rank != 1:
        assert dist.get_backend(pair) == "cgx"
        exact = sum(contribution(other).double() for other in (0, 2))
        assert 0.1 < error(summed(contribution(rank), group=pair), exact) < 2
    dist.destroy_process_group()
    init_group("cgx", pg_options=torch_accl.Options(algorithm="all_reduce=direct"))
    assert same_on_all(summed(contribution(rank)))
    assert dist.group.WORLD._get_backend(torch.device("cpu")).options.settings["algorithm"] == "all_reduce=direct"


@cgx_ranks(2)
def test_fsdp2_device_meshes_and_object_collectives_run_on_it(rank, world):
    found = []
    for hooked_too in (False, True):
        torch.manual_seed(7)
        model = fully_shard(Model(), mesh=init_device_mesh("cpu", (world,)))
        if hooked_too:
            compression.apply_fsdp2(
                model, compression.CompressionState(Compression("maxmin:8", min_elements=64), model)
            )
        model(torch.full((4, 48), float(rank + 1))).square().sum().backward()
        found.append({name: p.grad.full_tensor() for name, p in model.named_parameters()})
    assert 0 < error(found[1]["up.weight"], found[0]["up.weight"]) < 0.03
    objects = [None] * world
    dist.all_gather_object(objects, {"rank": rank})
    assert objects == [{"rank": other} for other in range(world)]


@cgx_ranks(2)
def test_ranks_whose_variables_differ_are_both_named(rank, world):
    os.environ[BITS] = str(4 + rank)
    with pytest.raises(dist.DistError) as caught:
        dist.all_reduce(contribution(rank))
    assert "rank 0 with maxmin:4," in str(caught.value) and "rank 1 with maxmin:5," in str(caught.value)


WRONG_AT_CALLS = [
    (BITS, "four", "from 1 to 32"),
    (BITS, "0", "from 1 to 32"),
    (BITS, "-4", "from 1 to 32"),
    (BITS, "33", "from 1 to 32"),
    (BITS, "4.0", "from 1 to 32"),
    (BUCKET, "0", "a number of elements"),
    (BUCKET, "7", "a multiple of 8 from 8 to 8192"),
    (BUCKET, "16384", "a multiple of 8 from 8 to 8192"),
    (BUCKET, "big", "a number of elements"),
    (SKIP, "yes", "0 or 1"),
]
WRONG_AT_GROUPS = [
    (MINIMAL, "-1", "at least 0"),
    ("CGX_FUSION_BUFFER_SIZE_MB", "64MB", "a size in MiB"),
    ("CGX_COMPRESSION_FAKE_RATIO", "half", "a number of at least 0"),
    ("CGX_COMPRESSION_FAKE_RATIO", "nan", "a number of at least 0"),
    ("CGX_INNER_COMMUNICATOR_TYPE", "shm", "one of MPI, SHM, NCCL"),
    ("CGX_CROSS_COMMUNICATOR_TYPE", "TCP", "one of MPI, SHM, NCCL"),
    ("CGX_INNER_REDUCTION_TYPE", "ring", "one of SRA, Ring"),
    ("CGX_CROSS_REDUCTION_TYPE", "Tree", "one of SRA, Ring"),
    ("CGX_INTRA_BROADCAST", "on", "0 or 1"),
    ("CGX_INTRA_COMPRESS", "off", "0 or 1"),
    ("CGX_REMOTE_BUF_COMPRESSION", "x", "0 or 1"),
    ("CGX_DEBUG_ALL_TO_ALL_REDUCTION", "x", "0 or 1"),
    ("CGX_DEBUG_DUMMY_COMPRESSION", "x", "0 or 1"),
    ("COMMUNICATOR_TYPE", "RDMA", "one of MPI, SHM, NCCL, P2P"),
]


@on_ranks(1, init=False)
def test_a_wrong_variable_is_named_when_a_group_is_made(rank, world):
    for name, value, expected in WRONG_AT_CALLS + WRONG_AT_GROUPS:
        os.environ[name] = value
        with pytest.raises(ValueError) as caught:
            init_group("cgx")
        assert str(caught.value).startswith(f"{name} is ") and value in str(caught.value), caught.value
        assert expected in str(caught.value), caught.value
        del os.environ[name]
    init_group("cgx")
    dist.destroy_process_group()


@cgx_ranks(2)
def test_a_wrong_variable_is_named_when_a_call_is_made(rank, world):
    model = DistributedDataParallel(nn.Linear(48, 48))
    for name, value, expected in WRONG_AT_CALLS:
        os.environ[BITS] = "4"
        os.environ[name] = value
        with pytest.raises(ValueError, match=f"^{name} is .*{expected}"):
            dist.all_reduce(torch.ones(100))
        del os.environ[name]
    os.environ[BITS] = "four"
    with pytest.raises(Exception, match=f"{BITS} is 'four'"):
        model(torch.ones(2, 48)).sum().backward()


def warned(**env):
    """Returns the warnings of creating a group with these variables, and the all-reduced contribution."""
    os.environ.update(env)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        init_group("cgx")
    tensor = summed(contribution(dist.get_rank()))
    dist.destroy_process_group()
    for name in env:
        del os.environ[name]
    return [str(warning.message) for warning in caught], tensor


@on_ranks(2, init=False, env={BITS: "4"})
def test_variables_that_mean_nothing_here_are_a_warning_and_never_wrong_sums(rank, world):
    said, compressed = warned()
    assert said == [] and 0.01 < error(compressed, exact_sum(world)) < 0.3
    said, tensor = warned(
        CGX_INNER_COMMUNICATOR_TYPE="SHM",
        CGX_INNER_REDUCTION_TYPE="SRA",
        CGX_INTRA_COMPRESS="1",
        CGX_FUSION_BUFFER_SIZE_MB="1",
        COMMUNICATOR_TYPE="SHM",
    )
    assert said == [] and torch.equal(tensor, compressed)
    said, tensor = warned(
        CGX_INNER_COMMUNICATOR_TYPE="MPI",
        CGX_CROSS_COMMUNICATOR_TYPE="NCCL",
        CGX_CROSS_REDUCTION_TYPE="SRA",
        CGX_INTRA_BROADCAST="0",
        CGX_REMOTE_BUF_COMPRESSION="1",
        COMMUNICATOR_TYPE="P2P",
    )
    assert torch.equal(tensor, compressed)
    assert len(said) == (1 if rank == 0 else 0)
    for name in (
        "INNER_COMMUNICATOR_TYPE=MPI",
        "CROSS_COMMUNICATOR_TYPE=NCCL",
        "COMPRESSION=1",
        " COMMUNICATOR_TYPE=P2P",
    ):
        assert rank != 0 or name in said[0]
    rows = {
        "CGX_COMPRESSION_FAKE_RATIO": ("0.5", "wrong results on purpose"),
        "CGX_DEBUG_ALL_TO_ALL_REDUCTION": ("1", "ACCL_ALGORITHM=all_reduce=direct"),
        "CGX_COMPRESSION_QUANTISATION_BITS": ("8", f"did you mean {BITS}"),
        "CGX_REMOTE_BUF_COMPRESSION": ("1", "has no effect here"),
    }
    for name, (value, part) in rows.items():
        said, tensor = warned(**{name: value})
        assert torch.equal(tensor, compressed), name
        assert rank != 0 or (len(said) == 1 and name in said[0] and part in said[0]), said
    said, tensor = warned(CGX_DEBUG_DUMMY_COMPRESSION="1")
    assert error(tensor, exact_sum(world)) < 1e-6
    assert rank != 0 or "nothing is compressed" in said[0]


@on_ranks(2, init=False, env={BITS: "4", "CGX_INTRA_COMPRESS": "0"})
def test_without_compression_inside_hosts_a_group_on_one_host_is_exact(rank, world):
    init_group("cgx")
    assert error(summed(contribution(rank)), exact_sum(world)) < 1e-6
    model = DistributedDataParallel(nn.Linear(48, 48))
    state = cgx.CGXState(None, compression_params={"bits": 2})
    model.register_comm_hook(state, cgx.cgx_hook)
    model(torch.ones(2, 48)).sum().backward()
    assert state.traffic.ratio == 1.0


@on_ranks(4, init=False, env={BITS: "4", "ACCL_ALGORITHM": "all_reduce=two_level"})
@pytest.mark.parametrize("inside", ["0", "1"])
def test_inside_hosts_sums_are_exact_or_compressed_as_the_variable_says(rank, world, inside):
    os.environ["ACCL_HOST_ID"] = "ab"[rank // 2]
    os.environ["CGX_INTRA_COMPRESS"] = inside
    init_group("cgx")
    result = summed(contribution(rank))
    other = dist.new_group(backend="accl")
    codec = "maxmin:4,bucket=512,meta=float32,rounding=nearest"
    expected = contribution(rank)
    settings = Compression(codec, inner=codec if inside == "1" else "raw")
    compression.all_reduce_quantized(expected, group=other, compression=settings)
    assert same_on_all(result) and torch.equal(result, expected)


@on_ranks(3, init=False, env={BITS: "4", "CGX_INNER_REDUCTION_TYPE": "Ring"})
def test_a_ring_is_taken_where_it_is_asked_for(rank, world):
    def algorithm():
        backend = dist.group.WORLD._get_backend(torch.device("cpu"))
        return backend.algorithm_of("all_reduce", [], [torch.empty(10**6)], dist.ReduceOp.SUM, 0)

    init_group("cgx")
    assert algorithm() == "ring"
    result = summed(contribution(rank))
    assert same_on_all(result) and 0.01 < error(result, exact_sum(world)) < 0.5
    dist.destroy_process_group()
    init_group("cgx", pg_options=torch_accl.Options(algorithm="all_reduce=direct"))
    assert algorithm() == "direct"


# Registered layers.


def refused(match, function, *arguments):
    with pytest.raises(ValueError, match=match):
        function(*arguments)


def test_layers_are_registered_in_order_and_every_setter_reads_back():
    cgx.reset()
    refused("bucket_idx is 1, and 0 buckets are registered; expected 0", cgx.register_layer, 1, 0, 10, 4, 64)
    refused("layer_idx is 1, and 0 layers are of bucket 0|layer_idx is 1", cgx.register_layer, 0, 1, 10, 4, 64)
    cgx.register_layer(0, 0, 100, 4, 64)
    cgx.register_layer(0, 1, 50, 32, 1024)
    cgx.register_layer(1, 0, 7, 0, 512)
    layer = cgx.Layer
    assert cgx.registered().layers == ((layer(100, 4, 64), layer(50, 32, 1024)), (layer(7, None, 512),))
    refused("layer 1 of bucket 0 is already registered; change it with", cgx.register_layer, 0, 1, 50, 4, 64)
    cgx.set_quantization_bits(0, 1, 8)
    assert cgx.registered().layers[0] == (layer(100, 4, 64), layer(50, 8, 1024))
    cgx.set_quantization_bucket_size(0, 1, 128)
    assert cgx.registered().layers[0] == (layer(100, 4, 64), layer(50, 8, 128))
    cgx.set_quantization_bits(1, 0, 2)
    cgx.set_quantization_bits(0, 0, 0)
    assert cgx.registered().layers == ((layer(100, None, 64), layer(50, 8, 128)), (layer(7, 2, 512),))
    before = cgx.registered()
    for wrong in ("four", 4.0, True, 33, None):
        refused("bits is .*; expected 1 to 8, 9 to 32", cgx.set_quantization_bits, 0, 0, wrong)
        refused("bits is", cgx.register_layer, 0, 2, 10, wrong, 64)
    for wrong in (0, 7, 100, 16384, -8, "64", True):
        refused("bucket_size is .*; expected", cgx.set_quantization_bucket_size, 0, 0, wrong)
        refused("bucket_size is", cgx.register_layer, 0, 2, 10, 4, wrong)
    for wrong in (0, -1, 1.0, "10"):
        refused("numel is .*; expected a number of at least 1", cgx.register_layer, 0, 2, wrong, 4, 64)
    refused("bucket_idx is -1", cgx.register_layer, -1, 0, 10, 4, 64)
    refused("layer_idx is '0'", cgx.register_layer, 0, "0", 10, 4, 64)
    refused(
        "there is no layer 2 of bucket 0: register it with register_layer first", cgx.set_quantization_bits, 0, 2, 4
    )
    refused("there is no layer 0 of bucket 5", cgx.set_quantization_bucket_size, 5, 0, 64)
    refused("bucket_idx is -1", cgx.set_quantization_bits, -1, 0, 4)
    assert cgx.registered() == before
    cgx.reset()
    assert cgx.registered() == cgx.Registered((), (), ())


# Only `direct` promises the same bits as separate calls: other algorithms depend on the size of the whole call.
@cgx_ranks(2, 3, CGX_COMPRESSION_QUANTIZATION_BITS="8", ACCL_ALGORITHM="all_reduce=direct")
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_registered_layers_have_bits_and_buckets_of_their_own(rank, world, dtype):
    other = dist.new_group(backend="accl")
    counts = (1000, 40, 2000, 16, 3000)
    for index, (count, bits) in enumerate(zip(counts, (2, 32, 0, 4, 4), strict=True)):
        cgx.register_layer(0, index, count, bits, 64 if index == 4 else 512)
    tensor = contribution(rank, sum(counts)).to(dtype)
    kind = str(dtype).removeprefix("torch.")
    codecs = (f"maxmin:2,meta={kind}", "raw", f"maxmin:8,meta={kind}", "raw", f"maxmin:4,bucket=64,meta={kind}")
    codecs = [codec if codec == "raw" else f"{codec},rounding=nearest" for codec in codecs]

    def expected():
        return [encoded_with(codec, part, other) for codec, part in zip(codecs, tensor.split(counts), strict=True)]

    result = summed(tensor)
    for part, wanted in zip(result.split(counts), expected(), strict=True):
        assert torch.equal(part, wanted)
    assert same_on_all(result)
    # The future of an asynchronous call returns the whole tensor.
    work = dist.all_reduce(again := tensor.clone(), async_op=True)
    assert [whole.shape for whole in work.get_future().wait()] == [tensor.shape] and work.wait()
    assert work.is_completed() and torch.equal(again, result)
    cgx.set_quantization_bits(0, 0, 6)
    cgx.set_quantization_bucket_size(0, 0, 64)
    codecs[0] = f"maxmin:6,bucket=64,meta={kind},rounding=nearest"
    assert torch.equal(summed(tensor).split(counts)[0], expected()[0])
    # A tensor that is not a registered bucket is exact, however many elements it has.
    for count in (1000, 5003, 16, 10**5):
        foreign = contribution(rank, count).to(dtype)
        assert torch.equal(summed(foreign), summed(foreign, group=other))
    # A strided tensor cannot be cut into layers, so the same bucket is exact in it.
    strided = torch.zeros(sum(counts), 2, dtype=dtype)
    strided[:, 0] = tensor
    dist.all_reduce(strided[:, 0])
    assert torch.equal(strided[:, 0], summed(tensor, group=other))


@cgx_ranks(2)
def test_a_size_that_two_buckets_have_is_exact_unless_they_are_alike(rank, world):
    for bucket, bits in ((0, 2), (1, 2), (2, 2), (3, 4)):
        count = 1000 if bucket < 2 else 3000
        cgx.register_layer(bucket, 0, count, bits, 512)
        cgx.register_layer(bucket, 1, count, 2, 512)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert 0.1 < error(summed(contribution(rank, 2000)), exact_sum(world, 2000)) < 2
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(3):
            assert error(summed(contribution(rank, 6000)), exact_sum(world, 6000)) < 1e-6
    said = [str(warning.message) for warning in caught]
    assert len(said) == (1 if rank == 0 else 0)
    assert rank != 0 or "2 registered buckets are of this size (6000 elements) but have different layers" in said[0]


# Models registered by name.


def made(seed=7, **options):
    torch.manual_seed(seed)
    return DistributedDataParallel(Model(), **options)


def hooked(seed=7, bits=4, bucket_size=64, layer_min_size=1024, **options):
    model = made(seed, **options)
    state = cgx.CGXState(None, layer_min_size, {"bits": bits, "bucket_size": bucket_size})
    model.register_comm_hook(state, cgx.cgx_hook)
    return model, state


def step(rank, model, number=0):
    """Returns the gradients of one step, by name."""
    generator = torch.Generator().manual_seed(1000 * rank + number)
    inputs, targets = torch.randn(8, 48, generator=generator), torch.randn(8, 5, generator=generator)
    model.zero_grad()
    (model(inputs) - targets).square().mean().backward()
    return {name.removeprefix("module."): p.grad.clone() for name, p in model.named_parameters()}


def coarse(gradients, exact):
    """Returns the names of the gradients that were compressed, which differ from the exact ones."""
    return {name for name, gradient in gradients.items() if not torch.equal(gradient, exact[name])}


def train(rank, model, steps=4):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for number in range(steps):
        step(rank, model, number)
        optimizer.step()
    return [p.detach().clone() for p in model.parameters()]


@cgx_ranks(2, 3)
def test_a_model_without_hook_is_compressed_by_variables(rank, world):
    exact = step(rank, made())
    os.environ[BITS] = "4"
    gradients = step(rank, made())
    assert coarse(gradients, exact) == set(exact) and same_on_all(*gradients.values())
    assert all(error(gradients[name], exact[name]) < 0.5 for name in ("up.weight", "down.weight", "head.weight"))


def weights_in_order(module):
    return [(name, parameter.numel()) for name, parameter in module.named_parameters()]


@cgx_ranks(2, CGX_COMPRESSION_QUANTIZATION_BITS="4")
def test_registered_models_are_compressed_and_other_calls_are_not(rank, world):
    other = dist.new_group(backend="accl")
    torch.manual_seed(7)
    exact = step(rank, DistributedDataParallel(Model(), process_group=other))
    model = made(bucket_cap_mb=0.01)
    cgx.register_model(weights_in_order(model.module))
    cgx.register_model(weights_in_order(model.module))
    assert cgx.registered().names == tuple(name for name, _ in weights_in_order(model.module))
    # DistributedDataParallel rebuilds its buckets after the first step.
    for _ in range(3):
        gradients = step(rank, model)
        assert coarse(gradients, exact) >= {"up.weight", "down.weight"}
    for count in (1000, 5003, 10**5):
        assert torch.equal(summed(contribution(rank, count)), summed(contribution(rank, count), group=other))
    # Without a hook, a bucket with an excluded layer cannot be taken apart; the other buckets are compressed.
    cgx.exclude_layer("head.bias")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        gradients = step(rank, model)
    assert "up.weight" in (found := coarse(gradients, exact)) and not found & {"head.weight", "head.bias"}
    said = [str(warning.message) for warning in caught]
    assert rank != 0 or (len(said) == 1 and "gradient of head.bias, which is excluded" in said[0])
    with pytest.warns(UserWarning, match=r"exclude_layer\('haed'\) matches no registered layer"):
        cgx.exclude_layer("haed")


@cgx_ranks(2, CGX_COMPRESSION_QUANTIZATION_BITS="4")
def test_names_that_are_excluded_without_a_model_leave_everything_exact(rank, world):
    cgx.exclude_layer("norm")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert error(summed(contribution(rank)), exact_sum(world)) < 1e-6
    assert rank != 0 or "no layer names are registered" in str(caught[0].message)
    model, _ = hooked()
    with pytest.raises(
        RuntimeError, match=r"exclude_layer was called with 'norm', .* call register_model\(model\) first"
    ):
        step(rank, model)


def test_what_is_no_model_is_refused():
    cgx.reset()
    refused("expected a model, or pairs of a name and a number of elements, not 3", cgx.register_model, [3])
    refused("number of elements of 'a' is 0; expected", cgx.register_model, [("a", 0)])
    refused("number of elements of 'a' is '7'", cgx.register_model, [("a", "7")])
    refused("register_model: expected at least one layer, got none", cgx.register_model, [])
    refused("expected a part of a name, not ''", cgx.exclude_layer, "")
    refused("expected a part of a name, not 3", cgx.exclude_layer, 3)
    assert cgx.registered() == cgx.Registered((), (), ())


@cgx_ranks(2)
def test_with_a_hook_excluded_layers_are_exact_by_name_or_by_size(rank, world):
    exact = step(rank, made())
    model, _ = hooked()
    cgx.register_model(model)
    cgx.exclude_layer("down")
    assert coarse(step(rank, model), exact) == {"up.weight"}
    cgx.reset()
    # Both weights have equally many elements. Sizes alone do not identify the excluded one, so neither is compressed.
    cgx.register_model(weights_in_order(model.module))
    cgx.exclude_layer("down")
    assert coarse(step(rank, model), exact) == set()
    cgx.reset()
    cgx.register_model([(name, p) for name, p in model.module.named_parameters()])
    cgx.exclude_layer("down")
    assert coarse(step(rank, model), exact) == {"up.weight"}


# The hook.


def test_the_names_of_cgx_utils_are_there():
    from torch_accl.compat import cgx_utils

    assert cgx_utils.CGXState is cgx.CGXState and cgx_utils.cgx_hook is cgx.cgx_hook


@cgx_ranks(1, 2, 3)
@pytest.mark.parametrize("options", [{}, {"bucket_cap_mb": 0.01}, {"static_graph": True}], ids=str)
def test_the_hook_trains_alike_on_all_ranks_and_near_plain_training(rank, world, options):
    exact = train(rank, made(**options))
    model, state = hooked(bits=8, **options)
    weights = train(rank, model)
    assert same_on_all(*weights) and state.step == 4
    assert all(torch.allclose(a, b, atol=2e-3) for a, b in zip(weights, exact, strict=True))
    assert any(not torch.equal(a, b) for a, b in zip(weights, exact, strict=True)) == (world > 1)
    assert state.traffic.ratio > 2.5


@cgx_ranks(2)
def test_the_hook_compresses_large_matrices_from_the_first_step_on(rank, world):
    exact = step(rank, made())
    assert coarse(step(rank, hooked()[0]), exact) == {"up.weight", "down.weight"}
    assert coarse(step(rank, hooked(layer_min_size=50)[0]), exact) == {"up.weight", "down.weight", "head.weight"}
    assert coarse(step(rank, hooked(layer_min_size=5000)[0]), exact) == set()
    assert coarse(step(rank, hooked(bits=32)[0]), exact) == set()
    # Bits come from the environment, and are 32 without it. The default bucket size of a state is 1024.
    model = made()
    state = cgx.CGXState()
    model.register_comm_hook(state, cgx.cgx_hook)
    assert coarse(step(rank, model), exact) == set()
    os.environ[BITS] = "8"
    assert coarse(step(rank, model), exact) == {"up.weight", "down.weight"}
    assert {layer.bucket_size for layer in state.layers[0]} == {1024}
    os.environ[BUCKET] = "128"
    assert {layer.bucket_size for layer in state.layers[0]} == {128}
    os.environ[MINIMAL] = "4609"
    torch.manual_seed(7)
    model = DistributedDataParallel(Model(), process_group=dist.new_group(backend="accl"))
    model.register_comm_hook(cgx.CGXState(model.process_group), cgx.cgx_hook)
    assert coarse(step(rank, model), exact) == set()


@cgx_ranks(2)
def test_setters_change_what_the_hook_does_and_read_back(rank, world):
    exact = step(rank, made())
    model, state = hooked(bits=8, bucket_cap_mb=0.01)
    with pytest.raises(ValueError, match="there is no layer 0 of bucket 0: layers are known after the first backward"):
        cgx.set_quantization_bits(0, 0, 4)
    before = step(rank, model)
    assert coarse(before, exact) == {"up.weight", "down.weight"}

    def place(name):
        wanted = dict(model.module.named_parameters())[name]
        return next(
            (index, position)
            for index, parameters in state._buckets.items()
            for position, parameter in enumerate(parameters)
            if parameter is wanted
        )

    def layer(name):
        index, position = place(name)
        return state.layers[index][position]

    assert layer("up.weight") == cgx.Layer(4608, 8, 64) and layer("up.bias").bits == 32
    cgx.set_quantization_bits(*place("up.weight"), 2)
    cgx.set_quantization_bucket_size(*place("down.weight"), 1024)
    cgx.set_quantization_bits(*place("up.bias"), 4)
    # DistributedDataParallel rebuilds its buckets now; the settings of a gradient stay with it.
    for _ in range(3):
        after = step(rank, model)
    assert layer("up.weight") == cgx.Layer(4608, 2, 64)
    assert layer("down.weight") == cgx.Layer(4608, 8, 1024) and layer("up.bias").bits == 4
    assert error(after["up.weight"], exact["up.weight"]) > 10 * error(before["up.weight"], exact["up.weight"])
    assert error(after["down.weight"], exact["down.weight"]) > error(before["down.weight"], exact["down.weight"])
    assert coarse(after, exact) == {"up.weight", "down.weight", "up.bias"}
    state.set_quantization_bits(*place("down.weight"), 32)
    assert coarse(step(rank, model), exact) == {"up.weight", "up.bias"}
    refused("there is no layer 9 of bucket 0: layer counts by bucket are", state.set_quantization_bits, 0, 9, 4)
    refused("bits is 'four'", state.set_quantization_bits, 0, 0, "four")
    refused("bucket_size is 7; expected", state.set_quantization_bucket_size, 0, 0, 7)


@cgx_ranks(2)
def test_registered_layers_count_in_the_hook_where_sizes_fit(rank, world):
    exact = step(rank, made())
    model, state = hooked(bits=8)
    # After the first step, gradients are in a different order.
    for _ in range(2):
        step(rank, model)
    for index, row in enumerate(state.layers[0]):
        cgx.register_layer(0, index, row.numel, 4 if row.numel == 240 else 32, 64)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(3):
            assert coarse(step(rank, model), exact) == {"head.weight"}
    # The table describes other layers for the only bucket than it has.
    cgx.reset()
    cgx.register_layer(0, 0, 10, 4, 64)
    with pytest.warns(UserWarning, match=r"layers registered for bucket 0 have \[10\] elements"):
        assert coarse(step(rank, model), exact) == {"up.weight", "down.weight"}


@cgx_ranks(2, CGX_COMPRESSION_QUANTIZATION_BITS="2")
def test_two_models_have_a_state_each_and_foreign_calls_stay_exact(rank, world):
    other = dist.new_group(backend="accl")
    alone = [train(rank, hooked(seed, bits)[0]) for seed, bits in ((1, 4), (2, 8))]
    pairs = [hooked(seed, bits) for seed, bits in ((1, 4), (2, 8))]
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.05) for model, _ in pairs]
    subgroup = dist.new_group()
    for number in range(4):
        for (model, _), optimizer in zip(pairs, optimizers, strict=True):
            step(rank, model, number)
            optimizer.step()
            # Metrics with as many elements as a bucket, in the default group and in a group of their own.
            metrics = contribution(rank, sum(p.numel() for p in model.parameters()))
            assert torch.equal(summed(metrics), summed(metrics, group=other))
            assert torch.equal(summed(metrics, group=subgroup), summed(metrics, group=other))
    for (model, _), weights in zip(pairs, alone, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(model.parameters(), weights, strict=True))
    with pytest.raises(ValueError, match="there are [0-9]+ states; call the method of one of them"):
        cgx.set_quantization_bits(0, 0, 4)
    pairs[0][1].set_quantization_bits(0, 0, 3)
    assert pairs[0][1].layers[0][0].bits == 3 and pairs[1][1].layers[0][0].bits != 3
    # After a reset nothing is registered, so calls are compressed again.
    cgx.reset()
    assert not torch.equal(summed(metrics), summed(metrics, group=other))


@cgx_ranks(1)
def test_a_wrong_state_is_refused(rank, world):
    for params, match in (
        ({"bits": "four"}, "bits is 'four'"),
        ({"bits": 33}, "bits is 33"),
        ({"bucket_size": 7}, "bucket_size is 7; expected"),
        ({"buckets": 64}, "compression_params has 'buckets'; expected bits and bucket_size"),
    ):
        with pytest.raises(ValueError, match=match):
            cgx.CGXState(None, compression_params=params)
    with pytest.raises(ValueError, match="layer_min_size is -1"):
        cgx.CGXState(None, -1)
    other = gloo_group()
    with pytest.raises(RuntimeError, match="this group has gloo"):
        cgx.CGXState(other)
    # A state whose creation failed does not change how calls are compressed.
    assert not compression.CompressionState.is_any_made


# Without the `cgx` module.

PLAIN = """
import torch, torch.distributed as dist
dist.init_process_group("accl")
tensor = torch.randn(5000, generator=torch.Generator().manual_seed(0))
expected = 2 * tensor
dist.all_reduce(tensor)
dist.barrier(dist.new_group())
dist.barrier()
print(torch.equal(tensor, expected))
dist.destroy_process_group()
"""


@pytest.mark.slow
def test_without_the_facade_variables_of_cgx_are_one_warning_of_rank_0():
    scripts = run_script(PLAIN, 2, env={BITS: "2", "CGX_NONSENSE": "x"})
    for script in scripts:
        assert script.exitcode == 0 and script.stdout == "True\n", script.stderr
    assert scripts[0].stderr.count("variables of torch_cgx have no effect") == 1, scripts[0].stderr
    assert f"{BITS}, CGX_NONSENSE: " in scripts[0].stderr
    assert "from torch_accl.compat import cgx` and init_process_group('cgx')" in scripts[0].stderr
    assert "torch_cgx" not in scripts[1].stderr


@pytest.mark.slow
def test_a_script_runs_after_changing_the_import():
    code = PLAIN.replace("import torch, ", "from torch_accl.compat import cgx as torch_cgx\nimport torch, ")
    scripts = run_script(code.replace('"accl"', '"cgx"'), 2, env={BITS: "2"})
    for script in scripts:
        assert script.exitcode == 0 and script.stdout == "False\n" and "torch_cgx" not in script.stderr, script.stderr


@on_ranks(2, fresh=True)
def test_the_hook_refuses_the_reducer_in_python_with_the_remedy(rank, world):
    import torch._dynamo

    with torch._dynamo.config.patch(optimize_ddp="python_reducer"):
        model = DistributedDataParallel(torch.nn.Linear(40, 40))
        model.register_comm_hook(cgx.CGXState(None, compression_params={"bits": 8}), cgx.cgx_hook)
        with pytest.raises(NotImplementedError, match="use torch_accl.compression.ddp_hook"):
            model(torch.ones(3, 40)).sum().backward()
