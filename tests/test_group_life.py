"""Groups: sequence numbers, timeouts, error state, abort, shutdown, splitting, sub-groups, and creating the default
group again.
"""

import os
import signal
import threading
import time
import warnings
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from support import BACKEND, init_group, on_ranks, run_ranks, runner
from support.accelerators import accelerator  # noqa: F401  this autouse fixture runs each test twice
from support.runner import check
from support.versions import needs, set_timeout
from torch._C._distributed_c10d import ErrorType
from torch.distributed import distributed_c10d as c10d

CPU = torch.device("cpu")


def backend_of(group=None):
    return (group or dist.group.WORLD)._get_backend(CPU)


def sums(group=None, world=None):
    tensor = torch.ones(3)
    dist.all_reduce(tensor, group=group)
    assert (tensor == (world or dist.get_world_size(group))).all()


@on_ranks(1, 2)
def test_the_sequence_number_counts_the_calls_of_the_group(rank, world):
    group = dist.new_group()
    start = backend_of(group)._get_sequence_number_for_group()
    for i in range(1, 4):
        dist.all_reduce(torch.ones(3), group=group)
        assert backend_of(group)._get_sequence_number_for_group() == start + i
    dist.barrier(group)
    assert backend_of(group)._get_sequence_number_for_group() == start + 4


@needs("numbers of plug-in groups")
@on_ranks(1, 2)
def test_a_group_returns_the_sequence_number_of_its_backend(rank, world):
    group = dist.new_group()
    dist.barrier(group)
    assert group._get_sequence_number_for_group() == backend_of(group)._get_sequence_number_for_group()


@on_ranks(2)
def test_the_sequence_number_is_the_same_on_all_ranks(rank, world):
    numbers = [None] * world
    dist.all_gather_object(numbers, backend_of()._get_sequence_number_for_group())
    assert len(set(numbers)) == 1


@on_ranks(1, 2)
def test_a_refused_argument_consumes_no_sequence_number(rank, world):
    start = backend_of()._get_sequence_number_for_group()
    with pytest.raises(ValueError):
        dist.broadcast(torch.ones(3), 99)
    assert backend_of()._get_sequence_number_for_group() == start
    sums()


@on_ranks(1)
def test_a_backend_returns_its_name_rank_size_and_options(rank, world):
    backend = backend_of()
    assert backend.name() == BACKEND and dist.get_backend() == BACKEND
    assert (backend.rank(), backend.size()) == (0, 1)
    assert backend.options._timeout == timedelta(seconds=20)


@on_ranks(1)
def test_the_options_of_a_backend_can_be_copied(rank, world):
    import copy

    assert copy.deepcopy(backend_of().options)._timeout == timedelta(seconds=20)


@on_ranks(2)
def test_set_timeout_holds_for_later_calls(rank, world):
    group = dist.new_group()
    set_timeout(timedelta(milliseconds=300), group)
    dist.barrier()
    if rank == 0:
        start = time.monotonic()
        with pytest.raises(dist.DistBackendError, match="300 ?ms"):
            dist.all_reduce(torch.ones(3), group=group)
        assert 0.28 < time.monotonic() - start < 1.5
    dist.barrier()
    sums()


@on_ranks(2)
def test_a_call_has_the_timeout_of_its_options_before_that_of_its_group(rank, world):
    group = dist.new_group()
    dist.barrier()
    if rank == 0:
        options = dist.AllreduceOptions()
        options.timeout = timedelta(milliseconds=300)
        start = time.monotonic()
        with pytest.raises(dist.DistBackendError, match="300 ?ms"):
            group.allreduce([torch.ones(3)], options).wait()
        assert 0.28 < time.monotonic() - start < 1.5
    dist.barrier()
    sums()


@on_ranks(2)
def test_the_error_state_is_success_until_a_call_times_out(rank, world):
    group = dist.new_group(timeout=timedelta(milliseconds=300))
    sums(group)
    assert backend_of(group).get_error() == ErrorType.SUCCESS
    dist.barrier()
    if rank == 0:
        with pytest.raises(dist.DistBackendError):
            dist.all_reduce(torch.ones(3), group=group)
        assert backend_of(group).get_error() == ErrorType.TIMEOUT
    dist.barrier()
    assert backend_of().get_error() == ErrorType.SUCCESS


@pytest.mark.alone
@on_ranks(2)
def test_a_group_that_timed_out_refuses_later_calls_quoting_the_cause(rank, world):
    group = dist.new_group(timeout=timedelta(milliseconds=300))
    dist.barrier()
    if rank == 0:
        with pytest.raises(dist.DistBackendError):
            dist.all_reduce(torch.ones(3), group=group)
        for _ in range(2):
            start = time.monotonic()
            with pytest.raises(dist.DistBackendError, match="(?i)(abort|poison|earlier|first cause)[^$]*300 ?ms"):
                dist.broadcast(torch.ones(3), 0, group=group)
            assert time.monotonic() - start < 0.2
    dist.barrier()
    sums()


@pytest.mark.alone
@on_ranks(2)
def test_the_cause_of_an_aborted_group_reaches_the_other_rank(rank, world):
    group = dist.new_group(timeout=timedelta(milliseconds=300))
    dist.barrier()
    if rank == 0:
        with pytest.raises(dist.DistBackendError):
            dist.all_reduce(torch.ones(3), group=group)
    dist.barrier()
    if rank == 1:
        start = time.monotonic()
        with pytest.raises(dist.DistBackendError, match=r"rank 0\b[\s\S]*(?i:timed? ?out)"):
            dist.all_reduce(torch.ones(3), group=group)
        assert time.monotonic() - start < 0.25
    dist.barrier()
    sums()


@pytest.mark.alone
@on_ranks(2)
@pytest.mark.parametrize("how", ["abort", "shutdown"])
def test_abort_from_another_thread_ends_a_wait_at_once(rank, world, how):
    group = dist.new_group()
    dist.barrier()
    if rank == 0:
        errors = []

        def wait():
            try:
                dist.all_reduce(torch.ones(3), group=group)
            except dist.DistBackendError as error:
                errors.append((time.monotonic(), str(error)))

        thread = threading.Thread(target=wait)
        thread.start()
        time.sleep(0.2)
        start = time.monotonic()
        getattr(backend_of(group), how)()
        thread.join(5)
        assert not thread.is_alive() and len(errors) == 1
        assert errors[0][0] - start < 0.5
    dist.barrier()
    sums()


@on_ranks(2)
def test_abort_ends_asynchronous_calls_and_their_futures(rank, world):
    group = dist.new_group()
    dist.barrier()
    if rank == 0:
        work = dist.all_reduce(torch.ones(3), group=group, async_op=True)
        future = work.get_future()
        backend_of(group).abort()
        with pytest.raises(RuntimeError, match="(?i)abort"):
            future.wait()
        with pytest.raises(dist.DistBackendError, match="(?i)abort"):
            work.wait()
        with pytest.raises(dist.DistBackendError, match="(?i)abort"):
            dist.all_reduce(torch.ones(3), group=group)
    dist.barrier()
    sums()


@on_ranks(2)
def test_abort_reaches_the_peer_that_waits(rank, world):
    group = dist.new_group()
    dist.barrier()
    if rank == 0:
        start = time.monotonic()
        with pytest.raises(dist.DistBackendError, match=r"(?i)abort"):
            dist.all_reduce(torch.ones(3), group=group)
        assert time.monotonic() - start < 2
    else:
        time.sleep(0.2)
        backend_of(group).abort()
    dist.barrier()
    sums()


@on_ranks(1, 2)
def test_abort_and_shutdown_may_be_repeated_in_any_order(rank, world):
    group = dist.new_group()
    sums(group)
    dist.barrier()
    for how in ("abort", "shutdown", "abort", "shutdown"):
        getattr(backend_of(group), how)()
    sums()


@on_ranks(1, 2, fresh=True)
def test_the_process_is_healthy_after_abort_process_group(rank, world):
    sums()
    dist.barrier()
    dist.distributed_c10d._abort_process_group()
    init_group()
    sums()


@on_ranks(1, 2, fresh=True)
@pytest.mark.parametrize("in_batch", [False, True])
def test_abort_process_group_forgets_all_groups_whatever_else_is_open(rank, world, in_batch):
    groups = [dist.new_group() for _ in range(2)]
    for group in groups:
        sums(group)
    dist.barrier()
    if in_batch:
        for group in (dist.group.WORLD, *groups):
            backend_of(group)._start_coalescing()
    dist.distributed_c10d._abort_process_group()
    assert not dist.is_initialized()
    init_group()
    sums()
    sums(dist.new_group())


@on_ranks(2)
def test_abort_while_another_thread_is_in_a_batch_is_aborted_there(rank, world):
    group = dist.new_group()
    dist.barrier()
    opened, aborted, errors = threading.Event(), threading.Event(), []

    def batch():
        backend = backend_of(group)
        backend._start_coalescing()
        dist.all_reduce(torch.ones(3), group=group, async_op=True)
        opened.set()
        aborted.wait(10)
        try:
            dist.all_reduce(torch.ones(3), group=group, async_op=True)
        except dist.DistBackendError as error:
            errors.append(str(error))
        work = backend._end_coalescing()
        try:
            work.wait()
        except dist.DistBackendError as error:
            errors.append(str(error))

    if rank == 0:
        thread = threading.Thread(target=batch)
        thread.start()
        assert opened.wait(10)
        backend_of(group).abort()
        aborted.set()
        thread.join(10)
        assert not thread.is_alive() and len(errors) == 2 and all("abort" in error for error in errors), errors
    dist.barrier()
    sums()


@on_ranks(2)
def test_aborts_and_batches_of_many_threads_end_in_errors_and_not_in_a_crash(rank, world):
    # The list of a batch must not be freed by another thread's abort while the batch uses it.
    for _ in range(20):
        group = dist.new_group()
        dist.barrier()
        stop = threading.Event()

        def batches(group=group, stop=stop):
            backend = backend_of(group)
            while not stop.is_set():
                backend._start_coalescing()
                try:
                    for _ in range(3):
                        dist.all_reduce(torch.ones(3), group=group, async_op=True)
                except dist.DistBackendError:
                    stop.set()
                try:
                    backend._end_coalescing().wait()
                except dist.DistBackendError:
                    stop.set()

        threads = [threading.Thread(target=batches) for _ in range(3)]
        [thread.start() for thread in threads]
        time.sleep(0.003)
        backend_of(group).abort()
        [thread.join(15) for thread in threads]
        assert not any(thread.is_alive() for thread in threads)
    dist.barrier()
    sums()


@on_ranks(1)
def test_an_end_of_coalescing_without_a_beginning_is_an_empty_work(rank, world):
    work = backend_of()._end_coalescing()
    assert work.is_completed() and work.is_success() and work.wait() is True and work.result() == []
    assert work.get_future().wait() == []


@on_ranks(2, fresh=True)
@pytest.mark.parametrize("which", ["world", "world_by_name", "group"])
def test_after_a_destroy_that_reports_a_disagreement_a_group_can_be_made(rank, world, which):
    group = dist.new_group() if which == "group" else None
    named = dist.group.WORLD if which == "world_by_name" else group
    dist.barrier(group)
    # The root's broadcast completes before the other rank can report a disagreement.
    if rank == 0:
        dist.broadcast(torch.ones(5), 0, group=group)
        end = time.monotonic() + 10
        while not backend_of(group).first_error() and time.monotonic() < end:
            time.sleep(0.01)
        with pytest.raises(dist.DistBackendError, match="5"):
            dist.destroy_process_group(named)
    else:
        with pytest.raises(dist.DistBackendError):
            dist.broadcast(torch.ones(6), 0, group=group)
        dist.destroy_process_group(named)
    if which == "group":
        assert group not in dist.distributed_c10d._world.pg_map
        dist.barrier()
        sums(dist.new_group())
        dist.destroy_process_group()
    assert not dist.is_initialized()
    init_group()
    sums()


@on_ranks(1, 2, fresh=True, init=False, store="tcp")
@pytest.mark.parametrize("store", ["own_prefix", "same_keys"])
def test_destroy_and_init_may_be_repeated(rank, world, store):
    from support import runner

    for i in range(5):
        if store == "same_keys" and i:
            init_group(store=runner._context.store)
        else:
            init_group()
        sums()
        dist.barrier()
        dist.destroy_process_group()


@on_ranks(2, 3, fresh=True, init=False, store="tcp")
def test_a_tcp_store_will_do(rank, world):
    init_group()
    sums()
    sums(dist.new_group())
    dist.destroy_process_group()


@on_ranks(3, 4)
def test_subgroups_work_side_by_side(rank, world):
    pairs = [dist.new_group([a, b]) for a in range(world) for b in range(a + 1, world)]
    for group in pairs:
        if rank in dist.get_process_group_ranks(group):
            sums(group, 2)
    alone = [dist.new_group([r]) for r in range(world)]
    sums(alone[rank], 1)


@on_ranks(3)
def test_the_ranks_of_a_group_may_be_unsorted(rank, world):
    group = dist.new_group([2, 0, 1], sort_ranks=False)
    outputs = [torch.zeros(1) for _ in range(3)]
    dist.all_gather(outputs, torch.tensor([float(rank)]), group=group)
    assert [t.item() for t in outputs] == [2.0, 0.0, 1.0]
    tensor = torch.tensor([float(rank)])
    dist.broadcast(tensor, 2, group=group)
    assert tensor.item() == 2.0


@on_ranks(2, 4)
def test_new_subgroups_of_a_given_size_work(rank, world):
    group, _ = dist.new_subgroups(group_size=2)
    sums(group, 2)


@on_ranks(3, 4)
def test_a_group_can_be_split(rank, world):
    evens, odds = [r for r in range(world) if r % 2 == 0], [r for r in range(world) if r % 2]
    assert backend_of().supports_splitting
    group = dist.group.WORLD.split_group(evens if rank % 2 == 0 else odds)
    mine = evens if rank % 2 == 0 else odds
    assert (group.rank(), group.size()) == (mine.index(rank), len(mine))
    tensor = torch.ones(3)
    group.allreduce([tensor]).wait()
    assert (tensor == len(mine)).all()
    sums()


@needs("split_group without an accelerator")
@on_ranks(2, 3)
def test_split_group_makes_a_group_of_ours_on_the_cpu(rank, world):
    evens, odds = [r for r in range(world) if r % 2 == 0], [r for r in range(world) if r % 2]
    group = dist.split_group(split_ranks=[evens, odds], timeout=timedelta(seconds=7), group_desc="halves")
    mine = evens if rank % 2 == 0 else odds
    assert dist.get_process_group_ranks(group) == mine and dist.get_backend(group) == BACKEND
    assert backend_of(group).options._timeout == timedelta(seconds=7)
    sums(group, len(mine))
    # The parent group keeps its own timeout and stays usable. torch's tables contain the child group, so
    # `destroy_process_group` accepts it.
    assert backend_of().options._timeout == timedelta(seconds=20)
    sums()
    dist.destroy_process_group(group)


@needs("ephemeral timeouts")
@on_ranks(2)
@pytest.mark.parametrize("blocking", [True, False])
def test_an_ephemeral_timeout_holds_until_the_first_call_after_it_is_over(rank, world, blocking):
    group = dist.new_group(timeout=timedelta(milliseconds=300))
    dist.barrier()
    group._add_ephemeral_timeout(timedelta(seconds=10))
    group._add_ephemeral_timeout(timedelta(seconds=5))
    if rank == 1:
        time.sleep(0.6)
    work = dist.all_reduce(torch.ones(3), group=group, async_op=not blocking)
    if not blocking:
        assert work.timeout == timedelta(milliseconds=15_300)
        second = dist.all_reduce(torch.ones(3), group=group, async_op=True)
        # On the late rank, the first call may already have completed.
        assert rank == 1 or second.timeout == timedelta(milliseconds=15_300)
        work.wait()
        second.wait()
    third = dist.all_reduce(torch.ones(3), group=group, async_op=True)
    assert third.timeout == timedelta(milliseconds=300)
    third.wait()
    dist.barrier()


@needs("ephemeral timeouts")
@on_ranks(2)
def test_the_work_of_a_sparse_sum_has_the_timeout_of_its_call(rank, world):
    group = dist.new_group(timeout=timedelta(seconds=30))
    sparse = torch.sparse_coo_tensor([[rank]], [1.0], (3,))
    options = dist.AllreduceOptions()
    options.timeout = timedelta(seconds=7)
    work = backend_of(group).allreduce([sparse], options)
    assert work.timeout == timedelta(seconds=7)
    work.wait()
    group._add_ephemeral_timeout(timedelta(seconds=10))
    work = dist.all_reduce(sparse, group=group, async_op=True)
    assert work.timeout == timedelta(seconds=40)
    work.wait()
    dist.barrier()


@on_ranks(1)
def test_the_name_that_gloo_has_for_set_timeout_works(rank, world):
    group = dist.new_group()
    backend_of(group)._set_default_timeout(timedelta(seconds=3))
    assert backend_of(group).options._timeout == timedelta(seconds=3)


@on_ranks(2)
def test_a_split_group_outlives_the_abort_of_its_sibling(rank, world):
    first = dist.new_group()
    second = dist.new_group()
    sums(first)
    dist.barrier()
    backend_of(first).abort()
    dist.barrier()
    sums(second)


@on_ranks(2)
def test_a_group_can_be_used_from_a_thread_that_did_not_make_it(rank, world):
    group = dist.new_group()
    failures = []

    def use():
        try:
            sums(group)
        except BaseException as error:
            failures.append(error)

    thread = threading.Thread(target=use)
    thread.start()
    thread.join()
    assert not failures


@on_ranks(2)
def test_groups_can_be_made_in_a_thread_while_another_is_in_use(rank, world):
    made = []
    used = dist.new_group()
    dist.barrier()
    thread = threading.Thread(target=lambda: made.extend(dist.new_group() for _ in range(10)))
    thread.start()
    for _ in range(200):
        sums(used)
    thread.join()
    for group in made:
        sums(group)


@on_ranks(2)
def test_buffers_that_the_backend_allocates_can_be_sent(rank, world):
    backend = backend_of()
    assert backend.supports_tensor_alloc(CPU) == (BACKEND == "accl")
    if BACKEND != "accl":
        return
    tensor = backend.allocate_tensor(1000, dtype=torch.float32, device=CPU)
    tensor.fill_(1.0)
    dist.all_reduce(tensor)
    assert (tensor == world).all()


@pytest.mark.parametrize(
    "name",
    [
        "supports_coalescing",
        "supports_shrinking",
        pytest.param("supports_window", marks=needs("supports_window")),
        pytest.param("supports_reconfigure", marks=needs("supports_reconfigure")),
    ],
)
@on_ranks(1)
def test_an_optional_feature_answers_and_does_not_crash(rank, name):
    feature = getattr(backend_of(), name)
    assert (feature() if callable(feature) else feature) in (True, False)


@needs("enable_reconfigure")
@on_ranks(2, fresh=True)
def test_a_group_that_cannot_be_reconfigured_warns_once_in_the_job(rank, world):
    store = dist.PrefixStore("reconfigured", dist.distributed_c10d._get_default_store())
    dist.destroy_process_group()
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        dist.init_process_group("accl", store=store, rank=rank, world_size=world, enable_reconfigure=True)
    assert sum("enable_reconfigure=True has no effect" in str(each.message) for each in seen) == (rank == 0)
    assert not dist.group.WORLD.supports_reconfigure
    dist.all_reduce(tensor := torch.ones(1))
    assert tensor.item() == world


def test_a_snapshot_says_what_the_calls_of_a_group_have_sent_and_waited_for():
    def body(rank):
        backend = dist.group.WORLD._get_backend(torch.device("cpu"))
        dist.all_reduce(torch.ones(10_000))
        dist.barrier()
        before = backend.snapshot()
        # Synchronize through the store rather than over links, because no rank may send before both have taken a
        # snapshot.
        store = dist.distributed_c10d._get_default_store()
        store.set(f"looked{rank}", "")
        store.wait([f"looked{1 - rank}"])
        if rank == 0:
            work = dist.irecv(torch.ones(5), 1)
            late = backend.snapshot()["group"]["in_flight"]
            dist.send(torch.ones(1), 1)
            work.wait()
        else:
            dist.recv(torch.ones(1), 0)
            dist.send(torch.ones(5), 0)
            late = []
        after = backend.snapshot()
        dist.barrier()
        return before, late, after

    (before, late, after), (before_there, _, after_there) = check(run_ranks(body, 2))
    assert [(call["collective"], call["awaits"]) for call in late] == [("recv", [1])] and late[0]["age_s"] >= 0
    assert before["group"]["collectives"] >= 2 and before["group"]["failed"] == 0
    there, back = before["ranks"][1]["traffic"], before_there["ranks"][0]["traffic"]
    assert (there["frames_sent"], there["bytes_sent"]) == (back["frames_received"], back["bytes_received"])
    assert after["group"]["messages"] == after_there["group"]["messages"] == 2
    assert after["ranks"][1]["traffic"]["bytes_sent"] > there["bytes_sent"]
    assert after["ranks"][1]["link"] and after["ranks"][1]["gone"] is None
    assert after["process"]["passes"] > 0
    assert after["group"]["waited_s"] >= before["group"]["waited_s"]


def test_a_snapshot_after_the_end_has_no_group():
    def body(rank):
        backend = dist.group.WORLD._get_backend(torch.device("cpu"))
        dist.destroy_process_group()
        return backend.snapshot()

    assert [(found["group"], found["ranks"]) for found in check(run_ranks(body, 2))] == [(None, [])] * 2


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_snapshot_in_a_forked_child_waits_for_no_thread_of_its_parent():
    # A spinning thread holds the engine's lock most of the time, so it holds the lock at some of these forks.
    def in_child(backend):
        pid = os.fork()
        if pid == 0:
            # The test's own time limit installs a handler, which would wait for the interpreter. Restore the default
            # action.
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
            signal.alarm(3)
            found = backend.snapshot()
            os._exit(0 if (found["group"], found["ranks"]) == (None, []) else 3)
        return os.waitpid(pid, 0)[1]

    def body(rank):
        backend = backend_of()
        dist.barrier()
        if rank == 1:
            dist.recv(torch.ones(1), 0, tag=1)
            dist.send(torch.ones(1), 0, tag=2)
            return []
        waiter = threading.Thread(target=dist.recv, args=(torch.ones(1), 1), kwargs={"tag": 2})
        waiter.start()
        while not backend.snapshot()["group"]["in_flight"]:
            pass
        ends = [in_child(backend) for _ in range(12)]
        dist.send(torch.ones(1), 1, tag=1)
        waiter.join()
        return ends

    # If a child waits for the lock, its alarm kills it.
    assert check(run_ranks(body, 2, env={"ACCL_SPIN_US": "1000000"}))[0] == [0] * 12


class Wrapped(dist.Store):
    """A store written in Python around another store, as users write one."""

    def __init__(self, store, fails=None):
        super().__init__()
        self.store, self.fails, self.compared = store, fails, 0

    def set(self, key, value):
        self.store.set(key, value)

    def get(self, key):
        return self.store.get(key)

    def add(self, key, value):
        return self.store.add(key, value)

    def check(self, keys):
        return self.store.check(keys)

    def wait(self, keys, timeout=timedelta(seconds=20)):
        self.store.wait(keys, timeout)

    def delete_key(self, key):
        return self.store.delete_key(key)


class Comparing(Wrapped):
    def compare_set(self, key, expected, desired):
        self.compared += 1
        if self.fails is not None:
            raise self.fails
        return self.store.compare_set(key, expected, desired)


@on_ranks(2, fresh=True, init=False)
@pytest.mark.parametrize("error", [None, NotImplementedError("compare_set"), RuntimeError("Not implemented.")], ids=str)
def test_a_store_that_cannot_compare_is_asked_once(rank, world, error):
    inner = runner._context.rendezvous.store(rank, world)
    store = Wrapped(inner) if error is None else Comparing(inner, error)
    init_group(store=store)
    dist.all_reduce(torch.ones(1))
    assert store.compared == (error is not None)


@on_ranks(2, fresh=True, init=False)
def test_a_comparison_that_fails_is_the_error_of_the_store(rank, world):
    """Regression: every error of `compare_set` was taken to mean that the store cannot compare. The answers that follow
    could then be too old.
    """
    store = Comparing(runner._context.rendezvous.store(rank, world), ConnectionError("reset by peer"))
    with pytest.raises(RuntimeError, match="reset by peer"):
        init_group(store=store)


def make_separate_group(rank, folder, world=3):
    """Creates a group of trainers and engines as frameworks do: with torch's helper function and a separate store."""
    store = dist.PrefixStore("weights", dist.FileStore(f"{folder}/weights", world))
    group, _ = c10d._new_process_group_helper(
        world, rank, [], dist.Backend(BACKEND), store, "weights", timeout=timedelta(seconds=20)
    )
    c10d._world.pg_group_ranks[group] = {rank: rank for rank in range(world)}
    return group


@on_ranks(3, init=False)
def test_a_group_of_trainers_and_an_engine_does_not_take_the_place_of_the_job(rank, world, tmp_path):
    """Regression: the exit of the engine, rank 1 of its own job, was taken for the exit of the second trainer."""
    if rank != 1:
        store = dist.FileStore(f"{tmp_path}/trainers", 2)
        dist.init_process_group(BACKEND, store=store, rank=rank // 2, world_size=2)
    group = make_separate_group(rank, tmp_path)
    weights = torch.full((5,), float(rank))
    dist.broadcast(weights, 0, group=group)
    assert weights.eq(0).all()
    if rank == 1:
        return
    # The engine process (rank 1) exits.
    with pytest.raises(RuntimeError):
        dist.recv(weights, 1, group=group)
    if rank == 2:
        time.sleep(0.3)
    sums(dist.new_group([0, 1]))
    sums()
    dist.destroy_process_group()


@pytest.mark.skipif(BACKEND != "accl", reason="about this package only")
@on_ranks(3, init=False, env={"ACCL_DEVICE": "sim://"})
def test_a_group_of_trainers_and_an_engine_leaves_the_device_to_the_job(rank, world, tmp_path):
    def has_device(group=None):
        return "device " in backend_of(group).describe()

    if rank < 2:
        store = dist.FileStore(f"{tmp_path}/trainers", 2)
        dist.init_process_group(BACKEND, store=store, rank=rank, world_size=2)
        assert has_device()
    group = make_separate_group(rank, tmp_path)
    assert not has_device(group)
    sums(group, 3)
    if rank < 2:
        sums()
        dist.destroy_process_group()
