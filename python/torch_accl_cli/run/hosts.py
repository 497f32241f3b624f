"""Ranks on several hosts: one agent per host behind an ssh connection, and the reports of all agents.

This module owns the connections, and ends all ranks at the first failure. `agent` owns the agent's side.
"""

from __future__ import annotations

import contextlib
import ipaddress
import json
import os
import re
import selectors
import shlex
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import Any

from .agent import ALIVE_S, HELLO, Order, signals, version

__all__ = ["Host", "Unreachable", "hosts_of", "run_on", "ssh_command"]

# ssh must not ask for a password, must give up on a host that does not answer, and must notice a host that is gone.
_QUIET = ("-o", "BatchMode=yes", "-o", "ConnectTimeout=15", "-o", "ServerAliveInterval=15")
# Seconds that an agent needs in addition to the time that its ranks have to end.
_END_S = 5.0
_ANSWER_S = 30.0
_LAST_WORDS_S = 1.0


class Unreachable(Exception):
    """One sentence on why a host has no agent; the exit status is 1."""


@dataclass(frozen=True)
class Host:
    """A host and its number of ranks."""

    name: str
    ranks: int


def hosts_of(text: str, ranks: int) -> list[Host]:
    """Parses a list such as `a,b:4`; hosts without a number have `ranks` ranks.

    Raises:
        ValueError: an entry has another form; the message quotes it.
    """
    found: list[Host] = []
    for part in (part.strip() for part in text.split(",")):
        # An IPv6 address is written in brackets, which are not a part of it.
        match = re.fullmatch(r"(?:((?:[^@\[\]:]*@)?)\[([0-9A-Fa-f:.%\w]+)\]|([^\[\]:]+))(?::([0-9]+))?", part)
        if match is None or (match[4] is not None and int(match[4]) < 1):
            raise ValueError(f"expected HOST or HOST:RANKS such as a:4, got {part!r}")
        name = match[3] or match[1] + match[2]
        if any(host.name == name for host in found):
            raise ValueError(f"{name} is listed twice; give its number of ranks as {name}:{2 * ranks}")
        found.append(Host(name, int(match[4] or ranks)))
    return found


def ssh_command(text: str | None) -> list[str]:
    """Returns the program that reaches a host, and its arguments. ssh gets options that keep it from asking or hanging."""
    command = shlex.split(text) if text else ["ssh"]
    return [command[0], *_QUIET, *command[1:]] if command[0] in ("ssh", "/usr/bin/ssh") else command


class _Agent:
    """The agent of a host, at the other end of a connection."""

    def __init__(self, host: Host, ssh: list[str], directory: str) -> None:
        self.host = host
        remote = f"cd {shlex.quote(directory)} && exec {shlex.quote(sys.executable)} -m torch_accl_cli run --agent"
        # ssh gets its own process group, because this process must react to Ctrl-C itself.
        self.process = subprocess.Popen(
            [*ssh, host.name, remote],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            process_group=0,
        )
        # The keepalive thread writes to the agent as well as the thread that sends orders.
        self._speaking = threading.Lock()
        self.out, self.err = bytearray(), bytearray()
        self.first: dict[str, Any] | None = None
        self.running: set[int] = set()
        self.is_over = False

    def say(self, what: dict[str, Any]) -> None:
        """Sends an order; an empty order is a keepalive message."""
        assert self.process.stdin is not None
        # A broken pipe is ignored: the end of the agent's reports shows that it is gone.
        with self._speaking, contextlib.suppress(BrokenPipeError):
            if not self.process.stdin.closed:
                self.process.stdin.write(json.dumps(what).encode() + b"\n")
                self.process.stdin.flush()

    def end(self) -> None:
        """Closes the agent's orders, which makes the agent end its ranks."""
        with self._speaking, contextlib.suppress(BrokenPipeError):
            if self.process.stdin is not None:
                self.process.stdin.close()


def run_on(hosts: list[Host], order: Order, ssh: list[str], report: Callable[..., None]) -> int:
    """Runs an order on several hosts. `order.master` and `order.port` may be unset. Returns the exit status, like `Team.run`.

    Raises:
        Unreachable: a host has no agent.
    """
    try:
        agents = [_Agent(host, ssh, order.directory) for host in hosts]
    except OSError as error:
        raise Unreachable(f"{ssh[0]} cannot be started: {error.strerror}") from None
    return _Crowd(agents, order, report).run()


class _Crowd:
    def __init__(self, agents: list[_Agent], order: Order, report: Callable[..., None]) -> None:
        self._agents, self._order, self._send_report = agents, order, report
        self._selector = selectors.DefaultSelector()
        self._first_failed = 0
        self._leave_at: float | None = None
        self._answer_by = time.monotonic() + _ANSWER_S
        self._has_begun = False
        self._is_over = threading.Event()

    def run(self) -> int:
        try:
            with self._selector, signals() as caught:
                self._selector.register(caught, selectors.EVENT_READ, lambda: self._forward(caught.recv(64)))
                for agent in self._agents:
                    for source, take in (
                        (agent.process.stdout, self._take_report),
                        (agent.process.stderr, self._take_error),
                    ):
                        assert source is not None
                        self._selector.register(source, selectors.EVENT_READ, lambda a=agent, s=source, t=take: t(a, s))
                while not all(agent.is_over for agent in self._agents):
                    for key, _ in self._selector.select(self._patience()):
                        key.data()
                    if not self._is_in_time():
                        break
        finally:
            self._is_over.set()
            for agent in self._agents:
                agent.end()
                if agent.process.poll() is None:
                    with contextlib.suppress(subprocess.TimeoutExpired):
                        agent.process.wait(0.5)
                    agent.process.kill()
                    agent.process.wait()
        return self._first_failed

    def _report(self, **what: Any) -> None:
        try:
            self._send_report(**what)
        except BrokenPipeError:
            # The reader of the output has closed it, so the ranks are ended.
            self._send_report = lambda **what: None
            self._stop(128 + signal.SIGPIPE)

    def _patience(self) -> float | None:
        ends = [] if self._leave_at is None else [self._leave_at]
        if not self._has_begun:
            ends.append(self._answer_by)
        return max(min(ends) - time.monotonic(), 0) if ends else None

    def _is_in_time(self) -> bool:
        now = time.monotonic()
        if not self._has_begun and now >= self._answer_by:
            silent = next(agent for agent in self._agents if agent.first is None)
            raise Unreachable(f"{silent.host.name} did not answer within {_ANSWER_S:.0f} s{_said(silent)}")
        return self._leave_at is None or now < self._leave_at

    def _forward(self, numbers: bytes) -> None:
        """Sends signals on to all ranks. Signals that end programs end the run."""
        for number in numbers:
            for agent in self._agents:
                if self._has_begun:
                    agent.say({"signal": number})
                else:
                    agent.end()
            if number not in (signal.SIGUSR1, signal.SIGUSR2):
                self._report(signalled=number)
                self._first_failed = self._first_failed or 128 + number
                self._leave_by(self._order.grace_s + _END_S)

    def _stop(self, status: int) -> None:
        """Ends all ranks. The first failure determines the exit status."""
        self._first_failed = self._first_failed or status
        for agent in self._agents:
            agent.end()
        self._leave_by(self._order.grace_s + _END_S)

    def _leave_by(self, seconds: float) -> None:
        if self._leave_at is None:
            self._leave_at = time.monotonic() + seconds

    def _take_error(self, agent: _Agent, source: Any) -> None:
        data = os.read(source.fileno(), 1 << 16)
        agent.err += data
        if agent.first is not None:
            # This is output of ssh itself, or of an agent that fails.
            sys.stderr.buffer.write(data)
            sys.stderr.flush()
        if not data:
            self._selector.unregister(source)

    def _take_report(self, agent: _Agent, source: Any) -> None:
        data = os.read(source.fileno(), 1 << 16)
        agent.out += data
        while (cut := agent.out.find(b"\n")) >= 0:
            line, agent.out = agent.out[:cut], agent.out[cut + 1 :]
            self._receive(agent, bytes(line))
        if data:
            return
        self._selector.unregister(source)
        agent.is_over = True
        if not self._has_begun:
            # Messages of ssh may still arrive; they are complete when ssh ends.
            assert agent.process.stderr is not None
            agent.end()
            with contextlib.suppress(subprocess.TimeoutExpired):
                agent.process.wait(_LAST_WORDS_S)
            os.set_blocking(agent.process.stderr.fileno(), False)
            agent.err += agent.process.stderr.read() or b""
            raise Unreachable(
                f"{agent.host.name}: {_said(agent).removeprefix(': ') or 'the connection ended without an error message'}"
            )
        if agent.running:
            self._report(
                failed=f"lost the connection to {agent.host.name}, and with it {_ranks(agent.running)}",
                host=agent.host.name,
            )
            self._stop(1)

    def _receive(self, agent: _Agent, line: bytes) -> None:
        if agent.first is None:
            # A shell on that host may print text before the agent's first line.
            _, found, said = line.partition(HELLO.encode())
            if found:
                agent.first = json.loads(said)
                self._check_version(agent)
                if all(other.first is not None for other in self._agents):
                    self._begin()
            return
        try:
            what = json.loads(line)
        except ValueError:
            return
        self._report(host=agent.host.name, **what)
        if "ended" in what:
            agent.running.discard(what["ended"])
            if status := what["status"]:
                self._stop(status if status > 0 else 128 - status)
        if "failed" in what:
            self._stop(127)
        # A user or system on that host has ended the agent with a signal.
        if "signalled" in what and self._leave_at is None:
            self._stop(128 + what["signalled"])

    def _check_version(self, agent: _Agent) -> None:
        assert agent.first is not None
        if (theirs := agent.first.get("version")) != version():
            raise Unreachable(
                f"{agent.host.name} has torch-accl {theirs}, and this host has {version()}; install the same version on both"
            )

    def _begin(self) -> None:
        """Sends each agent its part of the order. All agents have answered."""
        self._has_begun = True
        # Keepalive messages are sent by a thread, because the main thread may block while it prints.
        threading.Thread(target=self._say_that_all_is_well, daemon=True).start()
        master, port = self._meeting_place()
        number, world = 0, sum(agent.host.ranks for agent in self._agents)
        for host, agent in enumerate(self._agents):
            ranks = agent.host.ranks
            agent.running = set(range(number, number + ranks))
            agent.say(
                asdict(
                    replace(self._order, ranks=ranks, first=number, world=world, host=host, master=master, port=port)
                )
            )
            number += ranks

    def _say_that_all_is_well(self) -> None:
        while not self._is_over.wait(ALIVE_S):
            for agent in self._agents:
                agent.say({})

    def _meeting_place(self) -> tuple[str, int]:
        """Returns address and port of rank 0's store for the other hosts: the address that ssh used, or the host's name."""
        hosts = [agent.first for agent in self._agents if agent.first is not None]
        first = hosts[0]
        # An address that the user gave is used unchanged: it may be the address of a tunnel.
        if self._order.master:
            return self._order.master, self._order.port or first["port"]
        candidates = [first["address"], self._agents[0].host.name.rpartition("@")[2], first["name"]]
        master = next((name for name in candidates if name and not _is_loopback(name)), "")
        # All hosts may be one machine that ssh reached over loopback, under names that only ssh knows.
        machines = {host["machine"] if _is_loopback(host["address"]) else "" for host in hosts}
        if not master or len(hosts) == 1 or (len(machines) == 1 and "" not in machines):
            master = "127.0.0.1"
        return master, self._order.port or first["port"]


def _is_loopback(name: str) -> bool:
    try:
        return ipaddress.ip_address(name).is_loopback
    except ValueError:
        return name.partition(".")[0] == "localhost"


def _said(agent: _Agent) -> str:
    """Returns the last line of the connection's error output, with a separator; an empty string if there is none."""
    lines = [line for line in agent.err.decode(errors="replace").splitlines() if line.strip()]
    return f": {lines[-1].strip()}" if lines else ""


def _ranks(numbers: set[int]) -> str:
    return ("rank " if len(numbers) == 1 else "ranks ") + ", ".join(map(str, sorted(numbers)))
