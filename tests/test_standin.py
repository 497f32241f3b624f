"""The stand-in for an accelerator finds what tests with it must find: forgotten waits, lost memory, and copies that block."""

import ctypes
import os
import signal

import pytest
import torch
from support import standin
from support.runner import on_ranks

pytestmark = pytest.mark.skipif(
    torch.__version__ < "2.15", reason="the stand-in is written for the interfaces of torch 2.15"
)


@pytest.fixture(autouse=True, scope="module")
def module():
    """Compiles the stand-in once."""
    standin.build()


@on_ranks(1, fresh=True, init=False)
@pytest.mark.parametrize("order", standin.ORDERS)
def test_operators_give_the_results_of_the_host(order):
    module = standin.register(order)
    with standin.nothing_is_lost(module):
        for device in ("standin:0", "standin:1"):
            host = torch.arange(24.0).reshape(2, 3, 4)
            there = host.to(device)
            assert (there + 1).cpu().equal(host + 1)
            assert there.transpose(0, 2)[1:].contiguous().cpu().equal(host.transpose(0, 2)[1:].contiguous())
            assert there.sum().item() == host.sum().item()
            there[0].copy_(there[1])
            assert there.cpu()[0].equal(host[1])
            small = torch.empty(2, device=device)
            small.resize_(5).fill_(3)
            assert small.cpu().tolist() == [3.0] * 5
            moved = there.to("standin:0" if device.endswith("1") else "standin:1")
            assert moved.cpu()[1].equal(host[1])
            del there, small, moved
    assert module.counts()["wrong_device"] == 0


@on_ranks(1, fresh=True, init=False)
def test_the_hosts_first_touch_of_device_memory_ends_the_process():
    standin.register()
    there = torch.ones(4, device="standin")
    child = os.fork()
    if child == 0:
        ctypes.c_float.from_address(there.data_ptr()).value  # noqa: B018  the touch is the test
        os._exit(0)
    assert os.WTERMSIG(os.waitpid(child, 0)[1]) == signal.SIGSEGV


@on_ranks(1, fresh=True, init=False)
def test_a_forgotten_wait_reads_garbage_in_the_late_order_alone():
    module = standin.register()
    source = torch.arange(100.0).pin_memory()
    for order, is_right in (("early", True), ("late", False)):
        module.set_order(order, 1)
        side = torch.Stream("standin")
        target = torch.empty(100, device="standin")
        with side:
            target.copy_(source, non_blocking=True)
        # The current stream does not wait for the side stream.
        assert target.cpu().equal(source) == is_right
        torch.accelerator.synchronize()
        assert target.cpu().equal(source)


@on_ranks(1, fresh=True, init=False)
@pytest.mark.parametrize("order", standin.ORDERS)
def test_streams_that_wait_for_events_see_what_was_done_before(order):
    module = standin.register(order, seed=7)
    with standin.nothing_is_lost(module):
        for _ in range(20):
            side = torch.Stream("standin")
            there = torch.zeros(10, device="standin")
            module.compute(5)
            there.fill_(4)
            begun = torch.accelerator.current_stream().record_event()
            with side:
                side.wait_event(begun)
                there.add_(1)
                done = side.record_event()
            torch.accelerator.current_stream().wait_event(done)
            assert there.cpu().tolist() == [5.0] * 10
            del there, begun, done


@on_ranks(1, fresh=True, init=False)
def test_each_query_moves_a_stream_by_one_step():
    module = standin.register("late")
    module.compute(5)
    event = torch.accelerator.current_stream().record_event()
    answers = [event.query() for _ in range(7)]
    assert answers == [False] * 5 + [True, True]


@on_ranks(1, fresh=True, init=False)
def test_freed_memory_is_filled_with_garbage_in_the_order_of_its_stream():
    standin.register("late")
    there = torch.ones(8, device="standin")
    target = torch.empty(8, device="standin")
    target.copy_(there)
    del there
    assert target.cpu().tolist() == [1.0] * 8, "the copy is before the end of its source"
    source = torch.ones(8, device="standin")
    side = torch.Stream("standin")
    with side:
        target.copy_(source)
    del source
    # Torch could give this tensor the memory of the last one.
    torch.ones(8, device="standin")
    torch.accelerator.current_stream().synchronize()
    side.synchronize()
    assert target.cpu().tolist() != [1.0] * 8, "no stream knew that the side stream still reads"


@on_ranks(1, fresh=True, init=False)
def test_faults_that_devices_forgive_are_counted():
    module = standin.register()
    there = torch.ones(4, device="standin:1")
    torch.empty(4).copy_(there, non_blocking=True)
    assert module.counts()["pageable"] == 1
    event = torch.Event("standin")
    event.record()
    assert module.counts()["events"] == 1
    pinned = torch.ones(4).pin_memory()
    assert pinned.is_pinned() and module.counts()["pinned_bytes"] == 16
    del event, pinned
    assert (module.counts()["events"], module.counts()["pinned_bytes"]) == (0, 0)
    module.break_context(True)
    with pytest.raises(RuntimeError, match="illegal memory access"):
        there.cpu()
    module.break_context(False)
    module.capture(True)
    assert torch.accelerator.current_stream() is not None
    module.capture(False)
