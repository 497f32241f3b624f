"""Groups with a device: software engines in the ranks' processes, or behind the sockets of an emulator.

`ACCL_TEST_DEVICE=all` runs the whole matrix (`make test-device`). By default only a part runs, in which every pair of
values occurs.
"""

import copy
import itertools
import os
import re
import signal
import socket
import threading
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from support import BACKEND, bytes_equal, contribution, expected_reduction, init_group, on_ranks, reduce_op, run_ranks
from support.emulators import Emulator, free_ports
from support.runner import check

pytestmark = pytest.mark.skipif(BACKEND != "accl", reason="about this package only")

DESIGNS = ["udp", "tcp", "cyt_rdma"]
PLACES = ["sim", "emulator", "faithful"]
# Small limits, so that calls with counts around them are quick.
EAGER, RENDEZVOUS = 4096, 65536
LIMITS = f"rx_bytes=1KiB&rx_buffers=32&eager={EAGER}&rendezvous={RENDEZVOUS}"

ALL = list(itertools.product([1, 2, 3, 4, 5], DESIGNS, PLACES))
PAIRS = [
    (1, "udp", "sim"),
    (1, "tcp", "emulator"),
    (1, "cyt_rdma", "faithful"),
    (2, "udp", "faithful"),
    (2, "tcp", "sim"),
    (2, "cyt_rdma", "emulator"),
    (3, "udp", "emulator"),
    (3, "tcp", "faithful"),
    (3, "cyt_rdma", "sim"),
    (4, "udp", "sim"),
    (4, "cyt_rdma", "faithful"),
    (5, "tcp", "emulator"),
    (5, "cyt_rdma", "sim"),
]
MATRIX = ALL if os.environ.get("ACCL_TEST_DEVICE") == "all" else PAIRS

SUMS = ["float16", "float32", "float64", "int32", "int64"]
WHOLE = ["int32", "int64"]
MOVED = ["bool", "uint8", "int16", "bfloat16", "float32", "complex64"]


def options(text, **others):
    import torch_accl

    return torch_accl.Options(device=text, **others)


def backend():
    return dist.distributed_c10d._get_default_group()._get_backend(torch.device("cpu"))


def device_line():
    return next(line for line in backend().describe().splitlines() if line.startswith("device "))


def device_calls():
    """Returns the number of calls that the device of this rank has run, by kind of call."""
    counts = re.findall(r"(\w+ \w+(?: [A-Z_]+)?) (\d+)(?:,|$)", device_line().split(" calls", 1)[1].lstrip(":"))
    return {what: int(count) for what, count in counts}


def message_of(call):
    """Returns the kind and message of the error that a call raises, and the seconds that the call took."""
    begin = time.monotonic()
    try:
        call()
    except Exception as error:
        return type(error).__name__, str(error), time.monotonic() - begin
    return "nothing", "", time.monotonic() - begin


def emulator_of(place, ranks, design):
    """Returns the emulator of a case and the device URL; the emulator is None for engines in the ranks' processes."""
    if place == "sim":
        return None, f"sim://?design={design}&{LIMITS}"
    given = ["--faithful"] if place == "faithful" else []
    emulator = Emulator(ranks, design, *given)
    return emulator, f"{emulator.url}&{LIMITS}"


def counts_of(world, element_bytes):
    eager = EAGER // element_bytes
    return sorted({0, 1, world - 1, world, world + 1, eager - 1, eager, eager + 1, 3 * eager + 5})


def check_reductions(rank, world):
    made = 0
    for dtype, op in [(dtype, "SUM") for dtype in SUMS] + [(dtype, "MAX") for dtype in WHOLE]:
        for count in counts_of(world, getattr(torch, dtype).itemsize):
            inputs = [contribution(peer, count, dtype, op) for peer in range(world)]
            expected = expected_reduction(inputs, op)
            where = f"{dtype} {op} {count}"
            tensor = inputs[rank].clone()
            dist.all_reduce(tensor, reduce_op(op))
            assert bytes_equal(tensor, expected), f"all_reduce {where}"
            for root in {0, world // 2, world - 1}:
                tensor = inputs[rank].clone()
                dist.reduce(tensor, root, reduce_op(op))
                assert bytes_equal(tensor, expected if rank == root else inputs[rank]), f"reduce {where} to {root}"
            whole = [contribution(peer, world * count, dtype, op, seed=1) for peer in range(world)]
            part = torch.empty(count, dtype=tensor.dtype)
            dist.reduce_scatter_tensor(part, whole[rank].clone(), reduce_op(op))
            mine = [tensor[rank * count : (rank + 1) * count] for tensor in whole]
            assert bytes_equal(part, expected_reduction(mine, op)), f"reduce_scatter {where}"
            made += 2 + len({0, world // 2, world - 1})
    return made


def check_moves(rank, world, design):
    made = 0
    for dtype in MOVED:
        for count in counts_of(world, getattr(torch, dtype).itemsize):
            inputs = [contribution(peer, count, dtype) for peer in range(world)]
            kind, where = inputs[0].dtype, f"{dtype} {count}"
            gathered = [torch.empty(count, dtype=kind) for _ in range(world)]
            dist.all_gather(gathered, inputs[rank])
            assert all(map(bytes_equal, gathered, inputs)), f"all_gather {where}"
            for root in {0, world // 2, world - 1}:
                tensor = inputs[rank].clone()
                dist.broadcast(tensor, root)
                assert bytes_equal(tensor, inputs[root]), f"broadcast {where} from {root}"
                gathered = [torch.empty(count, dtype=kind) for _ in range(world)] if rank == root else None
                dist.gather(inputs[rank], gathered, root)
                assert rank != root or all(map(bytes_equal, gathered, inputs)), f"gather {where} to {root}"
                blocks = [contribution(root, count, dtype, seed=peer) for peer in range(world)]
                tensor = torch.empty(count, dtype=kind)
                dist.scatter(tensor, blocks if rank == root else None, root)
                assert bytes_equal(tensor, blocks[rank]), f"scatter {where} from {root}"
                made += 3
            blocks = torch.cat([contribution(rank, count, dtype, seed=peer) for peer in range(world)])
            tensor = torch.empty(world * count, dtype=kind)
            dist.all_to_all_single(tensor, blocks)
            expected = torch.cat([contribution(peer, count, dtype, seed=rank) for peer in range(world)])
            assert bytes_equal(tensor, expected), f"all_to_all {where}"
            made += 2 if design == "cyt_rdma" else 1
    return made


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize(("world", "design", "place"), MATRIX)
def test_collectives_of_a_device_are_those_of_the_host_bit_for_bit(world, design, place):
    emulator, text = emulator_of(place, world, design)

    def body(rank):
        init_group(pg_options=options(text), timeout=timedelta(seconds=60))
        made = check_reductions(rank, world) + check_moves(rank, world, design)
        calls = device_calls()
        assert sum(calls.values()) == made, (made, calls)
        assert calls["all_reduce float32 SUM"] and calls["broadcast bool"], calls

    try:
        check(run_ranks(body, world, init=False, deadline=240))
    finally:
        if emulator:
            emulator.__exit__()


@pytest.mark.parametrize("world", [2, 3])
def test_ddp_on_a_device_trains_to_the_weights_of_the_host(world):
    def train():
        torch.manual_seed(7)
        model = torch.nn.Sequential(torch.nn.Linear(20, 64), torch.nn.ReLU(), torch.nn.Linear(64, 5))
        model = torch.nn.parallel.DistributedDataParallel(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(10):
            torch.manual_seed(100 * step + dist.get_rank())
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(model(torch.randn(8, 20)), torch.randint(0, 5, (8,))).backward()
            optimizer.step()
        return [parameter.detach().clone() for parameter in model.parameters()]

    def body(rank):
        init_group(pg_options=options("sim"))
        on_device = train()
        assert device_calls()["all_reduce float32 SUM"] >= 10
        dist.destroy_process_group()
        init_group()
        on_host = train()
        for one, other in zip(on_device, on_host, strict=True):
            if world == 2:
                assert bytes_equal(one, other)
            # Two additions for each step's gradients, and their effect over ten steps.
            torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)

    check(run_ranks(body, world, init=False))


def test_sub_groups_and_messages_take_the_host():
    def body(rank):
        init_group(pg_options=options("sim"))
        group = dist.new_group([0, 1])
        same = dist.new_group([0, 1, 2], pg_options=copy.copy(options("sim")))
        tensor = torch.ones(3)
        if rank < 2:
            dist.all_reduce(tensor, group=group)
        dist.all_reduce(tensor, group=same)
        dist.all_to_all_single(tensor, tensor.clone())
        if rank == 0:
            dist.send(tensor, 1)
        if rank == 1:
            dist.recv(tensor, 0)
        dist.barrier()
        assert device_calls() == {"all_to_all float32": 1}, device_line()
        assert "device" not in same._get_backend(torch.device("cpu")).describe()

    check(run_ranks(body, 3, init=False))


def test_a_side_stepped_collective_takes_the_host():
    def body(rank):
        init_group(pg_options=options("sim", sidestep=["broadcast=host", "all_gather"]))
        dist.broadcast(torch.ones(3), 0)
        dist.all_gather([torch.empty(3), torch.empty(3)], torch.ones(3))
        assert device_calls() == {}
        dist.all_reduce(torch.ones(3))
        assert device_calls() == {"all_reduce float32 SUM": 1}

    check(run_ranks(body, 2, init=False))


def test_the_environment_gives_the_default_group_a_device():
    def body(rank):
        init_group()
        dist.all_reduce(torch.ones(3))
        assert device_line() == "device sim: 1 calls: all_reduce float32 SUM 1"

    check(run_ranks(body, 2, init=False, env={"ACCL_DEVICE": "1"}))


@pytest.mark.slow
def test_groups_are_made_one_after_the_other_on_the_same_emulator():
    def body(rank, text):
        for _ in range(3):
            init_group(pg_options=options(text))
            tensor = torch.arange(1000.0) * (rank + 1)
            dist.all_reduce(tensor)
            assert torch.equal(tensor, torch.arange(1000.0) * 3)
            assert sum(device_calls().values()) == 1
            dist.destroy_process_group()

    with Emulator(2, "udp") as emulator:
        check(run_ranks(body, 2, {"text": emulator.url}, init=False))


@pytest.mark.slow
@on_ranks(1, init=False)
def test_an_emulator_is_free_although_a_forked_process_has_the_connection_of_its_last_group(rank, world):
    """A group once failed because its device was in use by this very process, after a DataLoader had forked a
    worker."""
    with Emulator(1, "udp") as emulator:
        init_group(pg_options=options(emulator.url))
        dist.all_reduce(torch.ones(10))
        child = os.fork()
        if child == 0:
            time.sleep(60)
            os._exit(0)
        try:
            dist.destroy_process_group()
            init_group(pg_options=options(emulator.url))
            dist.all_reduce(torch.ones(10))
            assert device_calls() == {"all_reduce float32 SUM": 1}
            dist.destroy_process_group()
        finally:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)


def test_fp16_between_devices_halves_what_they_send_and_rounds_once_a_hop():
    def body(rank):
        init_group(pg_options=options("sim://?design=udp&compression=fp16"))
        torch.manual_seed(rank)
        tensor = torch.rand(3082)
        exact = tensor.double()
        dist.all_reduce(tensor)
        dist.all_reduce(exact)
        torch.testing.assert_close(tensor.double(), exact, rtol=1e-3, atol=5e-3)
        assert not torch.equal(tensor, exact.float())
        assert device_calls() == {"all_reduce float32 SUM": 1, "all_reduce float64 SUM": 1}

    check(run_ranks(body, 2, init=False))


WRONG = [
    ("simm", "did you mean sim"),
    ("sim://?desing=udp", "did you mean design"),
    ("sim://?design=roce", "expected udp, tcp, cyt_rdma"),
    ("sim://?eager=1KiB&rx_bytes=2KiB", "eager"),
    ("sim://?rendezvous=1KiB", "rendezvous"),
    ("sim://?rx_buffers=0", "rx"),
    ("sim://?rx_buffers=511", "exchange memory"),
    ("xrt://0", "xclbin"),
    ("emulator://", "HOST:PORT"),
    ("emulator://@/nowhere/ranks.json", "/nowhere/ranks.json"),
    ("a device", "contains white space"),
]


@pytest.mark.parametrize(("text", "words"), WRONG)
def test_a_text_that_is_no_device_is_refused_before_anything_starts(text, words):
    def body(rank):
        return message_of(lambda: init_group(pg_options=options(text)))

    kind, message, seconds = check(run_ranks(body, 1, init=False))[0]
    assert kind in ("ValueError", "DistBackendError") and words in message and seconds < 5, (kind, message)


@pytest.mark.parametrize(
    ("text", "words"),
    [("coyote://63", "/dev/fpga63"), ("xrt://0?xclbin=/nowhere.xclbin", "xrt")],
)
def test_a_card_that_is_not_there_is_every_ranks_error(text, words):
    def body(rank):
        return message_of(lambda: init_group(pg_options=options(text)))

    for kind, message, seconds in check(run_ranks(body, 2, init=False)):
        assert kind in ("ValueError", "DistBackendError") and words in message.lower() and seconds < 10, message


def test_ranks_with_different_devices_make_no_group():
    def body(rank):
        return message_of(lambda: init_group(pg_options=options(["sim", "sim://?design=udp"][rank])))

    for kind, message, _ in check(run_ranks(body, 2, init=False)):
        assert kind == "ValueError", (kind, message)
        assert "design=udp" in message and "design=cyt_rdma" in message, message


def silent(port, answers=b""):
    """A listener at a port that is not an emulator; it sends `answers` to each client."""
    server = socket.create_server(("127.0.0.1", port))

    def serve():
        while True:
            try:
                peer, _ = server.accept()
                peer.sendall(answers)
                kept.append(peer)
            except OSError:
                return

    kept = []
    threading.Thread(target=serve, daemon=True).start()
    return server


@pytest.mark.parametrize(
    ("what", "words"), [("nobody", "refused"), ("silent", "did not complete the ZeroMQ greeting"), ("garbage", "")]
)
def test_a_port_without_an_emulator_is_every_ranks_error_in_time(what, words):
    port = free_ports(2)

    def body(rank):
        server = None
        if rank == 1 and what != "nobody":
            server = silent(port + 1, b"HTTP/1.1 400 Bad Request\r\n\r\n" * 10 if what == "garbage" else b"")
        if rank == 0 and what != "nobody":
            server = silent(port, b"HTTP/1.1 400 Bad Request\r\n\r\n" * 10 if what == "garbage" else b"")
        result = message_of(
            lambda: init_group(
                pg_options=options(f"emulator://127.0.0.1:{port}?design=udp"), timeout=timedelta(seconds=3)
            )
        )
        if server:
            server.close()
        return result

    for kind, message, seconds in check(run_ranks(body, 2, init=False)):
        assert kind == "DistBackendError" and re.search(rf"127.0.0.1:({port}|{port + 1})", message), (kind, message)
        assert words in message and seconds < 4.5, (seconds, message)


@pytest.mark.slow
@pytest.mark.parametrize("how", ["killed", "stopped"])
@pytest.mark.parametrize("design", ["udp", "cyt_rdma"])
def test_an_emulator_that_ends_in_the_middle_of_calls_is_every_ranks_error(how, design):
    allowed = 3.0

    def body(rank, text, pid):
        init_group(pg_options=options(text), timeout=timedelta(seconds=allowed))
        dist.all_reduce(torch.ones(3))
        dist.barrier()
        if rank == 0:
            threading.Timer(0.2, os.kill, (pid, 9 if how == "killed" else 19)).start()

        last = [time.monotonic()]

        def call():
            while True:
                last[0] = time.monotonic()
                dist.all_reduce(torch.ones(100_000))

        kind, message, _ = message_of(call)
        seconds = time.monotonic() - last[0]
        later = message_of(lambda: dist.all_reduce(torch.ones(3)))
        return kind, message, seconds, later[1]

    with Emulator(2, design) as emulator:
        arguments = {"text": emulator.url, "pid": emulator.process.pid}
        outcomes = check(run_ranks(body, 2, arguments, init=False))
    for kind, message, seconds, later in outcomes:
        assert kind == "DistBackendError", (kind, message)
        assert "all_reduce" in message and re.search(rf"127.0.0.1:({emulator.port}|{emulator.port + 1}) ", message), (
            message
        )
        assert seconds < (allowed + 1.5), (seconds, message)
        assert "First cause" in later, later


@pytest.mark.slow
def test_an_emulator_of_which_a_rank_is_missing_names_it():
    ports = free_ports(12)

    def body(rank, text):
        return message_of(lambda: init_group(pg_options=options(text), timeout=timedelta(seconds=4)))

    given = ["--rank", "0-1", "--peer-timeout", "2"]
    with Emulator(3, "udp", *given, port=ports) as emulator:
        outcomes = check(run_ranks(body, 3, {"text": emulator.url}, init=False))
    for kind, message, seconds in outcomes:
        assert kind == "DistBackendError" and seconds < 5.5, (kind, seconds, message)
        assert f":{ports + 2}" in message or re.search(r"these ranks .*: 2\b", message), message


@pytest.mark.slow
def test_host_groups_survive_a_dead_device():
    def body(rank, text, pid):
        init_group(pg_options=options(text), timeout=timedelta(seconds=3))
        host = dist.new_group()
        if rank == 0:
            os.kill(pid, 9)
        kind, message, _ = message_of(lambda: [dist.all_reduce(torch.ones(3)) for _ in range(1000)])
        assert kind == "DistBackendError", message
        tensor = torch.ones(3)
        dist.all_reduce(tensor, group=host)
        assert torch.equal(tensor, torch.full((3,), 2.0))

    with Emulator(2, "udp") as emulator:
        check(run_ranks(body, 2, {"text": emulator.url, "pid": emulator.process.pid}, init=False))
