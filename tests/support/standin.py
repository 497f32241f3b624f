"""A stand-in for an accelerator: builds `tests/standin`, and registers it with torch as the device type `standin`.

The device is described in `tests/standin/standin.cpp`. A process that registers it cannot get rid of it, so tests do
that in ranks of their own (`on_ranks(..., fresh=True)`).
"""

import contextlib
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
ORDERS = ("early", "late", "random")


def build() -> Path:
    """Compiles the stand-in for this torch and this Python, unless that was done before. Returns the module's path."""
    facts = (
        SOURCE.read_bytes()
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
    command += [f"-isystem{include}" for include in includes] + [
        "-Wno-interference-size",
        str(SOURCE),
        "-o",
        str(partial),
    ]
    command += [f"-L{cpp_extension.library_paths()[0]}", "-lc10", "-ltorch_cpu", "-ltorch_python"]
    subprocess.run(command, check=True)
    partial.replace(path)
    return path


def register(order: str = "early", seed: int = 1) -> Any:
    """Registers the device type in this process. Returns the module that controls the device."""
    spec = importlib.util.spec_from_file_location("_standin", build())
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    torch.utils.rename_privateuse1_backend("standin")
    spec.loader.exec_module(module)
    facade = types.ModuleType("torch.standin")
    for name, value in {
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "_is_in_bad_fork": lambda: False,
        "device_count": lambda: 2,
        "current_device": torch.accelerator.current_device_index,
        "set_device": torch.accelerator.set_device_index,
        "current_stream": torch.accelerator.current_stream,
        "stream": lambda stream: stream,
        "synchronize": torch.accelerator.synchronize,
        "Stream": torch.Stream,
        "Event": torch.Event,
    }.items():
        setattr(facade, name, value)
    torch._register_device_module("standin", facade)
    torch.utils.generate_methods_for_privateuse1_backend()
    module.set_order(order, seed)
    return module


@contextlib.contextmanager
def nothing_is_lost(module: Any) -> Iterator[None]:
    """Checks that the block leaves no event, pinned byte or block of a device behind, and did nothing that a device
    forgives."""
    gc.collect()
    torch.accelerator.synchronize()
    before = _kept(module)
    yield
    until = time.monotonic() + 10
    while (after := _kept(module)) != before and time.monotonic() < until:
        time.sleep(0.001)
    assert after == before


def _kept(module: Any) -> dict[str, int]:
    """Returns what the device has counted, after everything that is no longer needed was let go."""
    gc.collect()
    if dist.is_initialized():
        # A message to itself lets the backend drop calls that are through.
        sent = dist.isend(torch.ones(1), dist.get_rank())
        dist.irecv(torch.ones(1), dist.get_rank()).wait()
        sent.wait()
    for device in range(torch.accelerator.device_count()):
        torch.accelerator.synchronize(torch.device("standin", device))
    counts: dict[str, int] = module.counts()
    if dist.is_initialized() and hasattr(backend := dist.group.WORLD._get_backend(torch.device("standin")), "snapshot"):
        process = backend.snapshot()["process"]
        counts["pinned_in_use"] = process["pinned_bytes"]
        # Memory that is kept for later calls is not lost.
        counts["pinned_bytes"] -= process["idle_pinned_bytes"]
    return counts
