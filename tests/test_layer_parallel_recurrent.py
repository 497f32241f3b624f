"""Recurrent nets whose sequence is distributed over several ranks."""

import copy
import itertools

import pytest
import torch
import torch.distributed as dist
from support import gloo_group, on_ranks
from support.nets import alone, squared
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch_accl import layer_parallel
from torch_accl.layer_parallel import Audits, Cycle, LayerParallelError, RecurrentParallel, Stop

EXACT = ["exact-wave", "exact-pipeline"]
STEPS, ROWS, WIDTH, HIDDEN = 13, 4, 3, 5


def seeded(number, *shape, dtype=torch.float64):
    return torch.randn(shape, generator=torch.Generator().manual_seed(number), dtype=torch.float64).to(dtype)


KINDS = {
    "GRU": lambda: nn.GRU(WIDTH, HIDDEN, 2, batch_first=True),
    "LSTM": lambda: nn.LSTM(WIDTH, HIDDEN, 2, batch_first=True),
    "GRU without bias": lambda: nn.GRU(WIDTH, HIDDEN, bias=False, batch_first=True),
    "GRUCell": lambda: nn.GRUCell(WIDTH, HIDDEN),
    "LSTMCell": lambda: nn.LSTMCell(WIDTH, HIDDEN),
}


def made(kind, dtype=torch.float64):
    torch.manual_seed(3)
    return KINDS[kind]().to(dtype), nn.Linear(HIDDEN, 2).to(dtype)


def run_serially(rnn, x):
    """Returns the outputs of all steps, computed by torch's own code."""
    if isinstance(rnn, nn.RNNBase):
        return rnn(x)[0]
    state, outputs = None, []
    for step in range(x.shape[1]):
        state = rnn(x[:, step], state)
        outputs.append(state[0] if isinstance(state, tuple) else state)
    return torch.stack(outputs, 1)


def lengths(world, steps=STEPS):
    """Returns the number of steps of each rank. The numbers differ, and with three or more ranks the second rank has no
    steps.
    """
    if world == 1:
        return [steps]
    return [4, 0, *([1] * (world - 3)), steps - 4 - (world - 3)] if world > 2 else [4, steps - 4]


def part(x, counts, rank):
    first = sum(counts[:rank])
    return x[:, first : first + counts[rank]].clone()


def gradients_of(module):
    return {name: parameter.grad.clone() for name, parameter in module.named_parameters() if parameter.grad is not None}


@on_ranks(1, 2, 4)
@pytest.mark.parametrize("mode", EXACT)
@pytest.mark.parametrize("kind", list(KINDS))
def test_exact_modes_are_torchs_own_nets(rank, world, mode, kind):
    x, target = seeded(1, ROWS, STEPS, WIDTH), seeded(2, ROWS, 2)
    rnn, tail = made(kind)
    counts = lengths(world)
    mine = part(x, counts, rank).requires_grad_()
    net = RecurrentParallel(copy.deepcopy(rnn), copy.deepcopy(tail), mode=mode, micro_batches=2)
    loss = net.step(mine, target, squared)
    x.requires_grad_()
    wanted = squared(tail(run_serially(rnn, x)[:, -1]), target)
    wanted.backward()
    torch.testing.assert_close(loss, wanted.detach(), rtol=1e-13, atol=0)
    # All ranks have the gradients of the whole sequence. Each rank has the gradients of its own inputs.
    for name, gradient in gradients_of(net.cell).items():
        torch.testing.assert_close(gradient, rnn.get_parameter(name).grad, rtol=1e-12, atol=1e-15)
    torch.testing.assert_close(mine.grad, part(x.grad, counts, rank), rtol=1e-12, atol=1e-15)
    assert (net.tail is None) == (not net.is_last)
    if net.is_last:
        torch.testing.assert_close(net.tail.weight.grad, tail.weight.grad, rtol=1e-12, atol=1e-15)


@on_ranks(1, 3)
@pytest.mark.parametrize("mode", [*EXACT, "inexact", "converged", "exact-forward"])
@pytest.mark.parametrize("kind", ["GRU", "LSTM"])
def test_outputs_of_all_steps_have_their_gradients(rank, world, mode, kind):
    x, target = seeded(1, ROWS, STEPS, WIDTH), seeded(2, ROWS, STEPS, HIDDEN)
    rnn, _ = made(kind)
    counts = lengths(world)
    cycle = Cycle(factor=4, iterations=8)
    net = RecurrentParallel(
        copy.deepcopy(rnn),
        mode=mode,
        micro_batches=2,
        fwd=cycle,
        bwd=cycle,
        stop=Stop(tolerance=1e-13, max_iterations=12),
    )
    mine = part(x, counts, rank).requires_grad_()
    outputs, last = net(mine)
    if net.is_last:
        assert torch.equal(last, outputs[:, -1])
    own = ((outputs - part(target, counts, rank)) ** 2).sum() if counts[rank] else 0 * last
    (own + (last**3).sum() if net.is_last else own + 0 * last).backward()
    x.requires_grad_()
    wanted = run_serially(rnn, x)
    (((wanted - target) ** 2).sum() + (wanted[:, -1] ** 3).sum()).backward()
    if counts[rank]:
        torch.testing.assert_close(outputs, part(wanted, counts, rank), rtol=1e-8, atol=1e-11)
    torch.testing.assert_close(mine.grad, part(x.grad, counts, rank), rtol=1e-7, atol=1e-10)
    for name, gradient in gradients_of(net.cell).items():
        torch.testing.assert_close(gradient, rnn.get_parameter(name).grad, rtol=1e-7, atol=1e-10)


@on_ranks(2, 3)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("levels", [2, 3])
def test_gradients_do_not_depend_on_the_number_of_ranks(rank, world, dtype, levels):
    x, target = seeded(1, ROWS, 32, WIDTH, dtype=dtype), seeded(2, ROWS, 2, dtype=dtype)
    rnn, tail = made("GRU", dtype)
    cycles = dict(fwd=Cycle(levels=levels, factor=4, iterations=2), bwd=Cycle(levels=levels, factor=4, iterations=2))
    one = RecurrentParallel(copy.deepcopy(rnn), copy.deepcopy(tail), group=alone(), **cycles)
    loss = one.step(x, target, squared)
    tolerance = 1e-14 if dtype == torch.float64 else 1e-6
    for group in (None, gloo_group()):
        net = RecurrentParallel(copy.deepcopy(rnn), copy.deepcopy(tail), group=group, **cycles)
        counts = lengths(world, 32)
        assert torch.equal(net.step(part(x, counts, rank), target, squared), loss)
        assert net.norms == one.norms
        whole = torch.cat([gradient.flatten() for gradient in gradients_of(net.cell).values()])
        wanted = torch.cat([gradient.flatten() for gradient in gradients_of(one.cell).values()])
        assert (whole - wanted).norm() <= tolerance * wanted.norm()
        of_all = [torch.empty_like(whole) for _ in range(world)]
        dist.all_gather(of_all, whole)
        assert all(torch.equal(other, whole) for other in of_all)


@on_ranks(1, 2)
@pytest.mark.parametrize("kind", ["GRU", "LSTM"])
def test_coarse_steps_come_near_the_fine_ones(rank, world, kind):
    x, target = seeded(1, ROWS, 64, WIDTH).cumsum(1) / 10, seeded(2, ROWS, 2)
    rnn, tail = made(kind)
    cycle = Cycle(factor=4, iterations=6)
    net = RecurrentParallel(rnn, tail, fwd=cycle, bwd=cycle, audit=Audits(every=1))
    net.step(part(x, [64 // world] * world, rank), target, squared)
    for norms in (net.norms.forward, net.norms.backward):
        found = list(norms.values())
        assert all(after < 0.6 * before for before, after in itertools.pairwise(found)), found
    assert net.audits[-1].gradient_error < 1e-2
    net.mode = "exact-wave"
    assert net.audits[-1].cosine > 0.999


@on_ranks(1, 2)
@pytest.mark.parametrize("kind, layers", [(nn.GRU, 2), (nn.LSTM, 1), (nn.LSTM, 2)])
def test_the_state_before_the_first_step_is_given_as_torch_takes_it(rank, world, kind, layers):
    torch.manual_seed(4)
    rnn = kind(WIDTH, HIDDEN, layers, batch_first=True).double()
    x, target = seeded(1, ROWS, STEPS, WIDTH), seeded(2, ROWS, HIDDEN)
    parts = [seeded(5 + number, layers, ROWS, HIDDEN).requires_grad_() for number in range(1 if kind is nn.GRU else 2)]
    state = parts[0] if kind is nn.GRU else tuple(parts)
    net = RecurrentParallel(copy.deepcopy(rnn), mode="exact-wave")
    own = part(x, lengths(world), rank)
    loss = net.step(own, target, squared, state=state if rank == 0 else None)
    mine = [each.grad for each in parts]
    for each in parts:
        each.grad = None
    wanted = squared(rnn(x, state)[0][:, -1], target)
    wanted.backward()
    torch.testing.assert_close(loss, wanted.detach(), rtol=1e-12, atol=0)
    if rank == 0:
        for found, right in zip(mine, parts):
            torch.testing.assert_close(found, right.grad, rtol=1e-11, atol=1e-15)
    with pytest.raises(LayerParallelError, match=rf"give .* of shape \({layers}, batch, {HIDDEN}\)"):
        net.step(own, target, squared, state=seeded(5, 7, ROWS, HIDDEN))


@on_ranks(1, 2)
def test_the_state_before_the_first_step_has_its_gradient(rank, world):
    x, target = seeded(1, ROWS, STEPS, WIDTH), seeded(2, ROWS, HIDDEN)
    rnn, _ = made("GRUCell")
    state = seeded(5, ROWS, HIDDEN).requires_grad_()
    net = RecurrentParallel(copy.deepcopy(rnn), mode="exact-wave")
    net.step(part(x, lengths(world), rank), target, squared, state=(state,) if rank == 0 else None)
    mine, state = state.grad, state.detach().requires_grad_()
    h = state
    for step in range(STEPS):
        h = rnn(x[:, step], h)
    squared(h, target).backward()
    if rank == 0:
        torch.testing.assert_close(mine, state.grad, rtol=1e-12, atol=1e-15)
    else:
        assert mine is None


@on_ranks(1, 2, 3)
@pytest.mark.parametrize("mode", EXACT)
@pytest.mark.parametrize("kind", list(KINDS))
def test_backpropagation_over_windows_begins_each_with_the_last_state_of_the_one_before(rank, world, mode, kind):
    rnn, tail = made(kind)
    net = RecurrentParallel(copy.deepcopy(rnn), copy.deepcopy(tail), mode=mode, micro_batches=2)
    optimizers = [
        torch.optim.SGD(list(modules), lr=0.1)
        for modules in ({*rnn.parameters(), *tail.parameters()}, net.parameters())
    ]
    with pytest.raises(RuntimeError, match=r"last_state\(\) before the first batch"):
        net.last_state()
    state, last = None, None
    # In some windows the last rank has no steps.
    for window, counts in enumerate([lengths(world), lengths(world)[::-1], [2] + [0] * (world - 1)]):
        x, target = seeded(10 + window, ROWS, sum(counts), WIDTH), seeded(20 + window, ROWS, 2)
        for optimizer in optimizers:
            optimizer.zero_grad()
        if isinstance(rnn, nn.RNNBase):
            outputs, state = rnn(x, state)
        else:
            for step in range(x.shape[1]):
                state = rnn(x[:, step], state)
            outputs = (state[0] if isinstance(state, tuple) else state)[:, None]
        wanted = squared(tail(outputs[:, -1]), target)
        wanted.backward()
        mine = part(x, counts, rank)
        if window == 1:
            loss = net(mine, last)[1]
            loss = squared(loss, target) if net.is_last else loss
            loss.backward()
        else:
            loss = net.step(mine, target, squared, state=last)
        if net.is_last:
            torch.testing.assert_close(loss.detach(), wanted.detach(), rtol=1e-12, atol=0)
        last = net.last_state()
        state = tuple(leaf.detach() for leaf in state) if isinstance(state, tuple) else state.detach()
        # The last state has the form and the values of torch's own, on every rank.
        torch.testing.assert_close(last, state, rtol=1e-12, atol=1e-14)
        for optimizer in optimizers:
            optimizer.step()
    for name, parameter in net.cell.named_parameters():
        torch.testing.assert_close(parameter, rnn.get_parameter(name), rtol=1e-11, atol=1e-13)
    # Evaluation continues from a given state in the same way. `evaluate` does not change the last state.
    net.eval()
    with torch.no_grad():
        net.evaluate(part(x, counts, rank), target, squared)
        torch.testing.assert_close(net.last_state(), state, rtol=1e-12, atol=1e-14)
        net(part(x, counts, rank), last)
        if isinstance(rnn, nn.RNNBase):
            torch.testing.assert_close(net.last_state(), rnn(x, state)[1], rtol=1e-11, atol=1e-13)


@on_ranks(2)
def test_another_length_is_planned_again(rank, world):
    rnn, tail = made("GRU")
    net = RecurrentParallel(copy.deepcopy(rnn), copy.deepcopy(tail)).eval()
    for steps in (16, 9, 16, 8):
        x = seeded(steps, ROWS, steps, WIDTH)
        with torch.no_grad():
            outputs, last = net(part(x, [steps - 3, 3], rank))
            wanted = run_serially(rnn, x)
        torch.testing.assert_close(outputs, part(wanted, [steps - 3, 3], rank), rtol=1e-12, atol=1e-14)
        if net.is_last:
            torch.testing.assert_close(last, tail(wanted[:, -1]), rtol=1e-12, atol=1e-14)


@on_ranks(1, 2)
@pytest.mark.parametrize("mode", ["exact-wave", "inexact"])
def test_batches_of_different_lengths_may_be_under_way_at_once(rank, world, mode):
    rnn, tail = made("LSTM")
    both = [(seeded(steps, ROWS, steps, WIDTH), seeded(1, ROWS, 2)) for steps in (16, 10)]
    gradients = []
    for together in (False, True):
        net = RecurrentParallel(copy.deepcopy(rnn), copy.deepcopy(tail), mode=mode)
        losses = []
        for x, target in both:
            outputs, last = net(part(x, [x.shape[1] - 6 * (world - 1), 6], rank))
            losses.append(
                squared(last, target) + outputs.square().mean() if net.is_last else last + outputs.square().mean()
            )
            if not together:
                losses.pop().backward()
        for loss in losses:
            loss.backward()
        gradients.append(gradients_of(net))
    for name, gradient in gradients[0].items():
        torch.testing.assert_close(gradient, gradients[1][name], rtol=1e-13, atol=1e-16)


@on_ranks(1)
def test_dropout_is_off_in_evaluation(rank, world):
    rnn = nn.GRU(WIDTH, HIDDEN, 2, batch_first=True, dropout=0.5).double()
    net = RecurrentParallel(rnn).eval()
    x = seeded(1, ROWS, STEPS, WIDTH)
    with torch.no_grad():
        torch.testing.assert_close(net(x)[0], rnn(x)[0], rtol=1e-13, atol=1e-15)


@on_ranks(1, 2)
@pytest.mark.parametrize("mode", ["inexact", "converged", "auto"])
def test_a_short_sequence_has_as_many_levels_as_it_can(rank, world, mode):
    rnn, tail = made("GRU")
    cycle = Cycle(levels=3, factor=4, iterations=3)
    net = RecurrentParallel(copy.deepcopy(rnn), copy.deepcopy(tail), mode=mode, fwd=cycle, bwd=cycle)
    for steps in (17, 3, 1):
        x, target = seeded(steps, ROWS, steps, WIDTH), seeded(2, ROWS, 2)
        loss = net.step(part(x, [steps, 0] if steps < 4 else [4, steps - 4], rank) if world > 1 else x, target, squared)
        wanted = squared(tail(run_serially(rnn, x)[:, -1]), target)
        torch.testing.assert_close(loss, wanted.detach(), rtol=1e-2, atol=1e-4)
    assert net.fwd == cycle


@on_ranks(1, 2)
def test_a_cell_or_tail_that_is_put_in_the_place_of_another_is_used(rank, world):
    x, target = seeded(1, ROWS, STEPS, WIDTH), seeded(2, ROWS, 3)
    net = RecurrentParallel(made("GRU")[0], made("GRU")[1], mode="exact-wave")
    net.step(part(x, lengths(world), rank), seeded(2, ROWS, 2), squared)
    rnn, _ = made("LSTM")
    torch.manual_seed(8)
    tail = nn.Linear(HIDDEN, 3).double()
    net.cell = copy.deepcopy(rnn)
    if net.is_last:
        net.tail = copy.deepcopy(tail)
    net.step(part(x, lengths(world), rank), target, squared)
    squared(tail(run_serially(rnn, x)[:, -1]), target).backward()
    for name, gradient in gradients_of(net.cell).items():
        torch.testing.assert_close(gradient, rnn.get_parameter(name).grad, rtol=1e-12, atol=1e-15)
    if net.is_last:
        torch.testing.assert_close(net.tail.weight.grad, tail.weight.grad, rtol=1e-12, atol=1e-15)


class Breaking(nn.Module):
    """A cell that raises at the place named by `where`, on the first rank only."""

    def __init__(self, where, rank):
        super().__init__()
        self.inner = nn.Linear(WIDTH + 2, 2).double()
        self.where = where if rank == 0 else None

    def at(self, place):
        if self.where == place:
            raise RuntimeError(f"no luck in {place}")

    def initial(self, rows, dtype, device):
        self.at("initial")
        return torch.zeros(rows, 2, dtype=dtype, device=device)

    def prepare(self, x):
        self.at("prepare")
        return x

    def output(self, state):
        self.at("output")
        return Raising.apply(state) if self.where == "backward" else state

    def forward(self, x, state):
        self.at("forward")
        return torch.tanh(self.inner(torch.cat([x, state], 1)))


class Raising(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        raise RuntimeError("no luck in backward")


@on_ranks(2, 3)
@pytest.mark.parametrize("where", ["initial", "prepare", "output", "forward", "backward"])
def test_a_cell_that_raises_on_one_rank_is_said_on_all(rank, world, where):
    torch.manual_seed(1)
    net = RecurrentParallel(Breaking(where, rank), mode="exact-wave")
    x = seeded(1, ROWS, 6, WIDTH)
    mine = part(x, [2, 3, 1] if world == 3 else [2, 4], rank)
    with pytest.raises(LayerParallelError, match=f"rank 0 .*no luck in {where}"):
        outputs, last = net(mine)
        (outputs.sum() + last).backward() if not net.is_last else (outputs.sum() + last.sum()).backward()
    net.cell.where = None
    outputs, last = net(mine)
    assert torch.isfinite(outputs).all()


@on_ranks(2)
def test_weights_that_differ_in_order_or_in_what_is_trained_are_found_out(rank, world):
    rnn, tail = made("GRU")
    mine = part(seeded(1, ROWS, STEPS, WIDTH), lengths(world), rank)
    if rank == 1:
        with torch.no_grad():
            rnn.weight_hh_l0.copy_(rnn.weight_hh_l0.flip(0))
    with pytest.raises(ValueError, match="copies of cell.weight_hh_l0 have different values"):
        RecurrentParallel(rnn, tail, mode="exact-wave")
    net = RecurrentParallel(made("GRU")[0], tail, mode="exact-wave")
    net.cell.get_parameter("bias_ih_l0" if rank == 0 else "bias_hh_l0").requires_grad_(False)
    with pytest.raises(ValueError, match="ranks 0 and 1 .*trained"):
        net.step(mine, seeded(2, ROWS, 2), squared)


class Counter(nn.Module):
    """A cell as a user may write it: its state is a dict, its input a tuple, and it has no coarse step."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(4)
        self.inner = nn.Linear(WIDTH + 2, 2).double()

    def initial(self, rows, dtype, device):
        return {"h": torch.zeros(rows, 2, dtype=dtype, device=device), "kept": torch.arange(rows)}

    def output(self, state):
        return state["h"]

    def forward(self, x, state):
        values, gates = x
        h = torch.tanh(self.inner(torch.cat([values, state["h"]], 1))) * gates
        return {"h": h + state["h"] / 2, "kept": state["kept"]}


@on_ranks(1, 2, 3)
@pytest.mark.parametrize("mode", EXACT)
def test_any_module_can_be_a_cell_in_exact_modes(rank, world, mode):
    cell, target = Counter(), seeded(2, ROWS, 2)
    x = (seeded(1, ROWS, STEPS, WIDTH), seeded(3, ROWS, STEPS, 2))
    net = RecurrentParallel(copy.deepcopy(cell), mode=mode, micro_batches=2 if mode == "exact-wave" else 1)
    loss = net.step(tuple(part(leaf, lengths(world), rank) for leaf in x), target, squared)
    state = cell.initial(ROWS, torch.float64, None)
    for step in range(STEPS):
        state = cell(tuple(leaf[:, step] for leaf in x), state)
    wanted = squared(state["h"], target)
    wanted.backward()
    torch.testing.assert_close(loss, wanted.detach(), rtol=1e-13, atol=0)
    torch.testing.assert_close(net.cell.inner.weight.grad, cell.inner.weight.grad, rtol=1e-12, atol=1e-15)
    with pytest.raises(ValueError, match="without `coarse_step`"):
        net.mode = "inexact"
    with pytest.raises(ValueError, match="without `coarse_step`"):
        RecurrentParallel(cell)


@on_ranks(1, 2)
def test_dropout_between_layers_is_the_same_on_any_number_of_ranks_and_in_every_iteration(rank, world):
    torch.manual_seed(3)
    rnn = nn.GRU(WIDTH, HIDDEN, 3, batch_first=True, dropout=0.4).double()
    x, target = seeded(1, ROWS, 16, WIDTH), seeded(2, ROWS, HIDDEN)
    losses = []
    for group, mode in ((alone(), "exact-wave"), (None, "exact-wave"), (None, "inexact")):
        cycle = Cycle(factor=4, iterations=7)
        net = RecurrentParallel(copy.deepcopy(rnn), group=group, mode=mode, fwd=cycle, bwd=cycle, replica=0)
        counts = [16] if net.wire.size == 1 else [8, 8]
        losses.append([float(net.step(part(x, counts, net.wire.rank), target, squared)) for _ in range(2)])
    assert losses[0] == losses[1] and losses[0][0] != losses[0][1]
    assert losses[2] == pytest.approx(losses[0], rel=1e-9)


@on_ranks(2)
def test_gradients_of_the_tail_and_the_cell_are_clipped_together(rank, world):
    x, target = seeded(1, ROWS, STEPS, WIDTH), seeded(2, ROWS, 2)
    rnn, tail = made("LSTM")
    net = RecurrentParallel(copy.deepcopy(rnn), copy.deepcopy(tail), mode="exact-wave")
    net.step(part(x, lengths(world), rank), target, squared)
    norm = layer_parallel.clip_grad_norm_(net, 1e-3)
    squared(tail(run_serially(rnn, x)[:, -1]), target).backward()
    both = [*rnn.parameters(), *tail.parameters()]
    wanted = nn.utils.clip_grad_norm_(both, 1e-3)
    torch.testing.assert_close(norm.double(), wanted.double(), rtol=1e-6, atol=0)
    for name, gradient in gradients_of(net.cell).items():
        torch.testing.assert_close(gradient, rnn.get_parameter(name).grad, rtol=1e-5, atol=1e-12)


@on_ranks(4)
@pytest.mark.parametrize("mode", ["exact-wave", "inexact"])
def test_two_replicas_of_two_ranks_train_like_one(rank, world, mode):
    lp = dist.new_subgroups(group_size=2)[0]
    dp, _ = dist.new_subgroups_by_enumeration([[0, 2], [1, 3]])
    x, target = seeded(1, 2 * ROWS, 16, WIDTH), seeded(2, 2 * ROWS, 2)
    rnn, tail = made("GRU")
    one = RecurrentParallel(copy.deepcopy(rnn), copy.deepcopy(tail), group=alone(), mode=mode)
    one.step(x, target, squared)
    net = RecurrentParallel(copy.deepcopy(rnn), copy.deepcopy(tail), group=lp, mode=mode)
    wrapped = DistributedDataParallel(net, process_group=dp)
    mine = slice(rank // 2 * ROWS, (rank // 2 + 1) * ROWS)
    layer_parallel.step(wrapped, part(x[mine], [8, 8], rank % 2), target[mine], squared)
    for name, gradient in gradients_of(net.cell).items():
        torch.testing.assert_close(gradient, one.cell.get_parameter(name).grad, rtol=1e-10, atol=1e-13)


@on_ranks(2, 3)
def test_what_is_wrong_is_said_on_all_ranks(rank, world):
    x, target = seeded(1, ROWS, STEPS, WIDTH), seeded(2, ROWS, 2)
    rnn, tail = made("GRU")
    mine = part(x, lengths(world), rank)
    net = RecurrentParallel(copy.deepcopy(rnn), copy.deepcopy(tail))
    with pytest.raises(LayerParallelError, match="rank 1 .*there is no input; give every rank its part"):
        net.step(None if rank == 1 else mine, target, squared)
    with pytest.raises(ValueError, match=r"parts of the sequence have \[2, 4"):
        net.step(mine[:2] if rank == 0 else mine, target, squared)
    with pytest.raises(ValueError, match="the sequence has no steps"):
        net.step(mine[:, :0], target, squared)
    expected = RecurrentParallel(copy.deepcopy(rnn), copy.deepcopy(tail), group=alone()).step(x, target, squared)
    assert torch.equal(net.step(mine, target, squared), expected)
    # A cell that is assigned later is compared as well.
    net.cell = copy.deepcopy(rnn)
    if rank == 1:
        with torch.no_grad():
            net.cell.weight_hh_l0[0, 0] += 1
    with pytest.raises(ValueError, match="start of batch 1: copies of cell.weight_hh_l0 have different values"):
        net.step(mine, target, squared)


@on_ranks(1)
def test_cells_that_are_none_are_refused(rank, world):
    with pytest.raises(ValueError, match="one direction"):
        RecurrentParallel(nn.GRU(3, 4, bidirectional=True, batch_first=True))
    with pytest.raises(ValueError, match="batch_first=True"):
        RecurrentParallel(nn.LSTM(3, 4))
    with pytest.raises(ValueError, match="proj_size"):
        RecurrentParallel(nn.LSTM(3, 4, proj_size=2, batch_first=True))
    with pytest.raises(TypeError, match="has no method `initial`"):
        RecurrentParallel(nn.RNN(3, 4, batch_first=True))


class WithoutFloats(torch.nn.Module):
    """A cell whose input is whole numbers, or whose numbers are complex."""

    def __init__(self, dtype):
        super().__init__()
        draw = torch.Generator().manual_seed(1)
        self.table = torch.nn.Parameter(torch.rand(5, 3, generator=draw, dtype=torch.float64).to(dtype))
        self.weight = torch.nn.Parameter(torch.rand(3, 3, generator=draw, dtype=torch.float64).to(dtype) / 4)

    def initial(self, rows, dtype, device):
        return torch.zeros(rows, 3, dtype=dtype, device=device)

    def output(self, state):
        return state

    def forward(self, x, state):
        return state @ self.weight + (x[:, :3] if x.is_complex() else self.table[x])


@on_ranks(2)
@pytest.mark.parametrize("dtype", [torch.float32, torch.complex64], ids=str)
def test_the_first_state_has_the_type_of_the_cells_numbers_whatever_the_default_is(rank, world, dtype):
    cell = WithoutFloats(dtype)
    draws = [torch.Generator().manual_seed(number) for number in range(world)]
    inputs = [torch.randint(5, (4, 3), generator=draw) for draw in draws]
    if dtype.is_complex:
        inputs = [torch.rand(4, 3, 3, generator=draw, dtype=dtype) for draw in draws]
    state = torch.zeros(4, 3, dtype=dtype)
    for x in torch.cat(inputs, 1).unbind(1):
        state = cell(x, state)
    net = RecurrentParallel(cell, mode="exact-wave")
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        outputs, _ = net(inputs[rank])
    finally:
        torch.set_default_dtype(before)
    assert outputs.dtype == dtype
    assert rank != world - 1 or torch.allclose(outputs[:, -1], state)


@on_ranks(2)
def test_a_rank_without_steps_has_outputs_of_the_type_of_the_others(rank, world):
    net = RecurrentParallel(nn.GRU(2, 3, batch_first=True), mode="exact-wave")
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        outputs, _ = net(torch.ones(4, 3 if rank == 0 else 0, 2, dtype=torch.float32))
    finally:
        torch.set_default_dtype(before)
    assert outputs.dtype == torch.float32
