"""Starts the ranks of one host, forwards what they print, and ends them all if one fails or the launching side is gone.

An agent is a separate process, on this host or at the end of an ssh connection. It exchanges lines of JSON: it reads orders from
its standard input and writes reports to its standard output. When its input ends, it ends its ranks. This module owns the ranks'
processes, their environment and their end. Read `serve` first.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib.metadata
import json
import os
import re
import select
import selectors
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import IO, Any

from .layout import Placement, ranges, share_out, topology

__all__ = ["ALIVE_S", "HELLO", "Order", "run_here", "serve", "signals", "version"]

_PR_SET_PDEATHSIG = 1
_ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
# Signals by which batch systems notify a program. They are forwarded to the ranks.
_PASSED_ON = (signal.SIGUSR1, signal.SIGUSR2)
# Seconds without input after which an agent ends its ranks, and seconds between the launching side's keepalive messages.
_SILENCE_S, ALIVE_S = 60.0, 10.0
# Seconds between two checks whether child processes of ended ranks still run.
_CHILDREN_S = 0.05
# Prefix of the agent's first line, which distinguishes it from output of the remote shell.
HELLO = "torch-accl agent "
# Seconds for which outputs of ended ranks are still read: other processes of these ranks may hold them open.
_LINGER_S = 2.0
# Bytes without a line end after which an output is forwarded in parts.
_LONGEST_LINE = 1 << 16


@dataclass(frozen=True)
class Order:
    """What an agent must start: `ranks` processes of `command`, of which the first is rank `first` of `world`."""

    command: list[str]
    directory: str
    environment: dict[str, str]
    ranks: int
    world: int
    first: int = 0
    host: int = 0
    # Address of rank 0's store. If it is empty, the launching side chooses an address.
    master: str = ""
    port: int = 0
    binds: bool = True
    grace_s: float = 5
    # Whether outputs of ranks are sent to the launching side line by line. Otherwise ranks inherit the agent's outputs.
    passes_on: bool = False


def free_port() -> tuple[socket.socket, int]:
    """Returns a socket and its port for rank 0's store. While the socket is open, the system gives the port to no other program.

    The store may listen at the port meanwhile: both set SO_REUSEADDR, and the socket does not listen.
    """
    holder = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    holder.bind(("", 0))
    return holder, holder.getsockname()[1]


def version() -> str:
    """Returns the version of this installation: agents of another version may interpret orders differently."""
    try:
        return importlib.metadata.version("torch-accl")
    except importlib.metadata.PackageNotFoundError:
        return "unknown"


def plan(ranks: int, binds: bool) -> list[Placement]:
    """Returns the cores of each of this host's ranks."""
    return share_out(topology(os.sched_getaffinity(0)), ranks) if binds else [Placement()] * ranks


def run_here(order: Order, report: Callable[..., None]) -> int:
    """Runs an order whose ranks are all on this host. Returns the exit status, like `Team.run`."""
    holder, port = free_port()
    with holder:
        return Team(replace(order, master=order.master or "127.0.0.1", port=order.port or port), report).run()


def serve() -> int:
    """Runs an agent at the end of a connection: reports its address, then starts the ranks of the first order it reads."""
    out = os.fdopen(os.dup(1), "w", buffering=1)
    # Other output to descriptor 1 goes to standard error, so that it is not taken for a report.
    os.dup2(2, 1)

    def report(**what: Any) -> None:
        # If the launching side does not read the output, this report is dropped: ending the ranks must not wait for it.
        if "failed" in what and not select.select([], [out], [], 0)[1]:
            return
        # The launching side is gone. The input ends too then, and that ends the ranks.
        with contextlib.suppress(OSError, ValueError):
            print(json.dumps(what), file=out, flush=True)

    holder, port = free_port()
    served = os.environ.get("SSH_CONNECTION", "").split()
    address = served[2] if len(served) == 4 else ""
    first = {
        "port": port,
        "address": address,
        "name": socket.gethostname(),
        "machine": _machine(),
        "version": version(),
    }
    with contextlib.suppress(OSError):
        print(HELLO + json.dumps(first), file=out, flush=True)
    # `sys.stdin` is not used: it would buffer data that the selector must wait for.
    line = _first_line(0)
    if not line:
        return 1
    order = Order(**json.loads(line))
    if why := _unresolved(order.master):
        report(
            failed=f"{order.master}, the address of rank 0, cannot be resolved here: {why}; give an address with --master-addr"
        )
        return 127
    with holder:
        return Team(order, report).run(0)


def _machine() -> str:
    """Returns an id of this boot of the machine, or an empty string if the system has none."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


def _unresolved(name: str) -> str:
    """Returns why `name` has no address on this host, or an empty string. torch's store would retry until its own timeout."""
    try:
        socket.getaddrinfo(name, None)
    except (OSError, UnicodeError) as error:
        return getattr(error, "strerror", None) or str(error)
    return ""


def _first_line(source: int) -> bytes:
    line = b""
    while not line.endswith(b"\n"):
        byte = os.read(source, 1)
        if not byte:
            return b""
        line += byte
    return line


class _Rank:
    """The process of a rank."""

    def __init__(self, number: int, process: subprocess.Popen[bytes]) -> None:
        self.number, self.process = number, process
        # `status` is set when the process ends, `is_over` when it was reaped.
        self.status: int | None = None
        self.is_over = False
        self.pidfd = os.pidfd_open(process.pid)


@dataclass
class _Pipe:
    """An output of a rank, with the part of the last line that was read so far."""

    rank: int
    name: str
    source: IO[bytes]
    rest: bytearray = field(default_factory=bytearray)

    def lines(self, data: bytes) -> Sequence[str]:
        """Returns the lines that `data` completes; a carriage return ends a line, too. Empty `data` returns the rest."""
        self.rest += data
        cut = max(self.rest.rfind(b"\n"), self.rest.rfind(b"\r")) + 1
        if not data or (not cut and len(self.rest) > _LONGEST_LINE):
            cut = len(self.rest)
        whole, self.rest = bytes(self.rest[:cut]), self.rest[cut:]
        lines = re.split(rb"\r\n|\n|\r", whole)
        if lines and not lines[-1]:
            del lines[-1]
        return [line.decode(errors="replace") for line in lines]


class Team:
    """The ranks of a host, from their start to the end of the last rank."""

    def __init__(self, order: Order, report: Callable[..., None]) -> None:
        self._order, self._send_report = order, report
        self._first_failed = 0
        self._ranks: list[_Rank] = []
        self._pipes = 0
        self._selector = selectors.DefaultSelector()
        self._orders = b""
        self._listens_to: int | None = None
        # Times of `time.monotonic`: when the launching side counts as gone; when ranks that were asked to end are killed; and
        # when the outputs of ended ranks are no longer read.
        self._lonely_at: float | None = None
        self._kill_at: float | None = None
        self._leave_at: float | None = None
        self._has_killed = False

    def run(self, orders: int | None = None) -> int:
        """Starts the ranks and waits until they have ended.

        `orders` is a descriptor from which orders are read. An order, the end of the orders, or their absence for `_SILENCE_S`
        ends the ranks. Returns the exit status: 0, or the status of the rank that failed first, as a shell reports it.
        """
        with self._selector, signals() as caught:
            self._selector.register(caught, selectors.EVENT_READ, lambda: self._forward(caught))
            try:
                for local, placement in enumerate(plan(self._order.ranks, self._order.binds)):
                    self._start(local, placement)
            except (OSError, subprocess.SubprocessError) as error:
                self._first_failed = 127
                self._report(
                    failed=f"{self._order.command[0]} cannot be started: {getattr(error, 'strerror', None) or error}"
                )
                self.end(signal.SIGKILL)
            if orders is not None:
                self._lonely_at = time.monotonic() + _SILENCE_S
                self._listens_to = orders
                self._selector.register(orders, selectors.EVENT_READ, lambda: self._obey(orders))
            while any(not rank.is_over for rank in self._ranks) or self._pipes:
                for key, _ in self._selector.select(self._patience()):
                    key.data()
                if not self._is_in_time():
                    break
        return self._first_failed

    def end(self, by: signal.Signals) -> None:
        """Signals the ranks to end, and sets the time at which they are killed if they have not ended."""
        for rank in self._ranks:
            if not rank.is_over:
                self._signal(rank, by)
        if self._kill_at is None:
            self._kill_at = time.monotonic() + (0 if by == signal.SIGKILL else self._order.grace_s)

    def _report(self, **what: Any) -> None:
        try:
            self._send_report(**what)
        except BrokenPipeError:
            # The reader of the output has closed it, so the ranks are ended.
            self._send_report = lambda **what: None
            self._first_failed = self._first_failed or 128 + signal.SIGPIPE
            self.end(signal.SIGTERM)

    @property
    def _is_at_terminal(self) -> bool:
        """Whether a single rank keeps the terminal, as if it were started directly: needed for a debugger."""
        return self._order.world == 1 and not self._order.passes_on

    def _signal(self, rank: _Rank, by: signal.Signals) -> None:
        """Sends a signal to a rank and its child processes."""
        with contextlib.suppress(ProcessLookupError):
            if self._is_at_terminal:
                os.kill(rank.process.pid, by)
            else:
                os.killpg(rank.process.pid, by)

    def _start(self, local: int, placement: Placement) -> None:
        order = self._order
        number = order.first + local
        inherited = {name: value for name, value in os.environ.items() if not name.startswith("TORCHELASTIC_")}
        environment = inherited | order.environment | self._variables(local, number)
        if placement.cores and "OMP_NUM_THREADS" not in environment:
            environment["OMP_NUM_THREADS"] = str(placement.cores)
        libc, parent = ctypes.CDLL(None), os.getpid()

        def prepare() -> None:
            # The kernel kills the rank if the agent dies.
            libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
            if os.getppid() != parent:
                os._exit(1)
            if placement.threads:
                os.sched_setaffinity(0, placement.threads)

        pipe = subprocess.PIPE if order.passes_on else None
        # A process in its own process group is stopped when it reads from a terminal, so it gets no terminal input.
        reads = number == 0 and not order.passes_on and (self._is_at_terminal or not os.isatty(0))
        process = subprocess.Popen(
            order.command,
            cwd=order.directory,
            env=environment,
            stdin=None if reads else subprocess.DEVNULL,
            stdout=pipe,
            stderr=pipe,
            preexec_fn=prepare,
            process_group=None if self._is_at_terminal else 0,
        )
        rank = _Rank(number, process)
        self._ranks.append(rank)
        self._selector.register(rank.pidfd, selectors.EVENT_READ, lambda: self._note_end(rank))
        for name, source in (("out", process.stdout), ("err", process.stderr)):
            if source is not None:
                self._pipes += 1
                end = _Pipe(number, name, source)
                self._selector.register(source, selectors.EVENT_READ, lambda end=end: self._pass_on(end))
        self._report(
            started=number,
            pid=process.pid,
            threads=ranges(placement.threads),
            cores=placement.cores,
            nodes=placement.nodes,
        )

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
        ends = [end for end in (self._lonely_at, self._leave_at) if end is not None]
        if self._kill_at is not None and not self._has_killed:
            ends.append(self._kill_at)
        if any(rank.status is not None and not rank.is_over for rank in self._ranks):
            ends.append(time.monotonic() + _CHILDREN_S)
        return max(min(ends) - time.monotonic(), 0) if ends else None

    def _is_in_time(self) -> bool:
        """Carries out what is due by now. Returns false if nothing needs to be awaited any more."""
        now = time.monotonic()
        if self._lonely_at is not None and now >= self._lonely_at and not self._takes_orders():
            self._lonely_at = None
            self._report(
                failed=f"no message from `accl run`, which started the ranks, for {_SILENCE_S:.0f} s; the ranks are ended"
            )
            self.end(signal.SIGTERM)
        if self._kill_at is not None and not self._has_killed and now >= self._kill_at:
            self._has_killed = True
            self.end(signal.SIGKILL)
        for rank in self._ranks:
            if (
                rank.status is not None
                and not rank.is_over
                and (self._has_killed or not _has_children(rank.process.pid))
            ):
                self._reap(rank)
        if self._leave_at is None and all(rank.is_over for rank in self._ranks):
            # Processes that a rank has left behind may hold its outputs open.
            self._leave_at = now + _LINGER_S
        return self._leave_at is None or now < self._leave_at

    def _takes_orders(self) -> bool:
        """Reads orders that arrived while a report blocked this process. Returns whether there were any."""
        assert self._listens_to is not None
        if not select.select([self._listens_to], [], [], 0)[0]:
            return False
        self._obey(self._listens_to)
        return True

    def _forward(self, caught: socket.socket) -> None:
        for number in caught.recv(64):
            self._take_signal(signal.Signals(number))

    def _take_signal(self, number: signal.Signals) -> None:
        if number in _PASSED_ON:
            for rank in self._ranks:
                if rank.status is None:
                    os.kill(rank.process.pid, number)
            return
        self._first_failed = self._first_failed or 128 + number
        self._report(signalled=int(number))
        if self._is_at_terminal and number == signal.SIGINT and os.isatty(0):
            # The terminal has sent the signal to the agent and to the rank.
            self._kill_at = self._kill_at or time.monotonic() + self._order.grace_s
        else:
            self.end(number)

    def _obey(self, orders: int) -> None:
        data = os.read(orders, 1 << 16)
        if not data:
            self._selector.unregister(orders)
            self._lonely_at = None
            self.end(signal.SIGTERM)
            return
        self._lonely_at = time.monotonic() + _SILENCE_S
        self._orders += data
        *lines, self._orders = self._orders.split(b"\n")
        for line in lines:
            if number := json.loads(line).get("signal"):
                self._take_signal(signal.Signals(number))

    def _note_end(self, rank: _Rank) -> None:
        """Records the end of a rank, and reaps it unless its child processes still have to end.

        Until the rank is reaped, the system cannot give its process group's number to another process.
        """
        self._selector.unregister(rank.pidfd)
        ended = os.waitid(os.P_PID, rank.process.pid, os.WEXITED | os.WNOWAIT)
        assert ended is not None
        rank.status = ended.si_status if ended.si_code == os.CLD_EXITED else -ended.si_status
        self._report(ended=rank.number, status=rank.status)
        if rank.status:
            self._first_failed = self._first_failed or (rank.status if rank.status > 0 else 128 - rank.status)
            self.end(signal.SIGTERM)
        if self._kill_at is None or self._is_at_terminal or not _has_children(rank.process.pid):
            self._reap(rank)

    def _reap(self, rank: _Rank) -> None:
        rank.process.wait()
        os.close(rank.pidfd)
        rank.is_over = True

    def _pass_on(self, end: _Pipe) -> None:
        data = os.read(end.source.fileno(), 1 << 16)
        for line in end.lines(data):
            self._report(rank=end.rank, stream=end.name, line=line)
        if not data:
            self._selector.unregister(end.source)
            end.source.close()
            self._pipes -= 1


def _has_children(group: int) -> bool:
    """Whether a process group has running processes other than its leader, which has ended."""
    for entry in os.listdir("/proc"):
        if entry.isdecimal() and int(entry) != group:
            try:
                with open(f"/proc/{entry}/stat") as stat:
                    fields = stat.read().rpartition(")")[2].split()
            except OSError:
                continue
            if int(fields[2]) == group and fields[0] != "Z":
                return True
    return False


@contextlib.contextmanager
def signals() -> Iterator[socket.socket]:
    """Delivers ending and forwarded signals as bytes on a socket. Ignored signals stay ignored; handlers are restored."""
    ours, theirs = socket.socketpair()
    ours.setblocking(False)
    theirs.setblocking(False)
    handled = [number for number in (*_ENDING, *_PASSED_ON) if signal.getsignal(number) != signal.SIG_IGN]
    before = {number: signal.signal(number, lambda *_: None) for number in handled}
    previous = signal.set_wakeup_fd(theirs.fileno(), warn_on_full_buffer=False)
    try:
        yield ours
    finally:
        signal.set_wakeup_fd(previous)
        for number, handler in before.items():
            signal.signal(number, handler)
        ours.close()
        theirs.close()
