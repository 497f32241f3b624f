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
from support import bytes_equal
from torch_accl import _native, compression

from .bench import Bench
from .device import Device
from .ranks import RANKS, on_a_card
from .report import Report, over_ranks

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
            _ranks(same_bits, kind, codec=codec, dtype=dtype, count=2_000_003 if is_tiny else 3_000_001)

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
    for codec, target in (("maxmin:4", 0.8), ("maxmin:4,rounding=stochastic", 0.6)):

        def single(codec: str = codec, target: float = target) -> Mapping[str, Any]:
            elems = MIB if is_tiny else 64 * MIB
            [(seconds, sizes)] = _ranks(single_kernels, kind, 1, codec=codec, elems=elems, rounds=3 if is_tiny else 15)
            medians = over_ranks([seconds])
            rates = {name: sizes[name] / medians[name] for name in medians}
            for name in _WORK:
                figure = f"{name} of {codec}: bytes/s over a copy's"
                # No target was set for error feedback.
                least = None if name == "feedback" else target
                report.figure(figure, rates[name] / rates["copy"], "x", least, at_least=True)
            report.figure("copy on the card", rates["copy"] / 1e9, "GB/s")
            return rates

        report.case(f"single kernels of {codec}", single)


def _ranks(body: Callable[..., Any], kind: str, ranks: int = RANKS, **facts: Any) -> list[Any]:
    return on_a_card(lambda device: body(device, **facts), kind, ranks, has_kernels=True)


def _pinned(device: Device) -> int:
    process = dist.group.WORLD._get_backend(torch.device(device.kind)).snapshot()["process"]
    return int(process["pinned_bytes"] + process["idle_pinned_bytes"])


def same_bits(device: Device, codec: str, dtype: torch.dtype, count: int) -> None:
    drawn = torch.Generator().manual_seed(dist.get_rank())
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


def times(device: Device, size: int, rounds: int) -> tuple[Mapping[str, Any], int]:
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


_WORK = ("encode", "feedback", "decode", "decode_add")
# Launches of a turn. A single one is too short to be timed.
_LAUNCHES = 8


def single_kernels(device: Device, codec: str, elems: int, rounds: int) -> tuple[Mapping[str, Any], Mapping[str, int]]:
    """Times kernels of float32 elements, and a copy. Returns the times, and the bytes that each reads and writes in them."""
    values, sums, copied = (torch.randn(elems, device=device.kind) for _ in range(3))
    number = {"cuda": 1, "standin": 20}[device.kind]
    kernels = _native._SingleKernels(number, 0, torch.version.hip is not None, codec, "float32")
    code_bytes = kernels.code_bytes(elems)
    code = torch.empty(code_bytes, dtype=torch.uint8, device=device.kind)
    stream = device.current_stream()
    handle = torch.cuda.current_stream().cuda_stream if device.is_card else stream.native_handle
    addresses = (values.data_ptr(), code.data_ptr(), sums.data_ptr(), elems, handle)

    def launches(work: str) -> Callable[[], None]:
        def launch() -> None:
            for _ in range(_LAUNCHES):
                kernels.launch(work, *addresses)
            device.synchronize()

        return launch

    def copy() -> None:
        for _ in range(_LAUNCHES):
            copied.copy_(values)
        device.synchronize()

    parts = {name: launches(name) for name in _WORK} | {"copy": copy}
    parts["encode"]()
    moved = {"encode": 4 * elems + code_bytes, "feedback": 12 * elems + code_bytes, "decode": 4 * elems + code_bytes}
    moved |= {"decode_add": 8 * elems + code_bytes, "copy": 8 * elems}
    sizes = {name: _LAUNCHES * count for name, count in moved.items()}
    return Bench(device, "accl", False).alternating(parts, rounds), sizes
