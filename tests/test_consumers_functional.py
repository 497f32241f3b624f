"""Functional collectives, eager and compiled, autograd through them, DETAIL debugging and mixed groups."""

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from support import BACKEND, gloo_group, init_group, on_ranks
from support.consumers import same_as_gloo
from torch.distributed.nn import functional as differentiable

CALLS = {
    "all_reduce": lambda x, group: funcol.all_reduce(x, "sum", group),
    "all_reduce_avg": lambda x, group: funcol.all_reduce(x, "avg", group),
    "all_reduce_coalesced": lambda x, group: funcol.all_reduce_coalesced([x, x * 2], "sum", group)[1],
    "all_gather_tensor": lambda x, group: funcol.all_gather_tensor(x, 0, group),
    "all_gather_along_dim_1": lambda x, group: funcol.all_gather_tensor(x, 1, group),
    "all_gather_coalesced": lambda x, group: funcol.all_gather_into_tensor_coalesced([x, x * 2], group)[1],
    "reduce_scatter_tensor": lambda x, group: funcol.reduce_scatter_tensor(x, "sum", 0, group),
    "reduce_scatter_coalesced": lambda x, group: funcol.reduce_scatter_tensor_coalesced(
        [x, x * 2], "sum", [0, 0], group
    )[1],
    "all_to_all_single": lambda x, group: funcol.all_to_all_single(x, None, None, group),
    "broadcast": lambda x, group: funcol.broadcast(x, 1, group),
    "permute": lambda x, group: funcol.permute_tensor(x.view(-1), [1, 0], group),
}


def run(call, rank, compiled):
    def step(x):
        y = CALLS[call](x * 2, dist.group.WORLD)
        return y.sin() + 1

    torch._dynamo.reset()
    x = torch.arange(24, dtype=torch.float32).view(4, 6) * (rank + 1)
    return (torch.compile(step, backend="aot_eager", fullgraph=True) if compiled else step)(x)


@on_ranks(2, fresh=True, init=False)
@pytest.mark.parametrize("call", list(CALLS))
def test_functional_collectives_give_the_same_eagerly(rank, world, call):
    same_as_gloo(lambda rank, world: run(call, rank, compiled=False), rank, world)


@pytest.mark.slow
@on_ranks(2, fresh=True, init=False, deadline=90)
@pytest.mark.parametrize("calls", [list(CALLS)[:6], list(CALLS)[6:]], ids=["first_half", "second_half"])
def test_functional_collectives_give_the_same_compiled(rank, world, calls):
    same_as_gloo(lambda rank, world: [run(call, rank, compiled=True) for call in calls], rank, world)


@pytest.mark.slow
@on_ranks(2, fresh=True, init=False, deadline=90)
def test_in_place_collectives_inside_a_compiled_function_give_the_same(rank, world):
    def consumer(rank, world):
        torch._dynamo.reset()

        @torch.compile(backend="aot_eager")
        def step(x):
            out = torch.empty(world * x.shape[0], x.shape[1])
            dist.all_gather_into_tensor(out, x)
            part = torch.empty_like(x)
            dist.reduce_scatter_tensor(part, out)
            dist.all_reduce(part)
            return part * 2

        return step(torch.ones(3, 4) * (rank + 1))

    same_as_gloo(consumer, rank, world)


@on_ranks(2, fresh=True, init=False)
def test_gradients_flow_through_differentiable_collectives_alike(rank, world):
    def consumer(rank, world):
        x = (torch.arange(8.0).view(4, 2) + rank).requires_grad_()
        a = funcol.all_gather_tensor_autograd(x, 0, dist.group.WORLD)
        b = funcol.reduce_scatter_tensor_autograd(a, "sum", 0, dist.group.WORLD)
        c = funcol.all_to_all_single_autograd(b, None, None, dist.group.WORLD)
        c.square().sum().backward()
        return c.detach(), x.grad

    same_as_gloo(consumer, rank, world)


@on_ranks(2, fresh=True, init=False)
def test_gradients_flow_through_torch_distributed_nn_alike(rank, world):
    def consumer(rank, world):
        x = (torch.arange(6.0) + rank).requires_grad_()
        y = differentiable.all_reduce(x * 2)
        gathered = torch.stack(list(differentiable.all_gather(y)))
        moved = torch.stack(differentiable.all_to_all([torch.empty(6) for _ in range(world)], list(gathered)))
        moved.square().sum().backward()
        return moved.detach(), x.grad

    same_as_gloo(consumer, rank, world)


@on_ranks(2, fresh=True, init=False)
def test_the_result_of_a_functional_collective_may_be_awaited_by_another_thread(rank, world):
    import threading

    init_group()
    y = funcol.all_reduce(torch.ones(100_003), "sum", dist.group.WORLD)
    seen = []
    thread = threading.Thread(target=lambda: seen.append((y * 1).sum().item()))
    thread.start()
    thread.join()
    assert seen == [2.0 * 100_003]
    dist.destroy_process_group()


@on_ranks(2, 3, fresh=True, init=False)
def test_everything_works_with_detailed_debugging(rank, world):
    dist.set_debug_level(dist.DebugLevel.DETAIL)
    init_group()
    tensor = torch.ones(5)
    dist.all_reduce(tensor)
    assert (tensor == world).all()
    dist.broadcast(tensor, 0)
    outputs = [torch.empty(5) for _ in range(world)]
    dist.all_gather(outputs, tensor)
    part = torch.empty(5)
    dist.reduce_scatter_tensor(part, torch.ones(5 * world))
    assert (part == world).all()
    flat = torch.empty(5 * world)
    dist.all_gather_into_tensor(flat, part)
    dist.barrier()
    if rank == 0:
        dist.send(tensor, 1)
    elif rank == 1:
        dist.recv(tensor, 0)
    group = dist.new_group([0, 1])
    if rank < 2:
        dist.all_reduce(tensor, group=group)
    ddp = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(3, 2))
    ddp(torch.ones(4, 3)).sum().backward()
    dist.destroy_process_group()


@on_ranks(2, fresh=True, init=False)
def test_detailed_debugging_reports_a_disagreement_before_the_backend_sees_it(rank, world):
    dist.set_debug_level(dist.DebugLevel.DETAIL)
    init_group()
    with pytest.raises(RuntimeError, match="(?i)mismatch|detected"):
        dist.all_reduce(torch.ones(5 + rank))


@on_ranks(2, fresh=True, init=False)
@pytest.mark.parametrize("name", [f"cpu:{BACKEND}", f"cpu:{BACKEND},cuda:gloo"])
def test_groups_of_several_devices_send_cpu_tensors_to_the_backend(rank, world, name):
    init_group(name)
    assert dist.group.WORLD._get_backend(torch.device("cpu")).name() == BACKEND
    tensor = torch.ones(5)
    dist.all_reduce(tensor)
    assert (tensor == 2).all()
    group = dist.new_group()
    dist.all_reduce(tensor, group=group)
    assert (tensor == 4).all()
    dist.destroy_process_group()


@on_ranks(2, fresh=True, init=False)
def test_a_group_of_the_backend_and_one_of_gloo_live_side_by_side(rank, world):
    init_group()
    other = gloo_group()
    for _ in range(20):
        a, b = torch.ones(1000), torch.ones(1000)
        first, second = dist.all_reduce(a, async_op=True), dist.all_reduce(b, group=other, async_op=True)
        first.wait()
        second.wait()
        assert (a == 2).all() and (b == 2).all()
    dist.destroy_process_group()
