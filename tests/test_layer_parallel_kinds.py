"""The kinds of layers: their answers, their names in the native module, and one more kind that is written here.

`docs/adding-a-layer-kind.md` quotes this kind and its first test.
"""

import copy
import pickle
import re
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
from support import on_ranks
from support.nets import drawn
from torch import nn
from torch_accl import _native, layer_parallel
from torch_accl.layer_parallel import Block, Cycle, LayerParallel, Scaled, Serial, Spline, coarsened, custom, refined
from torch_accl.layer_parallel._net.kinds import (
    CUSTOM,
    KINDS,
    ODE,
    PLAIN,
    RESIDUAL,
    TIMED,
    LayerKind,
    kind_of,
)

PAGE = Path(__file__).parent.parent / "docs" / "adding-a-layer-kind.md"


# ---- a kind that is not in the package


class ExponentialKind(LayerKind):
    """A step `exp(dt * rate) * x + dt * f(x)` of the equation `x' = rate * x + f(x)`. The layer has `rate` and computes f."""

    def arguments(self, state, span, dt):
        return state, span * dt

    def called(self, module, span):
        return ExponentialStep(module)


class ExponentialStep(nn.Module):
    def __init__(self, module):
        super().__init__()
        self.module = module

    def forward(self, x, dt, /, **side):
        return torch.exp(dt * self.module.rate) * x + dt * self.module(x, **side)


EXPONENTIAL = ExponentialKind("exponential", "custom", has_dt=True)


def exponential(f):
    """A step `exp(dt * f.rate) * x + dt * f(x)`; a coarse step takes a longer dt."""
    return Block(f, EXPONENTIAL.name)


# In the package, the kind is in `KINDS` for good.
is_known = patch.dict(KINDS, {EXPONENTIAL.name: EXPONENTIAL})


class Stiff(nn.Module):
    """f of an equation whose fastest component decays within a tenth of a unit of time."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(6, 6)
        self.rate = nn.Parameter(-torch.linspace(1.0, 40.0, 6))

    def forward(self, x):
        return torch.tanh(self.linear(x))


def stiff_layers(count):
    """Returns the same layers on every rank, in float64."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        return [Stiff().double() for _ in range(count)]


def batch():
    return drawn(4, (5, 6), (5, 6), dtype=torch.float64)


def gradients(layers):
    return {layer: [parameter.grad for parameter in module.parameters()] for layer, module in layers}


@on_ranks(1, 2, 3)
@pytest.mark.parametrize("mode", ["exact-wave", "exact-pipeline", "inexact"])
@is_known
def test_steps_of_a_new_kind_are_its_formula(rank, world, mode):
    (x, target), loss_fn = batch(), nn.functional.mse_loss
    layers, dt = stiff_layers(16), 1 / 16
    alone, y = copy.deepcopy(layers), x
    for layer in alone:
        y = torch.exp(dt * layer.rate) * y + dt * layer(y)
    loss = loss_fn(y, target)
    loss.backward()
    # Four intervals are exact after four iterations, in both passes.
    cycle = Cycle(factor=4, iterations=4)
    micro_batches = 1 if mode == "exact-pipeline" else None
    net = LayerParallel(
        [exponential(layer) for layer in layers], mode=mode, fwd=cycle, bwd=cycle, micro_batches=micro_batches
    )
    torch.testing.assert_close(net.step(x, target, loss_fn), loss.detach())
    wanted = gradients(enumerate(alone))
    for layer, found in gradients((int(number), module) for number, module in net.layers.items()).items():
        torch.testing.assert_close(found, wanted[layer])


@on_ranks(1, 2)
@is_known
def test_coarse_steps_of_a_new_kind_converge_fast_where_increments_diverge(rank, world):
    x, target = batch()

    def shares(layers):
        """Returns the last residual norm of each pass as a share of the first one."""
        cycle = Cycle(factor=4, iterations=3)
        net = LayerParallel(layers, horizon=0.5, fwd=cycle, bwd=cycle)
        net.step(x, target, nn.functional.mse_loss)
        passes = [list(norms.values()) for norms in (net.norms.forward, net.norms.backward)]
        return [norms[-1] / norms[0] for norms in passes]

    # Copies of one layer, because a coarse step evaluates the first of its layers for all of them.
    copies = [stiff_layers(1)[0] for _ in range(16)]
    for share in shares([exponential(layer) for layer in copies]):
        assert share < 0.1
    for share in shares([Block(Increment(layer), ODE.name) for layer in copies]):
        assert not share < 1


class Increment(nn.Module):
    """The whole right-hand side as an increment."""

    def __init__(self, module):
        super().__init__()
        self.module = module

    def forward(self, x):
        return self.module.rate * x + self.module(x)


class Scaling(nn.Module):
    """f with side inputs whose names a step's own arguments have."""

    def __init__(self):
        super().__init__()
        self.rate = nn.Parameter(torch.zeros(6, dtype=torch.float64))

    def forward(self, state, x, dt):
        return state * x * dt


@on_ranks(1, 2)
@is_known
def test_side_inputs_of_a_new_kind_may_have_any_names(rank, world):
    x, _ = batch()
    net = LayerParallel([exponential(Scaling()) for _ in range(4)], mode="exact-wave")
    with torch.no_grad():
        y = net(x, {"x": torch.tensor(2.0), "dt": torch.tensor(3.0)})
    if net.is_last:
        torch.testing.assert_close(y, x * (1 + 6 / 4) ** 4)


@on_ranks(1, 2)
@is_known
def test_a_net_of_a_new_kind_goes_to_one_rank_and_back(rank, world):
    x, _ = batch()
    net = LayerParallel([exponential(layer) for layer in stiff_layers(6)], mode="exact-wave", horizon=3.0)
    serial = pickle.loads(pickle.dumps(net.to_serial()))
    assert serial.kinds == ["exponential"] * 6
    again = LayerParallel.from_serial(serial, mode="exact-wave")
    with torch.no_grad():
        first, y, second = serial(x), net(x), again(x)
    if net.is_last:
        assert torch.equal(first, y) and torch.equal(y, second)


@on_ranks(1, 2)
@is_known
def test_a_refined_net_of_a_new_kind_has_another_dt_and_the_same_layers(rank, world):
    x, _ = batch()
    net = LayerParallel([exponential(layer) for layer in stiff_layers(4)], mode="exact-wave")
    finer = refined(net, 2)
    assert len(finer._plans.net.layers) == 8 and finer._solver.layers.dt == 1 / 8
    assert not any(isinstance(layer, Scaled) for layer in finer.layers.values())
    back = coarsened(finer, 2)
    with torch.no_grad():
        first, second = net(x), back(x)
    if net.is_last:
        assert torch.equal(first, second)


def test_the_page_quotes_the_code_of_this_file():
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    source = Path(__file__).read_text()
    assert len(blocks) >= 2
    for block in blocks:
        assert block in source, block


# ---- the kinds of the package


@pytest.mark.parametrize("name", list(KINDS))
def test_the_native_module_has_the_operations_of_each_kind(name):
    levels = _native.layer_levels([(kind_of(name).plan_kind, False)] * 8, [4] if kind_of(name).is_step else [])
    assert levels[-1] == ([0, 4, 8] if kind_of(name).is_step else list(range(9)))


@pytest.mark.parametrize("kind", list(KINDS.values()), ids=list(KINDS))
def test_a_copy_of_a_kind_is_equal_and_has_its_name(kind):
    assert kind_of(kind.name) is kind
    assert copy.deepcopy(kind) == kind and pickle.loads(pickle.dumps(kind)) == kind


@pytest.mark.parametrize("name", list(KINDS))
def test_the_function_of_a_kind_has_its_name_and_errors_list_it(name):
    assert getattr(layer_parallel, name)(nn.Identity()).kind == name
    for make in (lambda: LayerParallel([3]), lambda: Spline(3, layers=2, control_points=2)):
        with pytest.raises(TypeError, match=re.escape(f"{name}(f)")):
            make()


@on_ranks(1)
def test_an_unknown_kind_is_refused_with_the_known_ones(rank):
    known = f"kind of a layer: expected one of {', '.join(KINDS)}, got 'odd'"
    layers = nn.ModuleList([nn.Linear(2, 2)])
    for make in (
        lambda: LayerParallel([Block(layers[0], "odd")]),
        lambda: LayerParallel.from_serial(layers, kind="odd"),
        lambda: LayerParallel.from_serial(Serial(layers, ["odd"], 1.0)),
        lambda: Serial(layers, ["odd"], 1.0)(torch.zeros(1, 2)),
    ):
        with pytest.raises(ValueError, match=known):
            make()
    with pytest.raises(ValueError, match="layer: expected one of ode, timed, residual, custom, plain, got `odd`"):
        _native.layer_levels([("odd", False)], [])


def test_arguments_have_the_length_where_the_layer_takes_it():
    state = torch.zeros(1)
    for span in (1, 3):
        for kind in (ODE, RESIDUAL, PLAIN):
            assert kind.arguments(state, span, 0.5) == (state,)
        assert TIMED.arguments(state, span, 0.5) == (state, span * 0.5)
    assert CUSTOM.arguments(state, 1, 0.5) == (state,)
    assert CUSTOM.arguments(state, 3, 0.5) == (state, 3)


def test_only_a_custom_layer_has_its_own_coarse_step():
    class Layer(nn.Module):
        def coarse_step(self, x, n):
            return x + n

    layer = Layer()
    for kind in (ODE, TIMED, RESIDUAL, CUSTOM, PLAIN):
        assert kind.called(layer, 1) is layer
        assert (kind.called(layer, 3) is layer) == (kind is not CUSTOM)
    assert CUSTOM.called(layer, 3)(4, 3) == 7


def test_only_an_increment_is_multiplied_by_dt():
    state, returned = (torch.tensor([1.0, 2.0]), torch.tensor([True])), torch.tensor([10.0, 20.0])
    moved, mask = ODE.next_state(state, returned, 0.5)
    assert moved.tolist() == [6.0, 12.0] and mask is state[1]
    assert ODE.weight(0.5) == 0.5
    for kind in (TIMED, RESIDUAL, CUSTOM, PLAIN):
        assert kind.next_state(state, returned, 0.5) is returned
        assert kind.weight(0.5) == 1.0


def test_a_refined_net_has_more_steps_and_wraps_those_without_dt():
    for kind in KINDS.values():
        assert kind.parts(3) == (1 if kind is PLAIN else 3)
        assert kind.is_wrapped("scaled") == (kind in (RESIDUAL, CUSTOM))
        assert not kind.is_wrapped("copied")


@on_ranks(1)
def test_saved_nets_have_names_of_kinds(rank):
    net = LayerParallel([custom(nn.Linear(2, 2)), nn.Linear(2, 2)], mode="exact-wave")
    assert net.to_serial().kinds == ["custom", "plain"]
    assert [type(kind) for kind in net.to_serial().kinds] == [str, str]
