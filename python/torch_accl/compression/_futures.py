"""Calls that were issued one after the other for tensors that belong together: they complete when all have completed."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from datetime import timedelta
from typing import Any, TypeVar

import torch
from torch._C._distributed_c10d import Work

__all__ = ["WorkOfSeveral", "future_of"]

Result = TypeVar("Result")

# torch's value for a wait without a timeout.
_FOREVER = timedelta(0)


def future_of(works: Sequence[Work], result: Callable[[], Result]) -> torch.futures.Future[Result]:
    """Returns a future of `result`, complete when all works are. It fails with the first error, in the order of the works."""
    if len(works) == 1:
        return works[0].get_future().then(lambda future: _checked([_error(future)], result))
    # `collect_all` would complete at the first error, while other calls still write to their tensors. Errors are passed as values.
    ended = torch.futures.collect_all([work.get_future().then(_error) for work in works])
    return ended.then(lambda future: _checked((each.value() for each in future.value()), result))


class WorkOfSeveral(Work):
    """Several calls as one Work. Methods that describe a single call (`_get_sequence_number`) describe the last one.

    Args:
        works: works of the calls, in the order in which they were issued.
        tensors: result of the calls together.
    """

    def __init__(self, works: Sequence[Work], tensors: list[torch.Tensor]) -> None:
        super().__init__()
        self._works = tuple(works)
        self._tensors = tensors

    def wait(self, timeout: timedelta = _FOREVER) -> bool:
        """Waits for all calls, then raises the first error. Afterwards no call writes to its tensors any more."""
        begin = time.monotonic()
        errors = []
        for work in self._works:
            passed = timedelta(seconds=time.monotonic() - begin)
            left = max(timeout - passed, timedelta(milliseconds=1)) if timeout > _FOREVER else timeout
            try:
                work.wait(left)
            except Exception as error:
                errors.append(error)
        if errors:
            raise errors[0]
        return True

    def synchronize(self) -> None:
        """Calls `Work.synchronize` of all works."""
        for work in self._works:
            work.synchronize()

    def is_completed(self) -> bool:
        """Whether all calls have completed."""
        return all(work.is_completed() for work in self._works)

    def is_success(self) -> bool:
        """Whether all calls have completed without an error."""
        return all(work.is_success() for work in self._works)

    def exception(self) -> Any:
        """Returns the first error, or None."""
        return next((error for work in self._works if (error := work.exception()) is not None), None)

    def get_future(self) -> torch.futures.Future[list[torch.Tensor]]:
        """Returns a future of the tensors, complete when all calls have completed."""
        return future_of(self._works, lambda: self._tensors)

    def result(self) -> list[torch.Tensor]:
        """Returns the tensors."""
        for work in self._works:
            work.result()
        return self._tensors


def _of_last(name: str) -> Any:
    def method(self: WorkOfSeveral, *arguments: Any, **named: Any) -> Any:
        return getattr(self._works[-1], name)(*arguments, **named)

    method.__name__ = name
    method.__doc__ = f"Like `Work.{name}`."
    return method


for _name in [
    "source_rank",
    "_source_rank",
    "get_future_result",
    "_get_duration",
    "_get_op_type",
    "_get_sequence_number",
    "block_current_stream",
]:
    if hasattr(Work, _name):
        setattr(WorkOfSeveral, _name, _of_last(_name))


def _error(future: torch.futures.Future[Any]) -> Exception | None:
    try:
        future.value()
    except Exception as error:
        return error
    return None


def _checked(errors: Iterable[Exception | None], result: Callable[[], Result]) -> Result:
    # The error is raised in the future's callback, and so reaches a caller that waits for the future, such as the backward pass.
    for error in errors:
        if error is not None:
            raise error
    return result()
