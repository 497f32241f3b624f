"""Registration with torch.distributed, and the process's engine."""

from __future__ import annotations

import atexit
import contextlib
import gc
import inspect
import multiprocessing
import multiprocessing.util
import os
import sys
import threading
import warnings
from collections.abc import Callable
from types import FrameType
from typing import Any

import torch.distributed as dist
from torch._C._distributed_c10d import Backend

from . import _native
from ._options import Options
from ._transports import announce_transports, find_sidestep, find_transports, finish_transports, has_finishes

__all__ = [
    "NAME",
    "connect",
    "create_backend",
    "finish_destroy",
    "is_default_group",
    "make_whole_job_with",
    "options_of",
    "register",
    "settle_cgx",
]

NAME = "accl"

# The module in which torch makes groups.
_C10D = "torch.distributed.distributed_c10d"

# The base of every backend's options.
AnyOptions = Backend.Options

_runtime = _native.Runtime()

# The child of multiprocessing whose end is seen to.
_ending_in: list[int] = []

# What makes the default process group in place of `connect`, if a facade has said so.
_maker: list[Callable[[Any, _native.BackendOptions], _native.Backend]] = []

# What ends the children of multiprocessing that are daemons, and waits for the others.
_await_children = multiprocessing.util._exit_function  # type: ignore[attr-defined]

# Whether this process has made a group, or tried to.
_has_connected: list[bool] = []

# Whether somebody who sets variables of torch_cgx knows by now what they do here. Once for a process.
_knows_of_cgx: list[bool] = []


def register() -> None:
    """Registers the backend with torch.distributed; again and again is fine. Also the entry point of torch's plug-ins."""
    if NAME.upper() not in dist.Backend._plugins:
        dist.Backend.register_backend(NAME, create_backend, extended_api=True, devices=["cpu"])


def create_backend(group: Any, pg_options: _native.BackendOptions | None) -> _native.Backend:
    """Makes one rank's backend of a group; torch calls this on every rank of it.

    `group` is torch's description of the group: store, rank, size, timeout, name, global ranks.
    """
    # Launchers give all ranks the same variables, and one of them says so.
    if group.group_rank == 0:
        _warn_of_cgx()
    make = _maker[0] if _maker and is_default_group() else connect
    return make(group, options_of(group, pg_options))


def is_default_group() -> bool:
    """Whether the group that torch makes now on this thread is the default process group: that of `init_process_group`.

    torch names no ranks of it, nor does a framework of a group that it makes over a store of its own, with `_new_process_group_helper`.
    All ranks of such a group must say alike what it is, and only some of them may have a default process group before.
    """
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        if frame.f_code.co_name == "init_process_group" and frame.f_globals.get("__name__") == _C10D:
            return True
        frame = frame.f_back
    return False


def options_of(group: Any, pg_options: _native.BackendOptions | None) -> _native.BackendOptions:
    """The options of a group that is about to be made, from what was given for it."""
    is_ours = isinstance(pg_options, _native.BackendOptions)
    # In a group of several backends ("cpu:accl,cuda:nccl") all get the one object, which may be for another.
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
    """Makes one rank's backend of a group; blocks until all ranks have met."""
    _has_connected[:] = [True]
    _end_with_child()

    def make() -> _native.Backend:
        return _runtime.create_backend(group.store, group.group_rank, group.group_size, options, is_default_group())

    chosen = options.settings.get("transports")
    try:
        if chosen is not None:
            # What the environment names beside is checked as well, and nothing of it is loaded.
            announce_transports()
        find_transports(chosen)
        find_sidestep(options.settings.get("sidestep"))
    except Exception as error:
        # The other ranks fail with it, and do not wait for this one.
        options.settings = {**options.settings, "refusal": str(error)}
        with contextlib.suppress(Exception):
            make()
        raise
    return make()


def make_whole_job_with(maker: Callable[[Any, _native.BackendOptions], _native.Backend] | None) -> None:
    """From now on default process groups are made by `maker`, which calls `connect`; None: by that alone."""
    _maker[:] = [] if maker is None else [maker]


def finish_destroy() -> None:
    """Ends the `destroy_process_group` that this thread is in, whose `shutdown` is about to raise.

    torch forgets its groups after the last shutdown. One that raises would leave it with groups that are gone, and the next
    `init_process_group` would be refused. A group reports once, so the inner call gets to the end.
    """
    code = inspect.unwrap(dist.destroy_process_group).__code__
    frame: FrameType | None = sys._getframe()
    while frame is not None and frame.f_code is not code:
        frame = frame.f_back
    # Otherwise `shutdown` was called by itself, which takes no group away from torch.
    if frame is None:
        return
    try:
        dist.destroy_process_group(frame.f_locals["group"])
    except dist.DistBackendError as another:
        warnings.warn(f"another group reported, too: {another}", stacklevel=2)


def settle_cgx() -> None:
    """From now on nothing is said of variables of torch_cgx."""
    _knows_of_cgx[:] = [True]


def _warn_of_cgx() -> None:
    """Says that the variables of torch_cgx compress nothing in a group of accl."""
    found = sorted(name for name in os.environ if name.startswith("CGX_"))
    if found and not _knows_of_cgx:
        settle_cgx()
        warnings.warn(
            f"{', '.join(found)}: variables of torch_cgx have no effect on groups of the accl backend. For what they say, "
            "use `from torch_accl.compat import cgx` and init_process_group('cgx'); or see torch_accl.compression",
            stacklevel=2,
        )


def _error_of_the_end() -> BaseException | None:
    """The error by which the program ends, if it does; `SystemExit` is none."""
    # A child of multiprocessing comes here while its error is on the way.
    error = sys.exc_info()[1] or getattr(sys, "last_exc", None) or getattr(sys, "last_value", None)
    return None if isinstance(error, SystemExit) else error


def _end() -> None:
    """Ends the engine. Calls in flight may end well first, unless the program ends by an error: others may wait for it."""
    try:
        _runtime.shutdown(await_calls=_error_of_the_end() is None)
    finally:
        finish_transports()


class _OursAndLater:
    """Equal to this module's exit function and to those that were registered later: `atexit.unregister` removes these.

    Python compares with the oldest one first.
    """

    def __init__(self) -> None:
        self._is_later = False

    def __eq__(self, function: object) -> bool:
        self._is_later |= function is _end_last
        return self._is_later

    __hash__ = None  # type: ignore[assignment]


def _end_last() -> None:
    """Ends the engine after the exit functions that were registered before this one, which may use a group.

    Python runs exit functions in the reverse order, and takes none at the front. The exit function of multiprocessing comes after the engine's
    end: it waits for child processes, which may wait for what the end of this rank lets them know. A program that ends by an error ends the
    engine at once: its peers wait.
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
        # An exit function whose comparison raises ends this here, too.
        try:
            # What has run is still among them, and would run once more.
            atexit.unregister(_OursAndLater())  # type: ignore[arg-type]
            atexit.unregister(_await_children)
            atexit._run_exitfuncs()
        finally:
            _end_before_children()


def _list_end_last() -> bool:
    """Puts the engine's end behind all exit functions that Python is about to call; `False`: their list was not found."""
    # The search passes over objects that a program has frozen.
    gc.unfreeze()
    # They are called from a copy of Python's list: the end of both is ours.
    entries = [each for each in gc.get_referrers(_end_last) if isinstance(each, tuple) and each[0] is _end_last]
    lists = [each for entry in entries for each in gc.get_referrers(entry) if isinstance(each, list)]
    # That of this function refers to the entries as well.
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
    """Sees to the end of a child of multiprocessing, which may leave by `os._exit` and run no `atexit` hook."""
    if multiprocessing.parent_process() is not None and _ending_in[:] != [os.getpid()]:
        _ending_in[:] = [os.getpid()]
        # After all others: they may use a group. Those of a parent are not inherited.
        multiprocessing.util.Finalize(None, _end_of_child, exitpriority=-(1 << 30))


def _end_of_child() -> None:
    """Ends the engine when nothing of the child's program runs any more: multiprocessing awaits its threads after this."""
    running = [each for each in threading.enumerate() if each is not threading.current_thread() and not each.daemon]
    if not running:
        _end()
        return

    def end() -> None:
        for thread in running:
            thread.join()
        _end()

    # Not here: threads of a pool end only when Python tells them, which comes next. It awaits this one, too.
    threading.Thread(target=end, name="accl-end").start()


# A process may end without destroy_process_group: the peers learn of it, and no thread of ours outlives Python.
atexit.register(_end_last)
