"""Calls that are more than torch's `Work` of them says."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
from torch.distributed import Work

__all__ = ["WorkAround", "WorkWithEnd"]


class WorkAround(Work):
    """A call as it is, but for what a subclass says otherwise."""

    def __init__(self, work: Work) -> None:
        super().__init__()
        self._work = work


def _of_work(name: str) -> Any:
    def method(self: WorkAround, *arguments: Any, **named: Any) -> Any:
        return getattr(self._work, name)(*arguments, **named)

    method.__name__ = name
    method.__doc__ = f"As `Work.{name}`."
    return method


for _name in [
    "wait",
    "is_completed",
    "is_success",
    "exception",
    "synchronize",
    "source_rank",
    "_source_rank",
    "result",
    "get_future",
    "get_future_result",
    "_get_duration",
    "_get_op_type",
    "_get_sequence_number",
    "block_current_stream",
]:
    if hasattr(Work, _name):
        setattr(WorkAround, _name, _of_work(_name))


class WorkWithEnd(WorkAround):
    """A call that is done when `end` has run: once, on the thread that torch runs callbacks on. It makes the result."""

    def __init__(self, work: Work, end: Callable[[], list[torch.Tensor]]) -> None:
        super().__init__(work)
        self._end = end
        self._done = work.get_future().then(self._finish)

    def _finish(self, future: torch.futures.Future[list[torch.Tensor]]) -> list[torch.Tensor]:
        # An error of the call is raised here.
        future.value()
        return self._end()

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        """As `Work.wait`."""
        self._work.wait(timeout)
        # No message is outstanding: what is left is calculated.
        self._done.wait()
        return True

    def get_future(self) -> torch.futures.Future[list[torch.Tensor]]:
        """As `Work.get_future`."""
        return self._done

    def result(self) -> list[torch.Tensor]:
        """As `Work.result`."""
        self.wait()
        return self._done.value()

    def is_completed(self) -> bool:
        """As `Work.is_completed`."""
        return self._done.done()

    def is_success(self) -> bool:
        """As `Work.is_success`."""
        return self._done.done() and self._work.is_success()
