"""The request for a run, checked before any process is started or any call is measured."""

from __future__ import annotations

import argparse
import importlib.util
import math
import os
import resource
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from .._sizes import parse_sizes, show_size
from .._wrong import WrongInput, nearest
from .cases import Case, cases
from .collectives import COLLECTIVES

if TYPE_CHECKING:
    from torch_accl._native import _AlgorithmRow

__all__ = ["Request", "check_pin", "check_plot", "check_ranks", "checked_request"]

# Minimum private memory of a process that has torch loaded.
_RANK_BYTES = 48 << 20
# Buffers of a case, in multiples of its largest one: source, target, and the memory of the result check.
_BUFFERS = 3
# Operators with a factor, which the command line has no argument for.
_NOT_OFFERED = ("PREMUL_SUM",)


@dataclass(frozen=True)
class Request:
    """A run, after its arguments were checked."""

    collectives: list[str]
    # The tensors' device, as given: a type, or a type and an index.
    device: str
    sizes: list[int]
    dtypes: list[str]
    ops: list[str]
    peers: list[str]
    # Codecs that accl is also timed with, as given on the command line.
    codecs: list[str]
    # Rules of the setting `algorithm`, one per collective that has the forced algorithm.
    rules: list[str]
    try_all: bool
    engine: bool
    iterations: int | None
    seconds: float
    warmup: int
    alternations: int
    # None: pin if there is a core for each rank.
    pin: bool | None
    json: bool
    plot: Path | None
    timeout_s: float

    @property
    def is_on_accelerator(self) -> bool:
        """Whether the tensors are on a device other than the CPU."""
        return self.device != "cpu"

    def cases(self, world: int) -> list[Case]:
        """Returns the rows of the table for a number of ranks."""
        return cases(self.collectives, self.sizes, self.dtypes, self.ops, world)

    def check_memory(self, world: int, local: int) -> None:
        """Refuses cases that do not fit into this host's memory, if `local` of the `world` ranks run on this host."""
        largest = max((case.size_bytes for case in self.cases(world)), default=0)
        needed, free = largest * _BUFFERS * local, _available_memory()
        if needed > free:
            raise WrongInput(
                f"--sizes: {show_size(largest)} on {local} ranks needs {needed / 2**30:.1f} GiB of memory, and "
                f"{free / 2**30:.1f} GiB are available here"
            )


def checked_request(given: argparse.Namespace) -> Request:
    """Checks the arguments.

    Raises:
        WrongInput: an argument is wrong; the message names the first such argument.
    """
    import torch
    from torch_accl import _native

    collectives = _collectives(given.collectives)
    try:
        _native.config_rows()
    except ValueError as error:
        raise WrongInput(str(error).removeprefix("accl: ")) from None
    # The engine supports types that an older torch lacks.
    dtypes = {row["name"]: row["ops"] for row in _native.dtypes() if hasattr(torch, row["name"])}
    chosen = _each(given.dtype, dtypes, "--dtype")
    ops = _ops(given.op, chosen, dtypes, collectives)
    if given.try_all and (given.against or given.algorithm or given.codec):
        raise WrongInput(
            "--try-all compares accl's algorithms with each other: leave out --against, --algorithm and --codec"
        )
    device = _device(given.device)
    if device != "cpu" and (given.engine or given.try_all):
        raise WrongInput("--engine and --try-all time calls on host memory: leave them out, or leave out --device")
    if given.plot and given.try_all:
        raise WrongInput("--plot draws backends, and --try-all compares algorithms: leave out one of them")
    _positive(given.iterations, "--iterations")
    _positive(given.time, "--time")
    _positive(given.alternations, "--alternations")
    _positive(given.timeout, "--timeout")
    if given.warmup < 0:
        raise WrongInput(f"--warmup: expected a number of at least 0, got {given.warmup}")
    return Request(
        collectives=collectives,
        device=device,
        sizes=parse_sizes(given.sizes),
        dtypes=chosen,
        ops=ops,
        peers=_peers(given.against, device),
        codecs=_codecs(given.codec or []),
        rules=_rules(given.algorithm, collectives, _native.algorithms()),
        try_all=given.try_all,
        engine=given.engine or given.try_all,
        iterations=given.iterations,
        seconds=given.time,
        warmup=given.warmup,
        alternations=given.alternations,
        pin=given.pin,
        json=given.json,
        plot=given.plot,
        timeout_s=given.timeout,
    )


def check_plot(path: Path | None) -> None:
    """Refuses a plot that cannot be drawn or written."""
    if path is None:
        return
    if importlib.util.find_spec("matplotlib") is None:
        raise WrongInput("--plot needs matplotlib, which is not installed: pip install 'torch-accl[bench]'")
    from matplotlib.figure import Figure

    known = Figure().canvas.get_supported_filetypes()
    kind = path.suffix.removeprefix(".").lower()
    if kind not in known:
        raise WrongInput(
            f"--plot: expected a file name that ends in one of {', '.join(sorted(known))}, got {str(path)!r}"
        )
    try:
        if path.exists():
            with path.open("ab"):
                pass
        else:
            with tempfile.TemporaryFile(dir=path.parent):
                pass
    except OSError as error:
        raise WrongInput(f"--plot: {str(path)!r} cannot be written: {error.strerror}") from None


def check_ranks(ranks: int) -> None:
    """Refuses more ranks than this machine has memory, ports or processes for."""
    if ranks < 1:
        raise WrongInput(f"--ranks: expected 1 or more, got {ranks}")
    limits = [
        (
            _available_memory() // _RANK_BYTES,
            f"there is no memory for more (each takes about {show_size(_RANK_BYTES)})",
        ),
        (_ports(), "there are no ports for more (each listens on one; see ACCL_PORT_RANGE)"),
        (_processes(), "this user may not start more processes (see `ulimit -u`)"),
    ]
    most, why = min(limits)
    if ranks > most:
        raise WrongInput(f"--ranks: expected at most {most}, got {ranks}: {why}")


def check_pin(pin: bool | None, ranks: int, cores: int) -> None:
    """Refuses pinning if there are more ranks than cores."""
    if pin and ranks > cores:
        raise WrongInput(f"--pin: {ranks} ranks cannot have a core each: only {cores} cores are available here")


def _collectives(names: Sequence[str]) -> list[str]:
    chosen: list[str] = []
    for name in names or ["all_reduce"]:
        if name == "all":
            chosen += COLLECTIVES
        elif name in COLLECTIVES:
            chosen.append(name)
        else:
            raise WrongInput(f"unknown collective {name!r}{nearest(name, COLLECTIVES)}; {_expected(COLLECTIVES)}, all")
    return list(dict.fromkeys(chosen))


def _each(text: str, known: Iterable[str], argument: str) -> list[str]:
    names = [name.strip().lower() for name in text.split(",")]
    for name in names:
        if name not in known:
            raise WrongInput(f"{argument}: unknown {name!r}{nearest(name, known)}; {_expected(known)}")
    return list(dict.fromkeys(names))


def _ops(text: str, dtypes: list[str], known: dict[str, list[str]], collectives: list[str]) -> list[str]:
    offered = {op: None for ops in known.values() for op in ops if op not in _NOT_OFFERED}
    ops = _each(text, [op.lower() for op in offered], "--op")
    if not any(COLLECTIVES[name].reduces for name in collectives):
        return ops
    for dtype in dtypes:
        for op in ops:
            if op.upper() in known[dtype]:
                continue
            has = [name.lower() for name in known[dtype] if name not in _NOT_OFFERED]
            instead = f"this type supports {', '.join(has)}" if has else "this type can only be moved, not reduced"
            raise WrongInput(f"--op: {op} is not defined for {dtype}; {instead}")
    return ops


def _device(text: str) -> str:
    """Returns the name of a device. Does not use the device: ranks are forked from this process."""
    import torch

    try:
        device = torch.device(text)
    except RuntimeError:
        raise WrongInput(f"--device: unknown device {text!r}; expected cpu, or a device such as cuda or xpu") from None
    if device.type == "cpu":
        return "cpu"
    if not _accepts("accl", device.type):
        raise WrongInput(f"--device: accl does not accept {device.type} tensors; {_expected(_devices_of('accl'))}")
    return str(device)


def _devices_of(backend: str) -> list[str]:
    """Returns the types of devices whose tensors a backend accepts."""
    import torch.distributed as dist

    return list(dist.Backend.backend_capability.get(backend, ["cpu"]))


def _accepts(backend: str, device: str) -> bool:
    """Whether a backend accepts tensors of a type of device, which this machine may lack."""
    import torch.distributed as dist

    return device in dist.Backend.backend_capability.get(backend, ["cpu"])


def _peers(text: str | None, device: str) -> list[str]:
    import torch.distributed as dist

    known = [name for name in dist.Backend.backend_list if name not in ("undefined", "fake", "accl")]
    peers = _each(text, known, "--against") if text else []
    for name in peers:
        if not _accepts(name, device.partition(":")[0]):
            devices = _devices_of(name)
            hint = f"; give --device {devices[0]}" if device == "cpu" else ""
            kind = "CPU" if device == "cpu" else device
            raise WrongInput(
                f"--against: {name} does not accept {kind} tensors; it accepts tensors of {', '.join(devices)}{hint}"
            )
        if not dist.is_backend_available(name):
            raise WrongInput(f"--against: this installation of torch was built without {name}")
    return peers


def _codecs(texts: list[str]) -> list[str]:
    from torch_accl import _native

    for text in texts:
        try:
            _native.check_codec(text)
        except ValueError as error:
            raise WrongInput(f"--codec: {str(error).removeprefix('accl: ')}") from None
    return list(dict.fromkeys(texts))


def _rules(algorithm: str | None, collectives: list[str], table: list[_AlgorithmRow]) -> list[str]:
    if algorithm is None:
        return []
    names = list(dict.fromkeys(row["name"] for row in table if row["collective"] in collectives))
    if algorithm not in names:
        of = ", ".join(collectives)
        raise WrongInput(
            f"--algorithm: {of} has no algorithm {algorithm!r}{nearest(algorithm, names)}; {_expected(names)}"
        )
    having = [row["collective"] for row in table if row["name"] == algorithm and row["collective"] in collectives]
    lacking = [name for name in collectives if name not in having]
    if lacking:
        raise WrongInput(
            f"--algorithm: {', '.join(lacking)} has no algorithm {algorithm!r}; expected a collective among {', '.join(having)}"
        )
    return [f"{collective}={algorithm}" for collective in having]


def _positive(value: float | None, argument: str) -> None:
    if value is not None and not (0 < value < math.inf):
        raise WrongInput(f"{argument}: expected a number above zero, got {value}")


def _expected(names: Iterable[str]) -> str:
    return f"expected one of {', '.join(names)}"


def _available_memory() -> int:
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) << 10
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _ports() -> int:
    from torch_accl import _native

    given = next(row["value"] for row in _native.config_rows() if row["name"] == "ACCL_PORT_RANGE")
    text = given or Path("/proc/sys/net/ipv4/ip_local_port_range").read_text()
    first, last = (int(part) for part in text.replace("-", " ").split())
    return last - first + 1


def _processes() -> int:
    limits = [int(Path(f"/proc/sys/kernel/{name}").read_text()) for name in ("pid_max", "threads-max")]
    allowed, _ = resource.getrlimit(resource.RLIMIT_NPROC)
    # The divisor counts a rank's threads: its main thread, the engine's, and a peer's.
    return min([*limits, *([allowed] if allowed != resource.RLIM_INFINITY else [])]) // 4
