"""The future of a call: its value, `then` from any thread, and callbacks that issue calls and block."""

import os
import signal
import threading
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from support import on_ranks

LIMIT = 15


@on_ranks(1, 2)
def test_the_value_of_an_all_reduce_is_a_list_with_the_tensor(rank, world):
    tensor = torch.ones(3)
    value = dist.all_reduce(tensor, async_op=True).get_future().wait()
    assert len(value) == 1 and value[0].data_ptr() == tensor.data_ptr() and (value[0] == world).all()


@on_ranks(1, 2)
def test_the_value_of_an_all_gather_is_the_flat_list_of_its_outputs(rank, world):
    outputs = [torch.zeros(3) for _ in range(world)]
    value = dist.all_gather(outputs, torch.full((3,), float(rank)), async_op=True).get_future().wait()
    assert [v.data_ptr() for v in value] == [t.data_ptr() for t in outputs]
    assert [v[0].item() for v in value] == list(range(world))


@on_ranks(1, 2)
def test_every_kind_of_call_has_a_future_with_its_outputs(rank, world):
    one, flat, parts = torch.ones(4), torch.zeros(4 * world), [torch.zeros(4) for _ in range(world)]
    full = torch.ones(4 * world)
    calls = [
        (lambda: dist.broadcast(one, 0, async_op=True), [one]),
        (lambda: dist.all_gather_single(flat, one, async_op=True), [flat]),
        (lambda: dist.reduce_scatter_single(one, full, async_op=True), [one]),
        (lambda: dist.all_to_all_single(flat, full, async_op=True), [flat]),
        (lambda: dist.all_to_all(parts, [one] * world, async_op=True), parts),
    ]
    for call, outputs in calls:
        value = call().get_future().wait()
        assert [v.data_ptr() for v in value] == [t.data_ptr() for t in outputs]


@on_ranks(1, 2)
def test_a_barrier_has_a_future(rank, world):
    dist.barrier(async_op=True).get_future().wait()


@on_ranks(1, 2)
def test_then_runs_once_with_the_value(rank, world):
    seen = []
    future = dist.all_reduce(torch.ones(3), async_op=True).get_future()
    result = future.then(lambda f: seen.append(f.value()[0].sum().item()) or 42).wait()
    assert result == 42 and seen == [3 * world]


@on_ranks(2)
def test_then_may_be_called_from_any_thread(rank, world):
    future = dist.all_reduce(torch.ones(3), async_op=True).get_future()
    answers = []

    def attach():
        answers.append(future.then(lambda f: f.value()[0][0].item()).wait())

    threads = [threading.Thread(target=attach) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LIMIT)
    assert answers == [2.0] * 4


@on_ranks(2)
def test_waiting_on_the_future_alone_is_enough(rank, world):
    for count in (1, 4099, 500_009):
        tensor = torch.ones(count)
        dist.all_reduce(tensor, async_op=True).get_future().wait()
        assert (tensor == 2).all()


@on_ranks(2)
def test_collect_all_waits_for_many(rank, world):
    tensors = [torch.ones(1 + 1000 * i) for i in range(20)]
    futures = [dist.all_reduce(tensor, async_op=True).get_future() for tensor in tensors]
    torch.futures.collect_all(futures).wait()
    assert all((tensor == 2).all() for tensor in tensors)


@on_ranks(2, 3)
def test_callbacks_may_submit_and_block_in_a_chain_8_deep(rank, world):
    def step(depth):
        def callback(future):
            tensor = future.value()[0]
            dist.all_reduce(tensor)
            if depth:
                return dist.all_reduce(tensor, async_op=True).get_future().then(step(depth - 1)).wait()
            return tensor

        return callback

    tensor = torch.ones(64, dtype=torch.float64)
    result = dist.all_reduce(tensor, async_op=True).get_future().then(step(7)).wait()
    assert (result == float(world) ** 16).all()


@on_ranks(2)
def test_many_callbacks_may_block_at_the_same_time(rank, world):
    # Each callback waits for a call on a group of its own. The callback with the same index on the other rank issues
    # that call.
    groups = [dist.new_group() for _ in range(6)]
    late = [torch.zeros(3) for _ in groups]

    def block_on(group):
        def callback(future):
            tensor = torch.ones(3)
            dist.all_reduce(tensor, group=group)
            return tensor[0].item()

        return callback

    receives = [dist.irecv(late[i], 1 - rank, tag=i) for i in range(6)]
    chained = [receives[i].get_future().then(block_on(groups[i])) for i in range(6)]
    dist.barrier()
    for i in range(6) if rank == 0 else reversed(range(6)):
        dist.send(torch.ones(3), 1 - rank, tag=i)
    assert [future.wait() for future in chained] == [2.0] * 6


@on_ranks(2)
def test_a_callback_that_hangs_does_not_stop_the_progress_of_other_calls(rank, world):
    release, entered = threading.Event(), threading.Event()
    late = torch.zeros(3)

    def hang(future):
        entered.set()
        return release.wait(LIMIT)

    # The callback is attached before the call can complete, so another thread than this one runs it.
    receive = dist.irecv(late, 1 - rank, tag=77)
    first = receive.get_future().then(hang)
    dist.barrier()
    dist.send(torch.ones(3), 1 - rank, tag=77)
    assert entered.wait(LIMIT)
    for count in (3, 300_007):
        tensor = torch.ones(count)
        dist.all_reduce(tensor, async_op=True).get_future().wait()
        assert (tensor == 2).all()
        dist.all_reduce(tensor)
    release.set()
    assert first.wait() is True


@on_ranks(1, 2)
def test_an_exception_in_a_callback_stays_in_its_future(rank, world):
    def fail(future):
        raise ValueError("told so")

    chained = dist.all_reduce(torch.ones(3), async_op=True).get_future().then(fail)
    with pytest.raises(RuntimeError, match="ValueError: told so"):
        chained.wait()
    tensor = torch.ones(3)
    dist.all_reduce(tensor)
    assert (tensor == world).all()


@on_ranks(1, 2)
def test_done_callbacks_see_the_outputs_written(rank, world):
    results, done = [], threading.Event()
    tensor = torch.ones(100_003)
    future = dist.all_reduce(tensor, async_op=True).get_future()
    future.add_done_callback(lambda f: (results.append((tensor == world).all().item()), done.set()))
    assert done.wait(LIMIT) and results == [True]


@on_ranks(2)
def test_works_with_callbacks_and_works_with_waits_mix(rank, world):
    total = []
    for i in range(50):
        a, b = torch.ones(1 + i), torch.ones(1000 + i)
        chained = dist.all_reduce(a, async_op=True).get_future().then(lambda f: f.value()[0][0].item())
        dist.all_reduce(b, async_op=True).wait()
        total.append(chained.wait())
    assert total == [2.0] * 50


def slow_callback(seen, entered, release):
    def callback(future):
        entered.set()
        release.wait(LIMIT)
        seen.append("callback")

    return callback


@on_ranks(2)
@pytest.mark.parametrize("late", [True, False])
def test_wait_returns_after_the_callbacks_ran(rank, world, late):
    for count in (1, 4099, 100_003):
        seen = []
        dist.barrier()
        if rank == 1 and late:
            time.sleep(0.05)
        work = dist.all_reduce(torch.ones(count), async_op=True)
        work.get_future().then(lambda future, seen=seen: (time.sleep(0.05), seen.append("callback")))
        work.wait()
        assert seen == ["callback"]


@on_ranks(2)
def test_a_work_is_not_completed_before_its_callbacks_ran_and_asking_does_not_wait(rank, world):
    seen, entered, release = [], threading.Event(), threading.Event()
    # The callback is attached before the call can complete, so another thread than this one runs it.
    work = dist.irecv(torch.zeros(3), 1 - rank, tag=78)
    work.get_future().then(slow_callback(seen, entered, release))
    dist.barrier()
    dist.send(torch.ones(3), 1 - rank, tag=78)
    assert entered.wait(LIMIT)
    start = time.monotonic()
    assert not any(work.is_completed() for _ in range(50))
    assert time.monotonic() - start < 1
    # The wait's own timeout applies as usual, and the caller may wait for the call again.
    with pytest.raises(dist.DistBackendError, match="(?i)timed out.*callback"):
        work.wait(timedelta(milliseconds=100))
    assert seen == []
    release.set()
    work.wait()
    assert seen == ["callback"] and work.is_completed() and work.is_success()


@on_ranks(2)
def test_a_callback_may_wait_for_its_own_work(rank, world):
    tensor = torch.ones(3)
    work = dist.irecv(tensor, 1 - rank, tag=79)
    answers = []

    def callback(future):
        answers.extend([work.is_completed(), work.wait(), work.is_success()])
        return True

    chained = work.get_future().then(callback)
    dist.barrier()
    dist.send(torch.full((3,), 7.0), 1 - rank, tag=79)
    assert chained.wait() is True
    assert answers == [True] * 3 and tensor.tolist() == [7.0] * 3


@on_ranks(2)
def test_callbacks_may_wait_for_each_others_works(rank, world):
    tensors = [torch.zeros(3) for _ in range(2)]
    works = [dist.irecv(tensor, 1 - rank, tag=80 + i) for i, tensor in enumerate(tensors)]
    both = threading.Barrier(2)

    def callback(other):
        def run(future):
            both.wait(LIMIT)
            return works[other].wait()

        return run

    chained = [works[i].get_future().then(callback(1 - i)) for i in range(2)]
    dist.barrier()
    for i in range(2):
        dist.send(torch.ones(3), 1 - rank, tag=80 + i)
    assert [future.wait() for future in chained] == [True, True]


@on_ranks(2)
def test_a_future_asked_for_while_its_call_ends_is_completed_once(rank, world):
    # The call leaves the list of calls in flight at that moment.
    stop, failures = threading.Event(), []
    works = []

    def ask():
        while not stop.is_set():
            for work in works[-8:]:
                try:
                    work.get_future().wait()
                except BaseException as error:
                    failures.append(error)
                    stop.set()

    threads = [threading.Thread(target=ask) for _ in range(3)]
    [thread.start() for thread in threads]
    for i in range(1500):
        works.append(dist.all_reduce(torch.ones(1 + i % 7), async_op=True))
        if len(works) > 32:
            del works[:16]
    stop.set()
    [thread.join(LIMIT) for thread in threads]
    for work in works:
        work.wait()
    assert not failures and not any(thread.is_alive() for thread in threads)


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
@on_ranks(2)
def test_a_future_in_a_forked_child_is_an_error_and_no_wait_without_end(rank, world):
    # This call starts a completion thread, which does not exist in the forked child.
    dist.all_reduce(torch.ones(1), async_op=True).get_future().wait()
    if rank == 1:
        dist.recv(torch.ones(1), 0)
        dist.all_reduce(torch.ones(1))
        return
    work = dist.all_reduce(torch.ones(1), async_op=True)
    pid = os.fork()
    if pid == 0:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(5)
        try:
            work.get_future().wait()
        except RuntimeError as error:
            os._exit(0 if "forked" in str(error) else 3)
        os._exit(4)
    end = os.waitpid(pid, 0)[1]
    dist.send(torch.ones(1), 1)
    work.wait()
    assert end == 0
