"""Parameters that several ranks share, and steps that all ranks of a net skip."""

import copy

import pytest
import torch
from support import gloo_group, on_ranks
from support.nets import alone
from torch import nn
from torch.nn import functional
from torch_accl import layer_parallel
from torch_accl.layer_parallel import Cycle, GradScaler, LayerParallel, LayerParallelError, ode, plain

MODES = ["inexact", "exact-wave", "exact-pipeline"]
WORDS, WIDTH = 11, 6


class Unembedding(nn.Module):
    """The last layer of a language model, whose weight is tied to the weight of the first layer."""

    def __init__(self, weight=None):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(WORDS, WIDTH)) if weight is None else weight

    def forward(self, x):
        return functional.linear(x, self.weight)


class Embedding(nn.Module):
    """Maps shares of words to their vectors."""

    def __init__(self, number=0):
        super().__init__()
        torch.manual_seed(9)
        self.weight = nn.Parameter(torch.randn(WORDS, WIDTH))

    def forward(self, x):
        return x @ self.weight


def small(number):
    torch.manual_seed(number)
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh())


def batch(rows=6):
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(rows, WORDS, generator=generator).softmax(1)
    return x, torch.randint(WORDS, (rows,), generator=generator)


def blocks(shares=False):
    first = Embedding()
    last = Unembedding(first.weight) if shares else Unembedding()
    return [plain(first), *(ode(small(number)) for number in range(8)), plain(last)]


TIE = [("layers.0.weight", "layers.9.weight")]


@on_ranks(1, 2, 3)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("way", ["named", "shared", "gloo"])
def test_tied_parameters_get_the_sum_of_their_gradients_and_stay_one(rank, world, mode, way):
    x, target = batch()
    group = gloo_group() if way == "gloo" and world > 1 else None
    cycle = Cycle(factor=2, iterations=6)
    net = LayerParallel(
        blocks(shares=way == "shared"),
        group=group,
        mode=mode,
        fwd=cycle,
        bwd=cycle,
        micro_batches=2,
        tie=[] if way == "shared" else TIE,
    )
    one = blocks(shares=True)
    modules = nn.ModuleList([block.module for block in one])
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9) for model in (net, modules)]
    for _ in range(3):
        for optimizer in optimizers:
            optimizer.zero_grad()
        loss = net.step(x, target, functional.cross_entropy)
        y = x
        for block in one:
            y = y + block.module(y) / 8 if block.kind == "ode" else block.module(y)
        wanted = functional.cross_entropy(y, target)
        wanted.backward()
        torch.testing.assert_close(loss, wanted.detach(), rtol=1e-5, atol=1e-6)
        for name, gradient in ((name, parameter.grad) for name, parameter in net.named_parameters()):
            _, number, rest = name.split(".", 2)
            torch.testing.assert_close(gradient, modules[int(number)].get_parameter(rest).grad, rtol=1e-4, atol=1e-6)
        for optimizer in optimizers:
            optimizer.step()
    serial = net.to_serial()
    assert serial.layers[0].weight is serial.layers[9].weight or (way == "shared" and world == 1)
    mine = [layer.weight for number, layer in net.layers.items() if number in ("0", "9")]
    of_all = net.wire.gathered([weight.detach() for weight in mine])
    weights = [weight for part in of_all for weight in part]
    assert len(weights) == 2 and torch.equal(*weights)


@on_ranks(2, 3)
def test_tied_parameters_do_not_depend_on_the_number_of_ranks_by_a_bit(rank, world):
    x, target = batch()
    one = LayerParallel(blocks(), group=alone(), tie=TIE)
    net = LayerParallel(blocks(), tie=TIE)
    assert torch.equal(net.step(x, target, functional.cross_entropy), one.step(x, target, functional.cross_entropy))
    for name, parameter in net.named_parameters():
        assert torch.equal(parameter.grad, one.get_parameter(name).grad), name


@on_ranks(2)
def test_what_is_tied_again_is_tied_when_it_comes_from_one_rank(rank, world):
    x, target = batch()
    net = LayerParallel(blocks(), tie=TIE)
    back = LayerParallel.from_serial(net.to_serial())
    assert torch.equal(net.step(x, target, functional.cross_entropy), back.step(x, target, functional.cross_entropy))
    for name, parameter in back.named_parameters():
        assert torch.equal(parameter.grad, net.get_parameter(name).grad), name


@on_ranks(2)
def test_a_tied_parameter_that_nothing_uses_adds_nothing(rank, world):
    class Unused(Unembedding):
        def forward(self, x):
            return x @ torch.ones(WIDTH, WORDS)

    x, target = batch()
    layers = blocks()
    layers[9] = plain(Unused())
    net = LayerParallel(layers, tie=TIE, mode="exact-wave")
    net.step(x, target, functional.cross_entropy)
    mine = [layer.weight.grad for number, layer in net.layers.items() if number in ("0", "9")]
    gradients = [gradient for part in net.wire.gathered(mine) for gradient in part]
    assert torch.equal(*gradients) and gradients[0].abs().sum() > 0


@on_ranks(1, 2)
def test_names_that_cannot_be_tied_are_refused_on_all_ranks(rank, world):
    for group, message in (
        (["layers.0.weight", "layers.0.weight"], "at least two names"),
        (["layers.0.weight", "layers.12.weight"], "layer 12, which does not exist"),
        (["layers.0.weight", "head"], "'head' names no parameter"),
        (["layers.0.weight", "layers.9.bias"], "there is no parameter layers.9.bias"),
        (["layers.0.weight", "layers.8.0.weight"], r"float32\[11, 6\], layers.8.0.weight float32\[6, 6\]"),
    ):
        with pytest.raises(ValueError, match=message):
            LayerParallel(blocks(), tie=[group])


def three(**settings):
    """Builds a net of three layers with one parameter each."""
    torch.manual_seed(3)
    weights = [nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(3)]
    return LayerParallel([plain(layer) for layer in weights], mode="exact-wave", **settings)


@on_ranks(1, 2, 3)
@pytest.mark.parametrize("way", ["overlapping", "twice", "shared and named"])
def test_groups_that_have_a_name_in_common_are_one(rank, world, way):
    names = [f"layers.{number}.weight" for number in range(3)]
    x, target = torch.ones(2, WIDTH), torch.zeros(2, WIDTH)
    if way == "shared and named":
        layer = nn.Linear(WIDTH, WIDTH, bias=False)
        torch.manual_seed(3)
        nn.init.normal_(layer.weight)
        net = LayerParallel([plain(layer)] * 3, mode="exact-wave", tie=[names])
        weight = layer.weight.detach().clone().requires_grad_()
    else:
        net = three(tie=[names[:2], names[1:]] if way == "overlapping" else [names, names])
        torch.manual_seed(3)
        weight = nn.Linear(WIDTH, WIDTH, bias=False).weight
    net.step(x, target, functional.mse_loss)
    functional.mse_loss(x @ weight.T @ weight.T @ weight.T, target).backward()
    for parameter in net.parameters():
        torch.testing.assert_close(parameter.grad, weight.grad, rtol=1e-5, atol=1e-7)
    norm = layer_parallel.clip_grad_norm_(net, 1e9)
    torch.testing.assert_close(norm, weight.grad.norm().double(), rtol=1e-5, atol=0, check_dtype=False)


@on_ranks(2, 3)
def test_tied_parameters_may_lie_in_another_order(rank, world):
    torch.manual_seed(4)
    value = torch.randn(WIDTH, 2 * WIDTH)

    class Right(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(value.T.contiguous().T.clone(memory_format=torch.preserve_format))

        def forward(self, x):
            return x @ self.weight @ self.weight.T

    assert not Right().weight.is_contiguous()
    net = LayerParallel(
        [plain(Right()) for _ in range(3)], mode="exact-wave", tie=[[f"layers.{n}.weight" for n in range(3)]]
    )
    x, target = torch.ones(2, WIDTH), torch.zeros(2, WIDTH)
    net.step(x, target, functional.mse_loss)
    weight = value.clone().requires_grad_()
    y = x
    for _ in range(3):
        y = y @ weight @ weight.T
    functional.mse_loss(y, target).backward()
    for parameter in net.parameters():
        torch.testing.assert_close(parameter.grad, weight.grad, rtol=1e-4, atol=1e-4)


@on_ranks(2)
def test_tied_parameters_of_which_some_are_not_trained_are_found_out_on_all_ranks(rank, world):
    x, target = batch()
    net = LayerParallel(blocks(), tie=TIE)
    if rank == 0:
        net.layers["0"].weight.requires_grad_(False)
    with pytest.raises(LayerParallelError, match="differ in requires_grad; set it alike for all of them"):
        net.step(x, target, functional.cross_entropy)


@on_ranks(3)
def test_tied_parameters_that_are_refused_keep_no_other_rank_waiting(rank, world):
    tie = [("layers.0.weight", "layers.1.weight"), ("layers.1.bias", "layers.2.bias")]
    net = LayerParallel([plain(nn.Linear(WIDTH, WIDTH)) for _ in range(3)], mode="exact-wave", tie=tie)
    x, target = torch.ones(2, WIDTH), torch.zeros(2, WIDTH)
    if rank == 0:
        net.layers["0"].weight.requires_grad_(False)
    with pytest.raises(
        LayerParallelError,
        match="layers.0.weight, layers.1.weight differ in requires_grad",
    ):
        net.step(x, target, functional.mse_loss)
    net.requires_grad_(True)
    net.step(x, target, functional.mse_loss)


# ---- gradient scaling


@on_ranks(1, 2)
@pytest.mark.parametrize("mode", MODES)
def test_the_scale_is_in_the_gradient_before_it_gets_small(rank, world, mode):
    torch.manual_seed(2)
    layers = [plain(nn.Linear(4, 4).half()) for _ in range(3)]
    wanted = copy.deepcopy(layers)
    x, target = torch.ones(4, 4).half(), torch.zeros(4, 4).half()
    net = LayerParallel(layers, mode="exact-wave" if mode == "inexact" else mode, micro_batches=2)
    net.step(x, target, lambda y, t: (y - t).float().square().mean() * 1e-6, loss_scale=65536.0)
    y = x
    for layer in wanted:
        y = layer.module(y)
    ((y - target).float().square().mean() * 1e-6 * 65536.0).backward()
    for name, parameter in net.named_parameters():
        _, number, rest = name.split(".", 2)
        right = wanted[int(number)].module.get_parameter(rest).grad
        assert right.abs().sum() > 0
        torch.testing.assert_close(parameter.grad, right, rtol=2e-2, atol=1e-5)


@on_ranks(1, 2, 3)
@pytest.mark.parametrize("fused", [False, True])
def test_all_ranks_leave_out_the_step_that_one_cannot_make(rank, world, fused):
    x, target = batch()
    net = LayerParallel(blocks(), tie=TIE)
    plain_net = copy.deepcopy(net)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.5, fused=fused)
    other = torch.optim.SGD(plain_net.parameters(), lr=0.5)
    scaler = GradScaler(net, init_scale=1024.0, growth_interval=2)
    scales = []
    for number in range(4):
        optimizer.zero_grad()
        loss = net.step(x, target, functional.cross_entropy, loss_scale=scaler.get_scale())
        if number == 1 and net.is_first:
            next(net.parameters()).grad[0, 0] = torch.inf
        scaler.unscale_(optimizer)
        norm = layer_parallel.clip_grad_norm_(net, 100.0)
        assert torch.isfinite(norm) or number == 1
        scaler.step(optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
        if number != 1:
            other.zero_grad()
            torch.testing.assert_close(loss, plain_net.step(x, target, functional.cross_entropy))
            other.step()
    assert scales == [1024.0, 512.0, 512.0, 1024.0]
    for name, parameter in net.named_parameters():
        torch.testing.assert_close(parameter, plain_net.get_parameter(name), rtol=1e-5, atol=1e-6)
