"""Running libraries: their ranks are processes that follow orders of this driver, one library at a time.

All ranks are started once. Idle libraries are stopped with SIGSTOP, worker threads included, so that they take no time
from the active one. Owns processes, sockets, boards and their end; `measure.py` decides what is measured.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from . import board
from .libraries import BY_NAME, Library

# Loading torch on a busy machine takes a while.
START_S = 120.0
ANSWER_S = 120.0
END_S = 5.0


class Lost(Exception):
    """A library that has failed; the clause gives the reason."""


class Refused(Exception):
    """A library that does not offer the requested call."""


@dataclass(frozen=True)
class Host:
    """A host for ranks: a prefix of their command, and additions to their environment."""

    prefix: tuple[str, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    # Cores for a rank and all its threads; if empty, ranks pin themselves.
    cores: tuple[int, ...] = ()

    @property
    def is_apart(self) -> bool:
        """Whether the host differs from the driver's."""
        return bool(self.prefix or self.environment)

    def command(self, program: Iterable[str]) -> list[str]:
        """Returns the command of a rank. Variables are set by `env`, since a launcher starts the ranks of all hosts in
        one environment."""
        more = ["env", *(f"{name}={value}" for name, value in self.environment.items())] if self.environment else []
        bound = ["taskset", "--cpu-list", ",".join(map(str, self.cores))] if self.cores else []
        return [*self.prefix, *more, *bound, *program]


# The driver's own host.
HERE = (Host(),)


class Rank:
    """The driver's connection to one rank."""

    def __init__(self, stream: socket.socket) -> None:
        self.stream = stream
        self.received = b""
        self.pid = 0

    def line(self, deadline: float) -> str:
        """Returns the next line from the rank."""
        while b"\n" not in self.received:
            self.stream.settimeout(max(deadline - time.monotonic(), 0.001))
            try:
                more = self.stream.recv(4096)
            except TimeoutError:
                raise Lost("a rank does not answer") from None
            except OSError as why:
                raise Lost(f"a rank does not answer: {why}") from None
            if not more:
                raise Lost("a rank has exited")
            self.received += more
        line, self.received = self.received.split(b"\n", 1)
        return line.decode(errors="replace").strip()


class Job:
    """The ranks of one library."""

    def __init__(
        self, library: Library, ranks: int, pinned: bool, names: dict[str, str], hosts: Sequence[Host] = HERE
    ) -> None:
        self.library, self.ranks, self.pinned, self.hosts = library, ranks, pinned, hosts
        self.folder = Path(tempfile.mkdtemp(prefix=f"accl-peers-{library.name}-", dir=shared_memory()))
        self.errors = (self.folder / "errors").open("w+")
        self.board: mmap.mmap = board.create(self.folder / "board")
        self.processes: list[subprocess.Popen[bytes]] = []
        self.members: list[Rank] = []
        self.version = ""
        self.listener = socket.socket(socket.AF_UNIX)
        self.listener.bind(str(self.folder / "socket"))
        self.listener.listen(ranks)
        for command, environment in self.commands(names):
            try:
                process = subprocess.Popen(
                    command,
                    env=os.environ | environment,
                    stdin=subprocess.DEVNULL,
                    stdout=self.errors,
                    stderr=self.errors,
                    start_new_session=True,
                )
            except OSError as why:
                raise Lost(f"`{command[0]}` cannot be started: {why}") from None
            self.processes.append(process)

    def commands(self, names: dict[str, str]) -> Iterator[tuple[list[str], dict[str, str]]]:
        """Yields commands to start, with additions to the environment."""
        one, ranks = self.library, self.ranks
        cores = sorted(os.sched_getaffinity(0))

        def host_of(rank: int) -> Host:
            # Neighbouring ranks share a host, as launchers place them.
            return self.hosts[rank * len(self.hosts) // ranks]

        def filled(words: Iterable[str], rank: int) -> list[str]:
            share = max(len(host_of(rank).cores), 1)
            return [word.format(**names, rank=rank, ranks=ranks, share=share) for word in words]

        def program(rank: int) -> list[str]:
            host = host_of(rank)
            core = cores[rank] if self.pinned and not host.cores else -1
            place = [str(self.folder), str(rank), str(ranks), str(core)]
            return host.command([*filled(one.program, rank), *place, *filled(one.after, rank)])

        def environment(rank: int) -> dict[str, str]:
            return dict(zip(one.environment, filled(one.environment.values(), rank)))

        if not one.launcher:
            for rank in range(ranks):
                yield program(rank), environment(rank)
            return
        command = filled([*one.launcher, *([] if self.pinned else one.crowded)], 0)
        for rank in range(ranks):
            command += [":"] * (rank > 0) + ["-n", "1", *program(rank)]
        yield command, environment(0)

    def gather(self, deadline: float) -> None:
        """Waits until all ranks have connected and are ready."""
        found: dict[int, Rank] = {}
        while len(found) < self.ranks:
            self.listener.settimeout(0.2)
            try:
                stream, _ = self.listener.accept()
            except TimeoutError:
                if any(process.poll() is not None for process in self.processes):
                    raise Lost("a rank exited during its start") from None
                if time.monotonic() > deadline:
                    raise Lost("its ranks did not connect in time") from None
                continue
            rank = Rank(stream)
            _, number, pid = rank.line(deadline).split()
            rank.pid = int(pid)
            found[int(number)] = rank
            self.members = list(found.values())
        self.members = [found[number] for number in range(self.ranks)]
        for rank in self.members:
            word, _, rest = rank.line(deadline).partition(" ")
            if word != "ready":
                raise Lost(rest)
            self.version = rest

    def signal(self, number: int) -> None:
        """Sends a signal to every rank."""
        for rank in self.members:
            with contextlib.suppress(ProcessLookupError):
                os.kill(rank.pid, number)

    def order(self, text: str) -> None:
        """Has all ranks of this job carry out an order, while all others are stopped."""
        self.signal(signal.SIGCONT)
        try:
            for rank in self.members:
                rank.stream.sendall(text.encode() + b"\n")
            deadline = time.monotonic() + ANSWER_S
            answers = [rank.line(deadline).partition(" ") for rank in self.members]
        except OSError as why:
            raise Lost(f"a rank cannot be reached: {why}") from None
        finally:
            self.signal(signal.SIGSTOP)
        for word, _, rest in answers:
            if word == "wrong":
                raise Lost(rest)
        if any(word == "none" for word, _, _ in answers):
            raise Refused

    def spans(self, batches: int) -> list[list[board.Span]]:
        """Returns, by rank, the spans that the last order left on the board."""
        return [board.spans(self.board, rank, batches) for rank in range(self.ranks)]

    def last_words(self) -> str:
        """Returns the last line of the ranks' output."""
        self.errors.flush()
        self.errors.seek(0)
        lines = [line.strip() for line in self.errors.read().splitlines() if line.strip("-= \n")]
        return lines[-1] if lines else ""

    def close(self) -> None:
        """Ends all processes and removes their shared files."""
        self.signal(signal.SIGCONT)
        for rank in self.members:
            with contextlib.suppress(OSError):
                rank.stream.sendall(b"quit\n")
        deadline = time.monotonic() + END_S
        for process in self.processes:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(deadline - time.monotonic(), 0.01))
        self.signal(signal.SIGKILL)
        for process in self.processes:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        for rank in self.members:
            rank.stream.close()
        self.listener.close()
        self.errors.close()
        # DeepSpeed names its shared memory after the folder and does not remove it.
        for left in Path("/dev/shm").glob(f"*{self.folder.name}*"):
            if left != self.folder:
                left.unlink(missing_ok=True)
        shutil.rmtree(self.folder, ignore_errors=True)


def shared_memory() -> str | None:
    """Returns a folder in memory; None for the usual place of temporary files."""
    return "/dev/shm" if os.access("/dev/shm", os.W_OK) else None


class JobSet:
    """Jobs with the same number of ranks on the same hosts. As a context manager, it leaves no process behind."""

    def __init__(self, ranks: int, say: Callable[[str], None], hosts: Sequence[Host] = HERE) -> None:
        self.ranks, self.say, self.hosts = ranks, say, hosts
        # Either each rank has a core of its own, or none is pinned.
        self.pinned = ranks <= len(os.sched_getaffinity(0))
        self.jobs: dict[str, Job] = {}
        are_apart = len(hosts) > 1 and any(host.is_apart for host in hosts)
        self.words = f"{ranks} ranks" + (f" on {len(hosts)} hosts" if are_apart else "")
        # Contenders that are not running, with the reason.
        self.missing: dict[str, str] = {}
        self.versions: dict[str, str] = {}

    def __enter__(self) -> JobSet:
        return self

    def __exit__(self, *_: object) -> None:
        for job in self.jobs.values():
            job.close()
        self.jobs.clear()

    def start(self, wanted: Iterable[str], names: dict[str, str]) -> None:
        """Starts the libraries that are not running yet, one after the other; the others are stopped meanwhile."""
        for name in wanted:
            if name in self.jobs or name in self.missing:
                continue
            library = BY_NAME[name]
            self.say(f"start {library.title}, {self.words}")
            try:
                self.jobs[name] = job = Job(library, self.ranks, self.pinned, names, self.hosts)
                job.gather(time.monotonic() + START_S)
                job.signal(signal.SIGSTOP)
                self.versions[name] = job.version
            except Lost as why:
                self.drop(name, str(why))

    def drop(self, name: str, why: str) -> None:
        """Ends a library that has failed."""
        job = self.jobs.pop(name, None)
        if job:
            words = job.last_words()
            why += f" (`{words}`)" if words else ""
            job.close()
        self.say(f"{BY_NAME[name].title} is excluded: {why}")
        self.missing[name] = why
