"""What ACCL's creation arguments say of a device, and the groups that get it.

Owns the way from the arguments to the text that `Options(device=...)` takes, and the check of each. Read `Wanted` first.
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
    "Sizes",
    "Wanted",
    "card_of",
    "check_profiling",
    "refuse_p2p",
    "simulated",
    "warn",
]


class _Default(int):
    """A number that nobody has given, told from the same one given by which object it is."""


NBUFS = _Default(16)
BUFSIZE = _Default(1024)
# In the text of a device.
HALF = "compression=fp16"

# The largest eager message that a device has by itself, what a message has of segments at most, and the rx buffers that it needs beyond
# those of a message: as `crates/accl-cclo/src/device/settings.rs` has them, whose checks see every text that is made here.
_EAGER_BYTES = 4 << 20
_MOST_SEGMENTS = 64
_MORE_RX_BUFFERS = 16
_RX_UNIT = 64
# A segment has an element of each rank, and the largest has so many bytes.
_ELEMENT_BYTES = 8
# How long somebody who listens may take to be seen.
_LOOK_S = 1.0


@dataclass(frozen=True)
class Sizes:
    """Rx buffers of a device; None leaves a number to the device.

    Attributes:
        buffers: how many, at least.
        bytes: of each, at least: a multiple of 64 that holds an element of each rank.
    """

    buffers: int | None
    bytes: int | None

    @staticmethod
    def of(nbufs: int, bufsize: int) -> Sizes:
        """As they were given, or not: what ACCL took by itself, 16 buffers of 1 KiB, is slow.

        Raises:
            TypeError, ValueError: one is no number that makes sense.
        """
        check_integer("nbufs", nbufs, 1)
        check_integer("bufsize", bufsize, 1)
        return Sizes(None if nbufs is NBUFS else nbufs, None if bufsize is BUFSIZE else bufsize)

    def keys(self, world: int) -> list[str]:
        """What the text of a device says of them."""
        said, segments = [], _MOST_SEGMENTS
        if self.bytes is not None:
            rx_bytes = -(-max(self.bytes, world * _ELEMENT_BYTES) // _RX_UNIT) * _RX_UNIT
            # Sums are cut to the largest eager message: as large as the device takes it.
            segments = max(1, min(_MOST_SEGMENTS, _EAGER_BYTES // rx_bytes))
            said = [f"rx_bytes={rx_bytes}", f"eager={segments * rx_bytes}"]
        if self.buffers is not None and self.buffers > segments + _MORE_RX_BUFFERS:
            said.insert(0, f"rx_buffers={self.buffers}")
        return said


@dataclass(frozen=True)
class Wanted:
    """The device of the next group of the whole job.

    Attributes:
        place: `xrt://0?xclbin=FILE` or `coyote://0` of a card; None of an engine in software.
        design: how engines were built, where somebody has said so.
        ranks: where the engine of each rank is.
        sizes: of its rx buffers.
        is_half: whether float32 is added and sent as float16.
        profiling_ranks: those that sleep before they make the group.
        profiling_s: how long.
    """

    place: str | None
    design: str | None
    ranks: tuple[Rank, ...]
    sizes: Sizes
    is_half: bool
    profiling_ranks: tuple[int, ...] = ()
    profiling_s: float = 0.0

    def text(self, *, listens: bool = False, ranks_file: str | None = None) -> str:
        """The text of the device. An engine in software is behind a socket if somebody listens there."""
        place = self.place
        if place is None:
            place = "emulator://" + ",".join(f"{rank.ip}:{rank.port}" for rank in self.ranks) if listens else "sim://"
        keys = [f"design={self.design}"] if self.design else []
        keys += [f"ranks={ranks_file}"] if ranks_file else []
        keys += self.sizes.keys(len(self.ranks))
        keys += [HALF] if self.is_half else []
        return f"{place}{'&' if '?' in place else '?'}{'&'.join(keys)}" if keys else place

    def check(self) -> None:
        """Lets the device's own checks see its text.

        Raises:
            ValueError: with what is expected instead.
        """
        _native.check_option("device", self.text(listens=True))
        _native.check_option("device", self.text())

    def make_group(self, group: Any, options: _native.BackendOptions) -> _native.Backend:
        """Makes one rank's backend of the group of the whole job, with this device.

        Raises:
            ValueError: there are more or fewer ranks than were named.
        """
        rank, world = group.group_rank, group.group_size
        if world != len(self.ranks):
            raise ValueError(f"the group has {world} ranks, and create_process_group was given {len(self.ranks)}")
        if rank in self.profiling_ranks:
            time.sleep(self.profiling_s)
        # What is given to init_process_group itself wins.
        if "device" in options.settings:
            return connect(group, options)
        with self._ranks_file() as path:
            text = self.text(listens=self.place is None and _listens(self.ranks[rank]), ranks_file=path)
            options.settings = {**options.settings, "device": text}
            return connect(group, options)

    @contextmanager
    def _ranks_file(self) -> Iterator[str | None]:
        """A file with the addresses of cards, and with sessions that somebody else has opened, while their group is made."""
        if self.place is None:
            yield None
            return
        ranks: list[dict[str, str | int]] = [{"ip": rank.ip, "port": rank.port} for rank in self.ranks]
        if self.design == ACCLDesign.tcp.value:
            # Nobody here opens those of a card's network kernel.
            for line, rank in zip(ranks, self.ranks, strict=True):
                line["session"] = rank.session_id
        with tempfile.NamedTemporaryFile("w", prefix="accl-ranks-", suffix=".json") as file:
            json.dump({"ranks": ranks}, file)
            file.flush()
            yield file.name


def simulated(design: ACCLDesign) -> str | None:
    """What the text of an engine in software says of a design.

    Raises:
        ValueError: there are no such engines in software.
    """
    if design in (ACCLDesign.roce, ACCLDesign.cyt_tcp):
        other = ACCLDesign.cyt_rdma if design is ACCLDesign.roce else ACCLDesign.tcp
        raise ValueError(f"design {design.name}: there is no such engine in software; take {other.name}")
    return None if design is ACCLDesign.axis3x else design.value


def card_of(design: ACCLDesign, xclbin: str | None, index: int) -> str:
    """The place of a card.

    Raises:
        ValueError: it cannot be driven.
        FileNotFoundError: its bitstream is not there.
    """
    if design in (ACCLDesign.axis3x, ACCLDesign.roce, ACCLDesign.cyt_tcp):
        raise ValueError(f"design {design.name}: no card of it can be driven; take udp, tcp or cyt_rdma")
    if design is ACCLDesign.cyt_rdma:
        if xclbin:
            raise ValueError("design cyt_rdma: a card behind Coyote takes no xclbin; use create_process_group_coyote")
        return f"coyote://{index}"
    if xclbin is None:
        raise ValueError(
            f"design {design.name}: a card behind XRT needs its bitstream; call create_process_group(ranks, xclbin, device_index, "
            "design), or with simulation=True"
        )
    if not os.path.isfile(xclbin):
        raise FileNotFoundError(
            f"xclbin {xclbin!r} is no file; without a card use create_simulate_process_group(ranks)"
        )
    if "&" in xclbin:
        raise ValueError(f"xclbin {xclbin!r} has a `&` in its path, which ends it in the text of a device; rename it")
    return f"xrt://{index}?xclbin={xclbin}"


def refuse_p2p(p2p_enabled: bool) -> None:
    """Peer-to-peer is not offered.

    Raises:
        ValueError: it is asked for.
    """
    if p2p_enabled:
        raise ValueError(
            "p2p_enabled=True: memory of a card that a GPU writes is not offered; leave it out, and give CPU tensors"
        )


def check_profiling(ranks: object, timeout: object, world: int) -> tuple[tuple[int, ...], float]:
    """The ranks that sleep for somebody to attach to them, and how long.

    Raises:
        TypeError, ValueError: an argument is not what is expected.
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
    """A warning of the function that a script called."""
    warnings.warn(f"accl_process_group: {text}", stacklevel=4)


def _listens(rank: Rank) -> bool:
    """Whether there is somebody at the place of an engine."""
    try:
        with socket.create_connection((rank.ip, rank.port), timeout=_LOOK_S):
            return True
    except OSError:
        return False
