"""Calls on tensors of an accelerator, on the stand-in: order of streams, lifetime, futures, failures and refusals.

`make test-accelerator` runs the tests of values on the stand-in as well: see `support/staged.py`.
"""

import gc
import json
import os
import random
import re
import signal
import subprocess
import sys
import threading
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from support import init_group, on_ranks, run_ranks, standin
from support.versions import needs
from torch._C import _distributed_c10d as c10d
from torch_accl import _register

ORDERS = pytest.mark.parametrize("order", standin.ORDERS)

pytestmark = pytest.mark.skipif(
    torch.__version__ < "2.15", reason="the stand-in is written for the interfaces of torch 2.15"
)


@pytest.fixture(autouse=True, scope="module")
def module():
    """Compiles the stand-in once."""
    standin.build()


def start(order="early", backend=None, seed=1):
    """Registers the stand-in and creates the default group. Returns the module that controls the device."""
    module = standin.register(order, seed)
    init_group(backend)
    return module


def there(values, device="standin"):
    return torch.as_tensor(values, dtype=torch.float32).to(device)


def issue_and_freeze(module, rank, tensor):
    """Issues an all_reduce; rank 1 does so last. When its call can complete, the device of rank 0 has copied the
    contribution, and does nothing more by itself."""
    store = dist.distributed_c10d._get_default_store()
    if rank == 1:
        store.wait(["frozen"])
    work = dist.all_reduce(tensor, async_op=True)
    if rank == 0:
        time.sleep(0.2)
        module.freeze(True)
        store.set("frozen", "")
    return work


def threads():
    """Names of the threads of this process."""
    names = []
    for task in os.listdir("/proc/self/task"):
        with open(f"/proc/self/task/{task}/comm") as file:
            names.append(file.read().strip())
    return names


@on_ranks(2, fresh=True, init=False)
def test_a_group_named_accl_serves_the_cpu_and_accelerators(rank):
    # The types of torch that this machine lacks are left out.
    _register._may_exist = lambda device: device in ("cpu", "xpu")
    start()
    assert str(dist.get_backend_config()) == "cpu:accl,xpu:accl,standin:accl"
    backends = [dist.group.WORLD._get_backend(torch.device(name)) for name in ("cpu", "standin")]
    assert backends[0] is backends[1]
    assert "standin" not in dist.Backend.default_device_backend_map
    # One order of calls, whatever the device.
    works = [dist.all_reduce(tensor, async_op=True) for tensor in (torch.ones(3), there([1, 2, 3]), torch.ones(2))]
    for work in works:
        work.wait()


@on_ranks(2, fresh=True, init=False)
@pytest.mark.parametrize("backend", ["cpu:gloo,standin:accl", "cpu:accl,standin:gloo", "standin:accl"])
def test_a_group_serves_the_devices_that_its_name_gives_it(rank, backend):
    start("late", backend)
    if "cpu" in backend:
        tensor = torch.ones(3)
        dist.all_reduce(tensor)
        assert tensor.tolist() == [2.0] * 3
    if "standin:accl" in backend:
        tensor = there([1, 2, 3])
        dist.all_reduce(tensor)
        assert tensor.cpu().tolist() == [2.0, 4.0, 6.0]


@on_ranks(2, fresh=True, init=False)
@ORDERS
def test_results_follow_the_work_of_the_current_stream(rank, world, order):
    module = start(order, seed=rank)
    with standin.nothing_is_lost(module):
        for count in (1, 1000, 700_000):
            tensor = torch.full((count,), float(rank), device="standin")
            module.compute(20)
            tensor.add_(1)
            dist.all_reduce(tensor)
            tensor.mul_(2)
            work = dist.all_reduce(tensor, async_op=True)
            work.wait()
            tensor.add_(0.5)
            assert (tensor.cpu() == 12.5).all()
            del tensor, work
            dist.barrier()
    counts = module.counts()
    assert (counts["pageable"], counts["wrong_device"], counts["after_free"]) == (0, 0, 0)


@on_ranks(2, fresh=True, init=False)
@ORDERS
def test_tensors_on_the_second_device_are_copied_there(rank, order):
    module = start(order, seed=rank)
    tensor = there([1, 2, 3], "standin:1")
    dist.all_reduce(tensor)
    assert tensor.cpu().tolist() == [2.0, 4.0, 6.0]
    large = torch.full((100_000,), 1.0, device="standin:1")
    dist.all_reduce(large, async_op=True).wait()
    assert (large.cpu() == 2).all()
    assert module.counts()["wrong_device"] == 0
    assert torch.accelerator.current_device_index() == 0


@on_ranks(2, fresh=True, init=False)
@ORDERS
def test_a_wait_under_another_stream_sees_the_sum(rank, order):
    start(order, seed=rank)
    first, second, third = (torch.Stream("standin") for _ in range(3))
    for _ in range(10):
        with first:
            tensor = torch.full((1000,), float(rank + 1), device="standin")
            work = dist.all_reduce(tensor, async_op=True)
        with second:
            work.wait()
            result = tensor + 1
        with third:
            work.synchronize()
            other = tensor + 2
        first.synchronize()
        second.synchronize()
        third.synchronize()
        assert (result.cpu() == 4).all() and (other.cpu() == 5).all()


@on_ranks(2, fresh=True, init=False)
@ORDERS
def test_results_are_not_written_while_earlier_work_of_the_stream_may_still_read(rank, order):
    module = start(order, seed=rank)
    for count in (3, 200_000):
        if rank == 0:
            dist.send(torch.full((count,), 7.0, device="standin"), 1)
            continue
        tensor, copy = torch.full((count,), 1.0, device="standin"), torch.empty(count, device="standin")
        module.compute(20)
        copy.copy_(tensor)
        dist.irecv(tensor, 0).wait()
        assert (copy.cpu() == 1).all() and (tensor.cpu() == 7).all()


@on_ranks(2, fresh=True, init=False)
@ORDERS
def test_streams_of_the_program_may_be_those_that_copy(rank, order):
    """torch's pool hands out the same streams again, and a call whose stream was also its side stream ended the process."""
    start(order, seed=rank)
    for round_ in range(20):
        first, second = torch.Stream("standin"), torch.Stream("standin")
        with first:
            tensor = torch.full((100_000,), float(rank + round_), device="standin")
            work = dist.all_reduce(tensor, async_op=True)
        with second:
            work.wait()
            result = tensor + 1
        second.synchronize()
        assert (result.cpu() == 2 * round_ + 2).all(), round_


@on_ranks(2, fresh=True, init=False)
@ORDERS
def test_callbacks_of_futures_run_behind_the_results(rank, order):
    module = start(order, seed=rank)
    for _ in range(10):
        tensor = torch.full((1000,), float(rank + 1), device="standin")
        module.compute(5)
        future = dist.all_reduce(tensor, async_op=True).get_future().then(lambda done: done.value()[0] * 2)
        stream = torch.Stream("standin")
        with stream:
            doubled = future.wait()
            result = doubled + 1
        stream.synchronize()
        assert (result.cpu() == 7).all()


@on_ranks(2, fresh=True, init=False)
@ORDERS
def test_a_tensor_may_be_dropped_before_its_call_is_through(rank, order):
    module = start(order, seed=rank)
    with standin.nothing_is_lost(module):
        for round_ in range(20):
            kept = torch.full((1000,), float(rank), device="standin")
            outputs = [torch.empty(1000, device="standin") for _ in range(2)]
            dropped = torch.full((1000,), 7.0 + rank, device="standin")
            works = [dist.all_reduce(torch.ones(1000, device="standin"), async_op=True) for _ in range(3)]
            gathered = dist.all_gather(outputs, dropped, async_op=True)
            del dropped, works
            torch.full((1000,), -1.0, device="standin")
            gathered.wait()
            dist.all_reduce(kept)
            assert (kept.cpu() == 1).all() and [out.cpu()[-1].item() for out in outputs] == [7.0, 8.0], round_
            del kept, outputs, gathered
        dist.barrier()


@on_ranks(2, fresh=True, init=False)
@ORDERS
def test_views_of_every_layout_are_read_and_written(rank, order):
    start(order, seed=rank)
    host = torch.arange(48.0).reshape(4, 12)
    whole = host.to("standin")
    for view in (whole[:, ::3], whole.t()[2:5], whole[1:3, 4:8], whole[0, 0]):
        before = view.cpu()
        dist.all_reduce(view)
        assert view.cpu().equal(before * 2)
    complex_ = torch.randn(6, dtype=torch.complex64)
    shared = complex_.to("standin")
    dist.broadcast(shared, 0)
    conjugate = shared.conj()
    before = shared.cpu()
    # `dist.all_reduce` asks for a view as real numbers, which a conjugate has not.
    dist.group.WORLD.allreduce([conjugate]).wait()
    assert conjugate.is_conj() and conjugate.imag.is_neg()
    total = shared.cpu()
    assert total.equal(before * 2)
    dist.broadcast(conjugate.imag, 1)
    assert shared.cpu().equal(total)


@on_ranks(2, fresh=True, init=False)
def test_a_dropped_tensor_lives_until_its_results_are_copied(rank):
    """No stream waits for the call, and it is only enqueued when the backend drops calls that are through."""
    module = start("late")
    tensor = torch.ones(1000, device="standin")
    work = issue_and_freeze(module, rank, tensor)
    if rank == 0:
        future = work.get_future()
        until = time.monotonic() + 20
        while not future.done():
            assert time.monotonic() < until
            time.sleep(0.001)
        assert not work.is_completed()
        del tensor, work, future
        gc.collect()
        for _ in range(3):
            sent = dist.isend(torch.ones(1), rank)
            dist.irecv(torch.ones(1), rank).wait()
            sent.wait()
        module.freeze(False)
        for _ in range(2):
            torch.accelerator.synchronize()
        assert module.counts()["after_free"] == 0, module.counts()
    dist.barrier()


@on_ranks(2, fresh=True, init=False)
def test_a_call_is_completed_when_the_device_is_through(rank):
    module = start("late")
    tensor = there([1, 2, 3])
    work = issue_and_freeze(module, rank, tensor)
    if rank == 0:
        work.wait()
        time.sleep(0.05)
        assert not work.is_completed()
        module.freeze(False)
    work.wait()
    until = time.monotonic() + 20
    while not work.is_completed():
        assert time.monotonic() < until
        time.sleep(0.001)
    assert work.is_success() and work.exception() is None
    assert work.result()[0] is tensor and tensor.cpu().tolist() == [2.0, 4.0, 6.0]


@on_ranks(2, fresh=True, init=False)
def test_phases_separate_copies_from_a_late_peer(rank):
    module = start("late")
    tensor = there(range(1 << 18))
    dist.all_reduce(tensor)
    if rank == 0:
        # The device makes no copy before the peer has waited for a while.
        module.freeze(True)
        threading.Timer(0.4, module.freeze, (False,)).start()
    with torch.autograd.profiler.profile(record_shapes=True) as profile:
        dist.all_reduce(tensor)
    [times] = [event.kwinputs for event in profile.function_events if event.name == "accl:phases:all_reduce"]
    peers = times["peers_us"] + times["transfer_us"]
    late, other = (times["bus_us"], peers) if rank == 0 else (peers, times["bus_us"])
    assert late > 200_000 > other, times


@needs("completion hooks")
@on_ranks(2, fresh=True, init=False)
def test_torchs_flight_recorder_learns_of_the_end_of_a_call_without_another_call(rank):
    start("late")
    tensor = there([1, 2, 3])
    work = dist.all_reduce(tensor, async_op=True)
    work.wait()
    until = time.monotonic() + 20
    while True:
        [entry] = json.loads(c10d._dump_fr_trace_json(backend="accl"))["entries"]
        if entry["state"] == "completed":
            break
        assert time.monotonic() < until, entry
        time.sleep(0.01)
    assert work.is_completed() and tensor.cpu().tolist() == [2.0, 4.0, 6.0]


@on_ranks(2, fresh=True, init=False)
def test_a_stream_that_is_blocked_continues_when_the_call_is_through(rank):
    module = start("late")
    store = dist.distributed_c10d._get_default_store()
    tensor, result = there([1, 2, 3]), torch.zeros(3, device="standin")
    if rank == 1:
        store.wait(["blocked"])
    work = dist.all_reduce(tensor, async_op=True)
    work.block_current_stream()
    result.copy_(tensor)
    # A call that is issued behind the block does not hold up the copies of the call that ends it.
    second = dist.broadcast(result, 0, async_op=True)
    if rank == 0:
        time.sleep(0.2)
        assert not torch.accelerator.current_stream().query() and module.counts()["tasks"] > 0
        # The contribution has been copied, and from now on the device does nothing by itself.
        module.freeze(True)
        store.set("blocked", "")
        torch.accelerator.current_stream().synchronize()
        module.freeze(False)
    second.wait()
    assert result.cpu().tolist() == [2.0, 4.0, 6.0]


@on_ranks(2, 3, fresh=True, init=False)
@pytest.mark.parametrize("count", [10, 3000, 300_000])
@ORDERS
def test_calls_in_flight_that_share_memory_follow_each_other(rank, world, order, count):
    start(order, seed=rank)
    tensor = torch.full((count,), 1.0, device="standin")
    works = [dist.all_reduce(tensor, async_op=True) for _ in range(3)]
    works[2].wait()
    assert (tensor.cpu() == world**3).all()
    whole = torch.arange(float(count * world), device="standin")
    part = torch.empty(count, device="standin")
    # One writes what the next one reads, and that one writes what the first one reads.
    works = [
        dist.reduce_scatter_tensor(part, whole, async_op=True),
        dist.all_gather_into_tensor(whole, part, async_op=True),
    ]
    dist.all_reduce(whole)
    assert (whole.cpu() == torch.arange(count * world) * world * world).all()
    # Tensors that are not dense are packed when a call is issued, so they are packed again.
    columns = torch.ones(count, 2, device="standin")
    works = [dist.all_reduce(columns[:, 0], async_op=True) for _ in range(2)]
    works += [dist.broadcast(columns[:, 1], 1, async_op=True), dist.all_reduce(columns, async_op=True)]
    works[-1].wait()
    expected = torch.tensor([float(world**3), float(world)]).expand(count, 2)
    assert columns.cpu().equal(expected)
    # Calls of other memory do not wait: this rank's second call would keep the other rank from its first.
    other = dist.new_group()
    calls = [(None, torch.ones(count, device="standin")), (other, torch.ones(count, device="standin"))]
    works = [dist.all_reduce(mine, group=group, async_op=True) for group, mine in (calls if rank else calls[::-1])]
    for work in works:
        work.wait()
    assert all((mine.cpu() == world).all() for _, mine in calls)


@on_ranks(2, fresh=True, init=False, deadline=15)
@pytest.mark.parametrize("kind", ["all_reduce", "send"])
@pytest.mark.parametrize("order", ["early", "late"])
def test_a_stream_that_is_blocked_and_makes_copies_does_not_wait_for_itself(rank, order, kind):
    """torch's pool hands out the streams that make copies: blocked, they held up the copies that end the block."""
    start(order, seed=rank)
    # A message of this size is copied in as the other rank receives it.
    count = 1000 if kind == "all_reduce" else 4 << 20
    tensor, result = torch.empty(count, device="standin"), torch.empty(1, device="standin")
    # All streams of the pool.
    for index, stream in enumerate([torch.Stream("standin") for _ in range(8)]):
        tensor.fill_(rank + index)
        if kind == "all_reduce":
            work = dist.all_reduce(tensor, async_op=True)
        else:
            work = dist.irecv(tensor, 0) if rank == 1 else dist.isend(tensor, 1)
        with stream:
            work.block_current_stream()
            result.copy_(tensor[-1:])
        stream.synchronize()
        assert result.item() == (2 * index + 1 if kind == "all_reduce" else index), index
        work.wait()


@on_ranks(2, fresh=True, init=False)
def test_a_block_stops_the_stream_of_the_tensors_and_not_of_the_current_device(rank):
    module = start("early")
    tensor = there([1, 2, 3], "standin:1")
    if rank == 1:
        time.sleep(0.2)
    work = dist.all_reduce(tensor, async_op=True)
    work.block_current_stream()
    result = torch.empty(3, device="standin:1")
    result.copy_(tensor)
    assert torch.accelerator.current_stream(torch.device("standin", 0)).query()
    work.wait()
    assert result.cpu().tolist() == [2.0, 4.0, 6.0] and module.counts()["wrong_device"] == 0


@on_ranks(2, fresh=True, init=False)
@ORDERS
def test_a_call_that_writes_follows_an_earlier_one_of_the_same_memory_that_reads(rank, order):
    """The second call is issued on a stream without other work, and its data is there before the first call can read."""
    module = start(order, seed=rank)
    values = torch.arange(300_000, dtype=torch.float32)
    busy = torch.Stream("standin")
    for _ in range(3):
        tensor = values.to("standin") + rank
        whole = torch.empty(2 * tensor.numel(), device="standin")
        busy.wait_event(torch.accelerator.current_stream().record_event())
        with busy:
            module.compute(40)
            works = [dist.all_gather_into_tensor(whole, tensor, async_op=True)]
        works.append(dist.broadcast(tensor, 1, async_op=True))
        for work in works:
            work.wait()
        assert whole.cpu().equal(torch.cat([values, values + 1])) and tensor.cpu().equal(values + 1)


@on_ranks(2, fresh=True, init=False)
@ORDERS
def test_the_future_of_a_batch_completes_behind_the_results(rank, order):
    module = start(order, seed=rank)
    backend = dist.group.WORLD._get_backend(torch.device("standin"))
    for how in ("future", "wait", "block") * 3:
        tensors = [torch.full((1000,), float(rank + 1), device=f"standin:{device}") for device in (0, 0, 1)]
        module.compute(5)
        backend._start_coalescing()
        for tensor in tensors:
            dist.all_reduce(tensor, async_op=True)
        work = backend._end_coalescing()
        stream = torch.Stream("standin")
        if how == "block":
            work.block_current_stream()
            results = [tensor + 1 for tensor in tensors]
            work.wait()
        else:
            with stream:
                _ = work.get_future().wait() if how == "future" else work.wait()
                results = [tensor + 1 for tensor in tensors]
        torch.accelerator.synchronize()
        stream.synchronize()
        assert all((result.cpu() == 4).all() for result in results), how


@on_ranks(2, fresh=True, init=False)
def test_a_stream_that_is_blocked_continues_when_the_call_fails(rank):
    start("late")
    tensor = there([1, 2, 3])
    if rank == 0:
        work = dist.all_reduce(tensor, async_op=True)
        work.block_current_stream()
        dist.group.WORLD.abort()
        torch.accelerator.current_stream().synchronize()
        with pytest.raises(dist.DistBackendError, match="abort"):
            work.wait()
        assert tensor.cpu().tolist() == [1.0, 2.0, 3.0], "nothing is copied out after a failure"
    else:
        with pytest.raises(dist.DistBackendError):
            dist.recv(tensor, 0)


@on_ranks(2, fresh=True, init=False)
@pytest.mark.parametrize("seed", range(6))
@ORDERS
def test_random_programs_give_the_results_of_the_host(rank, world, order, seed):
    module = start(order, seed=seed * 2 + rank)
    program = random.Random(seed)
    streams = [torch.Stream("standin") for _ in range(3)]
    mine = random.Random(rank + 100 * seed)
    with standin.nothing_is_lost(module):
        pending = []
        for step in range(40):
            kind = program.choice(["all_reduce", "all_gather", "broadcast", "reduce_scatter", "exchange", "free"])
            count, strided = program.choice([1, 7, 1000, 40_000]), program.random() < 0.3
            base = [torch.arange(count * world, dtype=torch.float32) % 13 + r + step for r in range(world)]
            issue, look = mine.choice(streams), mine.choice(streams)
            with issue:
                made = base[rank].to("standin")
                if strided:
                    made = made.repeat_interleave(2)[::2]
                result, expected, work = _issue(kind, made, base, rank, world)
            if work is None:
                continue
            pending.append((look, work, result, expected, (step, kind, count, strided)))
            del made, result, work
            mine.shuffle(pending)
            while len(pending) > mine.choice([0, 2, 5]):
                _check(*pending.pop())
        while pending:
            _check(*pending.pop())
        del pending
        dist.barrier()


def _issue(kind, made, base, rank, world):
    """Issues a call. Returns its result, the expected values, and its work."""
    part = made.numel() // world
    if kind == "all_reduce":
        return made, sum(base), dist.all_reduce(made, async_op=True)
    if kind == "broadcast":
        return made, base[world - 1], dist.broadcast(made, world - 1, async_op=True)
    if kind == "all_gather":
        outputs = torch.empty(made.numel() * world, device="standin")
        work = dist.all_gather_into_tensor(outputs, made.contiguous(), async_op=True)
        return outputs, torch.cat(base), work
    if kind == "reduce_scatter":
        output = torch.empty(part, device="standin")
        work = dist.reduce_scatter_tensor(output, made.contiguous(), async_op=True)
        return output, sum(base)[rank * part : (rank + 1) * part], work
    if kind == "exchange":
        into = torch.empty_like(made)
        sent = dist.isend(made, (rank + 1) % world)
        got = dist.irecv(into, (rank - 1) % world)
        sent.wait()
        return into, base[(rank - 1) % world], got
    return None, None, None


def _check(look, work, result, expected, step):
    with look:
        work.wait()
        copy = result + 0
    look.synchronize()
    assert copy.cpu().equal(expected), step


# --- the thread, and machines without an accelerator ---


@on_ranks(2, fresh=True)
def test_calls_on_the_cpu_start_no_thread_for_accelerators(rank):
    dist.all_reduce(torch.ones(1000), async_op=True).wait()
    assert "accl-accelerato" not in threads()


@on_ranks(2, fresh=True, init=False)
def test_small_blocking_calls_use_their_callers_thread_alone(rank):
    start()
    for _ in range(5):
        tensor = there([1, 2])
        dist.all_reduce(tensor)
        assert tensor.cpu().tolist() == [2.0, 4.0]
    assert "accl-accelerato" not in threads()
    # Behind longer work, the call waits for the device in the engine, with its deadline.
    large = torch.ones(1 << 20, device="standin")
    dist.all_reduce(large)
    assert (large.cpu() == 2).all() and "accl-accelerato" in threads()


@on_ranks(2, fresh=True, init=False)
@ORDERS
def test_small_calls_on_several_streams_use_memory_of_their_own(rank, order):
    start(order, seed=rank)
    streams, results = [torch.Stream("standin") for _ in range(4)], []
    for round_ in range(12):
        with streams[round_ % 4]:
            tensor = there([round_, rank, round_])
            dist.all_reduce(tensor)
            results.append(tensor)
    torch.accelerator.synchronize()
    for stream in streams:
        stream.synchronize()
    assert [result.cpu().tolist() for result in results] == [[2.0 * i, 1.0, 2.0 * i] for i in range(12)]


@on_ranks(2, fresh=True, init=False)
def test_one_thread_follows_the_copies_of_all_devices_and_groups(rank):
    start()
    groups = [dist.new_group() for _ in range(3)]
    for group in groups:
        for device in ("standin:0", "standin:1"):
            dist.all_reduce(there([1, 2], device), group=group, async_op=True).wait()
    assert threads().count("accl-accelerato") == 1


@pytest.mark.parametrize("ending", ["destroyed", "waited", "in flight"])
def test_a_process_ends_with_copies_behind_it(ending, tmp_path):
    """Ranks of the runner leave at once, so these are processes of their own, which run the functions for the exit."""
    script = f"""
import sys
sys.path[:0] = {[str(standin.ROOT / "tests")]!r}
import torch, torch.distributed as dist
import torch_accl
from support import standin
standin.register("late")
rank = int(sys.argv[1])
dist.init_process_group("accl", store=dist.FileStore({str(tmp_path / "store")!r}, 2), rank=rank, world_size=2)
tensor = torch.full((200_000,), 1.0 + rank, device="standin")
work = dist.all_reduce(tensor, async_op=True)
if {ending!r} != "in flight":
    work.wait()
if {ending!r} == "destroyed":
    dist.destroy_process_group()
    assert (tensor.cpu() == 3).all()
"""
    command = [sys.executable, "-c", script]
    ranks = [
        subprocess.Popen([*command, str(rank)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for rank in (0, 1)
    ]
    for rank in ranks:
        _, errors = rank.communicate(timeout=60)
        assert rank.returncode == 0 and not re.search("Error|panick|Fatal", errors), errors


@on_ranks(2, fresh=True, init=False)
def test_a_forked_child_ends_without_the_threads_of_its_parent(rank):
    start()
    dist.all_reduce(torch.ones(100_000, device="standin"), async_op=True).wait()
    child = os.fork()
    if child == 0:
        signal.alarm(20)
        _register._end()
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    tensor = there([1, 2])
    dist.all_reduce(tensor)
    assert tensor.cpu().tolist() == [2.0, 4.0]


# --- refusals and failures ---


@on_ranks(2, fresh=True, init=False)
def test_a_call_with_tensors_on_two_devices_names_both(rank):
    start()
    mixed = [
        ("cpu and on standin:0", there([1, 2]), torch.ones(1)),
        ("standin:1 and on standin:0", there([1, 2]), there([1], "standin:1")),
        ("standin:1 and on cpu", torch.ones(2), there([1], "standin:1")),
    ]
    for places, output, own in mixed:
        with pytest.raises(
            TypeError, match=rf"\[rank {rank}\] all_gather: .*{places}; put all tensors of a call on one device"
        ):
            dist.all_gather_into_tensor(output, own)
    tensor = there([1])
    dist.all_reduce(tensor)
    assert tensor.item() == 2


@on_ranks(1, fresh=True, init=False)
def test_a_device_without_streams_is_refused_by_name(rank):
    start(backend="cpu:accl,meta:accl")
    backend = dist.group.WORLD._get_backend(torch.device("cpu"))
    with pytest.raises(TypeError, match=r"\[rank 0\] all_reduce: tensor at index 0 is on device meta; accl takes"):
        backend.allreduce([torch.ones(2, device="meta")], dist.AllreduceOptions())


@on_ranks(1, fresh=True, init=False)
def test_the_capture_of_a_graph_is_refused_before_anything_is_enqueued(rank):
    module = start("late")
    tensor = there([1, 2])
    torch.accelerator.synchronize()
    module.capture(True)
    with pytest.raises(
        NotImplementedError, match=r"\[rank 0\] all_reduce: the current stream of standin:0 captures a graph"
    ):
        dist.all_reduce(tensor)
    assert module.counts()["tasks"] == 0
    module.capture(False)
    dist.all_reduce(tensor)
    assert tensor.cpu().tolist() == [1.0, 2.0]


@on_ranks(2, fresh=True, init=False)
def test_an_output_with_several_elements_at_one_address_is_refused(rank):
    start()
    with pytest.raises(ValueError, match="several elements at one address"):
        dist.all_reduce(torch.ones(1, device="standin").expand(4))
    dist.barrier()


@on_ranks(2, fresh=True, init=False)
@pytest.mark.parametrize("when", ["before", "during"])
def test_a_broken_device_is_named_on_all_ranks(rank, when):
    module = start("late")
    tensor = torch.ones(1000, device="standin")
    module.compute(100)
    if rank == 1 and when == "before":
        module.break_context(True)
    with pytest.raises(dist.DistBackendError, match="illegal memory access"):
        work = dist.all_reduce(tensor, async_op=True)
        if rank == 1:
            module.break_context(True)
        work.wait()
    module.break_context(False)


@on_ranks(2, fresh=True, init=False)
def test_a_call_that_times_out_names_the_missing_rank(rank):
    start("late")
    tensor = there([1, 2])
    if rank == 0:
        work = dist.all_reduce(tensor, async_op=True)
        with pytest.raises(dist.DistBackendError, match="Timed out waiting"):
            work.wait(timedelta(milliseconds=100))
        dist.barrier(async_op=True)
        work.wait()
    else:
        time.sleep(0.5)
        dist.all_reduce(tensor)
        dist.barrier(async_op=True)
    assert tensor.cpu().tolist() == [2.0, 4.0]


@on_ranks(2, fresh=True, init=False)
@pytest.mark.parametrize("how", ["message", "issued behind another call", "blocking behind another call"])
def test_an_interrupt_ends_a_wait_for_an_accelerator(rank, how):
    start("late")
    tensor = there([1, 2])
    if rank == 1:
        with pytest.raises((dist.DistBackendError, dist.DistNetworkError)):
            dist.recv(tensor, 0)
        return
    if how != "message":
        # The other rank does not issue this call.
        work = dist.all_reduce(tensor, async_op=True)
    threading.Timer(0.2, lambda: os.kill(os.getpid(), signal.SIGINT)).start()
    with pytest.raises(KeyboardInterrupt):
        dist.recv(tensor, 1) if how == "message" else dist.all_reduce(tensor, async_op=how.startswith("issued"))
    if how != "message":
        # The other ranks may have issued the call, so the group has ended.
        with pytest.raises(dist.DistBackendError, match="interrupted"):
            dist.all_reduce(tensor)
        with pytest.raises(dist.DistBackendError, match="interrupted"):
            work.wait()
    gc.collect()


def test_a_killed_rank_is_named_while_a_device_waits_for_it():
    def body(rank):
        start("late")
        tensor = torch.ones(100_000, device="standin")
        dist.all_reduce(tensor)
        if rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        with pytest.raises(dist.DistNetworkError, match="rank 1"):
            for _ in range(100):
                dist.all_reduce(tensor)

    outcomes = run_ranks(body, 2, init=False)
    assert outcomes[0].status == "ok", outcomes[0].describe()


@on_ranks(1, fresh=True, init=False)
def test_memory_is_allocated_on_the_device_that_is_asked_for(rank):
    start()
    backend = dist.group.WORLD._get_backend(torch.device("standin"))
    tensor = backend.allocate_tensor(12, dtype=torch.float32, device=torch.device("standin:1"))
    assert (tensor.device, tensor.numel()) == (torch.device("standin:1"), 12)


# --- symptoms that users of other backends have reported ---


@on_ranks(2, fresh=True, init=False)
@ORDERS
def test_a_future_that_another_stream_waits_for_does_not_show_old_values(rank, order):
    """gloo's futures did not know the streams of CUDA tensors (pytorch/pytorch#170812)."""
    start(order, seed=rank)
    tensors = [torch.full((50_000,), float(rank + index), device="standin") for index in range(6)]
    futures = [dist.all_reduce(tensor, async_op=True).get_future() for tensor in tensors]
    stream = torch.Stream("standin")
    for index, (future, tensor) in enumerate(zip(futures, tensors, strict=True)):
        with stream:
            future.wait()
            assert tensor[-1].item() == 2 * index + 1
            assert future.value()[0] is tensor


@on_ranks(1, 2, fresh=True, init=False)
@ORDERS
def test_a_batch_of_gathers_in_place_does_not_crash(rank, world, order):
    """gloo's thread touched memory of the device (pytorch/pytorch#152645)."""
    start(order, seed=rank)
    for count in (10, 100_000):
        wholes = [torch.zeros(count * world, device="standin") for _ in range(3)]
        parts = [whole.view(world, count)[rank].fill_(float(10 * index + rank)) for index, whole in enumerate(wholes)]
        with dist._coalescing_manager(async_ops=True) as batch:
            for whole, part in zip(wholes, parts, strict=True):
                dist.all_gather_into_tensor(whole, part)
        batch.wait()
        for index, whole in enumerate(wholes):
            assert whole.cpu().view(world, count)[:, -1].tolist() == [10.0 * index + r for r in range(world)]
        with dist._coalescing_manager(device=torch.device("standin"), async_ops=True) as batch:
            for part, whole in zip(parts, wholes, strict=True):
                dist.reduce_scatter_tensor(part, whole)
        batch.wait()
        assert [part[0].item() for part in parts] == [world * (10.0 * index + rank) for index in range(3)]


@on_ranks(2, 3, fresh=True, init=False)
@ORDERS
def test_a_reduction_leaves_the_tensors_of_other_ranks_as_they_were(rank, world, order):
    """gloo wrote parts of the sum there (pytorch/pytorch#21480)."""
    start(order, seed=rank)
    for count in (3, 100_000):
        tensor = torch.full((count,), rank + 1.0, device="standin")
        work = dist.reduce(tensor, 1, async_op=True)
        work.wait()
        dist.reduce(tensor, 1)
        total = world * (world + 1) / 2
        assert (tensor.cpu() == (total + total - 2 if rank == 1 else rank + 1)).all()


@on_ranks(2, fresh=True, init=False)
@pytest.mark.parametrize("backend", ["accl", "cpu:gloo,standin:accl", "cpu:accl,standin:accl"])
def test_a_group_with_a_device_of_its_own_splits_and_ends(rank, backend):
    """Groups created with `device_id` connect at once, and could not be split or had no barrier (pytorch/pytorch#191954)."""
    module = standin.register("late", rank + 1)
    device = torch.device("standin", rank)
    torch.accelerator.set_device_index(rank)
    init_group(backend, device_id=device)
    dist.barrier(device_ids=[rank])
    whole = dist.new_group(device_id=device)
    groups = [(None, 2), (whole, 2)]
    # gloo refuses options of other backends.
    groups += [] if "gloo" in backend else [(dist.split_group(split_ranks=[[0], [1]]), 1)]
    for group, ranks in groups:
        tensor = torch.full((1000,), 3.0, device=device)
        dist.all_reduce(tensor, group=group)
        assert (tensor.cpu() == 3 * ranks).all()
        dist.barrier(group=group)
    dist.barrier()
    dist.destroy_process_group(whole)
    dist.destroy_process_group()
    assert module.counts()["wrong_device"] == 0


@on_ranks(3, fresh=True, init=False)
@pytest.mark.parametrize("kind", ["accelerator", "cpu"])
def test_ranks_outside_a_new_group_need_no_method_of_nccl_if_the_job_has_a_device(rank, kind):
    """torch then calls `perform_nocolor_split` on ranks that are not in the group, and raised an AttributeError."""
    if kind == "accelerator":
        standin.register()
    device = torch.device("standin" if kind == "accelerator" else "cpu", 0)
    init_group(device_id=device)
    group = dist.new_group([0, 2])
    tensor = torch.ones(3, device=device)
    if rank != 1:
        dist.all_reduce(tensor, group=group)
    assert tensor.cpu().tolist() == [1.0 if rank == 1 else 2.0] * 3
    pairs = dist.new_subgroups(1)[0]
    dist.all_reduce(tensor, group=pairs)
    dist.barrier()


@on_ranks(2, fresh=True, init=False)
def test_a_group_that_makes_no_more_calls_keeps_no_memory_of_the_device(rank):
    module = start("late")
    group = dist.new_group()
    torch.accelerator.synchronize()
    before = module.counts()["device_bytes"]
    works = [dist.all_reduce(torch.ones(50_000, device="standin"), group=group, async_op=True) for _ in range(3)]
    works.pop().wait()
    del works
    until = time.monotonic() + 20
    while module.counts()["device_bytes"] != before:
        assert time.monotonic() < until, module.counts()
        time.sleep(0.001)
        torch.accelerator.current_stream().query()


@on_ranks(2, fresh=True, init=False)
@ORDERS
def test_results_are_there_once_a_call_says_that_it_is_completed(rank, order):
    start(order, seed=rank)
    for count in (5, 100_000):
        tensor = torch.full((count,), rank + 1.0, device="standin")
        work = dist.all_reduce(tensor, async_op=True)
        until = time.monotonic() + 20
        while not work.is_completed():
            assert time.monotonic() < until
        stream = torch.Stream("standin")
        with stream:
            # No stream waits for this call.
            assert (tensor.cpu() == 3).all()
        assert work.result()[0] is tensor


@on_ranks(2, 3, fresh=True, init=False)
@pytest.mark.parametrize("kind", ["blocking", "asynchronous", "monitored"])
@ORDERS
def test_a_barrier_returns_when_earlier_calls_of_the_group_are_through(rank, world, order, kind):
    module = start(order, seed=rank)
    for count in (5, 200_000):
        tensors = [torch.full((count,), rank + 1.0, device=f"standin:{device}") for device in (0, 1, 0)]
        works = [dist.all_reduce(tensor, async_op=True) for tensor in tensors]
        module.compute(20)
        if kind == "monitored":
            # This barrier does not end the calls.
            dist.monitored_barrier()
        elif kind == "blocking":
            dist.barrier()
        else:
            dist.barrier(async_op=True).wait()
        if kind != "monitored":
            # A completion thread may just be completing a work. The device does nothing more for a call that is not through.
            module.freeze(True)
            until = time.monotonic() + 5
            while not all(work.is_completed() for work in works):
                assert time.monotonic() < until
                time.sleep(0.001)
            module.freeze(False)
        for work in works:
            work.wait()
        assert all((tensor.cpu() == world * (world + 1) / 2).all() for tensor in tensors)


@on_ranks(2, fresh=True, init=False)
@ORDERS
def test_a_thread_that_waits_sees_the_result_on_its_own_stream(rank, order):
    start(order, seed=rank)
    tensors = [torch.full((20_000,), float(rank + index), device="standin") for index in range(4)]
    works = [dist.all_reduce(tensor, async_op=True) for tensor in tensors]
    seen = {}

    def wait(index):
        with torch.Stream("standin"):
            works[index].wait()
            seen[index] = (tensors[index] + 0).cpu().unique().tolist()

    waiting = [threading.Thread(target=wait, args=(index,)) for index in range(4)]
    for thread in waiting:
        thread.start()
    for thread in waiting:
        thread.join(20)
    assert seen == {index: [2.0 * index + 1] for index in range(4)}


@on_ranks(2, fresh=True, init=False)
@pytest.mark.parametrize("ending", ["abort", "destroy", "shutdown"])
def test_a_group_that_is_ended_with_calls_in_flight_gives_its_memory_back(rank, ending):
    module = start("late")
    with standin.nothing_is_lost(module):
        group = dist.new_group()
        tensors = [torch.full((100_000,), rank + 1.0, device="standin") for _ in range(3)]
        dist.all_reduce(tensors[0], group=group)
        works = [dist.all_reduce(tensor, group=group, async_op=True) for tensor in tensors]
        # A call that the other rank never joins.
        works.append(dist.irecv(tensors[0], 1 - rank, group=group, tag=7))
        dist.barrier()
        module.compute(50)
        backend = group._get_backend(torch.device("standin"))
        if ending == "abort":
            backend.abort()
        elif ending == "shutdown":
            backend.abort()
            backend.shutdown()
        if ending != "destroy":
            with pytest.raises((dist.DistBackendError, dist.DistNetworkError)):
                works[-1].wait()
        else:
            works.pop()
            while works:
                works.pop().wait()
            # A message is in flight, so the end of the group on one rank fails calls that another one waits for.
            dist.barrier()
        del works, backend
        dist.destroy_process_group(group)
        del group, tensors
        dist.barrier()
        tensor = there([1, 2])
        dist.all_reduce(tensor)
        assert tensor.cpu().tolist() == [2.0, 4.0]
        del tensor


@on_ranks(2, fresh=True, init=False)
@ORDERS
def test_messages_from_any_rank_name_their_sender(rank, order):
    start(order, seed=rank)
    for count in (4, 60_000):
        tensor = torch.full((count,), float(rank), device="standin")
        if rank == 0:
            dist.send(tensor, 1, tag=3)
            assert dist.recv(tensor, tag=4) == 1 and (tensor.cpu() == 1).all()
        else:
            other = torch.empty_like(tensor)
            work = dist.irecv(other, tag=3)
            sent = dist.isend(tensor, 0, tag=4)
            work.wait()
            assert work._source_rank() == 0 and (other.cpu() == 0).all()
            sent.wait()
