"""Levels on which the states themselves are coarser: images with fewer pixels."""

import copy

import pytest
import torch
from support import gloo_group, on_ranks
from support.nets import gradients_of, squared
from torch import nn
from torch.nn import functional
from torch_accl.layer_parallel import (
    Cycle,
    LayerParallel,
    LayerParallelError,
    Spatial,
    custom,
    ode,
    plain,
    refined,
    residual,
    timed,
)

PIXELS = Spatial(
    lambda x: functional.avg_pool2d(x, 2) if x.dim() == 4 else x,
    lambda x, like: functional.interpolate(x, size=like.shape[-2:], mode="nearest") if x.dim() == 4 else x,
)


class Convolution(nn.Module):
    def __init__(self, number, way="ode"):
        super().__init__()
        torch.manual_seed(number)
        self.inner = nn.Conv2d(2, 2, 3, padding=1)
        self.way = way

    def f(self, x):
        return torch.tanh(self.inner(x))

    def forward(self, x, dt=1 / 16):
        return self.f(x) if self.way == "ode" else x + dt * self.f(x)

    def coarse_step(self, x, count):
        return x + count / 16 * self.f(x)


def steps(way="ode", count=16, dtype=torch.float64):
    kind = {"ode": ode, "timed": timed, "residual": residual, "custom": custom}[way]
    return [kind(Convolution(number, way).to(dtype)) for number in range(count)]


def batch(size=8, rows=3, dtype=torch.float64):
    generator = torch.Generator().manual_seed(3)
    draw = torch.randn(rows, 2, size, size, generator=generator, dtype=torch.float64)
    # The images are smooth, as images should be if they are coarsened.
    x = functional.interpolate(functional.avg_pool2d(draw, 4), size=(size, size), mode="bilinear")
    return x.to(dtype), torch.ones_like(x).to(dtype)


def check_exact(net, layers, x, target):
    exact = LayerParallel(layers, mode="exact-wave")
    loss = exact.step(x, target, squared)
    torch.testing.assert_close(net.step(x, target, squared), loss, rtol=1e-6, atol=1e-9)
    for name, gradient in gradients_of(net).items():
        torch.testing.assert_close(gradient, exact.get_parameter(name).grad, rtol=1e-4, atol=1e-8)


@on_ranks(1, 2, 3)
@pytest.mark.parametrize("way", ["ode", "timed", "residual", "custom"])
def test_it_converges_to_what_the_layers_give_one_after_the_other(rank, world, way):
    layers, (x, target) = steps(way), batch()
    cycle = Cycle(factor=4, iterations=9, coarser=1, relax="FCF")
    net = LayerParallel(copy.deepcopy(layers), fwd=cycle, bwd=cycle, spatial=PIXELS)
    check_exact(net, layers, x, target)
    for norms in (net.norms.forward, net.norms.backward):
        found = list(norms.values())
        assert found[-1] < 1e-3 * found[0], found


@pytest.mark.slow
@on_ranks(2, 3)
@pytest.mark.parametrize("levels, coarser", [(2, 1), (3, (2,)), (3, (1, 2))])
def test_nothing_depends_on_the_number_of_ranks_by_a_bit(rank, world, levels, coarser):
    layers, (x, target) = steps(dtype=torch.float32), batch(dtype=torch.float32)
    layers = [plain(nn.Conv2d(2, 2, 1)), *layers, plain(nn.Flatten()), plain(nn.Linear(128, 4))]
    target = torch.zeros(len(x), 4)
    cycle = Cycle(levels=levels, factor=2, iterations=3, coarser=coarser)
    one = LayerParallel(copy.deepcopy(layers), group="alone", fwd=cycle, bwd=cycle, spatial=PIXELS)
    loss = one.step(x, target, squared)
    for group in (None, gloo_group()):
        net = LayerParallel(copy.deepcopy(layers), group=group, fwd=cycle, bwd=cycle, spatial=PIXELS, placement="even")
        assert torch.equal(net.step(x, target, squared), loss)
        assert net.norms == one.norms
        wanted = gradients_of(one)
        assert all(torch.equal(gradient, wanted[name]) for name, gradient in gradients_of(net).items())


@on_ranks(1, 2)
def test_layers_see_fewer_pixels_on_coarse_levels_and_plain_ones_all(rank, world):
    seen = []

    class Watched(Convolution):
        def forward(self, x):
            seen.append(x.shape[-1])
            return self.f(x)

    class Head(nn.Conv2d):
        def forward(self, x):
            assert x.shape[-1] == 8
            return super().forward(x)

    x, target = batch(dtype=torch.float32)
    layers = [plain(Head(2, 2, 1)), *(ode(Watched(number)) for number in range(8))]
    cycle = Cycle(levels=3, factor=2, iterations=2, coarser=(1, 2))
    net = LayerParallel(layers, fwd=cycle, bwd=cycle, spatial=PIXELS)
    net.step(x, target, squared)
    assert {2, 8} <= set(seen) <= {2, 4, 8}
    net.mode = "exact-wave"
    seen.clear()
    net.step(x, target, squared)
    assert set(seen) == {8}


@on_ranks(1, 2)
def test_states_of_16_bits_and_other_sizes_work(rank, world):
    for size, dtype in ((7, torch.float32), (8, torch.bfloat16)):
        layers, (x, target) = steps(dtype=dtype), batch(size, dtype=dtype)
        cycle = Cycle(factor=4, iterations=3, coarser=1)
        net = LayerParallel(layers, fwd=cycle, bwd=cycle, spatial=PIXELS)
        exact = LayerParallel(copy.deepcopy(layers), mode="exact-wave")
        torch.testing.assert_close(net.step(x, target, squared), exact.step(x, target, squared), rtol=2e-2, atol=1e-2)


@on_ranks(1, 2)
def test_whole_numbers_of_a_state_become_coarser_with_it(rank, world):
    class Masked(Convolution):
        def forward(self, state):
            x, mask = state
            assert mask.shape == x.shape[-2:]
            return self.f(x) * mask

    def coarsen(state):
        x, mask = state
        return functional.avg_pool2d(x, 2), mask[::2, ::2]

    def refine(state, like):
        return functional.interpolate(state[0], size=like[0].shape[-2:]), like[1]

    x, target = batch()
    mask = torch.arange(8) < 6
    mask = mask[:, None] & mask
    layers = [ode(Masked(number).double()) for number in range(16)]
    cycle = Cycle(factor=4, iterations=9, coarser=1, relax="FCF")
    net = LayerParallel(copy.deepcopy(layers), fwd=cycle, bwd=cycle, spatial=Spatial(coarsen, refine))
    exact = LayerParallel(layers, mode="exact-wave")
    losses = [each.step((x, mask), target, lambda y, target: squared(y[0], target)) for each in (net, exact)]
    torch.testing.assert_close(*losses, rtol=1e-6, atol=1e-9)
    for name, gradient in gradients_of(net).items():
        torch.testing.assert_close(gradient, exact.get_parameter(name).grad, rtol=1e-4, atol=1e-8)


@on_ranks(1, 2)
def test_a_deeper_net_has_the_same_meshes(rank, world):
    sizes = []

    def coarsen(x):
        sizes.append(x.shape[-1])
        return PIXELS.coarsen(x)

    cycle = Cycle(factor=4, iterations=2, coarser=1)
    net = LayerParallel(steps(count=8), fwd=cycle, bwd=cycle, spatial=Spatial(coarsen, PIXELS.refine))
    deeper = refined(net, 2)
    x, target = batch()
    deeper.step(x, target, squared)
    assert sizes and set(sizes) == {8}


@on_ranks(1, 2)
def test_layers_are_timed_on_each_mesh_before_a_mode_is_chosen(rank, world):
    seen = set()

    class Watched(Convolution):
        def forward(self, x):
            seen.add(x.shape[-1])
            return self.f(x)

    cycle = Cycle(levels=3, factor=2, iterations=2, coarser=(1, 2))
    layers = [ode(Watched(number)) for number in range(8)]
    net = LayerParallel(layers, mode="auto", auto_modes=["exact-wave", "inexact"], fwd=cycle, bwd=cycle, spatial=PIXELS)
    x, target = batch(dtype=torch.float32)
    net.step(x, target, squared)
    assert {2, 4, 8} <= seen
    assert set(net.choice.seconds) == {"exact-wave", "inexact"}


@on_ranks(1, 2, 3)
def test_a_net_is_evaluated_exactly_and_with_fewer_pixels(rank, world):
    layers, (x, target) = steps(), batch()
    cycle = Cycle(factor=4, iterations=2, coarser=1)
    net = LayerParallel(copy.deepcopy(layers), fwd=cycle, bwd=cycle, spatial=PIXELS)
    loss = net.step(x, target, squared)
    exact = LayerParallel(layers, mode="exact-wave")
    net.eval()
    found = net.evaluate(x, target, squared)
    assert found.loss == exact.step(x, target, squared) and 0 < found.output_error < 0.2
    assert found.mode_loss == loss


@on_ranks(2, 3)
def test_what_makes_states_coarser_may_be_narrower_under_autocast(rank, world):
    weight = torch.full((2, 1, 2, 2), 0.25)

    def coarsen(x):
        return functional.conv2d(x, weight.to(x.dtype), stride=2, groups=2)

    spatial = Spatial(
        coarsen, lambda x, like: functional.conv_transpose2d(x, 4 * weight.to(x.dtype), stride=2, groups=2)
    )
    x, target = batch(dtype=torch.float32)
    cycle = Cycle(factor=4, iterations=3, coarser=1)
    found = []
    for group in ("alone", gloo_group()):
        net = LayerParallel(steps(dtype=torch.float32), group=group, fwd=cycle, bwd=cycle, spatial=spatial)
        with torch.autocast("cpu", torch.bfloat16):
            loss = net.step(x, target, squared)
        found.append((loss, net.norms, gradients_of(net)))
    (alone, norms, wanted), (loss, others, gradients) = found
    assert torch.equal(loss, alone) and loss.isfinite() and norms == others
    assert all(torch.equal(gradient, wanted[name]) for name, gradient in gradients.items())


@on_ranks(2, 3)
def test_a_function_that_fails_on_one_rank_while_plans_are_made_is_an_error_on_all(rank, world):
    def coarsen(x):
        if rank == world - 1:
            raise MemoryError("no room")
        return PIXELS.coarsen(x)

    layers, (x, target) = steps(), batch()
    net = LayerParallel(layers, fwd=Cycle(coarser=1), spatial=Spatial(coarsen, PIXELS.refine))
    with pytest.raises(LayerParallelError, match=rf"rank {world - 1} .* coarsening states: MemoryError: no room"):
        net.step(x, target, squared)
    other = LayerParallel(
        layers, fwd=Cycle(coarser=1), spatial=Spatial(PIXELS.coarsen if rank else lambda x: x, PIXELS.refine)
    )
    with pytest.raises(ValueError, match="`coarsen` returns different shapes on different ranks"):
        other.step(x, target, squared)


@on_ranks(1, 2)
def test_what_is_wrong_is_said_on_all_ranks(rank, world):
    layers, (x, target) = steps(), batch()
    with pytest.raises(ValueError, match="without `spatial`"):
        LayerParallel(layers, fwd=Cycle(coarser=1))
    with pytest.raises(ValueError, match="give levels from 1 to 1"):
        Cycle(coarser=2)
    wrong = Spatial(PIXELS.coarsen, lambda x, like: x)
    net = LayerParallel(layers, fwd=Cycle(coarser=1), spatial=wrong)
    with pytest.raises(LayerParallelError, match=r"`refine` of the state of point \d+ returned the shape"):
        net.step(x, target, squared)
    pairs = Spatial(lambda x: (x, x), PIXELS.refine)
    net = LayerParallel(layers, fwd=Cycle(coarser=1), spatial=pairs)
    with pytest.raises(ValueError, match="return the same number of leaves"):
        net.step(x, target, squared)
