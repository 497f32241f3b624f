"""send and recv: order, tags, any source, sends to oneself, batches, and independence from collectives."""

import pytest
import torch
import torch.distributed as dist
from support import bytes_equal, contribution, on_ranks
from support.oracle import MOVED


@on_ranks(2)
@pytest.mark.parametrize("dtype", MOVED)
def test_every_dtype_arrives(rank, world, dtype):
    sent = contribution(0, 1009, dtype)
    if rank == 0:
        dist.send(sent, 1)
    else:
        tensor = torch.empty_like(sent)
        assert dist.recv(tensor, 0) == 0
        assert bytes_equal(tensor, sent)


@on_ranks(2)
@pytest.mark.parametrize("count", [0, 1, 3, 16_385, 65_536, 262_147, 3_000_001])
def test_every_count_arrives_in_both_directions(rank, world, count):
    other = 1 - rank
    tensor = torch.zeros(count)
    if rank == 0:
        dist.send(contribution(0, count, "float32"), other)
        dist.recv(tensor, other)
    else:
        dist.recv(tensor, other)
        dist.send(contribution(1, count, "float32"), other)
    assert bytes_equal(tensor, contribution(other, count, "float32"))


@on_ranks(2)
def test_messages_of_one_tag_arrive_in_the_order_of_the_sends(rank, world):
    if rank == 0:
        works = [dist.isend(torch.full((i + 1,), float(i)), 1) for i in range(50)]
        for work in works:
            work.wait()
    else:
        tensors = [torch.zeros(i + 1) for i in range(50)]
        works = [dist.irecv(tensor, 0) for tensor in tensors]
        for work in works:
            work.wait()
        assert all((tensor == i).all() for i, tensor in enumerate(tensors))


@on_ranks(2)
@pytest.mark.parametrize("count", [10, 200_003])
def test_tags_may_be_received_in_any_order(rank, world, count):
    tags = [7, 3, 0, 11]
    if rank == 0:
        works = [dist.isend(torch.full((count,), float(tag)), 1, tag=tag) for tag in tags]
        for work in works:
            work.wait()
    else:
        for tag in reversed(tags):
            tensor = torch.zeros(count)
            dist.recv(tensor, 0, tag=tag)
            assert (tensor == tag).all()


@on_ranks(2)
@pytest.mark.parametrize("count", [1, 300_007])
def test_both_sides_may_send_before_they_receive(rank, world, count):
    send = dist.isend(torch.full((count,), float(rank)), 1 - rank)
    tensor = torch.zeros(count)
    receive = dist.irecv(tensor, 1 - rank)
    send.wait()
    receive.wait()
    assert (tensor == 1 - rank).all()


@on_ranks(3, 4)
def test_a_receive_from_any_source_takes_one_message_from_each_and_names_it(rank, world):
    if rank != 0:
        dist.send(torch.full((9,), float(rank)), 0)
        return
    sources = []
    for _ in range(world - 1):
        tensor = torch.zeros(9)
        sources.append(dist.recv(tensor))
        assert (tensor == sources[-1]).all()
    assert sorted(sources) == list(range(1, world))


@on_ranks(2, 3)
def test_an_asynchronous_receive_from_any_source_sets_the_source_rank(rank, world):
    if rank == 0:
        tensor = torch.zeros(9)
        work = dist.irecv(tensor, None, tag=5)
        work.wait()
        assert work.source_rank() == work._source_rank() == world - 1
        assert (tensor == world - 1).all()
    elif rank == world - 1:
        dist.send(torch.full((9,), float(rank)), 0, tag=5)
    dist.barrier()


@on_ranks(2)
def test_a_receive_from_any_source_leaves_other_tags_for_later(rank, world):
    if rank == 1:
        dist.send(torch.full((4,), 1.0), 0, tag=1)
        dist.send(torch.full((4,), 2.0), 0, tag=2)
    else:
        tensor = torch.zeros(4)
        assert dist.recv(tensor, None, tag=2) == 1 and (tensor == 2).all()
        assert dist.recv(tensor, 1, tag=1) == 1 and (tensor == 1).all()


@on_ranks(1, 2)
@pytest.mark.parametrize("count", [0, 5, 300_007])
def test_a_rank_may_send_to_itself(rank, world, count):
    group = dist.group.WORLD
    tensor = torch.zeros(count)
    receive = group.recv([tensor], rank, 3)
    send = group.send([contribution(rank, count, "float32")], rank, 3)
    send.wait()
    receive.wait()
    assert bytes_equal(tensor, contribution(rank, count, "float32"))
    send = group.send([contribution(rank, count, "float32", seed=1)], rank, 3)
    group.recv([tensor], rank, 3).wait()
    send.wait()
    assert bytes_equal(tensor, contribution(rank, count, "float32", seed=1))


@on_ranks(2, 3, 4)
@pytest.mark.parametrize("count", [3, 200_003])
def test_a_batch_moves_a_ring_in_both_directions(rank, world, count):
    after, before = (rank + 1) % world, (rank - 1) % world
    from_before, from_after = torch.zeros(count), torch.zeros(count)
    mine = torch.full((count,), float(rank))
    works = dist.batch_isend_irecv(
        [
            dist.P2POp(dist.isend, mine, after, tag=1),
            dist.P2POp(dist.isend, mine, before, tag=2),
            dist.P2POp(dist.irecv, from_before, before, tag=1),
            dist.P2POp(dist.irecv, from_after, after, tag=2),
        ]
    )
    for work in works:
        work.wait()
    assert (from_before == before).all() and (from_after == after).all()


@on_ranks(2)
def test_a_pending_receive_does_not_hold_up_a_later_collective(rank, world):
    late = torch.zeros(5)
    if rank == 0:
        work = dist.irecv(late, 1, tag=9)
    total = torch.ones(1000)
    dist.all_reduce(total)
    assert (total == 2).all()
    if rank == 0:
        assert not work.is_completed()
    dist.barrier()
    if rank == 1:
        dist.send(torch.full((5,), 4.0), 0, tag=9)
    else:
        work.wait()
        assert (late == 4).all()


@on_ranks(2)
def test_a_pending_receive_does_not_hold_up_a_later_send(rank, world):
    # Each rank posts its receive before its send, and only that send completes the peer's receive. A single queue would
    # hang in this order.
    answer = torch.zeros(4)
    receive = dist.irecv(answer, 1 - rank, tag=1)
    dist.send(torch.full((4,), float(rank)), 1 - rank, tag=1)
    receive.wait()
    assert (answer == 1 - rank).all()


@on_ranks(2)
def test_a_large_unreceived_send_does_not_hold_up_a_collective(rank, world):
    count = 2_000_003
    if rank == 0:
        send = dist.isend(torch.full((count,), 3.0), 1)
    total = torch.ones(100_003)
    dist.all_reduce(total)
    assert (total == 2).all()
    if rank == 0:
        send.wait()
    else:
        tensor = torch.zeros(count)
        dist.recv(tensor, 0)
        assert (tensor == 3).all()


@on_ranks(3)
def test_two_ranks_talk_while_the_third_stays_away(rank, world):
    if rank == 2:
        return
    for i in range(20):
        tensor = torch.full((1000,), float(i)) if rank == 0 else torch.zeros(1000)
        if rank == 0:
            dist.send(tensor, 1)
        else:
            dist.recv(tensor, 0)
            assert (tensor == i).all()


@on_ranks(2)
def test_a_strided_tensor_is_sent_and_received_in_logical_order(rank, world):
    sent = contribution(0, (20, 30), "float32").t()
    if rank == 0:
        dist.send(sent, 1)
    else:
        room = torch.full((30, 40), 77.0)
        dist.recv(room[:, ::2], 0)
        assert bytes_equal(room[:, ::2], sent) and (room[:, 1::2] == 77).all()


@on_ranks(3)
def test_ranks_of_a_subgroup_are_given_as_global_ranks(rank, world):
    group = dist.new_group([1, 2])
    if rank == 1:
        dist.send(torch.full((3,), 5.0), 2, group=group)
        dist.send(torch.full((3,), 6.0), group=group, group_dst=1)
    elif rank == 2:
        tensor = torch.zeros(3)
        assert dist.recv(tensor, 1, group=group) == 1 and (tensor == 5).all()
        assert dist.recv(tensor, None, group=group) == 1 and (tensor == 6).all()


@on_ranks(2)
def test_an_operation_that_raises_in_a_batch_leaves_the_group_as_it_was(rank, world):
    bad = dist.P2POp(dist.irecv, torch.ones(1).expand(4), 1 - rank)
    for operations in ([bad], [dist.P2POp(dist.isend, torch.ones(2), 1 - rank, tag=9), bad]):
        with pytest.raises((ValueError, RuntimeError)):
            for work in dist.batch_isend_irecv(operations):
                work.wait()
        # Regression: the state that torch keeps of a batch made this call return at once without doing anything.
        tensor = torch.ones(3)
        dist.all_reduce(tensor)
        assert tensor.tolist() == [world] * 3
    dist.recv(torch.zeros(2), 1 - rank, tag=9)
    parts = torch.zeros(world)
    dist.all_gather_single(parts, torch.full((1,), float(rank)))
    assert parts.tolist() == [0.0, 1.0]


@on_ranks(2)
def test_a_batch_has_one_work_for_each_operation(rank, world):
    tensors = [torch.zeros(10) for _ in range(3)]
    works = dist.batch_isend_irecv(
        [
            dist.P2POp(dist.isend if rank == 0 else dist.irecv, tensor, 1 - rank, tag=i)
            for i, tensor in enumerate(tensors)
        ]
    )
    assert len(works) == 3
    for work in works:
        work.wait()


@on_ranks(2)
def test_a_batch_may_list_its_receives_first_on_one_rank_and_its_sends_first_on_the_other(rank, world):
    count = 200_003
    mine, theirs = torch.full((count,), float(rank)), torch.zeros(count)
    operations = [dist.P2POp(dist.isend, mine, 1 - rank), dist.P2POp(dist.irecv, theirs, 1 - rank)]
    for work in dist.batch_isend_irecv(operations if rank else operations[::-1]):
        work.wait()
    assert (theirs == 1 - rank).all()


@on_ranks(2)
@pytest.mark.parametrize("pairs", [1, 3])
def test_calls_between_start_and_end_of_coalescing_are_all_done_by_its_end(rank, world, pairs):
    sent = [torch.full((1000,), float(10 * rank + i)) for i in range(pairs)]
    received = [torch.zeros(1000) for _ in range(pairs)]
    with dist._coalescing_manager(device=torch.device("cpu")):
        for out, into in zip(sent, received, strict=True):
            dist.isend(out, 1 - rank)
            dist.irecv(into, 1 - rank)
    assert all((into == 10 * (1 - rank) + i).all() for i, into in enumerate(received))
