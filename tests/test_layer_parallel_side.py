"""Side inputs: inputs that layers take in addition to the state, and the sum of the gradients over these layers."""

import copy

import pytest
import torch
import torch.distributed as dist
import torch_accl
from support import gloo_group, on_ranks
from support.nets import alone, gradients_of, squared
from torch import nn
from torch_accl.layer_parallel import (
    Audits,
    Cycle,
    LayerParallel,
    LayerParallelError,
    custom,
    ode,
    plain,
    refined,
    residual,
    step,
    timed,
)

MODES = ["inexact", "exact-forward", "converged", "exact-wave", "exact-pipeline"]


def seeded(number, shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(number))


class Attending(nn.Module):
    """A decoder block that attends to a memory under an attention mask."""

    def __init__(self, number, width=8):
        super().__init__()
        torch.manual_seed(number)
        self.attention = nn.MultiheadAttention(width, 2, batch_first=True)
        self.inner = nn.Linear(width, width)

    def forward(self, x, memory, mask=None):
        seen, _ = self.attention(x, memory, memory, attn_mask=mask, need_weights=False)
        return torch.tanh(self.inner(x + seen))


class Head(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(3)
        self.inner = nn.Linear(5, 8)

    def forward(self, x):
        return self.inner(x)


def decoder(count=8):
    return [Head(), *(ode(Attending(number)) for number in range(count)), plain(nn.LayerNorm(8))]


def given(rows=4):
    memory = seeded(2, (rows, 6, 8)).requires_grad_()
    mask = torch.zeros(3, 6, dtype=torch.bool)
    mask[:, 4:] = True
    return seeded(1, (rows, 3, 5)).requires_grad_(), {"memory": memory, "mask": mask}, seeded(4, (rows, 3, 8))


def serial(layers, x, side):
    for layer in layers:
        module = getattr(layer, "module", layer)
        x = x + module(x, **side) / 8 if isinstance(module, Attending) else module(x)
    return x


@on_ranks(1, 2, 3)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("way", ["step", "backward"])
def test_layers_get_those_that_they_name_and_the_first_rank_their_gradients(rank, world, mode, way):
    layers, (x, side, target) = decoder(), given()
    cycle = Cycle(factor=2, iterations=7)
    net = LayerParallel(
        copy.deepcopy(layers), mode=mode, fwd=cycle, bwd=cycle, micro_batches=2, side_per_sample=["memory"]
    )
    first = (x, side) if rank == 0 else (None, None)
    if way == "step":
        net.step(first[0], target, squared, side=first[1])
    else:
        y = net(*first)
        (squared(y, target) if net.is_last else y).backward()
    mine = (x.grad, side["memory"].grad)
    x, side, target = given()
    squared(serial(layers, x, side), target).backward()
    if rank == 0:
        for found, wanted in zip(mine, (x.grad, side["memory"].grad)):
            torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-6)
    else:
        assert mine == (None, None)
    wanted = nn.ModuleList([getattr(layer, "module", layer) for layer in layers])
    wanted = {f"layers.{name}": parameter.grad for name, parameter in wanted.named_parameters()}
    for name, gradient in gradients_of(net).items():
        torch.testing.assert_close(gradient, wanted[name], rtol=1e-4, atol=1e-6)


@on_ranks(2, 3)
def test_they_do_not_depend_on_the_number_of_ranks(rank, world):
    layers = decoder()
    results = []
    for group in (alone(), None, gloo_group()):
        x, side, target = given()
        net = LayerParallel(copy.deepcopy(layers), group=group, fwd=Cycle(factor=2), bwd=Cycle(factor=2))
        loss = net.step(x, target, squared, side=side)
        results.append((loss, gradients_of(net), side["memory"].grad))
    (loss, wanted, memory), *others = results
    for other, gradients, other_memory in others:
        assert torch.equal(other, loss)
        assert all(torch.equal(gradient, wanted[name]) for name, gradient in gradients.items())
        if rank == 0:
            torch.testing.assert_close(other_memory, memory, rtol=1e-6, atol=1e-9)


@on_ranks(1, 2)
def test_a_memory_that_was_computed_trains_what_computed_it(rank, world):
    torch.manual_seed(1)
    encoder = nn.Linear(6, 8)
    source, (x, side, target) = seeded(8, (4, 6, 6)), given()
    net = LayerParallel(decoder(), fwd=Cycle(factor=2), bwd=Cycle(factor=2))
    side = {"memory": encoder(source), "mask": side["mask"]} if rank == 0 else None
    net.step(x, target, squared, side=side)
    assert (encoder.weight.grad is not None) == (rank == 0)
    assert rank != 0 or encoder.weight.grad.abs().sum() > 0


@on_ranks(2)
def test_another_batch_may_have_others(rank, world):
    layers = decoder()
    net = LayerParallel(copy.deepcopy(layers), mode="exact-wave")
    for rows, length in ((4, 6), (2, 9), (4, 6)):
        x, memory = seeded(1, (rows, 3, 5)), seeded(2, (rows, length, 8))
        with torch.no_grad():
            y = net(x, {"memory": memory})
        if net.is_last:
            torch.testing.assert_close(y, serial(layers, x, {"memory": memory}), rtol=1e-5, atol=1e-6)
        exported = net.to_serial()
        with torch.no_grad():
            assert not net.is_last or torch.equal(exported(x, {"memory": memory}), y)


class Adding(nn.Module):
    """A layer whose gradient of the memory is, by `way`: the gradient of its state itself, an expanded scalar, or a
    transposed tensor.
    """

    def __init__(self, way):
        super().__init__()
        self.way = way

    def forward(self, x, memory):
        return x + {"itself": memory, "sum": memory.sum(), "transposed": memory.mT.contiguous().mT}[self.way]


@on_ranks(1, 2, 3)
@pytest.mark.parametrize("way", ["itself", "sum", "transposed"])
@pytest.mark.parametrize("mode", ["exact-wave", "inexact"])
def test_gradients_of_a_memory_are_no_other_tensors_and_lie_in_one_order(rank, world, way, mode):
    x = seeded(1, (4, 6)).double().requires_grad_()
    memory, target = seeded(2, (4, 6)).double().requires_grad_(), seeded(3, (4, 6)).double()
    kind = residual if mode == "inexact" else plain
    net = LayerParallel(
        [kind(Adding(way if number % 2 else "itself")) for number in range(8)],
        mode=mode,
        micro_batches=2,
        side_per_sample=["memory"],
        fwd=Cycle(factor=2, iterations=9),
        bwd=Cycle(factor=2, iterations=9),
    )
    net.step(x, target, squared, side={"memory": memory})
    mine = x.grad, memory.grad
    x, memory = (leaf.detach().requires_grad_() for leaf in (x, memory))
    y = x
    for number in range(8):
        y = Adding(way if number % 2 else "itself")(y, memory)
    squared(y, target).backward()
    if rank == 0:
        for found, wanted in zip(mine, (x.grad, memory.grad)):
            torch.testing.assert_close(found, wanted, rtol=1e-9, atol=1e-12)


@on_ranks(2, 3)
def test_gradients_that_lie_in_different_orders_on_different_ranks_are_summed_by_element(rank, world):
    class Convolving(nn.Module):
        def __init__(self, number):
            super().__init__()
            torch.manual_seed(number)
            self.inner = nn.Conv1d(5, 5, 1) if number % 2 else nn.Linear(5, 5)

        def forward(self, x, memory):
            if isinstance(self.inner, nn.Linear):
                return x + self.inner(memory)
            return x + self.inner(memory.transpose(1, 2)).transpose(1, 2)

    x, memory, target = (seeded(number, (2, 3, 5)) for number in range(3))
    memory.requires_grad_()
    layers = [plain(Convolving(number)) for number in range(6)]
    net = LayerParallel(copy.deepcopy(layers), mode="exact-wave")
    net.step(x, target, squared, side={"memory": memory})
    mine, memory = memory.grad, memory.detach().requires_grad_()
    y = x
    for layer in layers:
        y = layer.module(y, memory)
    squared(y, target).backward()
    if rank == 0:
        torch.testing.assert_close(mine, memory.grad, rtol=1e-5, atol=1e-7)


@on_ranks(2)
def test_layers_that_say_not_what_they_take_take_nothing(rank, world):
    builtin = nn.Identity()
    builtin.forward = torch.tanh
    compiled = torch.compile(nn.Linear(8, 8), backend="eager")
    layers = [*decoder()[:-1], plain(builtin), plain(compiled)]
    x, side, target = given()
    assert torch.isfinite(LayerParallel(layers, mode="exact-wave").step(x, target, squared, side=side))


class Named(nn.Module):
    """A step whose side inputs have names that a wrapper's own arguments might have."""

    def forward(self, state, x, n):
        return state + x * n

    def coarse_step(self, state, count, /, x, n):
        return state + count * x * n


class Rest(nn.Module):
    """A layer that takes all side inputs, but none by the name of its first argument."""

    def forward(self, x, **side):
        return x + side["dt"] + side["n"]


class Timed(nn.Module):
    def forward(self, state, dt, x):
        return state + dt * x


@on_ranks(1, 2)
@pytest.mark.parametrize("mode", ["exact-wave", "inexact"])
def test_a_side_input_named_x_or_dt_is_no_second_value_of_an_argument(rank, world, mode):
    x, n, dt = seeded(2, (4, 8)), torch.tensor(2.0), torch.tensor(8.0)
    net = LayerParallel(
        [plain(Rest()), *(residual(Named()) for _ in range(4)), *(custom(Named()) for _ in range(4)), timed(Timed())],
        horizon=9.0,
        mode=mode,
        fwd=Cycle(factor=2, iterations=9),
    )
    for each in (net, refined(net, 2)):
        # The first layer adds dt and n. Steps of a refined net are shorter, and their sum is the same.
        wanted = seeded(1, (4, 8)) + 10 + 8 * 2 * x + x
        side = {"x": x, "n": n, "dt": dt}
        with torch.no_grad():
            y, serial = each(seeded(1, (4, 8)), side), each.to_serial()(seeded(1, (4, 8)), side)
        torch.testing.assert_close(serial, wanted)
        if each.is_last:
            torch.testing.assert_close(y, wanted)


@on_ranks(1)
def test_the_length_of_a_step_is_no_side_input(rank):
    class Step(nn.Module):
        def forward(self, x, dt):
            return x + dt

    net = LayerParallel([timed(Step()) for _ in range(4)], mode="exact-wave")
    with pytest.raises(ValueError, match="no layer's forward has an argument `dt`"):
        net(torch.zeros(1, 2), {"dt": torch.tensor(1.0)})


@on_ranks(2, 3)
def test_conjugate_tensors_are_sent_as_what_they_are(rank, world):
    class Conjugating(nn.Module):
        def forward(self, x):
            return (x * (1 + 2j)).conj()

    x = torch.randn(3, 2, dtype=torch.complex64, generator=torch.Generator().manual_seed(1)).conj()
    net = LayerParallel([plain(Conjugating()) for _ in range(6)], mode="exact-wave")
    with torch.no_grad():
        y = net(x)
    if net.is_last:
        wanted = x
        for _ in range(6):
            wanted = (wanted * (1 + 2j)).conj()
        torch.testing.assert_close(y, wanted)


class Changing(nn.Module):
    def forward(self, x, memory):
        memory.zero_()
        return x


class Optional(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(8, 8)

    def forward(self, x, scale=None):
        return self.inner(x) if scale is None else self.inner(x) * scale["by"][0]


@on_ranks(1, 2)
def test_what_is_wrong_with_them_is_said_on_all_ranks(rank, world):
    x, side, target = given()
    net = LayerParallel(decoder(), micro_batches=3, side_per_sample=["memory"])
    with pytest.raises(ValueError, match="no layer's forward has an argument `masks`"):
        net.step(x, target, squared, side={**side, "masks": side["mask"]})
    with pytest.raises(LayerParallelError, match="rank 0 .*the side input `memory` has a leaf of type str"):
        net.step(x, target, squared, side={"memory": "all of it"} if rank == 0 else None)
    with pytest.raises(LayerParallelError, match="rank 0 .*side inputs are list"):
        net.step(x, target, squared, side=[1] if rank == 0 else None)
    with pytest.raises(LayerParallelError, match="missing 1 required positional argument: 'memory'"):
        net.step(x, target, squared)
    net.mode = "exact-pipeline"
    rows = {"memory": seeded(2, (4, 6, 8))}
    with pytest.raises(LayerParallelError, match="`memory` has a leaf .* not divisible by 3 micro-batches"):
        net.step(seeded(1, (3, 3, 5)), seeded(1, (3, 3, 8)), squared, side=rows)
    net = LayerParallel([Head(), *(ode(Changing()) for _ in range(8))])
    with pytest.raises(LayerParallelError, match="changes its input in place"):
        net.step(x, target, squared, side={"memory": side["memory"].detach()})
    # The next batches give the right results.
    net = LayerParallel([plain(Optional()), *(ode(Optional()) for _ in range(8))])
    x, target = seeded(1, (4, 8)), seeded(2, (4, 8))
    first = net.step(x, target, squared)
    half = {"by": (torch.tensor(1.0),)}
    assert torch.equal(net.step(x, target, squared, side={"scale": half}), first)


@on_ranks(2)
def test_they_reach_a_wrapped_net(rank, world):
    x, side, target = given()
    layers = decoder()
    lp, dp = None, alone()
    one = LayerParallel(copy.deepcopy(layers), group=lp)
    expected = one.step(x, target, squared, side=side)
    net = LayerParallel(copy.deepcopy(layers), group=lp)
    wrapped = nn.parallel.DistributedDataParallel(net, process_group=dp)
    assert torch.equal(step(wrapped, x, target, squared, side=side), expected)
    wanted = gradients_of(one)
    assert all(torch.equal(gradient, wanted[name]) for name, gradient in gradients_of(net).items())


@on_ranks(2)
@pytest.mark.parametrize("audit", [0, 1])
def test_gradients_are_exact_in_a_group_that_compresses_every_call(rank, world, audit):
    options = torch_accl.Options(compression="maxmin:2", compressed_calls="all")
    compressed = dist.new_group([0, 1], backend="accl", pg_options=options)
    results = []
    for group in (None, compressed):
        x, side, target = given()
        layers = [*decoder(), residual(nn.Sequential(nn.Linear(8, 8), nn.Tanh()))]
        for layer in layers[-1:]:
            nn.init.eye_(layer.module[0].weight)
        net = LayerParallel(layers, group=group, audit=Audits(every=audit))
        loss = net.step(x, target, squared, side=side)
        results.append((loss, gradients_of(net), side["memory"].grad, list(net.audits)))
    (loss, gradients, memory, audits), (other, others, other_memory, other_audits) = results
    assert torch.equal(loss, other) and audits == other_audits
    assert all(torch.equal(gradients[name], others[name]) for name in gradients)
    assert rank != 0 or torch.equal(memory, other_memory)
