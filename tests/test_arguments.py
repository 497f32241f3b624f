"""Wrong arguments: the call refuses each with its class and message, on one rank alone, and the group stays usable."""

import pickle
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from support import on_ranks

ONES, OTHER = torch.ones(3), torch.ones(3, dtype=torch.int32)


def resized(count, nbytes):
    """Returns a tensor whose storage was resized after the tensor was created."""
    tensor = torch.ones(count)
    tensor.untyped_storage().resize_(nbytes)
    return tensor


def backend():
    return dist.group.WORLD._get_backend(torch.device("cpu"))


def wrong(world):
    """For each case name, returns the call, the exception class and a pattern of the message."""
    many, meta = torch.ones(3 * world), torch.ones(3, device="meta")
    parts = [torch.ones(3) for _ in range(world)]
    group = dist.group.WORLD
    return {
        "broadcast_root_too_large": (
            lambda: dist.broadcast(ONES, world),
            ValueError,
            f"broadcast.*invalid root rank: {world}",
        ),
        "broadcast_root_negative": (lambda: dist.broadcast(ONES, -1), ValueError, "broadcast.*invalid root rank: -1"),
        "reduce_root": (lambda: dist.reduce(ONES, 99), ValueError, "reduce.*invalid root rank: 99"),
        "gather_root": (lambda: dist.gather(ONES, None, dst=99), ValueError, "gather.*invalid root rank: 99"),
        "scatter_root": (lambda: dist.scatter(ONES, None, src=99), ValueError, "scatter.*invalid root rank: 99"),
        "send_rank": (lambda: dist.send(ONES, 99), ValueError, "send.*invalid rank: 99"),
        "recv_rank": (lambda: dist.recv(ONES, 99), ValueError, "recv.*invalid rank: 99"),
        "send_tag": (lambda: group.send([ONES], 0, -3), ValueError, "send.*tag must be nonnegative"),
        "all_gather_list_too_long": (lambda: dist.all_gather(parts + parts, ONES), ValueError, "all_gather.*list"),
        "all_gather_list_too_short": (
            lambda: dist.all_gather(parts[1:], ONES),
            ValueError,
            "all_gather.*(?i:list|empty)",
        ),
        "gather_list": (
            lambda: dist.gather(ONES, parts + parts, dst=dist.get_rank()),
            ValueError,
            f"gather.*(?i:list).*{2 * world}",
        ),
        "scatter_list": (
            lambda: dist.scatter(ONES, parts + parts, src=dist.get_rank()),
            ValueError,
            f"scatter.*(?i:list).*{2 * world}",
        ),
        "reduce_scatter_list": (
            lambda: dist.reduce_scatter(ONES, parts + parts),
            ValueError,
            "reduce_scatter.*(?i:list)",
        ),
        "all_to_all_list": (lambda: dist.all_to_all(parts + parts, parts), ValueError, "all_to_all.*list"),
        "all_gather_size": (
            lambda: dist.all_gather([torch.ones(4) for _ in range(world)], ONES),
            ValueError,
            r"all_gather.*size.*\(?4",
        ),
        "all_gather_single_size": (
            lambda: dist.all_gather_single(torch.ones(4 * world), ONES),
            ValueError,
            "all_gather.*size",
        ),
        "all_gather_single_dtype": (
            lambda: dist.all_gather_single(torch.ones(3 * world, dtype=torch.int32), ONES),
            ValueError,
            "all_gather.*type",
        ),
        "reduce_scatter_single_size": (
            lambda: dist.reduce_scatter_single(torch.ones(4), many),
            ValueError,
            "reduce_scatter.*size",
        ),
        "reduce_scatter_single_dtype": (
            lambda: dist.reduce_scatter_single(OTHER, many),
            ValueError,
            "reduce_scatter.*type",
        ),
        "gather_size": (
            lambda: dist.gather(ONES, [torch.ones(4) for _ in range(world)], dst=dist.get_rank()),
            ValueError,
            "gather.*size",
        ),
        "scatter_size": (
            lambda: dist.scatter(ONES, [torch.ones(4) for _ in range(world)], src=dist.get_rank()),
            ValueError,
            "scatter.*size",
        ),
        "splits_count": (
            lambda: dist.all_to_all_single(many, many, [1] * (world + 1), [3] * world),
            ValueError,
            "all_to_all.*Number of tensor splits not equal to group size",
        ),
        "splits_sum": (
            lambda: dist.all_to_all_single(many, many, [3] * world, [2] * world),
            ValueError,
            "all_to_all.*Split sizes doesn't match total dim 0 size",
        ),
        "splits_negative": (
            lambda: dist.all_to_all_single(many, many, [3] * world, [3 * world + 1, -1] + [0] * (world - 2)),
            ValueError,
            "all_to_all.*split size",
        ),
        "storage_resized_away": (
            lambda: dist.all_reduce(resized(8, 0)),
            ValueError,
            "all_reduce.*needs 32 bytes and its storage has 0",
        ),
        "storage_too_small": (
            lambda: dist.all_gather([resized(8, 12)] * world, torch.ones(8)),
            ValueError,
            "all_gather.*needs 32 bytes and its storage has 12",
        ),
        "outputs_that_share_memory": (
            lambda: dist.all_gather([many[:3]] * (world + 1) if world == 1 else [many[:3]] * world, ONES),
            ValueError,
            "all_gather.*(share memory|list)",
        ),
        "splits_dtype": (
            lambda: group.alltoall_base(many, torch.ones(3 * world, dtype=torch.int32), [], []),
            ValueError,
            "all_to_all.*type",
        ),
        "coalesced_dtypes": (
            lambda: dist.group.WORLD.allreduce_coalesced([ONES, OTHER]),
            ValueError,
            "all_reduce.*tensors must all have the same type",
        ),
        "coalesced_outputs_dtype": (
            lambda: backend().allgather_coalesced([[OTHER] for _ in range(world)], [ONES]),
            ValueError,
            "all_gather.*invalid tensor type at index 0",
        ),
        # torch picks the backend by the first tensor. An empty list reaches the backend only if the backend is called
        # directly.
        "no_tensor": (lambda: backend().allreduce([]), ValueError, "all_reduce.*requires non-empty tensor list"),
        "no_coalesced_tensor": (
            lambda: backend().allreduce_coalesced([]),
            ValueError,
            "all_reduce.*requires non-empty tensor list",
        ),
        "no_input": (
            lambda: backend().allgather([parts], []),
            ValueError,
            "all_gather.*requires non-empty input tensor list",
        ),
        "no_output_list": (
            lambda: group.allgather([], [ONES]),
            ValueError,
            "all_gather.*requires input/output tensor lists to have the same length",
        ),
        "output_list": (
            lambda: group.allgather([parts + parts], [ONES]),
            ValueError,
            f"all_gather.*invalid output tensor list at index 0 .expected length {world}, got {2 * world}",
        ),
        "no_root_tensor": (
            lambda: backend().broadcast([], dist.BroadcastOptions()),
            ValueError,
            "broadcast.*invalid root tensor: 0",
        ),
        "two_tensors": (lambda: group.allreduce([ONES, ONES]), ValueError, "all_reduce.*single"),
        "other_device_in_a_list": (
            lambda: dist.all_gather([meta] * world, ONES),
            TypeError,
            "all_gather.*meta.*CPU|all_gather.*CPU.*meta",
        ),
        "other_device_as_output": (
            lambda: dist.reduce_scatter(ONES, [meta] * world),
            TypeError,
            "reduce_scatter.*meta.*CPU|reduce_scatter.*CPU.*meta",
        ),
        "sparse_in_a_list": (
            lambda: dist.all_gather([ONES.to_sparse()] * world, ONES),
            TypeError,
            "all_gather.*(?i:sparse).*dense",
        ),
    }


WRONG = list(wrong(3))


@on_ranks(1, 2, 3)
@pytest.mark.parametrize("case", WRONG)
def test_a_wrong_argument_is_refused_by_the_call_and_the_group_works_on(rank, world, case):
    if world == 1 and case in ("all_gather_list_too_short", "splits_negative"):
        return  # one rank has a list of one
    call, kind, sentence = wrong(world)[case]
    # Only one rank is wrong: if its call had taken a sequence number, the sums below would not match.
    if rank == world - 1:
        with pytest.raises(kind, match=sentence) as caught:
            call()
        # gloo has no separate class for arguments, so scripts catch RuntimeError.
        assert isinstance(caught.value, RuntimeError)
    tensor = torch.ones(3)
    dist.all_reduce(tensor)
    assert (tensor == world).all()


@on_ranks(2)
def test_a_refused_argument_has_one_class_for_those_who_catch_gloos_and_those_who_catch_pythons(rank, world):
    import torch_accl
    from torch.distributed import _functional_collectives as functional

    tensor = torch.ones(world * 2 + 1)
    with pytest.raises(torch_accl.InvalidArgumentError) as caught:
        dist.all_to_all_single(torch.ones_like(tensor), tensor)
    assert isinstance(caught.value, ValueError) and isinstance(caught.value, RuntimeError)
    assert pickle.loads(pickle.dumps(caught.value)).args == caught.value.args
    # The same holds for the operators that compiled graphs call.
    with pytest.raises(RuntimeError) as caught:
        functional.wait_tensor(functional.all_to_all_single(tensor, [1] * (world + 1), [1] * world, dist.group.WORLD))
    assert isinstance(caught.value, ValueError)
    with pytest.raises(torch_accl.InvalidTypeError) as caught:
        dist.all_gather([torch.ones(3, device="meta")] * world, ONES)
    assert isinstance(caught.value, TypeError) and isinstance(caught.value, RuntimeError)
    dist.barrier()


@on_ranks(2, 3)
def test_a_first_dimension_that_does_not_divide_is_refused(rank, world):
    tensor = torch.ones(world * 2 + 1)
    with pytest.raises(ValueError, match="all_to_all.*Tensor's dim 0 does not divide equally across group size"):
        dist.all_to_all_single(torch.ones_like(tensor), tensor)
    dist.barrier()


@on_ranks(1, 2)
def test_sparse_tensors_where_they_make_no_sense_are_refused(rank, world):
    with pytest.raises(NotImplementedError):
        dist.broadcast(ONES.to_sparse(), 0)
    with pytest.raises((NotImplementedError, TypeError)):
        dist.all_reduce(torch.eye(3).to_sparse_csr())
    backend = dist.group.WORLD._get_backend(torch.device("cpu"))
    with pytest.raises(RuntimeError, match="invalid tensor layout at index 1.*unsupported layout"):
        backend.allreduce_coalesced([ONES.clone(), ONES.to_sparse()])
    dist.barrier()


@on_ranks(2)
def test_a_list_on_a_rank_that_is_not_the_root_is_refused(rank, world):
    if rank == 1:
        with pytest.raises(ValueError):
            dist.gather(ONES, [torch.ones(3)] * world, dst=0)
        with pytest.raises(ValueError):
            dist.group.WORLD.scatter([torch.ones(3)], [[torch.ones(3)] * world], _scatter_options(0))
    tensor = torch.ones(3)
    dist.all_reduce(tensor)
    assert (tensor == world).all()


def _scatter_options(root):
    options = dist.ScatterOptions()
    options.rootRank = root
    return options


@on_ranks(1, 2)
def test_outputs_that_overlap_themselves_are_refused(rank, world):
    with pytest.raises(ValueError, match="(?i)overlap|expand|one memory location|stride 0"):
        dist.all_reduce(torch.ones(1).expand(4))
    tensor = torch.ones(3)
    dist.all_reduce(tensor)
    assert (tensor == world).all()


@on_ranks(1, 2)
def test_a_message_about_an_argument_names_the_call_in_lower_case_without_full_stop(rank, world):
    with pytest.raises(ValueError) as caught:
        dist.broadcast(torch.ones(3), 99)
    text = str(caught.value).splitlines()[0]
    assert text.startswith("accl: ") and "broadcast" in text and not text.endswith(".")


@on_ranks(2)
def test_an_expanded_tensor_with_more_bytes_than_an_address_has_is_refused(rank, world):
    # One element in memory, but 2^62 elements to send.
    with pytest.raises((RuntimeError, MemoryError), match="more bytes than the address space"):
        dist.send(torch.zeros(1).expand(2**62), 1 - rank)
    dist.barrier()


@on_ranks(2)
def test_a_negative_timeout_of_a_group_is_refused_by_its_value(rank, world):
    with pytest.raises(ValueError, match="timeout: expected a value that is not negative, got -1000 ms"):
        dist.new_group(timeout=timedelta(seconds=-1))
    dist.barrier()
