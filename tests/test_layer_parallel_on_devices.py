"""Layer-parallel nets and the facade for torchbraid with tensors of an accelerator, on the stand-in.

Operators of the stand-in run on the CPU, so results must have the bits that CPU tensors give: on any number of ranks, in
all modes, and whatever the order of the device's streams.
"""

import contextlib
import copy
import functools
import math
import threading

import pytest
import torch
import torch._dynamo  # optimizers load it, which takes seconds: load it once here, not in every rank
import torch.distributed as dist
from support import init_group, on_ranks, standin
from support.nets import drawn, squared
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint
from torch_accl import layer_parallel
from torch_accl.compat import torchbraid
from torch_accl.compat.torchbraid import MPI, mgopt
from torch_accl.compat.torchbraid._mgopt_levels import Draws
from torch_accl.layer_parallel import (
    Audits,
    Cycle,
    LayerParallel,
    LayerParallelError,
    MGOpt,
    RecurrentParallel,
    Spatial,
    Spline,
    Stop,
    coarsened,
    ode,
    plain,
    refined,
    residual,
    timed,
)
from torch_accl.layer_parallel._net import device_numbers
from torch_accl.layer_parallel._ranks.wire import Wire

WIDTH = 6
CPU = torch.device("cpu")

pytestmark = pytest.mark.skipif(
    torch.__version__ < "2.15", reason="the stand-in is written for the interfaces of torch 2.15"
)


@pytest.fixture(autouse=True, scope="module")
def module():
    """Compiles the stand-in once."""
    standin.build()


# ---- comparison with CPU tensors


# The module that controls the device, in a rank.
device_module = None


def begin(rank, backend=None):
    """Registers the stand-in and creates the default group. Returns the module that controls the device."""
    global device_module
    device_module = standin.register("early", rank + 1)
    init_group(backend)
    return device_module


FAULTS = ("pageable", "wrong_device", "after_free")


def same(module, rank, case, there="standin:0", orders=standin.ORDERS, faults=FAULTS):
    """Runs a case with CPU tensors, and for each order of streams with tensors of the device. Compares the bits of all
    results, except for results that the case names `close`.
    """
    wanted = dict(leaves(case(CPU)))
    for order in orders:
        module.set_order(order, rank + 1)
        found = dict(leaves(case(torch.device(there))))
        assert found.keys() == wanted.keys()
        for name, value in wanted.items():
            where = f"{order}: {name}: {found[name]}, expected {value}"
            if "close" in name:
                torch.testing.assert_close(found[name].cpu(), value)
            elif isinstance(value, torch.Tensor):
                # Bits, so that NaN is equal to itself.
                alike = [each.detach().cpu().contiguous().view(-1).view(torch.uint8) for each in (found[name], value)]
                assert found[name].dtype == value.dtype and torch.equal(*alike), where
            else:
                assert found[name] == value, where
    counts = module.counts()
    assert all(counts[fault] == 0 for fault in faults), counts


def leaves(value, name=""):
    """Yields the tensors and numbers of nested dicts, lists and tuples, by name."""
    if isinstance(value, dict | list | tuple):
        for key, each in value.items() if isinstance(value, dict) else enumerate(value):
            yield from leaves(each, f"{name}/{key}")
    elif value is not None:
        yield name, value


def results(net, device):
    """Returns what a batch has left in a net, and checks where it is."""
    for name, tensor in [*net.named_parameters(), *net.named_buffers()]:
        assert tensor.device == device and (tensor.grad is None or tensor.grad.device == device), name
    return {
        "gradients": {name: p.grad.clone() for name, p in net.named_parameters() if p.grad is not None},
        "buffers": {name: buffer.clone() for name, buffer in net.named_buffers()},
        "norms": [net.norms.forward, net.norms.backward],
    }


def detached(net):
    """Returns copies of a net's values, which later steps do not change."""
    return {name: value.clone() for name, value in net.state_dict().items()}


class Step(nn.Module):
    """A layer with dropout and batch statistics. It leaves work in the stream."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.norm = nn.BatchNorm1d(WIDTH)
        self.dropout = nn.Dropout(0.5)

    def forward(self, x):
        made = self.dropout(torch.tanh(self.linear(self.norm(x))))
        if x.device.type != "cpu":
            device_module.compute(3)
        return made


class Timed(Step):
    def forward(self, x, dt):
        return x + dt * super().forward(x)


class Skip(nn.Module):
    """A layer whose step has a random length. The number is drawn on the CPU, wherever the state is."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        share = torch.rand((), device="cpu").item() if self.training else 0.5
        return x + share * torch.tanh(self.linear(x)) / 4


class Shifted(nn.Module):
    """A layer with side inputs."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x, scale, shift=0):
        return torch.tanh(self.linear(x)) * scale + shift


def layers():
    return [
        plain(lambda number: nn.Linear(4, WIDTH)),
        *(ode(lambda number: Step()) for _ in range(4)),
        *(timed(lambda number: Timed()) for _ in range(2)),
        *(residual(lambda number: Skip()) for _ in range(2)),
        plain(lambda number: nn.Linear(WIDTH, 3)),
    ]


def built(device, **settings):
    """Returns a net whose layers are built on the device, so that their first weights are drawn there."""
    with device:
        return LayerParallel(layers(), seed=5, **settings)


def trained(net, device, batches=2):
    """Trains a net. Returns all that shows."""
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    found = {"before": detached(net)}
    for number in range(batches):
        x, target = (each.to(device) for each in drawn(number, (8, 4), (8, 3)))
        x.requires_grad_()
        optimizer.zero_grad()
        loss = net.step(x, target, squared)
        found[number] = {"loss": loss, "x": x.grad if net.is_first else None, **results(net, device)}
        optimizer.step()
    return {**found, "after": detached(net), "audits": [audit.gradient_error for audit in net.audits]}


CYCLE = Cycle(factor=2, iterations=2)
MODES = {
    "exact-wave": dict(mode="exact-wave"),
    "exact-pipeline": dict(mode="exact-pipeline", micro_batches=2),
    "gpipe": dict(mode="exact-pipeline", micro_batches=4, schedule="gpipe", checkpoint=True),
    "inexact": dict(fwd=CYCLE, bwd=CYCLE, audit=Audits(every=1, limit=math.inf)),
    "three levels": dict(fwd=Cycle(levels=3, factor=2, iterations=2, relax="FCF"), bwd=CYCLE, checkpoint=True),
    "exact-forward": dict(mode="exact-forward", bwd=CYCLE),
    "converged": dict(mode="converged", fwd=CYCLE, bwd=CYCLE, stop=Stop(tolerance=1e-3, max_iterations=4)),
}


@on_ranks(1, 2, 3, fresh=True, init=False)
def test_every_mode_has_the_bits_of_cpu_tensors(rank, world):
    module = begin(rank)
    for number, settings in enumerate(MODES.values()):
        order = standin.ORDERS[(number + world) % 3]
        same(module, rank, lambda device: trained(built(device, **settings), device), orders=(order,))


@on_ranks(2, fresh=True, init=False)
def test_the_fastest_mode_is_measured_on_a_device(rank, world):
    begin(rank)
    net = built(torch.device("standin"), mode="auto", micro_batches=2, fwd=CYCLE, bwd=CYCLE)
    x, target = (each.to("standin") for each in drawn(1, (8, 4), (8, 3)))
    assert math.isfinite(net.step(x, target, squared)) and net.choice.seconds.keys() == {
        "exact-wave",
        "exact-pipeline",
        "inexact",
    }


@on_ranks(1, 3, fresh=True, init=False)
def test_a_forward_pass_by_itself_has_the_bits_of_cpu_tensors(rank, world):
    def case(device):
        found = {}
        net = built(device, fwd=CYCLE, bwd=CYCLE)
        x, target = (each.to(device) for each in drawn(1, (8, 4), (8, 3)))
        for mode in ("inexact", "exact-wave"):
            net.mode = mode
            x.grad = None
            y = net(x.requires_grad_())
            # The last rank has the output on the device. Its backward pass runs in torch's thread of that device.
            assert y.device == (device if net.is_last else CPU)
            (squared(y, target) if net.is_last else y).backward()
            found[mode] = {"y": y, "x": x.grad, **results(net, device)}
        net.eval()
        evaluated = net.evaluate(x, target, squared)
        with torch.no_grad():
            found["evaluation"] = [net(x), evaluated.loss, evaluated.mode_loss, evaluated.output_error]
        return found

    same(begin(rank), rank, case)


@on_ranks(2, fresh=True, init=False)
@pytest.mark.parametrize("backend", ["standin:accl", "cpu:accl,standin:accl", "cpu:gloo,standin:accl"])
def test_groups_with_one_or_two_backends_serve_a_net_on_a_device(rank, world, backend):
    module = begin(rank, backend)
    if "cpu" not in backend:
        assert Wire(dist.group.WORLD).device.type == "standin"
    net = built(torch.device("standin:0"), fwd=CYCLE, bwd=CYCLE, tie=[("layers.0.bias", "layers.1.linear.bias")])
    one = built(CPU, fwd=CYCLE, bwd=CYCLE, tie=[("layers.0.bias", "layers.1.linear.bias")], group="alone")
    alone = trained(one, CPU)
    module.set_order("random", rank + 1)
    found = dict(leaves(trained(net, torch.device("standin:0"))))
    wanted = {name: value for name, value in leaves(alone) if name in found}
    assert len(wanted) > 20
    for name, value in wanted.items():
        value = value.cpu() if isinstance(value, torch.Tensor) else value
        other = found[name].cpu() if isinstance(value, torch.Tensor) else found[name]
        assert torch.equal(value, other) if isinstance(value, torch.Tensor) else value == other, name


# ---- random numbers


@on_ranks(2, fresh=True, init=False)
def test_masks_on_another_device_than_the_current_one_are_drawn_again(rank, world):
    # The checkpoint evaluates each layer a second time. Current is device 0.
    settings = dict(fwd=CYCLE, bwd=CYCLE, checkpoint=True)
    case = lambda device: trained(built(device, **settings), device)  # noqa: E731
    same(begin(rank), rank, case, there="standin:1", orders=("random",))
    assert torch.accelerator.current_device_index() == 0


@on_ranks(2, fresh=True, init=False)
def test_a_batch_leaves_the_numbers_of_devices_as_they_were(rank, world):
    begin(rank)
    for device in ("standin:0", "standin:1"):
        before = [generator.get_state() for generator in torch.standin.default_generators]
        net = built(torch.device(device), fwd=CYCLE, bwd=CYCLE)
        x, target = (each.to(device) for each in drawn(1, (8, 4), (8, 3)))
        net.step(x, target, squared)
        y = net(x)
        (y.sum() if net.is_last else y).backward()
        after = [generator.get_state() for generator in torch.standin.default_generators]
        assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True)), device


@on_ranks(2, fresh=True, init=False)
def test_masks_are_the_same_while_other_threads_run(rank, world):
    module = begin(rank)
    stop = threading.Event()
    thread = threading.Thread(target=stop.wait)
    thread.start()
    try:
        settings = dict(fwd=CYCLE, bwd=CYCLE, checkpoint=True)
        same(module, rank, lambda device: trained(built(device, **settings), device), orders=("late",))
    finally:
        stop.set()
        thread.join()


class Checkpointed(Step):
    """A layer whose masks torch draws again in the backward pass."""

    def forward(self, x):
        return checkpoint(super().forward, x, use_reentrant=False)


@on_ranks(2, fresh=True, init=False)
def test_masks_inside_of_a_checkpoint_have_the_bits_of_cpu_tensors(rank, world):
    def case(device):
        with device:
            net = LayerParallel([ode(lambda number: Checkpointed()) for _ in range(8)], fwd=CYCLE, bwd=CYCLE)
        x, target = (each.to(device) for each in drawn(1, (8, WIDTH), (8, WIDTH)))
        found = [net.step(x, target, squared), results(net, device)]
        y = net(x)
        (squared(y, target) if net.is_last else y).backward()
        return found, results(net, device)

    same(begin(rank), rank, case, there="standin:1", orders=("random",))


@on_ranks(2, fresh=True, init=False)
def test_a_device_whose_numbers_cannot_be_drawn_again_is_refused_on_all_ranks(rank, world):
    begin(rank)
    x, target = (each.to("standin") for each in drawn(1, (8, 4), (8, 3)))
    kept = torch.standin.default_generators
    if rank == 1:
        del torch.standin.default_generators, torch.standin.get_rng_state
        device_numbers.generator_of.cache_clear()
    net = LayerParallel(layers()).to("standin")
    with pytest.raises(LayerParallelError, match=r"rank 1 .*torch.standin has neither `default_generators` nor"):
        net.step(x, target, squared)
    torch.standin.default_generators = kept
    net.step(x, target, squared)


@on_ranks(1, fresh=True, init=False)
def test_a_package_that_shows_only_states_of_generators_is_served(rank):
    begin(rank)
    generators = torch.standin.default_generators
    del torch.standin.default_generators
    generator = device_numbers.generator_of(torch.device("standin:1"))
    generator.manual_seed(7)
    assert torch.equal(generator.get_state(), torch.Generator().manual_seed(7).get_state())
    assert torch.equal(generators[1].get_state(), generator.get_state())


# ---- layers of several kinds


@on_ranks(1, 2, 3, fresh=True, init=False)
def test_ties_splines_and_side_inputs_have_the_bits_of_cpu_tensors(rank, world):
    def case(device):
        with device:
            torch.manual_seed(3)
            made = [
                plain(lambda number: nn.Linear(WIDTH, WIDTH, bias=False)),
                *(ode(lambda number: Shifted()) for _ in range(4)),
                Spline(
                    ode(lambda number: nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh())), layers=4, control_points=3
                ),
                plain(lambda number: nn.Linear(WIDTH, WIDTH, bias=False)),
            ]
            net = LayerParallel(made, tie=[("layers.0.weight", "layers.9.weight")], fwd=CYCLE, bwd=CYCLE)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        found = []
        for number in range(2):
            x, target, scale, shift = (
                each.to(device).requires_grad_(place >= 2)
                for place, each in enumerate(drawn(number, (8, WIDTH), (8, WIDTH), (WIDTH,), (8, WIDTH)))
            )
            optimizer.zero_grad()
            loss = net.step(x, target, squared, side={"scale": scale, "shift": shift})
            found.append([loss, scale.grad, shift.grad, results(net, device), detached(net)])
            layer_parallel.clip_grad_norm_(net, 0.1)
            optimizer.step()
            if rank == 0:
                # The copies drift apart, and the lowest rank's copy replaces the others.
                with torch.no_grad():
                    net.get_parameter("layers.0.weight").mul_(1 + 1e-7)
        return found, detached(net), net.to_serial().state_dict()

    same(begin(rank), rank, case, orders=("late", "random"))


@on_ranks(3, fresh=True, init=False)
def test_states_with_masks_pass_ranks_whose_layers_have_no_parameters(rank, world):
    class Watched(LayerParallel):
        def settle(self, batch):
            self.last_device = batch.device
            super().settle(batch)

    class Masked(nn.Module):
        def forward(self, state):
            x, mask = state
            return torch.tanh(x) * mask, mask

    class Head(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(4, WIDTH)

        def forward(self, x):
            return self.linear(x), (x[:, :1] > 0).to(torch.int32)

    class Tail(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(WIDTH, 3)

        def forward(self, state):
            return self.linear(state[0] * state[1])

    def case(device):
        torch.manual_seed(4)
        made = [plain(Head()), *(residual(Masked()) for _ in range(4)), plain(Tail())]
        net = Watched(made, mode="exact-wave", fwd=CYCLE, bwd=CYCLE).to(device)
        assert rank != 1 or not list(net.parameters())
        x, target = (each.to(device) for each in drawn(1, (8, 4), (8, 3)))
        found = []
        for mode in ("exact-wave", "inexact"):
            net.mode = mode
            found.append([net.step(x, target, squared), results(net, device)])
            # A rank without parameters has its states where the other ranks have theirs.
            assert net.last_device == device
        return found

    same(begin(rank), rank, case)


class Stencil(nn.Module):
    def __init__(self):
        super().__init__()
        self.weights = nn.Parameter(torch.rand(3) - 0.5)

    def forward(self, x):
        left, right = torch.roll(x, 1, -1), torch.roll(x, -1, -1)
        return torch.tanh(self.weights[0] * left + self.weights[1] * x + self.weights[2] * right)


@on_ranks(2, fresh=True, init=False)
def test_large_states_in_both_directions_have_the_bits_of_cpu_tensors(rank, world):
    # A send waits for its receive: the parts of a batch are larger than the eager window.
    x, target = drawn(1, (4, 120_000), (4, 120_000))

    def case(device):
        with device:
            cycle = Cycle(factor=2, iterations=1)
            net = LayerParallel(
                [ode(lambda number: Stencil()) for _ in range(4)], micro_batches=4, fwd=cycle, bwd=cycle
            )
        found = []
        for net.mode in ("exact-pipeline", "inexact"):
            loss = net.step(x.to(device), target.to(device), squared)
            found.append([loss, results(net, device)])
        return found

    same(begin(rank), rank, case, orders=("late", "random"))


@on_ranks(2, 3, fresh=True, init=False)
def test_coarser_states_have_the_bits_of_cpu_tensors(rank, world):
    halves = Spatial(
        lambda x: (x[..., ::2] + x[..., 1::2]) / 2, lambda x, like: x.repeat_interleave(2, -1)[..., : like.shape[-1]]
    )

    def case(device):
        cycle = Cycle(levels=3, factor=2, iterations=2, coarser=(1, 2))
        with device:
            net = LayerParallel([ode(lambda number: Stencil()) for _ in range(9)], fwd=cycle, bwd=cycle, spatial=halves)
        x, target = (each.to(device) for each in drawn(1, (3, 16), (3, 16)))
        return [net.step(x, target, squared), results(net, device)]

    same(begin(rank), rank, case, orders=("late", "random"))


@on_ranks(2, fresh=True, init=False)
def test_deeper_nets_and_cycles_over_nets_have_the_bits_of_cpu_tensors(rank, world):
    def case(device):
        net = built(device, fwd=CYCLE, bwd=CYCLE)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
        x, target = (each.to(device) for each in drawn(1, (8, 4), (8, 3)))
        net.step(x, target, squared)
        optimizer.step()
        found = [results(net, device)]
        deeper, optimizer = refined(net, 2, optimizer)
        deeper.step(x, target, squared)
        optimizer.step()
        found += [results(deeper, device), optimizer.state_dict()["state"]]
        shallow, optimizer = coarsened(deeper, 4, optimizer)
        found += [detached(shallow), optimizer.state_dict()["state"]]
        cycle = MGOpt(net, torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9), mode="exact-wave")
        found += [cycle.step(x, target, squared), detached(net)]
        return found

    same(begin(rank), rank, case, orders=("random",))


@on_ranks(1, 3, fresh=True, init=False)
def test_recurrent_nets_have_the_bits_of_cpu_tensors(rank, world):
    # The second of three ranks has no steps.
    counts = [9] if world == 1 else [4, 0, 5]
    begin_at = sum(counts[:rank])

    def case(mode, device):
        torch.manual_seed(3)
        cell = nn.GRU(3, 5, 2, batch_first=True, dropout=0.5)
        net = RecurrentParallel(
            cell, nn.Linear(5, 2), mode=mode, micro_batches=2, fwd=CYCLE, bwd=CYCLE, stop=Stop(max_iterations=3)
        ).to(device)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        whole, target = drawn(1, (4, 9, 3), (4, 2))
        x = whole[:, begin_at : begin_at + counts[rank]].clone().to(device).requires_grad_()
        found = []
        for _ in range(2):
            optimizer.zero_grad()
            x.grad = None
            found.append([net.step(x, target.to(device), squared), x.grad, results(net, device), net.last_state()])
            optimizer.step()
        optimizer.zero_grad()
        state = net.last_state()
        outputs, last = net(x, state if rank == 0 else None)
        assert outputs.device == device
        own = outputs.square().sum() if counts[rank] else 0 * last
        (own.cpu() + (last.square().sum() if net.is_last else 0 * last).cpu()).backward()
        # In a pipeline, products have a strided gradient as a factor. The stand-in copies it, and BLAS rounds in another way.
        return {
            "steps": found,
            "outputs": outputs,
            "close" if mode == "exact-pipeline" else "exact": results(net, device),
        }

    module = begin(rank)
    for number, mode in enumerate(("exact-wave", "exact-pipeline", "inexact", "converged")):
        same(module, rank, functools.partial(case, mode), orders=(standin.ORDERS[(number + world) % 3],))


@on_ranks(4, fresh=True, init=False)
def test_replicas_on_a_device_have_the_bits_of_cpu_tensors(rank, world):
    def case(device):
        net = built(device, group=layers_of, fwd=CYCLE, bwd=CYCLE)
        wrapped = DistributedDataParallel(net, process_group=replicas, broadcast_buffers=False)
        x, target = (each.to(device) for each in drawn(rank // 2, (8, 4), (8, 3)))
        return [[layer_parallel.step(wrapped, x, target, squared), results(net, device)] for _ in range(2)]

    module = begin(rank)
    layers_of = [dist.new_group(ranks) for ranks in ([0, 1], [2, 3])][rank // 2]
    replicas = [dist.new_group(ranks) for ranks in ([0, 2], [1, 3])][rank % 2]
    # DistributedDataParallel itself copies from memory that is not pinned.
    same(module, rank, case, orders=("random",), faults=FAULTS[1:])


# ---- saving, scaling, other devices


@on_ranks(2, fresh=True, init=False)
def test_state_moves_between_the_cpu_and_a_device(rank, world):
    module = begin(rank)
    options = StateDictOptions(flatten_optimizer_state_dict=True)

    def case(device):
        net = built(CPU, fwd=CYCLE, bwd=CYCLE)
        optimizer = torch.optim.Adam(net.parameters(), lr=0.1)
        x, target = drawn(1, (8, 4), (8, 3))
        net.step(x, target, squared)
        optimizer.step()
        weights, moments = (copy.deepcopy(each) for each in get_state_dict(net, optimizer, options=options))
        other = LayerParallel(layers(), fwd=CYCLE, bwd=CYCLE).to(device)
        resumed = torch.optim.Adam(other.parameters(), lr=0.1)
        set_state_dict(other, resumed, model_state_dict=weights, optim_state_dict=moments, options=options)
        other.solver.load_state_dict(net.solver.state_dict())
        resumed.zero_grad()
        loss = other.step(x.to(device), target.to(device), squared)
        resumed.step()
        found = [loss, results(other, device), detached(other)]
        # The same net goes on with the CPU.
        other.cpu()
        return [*found, other.step(x, target, squared), results(other, CPU)]

    same(module, rank, case, orders=("random",))


@on_ranks(2, fresh=True, init=False)
def test_layers_that_come_from_another_rank_are_on_the_device_of_this_rank(rank, world):
    begin(rank)
    # Each rank uses a device of its own, as the ranks of a host do.
    device = torch.device("standin", rank)
    torch.accelerator.set_device_index(rank)
    net = built(device, mode="exact-wave")
    x, target = (each.to(device) for each in drawn(1, (8, 4), (8, 3)))
    optimizer = torch.optim.Adam(net.parameters(), lr=0.1)
    loss = net.step(x, target, squared)
    optimizer.step()
    y = net.eval()(x)
    whole = net.to_serial()
    assert {tensor.device for tensor in whole.state_dict().values()} == {device}
    assert not net.is_last or torch.equal(whole(x), y)
    net.train()
    deeper, optimizer = refined(net, 2, optimizer, placement=(4, 14))
    assert {tensor.device for tensor in deeper.state_dict().values()} == {device}
    state = [each for of_parameter in optimizer.state.values() for each in of_parameter.values()]
    # Adam counts its steps on the CPU.
    assert {tensor.device for tensor in state if tensor.dim()} == {device}
    assert math.isfinite(loss) and math.isfinite(deeper.step(x, target, squared))
    optimizer.step()


@on_ranks(2, fresh=True, init=False)
def test_scaled_gradients_have_the_bits_of_cpu_tensors(rank, world):
    def case(device, *scale_on):
        net = built(device, mode="exact-wave")
        scaler = layer_parallel.GradScaler(net, *scale_on, init_scale=64.0)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        found = []
        for number, bad in enumerate((0.0, math.inf, 0.0)):
            x, target = (each.to(device) for each in drawn(number, (8, 4), (8, 3)))
            optimizer.zero_grad()
            net.step(x, target + bad, squared, loss_scale=scaler.get_scale())
            scaler.step(optimizer)
            scaler.update()
            found.append([scaler.get_scale(), detached(net)])
        return found, layer_parallel.clip_grad_norm_(net, 0.01)

    module = begin(rank)
    same(module, rank, lambda device: case(device, device.type), orders=("late",))
    # The scale is on the CPU unless the caller says otherwise; torch would read results of the device too early.
    # torch itself copies the scale to the device from memory that is not pinned.
    same(module, rank, case, orders=("late", "random"), faults=FAULTS[1:])


@on_ranks(2, fresh=True, init=False)
def test_side_inputs_on_the_cpu_get_gradients_there(rank, world):
    def case(device):
        with device:
            net = LayerParallel([ode(lambda number: Shifted()) for _ in range(4)], seed=5, mode="exact-wave")
        x, scale, shift = drawn(1, (8, WIDTH), (WIDTH,), (8, WIDTH))
        side = {"scale": scale.requires_grad_(), "shift": shift.requires_grad_()}
        net(x.to(device), side).sum().backward()
        assert all(each.grad is None or each.grad.device == CPU for each in side.values())
        return [each.grad for each in side.values()]

    same(begin(rank), rank, case)


@on_ranks(2, fresh=True, init=False)
def test_a_net_that_moves_to_a_device_between_batches_has_the_bits_of_cpu_tensors(rank, world):
    def case(device):
        net = built(CPU, fwd=CYCLE, bwd=CYCLE)
        x, target = drawn(1, (8, 4), (8, 3))
        losses = [net.step(x, target, squared)]
        net.to(device)
        losses.append(net.step(x.to(device), target.to(device), squared))
        return losses, detached(net)

    same(begin(rank), rank, case)


@on_ranks(2, fresh=True, init=False)
def test_a_rank_that_cannot_use_the_device_of_the_input_leaves_no_other_rank_waiting(rank, world, monkeypatch):
    begin(rank)

    def refuse(device_type, wire):
        raise RuntimeError("no memory for a context")

    monkeypatch.setattr("torch_accl.layer_parallel._solve.opening._current_of", refuse)
    # The layers of the second rank have no parameters, so nothing shows their device.
    made = [plain(lambda number: nn.Linear(4, 4)), plain(lambda number: nn.Tanh())]
    with torch.device("standin"):
        net = LayerParallel(made, seed=5, mode="exact-wave")
    x, target = (each.to("standin") for each in drawn(1, (8, 4), (8, 4)))
    with pytest.raises(
        LayerParallelError, match="rank 1.*no memory for a context.*give each rank of the layers a device"
    ):
        net.step(x, target, squared)


@on_ranks(2, fresh=True, init=False)
def test_ranks_on_a_device_and_on_the_cpu_share_a_net(rank, world):
    def case(device):
        own = device if rank == 1 else CPU
        return trained(built(own, fwd=CYCLE, bwd=CYCLE), own)

    same(begin(rank), rank, case)


@on_ranks(2, fresh=True, init=False)
def test_ranks_whose_states_go_over_different_backends_are_refused(rank, world):
    begin(rank, "cpu:gloo,standin:accl")
    device = torch.device("standin:0" if rank else "cpu")
    net = built(device, mode="exact-wave")
    x, target = (each.to(device) for each in drawn(1, (8, 4), (8, 3)))
    with pytest.raises(
        ValueError, match=r"states on cpu and on standin:0, which different backends .*cpu:gloo,standin:accl"
    ):
        net.step(x, target, squared)
    net.to("standin")
    net.step(x.to("standin"), target.to("standin"), squared)


@on_ranks(2, fresh=True, init=False)
@pytest.mark.parametrize("backend", ["cpu:accl", "cpu:gloo,standin:gloo"])
def test_a_device_whose_tensors_no_backend_sends_is_refused_on_all_ranks(rank, world, backend):
    begin(rank, backend)
    net = built(torch.device("standin:0"), mode="exact-wave")
    x, target = (each.to("standin") for each in drawn(1, (8, 4), (8, 3)))
    with pytest.raises(
        LayerParallelError, match=r"states are on standin:0, but the group .* has no backend that sends"
    ):
        net.step(x, target, squared)
    made = torchbraid.LayerParallel(MPI.COMM_WORLD, Layer, 4, 1.0)
    with pytest.raises(ValueError, match="has no backend for that device"):
        made.to("standin")
    with pytest.warns(UserWarning, match="user_mpi_buf=True has no effect") if rank == 0 else contextlib.nullcontext():
        torchbraid.LayerParallel(MPI.COMM_WORLD, Layer, 4, 1.0, user_mpi_buf=True)


@on_ranks(2, fresh=True, init=False)
def test_ranks_with_and_without_autocast_of_their_device_are_refused(rank, world):
    begin(rank)
    net = LayerParallel([ode(lambda number: nn.Linear(4, 4)) for _ in range(4)], mode="exact-wave").to("standin")
    x, target = (each.to("standin") for each in drawn(1, (8, 4), (8, 4)))
    with (
        torch.autocast("standin", torch.bfloat16, enabled=rank == 1),
        pytest.raises(ValueError, match=r"differ in `autocast of others off` and `autocast of standin torch.bfloat16`"),
    ):
        net.step(x, target, squared)
    net.step(x, target, squared)


@on_ranks(2, fresh=True, init=False)
def test_a_pipeline_over_a_backend_that_orders_messages_in_one_stream_is_refused(rank, world, monkeypatch):
    begin(rank)
    net = built(torch.device("standin"), mode="exact-pipeline", micro_batches=2)
    x, target = (each.to("standin") for each in drawn(1, (8, 4), (8, 3)))
    monkeypatch.setattr(Wire, "backends", "cpu:accl,standin:nccl")
    with pytest.raises(LayerParallelError, match=r"exact-pipeline over the group cpu:accl,standin:nccl"):
        net.step(x, target, squared)
    net.mode = "auto"
    net.step(x, target, squared)
    assert "exact-pipeline" not in net.choice.seconds


@on_ranks(2, fresh=True, init=False)
def test_an_error_of_a_layer_on_a_device_is_raised_on_all_ranks(rank, world):
    module = begin(rank)
    net = built(torch.device("standin"), fwd=CYCLE, bwd=CYCLE)
    x, target = (each.to("standin") for each in drawn(1, (8, 4), (8, 3)))
    for order in standin.ORDERS:
        module.set_order(order, rank + 1)
        with pytest.raises(LayerParallelError, match=r"layer 0 .*mat1 and mat2|layer 0 .*size"):
            net.step(x[:, :2], target, squared)
        # An input on the CPU with layers on the device.
        with pytest.raises(LayerParallelError, match="rank 0 of the layers"):
            net.step(x.cpu(), target, squared)
        assert math.isfinite(net.step(x, target, squared))


class Failing(Step):
    """A layer whose backward pass fails once."""

    fails = False

    def forward(self, x):
        made = super().forward(x)
        if made.requires_grad:
            made.register_hook(self.fail)
        return made

    @classmethod
    def fail(cls, gradient):
        if cls.fails:
            cls.fails = False
            raise ValueError("no gradient")
        return gradient


@on_ranks(2, fresh=True, init=False)
def test_an_error_in_a_backward_pass_on_a_device_is_raised_on_all_ranks(rank, world):
    begin(rank)
    for failing in range(world):
        net = LayerParallel([ode(lambda number: Failing()) for _ in range(8)], fwd=CYCLE, bwd=CYCLE).to("standin")
        x = drawn(1, (8, WIDTH))[0].to("standin")
        for fails in (True, False):
            Failing.fails = fails and rank == failing
            y = net(x)
            # On the last rank, torch's thread of the device runs it.
            caught = pytest.raises(LayerParallelError, match=rf"rank {failing} .*ValueError: no gradient")
            with caught if fails else contextlib.nullcontext():
                (y.square().sum() if net.is_last else y).backward()
        assert all(parameter.grad is not None for parameter in net.parameters())


@on_ranks(2, fresh=True, init=False)
def test_a_batch_in_a_stream_of_its_own_has_the_bits_of_cpu_tensors(rank, world):
    module = begin(rank)
    streams = {}

    def case(device):
        if device == CPU:
            return trained(built(device, fwd=CYCLE, bwd=CYCLE), device)
        stream = streams.setdefault(0, torch.Stream(device))
        with stream:
            module.compute(50)
            found = trained(built(device, fwd=CYCLE, bwd=CYCLE), device)
        stream.synchronize()
        return found

    same(module, rank, case)


@on_ranks(2, fresh=True, init=False)
def test_a_step_leaves_nothing_on_a_device(rank, world):
    module = begin(rank)
    net = built(torch.device("standin"), fwd=CYCLE, bwd=CYCLE)
    x, target = (each.to("standin") for each in drawn(1, (8, 4), (8, 3)))

    def run():
        net.zero_grad()
        net.step(x, target, squared)
        net.zero_grad()

    run()
    for order in standin.ORDERS:
        module.set_order(order, rank + 1)
        with standin.nothing_is_lost(module):
            run()


# ---- the facade for torchbraid


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.dropout = torchbraid.LPDropout(0.25)

    def forward(self, x):
        return torch.tanh(self.dropout(self.linear(x)))


@on_ranks(1, 2, 3, fresh=True, init=False)
def test_torchbraids_net_sends_from_a_device(rank, world, recwarn):
    def case(device):
        torch.manual_seed(3)
        net = torchbraid.LayerParallel(
            MPI.COMM_WORLD, Layer, 8, 1.0, max_fwd_levels=2, max_bwd_levels=2, max_iters=2, user_mpi_buf=True
        ).to(device)
        compose = net.comp_op()
        torch.manual_seed(4)
        head, tail = compose(nn.Linear, 4, WIDTH), compose(nn.Linear, WIDTH, 3)
        if rank == 0:
            head, tail = head.to(device), tail.to(device)
        x, target = (each.to(device) for each in drawn(1, (8, 4), (8, 3)))
        found = []
        for _ in range(2):
            net.zero_grad()
            y = net(compose(head, x))
            loss = compose(squared, compose(tail, y), target)
            assert y.device == loss.device == device
            loss.backward()
            gradients = {name: parameter.grad for name, parameter in net.named_parameters()}
            assert all(gradient.device == device for gradient in gradients.values())
            found.append([y, loss, gradients, head.weight.grad if rank == 0 else None])
        return [*found, net.getFinalOnRoot(y), net.copyVectorFromRoot(x)]

    same(begin(rank), rank, case)
    assert not [each for each in recwarn if "user_mpi_buf" in str(each.message)]


@on_ranks(2, fresh=True, init=False)
def test_torchbraids_recurrent_net_runs_on_a_device(rank, world):
    class Cell(nn.Module):
        def __init__(self):
            super().__init__()
            self.lin_x, self.lin_h = nn.Linear(3, 5), nn.Linear(5, 5)

        def forward(self, level, tstart, tstop, x, h_prev):
            step = tstop - tstart
            return (h_prev[0] + step * torch.tanh(self.lin_x(x) + self.lin_h(h_prev[0])),)

    def case(device):
        torch.manual_seed(3)
        net = torchbraid.GRU_Parallel(
            MPI.COMM_WORLD, Cell(), 4, 5, 1, 1.0, max_fwd_levels=2, max_bwd_levels=2, max_iters=2
        )
        net = net.to(device)
        whole, target = drawn(1, (4, 8, 3), (4, 5))
        state = net(whole[:, 4 * rank : 4 * rank + 4].to(device), torch.zeros(1, 4, 5, device=device))
        loss = squared(state[-1] if isinstance(state, tuple) else state, target.to(device))
        net.comp_op()(lambda: loss).backward() if rank == 0 else loss.backward()
        return [state, loss, {name: parameter.grad for name, parameter in net.named_parameters()}]

    same(begin(rank), rank, case)


@on_ranks(3, fresh=True, init=False)
def test_buffers_of_messages_and_collectives_may_be_on_a_device(rank, world):
    comm = MPI.COMM_WORLD
    right, left = (rank + 1) % world, (rank - 1) % world

    def case(device):
        def whole(size, seed=1):
            return drawn(seed + rank, (size,))[0].to(device)

        def room(size):
            return torch.zeros(size, device=device)

        found = {}
        got = room(5)
        request = comm.Irecv(got, left, tag=3)
        large = whole(100_000, 5)
        other = comm.Isend(large, right, tag=4)
        comm.Send(whole(5), right, tag=3)
        large.zero_()
        request.Wait()
        found["message"] = got
        got = room(100_000)
        comm.Recv([got, MPI.FLOAT], left, tag=4)
        other.Wait()
        found["large message"] = got
        strided = room((4, 3)).t()
        comm.Sendrecv(whole(12).view(4, 3).t(), right, 0, strided, left, 0)
        found["strided"] = strided
        for name in ("Bcast", "Allreduce", "Reduce", "Allgather", "Gather", "Scatter", "Alltoall", "Alltoallv"):
            given, got = whole(6), room(6 if name not in ("Allgather", "Gather") else 18)
            if name == "Bcast":
                comm.Bcast(given, 1)
                got = given
            elif name in ("Reduce", "Gather"):
                getattr(comm, name)(given, got if rank == 0 else None, root=0)
            elif name == "Scatter":
                comm.Scatter(whole(18) if rank == 1 else None, got, root=1)
            elif name == "Alltoallv":
                comm.Alltoallv([given, [2, 2, 2]], [got, [2, 2, 2]])
            else:
                getattr(comm, name)(given, got)
            found[name] = got
        # A rank's two buffers may be on two devices.
        for name, size in (("Alltoall", 6), ("Allgather", 18), ("Allreduce", 6)):
            got = room(size)
            getattr(comm, name)(whole(6).cpu(), got)
            found[f"{name} from the host"] = got
        got = room(2)
        comm.Scatter(whole(6).cpu() if rank == 0 else None, got, root=0)
        found["Scatter from the host"] = got
        found["object"] = comm.allgather({"x": whole(2).cpu()})
        return found

    same(begin(rank), rank, case)


@on_ranks(2, fresh=True, init=False)
def test_messages_of_a_group_without_the_cpu_are_received(rank, world):
    begin(rank, "standin:accl")
    comm = MPI.COMM_WORLD
    got = torch.zeros(3, device="standin")
    comm.Isend(torch.full((3,), 1.0 + rank, device="standin"), 1 - rank)
    comm.Recv(got, 1 - rank)
    assert got.cpu().tolist() == [2.0 - rank] * 3
    comm.send({"rank": rank}, 1 - rank)
    assert comm.recv(source=MPI.ANY_SOURCE) == {"rank": 1 - rank}
    linear = nn.Linear(2, 2).to("standin")
    linear.weight.grad = torch.full((2, 2), float(rank), device="standin")
    torchbraid.utils.average_gradients(linear, comm)
    assert linear.weight.grad.cpu().tolist() == [[0.5, 0.5]] * 2 and linear.bias.grad is None


@on_ranks(2, fresh=True, init=False)
def test_torchbraids_mgopt_runs_on_a_device(rank, world):
    class Whole(nn.Module):
        def __init__(self, global_steps):
            super().__init__()
            self.parallel_nn = torchbraid.LayerParallel(MPI.COMM_WORLD, Layer, global_steps, 1.0, max_iters=1)
            self.compose = compose = self.parallel_nn.comp_op()
            self.open_nn, self.close_nn = compose(nn.Linear, 4, WIDTH), compose(nn.Linear, WIDTH, 3)

        def forward(self, x):
            return self.compose(self.close_nn, self.parallel_nn(self.compose(self.open_nn, x)))

    def case(device):
        solver = mgopt.mgopt_solver(device)
        data = [(drawn(number, (8, 4))[0], torch.arange(8) % 3) for number in range(2)]
        networks = [("Factory", {"global_steps": count}) for count in (4, 2)]
        options = dict(optims=("pytorch_sgd", {"lr": 0.1, "momentum": 0.9}), seed=7, mgopt_printlevel=0)
        solver.initialize_with_nested_iteration(
            lambda level, **arguments: Whole(**arguments), (2, 4), data, data, networks, 1, **options
        )
        losses = solver.mgopt_solve(data, data, epochs=1, mgopt_printlevel=0)
        model = solver.levels[0].model
        assert all(parameter.device == device for parameter in model.parameters())
        return losses, {name: value.clone() for name, value in model.state_dict().items()}

    same(begin(rank), rank, case, orders=("random",))


@on_ranks(1, fresh=True, init=False)
def test_draws_of_a_batch_of_mgopt_are_repeated_on_a_device(rank):
    begin(rank)
    for device in ("cpu", "standin", "standin:1"):
        draws = Draws(torch.device(device))
        first = [torch.rand(3), torch.rand(3, device=device).cpu()]
        draws.again()
        assert all(
            torch.equal(a, b) for a, b in zip(first, [torch.rand(3), torch.rand(3, device=device).cpu()], strict=True)
        )


# ---- the stand-in's random numbers, on which this file relies


@on_ranks(1, fresh=True, init=False)
def test_numbers_of_the_stand_in_are_its_own_and_the_cpus(rank):
    begin(rank)
    found = []
    for device in ("cpu", "standin:1"):
        torch.manual_seed(9)
        generator = torch.Generator(device).manual_seed(2)
        x = torch.rand(100, device=device)
        normal = torch.randn(7, generator=generator, device=device)
        found.append([x, normal, torch.native_dropout(x, 0.5, True)[1], torch.empty(5, device=device).bernoulli_(0.5)])
    assert all(torch.equal(a, b.cpu()) for a, b in zip(*found, strict=True))
    before = torch.get_rng_state()
    torch.rand(3, device="standin")
    torch.native_dropout(x, 0.5, True)
    assert torch.equal(torch.get_rng_state(), before)
