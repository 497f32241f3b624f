"""Options of a group: the settings of `docs/environment.md` as arguments, plus the group's timeout."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

from . import _native
from ._transports import announce_transports

__all__ = ["Options"]


class Options(_native.BackendOptions):
    """Settings of one group, given as `init_process_group("accl", pg_options=torch_accl.Options(...))`.

    Each argument has the name and the meaning of an `ACCL_*` variable (`accl config` lists them) and overrides it. The
    environment sets the others. Sizes are bytes or text such as `"64KiB"`. Lists can be text with commas.

    Args:
        timeout: maximum duration of a call, a `datetime.timedelta`; None takes the timeout given to `init_process_group` or `new_group`. It has no variable.
        log: log level for standard error: off, warn, info, debug or trace.
        socket_ifname: prefixes of network interfaces that peers are offered; `=` before them means exact names, `^` all but these.
        port_range: two ports, such as `(20000, 20100)` or `"20000-20100"`; the process listens on one port of this range.
        transports: transports in the order in which they are tried, such as `["shm", "tcp"]`; includes registered ones.
        host_id: identity of the host, any text without blanks; ranks with different ones count as on different hosts.
        ring_bytes: maximum shared memory per direction between two processes of a host, a size from 16KiB to 64MiB.
        shm_limit: maximum shared memory that a process creates for its links, a size from 0 to 1TiB.
        gpu_pinned: maximum pinned host memory that a process keeps for later calls on tensors of accelerators, a size from 0 to 1TiB.
        gpu_route: way of collectives on GPU tensors inside a host: `"peer"`, `"staged"`, or `"auto"`.
        gpu_window: maximum bytes of a collective for which ranks use device memory that others read, a size from 0 to 1TiB.
        segment_bytes: maximum payload of a frame, a size from 1KiB to 4MiB.
        eager_bytes: maximum bytes sent to a peer before it issues the matching call, 128 more per message, a size from 0 to 64MiB.
        spin_us: how long a waiting thread spins, `"auto"` or microseconds from 0 to 1000000.
        worker_count: worker threads that run parts of large calls, in addition to the caller, `"auto"` or a number from 0 to 63.
        worker_affinity: `"auto"`, or CPUs such as `"0-3,28-31"`, one per worker thread of the host, in the order of its ranks.
        algorithm: rules that replace the choice, such as `"all_reduce=ring"` or `["all_gather=ring:64KiB-1MiB"]`.
        deterministic: whether the choice of algorithm depends only on collective, size, dtype and world.
        calibration: source of the constants by which algorithms are chosen: `"auto"`, `"off"` or the path of a file, with a `/`.
        timing: whether every call records its duration.
        profile_names: names of calls and waits in torch's profiler: `"accl"`, or as torch-ccl did `"ccl"` or `"pg"`.
        compression: codec such as `"maxmin:4"` (`ACCL_CODEC`), for calls of `torch_accl.compression` that name no codec.
        compressed_calls: `"hooks"`, or `"all"`, which compresses ordinary calls with `compression`, too.
        device: engine that runs collectives of the default group: `"none"`, `"sim"`, `"emulator://host:5500"`, a card; sub-groups have none.
        sidestep: collectives to run elsewhere: `"all_gather=host"` on the host despite a device, `"all_reduce=mpi"` in the MPI library of the job.
        scope: old name of `compressed_calls`; it causes a DeprecationWarning.

    Raises:
        ValueError: a value is not accepted; the message lists the accepted ones. Also `scope` together with `compressed_calls`.
        TypeError: an argument is unknown, or `timeout` is not a timedelta.
    """

    def __init__(
        self,
        *,
        timeout: timedelta | None = None,
        log: str | None = None,
        socket_ifname: str | None = None,
        port_range: str | Sequence[int] | None = None,
        transports: str | Sequence[str] | None = None,
        host_id: str | None = None,
        ring_bytes: int | str | None = None,
        shm_limit: int | str | None = None,
        gpu_pinned: int | str | None = None,
        gpu_route: str | None = None,
        gpu_window: int | str | None = None,
        segment_bytes: int | str | None = None,
        eager_bytes: int | str | None = None,
        spin_us: int | str | None = None,
        worker_count: int | str | None = None,
        worker_affinity: str | Sequence[int] | None = None,
        algorithm: str | Sequence[str] | None = None,
        deterministic: bool | None = None,
        calibration: str | None = None,
        timing: bool | None = None,
        profile_names: str | None = None,
        compression: str | None = None,
        compressed_calls: str | None = None,
        device: str | None = None,
        sidestep: str | Sequence[str] | None = None,
        scope: str | None = None,
    ) -> None:
        super().__init__()
        if scope is not None:
            if compressed_calls is not None:
                raise ValueError("scope is the old name of compressed_calls; give one of them")
            warnings.warn(
                "Options(scope=...) is deprecated; use Options(compressed_calls=...)", DeprecationWarning, stacklevel=2
            )
            compressed_calls = scope
        given: dict[str, Any] = {
            "log": log,
            "socket_ifname": socket_ifname,
            "port_range": _port_range(port_range),
            "transports": transports,
            "host_id": host_id,
            "ring_bytes": ring_bytes,
            "shm_limit": shm_limit,
            "gpu_pinned": gpu_pinned,
            "gpu_route": gpu_route,
            "gpu_window": gpu_window,
            "segment_bytes": segment_bytes,
            "eager_bytes": eager_bytes,
            "spin_us": spin_us,
            "worker_count": worker_count,
            "worker_affinity": worker_affinity,
            "algorithm": algorithm,
            "deterministic": deterministic,
            "calibration": calibration,
            "timing": timing,
            "profile_names": profile_names,
            "compression": _codec(compression),
            "compressed_calls": compressed_calls,
            "device": device,
            "sidestep": sidestep,
        }
        settings = {name: _text(value) for name, value in given.items() if value is not None}
        for name, text in settings.items():
            if name == "transports":
                # The transport of a package is loaded only with the first group, because loading may involve all ranks.
                announce_transports(text)
            _native.check_option(name, text)
        self.settings = settings
        self.timeout = timeout

    @property
    def timeout(self) -> timedelta | None:
        """The group's timeout; None takes the one given to `init_process_group` or `new_group`."""
        return self._own_timeout

    @timeout.setter
    def timeout(self, timeout: timedelta | None) -> None:
        if timeout is not None and not isinstance(timeout, timedelta):
            raise TypeError(f"timeout must be a datetime.timedelta, not {type(timeout).__name__}")
        self._own_timeout = timeout
        if timeout is not None:
            self._timeout = timeout

    def __copy__(self) -> Options:
        return self.__deepcopy__({})

    def __deepcopy__(self, memo: dict[int, Any]) -> Options:
        make, state = self.__reduce__()
        return make(*state)

    def __reduce__(self) -> tuple[Callable[..., Options], tuple[Any, ...]]:
        return _restored, (
            self._own_timeout,
            {name: getattr(self, name) for name in _STATE if hasattr(self, name)},
        )

    def __repr__(self) -> str:
        given = [f"{name}={value!r}" for name, value in sorted(self.settings.items())]
        if self._own_timeout is not None:
            given.insert(0, f"timeout={self._own_timeout!r}")
        return f"torch_accl.Options({', '.join(given)})"


# Attributes that torch's class and the native class store. Not every version of torch has the last one.
_STATE = ("settings", "_timeout", "global_ranks_in_group", "group_name", "enable_reconfigure")


def _restored(timeout: timedelta | None, state: dict[str, Any]) -> Options:
    options = Options(timeout=timeout)
    for name, value in state.items():
        setattr(options, name, value)
    return options


def _codec(value: object) -> str | None:
    if value is None:
        return None
    if not isinstance(value, str):
        raise ValueError(f"compression: expected a codec such as 'maxmin:4', not {value!r}")
    return _native.check_codec(value)


def _port_range(value: object) -> str | None:
    if value is None or isinstance(value, str):
        return value
    if isinstance(value, Sequence) and len(value) == 2 and all(type(port) is int for port in value):
        return f"{value[0]}-{value[1]}"
    raise ValueError(f"port_range: expected two port numbers such as (20000, 20100) or '20000-20100', not {value!r}")


def _text(value: object) -> str:
    if isinstance(value, bool):
        return "1" if value else "0"
    if isinstance(value, str):
        return value
    if isinstance(value, Sequence):
        return ",".join(str(item) for item in value)
    return str(value)
