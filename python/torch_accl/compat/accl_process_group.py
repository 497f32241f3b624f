"""ACCL's process group by its own names: `from torch_accl.compat import accl_process_group as accl`.

A script first creates the group, which chooses its device, and then lets torch create it. "ACCL" is the backend `accl`,
because torch ignores the case of the name; nothing is registered again.

    from torch_accl.compat import accl_process_group as accl

    ranks = [accl.Rank("127.0.0.1", 5500 + rank, rank, 1024) for rank in range(world)]
    accl.create_simulate_process_group(ranks)
    dist.init_process_group("ACCL", rank=rank, world_size=world)

The choice holds for every default process group created afterwards, until another create function or `reset` is called.
`init_process_group(..., pg_options=torch_accl.Options(device=...))` takes precedence over it, and it takes precedence
over `ACCL_DEVICE`.

**In software**, rank r connects to the emulator at `ranks[r]`. If no process listens there, the rank's engine runs in
its own process (`sim`). **ACCL's limits** do not apply: tensors have any size, type, shape and number, and the host
does what a device cannot. **Rx buffers** have the device's default, 80 of 64 KiB, unless `bufsize` is given. Then they
have that size, rounded up to a multiple of 64 that holds an element of each rank. A message of 64 segments needs 64
buffers, and the device needs 16 more, so `nbufs` has effect only above that number. With fewer, a message would not
fit, or a rank that is a piece ahead would wait more often. `bufsize` cuts a sum into calls of up to 64 buffers, and
never limits a tensor.

`docs/migrating-accl.md` lists the differences from ACCL's own process group.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, overload

import torch.distributed as dist

from .. import _native
from .._register import make_whole_job_with
from ._accl_device import (
    BUFSIZE,
    HALF,
    NBUFS,
    DeviceRequest,
    Sizes,
    card_of,
    check_profiling,
    refuse_p2p,
    simulated,
    warn,
)
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

# The backend of a group of accl, as `group._get_backend(device)` returns it.
ProcessGroupACCL = _native.Backend

# The device that was created last, or no entry.
_requests: list[DeviceRequest] = []


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
    """Chooses the device of the default process group.

    Accepts both overloads of ACCL's function. `(ranks, xclbin, device_index, design)` is a card behind XRT. `(ranks,
    design)` is a card behind Coyote or, with `simulation`, an engine in software. All arguments may also be given by
    name.

    Args:
        ranks: the address of each rank's engine.
        xclbin: the bitstream of a card behind XRT.
        device_index: index of the card on the host.
        design: how the engines were built. Engines in software exist for udp, tcp and cyt_rdma; axis3x leaves the
            choice to them.
        nbufs: minimum number of rx buffers.
        bufsize: bytes of an rx buffer, see the module's text.
        compression: `{DataType.float32: DataType.float16}` or `DataType.float16` adds and sends float32 as float16.
        p2p_enabled: refused if true.
        profiling_ranks: ranks that sleep before they create the group, so that a debugger can attach to them.
        profiling_timeout: how long they sleep, in seconds.
        rsfec: has no effect but a warning: a card's build determines the error correction of its links.
        simulation: whether engines run in software.
        initialize: has no effect: a device is set up when torch creates the group.

    Raises:
        TypeError: an argument has the wrong type, or the device is described by too few or too many arguments.
        ValueError: a value is invalid or not supported; the message says which.
        FileNotFoundError: the bitstream does not exist.
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
    """Chooses engines in software for the default process group.

    Args:
        ranks: the address of each rank's emulator; if no process listens there, the engine runs in the rank's process.
        nbufs: minimum number of rx buffers.
        udp: whether the network is UDP. Without it, an engine in a process uses RDMA, and emulators use what all of
            their kinds accept.
        compression: see `create_process_group`.
        bufsize: bytes of an rx buffer, see the module's text.
        initialize: has no effect: a device is set up when torch creates the group.

    Raises:
        TypeError: an argument has the wrong type.
        ValueError: a value is invalid or not supported; the message says which.
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
    """Chooses cards behind Coyote for the default process group. See `create_process_group` for arguments and errors."""
    _check_switches(initialize=initialize)
    refuse_p2p(p2p_enabled)
    _check_design(design)
    if design is not ACCLDesign.cyt_rdma:
        raise ValueError(f"design {design.name}: a card behind Coyote supports only cyt_rdma")
    place = card_of(design, None, 0)
    _create(ranks, place, design.value, nbufs, bufsize, compression, (profiling_ranks, profiling_timeout), rsfec)


def set_compression(compression: Compression) -> None:
    """Sets how float32 is added and sent in the next group.

    Ranks agree on it when a group is created, so an existing group cannot be changed.

    Raises:
        TypeError, ValueError: see `create_process_group`.
        RuntimeError: no device was chosen, or a group exists that uses another setting.
    """
    is_half = is_half_on_the_wire(compression)
    request = _created("set_compression")
    if dist.is_initialized() and (_group_text() is not None) and is_half != (HALF in (_group_text() or "")):
        raise RuntimeError(
            "set_compression: ranks agreed on the compression when this group was created; call destroy_process_group, "
            "then set_compression, then init_process_group"
        )
    _hold(replace(request, is_half=is_half))


def get_compression() -> dict[DataType, DataType]:
    """Returns the type on the wire by the tensors' type: of the existing group, else of the next one.

    Raises:
        RuntimeError: no device was chosen.
    """
    text = _group_text() if dist.is_initialized() else None
    is_half = _created("get_compression").is_half if text is None else HALF in text
    return {DataType.float32: DataType.float16} if is_half else {}


def initialize() -> None:
    """Does nothing but check for a group with a device: devices are set up when torch creates the group.

    Raises:
        RuntimeError: there is no group with a device.
    """
    _group("initialize")


def get_local_qp(rank: int) -> list[int]:
    """Returns the value that rank `rank` must pass to `set_remote_qp` for this rank.

    The queue pairs themselves are exchanged through the group's store when torch creates it. The value holds the two
    rank numbers, so that a script that passes it to the wrong rank gets an error.

    Raises:
        TypeError, ValueError: `rank` is not another rank of the group.
        RuntimeError: there is no group with a device.
    """
    return [_other("get_local_qp", rank)[0], rank]


def set_remote_qp(rank: int, qp: Sequence[int]) -> None:
    """Checks the value that `get_local_qp` returned on rank `rank` for this rank.

    Raises:
        TypeError, ValueError: `rank` is not another rank of the group, or the value is for another pair.
        RuntimeError: there is no group with a device.
    """
    own, _ = _other("set_remote_qp", rank)
    if list(qp) != [rank, own]:
        raise ValueError(f"set_remote_qp: expected the value of get_local_qp({own}) on rank {rank}, got {list(qp)}")


def reset() -> None:
    """Forgets the chosen device: groups are created as if none had been chosen. Existing groups keep theirs."""
    _requests.clear()
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
    request = DeviceRequest(
        place,
        design,
        all_ranks,
        sizes,
        is_half_on_the_wire(compression),
        *check_profiling(*profiling, len(all_ranks)),
    )
    _check_switches(rsfec=rsfec)
    request.check()
    if rsfec:
        warn("rsfec=True has no effect: the card's build determines the error correction of its links")
    segments = {rank.max_segment_size for rank in all_ranks}
    if sizes.bytes is not None and segments != {sizes.bytes}:
        warn(
            f"ranks have segments of {', '.join(map(str, sorted(segments)))} bytes, but bufsize is {sizes.bytes}: a "
            "segment has the size of an rx buffer, so bufsize is used"
        )
    _hold(request)


def _hold(request: DeviceRequest) -> None:
    _requests[:] = [request]
    make_whole_job_with(request.make_group)


def _device_arguments(
    device: tuple[Any, ...], xclbin: str | None, index: int | None, design: ACCLDesign | None
) -> tuple[str | None, int | None, ACCLDesign]:
    """Returns the bitstream, the card and the design, from positional arguments of either overload and from names."""
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
            f"create_process_group: the second argument must be a bitstream's path or an ACCLDesign, not {path!r}"
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


def _created(function: str) -> DeviceRequest:
    if not _requests:
        raise RuntimeError(f"{function}: no device was chosen; call create_process_group first")
    return _requests[0]


def _group_text() -> str | None:
    """Returns the text of the default group's device; None if the group is not accl's or has no device."""
    group = dist.distributed_c10d._get_default_group()
    # Each device of the group may have another backend. All backends of accl in a group have the same options.
    for backend in map(group._get_backend, group._device_types):
        if isinstance(backend, ProcessGroupACCL):
            text = backend.options.settings.get("device")
            return None if text in (None, "", "none") else text
    return None


def _group(function: str) -> dist.ProcessGroup:
    if not dist.is_initialized() or _group_text() is None:
        raise RuntimeError(f'{function}: there is no group with a device; call init_process_group("ACCL") first')
    return dist.distributed_c10d._get_default_group()


def _other(function: str, rank: int) -> tuple[int, int]:
    """Returns this rank and `rank`, after checking that they differ."""
    group = _group(function)
    check_integer(f"{function}: rank", rank, 0, group.size() - 1)
    if rank == group.rank():
        raise ValueError(f"{function}: {rank} is this rank itself; queue pairs connect two different ranks")
    return group.rank(), rank
