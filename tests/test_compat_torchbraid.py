"""Scripts of torchbraid after changing their imports: nets, setters, communicators, and cases that fail in
torchbraid."""

import contextlib
import copy
import gc
import io
import itertools
import json
import os
import shutil
import subprocess
import sys
import textwrap
import types
import warnings
import weakref
from pathlib import Path

import pytest
import torch
import torch._dynamo  # imported once here: optimizers load it, which takes seconds in every rank
import torch.distributed as dist
from support import BACKEND, gloo_group, init_group, on_ranks, run_file, run_script
from support.launchers import COMMANDS, OF_A_JOB, run_under
from torch import nn
from torch.nn import functional
from torch_accl.compat import torchbraid
from torch_accl.compat.torchbraid import MPI, mgopt, utils
from torch_accl.compat.torchbraid._communicator import Comm
from torch_accl.compat.torchbraid._settings import _has_said
from torch_accl.layer_parallel import Cycle, LayerParallelError, MGOpt, ode, refined
from torch_accl.layer_parallel import LayerParallel as Body

pytestmark = pytest.mark.skipif(BACKEND != "accl", reason="about this package only")

SCRIPTS = Path(__file__).parent / "scripts"
WIDTH = 6


class Step(nn.Module):
    """A layer whose weights depend only on torch's random numbers."""

    def __init__(self, width=WIDTH):
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, x):
        return torch.tanh(self.linear(x))


def net(layer=Step, steps=8, Tf=1.0, comm=MPI.COMM_WORLD, levels=1, iters=10, seed=3, **options):
    torch.manual_seed(seed)
    return torchbraid.LayerParallel(
        comm, layer, steps, Tf, max_fwd_levels=levels, max_bwd_levels=levels, max_iters=iters, **options
    )


def inexact(layer=Step, steps=8, **options):
    """A net as in torchbraid's examples: two iterations forward, one backward, the down-cycle skipped."""
    made = net(layer, steps, levels=2, **options)
    made.setFwdMaxIters(2)
    made.setBwdMaxIters(1)
    made.setSkipDowncycle(True)
    made.setCFactor(4)
    return made


def batch(count=5, width=WIDTH, dtype=torch.float32, seed=1):
    return torch.randn(count, width, dtype=dtype, generator=torch.Generator().manual_seed(seed))


def serial(made, x):
    """Returns the same net as a serial net, and its output, on all ranks."""
    whole = made.body.to_serial()
    return whole, whole(x)


def gradients(made):
    """Returns the gradients of all layers, by name, on all ranks."""
    mine = {name: parameter.grad for name, parameter in made.body.named_parameters()}
    return {name: gradient for part in made.ranks.allgather(mine) for name, gradient in part.items()}


@contextlib.contextmanager
def recorded_warnings():
    """Records torchbraid's warnings, including those that are normally given once per process."""
    said = set(_has_said)
    _has_said.clear()
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        yield found
    # Drop torch's own warnings.
    found[:] = [one for one in found if str(one.message).startswith("torchbraid: ")]
    _has_said.update(said)


# ---- a batch


@on_ranks(1, 2, 3)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["float32", "float64"])
def test_one_level_is_the_serial_net_whose_output_is_on_rank_0(rank, world, dtype):
    made = net(lambda: Step().to(dtype))
    x, target = batch(dtype=dtype), batch(seed=2, dtype=dtype)
    given = x.clone().requires_grad_()
    y = made(given if rank == 0 else torch.tensor(5))
    whole, right = serial(made, x)
    assert y.shape == right.shape and y.dtype == dtype
    assert torch.equal(y, right if rank in (0, world - 1) else torch.zeros_like(right))
    loss = made.comp_op()(functional.mse_loss, y, target)
    assert rank == 0 or loss.item() == 0.0
    loss.backward()
    alone = x.clone().requires_grad_()
    functional.mse_loss(whole(alone), target).backward()
    if rank == 0:
        torch.testing.assert_close(given.grad, alone.grad, rtol=1e-5 if dtype == torch.float32 else 1e-12, atol=0)
    for name, parameter in whole.named_parameters():
        found = gradients(made)[name]
        torch.testing.assert_close(found, parameter.grad, rtol=1e-4 if dtype == torch.float32 else 1e-12, atol=1e-12)
    assert made.getFwdStats() == (1, -1.0) and made.getBwdStats() == (1, -1.0)


@on_ranks(1, 2, 3)
def test_results_do_not_depend_on_the_number_of_ranks(rank, world):
    found = []
    for comm in (MPI.COMM_WORLD, MPI.COMM_SELF):
        made = inexact(lambda: Step().double(), 10, comm=comm)
        y = made(batch(dtype=torch.float64))
        (y.square().sum() if comm.Get_rank() == 0 else y.sum()).backward()
        # The gradient that ranks other than 0 pass has no effect.
        found.append((y, gradients(made), made.getFwdStats(), made.getBwdStats()))
    (y, grads, *stats), (right, alone, *others) = found
    assert rank != 0 or torch.equal(y, right)
    assert stats == others and stats[0][0] == 2 and stats[1] == (1, -1.0)
    assert grads.keys() == alone.keys()
    for name in grads:
        torch.testing.assert_close(grads[name], alone[name], rtol=1e-14, atol=1e-16)


@on_ranks(1, 2)
def test_residuals_are_the_known_ones(rank, world):
    def block():
        return nn.Sequential(nn.Conv2d(8, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 8, 3, padding=1), nn.ReLU())

    made = net(block, 64, levels=2)
    made.setFwdMaxIters(3)
    made.setBwdMaxIters(2)
    made.setSkipDowncycle(1)
    made.setCFactor(4)
    made.setNumRelax(0)
    with torch.no_grad():
        for number in made.body.owned:
            generator = torch.Generator().manual_seed(1000 + number)
            for parameter in made.body.layers[str(number)].parameters():
                parameter.copy_((2 * torch.rand(parameter.shape, generator=generator) - 1) / 72**0.5)
    torch.manual_seed(1)
    x = torch.randn(8, 8, 28, 28)
    with torch.no_grad():
        made(x)
    assert list(made.body.norms.forward.values()) == pytest.approx([6.820099, 1.694539e-1], rel=2e-6)
    iterations, residual = made.getFwdStats()
    assert iterations == 3 and residual == pytest.approx(1.694539e-1, rel=2e-6)


@on_ranks(2, 3)
def test_head_tail_and_loss_are_on_rank_0_and_are_trained_there(rank, world):
    made = net()
    compose = made.comp_op()
    torch.manual_seed(7)
    head, tail = compose(nn.Linear, 4, WIDTH), compose(nn.Linear, WIDTH, 3)
    assert (head is None) == (tail is None) == (rank != 0)
    x, target = batch(width=4), torch.tensor([0, 1, 2, 1, 0])
    y = compose(tail, made(compose(head, x)))
    loss = compose(nn.CrossEntropyLoss(), y, target)
    assert rank == 0 or (loss.shape == (1,) and loss.item() == 0)
    loss.backward()
    whole, _ = serial(made, batch())
    if rank == 0:
        again = [copy.deepcopy(module) for module in (head, tail)]
        [module.zero_grad() for module in again]
        right = functional.cross_entropy(again[1](whole(again[0](x))), target)
        right.backward()
        assert loss.item() == right.item()
        for module, other in zip((head, tail), again):
            torch.testing.assert_close(module.weight.grad, other.weight.grad, rtol=1e-4, atol=1e-7)


def test_a_stand_in_is_zero_whatever_it_stands_for():
    compose = torchbraid._compose.Compose(1)
    x = torch.tensor([float("nan"), 1.0], requires_grad=True)
    found = compose(lambda *_: 1 / 0, {"x": [x]}, key=x)
    found.backward()
    assert found.item() == 0 and torch.equal(x.grad, torch.zeros(2))
    assert compose(nn.Linear, 2, 3) is None and not compose(None, torch.ones(2)).requires_grad
    with pytest.raises(TypeError, match="None on rank 0"):
        torchbraid._compose.Compose(0)(None, x)


# ---- what breaks in the original


class Fails(Step):
    # Number of evaluations until the layer fails; None: never.
    when: int | None = None

    def forward(self, x):
        if Fails.when == 0:
            raise RuntimeError("no good")
        if Fails.when is not None:
            Fails.when -= 1
        return super().forward(x)


@on_ranks(1, 2, 3)
def test_an_exception_in_a_layer_is_raised_on_all_ranks(rank, world):
    made = inexact(Fails)
    Fails.when = 0 if rank == world - 1 else None
    with pytest.raises(LayerParallelError, match=rf"rank {world - 1} of the layers failed in layer \d.*no good"):
        made(batch())
    Fails.when = None
    y = made(batch())
    y.sum().backward()
    assert all(gradient is not None for gradient in gradients(made).values())


@on_ranks(2)
def test_an_exception_of_the_backward_pass_is_raised_on_all_ranks(rank, world):
    class Bad(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, gradient):
            raise RuntimeError("no way back")

    class Backwards(Step):
        def forward(self, x, **more):
            return Bad.apply(super().forward(x)) if more else super().forward(x)

    made = inexact(Backwards)
    y = made(batch(), is_bad=True)
    with pytest.raises(LayerParallelError, match=r"layer \d.*no way back"):
        y.sum().backward()
    # Arguments that the layers received for that batch do not affect the next batch.
    made(batch()).sum().backward()


@on_ranks(1, 2)
def test_other_lengths_and_batch_sizes_are_planned_again(rank, world):
    made = inexact(lambda: nn.Conv1d(2, 2, 3, padding=1))
    for shape in ((3, 2, 8), (3, 2, 12), (5, 2, 12), (2, 2, 8)):
        x = torch.randn(shape, generator=torch.Generator().manual_seed(1))
        y = made(x if rank == 0 else torch.tensor(shape[0]))
        assert y.shape == shape
        # A small batch is not padded, so its backward pass has the batch's own size.
        y.sum().backward()


class Dropping(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.drops = nn.Sequential(torchbraid.LPDropout(0.5), torchbraid.LPDropout(0.5))
        self.seen = []

    def forward(self, x):
        self.seen.append(self.drops(torch.ones(len(x), 64)).detach())
        return torch.tanh(self.linear(x))


def masks(made):
    """Returns the last mask of each layer; all evaluations of a layer must have had the same mask."""
    found = {}
    for number, layer in made.body.layers.items():
        assert all(torch.equal(mask, layer.seen[0]) for mask in layer.seen), number
        found[int(number)] = layer.seen[-1]
        layer.seen.clear()
    return {number: mask for part in made.ranks.allgather(found) for number, mask in part.items()}


@on_ranks(1, 2)
def test_dropout_has_a_mask_for_each_batch_layer_and_sample_and_one_for_all_evaluations(rank, world):
    made = inexact(Dropping)
    state = torch.random.get_rng_state()
    made(batch(8)).sum().backward()
    first = masks(made)
    assert torch.equal(torch.random.get_rng_state(), state), "torch's own numbers are left alone"
    rows = [tuple(row.tolist()) for mask in first.values() for row in mask]
    assert len(set(rows)) == len(rows) == 64, "no two layers or samples have one mask"
    # The two modules in a layer draw independently, so a quarter is kept.
    kept = torch.stack(list(first.values()))
    assert set(kept.unique().tolist()) == {0.0, 4.0} and 0.2 < (kept > 0).float().mean() < 0.3
    made(batch(3)).sum().backward()
    other = masks(made)
    assert all(mask.shape == (3, 64) for mask in other.values())
    assert not torch.equal(other[0], first[0][:3]), "another batch has other masks"
    again = inexact(Dropping)
    again(batch(8)).sum().backward()
    assert all(torch.equal(mask, first[number]) for number, mask in masks(again).items()), "the seed gives them"


@on_ranks(2)
def test_dropout_does_not_depend_on_how_a_batch_is_cut(rank, world):
    whole, parts = net(Dropping), net(Dropping)
    parts.body.mode = "exact-pipeline"
    whole(batch(8)).sum().backward()
    parts(batch(8)).sum().backward()
    for number, layer in whole.body.layers.items():
        pieces = parts.body.layers[number].seen
        # A trial evaluation with zeros, which determines shapes, may come before.
        assert torch.equal(torch.cat(pieces[-2:]), layer.seen[-1])


def test_dropout_by_itself_is_torchs():
    torch.manual_seed(1)
    drop = torchbraid.LPDropout(0.25)
    x = torch.ones(400, 10)
    first, second = drop(x), drop(x)
    assert not torch.equal(first, second) and abs(first.mean().item() - 1) < 0.1
    assert torch.equal(drop.eval()(x), x)
    assert torch.equal(torchbraid.LPDropout(1.0)(x), torch.zeros_like(x))
    with pytest.raises(ValueError, match="from 0 to 1"):
        torchbraid.LPDropout(1.5)


@on_ranks(2, 3)
def test_ranks_need_not_divide_the_steps(rank, world):
    made = inexact(steps=7)
    y = made(batch())
    y.sum().backward()
    counts = made.ranks.allgather(len(made.layer_models))
    assert sum(counts) == 7 and max(counts) - min(counts) <= 1
    assert all(gradient is not None for gradient in gradients(made).values())


@on_ranks(2)
def test_eight_layers_on_two_ranks_are_four_each(rank, world):
    assert len(net().local_layers) == 4


@on_ranks(1, 2)
def test_coarsening_factors_and_relaxations_are_by_level(rank, world):
    made = net(steps=24, levels=3)
    made.setSkipDowncycle(True)
    made.setCFactor({0: 4, 1: 3})
    made.setNumRelax(1)
    made.setFwdNumRelax(0, level=0)
    made(batch()).sum().backward()
    assert made.body.fwd == Cycle(levels=3, factor=(4, 3), iterations=10, relax=(0, 1))
    assert made.body.bwd == Cycle(levels=3, factor=(4, 3), iterations=10, relax=(1, 1))
    assert [made.fwd_app.getLevelNumSteps(level) for level in range(3)] == [24, 6, 2]
    assert made.fwd_app.getFineTimeIndex(1, 2) == 12
    made.setCFactor({-1: 2})
    assert made.fwd_app.cycle().factor == (4, 3), "those of levels hold"
    made.setCFactor(2)
    assert made.fwd_app.cycle().factor == (2, 2)


class Normed(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = torchbraid.LPBatchNorm2d(WIDTH)
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return torch.tanh(self.linear(self.norm(x)))


@on_ranks(1, 2)
def test_an_export_has_the_running_statistics(rank, world):
    made = inexact(Normed)
    for number in range(5):
        made(batch(seed=number)).sum().backward()
    for layer in made.layer_models:
        assert layer.norm.mean is layer.norm.running_mean and layer.norm.var is layer.norm.running_var
        if made.body.owner(0) == rank and layer is made.layer_models[0]:
            # The first layer's inputs are the inputs of the net.
            right = nn.BatchNorm1d(WIDTH)
            for number in range(5):
                right(batch(seed=number))
            assert torch.equal(layer.norm.mean, right.running_mean), "once a batch, however often it was evaluated"
    made.eval()
    exported = made.buildSequentialOnRoot()
    assert (exported is None) == (rank != 0)
    with torch.no_grad():
        y = made(batch(seed=9))
        if rank == 0:
            assert len(exported) == 8 and not exported.training
            assert torch.equal(exported(batch(seed=9)), y)


def test_batch_norm_takes_two_dimensions_and_says_so_of_one():
    norm = torchbraid.LPBatchNorm2d(3, momentum=0.2, eps=1e-3)
    assert (norm.momentum, norm.eps) == (0.2, 1e-3)
    assert norm(torch.randn(4, 3)).shape == (4, 3) and norm(torch.randn(4, 3, 2, 2)).shape == (4, 3, 2, 2)
    with pytest.raises(ValueError, match="samples and channels"):
        norm(torch.randn(3))
    with pytest.raises(ValueError, match="give a number"):
        torchbraid.LPBatchNorm2d(3, momentum=None)


def test_batch_norm_has_two_buffers_and_loads_those_of_torch_and_torchbraid():
    norm, right = torchbraid.LPBatchNorm2d(3), nn.BatchNorm2d(3)
    right(torch.randn(4, 3, 2, 2))
    assert [name for name, _ in norm.named_buffers()] == ["running_mean", "running_var"]
    saved = dict(right.state_dict())
    norm.load_state_dict(saved)
    assert torch.equal(norm.mean, right.running_mean) and torch.equal(norm.var, right.running_var)
    assert set(saved) == set(right.state_dict()), "what was saved stays as it was"
    norm.reset_running_stats()
    assert norm.mean.tolist() == [0] * 3 and norm.var.tolist() == [1] * 3
    theirs = {"mean": saved["running_mean"], "var": saved["running_var"], "done_flag": torch.tensor(True)}
    norm.load_state_dict({**theirs, "weight": torch.ones(3), "bias": torch.zeros(3)})
    assert torch.equal(norm.mean, right.running_mean)
    again = torchbraid.LPBatchNorm2d(3)
    again.load_state_dict(dict(norm.state_dict()))
    assert torch.equal(again.var, right.running_var)


@on_ranks(2)
def test_an_expanded_gradient_is_sent(rank, world):
    made = net()
    y = made(batch())
    y.sum().backward()
    whole, right = serial(made, batch())
    right.sum().backward()
    for name, parameter in whole.named_parameters():
        torch.testing.assert_close(gradients(made)[name], parameter.grad, rtol=1e-4, atol=1e-7)


@on_ranks(1, 2)
def test_a_batch_does_not_depend_on_the_one_before(rank, world):
    first, second = inexact(), inexact()
    with recorded_warnings() as said:
        for made in (first, second):
            made.setSkipDowncycle(False)
            made.setMaxIters(1)
    assert len(said) == (rank == 0) and (rank or "the previous batch" in str(said[0].message))
    assert first.fwd_app.cycle().iterations == 2, "a cycle after the start"
    first(batch(seed=8))
    found, right = first(batch()), second(batch())
    assert torch.equal(found, right)
    assert first.getFwdStats()[0] == 1


@on_ranks(1, 2, 3)
@pytest.mark.parametrize("nsplines,degree", [(4, 1), (5, 3), (9, 1)])
def test_weights_are_splines_in_time(rank, world, nsplines, degree):
    made = net(lambda: Step().double(), nsplines=nsplines, splinedegree=degree)
    points = {}
    for name, parameter in made.body.named_parameters():
        _, _, _, point, rest = name.split(".", 4)
        points.setdefault(int(point), {})[rest] = parameter.detach()
    points = {number: each for part in made.ranks.allgather(points) for number, each in part.items()}
    made.diagnostics(True)
    x = batch(dtype=torch.float64)
    y = made(x)
    right, norms = x, []
    for layer in range(8):
        # The recursion of torchbraid's documentation, with knots at the distance Tf / (nsplines - splinedegree).
        distance = 1 / (nsplines - degree)
        first = min(int(layer / 8 / distance + 1e-12), nsplines - degree - 1)
        time = layer / 8 / distance
        basis = [1.0]
        for order in range(1, degree + 1):
            basis.append(0.0)
            for r in range(order, -1, -1):
                before = (time - (first + r - order)) / order * basis[r - 1] if r else 0.0
                after = (first + r + 1 - time) / order * basis[r] if r < order else 0.0
                basis[r] = before + after
        weights = {
            name: sum(value * points[first + at][name] for at, value in enumerate(basis) if value)
            for name in points[first]
        }
        norms.append([float(weight.norm()) for weight in weights.values()])
        right = right + torch.func.functional_call(Step().double(), weights, right) / 8
    if rank in (0, world - 1):
        torch.testing.assert_close(y, right, rtol=1e-12, atol=0)
    found = made.getDiagnostics()["params"]
    if rank == 0:
        torch.testing.assert_close(torch.tensor(found), torch.tensor(norms))
    y.sum().backward()
    for name, parameter in made.body.named_parameters():
        # With a knot for each layer, no layer uses the last control point.
        assert parameter.grad is not None or name.split(".")[3] == "8"
    whole = made.buildSequentialOnRoot()
    assert rank or torch.equal(whole(x), y)


def test_splines_that_do_not_fit_are_refused():
    with pytest.raises(ValueError, match=r"nsplines=2, splinedegree=2.*too few"):
        net(nsplines=2, splinedegree=2)
    with pytest.raises(ValueError, match=r"nsplines=10, splinedegree=1.*too many"):
        net(nsplines=10)
    with pytest.raises(ValueError, match=r"nsplines=4.*all layers are single ones"):
        net(steps=1, nsplines=4)


# ---- states that become coarser


class Pixels:
    """Functions for coarser states, written as in scripts: they check the level themselves and halve odd image sizes.

    `calls` records how they were called.
    """

    def __init__(self, levels, **others):
        self.levels, self.calls = levels, []
        self.functions = tuple(others.get(name, getattr(self, name)) for name in ("coarsen", "refine", "shape"))

    def coarsen(self, img, level):
        self.calls.append(("coarsen", level, img.shape[-1]))
        if level not in self.levels or img.dim() < 4:
            return img.clone()
        return functional.avg_pool2d(functional.pad(img, (1, 1, 1, 1)), 3, 2)

    def refine(self, img, level):
        self.calls.append(("refine", level, img.shape[-1]))
        if level not in self.levels or img.dim() < 4:
            return img.clone()
        size = 2 * img.shape[-1] - 1
        return functional.interpolate(img, (size, size), mode="bilinear", align_corners=True)

    def shape(self, shape, level):
        # The function may modify its argument.
        if level in self.levels and len(shape) == 4:
            shape[2:] = [(length + 1) // 2 for length in shape[2:]]
        return shape


class Convolution(nn.Module):
    def __init__(self, size=None):
        super().__init__()
        self.inner = nn.Conv2d(2, 2, 3, padding=1).double()
        self.size = size

    def forward(self, x):
        assert self.size is None or x.shape[-1] == self.size
        return torch.tanh(self.inner(x))


def images(size=9, rows=3):
    draw = torch.randn(rows, 2, size, size, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    return functional.avg_pool2d(functional.pad(draw, (2, 2, 2, 2)), 5, 1)


def pooled(levels=(0,), pixels=None, steps=16, max_levels=3, iters=9, **options):
    """Returns a net whose states become coarser, and the functions that do so."""
    pixels = pixels or Pixels(list(levels))
    made = net(
        options.pop("layer", Convolution),
        steps,
        levels=max_levels,
        iters=iters,
        spatial_ref_funcs=pixels.functions,
        levels_to_coarsen=pixels.levels,
        **options,
    )
    made.setSkipDowncycle(True)
    made.setNumRelax(1)
    return made, pixels


@on_ranks(1, 2)
@pytest.mark.parametrize("levels", [[0], [0, 1, 2], [1]], ids=str)
def test_states_become_coarser_on_the_levels_that_are_named(rank, world, levels):
    made, pixels = pooled(levels)
    x = images()
    y = made(x)
    y.square().sum().backward() if rank == 0 else y.sum().backward()
    found = gradients(made)
    whole, right = serial(made, x)
    right.square().sum().backward()
    torch.testing.assert_close(y if rank == 0 else right, right, rtol=1e-5, atol=1e-7)
    for name, parameter in whole.named_parameters():
        torch.testing.assert_close(found[name], parameter.grad, rtol=1e-3, atol=1e-6)
    for norms in (made.body.norms.forward, made.body.norms.backward):
        first, *_, last = norms.values()
        assert last < 1e-3 * first
    # Levels that the net does not have are ignored.
    called = {(name, level) for name, level, _ in pixels.calls}
    assert called == {(name, level) for name in ("coarsen", "refine") for level in levels if level < 2}
    sizes = {level: size for name, level, size in pixels.calls if name == "coarsen"}
    assert sizes == {0: {0: 9}, 1: {1: 9}, 2: {0: 9, 1: 5}}[levels[-1]]


@on_ranks(2, 3)
def test_coarser_states_give_the_same_bits_on_any_number_of_ranks(rank, world):
    found = []
    for comm in (MPI.COMM_WORLD, MPI.COMM_SELF):
        made, _ = pooled([0, 1], steps=10, iters=2, comm=comm)
        y = made(images())
        (y.square().sum() if comm.Get_rank() == 0 else y.sum()).backward()
        found.append((y, gradients(made), made.body.norms))
    (y, grads, norms), (right, alone, others) = found
    assert (rank != 0 or torch.equal(y, right)) and norms == others and len(norms.forward) > 0
    assert all(torch.equal(grads[name], alone[name]) for name in alone)


class Pool(nn.Module):
    def forward(self, pair):
        return tuple(functional.avg_pool2d(functional.pad(each, (1, 1, 1, 1)), 3, 2) for each in pair)


class TwoImages(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Conv2d(2, 2, 3, padding=1).double()

    def forward(self, pair):
        return torch.tanh(self.inner(pair[1])), pair[0] - pair[1]


class Joined(nn.Module):
    def forward(self, pair):
        return torch.cat([each.flatten(1) for each in pair], 1)


@on_ranks(1, 2)
def test_single_layers_that_pool_and_states_of_two_tensors_become_coarser_too(rank, world):
    # With as many iterations as intervals the solve is exact. States after the pooling look like coarser states before
    # it.
    pixels = Pixels([0, 1])
    made = net(
        [TwoImages, Pool, TwoImages, Joined],
        [8, 1, 8, 1],
        levels=3,
        iters=14,
        spatial_ref_funcs=pixels.functions,
        levels_to_coarsen=[0, 1],
    )
    made.setNumRelax(1)
    x = (images(17), images(17).flip(0))
    y = made(x)
    whole, right = serial(made, x)
    torch.testing.assert_close(y if rank == 0 else right, right, rtol=1e-10, atol=1e-12)
    y.sum().backward()
    right.sum().backward()
    grads = gradients(made)
    for name, parameter in whole.named_parameters():
        torch.testing.assert_close(grads[name], parameter.grad, rtol=1e-9, atol=1e-11)


@on_ranks(2)
def test_functions_that_are_wrong_are_named_on_all_ranks(rank, world):
    cases = [
        (
            "coarsen",
            lambda img, level: img[..., ::3, ::3],
            ValueError,
            r"on level 0 coarsen returned \[3, 2, 3, 3\], but shape returned \[3, 2, 5, 5\]",
        ),
        (
            "refine",
            lambda img, level: img,
            LayerParallelError,
            r"`refine` of the state of point \d+ returned the shape",
        ),
        (
            "shape",
            lambda shape, level: shape,
            ValueError,
            r"coarsen returned \[3, 2, 5, 5\], but shape returned \[3, 2, 9, 9\]",
        ),
        ("shape", lambda shape, level: None, TypeError, "shape returned None .* return a list of lengths"),
        (
            "coarsen",
            lambda img: img,
            RuntimeError,
            "coarsen failed on level 0 with a tensor .* must return its argument unchanged",
        ),
    ]
    for name, function, error, text in cases:
        made, _ = pooled(pixels=Pixels([0], **{name: function}))
        with pytest.raises(error, match=text):
            made(images())


@on_ranks(1)
def test_levels_whose_states_look_alike_are_distinguished(rank, world):
    # With as many iterations as intervals the solve is exact, whatever the functions do.
    said = []

    def scaled(by):
        def function(img, level):
            said.append((by, level))
            return img * by ** (level + 1)

        return function

    same = Pixels([0, 1], coarsen=scaled(0.5), refine=scaled(2.0), shape=lambda shape, level: shape)
    made, _ = pooled(pixels=same, iters=17)
    x = images()
    torch.testing.assert_close(made(x), serial(made, x)[1], rtol=1e-10, atol=1e-12)
    assert set(said) == {(by, level) for by in (0.5, 2.0) for level in (0, 1)}


def test_functions_and_levels_are_given_together():
    three = Pixels([0]).functions
    for arguments, error, text in (
        ({"spatial_ref_funcs": three}, ValueError, r"no levels_to_coarsen; give the levels, such as \[0\]"),
        ({"levels_to_coarsen": [0]}, ValueError, "no spatial_ref_funcs; also give"),
        ({"spatial_ref_funcs": three[:2], "levels_to_coarsen": [0]}, TypeError, "has 2 entries; give three functions"),
        ({"spatial_ref_funcs": three, "levels_to_coarsen": [-1]}, ValueError, r"give a list of levels of at least 0"),
        ({"spatial_ref_funcs": three, "levels_to_coarsen": 0.5}, ValueError, r"give a list of levels of at least 0"),
    ):
        with pytest.raises(error, match=text):
            net(**arguments)
    # Scripts pass an empty list if an argument controls coarsening.
    assert net(levels_to_coarsen=[]).fwd_app.coarsened == ()
    assert net(spatial_ref_funcs=three, levels_to_coarsen=[]).body.solver.shared.spatial is None
    made, _ = pooled([5], layer=lambda: Convolution(9))
    assert made.fwd_app.cycle().coarser == ()
    again = copy.deepcopy(pooled([0])[0])
    assert again.fwd_app.cycle().coarser == (1,) and again(images()).shape == (3, 2, 9, 9)


@on_ranks(1, 2)
def test_diagnostics_and_points(rank, world):
    made = net(steps=4, Tf=2.0)
    with pytest.raises(RuntimeError, match=r"diagnostics\(True\)"):
        made.getDiagnostics()
    made.diagnostics(True)
    made(batch()).sum().backward()
    whole, _ = serial(made, batch())
    states = [batch()]
    for layer in whole.layers:
        states.append(states[-1] + 0.5 * layer(states[-1]))
    found = made.getDiagnostics()
    assert found["rank"] == rank
    if rank == 0:
        norms = [state.norm().item() for state in states]
        assert found["timestep_index"] == [0, 1, 2, 3]
        assert found["step_in"] == pytest.approx(norms[:-1]) and found["step_out"] == pytest.approx(norms[1:])
        assert found["params"][0] == pytest.approx([p.norm().item() for p in whole.layers[0].parameters()])
    times, values = made.getFineTimePoints()
    own = [0, *range(1, 5)] if world == 1 else [0, 1, 2] if rank == 0 else [3, 4]
    assert times == [0.5 * number for number in own]
    for number, value in zip(own, values):
        torch.testing.assert_close(value.tensor(), states[number])
    made.diagnostics(False)
    made(batch())
    assert made._seen == {}


@on_ranks(1, 2, 3)
@pytest.mark.parametrize("make", [net, inexact], ids=["exact", "inexact"])
def test_states_of_points_are_there_without_diagnostics_until_the_backward_pass(rank, world, make):
    functors, counts = [lambda: nn.Linear(WIDTH, WIDTH), Step], [1, 7]
    made, other = make(functors, counts), make(functors, counts)
    with pytest.raises(RuntimeError, match=r"call it in between, or call diagnostics\(True\)"):
        made.getFineTimePoints()
    y = made(batch())
    times, states = made.getFineTimePoints()
    other.diagnostics(True)
    other(batch())
    right_times, right = other.getFineTimePoints()
    assert times == right_times and len(times) == len(made.layer_models) + (rank == 0)
    # At a C-point, an inexact solve has both a state and the preceding layer's result, which differ slightly.
    near = {"rtol": 1e-2, "atol": 1e-2} if make is inexact else {}
    for state, expected in zip(states, right):
        assert isinstance(state, torchbraid.BraidVector) and not state.tensor().requires_grad
        torch.testing.assert_close(state.tensor(), expected.tensor(), **near)
    assert [list(each.shape) for each in states[-1].tensors()] == [[5, WIDTH]]
    y.sum().backward()
    with pytest.raises(RuntimeError, match="states are kept only between a forward pass with gradients"):
        made.getFineTimePoints()
    with torch.no_grad():
        made(batch())
    with pytest.raises(RuntimeError, match="states are kept only between a forward pass with gradients"):
        made.fwd_app.getTimePoints()


def test_a_vector_has_the_tensors_of_a_state():
    from torch_accl.compat.torchbraid.braid_vector import BraidVector

    one, two = torch.ones(2), torch.zeros(3)
    vector = torchbraid.BraidVector((one, two))
    assert BraidVector is torchbraid.BraidVector and vector.tensor() is one and vector.tensors() == (one, two)
    copied = vector.clone()
    assert vector.replaceTensor(two) is one and vector.tensor(0) is two and next(iter(copied)) is not one
    assert torch.equal(copied.tensor(), one) and vector.replaceTensor([one])[1] is two and vector.tensors() == (one,)
    with pytest.raises(TypeError, match="expected a tensor or several tensors, got int"):
        torchbraid.BraidVector([1])
    assert torchbraid.layer_parallel.LayerParallel is torchbraid.LayerParallel
    assert torchbraid.gru_layer_parallel.GRU_Parallel is torchbraid.GRU_Parallel


@on_ranks(2)
def test_parameters_have_the_names_of_all_layers(rank, world):
    made = net()
    names = made.ranks.allgather(list(made.state_dict()))
    right = [f"body.layers.{number}.linear.{name}" for number in range(8) for name in ("weight", "bias")]
    assert names[0] + names[1] == right
    whole = net(comm=MPI.COMM_SELF, seed=4)
    assert list(whole.state_dict()) == right
    mine = {name: value for part in made.ranks.allgather(made.state_dict()) for name, value in part.items()}
    whole.load_state_dict(mine)
    with torch.no_grad():
        y, right = made(batch()), whole(batch())
    assert torch.equal(y, right)


@on_ranks(2)
def test_a_checkpoint_is_loaded_on_another_number_of_ranks(rank, world, tmp_path):
    import torch.distributed.checkpoint as dcp

    made = net()
    where = made.ranks.bcast(str(tmp_path))
    dcp.save(made.state_dict(), checkpoint_id=where)
    other = net(comm=MPI.COMM_SELF, seed=4)
    state = other.state_dict()
    dcp.load(state, checkpoint_id=where)
    other.load_state_dict(state)
    with torch.no_grad():
        y, right = made(batch()), other(batch())
    assert torch.equal(y, right)


@on_ranks(1, 2)
def test_nothing_of_a_batch_is_left_after_it(rank, world):
    left = []

    class Leaves(Step):
        def forward(self, x):
            found = super().forward(x)
            left.append(weakref.ref(found))
            return found

    made = inexact(Leaves)
    gc.collect()
    gc.disable()
    try:
        for is_trained in (True, False):
            y = made.train(is_trained)(batch())
            if is_trained:
                y.sum().backward()
            del y
            assert left and all(one() is None for one in left), "nobody has to look for it"
            left.clear()
    finally:
        gc.enable()


def test_a_weight_of_c_relaxation_is_refused_of_both_directions():
    made = net(comm=MPI.COMM_SELF)
    for name in ("setCRelaxWt", "setFwdCRelaxWt", "setBwdCRelaxWt"):
        getattr(made, name)(1.0)
        with pytest.raises(NotImplementedError, match=r"setCRelaxWt\(1.3\)"):
            getattr(made, name)(1.3)


@pytest.mark.slow
def test_compiled_layers_draw_again_for_each_batch_and_alike_within_it():
    found = []

    class Compiled(Dropping):
        def forward(self, x):
            mask = self.drops(torch.ones_like(x))
            return torch.tanh(self.linear(x)) * mask

    def layer():
        return torch.compile(Compiled(), backend="aot_eager")

    for build in (layer, Compiled):
        made = inexact(build)
        with torch.no_grad():
            found.append([made(batch()), made(batch())])
    assert torch.equal(found[0][0], found[1][0]) and torch.equal(found[0][1], found[1][1])
    assert not torch.equal(found[0][0], found[0][1])


# ---- layers


class Timed(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x, dt):
        return x + dt * torch.tanh(self.linear(x))


class Knows(nn.Module):
    """A single layer that takes dt."""

    def forward(self, x, dt):
        return x * dt


class Optional(nn.Module):
    def forward(self, x, mask=None):
        assert mask is None
        return x


@on_ranks(1, 2)
def test_dt_counts_single_layers(rank, world):
    blocks = [lambda: nn.Linear(4, WIDTH), Step, Timed, Knows, Optional]
    made = net(blocks, [1, 3, 3, 1, 1], Tf=2.0)
    assert made.dt == 2.0 / 9 and made.kinds == ["plain", *["ode"] * 3, *["timed"] * 3, "plain", "plain"]
    whole, y = serial(made, batch(width=4))
    x = whole.layers[0](batch(width=4))
    for number in range(1, 4):
        x = x + made.dt * whole.layers[number](x)
    for number in range(4, 7):
        x = whole.layers[number](x, made.dt)
    torch.testing.assert_close(y, x * made.dt, rtol=1e-6, atol=1e-7)
    with torch.no_grad():
        found = made(batch(width=4))
    assert rank != 0 or torch.equal(found, y)


class Extra(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x, *args, **kwargs):
        return torch.tanh(self.linear(x)) * args[0] + kwargs["shift"]


@on_ranks(1, 2)
@pytest.mark.parametrize("layer", [Extra, Timed], ids=["steps", "with dt"])
def test_extra_arguments_are_given_to_each_layer(rank, world, layer):
    class Takes(Timed):
        def forward(self, x, dt, factor, *, shift):
            return x + dt * (torch.tanh(self.linear(x)) * factor + shift)

    made = inexact(Extra if layer is Extra else Takes)
    y = made(batch(), 2.0, shift=0.5)
    y.sum().backward()
    exact = net(Extra if layer is Extra else Takes)
    right = exact(batch(), 2.0, shift=0.5)
    torch.testing.assert_close(y, right, rtol=5e-2, atol=5e-3)
    other = exact(batch(), 1.0, shift=0.5)
    assert rank != 0 or not torch.allclose(right, other)
    with pytest.raises(LayerParallelError, match="extra argument of forward requires a gradient"):
        made(batch(), torch.ones((), requires_grad=True), shift=0.5)
    # No hooks for the extra arguments remain.
    assert not any(layer._forward_pre_hooks or layer._forward_hooks for layer in made.layer_models)


@on_ranks(2)
def test_a_functor_that_fails_fails_on_all_ranks(rank, world):
    def bad():
        raise RuntimeError("cannot be built")

    with pytest.raises(LayerParallelError, match="cannot be built"):
        net(bad)

    def bad_on_the_second():
        if rank == 1:
            raise RuntimeError("not here")
        return Step()

    with pytest.raises(LayerParallelError, match=r"rank 1 of the layers failed in building its layers.*not here"):
        net(bad_on_the_second)
    net()(batch())


def test_what_cannot_be_is_said():
    with pytest.raises(ValueError, match="2 layer_blocks and 1 global_steps"):
        net([Step, Step], [3])
    with pytest.raises(ValueError, match=r"global_steps\[0\]=0"):
        net(Step, 0)
    with pytest.raises(TypeError, match="a function that builds a layer"):
        net(Step(), 2)
    made = net(comm=MPI.COMM_SELF)
    for call, given in (("setMaxIters", 0), ("setNumRelax", -1), ("setCFactor", 1), ("setMinCoarse", 0)):
        with pytest.raises(ValueError, match="give an integer of at least"):
            getattr(made, call)(given)


@on_ranks(2)
def test_layers_are_the_same_on_any_number_of_ranks_and_follow_torchs_seed(rank, world):
    first, second = net(), net(comm=MPI.COMM_SELF)
    mine = {name: value for part in first.ranks.allgather(first.state_dict()) for name, value in part.items()}
    other = second.state_dict()
    assert all(torch.equal(mine[name], other[name]) for name in other)
    weights = [value for name, value in other.items() if name.endswith("weight")]
    assert not any(torch.equal(a, b) for a, b in itertools.combinations(weights, 2)), "no two layers begin alike"
    torch.manual_seed(3 + rank)
    made = torchbraid.LayerParallel(MPI.COMM_WORLD, Step, 4, 1.0)
    made(batch())
    assert made.body._solver.layers.seed == MPI.COMM_WORLD.bcast(made.body._solver.layers.seed)


# ---- sequences

FEATURES, HIDDEN, LAYERS = 3, 5, 2


class ImplicitCell(nn.Module):
    """Two layers of a GRU whose step is implicit in time."""

    def __init__(self):
        super().__init__()
        self.of_input = nn.ModuleList([nn.Linear(size, 3 * HIDDEN) for size in (FEATURES, HIDDEN)])
        self.of_state = nn.ModuleList([nn.Linear(HIDDEN, 3 * HIDDEN) for _ in range(LAYERS)])
        self.times = set()

    def _cell(self, layer, dt, given, h):
        xr, xz, xn = given.chunk(3, 1)
        hr, hz, hn = self.of_state[layer](h).chunk(3, 1)
        n = torch.tanh(xn + torch.sigmoid(xr + hr) * hn)
        share = dt * (1 - torch.sigmoid(xz + hz))
        return (h + share * n) / (1 + share)

    def _layers(self, level, tstart, tstop, given, h):
        self.times.add((level, tstop - tstart))
        first = self._cell(0, tstop - tstart, given, h[0][0])
        second = self._cell(1, tstop - tstart, self.of_input[1](first), h[0][1])
        return (torch.stack((first, second)),)

    def forward(self, level, tstart, tstop, x, h):
        return self._layers(level, tstart, tstop, self.of_input[0](x), h)


class FastCell(ImplicitCell):
    def reduceX(self, x):
        assert x.dim() == 2
        return {"products": self.of_input[0](x)}

    def fastForward(self, level, tstart, tstop, reduced, h):
        return self._layers(level, tstart, tstop, reduced["products"], h)


class Pair(nn.Module):
    """A cell with two states of different shapes."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(FEATURES + 2, 4)

    def forward(self, level, tstart, tstop, x, state):
        h, c = state
        found = torch.tanh(self.inner(torch.cat((x, h), 1)))
        dt = tstop - tstart
        return h + dt * (c[:, :2] - h) / (1 + dt), c + dt * (found - c) / (1 + dt)


def recurrent(cell, count, world=None, rank=0, Tf=1.0, levels=1, comm=MPI.COMM_WORLD):
    """Returns the net of a sequence, and the slice of steps that belongs to this rank.

    Each rank has `count // world` steps; the last rank also has the remainder.
    """
    world = comm.Get_size() if world is None else world
    first = count // world
    own = first if rank < world - 1 else count - first * (world - 1)
    made = torchbraid.GRU_Parallel(
        comm, cell, own, HIDDEN, LAYERS, Tf, max_fwd_levels=levels, max_bwd_levels=levels, max_iters=2
    )
    made.setSkipDowncycle(True)
    return made, slice(first * rank, first * rank + own)


def sequence(count, samples=4, seed=1):
    return torch.randn(samples, count, FEATURES, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


@on_ranks(1, 2, 3)
@pytest.mark.parametrize("kind", [ImplicitCell, FastCell, Pair])
def test_a_sequence_of_one_level_is_the_serial_loop(rank, world, kind):
    torch.manual_seed(rank)
    cell = kind().double()
    made, own = recurrent(cell, 8, rank=rank, Tf=4.0)
    alone = torchbraid.GRU_Serial(copy.deepcopy(cell), LAYERS, HIDDEN, dt=0.5)
    for number in range(2):
        x = sequence(8, seed=number)
        if kind is Pair:
            start = torch.ones(4, 2, dtype=torch.float64), torch.ones(4, 4, dtype=torch.float64)
        else:
            start = (torch.ones(LAYERS, 4, HIDDEN, dtype=torch.float64),)
        h = [state.clone().requires_grad_() for state in start]
        mine, theirs = x[:, own].clone().requires_grad_(), x.clone().requires_grad_()
        found = made(mine, h[0] if len(h) == 1 else tuple(h))
        right = [state.clone().requires_grad_() for state in start]
        expected = alone(theirs, tuple(right))
        for a, b in zip([found] if len(h) == 1 else found, [expected] if len(h) == 1 else expected):
            torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-14)
        total = sum(a.square().sum() for a in ([found] if len(h) == 1 else found))
        # The gradient that ranks other than 0 pass has no effect.
        (total if rank == 0 else 3 * total).backward()
        sum(b.square().sum() for b in ([expected] if len(h) == 1 else expected)).backward()
        torch.testing.assert_close(mine.grad, theirs.grad[:, own], rtol=1e-10, atol=1e-14)
        if rank == 0:
            for a, b in zip(h, right):
                torch.testing.assert_close(a.grad, b.grad, rtol=1e-10, atol=1e-14)
    for a, b in zip(made.GRU_models.parameters(), alone.parameters()):
        torch.testing.assert_close(a.grad, b.grad, rtol=1e-10, atol=1e-14)
    assert (made.getFastForwardInfo()[1] == 1) == (kind is FastCell)


@on_ranks(1, 2)
def test_a_sequence_is_solved_by_multigrid_each_way_as_it_was_asked_for(rank, world):
    torch.manual_seed(4)
    cell = ImplicitCell().double()
    made, own = recurrent(cell, 16, rank=rank, Tf=4.0, levels=2)
    made.setCFactor({-1: 4})
    exact, _ = recurrent(copy.deepcopy(cell), 16, rank=rank, Tf=4.0)
    x = sequence(16)
    right = exact(x[:, own])
    right.square().sum().backward()
    grads = [parameter.grad for parameter in exact.parameters()]

    def errors(fwd, bwd):
        made.zero_grad()
        made.setFwdMaxIters(fwd)
        made.setBwdMaxIters(bwd)
        y = made(x[:, own])
        y.square().sum().backward()
        error = sum((p.grad - g).square().sum() for p, g in zip(made.parameters(), grads))
        return (y - right).norm() / right.norm(), (error / sum(g.square().sum() for g in grads)).sqrt()

    few, more = errors(1, 1), errors(3, 3)
    assert more[0] < few[0] / 2 and more[1] < few[1] / 2
    assert few[1] > 1e-6, "it is inexact"
    assert made.getFwdStats()[0] == 3 and made.getBwdStats()[1] > 0
    assert max(errors(5, 5)) < 1e-12, (
        "after as many iterations as there are intervals, and one for the output, all is exact"
    )
    assert cell.times == {(0, 0.25), (1, 1.0)}
    # The forward pass is now exact. The backward pass stays inexact until its own levels are set.
    made.fwd_app.max_levels = 1
    found = errors(1, 1)
    assert found[0] < 1e-12 and found[1] > 1e-6
    made.bwd_app.max_levels = 1
    assert max(errors(1, 1)) < 1e-12


@on_ranks(2)
def test_a_sequence_may_have_another_length(rank, world):
    made, _ = recurrent(FastCell().double(), 16, rank=rank, levels=3)
    for count, levels in ((16, 3), (5, 3), (3, 2), (16, 3)):
        own = slice(0, count - 2) if rank == 0 else slice(count - 2, count)
        x = sequence(count)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            y = made(x[:, own])
        assert y.shape == (LAYERS, 4, HIDDEN) and made.body.fwd.levels == levels
        y.sum().backward()


@on_ranks(2)
def test_dt_is_the_time_by_the_steps_of_the_batch_and_not_by_the_declared_ones(rank, world):
    cell = FastCell().double()
    with recorded_warnings() as said:
        # Scripts may give each rank only the integer part of its share: 27 steps, of which 2 ranks declare 13 each.
        made = torchbraid.GRU_Parallel(MPI.COMM_WORLD, cell, 13, HIDDEN, LAYERS, 27 * 0.25)
        x = sequence(27)
        state = torch.zeros(LAYERS, 4, HIDDEN, dtype=torch.float64)
        right = torchbraid.GRU_Serial(cell, LAYERS, HIDDEN, 0.25)(x, state)
        y = made(x[:, slice(0, 14) if rank == 0 else slice(14, 27)])
        assert made.dt == 0.25
        torch.testing.assert_close(y, right, rtol=1e-12, atol=1e-12)
        grads = torch.autograd.grad(right.square().sum(), cell.parameters(), allow_unused=True)
        # Another batch goes forward before the first batch goes backward.
        made(x[:, :9])
        assert made.dt == 27 * 0.25 / 18
        y.square().sum().backward()
    for parameter, gradient in zip(made.parameters(), grads):
        if gradient is not None:
            torch.testing.assert_close(parameter.grad, gradient, rtol=1e-10, atol=1e-12)
    texts = [str(one.message) for one in said]
    assert rank or any(
        "a batch has 27 steps, but num_steps of all ranks is 26; dt is Tf / 27" in text for text in texts
    )


@on_ranks(2)
def test_a_cell_that_may_be_fast_forwarded_is_not_where_that_is_turned_off(rank, world):
    calls = []

    class Counted(FastCell):
        def forward(self, *arguments):
            calls.append("forward")
            return super().forward(*arguments)

        def fastForward(self, *arguments):
            calls.append("fastForward")
            return super().fastForward(*arguments)

    made, own = recurrent(Counted().double(), 8, rank=rank)
    x = sequence(8)[:, own]
    assert made.fwd_app.has_fastforward
    fast = made(x)
    made.fwd_app.has_fastforward = False
    before = len(calls)
    slow = made(x)
    assert set(calls[before:]) == {"forward"} and made.getFastForwardInfo() == (0.0, 0)
    torch.testing.assert_close(slow, fast, rtol=1e-12, atol=1e-12)
    made.fwd_app.has_fastforward = True
    slow.sum().backward()


@on_ranks(2)
def test_an_exception_in_a_cell_or_a_missing_input_is_raised_on_all_ranks(rank, world):
    class Bad(ImplicitCell):
        is_bad = False

        def forward(self, *arguments):
            if self.is_bad:
                raise RuntimeError("no good")
            return super().forward(*arguments)

    cell = Bad().double()
    made, own = recurrent(cell, 4, rank=rank)
    cell.is_bad = rank == 1
    with pytest.raises(LayerParallelError, match=r"rank 1 of the layers failed in layer \d.*no good"):
        made(sequence(4)[:, own])
    cell.is_bad = False
    with pytest.raises(LayerParallelError, match="give every rank its part of the sequence"):
        made(sequence(4)[:, own] if rank else None)
    made(sequence(4)[:, own]).sum().backward()
    with pytest.raises(NotImplementedError, match="states of a sequence"):
        made.diagnostics(True)
    with pytest.raises(ValueError, match="exact-pipeline"):
        made.body.mode = "exact-pipeline"
    with pytest.raises(ValueError, match=r"num_steps=\[0, 0\]"):
        torchbraid.GRU_Parallel(MPI.COMM_WORLD, cell, 0, HIDDEN, LAYERS, 1.0)


@on_ranks(2)
def test_evaluations_of_a_cell_are_timed(rank, world):
    made, own = recurrent(ImplicitCell().double(), 8, rank=rank)
    made.fwd_app.setBraidTimers(2)
    with torch.no_grad():
        made.eval()(sequence(8)[:, own])
    assert len(made.timer_manager.timer("ForWD::step").getTimes()) >= 4
    assert "body.cell.cell.of_state.0.weight" in made.state_dict()
    assert [made.fwd_app.getTimePointProc(0, point) for point in (0, 4, 5)] == [0, 0, 1]


# ---- settings


@on_ranks(1, 2)
def test_levels_are_as_many_as_the_net_allows(rank, world):
    with recorded_warnings() as said:
        made = net(steps=8, levels=5)
        made.setCFactor(2)
        made(batch()).sum().backward()
    assert made.body.fwd.levels == made.body.bwd.levels == 3
    assert len(said) == (rank == 0)
    assert rank or "3 levels instead of 5: 8 layers by factors of [2, 2, 2]" in str(said[0].message)
    made.setMinCoarse(3)
    assert made.fwd_app.cycle().levels == 2
    assert net([Step, Step], [1, 1], levels=2).fwd_app.cycle() == Cycle(levels=1)


def test_settings_mean_what_they_say():
    made = net(steps=16, levels=2, iters=3, comm=MPI.COMM_SELF)
    assert (made.getFwdMaxIters(), made.getBwdMaxIters()) == (3, 3)
    made.setSkipDowncycle(True)
    with recorded_warnings():
        made.setSkipBwdDowncycle(False)
    made.setFwdMaxIters(2)
    made.setFwdCFactor(4)
    made.setBwdResidualCompute(0)
    made.setFwdFinalFCRelax()
    made.startStateCommunication()
    made.endStateCommunication()
    assert made.fwd_app.cycle() == Cycle(levels=2, factor=(4,), iterations=2, relax=(0,))
    assert made.bwd_app.cycle() == Cycle(levels=2, factor=(2,), iterations=4, relax=(0,), norms="none")
    made.setFMG()
    assert (made.fwd_app.cycle().shape, made.fwd_app.cycle().start) == ("F", "full")
    made(batch()).sum().backward()
    assert made.getFwdStats()[1] > 0 and made.getBwdStats() == (3, -1.0)


def test_settings_without_effect_say_why_once():
    made = net(comm=MPI.COMM_SELF)
    with recorded_warnings() as said:
        for _ in range(2):
            made.fwd_app.setAbsTol(1e-6)
            made.setFwdStorage(0)
            made.setBwdRelaxOnlyCG(1)
            made.setFwdRelaxOnlyCG(0)
    texts = [str(one.message) for one in said]
    assert [text.split(":")[1].split("(")[0].strip() for text in texts] == [
        "setAbsTol",
        "setStorage",
        "setRelaxOnlyCG has no effect",
    ]


@on_ranks(2, fresh=True, init=False)
def test_buffers_of_mpi_say_where_states_are_sent_from(rank, world):
    init_group("cpu:accl")
    with recorded_warnings() as said:
        net(user_mpi_buf=False)
        net(user_mpi_buf=True)
    assert len(said) == (rank == 0) and (rank or "sent from their own memory" in str(said[0].message))


@on_ranks(2)
def test_layers_that_no_backend_sends_from_are_refused(rank, world):
    made = net(lambda: Step().to("meta"), 2)
    with pytest.raises(ValueError, match="has no backend for that device"):
        torchbraid._module._check_device(made.ranks, torch.device("mps"))


def test_a_first_guess_is_taken():
    made = net(steps=16, levels=2, iters=1, comm=MPI.COMM_SELF)
    exact = net(steps=16, comm=MPI.COMM_SELF)
    exact.diagnostics(True)
    right = exact(batch())
    times, values = exact.getFineTimePoints()
    # Stores single samples, each in a class of its own.
    storage = utils.MeanInitialGuessStorage(5, 1.0)
    for time, value in zip(times, values):
        storage.addState(time, value.tensors(), range(5))

    class Guess:
        def getState(self, t):
            near = min(storage.getTimeStamps(), key=lambda known: abs(known - t))
            return storage.getState(near, torch.arange(5))

    plain = made(batch())
    residual = made.getFwdStats()[1]
    made.setFwdInitialGuess(Guess())
    guessed = made(batch())
    assert (guessed - right).norm() < (plain - right).norm() / 10 or torch.equal(guessed, right)
    assert made.body.fwd.start == "guess" and made.getFwdStats()[0] == 1
    assert made.getFwdStats()[1] < residual / 10
    made.setFwdInitialGuess(None)
    assert torch.equal(made(batch()), plain)


# ---- what happens to a batch


@on_ranks(2)
def test_timers_are_of_passes_and_of_each_evaluation(rank, world, tmp_path):
    made = inexact()
    made.fwd_app.setBraidTimers(2)
    for _ in range(3):
        made(batch()).sum().backward()
    times = {timer.getName(): len(timer.getTimes()) for timer in made.getTimerManager().getTimers()}
    assert times["ForWD::runBraid"] == times["BckWD::runBraid"] == 3
    assert times["ForWD::step"] >= 3 * 4, "each layer at least once a batch"
    shown = made.getTimersString()
    if rank == 0:
        assert "rank 0" in shown and "rank 1" in shown and "BckWD::runBraid" in shown
    else:
        assert shown is None
    made.bwd_app.setTimerFile("forgotten")
    made.bwd_app.setTimerFile(str(tmp_path / "bwd"))
    made.fwd_app.resetBraidTimer()
    assert [timer.getName() for timer in made.timer_manager.getTimers()] == ["BckWD::runBraid"]
    del made
    gc.collect()
    MPI.COMM_WORLD.Barrier()
    assert sorted(file.name for file in tmp_path.iterdir()) == ["bwd_0000.txt", "bwd_0001.txt"]
    assert "BckWD::runBraid" in (tmp_path / f"bwd_{rank:04d}.txt").read_text()
    # No rank may remove the folder while another rank reads it.
    MPI.COMM_WORLD.Barrier()


@on_ranks(2)
def test_residuals_are_printed_by_rank_0_where_that_is_asked_for(rank, world):
    made = inexact()
    made.setFwdMaxIters(3)
    with contextlib.redirect_stdout(io.StringIO()) as silent:
        made(batch()).sum().backward()
    made.setPrintLevel(1)
    made.setPrintLevel(1, True)
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        made(batch()).sum().backward()
    assert silent.getvalue() == ""
    lines = printed.getvalue().splitlines()
    if rank == 0:
        assert [line.split(",")[0] for line in lines] == [
            "forward: iteration 1",
            "forward: iteration 2",
            "forward: 3 iterations",
            "backward: 1 iteration",
        ]
        assert "factor" in lines[1] and f"residual {made.getFwdStats()[1]:.6e}" in lines[2]
    else:
        assert lines == []


@on_ranks(1, 2, 3)
def test_vectors_go_to_the_root_and_from_it(rank, world):
    made = net()
    found = made.getFinalOnRoot(torch.full((3,), float(rank)))
    assert (found is None) == (rank != 0) and (found is None or torch.equal(found, torch.full((3,), world - 1.0)))
    assert torch.equal(made.copyVectorFromRoot(torch.full((2,), rank + 5.0)), torch.full((2,), 5.0))
    assert made.getMPIComm() is MPI.COMM_WORLD
    assert [made.fwd_app.getTimePointProc(0, point) for point in (0, 1, 8)] == [0, 0, world - 1]


def test_a_net_can_be_copied_and_seen():
    made = inexact(comm=MPI.COMM_SELF)
    made(batch()).sum().backward()
    other = copy.deepcopy(made)
    made.setFwdMaxIters(5)
    assert other.getFwdMaxIters() == 2 and torch.equal(other(batch()), inexact(comm=MPI.COMM_SELF)(batch()))
    assert "rank 0 of 1" in repr(other)
    output = made(batch())
    with pytest.raises(RuntimeError, match="getFineTimePoints"):
        copy.deepcopy(made).getFineTimePoints()
    assert len(made.getFineTimePoints()[0]) == len(made.layer_models) + 1 and output.requires_grad
    other.zero_grad()
    assert all(parameter.grad is None for parameter in other.parameters())
    assert other.to("cpu") is other


# ---- ranks


@on_ranks(1, 2, 3)
def test_objects_go_between_all_ranks(rank, world):
    comm = MPI.COMM_WORLD
    assert (comm.Get_rank(), comm.Get_size(), comm.rank, comm.size) == (rank, world, rank, world)
    assert MPI.COMM_SELF.Get_size() == 1 and MPI.COMM_SELF.allreduce(7) == 7
    assert comm.bcast({"a": rank}, root=world - 1) == {"a": world - 1}
    assert comm.gather(rank, root=0) == (list(range(world)) if rank == 0 else None)
    assert comm.allgather((rank,)) == [(other,) for other in range(world)]
    assert comm.scatter([f"to {other}" for other in range(world)] if rank == 0 else None) == f"to {rank}"
    assert comm.alltoall([(rank, other) for other in range(world)]) == [(other, rank) for other in range(world)]
    total = sum(range(world))
    assert comm.allreduce(rank) == total and comm.reduce(rank, op=MPI.MAX) == (world - 1 if rank == 0 else None)
    assert comm.scan(1) == rank + 1
    assert comm.allreduce((abs(rank - 1), rank), op=MPI.MINLOC) == (0 if world > 1 else 1, 1 if world > 1 else 0)
    assert comm.allreduce(rank < 1, op=MPI.LAND) is (world == 1) and comm.allreduce([rank]) == list(range(world))
    comm.Barrier()
    assert MPI.Wtime() > 0 and MPI.Get_processor_name() and MPI.Is_initialized()


@on_ranks(1, 2, 3)
def test_buffers_go_between_all_ranks(rank, world):
    numpy = pytest.importorskip("numpy")
    comm = MPI.COMM_WORLD
    found = numpy.zeros(4)
    comm.Allreduce([numpy.full(4, rank + 1.0), MPI.DOUBLE], found, op=MPI.SUM)
    assert found.tolist() == [sum(range(1, world + 1))] * 4
    tensor = torch.full((2, 3), float(rank)).t()
    comm.Allreduce(MPI.IN_PLACE, tensor, MPI.MAX)
    assert torch.equal(tensor, torch.full((3, 2), world - 1.0)), "a buffer in another order"
    comm.Bcast(tensor.fill_(rank), root=world - 1)
    assert torch.equal(tensor, torch.full((3, 2), world - 1.0))
    out = numpy.zeros((world, 2), dtype=numpy.int64)
    comm.Allgather(numpy.full(2, rank), out)
    assert out[:, 1].tolist() == list(range(world))
    gathered = torch.zeros(world, 2) if rank == 0 else None
    comm.Gather(torch.full((2,), float(rank)), gathered)
    assert rank or gathered[:, 0].tolist() == list(range(world))
    part = torch.zeros(2)
    comm.Scatter(torch.arange(2.0 * world) if rank == 0 else None, part)
    assert part.tolist() == [2 * rank, 2 * rank + 1]
    reduced = torch.zeros(1)
    comm.Reduce(torch.ones(1), reduced, root=0)
    assert reduced.item() == (world if rank == 0 else 0)
    turned = torch.zeros(world)
    comm.Alltoall(torch.full((world,), float(rank)), turned)
    assert turned.tolist() == list(range(world))
    with pytest.raises(NotImplementedError, match=r"MPI.LAND of buffers"):
        comm.Allreduce(MPI.IN_PLACE, tensor, MPI.LAND)
    with pytest.raises(TypeError, match="lower case"):
        comm.Bcast("text")


@on_ranks(2, 3)
@pytest.mark.parametrize("way", ["accl", "gloo"])
@pytest.mark.parametrize("kind", ["every second", "transposed"])
def test_buffers_that_are_not_dense_have_their_own_elements(rank, world, way, kind):
    group = gloo_group() if way == "gloo" else None
    comm = MPI.COMM_WORLD if group is None else Comm(lambda: group)
    memory = torch.full((16,), -1.0)
    buffer = memory[::2] if kind == "every second" else memory.view(4, 4)[:, ::2].t()
    numbers = torch.arange(8.0).reshape(buffer.shape)

    def filled(by):
        memory.fill_(-1)
        buffer.copy_(numbers + by)
        return buffer

    def holds(wanted):
        return torch.equal(buffer, wanted) and torch.equal(memory[1::2], torch.full((8,), -1.0))

    comm.Bcast(filled(rank), root=world - 1)
    assert holds(numbers + world - 1)
    comm.Allreduce(MPI.IN_PLACE, filled(rank))
    assert holds(world * numbers + sum(range(world)))
    found = torch.zeros(8)
    comm.Allreduce(filled(rank), found)
    assert torch.equal(found, (world * numbers + sum(range(world))).flatten())
    request = comm.Isend(filled(rank), dest=(rank + 1) % world)
    comm.Recv(filled(-9), source=(before := (rank - 1) % world))
    request.wait()
    assert holds(numbers + before)
    gathered = torch.zeros(world, 8)
    comm.Allgather(filled(rank), gathered)
    assert torch.equal(gathered, torch.stack([numbers.flatten() + each for each in range(world)]))


@on_ranks(1, 2, 3)
def test_a_count_that_stands_with_a_buffer_limits_what_a_call_moves(rank, world):
    numpy = pytest.importorskip("numpy")
    comm, root = MPI.COMM_WORLD, world - 1
    ranks, total = list(range(world)), sum(range(1, world + 1))

    def mine(count, dtype=numpy.float64):
        return numpy.full(count, rank + 1, dtype=dtype)

    for form in (
        [2],
        [2, MPI.DOUBLE],
        [2, "d"],
        [(2, 0), MPI.DOUBLE],
        [(2, 0)],
        [[2, 0]],
        [2, 0, MPI.DOUBLE],
        [16, MPI.BYTE],
    ):
        comm.Bcast([buffer := mine(4), *form], root=root)
        assert buffer.tolist() == [world, world, rank + 1, rank + 1], form
    for form in ([], [MPI.DOUBLE], [None, MPI.DOUBLE]):
        comm.Bcast([buffer := mine(4), *form], root=root)
        assert buffer.tolist() == [world] * 4, form
    comm.Bcast([buffer := torch.full((2, 2), rank + 1.0).t(), (2, 1)], root=root)
    assert buffer.flatten().tolist() == [rank + 1, world, world, rank + 1], "in another order"
    comm.Allreduce([mine(4), 2], [buffer := numpy.zeros(4), (2, 1), MPI.DOUBLE])
    assert buffer.tolist() == [0, total, total, 0]
    comm.Allreduce(MPI.IN_PLACE, [buffer := mine(3), 1], MPI.MAX)
    assert buffer.tolist() == [world, rank + 1, rank + 1]
    comm.Reduce([mine(4), (1, 3)], [buffer := numpy.zeros(4), 1], root=root)
    assert buffer.tolist() == [total if rank == root else 0, 0, 0, 0]
    # A count is the count of one rank's block, as in MPI.
    comm.Allgather([mine(4), 1], [buffer := numpy.zeros(world + 2), (1, 1)])
    assert buffer.tolist() == [0, *(other + 1 for other in ranks), 0]
    block = numpy.zeros(world)
    block[rank] = rank + 1
    comm.Allgather(MPI.IN_PLACE, block)
    assert block.tolist() == [other + 1 for other in ranks]
    comm.Gather(MPI.IN_PLACE if rank == root else [mine(4), 1], mine(world) if rank == root else None, root=root)
    comm.Scatter([numpy.arange(2.0 * world), 2] if rank == root else None, [part := mine(3), 2], root=root)
    assert part.tolist() == [2 * rank, 2 * rank + 1, rank + 1]
    comm.Scatter(numpy.arange(1.0 * world), MPI.IN_PLACE if rank == root else mine(1), root=root)
    comm.Alltoall([mine(world + 1), 1], [turned := numpy.zeros(world + 1), (1, 1)])
    assert turned.tolist() == [0, *(other + 1 for other in ranks)]
    comm.Alltoall(MPI.IN_PLACE, mine(world))
    after, before = (rank + 1) % world, (rank - 1) % world
    comm.Send([mine(4, numpy.int32), (2, 1), MPI.INT], dest=after)
    status = MPI.Status()
    comm.Irecv([into := numpy.zeros(4, dtype=numpy.int32), (3, 1)], source=before).wait(status)
    assert into.tolist() == [0, before + 1, before + 1, 0]
    assert (status.Get_source(), status.Get_count(MPI.INT), status.Get_count(), status.Get_count(MPI.DOUBLE)) == (
        before, 2, 8, 1,
    )  # fmt: skip


@on_ranks(1, 2, 3)
def test_parts_of_different_lengths_go_between_ranks_by_counts_and_displacements(rank, world):
    numpy = pytest.importorskip("numpy")
    comm, root = MPI.COMM_WORLD, world - 1
    counts = [other + 1 for other in range(world)]
    length, mine = sum(counts), numpy.full(rank + 1, rank + 1, dtype=numpy.int64)
    whole = [other + 1 for other in range(world) for _ in range(other + 1)]
    starts = [sum(counts[:other]) for other in range(world)]
    for form in ([counts], [(counts, starts)], [counts, MPI.LONG], [counts, starts, MPI.LONG]):
        comm.Allgatherv(mine, [found := numpy.zeros(length, dtype=numpy.int64), *form])
        assert found.tolist() == whole, form
    comm.Gatherv(mine, [found := numpy.zeros(length, dtype=numpy.int64), counts] if rank == root else None, root=root)
    assert rank != root or found.tolist() == whole
    turned = [length - count for count in [sum(counts[: other + 1]) for other in range(world)]]
    comm.Allgatherv([mine, MPI.LONG], [found := numpy.zeros(length, dtype=numpy.int64), (counts, turned)])
    assert found[turned[rank] : turned[rank] + rank + 1].tolist() == mine.tolist()
    own = numpy.zeros(length, dtype=numpy.int64)
    own[starts[rank] : starts[rank] + rank + 1] = rank + 1
    comm.Allgatherv(MPI.IN_PLACE, [own, counts])
    assert own.tolist() == whole
    comm.Scatterv(
        [own, counts] if rank == root else None, [part := numpy.zeros(world, dtype=numpy.int64), rank + 1], root=root
    )
    assert part.tolist() == [rank + 1] * (rank + 1) + [0] * (world - rank - 1)
    comm.Alltoallv([own, counts], [found := numpy.zeros(world * (rank + 1), dtype=numpy.int64), rank + 1])
    assert found.tolist() == [rank + 1] * (rank + 1) * world
    with pytest.raises(ValueError, match=r"Allgatherv: rank 0 sends 1 elements to rank 0, but rank 0 expects 2"):
        comm.Allgatherv(mine, [numpy.zeros(length + world, dtype=numpy.int64), [count + 1 for count in counts]])
    comm.Barrier()


def test_forms_of_buffers_that_do_not_fit_are_refused():
    numpy = pytest.importorskip("numpy")
    comm, four = MPI.COMM_SELF, numpy.zeros(4)
    for form, error, text in (
        (
            [four, 2, MPI.FLOAT],
            TypeError,
            r"Bcast: type MPI.FLOAT is torch.float32, but the buffer has torch.float64",
        ),
        ([four, "i"], TypeError, "type i is torch.int32"),
        ([four, "x"], TypeError, "type 'x'; expected an MPI type"),
        ([four, 5], ValueError, "elements 0 to 5 exceed the buffer's 4"),
        ([four, (2, 3)], ValueError, "elements 3 to 5 exceed"),
        ([four, -1], ValueError, "count -1; expected at least 0"),
        ([four, 2.0], TypeError, "count 2.0; expected an integer"),
        ([four, 2, 0], TypeError, "the last of 3 list entries is not a type"),
        ([four, (1, 2, 3)], TypeError, r"expected \(count, displacement\), got \(1, 2, 3\)"),
        ([], TypeError, "got an empty list"),
        ([torch.zeros(2, 6)[:, ::2], MPI.BYTE], TypeError, "not contiguous"),
    ):
        with pytest.raises(error, match=text):
            comm.Bcast(form)
    for call, error, text in (
        (lambda: comm.Allreduce(numpy.zeros(1), four), ValueError, "sends 1 elements but receives 4"),
        (
            lambda: comm.Allreduce(four, numpy.zeros(4, dtype=numpy.int64)),
            TypeError,
            "the send buffer has torch.float64, the receive buffer torch.int64",
        ),
        (lambda: comm.Allreduce([four, MPI.BYTE], [four, MPI.BYTE]), TypeError, "bytes cannot be summed"),
        (lambda: comm.Allreduce(MPI.IN_PLACE, four, max), TypeError, "expected an operator such as MPI.SUM, got op="),
        (lambda: comm.Reduce(four, numpy.zeros(5)), ValueError, "sends 4 elements but receives 5"),
        (lambda: comm.Gather(four, numpy.zeros(3)), ValueError, "sends 4 elements but receives 3"),
        (lambda: comm.Scatter(four, numpy.zeros(3)), ValueError, "sends 3 elements but receives 4"),
        (lambda: comm.Gatherv(four, [four, [1, 2]]), ValueError, "2 counts for 1 ranks"),
        (lambda: comm.Bcast(four, root=1), ValueError, "Bcast with root 1: this communicator has ranks 0 to 0"),
        (lambda: comm.bcast(1, root=1), ValueError, "bcast with root 1"),
        (lambda: comm.scatter([1, 2]), ValueError, "scatter: 2 objects for 1 ranks"),
        (lambda: comm.alltoall([1, 2]), ValueError, "alltoall: 2 objects for 1 ranks"),
    ):
        with pytest.raises(error, match=text):
            call()
    comm.Send(four, dest=0)
    with pytest.raises(TypeError, match=r"Recv: rank 0 sent elements of torch.float64, but the buffer has torch.int64"):
        comm.Recv(numpy.zeros(4, dtype=numpy.int64))
    comm.Send(four, dest=0)
    with pytest.raises(TypeError, match="with Send; receive it with Recv"):
        comm.recv()
    comm.send("text", dest=0)
    with pytest.raises(TypeError, match="sent an object"):
        comm.Recv(four)


def test_methods_of_mpi4py_that_are_missing_say_what_to_use():
    for name, text in (
        ("Iprobe", "has no Iprobe; use recv or Recv with source=MPI.ANY_SOURCE"),
        ("probe", "has no probe; use recv"),
        ("Ibcast", "has no Ibcast; use Bcast, which returns when it is complete"),
        ("Reduce_scatter", "use Allreduce"),
        ("Create_cart", "use torch.distributed with its group"),
    ):
        with pytest.raises(AttributeError, match=text):
            getattr(MPI.COMM_WORLD, name)
        assert not hasattr(MPI.COMM_WORLD, name)
    with pytest.raises(AttributeError, match="has no Win; it has ANY_SOURCE"):
        getattr(MPI, "Win")  # noqa: B009


@on_ranks(1, 2, 3)
def test_messages_are_found_by_source_and_tag(rank, world):
    comm = MPI.COMM_WORLD
    after, before = (rank + 1) % world, (rank - 1) % world
    # All ranks send before they receive, as MPI allows.
    comm.send({"from": rank}, dest=after, tag=7)
    comm.send("second", dest=after, tag=8)
    comm.Send(torch.full((5,), float(rank)), dest=after, tag=9)
    status, into = MPI.Status(), torch.zeros(5)
    comm.Recv(into, source=before, tag=9)
    assert into.tolist() == [float(before)] * 5
    assert comm.recv(source=before, tag=8) == "second"
    assert comm.recv(status=status) == {"from": before}
    assert (status.Get_source(), status.Get_tag()) == (before, 7) and status.Get_count() > 0
    large = torch.randn(1 << 18)
    request = comm.isend(large, dest=after)
    assert comm.irecv(source=before).wait().shape == large.shape
    request.wait()
    assert comm.sendrecv(rank, dest=after, source=before) == before
    comm.Send(torch.ones(4), dest=after)
    with pytest.raises(ValueError, match=r"rank \d sent 16 bytes, but the buffer has 2 elements"):
        comm.Recv(torch.zeros(2), source=before)
    with pytest.raises(ValueError, match=f"ranks 0 to {world - 1}"):
        comm.send(1, dest=world)


@on_ranks(3)
def test_communicators_are_split(rank, world):
    comm = MPI.COMM_WORLD
    turned = comm.Split(0, -rank)
    assert turned.Get_rank() == 2 - rank and turned.allgather(rank) == [2, 1, 0]
    part = comm.Split(MPI.UNDEFINED if rank == 1 else 5, rank)
    if rank == 1:
        assert not part and part is MPI.COMM_NULL
        with pytest.raises(ValueError, match="COMM_NULL"):
            part.Get_size()
    else:
        assert part.allgather(rank) == [0, 2]
        made = net(comm=part, steps=4)
        y = made(batch())
        y.sum().backward()
        assert torch.equal(y, serial(made, batch())[1]), "the first has it, and the last"
        with pytest.raises(NotImplementedError, match=r"Split of 2 ranks.*split MPI.COMM_WORLD"):
            part.Split()
    (alone,) = comm.Split(rank).allgather(rank)
    assert alone == rank
    same = comm.Dup()
    comm.send("of the world", dest=rank)
    same.send("of its copy", dest=rank)
    assert same.recv() == "of its copy" and comm.recv() == "of the world"
    same.Free()
    assert comm.Split_type(MPI.COMM_TYPE_SHARED).Get_size() == 3


class Foreign:
    """A communicator with the interface of mpi4py."""

    def __init__(self, rank, size):
        self._of = rank, size

    def Get_rank(self):
        return self._of[0]

    def Get_size(self):
        return self._of[1]

    def bcast(self, obj, root=0):
        raise AssertionError("the group is there")


@on_ranks(2)
def test_a_real_communicator_has_the_ranks_of_the_world_or_is_refused(rank, world):
    made = net(comm=Foreign(rank, world))
    assert made.getMPIComm().Get_size() == 2 and made.ranks is MPI.COMM_WORLD
    made(batch())
    with pytest.raises(ValueError, match=r"of 1 rank was given.*world of 2.*mpi4py"):
        net(comm=Foreign(0, 1))
    with pytest.raises(ValueError, match=r"of 3 ranks was given.*world of 2"):
        net(comm=Foreign(rank, 3))
    with pytest.raises(ValueError, match=rf"rank {1 - rank} of a communicator was given on rank {rank}"):
        net(comm=Foreign(1 - rank, 2))
    with pytest.raises(TypeError, match="or one of mpi4py, got int"):
        net(comm=3)
    MPI.Init("accl")
    with pytest.raises(ValueError, match=r"MPI.Init\('gloo'\): the existing group has the backend"):
        MPI.Init("gloo")
    for comm in (dist.group.WORLD, dist.init_device_mesh("cpu", (2,))):
        assert len(net(comm=comm).layer_models) == 4


@on_ranks(4)
def test_two_by_two_ranks_have_the_gradients_of_one(rank, world):
    comm_dp, comm_lp = utils.split_communicator(MPI.COMM_WORLD, 2)
    assert (comm_dp.allgather(rank), comm_lp.allgather(rank)) == (
        [rank // 2 * 2, rank // 2 * 2 + 1],
        [rank % 2, rank % 2 + 2],
    )
    made = inexact(lambda: Step().double(), comm=comm_lp)
    torch.manual_seed(5)
    compose = made.comp_op()
    head = compose(lambda: nn.Linear(WIDTH, WIDTH).double())
    x = batch(8, dtype=torch.float64)
    replica = comm_dp.rank
    y = made(compose(head, x[4 * replica : 4 * replica + 4])) if comm_lp.rank == 0 else made(torch.tensor(4))
    compose(lambda y: y.square().mean(), y).backward()
    utils.average_gradients(made, comm_dp)
    alone = inexact(lambda: Step().double(), comm=MPI.COMM_SELF)
    torch.manual_seed(5)
    other = nn.Linear(WIDTH, WIDTH).double()
    alone(other(x)).square().mean().backward()
    right = gradients(alone)
    for name, parameter in made.body.named_parameters():
        torch.testing.assert_close(parameter.grad, right[name], rtol=1e-12, atol=1e-15)
    with pytest.raises(ValueError, match="4 ranks cannot be cut into groups of 3"):
        utils.split_communicator(MPI.COMM_WORLD, 3)


@on_ranks(2)
def test_gradients_that_some_ranks_lack_count_as_zero(rank, world):
    model = nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2).double(), nn.Linear(2, 2)])
    model[0].weight.grad = torch.full((2, 2), float(rank))
    if rank == 1:
        model[1].weight.grad = torch.ones(2, 2, dtype=torch.float64).t()
    utils.average_gradients(model, MPI.COMM_WORLD)
    assert torch.equal(model[0].weight.grad, torch.full((2, 2), 0.5))
    assert torch.equal(model[1].weight.grad, torch.full((2, 2), 0.5, dtype=torch.float64))
    assert model[2].weight.grad is None


# ---- utilities


@on_ranks(1, 2)
def test_regularization_is_that_of_all_layers_on_rank_0(rank, world):
    made = net()
    found = utils.l2_reg(made, MPI.COMM_WORLD)
    whole, _ = serial(made, batch())
    right = sum(parameter.square().sum().item() for parameter in whole.parameters())
    assert rank or found.item() == pytest.approx(right, rel=1e-6)
    found.backward()
    for parameter in made.parameters():
        assert torch.equal(parameter.grad, 2 * parameter)
    assert utils.l2_reg(nn.ReLU()).item() == 0


def test_seeds_and_devices_are_by_rank():
    assert len({utils.seed_from_rank(1, rank) for rank in range(100)}) == 100
    assert utils.seed_from_rank(2, 3) == utils.seed_from_rank(4, 1) < 1 << 32
    if not torch.cuda.is_available():
        assert utils.getDevice(MPI.COMM_WORLD) == (torch.device("cpu"), torch.device("cpu"))
    assert torchbraid.getDevice is utils.getDevice


def test_buffers_have_the_elements_of_their_tensors_exactly():
    tensors = [torch.randn(3, 2), None, torch.arange(5, dtype=torch.int16), torch.empty(0), torch.randn(4).double().t()]
    packed = utils.pack_buffer(tensors)
    assert packed.shape == (utils.buffer_size(tensors),) == (3 * 2 + 5 + 4,) and packed.dtype == torch.float64
    into = [None if tensor is None else torch.zeros_like(tensor) for tensor in tensors]
    utils.unpack_buffer(into, packed)
    assert all(a is None or torch.equal(a, b) for a, b in zip(tensors, into))
    for mixed, dtype in (
        ([torch.float32, torch.int16], torch.float32),
        ([torch.float32, torch.int32], torch.float64),
        ([torch.float16, torch.bfloat16, torch.bool], torch.float32),
        ([torch.int64, torch.uint8], torch.int64),
        ([torch.complex64, torch.int32], torch.complex128),
        ([], torch.float32),
    ):
        assert utils.pack_buffer([torch.zeros(2, dtype=each) for each in mixed]).dtype == dtype
    with pytest.raises(TypeError, match=r"no type holds torch.float32 and torch.int64 exactly"):
        utils.pack_buffer([torch.zeros(1), torch.zeros(1, dtype=torch.int64)])
    with pytest.raises(ValueError, match=r"has 15 elements, but the tensors have 6"):
        utils.unpack_buffer(tensors[0], packed)


def test_parts_of_a_data_set_are_batches_by_turns():
    state = torch.random.get_rng_state()
    whole = utils.Partioner(list(range(100, 123)), 2, seed=5, batch_size=4)
    parts = [whole.get_partion(rank) for rank in range(2)]
    assert [len(part) for part in parts] == [12, 11]
    found = [part[index] for part in parts for index in range(len(part))]
    assert sorted(found) == list(range(100, 123)) and found != sorted(found)
    other = utils.Partioner(list(range(100, 123)), 1, seed=5, batch_size=8).get_partion(0)
    assert [other[index] for index in range(4)] == [parts[0][index] for index in range(4)]
    assert [other[4 + index] for index in range(4)] == [parts[1][index] for index in range(4)]
    assert torch.equal(torch.random.get_rng_state(), state)


def test_parts_of_a_data_set_are_those_that_torchbraid_makes_of_a_seed():
    numpy = pytest.importorskip("numpy")
    for length, seed in ((20, 1), (1000, 7)):
        state = numpy.random.get_state()
        numpy.random.seed(seed)
        order = numpy.arange(length)
        numpy.random.shuffle(order)
        numpy.random.set_state(state)
        whole = utils.Partioner(range(length), 3, seed=seed, batch_size=2)
        assert [numpy.array_equal(a, b) for a, b in zip(state, numpy.random.get_state())] == [True] * len(state)
        by_turns = [order[first : first + 2].tolist() for first in range(0, length, 2)]
        for rank in range(3):
            assert whole.partitions[rank] == [number for batch in by_turns[rank::3] for number in batch]


def test_means_of_states_are_by_class_and_time():
    storage = utils.MeanInitialGuessStorage(3, 0.25)
    first = torch.tensor([[1.0], [3.0], [8.0]])
    storage.addState(0.5, first, [0, 0, 2])
    assert list(storage.getTimeStamps()) == [0.5]
    (found,) = storage.getState(0.5, torch.tensor([2, 0, 1]))
    assert found.tolist() == [[2.0], [0.5], [0.0]]
    storage.addState(0.5, (first,), torch.tensor([0, 1, 1]))
    assert storage.getState(0.5, [0, 1, 2])[0].tolist() == [[0.75 * 0.5 + 0.25], [0.25 * 5.5], [2.0]]
    with pytest.raises(KeyError, match="no state for time"):
        storage.getState(1.0, [0])
    with pytest.raises(ValueError, match="got classes 0 to 3, but class_count is 3"):
        storage.addState(0.5, first, [0, 1, 3])
    with pytest.raises(ValueError, match="2 classes for states of"):
        storage.addState(0.5, first, [0, 1])
    for arguments in ((0, 0.5), (-1, 0.5), (2, 1.1), (2, -0.1)):
        for error in (ValueError, AssertionError):
            with pytest.raises(error, match="MeanInitialGuessStorage"):
                utils.MeanInitialGuessStorage(*arguments)


def test_small_ones(capsys):
    assert utils.pickle_size([1, 2]) > 10
    kept = torch.zeros(1 << 18)
    kept.label = "kept"
    utils.tensor_memory("here", min_size=1 << 19)
    utils.tensor_memory("total", total_only=True)
    lines = capsys.readouterr().out.splitlines()
    assert any("here: 1.00 MiB" in line and "kept" in line for line in lines)
    assert len([line for line in lines if "total" in line]) == 1 and "tensors" in lines[-1]
    assert "test_small_ones" in utils.stack_string("> ") and utils.git_rev()
    timers = utils.ContextTimerManager()
    with timers.timer("twice") as timer:
        assert timer.isTiming() and timer.getName() == "twice"
    with pytest.raises(KeyError), timers.timer("twice"):
        raise KeyError
    assert len(timer.getTimes()) == 2 and not timer.isTiming()
    assert timers.getResultString().splitlines()[2].split()[:3] == ["twice", "|", "2"]
    timers.resetTimers()
    assert timers.getTimers() == []


def test_levels_are_counted_and_the_root_prints(capsys):
    found = [mgopt.compute_levels(steps, size, factor) for steps, size, factor in ((64, 1, 4), (32, 3, 4), (2, 3, 4))]
    assert found == [4, 2, 1]
    mgopt.root_print(0, 1, 1, "said")
    mgopt.root_print(0, 1, 2, "not said")
    mgopt.root_print(1, 1, 1, "nor this")
    assert capsys.readouterr().out == "said\n"
    with pytest.raises(ValueError, match="a cfactor of at least 2"):
        mgopt.compute_levels(8, 2, 1)


# ---- nested iteration and MG/Opt

DOUBLE = torch.float64
# With this option a coarse objective agrees with the finer objective to first order.
TRANSPOSED = "accl_transposed_interp_params"
BACKTRACK = ("tb_simple_backtrack_ls", {"ls_params": {"n_line_search": 4, "alpha": 1.0, "c1": 1e-4}})


class Smooth(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.norm = nn.BatchNorm1d(WIDTH)

    def forward(self, x):
        return torch.tanh(self.norm(self.linear(x)))


class Whole(nn.Module):
    """A model as in scripts: a head, a LayerParallel, a tail."""

    def __init__(self, global_steps, layer=Smooth, comm=MPI.COMM_WORLD, cfactor=0):
        super().__init__()
        levels = 2 if cfactor else 1
        self.parallel_nn = torchbraid.LayerParallel(comm, layer, global_steps, 1.0, levels, levels, 2)
        if cfactor:
            self.parallel_nn.setCFactor(cfactor)
            self.parallel_nn.setSkipDowncycle(True)
            self.parallel_nn.setBwdMaxIters(1)
        self.compose = self.parallel_nn.comp_op()
        self.open_nn = self.compose(nn.Linear, 4, WIDTH)
        self.close_nn = self.compose(nn.Linear, WIDTH, 3)
        self.double()

    def forward(self, x):
        return self.compose(self.close_nn, self.parallel_nn(self.compose(self.open_nn, x)))


def samples(count=3, rows=8):
    """A list of batches, which serves as a loader."""
    generator = torch.Generator().manual_seed(5)
    return [
        (torch.randn(rows, 4, generator=generator, dtype=DOUBLE), torch.randint(3, (rows,), generator=generator))
        for _ in range(count)
    ]


SGD = ("pytorch_sgd", {"lr": 0.1, "momentum": 0.9})


def hierarchy(steps=(2, 4), epochs=0, make=Whole, loader=None, seed=7, **options):
    solver = mgopt.mgopt_solver()
    # The finest level comes first.
    networks = [("Factory", {"global_steps": count}) for count in reversed(steps)]
    given = {"optims": SGD, "seed": seed, "mgopt_printlevel": 0, **options}
    solver.initialize_with_nested_iteration(
        lambda level, **arguments: make(**arguments), steps, loader or samples(), samples(2), networks, epochs, **given
    )
    return solver


def body_of(model):
    """Returns the same net built with `layer_parallel`, with head and tail as its first and last layer."""
    inner = model.parallel_nn.body
    serial_, rank = inner.to_serial(), model.parallel_nn.ranks.rank
    head, tail = copy.deepcopy(model.parallel_nn.ranks.bcast((model.open_nn, model.close_nn) if rank == 0 else None))
    # The last pass was a test, which left the layers in evaluation mode.
    made = Body(
        [head, *(ode(layer) for layer in serial_.layers), tail], group=inner.wire.group or "alone", mode="exact-wave"
    )
    return made.train()


def all_values(model):
    """Returns parameters and buffers of the whole net, on all ranks, by the names that `body_of` gives them."""
    count = len(model.parallel_nn.body.to_serial().layers)
    found = {}
    for name, value in model.state_dict().items():
        part, _, rest = name.partition(".")
        if part == "parallel_nn":
            _, _, number, rest = rest.split(".", 3)
            found[f"layers.{int(number) + 1}.{rest}"] = value
        else:
            found[f"layers.{0 if part == 'open_nn' else count + 1}.{rest}"] = value
    return {name: value for part in model.parallel_nn.ranks.allgather(found) for name, value in part.items()}


def assert_alike(model, body, rtol=1e-12):
    found = all_values(model)
    for name, value in body.state_dict().items():
        torch.testing.assert_close(found[name], value, rtol=rtol, atol=1e-14, msg=lambda text: f"{name}: {text}")


def optimizer_for(parameters, level=0):
    parameters = list(parameters)
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9) if parameters else None


@pytest.mark.slow
@on_ranks(3)
@pytest.mark.parametrize("how", ["injection", "linear"])
def test_nested_iteration_is_that_of_the_core(rank, world, how):
    name = "tb_get_linear_interp_params" if how == "linear" else "tb_parallel_get_injection_interp_params"
    begun, solver = hierarchy((2, 4, 8)), hierarchy((2, 4, 8), epochs=1, interp_params=name)
    assert [len(each.model.parallel_nn.body.to_serial().layers) for each in solver.levels] == [8, 4, 2]
    body = body_of(begun.levels[-1].model)
    for level in (2, 1, 0):
        optimizer = optimizer_for(body.parameters())
        for x, target in samples():
            body.zero_grad()
            body.step(x, target, functional.cross_entropy)
            if optimizer is not None:
                optimizer.step()
        assert_alike(solver.levels[level].model, body)
        if level:
            body = refined(body, 2, interpolation="linear" if how == "linear" else "constant")


@pytest.mark.slow
@on_ranks(3)
@pytest.mark.parametrize("how", ["injection", "linear"])
def test_a_v_cycle_is_that_of_the_core(rank, world, how):
    name = "tb_get_linear_interp_params" if how == "linear" else "tb_get_injection_interp_params"
    solver = hierarchy((2, 4, 8), epochs=1, interp_params=name, preserve_optim=False)
    body = body_of(solver.levels[0].model)
    interpolation = "linear" if how == "linear" else "constant"
    cycle = MGOpt(
        body,
        optimizer_for(body.parameters()),
        levels=3,
        interpolation=interpolation,
        coarse=3,
        coarse_optimizer=optimizer_for,
    )
    losses = solver.mgopt_solve(
        samples(), None, nrelax_coarse=3, mgopt_printlevel=0, restrict_grads=TRANSPOSED, line_search=BACKTRACK
    )
    wanted = [float(cycle.step(x, target, functional.cross_entropy)) for x, target in samples()]
    assert_alike(solver.levels[0].model, body)
    lengths = [[each.length for each in cycle.corrections if each.level == level][-1] for level in (0, 1)]
    assert [each.out_ls_step[-1] for each in solver.levels[:2]] == lengths
    # `mgopt_solve` reports the loss of a cycle's last step, and `MGOpt.step` the loss of its first step.
    assert len(losses) == 3 and all(found < before for found, before in zip(losses, wanted))


@pytest.mark.slow
@on_ranks(3)
def test_mgopt_does_not_depend_on_the_number_of_ranks(rank, world):
    searches = [
        ("tb_simple_ls", {"ls_params": {"alphas": [0.1, 0.5]}}),
        ("tb_adam_no_ls", {"ls_params": {}}),
        ("tb_simple_weighting", {"ls_params": {"alpha": 0.5}}),
        BACKTRACK,
    ]
    found = []
    for comm in (MPI.COMM_WORLD, MPI.COMM_SELF) if rank == 0 else (MPI.COMM_WORLD,):
        solver = hierarchy(
            (2, 4, 8),
            epochs=1,
            loader=samples(1),
            make=lambda global_steps: Whole(global_steps, comm=comm, cfactor=2),
            optims=("pytorch_adam", {"lr": 0.01}),
            criterions=("tb_mgopt_cross_ent_plus_continuity", {"continuity_constant": 0.01}),
        )
        losses = []
        for number, search in enumerate(searches):
            losses += solver.mgopt_solve(
                samples(1),
                None,
                nrelax_coarse=1,
                mgopt_iter=2 if search is BACKTRACK else 1,
                mgopt_printlevel=0,
                preserve_optim=bool(number % 2),
                restrict_params="tb_get_linear_restrict_params",
                restrict_grads=["tb_get_linear_restrict_params", "tb_parallel_get_injection_restrict_params"],
                line_search=search,
            )
        found.append((losses, [each.out_ls_step for each in solver.levels], all_values(solver.levels[0].model)))
    losses, steps, values = found[0]
    if rank == 0:
        others, alone, right = found[1]
        assert losses == others and steps == alone
        assert all(torch.equal(values[name], right[name]) for name in right)
    assert steps[0][0] in (0.1, 0.5) and steps[0][1:3] == [None, 0.5] and steps[2] == []
    assert len(steps[0]) == len(steps[1]) == 5


@on_ranks(2)
@pytest.mark.parametrize("how", ["constant", "linear"])
def test_objectives_of_two_levels_change_alike_to_first_order(rank, world, how):
    from torch_accl.compat.torchbraid import _mgopt_cycle, _mgopt_levels, _mgopt_options

    option = f"tb_get_{'linear' if how == 'linear' else 'injection'}_interp_params"
    solver = hierarchy((4, 8), epochs=1, interp_params=option)
    criterion = _mgopt_options.criterion_of(("tb_mgopt_cross_ent_plus_continuity", {"continuity_constant": 0.1}))
    fine, coarse = (_mgopt_levels.Level(each.model, criterion, each.optimizer) for each in solver.levels)
    transfer = _mgopt_levels.Transfer(fine, coarse, 2, how)
    pair = _mgopt_cycle.LevelPair(transfer, "injection", "transposed", _mgopt_options.line_search_of(BACKTRACK))
    cycle = _mgopt_cycle.Cycle([fine, coarse], [pair], pre=0, post=0, coarse=1, say=lambda *_: None)
    batch = _mgopt_levels.Batch(*samples(1)[0], 0, _mgopt_levels.Draws(torch.device("cpu")))
    fine.begin()
    coarse.begin()
    point = fine.evaluate(batch)
    start = cycle._descend(0, point, batch)
    again = coarse.evaluate(batch)
    assert again.objective == pytest.approx(start.objective, rel=1e-14)
    for seed in range(2):
        direction = {}
        for layer, tensors in coarse.values().items():
            generator = torch.Generator().manual_seed(1000 * seed + layer + 1)
            direction[layer] = [torch.randn(t.shape, generator=generator, dtype=t.dtype) for t in tensors]
        there = transfer.interpolated(direction)
        slopes = []
        for level, change in ((coarse, direction), (fine, there)):
            begun, values = level.values(), []
            for length in (-1e-5, 1e-5):
                level.move(begun, change, length)
                values.append(level.objective(batch))
            level.move(begun, change, 0.0)
            slopes.append((values[1] - values[0]) / 2e-5)
        # The error of central differences grows with the square of the length, and with rounding divided by the length.
        assert slopes[0] == pytest.approx(slopes[1], rel=1e-5, abs=1e-8)
        assert fine.product(point.gradients, there, "a test") == pytest.approx(slopes[1], rel=1e-5, abs=1e-8)
        assert coarse.product(again.gradients, direction, "a test") == pytest.approx(slopes[0], rel=1e-5, abs=1e-8)


@on_ranks(1, 2)
def test_injected_gradients_are_those_of_every_second_layer_and_linear_ones_are_weighed(rank, world):
    from torch_accl.compat.torchbraid import _mgopt_levels, _mgopt_options

    solver = hierarchy((3, 6))
    criterion = _mgopt_options.criterion_of(("tb_mgopt_cross_ent", {}))
    fine, coarse = (_mgopt_levels.Level(each.model, criterion, None) for each in solver.levels)
    transfer = _mgopt_levels.Transfer(fine, coarse, 2, "constant")
    field = {layer: [torch.full_like(p, 10.0**layer) for p in each] for layer, each in fine.trained().items()}
    shown = {}
    for how in ("injection", "linear", "transposed"):
        found = transfer.restricted(field, how)
        numbers = {layer: float(each[0].mean()) for layer, each in found.items() if layer >= 0}
        shown[how] = {k: v for part in fine.comm.allgather(numbers) for k, v in part.items()}
    assert shown["injection"] == {0: 1, 1: 100, 2: 10000}
    # The first layer's value is taken unchanged.
    assert shown["linear"] == {0: 1, 1: 2.5 + 50 + 250, 2: 250 + 5000 + 25000}
    assert shown["transposed"] == {0: 11, 1: 1100, 2: 110000}


def test_options_that_there_are_not_are_refused_with_those_that_there_are():
    for options, text in (
        ({"interp_params": "tb_cubic"}, "interp_params='tb_cubic': give one of tb_get_injection_interp_params, "),
        ({"optims": "pytorch_lbfgs"}, "optims='pytorch_lbfgs': give one of pytorch_sgd, pytorch_adam"),
        ({"criterions": "hinge"}, "criterions='hinge': give one of tb_mgopt_cross_ent, .*, tb_mgopt_regression"),
        ({"interp_params": ("tb_get_linear_interp_params", {"share": 1})}, "has no argument share; it takes cf, "),
        (
            {"criterions": ("tb_mgopt_cross_ent", {"weight": 1})},
            "tb_mgopt_cross_ent has no argument weight; it takes none",
        ),
        ({"steps": (2, 5)}, r"ni_steps=\[2, 5\]: give numbers that grow by the same integer factor"),
        ({"steps": (2, 4, 12)}, r"ni_steps=\[2, 4, 12\]"),
    ):
        with pytest.raises(ValueError, match=text):
            hierarchy(**options)
    with pytest.raises(RuntimeError, match="call initialize_with_nested_iteration before"):
        mgopt.mgopt_solver().mgopt_solve(samples(), samples())
    solver = hierarchy()
    for options, text in (
        ({"line_search": "tb_wolfe"}, "line_search='tb_wolfe': give one of tb_simple_backtrack_ls, tb_simple_ls, "),
        (
            {"line_search": "tb_simple_ls"},
            r"tb_simple_ls lacks alphas; give \('tb_simple_ls', {'ls_params': {'alphas': ",
        ),
        (
            {"line_search": ("tb_simple_weighting", {"ls_params": {"alpha": 1, "c1": 2}})},
            "has no argument c1; it takes alpha",
        ),
        ({"restrict_grads": "mean"}, "restrict_grads='mean': give one of .*accl_transposed_interp_params"),
        ({"restrict_params": TRANSPOSED}, "restrict_params='accl_transposed_interp_params': give one of tb_get_inj"),
        ({"restrict_states": "all"}, "restrict_states='all': give one of tb_injection_restrict_network_state"),
        ({"mgopt_levels": 3}, "mgopt_levels=3: there are 2 models"),
        ({"nrelax_coarse": 0}, "nrelax_coarse=0: give 1 or more"),
    ):
        with pytest.raises(ValueError, match=text):
            solver.mgopt_solve(samples(), samples(), **options)
    with pytest.raises(TypeError, match="model_factory returned Linear whose parallel_nn is NoneType"):
        hierarchy(make=lambda global_steps: nn.Linear(1, 1))
    with pytest.raises(ValueError, match="has 5 layers, and the next coarser level has 2; .* the level should have 4"):
        hierarchy(make=lambda global_steps: Whole(5 if global_steps == 4 else global_steps))


@pytest.mark.slow
@on_ranks(2)
def test_what_fails_on_one_rank_in_mgopt_is_raised_on_all(rank, world):
    def bad(output, target):
        raise ArithmeticError("no loss")

    with pytest.raises(LayerParallelError, match="the loss failed on rank 0: ArithmeticError: no loss"):
        hierarchy(epochs=1, criterions=bad)
    with pytest.raises(ValueError, match=r"train_loader has \[3, 2\] batches on the ranks"):
        hierarchy(epochs=1, loader=samples(3 - rank))
    solver = hierarchy(epochs=1)
    before, calls = all_values(solver.levels[0].model), []

    def tired(output, target):
        calls.append(1)
        # The calls: one for the model, two for the coarse model, and then those along the correction.
        if len(calls) == 4:
            raise ArithmeticError("it is tired")
        return functional.cross_entropy(output, target)

    for each in solver.levels:
        each.criterions = (tired, {})
    with pytest.raises(LayerParallelError, match="ArithmeticError: it is tired"):
        solver.mgopt_solve(samples(1), None, nrelax_pre=0, nrelax_coarse=2, mgopt_printlevel=0, line_search=BACKTRACK)
    # The model is unchanged, except for the counters and running statistics of its norms.
    after = all_values(solver.levels[0].model)
    assert all(
        torch.equal(after[name], value)
        for name, value in before.items()
        if not name.endswith("tracked") and "running" not in name
    )
    assert len(solver.mgopt_solve(samples(1), None, mgopt_printlevel=0)) == 1


class Numbers(Whole):
    """A model whose output is one number per sample, for a regression loss."""

    def forward(self, x):
        return super().forward(x)[:, :1] if MPI.COMM_WORLD.Get_rank() == 0 else super().forward(x)


@pytest.mark.slow
@on_ranks(1)
def test_losses_and_optimizers_may_be_functions_and_regression_has_coarse_levels(rank, world):
    data = [(x, x[:, :1].sin()) for x, _ in samples(1)] * 4
    for options in (
        {"criterions": "tb_mgopt_regression"},
        {"criterions": functional.mse_loss, "optims": [(torch.optim.AdamW, {"lr": 0.05}), SGD]},
        {"criterions": (functional.huber_loss, {"delta": 0.5}), "preserve_optim": False},
    ):
        solver = hierarchy(epochs=1, make=lambda global_steps: Numbers(global_steps), loader=data, **options)
        losses = solver.mgopt_solve(data, data, mgopt_printlevel=0)
        assert losses[-1] < losses[0] and len(solver.levels[0].out_ls_step) == 4
        assert type(solver.levels[1].optimizer) is torch.optim.SGD


@on_ranks(1)
def test_continuity_is_counted_between_neighbours(rank, world):
    from torch_accl.compat.torchbraid import _mgopt_levels, _mgopt_options

    model = Whole(4)
    criterion = _mgopt_options.criterion_of(("tb_mgopt_cross_ent_plus_continuity", {}))
    level = _mgopt_levels.Level(model, criterion, None)
    x, target = samples(1)[0]
    value = level.learn(x, target)
    found = [parameter.grad.clone() for parameter in model.parameters()]
    model.zero_grad()
    loss = functional.cross_entropy(model(x), target)
    layers = model.parallel_nn.layer_models
    for left, right in itertools.pairwise(layers):
        for a, b in zip(left.parameters(), right.parameters()):
            loss = loss + 1e-4 / (4 * 0.25) * (a - b).square().sum()
    loss.backward()
    assert value == pytest.approx(float(loss.detach()), rel=1e-14)
    for gradient, parameter in zip(found, model.parameters()):
        torch.testing.assert_close(gradient, parameter.grad, rtol=1e-10, atol=1e-14)


@pytest.mark.slow
@on_ranks(1, 2)
def test_a_hierarchy_shows_itself_on_rank_0(rank, world):
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        solver = hierarchy((2, 4), epochs=1, mgopt_printlevel=1, zero_init_guess=True, seed=None)
        solver.mgopt_solve(samples(), samples(1), epochs=2, mgopt_tol=1e9, log_interval=2, mgopt_printlevel=2)
        solver.options_used()
        print(repr(solver))
    text = out.getvalue()
    total, trained, counts, of_trained = solver.operator_complexity()
    # A layer has weights and biases, and its norm has both too.
    assert counts == of_trained == [4 * 54 + 51, 2 * 54 + 51] and total == trained == sum(counts) / counts[0]
    if rank != 0:
        assert not text.strip() and repr(solver) == ""
        return
    for wanted in (
        "nested iteration, model 2 of 2: 4 steps, 267 parameters",
        "batch 3 of 3: loss",
        "test: mean loss",
        "level 1, test:",
        "2 levels",
        "nrelax_coarse: 5",
        "line_search: tb_simple_ls (ls_params=",
        "optims: pytorch_sgd (lr=0.1, momentum=0.9)",
    ):
        assert wanted in text, (wanted, text)
    # If the loss is small enough, no second epoch follows.
    assert text.count("epoch 1") > 0 and "epoch 2" not in text


# ---- launchers

WORLD = """
import sys
import types
from torch_accl.compat.torchbraid import MPI
import torch.distributed as dist

assert not dist.is_initialized()
{before}
comm = MPI.COMM_WORLD
found = (comm.Get_rank(), comm.Get_size(), comm.allreduce(1), dist.get_backend() if dist.is_initialized() else None)
# A single write, because print() may write each argument separately and ranks share the launcher's output.
sys.stdout.write(" ".join(map(str, found)) + "\\n")
"""


@pytest.mark.slow
def test_the_world_is_the_launchers_and_made_when_it_is_asked_for():
    for script in run_script(WORLD.format(before=""), 2):
        assert script.exitcode == 0, script.stderr
        assert script.stdout.split() == [str(script.rank), "2", "2", "accl"] and script.stderr == ""


@pytest.mark.slow
def test_another_backend_can_be_asked_for():
    # gloo aborts some processes that exit with a group: the script destroys its own, and `MPI.Init` the one it made.
    own = "dist.init_process_group('gloo')\nimport atexit; atexit.register(dist.destroy_process_group)"
    for before in ("MPI.Init('gloo')", own):
        for script in run_script(WORLD.format(before=before), 2):
            assert script.exitcode == 0, script.stderr
            assert script.stdout.split() == [str(script.rank), "2", "2", "gloo"]


def test_without_a_launcher_the_world_is_one():
    (script,) = run_script(WORLD.format(before=""), 1, env=dict.fromkeys(OF_A_JOB, ""))
    assert script.exitcode == 0, script.stderr
    assert script.stdout.split() == ["0", "1", "1", "None"]


@pytest.mark.parametrize("name", ["mpirun.openmpi", "mpirun.mpich"])
def test_the_world_is_that_of_mpirun(name, tmp_path):
    ended = run_under(name, WORLD.format(before=""), 2, tmp_path)
    assert ended.returncode == 0, ended.stderr
    assert sorted(line.split() for line in ended.stdout.splitlines()) == [
        ["0", "2", "2", "accl"],
        ["1", "2", "2", "accl"],
    ]


def results(name, launcher, *arguments):
    """Runs a script on two ranks and returns the JSON that rank 0 prints at the end.

    Without a launcher, `run_file` starts the ranks with torchrun's variables.
    """
    if launcher is None:
        ended = run_file(SCRIPTS / name, *arguments, world=2)
    else:
        environment = {key: value for key, value in os.environ.items() if key not in OF_A_JOB}
        command = [*launcher, str(SCRIPTS / name), *arguments]
        ended = subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment)
    assert ended.returncode == 0, ended.stderr
    found = json.loads(next(line for line in reversed(ended.stdout.splitlines()) if line.startswith("{")))
    assert found["procs"] == 2
    return found


TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
SETTINGS = {
    "torchbraid_mnist.py": ("--steps", "8", "--lp-cfactor", "2", "--lp-max-levels", "2"),
    "torchbraid_gru.py": ("--length", "16", "--Tf", "16"),
    "torchbraid_mgopt.py": ("--lp-levels", "2"),
}


def under_mpirun(name):
    """Runs the script under the first MPI launcher that is installed; returns None if there is none."""
    launcher = next((command for command in COMMANDS.values() if shutil.which(command[0])), None)
    return None if launcher is None else results(name, [*launcher, "-n", "2", sys.executable], *SETTINGS[name])


@pytest.mark.slow
def test_a_script_like_the_mnist_example_runs_under_torchrun_and_mpirun(tmp_path):
    name = "torchbraid_mnist.py"
    found = results(name, TORCHRUN, *SETTINGS[name], "--timers", str(tmp_path / "t"))
    assert found["losses"][-1] < found["losses"][0] / 4 and found["correct"][-1] > 0.8 * found["of"]
    assert found["serial_correct"] == found["correct"][-1], "the exported net is the net"
    (forward, residual), (backward, _) = found["stats"]
    assert (forward, backward) == (2, 1) and residual > 0, "it was solved as it was asked for"
    assert "rank 1" in found["timers"]
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        f"t_{way}_{rank:04d}.txt" for way in ("bwd", "fwd") for rank in range(2)
    ]
    mpi = under_mpirun(name)
    assert mpi is None or (mpi["losses"], mpi["correct"]) == (found["losses"], found["correct"])


# Only the MNIST-like script runs under torchrun and MPI launchers: each of their processes takes seconds to load torch.
@pytest.mark.slow
def test_a_script_like_the_gru_example_runs():
    name = "torchbraid_gru.py"
    found = results(name, None, *SETTINGS[name])
    assert found["losses"][-1] < found["losses"][0] / 4 and found["correct"] > 0.8 * found["of"]
    assert found["alike"], "all ranks have the same weights"
    (forward, residual), (backward, _) = found["stats"]
    assert (forward, backward) == (2, 1) and residual > 0


@pytest.mark.slow
def test_a_script_like_the_mgopt_example_runs():
    name = "torchbraid_mgopt.py"
    found = results(name, None, *SETTINGS[name])
    losses, text = found["losses"], found["text"]
    # Six batches per epoch.
    assert len(losses) == 12 and losses[-1] < losses[0] / 4
    assert found["levels"] == [8, 4] and len(found["lengths"]) == 12 and max(found["lengths"]) > 0
    # One test of each model, and one of the finest model after each epoch.
    assert len(found["right"]) == 4 and found["right"][-1] > 0.9 * found["of"]
    assert "nested iteration, model 2 of 2: 8 steps" in text and text.count("nrelax_coarse: 3") == 1


@on_ranks(2)
@pytest.mark.parametrize("dtype", [torch.uint16, torch.uint64, torch.float8_e5m2], ids=str)
def test_elements_of_a_type_that_mpi_lacks_fit_their_own_type_only(rank, world, dtype):
    comm = MPI.COMM_WORLD
    sent = torch.arange(4).to(dtype)
    if rank == 0:
        comm.Send(sent, dest=1, tag=1)
        comm.Send(sent, dest=1, tag=2)
        return
    with pytest.raises(TypeError, match=f"rank 0 sent elements of {dtype}, but the buffer has torch.int32"):
        comm.Recv(torch.zeros(4, dtype=torch.int32), source=0, tag=1)
    found = torch.zeros(4, dtype=dtype)
    comm.Recv(found, source=0, tag=2)
    assert torch.equal(found.view(torch.uint8), sent.view(torch.uint8))


@on_ranks(2)
@pytest.mark.parametrize("is_negative", [False, True], ids=["conj", "neg"])
def test_lazy_views_are_sent_as_the_numbers_that_they_show(rank, world, is_negative):
    comm = MPI.COMM_WORLD
    shown = torch.tensor([1 + 2j, 3 - 4j]).conj()
    shown = shown.imag if is_negative else shown
    if rank == 0:
        comm.Send(shown, dest=1)
        comm.Isend(shown, dest=1).wait()
        return
    for _ in range(2):
        found = torch.zeros(2, dtype=shown.dtype)
        comm.Recv(found, source=0)
        assert torch.equal(found, shown.resolve_conj().resolve_neg())


@on_ranks(2)
def test_the_zero_of_a_rank_without_the_result_has_the_type_of_the_numbers(rank, world):
    made = inexact(Step, comm=MPI.COMM_WORLD)
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        found = made.comp_op()(torch.sum, torch.ones(3, dtype=torch.float32))
    finally:
        torch.set_default_dtype(before)
    assert found.dtype == torch.float32


# ---- messages and receives


@on_ranks(1, 2, 3)
@pytest.mark.parametrize("kind", ["objects", "elements"])
def test_receives_take_messages_in_the_order_in_which_they_were_posted(rank, world, kind):
    comm = MPI.COMM_WORLD
    after, before = (rank + 1) % world, (rank - 1) % world

    def post(source=before, tag=MPI.ANY_TAG):
        if kind == "objects":
            return comm.irecv(source=source, tag=tag)
        into = torch.full((1,), -1.0)
        request = comm.Irecv(into, source=source, tag=tag)
        return types.SimpleNamespace(wait=lambda status=None: (request.wait(status), int(into.item()))[1])

    def send(number, tag=0):
        if kind == "objects":
            comm.send(number, after, tag)
        else:
            comm.Send(torch.tensor([float(number)]), after, tag)

    # Requests of one source are waited for in the opposite order.
    first, second = post(), post()
    send(1)
    send(2)
    assert [second.wait(), first.wait()] == [2, 1]
    # A later blocking receive does not take the message of an earlier request, nor the other way round.
    early, status = post(source=MPI.ANY_SOURCE, tag=5), MPI.Status()
    send(4, tag=4)
    send(5, tag=5)
    send(6, tag=5)
    late = post(tag=5)
    assert post(tag=4).wait() == 4
    assert (late.wait(status), status.Get_source(), status.Get_tag()) == (6, before, 5)
    assert early.wait() == 5
    # Requests posted after their messages came take them in order, too.
    send(7)
    send(8)
    send(9, tag=9)
    assert post(tag=9).wait() == 9
    first, second = post(), post()
    assert [second.wait(), first.wait()] == [8, 7]
    comm.Barrier()


@on_ranks(1)
def test_a_receive_that_fails_takes_no_later_message(rank, world):
    comm = MPI.COMM_WORLD
    with pytest.raises(RuntimeError, match="has not sent itself a message that matches"):
        comm.recv(source=0, tag=3)
    comm.send("mine", dest=0, tag=3)
    assert comm.recv(source=0, tag=3) == "mine"


@on_ranks(2)
def test_buffers_that_cannot_be_written_are_refused_and_may_be_sent(rank, world):
    numpy = pytest.importorskip("numpy")
    comm = MPI.COMM_WORLD
    fixed = numpy.frombuffer(bytes(numpy.full(4, rank + 1.0)))
    locked = numpy.full((4, 2), rank + 1.0)[:, 0]
    locked.flags.writeable = False
    shared = torch.full((1,), rank + 1.0, dtype=torch.float64).expand(4)
    free = numpy.zeros(4)
    for buffer, text in ((fixed, "read-only array"), (locked, "read-only array"), (shared, r"as after expand\(\)")):
        for call in (
            lambda b: comm.Bcast(b, root=1 - rank),
            lambda b: comm.Allreduce(numpy.ones(4), b),
            lambda b: comm.Reduce(numpy.ones(4), b, root=rank),
            lambda b: comm.Allgather(numpy.ones(2), b),
            lambda b: comm.Gather(numpy.ones(2), b, root=rank),
            lambda b: comm.Scatter(None, b, root=1 - rank),
            lambda b: comm.Alltoall(numpy.ones(4), b),
            lambda b: comm.Recv(b),
            lambda b: comm.Irecv([b, 4]),
        ):
            with pytest.raises(TypeError, match=text):
                call(buffer)
        kept = numpy.array(buffer)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            comm.Bcast(buffer if rank == 0 else free, root=0)
            comm.Send(buffer, dest=1 - rank)
            comm.Recv(free, source=1 - rank)
            comm.Allreduce(buffer, free)
        assert free.tolist() == [3.0] * 4
        assert numpy.array_equal(kept, numpy.array(buffer))
    with torch.inference_mode():
        made = torch.zeros(4, 4)[:, ::2]
    comm.Send(torch.arange(8.0) + rank, dest=1 - rank)
    comm.Recv(made, source=1 - rank)
    assert made.flatten().tolist() == [each + 1 - rank for each in range(8)]
    comm.Bcast(made if rank else (own := torch.zeros(4, 2)), root=1)
    assert rank or own.flatten().tolist() == [float(each) for each in range(8)]


@on_ranks(1, 2, 3)
@pytest.mark.parametrize("lazy", ["conjugate", "negative"])
def test_collectives_into_lazy_views_leave_the_numbers_that_they_show(rank, world, lazy):
    comm = MPI.COMM_WORLD
    memory = torch.zeros(3, dtype=torch.complex64)
    view = memory.conj() if lazy == "conjugate" else torch._neg_view(memory)
    wanted = torch.tensor([1 + 2j, 3 - 1j, 2j])
    comm.Bcast(wanted.clone() if rank == 0 else view, root=0)
    assert rank == 0 or torch.equal(view.resolve_conj().resolve_neg(), wanted)
    comm.Allreduce(wanted.clone(), view)
    assert torch.equal(view.resolve_conj().resolve_neg(), world * wanted)
    comm.Allreduce(MPI.IN_PLACE, view)
    assert torch.equal(view.resolve_conj().resolve_neg(), world * world * wanted)


@on_ranks(2, 3)
def test_a_wrong_form_on_one_rank_is_refused_on_all_ranks_of_calls_with_counts(rank, world):
    numpy = pytest.importorskip("numpy")
    comm, mine, whole = MPI.COMM_WORLD, numpy.zeros(1), numpy.zeros(world)
    is_wrong = rank == 0
    counts = [1] * (world + 1) if is_wrong else [1] * world
    for call, error in (
        (lambda: comm.Gatherv(mine, [whole, counts] if is_wrong else None), f"{world + 1} counts"),
        (lambda: comm.Scatterv([whole, counts] if is_wrong else None, mine), f"{world + 1} counts"),
        (lambda: comm.Allgatherv(mine, [whole, counts]), f"{world + 1} counts"),
        (lambda: comm.Alltoallv([whole, counts], whole), f"{world + 1} counts"),
        (lambda: comm.Gatherv("text" if is_wrong else mine, whole), "got str"),
    ):
        with pytest.raises((TypeError, ValueError), match=error) as caught:
            call()
        assert is_wrong or "rank 0 passed a wrong buffer" in str(caught.value)
    comm.Barrier()


@on_ranks(2, fresh=True)
def test_a_receive_of_a_destroyed_group_takes_no_message_of_the_next(rank, world):
    comm, other = MPI.COMM_WORLD, 1 - rank
    store = dist.PrefixStore("next", dist.distributed_c10d._get_default_store())
    old = comm.irecv(source=other)
    dist.destroy_process_group()
    dist.init_process_group(BACKEND, store=store, rank=rank, world_size=world)
    comm.send("new", other)
    assert comm.recv(source=other) == "new"
    with pytest.raises(RuntimeError, match="destroyed before its message came"):
        old.wait()


@on_ranks(3)
def test_a_receive_from_any_source_that_is_older_takes_messages_as_they_come(rank, world):
    comm = MPI.COMM_WORLD
    if rank == 0:
        older = comm.irecv(source=MPI.ANY_SOURCE)
        comm.Barrier()
        # The older receive takes the message that comes first: usually rank 2's, which was sent before.
        mine, first = comm.recv(source=1), older.wait()
        assert (mine, first, comm.recv()) in {("one", "two", "more"), ("more", "one", "two")}
    elif rank == 2:
        comm.ssend("two", 0)
        comm.Barrier()
    else:
        comm.Barrier()
        comm.send("one", 0)
        comm.send("more", 0)
    comm.Barrier()


@on_ranks(1, 2)
def test_a_receive_that_is_cancelled_takes_no_message(rank, world):
    comm, other = MPI.COMM_WORLD, world - 1 - rank
    request = comm.irecv(source=other)
    request.Cancel()
    comm.send("kept", other)
    assert comm.recv(source=other) == "kept"
    assert request.wait() is None
    with pytest.raises(NotImplementedError, match="of a send"):
        comm.isend("sent", other).Cancel()
    assert comm.recv(source=other) == "sent"


@on_ranks(2, 3)
@pytest.mark.parametrize("size", [1 << 18, 1 << 22])
def test_large_messages_sent_both_ways_before_either_is_received_arrive(rank, world, size):
    comm = MPI.COMM_WORLD
    after, before = (rank + 1) % world, (rank - 1) % world
    request = comm.irecv(source=before)
    comm.send(bytes([rank]) * size, after)
    comm.Send(torch.full((size // 4,), float(rank)), after)
    comm.Barrier()
    assert request.wait() == bytes([before]) * size
    comm.Recv(into := torch.zeros(size // 4), source=before)
    assert torch.equal(into, torch.full((size // 4,), float(before)))


@on_ranks(2)
def test_communicators_over_one_group_share_its_messages(rank, world):
    group = dist.group.WORLD
    one, two, other = Comm(lambda: group), Comm(lambda: group), 1 - rank
    one.send("first", other, 1)
    one.send("second", other, 2)
    assert one.recv(source=other, tag=2) == "second"
    assert two.recv(source=other, tag=1) == "first"


@on_ranks(1)
def test_numbers_and_overlapping_tensors_are_no_receive_buffers(rank, world):
    numpy = pytest.importorskip("numpy")
    comm = MPI.COMM_WORLD
    for call in (
        lambda: comm.Allreduce(MPI.IN_PLACE, numpy.float64(1)),
        lambda: comm.Recv(numpy.zeros(3)[1]),
        lambda: comm.Allgather(numpy.ones(1), numpy.zeros(3).sum()),
    ):
        with pytest.raises(TypeError, match=r"is a number \(float64\), which cannot be written; give an array"):
            call()
    strided = numpy.lib.stride_tricks.as_strided(numpy.zeros(1), (4,), (0,), writeable=True)
    for buffer in (torch.zeros(4).as_strided((3, 2), (1, 1)), strided):
        with pytest.raises(TypeError, match="share memory"):
            comm.Recv(buffer)
    comm.Allreduce(numpy.float64(2), found := numpy.zeros(()))
    assert found == 2
    # Buffers without elements, and ones that are only laid out otherwise.
    comm.Allreduce(torch.zeros(1, 0).expand(4, 0), torch.zeros(1, 0).expand(4, 0))
    comm.Allreduce(torch.arange(6.0), into := torch.zeros(3, 4).t()[::2])
    assert into.flatten().tolist() == list(range(6))


@on_ranks(2, 3)
@pytest.mark.parametrize("lazy", ["conjugate", "negative"])
def test_lazy_views_are_sent_by_collectives_as_the_numbers_that_they_show(rank, world, lazy):
    comm = MPI.COMM_WORLD
    memory = torch.arange(world * 2).to(torch.complex64) * (1 + 2j) + rank
    view = memory.conj() if lazy == "conjugate" else torch._neg_view(memory)
    shown = view.resolve_conj().resolve_neg().clone()
    plain = torch.zeros(world, world * 2, dtype=torch.complex64)
    comm.Allgather(shown, plain)
    for call in (
        lambda out: comm.Allgather(view, out),
        lambda out: (comm.Gather(view, out if rank == 0 else None), comm.Bcast(out)),
    ):
        call(out := torch.zeros_like(plain))
        assert torch.equal(out, plain)
    summed = [torch.zeros_like(shown) for _ in range(2)]
    for given, out in ((shown, summed[0]), (view, summed[1])):
        comm.Reduce(given, out)
    assert rank or torch.equal(*summed)
    comm.Scatter(view if rank == 0 else None, part := torch.zeros(2, dtype=torch.complex64))
    assert torch.equal(part, plain[0].view(world, 2)[rank])
    comm.Alltoall(view, turned := torch.zeros_like(shown))
    assert torch.equal(turned.view(world, 2), plain.view(world, world, 2)[:, rank])


@on_ranks(1)
def test_tags_that_no_message_can_have_are_refused(rank, world):
    comm = MPI.COMM_WORLD
    with pytest.raises(TypeError, match="irecv with tag None: expected an integer"):
        comm.irecv(source=0, tag=None)
    for call, text in (
        (
            lambda: comm.recv(source=0, tag=-5),
            r"recv with tag -5: expected a tag from 0 to 9223372036854775807 or MPI.ANY_TAG",
        ),
        (lambda: comm.send(1, 0, tag=-1), "send with tag -1: expected a tag from 0 to 9223372036854775807"),
    ):
        with pytest.raises(ValueError, match=text):
            call()


@on_ranks(2, 3)
@pytest.mark.parametrize("how", ["waitall", "one by one"])
def test_requests_of_large_messages_may_be_waited_for_in_any_order(rank, world, how):
    comm = MPI.COMM_WORLD
    after, before = (rank + 1) % world, (rank - 1) % world
    into = torch.zeros(1 << 20)
    requests = [comm.Isend(torch.full((1 << 20,), float(rank)), after), comm.Irecv(into, before)]
    if how == "waitall":
        MPI.Request.Waitall(requests)
    else:
        [request.wait() for request in requests]
    assert torch.equal(into, torch.full((1 << 20,), float(before)))
    comm.Barrier()


def test_a_message_that_is_sent_last_arrives():
    code = """
        import time
        import torch
        from torch_accl.compat.torchbraid import MPI
        comm = MPI.COMM_WORLD
        big = torch.arange(1 << 20, dtype=torch.float32)
        if comm.Get_rank() == 0:
            comm.Send(big, 1)
            {end}
        else:
            time.sleep(0.5)
            comm.Recv(into := torch.zeros(1 << 20), source=0)
            assert torch.equal(into, big)
            print("received")
    """
    for end in ("MPI.Finalize()", "pass"):
        ended = run_script(textwrap.dedent(code).replace("{end}", end), 2)
        assert [each.exitcode for each in ended] == [0, 0], [each.stderr for each in ended]
        assert "received" in ended[1].stdout


@on_ranks(1)
def test_an_object_is_not_received_as_bytes(rank, world):
    comm = MPI.COMM_WORLD
    comm.send([1, 2, 3], dest=0)
    with pytest.raises(TypeError, match="sent an object"):
        comm.Recv(torch.zeros(1 << 10, dtype=torch.uint8))
