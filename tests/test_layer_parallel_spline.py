"""Layers whose parameters are a spline in time, and parameters that many layers share."""

import copy
import io

import pytest
import torch
import torch._dynamo  # imported once here: a compiled layer loads it, which takes seconds in every rank
from support import on_ranks
from support.nets import alone, drawn, gradients_of, squared
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.func import functional_call
from torch.nn.parallel import DistributedDataParallel
from torch_accl.layer_parallel import (
    Cycle,
    LayerParallel,
    LayerParallelError,
    MGOpt,
    Spline,
    clip_grad_norm_,
    coarsened,
    custom,
    ode,
    plain,
    refined,
    residual,
    step,
    timed,
)

LAYERS, WIDTH = 12, 5
WIDE = torch.float64
MODES = {
    "exact-wave": {},
    "exact-pipeline": {"micro_batches": 2},
    "inexact": {"fwd": Cycle(factor=2, iterations=12), "bwd": Cycle(factor=2, iterations=12)},
}


def block(number):
    return nn.Sequential(nn.Linear(WIDTH, WIDTH, dtype=WIDE), nn.Tanh())


def named(number):
    """Returns a module with a seed of its own, to build the same one elsewhere."""
    torch.manual_seed(100 + number)
    return block(number)


def basis(number, degree, time):
    """Returns the value of a uniform B-spline, by the recursion that defines it."""
    if degree == 0:
        return 1.0 if number <= time < number + 1 else 0.0
    left = (time - number) / degree * basis(number, degree - 1, time)
    right = (number + degree + 1 - time) / degree * basis(number + 1, degree - 1, time)
    return left + right


def weights_at(layer, modules, layers, degree):
    """Returns a layer's parameters, interpolated by hand from the modules of all control points."""
    time = layer * (len(modules) - degree) / layers
    values = [basis(number - degree, degree, time) for number in range(len(modules))]
    return {
        name: sum(value * dict(each.named_parameters())[name] for value, each in zip(values, modules))
        for name, _ in modules[0].named_parameters()
    }


def batch(rows=4):
    return drawn(3, (rows, WIDTH), (rows, WIDTH), dtype=WIDE)


def spline(points=5, degree=1, layers=LAYERS, kind=ode, build=named):
    return Spline(kind(build), layers=layers, control_points=points, degree=degree)


def by_control_point(gradients):
    """Returns the gradients by control point and name. All copies on a rank must be the same."""
    found = {}
    for name, gradient in gradients.items():
        key = name.split(".", 3)[3]
        assert key not in found or torch.equal(found[key], gradient), name
        found[key] = gradient
    return found


@on_ranks(1, 2, 3)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("points,degree", [(5, 1), (4, 3), (13, 1), (3, 0), (6, 2)])
def test_a_spline_equals_weights_that_are_interpolated_by_hand(rank, world, mode, points, degree):
    net = LayerParallel([spline(points, degree)], mode=mode, **MODES[mode])
    modules = [named(number) for number in range(points)]
    x, target = batch()
    loss = net.step(x, target, squared)
    y = x
    for layer in range(LAYERS):
        y = y + functional_call(modules[0], weights_at(layer, modules, LAYERS, degree), y) / LAYERS
    wanted = squared(y, target)
    wanted.backward()
    torch.testing.assert_close(loss, wanted.detach(), rtol=1e-12, atol=0)
    found = by_control_point(gradients_of(net))
    for key, gradient in found.items():
        number, name = key.split(".", 1)
        right = modules[int(number)].get_parameter(name).grad
        if gradient is None:
            # The last control point has the coefficient 0 if there is a knot for each layer.
            assert points == LAYERS + degree and not right.any()
            continue
        torch.testing.assert_close(gradient, right, rtol=1e-12, atol=1e-15)
    of_all = set().union(*net.wire.gathered({int(key.split(".")[0]) for key in found}))
    assert of_all == set(range(points))


@on_ranks(2, 3)
@pytest.mark.parametrize("cycle", [{}, {"mode": "exact-wave"}, {"mode": "exact-pipeline", "micro_batches": 2}])
@pytest.mark.parametrize("way", ["spline", "two splines", "one module", "tied by name"])
def test_shared_parameters_have_the_same_bits_on_any_number_of_ranks(rank, world, cycle, way):
    def layers():
        if way == "spline":
            return [plain(named(50)), spline(5, 2), plain(named(51))]
        if way == "two splines":
            return [spline(4, 1, layers=5, kind=residual), spline(4, 0, layers=7)]
        shared = named(1)
        return [ode(shared if way == "one module" else named(layer)) for layer in range(LAYERS)]

    tie = [("layers.9.0.weight", "layers.2.0.weight", "layers.3.0.weight", "layers.11.0.weight", "layers.8.0.weight")]
    settings = cycle | ({"tie": tie} if way == "tied by name" else {})
    one, net = LayerParallel(layers(), group=alone(), **settings), LayerParallel(layers(), **settings)
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1, momentum=0.9) for each in (one, net)]
    x, target = batch()
    for _ in range(3):
        losses = [each.step(x, target, squared) for each in (one, net)]
        assert torch.equal(*losses)
        for name, gradient in gradients_of(net).items():
            assert torch.equal(gradient, one.get_parameter(name).grad), name
        norms = [clip_grad_norm_(each, 0.01) for each in (one, net)]
        assert torch.equal(*norms)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()


@on_ranks(1, 2)
def test_a_rank_has_each_of_its_control_points_once(rank, world):
    net = LayerParallel([spline(4)])
    parameters = list(net.parameters())
    mine = {name.split(".")[3] for name, _ in net.named_parameters()}
    assert len(parameters) == 2 * len(mine)
    assert len(mine) == (4 if world == 1 else 3), "three of the points lie before or after the middle"


@on_ranks(1, 2, 3)
def test_a_spline_goes_to_one_rank_and_back(rank, world):
    net = LayerParallel([plain(named(50)), spline(5, 2)], mode="exact-wave")
    x, target = batch()
    serial = net.to_serial()
    assert len(list(serial.parameters())) == 2 + 2 * 5
    y = serial(x)
    if net.is_last:
        assert torch.equal(net.eval()(x if net.is_first else None), y)
    else:
        net.eval()(x if net.is_first else None)
    net.train()
    squared(y, target).backward()
    net.step(x, target, squared)
    again = LayerParallel.from_serial(net.to_serial(), mode="exact-wave")
    again.step(x, target, squared)
    for name, gradient in gradients_of(net).items():
        torch.testing.assert_close(serial.get_parameter(name).grad, gradient, rtol=1e-12, atol=1e-15)
        assert torch.equal(again.get_parameter(name).grad, gradient), name


@on_ranks(1, 2)
def test_a_spline_is_saved_and_loaded(rank, world):
    net = LayerParallel([spline(5, 2)], mode="exact-wave")
    x, target = batch()
    loss = net.step(x, target, squared)
    buffer = io.BytesIO()
    torch.save(net.state_dict(), buffer)
    other = LayerParallel([spline(5, 2, build=block)], mode="exact-wave", seed=7)
    assert not torch.equal(other.step(x, target, squared), loss)
    buffer.seek(0)
    other.load_state_dict(torch.load(buffer))
    assert torch.equal(other.step(x, target, squared), loss)


class Stepped(nn.Module):
    """A module for every kind: it takes the length of a step if it gets one, and a side input."""

    def __init__(self, number=0):
        super().__init__()
        torch.manual_seed(number)
        self.inner = nn.Linear(WIDTH, WIDTH, dtype=WIDE)
        self.norm = nn.BatchNorm1d(WIDTH, dtype=WIDE)
        self.drop = nn.Dropout(0.3)

    def forward(self, x, dt=0.125, *, gate=None):
        increment = torch.tanh(self.norm(self.inner(self.drop(x))))
        return x + dt * (increment if gate is None else gate * increment)

    def coarse_step(self, x, n, *, gate=None):
        return self(x, 0.125 * n, gate=gate)


@on_ranks(1, 2, 3)
@pytest.mark.parametrize("kind", [timed, residual, custom])
def test_a_spline_of_every_kind_has_buffers_random_numbers_and_side_inputs(rank, world, kind):
    side = {"gate": drawn(8, (WIDTH,), dtype=WIDE)[0].requires_grad_()}
    x, target = batch(8)
    found = []
    for group in (alone(), None):
        net = LayerParallel([spline(4, 2, kind=kind, build=Stepped)], group=group, fwd=Cycle(factor=3), replica=0)
        for _ in range(2):
            loss = net.step(x, target, squared, side=side)
        found.append((net, loss))
    (one, first), (net, second) = found
    assert torch.equal(first, second)
    values, right = net.state_dict(), one.state_dict()
    for name, value in values.items():
        assert torch.equal(value, right[name]), name
    means = [layer.block.norm.running_mean for layer in one.layers.values()]
    assert all(not torch.equal(means[0], mean) for mean in means[1:]), "each layer has statistics of its own"
    for name, gradient in gradients_of(net).items():
        assert torch.equal(gradient, one.get_parameter(name).grad), name


@on_ranks(1, 2)
@pytest.mark.parametrize("kind", [ode, residual])
def test_a_spline_is_made_deeper_and_shallower(rank, world, kind):
    net = LayerParallel([spline(5, 2, kind=kind)], mode="exact-wave")
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    x, target = batch()
    net.step(x, target, squared)
    optimizer.step()
    optimizer.zero_grad()
    deeper, its = refined(net, 2, optimizer)
    assert len(deeper.to_serial().layers) == 2 * LAYERS
    deeper.step(x, target, squared)
    its.step()
    again = coarsened(refined(net, 2), 2)
    assert torch.equal(again.step(x, target, squared), net.step(x, target, squared))
    half = coarsened(net, 2)
    modules = list(net.to_serial().layers)
    y = x
    for layer in range(0, LAYERS, 2):
        value = modules[layer](y)
        y = y + value * 2 / LAYERS if kind is ode else y + 2 * (value - y)
    torch.testing.assert_close(half.step(x, target, squared), squared(y, target).detach(), rtol=1e-12, atol=0)
    with pytest.raises(ValueError, match=r"the net has layers of a Spline.*interpolation='constant'"):
        refined(net, 2, interpolation="linear")
    with pytest.raises(ValueError, match=r"steps 0, 1.* have tied parameters"):
        MGOpt(net, optimizer)


@on_ranks(2)
def test_a_spline_on_the_meta_device_stays_one(rank, world):
    with torch.device("meta"):
        net = LayerParallel([spline(4, 1)], mode="exact-wave")
    net.to_empty(device="cpu")
    with torch.no_grad():
        for name, parameter in net.named_parameters():
            parameter.copy_(named(int(name.split(".")[3])).get_parameter(name.split(".", 4)[4]))
    assert len(list(net.parameters())) == 6
    right = LayerParallel([spline(4, 1)], mode="exact-wave")
    x, target = batch()
    assert torch.equal(net.step(x, target, squared), right.step(x, target, squared))
    for name, gradient in gradients_of(net).items():
        assert torch.equal(gradient, right.get_parameter(name).grad)


@on_ranks(2)
def test_a_control_point_that_is_trained_on_one_rank_only_is_an_error_on_both(rank, world):
    net = LayerParallel([spline(3, 1)], mode="exact-wave")
    if rank:
        for parameter in net.parameters():
            parameter.requires_grad_(False)
    x, target = batch()
    with pytest.raises(LayerParallelError, match=r"control_points\.1\..* differ in requires_grad"):
        net.step(x, target, squared)
    for parameter in net.parameters():
        parameter.requires_grad_(True)
    net.step(x, target, squared)


@on_ranks(1, 2)
def test_layers_of_a_spline_can_be_compiled(rank, world):
    def compiled(number):
        return torch.compile(named(number), backend="aot_eager")

    x, target = batch()
    found = []
    for build in (named, compiled):
        net = LayerParallel([spline(3, 1, layers=4, build=build)], mode="exact-wave")
        net.step(x, target, squared)
        found.append(by_control_point(gradients_of(net)))
    for key, gradient in found[1].items():
        torch.testing.assert_close(gradient, found[0][key.replace("_orig_mod.", "")], rtol=1e-10, atol=1e-14)


@on_ranks(1, 2)
def test_modules_with_two_names_for_one_parameter_and_with_parametrizations(rank, world):
    class Twice(nn.Module):
        def __init__(self, number):
            super().__init__()
            torch.manual_seed(number)
            self.first = nn.Linear(WIDTH, WIDTH, dtype=WIDE)
            self.second = nn.utils.parametrizations.weight_norm(nn.Linear(WIDTH, WIDTH, dtype=WIDE))
            self.third = nn.Linear(WIDTH, WIDTH, dtype=WIDE)
            self.third.weight = self.first.weight
            self.cell = nn.LSTM(WIDTH, WIDTH, dtype=WIDE, batch_first=True)

        def forward(self, x):
            y = self.cell(self.second(self.first(x))[:, None])[0][:, 0]
            return torch.tanh(self.third(y))

    x, target = batch()
    net = LayerParallel([spline(3, 1, layers=6, build=Twice)], mode="exact-wave")
    loss = net.step(x, target, squared)
    points = [Twice(number) for number in range(3)]
    y = x
    for layer in range(6):
        whole = copy.deepcopy(points[0])
        with torch.no_grad():
            for name, weight in weights_at(layer, points, 6, 1).items():
                whole.get_parameter(name).copy_(weight)
        y = y + whole(y) / 6
    torch.testing.assert_close(loss, squared(y, target).detach(), rtol=1e-12, atol=0)


@pytest.mark.slow
@on_ranks(4, deadline=80)
@pytest.mark.parametrize("wrapper", ["DistributedDataParallel", "fully_shard"])
def test_replicas_of_a_net_with_a_spline_train_as_one_rank_does(rank, world, wrapper):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "lp"))
    net = LayerParallel([spline(5, 2)], mode="exact-wave", mesh=mesh["lp"])
    one = LayerParallel([spline(5, 2)], mode="exact-wave", group="alone")
    if wrapper == "fully_shard":
        wrapped = fully_shard(net, mesh=mesh["dp"], reshard_after_forward=False)
    else:
        wrapped = DistributedDataParallel(net, process_group=mesh["dp"].get_group())
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.5, momentum=0.9) for each in (net, one)]
    part = slice(4 * mesh.get_local_rank("dp"), 4 * mesh.get_local_rank("dp") + 4)
    for _ in range(4):
        x, target = batch(8)
        step(wrapped, x[part], target[part], squared)
        one.step(x, target, squared)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    for name, parameter in net.named_parameters():
        whole = parameter.full_tensor() if wrapper == "fully_shard" else parameter
        torch.testing.assert_close(whole, one.get_parameter(name), rtol=1e-10, atol=1e-12)


def test_too_few_or_too_many_control_points_are_refused():
    with pytest.raises(ValueError, match=r"control_points=3\) has too few .* degree 3; give 4 to 15"):
        spline(3, 3)
    with pytest.raises(
        ValueError, match=r"control_points=14\) has too many .* for 12 layers and degree 1; give 2 to 13"
    ):
        spline(14, 1)
    for name, value in (("layers", 0), ("control_points", 1.5), ("degree", -1), ("layers", True)):
        with pytest.raises(ValueError, match=rf"Spline\({name}={value!r}\): give an integer"):
            Spline(**{"layer": ode(named), "layers": 4, "control_points": 3, "degree": 1} | {name: value})
    with pytest.raises(TypeError, match=r"Spline\(layer=Linear\): give ode"):
        Spline(nn.Linear(2, 2), 4, 3)
    with pytest.raises(TypeError, match=r"the layer has a module, Linear; give a function"):
        Spline(ode(nn.Linear(2, 2)), 4, 3)


@on_ranks(1, 2)
def test_control_points_that_differ_are_refused_on_all_ranks(rank, world):
    def growing(number):
        return nn.Linear(WIDTH, WIDTH, bias=number < 2)

    def of_integers(number):
        module = nn.Linear(WIDTH, WIDTH)
        module.count = nn.Parameter(torch.zeros(2, dtype=torch.int64), requires_grad=False)
        return module

    for build, text in (
        (
            growing,
            r"control point 2 of the spline from layer 1 has the parameters weight float32\[5, 5\], and control point \d has weight float32\[5, 5\], bias",
        ),
        (of_integers, r"the parameter count is torch.int64, which cannot be interpolated; make it a buffer"),
        (lambda number: 3, r"control point \d returned int; return a torch.nn.Module"),
    ):
        with pytest.raises((LayerParallelError, ValueError, TypeError), match=text):
            LayerParallel([plain(named(1)), spline(4, 1, layers=4, build=build)])


@on_ranks(2, 3)
def test_control_points_of_degree_zero_that_differ_are_refused_on_all_ranks(rank, world):
    def growing(number):
        return nn.Linear(WIDTH, WIDTH, bias=number < world - 1)

    with pytest.raises(
        (LayerParallelError, ValueError), match=r"control point \d of the spline from layer 0 has the parameters"
    ):
        LayerParallel([spline(world, 0, layers=2 * world, build=growing)])


class Recurrent(nn.Module):
    """A step with an LSTM."""

    def __init__(self, number):
        super().__init__()
        torch.manual_seed(number)
        self.cell = nn.LSTM(WIDTH, WIDTH, dtype=WIDE, batch_first=True)

    def forward(self, x):
        return self.cell(x[:, None])[0][:, 0]


def test_a_spline_of_recurrent_modules_is_copied_after_a_step_and_keeps_no_interpolated_parameters():
    net = LayerParallel([spline(3, 1, layers=6, build=Recurrent)], group="alone", mode="exact-wave")
    x, target = batch()
    loss = net.step(x, target, squared)
    assert all(weight is None for layer in net.layers.values() for weight in layer.block.cell._flat_weights)
    for other in (
        copy.deepcopy(net),
        coarsened(refined(net, 2), 2),
        LayerParallel.from_serial(net.to_serial(), group="alone", mode="exact-wave"),
    ):
        assert torch.equal(other.step(x, target, squared), loss)


@on_ranks(1, 2, 3)
def test_a_net_of_other_depth_has_each_control_point_once_and_all_are_tied(rank, world):
    net = LayerParallel([spline(5, 3, layers=16, kind=residual)], mode="exact-wave")
    optimizer = torch.optim.Adam(net.parameters(), lr=1e-2)
    x, target = batch()
    net.step(x, target, squared)
    optimizer.step()
    deeper, its = refined(net, 2, optimizer)
    again, last = coarsened(deeper, 2, its)
    for made, own in ((deeper, its), (again, last)):
        points = {name.split("control_points.")[1] for name, _ in made.named_parameters()}
        assert len(list(made.parameters())) == len(points) == len(own.param_groups[0]["params"]) == len(own.state)
        assert len(list(made.to_serial().parameters())) == 10
    for _ in range(2):
        deeper.step(x, target, squared)
        its.step()
        its.zero_grad()
    whole = deeper.to_serial()
    assert len(list(whole.parameters())) == 10


@on_ranks(1, 2)
def test_the_first_layer_of_a_control_point_on_a_rank_can_be_replaced(rank, world):
    net = LayerParallel([spline(3, 1, layers=8)], mode="exact-wave")
    if "4" in net.layers:
        net.layers["4"] = named(9)
    x, target = batch()
    net.step(x, target, squared)
    whole = net.to_serial()
    squared(whole(x), target).backward()
    for name, gradient in gradients_of(net).items():
        torch.testing.assert_close(gradient, whole.get_parameter(name).grad, rtol=1e-12, atol=1e-15)


def test_a_function_that_returns_one_module_for_all_control_points_is_refused_and_leaves_it_whole():
    module = named(1)
    for degree in (0, 1):
        with pytest.raises(TypeError, match=r"returned the same module or parameter for 0 and 1; build a new one"):
            LayerParallel([Spline(ode(lambda number: module), 4, 3, degree)], group="alone")


def test_a_compiled_layer_that_takes_dt_gets_few_graphs_in_a_spline():
    graphs = []

    def counted(graph, inputs):
        graphs.append(graph)
        return graph.forward

    counts = []
    for layers in (8, 16):
        torch._dynamo.reset()
        graphs.clear()
        entry = Spline(timed(lambda number: torch.compile(Stepped(number), backend=counted)), layers, 3, 1)
        net = LayerParallel([entry], group="alone", fwd=Cycle(factor=2), bwd=Cycle(factor=2))
        net.step(*batch(8), squared)
        counts.append(len(graphs))
    assert counts[0] == counts[1]
