"""An ordinary ZeroMQ client against `accl emulator`. It uses libzmq's own sockets and nothing of this package except
the emulator.

The client is written from the protocol alone. It therefore finds errors that the driver and the emulator have in
common.
"""

import json
import threading
import time

import pytest
import torch
from support import BACKEND
from support.emulators import Emulator

pytestmark = pytest.mark.skipif(BACKEND != "accl", reason="about this package only")

zmq = pytest.importorskip("zmq", reason="pyzmq is not installed: libzmq's sockets are not tried")

ANSWER_MS = 10_000
# Numbers of operations and functions, as hosts write them into calls.
CONFIG, BROADCAST, SCATTER, GATHER, REDUCE, ALL_GATHER, ALL_REDUCE, REDUCE_SCATTER, ALL_TO_ALL = (
    0,
    5,
    6,
    7,
    8,
    9,
    10,
    11,
    13,
)
RESET, ENABLE_PACKETS, TIMEOUT, EAGER, RENDEZVOUS = range(5)
SUM, MAX = 0, 1
COUNT_AT, SIZE_AT, TABLE_AT, CONFIGURED_AT, CODE_AT = 0x0, 0x4, 0x8, 0x1FF4, 0x1FFC
SPARES = (0x1FD8, 0x1FE0, 0x1FE8)
TUNING = {0x1FC4: 2, 0x1FC8: 32768, 0x1FCC: 3, 0x1FD0: 4, 0x1FD4: 32768}
RX_BUFFERS, RX_BYTES, EAGER_BYTES, RENDEZVOUS_BYTES = 16, 1024, 4096, 1 << 20
# For each dtype: element sizes, then the function numbers of the compressor, the decompressor, SUM and MAX.
ARITHMETIC = {
    torch.float32: (4, 4, 0, 0, 0, 2, 0, 0, 5),
    torch.float64: (8, 8, 0, 0, 0, 2, 0, 1, 6),
    torch.int32: (4, 4, 0, 0, 0, 2, 0, 2, 7),
    torch.int64: (8, 8, 0, 0, 0, 2, 0, 3, 8),
}


@pytest.fixture
def context():
    with zmq.Context() as context:
        yield context


class Engine:
    """One rank's engine, reached over one socket."""

    def __init__(self, context, port, kind=zmq.REQ, **options):
        self.socket = context.socket(kind)
        self.socket.linger, self.socket.rcvtimeo = 0, ANSWER_MS
        for name, value in options.items():
            setattr(self.socket, name, value)
        self.socket.connect(f"tcp://127.0.0.1:{port}")
        self.envelope = [] if kind == zmq.REQ else [b""]
        self.used = 0

    def ask(self, **request):
        self.socket.send_multipart([*self.envelope, json.dumps(request).encode()])
        return json.loads(self.socket.recv_multipart()[-1])

    def good(self, **request):
        reply = self.ask(**request)
        assert reply["status"] == 0, (request, reply)
        return reply

    def read(self, at):
        return self.good(type=0, addr=at)["rdata"]

    def write(self, at, *words):
        for number, word in enumerate(words):
            self.good(type=1, addr=at + 4 * number, wdata=word)
        return at + 4 * len(words)

    def buffer(self, size):
        at, self.used = self.used, self.used + (size + 4095) // 4096 * 4096
        self.good(type=4, addr=at, len=size, host=False)
        return at

    def put(self, at, tensor):
        self.good(type=3, addr=at, wdata=tensor.view(torch.uint8).tolist(), host=False)

    def get(self, at, like):
        got = self.good(type=2, addr=at, len=like.numel() * like.element_size(), host=False)["rdata"]
        return torch.tensor(got, dtype=torch.int8).view(like.dtype)

    def call(self, scenario, count=0, function=0, root=0, dtype=None, first=0, result=0):
        """Issues a call, waits for it to complete and returns its return code."""
        words = dict(count=count, function=function, root_src_dst=root, comm=0, arithcfg=0, tag=0xFFFFFFFF)
        if dtype is not None:
            words.update(comm=self.communicator, arithcfg=self.arithmetic[dtype])
        addresses = dict(addr_0=first, addr_1=result, addr_2=result)
        self.good(type=5, ctrl_id=0, scenario=scenario, compression_flags=0, stream_flags=0, **words, **addresses)
        end = time.monotonic() + ANSWER_MS / 1000
        while self.ask(type=6, ctrl_id=0)["status"] != 0:
            assert time.monotonic() < end, f"call {scenario} does not end"
        return self.read(CODE_AT)

    def set_up(self, rank, ranks):
        assert self.call(CONFIG, function=RESET) == 0 and self.read(CONFIGURED_AT) == 0
        at = TABLE_AT
        for _ in range(RX_BUFFERS):
            at = self.write(at, 0, self.buffer(RX_BYTES), 0, 0, 0, 0, 0)
        self.write(SIZE_AT, RX_BYTES)
        self.write(COUNT_AT, RX_BUFFERS)
        for spare in SPARES:
            self.write(spare, self.buffer(RENDEZVOUS_BYTES), 0)
        self.communicator, at = at, self.write(at, ranks, rank)
        for peer in range(ranks):
            at = self.write(at, 0x7F000001, 5500 + peer, 0, 0, peer, RX_BYTES)
        self.arithmetic = {}
        for dtype, words in ARITHMETIC.items():
            self.arithmetic[dtype], at = at, self.write(at, *words)
        for register, value in TUNING.items():
            self.write(register, value)
        self.write(CONFIGURED_AT, 1)
        for function, value in (
            (TIMEOUT, 10**6),
            (EAGER, EAGER_BYTES),
            (RENDEZVOUS, RENDEZVOUS_BYTES),
            (ENABLE_PACKETS, 0),
        ):
            assert self.call(CONFIG, value, function) == 0


def together(engines, act):
    """Runs `act` for all ranks at the same time, because a call completes only after other ranks have issued it.
    Returns the result of each rank.
    """
    results, errors = [None] * len(engines), []

    def of(rank):
        try:
            results[rank] = act(rank, engines[rank])
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=of, args=(rank,)) for rank in range(len(engines))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return results


@pytest.mark.slow
@pytest.mark.parametrize("comms", ["udp", "tcp", "cyt_rdma"])
def test_an_ordinary_client_gets_every_collective(context, comms):
    ranks = 3
    with Emulator(ranks, comms) as emulator:
        # REQ and DEALER are the two socket types that can send requests.
        engines = [Engine(context, emulator.port + rank, (zmq.REQ, zmq.DEALER)[rank % 2]) for rank in range(ranks)]
        together(engines, lambda rank, engine: engine.set_up(rank, ranks))
        for dtype in ARITHMETIC:
            for count in (1, ranks, 250, 3000):
                # Payloads larger than an eager message need queue pairs, which only `cyt_rdma` has.
                if count * dtype.itemsize > EAGER_BYTES and comms != "cyt_rdma":
                    continue
                given = [torch.arange(count * ranks).remainder(97).add(rank).to(dtype) for rank in range(ranks)]
                places = [[engine.buffer(count * ranks * dtype.itemsize) for _ in range(2)] for engine in engines]
                together(engines, lambda rank, engine: engine.put(places[rank][0], given[rank]))

                def made(scenario, length, function=SUM, root=0, dtype=dtype, count=count, places=places):
                    def make(rank, engine):
                        first, result = places[rank]
                        code = engine.call(scenario, count, function, root, dtype, first, result)
                        assert code == 0, f"{comms} {dtype} {count}: call {scenario} returned {code:#x}"
                        return engine.get(result, torch.empty(length, dtype=dtype))

                    return together(engines, make)

                block = [tensor.view(ranks, count) for tensor in given]
                total, largest = (
                    torch.stack([b[0] for b in block]).sum(0).to(dtype),
                    torch.stack([b[0] for b in block]).amax(0),
                )
                whole = torch.cat([b[0] for b in block])
                assert all(torch.equal(got, total) for got in made(ALL_REDUCE, count))
                assert all(torch.equal(got, largest) for got in made(ALL_REDUCE, count, MAX))
                assert all(torch.equal(got, whole) for got in made(ALL_GATHER, count * ranks))
                assert torch.equal(made(REDUCE, count, root=2)[2], total)
                assert torch.equal(made(GATHER, count * ranks, root=1)[1], whole)
                for rank, got in enumerate(made(SCATTER, count, root=2)):
                    assert torch.equal(got, block[2][rank])
                for rank, got in enumerate(made(REDUCE_SCATTER, count)):
                    assert torch.equal(got, torch.stack([b[rank] for b in block]).sum(0).to(dtype))
                if comms == "cyt_rdma":
                    for rank, got in enumerate(made(ALL_TO_ALL, count * ranks)):
                        assert torch.equal(got, torch.cat([b[rank] for b in block]))


@pytest.mark.slow
def test_whatever_other_clients_do_an_engine_goes_on_answering(context):
    with Emulator(1, "udp") as emulator:
        engine = Engine(context, emulator.port)
        engine.set_up(0, 1)
        refused = [
            dict(type=0, addr=0x2000),
            dict(type=0, addr=3),
            dict(type=99),
            dict(type=2, addr=1 << 30, len=5, host=False),
            {},
        ]
        assert [engine.ask(**request)["status"] for request in refused] == [1] * len(refused)
        assert engine.ask(type=6, ctrl_id=9)["status"] == -1
        # Four other clients. The first disconnects with a request in flight, and the second has a socket type that
        # sends no requests. The third wants a password, and the fourth stays connected and idle.
        gone = Engine(context, emulator.port)
        gone.socket.send_string(json.dumps(dict(type=2, addr=0, len=1 << 19, host=False)))
        gone.socket.close()
        context.socket(zmq.PUSH).connect(f"tcp://127.0.0.1:{emulator.port}")
        plain = Engine(context, emulator.port, plain_username=b"a", plain_password=b"b", rcvtimeo=300, sndtimeo=300)
        with pytest.raises(zmq.ZMQError):
            plain.ask(type=0, addr=0)
        alive = Engine(context, emulator.port, heartbeat_ivl=100, heartbeat_timeout=1000)
        assert alive.read(CONFIGURED_AT) == 1
        time.sleep(1.5)
        assert alive.read(CONFIGURED_AT) == engine.read(CONFIGURED_AT) == 1
        many = [Engine(context, emulator.port) for _ in range(40)]
        assert sum(other.read(CONFIGURED_AT) for other in many) == 40
        context.destroy(linger=0)
