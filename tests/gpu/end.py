"""Part `end`: ranks that are killed, a device that fails, and programs that exit in the middle of a call.

Each case asks for the same: the other ranks get an error that names the cause, all processes end in time, and the card has its
memory back. Which error text belongs to which failure of the protocol is asked by the tests of CPU tensors.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from support import init_group, run_ranks, run_script

from .device import Device, freed_tensor
from .report import Report, Skip, check

COUNT = 2_000_000
# Seconds after which a rank must know of a peer that has gone. Groups time out later.
SOON = 10.0


def run(report: Report, kind: str, is_tiny: bool) -> None:
    report.case("a killed rank is named by the others", lambda: killed(kind, behind=0))
    report.case("a rank is killed behind 300 ms of computing", lambda: killed(kind, behind=300))
    report.case("an illegal address is reported on all ranks", lambda: illegal_address(kind))
    for ending in ("in flight", "raised") if is_tiny else ("destroyed", "waited", "in flight", "raised"):
        report.case(f"a program ends: {ending}", lambda: exits(kind, ending))
    report.case("the card has its memory back", lambda: memory_is_back(kind))


def killed(kind: str, behind: int) -> dict[str, Any]:
    """Rank 1 is killed while its calls are in flight."""

    def body(rank: int) -> dict[str, Any]:
        device = Device(kind, order="late", seed=rank)
        init_group()
        tensor = torch.ones(COUNT, device=kind)
        dist.all_reduce(tensor)
        store = dist.distributed_c10d._get_default_store()
        if rank == 1:
            device.compute(behind)
            works = [dist.all_reduce(tensor.clone(), async_op=True) for _ in range(4)]
            assert works
            store.set("in flight", "")
            os.kill(os.getpid(), signal.SIGKILL)
        store.wait(["in flight"])
        begin = time.monotonic()
        said = _error_of(lambda: _calls(tensor))
        taken = time.monotonic() - begin
        assert "rank 1" in said, f"the error does not name rank 1: {said}"
        assert taken < SOON, f"the error came after {taken:.1f} s"
        # The device itself is well.
        device.synchronize()
        assert torch.ones(3, device=kind).sum().item() == 3
        return {"error": said, "seconds": round(taken, 3)}

    outcomes = run_ranks(body, 2, init=False)
    check(outcomes, 0)
    assert outcomes[1].exitcode == -signal.SIGKILL, outcomes[1].describe()
    found = outcomes[0].value
    assert isinstance(found, dict)
    return found


def _calls(tensor: torch.Tensor) -> None:
    for _ in range(200):
        dist.all_reduce(tensor, async_op=True).wait()
        torch.accelerator.synchronize()


def _error_of(call: Callable[[], object]) -> str:
    """Returns the first line of the error that a call raises."""
    try:
        call()
    except RuntimeError as error:
        return str(error).splitlines()[0]
    raise AssertionError("no error was raised")


def illegal_address(kind: str) -> dict[str, Any]:
    """A kernel of rank 1 accesses memory that was freed, while a call is in flight."""

    def body(rank: int) -> dict[str, Any]:
        device = Device(kind, order="late", seed=rank)
        init_group()
        tensor = torch.ones(COUNT, device=kind)
        dist.all_reduce(tensor)
        device.synchronize()
        begin = time.monotonic()
        if rank == 1:
            device.compute(20)
            if device.is_card:
                freed_tensor(1000).add_(1)
            else:
                device.module.break_context(True)
        said = _error_of(lambda: _calls(tensor))
        taken = time.monotonic() - begin
        if rank == 1 and not device.is_card:
            device.module.break_context(False)
        assert taken < SOON, f"the error came after {taken:.1f} s"
        return {"error": said, "seconds": round(taken, 3)}

    outcomes = run_ranks(body, 2, init=False)
    # A process whose context is broken may end with an abort of the CUDA runtime, once it has reported its error.
    check(outcomes)
    other, own = (outcomes[rank].value for rank in (0, 1))
    assert isinstance(other, dict) and isinstance(own, dict)
    for found in (other, own):
        assert re.search("illegal|unspecified launch|CUDA", found["error"]), (
            f"the device's error is missing: {found['error']}"
        )
    return {"rank 0": other["error"], "rank 1": own["error"]}


EXITS = """
import os
import torch, torch.distributed as dist
from gpu.device import Device
kind, ending, rank = os.environ["GPU_DEVICE"], os.environ["GPU_ENDING"], int(os.environ["RANK"])
device = Device(kind, order="late", seed=rank)
dist.init_process_group("accl")
tensor = torch.full((2_000_000,), 1.0 + rank, device=kind)
device.compute(100)
work = dist.all_reduce(tensor, async_op=True)
if ending == "raised" and rank == 1:
    raise ValueError("on purpose")
if ending in ("destroyed", "waited"):
    work.wait()
if ending == "destroyed":
    dist.destroy_process_group()
    assert (tensor.cpu() == 3).all()
print("at the end", flush=True)
"""


def exits(kind: str, ending: str) -> dict[str, Any]:
    """Programs that end by the interpreter's own exit, with a call behind them or in flight."""
    begin = time.monotonic()
    ranks = run_script(EXITS, 2, timeout=60, env={"GPU_DEVICE": kind, "GPU_ENDING": ending})
    codes = [rank.exitcode for rank in ranks]
    errors = "\n".join(rank.stderr for rank in ranks)
    assert not re.search("panick|Fatal|Segmentation|core dumped", errors), errors
    if ending == "raised":
        assert codes[1] == 1 and codes[0] in (0, 1) and "on purpose" in ranks[1].stderr, (codes, errors)
    else:
        assert codes == [0, 0], (codes, errors)
        assert all("at the end" in rank.stdout for rank in ranks), errors
    return {"seconds": round(time.monotonic() - begin, 1)}


def memory_is_back(kind: str) -> dict[str, Any]:
    """After all processes of the cases above have ended, no process holds memory of the card."""
    if kind == "standin":
        raise Skip("memory of the stand-in belongs to its process")
    query = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
    until = time.monotonic() + 20
    while True:
        try:
            used = int(
                subprocess.run(query, capture_output=True, text=True, timeout=30, check=True).stdout.splitlines()[0]
            )
        except (OSError, ValueError, IndexError, subprocess.SubprocessError) as error:
            raise Skip(f"nvidia-smi does not show the memory in use: {error}") from None
        if used < 1024:
            return {"MiB in use": used}
        assert time.monotonic() < until, f"{used} MiB of the card are in use 20 s after the last process has ended"
        time.sleep(0.5)
