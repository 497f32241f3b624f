"""The names that scripts of torchbraid take from mpi4py's `MPI`, over torch.distributed: `from
torch_accl.compat.torchbraid import MPI`.

On its first use, `COMM_WORLD` creates torch's default group of the ranks that torchrun, mpirun or srun started, with
the backend `accl`. To use another backend, call `MPI.Init("gloo")` or `init_process_group` before that.
"""

from __future__ import annotations

import operator
import socket
import time
from typing import NoReturn

import torch
import torch.distributed as dist

from ._buffers import BYTE, IN_PLACE, Datatype
from ._communicator import (
    ANY_SOURCE,
    ANY_TAG,
    COMM_NULL,
    COMM_TYPE_SHARED,
    PROC_NULL,
    UNDEFINED,
    Comm,
    Op,
    Request,
    Status,
)
from ._world import COMM_SELF, COMM_WORLD, begin, end, has_ended

__all__ = [
    "ANY_SOURCE",
    "ANY_TAG",
    "BAND",
    "BOOL",
    "BOR",
    "BXOR",
    "BYTE",
    "CHAR",
    "COMM_NULL",
    "COMM_SELF",
    "COMM_TYPE_SHARED",
    "COMM_WORLD",
    "COMPLEX",
    "C_BOOL",
    "C_DOUBLE_COMPLEX",
    "C_FLOAT_COMPLEX",
    "DOUBLE",
    "FLOAT",
    "INT",
    "INT8_T",
    "INT16_T",
    "INT32_T",
    "INT64_T",
    "IN_PLACE",
    "LAND",
    "LONG",
    "LONG_LONG",
    "LOR",
    "MAX",
    "MAXLOC",
    "MIN",
    "MINLOC",
    "PROC_NULL",
    "PROD",
    "SHORT",
    "SUM",
    "UINT8_T",
    "UNDEFINED",
    "Comm",
    "Datatype",
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
# Reductions of pairs of a value and its location; of equal values, the lowest location.
MAXLOC = Op("MAXLOC", lambda a, b: a if a[0] > b[0] or (a[0] == b[0] and a[1] <= b[1]) else b)
MINLOC = Op("MINLOC", lambda a, b: a if a[0] < b[0] or (a[0] == b[0] and a[1] <= b[1]) else b)

# Element types. A type passed with a buffer must be the buffer's own.
BOOL = Datatype("BOOL", torch.bool)
C_BOOL = Datatype("C_BOOL", torch.bool)
CHAR = Datatype("CHAR", torch.int8)
SHORT = Datatype("SHORT", torch.int16)
INT = Datatype("INT", torch.int32)
LONG = Datatype("LONG", torch.int64)
LONG_LONG = Datatype("LONG_LONG", torch.int64)
INT8_T = Datatype("INT8_T", torch.int8)
INT16_T = Datatype("INT16_T", torch.int16)
INT32_T = Datatype("INT32_T", torch.int32)
INT64_T = Datatype("INT64_T", torch.int64)
UINT8_T = Datatype("UINT8_T", torch.uint8)
FLOAT = Datatype("FLOAT", torch.float32)
DOUBLE = Datatype("DOUBLE", torch.float64)
COMPLEX = Datatype("COMPLEX", torch.complex64)
C_FLOAT_COMPLEX = Datatype("C_FLOAT_COMPLEX", torch.complex64)
C_DOUBLE_COMPLEX = Datatype("C_DOUBLE_COMPLEX", torch.complex128)

Wtime = time.perf_counter


def Wtick() -> float:
    """Returns the resolution of `Wtime` in seconds."""
    return time.get_clock_info("perf_counter").resolution


def Get_processor_name() -> str:
    """Returns the name of this host."""
    return socket.gethostname()


def Init(backend: str | None = None) -> None:
    """Creates torch's default group now, with this backend, by default `accl`. Collective. Does nothing if a group
    exists or the job has one rank."""
    begin(backend)


def Finalize() -> None:
    """Waits until this rank's messages are sent, and destroys torch's groups. Later uses of `COMM_WORLD` are errors,
    unless `Init` comes first."""
    end()


def Is_initialized() -> bool:
    """Returns True: communication is always possible."""
    return True


def Is_finalized() -> bool:
    """Returns whether `Finalize` has ended communication."""
    return has_ended()


def __getattr__(name: str) -> NoReturn:
    if name.startswith("__"):
        raise AttributeError(name)
    raise AttributeError(
        f"MPI of torch_accl.compat.torchbraid has no {name}; it has {', '.join(__all__)}; use torch.distributed for the rest"
    )
