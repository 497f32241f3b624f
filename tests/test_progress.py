"""Threads that make progress, the GIL, groups in different orders, idle processes and many groups."""

import contextlib
import ctypes
import os
import signal
import threading
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from support import BACKEND, on_ranks, run_ranks, run_script
from support.runner import check
from support.versions import needs


@pytest.mark.alone
@pytest.mark.slow
@on_ranks(2)
@pytest.mark.parametrize("count", [3, 1_000_003])
def test_a_thread_that_holds_the_gil_does_not_stop_a_call(rank, world, count):
    dist.barrier()
    tensor = torch.ones(count)
    work = dist.all_reduce(tensor, async_op=True)
    start = time.monotonic()
    if rank == 0:
        # PyDLL keeps the GIL, so for one second no other thread of this process runs Python code.
        ctypes.PyDLL(None).usleep(1_000_000)
        assert work.is_completed()
    else:
        work.wait()
        assert time.monotonic() - start < 0.8
    work.wait()
    assert (tensor == 2).all()


@pytest.mark.alone
@on_ranks(2)
def test_calls_advance_while_the_main_thread_computes(rank, world):
    dist.barrier()
    tensor = torch.ones(200_003)
    work = dist.all_reduce(tensor, async_op=True)
    if rank == 0:
        end = time.monotonic() + 0.7
        while time.monotonic() < end:
            pass
        assert work.is_completed()
    else:
        start = time.monotonic()
        work.wait()
        assert time.monotonic() - start < 0.6
    work.wait()


@on_ranks(2)
def test_threads_may_use_one_group_each(rank, world):
    groups = [dist.new_group() for _ in range(4)]
    dist.barrier()
    wrong = []

    def use(index):
        for i in range(30):
            tensor = torch.full((1 + 999 * (i % 3),), float(index))
            dist.all_reduce(tensor, group=groups[index])
            if not (tensor == 2 * index).all():
                wrong.append((index, i))

    threads = [threading.Thread(target=use, args=(index,)) for index in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


@on_ranks(2)
def test_threads_may_share_one_group_for_point_to_point(rank, world):
    wrong = []

    def use(tag):
        for i in range(20):
            tensor = torch.full((1 + 9999 * (i % 2),), float(tag * 100 + i))
            if rank == 0:
                dist.send(tensor, 1, tag=tag)
            else:
                received = torch.zeros_like(tensor)
                dist.recv(received, 0, tag=tag)
                if not torch.equal(received, tensor):
                    wrong.append((tag, i))

    threads = [threading.Thread(target=use, args=(tag,)) for tag in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


@on_ranks(2)
def test_threads_may_wait_for_works_of_one_group_that_another_issued(rank, world):
    tensors = [torch.full((1 + 5000 * i,), float(i)) for i in range(12)]
    works = [dist.all_reduce(tensor, async_op=True) for tensor in tensors]
    threads = [threading.Thread(target=work.wait) for work in works]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all((tensor == 2 * i).all() for i, tensor in enumerate(tensors))


@on_ranks(2, 3)
@pytest.mark.parametrize("count", [3, 400_009])
def test_groups_may_be_used_in_different_orders_on_different_ranks(rank, world, count):
    groups = [dist.new_group() for _ in range(5)]
    dist.barrier()
    order = list(range(5))
    order = order[rank:] + order[:rank] if rank != 1 else order[::-1]
    tensors = [torch.full((count,), float(i)) for i in range(5)]
    works = [dist.all_reduce(tensors[i], group=groups[i], async_op=True) for i in order]
    for work in works:
        work.wait()
    assert all((tensor == world * i).all() for i, tensor in enumerate(tensors))


@pytest.mark.alone
@on_ranks(2)
def test_four_bytes_do_not_wait_behind_64_mib_of_another_thread(rank, world):
    small = dist.new_group()
    big = torch.ones(1 << 24)
    dist.all_reduce(torch.ones(1), group=small)
    dist.barrier()
    thread = threading.Thread(target=lambda: [dist.all_reduce(big) for _ in range(5)])
    thread.start()
    times = []
    for _ in range(20):
        start = time.monotonic()
        dist.all_reduce(torch.ones(1), group=small)
        times.append(time.monotonic() - start)
    # One such large call takes at least about 30 ms. Two ranks with two threads each share the cores.
    assert sorted(times)[len(times) // 2] < 0.02
    thread.join()


IDLE = """
import os, time, torch, torch.distributed as dist
dist.init_process_group({backend!r})
tensor = torch.ones(1000)
for _ in range(20):
    dist.all_reduce(tensor)
dist.all_reduce(tensor, async_op=True).get_future().wait()
{pending}
time.sleep(0.5)
before = os.times()
time.sleep(1.0)
after = os.times()
print("used", after.user + after.system - before.user - before.system, flush=True)
{finish}
dist.barrier()
dist.destroy_process_group()
"""


@pytest.mark.alone
@pytest.mark.parametrize("pending", [False, True], ids=["nothing_in_flight", "a_receive_pending"])
def test_a_process_with_a_live_group_and_nothing_to_do_uses_no_cpu(pending):
    late = torch_late = ""
    if pending:
        late = "work = dist.irecv(tensor, 1 - dist.get_rank())"
        torch_late = "dist.isend(torch.ones(1000), 1 - dist.get_rank()).wait(); work.wait()"
    scripts = run_script(IDLE.format(backend=BACKEND, pending=late, finish=torch_late), world=2)
    for script in scripts:
        assert script.exitcode == 0, script.stderr
        # Clock ticks are 10 ms, and Python's own wake-up after the sleep may cost one tick.
        assert float(script.stdout.split()[1]) <= 0.02


MANY = """
import os, resource, sys, torch, torch.distributed as dist
dist.init_process_group({backend!r})
threads, descriptors = len(os.listdir("/proc/self/task")), len(os.listdir("/proc/self/fd"))
groups = [dist.new_group() for _ in range({count})]
for i, group in enumerate(groups):
    tensor = torch.full((3,), float(i))
    dist.all_reduce(tensor, group=group)
    assert (tensor == 2 * i).all()
print("threads", len(os.listdir("/proc/self/task")) - threads)
print("descriptors", len(os.listdir("/proc/self/fd")) - descriptors)
works = [dist.all_reduce(torch.ones(5), group=group, async_op=True) for group in groups]
for work in works:
    work.wait()
dist.barrier()
dist.destroy_process_group()
"""


@pytest.mark.slow
def test_1000_live_groups_work_at_1024_descriptors_without_more_threads():
    code = MANY.format(backend=BACKEND, count=1000)
    for script in run_script(code, world=2, timeout=120, limits={"RLIMIT_NOFILE": 1024}):
        assert script.exitcode == 0, script.stderr
        found = dict(line.split() for line in script.stdout.splitlines())
        assert int(found["threads"]) <= 3
        assert int(found["descriptors"]) <= 8


@on_ranks(2)
def test_groups_may_be_made_and_destroyed_again_and_again(rank, world):
    before = len(os.listdir("/proc/self/fd"))
    for i in range(40):
        group = dist.new_group()
        tensor = torch.full((100,), float(i))
        dist.all_reduce(tensor, group=group)
        assert (tensor == 2 * i).all()
        dist.destroy_process_group(group)
    assert len(os.listdir("/proc/self/fd")) <= before + 4


class Numbers(torch.utils.data.Dataset):
    def __len__(self):
        return 32

    def __getitem__(self, index):
        return torch.full((1000,), float(index))


@pytest.mark.slow
@on_ranks(2, fresh=True)
@pytest.mark.parametrize("context", ["fork"])
def test_a_data_loader_forked_during_a_live_group_changes_nothing(rank, world, context):
    dist.all_reduce(torch.ones(1000))
    for epoch in range(2):
        loader = torch.utils.data.DataLoader(Numbers(), batch_size=4, num_workers=2, multiprocessing_context=context)
        for i, batch in enumerate(loader):
            dist.all_reduce(batch)
            assert (batch == 2 * (torch.arange(4) + 4 * i).view(4, 1)).all()
    dist.barrier()


@pytest.mark.slow
@pytest.mark.skipif(BACKEND != "accl", reason="gloo notices the loss in its own time and words")
@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_a_live_data_loader_does_not_hide_that_its_rank_died(transport):
    # DataLoader workers hold copies of every descriptor unless the child closes them.
    def body(rank):
        loader = torch.utils.data.DataLoader(Numbers(), num_workers=1, persistent_workers=True)
        batches = iter(loader)
        next(batches)
        dist.barrier()
        if rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        start = time.monotonic()
        with pytest.raises(dist.DistNetworkError, match="rank 1"):
            dist.all_reduce(torch.ones(3))
        dist.destroy_process_group()
        return time.monotonic() - start

    outcomes = run_ranks(body, 2, env={"ACCL_TRANSPORTS": transport})
    assert outcomes[1].status == "died", outcomes[1].describe()
    assert check(outcomes[:1])[0] < 3


@pytest.mark.slow
@needs("ephemeral timeouts")
@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_forked_child_waits_for_no_lock_of_its_parents_list_of_calls():
    def in_child(backend, work):
        pid = os.fork()
        if pid == 0:
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
            signal.alarm(3)
            backend._start_coalescing()
            backend._add_ephemeral_timeout(timedelta(seconds=1))
            with contextlib.suppress(RuntimeError):
                work.is_completed()
            # If the call is still running, dropping its handle makes the list of calls watch the call.
            del work
            os._exit(0)
        return os.waitpid(pid, 0)[1]

    def body(rank):
        backend = dist.group.WORLD._get_backend(torch.device("cpu"))
        if rank == 1:
            dist.recv(torch.ones(1), 0, tag=1)
            return []
        works, is_over = [dist.irecv(torch.ones(1), 1, tag=2)], False
        # Each call adds up all these timeouts under the list's lock, so other threads queue for the lock. At a fork,
        # one of them holds it.
        for _ in range(200_000):
            backend._add_ephemeral_timeout(timedelta(milliseconds=1))

        def calls():
            while not is_over:
                works.append(dist.irecv(torch.ones(1), 1, tag=2))

        callers = [threading.Thread(target=calls) for _ in range(32)]
        [caller.start() for caller in callers]
        ends = []
        while len(ends) < 16 and not any(ends):
            ends.append(in_child(backend, works[0]))
        is_over = True
        [caller.join() for caller in callers]
        dist.send(torch.ones(1), 1, tag=1)
        backend.abort()
        return ends

    ended, _ = run_ranks(body, 2)
    assert ended.value == [0] * 16, ended


@on_ranks(2, fresh=True)
def test_an_exception_that_refuses_notes_ends_a_blocking_call_as_itself(rank, world):
    class Stubborn(Exception):
        def add_note(self, note):
            raise ValueError("no notes")

    def interrupt(*_):
        raise Stubborn

    store = dist.distributed_c10d._get_default_store()
    if rank == 0:
        signal.signal(signal.SIGALRM, interrupt)
        signal.setitimer(signal.ITIMER_REAL, 0.05)
        with pytest.raises(Stubborn):
            dist.all_reduce(torch.ones(1))
        store.set("interrupted", "")
    store.wait(["interrupted"])
