"""Requests of autograd and torch's transforms that a layer-parallel net cannot serve. They are refused on all ranks and
never silently skipped.
"""

import copy
import io
import pickle

import pytest
import torch
import torch._dynamo  # loading it takes seconds: load it once here, not in every rank
from support import on_ranks
from torch import nn
from torch.autograd import forward_ad
from torch_accl.layer_parallel import Cycle, LayerParallel, LayerParallelError, RecurrentParallel, ode, timed


def small(number):
    return nn.Sequential(nn.Linear(6, 6), nn.Tanh())


def layers():
    return [nn.Linear(6, 6), *(ode(small) for _ in range(6)), nn.Linear(6, 3)]


def batch():
    return torch.randn(4, 6, generator=torch.Generator().manual_seed(1))


def goes_on(net, x):
    """Checks that the next batch works as usual."""
    y = net(x)
    y.sum().backward()
    assert all(parameter.grad is not None for parameter in net.parameters())


# ---- backward passes


@on_ranks(1, 2, 3)
@pytest.mark.parametrize("mode", ["inexact", "exact-wave"])
def test_a_gradient_penalty_is_refused_on_all_ranks_and_not_left_out(rank, world, mode):
    net = LayerParallel(layers(), mode=mode, fwd=Cycle(factor=2), bwd=Cycle(factor=2))
    x = batch().requires_grad_()
    y = net(x)
    with pytest.raises(LayerParallelError, match=r"rank 0 .* create_graph=True.*to_serial\(\)"):
        # The other ranks do not know that the first rank wants a graph of the gradients.
        torch.autograd.grad(y.sum(), x, create_graph=rank == 0)
    goes_on(net, x)


@on_ranks(2)
def test_a_gradient_penalty_that_all_ranks_ask_for_is_one_sentence(rank, world):
    net = LayerParallel(layers(), mode="exact-wave")
    with pytest.raises(LayerParallelError) as caught:
        x = batch().requires_grad_()
        torch.autograd.grad(net(x).sum(), x, create_graph=True)
    assert str(caught.value).count("create_graph=True") == 1 and "ranks 0 and 1 of the layers" in str(caught.value)


@on_ranks(1, 2)
def test_a_gradient_penalty_of_a_recurrent_net_is_refused(rank, world):
    torch.manual_seed(1)
    net = RecurrentParallel(nn.GRU(6, 5, batch_first=True), mode="exact-wave")
    x = torch.randn(2, 3, 6, requires_grad=True)
    outputs, last = net(x)
    with pytest.raises(LayerParallelError, match="create_graph=True"):
        torch.autograd.grad(outputs.sum() + last.sum(), x, create_graph=True)


@on_ranks(1, 2)
def test_a_gradient_penalty_of_torchbraids_net_is_refused(rank, world):
    from torch_accl.compat.torchbraid import MPI
    from torch_accl.compat.torchbraid import LayerParallel as Facade

    net = Facade(MPI.COMM_WORLD, lambda: nn.Linear(6, 6), 2, 1.0)
    x = batch().requires_grad_()
    y = net(x)
    with pytest.raises(LayerParallelError, match="create_graph=True"):
        y.sum().backward(create_graph=rank == 0)


@on_ranks(1, 2)
def test_several_gradients_at_once_are_refused(rank, world):
    net = LayerParallel(layers(), mode="exact-wave")
    x = batch().requires_grad_()
    y = net(x)
    with pytest.raises(LayerParallelError, match="is_grads_batched=True"):
        torch.autograd.grad(y, x, torch.ones(3, *y.shape), is_grads_batched=True)
    goes_on(net, x)


@on_ranks(1, 2, 3)
@pytest.mark.parametrize("asking", ["first", "last", "all"])
def test_several_gradients_at_once_of_torchbraids_net_are_refused_on_all_ranks(rank, world, asking):
    from torch_accl.compat.torchbraid import MPI
    from torch_accl.compat.torchbraid import LayerParallel as Facade

    net = Facade(MPI.COMM_WORLD, lambda: nn.Linear(6, 6), 3, 1.0)
    x = batch().requires_grad_()
    asks = asking == "all" or rank == (0 if asking == "first" else world - 1)
    for _ in range(2):
        y = net(x)
        with pytest.raises(LayerParallelError, match="is_grads_batched=True"):
            if asks:
                wanted = [x, *net.parameters()]
                torch.autograd.grad(y, wanted, torch.ones(3, *y.shape), is_grads_batched=True, allow_unused=True)
            else:
                y.backward(torch.ones_like(y))
    net(x).sum().backward()
    assert all(parameter.grad is not None for parameter in net.parameters())


@on_ranks(1)
def test_second_derivatives_are_refused_and_not_zero(rank, world):
    net = LayerParallel(layers(), mode="exact-wave")
    for call in (
        lambda: torch.autograd.functional.hessian(lambda x: net(x).sum(), batch()),
        lambda: torch.autograd.functional.jvp(net, batch(), batch()),
    ):
        with pytest.raises(LayerParallelError, match="create_graph=True"):
            call()


# ---- transforms


def pushed(net, x):
    with forward_ad.dual_level():
        return net(forward_ad.make_dual(x, x))


@torch.no_grad()
def pushed_without_gradients(net, x):
    return pushed(net, x)


TRANSFORMS = {
    "grad": lambda net, x: torch.func.grad(lambda x: net(x).sum())(x),
    "vmap": lambda net, x: torch.func.vmap(net)(x[None]),
    "jvp": lambda net, x: torch.func.jvp(net, (x,), (x,)),
    "dual": pushed,
    "dual without gradients": pushed_without_gradients,
}


@on_ranks(1, 2)
@pytest.mark.parametrize("how", list(TRANSFORMS))
def test_a_transform_on_the_first_rank_is_refused_on_all(rank, world, how):
    net = LayerParallel(layers(), mode="exact-wave")
    with pytest.raises(LayerParallelError, match=r"rank 0 of the layers .* does not support .*to_serial\(\)"):
        TRANSFORMS[how](net, batch()) if rank == 0 else net(batch())
    goes_on(net, batch())


@on_ranks(1, 2)
def test_a_recurrent_net_under_a_transform_is_refused(rank, world):
    torch.manual_seed(1)
    net = RecurrentParallel(nn.GRU(6, 5, batch_first=True), mode="exact-wave")
    with pytest.raises(LayerParallelError, match="torch.func's transforms"):
        torch.func.grad(lambda x: net(x)[0].sum())(torch.randn(2, 3, 6))


@on_ranks(1, 2)
@pytest.mark.parametrize("checkpoint", [False, True])
def test_parameters_of_functional_call_are_those_of_the_backward_pass_too(rank, world, checkpoint):
    class Timed(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Linear(6, 6)

        def forward(self, x, dt):
            return x + dt * torch.tanh(self.inner(x))

    settings = {"mode": "exact-forward", "bwd": Cycle(factor=2, iterations=2), "checkpoint": checkpoint}
    found = []
    for is_called in (False, True):
        net = LayerParallel([timed(lambda number: Timed()) for _ in range(8)], **settings)
        others = {name: (parameter * 2).detach().requires_grad_() for name, parameter in net.named_parameters()}
        if is_called:
            torch.func.functional_call(net, others, (batch(),)).sum().backward()
            found.append([other.grad for other in others.values()])
            assert all(parameter.grad is None for parameter in net.parameters())
        else:
            net.load_state_dict(others)
            net(batch()).sum().backward()
            found.append([parameter.grad for parameter in net.parameters()])
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))


# ---- the net as an object


@on_ranks(1, 2)
def test_a_net_that_is_pickled_names_what_can_be(rank, world):
    net = LayerParallel(layers(), mode="exact-wave")
    recurrent = RecurrentParallel(nn.GRU(6, 5, batch_first=True), mode="exact-wave")
    for model, instead in (
        (net, r"net\.state_dict\(\), or net\.to_serial\(\)"),
        (recurrent, r"net\.cell and net\.tail"),
    ):
        for call in (pickle.dumps, lambda model: torch.save(model, io.BytesIO())):
            with pytest.raises(TypeError, match=f"{type(model).__name__} cannot be pickled.*{instead}"):
                call(model)
    for made in (copy.copy(net), copy.deepcopy(net)):
        goes_on(made, batch())


@on_ranks(1)
def test_a_compiled_net_names_what_can_be_compiled(rank, world):
    net = LayerParallel(layers(), mode="exact-wave")
    for _ in range(2):
        with pytest.raises(NotImplementedError, match=r"compile its layers instead, as ode\(torch\.compile"):
            torch.compile(net, backend="eager")(batch())
    with pytest.raises(NotImplementedError, match="compile its layers"):
        net.compile()
    goes_on(net, batch())
