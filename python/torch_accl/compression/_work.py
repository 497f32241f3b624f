"""A call followed by local work, as one `Work`."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta

import torch
from torch.distributed import Work

from ._futures import WorkOfSeveral, future_of

__all__ = ["WorkWithEnd"]


class WorkWithEnd(WorkOfSeveral):
    """A call of host memory that completes once `end` has run. `end` runs once, on the thread on which torch runs callbacks.

    `end` may copy to `tensors` on an accelerator, if it waits for these copies.
    """

    def __init__(self, work: Work, tensors: list[torch.Tensor], end: Callable[[], None]) -> None:
        super().__init__([work], tensors)

        def ended() -> list[torch.Tensor]:
            end()
            return tensors

        self._done = future_of([work], ended)

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        """Waits for the call and for `end`, like `Work.wait`."""
        super().wait(timeout)
        # No message is outstanding, only `end` is left to compute, so this wait needs no timeout.
        self._done.wait()
        return True

    def get_future(self) -> torch.futures.Future[list[torch.Tensor]]:
        """Returns a future that completes after `end`, like `Work.get_future`."""
        return self._done

    def synchronize(self) -> None:
        """Calls `Work.synchronize`. For tensors on an accelerator it waits, because the host runs `end`."""
        super().synchronize()
        if not all(tensor.is_cpu for tensor in self._tensors):
            self.wait()

    def block_current_stream(self) -> None:
        """Calls `Work.block_current_stream`. For tensors on an accelerator it waits, because the host runs `end`."""
        if all(tensor.is_cpu for tensor in self._tensors):
            super().block_current_stream()
        else:
            self.wait()

    def result(self) -> list[torch.Tensor]:
        """Waits and returns the tensors, like `Work.result`."""
        self.wait()
        return super().result()

    def is_completed(self) -> bool:
        """Whether the call and `end` have completed, like `Work.is_completed`."""
        return self._done.done()

    def is_success(self) -> bool:
        """Whether the call and `end` have completed without an error, like `Work.is_success`."""
        return self._done.done() and super().is_success()
