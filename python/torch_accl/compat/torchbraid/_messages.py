"""Requests and statuses of messages by mpi4py's names, and the kinds, tags and sources of messages.

Owns what a script holds of a message. `_mailbox.py` sends messages and finds their receives.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import torch

from ._buffers import BYTE, Datatype

__all__ = [
    "ANY_SOURCE",
    "ANY_TAG",
    "BYTES",
    "KINDS",
    "OBJECT",
    "PROC_NULL",
    "UNDEFINED",
    "Request",
    "Status",
    "rank_of",
    "tag_of",
]

ANY_SOURCE = -1
ANY_TAG = -1
# No rank: a message to it is dropped, and a receive from it takes nothing and ends at once.
PROC_NULL = -2
UNDEFINED = -32766

# Largest tag: the header of a message has it in 64 bits.
_LARGEST_TAG = (1 << 63) - 1

# Kinds of messages, by numbers that are the same on all ranks: a pickled object, plain bytes, or elements.
OBJECT, BYTES = 0, 1
KINDS: tuple[torch.dtype | None, ...] = (
    None,
    torch.uint8,
    torch.bool,
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
    torch.complex64,
    torch.complex128,
    torch.uint16,
    torch.uint32,
    torch.uint64,
    torch.float8_e4m3fn,
    torch.float8_e4m3fnuz,
    torch.float8_e5m2,
    torch.float8_e5m2fnuz,
)


class Status:
    """Source, tag and length of a received message."""

    def __init__(self) -> None:
        self.source = ANY_SOURCE
        self.tag = ANY_TAG
        self.count_bytes = 0

    def Get_source(self) -> int:
        """Returns the rank that sent the message."""
        return self.source

    def Get_tag(self) -> int:
        """Returns the message's tag."""
        return self.tag

    def Get_count(self, datatype: Datatype = BYTE) -> int:
        """Returns the length in elements of a type, by default bytes; MPI.UNDEFINED if it is not a whole number of
        elements."""
        count, rest = divmod(self.count_bytes, datatype.Get_size())
        return UNDEFINED if rest else count

    Get_elements = Get_count

    def __getattr__(self, name: str) -> NoReturn:
        raise AttributeError(
            f"a status of torch_accl.compat.torchbraid has no {name}; use Get_source, Get_tag, Get_count or Get_elements"
        )


class Request:
    """A message to be sent or received.

    The request of a send is complete at once, because the message has memory of its own.
    """

    def __init__(
        self,
        take: Callable[[Status | None], Any],
        withdraw: Callable[[], bool] | None = None,
    ) -> None:
        # Completes the request, and returns the object of a receive.
        self._take: Callable[[Status | None], Any] | None = take
        # Withdraws a receive; None for a send.
        self._withdraw = withdraw
        self._found: Any = None

    def __getattr__(self, name: str) -> NoReturn:
        raise AttributeError(
            f"a request of torch_accl.compat.torchbraid has no {name}; use Wait, Test, Waitall or Cancel"
        )

    def wait(self, status: Status | None = None) -> Any:
        """Waits for a receive, and returns its object. Returns None for a send: it waits only while earlier messages to
        that rank have many bytes."""
        take, self._take = self._take, None
        if take is not None:
            try:
                self._found = take(status)
            except BaseException:
                self._take = take
                raise
        return self._found

    def Wait(self, status: Status | None = None) -> bool:
        """Waits as `wait` does, and returns True."""
        self.wait(status)
        return True

    def __bool__(self) -> bool:
        """Returns whether the request was not waited for yet."""
        return self._take is not None

    def test(self) -> tuple[bool, Any]:
        """Returns whether the request is complete, and what `wait` would return.

        Raises:
            NotImplementedError: the request is a receive, whose message is received in `wait` only.
        """
        if self._take is not None and self._withdraw is not None:
            raise NotImplementedError("test() of a receive: messages are received in wait() only; use wait()")
        return True, self._found

    def Cancel(self) -> None:
        """Withdraws a receive that no message has matched: it takes none, and its `wait` returns None. A send cannot be
        cancelled.

        Raises:
            NotImplementedError: the request is a send.
        """
        if self._withdraw is None:
            raise NotImplementedError("Cancel() of a send: its message may have been sent; receive it")
        if self._withdraw():
            self._take = None

    cancel = Cancel

    def Test(self) -> bool:
        """Returns whether the request is complete."""
        return self.test()[0]

    @staticmethod
    def waitall(requests: Sequence[Request], statuses: list[Status] | None = None) -> list[Any]:
        """Waits for all requests and returns the result of each. `statuses` gets a status for each request."""
        if statuses is not None:
            statuses += [Status() for _ in range(len(requests) - len(statuses))]
        # Receives first: another rank may send only after it has received, and sends are under way already.
        order = sorted(range(len(requests)), key=lambda at: requests[at]._withdraw is None)
        for at in order:
            requests[at].wait(None if statuses is None else statuses[at])
        return [request._found for request in requests]

    @staticmethod
    def Waitall(requests: Sequence[Request], statuses: list[Status] | None = None) -> bool:
        """Waits for all requests as `waitall` does, and returns True."""
        Request.waitall(requests, statuses)
        return True

    @staticmethod
    def Waitany(*_: Any) -> NoReturn:
        """Raises NotImplementedError: messages are received in `wait` only."""
        raise NotImplementedError("messages are received in wait() only; wait for the requests in turn, or use Waitall")

    Waitsome = Testany = Testall = Testsome = Waitany
    waitany = waitsome = testany = testall = testsome = Waitany


def rank_of(call: str, role: str, rank: Any, size: int, *others: int) -> int:
    """Returns a rank as an integer; `role` is `to rank`, `from rank` or `with root`. It may also be one of `others`.

    Raises:
        TypeError: it is not an integer.
        ValueError: the communicator has no such rank.
    """
    number = _integer(f"{call} {role}", rank)
    if number not in others and not 0 <= number < size:
        raise ValueError(f"{call} {role} {number}: this communicator has ranks 0 to {size - 1}")
    return number


def tag_of(call: str, tag: Any, *, is_receive: bool) -> int:
    """Returns a tag as an integer.

    Raises:
        TypeError: it is not an integer.
        ValueError: it is negative, and not ANY_TAG of a receive, or too large.
    """
    number = _integer(f"{call} with tag", tag)
    if not 0 <= number <= _LARGEST_TAG and not (is_receive and number == ANY_TAG):
        raise ValueError(
            f"{call} with tag {number}: expected a tag from 0 to {_LARGEST_TAG}{' or MPI.ANY_TAG' if is_receive else ''}"
        )
    return number


def _integer(what: str, given: Any) -> int:
    try:
        return operator.index(given)
    except TypeError:
        raise TypeError(f"{what} {given!r}: expected an integer") from None
