"""Encoded calls whose tensors lie on a GPU: kernels encode and decode them there, with the bits of the CPU.

The stand-in's streams and memory are lent to a stand-in of a GPU's driver, whose compiler is g++. So these are the product's
kernels, and everything between a call and them, without a GPU.
"""

import ctypes
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from support import init_group, on_ranks, standin
from support.training import contribution
from torch_accl import _native, compression
from torch_accl.compression.extension import codecs_of, encoded

ORDERS = pytest.mark.parametrize("order", standin.ORDERS)

pytestmark = pytest.mark.skipif(
    torch.__version__ < "2.15", reason="the stand-in is written for the interfaces of torch 2.15"
)

# Flags with which kernels compute other bits, as they may with a compiler that ignores options.
WRONG = "-ffast-math"
# The CPU encodes small blocking calls.
NOT_EAGER = {"ACCL_EAGER_BYTES": "0"}

CODECS = ("maxmin:4", "maxmin:3,bucket=64,rounding=stochastic", "bf16", "e4m3", "sign", "topk:4", "hadamard:2")


@pytest.fixture(autouse=True, scope="module")
def modules():
    """Compiles the stand-ins once."""
    standin.build()
    standin.build_driver()
    standin.build_driver(WRONG)


def start(rank, order="random", flags="", **options):
    module = standin.register(order, seed=rank)
    standin.lend_driver(module, flags)
    init_group(None, **options)
    return module


def quantized(device, codec, dtype, wait):
    """Makes each call that can be compressed. Returns the results."""
    rank, world = dist.get_rank(), dist.get_world_size()
    total = contribution(rank).to(dtype).to(device)
    row = contribution(rank, 1200 * world, seed=1).to(dtype).to(device)
    part, gathered, exchanged = row.new_empty(1200), torch.empty_like(row), torch.empty_like(row)
    named = {"compression": codec, "async_op": wait}
    works = [compression.all_reduce_quantized(total, dist.ReduceOp.AVG, step=1, **named)]
    works.append(compression.reduce_scatter_quantized(part, row, step=2, **named))
    works.append(compression.all_to_all_quantized(exchanged, row, step=3, **named))
    for work in works:
        if work is not None:
            work.wait()
    compression.all_gather_quantized(gathered, part, step=4, compression=codec)
    return [tensor.cpu() for tensor in (total, part, exchanged, gathered)]


@ORDERS
@on_ranks(2, 3, fresh=True, init=False, env=NOT_EAGER)
def test_kernels_give_the_bits_of_the_cpu(rank, world, order):
    start(rank, order)
    for number, codec in enumerate(CODECS):
        dtype = (torch.float32, torch.bfloat16, torch.float16)[number % 3]
        host = quantized("cpu", codec, dtype, number % 2 == 0)
        before = standin.driver_counts()
        there = quantized("standin", codec, dtype, number % 2 == 0)
        assert standin.driver_counts().launches > before.launches, f"{codec}: no kernel ran"
        for one, other in zip(host, there, strict=True):
            assert one.view(torch.uint8).equal(other.view(torch.uint8)), f"{codec} {dtype}"


@ORDERS
@on_ranks(2, 3, fresh=True, init=False, env=NOT_EAGER)
def test_the_check_of_a_new_codec_does_not_change_calls_in_flight(rank, world, order):
    """It used their memory for sums, so that whole tiles of their results were wrong."""
    start(rank, order)
    codecs = ("maxmin:4", "maxmin:8", "maxmin:2", "maxmin:3", "e4m3", "hadamard:2", "maxmin:5", "maxmin:6")

    def program(device):
        tensors = [contribution(rank, 200_000, seed=number).to(device) for number in range(len(codecs))]
        works = [
            compression.all_reduce_quantized(tensor, async_op=True, compression=codec, key=codec, step=1)
            for tensor, codec in zip(tensors, codecs, strict=True)
        ]
        for work in works:
            work.wait()
        return [tensor.cpu() for tensor in tensors]

    for codec, one, other in zip(codecs, program("cpu"), program("standin"), strict=True):
        assert one.equal(other), codec


@on_ranks(2, fresh=True, init=False, env=NOT_EAGER)
def test_ranks_on_the_host_and_on_a_gpu_join_one_call(rank, world):
    start(rank)
    device = "standin" if rank == 0 else "cpu"
    host = quantized("cpu", "maxmin:4", torch.float32, False)
    mixed = quantized(device, "maxmin:4", torch.float32, False)
    assert all(one.equal(other) for one, other in zip(host, mixed, strict=True))


@on_ranks(2, fresh=True, init=False, env=NOT_EAGER)
def test_results_follow_the_work_of_the_current_stream(rank, world):
    module = start(rank, "late")
    tensor = torch.zeros(300_000, device="standin")
    # The first call waits for the device, to load kernels.
    compression.all_reduce_quantized(tensor, compression="maxmin:8")
    module.compute(20)
    tensor.fill_(float(rank + 1))
    compression.all_reduce_quantized(tensor, compression="maxmin:8")
    tensor.mul_(2)
    assert tensor.cpu().eq(6).all()


@on_ranks(2, fresh=True, init=False, env=NOT_EAGER)
@pytest.mark.parametrize("order", ["late", "random"])
def test_kernels_behind_a_blocked_stream_do_not_hold_up_the_call_that_ends_the_block(rank, world, order):
    start(rank, order, timeout=timedelta(seconds=20))
    store = dist.distributed_c10d._get_default_store()
    tensor, result = torch.full((100_000,), float(rank + 1), device="standin"), torch.zeros(100_000, device="standin")
    named = {"compression": "maxmin:8", "async_op": True}
    compression.all_reduce_quantized(tensor.clone(), compression="maxmin:8")
    dist.barrier()
    if rank == 1:
        store.wait(["blocked"])
    work = compression.all_reduce_quantized(tensor, **named)
    work.block_current_stream()
    result.copy_(tensor)
    second = compression.all_reduce_quantized(result, **named)
    if rank == 0:
        # The kernels of the second call are due, and its stream is blocked until the other rank joins the first call.
        time.sleep(0.2)
        assert not torch.accelerator.current_stream().query()
        store.set("blocked", "")
    second.wait()
    assert tensor.cpu().eq(3).all() and result.cpu().eq(6).all()


@on_ranks(2, fresh=True, init=False, env=NOT_EAGER)
def test_only_encoded_bytes_are_pinned(rank, world):
    start(rank, "early")
    tensor = torch.randn(1 << 22, device="standin")
    compression.all_reduce_quantized(tensor, compression="maxmin:4")
    backend = dist.group.WORLD._get_backend(torch.device("standin"))
    process = backend.snapshot()["process"]
    # Half of the tensor is sent and half received, in each of two phases; blocks are powers of two. A block of 1 MiB has figures.
    assert 0 < process["pinned_bytes"] + process["idle_pinned_bytes"] < 12 << 20


@on_ranks(2, fresh=True, init=False, env=NOT_EAGER)
def test_kernels_are_compiled_once(rank, world):
    start(rank)
    tensor = torch.randn(5000, device="standin")
    compression.all_reduce_quantized(tensor, compression="maxmin:4")
    compiles = standin.driver_counts().compiles
    assert compiles > 0
    for _ in range(3):
        compression.all_reduce_quantized(tensor, compression="maxmin:4")
    assert standin.driver_counts().compiles == compiles


@on_ranks(2, fresh=True, init=False, env=NOT_EAGER)
def test_a_gpu_without_a_compiler_leaves_the_codecs_to_the_cpu(rank, world):
    module = start(rank)
    library = ctypes.CDLL(str(standin.build_driver()))
    library.accl_standin_fail(b"nvrtcCompileProgram", 0, 6)
    host = quantized("cpu", "maxmin:4", torch.float32, False)
    there = quantized("standin", "maxmin:4", torch.float32, False)
    assert all(one.equal(other) for one, other in zip(host, there, strict=True))
    assert module.counts()["pageable"] == 0


@on_ranks(2, fresh=True, init=False, env=NOT_EAGER)
def test_a_gpu_with_other_addresses_of_pinned_memory_leaves_the_codecs_to_the_cpu(rank, world):
    start(rank)
    ctypes.CDLL(str(standin.build_driver())).accl_standin_host_pointers(0)
    host = quantized("cpu", "maxmin:4", torch.float32, False)
    there = quantized("standin", "maxmin:4", torch.float32, False)
    assert standin.driver_counts().launches == 0
    assert all(one.equal(other) for one, other in zip(host, there, strict=True))


@on_ranks(2, fresh=True, init=False, env=NOT_EAGER)
def test_a_kernel_that_the_driver_refuses_fails_the_call_on_all_ranks(rank, world):
    start(rank)
    tensor = torch.randn(5000, device="standin")
    compression.all_reduce_quantized(tensor, compression="maxmin:4")
    # Otherwise the failure could end the first call of a slower rank.
    dist.barrier()
    if rank == 0:
        ctypes.CDLL(str(standin.build_driver())).accl_standin_fail(b"cuLaunchKernel", 0, 719)
    with pytest.raises(dist.DistBackendError, match="cuLaunchKernel failed"):
        compression.all_reduce_quantized(tensor, compression="maxmin:4")


@on_ranks(2, fresh=True, init=False, env=NOT_EAGER)
def test_many_calls_whose_kernels_the_driver_refuses_lose_no_memory(rank, world):
    """Each lost memory for figures, of which there is enough for 127 launches. The device works again after each failure."""
    module = start(rank)
    driver = ctypes.CDLL(str(standin.build_driver()))
    settings = compression.Compression("maxmin:4", audit=4)
    tensor = torch.randn(5000, device="standin")
    compression.all_reduce_quantized(tensor, compression=settings)
    dist.barrier()
    standin.wait_until_idle(module)
    with standin.nothing_is_lost(module, but=("pinned_bytes", "pinned_in_use")):
        for number in range(140):
            group = dist.new_group()
            driver.accl_standin_fail(b"cuLaunchKernel", number % 4, 719)
            with pytest.raises(dist.DistBackendError, match="cuLaunchKernel failed"):
                compression.all_reduce_quantized(tensor, compression=settings, group=group)
            dist.barrier()
            dist.destroy_process_group(group)
    driver.accl_standin_fail(b"", 0, 0)
    compression.all_reduce_quantized(tensor, compression=settings)


@on_ranks(2, fresh=True, init=False, env=NOT_EAGER)
def test_kernels_that_give_other_bytes_than_the_cpu_are_not_used(rank, world):
    start(rank, flags=WRONG)
    host = quantized("cpu", "maxmin:4", torch.float32, False)
    there = quantized("standin", "maxmin:4", torch.float32, False)
    assert standin.driver_counts(WRONG).loads > 0, "no kernel was tried"
    assert all(one.equal(other) for one, other in zip(host, there, strict=True))
    before = standin.driver_counts(WRONG).calls
    again = quantized("standin", "maxmin:4", torch.float32, False)
    assert standin.driver_counts(WRONG).calls == before, "a kernel ran"
    assert all(one.equal(other) for one, other in zip(host, again, strict=True))


@ORDERS
@on_ranks(2, fresh=True, init=False, env=NOT_EAGER)
def test_launches_beyond_the_memory_for_figures_wait_for_others(rank, world, order):
    """A launch measures one tensor, and 127 launches have memory for their figures."""
    start(rank, order)
    count = 300

    def program(device):
        tensors = [contribution(rank, 500, seed=number) for number in range(count)]
        for tensor in tensors:
            tensor[7] = float("nan")
        tensors = [tensor.to(device) for tensor in tensors]
        stats = _native.ErrorStats(count)
        codecs = codecs_of(tuple(("maxmin:4,bucket=64",) * 3 + (number,) for number in range(count)))
        for step in range(2):
            with encoded(codecs, 1, step, None, stats, 4):
                dist.group.WORLD.allreduce_coalesced(tensors).wait()
        rows = [(row.calls, row.compared, row.error, row.square, row.not_finite) for row in stats.read()]
        return torch.cat([tensor.cpu() for tensor in tensors]), rows

    (host, figures), (there, ours) = program("cpu"), program("standin")
    assert standin.driver_counts().launches > 0, "no kernel ran"
    assert host.view(torch.int32).equal(there.view(torch.int32)) and figures == ours
    assert max(row[-1] for row in figures) > 0
