"""Deeper and shallower nets made from trained nets: their results, the state that they take over, and independence of
the number of ranks.
"""

import copy
import inspect
import itertools
from fractions import Fraction

import pytest
import torch
import torch._dynamo  # optimizers load it, which takes seconds: load it once here, not in every rank
from support import gloo_group, on_ranks
from support.nets import alone, drawn, squared
from torch import nn
from torch.distributed import checkpoint
from torch_accl.layer_parallel import (
    Audits,
    Block,
    Cycle,
    LayerParallel,
    LayerParallelError,
    Scaled,
    Spatial,
    Stop,
    coarsened,
    custom,
    ode,
    plain,
    refined,
    residual,
    timed,
)

RANKS = (1, 2, 3, 4)


def small(number, width=6):
    block = nn.Sequential(nn.Linear(width, 9), nn.Tanh(), nn.Linear(9, width))
    generator = torch.Generator().manual_seed(number)
    with torch.no_grad():
        for parameter in block.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) / 3)
    return block


class Timed(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(6, 6)

    def forward(self, x, dt):
        return x + dt * torch.tanh(self.inner(x))


class Skip(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(6, 6)

    def forward(self, x):
        return x + torch.tanh(self.inner(x)) / 4


class Implicit(nn.Module):
    """A step with a coarse step of n times its length. It records each n for which it was called."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(6, 6)
        self.asked = []

    def forward(self, x):
        return self.coarse_step(x, 1)

    def coarse_step(self, x, n):
        self.asked.append(n)
        return (x + n * torch.tanh(self.inner(x)) / 4) / (1 + n / 8)


class Masked(nn.Module):
    """A block that takes a mask in addition to the state."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(6, 6)

    def forward(self, x, mask):
        return x + torch.tanh(self.inner(x)) * mask


class Normed(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner, self.norm = nn.Linear(6, 6), nn.BatchNorm1d(6)

    def forward(self, x):
        return torch.tanh(self.norm(self.inner(x)))


def mixed_list():
    """Returns layers of every kind, a head, a tail, a plain layer between steps, and layers with buffers."""
    torch.manual_seed(5)
    layers = [nn.Linear(4, 6)]
    layers += [ode(small(number)) for number in range(4)]
    layers += [timed(Timed()) for _ in range(2)] + [residual(Skip()) for _ in range(2)]
    layers += [plain(nn.LayerNorm(6)), *(ode(Normed()) for _ in range(2)), nn.Linear(6, 3)]
    return layers


def batch(rows=8):
    return drawn(11, (rows, 4), (rows, 3))


def adam(parameters):
    return torch.optim.Adam(parameters, lr=1e-2, weight_decay=1e-3, amsgrad=True)


def trained(net, optimizer, steps=1):
    for _ in range(steps):
        if optimizer is not None:
            optimizer.zero_grad()
        loss = net.step(*batch(), squared)
        if optimizer is not None:
            optimizer.step()
    return loss


def optimizer_of(net, make=adam):
    """Returns an optimizer, or `None` on a rank without parameters."""
    return make(net.parameters()) if list(net.parameters()) else None


def all_of(net, optimizer):
    """Returns all values that belong to the layers of this rank, by name."""
    found = {name: value.clone() for name, value in net.state_dict().items()}
    names = {id(parameter): name for name, parameter in net.named_parameters()}
    if optimizer is not None:
        for group in optimizer.param_groups:
            options = {key: value for key, value in group.items() if key != "params"}
            found |= {f"{names[id(parameter)]} options": options for parameter in group["params"]}
        for parameter, state in optimizer.state.items():
            found |= {f"{names[id(parameter)]} {key}": value.clone() for key, value in state.items()}
    return found


def assert_same(found, wanted):
    for name, value in found.items():
        right = wanted[name]
        assert torch.equal(value, right) if isinstance(value, torch.Tensor) else value == right, name


def of_ranks(net, mine):
    """Returns the values of all ranks."""
    return {name: value for part in net._wire.gathered(mine) for name, value in part.items()}


# ---- results of a refined net

KINDS = {
    "ode": lambda: ode(small(7)),
    "timed": lambda: timed(Timed()),
    "residual": lambda: residual(Skip()),
    "custom": lambda: custom(Implicit()),
}


@on_ranks(1, 2)
@pytest.mark.parametrize("kind", list(KINDS))
def test_refined_nets_converge_to_what_their_equation_gives(rank, world, kind):
    torch.manual_seed(2)
    layers = [KINDS[kind]() for _ in range(4)]
    for layer in layers:
        layer.module.double()
    x = torch.randn(5, 6, dtype=torch.float64)
    net, outputs = LayerParallel(layers, mode="exact-wave", horizon=2.0), []
    for factor in (1, 2, 4, 8, 16):
        finer = refined(net, factor)
        assert len(finer._plans.net.layers) == 4 * factor
        with torch.no_grad():
            outputs.append(finer(x))
    if net.is_last:
        # The function is the same to first order: Euler's error halves when the number of steps doubles.
        away = [float((a - b).norm()) for a, b in itertools.pairwise(outputs)]
        assert away[0] > 1e-3
        assert all(1.8 < a / b < 2.2 for a, b in itertools.pairwise(away))


@on_ranks(1)
def test_linear_interpolation_is_of_second_order_where_parameters_vary_with_time(rank, world):
    def at(count):
        layers = []
        for number in range(count):
            layer = nn.Linear(3, 3, dtype=torch.float64)
            with torch.no_grad():
                time = number / count
                layer.weight.copy_(torch.sin(time + torch.arange(9.0, dtype=torch.float64)).view(3, 3))
                layer.bias.fill_(time**2)
            layers.append(ode(layer))
        return LayerParallel(layers, mode="exact-wave")

    errors = {}
    for interpolation in ("constant", "linear"):
        for count in (8, 16):
            finer = refined(at(count), 2, interpolation=interpolation)
            right = at(2 * count)
            # Leave out the last interval, which has no neighbour to interpolate towards.
            pairs = [(finer.layers[str(n)].weight, right.layers[str(n)].weight) for n in range(2 * count - 2)]
            errors[interpolation, count] = max(float((a - b).abs().max()) for a, b in pairs)
    assert 1.8 < errors["constant", 8] / errors["constant", 16] < 2.2
    assert 3.6 < errors["linear", 8] / errors["linear", 16] < 4.4


@on_ranks(1, 2, 3)
def test_layers_go_towards_neighbours_of_their_own_make_alone(rank, world):
    layers = mixed_list()
    with torch.no_grad():
        for number, layer in enumerate(layers):
            for parameter in (layer.module if isinstance(layer, Block) else layer).parameters():
                parameter.fill_(number)
    net = LayerParallel(layers, mode="exact-wave")
    finer = refined(net, 4, interpolation="linear")
    found = of_ranks(finer, {int(n): {float(p.mean()) for p in m.parameters()} for n, m in finer.layers.items()})
    wanted = [0]
    for run in ((1, 2, 3, 4), (5, 6), (7, 8), (9,), (10, 11), (12,)):
        is_plain = run in ((9,), (12,))
        for number in run:
            to = number + (number + 1 in run)
            wanted += [number] if is_plain else [number + part / 4 * (to - number) for part in range(4)]
    assert [found[number] for number in range(len(wanted))] == [{float(value)} for value in wanted]


class Odd(nn.Module):
    def __init__(self, number):
        super().__init__()
        generator = torch.Generator().manual_seed(number)
        self.short = nn.Parameter(torch.randn(1000, generator=generator).bfloat16())
        self.shorter = nn.Parameter(torch.randn(1000, generator=generator).to(torch.float8_e4m3fn))
        self.complex = nn.Parameter(torch.randn(5, dtype=torch.complex64, generator=generator))
        self.whole = nn.Parameter(torch.tensor([number]), requires_grad=False)

    def forward(self, x):
        return x


@on_ranks(1, 2)
def test_parameters_of_any_type_are_rounded_once_and_whole_numbers_stay(rank, world):
    a, b = Odd(1), Odd(2)
    net = LayerParallel([ode(copy.deepcopy(a)), ode(copy.deepcopy(b))], mode="exact-wave")
    finer = refined(net, 4, interpolation="linear", placement=[8] + [0] * (world - 1))
    for number, layer in finer.layers.items():
        share = min(int(number), 4) / 4
        for name in ("short", "shorter", "complex"):
            x, y, found = (each.get_parameter(name).detach() for each in (a, b, layer))
            dtype = torch.complex128 if x.is_complex() else torch.float64
            between = (1 - share) * x.to(dtype) + share * y.to(dtype)
            assert found.dtype == x.dtype
            if name == "complex":
                torch.testing.assert_close(found, between.to(x.dtype))
            else:
                # The computation is in float32. That is exact enough to find the nearest 16-bit number, except for
                # ties.
                assert (found.to(dtype) != between.to(x.dtype).to(dtype)).sum() <= 2
        assert int(layer.whole) == 1 + (share == 1)


@on_ranks(1, 2)
def test_residual_blocks_make_shares_of_their_steps_or_are_copied(rank, world):
    torch.manual_seed(1)
    blocks = [Skip() for _ in range(2)]
    x = torch.randn(3, 6)
    net = LayerParallel([residual(block) for block in copy.deepcopy(blocks)], mode="exact-wave")
    scaled, copied = refined(refined(net, 3), 2), refined(net, 2, residual="copied")
    one = coarsened(coarsened(scaled, 2), 3)
    with torch.no_grad():
        outputs = [made(x) for made in (scaled, copied, one)]
        if net.is_last:
            state = x
            for block in blocks:
                for _ in range(6):
                    state = state + (block(state) - state) / 6
            torch.testing.assert_close(outputs[0], state)
            assert torch.equal(outputs[1], blocks[1](blocks[1](blocks[0](blocks[0](x)))))
            assert torch.equal(outputs[2], blocks[1](blocks[0](x)))
    for module in scaled.layers.values():
        # Refining twice must not put one `Scaled` around another, because parameter names would then depend on the
        # number of refinements.
        assert isinstance(module, Scaled) and module.by == Fraction(1, 6) and isinstance(module.block, Skip)
    assert all(isinstance(module, Skip) for made in (copied, one) for module in made.layers.values())


@on_ranks(1, 2)
def test_steps_longer_than_a_layers_own_are_its_coarse_steps(rank, world):
    torch.manual_seed(1)
    layers = [Implicit() for _ in range(4)]
    x = torch.randn(3, 6)
    net = LayerParallel([custom(copy.deepcopy(layer)) for layer in layers], mode="exact-wave")
    with torch.no_grad():
        y = coarsened(net, 2)(x)
        if net.is_last:
            assert torch.equal(y, layers[2].coarse_step(layers[0].coarse_step(x, 2), 2))
        # Coarse steps then have the length of three halves of a step.
        finer = refined(net, 2, mode="inexact", fwd=Cycle(factor=3), placement="kept")
        for module in finer.layers.values():
            module.block.asked.clear()
        finer.train()(x)
        asked = {n for module in finer.layers.values() for n in module.block.asked}
        assert asked <= {1, 1.5} and 1.5 in {n for part in net._wire.gathered(asked) for n in part}


@on_ranks(1, 2, 3)
def test_shares_of_steps_pass_side_inputs_to_the_block(rank, world):
    torch.manual_seed(1)
    blocks = [*(Masked() for _ in range(3)), *(Skip() for _ in range(3))]
    x, target, mask = torch.randn(3, 6), torch.randn(3, 6), torch.tensor([1.0, 0.0, 1.0, 1.0, 0.0, 1.0])
    net = LayerParallel([residual(block) for block in copy.deepcopy(blocks)], mode="exact-wave")
    side = {"mask": mask.clone().requires_grad_()}
    loss = refined(net, 2).step(x, target, squared, side=side)
    state, wanted = x, mask.clone().requires_grad_()
    for block in blocks:
        for _ in range(2):
            y = block(state, wanted) if isinstance(block, Masked) else block(state)
            state = state + 0.5 * (y - state)
    right = squared(state, target)
    right.backward()
    torch.testing.assert_close(loss, right.detach())
    if rank == 0:
        torch.testing.assert_close(side["mask"].grad, wanted.grad)


def test_a_share_of_a_step_has_the_leaves_of_the_state():
    class Pair(nn.Module):
        def forward(self, state):
            # The leaves are returned in another order.
            return {"mask": state["mask"], "x": state["x"] + 4 * state["mask"]}

    state = {"x": torch.zeros(3), "mask": torch.tensor([1, 0, 1])}
    y = Scaled(Pair(), 0.25)(state)
    assert torch.equal(y["x"], torch.tensor([1.0, 0.0, 1.0])) and y["mask"] is state["mask"]

    class First(nn.Module):
        def forward(self, state):
            return state[0]

    with pytest.raises(TypeError, match="(?s)First returned the structure .*; expected its input's structure"):
        Scaled(First(), 0.5)((torch.zeros(3), torch.zeros(3)))


# ---- ranks


@pytest.mark.slow
@on_ranks(*RANKS)
@pytest.mark.parametrize("interpolation", ["constant", "linear"])
def test_nothing_depends_on_the_number_of_ranks_by_a_bit(rank, world, interpolation):
    layers = mixed_list()
    one = LayerParallel(copy.deepcopy(layers), group=alone(), replica=0, mode="exact-wave")
    own = adam(one.parameters())
    trained(one, own)
    finer_one, own_finer = refined(one, 3, own, interpolation=interpolation)
    wanted, loss = all_of(finer_one, own_finer), trained(finer_one, own_finer)
    wanted_after = all_of(finer_one, own_finer)
    back = all_of(*coarsened(finer_one, 3, own_finer))
    count = len(layers)
    for placement, wished in (
        ("aligned", {}),
        ("even", {"placement": "kept"}),
        ([1] * (world - 1) + [count + 1 - world], {}),
        ([count - world + 1] + [1] * (world - 1), {"placement": "even"}),
        ([0] * (world - 1) + [count], {"placement": "even"}),
    ):
        # One of the runs uses another backend.
        group = gloo_group() if world == 2 and placement == "aligned" else None
        net = LayerParallel(copy.deepcopy(layers), group=group, mode="exact-wave", placement=placement)
        optimizer = optimizer_of(net)
        trained(net, optimizer)
        finer, of_finer = refined(net, 3, optimizer, interpolation=interpolation, **wished)
        if wished.get("placement") == "kept" or (not wished and not isinstance(placement, str)):
            # Each new layer is on the rank of the step from which it was made.
            assert {finer_one_origin(number) for number in finer.owned} == set(net.owned)
        mine = all_of(finer, of_finer)
        assert_same(mine, wanted)
        assert of_ranks(finer, dict.fromkeys(mine, 0)).keys() == wanted.keys()
        assert torch.equal(trained(finer, of_finer), loss)
        assert_same(all_of(finer, of_finer), wanted_after)
        assert_same(all_of(*coarsened(finer, 3, of_finer)), back)


def finer_one_origin(number):
    """Returns the layer of the mixed list from which layer `number` of the list refined by 3 was made."""
    kinds = ["plain" if not isinstance(layer, Block) else layer.kind for layer in mixed_list()]
    origins = [at for at, kind in enumerate(kinds) for _ in range(1 if kind == "plain" else 3)]
    return origins[number]


@on_ranks(1, 2, 3)
@pytest.mark.parametrize("interpolation", ["constant", "linear"])
def test_coarsening_a_refined_net_gives_the_net(rank, world, interpolation):
    net = LayerParallel(mixed_list(), mode="exact-wave", horizon=0.7)
    optimizer = adam(net.parameters())
    trained(net, optimizer)
    before = all_of(net, optimizer)
    # Dividing by a power of two does not round.
    again, of_again = coarsened(*refined_pair(net, 4, optimizer, interpolation))
    assert_same(of_ranks(again, all_of(again, of_again)), of_ranks(net, before))
    assert again._solver.layers.dt == net._solver.layers.dt
    # The original net is unchanged and can be trained further.
    assert_same(all_of(net, optimizer), before)
    assert torch.equal(trained(net, optimizer), trained(again, of_again))


def refined_pair(net, factor, optimizer, interpolation):
    finer, of_finer = refined(net, factor, optimizer, interpolation=interpolation)
    return finer, factor, of_finer


@on_ranks(3)
def test_ranks_without_parameters_get_an_optimizer_and_may_come_to_have_none(rank, world):
    net = LayerParallel([ode(small(number)) for number in range(4)], placement=[0, 4, 0], mode="exact-wave")
    optimizer = optimizer_of(net, lambda parameters: torch.optim.AdamW(parameters, lr=0.3))
    x, target = torch.randn(4, 6), torch.randn(4, 6)
    for placement in ("even", [8, 0, 0]):
        finer, of_finer = refined(net, 2, optimizer, placement=placement)
        assert isinstance(of_finer, torch.optim.AdamW)
        assert all(group["lr"] == 0.3 for group in of_finer.param_groups if group["params"])
        finer.step(x, target, squared)
        of_finer.step()
        assert len(of_finer.state) == 4 * len(finer.owned)
    if rank == 1:
        assert list(finer.owned) == [] and of_finer.param_groups[0]["params"] == []
    with pytest.raises(ValueError, match="rank 1 of the layers has parameters but gave no optimizer"):
        refined(net, 2, adam([nn.Parameter(torch.zeros(1))]) if rank == 0 else None)


@on_ranks(1, 2, 3)
def test_buffers_training_and_frozen_parameters_are_kept(rank, world):
    net = LayerParallel(mixed_list(), mode="exact-wave")
    trained(net, None)
    for number, module in net.layers.items():
        if isinstance(module, Normed):
            module.inner.weight.requires_grad_(False)
            if int(number) == 10:
                module.norm.eval()
    state = of_ranks(net, {number: module.state_dict() for number, module in net.layers.items()})
    finer = refined(net, 2, placement="even")
    # Layers 18 and 19 come from step 10, layers 20 and 21 from step 11.
    for number in (18, 19, 20, 21):
        if str(number) in finer.layers:
            module, before = finer.layers[str(number)], state[str(10 + (number - 18) // 2)]
            assert torch.equal(module.norm.running_mean, before["norm.running_mean"])
            assert int(module.norm.num_batches_tracked) == 1
            assert module.norm.training == (number > 19) and module.training
            assert not module.inner.weight.requires_grad and module.inner.bias.requires_grad
            assert module.inner.weight.grad is None
    assert finer._solver.shared.number == net._solver.shared.number == 1


@on_ranks(2)
def test_a_checkpoint_of_a_refined_net_is_read_on_another_number_of_ranks(rank, world, tmp_path):
    net = LayerParallel(mixed_list(), mode="exact-wave")
    finer = refined(net, 2, interpolation="linear")
    checkpoint.save({"net": finer.state_dict()}, checkpoint_id=tmp_path)
    whole = finer.to_serial()
    names = of_ranks(finer, dict.fromkeys(finer.state_dict(), 0))
    assert sorted(names) == sorted(whole.state_dict())
    assert {name.split(".")[1] for name in names} == set(map(str, range(3 + 2 * 10)))
    one = refined(LayerParallel(mixed_list(), group=alone(), mode="exact-wave"), 2)
    read = {"net": one.state_dict()}
    checkpoint.load(read, checkpoint_id=tmp_path)
    one.load_state_dict(read["net"])
    for name, parameter in one.named_parameters():
        assert torch.equal(parameter, whole.get_parameter(name))


# ---- tied parameters


@on_ranks(1, 2, 3)
@pytest.mark.parametrize("how", ["named", "one object"])
@pytest.mark.parametrize("interpolation", ["constant", "linear"])
def test_what_is_tied_stays_tied(rank, world, how, interpolation):
    torch.manual_seed(4)
    layers = [nn.Linear(6, 6), *(residual(Skip()) for _ in range(4)), nn.Linear(6, 6)]
    tie = [("layers.5.weight", "layers.0.weight"), ("layers.1.inner.bias", "layers.2.inner.bias")]
    if how == "one object":
        layers[5].weight = layers[0].weight
        layers[2].module.inner.bias = layers[1].module.inner.bias
    x, target = torch.randn(4, 6), torch.randn(4, 6)
    net = LayerParallel(copy.deepcopy(layers), mode="exact-wave", tie=tie if how == "named" else ())
    optimizer = optimizer_of(net, lambda parameters: torch.optim.Adam(parameters, lr=0.01))
    net.step(x, target, squared)
    optimizer.step()
    finer, of_finer = refined(net, 3, optimizer, interpolation=interpolation)
    head, tail = "layers.0.weight", "layers.13.weight"
    biases = [f"layers.{number}.block.inner.bias" for number in range(1, 7)]
    assert sorted(map(sorted, finer._ties.names)) == [sorted([head, tail]), biases]
    before = of_ranks(net, {name: p.detach() for name, p in net.named_parameters(remove_duplicate=False)})
    moments = of_ranks(net, moments_of(net, optimizer))
    of_finer.zero_grad()
    for step in range(2):
        found = of_ranks(finer, {name: p.detach().clone() for name, p in finer.named_parameters()})
        for group in ([head, tail], biases):
            assert all(torch.equal(found[name], found[group[0]]) for name in group)
        if step == 0:
            # Interpolation between two tied parameters gives the same values, and tied parameters are not interpolated
            # towards others.
            assert torch.equal(found[head], before["layers.0.weight"])
            assert torch.equal(found[biases[0]], before["layers.1.inner.bias"])
            finer_moments = of_ranks(finer, moments_of(finer, of_finer))
            for old, new, size in (
                ("layers.0.weight", head, 1),
                ("layers.2.inner.bias", biases[5], 1),
                ("layers.1.inner.weight", "layers.1.block.inner.weight", 3),
            ):
                torch.testing.assert_close(finer_moments[new] * size, moments[old])
        finer.step(x, target, squared)
        of_finer.step()
    # A serial net with the same object in all these positions gives the same gradients.
    whole = finer.to_serial()
    of_finer.zero_grad()
    loss = finer.step(x, target, squared)
    right = squared(whole(x), target)
    right.backward()
    torch.testing.assert_close(loss, right.detach())
    for name, parameter in finer.named_parameters():
        torch.testing.assert_close(parameter.grad, whole.get_parameter(name).grad)
    # Two of the six tied biases are left.
    back = coarsened(finer, 3)
    assert [len(group) for group in sorted(back._ties.names)] == [2, 2]
    # One of the two tied biases goes, so the other is tied to nothing.
    assert len(coarsened(back, 2)._ties.names) == 1
    assert refined(net, 2, tie=())._ties.names == []


def moments_of(net, optimizer):
    named = net.named_parameters(remove_duplicate=False)
    return {name: optimizer.state[parameter]["exp_avg"].clone() for name, parameter in named}


# ---- settings


@on_ranks(1, 2)
def test_settings_are_kept_unless_others_are_given(rank, world):
    given = dict(
        horizon=0.3,
        seed=4,
        mode="exact-forward",
        fwd=Cycle(factor=2, iterations=5),
        bwd=Cycle(factor=2, iterations=3),
        spatial=Spatial(lambda x: x, lambda x, like: x),
        placement="even",
        micro_batches=3,
        schedule="gpipe",
        side_per_sample=("mask",),
        checkpoint=True,
        auto_modes=("inexact", "exact-wave"),
        stop=Stop(tolerance=0.125, max_iterations=7),
        replica=7,
        audit=Audits(every=3, limit=0.25, on_excess="more", probe_every=5, on_stall="exact"),
    )
    # The other parameters: `layers` and `guess` are no settings, and `mesh` and `group` give the ranks. `buffer_layers`
    # and `tie` are properties of the layers.
    assert set(inspect.signature(LayerParallel).parameters) == {
        "layers",
        "mesh",
        "group",
        "buffer_layers",
        "guess",
        "tie",
        *given,
    }
    net = LayerParallel([ode(small(number)) for number in range(8)], **given)
    net.evaluation = "inexact"
    finer = refined(net, 2)
    assert settings_of(finer) == settings_of(net) | {"dt": 0.3 / 16}
    assert settings_of(net)["dt"] == 0.3 / 8
    net.mode, net.fwd = "inexact", Cycle(factor=4)
    again = refined(net, 2, horizon=1.0, placement="aligned", bwd=Cycle(factor=8))
    # A set has another order on every rank, and a function has another address. Neither may count as a difference.
    refined(net, 2, side_per_sample={"a", "b", "c", "d"}, guess=lambda point: point)
    assert refined(net, 2, evaluation="exact-wave").evaluation == "exact-wave"
    assert settings_of(again) == settings_of(net) | {
        "dt": 1 / 16,
        "horizon": 1.0,
        "placement": "aligned",
        "bwd": Cycle(factor=8),
    }


def settings_of(net):
    names = ["mode", "evaluation", "fwd", "bwd", "_horizon", "_placement", "_micro_batches", "_schedule", "_checkpoint"]
    names += ["_auto_modes", "_stop", "_audit"]
    solver = net._solver
    others = dict(
        dt=solver.layers.dt,
        seed=solver.layers.seed,
        replica=solver.replica,
        per_sample=solver.shared.per_sample,
        spatial=solver.shared.spatial,
    )
    return {name.removeprefix("_"): getattr(net, name) for name in names} | others


@on_ranks(1, 2)
def test_a_guess_is_by_the_points_of_the_net_that_it_was_made_for(rank, world):
    layers = [nn.Linear(4, 6), *(ode(small(number)) for number in range(4)), nn.Linear(6, 3)]
    net = LayerParallel(layers, guess=lambda point: point, fwd=Cycle(factor=2, start="guess"))
    assert [refined(net, 2)._solver.shared.guess(point) for point in range(11)] == [0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 6]
    assert [coarsened(net, 2, mode="exact-wave")._solver.shared.guess(point) for point in range(5)] == [0, 1, 3, 5, 6]
    assert refined(net, 2, guess=len)._solver.shared.guess is len


@on_ranks(1, 2)
def test_layers_of_a_layer_that_is_apart_are_apart(rank, world):
    layers = [ode(small(number)) for number in range(8)]
    layers[4] = layers[4].apart()
    net = LayerParallel(layers, buffer_layers=(2, 1), mode="exact-wave")

    def apart(made):
        return [number for number, (_, is_apart) in enumerate(made._plans.net.layers) if is_apart]

    assert apart(net) == [0, 1, 4, 7]
    assert apart(refined(net, 2)) == [0, 1, 2, 3, 8, 9, 14, 15]
    assert apart(coarsened(net, 2)) == [0, 2, 3] and apart(coarsened(refined(net, 3), 3)) == [0, 1, 4, 7]
    assert apart(refined(net, 2, buffer_layers=(1, 0))) == [0]


# ---- optimizers


@on_ranks(1, 2)
def test_adams_next_step_of_each_layer_is_that_of_the_layer_it_comes_from(rank, world):
    # If a layer becomes several layers, its gradient is distributed over them.
    for make in (
        lambda parameters: torch.optim.Adam(parameters, lr=0.1, eps=0.0, amsgrad=True),
        lambda parameters: torch.optim.RMSprop(parameters, lr=0.1, eps=0.0, momentum=0.9, centered=True),
        lambda parameters: torch.optim.Adamax(parameters, lr=0.1, eps=0.0),
        lambda parameters: torch.optim.Adagrad(parameters, lr=0.1, eps=0.0),
    ):
        net = LayerParallel([plain(nn.Linear(6, 6)), *(ode(small(n)) for n in range(4))], mode="exact-wave")
        optimizer = make(net.parameters())
        x, target = torch.randn(4, 6), torch.randn(4, 6)
        for _ in range(3):
            optimizer.zero_grad()
            net.step(x, target, squared)
            optimizer.step()
        finer, of_finer = refined(net, 4, optimizer, placement="kept")
        origins = {0: 0} | {number: 1 + (number - 1) // 4 for number in range(1, 17)}
        for number in finer.owned:
            pairs = zip(finer.layers[str(number)].parameters(), net.layers[str(origins[number])].parameters())
            for parameter, before in pairs:
                parameter.grad = before.grad if number == 0 else before.grad / 4
        optimizer.step()
        of_finer.step()
        for number in finer.owned:
            pairs = zip(finer.layers[str(number)].parameters(), net.layers[str(origins[number])].parameters())
            for parameter, before in pairs:
                # The values are equal bit for bit, because division by four does not round.
                assert torch.equal(parameter, before), (type(optimizer), number)


@on_ranks(1, 2)
@pytest.mark.parametrize("moments", ["scaled", "copied", "none"])
def test_the_next_step_of_sgd_has_the_momentum_that_was_asked_for(rank, world, moments):
    net = LayerParallel([ode(small(number)) for number in range(4)], mode="exact-wave")
    optimizer = torch.optim.SGD(net.parameters(), lr=0.5, momentum=0.75)
    x, target = torch.randn(4, 6), torch.randn(4, 6)
    for _ in range(3):
        optimizer.zero_grad()
        net.step(x, target, squared)
        optimizer.step()
    finer, of_finer = refined(net, 2, optimizer, moments=moments, placement="kept")
    before = {name: parameter.detach().clone() for name, parameter in finer.named_parameters()}
    finer.step(x, target, squared)
    of_finer.step()
    share = {"scaled": 0.5, "copied": 1.0, "none": 0.0}[moments]
    for number in finer.owned:
        for name, parameter in finer.layers[str(number)].named_parameters():
            old = net.layers[str(number // 2)].get_parameter(name)
            velocity = 0.75 * share * optimizer.state[old]["momentum_buffer"] + parameter.grad
            torch.testing.assert_close(parameter, before[f"layers.{number}.{name}"] - 0.5 * velocity)


@on_ranks(1, 2, 3)
def test_moments_lie_between_those_of_neighbours_as_parameters_do(rank, world):
    net = LayerParallel([ode(nn.Linear(2, 2)) for _ in range(3)], mode="exact-wave")
    optimizer = torch.optim.Adam(net.parameters())
    for number in net.owned:
        for parameter in net.layers[str(number)].parameters():
            optimizer.state[parameter] = {
                "step": torch.tensor(5.0 + number),
                "exp_avg": torch.full_like(parameter, number),
                "exp_avg_sq": torch.full_like(parameter, 4.0 * number),
            }
    finer, of_finer = refined(net, 2, optimizer, interpolation="linear")
    for number in finer.owned:
        at = min(number / 2, 2)
        for parameter in finer.layers[str(number)].parameters():
            state = of_finer.state[parameter]
            assert float(state["step"]) == 5 + number // 2
            assert torch.equal(state["exp_avg"], torch.full_like(parameter, at / 2))
            assert torch.equal(state["exp_avg_sq"], torch.full_like(parameter, 4 * at / 4))


@on_ranks(1, 2, 3)
def test_options_of_groups_go_with_the_parameters(rank, world):
    net = LayerParallel(mixed_list(), mode="exact-wave")
    weights = [(name, p) for name, p in net.named_parameters() if name.endswith("weight")]
    biases = [(name, p) for name, p in net.named_parameters() if not name.endswith("weight")]
    outside = nn.Parameter(torch.ones(3))
    groups = [
        {"params": [("outside", outside)], "lr": torch.tensor(0.5)},
        {"params": weights, "lr": torch.tensor(0.25), "initial_lr": 1.0},
        # An additional group on one rank, so that later groups have different indices on different ranks.
        *([{"params": []}] if rank == 1 else []),
        {"params": biases, "weight_decay": 0.125},
    ]
    if rank == 1:
        groups[2]["param_names"] = []
    optimizer = torch.optim.AdamW(groups, lr=torch.tensor(0.1), foreach=False)
    trained(net, optimizer)
    optimizer.state[outside] = {"step": torch.tensor(3.0)}
    finer, of_finer = refined(net, 2, optimizer, placement=[1] * (world - 1) + [24 - world])
    assert isinstance(of_finer, torch.optim.AdamW) and of_finer is not optimizer
    assert len(of_finer.param_groups) == len(groups)
    names = dict(finer.named_parameters())
    seen = []
    for group in of_finer.param_groups:
        for name, parameter in zip(group["param_names"], group["params"], strict=True):
            if name == "outside":
                # A parameter that does not belong to the net is kept as it is.
                assert parameter is outside and float(of_finer.state[outside]["step"]) == 3
                assert float(group["lr"]) == 0.5
                continue
            assert names[name] is parameter
            is_weight = name.endswith("weight")
            assert float(group["lr"]) == pytest.approx(0.25 if is_weight else 0.1)
            assert group["weight_decay"] == (0.01 if is_weight else 0.125)
            assert group.get("initial_lr") == (1.0 if is_weight else None)
            assert of_finer.state[parameter].keys() == {"step", "exp_avg", "exp_avg_sq"}
            seen.append(name)
    assert sorted(seen) == sorted(names)
    finer.step(*batch(), squared)
    of_finer.step()


# ---- failures


class Local:
    """An object that cannot be pickled but can be copied."""

    def __reduce_ex__(self, protocol):
        raise TypeError("it stays where it is")

    def __deepcopy__(self, memo):
        return self


@on_ranks(1, 2, 3)
def test_what_goes_wrong_on_one_rank_is_raised_on_all_and_the_net_goes_on(rank, world):
    net = LayerParallel([ode(small(number)) for number in range(6)], mode="exact-wave")
    x, target = torch.randn(4, 6), torch.randn(4, 6)

    def is_raised(said, *arguments, error=LayerParallelError, call=refined, **settings):
        with pytest.raises(error, match=said):
            call(*arguments, **settings)

    is_raised("factor=0: give an integer of at least 1", net, 0, error=ValueError)
    is_raised("factor=2.0: give an integer", net, 2.0, error=ValueError)
    is_raised("interpolation='cubic': give one of constant, linear", net, 2, error=ValueError, interpolation="cubic")
    is_raised("group is not supported: the net stays on its ranks", net, 2, error=ValueError, group=None)
    is_raised("mode='fast': give one of", net, 2, error=ValueError, mode="fast")
    is_raised("unexpected keyword argument 'speed'", net, 2, error=TypeError, speed=3)
    is_raised("factor=4 does not divide the 6 equal steps from layer 0 to 5", net, 4, error=ValueError, call=coarsened)
    is_raised("net is Sequential; give the LayerParallel itself", nn.Sequential(net), 2, error=TypeError)
    lbfgs = torch.optim.LBFGS(net.parameters())
    is_raised("LBFGS has one state for all parameters", net, 2, lbfgs, error=TypeError)
    is_raised("optimizer is str; give a torch.optim.Optimizer", net, 2, "Adam", error=TypeError)
    if world > 1:
        is_raised(
            r"issued different calls: refined\(factor=2.* and refined\(factor=3",
            net,
            2 + (rank == 1),
            error=ValueError,
        )
        is_raised("rank 1 of the layers failed in refined.*factor=0", net, 0 if rank == 1 else 2)
        other = torch.optim.SGD if rank else torch.optim.Adam
        is_raised("gave optimizers of", net, 2, other(net.parameters()), error=ValueError)
        # The first layer of rank 1 is sent to rank 0.
        first = next(number for number in range(6) if net.owner(number) == 1)
        if net.owner(first) == rank:
            net.layers[str(first)].extra = Local()
        is_raised(
            rf"rank 1 of the layers failed in packing layers: .*layer {first} \(Sequential\) cannot be sent: "
            "TypeError: it stays where it is. Layers that move to another rank must be picklable; placement='kept'",
            net,
            2,
            placement=[12] + [0] * (world - 1),
        )
        refined(net, 2, placement="kept")
    last = net.layers["5"] if net.is_last else None
    if last is not None:
        last[0].register_buffer("graph", torch.ones(1, requires_grad=True) * 2)
    is_raised(r"failed in refined\(\): .*layer 5 \(Sequential\) cannot be copied: ", net, 2, placement="kept")
    if last is not None:
        del last[0].graph
    assert torch.isfinite(net.step(x, target, squared))
    assert torch.isfinite(refined(net, 2, placement="kept").step(x, target, squared))


@on_ranks(2)
def test_a_net_of_one_rank_among_others_stays_alone(rank, world):
    net = LayerParallel([ode(small(number)) for number in range(4)], group="alone", fwd=Cycle(factor=2))
    deeper = refined(net, 2, placement="kept")
    assert deeper.owned == range(8) and coarsened(deeper, 2).owned == range(4)
    x = torch.ones(3, 6)
    # One rank steps alone, and no rank waits for the other.
    if rank == 1:
        deeper.step(x, x, squared)


@on_ranks(1, 2)
def test_a_misspelt_side_input_stays_an_error_in_a_deeper_net(rank, world):
    net = LayerParallel([residual(Masked()) for _ in range(4)], fwd=Cycle(factor=2))
    x = torch.ones(3, 6)
    for each in (net, refined(net, 2), coarsened(net, 2)):
        each.step(x, x, squared, side={"mask": torch.ones(6)})
        with pytest.raises(ValueError, match="no layer's forward has an argument `msak`"):
            each.step(x, x, squared, side={"mask": torch.ones(6), "msak": torch.ones(6)})


class TwoNames(nn.Module):
    def __init__(self, weight):
        super().__init__()
        self.a = self.b = weight

    def forward(self, x):
        return torch.tanh(x @ self.a) @ self.b


class OneName(nn.Module):
    def __init__(self, weight):
        super().__init__()
        self.w = weight

    def forward(self, x):
        return x @ self.w.T


@on_ranks(1, 2)
def test_a_parameter_of_two_names_in_one_layer_is_tied_to_another_layer_in_a_deeper_net(rank, world):
    weight = nn.Parameter(torch.linspace(-1, 1, 36).view(6, 6))
    layers = [plain(TwoNames(weight)), *(ode(small(number)) for number in range(4)), plain(OneName(weight))]
    net = LayerParallel(layers, mode="exact-wave", placement="even")
    deeper = refined(net, 2)
    x = torch.linspace(-1, 1, 18).view(3, 6)
    for each in (net, deeper):
        each.step(x, x, squared)
    found = {name: each.grad for name, each in deeper.named_parameters()}
    serial = nn.Sequential(*(copy.deepcopy(each) for each in deeper.to_serial().layers))
    # The expected gradient is the sum over all three uses of the weight.
    weight = weight.detach().clone().requires_grad_()
    y = torch.tanh(x @ weight) @ weight
    for layer in serial[1:-1]:
        y = y + layer(y) / 8
    loss = squared(y @ weight.T, x)
    (wanted,) = torch.autograd.grad(loss, [weight])
    for name, gradient in found.items():
        if name.endswith((".a", ".w")):
            torch.testing.assert_close(gradient, wanted, rtol=1e-4, atol=1e-6)
