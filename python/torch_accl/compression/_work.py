"""A call after which something is left to do, as one `Work`."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta

import torch
from torch.distributed import Work

from ._together import WorkOfSeveral, future_of

__all__ = ["WorkWithEnd"]


class WorkWithEnd(WorkOfSeveral):
    """A call that is done when `end` has run: once, on the thread that torch runs callbacks on."""

    def __init__(self, work: Work, tensors: list[torch.Tensor], end: Callable[[], None]) -> None:
        super().__init__([work], tensors)

        def ended() -> list[torch.Tensor]:
            end()
            return tensors

        self._done = future_of([work], ended)

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        """As `Work.wait`."""
        super().wait(timeout)
        # No message is outstanding: what is left is calculated.
        self._done.wait()
        return True

    def get_future(self) -> torch.futures.Future[list[torch.Tensor]]:
        """As `Work.get_future`."""
        return self._done

    def result(self) -> list[torch.Tensor]:
        """As `Work.result`."""
        self.wait()
        return super().result()

    def is_completed(self) -> bool:
        """As `Work.is_completed`."""
        return self._done.done()

    def is_success(self) -> bool:
        """As `Work.is_success`."""
        return self._done.done() and super().is_success()
