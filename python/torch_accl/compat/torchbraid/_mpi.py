"""What scripts of torchbraid take from mpi4py's `MPI`, over torch.distributed: `from torch_accl.compat.torchbraid import MPI`.

`COMM_WORLD` makes torch's default group when it is first asked for something, of the ranks that torchrun, mpirun or srun has started, with
the backend `accl`; `MPI.Init("gloo")`, or a script's own `init_process_group`, before that makes another one.
"""

from __future__ import annotations

import operator
import socket
import time

import torch.distributed as dist

from ._communicator import (
    ANY_SOURCE,
    ANY_TAG,
    COMM_NULL,
    COMM_TYPE_SHARED,
    IN_PLACE,
    UNDEFINED,
    Comm,
    Op,
    Request,
    Status,
)
from ._world import COMM_SELF, COMM_WORLD, begin

__all__ = [
    "ANY_SOURCE",
    "ANY_TAG",
    "BAND",
    "BOOL",
    "BOR",
    "BXOR",
    "BYTE",
    "COMM_NULL",
    "COMM_SELF",
    "COMM_TYPE_SHARED",
    "COMM_WORLD",
    "DOUBLE",
    "FLOAT",
    "INT",
    "INT64_T",
    "IN_PLACE",
    "LAND",
    "LONG",
    "LOR",
    "MAX",
    "MAXLOC",
    "MIN",
    "MINLOC",
    "PROD",
    "SUM",
    "UNDEFINED",
    "Comm",
    "Finalize",
    "Get_processor_name",
    "Init",
    "Intracomm",
    "Is_finalized",
    "Is_initialized",
    "Op",
    "Request",
    "Status",
    "Wtick",
    "Wtime",
]

Intracomm = Comm

SUM = Op("SUM", operator.add, dist.ReduceOp.SUM)
PROD = Op("PROD", operator.mul, dist.ReduceOp.PRODUCT)
MAX = Op("MAX", max, dist.ReduceOp.MAX)
MIN = Op("MIN", min, dist.ReduceOp.MIN)
BAND = Op("BAND", operator.and_, dist.ReduceOp.BAND)
BOR = Op("BOR", operator.or_, dist.ReduceOp.BOR)
BXOR = Op("BXOR", operator.xor, dist.ReduceOp.BXOR)
LAND = Op("LAND", lambda a, b: bool(a) and bool(b))
LOR = Op("LOR", lambda a, b: bool(a) or bool(b))
# Of pairs of a value and where it is: of equal ones, the first place.
MAXLOC = Op("MAXLOC", lambda a, b: max(a, b, key=lambda pair: (pair[0], -pair[1])))
MINLOC = Op("MINLOC", lambda a, b: min(a, b, key=lambda pair: (pair[0], pair[1])))

# Types beside a buffer, which knows its own.
BOOL, BYTE, INT, LONG, INT64_T, FLOAT, DOUBLE = "BOOL", "BYTE", "INT", "LONG", "INT64_T", "FLOAT", "DOUBLE"

Wtime = time.perf_counter


def Wtick() -> float:
    """What `Wtime` can tell apart, in seconds."""
    return time.get_clock_info("perf_counter").resolution


def Get_processor_name() -> str:
    """The name of this host."""
    return socket.gethostname()


def Init(backend: str | None = None) -> None:
    """Makes torch's default group now, with this backend, by default `accl`. Collective; nothing where there is one or one rank alone."""
    begin(backend)


def Finalize() -> None:
    """Ends torch's groups."""
    if dist.is_initialized():
        dist.destroy_process_group()


def Is_initialized() -> bool:
    """Whether ranks may talk, which they always may."""
    return True


def Is_finalized() -> bool:
    """Whether they may no more."""
    return False
