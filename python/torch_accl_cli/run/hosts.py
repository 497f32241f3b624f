"""Ranks on several hosts: an agent at the end of an ssh connection to each, whose reports come together here.

Owns the connections, and that the first failure ends all. What an agent does is in `agent`.
"""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import shlex
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import Any

from .agent import Order, signals

__all__ = ["SSH", "Host", "Unreachable", "hosts_of", "run_on"]

# ssh asks nobody for a password, and gives a host that does not answer up.
SSH = "ssh -o BatchMode=yes -o ConnectTimeout=15"
# What an agent needs beyond the time that its ranks have to end.
_END_S = 5.0
_ANSWER_S = 30.0
_LAST_WORDS_S = 1.0


class Unreachable(Exception):
    """One sentence on a host without an agent; the exit status is 1."""


@dataclass(frozen=True)
class Host:
    """A host, and how many ranks it has."""

    name: str
    ranks: int


def hosts_of(text: str, ranks: int) -> list[Host]:
    """The hosts of `a,b:4`; those without a number have `ranks`.

    Raises:
        ValueError: one sentence on what is written otherwise.
    """
    found = []
    for part in text.split(","):
        # An address of IPv6 stands in brackets.
        name, _, number = (
            part.strip().rpartition(":") if ":" in part.rpartition("]")[2] else (part.strip(), "", str(ranks))
        )
        if not name or not number.isdecimal() or int(number) < 1:
            raise ValueError(f"{part.strip()!r} is no host, and no host with a number of ranks such as a:4")
        found.append(Host(name, int(number)))
    return found


class _Agent:
    """The agent of a host, through its connection."""

    def __init__(self, host: Host, ssh: list[str], directory: str) -> None:
        self.host = host
        remote = f"cd {shlex.quote(directory)} && exec {shlex.quote(sys.executable)} -m torch_accl_cli run --agent"
        # In a group of its own: Ctrl-C is ours to answer.
        self.process = subprocess.Popen(
            [*ssh, host.name, remote],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            process_group=0,
        )
        self.out, self.err = bytearray(), bytearray()
        self.first: dict[str, Any] | None = None
        self.running: set[int] = set()
        self.is_over = False

    def give(self, order: Order) -> None:
        assert self.process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.write(json.dumps(asdict(order)).encode() + b"\n")
            self.process.stdin.flush()

    def end(self) -> None:
        """The end of its orders is the end of its ranks."""
        with contextlib.suppress(BrokenPipeError):
            if self.process.stdin is not None:
                self.process.stdin.close()


def run_on(hosts: list[Host], order: Order, ssh: str, report: Callable[..., None]) -> int:
    """Runs an order on several hosts, where `order.master` or `order.port` may be unset. The exit status, as of `Team.run`.

    Raises:
        Unreachable: a host has no agent.
    """
    agents = [_Agent(host, shlex.split(ssh), order.directory) for host in hosts]
    return _Crowd(agents, order, report).run()


class _Crowd:
    def __init__(self, agents: list[_Agent], order: Order, report: Callable[..., None]) -> None:
        self._agents, self._order, self._report = agents, order, report
        self._selector = selectors.DefaultSelector()
        self._first_failed = 0
        self._leave_at: float | None = None
        self._answer_by = time.monotonic() + _ANSWER_S
        self._has_begun = False

    def run(self) -> int:
        try:
            with self._selector, signals() as caught:
                self._selector.register(caught, selectors.EVENT_READ, lambda: self._interrupt(caught.recv(64)[0]))
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
            for agent in self._agents:
                agent.end()
                if agent.process.poll() is None:
                    with contextlib.suppress(subprocess.TimeoutExpired):
                        agent.process.wait(0.5)
                    agent.process.kill()
                    agent.process.wait()
        return self._first_failed

    def _patience(self) -> float | None:
        ends = [self._leave_at] if self._leave_at is not None else []
        if not self._has_begun:
            ends.append(self._answer_by)
        return max(min(ends) - time.monotonic(), 0) if ends else None

    def _is_in_time(self) -> bool:
        now = time.monotonic()
        if not self._has_begun and now >= self._answer_by:
            silent = next(agent for agent in self._agents if agent.first is None)
            raise Unreachable(f"{silent.host.name} did not answer within {_ANSWER_S:.0f} s{_said(silent)}")
        return self._leave_at is None or now < self._leave_at

    def _interrupt(self, number: int) -> None:
        self._report(signalled=number)
        self._stop(128 + number)

    def _stop(self, status: int) -> None:
        """Ends all ranks; the first reason is the exit status."""
        self._first_failed = self._first_failed or status
        for agent in self._agents:
            agent.end()
        if self._leave_at is None:
            self._leave_at = time.monotonic() + self._order.grace_s + _END_S

    def _take_error(self, agent: _Agent, source: Any) -> None:
        data = os.read(source.fileno(), 1 << 16)
        agent.err += data
        if agent.first is not None:
            # What ssh itself has to say, or an agent that breaks.
            sys.stderr.buffer.write(data)
            sys.stderr.flush()
        if not data:
            self._selector.unregister(source)

    def _take_report(self, agent: _Agent, source: Any) -> None:
        data = os.read(source.fileno(), 1 << 16)
        agent.out += data
        while (cut := agent.out.find(b"\n")) >= 0:
            line, agent.out = agent.out[:cut], agent.out[cut + 1 :]
            self._hear(agent, bytes(line))
        if data:
            return
        self._selector.unregister(source)
        agent.is_over = True
        if agent.first is None:
            # What ssh has to say may still be on the way; it ends with it.
            assert agent.process.stderr is not None
            agent.end()
            with contextlib.suppress(subprocess.TimeoutExpired):
                agent.process.wait(_LAST_WORDS_S)
            os.set_blocking(agent.process.stderr.fileno(), False)
            agent.err += agent.process.stderr.read() or b""
            raise Unreachable(
                f"{agent.host.name}: {_said(agent).removeprefix(': ') or 'the connection ended without a word'}"
            )
        if agent.running:
            self._report(
                failed=f"the connection to {agent.host.name} ended, and with it {_ranks(agent.running)}",
                host=agent.host.name,
            )
            self._stop(1)

    def _hear(self, agent: _Agent, line: bytes) -> None:
        try:
            what = json.loads(line)
        except ValueError:
            # A shell of that host that greets.
            return
        if agent.first is None:
            agent.first = what
            if all(other.first is not None for other in self._agents):
                self._begin()
            return
        if "started" in what:
            agent.running.add(what["started"])
        self._report(host=agent.host.name, **what)
        if "ended" in what:
            agent.running.discard(what["ended"])
            if status := what["status"]:
                self._stop(status if status > 0 else 128 - status)
        if "failed" in what:
            self._stop(127)

    def _begin(self) -> None:
        """All agents are there: each gets its part."""
        self._has_begun = True
        first = self._agents[0]
        assert first.first is not None
        address = first.first["address"]
        is_of_this_host = address in ("", "127.0.0.1", "::1")
        master = self._order.master or (first.host.name if is_of_this_host else address)
        port = self._order.port or first.first["port"]
        number, world = 0, sum(agent.host.ranks for agent in self._agents)
        for host, agent in enumerate(self._agents):
            part = replace(
                self._order, ranks=agent.host.ranks, first=number, world=world, host=host, master=master, port=port
            )
            agent.give(part)
            number += agent.host.ranks


def _said(agent: _Agent) -> str:
    """What came on its error output instead of an agent."""
    lines = [line for line in agent.err.decode(errors="replace").splitlines() if line.strip()]
    return f": {lines[-1].strip()}" if lines else ""


def _ranks(numbers: set[int]) -> str:
    return ("rank " if len(numbers) == 1 else "ranks ") + ", ".join(map(str, sorted(numbers)))
