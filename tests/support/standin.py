"""A stand-in for an accelerator: builds `tests/standin`, and registers it with torch as the device type `standin`.

The device is described in `tests/standin/standin.cpp`. A process that registers it cannot get rid of it, so tests do
that in ranks of their own (`on_ranks(..., fresh=True)`).
"""

import contextlib
import ctypes
import gc
import hashlib
import importlib.util
import os
import subprocess
import sysconfig
import time
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.utils import cpp_extension

ROOT = Path(__file__).resolve().parents[2]
SOURCE = ROOT / "tests" / "standin" / "standin.cpp"
DRIVER = ROOT / "crates" / "accl-gpu-standin" / "src"
ORDERS = ("early", "late", "random")


def build() -> Path:
    """Compiles the stand-in for this torch and this Python, unless that was done before. Returns the module's path."""
    facts = (
        SOURCE.read_bytes()
        + (DRIVER / "standin.h").read_bytes()
        + f"{torch.__version__} {sysconfig.get_platform()} {sysconfig.get_python_version()}".encode()
    )
    path = ROOT / "target" / "standin" / f"_standin_{hashlib.sha256(facts).hexdigest()[:16]}.so"
    if path.exists():
        return path
    path.parent.mkdir(parents=True, exist_ok=True)
    includes = [*cpp_extension.include_paths(), sysconfig.get_path("include")]
    abi = int(torch._C._GLIBCXX_USE_CXX11_ABI)
    partial = path.with_suffix(f".{os.getpid()}")
    command = [os.environ.get("CXX", "g++"), "-std=c++20", "-O1", "-fPIC", "-shared", f"-D_GLIBCXX_USE_CXX11_ABI={abi}"]
    command += [f"-I{DRIVER}", *(f"-isystem{include}" for include in includes)] + [
        "-Wno-interference-size",
        str(SOURCE),
        "-o",
        str(partial),
    ]
    command += [f"-L{cpp_extension.library_paths()[0]}", "-lc10", "-ltorch_cpu", "-ltorch_python"]
    subprocess.run(command, check=True)
    partial.replace(path)
    return path


def build_driver(flags: str = "") -> Path:
    """Compiles the stand-in of a GPU's driver, unless that was done before. Returns the library's path.

    `flags` are further flags of the compiler of kernels.
    """
    model = ROOT / "crates" / "accl-gpu" / "tests" / "host" / "model.hpp"
    facts = b"".join(path.read_bytes() for path in (DRIVER / "standin.cpp", DRIVER / "standin.h", model))
    # The library has the path of the model, so a copy of this repository has a library of its own.
    facts += f"{flags} {model}".encode()
    folder = ROOT / "target" / "standin"
    path = folder / f"driver_{hashlib.sha256(facts).hexdigest()[:16]}.so"
    if path.exists():
        return path
    folder.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(f".{os.getpid()}")
    defines = [f'-DSTANDIN_FLAGS="{flags}"', f'-DSTANDIN_MODEL="{model}"', f'-DSTANDIN_FOLDER="{folder / "kernels"}"']
    command = [os.environ.get("CXX", "g++"), "-std=c++17", "-O1", "-fPIC", "-shared", "-fvisibility=hidden"]
    command += ["-fno-gnu-unique", *defines, str(DRIVER / "standin.cpp"), "-o", str(partial), "-ldl"]
    subprocess.run(command, check=True)
    partial.replace(path)
    return path


def lend_driver(module: Any, flags: str = "") -> None:
    """Lets the device run kernels, through a stand-in of a GPU's driver, for the life of this process."""
    from torch_accl import _native

    module.lend_to(str(build_driver(flags)))
    _native._lend_gpu_driver(build_driver(flags))


class DriverCounts(ctypes.Structure):
    """What the stand-in of a GPU's driver has counted: see `accl_standin_counts`."""

    _fields_ = [
        (name, ctypes.c_int64)
        for name in (
            "contexts",
            "modules",
            "events",
            "programs",
            "tasks",
            "loads",
            "compiles",
            "calls",
            "launches",
            "allocations",
            "imports",
            "copies",
        )
    ]


def driver_counts(flags: str = "") -> DriverCounts:
    """Returns the counts of the driver that was built with these flags."""
    found = DriverCounts()
    ctypes.CDLL(str(build_driver(flags))).accl_standin_count(ctypes.byref(found))
    return found


def register(order: str = "early", seed: int = 1) -> Any:
    """Registers the device type in this process. Returns the module that controls the device."""
    spec = importlib.util.spec_from_file_location("_standin", build())
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    torch.utils.rename_privateuse1_backend("standin")
    spec.loader.exec_module(module)
    facade = types.ModuleType("torch.standin")

    def index_of(device: Any) -> int:
        index = device if isinstance(device, int) else None if device is None else torch.device(device).index
        return torch.accelerator.current_device_index() if index is None else index

    generators = tuple(module.default_generator(number) for number in range(2))
    for name, value in {
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        # torch's checkpoint asks for this name.
        "_initialized": True,
        "_is_in_bad_fork": lambda: False,
        "device_count": lambda: 2,
        "current_device": torch.accelerator.current_device_index,
        "set_device": torch.accelerator.set_device_index,
        "device": _device,
        "current_stream": torch.accelerator.current_stream,
        "stream": _stream,
        "synchronize": lambda device=None: torch.accelerator.synchronize(device),
        "Stream": torch.Stream,
        "Event": torch.Event,
        "get_amp_supported_dtype": lambda: [torch.bfloat16, torch.float16],
        "default_generators": generators,
        "manual_seed_all": lambda number: [generator.manual_seed(number) for generator in generators],
        "get_rng_state": lambda device=None: generators[index_of(device)].get_state(),
        "set_rng_state": lambda state, device=None: generators[index_of(device)].set_state(state),
    }.items():
        setattr(facade, name, value)
    torch._register_device_module("standin", facade)
    torch.utils.generate_methods_for_privateuse1_backend()
    module.set_order(order, seed)
    return module


def _device(device: Any) -> Any:
    """Makes a device current for a block. Modules of devices offer this, under this name."""
    return torch.accelerator.device_index(device if isinstance(device, int) else torch.device(device).index)


def _stream(stream: Any) -> Any:
    """Makes a stream current for a block, if it is one."""
    return contextlib.nullcontext() if stream is None else stream


@contextlib.contextmanager
def nothing_is_lost(module: Any, *, but: tuple[str, ...] = ()) -> Iterator[None]:
    """Checks that the block leaves no event, pinned byte or block of a device behind, and did nothing that a device
    forgives. Counters in `but` may differ."""

    def kept() -> dict[str, int]:
        return {name: count for name, count in _kept(module).items() if name not in but}

    gc.collect()
    torch.accelerator.synchronize()
    before = kept()
    yield
    until = time.monotonic() + 10
    while (after := kept()) != before and time.monotonic() < until:
        time.sleep(0.001)
    assert after == before


def wait_until_idle(module: Any) -> None:
    """Waits until the device has no events of earlier calls, and nothing changes. Other threads let things go."""
    until = time.monotonic() + 10
    before: dict[str, int] = {}
    while (counts := _kept(module)) != before or counts["events"]:
        assert time.monotonic() < until, counts
        before = counts
        time.sleep(0.05)


def _kept(module: Any) -> dict[str, int]:
    """Returns what the device has counted, after everything that is no longer needed was let go."""
    gc.collect()
    if dist.is_initialized() and hasattr(_backend("cpu"), "snapshot"):
        # A message to itself lets the backend drop calls that are through.
        sent = dist.isend(torch.ones(1), dist.get_rank())
        dist.irecv(torch.ones(1), dist.get_rank()).wait()
        sent.wait()
    for device in range(torch.accelerator.device_count()):
        torch.accelerator.synchronize(torch.device("standin", device))
    counts: dict[str, int] = module.counts()
    if dist.is_initialized() and hasattr(backend := _backend("standin"), "snapshot"):
        process = backend.snapshot()["process"]
        counts["pinned_in_use"] = process["pinned_bytes"]
        # Memory that is kept for later calls is not lost.
        counts["pinned_bytes"] -= process["idle_pinned_bytes"]
    return counts


def _backend(device: str) -> Any:
    """Returns the default group's backend for a type of devices, without the wrapper of detailed debugging."""
    backend = dist.group.WORLD._get_backend(torch.device(device))
    return getattr(backend, "wrapped_pg", backend)


def batch_norm_kernels() -> torch.library.Library:
    """Registers the operators of `SyncBatchNorm`, which torch has for CUDA alone. They stay as long as the result."""
    library = torch.library.Library("aten", "IMPL")

    def dims(x: torch.Tensor) -> list[int]:
        return [dim for dim in range(x.dim()) if dim != 1]

    def wide(value: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return value.reshape(1, -1, *[1] * (x.dim() - 2))

    def scale(invstd: torch.Tensor, weight: torch.Tensor | None) -> torch.Tensor:
        return invstd if weight is None else invstd * weight

    def stats(x: torch.Tensor, eps: float) -> tuple[torch.Tensor, torch.Tensor]:
        return x.mean(dims(x)), (x.var(dims(x), unbiased=False) + eps).rsqrt()

    def gather(
        x: torch.Tensor,
        means: torch.Tensor,
        invstds: torch.Tensor,
        running_mean: torch.Tensor | None,
        running_var: torch.Tensor | None,
        momentum: float,
        eps: float,
        counts: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        weights = counts.view(-1, 1)
        count = weights.sum()
        mean = (means * weights).sum(0) / count
        squares = ((invstds**-2 - eps + means**2) * weights).sum(0) / count
        var = squares - mean**2
        if running_mean is not None and running_var is not None:
            running_mean.mul_(1 - momentum).add_(mean * momentum)
            running_var.mul_(1 - momentum).add_(var * count / (count - 1) * momentum)
        return mean, (var + eps).rsqrt()

    def normalise(
        x: torch.Tensor,
        weight: torch.Tensor | None,
        bias: torch.Tensor | None,
        mean: torch.Tensor,
        invstd: torch.Tensor,
        eps: float,
    ) -> torch.Tensor:
        scaled = (x - wide(mean, x)) * wide(scale(invstd, weight), x)
        return scaled if bias is None else scaled + wide(bias, x)

    def sums(
        grad: torch.Tensor,
        x: torch.Tensor,
        mean: torch.Tensor,
        invstd: torch.Tensor,
        weight: torch.Tensor | None,
        *needed: bool,
    ) -> tuple[torch.Tensor, ...]:
        product = (grad * (x - wide(mean, x))).sum(dims(x))
        total = grad.sum(dims(x))
        return total, product, product * invstd, total.clone()

    def backward(
        grad: torch.Tensor,
        x: torch.Tensor,
        mean: torch.Tensor,
        invstd: torch.Tensor,
        weight: torch.Tensor | None,
        total: torch.Tensor,
        product: torch.Tensor,
        counts: torch.Tensor,
    ) -> torch.Tensor:
        count = counts.sum()
        centred = (x - wide(mean, x)) * wide(invstd**2 * product / count, x)
        return (grad - wide(total / count, x) - centred) * wide(scale(invstd, weight), x)

    for name, kernel in {
        "batch_norm_stats": stats,
        "batch_norm_gather_stats_with_counts": gather,
        "batch_norm_elemt": normalise,
        "batch_norm_backward_reduce": sums,
        "batch_norm_backward_elemt": backward,
    }.items():
        library.impl(name, kernel, "PrivateUse1")
    return library
