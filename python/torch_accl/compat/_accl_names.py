"""The types of ACCL's process group: ranks, designs, types of elements.

Owns what they are and how a wrong one is refused. What a device makes of them is in `_accl_device.py`.
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
    """What an engine takes elements for, by its own numbers."""

    none = 0
    int8 = 1
    float16 = 2
    float32 = 3
    float64 = 4
    int32 = 5
    int64 = 6


# What `compression` may be: the type on the wire by that of the tensors, or the former alone.
Compression = Mapping[DataType, DataType] | DataType | None


@dataclass(frozen=True)
class Rank:
    """Where the engine of a rank is reached.

    Attributes:
        ip: its address; of an emulator also the name of its host.
        port: its port.
        session_id: its session, as this rank's card behind XRT has opened it, of a tcp design. Of other designs sessions are found when
            the engines meet, and this one has no effect.
        max_segment_size: bytes of a segment. Segments have the size of an rx buffer, so this one has no effect either.
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
    """All ranks of a job, in their order.

    Raises:
        TypeError: it is no sequence of `Rank`.
        ValueError: it is empty, or two engines are at one place.
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
    """Whether float32 is added and sent as float16, which is all that there is besides no compression.

    Raises:
        TypeError: it is nothing that `compression` may be.
        ValueError: it asks for other types.
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
                f"compression from {given.name} to {carried.name} is not offered; a device sends float32 as float16 or as it is"
            )
    return is_half


def check_integer(name: str, value: object, least: int, most: int | None = None) -> int:
    """A number within its limits.

    Raises:
        TypeError: it is no integer.
        ValueError: it is beyond a limit.
    """
    if not isinstance(value, int) or isinstance(value, bool):
        raise TypeError(f"{name} must be an integer, not {type(value).__name__}")
    if value < least or (most is not None and value > most):
        limits = f"at least {least}" if most is None else f"from {least} to {most}"
        raise ValueError(f"{name} is {value}; expected {limits}")
    return value
