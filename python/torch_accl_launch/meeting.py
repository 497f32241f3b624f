"""How rank 0 sends the port of its store to the other ranks of its job if MASTER_ADDR is unset.

Ranks of one host meet at an abstract Unix socket, which leaves nothing in a file system and closes with its process. Its name
consists of the user, the job and the number of earlier rendezvous. Rank 0 waits until it has answered all ranks, and keeps the
name as long as it runs. It thereby refuses another process of the job that takes itself for rank 0, and ranks of another
program. This module owns the protocol over that socket, and the checks of the peer. It does not use torch.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import socket
import struct
import sys
import time
from contextlib import suppress

from .launchers import LaunchError, RankInfo

__all__ = ["Meeting", "above_standard_streams", "fill_standard_streams", "port_of"]

# Seconds between two attempts to connect to a missing socket, and seconds until a message says which ranks are awaited.
_LOOK_AGAIN_S = 0.01
_SILENT_S = 30.0
# Seconds that one side waits for the other's next message.
_ANSWER_S = 5.0
_ALIKE = "start all ranks with one command, or set MASTER_ADDR and MASTER_PORT"
# Range of ports below those that the system assigns by itself.
_FIRST_PORT, _PORTS = 20_000, 10_000


def port_of(job: str, times: int) -> int:
    """Returns a port that all ranks of a job compute alike, from its name and its number of earlier rendezvous."""
    return _FIRST_PORT + int.from_bytes(_digest(f"{job}/{times}")[:8], "big") % _PORTS


def _digest(text: str) -> bytes:
    import hashlib

    return hashlib.sha256(text.encode()).digest()


def program() -> str:
    """Returns the path of the running program: two programs that a rank runs one after the other are different jobs."""
    main = sys.modules.get("__main__")
    return os.path.realpath(getattr(main, "__file__", None) or sys.argv[0] or "")


class Meeting:
    """The rendezvous of a job's ranks on this host; `deadline` is a time of `time.monotonic`."""

    def __init__(self, own: RankInfo, job: str, times: int, deadline: float) -> None:
        self._own, self._deadline = own, deadline
        # The job's name may have any length, and the system accepts 107 bytes, so it is hashed.
        self._name = f"\0torch-accl/{os.getuid()}/{_digest(job).hex()[:32]}/{times}"
        self._since = time.monotonic()
        self._has_said_so = False

    def open(self) -> socket.socket:
        """Rank 0: opens the socket, which no other process of this host can hold then. The caller keeps it open.

        Raises:
            LaunchError: another process has opened it.
        """
        listener = above_standard_streams(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
        try:
            listener.bind(self._name)
            listener.listen(max(self._own.world, 128))
        except OSError as error:
            listener.close()
            why = (
                "another process has opened it as rank 0 of this job"
                if error.errno == errno.EADDRINUSE
                else error.strerror
            )
            raise LaunchError(
                f"rank 0 cannot open the rendezvous socket of this host: {why}; set MASTER_ADDR and MASTER_PORT, or start the ranks once"
            ) from None
        return listener

    def serve_port(self, listener: socket.socket, port: int) -> None:
        """Rank 0: sends the port of its store to each of the other ranks as they connect.

        Raises:
            LaunchError: a rank has another world size or runs another program.
            TimeoutError: not all ranks have connected in time.
        """
        awaited = set(range(1, self._own.world))
        while awaited:
            with suppress(TimeoutError):
                listener.settimeout(self._patience(_ranks(awaited)))
                with above_standard_streams(listener.accept()[0]) as peer:
                    awaited -= self._answer(peer, port)
            if awaited:
                self._check_time(f"{_ranks(awaited)} of {self._own.world} did not join the rendezvous of this host")
        # A later connection comes from another job and is refused at once. The name stays taken.
        listener.shutdown(socket.SHUT_RD)

    def _answer(self, peer: socket.socket, port: int) -> set[int]:
        """Answers one connection. Returns the rank, or nothing if the peer is not of this user or breaks off."""
        if _user_of(peer) != os.getuid():
            return set()
        until = min(self._deadline, time.monotonic() + _ANSWER_S)
        try:
            asked = json.loads(_line(peer, until))
            rank = int(asked["rank"])
            wrong = self._difference(rank, asked)
            _say(peer, {"port": port} if wrong is None else {"wrong": wrong})
            # A rank that does not receive the answer asks again, so its acknowledgement is awaited.
            acknowledged = wrong is not None or _line(peer, until) == b"heard\n"
        except (OSError, ValueError, KeyError, TypeError):
            return set()
        if wrong is not None:
            raise LaunchError(wrong)
        return {rank} if acknowledged else set()

    def _difference(self, rank: int, asked: dict[str, object]) -> str | None:
        if asked["world"] != self._own.world:
            return f"rank {rank} has world size {asked['world']}, rank 0 has world size {self._own.world}; {_ALIKE}"
        if asked["program"] != program():
            return f"rank {rank} runs {asked['program']}, rank 0 runs {program()}; {_ALIKE}"
        return None

    def fetch_port(self) -> int:
        """Other ranks: returns the port of rank 0's store.

        Raises:
            LaunchError: rank 0 has another world size or program, or belongs to another user.
            TimeoutError: rank 0 has not come in time.
        """
        while True:
            # These errors mean that the socket does not exist yet, or that its queue is full.
            with (
                suppress(ConnectionError, FileNotFoundError, TimeoutError, BlockingIOError),
                above_standard_streams(socket.socket(socket.AF_UNIX)) as meeting,
            ):
                meeting.settimeout(self._patience("rank 0"))
                meeting.connect(self._name)
                if (user := _user_of(meeting)) != os.getuid():
                    raise LaunchError(
                        f"user {user} has opened the rendezvous socket of this host; set MASTER_ADDR and MASTER_PORT"
                    )
                _say(meeting, {"rank": self._own.rank, "world": self._own.world, "program": program()})
                if line := _line(meeting, min(self._deadline, time.monotonic() + _ANSWER_S)):
                    answer = json.loads(line)
                    if "wrong" in answer:
                        raise LaunchError(answer["wrong"])
                    meeting.sendall(b"heard\n")
                    return int(answer["port"])
            self._check_time("rank 0 did not join the rendezvous of this host")
            time.sleep(_LOOK_AGAIN_S)

    def _patience(self, awaited: str) -> float:
        """Returns how long to wait before the next check of the time. After `_SILENT_S`, prints once what is awaited."""
        now = time.monotonic()
        if now - self._since > _SILENT_S and not self._has_said_so:
            self._has_said_so = True
            print(
                f"[torch_accl] rank {self._own.rank} still waits for {awaited} to call init_process_group",
                file=sys.stderr,
                flush=True,
            )
        return max(min(1.0, self._deadline - now), 0.001)

    def _check_time(self, otherwise: str) -> None:
        if time.monotonic() >= self._deadline:
            waited = time.monotonic() - self._since
            raise TimeoutError(
                f"rank {self._own.rank}: {otherwise} within {waited:.0f} s; if the ranks run in containers or network namespaces of their "
                "own, set MASTER_ADDR and MASTER_PORT on all of them"
            )


def above_standard_streams(made: socket.socket) -> socket.socket:
    """Moves a socket to a descriptor above the standard streams.

    A process may be started without standard streams. What it prints must not go to this socket.
    """
    with made:
        return socket.socket(fileno=fcntl.fcntl(made.fileno(), fcntl.F_DUPFD_CLOEXEC, 3))


def fill_standard_streams() -> None:
    """Opens /dev/null for each standard stream that the process lacks, so that no other file gets its descriptor."""
    for stream in (0, 1, 2):
        try:
            os.fstat(stream)
        except OSError:
            # The system assigns the lowest free descriptor, which is `stream`.
            os.open(os.devnull, os.O_RDWR)


def _say(peer: socket.socket, what: dict[str, object]) -> None:
    peer.sendall(json.dumps(what).encode() + b"\n")


def _line(peer: socket.socket, until: float) -> bytes:
    """Returns the data up to the end of a line; nothing if the connection ends before.

    Raises:
        TimeoutError: neither has happened by `until`, a time of `time.monotonic`.
    """
    data = b""
    while not data.endswith(b"\n"):
        peer.settimeout(max(until - time.monotonic(), 0.001))
        more = peer.recv(4096)
        if not more:
            return b""
        data += more
    return data


def _user_of(peer: socket.socket) -> int:
    _, user, _ = map(
        int, struct.unpack("3i", peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i")))
    )
    return user


def _ranks(ranks: set[int]) -> str:
    listed = ", ".join(map(str, sorted(ranks)[:8])) + (" and more" if len(ranks) > 8 else "")
    return ("rank " if len(ranks) == 1 else "ranks ") + listed
