"""How rank 0 tells the others of its job where its store is, when nobody has told them before: no MASTER_ADDR.

Ranks of one host meet at an abstract Unix socket, which leaves nothing in a file system and ends with its process. Its name has the user,
the job and how often the job has met so far. Rank 0 waits until all have asked. Owns what goes over that socket, and who is believed;
knows nothing of torch.
"""

from __future__ import annotations

import json
import os
import socket
import struct
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from .places import LaunchError, Place

__all__ = ["Meeting", "port_of"]

# Between two looks for a socket that is not there yet; and until somebody hears what is waited for.
_LOOK_AGAIN_S = 0.01
_SILENT_S = 30.0
_ALIKE = "start all ranks with one command, or set MASTER_ADDR and MASTER_PORT"
# Below the ports that the system gives out by itself.
_FIRST_PORT, _PORTS = 20_000, 10_000


def port_of(job: str, times: int) -> int:
    """A port that all ranks of a job choose alike, as often as it has met before."""
    import hashlib

    number = int.from_bytes(hashlib.sha256(f"{job}/{times}".encode()).digest()[:8], "big")
    return _FIRST_PORT + number % _PORTS


class Meeting:
    """The meeting of a job's ranks on this host; `deadline` is one of `time.monotonic`."""

    def __init__(self, place: Place, job: str, times: int, deadline: float) -> None:
        self._place, self._deadline = place, deadline
        self._name = f"\0torch-accl/{os.getuid()}/{job}/{times}"
        self._since = time.monotonic()
        self._has_said_so = False

    @contextmanager
    def open(self) -> Iterator[socket.socket]:
        """Rank 0's side: a socket that nobody else of this host can have opened.

        Raises:
            LaunchError: somebody has.
        """
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
            try:
                listener.bind(self._name)
            except OSError as error:
                raise LaunchError(
                    f"rank 0 cannot open the socket at which the ranks of this host meet ({error.strerror}): another process of this job "
                    "is its rank 0, too; set MASTER_ADDR and MASTER_PORT, or start the ranks once"
                ) from None
            listener.listen(max(self._place.world, 128))
            yield listener

    def tell(self, listener: socket.socket, port: int) -> None:
        """Rank 0: tells each of the others the port of its store, as it comes.

        Raises:
            LaunchError: one of them has another idea of the job.
            TimeoutError: not all have come.
        """
        awaited = set(range(1, self._place.world))
        while awaited:
            with suppress(TimeoutError):
                listener.settimeout(self._patience(f"ranks {_listed(awaited)}"))
                with listener.accept()[0] as peer:
                    peer.settimeout(self._patience(f"ranks {_listed(awaited)}"))
                    awaited -= self._answer(peer, port)
                continue
            self._check_time(f"{_ranks(awaited)} of {self._place.world} did not come to the meeting of this host")

    def _answer(self, peer: socket.socket, port: int) -> set[int]:
        """Answers one of the others; its rank, or nothing of one that is not of this job or dies in the middle of a word."""
        if _user_of(peer) != os.getuid():
            return set()
        try:
            asked = json.loads(_line(peer))
            rank, world = int(asked["rank"]), int(asked["world"])
            wrong = None
            if world != self._place.world:
                wrong = f"rank {rank} was told of {world} ranks, and rank 0 of {self._place.world}; {_ALIKE}"
            peer.sendall(json.dumps({"port": port} if wrong is None else {"wrong": wrong}).encode() + b"\n")
        except (OSError, ValueError, KeyError, TypeError):
            return set()
        if wrong is not None:
            raise LaunchError(wrong)
        return {rank}

    def ask(self) -> int:
        """The others: the port of rank 0's store.

        Raises:
            LaunchError: rank 0 has another idea of the job, or is of another user.
            TimeoutError: rank 0 has not come.
        """
        while True:
            with suppress(ConnectionError, FileNotFoundError, TimeoutError), socket.socket(socket.AF_UNIX) as meeting:
                meeting.settimeout(self._patience("rank 0"))
                meeting.connect(self._name)
                if (user := _user_of(meeting)) != os.getuid():
                    raise LaunchError(
                        f"user {user} has opened the socket at which the ranks of this host meet; set MASTER_ADDR and MASTER_PORT"
                    )
                asked = {"rank": self._place.rank, "world": self._place.world}
                meeting.sendall(json.dumps(asked).encode() + b"\n")
                if line := _line(meeting):
                    answer = json.loads(line)
                    if "wrong" in answer:
                        raise LaunchError(answer["wrong"])
                    return int(answer["port"])
            self._check_time("rank 0 did not come to the meeting of this host")
            time.sleep(_LOOK_AGAIN_S)

    def _patience(self, awaited: str) -> float:
        """How long to wait at most before the next look at the time; says once what is waited for so long."""
        now = time.monotonic()
        if now - self._since > _SILENT_S and not self._has_said_so:
            self._has_said_so = True
            print(
                f"[torch_accl] rank {self._place.rank} still waits for {awaited} to call init_process_group",
                file=sys.stderr,
                flush=True,
            )
        return max(min(1.0, self._deadline - now), 0.001)

    def _check_time(self, otherwise: str) -> None:
        if time.monotonic() >= self._deadline:
            waited = time.monotonic() - self._since
            raise TimeoutError(
                f"rank {self._place.rank}: {otherwise} within {waited:.0f} s; if the ranks run in containers or network namespaces of their "
                "own, set MASTER_ADDR and MASTER_PORT on all of them"
            )


def _line(peer: socket.socket) -> bytes:
    """What comes until the end of a line, or of the connection."""
    data = b""
    while not data.endswith(b"\n"):
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


def _listed(ranks: set[int]) -> str:
    return ", ".join(map(str, sorted(ranks)[:8])) + (" and more" if len(ranks) > 8 else "")


def _ranks(ranks: set[int]) -> str:
    return ("rank " if len(ranks) == 1 else "ranks ") + _listed(ranks)
