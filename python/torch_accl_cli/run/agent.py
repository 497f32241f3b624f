"""Starts the ranks of one host, passes on what they print, and ends them all when one fails or nobody listens any more.

An agent is a process of its own, on this host or at the end of an ssh connection, and talks in lines of JSON: orders come on its
standard input, and what happens goes to its standard output. When its input ends, so do its ranks. Owns the ranks' processes, their
environment and their end. Read `serve` first.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import selectors
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import IO, Any

from .layout import Seat, ranges, share_out, topology

__all__ = ["Order", "Team", "free_port", "plan", "serve", "signals"]

_PR_SET_PDEATHSIG = 1
_ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
# A time that does not come: what was to be done then has been.
_DONE = float("inf")
# How long the outputs of ranks that have ended are read, which processes of theirs may hold open.
_LINGER_S = 2.0
# One that writes no line for so long is passed on in parts.
_LONGEST_LINE = 1 << 16


@dataclass(frozen=True)
class Order:
    """What an agent is told to start: `ranks` processes of `command`, of which the first is rank `first` of `world`."""

    command: list[str]
    directory: str
    environment: dict[str, str]
    ranks: int
    first: int
    world: int
    host: int
    master: str
    port: int
    binds: bool
    grace_s: float
    # Whether what ranks print goes to whoever gave the order, in lines; else they print where the agent does.
    passes_on: bool


def free_port() -> tuple[socket.socket, int]:
    """A port for rank 0's store, which nobody is given by the system while the socket is there.

    The store may listen at it meanwhile: both reuse addresses, and the socket does not listen.
    """
    holder = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    holder.bind(("", 0))
    return holder, holder.getsockname()[1]


def plan(ranks: int, binds: bool) -> list[Seat]:
    """The seats of this host's ranks."""
    return share_out(topology(os.sched_getaffinity(0)), ranks) if binds else [Seat()] * ranks


def serve() -> int:
    """The agent at the end of a connection: its first order asks for a port or is empty, the second starts the ranks."""
    out = os.fdopen(os.dup(1), "w", buffering=1)
    # What else prints here must not be taken for a report.
    os.dup2(2, 1)

    def report(**what: Any) -> None:
        # Who listened is gone, and with it our input: the ranks are ended for that.
        with contextlib.suppress(OSError, ValueError):
            print(json.dumps(what), file=out, flush=True)

    holder, port = free_port()
    served = os.environ.get("SSH_CONNECTION", "").split()
    report(port=port, address=served[2] if len(served) == 4 else "", name=socket.gethostname())
    line = sys.stdin.readline()
    if not line:
        return 1
    order = Order(**json.loads(line))
    with holder:
        return Team(order, report).run(sys.stdin)


class _Rank:
    """A rank's process."""

    def __init__(self, number: int, process: subprocess.Popen[bytes]) -> None:
        self.number, self.process = number, process
        self.status: int | None = None
        self.pidfd = os.pidfd_open(process.pid)


@dataclass
class _Pipe:
    """What a rank prints on one of its outputs, until the line ends."""

    rank: int
    name: str
    source: IO[bytes]
    rest: bytearray = field(default_factory=bytearray)

    def lines(self, data: bytes) -> Sequence[str]:
        """The lines that end with this; at the end of all, what is left."""
        self.rest += data
        cut = len(self.rest) if not data or len(self.rest) > _LONGEST_LINE else self.rest.rfind(b"\n") + 1
        whole, self.rest = self.rest[:cut], self.rest[cut:]
        return whole.decode(errors="replace").splitlines()


class Team:
    """The ranks of a host, from their start to the end of the last."""

    def __init__(self, order: Order, report: Callable[..., None]) -> None:
        self._order, self._report = order, report
        self._first_failed = 0
        self._ranks: list[_Rank] = []
        self._pipes = 0
        self._selector = selectors.DefaultSelector()
        # When the ranks are killed that have been asked to end; and since when nothing is awaited any more of what they have started.
        self._kill_at: float | None = None
        self._leave_at: float | None = None

    def run(self, orders: IO[str] | None = None) -> int:
        """Starts the ranks and waits for their end. The ranks are ended by anything that comes from `orders`, by their end, and by signals.

        Returns the exit status: that of the rank that failed first, as a shell has it; 0 when none has.
        """
        with self._selector, signals() as caught:
            self._selector.register(caught, selectors.EVENT_READ, lambda: self._forward(caught))
            try:
                for local, seat in enumerate(plan(self._order.ranks, self._order.binds)):
                    self._start(local, seat)
            except OSError as error:
                self._report(failed=f"{self._order.command[0]} cannot be started: {error.strerror or error}")
                self.end(signal.SIGKILL)
                self._first_failed = 127
            if orders is not None:
                self._selector.register(orders, selectors.EVENT_READ, lambda: self._obey(orders))
            while any(rank.status is None for rank in self._ranks) or self._pipes:
                for key, _ in self._selector.select(self._patience()):
                    key.data()
                if not self._is_in_time():
                    break
        return self._first_failed

    def end(self, by: signal.Signals) -> None:
        """Asks the ranks to end, and sees to it after the time that they are given."""
        for rank in self._ranks:
            if rank.status is None:
                self._signal(rank, by)
        if self._kill_at is None:
            self._kill_at = time.monotonic() + (0 if by == signal.SIGKILL else self._order.grace_s)

    @staticmethod
    def _signal(rank: _Rank, by: signal.Signals) -> None:
        """To a rank and what it has started itself."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(rank.process.pid, by)

    def _start(self, local: int, seat: Seat) -> None:
        order = self._order
        number = order.first + local
        environment = os.environ | order.environment | self._variables(local, number)
        if seat.cores and "OMP_NUM_THREADS" not in environment:
            environment["OMP_NUM_THREADS"] = str(seat.cores)
        libc, parent = ctypes.CDLL(None), os.getpid()

        def prepare() -> None:
            # Nobody outlives the agent.
            libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
            if os.getppid() != parent:
                os._exit(1)
            if seat.threads:
                os.sched_setaffinity(0, seat.threads)

        pipe = subprocess.PIPE if order.passes_on else None
        # A process in a group of its own is stopped when it reads from a terminal.
        reads = number == 0 and not order.passes_on and not os.isatty(0)
        process = subprocess.Popen(
            order.command,
            cwd=order.directory,
            env=environment,
            stdin=None if reads else subprocess.DEVNULL,
            stdout=pipe,
            stderr=pipe,
            preexec_fn=prepare,
            process_group=0,
        )
        rank = _Rank(number, process)
        self._ranks.append(rank)
        self._selector.register(rank.pidfd, selectors.EVENT_READ, lambda: self._reap(rank))
        for name, source in (("out", process.stdout), ("err", process.stderr)):
            if source is not None:
                self._pipes += 1
                end = _Pipe(number, name, source)
                self._selector.register(source, selectors.EVENT_READ, lambda end=end: self._pass_on(end))
        self._report(started=number, pid=process.pid, threads=ranges(seat.threads), cores=seat.cores, nodes=seat.nodes)

    def _variables(self, local: int, number: int) -> dict[str, str]:
        order = self._order
        return {
            "RANK": str(number),
            "WORLD_SIZE": str(order.world),
            "LOCAL_RANK": str(local),
            "LOCAL_WORLD_SIZE": str(order.ranks),
            "GROUP_RANK": str(order.host),
            "MASTER_ADDR": order.master,
            "MASTER_PORT": str(order.port),
        }

    def _patience(self) -> float | None:
        ends = [end for end in (self._kill_at, self._leave_at) if end not in (None, _DONE)]
        return max(min(ends) - time.monotonic(), 0) if ends else None

    def _is_in_time(self) -> bool:
        """Kills the ranks whose time is up; false when nothing is awaited any more."""
        now = time.monotonic()
        if self._kill_at is not None and now >= self._kill_at:
            self.end(signal.SIGKILL)
            self._kill_at = _DONE
        if self._leave_at is None and all(rank.status is not None for rank in self._ranks):
            # What a rank has left behind may hold its outputs open.
            self._leave_at = now + _LINGER_S
        return self._leave_at is None or now < self._leave_at

    def _forward(self, caught: socket.socket) -> None:
        for number in caught.recv(64):
            self._first_failed = self._first_failed or 128 + number
            self._report(signalled=number)
            self.end(signal.Signals(number))

    def _obey(self, orders: IO[str]) -> None:
        # Any order, and the end of orders, is to end.
        self._selector.unregister(orders)
        self.end(signal.SIGTERM)

    def _reap(self, rank: _Rank) -> None:
        self._selector.unregister(rank.pidfd)
        ended = os.waitid(os.P_PID, rank.process.pid, os.WEXITED | os.WNOWAIT)
        if self._kill_at is not None or ended is None or ended.si_status != 0:
            # What it has left behind; as long as it is not reaped, its number is its own.
            self._signal(rank, signal.SIGKILL)
        rank.status = rank.process.wait()
        os.close(rank.pidfd)
        self._report(ended=rank.number, status=rank.status)
        if rank.status:
            self._first_failed = self._first_failed or (rank.status if rank.status > 0 else 128 - rank.status)
            self.end(signal.SIGTERM)

    def _pass_on(self, end: _Pipe) -> None:
        data = os.read(end.source.fileno(), 1 << 16)
        for line in end.lines(data):
            self._report(rank=end.rank, stream=end.name, line=line)
        if not data:
            self._selector.unregister(end.source)
            end.source.close()
            self._pipes -= 1


@contextlib.contextmanager
def signals() -> Iterator[socket.socket]:
    """Signals that end a program, as bytes to read; what they did before comes back."""
    ours, theirs = socket.socketpair()
    ours.setblocking(False)
    theirs.setblocking(False)
    before = {number: signal.signal(number, lambda *_: None) for number in _ENDING}
    previous = signal.set_wakeup_fd(theirs.fileno(), warn_on_full_buffer=False)
    try:
        yield ours
    finally:
        signal.set_wakeup_fd(previous)
        for number, handler in before.items():
            signal.signal(number, handler)
        ours.close()
        theirs.close()
