"""V-cycles over nets of different depth: first-order consistency, gain, and independence of the number of ranks."""

import copy

import pytest
import torch
import torch._dynamo  # optimizers load it, which takes seconds: load it once here, not in every rank
from support import on_ranks
from support.nets import alone, drawn, squared
from torch import nn
from torch_accl.layer_parallel import (
    Audits,
    Block,
    Cycle,
    LayerParallel,
    LayerParallelError,
    MGOpt,
    coarsened,
    ode,
    residual,
    timed,
)
from torch_accl.layer_parallel._change.level_transfer import dots, trained
from torch_accl.layer_parallel._change.mgopt import _Batch

DOUBLE = torch.float64


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
        return x + torch.tanh(self.inner(x)) / 8


def mixed_list(dtype=DOUBLE, seed=5):
    """Returns steps of every kind, a head, a tail, and a plain layer between steps."""
    torch.manual_seed(seed)
    layers = [nn.Linear(4, 6)]
    layers += [ode(nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 6))) for _ in range(8)]
    layers += [timed(Timed()) for _ in range(4)] + [residual(Skip()) for _ in range(4)]
    layers += [nn.LayerNorm(6), *(ode(nn.Sequential(nn.Linear(6, 6), nn.Tanh())) for _ in range(4)), nn.Linear(6, 3)]
    for layer in layers:
        (layer.module if isinstance(layer, Block) else layer).to(dtype)
    return layers


def batch(dtype=DOUBLE, rows=16):
    return drawn(11, (rows, 4), (rows, 3), dtype=dtype)


def sgd(net, **options):
    """Returns an optimizer, or `None` on a rank without parameters."""
    return torch.optim.SGD(net.parameters(), **{"lr": 0.05, **options}) if list(net.parameters()) else None


def begun(net, cycle, data):
    """Runs a cycle down to the start of the coarsest net. Returns one point per level, finest first, and the batch."""
    made = _Batch(*data, squared, None, 0)
    points = []
    for at, level in enumerate(cycle._levels):
        if at == 0:
            level.begin()
            points.append(level.evaluate(made))
        else:
            points.append(cycle._descend(at - 1, points[-1], made))
    return points, made


def directions(net, seed):
    """Returns a direction for each trained parameter, which depends only on its layer."""
    found = {}
    for layer, parameters in trained(net).items():
        generator = torch.Generator().manual_seed(1000 * seed + layer)
        found[layer] = [torch.randn(p.shape, generator=generator, dtype=p.dtype) for p in parameters]
    return found


@on_ranks(1, 2, 3)
@pytest.mark.parametrize("interpolation", ["constant", "linear"])
def test_the_coarse_objective_has_the_restricted_gradient_of_the_fine_one(rank, world, interpolation):
    net = LayerParallel(mixed_list(), mode="exact-wave")
    cycle = MGOpt(net, sgd(net), levels=3, interpolation=interpolation)
    points, made = begun(net, cycle, batch())
    whole = LayerParallel(mixed_list(), group=alone(), mode="exact-wave")
    whole.step(*batch(), squared)
    wanted = {layer: [p.grad for p in parameters] for layer, parameters in trained(whole).items()}
    # Layer numbers by run: each run of steps of one kind, and each plain layer.
    runs = [[0], [*range(1, 9)], [*range(9, 13)], [*range(13, 17)], [17], [*range(18, 22)], [22]]
    for level in (1, 2):
        coarse, restricted = [], {}
        for run in runs:
            if len(run) == 1:
                restricted[len(coarse)] = wanted[run[0]]
                coarse.append(None)
                continue
            pairs = [(run[at], run[at + 1]) for at in range(0, len(run), 2)]
            for at, (first, second) in enumerate(pairs):
                # Sum the gradients of the step's own layer and of the layer halfway to the next step, if there is a
                # next step.
                share = 0.5 if interpolation == "linear" and at + 1 < len(pairs) else 1.0
                sums = [a + share * b for a, b in zip(wanted[first], wanted[second])]
                if interpolation == "linear" and at > 0:
                    sums = [a + 0.5 * b for a, b in zip(sums, wanted[pairs[at - 1][1]])]
                restricted[len(coarse)] = sums
                coarse.append(None)
        # Compare the point's gradients, and the gradients from another evaluation of the corrected objective at the
        # point.
        again = cycle._levels[level].evaluate(made)
        assert points[level].objective == pytest.approx(again.objective, rel=1e-15)
        for layer in cycle.nets[level].owned:
            for found, other, right in zip(
                points[level].gradients[layer], again.gradients[layer], restricted[layer], strict=True
            ):
                torch.testing.assert_close(found, right, rtol=1e-11, atol=1e-14)
                torch.testing.assert_close(other, right, rtol=1e-11, atol=1e-14)
        wanted, at = restricted, 0
        runs_after = []
        for run in runs:
            count = max(1, len(run) // 2)
            runs_after.append([*range(at, at + count)])
            at += count
        runs = runs_after


@on_ranks(1, 2)
@pytest.mark.parametrize("interpolation", ["constant", "linear"])
def test_both_objectives_change_alike_to_first_order_and_not_to_second(rank, world, interpolation):
    net = LayerParallel(mixed_list(), mode="exact-wave")
    cycle = MGOpt(net, sgd(net), interpolation=interpolation)
    (fine, coarse), made = begun(net, cycle, batch())
    below, above = cycle._levels[1], cycle._levels[0]
    for seed in range(2):
        way = directions(below.net, seed)
        there = cycle._transfers[0].interpolated(way)
        starts = below.values(), above.values()
        slopes = []
        for level, start, direction in ((below, starts[0], way), (above, starts[1], there)):
            values = []
            for length in (-1e-5, 1e-5):
                level.move(start, direction, length)
                values.append(level.evaluate(made).objective)
            level.move(start, direction, 0.0)
            slopes.append((values[1] - values[0]) / 2e-5)
        # Central differences are off by the square of the length, and by rounding over the length: 1e-16 / 1e-5.
        assert slopes[0] == pytest.approx(slopes[1], rel=1e-6, abs=1e-9)
        assert dots(above.net, fine.gradients, there, "a test") == pytest.approx(slopes[1], rel=1e-6, abs=1e-9)
        assert dots(below.net, coarse.gradients, way, "a test") == pytest.approx(slopes[1], rel=1e-6, abs=1e-9)
        # Further away, the two functions differ to second order.
        differences = []
        for length in (0.01, 0.005):
            values = []
            for level, start, direction, point in (
                (below, starts[0], way, coarse),
                (above, starts[1], there, fine),
            ):
                level.move(start, direction, length)
                values.append(level.evaluate(made).objective - point.objective)
                level.move(start, direction, 0.0)
            differences.append(abs(values[0] - values[1]))
        assert 3.5 < differences[0] / differences[1] < 4.5


@pytest.mark.slow
@on_ranks(1, 2)
@pytest.mark.parametrize("levels", [2, 3])
@pytest.mark.parametrize("mode", ["exact-wave", "exact-pipeline", "inexact"])
def test_cycles_lower_the_loss_by_more_than_as_many_steps(rank, world, levels, mode):
    cycles = dict(fwd=Cycle(factor=2), bwd=Cycle(factor=2, iterations=1))
    x, target = batch()
    plainly = LayerParallel(mixed_list(), mode=mode, **cycles)
    optimizer = sgd(plainly)
    net = LayerParallel(mixed_list(), mode=mode, **cycles)
    multigrid = MGOpt(net, sgd(net), levels=levels, coarse=4)
    losses = []
    for _ in range(5):
        for _ in range(2):
            optimizer.zero_grad()
            plain_loss = plainly.step(x, target, squared)
            optimizer.step()
        losses.append(float(multigrid.step(x, target, squared)))
        assert len(multigrid.corrections) == levels - 1
        assert all(each.after < each.before and each.slope < 0 and each.length > 0 for each in multigrid.corrections)
    assert losses == sorted(losses, reverse=True)
    assert losses[-1] < float(plain_loss)
    assert all(parameter.grad is None for made in multigrid.nets for parameter in made.parameters())


@pytest.mark.slow
@on_ranks(1, 2, 3)
@pytest.mark.parametrize("interpolation, mode", [("constant", "exact-wave"), ("linear", "inexact")])
def test_nothing_depends_on_the_number_of_ranks_by_a_bit(rank, world, interpolation, mode):
    cycles = dict(fwd=Cycle(factor=2), bwd=Cycle(factor=2, iterations=1), mode=mode)
    layers, data = mixed_list(torch.float32), batch(torch.float32)

    def run(group, placement):
        net = LayerParallel(copy.deepcopy(layers), group=group, placement=placement, **cycles)
        optimizer = torch.optim.Adam(net.parameters(), lr=1e-2) if list(net.parameters()) else None
        cycle = MGOpt(net, optimizer, levels=3, interpolation=interpolation)
        found = []
        for _ in range(2):
            found.append((float(cycle.step(*data, squared)), cycle.corrections))
        return net, found

    one, wanted = run(alone(), "aligned")
    # In these placements, the steps of one coarse layer are on two ranks, or some ranks have no steps.
    for placement in ("even", [2] * (world - 1) + [25 - 2 * world], [0] * (world - 1) + [23]):
        net, found = run(None, placement)
        assert found == wanted
        for name, parameter in net.named_parameters():
            assert torch.equal(parameter, one.get_parameter(name)), (placement, name)


class Noisy(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner, self.norm, self.drop = nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Dropout(0.5)

    def forward(self, x):
        return self.drop(torch.tanh(self.norm(self.inner(x))))


@on_ranks(1, 2)
def test_a_batch_has_one_mask_and_statistics_are_taken_once(rank, world):
    torch.manual_seed(3)
    net = LayerParallel([ode(Noisy()) for _ in range(8)], mode="exact-wave")
    cycle = MGOpt(net, sgd(net), pre=1, post=2)
    x, target = torch.randn(16, 6), torch.randn(16, 6)
    level = cycle._levels[0]
    level.begin()
    for number in (0, 1):
        points = [level.evaluate(_Batch(x, target, squared, None, number)) for _ in range(2)]
        assert points[0].objective == points[1].objective
        objective = points[0].objective
    assert objective != level.evaluate(_Batch(x, target, squared, None, 0)).objective
    for parameter in net.parameters():
        parameter.grad = None
    net._solver.shared.number = 0
    level.restore(level._buffers)
    for _ in range(3):
        cycle.step(x, target, squared)
    assert net._solver.shared.number == 3
    for module in net.layers.values():
        assert int(module.norm.num_batches_tracked) == 3


@pytest.mark.slow
@on_ranks(1, 2)
def test_a_batch_is_audited_and_probed_once(rank, world):
    cycles = dict(fwd=Cycle(factor=2), bwd=Cycle(factor=2, iterations=1))
    net = LayerParallel(mixed_list(), audit=Audits(every=2, probe_every=2, limit=10.0), **cycles)
    cycle = MGOpt(net, sgd(net), post=2)
    for number in range(3):
        cycle.step(*batch(), squared)
        assert len(net.audits) == len(net.probes) == number // 2 + 1
    assert len(cycle.nets[1].audits) == len(cycle.nets[1].probes) == 0


@on_ranks(1, 2)
def test_a_correction_that_lowers_nothing_is_not_made(rank, world):
    net = LayerParallel(mixed_list(), mode="exact-wave")

    def wild(parameters, level):
        return torch.optim.SGD(parameters, lr=1e6)

    cycle = MGOpt(net, sgd(net), pre=0, post=0, trials=2, coarse_optimizer=wild)
    before = {name: value.clone() for name, value in net.state_dict().items()}
    loss = cycle.step(*batch(), squared)
    (correction,) = cycle.corrections
    assert correction.length == 0 and correction.trials == 2
    assert correction.before == correction.after == float(loss)
    for name, value in net.state_dict().items():
        assert torch.equal(value, before[name])


@on_ranks(1, 2)
def test_coarse_optimizers_have_the_options_and_moments_of_the_one_above(rank, world):
    net = LayerParallel(mixed_list(), mode="exact-wave")
    optimizer = torch.optim.Adam(net.parameters(), lr=1e-2)
    cycle = MGOpt(net, optimizer, coarse=1, post=0)
    cycle.step(*batch(), squared)
    optimizer.param_groups[0]["lr"] = 0.0
    before = {name: value.clone() for name, value in net.state_dict().items()}
    cycle.step(*batch(), squared)
    # No level moves its parameters if the learning rate is zero.
    for name, value in net.state_dict().items():
        assert torch.equal(value, before[name])
    made = cycle.optimizers[1]
    assert isinstance(made, torch.optim.Adam) and made.param_groups[0]["lr"] == 0
    coarse = coarsened(net, 2)
    assert [list(made.owned) for made in cycle.nets[1:]] == [list(coarsened(net, 2, placement="kept").owned)]
    for layer in cycle.nets[1].owned:
        first = next(at for at in range(23) if cycle._transfers[0]._origins[at].layer == layer)
        pairs = zip(cycle.nets[1].layers[str(layer)].parameters(), net.layers[str(first)].parameters())
        for parameter, finer in pairs:
            # The state has one step more than the state of the fine net from which it comes.
            assert float(made.state[parameter]["step"]) == float(optimizer.state[finer]["step"]) + 1
    assert len(coarse._plans.net.layers) == 13


class Masked(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(6, 6)

    def forward(self, x, mask):
        return x + torch.tanh(self.inner(x)) * mask / 8


@on_ranks(1, 2)
def test_side_inputs_reach_all_nets_and_nothing_given_gets_a_gradient(rank, world):
    torch.manual_seed(3)
    net = LayerParallel([residual(Masked()) for _ in range(8)], mode="exact-wave")
    cycle = MGOpt(net, sgd(net))
    # The input has a graph of its own, through which autograd could go backward only once.
    leaf = torch.randn(4, 6, requires_grad=True)
    mask = torch.tensor([1.0, 0.0, 1.0, 1.0, 0.0, 1.0], requires_grad=True)
    losses = [float(cycle.step(2 * leaf, torch.randn(4, 6), squared, side={"mask": mask})) for _ in range(2)]
    assert losses[0] != losses[1] and leaf.grad is None and mask.grad is None
    assert all(each.length > 0 for each in cycle.corrections)


@on_ranks(1, 2)
@pytest.mark.parametrize("how", ["named", "one object"])
def test_tied_parameters_of_plain_layers_count_once(rank, world, how):
    torch.manual_seed(3)
    layers = [nn.Linear(6, 6), *(ode(nn.Sequential(nn.Linear(6, 6), nn.Tanh())) for _ in range(4)), nn.Linear(6, 6)]
    for layer in layers:
        (layer.module if isinstance(layer, Block) else layer).double()
    if how == "one object":
        layers[5].weight = layers[0].weight
    tie = [("layers.0.weight", "layers.5.weight")] if how == "named" else ()
    net = LayerParallel(layers, mode="exact-wave", tie=tie)
    cycle = MGOpt(net, sgd(net))
    data = torch.randn(4, 6, dtype=DOUBLE), torch.randn(4, 6, dtype=DOUBLE)
    (fine, coarse), made = begun(net, cycle, data)
    level, below = cycle._levels
    for at, point in ((level, fine), (below, coarse)):
        # Move along the gradient, which changes both copies alike.
        start, values = at.values(), []
        for length in (-1e-6, 1e-6):
            at.move(start, point.gradients, length)
            values.append(at.evaluate(made).objective)
        at.move(start, point.gradients, 0.0)
        slope = (values[1] - values[0]) / 2e-6
        assert at.product(point.gradients, point.gradients, "a test") == pytest.approx(slope, rel=1e-6)
    losses = [float(cycle.step(*data, squared)) for _ in range(3)]
    assert losses == sorted(losses, reverse=True)
    found = {name: value for part in net._wire.gathered(net.state_dict()) for name, value in part.items()}
    assert torch.equal(found["layers.0.weight"], found["layers.5.weight"])
    shared = nn.Linear(6, 6)
    with pytest.raises(ValueError, match="steps 1, 2, 3 have tied parameters"):
        steps = LayerParallel([nn.Linear(6, 6), *(ode(shared) for _ in range(3))], mode="exact-wave")
        MGOpt(steps, sgd(steps))


@on_ranks(1, 2)
def test_a_failure_on_one_rank_is_raised_on_all_and_leaves_the_net_where_it_was(rank, world):
    class Failing(nn.Module):
        calls = 0

        def __init__(self):
            super().__init__()
            self.inner = nn.Linear(6, 6)

        def forward(self, x):
            return torch.tanh(self.inner(x))

    net = LayerParallel([ode(Failing()) for _ in range(8)], mode="exact-wave")
    x, target = torch.randn(4, 6), torch.randn(4, 6)
    cycle = MGOpt(net, sgd(net), pre=0, post=0)
    before = {name: value.clone() for name, value in net.state_dict().items()}
    calls = []

    def loss(y, aim):
        calls.append(1)
        # Calls of the loss in order: the net, the coarse net twice, and then the trial.
        if len(calls) == 4:
            raise ArithmeticError("it is tired")
        return squared(y, aim)

    with pytest.raises(LayerParallelError, match="it is tired"):
        cycle.step(x, target, loss)
    for name, value in net.state_dict().items():
        assert torch.equal(value, before[name])
    first = float(cycle.step(x, target, squared))
    assert float(cycle.step(x, target, squared)) < first
    if world > 1:

        def some(parameters, level):
            if rank == 1:
                raise ArithmeticError("no optimizer today")
            return torch.optim.SGD(parameters, lr=0.1)

        with pytest.raises(
            LayerParallelError, match="rank 1 of the layers failed in creating the optimizer of level 1"
        ):
            MGOpt(net, sgd(net), coarse_optimizer=some)


@on_ranks(1)
def test_settings_that_cannot_be_are_refused(rank, world):
    net = LayerParallel([ode(nn.Linear(6, 6)) for _ in range(6)], mode="exact-wave")
    for settings, said in [
        (dict(levels=0), "levels=0: give 1 or more"),
        (dict(factor=1), "factor=1: give 2 or more"),
        (dict(trials=0), "trials=0: give 1 or more"),
        (dict(interpolation="cubic"), "interpolation='cubic': give one of constant, linear"),
        (dict(placement="even"), "a coarse layer is on the rank of the first layer it stands for"),
        (dict(levels=3), "factor=2 does not divide the 3 equal steps from layer 0 to 2"),
    ]:
        with pytest.raises(ValueError, match=said):
            MGOpt(net, sgd(net), **settings)
    # With one level, the cycle takes plain steps of its optimizer.
    x, target = torch.randn(4, 6), torch.randn(4, 6)
    alone_, plainly = copy.deepcopy(net), copy.deepcopy(net)
    optimizer = sgd(plainly)
    MGOpt(alone_, sgd(alone_), levels=1, coarse=2).step(x, target, squared)
    for _ in range(2):
        optimizer.zero_grad()
        plainly.step(x, target, squared)
        optimizer.step()
    for name, parameter in alone_.named_parameters():
        assert torch.equal(parameter, plainly.get_parameter(name))


class Greedy(torch.optim.SGD):
    """Modifies gradients in place, as some optimizers do."""

    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.grad.mul_(0.5)
        return super().step(closure)


@pytest.mark.slow
@on_ranks(1, 2)
def test_an_optimizer_that_changes_gradients_where_they_lie_changes_nothing_of_the_cycle(rank, world):
    found = []
    for kind, rate in ((torch.optim.SGD, 0.25), (Greedy, 0.5)):
        net = LayerParallel(mixed_list())
        own = list(net.parameters())
        cycle = MGOpt(net, kind(own, lr=rate) if own else None)
        losses = [cycle.step(*batch(), squared) for _ in range(3)]
        found.append((losses, cycle.corrections, [parameter.detach().clone() for parameter in net.parameters()]))
    (losses, corrections, values), (others, other_corrections, other_values) = found
    assert losses == others and corrections == other_corrections
    assert all(torch.equal(a, b) for a, b in zip(values, other_values))


@on_ranks(1, 2)
def test_what_is_not_the_nets_takes_no_steps_of_coarse_nets(rank, world):
    net = LayerParallel(mixed_list())
    other = nn.Parameter(torch.zeros(()))
    other.grad = torch.ones(())
    optimizer = torch.optim.SGD([*net.parameters(), other], lr=1.0)
    cycle = MGOpt(net, optimizer, coarse=5, levels=3)
    for group in optimizer.param_groups:
        group["lr"] = 1e-3
    cycle.step(*batch(), squared)
    assert other.item() == pytest.approx(-2e-3)
    assert all(other is not each for coarse in cycle.optimizers[1:] for each in coarse.param_groups[0]["params"])


@on_ranks(1, 2)
def test_parameters_that_are_frozen_later_are_refused_on_all_ranks(rank, world):
    net = LayerParallel(mixed_list())
    cycle = MGOpt(net, sgd(net))
    if rank == 0:
        net.layers["1"][0].weight.requires_grad_(False)
    with pytest.raises(
        ValueError, match="requires_grad of the parameters of layer 1 has changed since this MGOpt was created"
    ):
        cycle.step(*batch(), squared)
    if rank == 0:
        net.layers["1"][0].weight.requires_grad_()
    cycle.step(*batch(), squared)


@on_ranks(1)
def test_moments_of_coarse_nets_are_what_is_asked_for(rank, world):
    found = {}
    for moments in ("scaled", "copied", "none"):
        net = LayerParallel(mixed_list())
        cycle = MGOpt(net, torch.optim.Adam(net.parameters(), lr=1e-3), moments=moments, pre=1, coarse=1)
        cycle.step(*batch(), squared)
        below = cycle.optimizers[1].state[cycle.nets[1].layers["1"][0].weight]
        found[moments] = int(below["step"]), below["exp_avg_sq"]
    # One step comes from the finer net, one is the coarse net's own.
    assert [steps for steps, _ in found.values()] == [2, 2, 1]
    (_, scaled), (_, copied), (_, none) = found.values()
    assert (scaled > copied).all() and (copied > none).all()


@on_ranks(1, 2)
def test_coarse_nets_are_in_training_where_the_net_is(rank, world):
    net = LayerParallel(mixed_list())
    net.eval()
    cycle = MGOpt(net, sgd(net))
    net.train()
    own = [module for number, module in net.layers.items() if number == "1"]
    for module in own:
        module[0].eval()
    cycle.step(*batch(), squared)
    coarse = cycle.nets[1]
    assert coarse.training and coarse.layers.training
    for number, module in coarse.layers.items():
        assert [part.training for part in module.modules()].count(False) == (1 if number == "1" and own else 0)
