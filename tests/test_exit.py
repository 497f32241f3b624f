"""How a process exits: without a destroy call, with calls in flight, after errors, and by Ctrl-C."""

import multiprocessing
import os
import re
import signal
import time

import pytest
import torch
import torch.distributed as dist
from support import BACKEND, run_script, start_script
from support.accelerators import accelerator  # noqa: F401  this autouse fixture runs each test twice
from support.versions import MONITORED_BARRIER

HEAD = f"""
import os, sys, time, torch, torch.distributed as dist
dist.init_process_group({BACKEND!r})
rank = dist.get_rank()
tensor = torch.ones(1000)
dist.all_reduce(tensor)
"""

LEAVING = {
    "at_once": "",
    "with_a_subgroup": "group = dist.new_group(); dist.all_reduce(tensor, group=group)",
    "with_a_finished_work": "work = dist.all_reduce(tensor, async_op=True); work.wait()",
    "with_a_dropped_work": "dist.all_reduce(tensor, async_op=True); dist.barrier()",
    "with_a_future": "f = dist.all_reduce(tensor, async_op=True).get_future().then(lambda f: f.value()); f.wait()",
    "with_a_receive_in_flight": "work = dist.irecv(tensor, 1 - rank); dist.barrier()",
    "with_a_destroyed_group": "dist.barrier(); dist.destroy_process_group()",
    "by_sys_exit": "sys.exit(0)",
}


@pytest.mark.slow
@pytest.mark.parametrize("way", list(LEAVING))
def test_leaving_is_silent_and_ends_with_code_0(way):
    for script in run_script(HEAD + LEAVING[way], world=2):
        assert script.exitcode == 0, script.stderr
        assert not re.search("terminate|Traceback|Aborted|Fatal", script.stderr), script.stderr


@pytest.mark.slow
def test_leaving_without_destroy_ends_with_code_0_each_time():
    codes = []
    for _ in range(10):
        codes += [script.exitcode for script in run_script(HEAD, world=2)]
    assert codes == [0] * 20


@pytest.mark.alone
def test_leaving_takes_no_time():
    assert min(_seconds_of_leaving() for _ in range(3)) < 2, (
        "a wait at the end takes as long each time, a busy machine does not"
    )


def _seconds_of_leaving():
    scripts = start_script(HEAD + "print(time.monotonic(), flush=True)", world=2)
    for script in scripts:
        script.wait()
    return time.monotonic() - max(float(script.stdout.split()[-1]) for script in scripts)


@pytest.mark.slow
@pytest.mark.skipif(BACKEND != "accl", reason="about this package only")
def test_works_of_many_groups_that_are_dropped_last_do_not_hold_up_the_end():
    """Regression: each Work waited for room in Python's queue of pending calls. Only the main thread empties that
    queue, and it waited for the works. The exit took half a minute.
    """
    code = """
import torch, torch.distributed as dist, torch_accl
def main():
    held = []
    for number in range(80):
        options = torch_accl.Options(device="sim")
        dist.init_process_group("accl", store=dist.HashStore(), rank=0, world_size=1, pg_options=options)
        held.append((dist.group.WORLD, dist.all_reduce(torch.ones(1000), async_op=True)))
        dist.destroy_process_group()
main()
"""
    [script] = run_script(code, world=1, timeout=25)
    assert (script.exitcode, script.stderr) == (0, "")


@pytest.mark.slow
def test_an_uncaught_error_ends_with_code_1_on_its_rank_and_an_error_on_the_other():
    code = (
        HEAD
        + """
if rank == 1:
    raise ValueError("told so")
for _ in range(1000):
    dist.all_reduce(tensor)
"""
    )
    first, second = run_script(code, world=2)
    assert second.exitcode == 1 and "told so" in second.stderr
    assert first.exitcode == 1 and "rank 1" in first.stderr, first.stderr


# `later` posts receives whose messages arrive only after all ranks have attached callbacks. A completion thread
# therefore runs the callbacks.
LATE = """
def later(count):
    works = [dist.irecv(torch.ones(1), 1 - rank) for _ in range(count)]
    return [work.get_future() for work in works]

def serve(count):
    dist.barrier()
    for _ in range(count):
        dist.send(torch.ones(1), 1 - rank)
"""


@pytest.mark.slow
def test_a_callback_that_outlives_the_group_ends_before_the_process():
    """Regression: the callback was still running when the interpreter shut down. That aborted the process, and the
    callback's future never got its value.
    """
    code = (
        HEAD
        + LATE
        + """
def slow(future):
    for _ in range(50):
        time.sleep(0.05)
    print("ran", flush=True)

first, *others = later(9)
kept = [first.then(slow)] + [other.then(lambda _: time.sleep(0.5)) for other in others]
kept[-1].then(lambda _: print("too", flush=True))
serve(9)
for other in others:
    other.wait()
print("ends", flush=True)
dist.destroy_process_group()
"""
    )
    for script in run_script(code, world=2):
        assert script.exitcode == 0 and script.stderr == "", script.stderr
        assert sorted(script.stdout.split()) == ["ends", "ran", "too"]
        assert script.stdout.startswith("ends")


@pytest.mark.slow
@pytest.mark.parametrize("end", ["dist.destroy_process_group()", "pass", "sys.exit(0)"])
def test_a_rank_that_ends_lets_its_asynchronous_calls_end(end):
    """Regression: the calls of the other ranks failed although this rank had issued its part."""
    code = (
        HEAD
        + f"""
dist.barrier()
if rank == 1:
    time.sleep(0.5)
    dist.all_reduce(tensor.fill_(1))
    print(float(tensor.sum()), flush=True)
else:
    work = dist.all_reduce(tensor.fill_(1), async_op=True)
    work.get_future().then(lambda _: print(float(tensor.sum()), flush=True))
{end}
"""
    )
    for script in run_script(code, world=2):
        assert script.exitcode == 0 and script.stdout.split() == ["2000.0"], (script.stdout, script.stderr)


def test_a_rank_that_ends_by_an_error_does_not_wait_for_its_asynchronous_calls():
    code = (
        HEAD
        + """
dist.barrier()
if rank == 0:
    dist.all_reduce(tensor, async_op=True)
    raise ValueError("told so")
start = time.monotonic()
try:
    dist.recv(tensor, 0)
except RuntimeError:
    print(time.monotonic() - start, flush=True)
os._exit(0)
"""
    )
    first, second = run_script(code, world=2)
    assert first.exitcode == 1 and "told so" in first.stderr
    assert float(second.stdout.split()[-1]) < 5


@pytest.mark.slow
def test_ctrl_c_ends_the_wait_for_a_callback_at_the_end_of_the_process():
    code = (
        HEAD
        + LATE
        + """
kept = [future.then(lambda _: time.sleep(25)) for future in later(1)]
serve(1)
dist.barrier()  # A rank that exits leaves the group at once. A peer could then no longer send to it.
print("ends", flush=True)
"""
    )
    scripts = start_script(code, world=2)
    for script in scripts:
        script.wait_for("ends")
    time.sleep(0.5)
    for script in scripts:
        assert script.exitcode is None
        os.kill(script.pid, signal.SIGINT)
    for script in scripts:
        # 10 s end well before the callback would return. Any exit code is accepted, because Python exits while a thread
        # runs Python code.
        script.wait(10)


WAITING = {
    "a_blocking_call": "dist.all_reduce(tensor)",
    "a_blocking_large_call": "dist.all_reduce(torch.ones(1 << 22))",
    "a_work": "dist.all_reduce(tensor, async_op=True).wait()",
    "a_receive": "dist.recv(tensor, 1)",
    "a_barrier": "dist.barrier()",
    "a_monitored_barrier": MONITORED_BARRIER,
    "a_send": "dist.send(torch.ones(1 << 24), 1)",
}


@pytest.mark.alone
@pytest.mark.parametrize("wait", list(WAITING))
def test_ctrl_c_ends_a_wait_within_200_ms(wait):
    code = (
        HEAD
        + f"""
print("ready", flush=True)
if rank == 1:
    time.sleep(30)
try:
    {WAITING[wait]}
except KeyboardInterrupt:
    print("interrupted", time.monotonic(), flush=True)
    os._exit(7)
"""
    )
    first, second = start_script(code, world=2)
    for script in (first, second):
        script.wait_for("ready")
    time.sleep(0.3)
    start = time.monotonic()
    os.kill(first.pid, signal.SIGINT)
    assert first.wait(5) == 7, first.stderr
    elapsed = float(first.stdout.split()[-1]) - start
    os.kill(second.pid, signal.SIGKILL)
    second.wait()
    assert elapsed < 0.2


def test_ctrl_c_inside_a_blocking_call_says_that_the_group_has_ended():
    code = (
        HEAD
        + """
import traceback
print("ready", flush=True)
try:
    dist.all_reduce(tensor) if rank == 0 else dist.recv(tensor, 0)
except KeyboardInterrupt as error:
    print("NOTE", getattr(error, "__notes__", None), flush=True)
except RuntimeError as error:
    print("NOTE", error, flush=True)
try:
    dist.all_reduce(tensor)
except RuntimeError as error:
    print("NEXT", error, flush=True)
os._exit(0)
"""
    )
    first, second = start_script(code, world=2)
    for script in (first, second):
        script.wait_for("ready")
    time.sleep(0.3)
    os.kill(first.pid, signal.SIGINT)
    for script in (first, second):
        assert script.wait(15) == 0, script.stderr
        said = dict(line.split(" ", 1) for line in script.stdout.splitlines() if line.startswith(("NOTE", "NEXT")))
        for text in said.values():
            assert "interrupted" in text and "blocking call" in text and "new group" in text, script.stdout


@pytest.mark.alone
@pytest.mark.slow
def test_ctrl_c_ends_an_init_that_waits_for_others():
    code = f"""
import os, time, torch, torch.distributed as dist
print("ready", flush=True)
try:
    dist.init_process_group({BACKEND!r}, init_method="file:///tmp/accl-ctrl-c-{{}}".format(os.getpid()), rank=0, world_size=2)
except KeyboardInterrupt:
    print("interrupted", time.monotonic(), flush=True)
"""
    (script,) = start_script(code, world=1)
    script.wait_for("ready")
    time.sleep(0.5)
    start = time.monotonic()
    os.kill(script.pid, signal.SIGINT)
    script.wait(5)
    if os.path.exists(f"/tmp/accl-ctrl-c-{script.pid}"):
        os.unlink(f"/tmp/accl-ctrl-c-{script.pid}")
    assert float(script.stdout.split()[-1]) - start < 0.5, script.stderr


@pytest.mark.slow
def test_ctrl_c_in_wait_leaves_the_call_running_and_a_later_wait_succeeds():
    # `Work.wait` only waits. An interrupt aborts the group only inside a blocking call.
    code = (
        HEAD
        + """
work = None
if rank == 0:
    work = dist.all_reduce(tensor, async_op=True)
    print("ready", flush=True)
    try:
        work.wait()
    except KeyboardInterrupt:
        print("interrupted", flush=True)
    dist.send(torch.zeros(1), 1)
    work.wait()
else:
    dist.recv(torch.zeros(1), 0)
    dist.all_reduce(tensor)
print("sum", tensor[0].item(), flush=True)
dist.barrier()
"""
    )
    first, second = start_script(code, world=2)
    first.wait_for("ready")
    time.sleep(0.3)
    os.kill(first.pid, signal.SIGINT)
    for script in (first, second):
        assert script.wait() == 0, script.stderr
        assert "sum 4.0" in script.stdout
    assert "interrupted" in first.stdout


# The function is registered before torch's backend is loaded, and therefore before everything that closes a group by
# itself.
BEFORE = """
import atexit

def last(number):
    dist.barrier()
    sums = torch.ones(3)
    dist.all_reduce(sums)
    got = torch.zeros(1)
    if rank == 0:
        dist.send(torch.full((1,), 7.0), 1)
        dist.recv(got, 1)
    else:
        dist.recv(got, 0)
        dist.send(got + 1, 0)
    print(number, int(sums.sum()), int(got), flush=True)

atexit.register(last, 1)
"""


@pytest.mark.parametrize("end", ["pass", "sys.exit(0)", "atexit.register(last, 3); multiprocessing.util"])
def test_functions_that_were_registered_before_the_group_may_use_it_at_exit(end):
    code = BEFORE + "import multiprocessing.util\natexit.register(last, 2)" + HEAD + end
    for rank, script in enumerate(run_script(code, world=2)):
        assert (script.exitcode, script.stderr) == (0, "")
        numbers = [3, 2, 1] if "3" in end else [2, 1]
        assert script.stdout.splitlines() == [f"{number} 6 {8 - rank}" for number in numbers]


@pytest.mark.skipif(BACKEND != "accl", reason="about this package only")
def test_a_rank_that_dies_of_an_error_lets_its_peers_know_before_functions_of_its_exit(tmp_path):
    """Regression: the peer learned of the death only after all functions had run that were registered before the group,
    however long they took.
    """
    os.mkfifo(tmp_path / "go_on")
    code = (
        f"import atexit\natexit.register(lambda: print(open('{tmp_path}/go_on').read(), flush=True))"
        + HEAD
        + """
if rank == 1:
    raise ValueError("died of it")
try:
    dist.recv(tensor, 1)
except RuntimeError as error:
    print(error, flush=True)
os._exit(0)
"""
    )
    first, second = start_script(code, world=2)
    first.wait(60)
    assert "rank 1" in first.stdout and second.exitcode is None, (first.stdout, second.stderr)
    (tmp_path / "go_on").write_text("late")
    assert second.wait(60) == 1 and "died of it" in second.stderr and second.stdout == "late\n"


ENDING = "from torch_accl._transports import add_finish\nadd_finish(lambda: print('finished', flush=True))"
UNCOMPARABLE = """
import atexit
class Uncomparable:
    def __call__(self): print("called", flush=True)
    def __eq__(self, other): raise ValueError("no comparison")
"""


@pytest.mark.skipif(BACKEND != "accl", reason="about this package only")
def test_transports_end_in_a_process_that_made_no_group():
    [script] = run_script(ENDING, world=1)
    assert (script.exitcode, script.stdout, script.stderr) == (0, "finished\n", "")


@pytest.mark.skipif(BACKEND != "accl", reason="about this package only")
@pytest.mark.parametrize("order", ["before", "after"])
def test_an_exit_function_that_cannot_be_compared_does_not_keep_the_engine_from_its_end(order):
    register = "atexit.register(Uncomparable())"
    parts = {"before": [UNCOMPARABLE, register, ENDING], "after": [UNCOMPARABLE, ENDING, register]}[order]
    [script] = run_script("\n".join(parts), world=1)
    assert script.exitcode == 0 and "finished" in script.stdout and "called" in script.stdout, (
        script.stdout,
        script.stderr,
    )


@pytest.mark.skipif(BACKEND != "accl", reason="about this package only")
def test_a_rank_that_ends_does_not_wait_for_a_child_that_waits_for_it(tmp_path):
    """At exit, multiprocessing waits for its children. This child waits for a message from its parent."""
    code = f"""
import multiprocessing, torch, torch.distributed as dist

def join(rank):
    dist.init_process_group("accl", init_method="file://{tmp_path}/meet", rank=rank, world_size=2)
    dist.barrier()

def child():
    join(1)
    try:
        dist.recv(torch.ones(1), 0)
    except RuntimeError as error:
        print(error, flush=True)

multiprocessing.get_context("fork").Process(target=child).start()
join(0)
"""
    [script] = run_script(code, world=1, timeout=20)
    assert script.exitcode == 0 and "rank 0" in script.stdout and "has left" in script.stdout, (
        script.stdout,
        script.stderr,
    )


def give(meet, end, count, size):
    os.environ.update(ACCL_TRANSPORTS="tcp", ACCL_EAGER_BYTES="64MiB")
    dist.init_process_group(BACKEND, init_method=f"file://{meet}", rank=0, world_size=2)
    if end == "count":
        fitting, data = 0, torch.zeros(size, dtype=torch.uint8)
        while dist.isend(data, 1).is_completed():
            fitting += 1
        meet.with_suffix(".fitting").write_text(str(fitting))
        os._exit(0)
    for number in range(count):
        dist.send(torch.full((size,), number, dtype=torch.uint8), 1)
    if end == "destroy":
        dist.destroy_process_group()


def take(meet, late, count, size):
    os.environ.update(ACCL_TRANSPORTS="tcp", ACCL_EAGER_BYTES="64MiB")
    dist.init_process_group(BACKEND, init_method=f"file://{meet}", rank=1, world_size=2)
    time.sleep(late)
    for number in range(count):
        tensor = torch.zeros(size, dtype=torch.uint8)
        dist.recv(tensor, 0)
        assert (tensor == number).all(), number
    dist.destroy_process_group()


def give_and_take(meet, end, late, count, size):
    """Runs `give` and `take` in two children of multiprocessing, which exit by `os._exit`. Returns their exit codes."""
    fork = multiprocessing.get_context("fork")
    children = [
        fork.Process(target=give, args=(meet, end, count, size)),
        fork.Process(target=take, args=(meet, late, count, size)),
    ]
    for child in children:
        child.start()
    for child in children:
        child.join(40)
        child.kill()
    return [child.exitcode for child in children]


@pytest.mark.slow
@pytest.mark.skipif(BACKEND != "accl", reason="about this package only")
@pytest.mark.parametrize("end", ["destroy", "return"])
def test_what_a_child_has_sent_arrives_although_it_ends_10_times_of_10(end, tmp_path):
    codes = [give_and_take(tmp_path / f"meet{run}", end, 0, 1, 64 << 20) for run in range(10)]
    assert codes == [[0, 0]] * 10


@pytest.mark.slow
@pytest.mark.skipif(BACKEND != "accl", reason="about this package only")
@pytest.mark.parametrize("end", ["destroy", "return"])
def test_what_a_child_has_sent_waits_for_a_receiver_that_comes_4_s_late(end, tmp_path):
    # The first run counts the sends that complete at once. The second run sends one less. A part of the data then waits
    # in the child's own buffer, but all sends complete long before the receiver comes.
    assert give_and_take(tmp_path / "first", "count", 1, 0, 60_000) == [0, 0]
    fitting = int((tmp_path / "first.fitting").read_text())
    assert give_and_take(tmp_path / "second", end, 4, fitting - 1, 60_000) == [0, 0]
