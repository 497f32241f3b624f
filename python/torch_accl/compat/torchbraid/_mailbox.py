"""The transport of messages between two ranks, with MPI's tags and matching, over torch's point-to-point calls.

Owns how a message is sent, which receive takes which message, and the messages that are under way. `_communicator.py`
checks ranks and buffers, and turns objects and elements into bytes.

A message is a header of three integers, and its bytes. A torch receive names one torch tag, so all headers have one.
A message is received while a thread waits for it or for a later one, never ahead: a receive of torch that nothing waits for
would fail the group at its timeout.
"""

from __future__ import annotations

import atexit
import sys
import threading
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor

from ._messages import ANY_SOURCE, ANY_TAG, Status

__all__ = ["Mailbox", "Message", "Receive", "device_of", "flush_all", "flush_at_exit", "mailbox_of"]

# The torch tag of all headers and bytes. The header has the message's MPI tag.
_TORCHS_TAG = 7461
# A send returns before its message is received while earlier messages to the same rank have at most these bytes, and
# are at most that many.
_BUFFERED_BYTES = 1 << 28
_BUFFERED_MESSAGES = 1000


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
        with self.mailbox.changed:
            if self in self.mailbox.posted:
                self.mailbox.posted.remove(self)
            self.mailbox.changed.notify_all()
            return self.message is None


@dataclass(eq=False)
class _Send:
    """A message under way to a rank, with its memory."""

    works: list[dist.Work]
    kept: list[Tensor]

    @property
    def size_bytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.kept)


class Mailbox:
    """Messages and receives of one group on this rank. It does not keep the group alive."""

    def __init__(self) -> None:
        # Guards received messages and posted receives. Notified when a message is delivered or a thread stops receiving.
        self.changed = threading.Condition()
        # Unexpected messages, which matched no posted receive when they came.
        self.came: deque[Message] = deque()
        # Posted receives that no message has matched, in the order in which they were posted.
        self.posted: deque[Receive] = deque()
        # Ranks from which threads receive now, or ANY_SOURCE alone.
        self._receiving: set[int] = set()
        # Guards the messages under way. Keeps the header and the bytes of a message together.
        self._sending = threading.Lock()
        # Messages under way by rank, and their bytes.
        self._sends: dict[int, deque[_Send]] = {}
        self._bytes: dict[int, int] = {}
        # Lets one thread at a time wait for the messages to a rank: works of gloo allow one waiter.
        self._waiting: dict[int, threading.Lock] = {}

    # ---- sends

    def isend(self, group: dist.ProcessGroup | None, data: Tensor, dest: int, tag: int, kind: int) -> None:
        """Starts to send a message. `data` belongs to the message."""
        if group is None or dest == group.rank():
            self._deliver(Message(dest, tag, kind, data))
            return
        device = device_of(group)
        parts = [torch.tensor([tag, kind, data.numel()], dtype=torch.int64, device=device), data.to(device)]
        with self._sending:
            works = [dist.isend(part, group=group, group_dst=dest, tag=_TORCHS_TAG) for part in parts if part.numel()]
            sent = _Send([work for work in works if work is not None], parts)
            self._sends.setdefault(dest, deque()).append(sent)
            self._bytes[dest] = self._bytes.get(dest, 0) + sent.size_bytes
            self._forget_sent(dest)

    def limit(self, dest: int) -> None:
        """Waits while too many messages to a rank are under way, unless a receive is posted: the other rank may receive
        only after this rank has."""
        while not self.posted and (sends := self._sends.get(dest)):
            if len(sends) <= _BUFFERED_MESSAGES and (len(sends) == 1 or self._bytes[dest] <= _BUFFERED_BYTES):
                return
            self._await_oldest(dest)

    def await_sent(self, dest: int) -> None:
        """Waits until all messages to a rank are sent."""
        while self._sends.get(dest):
            self._await_oldest(dest)

    def flush(self) -> None:
        """Waits until all messages are sent. If some cannot be sent, waits for the others, and raises the first error."""
        failed: Exception | None = None
        for dest in list(self._sends):
            while self._sends.get(dest):
                try:
                    self._await_oldest(dest)
                except Exception as error:
                    failed = failed or error
        if failed is not None:
            raise failed

    def _await_oldest(self, dest: int) -> None:
        with self._sending:
            waiting = self._waiting.setdefault(dest, threading.Lock())
        with waiting:
            with self._sending:
                sends = self._sends[dest]
                if not sends:
                    return
                oldest = sends[0]
            try:
                for work in oldest.works:
                    work.wait()
            except Exception:
                self._forget(dest, oldest)
                raise
            self._forget(dest, oldest)

    def _forget_sent(self, dest: int) -> None:
        """Forgets the oldest messages to a rank that are sent. A failed one stays, for the next wait."""
        sends = self._sends[dest]
        while sends and all(work.is_completed() and work.is_success() for work in sends[0].works):
            self._bytes[dest] -= sends.popleft().size_bytes

    def _forget(self, dest: int, sent: _Send) -> None:
        with self._sending:
            if self._sends[dest] and self._sends[dest][0] is sent:
                self._bytes[dest] -= self._sends[dest].popleft().size_bytes

    # ---- receives

    def post(self, source: int, tag: int) -> Receive:
        """Posts a receive, which takes the earliest unexpected message that it matches."""
        receive = Receive(self, source, tag)
        with self.changed:
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
            RuntimeError: the receive was posted in a group that was destroyed since, was cancelled, or waits for this rank's
                own message.
        """
        while (message := receive.message) is None:
            if receive.mailbox is not self:
                raise RuntimeError("the group of this receive was destroyed before its message came; post it again")
            with self.changed:
                if receive.message is not None:
                    continue
                if receive not in self.posted:
                    raise RuntimeError("the receive was cancelled while this thread waited for it; post it again")
                source = self._source_for(receive)
                if not self._may_receive(source):
                    self.changed.wait()
                    continue
                self._receiving.add(source)
            try:
                self._deliver(_next(group, source))
            finally:
                with self.changed:
                    self._receiving.discard(source)
                    self.changed.notify_all()
        if status is not None:
            status.source, status.tag, status.count_bytes = message.source, message.tag, message.data.numel()
        return message

    def _may_receive(self, source: int) -> bool:
        """Returns whether this thread may receive from a rank or from any: no other thread may get the same messages."""
        if source == ANY_SOURCE:
            return not self._receiving
        return not self._receiving & {source, ANY_SOURCE}

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
        with self.changed:
            self.changed.notify_all()
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
    for mailbox in list(_MAILBOXES.values()):
        try:
            mailbox.flush()
        except Exception as error:
            failed = failed or error
    if failed is not None:
        raise failed


def flush_at_exit() -> None:
    """Like `flush_all`, unless an exception ends the program: its receivers may never come."""
    if getattr(sys, "last_value", None) is None:
        flush_all()


atexit.register(flush_at_exit)


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
