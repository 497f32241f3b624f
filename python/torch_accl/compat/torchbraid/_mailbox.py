"""The transport of messages between two ranks, with MPI's tags and matching, over torch's point-to-point calls.

Owns how a message is sent, which receive takes which message, and the messages that are under way. `_communicator.py`
checks ranks and buffers, and turns objects and elements into bytes.

A message is a header of three integers, and its bytes. A torch receive names one torch tag, so all headers have one.

*Headers under way.* While this rank waits for a send or a barrier, the other rank may wait until this rank receives. So
such a wait also receives messages for posted receives. It starts the receive of a header, and leaves it to later waits.
This needs works that are seen to complete before they are waited for. Works of gloo are not.
"""

from __future__ import annotations

import atexit
import sys
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor

from ._messages import ANY_SOURCE, ANY_TAG, Status

__all__ = [
    "Mailbox",
    "Message",
    "Receive",
    "device_of",
    "flush_all",
    "flush_at_exit",
    "mailbox_of",
]

# The torch tags of all headers and of all bytes. The header has the message's MPI tag. With one tag for both, the receive
# of a header from any rank could take the bytes of another message.
_HEADER_TAG, _BYTES_TAG = 7461, 7462
# A send returns before its message is received while earlier messages to the same rank have at most these bytes, and
# are at most that many.
_BUFFERED_BYTES = 1 << 28
_BUFFERED_MESSAGES = 1000
# Pauses between two looks at works, in seconds: the first and the longest.
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 2e-5, 1e-3


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
        return self.source in (ANY_SOURCE, message.source) and self.tag in (
            ANY_TAG,
            message.tag,
        )

    def withdraw(self) -> bool:
        """Lets no later message match this receive. Returns False if a message has matched it."""
        with self.mailbox.lock:
            if self in self.mailbox.posted:
                self.mailbox.posted.remove(self)
            return self.message is None


@dataclass(eq=False)
class _Send:
    """A message under way to a rank, with its memory."""

    works: list[dist.Work]
    kept: list[Tensor]

    @property
    def size_bytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.kept)


@dataclass(eq=False)
class _Header:
    """The receive of a header, under way."""

    source: int
    header: Tensor
    work: dist.Work


class Mailbox:
    """Messages and receives of one group on this rank. It does not keep the group alive."""

    def __init__(self) -> None:
        # Guards everything below. It is held for a wait only if no other thread runs, or torch's backend needs it.
        self.lock = threading.RLock()
        # Keeps the header and the bytes of a message together, and messages to a rank in order.
        self._sending = threading.Lock()
        # Unexpected messages, which matched no posted receive when they came.
        self.came: deque[Message] = deque()
        # Posted receives that no message has matched, in the order in which they were posted.
        self.posted: deque[Receive] = deque()
        # Messages under way by rank, and their bytes.
        self._sends: dict[int, deque[_Send]] = {}
        self._bytes: dict[int, int] = {}
        # Receives of headers under way, in the order in which they started.
        self._headers: list[_Header] = []

    # ---- sends

    def isend(
        self,
        group: dist.ProcessGroup | None,
        data: Tensor,
        dest: int,
        tag: int,
        kind: int,
    ) -> None:
        """Starts to send a message. `data` belongs to the message."""
        if group is None or dest == group.rank():
            with self.lock:
                self._deliver(Message(dest, tag, kind, data))
            return
        device = device_of(group)
        parts = [
            torch.tensor([tag, kind, data.numel()], dtype=torch.int64, device=device),
            data.to(device),
        ]
        with self._sending:
            tagged = zip(parts, (_HEADER_TAG, _BYTES_TAG))
            works = [dist.isend(part, group=group, group_dst=dest, tag=at) for part, at in tagged if part.numel()]
            sent = _Send([work for work in works if work is not None], parts)
            self._sends.setdefault(dest, deque()).append(sent)
            self._bytes[dest] = self._bytes.get(dest, 0) + sent.size_bytes
            self._forget_sent(dest)

    def limit(self, group: dist.ProcessGroup | None, dest: int) -> None:
        """Waits while too many messages to a rank are under way."""
        while (sends := self._sends.get(dest)) and (
            len(sends) > _BUFFERED_MESSAGES or (len(sends) > 1 and self._bytes[dest] > _BUFFERED_BYTES)
        ):
            if self.posted and not _shows_completion(group):
                # A wait could not receive meanwhile, and the other rank may wait for that.
                return
            self._await_oldest(group, dest)

    def await_sent(self, group: dist.ProcessGroup | None, dest: int) -> None:
        """Waits until all messages to a rank are sent."""
        while self._sends.get(dest):
            self._await_oldest(group, dest)

    def flush(self, group: dist.ProcessGroup | None) -> None:
        """Waits until all messages are sent. If some cannot be sent, waits for the others, and raises the first error."""
        failed: Exception | None = None
        for dest in list(self._sends):
            while self._sends.get(dest):
                try:
                    self._await_oldest(group, dest)
                except Exception as error:
                    failed = failed or error
        if failed is not None:
            raise failed

    def _await_oldest(self, group: dist.ProcessGroup | None, dest: int) -> None:
        sends = self._sends[dest]
        oldest = sends[0]
        try:
            self.wait(group, oldest.works)
        finally:
            with self._sending:
                if sends and sends[0] is oldest:
                    self._forget(dest)

    def _forget_sent(self, dest: int) -> None:
        """Forgets the oldest messages to a rank that are sent."""
        sends = self._sends[dest]
        while sends and all(work.is_completed() for work in sends[0].works):
            try:
                for work in sends[0].works:
                    work.wait()
            finally:
                self._forget(dest)

    def _forget(self, dest: int) -> None:
        self._bytes[dest] -= self._sends[dest].popleft().size_bytes

    # ---- receives

    def post(self, source: int, tag: int) -> Receive:
        """Posts a receive, which takes the earliest unexpected message that it matches."""
        receive = Receive(self, source, tag)
        with self.lock:
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
        pause = _FIRST_PAUSE_S
        while receive.message is None:
            if receive.mailbox is not self:
                raise RuntimeError("the group of this receive was destroyed before its message came; post it again")
            with self.lock:
                if receive.message is None:
                    has_come = self._receive(group, self._source_for(receive))
            if not has_come:
                time.sleep(pause)
                pause = min(2 * pause, _LONGEST_PAUSE_S)
        message = receive.message
        if status is not None:
            status.source, status.tag, status.count_bytes = (
                message.source,
                message.tag,
                message.data.numel(),
            )
        return message

    def has_come(self, group: dist.ProcessGroup | None, receive: Receive) -> bool:
        """Returns whether the message of a posted receive has come.

        Raises:
            NotImplementedError: torch's backend shows no message before a wait.
        """
        if receive.message is None and group is not None:
            if not _shows_completion(group):
                raise NotImplementedError(
                    f"test() of a receive with {dist.get_backend(group)}: its works complete in wait() only; use wait(), or the backend accl"
                )
            self._receive_what_came(group)
        return receive.message is not None

    def wait(self, group: dist.ProcessGroup | None, works: Sequence[dist.Work]) -> None:
        """Waits for works of sends or collectives. Receives messages for posted receives meanwhile."""
        for work in works:
            pause = _FIRST_PAUSE_S
            while self.posted and _shows_completion(group) and not work.is_completed():
                self._receive_what_came(group)
                time.sleep(pause)
                pause = min(2 * pause, _LONGEST_PAUSE_S)
            work.wait()

    def _receive_what_came(self, group: dist.ProcessGroup | None) -> None:
        """Receives the messages that have come for posted receives, without a wait for others."""
        with self.lock:
            while self.posted and group is not None and self.posted[0].source != group.rank():
                self._expect(group, self._source_for(self.posted[0]))
                if not self._deliver_completed(group):
                    return

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

    def _receive(self, group: dist.ProcessGroup | None, source: int) -> bool:
        """Receives a message from a rank or from any, regardless of its tag. Returns False if none has come yet."""
        if group is None or source == group.rank():
            raise RuntimeError(
                f"recv from rank {source}: this rank has not sent itself a message that matches, or an earlier receive took "
                "it; send it before recv"
            )
        self._expect(group, source)
        # Another thread may send to this rank's other receives, or receive from another rank.
        if _shows_completion(group) and (len(self._headers) > 1 or threading.active_count() > 1):
            return self._deliver_completed(group)
        self._deliver(self._message_of(group, self._headers[0]))
        return True

    def _expect(self, group: dist.ProcessGroup, source: int) -> None:
        """Starts to receive the next header from a rank or from any, unless such a receive is under way."""
        if any(each.source in (source, ANY_SOURCE) for each in self._headers):
            return
        header = torch.zeros(3, dtype=torch.int64, device=device_of(group))
        named = {} if source == ANY_SOURCE else {"group_src": source}
        work = dist.irecv(header, group=group, tag=_HEADER_TAG, **named)
        assert work is not None
        self._headers.append(_Header(source, header, work))

    def _deliver_completed(self, group: dist.ProcessGroup) -> bool:
        """Delivers the first message whose header has come. Returns whether there was one."""
        for each in self._headers:
            if each.work.is_completed():
                self._deliver(self._message_of(group, each))
                return True
        return False

    def _message_of(self, group: dist.ProcessGroup, under_way: _Header) -> Message:
        """Waits for a message whose header is under way."""
        self._headers.remove(under_way)
        under_way.work.wait()
        source = under_way.source
        if source == ANY_SOURCE:
            # torch gives the rank in the group.
            source = under_way.work._source_rank()
        tag, kind, count = under_way.header.tolist()
        data = torch.empty(count, dtype=torch.uint8, device=under_way.header.device)
        if count:
            dist.recv(data, group=group, group_src=source, tag=_BYTES_TAG)
        return Message(source, tag, kind, data.cpu())

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
    """Waits until the messages of all groups are sent, as far as they can be. Raises the first error."""
    failed: Exception | None = None
    for group, mailbox in list(_MAILBOXES.items()):
        try:
            mailbox.flush(group)
        except Exception as error:
            failed = failed or error
    if failed is not None:
        raise failed


def flush_at_exit() -> None:
    """Like `flush_all`, unless an exception ends the program: its receivers may never come."""
    if getattr(sys, "last_value", None) is None:
        flush_all()


atexit.register(flush_at_exit)


def _shows_completion(group: dist.ProcessGroup | None) -> bool:
    """Returns whether torch's works of a group are seen to complete before they are waited for."""
    return group is not None and "gloo" not in dist.get_backend_config(group)


def device_of(group: dist.ProcessGroup) -> torch.device:
    """Returns the device for this module's own messages in a group."""
    devices = group._device_types
    cpu = torch.device("cpu")
    return cpu if cpu in devices or not devices else devices[0]
