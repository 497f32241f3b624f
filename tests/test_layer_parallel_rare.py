"""Batches that few programs run: interrupts, sparse gradients, audits outside of training or autocast, casting wrappers,
and arguments of a wrong type. Each test is named for the symptom that a program once saw."""

import gc
import warnings
import weakref

import pytest
import torch
from support import on_ranks
from support.nets import alone, drawn, gradients_of, squared
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch_accl import layer_parallel
from torch_accl.layer_parallel import (
    Audits,
    Cycle,
    LayerParallel,
    LayerParallelError,
    RecurrentParallel,
    Stop,
    clip_grad_norm_,
    coarsened,
    ode,
    plain,
    refined,
)
from torch_accl.layer_parallel._solve import batch as batches

WIDTH = 6


class Step(nn.Module):
    """A layer that raises what `fails` contains."""

    fails = None

    def __init__(self, number=0):
        super().__init__()
        torch.manual_seed(number)
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        if Step.fails is not None:
            raise Step.fails
        return torch.tanh(self.linear(x))


class Layer(Step):
    """The same as a plain layer."""


class Twice(nn.Module):
    """Two names for one parameter."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(4)
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.second.weight = self.first.weight

    def forward(self, x):
        return torch.tanh(self.second(self.first(x)))


class Words(nn.Module):
    """The last layer of a language model."""

    def __init__(self, weight):
        super().__init__()
        self.weight = weight

    def forward(self, y):
        return y @ self.weight.T


def batch(rows=4):
    return drawn(5, (rows, WIDTH), (rows, WIDTH))


def net(first=(), **settings):
    return LayerParallel([*first, *(ode(Step(number)) for number in range(8))], **settings)


INEXACT = {"fwd": Cycle(factor=2), "bwd": Cycle(factor=2, iterations=1)}


@on_ranks(1, 2)
@pytest.mark.parametrize("change", [refined, coarsened])
def test_a_deeper_net_keeps_the_loss_of_a_sum_when_an_audit_changes_the_mode(rank, world, change):
    settings = INEXACT | {"audit": Audits(every=1, limit=0.0, on_excess="exact")}
    made = change(net(**settings), 1)
    x, target = batch()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        made.step(x, target, lambda y, t: (y - t).square().sum())
    assert made.mode == "exact-wave", "the loss may be no mean over micro-batches"


@on_ranks(1, 2)
@pytest.mark.parametrize("first", [(), (plain(Layer(40)),)], ids=["steps", "plain"])
def test_an_audit_outside_of_autocast_finds_no_error_in_an_exact_solve(rank, world, first):
    one = Cycle(levels=1)
    made = net(first, fwd=one, bwd=one, audit=Audits(every=1))
    x, target = batch()
    with torch.autocast("cpu", torch.bfloat16):
        y = made(x if made.is_first else None)
    (squared(y.float(), target) if made.is_last else y).backward()
    assert made.audits[-1].gradient_error == 0


@on_ranks(2)
def test_mixed_precision_of_a_wrapper_casts_neither_target_nor_loss_function(rank, world):
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("dp", "lp"))
    made = net((plain(Layer(40)),), mesh=mesh["lp"], mode="exact-wave")
    fully_shard(made, mesh=mesh["dp"], mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))
    x = batch()[0]
    target = torch.full((4, WIDTH), 1000.3)
    seen = []

    def loss(y, t):
        seen.append((y.dtype, t.dtype, float(t[0, 0])))
        return (y.float() - t).square().mean()

    layer_parallel.step(made, x, target, loss)
    assert seen == [(torch.bfloat16, torch.float32, float(target[0, 0]))]


@on_ranks(2)
@pytest.mark.parametrize("side", [{1: 2.0, "a": 1.0}, {1: 2.0}, [3.0]])
def test_side_inputs_with_other_keys_than_names_leave_no_rank_waiting(rank, world, side):
    made = net(mode="exact-wave")
    x, target = batch()
    for _ in range(2):
        with pytest.raises(LayerParallelError, match="side inputs are .* give a dict from argument names"):
            made.step(x, target, squared, side=side if rank == 0 else None)
    assert torch.isfinite(made.step(x, target, squared))


class Cell(nn.Module):
    """A recurrent cell whose preparation may be interrupted."""

    is_interrupted = False

    def __init__(self):
        super().__init__()
        torch.manual_seed(2)
        self.input, self.state = nn.Linear(3, WIDTH), nn.Linear(WIDTH, WIDTH)

    def initial(self, rows, dtype, device):
        return torch.zeros(rows, WIDTH, dtype=dtype)

    def prepare(self, x):
        if Cell.is_interrupted:
            raise KeyboardInterrupt
        return self.input(x)

    def forward(self, x, state):
        return torch.tanh(x + self.state(state))

    def output(self, state):
        return state


@on_ranks(2)
def test_an_interrupt_before_the_passes_is_raised_on_all_ranks(rank, world):
    recurrent = RecurrentParallel(Cell(), mode="exact-wave")
    x, target = drawn(1, (4, 5, 3), (4, WIDTH))
    Cell.is_interrupted = rank == 1
    with pytest.raises(KeyboardInterrupt if rank == 1 else LayerParallelError):
        recurrent.step(x, target, squared)
    Cell.is_interrupted = False
    assert torch.isfinite(recurrent.step(x, target, squared))


@on_ranks(2)
def test_an_interrupt_in_the_first_batch_of_a_plain_layer_is_raised_on_all_ranks(rank, world):
    made = net((plain(Layer(40)),), mode="exact-wave")
    x, target = batch()
    Step.fails = KeyboardInterrupt() if rank == 0 else None
    with pytest.raises(KeyboardInterrupt if rank == 0 else LayerParallelError):
        made.step(x, target, squared)
    Step.fails = None
    assert torch.isfinite(made.step(x, target, squared))


@on_ranks(2)
def test_an_interrupt_of_one_replica_is_an_error_in_the_other(rank, world):
    made = net(group="alone", mode="exact-wave")
    wrapped = DistributedDataParallel(made)
    x, target = batch()
    layer_parallel.step(wrapped, x, target, squared)
    Step.fails = KeyboardInterrupt() if rank == 0 else None
    with pytest.raises(KeyboardInterrupt if rank == 0 else LayerParallelError):
        layer_parallel.step(wrapped, x, target, squared)
    Step.fails = None
    made.zero_grad()
    layer_parallel.step(wrapped, x, target, squared)
    both = made.wire.gathered(0)
    assert len(both) == 1 and all(gradient is not None for gradient in gradients_of(made).values())


@on_ranks(1, 2)
def test_an_audit_reads_sparse_gradients(rank, world):
    torch.manual_seed(7)
    words = nn.Embedding(10, WIDTH, sparse=True)
    made = net((plain(words),), **INEXACT, audit=Audits(every=1))
    x, target = torch.tensor([1, 3, 3, 9]), batch()[1]
    made.step(x, target, squared)
    assert 0 < made.audits[-1].gradient_error < 1
    if made.is_first:
        assert made.layers["0"].weight.grad.is_sparse


@on_ranks(1, 2)
def test_sparse_gradients_of_tied_parameters_are_added(rank, world):
    torch.manual_seed(7)
    x, target = torch.tensor([1, 3, 3, 9]), torch.tensor([0, 1, 2, 3])

    words = nn.Embedding(10, WIDTH, sparse=True)
    blocks = [plain(words), *(ode(Step(number)) for number in range(8)), plain(Words(words.weight))]
    made = LayerParallel(blocks, mode="exact-wave")
    whole = made.to_serial()
    made.step(x, target, nn.functional.cross_entropy)
    nn.functional.cross_entropy(whole(x), target).backward()
    right = whole.layers[0].weight.grad.to_dense()
    for name, gradient in gradients_of(made).items():
        if name.endswith(".weight") and "linear" not in name:
            torch.testing.assert_close(gradient.to_dense(), right)


@on_ranks(1, 2)
def test_a_module_with_two_names_for_a_parameter_stays_tied_in_the_serial_net(rank, world):
    shared = Twice()
    made = LayerParallel([ode(shared) for _ in range(4)], mode="exact-wave")
    whole = made.to_serial()
    assert len(list(whole.parameters())) == 3
    x, target = batch()
    made.step(x, target, squared)
    squared(whole(x), target).backward()
    for name, gradient in gradients_of(made).items():
        torch.testing.assert_close(gradient, whole.get_parameter(name).grad)


@on_ranks(1, 2)
@pytest.mark.parametrize(
    "tie", [("layers.7.linear.weight", "layers.5.linear.weight"), ("layers.5.linear.weight", "layers.7.linear.weight")]
)
def test_norms_count_a_tied_parameter_once_whatever_its_name(rank, world, tie):
    def made(group):
        shared = Step(0)
        modules = [shared if layer in (0, 5) else Step(layer) for layer in range(8)]
        return LayerParallel([ode(module) for module in modules], group=group, mode="exact-wave", tie=[tie])

    x, target = batch()
    norms = []
    for group in (alone(), None):
        each = made(group)
        each.step(x, target, squared)
        norms.append(clip_grad_norm_(each, 1e9))
    assert torch.equal(*norms)
    whole = made(alone()).to_serial()
    squared(whole(x), target).backward()
    torch.testing.assert_close(norms[0], torch.nn.utils.get_total_norm([p.grad for p in whole.parameters()]))


@on_ranks(2)
def test_evaluation_with_different_training_modes_is_refused_on_all_ranks(rank, world):
    made = net(**INEXACT)
    made.mode = "converged" if rank == 0 else "exact-wave"
    made.eval()
    x, target = batch()
    with pytest.raises(ValueError, match="differ in `mode converged` and `mode exact-wave`"):
        made.evaluate(x, target, squared)
    made.mode = "inexact"
    assert made.evaluate(x, target, squared).loss > 0


@on_ranks(1, 2)
def test_a_batch_in_evaluation_is_not_audited(rank, world):
    made = net(**INEXACT, audit=Audits(every=1, limit=0.0, on_excess="exact"))
    made.evaluation = "inexact"
    made.eval()
    x, target = batch()
    made.step(x, target, squared)
    assert not made.audits and made.mode == "inexact"


@on_ranks(1, 2)
@pytest.mark.parametrize("way", ["step", "forward", "replicas"])
def test_a_failed_batch_is_freed_without_garbage_collection(rank, world, way):
    alive = []
    made_batch = batches.Batch.__init__

    def remembered(self, *values, **given):
        made_batch(self, *values, **given)
        alive.append(weakref.ref(self))

    batches.Batch.__init__ = remembered
    made = net(group="alone" if way == "replicas" else None, mode="exact-wave")
    wrapped = DistributedDataParallel(made) if way == "replicas" else made
    x, target = batch()
    gc.collect()
    gc.disable()
    try:
        Step.fails = ValueError("boom") if rank == 0 else None
        for _ in range(3):
            with pytest.raises(LayerParallelError) as raised:
                made(x) if way == "forward" else layer_parallel.step(wrapped, x, target, squared)
            del raised
        Step.fails = None
        assert len(alive) == 3 and not any(each() is not None for each in alive)
    finally:
        gc.enable()
        batches.Batch.__init__ = made_batch


@on_ranks(2)
def test_an_input_on_the_meta_device_leaves_no_rank_waiting(rank, world):
    made = net(mode="exact-wave")
    x, target = batch()
    with pytest.raises(LayerParallelError, match="an input is on the meta device"):
        made.step(x.to("meta") if rank == 0 else None, target, squared)
    assert torch.isfinite(made.step(x, target, squared))


@on_ranks(2)
def test_a_sparse_gradient_of_the_output_leaves_no_rank_waiting(rank, world):
    made = net(mode="exact-wave")
    x, _ = batch()
    y = made(x if made.is_first else None)
    gradient = torch.ones_like(y).to_sparse() if made.is_last else None
    with pytest.raises(LayerParallelError, match="the gradient of a layer-parallel net's output is sparse"):
        y.backward(gradient)
    y = made(x if made.is_first else None)
    y.sum().backward()


@pytest.mark.parametrize(
    "settings, text",
    [
        ({"audit": 10}, r"audit=10: give a Audits, such as Audits\(every=100\)"),
        ({"stop": 1e-3}, r"stop=0.001: give a Stop, such as"),
        ({"fwd": 2}, r"fwd=2: give a Cycle, such as Cycle\(factor=4\)"),
        ({"bwd": None}, r"bwd=None: give a Cycle, such as"),
        ({"spatial": abs}, r"spatial=.*: give a Spatial, such as"),
        ({"guess": 4}, r"guess is int; give a function"),
        ({"group": 5}, r"group=5: give a ProcessGroup, such as"),
        ({"mesh": 5}, r"mesh=5: give a DeviceMesh, such as"),
        ({"checkpoint": "no"}, r"checkpoint='no': give a bool"),
        ({"micro_batches": 2.0}, r"micro_batches=2.0\): give an integer"),
        ({"replica": 1.5}, r"replica=1.5\): give an integer"),
        ({"side_per_sample": "mask"}, r"side_per_sample='mask': give a list of names, such as \['mask'\]"),
    ],
)
def test_arguments_of_a_wrong_type_are_refused_when_the_net_is_built(settings, text):
    with pytest.raises(TypeError, match=text):
        net(**{"group": "alone"} | settings) if "mesh" not in settings else net(**settings)


def test_numbers_that_are_no_integers_are_refused():
    for make in (lambda: Cycle(iterations=1.5), lambda: Audits(every=1.5), lambda: Stop(max_iterations=2.5)):
        with pytest.raises(TypeError, match="give an integer"):
            make()
    made = net(group="alone")
    with pytest.raises(TypeError, match=r"batch=2.5\): give an integer"):
        made.batch = 2.5
    with pytest.raises(TypeError, match="fwd=3: give a Cycle"):
        made.fwd = 3
    with pytest.raises(TypeError, match="guess is int"):
        made.guess = 4
    with pytest.raises(ValueError, match="horizon=nan: give a finite number"):
        net(group="alone", horizon=float("nan"))


@on_ranks(2)
def test_a_cell_that_one_rank_cannot_use_is_an_error_on_all_ranks_in_every_batch(rank, world):
    recurrent = RecurrentParallel(Cell(), mode="exact-wave")
    x, target = drawn(1, (4, 5, 3), (4, WIDTH))
    recurrent.step(x, target, squared)
    cell = recurrent.cell
    if rank == 1:
        recurrent.cell = nn.GRU(3, WIDTH, bidirectional=True)
    for _ in range(2):
        with pytest.raises(LayerParallelError, match=r"rank 1 .* give bidirectional=False"):
            recurrent.step(x, target, squared)
    recurrent.cell = cell
    assert torch.isfinite(recurrent.step(x, target, squared))
