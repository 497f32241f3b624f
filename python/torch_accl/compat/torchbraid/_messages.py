"""Messages between two ranks, with MPI's tags and matching, over torch's point-to-point calls.

Owns how a message is sent, which receive takes which message, and the requests of both. `_communicator.py` checks ranks
and buffers, and turns objects and elements into bytes.
"""

from __future__ import annotations

import atexit
import operator
import sys
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor

from ._buffers import BYTE, Datatype

__all__ = [
    "ANY_SOURCE",
    "ANY_TAG",
    "BYTES",
    "KINDS",
    "OBJECT",
    "UNDEFINED",
    "Mailbox",
    "Message",
    "Receive",
    "Request",
    "Status",
    "device_of",
    "flush_all",
    "flush_at_exit",
    "mailbox_of",
    "tag_of",
]

ANY_SOURCE = -1
ANY_TAG = -1
UNDEFINED = -32766

# The torch tag of all messages. A torch receive must name one tag, so each message carries its MPI tag in a header.
_TORCHS_TAG = 7461
# `send` returns before its message is received while the messages of earlier `send`s have at most this many bytes.
_BUFFERED_BYTES = 1 << 28

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


class Request:
    """A message in flight."""

    def __init__(
        self,
        works: Sequence[dist.Work],
        kept: Sequence[Tensor],
        receive: Callable[[Status | None], Any] | None = None,
        withdraw: Callable[[], bool] | None = None,
        leave: Callable[[Request], None] | None = None,
    ) -> None:
        self._works = list(works)
        # The message's own memory, which must live until it is sent.
        self._kept = list(kept)
        self.size_bytes = sum(tensor.nbytes for tensor in kept)
        # Takes over a send whose caller does not wait until the message is sent.
        self._leave = leave
        self._receive = receive
        self._withdraw = withdraw
        self._found: Any = None

    @property
    def is_over(self) -> bool:
        """Whether the message is complete.

        Raises:
            DistError: it failed.
        """
        if self._receive is not None or not all(work.is_completed() for work in self._works):
            return False
        self.wait_until_sent()
        return True

    def wait(self, status: Status | None = None) -> Any:
        """Waits for a receive, and returns its object. Returns None for a send, whose message has memory of its own: it
        does not wait for the receiver, unless messages of many bytes do."""
        if self._receive is not None:
            self._found, self._receive = self._receive(status), None
        elif self._works and self._leave is not None:
            leave, self._leave = self._leave, None
            leave(self)
        return self._found

    def wait_until_sent(self) -> None:
        """Waits until the message of a send is sent."""
        for work in self._works:
            work.wait()
        self._works.clear()
        self._kept.clear()

    def test(self) -> tuple[bool, Any]:
        """Returns whether the message is complete, and what `wait` would return.

        Raises:
            NotImplementedError: the request is a receive, which starts in `wait` only.
        """
        if self._receive is not None:
            raise NotImplementedError("test() of a receive: messages are received in wait() only; use wait()")
        return self.is_over, self._found

    Wait = wait

    def Cancel(self) -> None:
        """Withdraws a receive that no message has matched: it takes none, and its `wait` returns None. A send cannot be
        cancelled.

        Raises:
            NotImplementedError: the request is a send.
        """
        if self._withdraw is None:
            raise NotImplementedError("Cancel() of a send: its message may have been sent; receive it")
        if self._withdraw():
            self._receive = None

    cancel = Cancel

    def Test(self) -> bool:
        """Returns whether the message is complete."""
        return self.test()[0]

    @staticmethod
    def waitall(requests: Sequence[Request], statuses: Sequence[Status] | None = None) -> list[Any]:
        """Waits for all requests and returns the result of each."""
        if statuses is not None and len(statuses) < len(requests):
            raise ValueError(f"waitall: {len(statuses)} statuses for {len(requests)} requests; give one for each")
        return [request.wait(None if statuses is None else statuses[at]) for at, request in enumerate(requests)]

    Waitall = waitall


@dataclass
class Message:
    """A message that has arrived."""

    source: int
    tag: int
    # Index of the elements' type in `KINDS`.
    kind: int
    data: Tensor


@dataclass(eq=False)
class Receive:
    """A posted receive, and its message once a message has matched it."""

    mailbox: Mailbox
    source: int
    tag: int
    message: Message | None = None

    def matches(self, message: Message) -> bool:
        """Returns whether a message has the source and the tag of this receive."""
        return self.source in (ANY_SOURCE, message.source) and self.tag in (ANY_TAG, message.tag)

    def withdraw(self) -> bool:
        """Lets no later message match this receive. Returns False if a message has matched it."""
        if self in self.mailbox.posted:
            self.mailbox.posted.remove(self)
        return self.message is None


class Mailbox:
    """Messages and receives of one group on this rank. It does not keep the group alive."""

    def __init__(self) -> None:
        # Unexpected messages, which matched no posted receive when they came.
        self.came: deque[Message] = deque()
        # Posted receives that no message has matched, in the order in which they were posted.
        self.posted: deque[Receive] = deque()
        # Messages that are still being sent, and for which no caller waits.
        self._leaving: deque[Request] = deque()

    def send(self, group: dist.ProcessGroup | None, data: Tensor, dest: int, tag: int, kind: int) -> None:
        """Sends a message. Returns at once, unless earlier messages of many bytes wait for their receivers."""
        self.isend(group, data, dest, tag, kind).wait()

    def _leave(self, request: Request) -> None:
        """Takes over a send. Waits for earlier ones while they have many bytes."""
        self._leaving.append(request)
        self._leaving = deque(each for each in self._leaving if not each.is_over)
        while len(self._leaving) > 1 and sum(each.size_bytes for each in self._leaving) > _BUFFERED_BYTES:
            self._leaving.popleft().wait_until_sent()

    def flush(self) -> None:
        """Waits until all messages are sent."""
        while self._leaving:
            self._leaving.popleft().wait_until_sent()

    def isend(self, group: dist.ProcessGroup | None, data: Tensor, dest: int, tag: int, kind: int) -> Request:
        """Starts to send a message. `data` must not change until it is sent."""
        if group is None or dest == group.rank():
            self._deliver(Message(dest, tag, kind, data.clone()))
            return Request([], [])
        device = device_of(group)
        parts = [torch.tensor([tag, kind, data.numel()], dtype=torch.int64, device=device), data.to(device)]
        works = [dist.isend(part, group=group, group_dst=dest, tag=_TORCHS_TAG) for part in parts if part.numel()]
        return Request([work for work in works if work is not None], parts, leave=self._leave)

    def post(self, source: int, tag: int) -> Receive:
        """Posts a receive, which takes the earliest unexpected message that it matches."""
        receive = Receive(self, source, tag)
        for at, message in enumerate(self.came):
            if receive.matches(message):
                receive.message = message
                del self.came[at]
                return receive
        self.posted.append(receive)
        return receive

    @contextmanager
    def posted_for_now(self, source: int, tag: int) -> Iterator[Receive]:
        """Posts a receive for a blocking call. If the call fails, the receive does not take a later message."""
        receive = self.post(source, tag)
        try:
            yield receive
        finally:
            receive.withdraw()

    def take(self, group: dist.ProcessGroup | None, receive: Receive, status: Status | None) -> Message:
        """Waits for the message of a posted receive.

        Raises:
            RuntimeError: the receive was posted in a group that was destroyed since, or waits for this rank's own message.
        """
        while receive.message is None:
            if receive.mailbox is not self:
                raise RuntimeError("the group of this receive was destroyed before its message came; post it again")
            self._deliver(_next(group, self._source_for(receive)))
        message = receive.message
        if status is not None:
            status.source, status.tag, status.count_bytes = message.source, message.tag, message.data.numel()
        return message

    def _source_for(self, receive: Receive) -> int:
        """Returns the rank whose next message is received for a receive.

        An older receive from any source takes messages in the order in which they came, so none may be passed over.
        """
        for older in self.posted:
            if older is receive:
                return receive.source
            if older.source == ANY_SOURCE:
                return ANY_SOURCE
        return receive.source

    def _deliver(self, message: Message) -> None:
        """Gives a message to the earliest posted receive that it matches, or keeps it as unexpected."""
        for receive in self.posted:
            if receive.matches(message):
                receive.message = message
                self.posted.remove(receive)
                return
        self.came.append(message)


# Communicators of one group share its messages. A new group begins without any.
_MAILBOXES: WeakKeyDictionary[dist.ProcessGroup, Mailbox] = WeakKeyDictionary()


def mailbox_of(group: dist.ProcessGroup) -> Mailbox:
    """Returns the mailbox of a group, an empty one at first."""
    return _MAILBOXES.setdefault(group, Mailbox())


def flush_all() -> None:
    """Waits until the messages of all groups are sent."""
    for mailbox in list(_MAILBOXES.values()):
        mailbox.flush()


def flush_at_exit() -> None:
    """Like `flush_all`, unless an exception ends the program: its receivers may never come."""
    if getattr(sys, "last_value", None) is None:
        flush_all()


atexit.register(flush_at_exit)


def tag_of(call: str, tag: Any, *, is_receive: bool) -> int:
    """Returns a tag as an integer.

    Raises:
        TypeError: it is not an integer.
        ValueError: it is negative, and not ANY_TAG of a receive.
    """
    try:
        number = operator.index(tag)
    except TypeError:
        raise TypeError(f"{call} with tag {tag!r}: expected an integer") from None
    if number < 0 and not (is_receive and number == ANY_TAG):
        raise ValueError(
            f"{call} with tag {number}: expected a tag of at least 0{' or MPI.ANY_TAG' if is_receive else ''}"
        )
    return number


def device_of(group: dist.ProcessGroup) -> torch.device:
    """Returns the device for this module's own messages in a group."""
    devices = group._device_types
    cpu = torch.device("cpu")
    return cpu if cpu in devices or not devices else devices[0]


def _next(group: dist.ProcessGroup | None, source: int) -> Message:
    """Receives the next message from one rank, or from any, regardless of its tag."""
    if group is None or source == group.rank():
        raise RuntimeError(
            f"recv from rank {source}: this rank has not sent itself a message that matches, or an earlier receive took "
            "it; send it before recv"
        )
    device = device_of(group)
    header = torch.zeros(3, dtype=torch.int64, device=device)
    if source == ANY_SOURCE:
        source = dist.get_group_rank(group, dist.recv(header, group=group, tag=_TORCHS_TAG))
    else:
        dist.recv(header, group=group, group_src=source, tag=_TORCHS_TAG)
    tag, kind, count = header.tolist()
    data = torch.empty(count, dtype=torch.uint8, device=device)
    if count:
        dist.recv(data, group=group, group_src=source, tag=_TORCHS_TAG)
    return Message(source, tag, kind, data.cpu())
