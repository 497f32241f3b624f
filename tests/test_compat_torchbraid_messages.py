"""Messages of torchbraid's communicator: requests, large messages, threads, and the end of the program."""

import pickle
import textwrap
import threading
import time
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from support import BACKEND, on_ranks, run_script
from torch_accl.compat.torchbraid import MPI, _mailbox

pytestmark = pytest.mark.skipif(BACKEND != "accl", reason="about this package only")

SMALL_LIMIT = 1 << 16


@pytest.fixture
def small_limit(monkeypatch):
    """Sends wait for their receivers from 64 KiB on, as they do from 256 MiB on by default."""
    monkeypatch.setattr(_mailbox, "_BUFFERED_BYTES", SMALL_LIMIT)


def ended_well(code, world=2, **fields):
    text = textwrap.dedent(code)
    for name, value in fields.items():
        text = text.replace("{" + name + "}", value)
    ended = run_script(text, world)
    assert [each.exitcode for each in ended] == [0] * world, [each.stderr for each in ended]
    return [each.stdout for each in ended]


@pytest.mark.parametrize("backend", ["accl", "gloo"])
@pytest.mark.parametrize("end", ["MPI.Finalize()", "pass"])
def test_a_message_whose_request_is_dropped_arrives_before_the_program_ends(backend, end):
    code = """
        import time
        from torch_accl.compat.torchbraid import MPI
        MPI.Init("{backend}")
        comm = MPI.COMM_WORLD
        if comm.rank == 0:
            comm.isend(bytes(4000000), 1)
            comm.isend("last", 1)
            {end}
        else:
            time.sleep(0.5)
            assert len(comm.recv(source=0)) == 4000000 and comm.recv(source=0) == "last"
            print("received")
            {end}
    """
    assert "received" in ended_well(code, backend=backend, end=end)[1]


def test_dropped_requests_do_not_lose_messages_in_the_middle_of_a_program():
    code = """
        import gc, time
        from torch_accl.compat.torchbraid import MPI
        MPI.Init("gloo")
        comm = MPI.COMM_WORLD
        if comm.rank == 0:
            for number in range(5):
                comm.isend(number, 1)
            gc.collect()
            comm.send("last", 1)
        else:
            time.sleep(0.3)
            assert [comm.recv(source=0) for _ in range(6)] == [0, 1, 2, 3, 4, "last"]
            print("received")
        MPI.Finalize()
    """
    assert "received" in ended_well(code)[1]


@on_ranks(2)
def test_the_test_of_a_send_is_true_before_the_message_is_received(rank, world):
    comm = MPI.COMM_WORLD
    if rank == 0:
        request = comm.Isend(torch.ones(1 << 20), 1)
        assert request.Test() and request.test() == (True, None) and request.wait() is None
    comm.Barrier()
    if rank == 1:
        comm.Recv(into := torch.zeros(1 << 20), 0)
        assert bool(into.all())


@on_ranks(1)
def test_a_receive_is_not_tested_but_waited_for(rank, world):
    comm = MPI.COMM_WORLD
    request = comm.irecv(source=0)
    for call in (
        request.Test,
        request.test,
        lambda: MPI.Request.Waitany([request]),
        lambda: MPI.Request.testall([request]),
    ):
        with pytest.raises(NotImplementedError, match=r"messages are received in wait\(\) only"):
            call()
    comm.send("mine", 0)
    assert request.wait() == "mine" and request.test() == (True, "mine")


@on_ranks(2, 3)
@pytest.mark.parametrize("how", ["Isend", "Send", "any source"])
def test_posted_receives_let_large_messages_go_both_ways(rank, world, how, small_limit):
    comm, count = MPI.COMM_WORLD, 1 << 19
    after, before = (rank + 1) % world, (rank - 1) % world
    into = [torch.zeros(count) for _ in range(3)]
    source = MPI.ANY_SOURCE if how == "any source" else before
    receives = [comm.Irecv(each, source, tag) for tag, each in enumerate(into)]
    sends = []
    for tag in range(3):
        data = torch.full((count,), float(3 * rank + tag))
        if how == "Isend":
            sends.append(comm.Isend(data, after, tag))
        else:
            comm.Send(data, after, tag)
    statuses = []
    MPI.Request.Waitall(sends + receives, statuses)
    assert [float(each[0]) for each in into] == [float(3 * before + tag) for tag in range(3)]
    assert all(bool((each == each[0]).all()) for each in into)
    assert [status.Get_source() for status in statuses[-3:]] == [before] * 3


@on_ranks(3)
def test_a_receive_from_any_rank_takes_no_message_of_an_older_receive(rank, world):
    comm = MPI.COMM_WORLD
    if rank == 0:
        named = comm.irecv(source=1, tag=5)
        found = [comm.recv(source=MPI.ANY_SOURCE, tag=tag) for tag in (1, 2) for _ in range(2)]
        assert sorted(found) == [(1, 1), (1, 2), (2, 1), (2, 2)]
        assert named.wait() == (1, 5)
    else:
        for tag in (1, 2, 5) if rank == 1 else (1, 2):
            comm.send((rank, tag), 0, tag)
    comm.Barrier()


@on_ranks(2)
def test_several_threads_send_and_receive_at_once(rank, world):
    comm, other, failures = MPI.COMM_WORLD, 1 - rank, []

    def work(call, tag):
        try:
            for number in range(100):
                if call == "send":
                    comm.send((tag, number), other, tag)
                elif (found := comm.recv(source=other, tag=tag)) != (tag, number):
                    failures.append((tag, number, found))
        except Exception as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(call, tag)) for call in ("send", "recv") for tag in (1, 2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not failures and not any(thread.is_alive() for thread in threads)
    comm.Barrier()


@on_ranks(1, 2)
def test_collectives_return_copies_of_objects(rank, world):
    comm = MPI.COMM_WORLD
    mine = [float(rank)]
    results = [
        comm.bcast(mine, 0),
        comm.allgather(mine)[rank],
        (comm.gather(mine, 0) or [[]])[0],
        comm.scatter([mine] * world if rank == 0 else None, 0),
        comm.alltoall([mine] * world)[rank],
        comm.allreduce(mine),
        comm.reduce(mine, root=0) or [],
        comm.scan(mine),
    ]
    for result in results:
        result.append("changed")
    assert mine == [float(rank)]


def test_with_gloo_several_threads_send_to_one_rank_and_receive_from_it():
    code = """
        import threading
        from torch_accl.compat.torchbraid import MPI
        MPI.Init("gloo")
        comm, failures = MPI.COMM_WORLD, []
        other = 1 - comm.rank
        def work(call, tag):
            try:
                for number in range(50):
                    if call == "send":
                        comm.ssend((tag, number), other, tag)
                    else:
                        found = comm.recv(source=other, tag=tag)
                        assert found == (tag, number), (found, tag, number)
            except Exception as error:
                failures.append(error)
        threads = [threading.Thread(target=work, args=each) for each in (("send", 1), ("send", 2), ("recv", 1), ("recv", 2))]
        [thread.start() for thread in threads]
        [thread.join() for thread in threads]
        assert not failures, failures
        print("received")
        MPI.Finalize()
    """
    assert all("received" in output for output in ended_well(code))


@on_ranks(1)
def test_a_receive_that_another_thread_cancels_ends_its_wait(rank, world):
    box = _mailbox.Mailbox()
    receive, errors = box.post(0, 1), []
    box._receiving.add(MPI.ANY_SOURCE)  # as if a third thread received from any rank

    def wait():
        try:
            box.take(SimpleNamespace(rank=lambda: 1), receive, None)
        except RuntimeError as error:
            errors.append(str(error))

    thread = threading.Thread(target=wait)
    thread.start()
    time.sleep(0.05)
    assert receive.withdraw()
    thread.join(30)
    assert not thread.is_alive() and "was cancelled while this thread waited" in errors[0]


def test_an_abort_without_a_code_is_a_failure():
    code = """
        from torch_accl.compat.torchbraid import MPI
        MPI.Init()
        MPI.COMM_WORLD.Barrier()
        if MPI.COMM_WORLD.rank == 0:
            MPI.COMM_WORLD.Abort({code})
        import time
        time.sleep(0.1)
    """
    for number, expected in (("", 1), ("0", 1), ("256", 1), ("3", 3)):
        ended = run_script(textwrap.dedent(code).replace("{code}", number), 2)
        assert ended[0].exitcode == expected, ended[0].stderr


def test_the_world_is_refused_after_finalize_instead_of_another_rendezvous():
    code = """
        from torch_accl.compat.torchbraid import MPI
        comm = MPI.COMM_WORLD
        assert comm.size == 2 and not MPI.Is_finalized()
        MPI.Finalize()
        assert MPI.Is_finalized()
        if {rank} == 0:
            try:
                comm.size
            except RuntimeError as error:
                assert "after MPI.Finalize(): move the call before Finalize" in str(error)
                print("refused")
    """
    assert "refused" in ended_well(code, rank="int(__import__('os').environ['RANK'])")[0]


@on_ranks(1)
def test_wrong_arguments_are_named_with_their_call(rank, world):
    comm = MPI.COMM_WORLD
    for call, kind, text in (
        (lambda: comm.send(1, None), TypeError, "send to rank None: expected an integer"),
        (lambda: comm.send(1, 0.0), TypeError, "send to rank 0.0: expected an integer"),
        (lambda: comm.recv(source=None), TypeError, "recv from rank None: expected an integer"),
        (lambda: comm.bcast(1, None), TypeError, "bcast with root None: expected an integer"),
        (lambda: comm.bcast(1, 4), ValueError, "bcast with root 4: this communicator has ranks 0 to 0"),
        (lambda: comm.send(1, 0, 1 << 63), ValueError, "send with tag 9223372036854775808: expected a tag from 0 to"),
        (lambda: MPI.Request(print).Free(), AttributeError, "a request .* has no Free; use Wait, Test"),
        (lambda: MPI.Status().Is_cancelled(), AttributeError, "a status .* has no Is_cancelled; use Get_source"),
    ):
        with pytest.raises(kind, match=text):
            call()


@on_ranks(1, 3)
def test_counts_and_displacements_may_be_arrays_and_a_single_displacement_is_a_distance(rank, world):
    numpy = pytest.importorskip("numpy")
    comm, mine = MPI.COMM_WORLD, torch.full((rank + 1,), float(rank))
    counts = list(range(1, world + 1))
    for form in (numpy.array, torch.tensor, list):
        comm.Allgatherv(mine, [into := torch.zeros(sum(counts)), form(counts)])
        assert into.tolist() == [float(each) for each in range(world) for _ in range(each + 1)]
    starts = numpy.arange(world) * 4
    for displacements in (starts, 4, numpy.int64(4), torch.tensor(4)):
        comm.Allgatherv(torch.full((2,), rank + 1.0), [into := torch.zeros(4 * world), (2, displacements)])
        assert into.view(world, 4).tolist() == [[each + 1.0, each + 1.0, 0.0, 0.0] for each in range(world)]


@on_ranks(1, 2)
def test_a_buffer_in_fortrans_order_is_sent_as_it_lies_in_memory(rank, world):
    comm, matrix = MPI.COMM_WORLD, torch.arange(6.0).view(2, 3)
    comm.Send(matrix.t(), rank)
    comm.Recv(into := torch.zeros(6), rank)
    assert into.tolist() == [0.0, 1.0, 2.0, 3.0, 4.0, 5.0]
    comm.Send(torch.arange(6.0), rank)
    comm.Recv(turned := torch.zeros(2, 3).t(), rank)
    assert turned.tolist() == [[0.0, 3.0], [1.0, 4.0], [2.0, 5.0]]
    # mpi4py refuses these, and here they have the order of their indices.
    comm.Send(torch.arange(12.0).view(3, 4)[:, ::2], rank)
    comm.Recv(into, rank)
    assert into.tolist() == [0.0, 2.0, 4.0, 6.0, 8.0, 10.0]


@on_ranks(2)
def test_messages_to_and_from_no_rank_end_at_once(rank, world):
    comm, status = MPI.COMM_WORLD, MPI.Status()
    before, after = (rank - 1 if rank else MPI.PROC_NULL), (rank + 1 if rank == 0 else MPI.PROC_NULL)
    into = torch.full((3,), -1.0)
    comm.Sendrecv(torch.full((3,), float(rank)), after, 4, into, before, MPI.ANY_TAG, status)
    assert into.tolist() == ([-1.0] * 3 if rank == 0 else [0.0] * 3)
    assert (status.Get_source(), status.Get_count()) == ((MPI.PROC_NULL, 0) if rank == 0 else (0, 12))
    comm.ssend("nothing", MPI.PROC_NULL)
    assert comm.recv(source=MPI.PROC_NULL) is None and comm.irecv(source=MPI.PROC_NULL).wait() is None


@on_ranks(2)
def test_requests_and_communicators_behave_as_mpi4pys(rank, world):
    comm = MPI.COMM_WORLD
    request = comm.irecv(source=1 - rank)
    comm.bsend(rank, 1 - rank)
    assert bool(request) and request.Wait() is True and not request and request.wait() == 1 - rank
    assert MPI.Request.Waitall([comm.isend(1, rank), comm.irecv(source=rank)]) is True
    assert comm.allreduce((1.0, f"rank {rank}"), MPI.MAXLOC) == (1.0, "rank 0")
    assert not comm.Split_type(MPI.UNDEFINED)
    assert pickle.loads(pickle.dumps(comm)).allgather(rank) == [0, 1]
    with pytest.raises(
        NotImplementedError, match=r"Allreduce of torch.complex64 with MPI.PROD: .* use Reduce, then Bcast"
    ):
        comm.Allreduce(torch.ones(2, dtype=torch.complex64), torch.ones(2, dtype=torch.complex64), MPI.PROD)


class _Work:
    """A torch work that is complete only after a wait, as gloo's are."""

    def __init__(self, looks, error=None):
        self.looks, self.error, self.is_over = looks, error, False

    def is_completed(self):
        self.looks.append(self)
        return self.is_over

    def is_success(self):
        return self.error is None

    def wait(self):
        self.is_over = True
        if self.error is not None:
            raise self.error


def _sending_mailbox(monkeypatch, errors=()):
    looks, waited = [], iter([*errors, *[None] * 10000])
    monkeypatch.setattr(_mailbox, "device_of", lambda group: torch.device("cpu"))
    monkeypatch.setattr(dist, "isend", lambda *args, **named: _Work(looks, next(waited)))
    return _mailbox.Mailbox(), SimpleNamespace(rank=lambda: 0), looks


def test_one_more_message_costs_the_same_however_many_are_under_way(monkeypatch):
    box, group, looks = _sending_mailbox(monkeypatch)
    for _ in range(1500):
        box.isend(group, torch.ones(4, dtype=torch.uint8), 1, 0, 0)
        box.limit(1)
    assert len(looks) <= 2 * 1500
    assert len(box._sends[1]) <= 1000


def test_a_message_that_cannot_be_sent_does_not_keep_others_from_being_sent(monkeypatch):
    box, group, _ = _sending_mailbox(monkeypatch, [RuntimeError("rank 1 is lost")])
    for dest in (1, 2, 2):
        box.isend(group, torch.ones(4, dtype=torch.uint8), dest, 0, 0)
    with pytest.raises(RuntimeError, match="rank 1 is lost"):
        box.flush()
    assert not any(box._sends.values()) and not any(box._bytes.values())
