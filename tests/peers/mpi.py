"""Places in an MPI job for ranks that are forked from a process that has loaded torch.

MPI would treat a forked rank as a job of one process. So mpirun starts idle processes (`attach.py`). Each lends its
launcher variables and its descriptor to one rank. Owns the launch and the handover; mpirun decides the rank numbers.
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
# Limits of one message.
MOST_BYTES, MOST_DESCRIPTORS = 1 << 16, 4
LIMIT_S = 30
# By default mpirun refuses to run as root, and refuses more ranks than cores.
ROOT_MAY = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}


@dataclass
class JobProcess:
    """The launcher variables and descriptors of one process of the job."""

    variables: dict[str, str]
    descriptors: list[int]

    @property
    def rank(self) -> int:
        return int(self.variables.get("OMPI_COMM_WORLD_RANK") or self.variables["PMI_RANK"])

    def adopt(self) -> None:
        """Gives this process the place in the job."""
        os.environ.update(self.variables)
        if self.descriptors:
            os.environ["PMI_FD"] = str(self.descriptors[0])
            os.set_inheritable(self.descriptors[0], True)


@dataclass
class Job:
    """A job that mpirun has started; `processes` is sorted by rank."""

    launcher: subprocess.Popen[bytes]
    processes: list[JobProcess] = field(default_factory=list)
    connections: list[socket.socket] = field(default_factory=list)

    def end(self) -> None:
        """Ends the job. Call this after its ranks have exited."""
        for connection in self.connections:
            connection.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.launcher.wait(LIMIT_S)
        self.launcher.kill()
        self.launcher.wait()


def start(mpirun: str, world: int) -> Job:
    """Starts a job of `world` processes, and waits until each has sent its launcher variables.

    Raises:
        TimeoutError: a process did not connect or send them within `LIMIT_S` seconds.
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
                job.processes.append(_job_process(connection))
    job.processes.sort(key=lambda process: process.rank)
    return job


def _job_process(connection: socket.socket) -> JobProcess:
    room = array.array("i")
    variables, passed, _, _ = connection.recvmsg(MOST_BYTES, socket.CMSG_SPACE(MOST_DESCRIPTORS * room.itemsize))
    for _, _, data in passed:
        room.frombytes(data[: len(data) - len(data) % room.itemsize])
    return JobProcess(json.loads(variables), room.tolist())
