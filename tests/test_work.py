"""Rules for a `Work`: waiting, polling, results, failures, and its effect on the tensors."""

import gc
import threading
import time
import weakref
from datetime import timedelta

import numpy as np
import pytest
import torch
import torch.distributed as dist
from support import GROUP_TIMEOUT, on_ranks
from support.versions import needs
from torch.distributed import _functional_collectives as funcol
from torch.distributed._functional_collectives import allow_inflight_collective_as_graph_input_ctx

COUNTS = [1, 4099, 500_009]


def until(condition, seconds=5.0):
    """Runs Python code, as a training loop does, until the condition holds. Returns whether it held in time."""
    end = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > end:
            return False
        time.sleep(0.001)
    return True


@on_ranks(1, 2, 3)
@pytest.mark.parametrize("count", COUNTS)
def test_wait_returns_true_and_the_output_is_there(rank, world, count):
    tensor = torch.ones(count)
    work = dist.all_reduce(tensor, async_op=True)
    assert work.wait() is True
    assert (tensor == world).all()
    assert work.is_completed() and work.is_success()


@on_ranks(1, 2)
def test_wait_may_be_called_again_and_from_another_thread(rank, world):
    tensor = torch.ones(4099)
    work = dist.all_reduce(tensor, async_op=True)
    answers = []
    thread = threading.Thread(target=lambda: answers.append(work.wait()))
    thread.start()
    answers.append(work.wait())
    thread.join()
    answers.append(work.wait())
    assert answers == [True] * 3 and (tensor == world).all()


@on_ranks(2)
@pytest.mark.parametrize("count", COUNTS)
def test_a_call_completes_without_a_waiting_thread(rank, world, count):
    tensor = torch.ones(count)
    work = dist.all_reduce(tensor, async_op=True)
    assert until(work.is_completed)
    assert (tensor == world).all()


@pytest.mark.alone
@on_ranks(2)
def test_is_completed_answers_at_once(rank, world):
    dist.barrier()
    if rank == 1:
        time.sleep(0.3)
        dist.all_reduce(torch.ones(9))
    else:
        work = dist.all_reduce(torch.ones(9), async_op=True)
        start = time.monotonic()
        assert not any(work.is_completed() for _ in range(100))
        assert time.monotonic() - start < 0.15
        work.wait()


@pytest.mark.alone
@on_ranks(2)
def test_a_wait_that_expires_raises_and_the_call_runs_on(rank, world):
    dist.barrier()
    tensor = torch.ones(1001)
    if rank == 1:
        time.sleep(0.6)
        dist.all_reduce(tensor)
    else:
        work = dist.all_reduce(tensor, async_op=True)
        start = time.monotonic()
        with pytest.raises(dist.DistBackendError, match=r"(?i)timed? ?out"):
            work.wait(timedelta(milliseconds=150))
        assert 0.14 <= time.monotonic() - start < 0.45
        assert not work.is_completed()
        work.wait()
    assert (tensor == 2).all()
    dist.all_reduce(tensor)
    assert (tensor == 4).all()


@on_ranks(2)
def test_a_wait_without_time_limit_is_a_wait_with_the_groups_limit(rank, world):
    dist.barrier()
    tensor = torch.ones(9)
    if rank == 1:
        time.sleep(0.2)
    work = dist.all_reduce(tensor, async_op=True)
    assert work.wait(timedelta(0)) is True
    assert (tensor == 2).all()


@on_ranks(2)
def test_the_result_is_there_only_after_completion(rank, world):
    dist.barrier()
    tensor = torch.ones(9)
    if rank == 1:
        time.sleep(0.2)
    work = dist.all_reduce(tensor, async_op=True)
    if rank == 0:
        with pytest.raises(RuntimeError):
            work.result()
    work.wait()
    (result,) = work.result()
    assert result.data_ptr() == tensor.data_ptr() and (tensor == 2).all()


@on_ranks(2, fresh=True)
def test_a_call_that_times_out_raises_its_stored_exception_every_time(rank, world):
    group = dist.new_group(timeout=timedelta(milliseconds=300))
    dist.barrier()
    if rank == 0:
        work = dist.all_reduce(torch.ones(9), group=group, async_op=True)
        for _ in range(2):
            with pytest.raises(dist.DistBackendError, match=r"(?i)timed? ?out.*rank 1\b|rank 1\b.*timed? ?out"):
                work.wait()
        assert work.is_completed() and not work.is_success()
        assert work.exception() is not None
    dist.barrier()


@on_ranks(2, fresh=True)
def test_a_call_times_out_without_a_waiting_thread(rank, world):
    group = dist.new_group(timeout=timedelta(milliseconds=300))
    dist.barrier()
    if rank == 0:
        work = dist.all_reduce(torch.ones(9), group=group, async_op=True)
        assert until(work.is_completed, 3)
        assert not work.is_success()
        with pytest.raises(dist.DistBackendError):
            work.wait()
    dist.barrier()


@on_ranks(1, 2)
def test_a_synchronous_call_has_written_its_output_when_it_returns(rank, world):
    for i in range(200):
        tensor = torch.full((i + 1,), float(rank))
        dist.all_reduce(tensor)
        assert (tensor == world * (world - 1) / 2).all()


@on_ranks(2)
def test_many_calls_in_flight_complete_in_any_order_of_waiting(rank, world):
    tensors = [torch.full((1 + 97 * i,), float(i)) for i in range(100)]
    works = [dist.all_reduce(tensor, async_op=True) for tensor in tensors]
    for work in reversed(works):
        work.wait()
    assert all((tensor == 2 * i).all() for i, tensor in enumerate(tensors))


def all_outputs(rank, world):
    """Yields the output tensors and the call, for one call of each kind."""
    flat = torch.zeros(world * 4)
    one, parts = torch.ones(4), [torch.zeros(4) for _ in range(world)]
    root = [torch.zeros(4) for _ in range(world)] if rank == 0 else None
    yield [one], lambda: dist.all_reduce(one)
    yield [one], lambda: dist.broadcast(one, 0)
    yield [one], lambda: dist.reduce(one, 0)
    yield parts, lambda: dist.all_gather(parts, one)
    yield [flat], lambda: dist.all_gather_single(flat, one)
    yield root or [], lambda: dist.gather(one, root, dst=0)
    yield [one], lambda: dist.scatter(one, [torch.ones(4)] * world if rank == 0 else None, src=0)
    yield [one], lambda: dist.reduce_scatter_single(one, torch.ones(world * 4))
    yield [one], lambda: dist.reduce_scatter(one, [torch.ones(4)] * world)
    yield [flat], lambda: dist.all_to_all_single(flat, torch.ones(world * 4))
    yield parts, lambda: dist.all_to_all(parts, [torch.ones(4)] * world)


@on_ranks(1, 2)
def test_no_call_touches_the_version_counter_of_its_outputs(rank, world):
    for outputs, call in all_outputs(rank, world):
        before = [tensor._version for tensor in outputs]
        call()
        assert [tensor._version for tensor in outputs] == before


@on_ranks(1, 2)
def test_outputs_that_need_gradients_can_be_written(rank, world):
    leaf = torch.nn.Parameter(torch.full((5,), float(rank + 1)))
    dist.broadcast(leaf, 0)
    assert leaf.tolist() == [1.0] * 5 and leaf.is_leaf and leaf.grad_fn is None
    strided = torch.nn.Parameter(torch.full((5, 4), float(rank + 1)))
    dist.all_reduce(strided.t())
    assert (strided == world * (world + 1) / 2).all() and strided.grad_fn is None


@on_ranks(1, 2)
def test_outputs_made_in_inference_mode_can_be_written(rank, world):
    with torch.inference_mode():
        tensor = torch.ones(5)
        dist.all_reduce(tensor)
        dist.broadcast(tensor, 0)
    assert (tensor == world).all()


def watched(count):
    """Returns a tensor, and a weak reference to the numpy array that holds its memory. The array lives as long as the
    tensor's storage.
    """
    array = np.ones(count, dtype=np.float32)
    return torch.from_numpy(array), weakref.ref(array)


@on_ranks(1, 2)
@pytest.mark.parametrize("count", COUNTS)
def test_memory_falls_after_calls_whose_handles_were_dropped(rank, world, count):
    gone = []
    for _ in range(5):
        tensor, alive = watched(count)
        dist.all_reduce(tensor, async_op=True)
        del tensor
        gone.append(alive)
    gc.collect()
    assert until(lambda: all(alive() is None for alive in gone), 2.0)


@on_ranks(2)
def test_memory_falls_after_receives_whose_handles_were_dropped(rank, world):
    tensor, alive = watched(5000)
    if rank == 0:
        dist.isend(tensor, 1)
    else:
        dist.irecv(tensor, 0)
    del tensor
    gc.collect()
    assert until(lambda: alive() is None, 2.0)
    dist.barrier()


@on_ranks(1, 2)
def test_a_finished_work_does_not_keep_its_inputs_for_ever(rank, world):
    tensor, alive = watched(5000)
    work = dist.all_reduce(tensor, async_op=True)
    work.wait()
    del tensor, work
    gc.collect()
    assert until(lambda: alive() is None, 2.0)


@on_ranks(2)
def test_tensors_live_until_their_call_is_done(rank, world):
    dist.barrier()
    if rank == 1:
        time.sleep(0.3)
        tensor = torch.ones(100_003)
        dist.all_reduce(tensor)
        assert (tensor == 2).all()
    else:
        work = dist.all_reduce(torch.ones(100_003), async_op=True)
        gc.collect()
        scratch = [torch.zeros(100_003) for _ in range(20)]
        work.wait()
        (result,) = work.result()
        assert (result == 2).all() and not any(t.any() for t in scratch)


@needs("numbers of works")
@on_ranks(2)
def test_every_work_has_the_number_of_its_call(rank, world):
    works = [dist.all_reduce(torch.ones(3), async_op=True) for _ in range(3)]
    for work in works:
        work.wait()
    numbers = [work._get_sequence_number() for work in works]
    assert numbers == list(range(numbers[0], numbers[0] + 3))


@on_ranks(2)
def test_durations_are_there_once_timing_is_on(rank, world):
    group = dist.new_group()
    group._get_backend(torch.device("cpu"))._enable_collectives_timing()
    dist.barrier()
    if rank == 1:
        time.sleep(0.2)
    work = dist.all_reduce(torch.ones(3), group=group, async_op=True)
    work.wait()
    if rank == 0:
        assert 100 < work._get_duration() < GROUP_TIMEOUT * 1000


@on_ranks(1)
def test_a_duration_without_timing_is_refused(rank, world):
    work = dist.all_reduce(torch.ones(3), async_op=True)
    work.wait()
    with pytest.raises(RuntimeError, match="(?i)timing"):
        work._get_duration()


@on_ranks(2)
def test_the_memory_of_a_call_in_flight_stays_when_its_tensor_is_given_another(rank, world):
    tensor = torch.ones(100_000)
    if rank == 0:
        work = dist.all_reduce(tensor, async_op=True)
        tensor.data = torch.zeros(3)
        others = [torch.full((100_000,), 7.0) for _ in range(8)]
        dist.send(torch.ones(1), 1)
        work.wait()
        # If the memory had been freed, one of these tensors would now be in its place.
        assert all((other == 7.0).all() for other in others)
    else:
        dist.recv(torch.ones(1), 0)
        dist.all_reduce(tensor)


@on_ranks(1, 2)
def test_a_blocking_call_is_over_when_it_returns_and_has_no_work(rank, world):
    options = dist.AllreduceOptions()
    options.asyncOp = False
    tensor = torch.ones(3)
    assert dist.group.WORLD.allreduce([tensor], options) is None
    assert tensor.tolist() == [world] * 3
    # A compiled graph looks up the works of the calls that were issued in it.
    with allow_inflight_collective_as_graph_input_ctx(True):
        work = dist.group.WORLD.allreduce([tensor], options)
    assert work.is_completed() and tensor.tolist() == [world * world] * 3
    work.wait()


@on_ranks(2)
def test_torch_keeps_no_work_that_was_waited_for_while_a_graph_is_compiled(rank, world):
    kept = torch._C._distributed_c10d._get_work_registry_size
    before = kept()
    with allow_inflight_collective_as_graph_input_ctx(True):
        small, large = torch.ones(4, 4), torch.empty(8, 4)
        dist.all_reduce(small)
        dist.all_reduce(small, async_op=True).wait()
        dist.all_gather_into_tensor(large, small, async_op=True).wait()
        dist.reduce_scatter_tensor(torch.empty(2, 4), small, async_op=True).wait()
        assert kept() == before
        work = dist.broadcast(small, 0, async_op=True)
        assert kept() > before
        funcol.wait_tensor(small)
        assert kept() == before and work.is_completed()
