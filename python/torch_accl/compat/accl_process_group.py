"""ACCL's process group by its own names: `from torch_accl.compat import accl_process_group as accl`.

A script creates the group first, which says which device it gets, and has torch make it then. "ACCL" is the backend `accl`, whose
name torch takes in any case; nothing is registered again.

    from torch_accl.compat import accl_process_group as accl

    ranks = [accl.Rank("127.0.0.1", 5500 + rank, rank, 1024) for rank in range(world)]
    accl.create_simulate_process_group(ranks)
    dist.init_process_group("ACCL", rank=rank, world_size=world)

What is created holds for every group of the whole job that is made from then on, until something else is created or `reset` is
called. `init_process_group(..., pg_options=torch_accl.Options(device=...))` wins over it, and it over `ACCL_DEVICE`.

**In software**, rank r connects to the emulator at `ranks[r]`; where nobody listens, its engine is in its own process (`sim`).
**Of ACCL's limits** none is kept: tensors have any size, type, shape and number, and what a device cannot do, the host does.
**Rx buffers** are as the device takes them, 80 of 64 KiB, unless `bufsize` is given: then they have that size, rounded up to a
multiple of 64 that holds an element of each rank. Of `nbufs` there are at least so many as a message of 64 segments and 16 more need: with
fewer, a message would not fit, or a rank that is a piece ahead would wait more often. `bufsize` cuts a sum into calls of up to 64 buffers, and never limits a tensor.

`docs/migrating-accl.md` has what differs from ACCL's own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, overload

import torch
import torch.distributed as dist

from .. import _native
from .._register import make_whole_job_with
from ._accl_device import BUFSIZE, HALF, NBUFS, Sizes, Wanted, card_of, check_profiling, refuse_p2p, simulated, warn
from ._accl_names import ACCLDesign, Compression, DataType, Rank, check_integer, check_ranks, is_half_on_the_wire

__all__ = [
    "ACCLDesign",
    "DataType",
    "ProcessGroupACCL",
    "Rank",
    "create_process_group",
    "create_process_group_coyote",
    "create_simulate_process_group",
    "get_compression",
    "get_local_qp",
    "initialize",
    "reset",
    "set_compression",
    "set_remote_qp",
]

# What a group of accl does collectives with; `group._get_backend(torch.device("cpu"))` is one.
ProcessGroupACCL = _native.Backend

# What was created last.
_wanted: list[Wanted] = []


@overload
def create_process_group(
    ranks: Sequence[Rank],
    xclbin: str,
    device_index: int,
    design: ACCLDesign,
    *,
    nbufs: int = NBUFS,
    bufsize: int = BUFSIZE,
    compression: Compression = None,
    p2p_enabled: bool = False,
    profiling_ranks: Sequence[int] | None = None,
    profiling_timeout: float = 0,
    rsfec: bool = False,
    initialize: bool = True,
) -> None: ...
@overload
def create_process_group(
    ranks: Sequence[Rank],
    design: ACCLDesign,
    *,
    nbufs: int = NBUFS,
    bufsize: int = BUFSIZE,
    compression: Compression = None,
    p2p_enabled: bool = False,
    profiling_ranks: Sequence[int] | None = None,
    profiling_timeout: float = 0,
    rsfec: bool = False,
    simulation: bool = False,
    initialize: bool = True,
) -> None: ...
def create_process_group(
    ranks: Sequence[Rank],
    *device: Any,
    xclbin: str | None = None,
    device_index: int | None = None,
    design: ACCLDesign | None = None,
    nbufs: int = NBUFS,
    bufsize: int = BUFSIZE,
    compression: Compression = None,
    p2p_enabled: bool = False,
    profiling_ranks: Sequence[int] | None = None,
    profiling_timeout: float = 0,
    rsfec: bool = False,
    simulation: bool = False,
    initialize: bool = True,
) -> None:
    """Says which device the group of the whole job gets.

    Both versions of ACCL's own are taken: `(ranks, xclbin, device_index, design)` is a card behind XRT, and `(ranks, design)` one behind
    Coyote or, with `simulation`, an engine in software. Those arguments can be given by name as well.

    Args:
        ranks: where the engine of each rank is.
        xclbin: the bitstream of a card behind XRT.
        device_index: which card of the host.
        design: how the engines were built. Engines in software are of udp, tcp or cyt_rdma; axis3x leaves it to them.
        nbufs: how many rx buffers, at least.
        bufsize: bytes of each, see above.
        compression: `{DataType.float32: DataType.float16}` or `DataType.float16` adds and sends float32 as float16.
        p2p_enabled: refused if true.
        profiling_ranks: ranks that sleep before they make the group, so that a debugger can attach to them.
        profiling_timeout: for how many seconds.
        rsfec: has no effect but a warning: error correction of a link is the card's own matter.
        simulation: engines in software.
        initialize: has no effect: a device is set up when torch makes the group.

    Raises:
        TypeError: an argument is of another type, or too many or too few say what device it is.
        ValueError: what cannot be, in a sentence.
        FileNotFoundError: the bitstream is not there.
    """
    xclbin, device_index, design = _device_arguments(device, xclbin, device_index, design)
    _check_switches(simulation=simulation, initialize=initialize)
    if xclbin is not None and simulation:
        raise ValueError("simulation=True takes no xclbin: call create_process_group(ranks, design, simulation=True)")
    refuse_p2p(p2p_enabled)
    if simulation:
        place, network = None, simulated(design)
    else:
        place, network = card_of(design, xclbin, check_integer("device_index", device_index or 0, 0)), design.value
    _create(ranks, place, network, nbufs, bufsize, compression, (profiling_ranks, profiling_timeout), rsfec)


def create_simulate_process_group(
    ranks: Sequence[Rank],
    *,
    nbufs: int = NBUFS,
    udp: bool = False,
    compression: Compression = None,
    bufsize: int = BUFSIZE,
    initialize: bool = True,
) -> None:
    """Says that the group of the whole job gets engines in software.

    Args:
        ranks: where the emulator of each rank is; where nobody listens, its engine is in its process.
        nbufs: how many rx buffers, at least.
        udp: their network is UDP; else that of an engine in a process is RDMA, and of emulators it is what all kinds of them take.
        compression: as of `create_process_group`.
        bufsize: bytes of each rx buffer, see above.
        initialize: has no effect: a device is set up when torch makes the group.

    Raises:
        TypeError: an argument is of another type.
        ValueError: what cannot be, in a sentence.
    """
    _check_switches(udp=udp, initialize=initialize)
    network = simulated(ACCLDesign.udp) if udp else None
    _create(ranks, None, network, nbufs, bufsize, compression, (None, 0), False)


def create_process_group_coyote(
    ranks: Sequence[Rank],
    design: ACCLDesign,
    *,
    nbufs: int = NBUFS,
    bufsize: int = BUFSIZE,
    compression: Compression = None,
    p2p_enabled: bool = False,
    profiling_ranks: Sequence[int] | None = None,
    profiling_timeout: float = 0,
    rsfec: bool = False,
    initialize: bool = False,
) -> None:
    """Says that the group of the whole job gets cards behind Coyote. Arguments and errors are those of `create_process_group`."""
    _check_switches(initialize=initialize)
    refuse_p2p(p2p_enabled)
    _check_design(design)
    if design is not ACCLDesign.cyt_rdma:
        raise ValueError(f"design {design.name}: a card behind Coyote can be driven over cyt_rdma alone")
    place = card_of(design, None, 0)
    _create(ranks, place, design.value, nbufs, bufsize, compression, (profiling_ranks, profiling_timeout), rsfec)


def set_compression(compression: Compression) -> None:
    """Says how float32 is added and sent in the group that is made next.

    Ranks agree on it when a group is made, so that of a group which there is cannot be changed.

    Raises:
        TypeError, ValueError: as of `create_process_group`.
        RuntimeError: nothing was created, or its group is made and adds otherwise.
    """
    is_half = is_half_on_the_wire(compression)
    wanted = _created("set_compression")
    if dist.is_initialized() and (_group_text() is not None) and is_half != (HALF in (_group_text() or "")):
        raise RuntimeError(
            "set_compression: ranks have agreed on it when this group was made; call destroy_process_group, then this, then "
            "init_process_group"
        )
    _hold(replace(wanted, is_half=is_half))


def get_compression() -> dict[DataType, DataType]:
    """The type on the wire by that of the tensors: of the group that there is, else of the one that is made next.

    Raises:
        RuntimeError: nothing was created.
    """
    text = _group_text() if dist.is_initialized() else None
    is_half = _created("get_compression").is_half if text is None else HALF in text
    return {DataType.float32: DataType.float16} if is_half else {}


def initialize() -> None:
    """Nothing is left to be done: devices are set up when torch makes the group.

    Raises:
        RuntimeError: there is no group with a device.
    """
    _group("initialize")


def get_local_qp(rank: int) -> list[int]:
    """What `set_remote_qp` of that rank wants of this one.

    Queue pairs themselves are exchanged through the group's store when torch makes it; these are the names of the two ranks, by which
    a script that passes them on to the wrong one is found out.

    Raises:
        TypeError, ValueError: it is no other rank.
        RuntimeError: there is no group with a device.
    """
    return [_other("get_local_qp", rank)[0], rank]


def set_remote_qp(rank: int, qp: Sequence[int]) -> None:
    """Takes what `get_local_qp` has given that rank for this one.

    Raises:
        TypeError, ValueError: it is no other rank, or what another one was given.
        RuntimeError: there is no group with a device.
    """
    own, _ = _other("set_remote_qp", rank)
    if list(qp) != [rank, own]:
        raise ValueError(f"set_remote_qp: {list(qp)} is not what get_local_qp({own}) gives on rank {rank}")


def reset() -> None:
    """Forgets what was created: groups are made as if it had never been. Those that there are stay as they are."""
    _wanted.clear()
    make_whole_job_with(None)


def _create(
    ranks: Sequence[Rank],
    place: str | None,
    design: str | None,
    nbufs: int,
    bufsize: int,
    compression: Compression,
    profiling: tuple[Sequence[int] | None, float],
    rsfec: bool,
) -> None:
    all_ranks = check_ranks(ranks)
    sizes = Sizes.of(nbufs, bufsize)
    wanted = Wanted(
        place,
        design,
        all_ranks,
        sizes,
        is_half_on_the_wire(compression),
        *check_profiling(*profiling, len(all_ranks)),
    )
    _check_switches(rsfec=rsfec)
    wanted.check()
    if rsfec:
        warn("rsfec=True has no effect: error correction of a link is what the card was built with")
    segments = {rank.max_segment_size for rank in all_ranks}
    if sizes.bytes is not None and segments != {sizes.bytes}:
        warn(
            f"ranks have segments of {', '.join(map(str, sorted(segments)))} bytes, and bufsize is {sizes.bytes}: a segment is what an "
            "rx buffer holds, so bufsize counts"
        )
    _hold(wanted)


def _hold(wanted: Wanted) -> None:
    _wanted[:] = [wanted]
    make_whole_job_with(wanted.make_group)


def _device_arguments(
    device: tuple[Any, ...], xclbin: str | None, index: int | None, design: ACCLDesign | None
) -> tuple[str | None, int | None, ACCLDesign]:
    """The bitstream, the card and the design, from arguments in either order and by name."""
    names = ("design",) if device and isinstance(device[0], ACCLDesign) else ("xclbin", "device_index", "design")
    given: dict[str, Any] = {"xclbin": xclbin, "device_index": index, "design": design}
    if len(device) > len(names):
        raise TypeError(
            "create_process_group takes (ranks, xclbin, device_index, design) or (ranks, design), and the rest by name"
        )
    for name, value in zip(names, device, strict=False):
        if given[name] is not None:
            raise TypeError(f"create_process_group: {name} is given twice")
        given[name] = value
    path = given["xclbin"]
    if path is not None and not isinstance(path, str):
        raise TypeError(
            f"create_process_group: the second argument is a bitstream's path or an ACCLDesign, not {path!r}"
        )
    return path, given["device_index"], _check_design(given["design"])


def _check_design(design: object) -> ACCLDesign:
    if not isinstance(design, ACCLDesign):
        raise TypeError(f"design must be an ACCLDesign such as ACCLDesign.cyt_rdma, not {design!r}")
    return design


def _check_switches(**switches: object) -> None:
    for name, value in switches.items():
        if not isinstance(value, bool):
            raise TypeError(f"{name} must be True or False, not {value!r}")


def _created(function: str) -> Wanted:
    if not _wanted:
        raise RuntimeError(f"{function}: nothing was created; call create_process_group first")
    return _wanted[0]


def _group_text() -> str | None:
    """The device of the default group, if it is one of accl's and has one."""
    # The group of one rank of several that this torch knows may have no backend for the CPU.
    try:
        backend = dist.distributed_c10d._get_default_group()._get_backend(torch.device("cpu"))
    except RuntimeError:
        return None
    text = backend.options.settings.get("device") if isinstance(backend, ProcessGroupACCL) else None
    return None if text in (None, "", "none") else text


def _group(function: str) -> dist.ProcessGroup:
    if not dist.is_initialized() or _group_text() is None:
        raise RuntimeError(f'{function}: there is no group with a device; call init_process_group("ACCL") first')
    return dist.distributed_c10d._get_default_group()


def _other(function: str, rank: int) -> tuple[int, int]:
    """This rank and another."""
    group = _group(function)
    check_integer(f"{function}: rank", rank, 0, group.size() - 1)
    if rank == group.rank():
        raise ValueError(f"{function}: {rank} is this rank itself; queue pairs are between two")
    return group.rank(), rank
