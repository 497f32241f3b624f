"""Scripts of ACCL's process group after changing the import: functions, workloads, every argument and every refusal."""

import inspect
import json
import time
import warnings
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch_accl
from support import BACKEND, init_group, on_ranks, run_script
from support.devices import device_calls, device_line
from support.emulators import Emulator, free_ports
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch_accl.compat import accl_process_group as accl
from torch_accl.compat._accl_device import Sizes

pytestmark = pytest.mark.skipif(BACKEND != "accl", reason="about this package only")

DESIGN = accl.ACCLDesign
HALF = {accl.DataType.float32: accl.DataType.float16}
# No process listens at port 1, so the engines run in the ranks' own processes.
UNUSED_PORT = 1


def places(world, port=UNUSED_PORT, segment=1024):
    """Ranks at successive ports. At port `UNUSED_PORT` they have successive addresses instead."""
    if port == UNUSED_PORT:
        return [accl.Rank(f"127.0.0.{rank + 1}", UNUSED_PORT, rank, segment) for rank in range(world)]
    return [accl.Rank("127.0.0.1", port + rank, rank, segment) for rank in range(world)]


def accl_group(world, create=accl.create_simulate_process_group, *arguments, **named):
    """Creates the group as a script does, and returns the URL of its device."""
    create(places(world), *arguments, **named)
    init_group("ACCL")
    return device_line().split(": ", 1)[0].removeprefix("device ")


def numbers(rank, count, dtype=torch.float32):
    return (torch.arange(count) % 97 + rank + 1).to(dtype)


# The plain workload: every collective of ACCL, and collectives that ACCL lacks.


@on_ranks(1, 2, 3, init=False)
def test_every_collective_of_a_group_that_was_created_first_is_right_and_on_the_device(rank, world):
    accl_group(world)
    assert dist.get_backend() == "accl" and isinstance(
        dist.group.WORLD._get_backend(torch.device("cpu")), accl.ProcessGroupACCL
    )
    root = world - 1
    expected = {}

    def counts(name):
        expected[name] = expected.get(name, 0) + 1
        if world > 1:
            assert device_calls() == expected

    for dtype in (torch.float32, torch.float64, torch.int32, torch.int64):
        kind = str(dtype).removeprefix("torch.")
        mine, total = numbers(rank, 257, dtype), sum(numbers(other, 257, dtype) for other in range(world))
        tensor = mine.clone()
        dist.all_reduce(tensor)
        assert torch.equal(tensor, total)
        counts(f"all_reduce {kind} SUM")
        tensor = mine.clone()
        dist.reduce(tensor, root)
        assert rank != root or torch.equal(tensor, total)
        counts(f"reduce {kind} SUM")
        tensor = mine.clone()
        dist.broadcast(tensor, root)
        assert torch.equal(tensor, numbers(root, 257, dtype))
        counts(f"broadcast {kind}")
        parts = [torch.empty_like(mine) for _ in range(world)]
        dist.all_gather(parts, mine)
        assert all(torch.equal(part, numbers(other, 257, dtype)) for other, part in enumerate(parts))
        counts(f"all_gather {kind}")
        parts = [torch.empty_like(mine) for _ in range(world)] if rank == root else None
        dist.gather(mine, parts, root)
        assert rank != root or all(torch.equal(part, numbers(other, 257, dtype)) for other, part in enumerate(parts))
        counts(f"gather {kind}")
        given = [numbers(10 * other, 257, dtype) for other in range(world)] if rank == root else None
        tensor = torch.empty_like(mine)
        dist.scatter(tensor, given, root)
        assert torch.equal(tensor, numbers(10 * rank, 257, dtype))
        counts(f"scatter {kind}")
        given = torch.cat([numbers(10 * rank + other, 5, dtype) for other in range(world)])
        tensor = torch.empty_like(given)
        dist.all_to_all_single(tensor, given)
        assert torch.equal(tensor, torch.cat([numbers(10 * other + rank, 5, dtype) for other in range(world)]))
        counts(f"all_to_all {kind}")
        tensor = torch.empty(5, dtype=dtype)
        dist.reduce_scatter_tensor(tensor, given)
        assert torch.equal(tensor, sum(numbers(10 * other + rank, 5, dtype) for other in range(world)))
        counts(f"reduce_scatter {kind} SUM")
    # The host runs what the device does not support.
    tensor = numbers(rank, 9)
    dist.all_reduce(tensor, dist.ReduceOp.MAX)
    assert torch.equal(tensor, numbers(world - 1, 9))
    dist.barrier()
    if world > 1:
        if rank == 0:
            dist.send(numbers(7, 31), 1)
        elif rank == 1:
            tensor = torch.empty(31)
            dist.recv(tensor, 0)
            assert torch.equal(tensor, numbers(7, 31))
        assert device_calls() == expected
    dist.destroy_process_group()


@on_ranks(2, init=False)
def test_a_model_trains_to_the_bits_of_the_host_path(rank, world):
    weights = []
    for create in (accl.create_simulate_process_group, None):
        accl.reset()
        if create:
            create(places(world))
        init_group("ACCL")
        torch.manual_seed(3)
        model = DistributedDataParallel(nn.Sequential(nn.Linear(10, 10), nn.ReLU(), nn.Linear(10, 5)))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        for step in range(4):
            torch.manual_seed(10 * step + rank)
            optimizer.zero_grad()
            nn.functional.mse_loss(model(torch.randn(20, 10)), torch.randn(20, 5)).backward()
            optimizer.step()
        assert (device_calls().get("all_reduce float32 SUM", 0) >= 4) == bool(create)
        weights.append([parameter.detach().clone() for parameter in model.parameters()])
        dist.destroy_process_group()
    assert all(torch.equal(one, other) for one, other in zip(*weights, strict=True))


# The compression workload: float32 that is added and sent as float16.


@on_ranks(2, 3, init=False)
@pytest.mark.parametrize("how", ["argument", "type alone", "set_compression"])
def test_compressed_sums_keep_within_the_tolerances_of_the_workload(rank, world, how):
    if how == "set_compression":
        accl.create_simulate_process_group(places(world))
        accl.set_compression(HALF)
    else:
        accl.create_simulate_process_group(
            places(world), compression=HALF if how == "argument" else accl.DataType.float16
        )
    assert accl.get_compression() == HALF
    init_group("ACCL")
    assert accl.get_compression() == HALF and "compression=fp16" in device_line()
    # ACCL's test allows 1e-3 of a value plus 5e-3 for the rounding of float16.
    generator = torch.Generator().manual_seed(5)
    inputs = torch.rand(world, 2000, generator=generator)
    tensor = inputs[rank].clone()
    dist.all_reduce(tensor)
    assert torch.allclose(tensor, inputs.sum(0), rtol=1e-3, atol=5e-3) and not torch.equal(tensor, inputs.sum(0))
    tensor = inputs[rank].clone()
    dist.reduce(tensor, 0)
    assert rank != 0 or torch.allclose(tensor, inputs.sum(0), rtol=1e-3, atol=5e-3)
    # Calls that only move data, and calls with another type, stay exact.
    tensor = inputs[rank].clone()
    dist.broadcast(tensor, 1)
    assert torch.equal(tensor, inputs[1])
    tensor = inputs[rank].double()
    dist.all_reduce(tensor)
    assert torch.allclose(tensor, inputs.double().sum(0), rtol=1e-15, atol=0)
    assert set(device_calls()) == {
        "all_reduce float32 SUM",
        "reduce float32 SUM",
        "broadcast float32",
        "all_reduce float64 SUM",
    }
    dist.destroy_process_group()


@on_ranks(2, init=False)
def test_compression_of_a_group_that_there_is_cannot_change(rank, world):
    with pytest.raises(RuntimeError, match="set_compression: no device was chosen; call create_process_group first"):
        accl.set_compression(None)
    with pytest.raises(RuntimeError, match="get_compression: no device was chosen"):
        accl.get_compression()
    accl_group(world)
    accl.set_compression({})
    assert accl.get_compression() == {}
    with pytest.raises(
        RuntimeError, match="agreed on the compression when this group was created; call destroy_process"
    ):
        accl.set_compression(HALF)
    dist.destroy_process_group()
    accl.set_compression(HALF)
    init_group("ACCL")
    assert accl.get_compression() == HALF
    dist.destroy_process_group()


# The segmentation workload: tensors larger than an rx buffer, in any shape.


@on_ranks(2, 3, init=False)
def test_tensors_of_many_rx_buffers_are_whole(rank, world):
    assert "rx_bytes=1KiB&eager=64KiB" in accl_group(world, bufsize=1024)
    root = world - 1
    for shape in ((3082,), (23, 134), (1, 3082), (100_003,)):
        count = torch.Size(shape).numel()
        total = sum(numbers(other, count) for other in range(world)).view(shape)
        tensor = numbers(rank, count).view(shape)
        dist.all_reduce(tensor)
        assert torch.equal(tensor, total)
        tensor = numbers(rank, count).view(shape)
        dist.reduce(tensor, root)
        assert rank != root or torch.equal(tensor, total)
        tensor = numbers(rank, count).view(shape)
        dist.broadcast(tensor, root)
        assert torch.equal(tensor, numbers(root, count).view(shape))
        parts = [torch.empty(shape) for _ in range(world)]
        dist.all_gather(parts, numbers(rank, count).view(shape))
        assert all(torch.equal(part.view(-1), numbers(other, count)) for other, part in enumerate(parts))
        parts = [torch.empty(shape) for _ in range(world)] if rank == root else None
        dist.gather(numbers(rank, count).view(shape), parts, root)
        assert rank != root or all(
            torch.equal(part.view(-1), numbers(other, count)) for other, part in enumerate(parts)
        )
        given = [numbers(other, count).view(shape) for other in range(world)] if rank == root else None
        tensor = torch.empty(shape)
        dist.scatter(tensor, given, root)
        assert torch.equal(tensor.view(-1), numbers(rank, count))
    assert sum(device_calls().values()) == 24
    dist.destroy_process_group()


@pytest.mark.slow
@on_ranks(2, 3, init=False)
@pytest.mark.parametrize("bufsize", [1, 64, 1000, 65536, 4 << 20])
def test_any_size_of_rx_buffers_is_right(rank, world, bufsize):
    accl_group(world, bufsize=bufsize, nbufs=3)
    for count in (1, world - 1, world, world + 1, bufsize // 4, 70 * 64 // 4 + 1, 300_001):
        tensor = numbers(rank, count)
        dist.all_reduce(tensor)
        assert torch.equal(tensor, sum(numbers(other, count) for other in range(world)))
    assert device_calls() == {"all_reduce float32 SUM": 7}
    dist.destroy_process_group()


# Creation: the URL of the device.


def text_of(create, *arguments, listens=False, **named):
    """Returns the device URL that a creation function requests, without creating a group."""
    accl.reset()
    create(*arguments, **named)
    text = accl._requests[0].text(listens=listens)
    accl.reset()
    return text


def test_arguments_and_defaults_are_those_of_accl():
    def named(function):
        parameters = inspect.signature(function).parameters.values()
        return {p.name: p.default for p in parameters if p.kind is p.KEYWORD_ONLY}

    common = dict(nbufs=16, bufsize=1024, compression=None)
    cards = dict(**common, p2p_enabled=False, profiling_ranks=None, profiling_timeout=0, rsfec=False)
    of_both = dict(xclbin=None, device_index=None, design=None, simulation=False, initialize=True)
    assert named(accl.create_process_group) == {**cards, **of_both}
    assert named(accl.create_process_group_coyote) == {**cards, "initialize": False}
    assert named(accl.create_simulate_process_group) == {**common, "udp": False, "initialize": True}


def test_both_signatures_of_the_creation_are_recognised(tmp_path):
    xclbin = tmp_path / "accl.xclbin"
    xclbin.touch()
    card = f"xrt://1?xclbin={xclbin}&design=udp"
    ranks = places(2)
    create = accl.create_process_group
    assert text_of(create, ranks, str(xclbin), 1, DESIGN.udp) == card
    assert text_of(create, ranks, xclbin=str(xclbin), device_index=1, design=DESIGN.udp) == card
    assert text_of(create, ranks, DESIGN.cyt_rdma) == "coyote://0?design=cyt_rdma"
    assert text_of(create, ranks, DESIGN.cyt_rdma, simulation=True) == "sim://?design=cyt_rdma"
    assert text_of(create, ranks, design=DESIGN.tcp, simulation=True) == "sim://?design=tcp"
    assert text_of(create, ranks, DESIGN.axis3x, simulation=True) == "sim://"
    assert text_of(accl.create_process_group_coyote, ranks, DESIGN.cyt_rdma) == "coyote://0?design=cyt_rdma"
    simulate = accl.create_simulate_process_group
    assert text_of(simulate, ranks) == "sim://"
    assert text_of(simulate, ranks, udp=True) == "sim://?design=udp"
    assert text_of(simulate, places(2, 5500), listens=True) == "emulator://127.0.0.1:5500,127.0.0.1:5501"


def test_sizes_are_the_devices_own_unless_they_are_given():
    def keys(nbufs=Sizes.of.__globals__["NBUFS"], bufsize=Sizes.of.__globals__["BUFSIZE"], world=2):
        return "&".join(Sizes.of(nbufs, bufsize).keys(world))

    assert keys() == ""
    assert keys(nbufs=16) == "" and keys(nbufs=100) == "rx_buffers=100"
    assert keys(bufsize=1024) == "rx_bytes=1024&eager=65536"
    assert keys(bufsize=1000, nbufs=81) == "rx_buffers=81&rx_bytes=1024&eager=65536"
    assert keys(bufsize=1, world=9) == "rx_bytes=128&eager=8192"
    assert keys(bufsize=4 << 20, nbufs=18) == "rx_buffers=18&rx_bytes=4194304&eager=4194304"
    assert keys(bufsize=8 << 20) == "rx_bytes=8388608&eager=8388608"
    # One more segment would be refused, so the number of segments here is the device's maximum.
    torch_accl.Options(device=f"sim://?{keys(bufsize=1024)}")
    with pytest.raises(ValueError, match="more than 64 segments"):
        torch_accl.Options(device="sim://?rx_bytes=1024&eager=66560")


WRONG = [
    (dict(ranks="127.0.0.1"), TypeError, "ranks must be a list of Rank"),
    (dict(ranks=[]), ValueError, "ranks is empty"),
    (dict(ranks=places(1) * 2), ValueError, "ranks 0 and 1 are both at 127.0.0.1:1; an engine serves one rank"),
    (dict(design=None), TypeError, "design must be an ACCLDesign"),
    (dict(design="udp"), TypeError, "design must be an ACCLDesign"),
    (dict(design=DESIGN.roce), ValueError, "design roce: software engines do not have this design; use cyt_rdma"),
    (dict(design=DESIGN.cyt_tcp), ValueError, "design cyt_tcp: software engines do not have this design; use tcp"),
    (dict(simulation=False, design=DESIGN.roce), ValueError, "design roce: cards of this design are not supported"),
    (dict(simulation=False, design=DESIGN.axis3x), ValueError, "design axis3x: cards of this design are not supported"),
    (
        dict(simulation=False, design=DESIGN.cyt_tcp),
        ValueError,
        "design cyt_tcp: cards of this design are not supported",
    ),
    (dict(simulation=False), ValueError, "design udp: a card behind XRT needs its bitstream"),
    (dict(simulation=False, xclbin="/nowhere/accl.xclbin"), FileNotFoundError, "'/nowhere/accl.xclbin' is not a file"),
    (dict(simulation=False, xclbin=__file__, design=DESIGN.cyt_rdma), ValueError, "takes no xclbin"),
    (dict(simulation=False, xclbin=7), TypeError, "a bitstream's path or an ACCLDesign, not 7"),
    (dict(simulation=False, xclbin=__file__, device_index="0"), TypeError, "device_index must be an integer"),
    (dict(simulation=False, xclbin=__file__, device_index=-1), ValueError, "device_index is -1; expected at least 0"),
    (dict(xclbin="a.xclbin"), ValueError, "simulation=True takes no xclbin"),
    (dict(simulation=1), TypeError, "simulation must be True or False, not 1"),
    (dict(initialize="yes"), TypeError, "initialize must be True or False"),
    (dict(rsfec=1), TypeError, "rsfec must be True or False"),
    (dict(p2p_enabled=True), ValueError, "p2p_enabled=True: card memory that a GPU writes is not supported"),
    (dict(nbufs=0), ValueError, "nbufs is 0; expected at least 1"),
    (dict(nbufs=513), ValueError, "rx buffers: expected from 1 to about 280, fewer with more ranks, got 513"),
    (dict(nbufs="16"), TypeError, "nbufs must be an integer"),
    (dict(bufsize=0), ValueError, "bufsize is 0; expected at least 1"),
    (dict(bufsize=1 << 33), ValueError, "`rx_bytes` cannot be `8589934592`"),
    (dict(bufsize=1.5), TypeError, "bufsize must be an integer"),
    (dict(compression="fp16"), TypeError, "compression must be None, DataType.float16 or"),
    (dict(compression={accl.DataType.float64: accl.DataType.float16}), ValueError, "from float64 to float16"),
    (dict(compression=accl.DataType.int8), ValueError, "compression from float32 to int8 is not supported"),
    (dict(profiling_ranks=[2]), ValueError, "profiling_ranks is 2; expected from 0 to 1"),
    (dict(profiling_ranks="0"), TypeError, "profiling_ranks must be a list of ranks"),
    (dict(profiling_timeout=-1), ValueError, "profiling_timeout is -1; expected a number of seconds"),
    (dict(profiling_timeout="1"), TypeError, "profiling_timeout must be a number of seconds"),
]


@pytest.mark.parametrize(("wrong", "kind", "sentence"), WRONG, ids=[sentence[:40] for _, _, sentence in WRONG])
def test_what_cannot_be_is_refused_in_one_sentence(wrong, kind, sentence):
    named = {"ranks": places(2), "design": DESIGN.udp, "simulation": True, **wrong}
    with pytest.raises(kind) as caught:
        accl.create_process_group(**named)
    assert sentence in str(caught.value) and "\n" not in str(caught.value)
    assert accl._requests == []


def test_creations_of_other_forms_are_refused_by_name():
    ranks = places(2)
    with pytest.raises(TypeError, match=r"takes \(ranks, xclbin, device_index, design\) or \(ranks, design\)"):
        accl.create_process_group(ranks, DESIGN.udp, 16)
    with pytest.raises(TypeError, match="design is given twice"):
        accl.create_process_group(ranks, DESIGN.udp, design=DESIGN.udp)
    with pytest.raises(ValueError, match="design udp: a card behind Coyote supports only cyt_rdma"):
        accl.create_process_group_coyote(ranks, DESIGN.udp)
    with pytest.raises(TypeError, match="udp must be True or False"):
        accl.create_simulate_process_group(ranks, udp=DESIGN.udp)
    for create in (accl.create_process_group, accl.create_process_group_coyote):
        with pytest.raises(ValueError, match="p2p_enabled=True"):
            create(ranks, DESIGN.cyt_rdma, p2p_enabled=True)
    with pytest.raises(ValueError, match="ip is 'a,b'; expected an address"):
        accl.Rank("a,b", 5500, 0, 1024)
    with pytest.raises(ValueError, match="port is 65536; expected from 1 to 65535"):
        accl.Rank("127.0.0.1", 65536, 0, 1024)
    with pytest.raises(TypeError, match="session_id must be an integer"):
        accl.Rank("127.0.0.1", 5500, None, 1024)
    with pytest.raises(ValueError, match="max_segment_size is 0; expected at least 1"):
        accl.Rank("127.0.0.1", 5500, 0, 0)


def messages_of(create, *arguments, **named):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        create(*arguments, **named)
    accl.reset()
    assert all(warning.filename == __file__ for warning in caught)
    return [str(warning.message) for warning in caught]


def test_what_has_no_effect_is_a_warning_where_it_would_matter():
    assert messages_of(accl.create_simulate_process_group, places(2)) == []
    assert messages_of(accl.create_simulate_process_group, places(2), bufsize=1024) == []
    [message] = messages_of(accl.create_process_group, places(2), DESIGN.udp, simulation=True, rsfec=True)
    assert message.startswith("accl_process_group: rsfec=True has no effect")
    [message] = messages_of(accl.create_process_group_coyote, places(2), DESIGN.cyt_rdma, rsfec=True)
    assert "rsfec=True" in message
    [message] = messages_of(accl.create_simulate_process_group, places(2, segment=512), bufsize=2048)
    assert "segments of 512 bytes, but bufsize is 2048" in message


# Groups.


@on_ranks(2, init=False)
def test_a_card_that_cannot_be_opened_says_so_on_all_ranks(rank, world):
    accl.create_process_group_coyote(places(world), DESIGN.cyt_rdma)
    with pytest.raises((NotImplementedError, dist.DistError), match="(?i)coyote"):
        init_group("ACCL")
    accl.create_process_group(places(world), __file__, 0, DESIGN.udp)
    with pytest.raises((NotImplementedError, dist.DistError), match="(?i)xrt"):
        init_group("ACCL")


@on_ranks(2, init=False)
def test_a_card_of_a_tcp_design_gets_the_sessions_that_its_ranks_name(rank, world):
    ranks = [accl.Rank(f"10.10.10.{other}", 5500, 40 + other, 1024) for other in range(world)]
    accl.create_process_group(ranks, __file__, 0, DESIGN.tcp)
    with pytest.raises((NotImplementedError, dist.DistError), match="(?i)xrt") as error:
        init_group("ACCL")
    # The error comes from the card that did not open, or from its library, and not from the sessions.
    assert "sessions" not in str(error.value)
    with accl._requests[0]._ranks_file() as path:
        sessions = [line["session"] for line in json.loads(Path(path).read_text())["ranks"]]
    assert sessions == [40, 41]


@on_ranks(2, init=False)
def test_a_group_of_other_ranks_than_were_named_is_refused(rank, world):
    accl.create_simulate_process_group(places(3))
    with pytest.raises(ValueError, match="the group has 2 ranks, but create_process_group got 3"):
        init_group("ACCL")


@on_ranks(2, init=False, env={"ACCL_DEVICE": "sim://?design=tcp"})
def test_what_was_created_holds_until_it_is_reset_and_options_win(rank, world):
    for _ in range(2):
        assert accl_group(world, udp=True) == "sim://?design=udp"
        dist.destroy_process_group()
    init_group("accl")
    assert "design=udp" in device_line()
    pair = dist.new_group([0, 1])
    assert device_line(pair) == ""
    dist.destroy_process_group()
    init_group("ACCL", pg_options=torch_accl.Options(device="none"))
    assert device_line() == ""
    dist.destroy_process_group()
    accl.reset()
    init_group("Accl")
    assert "design=tcp" in device_line()
    dist.destroy_process_group()


@pytest.mark.slow
@on_ranks(3, init=False)
def test_ranks_sleep_for_a_debugger_before_they_make_the_group(rank, world):
    begin = time.monotonic()
    accl_group(world, accl.create_process_group, DESIGN.udp, simulation=True, profiling_ranks=[1], profiling_timeout=1)
    # The other ranks wait for rank 1, whichever rank began first.
    assert 0.9 < time.monotonic() - begin < 10
    dist.destroy_process_group()


@on_ranks(3, init=False)
def test_initialisation_and_queue_pairs_are_the_engines_matter(rank, world):
    for call in (accl.initialize, lambda: accl.get_local_qp(0), lambda: accl.set_remote_qp(0, [])):
        with pytest.raises(RuntimeError, match="there is no group with a device"):
            call()
    accl_group(world, accl.create_process_group, DESIGN.cyt_rdma, simulation=True, initialize=False)
    pairs = [None] * world
    dist.all_gather_object(pairs, {other: accl.get_local_qp(other) for other in range(world) if other != rank})
    for other in range(world):
        if other != rank:
            accl.set_remote_qp(other, pairs[other][rank])
    accl.initialize()
    other = (rank + 1) % world
    with pytest.raises(ValueError, match=rf"expected the value of get_local_qp\({rank}\) on rank {other}"):
        accl.set_remote_qp(other, accl.get_local_qp(other))
    with pytest.raises(ValueError, match="this rank itself"):
        accl.get_local_qp(rank)
    with pytest.raises(ValueError, match="rank is 3; expected from 0 to 2"):
        accl.get_local_qp(3)
    tensor = numbers(rank, 100)
    dist.all_reduce(tensor)
    assert device_calls()["all_reduce float32 SUM"] == 1
    dist.destroy_process_group()


# A script for ranks whose ports have emulators or no listeners.
SCRIPT = """
import os, torch, torch.distributed as dist
from torch_accl.compat import accl_process_group as accl

rank = int(os.environ["RANK"])
ranks = [accl.Rank("127.0.0.1", {port} + other, other, 1024) for other in range(2)]
accl.create_simulate_process_group(ranks, udp={udp}, bufsize=1024)
dist.init_process_group("ACCL", rank=rank, world_size=2)
tensor = torch.arange(3082.0) * (rank + 1)
dist.all_reduce(tensor)
assert torch.equal(tensor, torch.arange(3082.0) * 3)
print(dist.group.WORLD._get_backend(torch.device("cpu")).describe())
dist.destroy_process_group()
"""


@pytest.mark.slow
@pytest.mark.parametrize("comms", ["cyt_rdma", "udp"])
def test_simulation_connects_to_the_emulators_of_its_ranks(comms):
    with Emulator(2, comms) as emulator:
        port = emulator.port
        scripts = run_script(SCRIPT.format(port=port, udp=comms == "udp"), 2)
    for script in scripts:
        assert script.exitcode == 0, script.stderr
        assert f"device emulator://127.0.0.1:{port}," in script.stdout, script.stdout
        assert "1 calls: all_reduce float32 SUM 1" in script.stdout


@pytest.mark.slow
def test_without_listeners_engines_are_in_the_ranks_own_processes():
    for script in run_script(SCRIPT.format(port=free_ports(2), udp=False), 2):
        assert script.exitcode == 0, script.stderr
        assert "device sim://" in script.stdout and "1 calls: all_reduce float32 SUM 1" in script.stdout
