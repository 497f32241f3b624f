"""Solves until convergence, initial guesses, steps with their own coarse step, checkpoints, and evaluation in another
mode than training.
"""

import copy
import time
import warnings

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from support import gloo_group, on_ranks
from support.nets import alone, drawn, gradients_of, squared
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.nn import functional
from torch_accl import layer_parallel
from torch_accl.layer_parallel import (
    Audits,
    Cycle,
    GradScaler,
    LayerParallel,
    LayerParallelError,
    Stop,
    custom,
    ode,
    plain,
    residual,
    timed,
)


def batch(dtype=torch.float32, rows=8, width=6):
    return drawn(7, (rows, width), (rows, width), dtype=dtype)


def small(number, width=6):
    torch.manual_seed(100 + number)
    return nn.Sequential(nn.Linear(width, width), nn.Tanh())


def steps(count=16):
    return [ode(small(number)) for number in range(count)]


class Implicit(nn.Module):
    """A step of the stiff equation `x' = f(x) - 30 x`, implicit in its stiff part.

    A coarse step that scaled the increment of the fine step would diverge.
    """

    def __init__(self, number, width=6, dt=1 / 16):
        super().__init__()
        torch.manual_seed(number)
        self.inner = nn.Linear(width, width)
        self.dt = dt

    def coarse_step(self, x, count):
        return (x + count * self.dt * torch.tanh(self.inner(x))) / (1 + 30 * count * self.dt)

    def forward(self, x):
        return self.coarse_step(x, 1)


def stiff(count=16):
    return [custom(Implicit(number)) for number in range(count)]


# ---- steps with their own coarse step


@on_ranks(1, 2, 3)
@pytest.mark.parametrize("mode", ["exact-wave", "exact-pipeline"])
def test_a_step_with_a_coarse_step_of_its_own_is_itself_in_exact_modes(rank, world, mode):
    layers, (x, target) = stiff(), batch(torch.float64)
    for block in layers:
        block.module.double()
    net = LayerParallel(copy.deepcopy(layers), mode=mode, micro_batches=2)
    loss = net.step(x, target, squared)
    y = x
    for block in layers:
        y = block.module(y)
    expected = squared(y, target)
    expected.backward()
    torch.testing.assert_close(loss, expected.detach(), rtol=1e-12, atol=0)
    for name, gradient in gradients_of(net).items():
        _, number, rest = name.split(".", 2)
        wanted = dict(layers[int(number)].module.named_parameters())[rest].grad
        torch.testing.assert_close(gradient, wanted, rtol=1e-10, atol=1e-14)


@on_ranks(1, 2, 4)
def test_a_stiff_net_converges_with_coarse_steps_of_its_own_and_not_with_the_fine_ones(rank, world):
    x, target = batch(torch.float64)
    cycle = Cycle(factor=4, iterations=5)
    layers = stiff()
    for block in layers:
        block.module.double()
    exact = LayerParallel(copy.deepcopy(layers), mode="exact-wave")
    exact.step(x, target, squared)
    net = LayerParallel(copy.deepcopy(layers), fwd=cycle, bwd=cycle)
    net.step(x, target, squared)
    for norms in (net.norms.forward, net.norms.backward):
        found = list(norms.values())
        assert found[-1] < 2e-3 * found[0], found
    for name, gradient in gradients_of(net).items():
        torch.testing.assert_close(gradient, dict(exact.named_parameters())[name].grad, rtol=1e-2, atol=1e-6)
    other = LayerParallel([residual(block.module) for block in copy.deepcopy(layers)], fwd=cycle, bwd=cycle)
    other.step(x, target, squared)
    found = list(other.norms.forward.values())
    assert not found[1] < found[0], found


@on_ranks(2, 3)
def test_coarse_steps_of_their_own_do_not_depend_on_the_number_of_ranks_by_a_bit(rank, world):
    layers, (x, target) = stiff(), batch()
    cycles = dict(fwd=Cycle(factor=2, levels=3, iterations=3), bwd=Cycle(factor=4, iterations=2, relax="FCF"))
    one = LayerParallel(copy.deepcopy(layers), group=alone(), **cycles)
    net = LayerParallel(copy.deepcopy(layers), placement=[3] * (world - 1) + [16 - 3 * (world - 1)], **cycles)
    assert torch.equal(net.step(x, target, squared), one.step(x, target, squared))
    assert net.norms == one.norms
    wanted = gradients_of(one)
    assert all(torch.equal(gradient, wanted[name]) for name, gradient in gradients_of(net).items())


# ---- solves until convergence


@on_ranks(1, 2, 3)
@pytest.mark.parametrize("levels", [2, 3])
def test_a_solve_that_goes_on_is_one_of_as_many_iterations(rank, world, levels):
    x, target = batch()
    cycle = Cycle(levels=levels, factor=2, iterations=2)
    net = LayerParallel(steps(), mode="converged", fwd=cycle, bwd=cycle, stop=Stop(tolerance=1e-4))
    loss = net.step(x, target, squared)
    assert net.norms.forward_end == net.norms.backward_end == "converged"
    forward, backward = len(net.norms.forward) + 1, len(net.norms.backward) + 1
    assert forward > 2 and list(net.norms.forward.values())[-1] <= 1e-4 * next(iter(net.norms.forward.values()))
    other = LayerParallel(
        steps(),
        fwd=Cycle(levels=levels, factor=2, iterations=forward),
        bwd=Cycle(levels=levels, factor=2, iterations=backward),
    )
    assert torch.equal(other.step(x, target, squared), loss)
    assert other.norms.forward == net.norms.forward and other.norms.backward == net.norms.backward
    wanted = gradients_of(other)
    assert all(torch.equal(gradient, wanted[name]) for name, gradient in gradients_of(net).items())


@on_ranks(1, 2)
def test_a_solve_that_cannot_converge_says_so(rank, world):
    x, target = batch()
    cycle = Cycle(factor=2, iterations=2)
    net = LayerParallel(steps(), mode="converged", fwd=cycle, bwd=cycle, stop=Stop(tolerance=0.0, max_iterations=30))
    net.step(x, target, squared)
    # float32 limits how far the residual falls, and exact states have a residual of zero.
    assert net.norms.forward_end in ("stalled", "converged")
    net = LayerParallel(steps(), mode="converged", fwd=cycle, bwd=cycle, stop=Stop(tolerance=1e-12, max_iterations=3))
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        net.step(x, target, squared)
    assert sum("a solve reached max_iterations=3" in str(each.message) for each in seen) == net.is_first
    assert net.norms.forward_end == "limit" and len(net.norms.forward) == 2
    with pytest.raises(ValueError, match="norms='none'"):
        LayerParallel(steps(), mode="converged", fwd=Cycle(norms="none")).step(x, target, squared)


@on_ranks(2)
def test_a_layer_that_fails_ends_a_solve_that_goes_on(rank, world):
    class Failing(nn.Module):
        def forward(self, x):
            raise RuntimeError("no such luck")

    x, target = batch()
    layers = steps()
    layers[12] = ode(Failing())
    net = LayerParallel(layers, mode="converged", fwd=Cycle(factor=2))
    with pytest.raises(LayerParallelError, match="rank 1 .* layer 12 .*no such luck"):
        net.step(x, target, squared)


# ---- initial guesses


@on_ranks(1, 2, 3)
def test_a_guess_that_is_right_leaves_no_residual(rank, world):
    x, target = batch(torch.float64)
    layers = steps()
    for block in layers:
        block.module.double()
    states = [x]
    for block in layers:
        with torch.no_grad():
            states.append(states[-1] + block.module(states[-1]) / 16)
    asked = []

    def guess(point):
        asked.append(point)
        return states[point]

    net = LayerParallel(layers, fwd=Cycle(start="guess", iterations=1), guess=guess)
    net.step(x, target, squared)
    assert next(iter(net.norms.forward.values())) < 1e-13
    # Each rank is asked for the points that follow its own layers.
    assert asked == [point for point in (4, 8, 12, 16) if point - 1 in net.owned]
    net.fwd = Cycle(start="guess", iterations=0)
    net.step(x, target, squared)
    assert net.norms.forward == {}
    net.guess = None
    with pytest.raises(LayerParallelError, match="no guess"):
        net.step(x, target, squared)


@on_ranks(2)
def test_a_guess_of_another_shape_is_an_error_on_all_ranks(rank, world):
    x, target = batch()
    net = LayerParallel(steps(), fwd=Cycle(start="guess"), guess=lambda point: torch.zeros(3))
    with pytest.raises(LayerParallelError, match=r"rank 0 .* the guess of point 4, batch 0: .*\[3\]"):
        net.step(x, target, squared)
    with pytest.raises(ValueError, match="a guess provides states"):
        net.bwd = Cycle(start="guess")


# ---- recomputed graphs


class Noisy(nn.Module):
    """Has dropout, which must be the same in a recomputation, and statistics, which must not be updated twice."""

    def __init__(self, number, width=6):
        super().__init__()
        torch.manual_seed(number)
        self.inner = nn.Linear(width, width)
        self.norm = nn.BatchNorm1d(width)
        self.drop = nn.Dropout(0.3)

    def forward(self, x):
        return torch.tanh(self.drop(self.norm(self.inner(x))))


@on_ranks(1, 2, 3)
@pytest.mark.parametrize("mode", ["inexact", "exact-forward", "converged", "exact-wave", "exact-pipeline"])
def test_graphs_that_are_recorded_again_change_no_bit(rank, world, mode):
    x, target = batch()
    results = []
    for checkpoint in (False, True):
        layers = [ode(Noisy(number)) for number in range(12)] + [timed(Stepped(3)), plain(nn.Linear(6, 6))]
        torch.manual_seed(0)
        nn.init.eye_(layers[-1].module.weight)
        cycle = Cycle(factor=3, iterations=2, relax="FCF")
        net = LayerParallel(layers, mode=mode, bwd=cycle, checkpoint=checkpoint, micro_batches=2)
        loss = net.step(x, target, squared)
        buffers = {name: buffer.clone() for name, buffer in net.named_buffers()}
        results.append((loss, gradients_of(net), buffers))
    (loss, gradients, buffers), (other_loss, other_gradients, other_buffers) = results
    assert torch.equal(loss, other_loss)
    assert all(torch.equal(gradients[name], other_gradients[name]) for name in gradients)
    assert all(torch.equal(buffers[name], other_buffers[name]) for name in buffers)


class Stepped(nn.Module):
    def __init__(self, number, width=6):
        super().__init__()
        torch.manual_seed(number)
        self.inner = nn.Linear(width, width)

    def forward(self, x, dt):
        return x + dt * torch.tanh(self.inner(x))


@on_ranks(1)
def test_graphs_that_are_recorded_again_take_less_memory(rank, world):
    held = []

    class Watched(nn.Module):
        def __init__(self, number):
            super().__init__()
            torch.manual_seed(number)
            self.inner = nn.Linear(6, 6)

        def forward(self, x):
            y = torch.tanh(self.inner(x))
            if y.requires_grad:
                graphs.add(id(y.grad_fn))
                held.append(y)
            return y

    x, target = batch()
    counts = []
    for checkpoint in (False, True):
        graphs = set()
        net = LayerParallel(
            [ode(Watched(number)) for number in range(16)],
            checkpoint=checkpoint,
            fwd=Cycle(factor=4),
            bwd=Cycle(factor=4),
        )
        y = net(x)
        counts.append(len(graphs))
        squared(y, target).backward()
        held.clear()
    # With checkpoints, only the first layer of each coarse step keeps a graph.
    assert counts == [16, 4]


@on_ranks(1, 2)
def test_statistics_that_a_layer_computes_with_are_restored_when_it_is_evaluated_again(rank, world):
    x, target = batch()
    gradients = []
    for checkpoint in (False, True):
        layers = []
        for number in range(8):
            block = small(number)
            nn.utils.parametrizations.spectral_norm(block[0])
            layers.append(ode(block))
        net = LayerParallel(layers, mode="exact-wave", checkpoint=checkpoint)
        net.step(x, target, squared)
        gradients.append(gradients_of(net))
    for name, gradient in gradients[0].items():
        torch.testing.assert_close(gradient, gradients[1][name], rtol=1e-5, atol=1e-8)


@on_ranks(2)
def test_an_input_that_is_changed_before_it_is_needed_again_is_found_out(rank, world):
    x, target = batch()
    net = LayerParallel(steps(), mode="exact-wave", checkpoint=True)
    y = net(x)
    x.mul_(2)
    with pytest.raises(LayerParallelError, match="rank 0 .*changed in place before the backward pass"):
        (squared(y, target) if net.is_last else y).backward()


# ---- evaluation


@on_ranks(1, 2, 3)
def test_evaluation_gives_the_exact_loss_and_that_of_the_mode(rank, world):
    x, target = batch()
    net = LayerParallel(steps(), fwd=Cycle(factor=4, iterations=2))
    with pytest.raises(RuntimeError, match="call eval"):
        net.evaluate(x, target, squared)
    net.eval()
    found = net.evaluate(x if rank == 0 else None, target if net.is_last else None, squared)
    exact = net(x)
    net.evaluation = "inexact"
    inexact = net(x)
    losses = [squared(y, target).item() if net.is_last else 0.0 for y in (exact, inexact)]
    if net.is_last:
        assert [found.loss, found.mode_loss] == losses
        error = float((inexact - exact).double().norm() / exact.double().norm())
        assert found.output_error == pytest.approx(error, rel=1e-6)
    assert 1e-6 < found.output_error < 0.1
    assert all(parameter.grad is None for parameter in net.parameters())
    net.mode = "exact-wave"
    found = net.evaluate(x, target, squared)
    assert found.loss == found.mode_loss and found.output_error == 0
    with pytest.raises(ValueError, match="exact-pipeline"):
        net.evaluation = "exact-pipeline"


@on_ranks(2)
def test_modes_run_over_gloo_too(rank, world):
    x, target = batch()
    losses = []
    for group in (None, gloo_group()):
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            net = LayerParallel(stiff(), group=group, mode="converged", fwd=Cycle(factor=4), checkpoint=True)
        losses.append(net.step(x, target, squared))
    assert torch.equal(*losses)


# ---- the fastest mode


class Slow(nn.Module):
    """A layer with a small increment that takes its time by sleeping. All ranks can sleep at once, however few cores
    there are.
    """

    def __init__(self, number, seconds):
        super().__init__()
        torch.manual_seed(number)
        self.inner, self.seconds = nn.Linear(6, 6), seconds
        self.calls = 0

    def forward(self, x):
        self.calls += 1
        time.sleep(self.seconds)
        return torch.tanh(self.inner(x)) / 10


@pytest.mark.slow
@on_ranks(1, 4)
def test_the_fastest_mode_is_chosen_once_for_each_kind_of_batch(rank, world):
    cycle = Cycle(factor=8, iterations=1)
    net = LayerParallel([ode(Slow(number, 0.002)) for number in range(32)], mode="auto", fwd=cycle, bwd=cycle)
    for rows in (8, 8, 4):
        x, target = batch(rows=rows)
        before = [layer.module.calls if hasattr(layer, "module") else layer.calls for layer in net.layers.values()]
        found = net.step(x if net.is_first else None, target if net.is_last else None, squared)
        # A batch evaluates a step of the coarsest-level solve at most once more than other steps. A measurement takes
        # many calls.
        calls = max(layer.calls - count for layer, count in zip(net.layers.values(), before))
        assert (calls > 3) == (rows != 8 or before[0] == 0), (rows, calls)
        assert set(net.choice.seconds) == {"exact-wave", "inexact"}
        # Coarse steps of eight layers on four ranks beat serial execution, whatever a layer costs. On one rank nothing
        # beats it.
        assert net.choice.mode == ("exact-wave" if world == 1 else "inexact"), net.choice
        other = copy.deepcopy(net)
        other.mode = net.choice.mode
        assert all(choice == net.choice for choice in net.wire.gathered(net.choice))
    with torch.no_grad():
        assert net.eval()(x) is not None
    del found


@on_ranks(1, 2)
@pytest.mark.parametrize("modes", [["exact-pipeline"], ["inexact"], ["exact-wave", "exact-pipeline"], None])
def test_a_batch_in_the_chosen_mode_is_one_in_that_mode(rank, world, modes):
    x, target = batch()
    net = LayerParallel([ode(Noisy(number)) for number in range(12)], mode="auto", auto_modes=modes, micro_batches=2)
    plain_net = copy.deepcopy(net)
    losses = [net.step(x, target, squared) for _ in range(2)]
    plain_net.mode = net.choice.mode
    assert losses == [plain_net.step(x, target, squared) for _ in range(2)]
    # The measurement has no side effects, not even on the statistics.
    for (name, buffer), (_, other) in zip(net.named_buffers(), plain_net.named_buffers()):
        assert torch.equal(buffer, other), name
    for name, gradient in gradients_of(net).items():
        assert torch.equal(gradient, plain_net.get_parameter(name).grad), name


@on_ranks(2)
def test_a_pipeline_is_not_chosen_for_what_cannot_be_cut(rank, world):
    x, target = batch(rows=7)
    net = LayerParallel(steps(), mode="auto", auto_modes=["exact-wave", "exact-pipeline"], micro_batches=2)
    net.step(x, target, squared)
    assert set(net.choice.seconds) == {"exact-wave"}
    with pytest.raises(LayerParallelError, match="no input"):
        net.step(None, target, squared)
    with pytest.raises(ValueError, match="auto_modes"):
        LayerParallel(steps(), auto_modes=["converged"])
    with pytest.raises(ValueError, match="auto_modes is empty"):
        LayerParallel(steps(), auto_modes=[])
    with pytest.raises(ValueError, match="evaluation='auto'"):
        net.evaluation = "auto"


@on_ranks(2)
def test_layers_that_cannot_be_measured_run_in_the_first_mode(rank, world):
    class Picky(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Linear(6, 6)

        def forward(self, x):
            if bool((x.abs() < 100).all()):
                raise RuntimeError("no such luck")
            return self.inner(x) / 16 * 0

    x, target = batch()
    layers = steps()
    layers[12] = ode(Picky())
    net = LayerParallel(layers, mode="auto")
    net.step(x * 1000, target, squared)
    assert net.choice.mode == "exact-wave" and net.choice.seconds == {}
    with pytest.raises(LayerParallelError, match="rank 1 .* layer 12 .*no such luck"):
        net.step(x, target, squared)


@on_ranks(2)
def test_what_is_evaluated_need_not_have_a_gradient(rank, world):
    class Best(nn.Module):
        def forward(self, x):
            return x.argmax(1)

    x, _ = batch()
    target = torch.zeros(len(x), dtype=torch.long)
    net = LayerParallel([*steps(), plain(Best())]).eval()
    with torch.inference_mode():
        found = net.evaluate(x, target, lambda y, t: (y == t).float().mean())
    assert 0 <= found.loss <= 1 and 0 <= found.mode_loss <= 1


@on_ranks(2)
def test_a_batch_that_cannot_be_cut_goes_on_as_a_wave(rank, world):
    for rows, mode in ((5, "exact-wave"), (6, "exact-pipeline")):
        settings = dict(audit=Audits(every=1, limit=1e-9, on_excess="exact"), micro_batches=2)
        net = LayerParallel(steps(), fwd=Cycle(factor=8), **settings)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            net.step(*batch(rows=rows), squared)
        assert net.mode == mode
        net.step(*batch(rows=rows), squared)


# ---- compiled layers


def graphs_of(blocks, cycle):
    """Compiles these layers and runs them in training, evaluation and an exact mode. Returns the number of graphs that
    torch.compile made, and the losses.
    """
    made = []

    def backend(graph, inputs):
        made.append(graph)
        return graph.forward

    torch._dynamo.reset()
    for block in blocks:
        block.module.compile(backend=backend)
    net = LayerParallel(blocks, fwd=cycle, bwd=cycle)
    x, target = batch()
    losses = [net.step(x, target, squared) for _ in range(2)]
    net.mode = "exact-wave"
    losses.append(net.step(x, target, squared))
    with torch.no_grad():
        net.eval()(x)
    return len(made), losses


@pytest.mark.slow
@on_ranks(1, 2)
def test_a_kind_of_layer_is_compiled_twice_however_many_layers_and_levels_there_are(rank, world):
    cycle = Cycle(levels=3, factor=2, iterations=3, relax="FCF")
    for make in (
        lambda: [ode(Change(number)) for number in range(12)],
        lambda: [timed(Stepped(number)) for number in range(12)],
        lambda: [residual(Residual(number)) for number in range(12)],
    ):
        blocks = make()
        graphs, losses = graphs_of(blocks, cycle)
        # One graph serves calls that autograd records, the other serves calls without a record.
        assert graphs == 2, (type(blocks[0].module), graphs)
        x, target = batch()
        net = LayerParallel(make(), fwd=cycle, bwd=cycle)
        torch.testing.assert_close(net.step(x, target, squared), losses[0], rtol=1e-5, atol=1e-7)


class Change(nn.Module):
    def __init__(self, number, width=6):
        super().__init__()
        torch.manual_seed(number)
        self.inner = nn.Linear(width, width)

    def forward(self, x):
        return torch.tanh(self.inner(x))


class Residual(Change):
    def forward(self, x):
        return x + torch.tanh(self.inner(x)) / 12


# ---- probes


class Stretching(Change):
    """A layer whose increment is large."""

    def __init__(self, number):
        super().__init__(number)
        self.inner.weight.data *= 30

    def forward(self, x):
        return torch.sin(self.inner(x)) * 8


@on_ranks(1, 2)
def test_a_probe_says_how_iterations_converge_and_changes_no_other_batch(rank, world):
    x, target = batch()
    cycles = dict(fwd=Cycle(factor=2), bwd=Cycle(factor=2, iterations=1))
    net = LayerParallel(steps(), audit=Audits(probe_every=2), **cycles)
    other = LayerParallel(steps(), **cycles)
    losses = [[float(each.step(x, target, squared)) for _ in range(4)] for each in (net, other)]
    assert losses[0][1::2] == losses[1][1::2] and losses[0][0] != losses[1][0]
    assert [probe.batch for probe in net.probes] == [0, 2]
    probe = net.probes[0]
    again = LayerParallel(steps(), fwd=Cycle(factor=2, iterations=4), bwd=Cycle(factor=2, iterations=3))
    again.step(x, target, squared)
    forward, backward = list(again.norms.forward.values()), list(again.norms.backward.values())
    assert (probe.forward, probe.backward) == (forward[-1] / forward[-2], backward[-1] / backward[-2])
    assert 0 < probe.factor < 1
    y = net(x)
    (squared(y, target) if net.is_last else y).backward()
    assert len(net.probes) == 3


@on_ranks(1, 2)
@pytest.mark.parametrize("on_stall", ["warn", "more", "exact"])
def test_a_net_that_does_not_converge_is_found_out(rank, world, on_stall):
    x, target = batch()
    layers = [ode(Stretching(number)) for number in range(16)]
    cycles = dict(fwd=Cycle(factor=4), bwd=Cycle(factor=4, iterations=1))
    net = LayerParallel(layers, audit=Audits(probe_every=1, on_stall=on_stall), horizon=16.0, **cycles)
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        net.step(x, target, squared)
    assert not net.probes[-1].factor < 1, net.probes
    mine = [
        each for each in seen if str(each.message).startswith("layer-parallel training, batch 0: a probe with twice")
    ]
    assert len(mine) == net.is_first
    assert net.mode == ("exact-wave" if on_stall == "exact" else "inexact")
    assert (net.fwd.iterations, net.bwd.iterations) == ((3, 2) if on_stall == "more" else (2, 1))


class Exploding(nn.Module):
    """Coarse steps of this layer overflow, while its fine steps do not."""

    def __init__(self):
        super().__init__()
        self.factor = nn.Parameter(torch.full((6,), 3.0))

    def forward(self, x):
        return -self.factor * x**3


def exploding(**settings):
    layers = [ode(Exploding()) for _ in range(32)]
    return LayerParallel(layers, horizon=4.0, fwd=Cycle(factor=8), bwd=Cycle(factor=8, iterations=1), **settings)


@on_ranks(1, 2)
@pytest.mark.parametrize("audit", [Audits(every=1, on_excess="exact"), Audits(probe_every=1, on_stall="exact")])
def test_a_solve_that_ends_in_no_numbers_is_found_out_and_run_exactly(rank, world, audit):
    x = torch.linspace(-1.5, 1.5, 36).view(6, 6)
    net = exploding(audit=audit)
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        loss = net.step(x, torch.zeros(6, 6), squared)
    # A probe runs more iterations, which may be enough to converge.
    assert loss.isnan() or net.probes
    assert sum("layer-parallel" in str(each.message) for each in seen) == net.is_first
    assert net.mode == "exact-wave"
    net.zero_grad()
    assert net.step(x, torch.zeros(6, 6), squared).isfinite()


@on_ranks(1)
def test_what_is_no_number_exactly_either_changes_no_mode(rank, world):
    net = LayerParallel(steps(), audit=Audits(every=1, on_excess="exact"))
    x, target = batch()
    x[0, 0] = float("nan")
    with pytest.warns(UserWarning, match="the exact loss is not finite either"):
        net.step(x, target, squared)
    assert net.mode == "inexact"


@on_ranks(1, 2, 3)
def test_a_pass_whose_iterations_do_not_help_is_run_exactly(rank, world):
    x = torch.linspace(-1.5, 1.5, 36).view(6, 6)
    net, exact = exploding(mode="converged"), exploding(mode="exact-wave")
    loss = exact.step(x, torch.zeros(6, 6), squared)
    assert torch.equal(net.step(x, torch.zeros(6, 6), squared), loss)
    assert net.norms.forward_end == "stalled" and net.norms.backward_end in ("stalled", "converged")
    for name, gradient in gradients_of(net).items():
        torch.testing.assert_close(gradient, exact.get_parameter(name).grad, rtol=1e-3, atol=1e-6)


# ---- training that continues


class Dropping(nn.Module):
    def __init__(self, number):
        super().__init__()
        self.inner = small(number)

    def forward(self, x):
        return functional.dropout(self.inner(x), 0.3, self.training)


@on_ranks(1, 2)
def test_what_is_evaluated_between_two_batches_changes_nothing_of_the_second(rank, world):
    x, target = batch()
    losses = []
    for evaluates in (False, True):
        net = LayerParallel([ode(Dropping(number)) for number in range(8)], fwd=Cycle(factor=2))
        for _ in range(3):
            losses.append(float(net.step(x, target, squared)))
            if evaluates:
                net.eval()
                with torch.no_grad():
                    net(x)
                net.evaluate(x, target, squared)
                net.train()
    assert losses[:3] == losses[3:] and len(set(losses)) == 3


@pytest.mark.slow
@on_ranks(2, 3)
def test_a_run_that_is_resumed_on_another_number_of_ranks_goes_on_as_it_was(rank, world, tmp_path):
    x, target = batch()
    options = StateDictOptions(flatten_optimizer_state_dict=True)

    def made(group):
        net = LayerParallel([ode(Dropping(number)) for number in range(8)], group=group, mode="exact-wave", replica=0)
        layers = list(net.parameters())
        groups = [{"params": layers[::2], "weight_decay": 0.1}, {"params": layers[1::2]}]
        return net, torch.optim.AdamW(groups, lr=1e-2)

    def train(net, optimizer, count):
        for _ in range(count):
            optimizer.zero_grad()
            loss = net.step(x, target, squared)
            optimizer.step()
        return loss

    net, optimizer = made(None)
    train(net, optimizer, 2)
    weights, moments = get_state_dict(net, optimizer, options=options)
    dcp.save({"net": weights, "optimizer": moments, "batch": net.batch}, checkpoint_id=tmp_path)
    wanted = train(net, optimizer, 2)
    for group in (None, "alone"):
        net, optimizer = made(group)
        state = dict(zip(("net", "optimizer"), get_state_dict(net, optimizer, options=options)), batch=0)
        dcp.load(state, checkpoint_id=tmp_path, no_dist=group == "alone")
        set_state_dict(
            net, optimizer, model_state_dict=state["net"], optim_state_dict=state["optimizer"], options=options
        )
        net.batch = state["batch"]
        assert net.batch == 2
        assert torch.equal(train(net, optimizer, 2), wanted)


FALLBACKS = {
    "more iterations after an audit": dict(audit=Audits(every=2, limit=1e-9, on_excess="more")),
    "exactly after an audit": dict(audit=Audits(every=2, limit=1e-9, on_excess="exact")),
    "exactly after a probe": dict(audit=Audits(probe_every=2, on_stall="exact")),
    "a chosen mode": dict(mode="auto"),
}


@on_ranks(1, 2)
@pytest.mark.parametrize("how", list(FALLBACKS))
def test_a_run_that_has_fallen_back_is_resumed_in_what_it_fell_back_to(rank, world, how, tmp_path):
    x, target = batch()
    folder = [tmp_path if rank == 0 else None]
    dist.broadcast_object_list(folder)

    def made():
        layers = [ode(Stretching(number)) for number in range(16)]
        return LayerParallel(layers, horizon=16.0, replica=0, **FALLBACKS[how])

    def train(net, count):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for _ in range(count):
                loss = net.step(x, target, squared)
                with torch.no_grad():
                    for parameter in net.parameters():
                        parameter -= 1e-4 * parameter.grad.sign()
                        parameter.grad = None
        return loss

    net = made()
    train(net, 2)
    net.evaluation = "inexact"
    if how == "a chosen mode":
        # Set the choice as if this mode had been the fastest.
        net._choices = {key: layer_parallel.Choice("inexact", {"inexact": 0.5}) for key in net._choices}
    else:
        assert (net.mode, net.fwd.iterations) != ("inexact", 2)
    weights = net.state_dict()
    assert all(name.startswith("layers.") for name in weights)
    dcp.save({"net": weights, "solver": net.solver}, checkpoint_id=tmp_path / "dcp")
    if rank == 0:
        torch.save({"solver": net.solver.state_dict()}, folder[0] / "plain.pt")
    dist.barrier()
    state = torch.load(folder[0] / "plain.pt")["solver"]
    wanted = train(net, 2)

    resumed = made()
    found = {"net": resumed.state_dict(), "solver": resumed.solver}
    dcp.load(found, checkpoint_id=tmp_path / "dcp")
    resumed.load_state_dict(found["net"])
    assert resumed.solver.state_dict() == state and resumed.evaluation == "inexact" and resumed.batch == 2
    assert torch.equal(train(resumed, 2), wanted)
    if how == "a chosen mode":
        assert resumed.choice == layer_parallel.Choice("inexact", {"inexact": 0.5})

    plain = made()
    dcp.load({"net": (others := plain.state_dict())}, checkpoint_id=tmp_path / "dcp")
    plain.load_state_dict(others)
    plain.solver.load_state_dict(state)
    assert torch.equal(train(plain, 2), wanted)
    dist.barrier()


@on_ranks(1)
def test_a_saved_state_that_does_not_fit_changes_nothing(rank, world):
    net = LayerParallel([ode(small) for _ in range(4)], fwd=Cycle(factor=2), bwd=Cycle(factor=2))
    before = net.solver.state_dict()
    wrong = {
        r"format 7, and this version reads format 1": before | {"format": 7},
        r"format None": {"net": 1},
        r"lacks batch, choices": {k: v for k, v in before.items() if k not in ("batch", "choices")},
        r"does not fit this net: mode='fast': give one of": before | {"mode": "fast"},
        r"does not fit this net: .*levels": before | {"fwd": before["fwd"] | {"levels": 9}},
        r"does not fit this net: .*colour": before | {"fwd": before["fwd"] | {"colour": 1}},
        r"does not fit this net: evaluation='auto'": before | {"evaluation": "auto", "mode": "exact-wave"},
        r"does not fit this net: batch=-1": before | {"batch": -1, "mode": "exact-wave"},
        r"does not fit this net: evaluations=-1": before | {"batch": 3, "evaluations": -1},
        r"does not fit this net: bwd=.*a guess": before | {"bwd": before["bwd"] | {"start": "guess"}, "batch": 3},
        r"does not fit this net: .*too many|levels": before
        | {"fwd": before["fwd"] | {"levels": 9}, "mode": "exact-wave", "batch": 3},
        r"does not fit this net: mode='slow'": before | {"choices": ((1, "slow", ()),), "batch": 3},
        r"does not fit this net: not enough values": before | {"choices": ((1, "inexact"),), "batch": 3},
        r"does not fit this net: could not convert": before
        | {"choices": ((1, "inexact", (("inexact", "fast"),)),), "batch": 3},
    }
    for text, state in wrong.items():
        with pytest.raises(ValueError, match=text):
            net.solver.load_state_dict(state)
        assert net.solver.state_dict() == before


@on_ranks(2, 3)
def test_another_batch_on_the_last_rank_causes_a_warning(rank, world):
    x, target = batch()
    for given, count in ((x + rank, 2), (x, 0), (x if rank == 0 else None, 0)):
        net = LayerParallel(steps(), fwd=Cycle(factor=4))
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            for _ in range(4):
                net.step(given, target, squared)
        found = ["the last rank's input differs from the first rank's" in str(each.message) for each in seen]
        assert sum(found) == (count if rank == 0 else 0)


# ---- building


@on_ranks(2, 3)
def test_what_builds_a_layer_and_fails_on_one_rank_is_an_error_on_all(rank, world):
    def build(number):
        if number == 15:
            raise MemoryError("no room")
        return small(number)

    with pytest.raises(LayerParallelError, match=f"rank {world - 1} .* building its layers: MemoryError: no room"):
        LayerParallel([ode(build) for _ in range(16)])


@on_ranks(1, 2)
def test_a_net_made_on_the_meta_device_is_trained_once_it_is_filled(rank, world):
    x, target = batch()
    with torch.device("meta"):
        net = LayerParallel(steps(), mode="exact-wave")
    with pytest.raises(LayerParallelError, match=r"meta device; call to_empty\(device=...\) and initialize them first"):
        net.step(x, target, squared)
    net.to_empty(device="cpu")
    right = LayerParallel(steps(), mode="exact-wave")
    net.load_state_dict(right.state_dict())
    assert torch.equal(net.step(x, target, squared), right.step(x, target, squared))


@on_ranks(1, 2)
def test_a_scaler_needs_no_loss_on_ranks_that_have_none(rank, world):
    net = LayerParallel(steps(), mode="exact-wave")
    scaler, optimizer = GradScaler(net, init_scale=4.0), torch.optim.SGD(net.parameters(), lr=0.1)
    x, target = batch()
    before = [parameter.detach().clone() for parameter in net.parameters()]
    y = net(x)
    (scaler.scale(squared(y, target)) if net.is_last else y).backward()
    scaler.step(optimizer)
    scaler.update()
    assert all(not torch.equal(old, new) for old, new in zip(before, net.parameters()))


# ---- states of 16 bits


@on_ranks(2, 3)
@pytest.mark.parametrize("kind", ["bfloat16", "autocast"])
@pytest.mark.parametrize(
    "settings",
    [{"mode": "exact-forward"}, {"fwd": Cycle(levels=1)}, {"bwd": Cycle(levels=1)}, {"mode": "exact-wave"}],
    ids=["exact-forward", "forward of one level", "backward of one level", "exact-wave"],
)
def test_one_pass_may_be_exact_where_states_have_16_bits(rank, world, settings, kind):
    cycles = {"fwd": Cycle(factor=4), "bwd": Cycle(factor=4)} | settings
    x, target = batch()
    found = []
    for group in ("alone", None, gloo_group()):
        layers = [plain(small(99)), *steps(), plain(small(98))]
        net = LayerParallel(layers, group=group, placement="even", replica=0, **cycles)
        if kind == "bfloat16":
            net.bfloat16()
            x = x.bfloat16()
        with torch.autocast("cpu", torch.bfloat16, enabled=kind == "autocast"):
            loss = net.step(x, target, lambda y, target: squared(y.float(), target))
        found.append((loss, gradients_of(net)))
    (alone_loss, wanted), *others = found
    assert all(gradient.isfinite().all() for gradient in wanted.values())
    for loss, gradients in others:
        assert torch.equal(loss, alone_loss)
        assert all(torch.equal(gradient, wanted[name]) for name, gradient in gradients.items())


@on_ranks(1, 2)
def test_a_net_that_begins_with_a_guess_and_has_none_is_not_evaluated_from_zeros(rank, world):
    net = LayerParallel(steps(), fwd=Cycle(start="guess"))
    net.eval()
    with pytest.raises(LayerParallelError, match="no guess; give the net one on every rank"):
        net.evaluate(*batch(), squared)
