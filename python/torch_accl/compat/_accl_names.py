"""The types of ACCL's process group: ranks, designs and element types.

Owns these types and their checks. `_accl_device.py` translates them for a device.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

__all__ = ["ACCLDesign", "Compression", "DataType", "Rank", "check_integer", "check_ranks", "is_half_on_the_wire"]

_MOST_SESSION = 2**32 - 1
_MOST_PORT = 65535


class ACCLDesign(enum.Enum):
    """How the engines were built to reach one another."""

    axis3x = "axis3x"
    tcp = "tcp"
    udp = "udp"
    roce = "roce"
    cyt_tcp = "cyt_tcp"
    cyt_rdma = "cyt_rdma"


class DataType(enum.Enum):
    """Element types by the numbers that the engine uses."""

    none = 0
    int8 = 1
    float16 = 2
    float32 = 3
    float64 = 4
    int32 = 5
    int64 = 6


# Values that `compression` accepts: a map from the tensors' type to the type on the wire, or the type on the wire alone.
Compression = Mapping[DataType, DataType] | DataType | None


@dataclass(frozen=True)
class Rank:
    """The address of a rank's engine.

    Attributes:
        ip: its IP address; an emulator may also be given by host name.
        port: its port.
        session_id: the session that the caller opened on this rank's card behind XRT, for design tcp. Other designs set
            up sessions when the engines connect, and ignore this value.
        max_segment_size: bytes of a segment. It has no effect: a segment has the size of an rx buffer.
    """

    ip: str
    port: int
    session_id: int
    max_segment_size: int

    def __post_init__(self) -> None:
        if not isinstance(self.ip, str):
            raise TypeError(f"Rank: ip must be text, not {type(self.ip).__name__}")
        if not self.ip.strip() or any(mark in self.ip for mark in ",?&@/ "):
            raise ValueError(f"Rank: ip is {self.ip!r}; expected an address such as 10.10.10.1")
        check_integer("Rank: port", self.port, 1, _MOST_PORT)
        check_integer("Rank: session_id", self.session_id, 0, _MOST_SESSION)
        check_integer("Rank: max_segment_size", self.max_segment_size, 1)


def check_ranks(ranks: object) -> tuple[Rank, ...]:
    """Returns all ranks of a job in their order.

    Raises:
        TypeError: `ranks` is not a sequence of `Rank`.
        ValueError: `ranks` is empty, or two engines have the same address.
    """
    if not isinstance(ranks, Sequence) or not all(isinstance(rank, Rank) for rank in ranks):
        raise TypeError(f"ranks must be a list of Rank(ip, port, session_id, max_segment_size), not {ranks!r}")
    if not ranks:
        raise ValueError("ranks is empty; expected a Rank for each process")
    places = [(rank.ip, rank.port) for rank in ranks]
    for number, place in enumerate(places):
        if (first := places.index(place)) < number:
            raise ValueError(f"ranks {first} and {number} are both at {place[0]}:{place[1]}; an engine serves one rank")
    return tuple(ranks)


def is_half_on_the_wire(compression: object) -> bool:
    """Returns whether float32 is added and sent as float16, the only compression that exists.

    Raises:
        TypeError: `compression` has an unexpected type.
        ValueError: it asks for other element types.
    """
    if compression is None:
        return False
    pairs = {DataType.float32: compression} if isinstance(compression, DataType) else compression
    if not isinstance(pairs, Mapping) or not all(isinstance(one, DataType) for pair in pairs.items() for one in pair):
        raise TypeError(
            f"compression must be None, DataType.float16 or {{DataType.float32: DataType.float16}}, not {compression!r}"
        )
    is_half = False
    for given, carried in pairs.items():
        if (given, carried) == (DataType.float32, DataType.float16):
            is_half = True
        elif carried not in (given, DataType.none):
            raise ValueError(
                f"compression from {given.name} to {carried.name} is not supported; a device sends float32 as float16 "
                "or uncompressed"
            )
    return is_half


def check_integer(name: str, value: object, least: int, most: int | None = None) -> int:
    """Returns `value` if it is an integer within the limits.

    Raises:
        TypeError: it is not an integer.
        ValueError: it is beyond a limit.
    """
    if not isinstance(value, int) or isinstance(value, bool):
        raise TypeError(f"{name} must be an integer, not {type(value).__name__}")
    if value < least or (most is not None and value > most):
        limits = f"at least {least}" if most is None else f"from {least} to {most}"
        raise ValueError(f"{name} is {value}; expected {limits}")
    return value
