"""Calls that were issued one after the other for tensors that belong together: they complete when all have completed."""

from __future__ import annotations

import itertools
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


def future_of(
    works: Sequence[Work], result: Callable[[], Result], device: torch.device | None = None
) -> torch.futures.Future[Result]:
    """Returns a future of `result`, complete when all works are. It fails with the first error, in the order of the works.

    `device` has the tensors of the calls and of the result; None is the CPU. On an accelerator, a wait for the future makes the
    current stream wait for all results, and `result` runs on a stream that does.
    """
    if len(works) == 1:
        return works[0].get_future().then(lambda future: _checked([_error(future)], result))
    if device is not None and device.type != "cpu":
        return _future_on(device, [work.get_future() for work in works], result)
    # `collect_all` would complete at the first error, while other calls still write to their tensors. Errors are passed as values.
    ended = torch.futures.collect_all([work.get_future().then(_error) for work in works])
    return ended.then(lambda future: _checked((each.value() for each in future.value()), result))


def _future_on(
    device: torch.device, futures: Sequence[torch.futures.Future[Any]], result: Callable[[], Result]
) -> torch.futures.Future[Result]:
    """Returns the future of `future_of` for an accelerator. The future of `collect_all` has no devices, and so waits for no stream."""
    joined: torch.futures.Future[Any] = torch.futures.Future(devices=[device])
    if not futures:
        joined.set_result(result())
        return joined
    left, refused = itertools.count(len(futures) - 1, -1), list[Exception]()

    def ended(_: object) -> None:
        # The interpreter counts in one step, so exactly one of several threads is the last.
        if next(left):
            return
        try:
            # The streams of this callback wait for the results of all calls.
            joined.set_result([future.wait() for future in futures if _error(future) is None])
        except Exception as error:
            # A device that has failed takes no events; a thread that waits for the future must not wait for ever.
            refused.append(error)
            joined.set_result(None)

    for future in futures:
        future.add_done_callback(ended)
    return joined.then(lambda _: _checked(itertools.chain(map(_error, futures), refused), result))


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
        device = self._tensors[0].device if self._tensors else None
        return future_of(self._works, lambda: self._tensors, device)

    def block_current_stream(self) -> None:
        """Blocks the current stream until all calls have completed, like `Work.block_current_stream` of each."""
        for work in self._works:
            work.block_current_stream()

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
