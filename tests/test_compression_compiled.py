"""The hook in DistributedDataParallel's Python reducer, which passes gradients to it one by one."""

import pytest
import torch
from support import BACKEND, on_ranks
from support.training import Model, batch, same_on_all
from torch.nn.parallel import DistributedDataParallel
from torch_accl import compression
from torch_accl.compression import Compression

pytestmark = pytest.mark.skipif(BACKEND != "accl", reason="about this package only")

# Compiling takes long on a machine that is busy with other work.
DEADLINE = 120.0


def model():
    torch.manual_seed(7)
    return Model()


def forward_and_backward(net, inputs, targets):
    (net(inputs) - targets).square().mean().backward()


def steps(rank, net, count=3, run=forward_and_backward):
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05)
    for step in range(count):
        inputs, targets = batch(rank, step)
        optimizer.zero_grad()
        run(net, inputs, targets)
        optimizer.step()
    return [parameter.detach().clone() for parameter in net.parameters()]


@pytest.mark.slow
@on_ranks(2, fresh=True, deadline=DEADLINE)
@pytest.mark.parametrize("backend", [None, "eager", "aot_eager"], ids=str)
def test_the_reducer_in_python_hands_over_gradients_one_by_one(rank, world, backend):
    import torch._dynamo

    settings = Compression("maxmin:4,bucket=64", error_feedback=True, exclude=["head"])
    plain = steps(rank, DistributedDataParallel(model()))
    usual = DistributedDataParallel(model())
    usual.register_comm_hook(compression.CompressionState(settings, usual), compression.ddp_hook)
    usual = steps(rank, usual)
    with torch._dynamo.config.patch(optimize_ddp="python_reducer", compiled_autograd=backend is not None):
        ddp = DistributedDataParallel(model())
        state = compression.CompressionState(settings, ddp)
        ddp.register_comm_hook(state, compression.ddp_hook)
        # The backward pass is compiled only as part of a compiled function.
        run = forward_and_backward if backend is None else torch.compile(forward_and_backward, backend=backend)
        weights = steps(rank, ddp, run=run)
    assert same_on_all(*weights)
    assert state.step == 3 and state.traffic.ratio > 1.5
    rows = {row.name: row for row in state.measures()}
    assert rows["up.weight"].calls == 3 and rows["up.weight"].codec.startswith("maxmin:4")
    # A gradient without a codec has a call of its own here, and no figures.
    assert "head.weight" not in rows
    if backend is not None:
        assert torch._dynamo.utils.counters["compiled_autograd"]["captures"] > 0
    assert all(torch.allclose(a, b, atol=4e-3) for a, b in zip(weights, plain, strict=True))
    assert any(not torch.equal(a, b) for a, b in zip(weights, plain, strict=True))
    assert all(torch.allclose(a, b, atol=4e-3) for a, b in zip(weights, usual, strict=True))
