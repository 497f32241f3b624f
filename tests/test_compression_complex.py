"""Gradients of complex parameters in hooks: DistributedDataParallel passes a real buffer with twice as many
elements."""

import itertools

import pytest
import torch
import torch._dynamo  # imported once here: DistributedDataParallel loads it, which takes seconds in every rank
import torch.distributed as dist
from support import BACKEND, gloo_group, init_group, on_ranks
from support.training import error, same_on_all
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch_accl import Options, compression
from torch_accl.compat import cgx
from torch_accl.compression import Compression, Reproducible

pytestmark = pytest.mark.skipif(BACKEND != "accl", reason="about this package only")

COMPLEX = (torch.complex64, torch.complex128)


class Mixed(nn.Module):
    """A real layer between complex layers. Real and complex gradients are in separate buckets."""

    def __init__(self, dtype=torch.complex64):
        super().__init__()
        self.first = nn.Linear(16, 16, dtype=dtype)
        self.real = nn.Linear(32, 48)
        self.last = nn.Linear(24, 5, dtype=dtype)

    def forward(self, x):
        pairs = torch.view_as_real(self.first(x)).flatten(1).float()
        return self.last(torch.view_as_complex(self.real(pairs).view(-1, 24, 2)).to(x.dtype))


KINDS = {"alone": lambda dtype: nn.Linear(16, 16, dtype=dtype), "mixed": Mixed}

HOOKS = {
    **{
        codec: (lambda ddp, codec=codec: (compression.CompressionState(settings(codec), ddp), compression.ddp_hook))
        for codec in ("raw", "maxmin:2", "auto")
    },
    "cgx": lambda ddp: (cgx.CGXState(ddp.process_group, 64, {"bits": 2, "bucket_size": 64}), cgx.cgx_hook),
    "reproducible": lambda ddp: (Reproducible(bits=16), compression.reproducible_hook),
}


def settings(codec, **more):
    return Compression(codec, min_elements=64, error_feedback=codec == "maxmin:2", **more)


def made(kind, dtype):
    torch.manual_seed(7)
    return KINDS[kind](dtype)


def batch(rank, step, dtype):
    generator = torch.Generator().manual_seed(1000 * rank + step)
    return torch.randn(8, 16, generator=generator, dtype=torch.complex128).to(dtype)


def gradients(rank, model, dtype, steps=1):
    """Returns gradients by name, accumulated over `steps` steps.

    DistributedDataParallel rebuilds its buckets after the first step.
    """
    for step in range(steps):
        model(batch(rank, step, dtype)).abs().square().sum().backward()
    return {name: parameter.grad.clone() for name, parameter in model.named_parameters()}


def distance(found, wanted):
    return error(torch.view_as_real(found), torch.view_as_real(wanted)) if found.is_complex() else error(found, wanted)


@on_ranks(2, 3)
@pytest.mark.parametrize("hook", list(HOOKS))
def test_every_gradient_of_a_complex_parameter_is_reduced(rank, world, hook):
    for dtype, kind, view in itertools.product(COMPLEX, KINDS, (False, True)):
        if hook == "reproducible" and dtype == torch.complex128:
            continue
        exact = gradients(rank, DistributedDataParallel(made(kind, dtype), gradient_as_bucket_view=view), dtype, 2)
        ddp = DistributedDataParallel(made(kind, dtype), gradient_as_bucket_view=view)
        ddp.register_comm_hook(*HOOKS[hook](ddp))
        found = gradients(rank, ddp, dtype, 2)
        assert same_on_all(*found.values())
        # Gradients of complex parameters are exact, whatever the codec.
        coarse = {name for name, gradient in found.items() if distance(gradient, exact[name]) > 1e-3}
        may_be = {"module.real.weight"} if kind == "mixed" and hook in ("maxmin:2", "cgx", "auto") else set()
        assert coarse == may_be or (hook == "auto" and not coarse), (dtype, kind, view)


@on_ranks(2, init=False, env={"CGX_COMPRESSION_QUANTIZATION_BITS": "2", "CGX_COMPRESSION_BUCKET_SIZE": "64"})
def test_complex_gradients_without_a_hook_are_exact_in_groups_that_compress_all(rank, world):
    init_group("cgx")
    exact = gradients(
        rank,
        DistributedDataParallel(made("mixed", torch.complex64), process_group=gloo_group()),
        torch.complex64,
    )
    found = gradients(rank, DistributedDataParallel(made("mixed", torch.complex64)), torch.complex64)
    assert all((distance(found[name], exact[name]) > 1e-3) == ("real" in name) for name in found)
    dist.destroy_process_group()


@on_ranks(2, 3)
def test_complex_parameters_are_in_the_figures_as_what_they_are(rank, world):
    ddp = DistributedDataParallel(made("mixed", torch.complex64))
    state = compression.CompressionState(settings("maxmin:2"), ddp)
    ddp.register_comm_hook(state, compression.ddp_hook)
    gradients(rank, ddp, torch.complex64)
    assert state.traffic.raw == sum(parameter.nbytes for parameter in ddp.parameters())
    rows = {row.name: row.codec and row.codec.split(",")[0] for row in state.measures()}
    assert rows == {"real.weight": "maxmin:2", "real.bias": None}
    assert state.codec_of("first.weight") is None and state.codec_of("real.weight")


@on_ranks(2)
def test_buckets_of_complex_parameters_travel_in_calls_of_the_size_that_is_wanted(rank, world):
    exact = gradients(rank, DistributedDataParallel(made("mixed", torch.complex64)), torch.complex64)
    ddp = DistributedDataParallel(made("mixed", torch.complex64))
    # With this low limit each tensor has a call of its own.
    state = compression.CompressionState(settings("maxmin:2", fusion_bytes=64), ddp)
    ddp.register_comm_hook(state, compression.ddp_hook)
    found = gradients(rank, ddp, torch.complex64)
    assert all(distance(found[name], exact[name]) < 1e-6 for name in found if "real" not in name)


@on_ranks(2, 3)
def test_a_complex_gradient_by_itself_is_reduced(rank, world):
    # DistributedDataParallel's Python reducer passes gradients this way.
    for dtype in COMPLEX:
        model = nn.Linear(16, 16, dtype=dtype)
        state = compression.CompressionState(settings("maxmin:2"), model)
        mine = [batch(other, 0, dtype)[:, :1].expand(8, 16) * (1 + 1j) for other in range(world)]
        gradient = mine[rank].clone()
        compression.ddp_hook(state, (gradient, model.weight)).wait()
        torch.testing.assert_close(gradient, sum(mine) / world)


@on_ranks(2, 3)
def test_reproducible_sums_of_complex_numbers_have_the_same_bits_by_every_algorithm(rank, world):
    found = []
    for algorithm in ("ring", "direct", "recursive_doubling"):
        group = dist.new_group(pg_options=Options(algorithm=f"all_reduce={algorithm}"))
        for other in (False, True):
            tensor = batch(rank, 1, torch.complex64)
            given = tensor.t() if other else tensor
            given = given.conj() if other else given
            compression.all_reduce_reproducible(given, group=group, bits=16)
            found.append(given.conj().t().resolve_conj() if other else given)
            exact = sum(batch(each, 1, torch.complex64) for each in range(world))
            assert 0 < distance(found[-1], exact) < 1e-3
    assert all(torch.equal(each, found[2 * (number % 2)]) for number, each in enumerate(found) if number % 2 == 0)
    assert same_on_all(*found)


@on_ranks(2)
def test_reproducible_sums_of_doubles_are_refused_as_what_they_are(rank, world):
    with pytest.raises(ValueError, match="got torch.complex128"):
        compression.all_reduce_reproducible(batch(rank, 1, torch.complex128))
    ddp = DistributedDataParallel(made("alone", torch.complex128))
    ddp.register_comm_hook(Reproducible(), compression.reproducible_hook)
    with pytest.raises(ValueError, match="got torch.complex128"):
        gradients(rank, ddp, torch.complex128)


@on_ranks(2)
def test_fsdp2_reduces_complex_gradients(rank, world):
    for dtype, fusion_bytes in itertools.product(COMPLEX, (None, 64)):
        found = []
        for compressed in (False, True):
            model = fully_shard(made("alone", dtype))
            if compressed:
                state = compression.CompressionState(settings("maxmin:2", fusion_bytes=fusion_bytes), model)
                compression.apply_fsdp2(model, state)
            gradients(rank, model, dtype)
            found.append([parameter.grad.to_local() for parameter in model.parameters()])
        torch.testing.assert_close(*found)


class Bucket:
    """A bucket whose gradients are not views of the whole buffer, as if a torch version cut the buffer differently."""

    def __init__(self, parameters, buffer, gradients):
        self._found = parameters, buffer, gradients

    def parameters(self):
        return self._found[0]

    def buffer(self):
        return self._found[1]

    def gradients(self):
        return self._found[2]

    def index(self):
        return 4

    def is_last(self):
        return True


@on_ranks(2)
@pytest.mark.parametrize("hook", ["ddp", "reproducible", "cgx"])
def test_a_part_is_not_taken_for_the_whole_bucket(rank, world, hook):
    model = nn.Linear(4, 4, bias=False)
    buffer = torch.ones(20)
    state = {
        "ddp": lambda: compression.CompressionState(Compression("raw"), model),
        "reproducible": Reproducible,
        "cgx": cgx.CGXState,
    }[hook]()
    call = {"ddp": compression.ddp_hook, "reproducible": compression.reproducible_hook, "cgx": cgx.cgx_hook}[hook]
    with pytest.raises(RuntimeError, match=r"bucket 4 have 16 elements \(16\), but the bucket has 20 of"):
        call(state, Bucket([model.weight], buffer, [buffer[:16].view(4, 4)]))
