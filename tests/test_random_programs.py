"""Long random programs that all ranks run alike: kinds, sizes, roots, groups, blocking or not, and order of waiting."""

import itertools
import random
import threading

import pytest
import torch
import torch.distributed as dist
from support import bytes_equal, contributions, expected_reduction, on_ranks

SIZES = [0, 1, 2, 5, 64, 1000, 4097, 65_536, 70_001, 300_007]
KINDS = ["all_reduce", "broadcast", "reduce", "all_gather", "reduce_scatter", "all_to_all", "gather", "scatter", "ring"]


def start(kind, seed, count, root, group, ranks, rank):
    """Starts one call. Returns its works and a function that checks the result."""
    world, me = len(ranks), ranks.index(rank)
    tensors = contributions(world, count, "float32", seed=seed)
    own, total = tensors[me].clone(), None
    here = {"group": group, "async_op": True}
    if kind == "all_reduce":
        works = [dist.all_reduce(own, **here)]
        return works, lambda: bytes_equal(own, expected_reduction(tensors, "SUM"))
    if kind == "broadcast":
        works = [dist.broadcast(own, group_src=root, **here)]
        return works, lambda: bytes_equal(own, tensors[root])
    if kind == "reduce":
        works = [dist.reduce(own, group_dst=root, **here)]
        total = expected_reduction(tensors, "SUM")
        return works, lambda: bytes_equal(own, total if me == root else tensors[me])
    if kind == "all_gather":
        flat = torch.zeros(world * count)
        works = [dist.all_gather_single(flat, own, **here)]
        return works, lambda: bytes_equal(flat, torch.cat(tensors))
    if kind == "reduce_scatter":
        blocks = own.repeat(world)
        works = [dist.reduce_scatter_single(own, blocks, **here)]
        return works, lambda: bytes_equal(own, expected_reduction(tensors, "SUM"))
    if kind == "all_to_all":
        flat, blocks = torch.zeros(world * count), own.repeat(world)
        works = [dist.all_to_all_single(flat, blocks, **here)]
        return works, lambda: bytes_equal(flat, torch.cat(tensors))
    if kind == "gather":
        parts = [torch.zeros(count) for _ in range(world)] if me == root else None
        works = [dist.gather(own, parts, group_dst=root, **here)]
        return works, lambda: me != root or bytes_equal(torch.cat(parts), torch.cat(tensors))
    if kind == "scatter":
        output = torch.zeros(count)
        works = [dist.scatter(output, tensors if me == root else None, group_src=root, **here)]
        return works, lambda: bytes_equal(output, tensors[me])
    received = torch.zeros(count)
    works = [
        dist.isend(own, group=group, group_dst=(me + 1) % world, tag=seed),
        dist.irecv(received, group=group, group_src=(me - 1) % world, tag=seed),
    ]
    return works, lambda: bytes_equal(received, tensors[me - 1])


def run_program(seed, steps, groups, rank):
    """Runs the program of this seed. All ranks draw the same steps, but each rank draws its own order of waiting."""
    shared, own = random.Random(seed), random.Random(1000 * seed + rank)
    pending = []
    for step in range(steps):
        group, ranks = shared.choice(groups)
        kind, count = shared.choice(KINDS), shared.choice(SIZES)
        root, blocking = shared.randrange(len(ranks)), shared.random() < 0.4
        if rank not in ranks or (kind == "ring" and len(ranks) == 1):
            continue
        works, right = start(kind, seed * 1000 + step, count, root, group, ranks, rank)
        pending.append((f"step {step}: {kind} of {count} on {ranks}", works, right))
        while pending and (blocking or len(pending) > 8):
            what, works, right = pending.pop(own.randrange(len(pending)))
            for work in works:
                work.wait()
            assert right(), what
    for what, works, right in pending:
        for work in works:
            work.wait()
        assert right(), what


def groups_of(world):
    everyone = list(range(world))
    sets = [everyone, everyone]
    sets += [list(pair) for pair in itertools.combinations(everyone, 2) if world > 2]
    return [(dist.new_group(ranks), ranks) for ranks in sets]


SETTINGS = {
    "default": {},
    "tcp": {"ACCL_TRANSPORTS": "tcp"},
    "small_rings": {"ACCL_RING_BYTES": "16KiB", "ACCL_SEGMENT_BYTES": "1KiB", "ACCL_EAGER_BYTES": "0"},
}


@on_ranks(2, 3, 4, fresh=True)
@pytest.mark.parametrize("seed", range(5))
def test_a_random_program_gives_exact_results(rank, world, seed):
    run_program(seed, 150, groups_of(world), rank)
    dist.barrier()


@pytest.mark.slow
@on_ranks(2, 3, fresh=True, init=False)
@pytest.mark.parametrize("setting", ["tcp", "small_rings"])
@pytest.mark.parametrize("seed", [11, 12])
def test_a_random_program_gives_exact_results_with_other_settings(rank, world, seed, setting):
    import os

    from support import init_group

    os.environ.update(SETTINGS[setting])
    init_group()
    run_program(seed, 150, groups_of(world), rank)
    dist.barrier()
    dist.destroy_process_group()


@pytest.mark.slow
@on_ranks(2, 3, fresh=True)
@pytest.mark.parametrize("seed", [21, 22, 23])
def test_threads_run_random_programs_on_groups_of_their_own(rank, world, seed):
    groups = [groups_of(world) for _ in range(3)]
    dist.barrier()
    failures = []

    def run(index):
        try:
            run_program(seed * 10 + index, 60, groups[index], rank)
        except BaseException as error:
            failures.append((index, repr(error)))

    threads = [threading.Thread(target=run, args=(index,)) for index in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    dist.barrier()
