"""Calls by reference: ranks of a host read each other's device memory, with the bits of CPU tensors.

The stand-in's streams and memory are lent to a stand-in of a GPU's driver, whose windows are files that processes share. So
everything but the GPU is the product's.
"""

import ctypes
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from support import init_group, on_ranks, run_ranks, standin
from support.training import contribution

ORDERS = pytest.mark.parametrize("order", standin.ORDERS)

pytestmark = pytest.mark.skipif(
    torch.__version__ < "2.15",
    reason="the stand-in is written for the interfaces of torch 2.15",
)

# All collectives are by reference.
ALL = {"ACCL_EAGER_BYTES": "0"}
# More than a tile and more than an event's bytes.
LARGE = 3_000_001


@pytest.fixture(autouse=True, scope="module")
def modules():
    """Compiles the stand-ins once."""
    standin.build()
    standin.build_driver()


def start(rank, order="random", backend=None, **options):
    module = standin.register(order, seed=rank + 1)
    standin.lend_driver(module)
    init_group(backend, **options)
    return module


def described():
    return standin._backend("standin").describe()


def peer_bytes():
    found = re.search(r"peer memory peer, (\d+) bytes by peer, (\d+) bytes staged", described())
    return (0, 0) if found is None else (int(found[1]), int(found[2]))


def values(rank, count, dtype, seed=0):
    value = contribution(rank, count, seed=seed)
    if dtype.is_complex:
        return torch.complex(value, value.flip(0)).to(dtype)
    return (value * 50).to(dtype) if not dtype.is_floating_point else value.to(dtype)


def collectives(device, rank, world, dtype, count, op):
    """Makes every collective once. Returns the results on the host."""
    whole = values(rank, count, dtype).to(device)
    blocks = [values(rank, count + 5 * to, dtype, seed=to).to(device) for to in range(world)]
    row = values(rank, count * world, dtype, seed=9).to(device)
    results = {}
    tensor = whole.clone()
    dist.all_reduce(tensor, op)
    results["all_reduce"] = tensor
    tensor = whole.clone()
    dist.broadcast(tensor, world - 1)
    results["broadcast"] = tensor
    tensor = whole.clone()
    dist.reduce(tensor, 0, op)
    if rank == 0:
        results["reduce"] = tensor
    tensor = whole.new_empty(count)
    dist.reduce_scatter_single(tensor, row, op)
    results["reduce_scatter_single"] = tensor
    tensor = blocks[rank].new_empty(blocks[rank].numel())
    dist.reduce_scatter(tensor, blocks, op)
    results["reduce_scatter"] = tensor
    tensor = whole.new_empty(count * world)
    dist.all_gather_single(tensor, whole)
    results["all_gather_single"] = tensor
    gathered = [torch.empty_like(block) for block in blocks]
    dist.all_gather(gathered, blocks[rank])
    results.update({f"all_gather {index}": tensor for index, tensor in enumerate(gathered)})
    tensor = torch.empty_like(row)
    dist.all_to_all_single(tensor, row)
    results["all_to_all_single"] = tensor
    exchanged = [torch.empty_like(blocks[rank]) for _ in range(world)]
    dist.all_to_all(exchanged, blocks)
    results.update({f"all_to_all {index}": tensor for index, tensor in enumerate(exchanged)})
    gathered = [torch.empty_like(whole) for _ in range(world)] if rank == 1 else None
    dist.gather(whole, gathered, 1)
    results.update({f"gather {index}": tensor for index, tensor in enumerate(gathered or [])})
    tensor = torch.empty_like(whole)
    dist.scatter(tensor, list(row.chunk(world)) if rank == 0 else None, 0)
    results["scatter"] = tensor
    return {name: tensor.cpu() for name, tensor in results.items()}


def assert_equal_bits(found, wanted, what=""):
    assert found.keys() == wanted.keys()
    for name, tensor in found.items():
        other = wanted[name]
        assert tensor.view(torch.uint8).equal(other.view(torch.uint8)), f"{what} {name}: other bits"


SUMS = [
    (torch.float32, dist.ReduceOp.SUM),
    (torch.bfloat16, dist.ReduceOp.AVG),
    (torch.float16, dist.ReduceOp.MAX),
    (torch.float64, dist.ReduceOp.PRODUCT),
    (torch.int32, dist.ReduceOp.MIN),
    (torch.int64, dist.ReduceOp.SUM),
    (torch.uint8, dist.ReduceOp.BXOR),
    (torch.complex64, dist.ReduceOp.SUM),
]


@ORDERS
@on_ranks(2, 3, fresh=True, init=False, env=ALL)
def test_every_collective_gives_the_bits_of_the_cpu(rank, world, order):
    start(rank, order)
    for number, (dtype, op) in enumerate(SUMS):
        count = (1000, 7, 70_001, 1)[number % 4]
        wanted = collectives("cpu", rank, world, dtype, count, op)
        assert_equal_bits(
            collectives("standin", rank, world, dtype, count, op),
            wanted,
            f"{dtype} {op} of {count}",
        )
    by_peer, staged = peer_bytes()
    assert by_peer > 0 and staged == 0, described()


@ORDERS
@on_ranks(2, fresh=True, init=False)
def test_large_tensors_stream_tile_by_tile(rank, world, order):
    start(rank, order)
    tensors = [values(rank, LARGE, torch.float32).to(device) for device in ("cpu", "standin")]
    for tensor in tensors:
        dist.all_reduce(tensor)
    assert tensors[1].cpu().equal(tensors[0])
    assert peer_bytes() == (4 * LARGE, 0)
    gathered = torch.empty(2 * LARGE, device="standin")
    dist.all_gather_single(gathered, tensors[1])
    assert gathered.cpu().equal(tensors[0].repeat(2))


@ORDERS
@on_ranks(2, fresh=True, init=False, env=ALL)
def test_results_follow_the_work_of_the_current_stream(rank, world, order):
    module = start(rank, order)
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
    assert (counts["pageable"], counts["wrong_device"], counts["after_free"]) == (
        0,
        0,
        0,
    )


@ORDERS
@on_ranks(2, 3, fresh=True, init=False, env=ALL)
def test_calls_in_flight_together_do_not_disturb_each_other(rank, world, order):
    start(rank, order)

    def program(device):
        tensors = [values(rank, 10_000 + 50_000 * index, torch.float32, seed=index).to(device) for index in range(8)]
        works = [dist.all_reduce(tensor, async_op=True) for tensor in tensors]
        gathered = [torch.empty(world * 5000, device=device) for _ in range(3)]
        works += [dist.all_gather_single(row, tensors[0][:5000].clone(), async_op=True) for row in gathered]
        for work in works:
            work.wait()
        return {str(index): tensor.cpu() for index, tensor in enumerate(tensors)}

    assert_equal_bits(program("standin"), program("cpu"))


@ORDERS
@on_ranks(2, fresh=True, init=False, env=ALL)
def test_tensors_that_are_not_dense_get_the_bits_of_the_cpu(rank, world, order):
    start(rank, order)

    def program(device):
        matrix = values(rank, 300 * 200, torch.float32).view(300, 200).to(device)
        dist.all_reduce(matrix.t())
        column = torch.zeros(300, 7, device=device)
        dist.all_reduce(matrix[:, 3:9])
        column[:, 2] = rank + 5.0
        dist.broadcast(column[:, 2], 1)
        outputs = torch.zeros(world, 500, 2, device=device)
        dist.all_gather([outputs[index, :, 0] for index in range(world)], matrix.flatten()[::120])
        return {
            "matrix": matrix.cpu(),
            "column": column.cpu(),
            "outputs": outputs.cpu(),
        }

    assert_equal_bits(program("standin"), program("cpu"))
    assert peer_bytes()[1] == 0


@ORDERS
@on_ranks(2, fresh=True, init=False, env=ALL)
def test_results_in_the_place_of_their_contributions(rank, world, order):
    start(rank, order)

    def program(device):
        row = values(rank, 20_000, torch.float32).to(device)
        dist.all_gather_single(row, row.chunk(2)[rank])
        other = values(rank, 20_000, torch.float32, seed=3).to(device)
        dist.reduce_scatter_single(other.chunk(2)[rank], other)
        return {"gathered": row.cpu(), "reduced": other.chunk(2)[rank].cpu()}

    assert_equal_bits(program("standin"), program("cpu"))


@ORDERS
@on_ranks(2, 3, fresh=True, init=False, env=ALL)
def test_contributions_that_share_memory_with_results(rank, world, order):
    start(rank, order)

    def program(device):
        row = values(rank, 5000 * (world + 1), torch.float32).to(device)
        dist.all_gather_single(row[: 1000 * world], row[500:1500])
        dist.reduce_scatter_single(row[300:1300], row[: 1000 * world])
        exchanged = values(rank, 4000 * world, torch.float32, seed=2).to(device)
        dist.all_to_all_single(exchanged, exchanged)
        # One rank alone has tensors that share memory.
        other = values(rank, 3000 * world, torch.float32, seed=3).to(device)
        target = other if rank == 0 else torch.empty_like(other)
        dist.all_to_all_single(target, other)
        return {"row": row.cpu(), "exchanged": exchanged.cpu(), "target": target.cpu()}

    assert_equal_bits(program("standin"), program("cpu"))


@on_ranks(2, fresh=True, init=False, env=ALL)
def test_results_that_share_memory_are_refused_by_name(rank):
    start(rank)
    row = torch.zeros(3000, device="standin")
    with pytest.raises(ValueError, match="two output tensors share memory; give each its own"):
        dist.all_gather([row[:2000], row[1000:]], torch.zeros(2000, device="standin"))
    dist.all_reduce(row)


@on_ranks(2, fresh=True, init=False, env=ALL | {"ACCL_GPU_ROUTE": "staged"})
def test_the_route_staged_shares_no_memory(rank):
    start(rank)
    tensor = torch.ones(100_000, device="standin")
    dist.all_reduce(tensor)
    counts = standin.driver_counts()
    assert (tensor.cpu() == 2).all() and (counts.allocations, counts.copies) == (0, 0)
    assert "0 bytes by peer, 400000 bytes staged" in described()


@on_ranks(2, fresh=True, init=False)
def test_small_calls_and_calls_beyond_the_window_are_staged(rank):
    os.environ["ACCL_GPU_WINDOW"] = "1MiB"
    start(rank)
    dist.all_reduce(torch.ones(1 << 16, device="standin"))
    assert "0 bytes by peer, 262144 bytes staged" in described() or "0 bytes by peer" not in described()
    dist.all_reduce(torch.ones(1 << 19, device="standin"))
    assert standin.driver_counts().allocations == 0
    dist.all_reduce(torch.ones(1 << 17, device="standin"))
    assert standin.driver_counts().allocations > 0


@pytest.mark.parametrize("what", ["none", "import"])
@pytest.mark.parametrize("world", [2, 3])
def test_where_processes_cannot_share_memory_tensors_are_staged_with_one_line(world, what):
    def body(rank):
        if rank == world - 1:
            os.environ["ACCL_GPU_STANDIN_IPC"] = what
        start(rank)
        for _ in range(3):
            tensor = torch.ones(100_000, device="standin")
            dist.all_reduce(tensor)
            assert (tensor.cpu() == world).all()
        group = dist.new_group()
        dist.all_reduce(torch.ones(100_000, device="standin"), group=group)
        assert "0 bytes by peer" in described()

    outcomes = run_ranks(body, world, init=False, env=ALL)
    assert all(outcome.status == "ok" for outcome in outcomes), outcomes
    lines = [line for outcome in outcomes for line in outcome.output.splitlines()]
    said = [line for line in lines if "cannot read each other's GPU memory" in line]
    assert len(said) == 1 and f"rank {world - 1}: " in said[0], lines


@pytest.mark.parametrize("what", ["none", "import"])
@on_ranks(2, fresh=True, init=False, env=ALL | {"ACCL_GPU_ROUTE": "peer"})
def test_where_processes_cannot_share_memory_the_route_peer_is_refused_on_all_ranks(rank, what):
    if rank == 1:
        os.environ["ACCL_GPU_STANDIN_IPC"] = what
    start(rank)
    words = "not supported" if what == "none" else "peer access is not supported|peer access"
    for _ in range(2):
        with pytest.raises(
            NotImplementedError,
            match=f"ACCL_GPU_ROUTE=peer is impossible: rank 1: .*({words})",
        ):
            dist.all_reduce(torch.ones(100_000, device="standin"))
    tensor = torch.ones(3)
    dist.all_reduce(tensor)
    assert tensor.tolist() == [2.0] * 3


@on_ranks(2, fresh=True, init=False, env=ALL)
def test_a_rank_with_host_memory_and_one_with_a_gpu_are_both_named(rank):
    start(rank)
    dist.all_reduce(torch.ones(1000, device="standin"))
    with pytest.raises(
        RuntimeError,
        match="only rank 0 has all tensors on a GPU; move the tensors of rank 1 to its GPU",
    ):
        dist.all_reduce(torch.ones(1000, device="standin" if rank == 0 else "cpu"))


@on_ranks(2, fresh=True, init=False)
def test_ranks_that_disagree_on_the_route_are_named(rank):
    os.environ["ACCL_GPU_ROUTE"] = "peer" if rank == 0 else "staged"
    with pytest.raises(ValueError, match="rank [01] has gpu_route=peer|rank [01] has gpu_route=staged"):
        start(rank)


@on_ranks(2, fresh=True, init=False)
def test_an_unknown_route_is_refused_with_the_known_ones(rank):
    os.environ["ACCL_GPU_ROUTE"] = "nvlink"
    with pytest.raises(
        ValueError,
        match="value `nvlink` is not accepted; expected one of auto, peer, staged",
    ):
        start(rank)


@on_ranks(3, fresh=True, init=False, env=ALL)
def test_groups_of_some_ranks_have_a_way_of_their_own(rank, world):
    start(rank)
    pair = dist.new_group([0, 2])
    tensor = torch.full((5000,), float(rank), device="standin")
    if rank != 1:
        dist.all_reduce(tensor, group=pair)
        assert (tensor.cpu() == 2).all()
    whole = torch.ones(5000, device="standin")
    dist.all_reduce(whole)
    assert (whole.cpu() == 3).all()


@on_ranks(2, fresh=True, init=False, env=ALL)
def test_a_group_that_ends_gives_the_memory_of_other_ranks_back(rank):
    module = start(rank)
    for _ in range(3):
        group = dist.new_group()
        tensor = torch.ones(200_000, device="standin")
        dist.all_reduce(tensor, group=group)
        assert (tensor.cpu() == 2).all()
        dist.barrier()
        dist.destroy_process_group(group)
        del group
    standin.wait_until_idle(module)
    counts = standin.driver_counts()
    assert counts.imports <= 2, counts.imports
    # Windows are reused.
    assert counts.allocations <= 3, counts.allocations


def test_the_death_of_a_rank_ends_the_calls_of_the_others():
    def body(rank):
        start(rank, timeout=timedelta(seconds=30))
        tensor = torch.ones(LARGE, device="standin")
        dist.all_reduce(tensor)
        if rank == 1:
            dist.all_reduce(tensor, async_op=True)
            os.kill(os.getpid(), signal.SIGKILL)
        begun = time.monotonic()
        with pytest.raises(RuntimeError, match="rank 1"):
            for _ in range(3):
                dist.all_reduce(tensor)
        assert time.monotonic() - begun < 20

    assert [outcome.status for outcome in run_ranks(body, 2, init=False, env=ALL)] == [
        "ok",
        "died",
    ]


@on_ranks(2, fresh=True, init=False, env=ALL)
def test_a_device_without_memory_for_a_window_says_so(rank):
    start(rank)
    dist.all_reduce(torch.ones(1000, device="standin"))
    library = ctypes.CDLL(str(standin.build_driver()))
    library.accl_standin_memory_limit(ctypes.c_size_t(4 << 20))
    with pytest.raises(
        MemoryError,
        match="out of memory.*ACCL_GPU_ROUTE=staged or a smaller ACCL_GPU_WINDOW",
    ):
        dist.all_reduce(torch.ones(LARGE, device="standin"))
    # The ranks do not know what the others have done, so the group has failed.
    with pytest.raises(RuntimeError, match="out of memory"):
        dist.all_reduce(torch.ones(1000, device="standin"))


@on_ranks(2, fresh=True, init=False, env=ALL)
def test_training_gives_the_bits_of_the_cpu(rank):
    start(rank)

    def train(device):
        torch.manual_seed(3)
        model = torch.nn.Sequential(torch.nn.Linear(300, 400), torch.nn.ReLU(), torch.nn.Linear(400, 10)).to(device)
        model = torch.nn.parallel.DistributedDataParallel(model, bucket_cap_mb=0.2)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        for step in range(3):
            optimizer.zero_grad()
            inputs = contribution(rank, 16 * 300, seed=step).view(16, 300).to(device)
            model(inputs).square().mean().backward()
            optimizer.step()
        return {name: value.cpu() for name, value in model.state_dict().items()}

    assert_equal_bits(train("standin"), train("cpu"))
    assert peer_bytes()[0] > 0


PEER = ALL | {"ACCL_GPU_ROUTE": "peer"}


@ORDERS
@on_ranks(2, 3, fresh=True, init=False, env=PEER)
def test_messages_give_the_bits_of_the_cpu(rank, world, order):
    start(rank, order)

    def program(device):
        counts = (1, 1000, 300_001, LARGE)
        received = [torch.empty(count, device=device) for count in counts]
        sent = [values(rank, count, torch.float32, seed=count % 7).to(device) for count in counts]
        after, before = (rank + 1) % world, (rank - 1) % world
        works = [dist.isend(tensor, after, tag=tag) for tag, tensor in enumerate(sent)]
        works += [dist.irecv(tensor, before, tag=tag) for tag, tensor in reversed(list(enumerate(received)))]
        for work in works:
            work.wait()
        strided = torch.zeros(500, 4, device=device)
        if rank == 0:
            dist.send(sent[1][:500].view(100, 5).t(), 1)
        elif rank == 1:
            dist.recv(strided[:, 2])
        return {str(index): tensor.cpu() for index, tensor in enumerate((*received, strided))}

    assert_equal_bits(program("standin"), program("cpu"))
    by_peer, staged = peer_bytes_of(described())
    assert by_peer > 4 * LARGE and staged == 0, described()


def peer_bytes_of(text):
    found = re.search(r"(\d+) bytes by peer, (\d+) bytes staged", text)
    return int(found[1]), int(found[2])


@on_ranks(2, fresh=True, init=False, env=PEER)
def test_a_send_may_be_followed_by_a_change_of_its_tensor(rank):
    start(rank, "late")
    for number in range(5):
        tensor = torch.full((200_000,), float(number), device="standin")
        if rank == 0:
            dist.send(tensor, 1)
            tensor.fill_(-1.0)
        else:
            received = torch.empty_like(tensor)
            dist.recv(received, 0)
            assert (received.cpu() == number).all()


@on_ranks(2, fresh=True, init=False, env=PEER)
def test_a_message_between_a_gpu_and_host_memory_names_both_ranks(rank):
    start(rank)
    tensor = torch.ones(3000, device="standin" if rank == 0 else "cpu")
    with pytest.raises(RuntimeError, match="only rank 0 has its tensor on a GPU; move the tensor of rank 1 to its GPU"):
        dist.send(tensor, 1) if rank == 0 else dist.recv(tensor, 0)


@on_ranks(2, fresh=True, init=False, env=ALL)
def test_messages_are_staged_unless_the_setting_says_peer(rank):
    start(rank)
    tensor = torch.ones(3000, device="standin")
    dist.all_reduce(tensor)
    by_peer, _ = peer_bytes_of(described())
    if rank == 0:
        dist.send(tensor, 1)
    else:
        dist.recv(tensor, 0)
    assert peer_bytes_of(described()) == (by_peer, 12_000)


@ORDERS
@on_ranks(2, fresh=True, init=False, env=PEER)
def test_batches_of_messages_give_the_bits_of_the_cpu(rank, order):
    start(rank, order)

    def program(device):
        received = torch.empty(50_000, device=device)
        operations = [
            dist.P2POp(dist.isend, values(rank, 50_000, torch.float32).to(device), 1 - rank),
            dist.P2POp(dist.irecv, received, 1 - rank),
        ]
        for work in dist.batch_isend_irecv(operations):
            work.wait()
        return {"received": received.cpu()}

    assert_equal_bits(program("standin"), program("cpu"))


@on_ranks(2, fresh=True, init=False, env=ALL)
def test_a_rank_without_memory_for_a_window_fails_the_call_on_all_ranks(rank):
    """The next call of the rank was taken for the one that it had refused, so that both ranks had wrong sums."""
    start(rank, timeout=timedelta(seconds=20))
    dist.all_reduce(torch.ones(1000, device="standin"))
    if rank == 1:
        library = ctypes.CDLL(str(standin.build_driver()))
        library.accl_standin_memory_limit(ctypes.c_size_t(4 << 20))
    with pytest.raises((MemoryError, RuntimeError), match="out of memory"):
        dist.all_reduce(torch.full((LARGE,), 10.0, device="standin"))
    with pytest.raises(RuntimeError, match="out of memory"):
        dist.all_reduce(torch.ones(LARGE, device="standin"))


@on_ranks(2, fresh=True, init=False, env=ALL)
def test_an_idle_window_of_any_size_serves_a_call_if_the_device_is_full(rank):
    start(rank)
    dist.all_reduce(torch.ones(LARGE, device="standin"))
    library = ctypes.CDLL(str(standin.build_driver()))
    library.accl_standin_memory_limit(ctypes.c_size_t(1 << 20))
    until = time.monotonic() + 10
    while standin._backend("standin").snapshot()["process"]["idle_window_bytes"] < 16 << 20:
        assert time.monotonic() < until
    # Two windows at once, one of them much larger than its call.
    works = [dist.all_reduce(torch.ones(1000, device="standin"), async_op=True) for _ in range(2)]
    for work in works:
        work.wait()


def test_ranks_that_were_forked_after_the_import_read_each_others_windows():
    """They drew the same numbers for their windows, so that each read its own, and had wrong sums without an error."""
    program = """
import os, sys
sys.path.insert(0, "tests")
import torch, torch.distributed as dist
import torch_accl
from support import standin

def main(rank, path):
    module = standin.register("late", seed=rank + 1)
    standin.lend_driver(module)
    dist.init_process_group("accl", init_method=f"file://{path}", rank=rank, world_size=2)
    for count in (200_000, 70_000):
        tensor = torch.full((count,), float(rank + 1), device="standin")
        dist.all_reduce(tensor)
        assert (tensor.cpu() == 3).all(), tensor.cpu()
    found = dist.group.WORLD._get_backend(torch.device("standin")).describe()
    assert "peer memory peer" in found, found
    assert standin.driver_counts().imports > 0
    dist.destroy_process_group()

path = sys.argv[1]
children = []
for rank in range(2):
    child = os.fork()
    if child == 0:
        status = 1
        try:
            main(rank, path)
            status = 0
        finally:
            os._exit(status)
    children.append(child)
sys.exit(max(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children))
"""
    with tempfile.TemporaryDirectory() as folder:
        environment = os.environ | {"ACCL_EAGER_BYTES": "0"}
        command = [sys.executable, "-c", program, os.path.join(folder, "store")]
        done = subprocess.run(command, cwd=standin.ROOT, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


@ORDERS
@on_ranks(2, fresh=True, init=False, env=ALL)
def test_one_group_serves_two_devices_of_a_process(rank, order):
    """The windows of the first device were used with tensors of the second one, which ended the process."""
    start(rank, order)
    for device in ("standin:0", "standin:1", "standin:0"):
        tensor = torch.full((50_000,), rank + 1.0, device=device)
        dist.all_reduce(tensor)
        assert (tensor.cpu() == 3).all()
    tensor = torch.full((50_000,), rank + 1.0, device=f"standin:{rank}")
    dist.all_reduce(tensor)
    assert (tensor.cpu() == 3).all()


@on_ranks(2, fresh=True, init=False, env=ALL)
def test_a_first_call_with_host_memory_on_one_rank_names_both(rank):
    """It named an all_gather of bytes that no program had called."""
    start(rank)
    with pytest.raises(RuntimeError) as raised:
        dist.all_reduce(torch.ones(1000, device="standin" if rank == 0 else "cpu"))
    text = str(raised.value)
    assert "rank 0 called a large collective with all tensors on a GPU, and rank 1 called all_reduce(float32" in text
    assert "set ACCL_GPU_ROUTE=staged on all ranks" in text


@on_ranks(2, fresh=True, init=False)
def test_a_small_exchange_without_splits_is_staged(rank):
    start(rank)
    counts = torch.arange(2, device="standin")
    dist.all_to_all_single(torch.empty_like(counts), counts)
    assert "0 bytes by peer, 16 bytes staged" in described() or "peer" not in described()
    assert standin.driver_counts().allocations == 0


@on_ranks(2, fresh=True, init=False, env=ALL)
def test_a_trial_waits_for_no_work_of_the_program(rank):
    module = start(rank, "late")
    module.compute(1_000_000)
    begun = time.monotonic()
    work = dist.all_reduce(torch.ones(1000, device="standin"), async_op=True)
    assert time.monotonic() - begun < 5
    work.wait()


@on_ranks(2, fresh=True, init=False, env=ALL)
def test_the_snapshot_counts_windows(rank):
    start(rank)
    dist.all_reduce(torch.ones(100_000, device="standin"))
    until = time.monotonic() + 10
    while True:
        process = standin._backend("standin").snapshot()["process"]
        if process["window_bytes"] == process["idle_window_bytes"] > 0:
            break
        assert time.monotonic() < until, process


@on_ranks(2, fresh=True, init=False, env=ALL)
def test_phases_separate_work_of_the_device_from_a_late_peer(rank):
    """The time for which a device was busy before the call was shown as a slow link."""
    module = start(rank, "late")
    tensor = torch.zeros(1 << 18, device="standin")
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


@on_ranks(2, fresh=True, init=False, env=PEER)
def test_a_message_to_itself_between_a_gpu_and_host_memory_says_so(rank):
    start(rank)
    sent = dist.isend(torch.ones(3000, device="standin"), rank)
    with pytest.raises(
        RuntimeError, match="sends itself a message with tag 0, and only one of its two tensors is on a GPU"
    ):
        dist.recv(torch.ones(3000), rank)
    with pytest.raises(RuntimeError):
        sent.wait()
