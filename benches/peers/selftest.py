"""Tests the machinery with programs that a build of this repository has anyway: starts, turns, checks and ends, also
over a network. Ignores the times of calls.
"""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

from . import networks
from .build import Unavailable, Workshop
from .jobs import HERE, Host, JobSet
from .measure import TINY, Cell, measure

# Includes a codec, whose results are not exact.
LIBRARIES = ("accl", "accl_maxmin:4_0", "sketch", "gloo")
# Without the C baseline, which needs shared memory.
ON_HOSTS = ("accl", "gloo")
CELL = Cell("all_reduce", "float32", 4096)
BY_HOST_ID = (Host(environment={"ACCL_HOST_ID": "one"}), Host(environment={"ACCL_HOST_ID": "other"}))


def run() -> int:
    """Returns the exit code."""
    with tempfile.TemporaryDirectory() as folder:
        shop = Workshop(Path(folder), print, online=False, is_timed=False)
        shop.prepare(LIBRARIES)
        complaints = [f"{name}: {reason}" for name, reason in shop.missing.items()]
        complaints += turns(shop, LIBRARIES)
        complaints += turns(shop, ("accl",), BY_HOST_ID, host_id_of)
        complaints += over_a_network(shop)
    for complaint in complaints:
        print(complaint, file=sys.stderr)
    print(f"peers: {len(LIBRARIES)} libraries expected to take turns, {len(complaints)} complaints")
    return int(bool(complaints))


def turns(
    shop: Workshop,
    wanted: Sequence[str],
    hosts: Sequence[Host] = HERE,
    where: Callable[[int], str] = lambda pid: "",
) -> list[str]:
    """Returns complaints about a set of jobs that measures a cell; `where` returns the host of a process."""
    with JobSet(2, print, hosts) as job_set:
        job_set.start(wanted, shop.names)
        pids = [rank.pid for job in job_set.jobs.values() for rank in job.members]
        seen = {where(pid) for pid in pids}
        figures = measure(job_set, [CELL], wanted, TINY, lambda cell, name: None)
        complaints = [f"{name}, {job_set.words}: {reason}" for name, reason in job_set.missing.items()]
    measured = {figure.library for figure in figures if figure.us > 0}
    complaints += [f"{name}, {job_set.words}: no figure" for name in wanted if name not in measured]
    complaints += [f"ranks ran on {sorted(seen)}"] if len(seen) != len(hosts) else []
    return complaints + [f"process {pid} is still running" for pid in pids if alive(pid)]


def over_a_network(shop: Workshop) -> list[str]:
    """Returns complaints about ranks in two namespaces; skipped if namespaces cannot be created."""
    try:
        with networks.joined(networks.SHAPED_BITS) as link:
            complaints = turns(shop, ON_HOSTS, link.hosts, lambda pid: os.readlink(f"/proc/{pid}/ns/net"))
            [goodput] = link.goodput(1)
        with networks.joined(networks.SHAPED_BITS, 3) as bridged:
            [over_bridge], sent = bridged.goodput(1), bridged.sent()
    except Unavailable as why:
        print(f"SKIPPED ranks over a network: {why}")
        return []
    if 8 * over_bridge > 1.1 * networks.SHAPED_BITS:
        complaints.append(f"a link limited to {networks.SHAPED_BITS} bit/s at a bridge carries {8 * over_bridge:.0f}")
    # The counter includes headers and retransmissions.
    if not 1 < sent / networks.BULK_BYTES < 1.1:
        complaints.append(f"{networks.BULK_BYTES} bytes were sent, but the interface counted {sent}")
    # A token bucket exceeds its rate only at the start.
    if 8 * goodput > 1.1 * networks.SHAPED_BITS:
        complaints.append(f"a link limited to {networks.SHAPED_BITS} bit/s carries {8 * goodput:.0f}")
    names = (*link.namespaces, *bridged.namespaces)
    return complaints + [f"namespace {name} was not removed" for name in names if (networks.NAMED / name).exists()]


def host_id_of(pid: int) -> str:
    """Returns the host that a process's environment sets."""
    words = Path(f"/proc/{pid}/environ").read_text().split("\0")
    return next((word for word in words if word.startswith("ACCL_HOST_ID=")), "")


def alive(pid: int) -> bool:
    """Returns whether a process exists."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True
