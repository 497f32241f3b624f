"""How rank 0 tells the others of its job where its store is, when nobody has told them before: no MASTER_ADDR.

Ranks of one host meet at an abstract Unix socket, which leaves nothing in a file system and ends with its process. Its name has the user,
the job and how often the job has met so far. Rank 0 waits until all have been told, and keeps the name for as long as it runs: another
process of the job that takes itself for rank 0 is refused, and so is a rank of another program. Owns what goes over that socket, and who is
believed; knows nothing of torch.
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

from .places import LaunchError, Place

__all__ = ["Meeting", "above_standard_streams", "fill_standard_streams", "port_of"]

# Between two looks for a socket that is not there yet; and until somebody hears what is waited for.
_LOOK_AGAIN_S = 0.01
_SILENT_S = 30.0
# How long one side waits for the other's next word.
_ANSWER_S = 5.0
_ALIKE = "start all ranks with one command, or set MASTER_ADDR and MASTER_PORT"
# Below the ports that the system gives out by itself.
_FIRST_PORT, _PORTS = 20_000, 10_000


def port_of(job: str, times: int) -> int:
    """A port that all ranks of a job choose alike, as often as it has met before."""
    return _FIRST_PORT + int.from_bytes(_digest(f"{job}/{times}")[:8], "big") % _PORTS


def _digest(text: str) -> bytes:
    import hashlib

    return hashlib.sha256(text.encode()).digest()


def program() -> str:
    """What this process runs: two programs that one rank runs after the other are not of one job."""
    main = sys.modules.get("__main__")
    return os.path.realpath(getattr(main, "__file__", None) or sys.argv[0] or "")


class Meeting:
    """The meeting of a job's ranks on this host; `deadline` is one of `time.monotonic`."""

    def __init__(self, place: Place, job: str, times: int, deadline: float) -> None:
        self._place, self._deadline = place, deadline
        # Of any length; the system takes 107 bytes.
        self._name = f"\0torch-accl/{os.getuid()}/{_digest(job).hex()[:32]}/{times}"
        self._since = time.monotonic()
        self._has_said_so = False

    def open(self) -> socket.socket:
        """Rank 0's side: a socket that nobody else of this host can have opened; it is to stay open.

        Raises:
            LaunchError: somebody has.
        """
        listener = above_standard_streams(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
        try:
            listener.bind(self._name)
            listener.listen(max(self._place.world, 128))
        except OSError as error:
            listener.close()
            why = (
                "another process has, which takes itself for rank 0 of this job"
                if error.errno == errno.EADDRINUSE
                else error.strerror
            )
            raise LaunchError(
                f"rank 0 cannot open the socket at which the ranks of this host meet: {why}; set MASTER_ADDR and MASTER_PORT, or start the ranks once"
            ) from None
        return listener

    def tell(self, listener: socket.socket, port: int) -> None:
        """Rank 0: tells each of the others the port of its store, as it comes.

        Raises:
            LaunchError: one of them has another idea of the job.
            TimeoutError: not all have come.
        """
        awaited = set(range(1, self._place.world))
        while awaited:
            with suppress(TimeoutError):
                listener.settimeout(self._patience(_ranks(awaited)))
                with above_standard_streams(listener.accept()[0]) as peer:
                    awaited -= self._answer(peer, port)
            if awaited:
                self._check_time(f"{_ranks(awaited)} of {self._place.world} did not come to the meeting of this host")
        # Who comes now is of another job, and refused at once; the name stays ours.
        listener.shutdown(socket.SHUT_RD)

    def _answer(self, peer: socket.socket, port: int) -> set[int]:
        """Answers one of the others; its rank, or nothing of one that is not of this job or dies in the middle of a word."""
        if _user_of(peer) != os.getuid():
            return set()
        until = min(self._deadline, time.monotonic() + _ANSWER_S)
        try:
            asked = json.loads(_line(peer, until))
            rank = int(asked["rank"])
            wrong = self._difference(rank, asked)
            _say(peer, {"port": port} if wrong is None else {"wrong": wrong})
            # What it has not heard it asks again.
            heard = wrong is not None or _line(peer, until) == b"heard\n"
        except (OSError, ValueError, KeyError, TypeError):
            return set()
        if wrong is not None:
            raise LaunchError(wrong)
        return {rank} if heard else set()

    def _difference(self, rank: int, asked: dict[str, object]) -> str | None:
        if asked["world"] != self._place.world:
            return f"rank {rank} was told of {asked['world']} ranks, and rank 0 of {self._place.world}; {_ALIKE}"
        if asked["program"] != program():
            return f"rank {rank} runs {asked['program']}, and rank 0 {program()}; {_ALIKE}"
        return None

    def ask(self) -> int:
        """The others: the port of rank 0's store.

        Raises:
            LaunchError: rank 0 has another idea of the job, or is of another user.
            TimeoutError: rank 0 has not come.
        """
        while True:
            # Nobody is there yet; or so many come at once that there is no room in the queue.
            with (
                suppress(ConnectionError, FileNotFoundError, TimeoutError, BlockingIOError),
                above_standard_streams(socket.socket(socket.AF_UNIX)) as meeting,
            ):
                meeting.settimeout(self._patience("rank 0"))
                meeting.connect(self._name)
                if (user := _user_of(meeting)) != os.getuid():
                    raise LaunchError(
                        f"user {user} has opened the socket at which the ranks of this host meet; set MASTER_ADDR and MASTER_PORT"
                    )
                _say(meeting, {"rank": self._place.rank, "world": self._place.world, "program": program()})
                if line := _line(meeting, min(self._deadline, time.monotonic() + _ANSWER_S)):
                    answer = json.loads(line)
                    if "wrong" in answer:
                        raise LaunchError(answer["wrong"])
                    meeting.sendall(b"heard\n")
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


def above_standard_streams(made: socket.socket) -> socket.socket:
    """The socket at a number that is none of a standard stream: in a process that was started without them, what it prints must not go there."""
    with made:
        return socket.socket(fileno=fcntl.fcntl(made.fileno(), fcntl.F_DUPFD_CLOEXEC, 3))


def fill_standard_streams() -> None:
    """Opens /dev/null for each standard stream that the process was started without, so that no other file gets its number."""
    for stream in (0, 1, 2):
        try:
            os.fstat(stream)
        except OSError:
            # The system gives the lowest free number, which is this one.
            os.open(os.devnull, os.O_RDWR)


def _say(peer: socket.socket, what: dict[str, object]) -> None:
    peer.sendall(json.dumps(what).encode() + b"\n")


def _line(peer: socket.socket, until: float) -> bytes:
    """What comes until the end of a line, or of the connection.

    Raises:
        TimeoutError: neither has come until then.
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
