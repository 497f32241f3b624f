"""Registration with torch.distributed, and the process's engine."""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import gc
import inspect
import multiprocessing
import multiprocessing.util
import os
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from functools import cache
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Backend

from . import _native
from ._options import Options
from ._transports import announce_transports, find_offload, find_transports, finish_transports, has_finishes

__all__ = [
    "NAME",
    "connect",
    "create_backend",
    "finish_destroy",
    "is_default_group",
    "make_whole_job_with",
    "options_of",
    "register",
    "register_name",
    "serve_devices",
    "settle_cgx",
]

NAME = "accl"

# Name of the module in which torch creates groups.
_C10D = "torch.distributed.distributed_c10d"

# The base of every backend's options.
AnyOptions = Backend.Options

_runtime = _native.Runtime()

# Process id of the multiprocessing child for which `_end_with_child` has registered its finalizer.
_ending_in: list[int] = []

# Function that creates the default process group instead of `connect`, if a facade has set one. Empty or one element.
_maker: list[Callable[[Any, _native.BackendOptions], _native.Backend]] = []

# multiprocessing's exit function: it ends daemonic children and waits for the others.
_await_children = multiprocessing.util._exit_function  # type: ignore[attr-defined]

# Non-empty once this process has created a group or tried to.
_has_connected: list[bool] = []

# Non-empty once the warning about torch_cgx's variables was given or is not needed. One per process.
_knows_of_cgx: list[bool] = []


class _Devices(list[str]):
    """Device types of a group whose `backend` argument is a name alone: the given types that can exist here, and the type
    that a package adds to torch.

    Types are looked up when a group is created. A package may be imported later, and looking for drivers at import would
    take time. torch's flight recorder asks each type of a group for its stream at every barrier. A type without a driver
    answers with an exception, which takes longer than the barrier.
    """

    def __iter__(self) -> Iterator[str]:
        yield from filter(_may_exist, super().__iter__())
        yield from self._added()

    def __contains__(self, device: object) -> bool:
        return super().__contains__(device) or device in self._added()

    def _added(self) -> list[str]:
        name = torch._C._get_privateuse1_backend_name()
        return [name] if hasattr(torch, name) and not super().__contains__(name) else []


@cache
def _may_exist(device: str) -> bool:
    """Whether this process may have devices of a type of torch. Creates no context, and asks no driver."""
    match device:
        case "cuda" if torch.version.hip is not None:
            # The second one is the GPU of Windows in WSL.
            return os.path.exists("/dev/kfd") or os.path.exists("/dev/dxg")
        case "cuda":
            # torch's own libraries may find a driver that is not on the loader's usual path.
            return torch.version.cuda is not None and (
                any(map(os.path.exists, ("/dev/nvidiactl", "/dev/dxg"))) or _is_there("libcuda.so.1")
            )
        case "xpu":
            return torch.xpu._is_compiled()
    return True


def _is_there(library: str) -> bool:
    try:
        ctypes.CDLL(library)
    except OSError:
        return False
    return True


def register() -> None:
    """Registers the backend with torch.distributed. May be called repeatedly. It is also the entry point of torch's plug-ins."""
    register_name(NAME, create_backend)
    _native.Backend.perform_nocolor_split = _perform_nocolor_split  # type: ignore[method-assign]


def _perform_nocolor_split(self: _native.Backend, device: torch.device) -> None:
    """Does nothing: only members create a group.

    If the default group has a device, torch calls this on ranks that are not in a new group, as NCCL needs all ranks.
    """


def register_name(name: str, create: Callable[[Any, Any], Backend | dist.ProcessGroup]) -> None:
    """Registers a backend for tensors of the CPU and of all accelerators, unless its name is registered."""
    devices = ["cpu", "cuda", "xpu"]
    if name.upper() not in dist.Backend._plugins:
        # Without the type that a package adds: the backend would become the type's default.
        dist.Backend.register_backend(name, create, extended_api=True, devices=devices)
    dist.Backend.backend_capability[name] = _Devices(devices)


def serve_devices(group: dist.ProcessGroup, backend: Backend, name: str) -> None:
    """Makes a group that torch does not fill use this backend for tensors of all devices; `name` is the backend's."""
    for device in dist.Backend.backend_capability[name]:
        group._register_backend(torch.device(device), dist.ProcessGroup.BackendType.CUSTOM, backend)


def create_backend(group: Any, pg_options: _native.BackendOptions | None) -> _native.Backend:
    """Creates the backend of one rank in a group. torch calls this on every rank of the group.

    `group` is torch's description of the group: store, rank, size, timeout, name, global ranks.
    """
    # Launchers give all ranks the same variables, so one rank warns.
    if group.group_rank == 0:
        _warn_of_cgx()
    make = _maker[0] if _maker and is_default_group() else connect
    backend = make(group, options_of(group, pg_options))
    if group.group_rank == 0 and getattr(group, "enable_reconfigure", False):
        # torch documents that a backend without reconfiguration ignores the argument. The warning follows the group's
        # creation: it may be an error here, and other ranks must not wait for this one.
        warnings.warn(
            "accl: enable_reconfigure=True has no effect, because accl groups cannot be reconfigured; create a new group instead",
            stacklevel=2,
        )
    return backend


def is_default_group() -> bool:
    """Whether this thread is in `init_process_group`, so that the group being created is the default process group.

    The call stack is searched, because no property of the group identifies it. torch passes an empty list of global ranks
    for the default process group. It does the same for a group that a framework creates over its own store, with
    `_new_process_group_helper`.
    All ranks of a group must give the same answer, and only some of them may have a default process group already.
    """
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        if frame.f_code.co_name == "init_process_group" and frame.f_globals.get("__name__") == _C10D:
            return True
        frame = frame.f_back
    return False


def options_of(group: Any, pg_options: _native.BackendOptions | None) -> _native.BackendOptions:
    """Returns the options of a group that is about to be created, from the `pg_options` given for it."""
    is_ours = isinstance(pg_options, _native.BackendOptions)
    # All backends of a group ("cpu:accl,cuda:nccl") get the same object, which may be meant for another backend.
    if pg_options is None or (isinstance(pg_options, AnyOptions) and not is_ours):
        pg_options = Options()
    elif not is_ours:
        raise TypeError(f"pg_options must be a torch_accl.Options, not {type(pg_options).__name__}")
    options = _native.BackendOptions()
    options.settings = pg_options.settings
    own_timeout = getattr(pg_options, "timeout", None)
    options._timeout = group.timeout if own_timeout is None else own_timeout
    options.group_name = group.group_id
    options.global_ranks_in_group = list(group.global_ranks_in_group)
    return options


def connect(group: Any, options: _native.BackendOptions) -> _native.Backend:
    """Creates the backend of one rank in a group. Blocks until all ranks have met."""
    _has_connected[:] = [True]
    _end_with_child()

    def make() -> _native.Backend:
        return _runtime.create_backend(group.store, group.group_rank, group.group_size, options, is_default_group())

    chosen = options.settings.get("transports")
    try:
        if chosen is not None:
            # Transports that only the environment names are checked as well, but not loaded.
            announce_transports()
        find_transports(chosen)
        find_offload(options.settings.get("sidestep"))
    except Exception as error:
        # Creating the backend with this refusal makes the other ranks fail with it, instead of waiting for this rank.
        options.settings = {**options.settings, "refusal": str(error)}
        with contextlib.suppress(Exception):
            make()
        raise
    return make()


def make_whole_job_with(maker: Callable[[Any, _native.BackendOptions], _native.Backend] | None) -> None:
    """Sets the function that creates default process groups from now on; it calls `connect`. None: only `connect` is used."""
    _maker[:] = [] if maker is None else [maker]


def finish_destroy() -> None:
    """Completes the `destroy_process_group` call that this thread is in; the `shutdown` that it called is about to raise.

    torch forgets its groups after the last shutdown. A shutdown that raises would leave torch with destroyed groups, and the
    next `init_process_group` would be refused. A group reports its error once, so the inner call completes.
    """
    code = inspect.unwrap(dist.destroy_process_group).__code__
    frame: FrameType | None = sys._getframe()
    while frame is not None and frame.f_code is not code:
        frame = frame.f_back
    # Otherwise the program called `shutdown` itself, which removes no group from torch.
    if frame is None:
        return
    try:
        dist.destroy_process_group(frame.f_locals["group"])
    except dist.DistBackendError as another:
        warnings.warn(f"another group also reported an error: {another}", stacklevel=2)


def settle_cgx() -> None:
    """Suppresses the warning about torch_cgx's variables from now on."""
    _knows_of_cgx[:] = [True]


def _warn_of_cgx() -> None:
    """Warns, once per process, that the variables of torch_cgx compress nothing in a group of accl."""
    found = sorted(name for name in os.environ if name.startswith("CGX_"))
    if found and not _knows_of_cgx:
        settle_cgx()
        warnings.warn(
            f"{', '.join(found)}: variables of torch_cgx have no effect on groups of the accl backend. To apply them, "
            "use `from torch_accl.compat import cgx` and init_process_group('cgx'); or see torch_accl.compression",
            stacklevel=2,
        )


def _error_of_the_end() -> BaseException | None:
    """Returns the exception that ends the program, or None; `SystemExit` does not count."""
    # In a child of multiprocessing this runs while the exception is being handled.
    error = sys.exc_info()[1] or getattr(sys, "last_exc", None) or getattr(sys, "last_value", None)
    return None if isinstance(error, SystemExit) else error


def _end() -> None:
    """Ends the engine and then the transports.

    Calls in flight get time to complete, unless an exception ends the program: peers may then wait for this rank.
    """
    try:
        _runtime.shutdown(await_calls=_error_of_the_end() is None)
    finally:
        finish_transports()


class _OursAndLater:
    """Compares equal to `_end_last` and to exit functions registered after it, so that `atexit.unregister` removes these.

    Python compares with the oldest exit function first.
    """

    def __init__(self) -> None:
        self._is_later = False

    def __eq__(self, function: object) -> bool:
        self._is_later |= function is _end_last
        return self._is_later

    __hash__ = None  # type: ignore[assignment]


def _end_last() -> None:
    """Ends the engine after all exit functions that were registered before this one, because they may use a group.

    Python runs exit functions in reverse order of registration, and offers no way to register one to run last. The exit
    function of multiprocessing runs after the end of the engine. It waits for child processes, which may wait until this
    rank disconnects. If an exception ends the program, the engine is ended at once, because peers wait for this rank.
    """
    if _error_of_the_end() is not None:
        _end()
        return
    if not _has_connected and not has_finishes():
        return
    if sys.version_info >= (3, 14):
        is_listed = False
        try:
            is_listed = _list_end_last()
        finally:
            if not is_listed:
                _end()
    else:
        # `finally` also covers an exit function whose comparison raises.
        try:
            # Python still lists the exit functions that have run, and would run them again.
            atexit.unregister(_OursAndLater())  # type: ignore[arg-type]
            atexit.unregister(_await_children)
            atexit._run_exitfuncs()
        finally:
            _end_before_children()


def _list_end_last() -> bool:
    """Appends the engine's end to the exit functions that Python is about to call. Returns False if their list was not found."""
    # `gc.get_referrers` skips objects that the program has frozen.
    gc.unfreeze()
    # Python calls the functions from a copy of its list. The engine's end is appended to the list and to the copy.
    entries = [each for each in gc.get_referrers(_end_last) if isinstance(each, tuple) and each[0] is _end_last]
    lists = [each for entry in entries for each in gc.get_referrers(entry) if isinstance(each, list)]
    # The list `entries` of this function refers to the entries as well.
    lists = [each for each in lists if each is not entries]
    for each in lists:
        each[:] = [entry for entry in each if entry[0] is not _await_children]
        each.append((_end_before_children, (), None))
    return bool(lists)


def _end_before_children() -> None:
    try:
        _end()
    finally:
        _await_children()


def _end_with_child() -> None:
    """Registers the engine's end in a child of multiprocessing, which may leave by `os._exit` without running `atexit` hooks."""
    if multiprocessing.parent_process() is not None and _ending_in[:] != [os.getpid()]:
        _ending_in[:] = [os.getpid()]
        # The lowest priority runs after all other finalizers, which may use a group. Finalizers of a parent are not inherited.
        multiprocessing.util.Finalize(None, _end_of_child, exitpriority=-(1 << 30))


def _end_of_child() -> None:
    """Ends the engine once no non-daemon thread of the child runs. multiprocessing joins those threads after this finalizer."""
    running = [each for each in threading.enumerate() if each is not threading.current_thread() and not each.daemon]
    if not running:
        _end()
        return

    def end() -> None:
        for thread in running:
            thread.join()
        _end()

    # Waiting here would deadlock: threads of a pool end only when Python stops them, which happens after this finalizer.
    # Python joins the new thread, too.
    threading.Thread(target=end, name="accl-end").start()


# A process may end without destroy_process_group. Its peers are then notified, and no thread of the engine outlives Python.
atexit.register(_end_last)
