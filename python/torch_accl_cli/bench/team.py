"""One rank of a run and its communication with the others: values through the store, pinning, and groups."""

from __future__ import annotations

import json
import os
import platform
import socket
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store
from torch_accl import Options

from .._wrong import WrongInput
from .rank_info import RankInfo, leave
from .request import Request, check_pin

__all__ = ["Team", "machine"]


class Team:
    """The ranks of a run. They exchange values through the store, so that no backend is used for that."""

    def __init__(self, rank_info: RankInfo, store: Store) -> None:
        self.rank, self.world = rank_info.rank, rank_info.world
        # Index among the ranks of this host; `pin_ranks` finds it.
        self._local_rank = 0
        self._store = PrefixStore("team", store)
        self._group_store = PrefixStore("groups", store)
        self._exchanges = 0

    def collect(self, value: Any) -> list[Any]:
        """Returns the values of all ranks, on every rank. When it returns, all ranks have called it."""
        self._exchanges += 1
        key = f"{self._exchanges}"
        self._store.set(f"{key}/{self.rank}", json.dumps(value))
        if self.rank == 0:
            values = self._store.multi_get([f"{key}/{rank}" for rank in range(self.world)])
            self._store.set(key, json.dumps([json.loads(text) for text in values]))
        values_of_all: list[Any] = json.loads(self._store.get(key))
        return values_of_all

    def check(self, check: Callable[[], None]) -> None:
        """Runs a check on every rank.

        Raises:
            WrongInput: on all ranks, if the check raised it on any rank.
        """
        refusal = None
        try:
            check()
        except WrongInput as error:
            refusal = str(error)
        first = next(filter(None, self.collect(refusal)), None)
        if first is not None:
            raise WrongInput(first)

    def pin_ranks(self, request: Request) -> list[dict[str, Any]]:
        """Pins every rank of a host to its own core, if that is requested and there are enough cores. Returns where the ranks are.

        If a launcher has given different cores to the ranks of a host, they keep these cores.

        Raises:
            WrongInput: pinning was requested and there are too few cores, or the cases do not fit into memory.
        """
        cores = sorted(os.sched_getaffinity(0))
        host = socket.gethostname(), Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        placements = self.collect({"rank": self.rank, "host": host, "cores": cores})
        mine = [placement for placement in placements if tuple(placement["host"]) == host]
        shares_cores = all(placement["cores"] == cores for placement in mine)
        self.check(lambda: check_pin(request.pin and shares_cores, len(mine), len(cores)))
        self.check(lambda: request.check_memory(self.world, len(mine)))
        self._local_rank = [placement["rank"] for placement in mine].index(self.rank)
        if shares_cores and request.pin is not False and len(mine) <= len(cores):
            os.sched_setaffinity(0, {_one_thread_of_each_core_first(cores)[self._local_rank]})
        cores = sorted(os.sched_getaffinity(0))
        return self.collect({"rank": self.rank, "host": host[0], "pid": os.getpid(), "cores": cores})

    def device(self, request: Request) -> torch.device:
        """Returns the device of this rank's tensors, and makes it current. Without an index, the ranks of a host take the
        devices in turn.

        Raises:
            WrongInput: on all ranks, if the device is missing on one.
        """
        device = torch.device(request.device)
        if device.type == "cpu":
            return device
        self.check(lambda: _check_present(device))
        index = self._local_rank % torch.accelerator.device_count() if device.index is None else device.index
        torch.accelerator.set_device_index(index)
        return torch.device(device.type, index)

    def open(self, request: Request) -> None:
        """Creates the default process group, with accl.

        Raises:
            WrongInput: on all ranks, if these ranks cannot run a forced algorithm.
        """
        # torch gets one thread: ranks share the cores, and torch computes nothing while a clock runs.
        torch.set_num_threads(1)
        try:
            dist.init_process_group(
                "accl",
                store=self._group_store,
                rank=self.rank,
                world_size=self.world,
                timeout=timedelta(seconds=request.timeout_s),
                pg_options=Options(algorithm=request.rules or None),
            )
        except ValueError as error:
            raise WrongInput(str(error).removeprefix("accl: ")) from None

    def group(self, backend: str, rules: Sequence[str] = ()) -> Any:
        """Creates a group of all ranks; `rules` force algorithms of accl."""
        options = Options(algorithm=rules) if rules else None
        return dist.new_group(backend=backend, pg_options=options)

    def close(self) -> None:
        """Destroys all groups; rank 0 leaves last."""
        self.collect(None)
        dist.destroy_process_group()
        leave(self._store, self.rank, self.world)


def _check_present(device: torch.device) -> None:
    """Refuses a device that this process cannot use."""
    found = torch.accelerator.current_accelerator(check_available=True)
    if found is None or found.type != device.type:
        there = (
            f"this machine has {found.type}"
            if found is not None
            else "this machine has no accelerator that torch can use"
        )
        raise WrongInput(f"--device: {device} is not available: {there}; see `accl info`")
    count = torch.accelerator.device_count()
    if device.index is not None and device.index >= count:
        raise WrongInput(
            f"--device: {device} is not available: the devices are {device.type}:0 to {device.type}:{count - 1}"
        )


def machine() -> dict[str, Any]:
    """Returns properties of the machine that influence times, as far as this process can see them."""

    def text(path: str) -> str | None:
        try:
            return Path(path).read_text().strip()
        except OSError:
            return None

    names = [line for line in (text("/proc/cpuinfo") or "").splitlines() if line.startswith("model name")]
    return {
        "host": socket.gethostname(),
        "cpu": names[0].partition(":")[2].strip() if names else platform.machine(),
        "cores": os.cpu_count(),
        "kernel": platform.release(),
        "governor": text("/sys/devices/system/cpu/cpu0/cpufreq/scaling_governor"),
        "load": list(os.getloadavg()),
    }


def _one_thread_of_each_core_first(cores: list[int]) -> list[int]:
    """Orders CPUs by thread of a core, so that ranks share a core's threads only once every core has a rank."""
    seen: dict[str, int] = {}
    turns = []
    for core in cores:
        try:
            siblings = Path(f"/sys/devices/system/cpu/cpu{core}/topology/thread_siblings_list").read_text()
        except OSError:
            siblings = str(core)
        turns.append((seen.setdefault(siblings, 0), core))
        seen[siblings] += 1
    return [core for _, core in sorted(turns)]
