"""Part `codecs`: kernels encode and decode compressed calls on the card, with the bits of CPU tensors.

The bits are compared before anything is timed. A call whose pinned memory holds its values was encoded by the CPU, and fails
its case: the log says why. `tests/test_gpu_codecs.py` has the same questions for a stand-in of the driver, whose compiler is
g++.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from support import bytes_equal, init_group, run_ranks, standin
from torch_accl import compression

from .device import Device
from .report import Report, check, over_ranks

RANKS = 2
MIB = 1 << 20
CODECS = (
    "maxmin:4",
    "maxmin:3,bucket=64,rounding=stochastic",
    "maxmin:8,bucket=1024,rounding=correlated",
    "absmax:2,meta=float16",
    "bf16",
    "fp16",
    "sign",
    "e4m3",
    "mxfp4",
    "nvfp4",
    "hadamard:4",
    "topk:4",
)
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def run(report: Report, kind: str, is_tiny: bool) -> None:
    for number, codec in enumerate(CODECS[:2] if is_tiny else CODECS):
        dtype = DTYPES[number % len(DTYPES)]

        def case(codec: str = codec, dtype: torch.dtype = dtype) -> None:
            _ranks(same_bits, kind, codec=codec, dtype=dtype, count=1_000_003 if is_tiny else 3_000_001)

        report.case(f"{codec} of {str(dtype).removeprefix('torch.')} gives the bits of CPU tensors", case)

    def all_reduce() -> Mapping[str, Any]:
        size = MIB if is_tiny else 64 * MIB
        found = _ranks(times, kind, size=size, rounds=3 if is_tiny else 15)
        medians = over_ranks([times for times, _ in found])
        pinned = max(pinned for _, pinned in found)
        report.figure("maxmin:4 over raw, all_reduce of 64 MiB", medians["maxmin:4"] / medians["raw"], "x", 0.5)
        # Blocks of pinned memory are powers of two, so this is at most twice the encoded bytes.
        report.figure("pinned memory of the compressed call over the tensor's bytes", pinned / size, "x", 0.5)
        for name, seconds in medians.items():
            report.figure(f"all_reduce of 64 MiB, {name}", 1e3 * seconds, "ms")
        return medians

    report.case("all_reduce with and without a codec", all_reduce)


def _ranks(body: Callable[..., Any], kind: str, **facts: Any) -> list[Any]:
    """Returns what `body` returns on each rank, or raises an error that shows all ranks."""

    def rank_body(rank: int) -> Any:
        device = Device(kind, order="early")
        if not device.is_card:
            standin.lend_driver(device.module)
        init_group("accl")
        found = body(device, rank, **facts)
        dist.barrier()
        dist.destroy_process_group()
        return found

    outcomes = run_ranks(rank_body, RANKS, init=False, deadline=90)
    check(outcomes)
    return [outcome.value for outcome in outcomes]


def _pinned(device: Device) -> int:
    process = dist.group.WORLD._get_backend(torch.device(device.kind)).snapshot()["process"]
    return int(process["pinned_bytes"] + process["idle_pinned_bytes"])


def same_bits(device: Device, rank: int, codec: str, dtype: torch.dtype, count: int) -> None:
    drawn = torch.Generator().manual_seed(rank)
    values = torch.randn(count, generator=drawn)
    # Buckets that are not finite, that metadata of 16 bits cannot hold, or that are smaller than normal numbers.
    values[77], values[7_777], values[20_000:20_064], values[30_000:30_064] = float("nan"), 3e38, 1e-41, 7e4
    host = values.to(dtype)
    there = device.put(host)
    compression.all_reduce_quantized(host, compression=codec, step=1)
    compression.all_reduce_quantized(there, compression=codec, step=1)
    assert bytes_equal(there.cpu(), host), f"{codec} of {dtype}: other bits"
    encoded_by_cpu = _pinned(device) >= host.numel() * host.element_size()
    assert not encoded_by_cpu or codec in ("bf16", "fp16"), f"{codec}: the CPU has encoded the call; see the log"


def times(device: Device, rank: int, size: int, rounds: int) -> tuple[Mapping[str, Any], int]:
    from .bench import Bench

    tensor = torch.ones(size // 4, device=device.kind)
    compression.all_reduce_quantized(tensor, compression="maxmin:4")
    pinned = _pinned(device)

    def raw() -> None:
        dist.all_reduce(tensor)
        device.synchronize()

    def encoded() -> None:
        compression.all_reduce_quantized(tensor, compression="maxmin:4")
        device.synchronize()

    found = Bench(device, "accl", False).alternating({"raw": raw, "maxmin:4": encoded}, rounds)
    return found, pinned
