"""Places in an MPI job for ranks that are forked from a process that has loaded torch.

To MPI a forked rank would be a job of one. So mpirun starts processes that do nothing (`attach.py`), each of which lends what it was told,
its environment and its descriptor, to one rank. Owns the launch and the handing over; which rank is which is mpirun's word.
"""

from __future__ import annotations

import array
import contextlib
import json
import os
import socket
import subprocess
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path

ATTACH = Path(__file__).with_name("attach.py")
# What a message may have.
MOST_BYTES, MOST_DESCRIPTORS = 1 << 16, 4
LIMIT_S = 30
# mpirun refuses to run as root, and more ranks than cores, unless it is told to.
ROOT_MAY = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}


@dataclass
class Place:
    """What one process of the job was told."""

    told: dict[str, str]
    descriptors: list[int]

    @property
    def rank(self) -> int:
        return int(self.told.get("OMPI_COMM_WORLD_RANK") or self.told["PMI_RANK"])

    def adopt(self) -> None:
        """This process has the place from now on."""
        os.environ.update(self.told)
        if self.descriptors:
            os.environ["PMI_FD"] = str(self.descriptors[0])
            os.set_inheritable(self.descriptors[0], True)


@dataclass
class Job:
    """A job that mpirun has started, by rank."""

    launcher: subprocess.Popen[bytes]
    places: list[Place] = field(default_factory=list)
    connections: list[socket.socket] = field(default_factory=list)

    def end(self) -> None:
        """The ranks have ended, and so does the job."""
        for connection in self.connections:
            connection.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.launcher.wait(LIMIT_S)
        self.launcher.kill()
        self.launcher.wait()


def start(mpirun: str, world: int) -> Job:
    """Starts a job of so many processes, and waits until each has said what it was told.

    Raises:
        TimeoutError: they do not.
    """
    options = ["--oversubscribe", "--bind-to", "none"] if "openmpi" in os.path.basename(mpirun) else []
    with tempfile.TemporaryDirectory(prefix="accl-peers-mpi-") as folder:
        path = os.path.join(folder, "attach")
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
            listener.bind(path)
            listener.listen(world)
            listener.settimeout(LIMIT_S)
            command = [mpirun, *options, "-n", str(world), sys.executable, "-S", "-E", str(ATTACH), path]
            job = Job(subprocess.Popen(command, env=os.environ | ROOT_MAY, stdin=subprocess.DEVNULL))
            for _ in range(world):
                connection = listener.accept()[0]
                connection.settimeout(LIMIT_S)
                job.connections.append(connection)
                job.places.append(_place(connection))
    job.places.sort(key=lambda place: place.rank)
    return job


def _place(connection: socket.socket) -> Place:
    room = array.array("i")
    told, passed, _, _ = connection.recvmsg(MOST_BYTES, socket.CMSG_SPACE(MOST_DESCRIPTORS * room.itemsize))
    for _, _, data in passed:
        room.frombytes(data[: len(data) - len(data) % room.itemsize])
    return Place(json.loads(told), room.tolist())
