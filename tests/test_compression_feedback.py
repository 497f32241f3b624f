"""Error feedback loses nothing: the results and the residuals together hold the gradients, whatever happens to a
parameter."""

import warnings

import pytest
import torch
import torch.distributed as dist
from support import on_ranks
from support.training import decide, residuals_of, same_on_all
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch_accl import compression
from torch_accl.compression import Compression, _feedback, _state

# This algorithm also encodes the sums that it sends back. With 2 bits the loss is kept as a residual of sums.
TWO_PHASES = {"ACCL_ALGORITHM": "all_reduce=direct_two_phase"}
SETTINGS = Compression("maxmin:2,bucket=64,rounding=nearest", error_feedback=True)


class Branches(nn.Module):
    """Two branches, of which only those named in `used` take part."""

    def __init__(self):
        super().__init__()
        self.left = nn.Linear(48, 64, bias=False)
        self.right = nn.Linear(48, 64, bias=False)

    def forward(self, x, used):
        return sum(getattr(self, name)(x).square().mean() for name in used)


def made():
    torch.manual_seed(7)
    return Branches()


def inputs(rank, step):
    return torch.randn(8, 48, generator=torch.Generator().manual_seed(100 * rank + step))


class Book:
    """The gradients of all ranks minus the results, by parameter. The weights stay unchanged."""

    def __init__(self, world):
        self.world = world
        self.plain = made()
        self.missing = {name: torch.zeros_like(p, dtype=torch.float64) for name, p in self.plain.named_parameters()}

    def add(self, step, used_by, found):
        """Adds a step with the results `found`; `used_by` lists the branches that each rank used."""
        for rank, used in enumerate(used_by):
            if used:
                gradients = torch.autograd.grad(
                    self.plain(inputs(rank, step), used), [getattr(self.plain, name).weight for name in used]
                )
                for name, gradient in zip(used, gradients, strict=True):
                    self.missing[f"{name}.weight"] += gradient.double() / self.world
        for name, gradient in found.items():
            if gradient is not None:
                self.missing[name] -= gradient.double()

    def check(self, state, bound=1e-4):
        """Checks that the residuals hold everything that the results lack, except for the share `bound`.

        That share covers rounding, or the loss of finer codecs, which keep no residuals.
        """
        saved = residuals_of(state)
        for name, missing in self.missing.items():
            kept = torch.zeros_like(missing)
            if name in saved["residuals"]:
                kept += saved["residuals"][name].double().sum(0).view_as(kept) / self.world
            if name in saved["residuals_of_sums"]:
                kept += saved["residuals_of_sums"][name].double().view_as(kept)
            dist.all_reduce(kept)
            scale = missing.abs().max().clamp(min=1e-3)
            assert (missing - kept).abs().max() < bound * scale, (name, (missing - kept).abs().max(), scale)


def hooked(settings=SETTINGS, **options):
    ddp = DistributedDataParallel(made(), **options)
    state = compression.CompressionState(settings, ddp)
    ddp.register_comm_hook(state, compression.ddp_hook)
    return ddp, state


def stepped(ddp, rank, step, used_by):
    ddp.zero_grad(set_to_none=True)
    ddp(inputs(rank, step), used_by[rank]).backward()
    return {name.removeprefix("module."): p.grad for name, p in ddp.named_parameters()}


def on_any(said):
    """Returns whether `said` is true on any rank.

    The rank that adds up a parameter depends on the parameter's position in the call.
    """
    found = torch.tensor([float(said)])
    dist.all_reduce(found, dist.ReduceOp.MAX)
    return bool(found)


BOTH = ("left", "right")


@on_ranks(2, 3, fresh=True, env=TWO_PHASES)
def test_the_residual_of_an_unused_parameter_is_kept(rank, world):
    ddp, state = hooked(find_unused_parameters=True)
    book = Book(world)
    for step, used in enumerate([BOTH, BOTH, ("left",), ("left",), BOTH]):
        before = residuals_of(state)
        book.add(step, [used] * world, stepped(ddp, rank, step, [used] * world))
        after = residuals_of(state)
        book.check(state)
        if step > 1:
            for kind in ("residuals", "residuals_of_sums"):
                assert on_any(before[kind]["right.weight"].any())
                for name in BOTH:
                    is_kept = torch.equal(before[kind][f"{name}.weight"], after[kind][f"{name}.weight"])
                    assert on_any(not is_kept) == (name in used), (step, kind, name)


@on_ranks(3, fresh=True, env=TWO_PHASES)
def test_a_rank_that_does_not_use_a_parameter_keeps_what_it_carries_over(rank, world):
    ddp, state = hooked(find_unused_parameters=True)
    book = Book(world)
    for step in range(6):
        # Each rank leaves out the branch in some steps.
        used_by = [("left",) if step and step % world == other else BOTH for other in range(world)]
        before = residuals_of(state)["residuals"].get("right.weight")
        found = stepped(ddp, rank, step, used_by)
        assert same_on_all(*found.values())
        book.add(step, used_by, found)
        book.check(state)
        if step:
            is_kept = torch.equal(before, residuals_of(state)["residuals"]["right.weight"])
            assert is_kept == (used_by[rank] == ("left",))


@on_ranks(2, 3, fresh=True, env=TWO_PHASES)
def test_a_parameter_that_falls_back_to_raw_gets_its_residual_once(rank, world):
    _state.CHECK_EVERY = 4
    settings = Compression(
        "maxmin:2,bucket=64,rounding=nearest", error_feedback=True, error_limit=1e-6, layers={"left": "raw"}, audit=2
    )
    ddp, state = hooked(settings, find_unused_parameters=True)
    book = Book(world)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for step in range(10):
            # No rank uses the parameter in the first raw call, so its result will be discarded.
            used = ("left",) if step == 4 else BOTH
            book.add(step, [used] * world, stepped(ddp, rank, step, [used] * world))
            book.check(state)
            assert ("right.weight" in residuals_of(state)["residuals"]) == (step <= 4), step
    assert state.codec_of("right.weight") is None
    assert not residuals_of(state)["residuals_of_sums"]


@on_ranks(2, fresh=True, env=TWO_PHASES)
def test_what_was_lost_of_sums_is_not_lost_where_they_are_encoded_more_finely(rank, world):
    ddp, state = hooked()
    book = Book(world)
    for step in range(4):
        if step == 2:
            saved = residuals_of(state)
            assert saved["residuals_of_sums"]["right.weight"].any()
            finer = ("raw", "maxmin:8,bucket=64", "maxmin:8,bucket=64")
            decide(state, {"right.weight": finer})
        book.add(step, [BOTH] * world, stepped(ddp, rank, step, [BOTH] * world))
        # 8 bits keep no residual of their loss in a sum. The loss of 2 bits was a hundred times as large.
        book.check(state, 1e-4 if step < 2 else 0.02)
    assert set(residuals_of(state)["residuals_of_sums"]) == {"left.weight"}


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(64, 48))

    def forward(self, x):
        return (x @ self.weight.T).square().mean()


@on_ranks(4, fresh=True, env=TWO_PHASES)
@pytest.mark.parametrize("divide_by", [None, 4.0])
def test_shards_of_fsdp2_that_fall_back_to_raw_get_what_was_carried_over(rank, world, divide_by):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))

    def net():
        torch.manual_seed(5)
        model = fully_shard(Layer(), mesh=mesh)
        model.set_gradient_divide_factor(divide_by)
        return model

    def gradient(model, step):
        model.zero_grad()
        model(inputs(rank, step)).backward()
        return model.weight.grad.full_tensor().double()

    plain, coarse = net(), net()
    state = compression.CompressionState(SETTINGS, coarse)
    compression.apply_fsdp2(coarse, state)
    exact, found = torch.zeros(64, 48).double(), torch.zeros(64, 48).double()
    for step in range(4):
        if step == 3:
            saved = residuals_of(state)
            assert saved["residuals_of_sums"]["weight (replicas)"].any()
            assert (exact - found).norm() > 0.01 * exact.norm()
            decide(state, {"weight": None, "weight (replicas)": None})
        exact += gradient(plain, step)
        found += gradient(coarse, step)
    # The last step sent all residuals.
    torch.testing.assert_close(found, exact, rtol=1e-4, atol=1e-5 * exact.abs().max().item())
    assert not residuals_of(state)["residuals"] and not residuals_of(state)["residuals_of_sums"]


def test_only_zeros_are_zero():
    for shape in [(5000,), (7, 700), (3, 1, 40), ()]:
        tensor = torch.zeros(shape)
        assert _feedback.is_zero(tensor) and _feedback.is_zero(-tensor) and _feedback.is_zero(tensor.bfloat16())
        for value in (1e-40, float("nan"), -1.0):
            changed = tensor.clone().view(-1)
            changed[-1] = value
            assert not _feedback.is_zero(changed.view(shape))
    assert _feedback.is_zero(torch.empty(0)) and _feedback.is_zero(torch.empty(4, 0))
