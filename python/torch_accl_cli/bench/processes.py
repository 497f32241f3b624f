"""Ranks that are forked from this process and watched until all have ended.

This module owns the start and the end of the ranks. The first rank that fails ends all; none outlives this process. Read
`run_ranks` first.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from typing import TYPE_CHECKING, NoReturn

from .._wrong import WrongInput
from .rank_info import RankInfo

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

    # The function that a rank runs. It returns the rank's exit status.
    Body = Callable[[RankInfo, Store], int]

__all__ = ["Failed", "one_sentence", "run_ranks"]

# Seconds that the other ranks have to end by themselves after one has failed.
_GRACE_S = 2.0
_PR_SET_PDEATHSIG = 1


class Failed(Exception):
    """One sentence on why a run failed; the exit status is 1."""


def run_ranks(world: int, timeout_s: float, body: Body) -> int:
    """Runs `body(rank_info, store)` in `world` processes on this host. Returns the largest of their exit statuses.

    Raises:
        Failed: a rank raised or died; the message names the rank.
        BrokenPipeError: no process reads what the ranks print.
        WrongInput: a rank found an input error that only ranks can find.
        KeyboardInterrupt: the user interrupted; all ranks have been ended.
    """
    from torch._C._distributed_c10d import TCPStore

    # Ranks are forked, because loading torch takes seconds. Here torch is loaded, and no thread of accl runs yet.
    listener = socket.create_server(("127.0.0.1", 0), backlog=world)
    port = listener.getsockname()[1]
    ranks: list[_Rank] = []
    try:
        for number in range(world):
            ranks.append(_start(RankInfo("accl bench", number, world, number, world), port, timeout_s, listener, body))
        timeout = timedelta(seconds=timeout_s)
        store = TCPStore(
            "127.0.0.1", port, None, True, timeout, wait_for_workers=False, master_listen_fd=listener.detach()
        )
        status = _watch(ranks)
        del store
    finally:
        # All ranks are stopped before any is killed: a running rank would report that another is lost.
        for rank in ranks:
            rank.send(signal.SIGSTOP)
        for rank in ranks:
            rank.kill()
    return status


class _Rank:
    """A started process, and the report that it wrote before it failed."""

    def __init__(self, number: int, pid: int, report: int) -> None:
        self.number, self.pid, self.report = number, pid, report
        self.pidfd = os.pidfd_open(pid)
        self.status: int | None = None

    def reap(self) -> None:
        """Collects the status of a process that has ended; a signal gives a negative status."""
        self.status = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        os.close(self.pidfd)

    def said(self) -> str:
        """Returns the rank's report, or an empty string."""
        with os.fdopen(self.report, "r", errors="replace") as report:
            return report.read().strip()

    def send(self, number: signal.Signals) -> None:
        """Sends a signal to the process, if it has not ended."""
        if self.status is None:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self.pidfd, number)

    def kill(self) -> None:
        """Kills the process, if it has not ended. It has nothing to clean up."""
        if self.status is None:
            self.send(signal.SIGKILL)
            self.reap()


def _start(rank_info: RankInfo, port: int, timeout_s: float, listener: socket.socket, body: Body) -> _Rank:
    readable, writable = os.pipe()
    parent = os.getpid()
    sys.stdout.flush()
    sys.stderr.flush()
    # SIGINT is blocked until the child ignores it: Ctrl-C reaches all processes, and only the parent must react.
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        pid = os.fork()
        if pid == 0:
            signal.signal(signal.SIGINT, signal.SIG_IGN)
            signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
            ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
            if os.getppid() != parent:
                os._exit(1)
            os.close(readable)
            listener.close()
            _be_rank(rank_info, port, timeout_s, writable, body)
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    os.close(writable)
    return _Rank(rank_info.rank, pid, readable)


def _be_rank(rank_info: RankInfo, port: int, timeout_s: float, report: int, body: Body) -> NoReturn:
    import torch.distributed
    from torch._C._distributed_c10d import TCPStore

    status = 1
    try:
        store = TCPStore("127.0.0.1", port, None, False, timedelta(seconds=timeout_s), wait_for_workers=False)
        status = body(rank_info, store)
        sys.stdout.flush()
    except BrokenPipeError:
        # Leaving the group in good order keeps the other ranks from reporting this one as lost.
        with contextlib.suppress(Exception):
            torch.distributed.destroy_process_group()
        # The reader has closed the pipe: this process ends like a program with the default action for SIGPIPE.
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGPIPE)
    except Exception as error:
        status = 2 if isinstance(error, WrongInput) else 1
        os.write(report, one_sentence(error).encode())
    finally:
        # In any case the child must not return into the code of its parent.
        os._exit(status)


def one_sentence(error: BaseException) -> str:
    """Returns an error as one sentence. An unexpected type gets the source position, because it is a defect of accl."""
    text = " ".join(str(error).split()) or type(error).__name__
    if isinstance(error, RuntimeError | ValueError | OSError | MemoryError | Failed | WrongInput):
        return text
    frame = traceback.extract_tb(error.__traceback__)[-1]
    return f"{type(error).__name__}: {text} ({os.path.basename(frame.filename)}:{frame.lineno})"


def _watch(ranks: list[_Rank]) -> int:
    """Waits for all ranks, or after a failure for at most `_GRACE_S`. Returns the largest exit status."""
    running = {rank.pidfd: rank for rank in ranks}
    ended: list[_Rank] = []
    deadline = None
    while running:
        left = None if deadline is None else max(0.0, deadline - time.monotonic())
        ready, _, _ = select.select(list(running), [], [], left)
        if not ready:
            break
        for pidfd in ready:
            rank = running.pop(pidfd)
            rank.reap()
            ended.append(rank)
            if deadline is None and (rank.status or 0) != 0:
                deadline = time.monotonic() + (0 if rank.status == -signal.SIGPIPE else _GRACE_S)
    _raise_cause(ended)
    return max((rank.status or 0 for rank in ended), default=0)


def _raise_cause(ended: list[_Rank]) -> None:
    """Raises the cause of a failure: a rank that died, otherwise the first failed rank's report; others follow from it."""
    for rank in ended:
        if rank.status == -signal.SIGPIPE:
            raise BrokenPipeError
        if (rank.status or 0) < 0:
            name = signal.Signals(-(rank.status or 0)).name
            raise Failed(f"rank {rank.number} (process {rank.pid}) was killed by {name}")
    for rank in ended:
        said = rank.said()
        if said and rank.status == 2:
            raise WrongInput(said)
        if said:
            raise Failed(f"rank {rank.number}: {said}")
