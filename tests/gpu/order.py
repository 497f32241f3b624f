"""Part `order`: results on real streams, behind long kernels, equal the results of CPU tensors bit for bit.

Runs with 2 and 3 ranks on one card. `tests/test_accelerator.py` has the same questions for the stand-in; here, kernels take
real time, and other threads return and free memory of the card meanwhile. Speed is not its subject: see `bench.py`.
"""

from __future__ import annotations

import itertools
import os
import random
import subprocess
import sys
import time
import xml.etree.ElementTree
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from support import bytes_equal, init_group, run_ranks, versions

from . import calls
from .calls import Call, check_results, on_host
from .device import Device
from .report import Report, Skip, check

TESTS = Path(__file__).resolve().parents[1]
# Tests of values that run on tensors of the card: tests/support/staged.py.
VALUES = ["test_values.py", "test_reduce.py", "test_moving.py", "test_all_to_all.py", "test_point_to_point.py"]


def run(report: Report, kind: str, is_tiny: bool) -> None:
    worlds = [2] if is_tiny else [2, 3]
    for world, (name, body, facts) in itertools.product(worlds, _cases(is_tiny)):
        report.case(f"{name} [world {world}]", lambda: _ranks(body, world, kind, **facts))
    report.case("tests of values on tensors of the device", lambda: _values(report, kind, is_tiny), least_seconds=20)


def _ranks(body: Callable[..., Any], world: int, kind: str, **facts: Any) -> None:
    """Runs `body` on fresh ranks; raises an error that shows all ranks, if one has failed."""

    def rank_body(rank: int) -> None:
        device = Device(kind, seed=rank)
        init_group()
        body(device, rank, world, **facts)
        dist.barrier()
        dist.destroy_process_group()

    outcomes = run_ranks(rank_body, world, init=False, deadline=90)
    check(outcomes)


def _cases(is_tiny: bool) -> list[tuple[str, Callable[..., Any], Mapping[str, Any]]]:
    seeds = 1 if is_tiny else 4
    return [
        ("every call gives the bits of CPU tensors", every_call, {"is_tiny": is_tiny}),
        ("results follow the current stream", follows_the_current_stream, {}),
        ("a wait under another stream sees the result", under_another_stream, {}),
        ("results are not written while earlier kernels may still read", earlier_reads, {}),
        ("streams of the program may be streams that copy", many_streams, {"rounds": 5 if is_tiny else 80}),
        ("callbacks of futures run behind the results", futures, {}),
        ("tensors may be dropped before their call is through", dropped, {"rounds": 3 if is_tiny else 30}),
        ("views of every layout are read and written", views, {}),
        ("a blocked stream continues behind the result", blocked, {}),
        ("small blocking calls on several streams", small_calls, {"rounds": 12 if is_tiny else 300}),
        *(
            (f"random program {seed}", random_program, {"seed": seed, "steps": 20 if is_tiny else 60})
            for seed in range(seeds)
        ),
        ("nothing is left behind", nothing_left, {}),
    ]


def every_call(device: Device, rank: int, world: int, is_tiny: bool) -> None:
    sizes = [1, 1000] if is_tiny else [0, 1, 1000, 70_001, 3_000_001]
    dtypes = ["float32", "int64"] if is_tiny else ["float32", "float16", "bfloat16", "float64", "int32", "uint8"]
    seed = 0
    for dtype, count, kind in itertools.product(dtypes, sizes, [*calls.REDUCE, *calls.MOVE]):
        # Large calls need memory of every rank and time: one dtype shows what they show.
        if count > 100_000 and dtype not in ("float32", "bfloat16"):
            continue
        seed += 1
        strided = kind not in calls.DENSE and seed % 3 == 0
        expected = on_host(kind, rank, world, count, dtype, seed, strided)
        device.compute(0.3)
        works, results = kind(Call(rank, world, count, dtype, device.put, seed, strided))
        for work in works:
            work.wait()
        check_results(results, expected, (kind.__name__, dtype, count, strided))


def follows_the_current_stream(device: Device, rank: int, world: int) -> None:
    for count in (1, 1000, 700_000, 5_000_000):
        tensor = torch.full((count,), float(rank), device=device.kind)
        device.compute(20)
        tensor.add_(1)
        dist.all_reduce(tensor)
        tensor.mul_(2)
        work = dist.all_reduce(tensor, async_op=True)
        work.wait()
        tensor.add_(0.5)
        wanted = world * (world + 1) / 2 * 2 * world + 0.5
        assert (tensor.cpu() == wanted).all(), (count, wanted, tensor.cpu()[:3])


def under_another_stream(device: Device, rank: int, world: int) -> None:
    first, second, third = (device.stream() for _ in range(3))
    for count in (1000, 2_000_000):
        for _ in range(5):
            with first:
                device.compute(5)
                tensor = torch.full((count,), float(rank + 1), device=device.kind)
                work = dist.all_reduce(tensor, async_op=True)
            with second:
                work.wait()
                result = tensor + 1
            with third:
                work.synchronize()
                other = tensor + 2
            for stream in (first, second, third):
                stream.synchronize()
            total = world * (world + 1) / 2
            assert (result.cpu() == total + 1).all() and (other.cpu() == total + 2).all()


def earlier_reads(device: Device, rank: int, world: int) -> None:
    for count in (3, 200_000, 4_000_000):
        if rank == 0:
            for other in range(1, world):
                dist.send(torch.full((count,), 7.0, device=device.kind), other)
            continue
        tensor, copy = torch.full((count,), 1.0, device=device.kind), torch.empty(count, device=device.kind)
        device.compute(50)
        copy.copy_(tensor)
        dist.irecv(tensor, 0).wait()
        assert (copy.cpu() == 1).all() and (tensor.cpu() == 7).all()


def many_streams(device: Device, rank: int, world: int, rounds: int) -> None:
    for round_ in range(rounds):
        first, second = device.stream(), device.stream()
        with first:
            device.compute(1)
            tensor = torch.full((100_000,), float(rank + round_), device=device.kind)
            work = dist.all_reduce(tensor, async_op=True)
        with second:
            work.wait()
            result = tensor + 1
        second.synchronize()
        assert (result.cpu() == world * round_ + world * (world - 1) / 2 + 1).all(), round_
        first.synchronize()


def futures(device: Device, rank: int, world: int) -> None:
    for count in (1000, 1_000_000):
        tensor = torch.full((count,), float(rank + 1), device=device.kind)
        device.compute(10)
        future = dist.all_reduce(tensor, async_op=True).get_future().then(lambda done: done.value()[0] * 2)
        stream = device.stream()
        with stream:
            doubled = future.wait()
            result = doubled + 1
        stream.synchronize()
        assert (result.cpu() == world * (world + 1) + 1).all()


def dropped(device: Device, rank: int, world: int, rounds: int) -> None:
    with device.disturbed():
        for round_ in range(rounds):
            count = (1000, 400_000)[round_ % 2]
            kept = torch.full((count,), float(rank), device=device.kind)
            outputs = [torch.empty(count, device=device.kind) for _ in range(world)]
            given = torch.full((count,), 7.0 + rank, device=device.kind)
            device.compute(3)
            works = [dist.all_reduce(torch.ones(count, device=device.kind), async_op=True) for _ in range(3)]
            gathered = dist.all_gather(outputs, given, async_op=True)
            del given, works
            # The allocator may hand out the memory of the dropped tensors.
            reused = [torch.full((count,), -1.0, device=device.kind) for _ in range(4)]
            gathered.wait()
            dist.all_reduce(kept)
            found = [output.cpu()[-1].item() for output in outputs]
            assert (kept.cpu() == world * (world - 1) / 2).all() and found == [7.0 + other for other in range(world)], (
                round_
            )
            assert all((tensor.cpu() == -1).all() for tensor in reused), round_


def views(device: Device, rank: int, world: int) -> None:
    whole = device.put(torch.arange(48.0, device="cpu").reshape(4, 12))
    for view in (whole[:, ::3], whole.t()[2:5], whole[1:3, 4:8], whole[0, 0]):
        before = view.cpu()
        device.compute(3)
        dist.all_reduce(view)
        assert view.cpu().equal(before * world)
    generator = torch.Generator(device="cpu").manual_seed(rank)
    numbers = device.put(torch.randn(6, dtype=torch.complex64, generator=generator, device="cpu"))
    host = numbers.cpu()
    for tensor in (numbers, host):
        # torch's functions refuse conjugate views on a card, where the group itself takes them.
        dist.group.WORLD.broadcast([tensor.conj()], dist.BroadcastOptions()).wait()
        dist.broadcast(tensor.conj().imag, world - 1)
    assert bytes_equal(numbers.cpu(), host)


def blocked(device: Device, rank: int, world: int) -> None:
    store = dist.distributed_c10d._get_default_store()
    for count in (3, 1_000_000):
        tensor, result = torch.full((count,), 1.0 + rank, device=device.kind), torch.zeros(count, device=device.kind)
        if rank == 1:
            store.wait([f"blocked {count}"])
        work = dist.all_reduce(tensor, async_op=True)
        work.block_current_stream()
        result.copy_(tensor)
        if rank == 0:
            time.sleep(0.1)
            assert not device.current_stream().query(), "the stream continued before rank 1 had issued the call"
            store.set(f"blocked {count}", "")
        device.current_stream().synchronize()
        work.wait()
        assert (result.cpu() == world * (world + 1) / 2).all()


def small_calls(device: Device, rank: int, world: int, rounds: int) -> None:
    streams, results = [device.stream() for _ in range(4)], []
    with device.disturbed():
        for round_ in range(rounds):
            with streams[round_ % 4]:
                if round_ % 5 == 0:
                    device.compute(1)
                tensor = device.put(torch.tensor([round_, rank, round_], dtype=torch.float32, device="cpu"))
                dist.all_reduce(tensor)
                results.append(tensor)
        for stream in streams:
            stream.synchronize()
        device.synchronize()
        ranks = world * (world - 1) / 2
        assert [result.cpu().tolist() for result in results] == [
            [float(world * i), ranks, float(world * i)] for i in range(rounds)
        ]


def random_program(device: Device, rank: int, world: int, seed: int, steps: int) -> None:
    """Calls in one order on all ranks, issued and waited for under streams that each rank draws for itself."""
    program, mine = random.Random(seed), random.Random(rank + 100 * seed)
    streams = [device.stream() for _ in range(4)]
    kinds = [*calls.REDUCE, *calls.MOVE]
    pending: list[tuple[Any, list[Any], list[torch.Tensor], list[torch.Tensor], object]] = []

    def finish() -> None:
        look, works, results, expected, what = pending.pop(mine.randrange(len(pending)))
        with look:
            for work in works:
                work.wait()
            copies = [result + 0 for result in results]
        look.synchronize()
        check_results(copies, [wanted.contiguous() for wanted in expected], what)

    with device.disturbed():
        for step in range(steps):
            kind, count = program.choice(kinds), program.choice([1, 7, 1000, 40_000, 600_000])
            strided = kind not in calls.DENSE and program.random() < 0.3
            expected = on_host(kind, rank, world, count, "float32", step, strided)
            with mine.choice(streams):
                if mine.random() < 0.5:
                    device.compute(mine.choice([1, 5]))
                works, results = kind(Call(rank, world, count, "float32", device.put, step, strided))
            pending.append((mine.choice(streams), works, results, expected, (step, kind.__name__, count, strided)))
            del works, results
            while len(pending) > mine.choice([0, 2, 5]):
                finish()
        while pending:
            finish()


def nothing_left(device: Device, rank: int, world: int) -> None:
    """Memory of the card and pinned memory in use return to what they were."""
    backend: Any = dist.group.WORLD._get_backend(torch.device(device.kind))

    def kept() -> tuple[int, int]:
        # A message to itself lets the backend drop calls that are through.
        sent = dist.isend(torch.ones(1, device="cpu"), rank)
        dist.irecv(torch.ones(1, device="cpu"), rank).wait()
        sent.wait()
        return device.used_bytes(), backend.snapshot()["process"]["pinned_bytes"]

    def some() -> None:
        tensors = [torch.ones(300_000, device=device.kind) for _ in range(8)]
        works = [dist.all_reduce(tensor, async_op=True) for tensor in tensors]
        for work in works:
            work.wait()
        dist.barrier()

    some()
    until = time.monotonic() + 10
    before = kept()
    some()
    while (after := kept()) > before and time.monotonic() < until:
        time.sleep(0.01)
    assert after <= before, f"bytes on the device and pinned bytes in use: {before} before the calls, {after} after"


def _values(report: Report, kind: str, is_tiny: bool) -> Mapping[str, Any] | None:
    """Runs tests of values with their tensors moved to the device: tests/support/staged.py."""
    output = TESTS.parent / f".values-{os.getpid()}.xml"
    files = [str(TESTS / name) for name in (VALUES[:1] if is_tiny else VALUES)]
    command = [
        sys.executable,
        "-m",
        "pytest",
        *files,
        "-q",
        "--timeout",
        "120",
        "-p",
        "no:cacheprovider",
        f"--junitxml={output}",
    ]
    # Each world has processes of its own, with a context each.
    command += ["-k", "all_reduce and world2 and float32" if is_tiny else "world2"]
    environment = os.environ | {
        "ACCL_TEST_ORDER": "random" if kind == "standin" else kind,
        "ACCL_TEST_COVER": "values",
    }
    seconds = max(20.0, report.seconds_left())
    try:
        done = subprocess.run(
            command, env=environment, timeout=seconds, check=False, capture_output=True, text=True, cwd=TESTS
        )
    except subprocess.TimeoutExpired:
        raise Skip(f"pytest did not end within the {seconds:.0f} s that the part's limit left") from None
    try:
        root = xml.etree.ElementTree.parse(output).getroot()
    except (OSError, xml.etree.ElementTree.ParseError):
        raise AssertionError(
            f"pytest ended with status {done.returncode}\n{done.stdout[-4000:]}{done.stderr[-2000:]}"
        ) from None
    finally:
        output.unlink(missing_ok=True)
    suite = root[0] if root.tag == "testsuites" else root
    number = {key: int(suite.get(key, "0")) for key in ("tests", "failures", "errors", "skipped")}
    if number["failures"] or number["errors"] or not number["tests"]:
        raise AssertionError(f"{number}, torch {versions.NAME}\n{done.stdout[-5000:]}")
    return number
