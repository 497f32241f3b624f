"""Network namespaces joined by veth pairs, over which ranks of one machine connect as ranks of several hosts do.

Owns names, addresses, shaping and removal, and the speed of a plain TCP connection over the same link. It does not know
the programs that run there. Memory, files and clocks are the machine's: ranks share the board as usual.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import shutil
import statistics
import string
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from .build import Unavailable, finish
from .jobs import Host

BULK = Path(__file__).resolve().parent / "ranks" / "bulk.py"
NAMED = Path("/run/netns")
PREFIX = "accl-peers-"
# Each namespace has its own interface, so the same name serves all.
INTERFACE = "peers0"
# From the block reserved for benchmarks (RFC 2544), which no other route uses.
NETWORK = "198.18.0.0/28"
ADDRESSES = tuple(f"198.18.0.{number}" for number in range(1, 9))
# Linux's default, set explicitly: figures of a machine with another setting would not compare.
CONGESTION_CONTROL = "cubic"
SHAPED_BITS = 10**9
# A millisecond of the rate. With less, a late timer costs throughput; with more, small messages see no limit.
BURST_PER_S = 1000
# A queue that ranks cannot fill: the limit must delay, not drop.
QUEUE_MS = 100
COMMAND_S = 20
# About a second over the shaped link.
BULK_BYTES = 120 << 20
BULK_S = 60
NUMBERS = itertools.count()


@dataclass(frozen=True)
class Link:
    """The ends of a link. Ranks are started on `hosts`."""

    namespaces: tuple[str, ...]

    @property
    def hosts(self) -> tuple[Host, ...]:
        """The hosts at its ends; gloo needs the interface to listen on."""
        return tuple(Host(inside(name), {"GLOO_SOCKET_IFNAME": INTERFACE}) for name in self.namespaces)

    def sent(self) -> int:
        """Returns the bytes sent from the first end, by its interface's counter, including headers and
        retransmissions."""
        count = f"/sys/class/net/{INTERFACE}/statistics/tx_bytes"
        return int(
            finish(
                [*inside(self.namespaces[0]), "cat", count],
                "the byte counter of the interface cannot be read",
                COMMAND_S,
            )
        )

    def goodput(self, turns: int) -> list[float]:
        """Returns bytes per second of a plain TCP connection that sends both ways at once: for each turn, the slower
        direction."""
        return [BULK_BYTES / max(turn) for turn in zip(*self.transfer(BULK_BYTES, turns))]

    def latency(self, turns: int) -> float:
        """Returns the one-way time of a byte in seconds over a plain TCP connection: the median turn."""
        return statistics.median(self.transfer(0, turns)[0]) / 2

    def transfer(self, count: int, turns: int) -> list[list[float]]:
        """Returns the seconds of each turn at each end; with `count` 0, of a round trip."""
        cores = sorted(os.sched_getaffinity(0))
        server, client = (
            [*inside(name), sys.executable, str(BULK), ADDRESSES[0], str(count), str(turns), str(core)]
            for name, core in zip(self.namespaces[:2], itertools.cycle(cores))
        )
        with contextlib.ExitStack() as ends:
            listening = ends.enter_context(started(server))
            port = listening.stdout.readline().strip() if listening.stdout else ""
            if not port:
                raise Unavailable("the plain TCP transfer does not start")
            return [seconds_of(one) for one in (listening, ends.enter_context(started([*client, port])))]


@contextlib.contextmanager
def joined(bits: int | None = None, ends: int = 2) -> Iterator[Link]:
    """Creates a link, each end limited to `bits` bits a second each way, and removes it in any case. More than two ends
    meet at a bridge.

    Processes on the link must have ended before its removal.
    """
    if os.geteuid() != 0:
        raise Unavailable("only root can create network namespaces")
    for program in ("ip", "tc") if bits else ("ip",):
        if shutil.which(program) is None:
            raise Unavailable(f"`{program}` not found; install iproute2")
    sweep()
    number = next(NUMBERS)
    names = tuple(f"{PREFIX}{os.getpid()}-{number}{end}" for end in string.ascii_lowercase[:ends])
    bridge = f"{PREFIX}{os.getpid()}-{number}-bridge"
    try:
        for name in names:
            command(["ip", "netns", "add", name])
        # Interfaces are removed with their namespaces.
        if ends == 2:
            sides = [["name", INTERFACE, "netns", name] for name in names]
            command(["ip", "link", "add", *sides[0], "type", "veth", "peer", *sides[1]])
        else:
            join_at_bridge(bridge, names)
        for name, address in zip(names, ADDRESSES):
            for change in changes(address, bits):
                command([*inside(name), *change.split()])
        yield Link(names)
    finally:
        remove([*names, bridge])


def join_at_bridge(bridge: str, names: Sequence[str]) -> None:
    """Gives each namespace an interface whose other side is a port of a bridge in a separate namespace."""
    command(["ip", "netns", "add", bridge])
    command([*inside(bridge), "ip", "link", "add", "bridge0", "type", "bridge"])
    command([*inside(bridge), "ip", "link", "set", "bridge0", "up"])
    for number, name in enumerate(names):
        port = f"port{number}"
        sides = [["name", INTERFACE, "netns", name], ["name", port, "netns", bridge]]
        command(["ip", "link", "add", *sides[0], "type", "veth", "peer", *sides[1]])
        command([*inside(bridge), "ip", "link", "set", port, "master", "bridge0", "up"])


def changes(address: str, bits: int | None) -> Iterator[str]:
    """Yields the commands that set up a namespace with an interface."""
    # Ranks of one host connect over loopback, unless they share memory.
    yield "ip link set lo up"
    yield f"ip link set {INTERFACE} addrgenmode none"
    yield f"ip address add {address}/28 dev {INTERFACE}"
    yield f"ip link set {INTERFACE} up"
    yield f"ip route replace {NETWORK} dev {INTERFACE} src {address} congctl {CONGESTION_CONTROL}"
    if bits:
        limit = f"rate {bits}bit burst {bits // 8 // BURST_PER_S} latency {QUEUE_MS}ms"
        yield f"tc qdisc add dev {INTERFACE} root tbf {limit}"


def inside(name: str) -> tuple[str, ...]:
    """Returns the prefix of a command that runs in a namespace."""
    return ("ip", "netns", "exec", name)


def command(words: Sequence[str]) -> None:
    """Runs a command that creates a part of the link."""
    finish(list(words), "the network cannot be created", COMMAND_S)


def remove(names: Sequence[str]) -> None:
    """Removes the namespaces, if they exist."""
    for name in names:
        if (NAMED / name).exists():
            with contextlib.suppress(subprocess.TimeoutExpired):
                subprocess.run(["ip", "netns", "delete", name], capture_output=True, timeout=COMMAND_S)


def sweep() -> None:
    """Removes namespaces left by a driver that was killed."""
    for path in NAMED.glob(f"{PREFIX}*"):
        driver = path.name.removeprefix(PREFIX).partition("-")[0]
        if not Path("/proc", driver).exists():
            remove([path.name])


@contextlib.contextmanager
def started(words: list[str]) -> Iterator[subprocess.Popen[str]]:
    """Starts an end of the plain transfer."""
    process = subprocess.Popen(words, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True)
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def seconds_of(process: subprocess.Popen[str]) -> list[float]:
    """Returns the measurements of an end."""
    try:
        seconds: list[float] = json.loads(process.communicate(timeout=BULK_S)[0])
        return seconds
    except (subprocess.TimeoutExpired, ValueError):
        raise Unavailable("the plain TCP transfer does not complete") from None
