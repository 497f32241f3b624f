"""Communicators by mpi4py's names, over process groups of torch.

Owns the communication of ranks outside of a solve: objects, buffers, splits. `_mailbox.py` sends and matches messages.
`_world.py` finds the ranks and creates their group. `_mpi.py` has the names that a script takes from `MPI`.
"""

from __future__ import annotations

import functools
import os
import pickle
import socket
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor

from ._buffers import IN_PLACE, Part, simple, vector
from ._mailbox import Mailbox, Receive, mailbox_of
from ._messages import (
    ANY_SOURCE,
    ANY_TAG,
    BYTES,
    KINDS,
    OBJECT,
    PROC_NULL,
    UNDEFINED,
    Request,
    Status,
    rank_of,
    tag_of,
)

__all__ = [
    "ANY_SOURCE",
    "ANY_TAG",
    "COMM_NULL",
    "COMM_TYPE_SHARED",
    "PROC_NULL",
    "UNDEFINED",
    "Comm",
    "Op",
    "Request",
    "Status",
]

COMM_TYPE_SHARED = "COMM_TYPE_SHARED"

# Replacements for methods of mpi4py that are missing, by their names in lower case.
_INSTEAD = {
    "iprobe": "recv or Recv with source=MPI.ANY_SOURCE and tag=MPI.ANY_TAG, which wait for the next message",
    "sendrecv_replace": "Isend of a copy, and Recv",
    "exscan": "scan, of objects",
    "scan": "scan, of objects",
    "reduce_scatter": "Allreduce, and this rank's part of it",
    "reduce_scatter_block": "Allreduce, and this rank's part of it",
    "alltoallw": "Alltoallv",
    "create": "Split",
    "create_group": "Split",
    "get_group": "Split, or torch's group in `comm.group`",
}
for _same in ("probe", "mprobe", "improbe"):
    _INSTEAD[_same] = _INSTEAD["iprobe"]


@dataclass(frozen=True)
class Op:
    """A reduction: of two objects, and torch's reduction of tensors where it exists."""

    name: str
    of_two: Callable[[Any, Any], Any]
    torchs: Any = None

    def __call__(self, a: Any, b: Any) -> Any:
        return self.of_two(a, b)

    def for_tensors(self) -> Any:
        """Returns torch's reduction.

        Raises:
            NotImplementedError: torch has none.
        """
        if self.torchs is None:
            raise NotImplementedError(
                f"MPI.{self.name} of buffers: torch has no such reduction; use the lower-case method, for objects"
            )
        return self.torchs


# Turns the message of a receive into an object, or writes it to a buffer.
_Finish = Callable[[Receive, Status | None], Any]


class _Parts(NamedTuple):
    """The parts that a rank sends and receives in a call, by rank. An empty list of parts has the type of `like`."""

    sent: dict[int, Part]
    received: dict[int, Part]
    like: Part | None


class Comm:
    """A communicator. `find` returns torch's group when it is needed; None stands for this rank alone."""

    def __init__(self, find: Callable[[], dist.ProcessGroup | None], name: str = "") -> None:
        self._find = find
        self.name = name
        # The messages of a rank that is alone without a group.
        self._own = Mailbox()

    @property
    def group(self) -> dist.ProcessGroup | None:
        """torch's group of these ranks; None if this rank is alone without a group."""
        return self._find()

    @property
    def _mailbox(self) -> Mailbox:
        group = self.group
        return self._own if group is None else mailbox_of(group)

    # The messages of a rank that is alone are not saved with its communicator.
    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "_own"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, _own=Mailbox())

    def __repr__(self) -> str:
        return f"<Comm {self.name or hex(id(self))}>"

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("_"):
            raise AttributeError(name)
        blocking = name[1:].capitalize() if name.startswith("I") else name[1:]
        instead = _INSTEAD.get(name.lower())
        if instead is None and name[:1] in "Ii" and hasattr(type(self), blocking):
            instead = f"{blocking}, which returns when it is complete"
        raise AttributeError(
            f"a communicator of torch_accl.compat.torchbraid has no {name}; use {instead or 'torch.distributed with its group, `comm.group`'}"
        )

    # A communicator stands for ranks, and a copied net stays on them.
    def __deepcopy__(self, memo: dict[int, Any]) -> Comm:
        return self

    # ---- rank and size

    def Get_rank(self) -> int:
        """Returns this rank's number."""
        group = self.group
        return 0 if group is None else group.rank()

    def Get_size(self) -> int:
        """Returns the number of ranks."""
        group = self.group
        return 1 if group is None else group.size()

    @property
    def rank(self) -> int:
        """This rank's number."""
        return self.Get_rank()

    @property
    def size(self) -> int:
        """The number of ranks."""
        return self.Get_size()

    def Get_name(self) -> str:
        """Returns the communicator's name."""
        return self.name

    def Is_inter(self) -> bool:
        """Returns False: there are no inter-communicators."""
        return False

    def Abort(self, errorcode: int = 0) -> NoReturn:
        """Ends this process at once, as failed: with the lowest 8 bits of `errorcode`, or with 1 if they are 0. The
        launcher ends the others."""
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(errorcode & 0xFF or 1)

    # ---- splitting

    def Split(self, color: int = 0, key: int = 0) -> Comm:
        """Returns the communicator of the ranks that pass the same color, ordered by their keys. Collective.

        Raises:
            NotImplementedError: the communicator has only some of the job's ranks, which torch cannot split again.
        """
        group = self.group
        if group is not None and group.size() < dist.get_world_size():
            raise NotImplementedError(
                f"Split of {group.size()} ranks: torch creates groups with all {dist.get_world_size()} ranks of the job only; split MPI.COMM_WORLD"
            )
        of_all = self.allgather((color, key))
        mine: Comm = COMM_NULL
        for other in dict.fromkeys(color for color, _ in of_all if color != UNDEFINED):
            members = [rank for rank, (theirs, _) in enumerate(of_all) if theirs == other]
            members.sort(key=lambda rank: (of_all[rank][1], rank))
            # All ranks create all groups, in the same order.
            part = self._part([rank if group is None else dist.get_global_rank(group, rank) for rank in members])
            if other == color:
                mine = Comm(lambda part=part: part, f"{self.name} split {color}")  # type: ignore[misc]
        return mine

    def _part(self, ranks: Sequence[int]) -> dist.ProcessGroup | None:
        """Creates a group of the job's `ranks`, in this order. Returns None for a single rank, and on ranks outside of
        the group."""
        if len(ranks) == 1:
            return None
        group = dist.new_group(list(ranks), sort_ranks=False)
        return group if isinstance(group, dist.ProcessGroup) else None

    def Split_type(self, split_type: object = COMM_TYPE_SHARED, key: int = 0) -> Comm:
        """Returns the communicator of the ranks of this host, or COMM_NULL on ranks that pass UNDEFINED. Collective."""
        if split_type not in (COMM_TYPE_SHARED, UNDEFINED):
            raise NotImplementedError(f"Split_type({split_type}): only MPI.COMM_TYPE_SHARED is supported")
        hosts = self.allgather(socket.gethostname())
        return self.Split(UNDEFINED if split_type == UNDEFINED else hosts.index(socket.gethostname()), key)

    def Dup(self) -> Comm:
        """Returns a communicator of the same ranks with separate messages. Collective."""
        return self.Split(0, self.rank)

    Clone = Dup

    def Free(self) -> None:
        """Waits until this rank's messages are sent, and destroys the group, unless it is the default group. Collective."""
        group = self.group
        try:
            self._mailbox.flush()
        finally:
            if group is not None and group is not dist.group.WORLD:
                dist.destroy_process_group(group)

    # ---- collectives on objects

    def Barrier(self) -> None:
        """Waits until all ranks have called it."""
        if (group := self.group) is not None:
            dist.barrier(group=group)

    barrier = Barrier

    def bcast(self, obj: Any = None, root: int = 0) -> Any:
        """Returns the root's object."""
        self._check_root("bcast", root)
        group = self.group
        if group is None:
            return _copied(obj)
        objects = [obj]
        dist.broadcast_object_list(objects, group=group, group_src=root)
        return _copied(obj) if group.rank() == root else objects[0]

    def gather(self, sendobj: Any, root: int = 0) -> list[Any] | None:
        """Returns the objects of all ranks on the root; None on the others."""
        self._check_root("gather", root)
        group = self.group
        if group is None:
            return [_copied(sendobj)]
        found: list[Any] | None = [None] * group.size() if group.rank() == root else None
        dist.gather_object(sendobj, found, group=group, group_dst=root)
        return found

    def allgather(self, sendobj: Any) -> list[Any]:
        """Returns the objects of all ranks."""
        group = self.group
        if group is None:
            return [_copied(sendobj)]
        found: list[Any] = [None] * group.size()
        dist.all_gather_object(found, sendobj, group=group)
        return found

    def scatter(self, sendobj: Sequence[Any] | None = None, root: int = 0) -> Any:
        """Returns this rank's entry of the root's list."""
        given = self._for_each("scatter", sendobj) if self._check_root("scatter", root) else None
        group = self.group
        if group is None:
            assert given is not None
            return _copied(given[0])
        found: list[Any] = [None]
        dist.scatter_object_list(found, given, group=group, group_src=root)
        return found[0]

    def alltoall(self, sendobj: Sequence[Any]) -> list[Any]:
        """Returns this rank's entry of each rank's list."""
        rank = self.rank
        return [theirs[rank] for theirs in self.allgather(self._for_each("alltoall", sendobj))]

    def _for_each(self, call: str, given: Sequence[Any] | None) -> list[Any]:
        """Returns a list with an object for each rank."""
        objects = None if given is None else list(given)
        if objects is None or len(objects) != self.size:
            what = "None" if objects is None else f"{len(objects)} objects"
            raise ValueError(f"{call}: {what} for {self.size} ranks; give a list with one object for each")
        return objects

    def reduce(self, sendobj: Any, op: Op | None = None, root: int = 0) -> Any:
        """Combines the objects of all ranks, in rank order, and returns the result on the root; None on the others."""
        found = self.gather(sendobj, root)
        return None if found is None else functools.reduce(op or _ADD, found)

    def allreduce(self, sendobj: Any, op: Op | None = None) -> Any:
        """Combines the objects of all ranks, in rank order, and returns the result."""
        return functools.reduce(op or _ADD, self.allgather(sendobj))

    def scan(self, sendobj: Any, op: Op | None = None) -> Any:
        """Combines the objects of the ranks up to and including this one."""
        return functools.reduce(op or _ADD, self.allgather(sendobj)[: self.rank + 1])

    # ---- collectives on buffers in the forms of `_buffers.py`

    def Bcast(self, buf: Any, root: int = 0) -> None:
        """Broadcasts the root's elements."""
        is_root = self._check_root("Bcast", root)
        part = simple(buf, "Bcast", is_written=not is_root)
        if (group := self.group) is not None:
            _in_place(part, lambda flat: dist.broadcast(flat, group=group, group_src=root), is_written=not is_root)

    def Allreduce(self, sendbuf: Any, recvbuf: Any, op: Op | None = None) -> None:
        """Reduces the elements of all ranks on every rank."""
        reduction = _reduction("Allreduce", op)
        out = simple(recvbuf, "Allreduce", is_written=True, is_reduced=True)
        if out.dtype.is_complex and reduction != dist.ReduceOp.SUM:
            raise NotImplementedError(
                f"Allreduce of {out.dtype} with MPI.{(op or _ADD).name}: torch refuses it; use Reduce, then Bcast, or allreduce of objects"
            )
        if sendbuf is not IN_PLACE:
            given = simple(sendbuf, "Allreduce", is_written=False, is_reduced=True)
            given.check_like(out, "Allreduce")
            out.write(given.sent())
        if (group := self.group) is not None:
            _in_place(out, lambda flat: dist.all_reduce(flat, reduction, group=group), is_written=True)

    def Reduce(self, sendbuf: Any, recvbuf: Any, op: Op | None = None, root: int = 0) -> None:
        """Reduces the elements of all ranks on the root."""
        reduction = _reduction("Reduce", op)
        is_root = self._check_root("Reduce", root)
        own = self._given("Reduce", sendbuf, recvbuf, is_root)
        given = simple(own, "Reduce", is_written=False, is_reduced=True)
        out = simple(recvbuf, "Reduce", is_written=True, is_reduced=True) if is_root else given
        given.check_like(out, "Reduce")
        flat = given.sent().clone()
        if (group := self.group) is not None:
            dist.reduce(flat, op=reduction, group=group, group_dst=root)
        if is_root:
            out.write(flat)

    def Allgather(self, sendbuf: Any, recvbuf: Any) -> None:
        """Gathers the elements of all ranks on every rank, in rank order."""
        size = self.size
        out = simple(recvbuf, "Allgather", size, is_written=True)
        given = out.block(self.rank, size) if sendbuf is IN_PLACE else simple(sendbuf, "Allgather", is_written=False)
        given.check_like(out, "Allgather", size)
        flat = given.sent()
        parts = [torch.empty_like(flat) for _ in range(size)]
        if (group := self.group) is None:
            parts = [flat]
        else:
            dist.all_gather(parts, flat, group=group)
        out.write(torch.cat(parts))

    def Gather(self, sendbuf: Any, recvbuf: Any = None, root: int = 0) -> None:
        """Gathers the elements of all ranks on the root, in rank order."""
        size, is_root = self.size, self._check_root("Gather", root)
        self._given("Gather", sendbuf, recvbuf, is_root)
        out = simple(recvbuf, "Gather", size, is_written=True) if is_root else None
        if out is not None and sendbuf is IN_PLACE:
            given = out.block(root, size)
        else:
            given = simple(sendbuf, "Gather", is_written=False)
        if out is not None:
            given.check_like(out, "Gather", size)
        flat = given.sent()
        parts = [torch.empty_like(flat) for _ in range(size)] if is_root else None
        if (group := self.group) is None:
            parts = [flat]
        else:
            dist.gather(flat, parts, group=group, group_dst=root)
        if out is not None and parts is not None:
            out.write(torch.cat(parts))

    def Scatter(self, sendbuf: Any, recvbuf: Any, root: int = 0) -> None:
        """Distributes the root's elements in equal parts."""
        size, is_root = self.size, self._check_root("Scatter", root)
        self._given("Scatter", recvbuf, sendbuf, is_root)
        given = simple(sendbuf, "Scatter", size, is_written=False) if is_root else None
        if given is not None and recvbuf is IN_PLACE:
            out = given.block(root, size)
        else:
            out = simple(recvbuf, "Scatter", is_written=True)
        if given is not None:
            out.check_like(given, "Scatter", size)
        parts = None if given is None else list(given.sent().chunk(size)) if given.count else [given.sent()] * size
        # The buffers of a rank may lie on two devices, but the tensors of a call may not.
        like = out if given is None else given
        found = torch.empty(out.count, dtype=out.dtype, device=like.tensor.device)
        if (group := self.group) is None:
            assert parts is not None
            found = parts[0]
        else:
            dist.scatter(found, parts, group=group, group_src=root)
        out.write(found)

    def Alltoall(self, sendbuf: Any, recvbuf: Any) -> None:
        """Exchanges equal parts between all ranks."""
        size = self.size
        out = simple(recvbuf, "Alltoall", size, is_written=True)
        given = out if sendbuf is IN_PLACE else simple(sendbuf, "Alltoall", size, is_written=False)
        given.check_like(out, "Alltoall")
        if (group := self.group) is None:
            out.write(given.sent())
            return
        found = torch.empty(out.count, dtype=out.dtype, device=given.tensor.device)
        dist.all_to_all_single(found, given.sent(), group=group)
        out.write(found)

    # ---- the same with parts of different lengths: counts, and displacements, by rank

    def Gatherv(self, sendbuf: Any, recvbuf: Any = None, root: int = 0) -> None:
        """See `Gather`; parts may have different lengths."""
        size = self.size

        def parts() -> _Parts:
            is_root = self._check_root("Gatherv", root)
            self._given("Gatherv", sendbuf, recvbuf, is_root)
            into = vector(recvbuf, "Gatherv", size, is_written=True) if is_root else []
            is_in_place = is_root and sendbuf is IN_PLACE
            given = into[root] if is_in_place else simple(sendbuf, "Gatherv", is_written=False)
            return _Parts({root: given}, dict(enumerate(into)), given)

        self._exchange("Gatherv", parts)

    def Scatterv(self, sendbuf: Any, recvbuf: Any, root: int = 0) -> None:
        """See `Scatter`; parts may have different lengths."""
        size = self.size

        def parts() -> _Parts:
            is_root = self._check_root("Scatterv", root)
            self._given("Scatterv", recvbuf, sendbuf, is_root)
            given = vector(sendbuf, "Scatterv", size, is_written=False) if is_root else []
            is_in_place = is_root and recvbuf is IN_PLACE
            out = given[root] if is_in_place else simple(recvbuf, "Scatterv", is_written=True)
            return _Parts(dict(enumerate(given)), {root: out}, out)

        self._exchange("Scatterv", parts)

    def Allgatherv(self, sendbuf: Any, recvbuf: Any) -> None:
        """See `Allgather`; parts may have different lengths."""
        size = self.size

        def parts() -> _Parts:
            into = vector(recvbuf, "Allgatherv", size, is_written=True)
            given = into[self.rank] if sendbuf is IN_PLACE else simple(sendbuf, "Allgatherv", is_written=False)
            return _Parts(dict.fromkeys(range(size), given), dict(enumerate(into)), given)

        self._exchange("Allgatherv", parts)

    def Alltoallv(self, sendbuf: Any, recvbuf: Any) -> None:
        """See `Alltoall`; parts may have different lengths."""
        size = self.size

        def parts() -> _Parts:
            into = vector(recvbuf, "Alltoallv", size, is_written=True)
            given = into if sendbuf is IN_PLACE else vector(sendbuf, "Alltoallv", size, is_written=False)
            return _Parts(dict(enumerate(given)), dict(enumerate(into)), into[0])

        self._exchange("Alltoallv", parts)

    def _exchange(self, call: str, parse: Callable[[], _Parts]) -> None:
        """Sends a part to each rank and receives one from each rank; ranks compare their counts first.

        If `parse` raises on any rank, all ranks raise: a rank with a wrong form does not leave the others waiting.
        """
        size = self.size
        parts, wrong = _Parts({}, {}, None), None
        try:
            parts = parse()
        except Exception as error:
            wrong = error
        sent, received = parts.sent, parts.received
        counts = [[each[rank].count if rank in each else 0 for rank in range(size)] for each in (sent, received)]
        types = {str(part.dtype) for part in (*sent.values(), *received.values())}
        of_all = self.allgather((*counts, sorted(types), None if wrong is None else str(wrong)))
        if wrong is not None:
            raise wrong
        for rank, (*_, theirs) in enumerate(of_all):
            if theirs is not None:
                raise ValueError(f"{call}: rank {rank} passed a wrong buffer ({theirs})")
        for source in range(size):
            for to in range(size):
                leaving, coming = of_all[source][0][to], of_all[to][1][source]
                if leaving != coming:
                    raise ValueError(
                        f"{call}: rank {source} sends {leaving} elements to rank {to}, but rank {to} expects {coming}; give counts that agree"
                    )
        named = sorted({name for _, _, names, _ in of_all for name in names})
        if len(named) > 1:
            raise TypeError(f"{call}: ranks have buffers of {' and '.join(named)}; give all ranks the same type")
        like = parts.like
        assert like is not None
        flat = [sent[rank].sent() for rank in range(size) if rank in sent]
        leaving_all = torch.cat(flat) if flat else like.read()[:0]
        if (group := self.group) is None:
            found = leaving_all
        else:
            found = torch.empty(sum(counts[1]), dtype=like.dtype, device=leaving_all.device)
            dist.all_to_all_single(found, leaving_all, counts[1], counts[0], group=group)
        for rank, coming_part in enumerate(torch.split(found, counts[1])):
            if rank in received:
                received[rank].write(coming_part)

    def _check_root(self, call: str, root: int) -> bool:
        """Returns whether this rank is the root."""
        return self.rank == rank_of(call, "with root", root, self.size)

    @staticmethod
    def _given(call: str, own: Any, whole: Any, is_root: bool) -> Any:
        """Returns the buffer that a rank contributes: its own, or the whole one if the root passed IN_PLACE."""
        if own is not IN_PLACE:
            return own
        if not is_root:
            raise ValueError(f"{call}: MPI.IN_PLACE on a rank that is not the root; give a buffer")
        return whole

    # ---- point-to-point messages

    def send(self, obj: Any, dest: int, tag: int = 0) -> None:
        """Sends an object. Returns at once, unless more than 256 MiB or 1,000 messages to that rank are under way."""
        self._send(_bytes_of(obj), dest, tag, OBJECT)

    def ssend(self, obj: Any, dest: int, tag: int = 0) -> None:
        """Sends an object, and returns when it is sent. A large object waits for its receiver, up to the group's timeout."""
        self._ssend("ssend", _bytes_of(obj), dest, tag, OBJECT)

    def isend(self, obj: Any, dest: int, tag: int = 0) -> Request:
        """Starts to send an object."""
        return self._post(_bytes_of(obj), dest, tag, OBJECT)

    def recv(self, buf: Any = None, source: int = ANY_SOURCE, tag: int = ANY_TAG, status: Status | None = None) -> Any:
        """Receives an object."""
        return self._receive("recv", source, tag, status, self._received_object)

    def _received_object(self, receive: Receive, status: Status | None) -> Any:
        message = self._mailbox.take(self.group, receive, status)
        if message.kind != OBJECT:
            raise TypeError(
                f"recv: rank {message.source} sent a buffer of {KINDS[message.kind]} with Send; receive it with Recv"
            )
        return pickle.loads(message.data.numpy().tobytes())

    def irecv(self, buf: Any = None, source: int = ANY_SOURCE, tag: int = ANY_TAG) -> Request:
        """Returns a request for an object, which is received in its `wait`.

        Messages match receives in the order in which the receives are posted, whatever order they are waited for in.
        """
        return self._post_receive("irecv", source, tag, self._received_object)

    def sendrecv(
        self,
        sendobj: Any,
        dest: int,
        sendtag: int = 0,
        recvbuf: Any = None,
        source: int = ANY_SOURCE,
        recvtag: int = ANY_TAG,
        status: Status | None = None,
    ) -> Any:
        """Sends an object and receives another."""
        request = self.isend(sendobj, dest, sendtag)
        found = self.recv(recvbuf, source, recvtag, status)
        request.wait()
        return found

    def Send(self, buf: Any, dest: int, tag: int = 0) -> None:
        """Sends the elements of a buffer."""
        self._send(*_bytes_in(buf, "Send", dest, tag))

    def Ssend(self, buf: Any, dest: int, tag: int = 0) -> None:
        """Sends the elements of a buffer, and returns when they are sent, as `ssend` does."""
        self._ssend("Ssend", *_bytes_in(buf, "Ssend", dest, tag))

    # A message has memory of its own, so a buffered send and one to a ready receiver are this send.
    bsend = rsend = send
    Bsend = Rsend = Send

    def Sendrecv(
        self,
        sendbuf: Any,
        dest: int,
        sendtag: int = 0,
        recvbuf: Any = None,
        source: int = ANY_SOURCE,
        recvtag: int = ANY_TAG,
        status: Status | None = None,
    ) -> None:
        """Sends the elements of a buffer and receives others."""
        request = self.Isend(sendbuf, dest, sendtag)
        self.Recv(recvbuf, source, recvtag, status)
        request.wait()

    def Isend(self, buf: Any, dest: int, tag: int = 0) -> Request:
        """Starts to send the elements of a buffer."""
        return self._post(*_bytes_in(buf, "Isend", dest, tag))

    def Recv(self, buf: Any, source: int = ANY_SOURCE, tag: int = ANY_TAG, status: Status | None = None) -> None:
        """Receives elements into a buffer, which must have room for them.

        Raises:
            TypeError: the message has elements of another type, or an object.
            ValueError: the message is too long, or not a whole number of elements.
        """
        out = simple(buf, "Recv", is_written=True)
        self._receive("Recv", source, tag, status, functools.partial(self._received_elements, out))

    def _received_elements(self, out: Part, receive: Receive, status: Status | None) -> None:
        message = self._mailbox.take(self.group, receive, status)
        came, width = message.data.numel(), out.tensor.element_size()
        wanted = _kind_of(out.dtype)
        # Bytes fit the elements of any type, on either side.
        if message.kind != wanted and (message.kind == OBJECT or BYTES not in (message.kind, wanted)):
            what = "an object" if message.kind == OBJECT else f"elements of {KINDS[message.kind]}"
            raise TypeError(
                f"Recv: rank {message.source} sent {what}, but the buffer has {out.dtype}; use recv for objects, and a buffer of the same type for elements"
            )
        if came > out.count * width or came % width:
            raise ValueError(
                f"Recv: rank {message.source} sent {came} bytes, but the buffer has {out.count} elements of {out.dtype}"
            )
        out.write(message.data.clone().view(out.dtype))

    def Irecv(self, buf: Any, source: int = ANY_SOURCE, tag: int = ANY_TAG) -> Request:
        """Returns a request for elements, which are received into the buffer in its `wait`. Matches as `irecv` does."""
        out = simple(buf, "Irecv", is_written=True)
        return self._post_receive("Irecv", source, tag, functools.partial(self._received_elements, out))

    def _receive(self, call: str, source: int, tag: int, status: Status | None, finish: _Finish) -> Any:
        """Receives a message, and returns what `finish` returns for it; None from PROC_NULL."""
        rank, number = self._from(call, source, tag)
        if rank == PROC_NULL:
            return _from_no_rank(status)
        with self._mailbox.posted_for_now(rank, number) as receive:
            return finish(receive, status)

    def _post_receive(self, call: str, source: int, tag: int, finish: _Finish) -> Request:
        """Posts a receive, whose request does in its `wait` what `_receive` does."""
        rank, number = self._from(call, source, tag)
        if rank == PROC_NULL:
            return Request(_from_no_rank)
        receive = self._mailbox.post(rank, number)
        return Request(functools.partial(finish, receive), receive.withdraw)

    def _send(self, data: Tensor, dest: int, tag: int, kind: int) -> None:
        self._post(data, dest, tag, kind, call="send").wait()

    def _ssend(self, call: str, data: Tensor, dest: int, tag: int, kind: int) -> None:
        self._post(data, dest, tag, kind, call=call)
        self._mailbox.await_sent(dest)

    def _post(self, data: Tensor, dest: int, tag: int, kind: int, call: str = "isend") -> Request:
        to, number = self._to(call, dest, tag)
        if to == PROC_NULL:
            return Request(lambda _: None)
        self._mailbox.isend(self.group, data, to, number, kind)
        return Request(lambda _: self._mailbox.limit(to))

    def _to(self, call: str, dest: int, tag: int) -> tuple[int, int]:
        """Returns the rank and the tag of a message, checked."""
        return rank_of(call, "to rank", dest, self.size, PROC_NULL), tag_of(call, tag, is_receive=False)

    def _from(self, call: str, source: int, tag: int) -> tuple[int, int]:
        """Returns the rank and the tag of a receive, checked."""
        number = rank_of(call, "from rank", source, self.size, ANY_SOURCE, PROC_NULL)
        return number, tag_of(call, tag, is_receive=True)


class _Null(Comm):
    """The null communicator, which `Split` returns to ranks that passed UNDEFINED."""

    def __init__(self) -> None:
        super().__init__(self._refuse, "COMM_NULL")

    def __bool__(self) -> bool:
        return False

    @staticmethod
    def _refuse() -> NoReturn:
        raise ValueError("this is MPI.COMM_NULL: this rank passed MPI.UNDEFINED to Split")


COMM_NULL = _Null()
_ADD = Op("SUM", lambda a, b: a + b, dist.ReduceOp.SUM)


def _from_no_rank(status: Status | None) -> None:
    """Ends a receive from PROC_NULL."""
    if status is not None:
        status.source, status.tag, status.count_bytes = PROC_NULL, ANY_TAG, 0


def _copied(obj: Any) -> Any:
    """Returns a copy of an object, as another rank would get it."""
    return pickle.loads(pickle.dumps(obj))


def _bytes_of(obj: Any) -> Tensor:
    return torch.frombuffer(bytearray(pickle.dumps(obj)), dtype=torch.uint8)


def _bytes_in(buf: Any, call: str, dest: int, tag: int) -> tuple[Tensor, int, int, int]:
    """Returns the arguments of a message with a buffer's elements."""
    part = simple(buf, call, is_written=False)
    given = part.sent()
    # Copied, because the caller may change the buffer while the request is in flight. A message is kept in the memory of
    # the host, wherever its buffers are: its receive is not known before it comes.
    own = given.clone() if given.device.type == "cpu" else given.cpu()
    data = own.view(torch.uint8) if part.count else torch.empty(0, dtype=torch.uint8, device="cpu")
    return data, dest, tag, _kind_of(part.dtype)


def _kind_of(dtype: torch.dtype) -> int:
    """Returns the index of a type in `KINDS`; the index of bytes if the type is not listed."""
    return KINDS.index(dtype) if dtype in KINDS else BYTES


def _reduction(call: str, op: Op | None) -> Any:
    if op is not None and not isinstance(op, Op):
        raise TypeError(f"{call}: expected an operator such as MPI.SUM, got op={op!r}")
    return (op or _ADD).for_tensors()


def _in_place(part: Part, call: Callable[[Tensor], Any], *, is_written: bool) -> None:
    """Calls with a buffer's elements as a dense tensor. If `is_written`, the buffer gets what the call leaves there."""
    own, flat = part.read(), part.sent()
    call(flat)
    if is_written and (own.is_conj() or own.is_neg() or not part.tensor.is_contiguous()):
        part.write(flat)
