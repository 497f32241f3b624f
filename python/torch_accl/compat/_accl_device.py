"""The device that ACCL's creation arguments describe, and the groups that get it.

Owns the translation of the arguments to the text that `Options(device=...)` takes, and the check of each argument. Read
`DeviceRequest` first.
"""

from __future__ import annotations

import json
import os
import socket
import tempfile
import time
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from .. import _native
from .._register import connect
from ._accl_names import ACCLDesign, Rank, check_integer

__all__ = [
    "BUFSIZE",
    "HALF",
    "NBUFS",
    "DeviceRequest",
    "Sizes",
    "card_of",
    "check_profiling",
    "refuse_p2p",
    "simulated",
    "warn",
]


class _Default(int):
    """The default of an argument. It is compared by identity, so an equal number that the caller passes is not taken
    for it."""


NBUFS = _Default(16)
BUFSIZE = _Default(1024)
# The part of a device's text that asks for float16 sums.
HALF = "compression=fp16"

# Limits of `crates/accl-cclo/src/device/settings.rs`, which also checks every text that is made here: the default
# largest eager message in bytes, the maximum segments of a message, and the rx buffers needed beyond the segments of
# one message.
_EAGER_BYTES = 4 << 20
_MOST_SEGMENTS = 64
_MORE_RX_BUFFERS = 16
_RX_UNIT = 64
# A segment holds an element of each rank; this is the size of the largest element type.
_ELEMENT_BYTES = 8
# Timeout of the connection attempt that looks for an emulator, in seconds.
_LOOK_S = 1.0


@dataclass(frozen=True)
class Sizes:
    """Rx buffers of a device; None leaves a number to the device.

    Attributes:
        buffers: minimum number of buffers.
        bytes: minimum bytes of a buffer. The device gets a multiple of 64 that holds an element of each rank.
    """

    buffers: int | None
    bytes: int | None

    @staticmethod
    def of(nbufs: int, bufsize: int) -> Sizes:
        """Sizes from ACCL's arguments; an argument left at its default becomes None, because ACCL's 16 buffers of 1 KiB
        are slow.

        Raises:
            TypeError: an argument is not an integer.
            ValueError: an argument is less than 1.
        """
        check_integer("nbufs", nbufs, 1)
        check_integer("bufsize", bufsize, 1)
        return Sizes(None if nbufs is NBUFS else nbufs, None if bufsize is BUFSIZE else bufsize)

    def keys(self, world: int) -> list[str]:
        """Returns the settings of these buffers for the text of a device."""
        said, segments = [], _MOST_SEGMENTS
        if self.bytes is not None:
            rx_bytes = -(-max(self.bytes, world * _ELEMENT_BYTES) // _RX_UNIT) * _RX_UNIT
            # A sum is cut into pieces of the largest eager message, so that is made as large as the device takes it.
            segments = max(1, min(_MOST_SEGMENTS, _EAGER_BYTES // rx_bytes))
            said = [f"rx_bytes={rx_bytes}", f"eager={segments * rx_bytes}"]
        if self.buffers is not None and self.buffers > segments + _MORE_RX_BUFFERS:
            said.insert(0, f"rx_buffers={self.buffers}")
        return said


@dataclass(frozen=True)
class DeviceRequest:
    """The device of the next default process group.

    Attributes:
        place: `xrt://0?xclbin=FILE` or `coyote://0` for a card; None for an engine in software.
        design: how the engines were built; None if the caller left it open.
        ranks: the address of each rank's engine.
        sizes: the engines' rx buffers.
        is_half: whether float32 is added and sent as float16.
        profiling_ranks: ranks that sleep before they create the group.
        profiling_s: how long they sleep, in seconds.
    """

    place: str | None
    design: str | None
    ranks: tuple[Rank, ...]
    sizes: Sizes
    is_half: bool
    profiling_ranks: tuple[int, ...] = ()
    profiling_s: float = 0.0

    def text(self, *, listens: bool = False, ranks_file: str | None = None) -> str:
        """Returns the text of the device. An engine in software is an emulator behind a socket if `listens`, else
        `sim`."""
        place = self.place
        if place is None:
            place = "emulator://" + ",".join(f"{rank.ip}:{rank.port}" for rank in self.ranks) if listens else "sim://"
        keys = [f"design={self.design}"] if self.design else []
        keys += [f"ranks={ranks_file}"] if ranks_file else []
        keys += self.sizes.keys(len(self.ranks))
        keys += [HALF] if self.is_half else []
        return f"{place}{'&' if '?' in place else '?'}{'&'.join(keys)}" if keys else place

    def check(self) -> None:
        """Runs the device's own checks on the text.

        Raises:
            ValueError: the text is not accepted; the message says what is expected.
        """
        _native.check_option("device", self.text(listens=True))
        _native.check_option("device", self.text())

    def make_group(self, group: Any, options: _native.BackendOptions) -> _native.Backend:
        """Creates one rank's backend of the default process group, with this device.

        Raises:
            ValueError: the group's size is not the number of ranks that were given.
        """
        rank, world = group.group_rank, group.group_size
        if world != len(self.ranks):
            raise ValueError(
                f"the group has {world} ranks, but create_process_group got {len(self.ranks)}; pass one for each process"
            )
        if rank in self.profiling_ranks:
            time.sleep(self.profiling_s)
        # A device given to init_process_group itself takes precedence.
        if "device" in options.settings:
            return connect(group, options)
        with self._ranks_file() as path:
            text = self.text(listens=self.place is None and _listens(self.ranks[rank]), ranks_file=path)
            options.settings = {**options.settings, "device": text}
            return connect(group, options)

    @contextmanager
    def _ranks_file(self) -> Iterator[str | None]:
        """Provides a file with the cards' addresses, and the sessions that the caller has opened, until the group is
        created."""
        if self.place is None:
            yield None
            return
        ranks: list[dict[str, str | int]] = [{"ip": rank.ip, "port": rank.port} for rank in self.ranks]
        if self.design == ACCLDesign.tcp.value:
            # accl does not open the sessions of a card's network kernel, so they come from the caller.
            for line, rank in zip(ranks, self.ranks, strict=True):
                line["session"] = rank.session_id
        with tempfile.NamedTemporaryFile("w", prefix="accl-ranks-", suffix=".json") as file:
            json.dump({"ranks": ranks}, file)
            file.flush()
            yield file.name


def simulated(design: ACCLDesign) -> str | None:
    """Returns the `design` value for an engine in software; None leaves the design to the engine.

    Raises:
        ValueError: software engines do not have this design.
    """
    if design in (ACCLDesign.roce, ACCLDesign.cyt_tcp):
        other = ACCLDesign.cyt_rdma if design is ACCLDesign.roce else ACCLDesign.tcp
        raise ValueError(f"design {design.name}: software engines do not have this design; use {other.name}")
    return None if design is ACCLDesign.axis3x else design.value


def card_of(design: ACCLDesign, xclbin: str | None, index: int) -> str:
    """Returns the place of a card.

    Raises:
        ValueError: a card of this design is not supported, or the arguments do not fit the design.
        FileNotFoundError: the bitstream does not exist.
    """
    if design in (ACCLDesign.axis3x, ACCLDesign.roce, ACCLDesign.cyt_tcp):
        raise ValueError(f"design {design.name}: cards of this design are not supported; use udp, tcp or cyt_rdma")
    if design is ACCLDesign.cyt_rdma:
        if xclbin:
            raise ValueError("design cyt_rdma: a card behind Coyote takes no xclbin; use create_process_group_coyote")
        return f"coyote://{index}"
    if xclbin is None:
        raise ValueError(
            f"design {design.name}: a card behind XRT needs its bitstream; call create_process_group(ranks, xclbin, device_index, "
            "design), or pass simulation=True"
        )
    if not os.path.isfile(xclbin):
        raise FileNotFoundError(
            f"xclbin {xclbin!r} is not a file; without a card use create_simulate_process_group(ranks)"
        )
    if "&" in xclbin:
        raise ValueError(
            f"xclbin {xclbin!r}: expected a path without `&`, which separates the settings of a device URL; rename it"
        )
    return f"xrt://{index}?xclbin={xclbin}"


def refuse_p2p(p2p_enabled: bool) -> None:
    """Refuses peer-to-peer memory, which is not supported.

    Raises:
        ValueError: `p2p_enabled` is true.
    """
    if p2p_enabled:
        raise ValueError(
            "p2p_enabled=True: card memory that a GPU writes is not supported; omit it, and pass CPU tensors"
        )


def check_profiling(ranks: object, timeout: object, world: int) -> tuple[tuple[int, ...], float]:
    """Returns the ranks that sleep so that a debugger can attach, and the seconds they sleep.

    Raises:
        TypeError: the timeout is not a number, or `ranks` is not a list of integers.
        ValueError: the timeout or a rank is out of range.
    """
    if not isinstance(timeout, int | float) or isinstance(timeout, bool):
        raise TypeError(f"profiling_timeout must be a number of seconds, not {type(timeout).__name__}")
    if not 0 <= timeout < float("inf"):
        raise ValueError(f"profiling_timeout is {timeout}; expected a number of seconds of at least 0")
    if ranks is None:
        return (), 0.0
    if not isinstance(ranks, Sequence) or isinstance(ranks, str):
        raise TypeError(f"profiling_ranks must be a list of ranks, not {ranks!r}")
    return tuple(check_integer("profiling_ranks", rank, 0, world - 1) for rank in ranks), float(timeout)


def warn(text: str) -> None:
    """Issues a warning that points at the script's call."""
    warnings.warn(f"accl_process_group: {text}", stacklevel=4)


def _listens(rank: Rank) -> bool:
    """Returns whether a process accepts connections at an engine's address."""
    try:
        with socket.create_connection((rank.ip, rank.port), timeout=_LOOK_S):
            return True
    except OSError:
        return False
