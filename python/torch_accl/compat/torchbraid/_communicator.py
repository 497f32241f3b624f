"""Communicators by mpi4py's names, over process groups of torch.

Owns what ranks say to one another outside of a solve: objects, buffers, messages with tags, splits. The ranks themselves, and when a group is
made for them, are in `_world.py`; the names that a script takes from `MPI` in `_mpi.py`.
"""

from __future__ import annotations

import functools
import os
import pickle
import socket
import sys
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor

__all__ = [
    "ANY_SOURCE",
    "ANY_TAG",
    "COMM_NULL",
    "COMM_TYPE_SHARED",
    "IN_PLACE",
    "UNDEFINED",
    "Comm",
    "Op",
    "Request",
    "Status",
    "tensor_of",
]

ANY_SOURCE = -1
ANY_TAG = -1
UNDEFINED = -32766
COMM_TYPE_SHARED = "COMM_TYPE_SHARED"
IN_PLACE = "IN_PLACE"

# The tag of torch's under which all messages travel: what torch knows of tags has no word for any of them, so each says its own.
_TORCHS_TAG = 7461
# As much is on its way when `send` returns, received or not, as MPIs have it; of more it waits for the receiver.
_EAGER_BYTES = 1 << 16


@dataclass(frozen=True)
class Op:
    """A reduction: of two objects, and torch's of tensors where it has one."""

    name: str
    of_two: Callable[[Any, Any], Any]
    torchs: Any = None

    def __call__(self, a: Any, b: Any) -> Any:
        return self.of_two(a, b)

    def for_tensors(self) -> Any:
        """torch's.

        Raises:
            NotImplementedError: it has none.
        """
        if self.torchs is None:
            raise NotImplementedError(
                f"MPI.{self.name} of buffers: torch has no such reduction; use the method in small letters, of objects"
            )
        return self.torchs


class Status:
    """What `recv` has found out of a message."""

    def __init__(self) -> None:
        self.source = ANY_SOURCE
        self.tag = ANY_TAG
        self.count_bytes = 0

    def Get_source(self) -> int:
        """The rank that it came from."""
        return self.source

    def Get_tag(self) -> int:
        """Its tag."""
        return self.tag

    def Get_count(self) -> int:
        """Its length in bytes."""
        return self.count_bytes


class Request:
    """A message under way."""

    def __init__(self, works: Sequence[dist.Work], kept: Sequence[Tensor], receive: Callable[[], Any] | None = None):
        self._works = list(works)
        # What leaves stays as it is until it has left.
        self._kept = list(kept)
        self._receive = receive
        self._found: Any = None

    @property
    def is_over(self) -> bool:
        """Whether nothing is left to be waited for."""
        return self._receive is None and all(work.is_completed() for work in self._works)

    def wait(self, status: Status | None = None) -> Any:
        """The object, of a receive; None of a send."""
        for work in self._works:
            work.wait()
        self._works.clear()
        self._kept.clear()
        if self._receive is not None:
            self._found, self._receive = self._receive(), None
        return self._found

    def test(self) -> tuple[bool, Any]:
        """Whether it is over, and what `wait` gives.

        Raises:
            NotImplementedError: of a receive, which begins when somebody waits for it.
        """
        if self._receive is not None:
            raise NotImplementedError("test() of irecv: a message is received when somebody waits for it; use wait()")
        return self.is_over, self._found

    Wait = wait

    def Test(self) -> bool:
        """Whether it is over."""
        return self.test()[0]

    @staticmethod
    def waitall(requests: Sequence[Request]) -> list[Any]:
        """What each gives."""
        return [request.wait() for request in requests]

    Waitall = waitall


@dataclass
class _Message:
    source: int
    tag: int
    data: Tensor


class Comm:
    """Ranks that talk with one another. `find` gives their group when it is wanted; None: this rank alone."""

    def __init__(self, find: Callable[[], dist.ProcessGroup | None], name: str = "") -> None:
        self._find = find
        self.name = name
        # Messages that came while another one was waited for.
        self._came: deque[_Message] = deque()
        self._leaving: list[Request] = []

    @property
    def group(self) -> dist.ProcessGroup | None:
        """torch's group of these ranks; None where there is no other rank and no group."""
        return self._find()

    def __repr__(self) -> str:
        return f"<Comm {self.name or hex(id(self))}>"

    # A communicator stands for ranks, and a net that is copied stays on them.
    def __deepcopy__(self, memo: dict[int, Any]) -> Comm:
        return self

    # ---- who

    def Get_rank(self) -> int:
        """This rank's number."""
        group = self.group
        return 0 if group is None else group.rank()

    def Get_size(self) -> int:
        """How many there are."""
        group = self.group
        return 1 if group is None else group.size()

    @property
    def rank(self) -> int:
        """This rank's number."""
        return self.Get_rank()

    @property
    def size(self) -> int:
        """How many there are."""
        return self.Get_size()

    def Get_name(self) -> str:
        """Its name."""
        return self.name

    def Is_inter(self) -> bool:
        """Whether it is between two groups, as none is here."""
        return False

    def Abort(self, errorcode: int = 0) -> NoReturn:
        """Ends this process at once; the launcher ends the others."""
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(errorcode)

    # ---- fewer ranks

    def Split(self, color: int = 0, key: int = 0) -> Comm:
        """The communicator of those that give the same color, in the order of their keys. Collective.

        Raises:
            NotImplementedError: of a part of the world, of which torch cannot split another part.
        """
        group = self.group
        if group is not None and group.size() < dist.get_world_size():
            raise NotImplementedError(
                f"Split of {group.size()} ranks: torch makes a group with all {dist.get_world_size()} of the world; split MPI.COMM_WORLD"
            )
        of_all = self.allgather((color, key))
        mine: Comm = COMM_NULL
        for other in dict.fromkeys(color for color, _ in of_all if color != UNDEFINED):
            members = [rank for rank, (theirs, _) in enumerate(of_all) if theirs == other]
            members.sort(key=lambda rank: (of_all[rank][1], rank))
            # All ranks make all groups, in the same order.
            part = self._part([rank if group is None else dist.get_global_rank(group, rank) for rank in members])
            if other == color:
                mine = Comm(lambda part=part: part, f"{self.name} split {color}")  # type: ignore[misc]
        return mine

    def _part(self, ranks: Sequence[int]) -> dist.ProcessGroup | None:
        """A group of ranks of the world, in this order, on them; None for one rank, and on the others."""
        if len(ranks) == 1:
            return None
        group = dist.new_group(list(ranks), sort_ranks=False)
        return group if isinstance(group, dist.ProcessGroup) else None

    def Split_type(self, split_type: object = COMM_TYPE_SHARED, key: int = 0) -> Comm:
        """The communicator of the ranks of this host. Collective."""
        if split_type != COMM_TYPE_SHARED:
            raise NotImplementedError(f"Split_type({split_type}): MPI.COMM_TYPE_SHARED is the only one here")
        hosts = self.allgather(socket.gethostname())
        return self.Split(hosts.index(socket.gethostname()), key)

    def Dup(self) -> Comm:
        """The same ranks, with messages of their own. Collective."""
        return self.Split(0, self.rank)

    Clone = Dup

    def Free(self) -> None:
        """Ends the group. Collective; the world stays."""
        group = self.group
        if group is not None and group is not dist.group.WORLD:
            dist.destroy_process_group(group)

    # ---- all together, objects

    def Barrier(self) -> None:
        """Waits until all are here."""
        if (group := self.group) is not None:
            dist.barrier(group=group)

    barrier = Barrier

    def bcast(self, obj: Any = None, root: int = 0) -> Any:
        """The object of one rank."""
        group = self.group
        if group is None:
            return obj
        objects = [obj]
        dist.broadcast_object_list(objects, group=group, group_src=root)
        return objects[0]

    def gather(self, sendobj: Any, root: int = 0) -> list[Any] | None:
        """The objects of all, on one rank."""
        group = self.group
        if group is None:
            return [sendobj]
        found: list[Any] | None = [None] * group.size() if group.rank() == root else None
        dist.gather_object(sendobj, found, group=group, group_dst=root)
        return found

    def allgather(self, sendobj: Any) -> list[Any]:
        """The objects of all."""
        group = self.group
        if group is None:
            return [sendobj]
        found: list[Any] = [None] * group.size()
        dist.all_gather_object(found, sendobj, group=group)
        return found

    def scatter(self, sendobj: Sequence[Any] | None = None, root: int = 0) -> Any:
        """Of a list of one rank, to each its own."""
        group = self.group
        if group is None:
            assert sendobj is not None, "scatter: the root gives a list"
            (mine,) = sendobj
            return mine
        found: list[Any] = [None]
        dist.scatter_object_list(found, list(sendobj) if sendobj is not None else None, group=group, group_src=root)
        return found[0]

    def alltoall(self, sendobj: Sequence[Any]) -> list[Any]:
        """Of each one's list, to each its own."""
        rank = self.rank
        return [theirs[rank] for theirs in self.allgather(list(sendobj))]

    def reduce(self, sendobj: Any, op: Op | None = None, root: int = 0) -> Any:
        """The objects of all in one, in the order of ranks, on one rank."""
        found = self.gather(sendobj, root)
        return None if found is None else functools.reduce(op or _ADD, found)

    def allreduce(self, sendobj: Any, op: Op | None = None) -> Any:
        """The objects of all in one, in the order of ranks."""
        return functools.reduce(op or _ADD, self.allgather(sendobj))

    def scan(self, sendobj: Any, op: Op | None = None) -> Any:
        """The objects of the ranks up to this one in one."""
        return functools.reduce(op or _ADD, self.allgather(sendobj)[: self.rank + 1])

    # ---- all together, buffers: tensors, arrays, or [array, type]

    def Bcast(self, buf: Any, root: int = 0) -> None:
        """The elements of one rank."""
        if (group := self.group) is not None:
            _in_place(buf, lambda flat: dist.broadcast(flat, group=group, group_src=root))

    def Allreduce(self, sendbuf: Any, recvbuf: Any, op: Op | None = None) -> None:
        """Elements of all in one."""
        reduction = (op or _ADD).for_tensors()
        if sendbuf is not IN_PLACE:
            tensor_of(recvbuf).copy_(tensor_of(sendbuf))
        if (group := self.group) is not None:
            _in_place(recvbuf, lambda flat: dist.all_reduce(flat, reduction, group=group))

    def Reduce(self, sendbuf: Any, recvbuf: Any, op: Op | None = None, root: int = 0) -> None:
        """The same on one rank."""
        reduction = (op or _ADD).for_tensors()
        is_root = self.rank == root
        given = tensor_of(recvbuf if sendbuf is IN_PLACE else sendbuf).clone(memory_format=torch.contiguous_format)
        if (group := self.group) is not None:
            dist.reduce(given, op=reduction, group=group, group_dst=root)
        if is_root:
            tensor_of(recvbuf).copy_(given.view(tensor_of(recvbuf).shape))

    def Allgather(self, sendbuf: Any, recvbuf: Any) -> None:
        """Elements of all, one rank's after the other's."""
        size, given = self.size, tensor_of(sendbuf).contiguous()
        parts = [torch.empty_like(given) for _ in range(size)]
        if (group := self.group) is None:
            parts[0].copy_(given)
        else:
            dist.all_gather(parts, given, group=group)
        _fill(recvbuf, parts)

    def Gather(self, sendbuf: Any, recvbuf: Any = None, root: int = 0) -> None:
        """The same on one rank."""
        size, given = self.size, tensor_of(sendbuf).contiguous()
        is_root = self.rank == root
        parts = [torch.empty_like(given) for _ in range(size)] if is_root else None
        if (group := self.group) is None:
            parts = [given]
        else:
            dist.gather(given, parts, group=group, group_dst=root)
        if parts is not None:
            _fill(recvbuf, parts)

    def Scatter(self, sendbuf: Any, recvbuf: Any, root: int = 0) -> None:
        """Elements of one rank, to each its part."""
        size, out = self.size, tensor_of(recvbuf)
        part = torch.empty(out.shape, dtype=out.dtype, device=out.device)
        parts = list(tensor_of(sendbuf).reshape(size, *out.shape).unbind(0)) if self.rank == root else None
        if (group := self.group) is None:
            assert parts is not None
            part = parts[0]
        else:
            given = None if parts is None else [each.contiguous() for each in parts]
            dist.scatter(part, given, group=group, group_src=root)
        out.copy_(part)

    def Alltoall(self, sendbuf: Any, recvbuf: Any) -> None:
        """Elements of each, to each its part."""
        given, out = tensor_of(sendbuf).contiguous(), tensor_of(recvbuf)
        if (group := self.group) is None:
            out.copy_(given.view(out.shape))
            return
        found = torch.empty(out.numel(), dtype=out.dtype, device=out.device)
        dist.all_to_all_single(found, given.flatten(), group=group)
        out.copy_(found.view(out.shape))

    # ---- from one to another

    def send(self, obj: Any, dest: int, tag: int = 0) -> None:
        """Sends an object. A small one is on its way when this returns; of a large one the receiver has begun."""
        self._send(_bytes_of(obj), dest, tag)

    ssend = send

    def isend(self, obj: Any, dest: int, tag: int = 0) -> Request:
        """Begins to send an object."""
        return self._post(_bytes_of(obj), dest, tag)

    def recv(self, buf: Any = None, source: int = ANY_SOURCE, tag: int = ANY_TAG, status: Status | None = None) -> Any:
        """Receives an object."""
        return pickle.loads(self._take(source, tag, status).data.numpy().tobytes())

    def irecv(self, buf: Any = None, source: int = ANY_SOURCE, tag: int = ANY_TAG) -> Request:
        """An object that is received when somebody waits for it."""
        return Request([], [], lambda: self.recv(None, source, tag))

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
        self._send(_bytes_in(buf), dest, tag)

    Ssend = Send

    def Isend(self, buf: Any, dest: int, tag: int = 0) -> Request:
        """Begins to send them."""
        return self._post(_bytes_in(buf), dest, tag)

    def Recv(self, buf: Any, source: int = ANY_SOURCE, tag: int = ANY_TAG, status: Status | None = None) -> None:
        """Receives elements into a buffer, which must have room for them.

        Raises:
            ValueError: more has come than fits.
        """
        out = tensor_of(buf)
        message = self._take(source, tag, status)
        came, fits = message.data.numel(), out.numel() * out.element_size()
        if came > fits or came % out.element_size():
            raise ValueError(
                f"Recv: {came} bytes came from rank {message.source}, and the buffer is {out.numel()} elements of {out.dtype}"
            )
        found = message.data.clone().view(out.dtype)
        if came == fits:
            out.copy_(found.view(out.shape))
        else:
            out.view(-1)[: found.numel()].copy_(found)

    def Irecv(self, buf: Any, source: int = ANY_SOURCE, tag: int = ANY_TAG) -> Request:
        """The same when somebody waits for it."""
        return Request([], [], lambda: self.Recv(buf, source, tag))

    def _send(self, data: Tensor, dest: int, tag: int) -> None:
        request = self._post(data, dest, tag)
        self._leaving = [each for each in self._leaving if not each.is_over]
        if data.numel() > _EAGER_BYTES:
            request.wait()
        else:
            self._leaving.append(request)

    def _post(self, data: Tensor, dest: int, tag: int) -> Request:
        group, size = self.group, self.size
        if not 0 <= dest < size:
            raise ValueError(f"send to rank {dest}: this communicator has ranks 0 to {size - 1}")
        if tag < 0:
            raise ValueError(f"send with tag {tag}: give one from 0")
        if dest == self.rank or group is None:
            self._came.append(_Message(self.rank, tag, data.clone()))
            return Request([], [])
        device = _device(group)
        parts = [torch.tensor([tag, data.numel()], dtype=torch.int64, device=device), data.to(device)]
        works = [dist.isend(part, group=group, group_dst=dest, tag=_TORCHS_TAG) for part in parts if part.numel()]
        return Request([work for work in works if work is not None], parts)

    def _take(self, source: int, tag: int, status: Status | None) -> _Message:
        message = self._waiting(source, tag)
        while message is None:
            self._came.append(self._next(source))
            message = self._waiting(source, tag)
        if status is not None:
            status.source, status.tag, status.count_bytes = message.source, message.tag, message.data.numel()
        return message

    def _waiting(self, source: int, tag: int) -> _Message | None:
        for place, message in enumerate(self._came):
            if source in (ANY_SOURCE, message.source) and tag in (ANY_TAG, message.tag):
                del self._came[place]
                return message
        return None

    def _next(self, source: int) -> _Message:
        """The next message of a rank, or of any, whatever its tag."""
        group, size = self.group, self.size
        if source != ANY_SOURCE and not 0 <= source < size:
            raise ValueError(f"recv from rank {source}: this communicator has ranks 0 to {size - 1}")
        if group is None or source == self.rank:
            raise RuntimeError(f"recv from rank {source}: it is this rank, which has sent itself nothing of the kind")
        device = _device(group)
        header = torch.zeros(2, dtype=torch.int64, device=device)
        if source == ANY_SOURCE:
            source = dist.get_group_rank(group, dist.recv(header, group=group, tag=_TORCHS_TAG))
        else:
            dist.recv(header, group=group, group_src=source, tag=_TORCHS_TAG)
        tag, count = header.tolist()
        data = torch.empty(count, dtype=torch.uint8, device=device)
        if count:
            dist.recv(data, group=group, group_src=source, tag=_TORCHS_TAG)
        return _Message(source, tag, data.cpu())


class _Null(Comm):
    """No communicator: what `Split` gives to who is in none."""

    def __init__(self) -> None:
        super().__init__(self._refuse, "COMM_NULL")

    def __bool__(self) -> bool:
        return False

    @staticmethod
    def _refuse() -> NoReturn:
        raise ValueError("this is MPI.COMM_NULL: Split was given MPI.UNDEFINED here")


COMM_NULL = _Null()
_ADD = Op("SUM", lambda a, b: a + b, dist.ReduceOp.SUM)


def _device(group: dist.ProcessGroup) -> torch.device:
    """Where a group has messages that are not a caller's."""
    devices = group._device_types
    cpu = torch.device("cpu")
    return cpu if cpu in devices or not devices else devices[0]


def _bytes_of(obj: Any) -> Tensor:
    return torch.frombuffer(bytearray(pickle.dumps(obj)), dtype=torch.uint8)


def _bytes_in(buf: Any) -> Tensor:
    given = tensor_of(buf).detach().contiguous().cpu()
    # A copy: a request may outlive what the caller does with the buffer.
    return given.flatten().view(torch.uint8).clone() if given.numel() else given.new_empty(0, dtype=torch.uint8)


def tensor_of(buf: Any) -> Tensor:
    """A buffer as a tensor of the same memory: a tensor, an array of numpy, or a list of one of them and a type.

    Raises:
        TypeError: it is nothing of the kind.
    """
    if isinstance(buf, list | tuple) and buf:
        buf = buf[0]
    if isinstance(buf, Tensor):
        return buf.detach()
    if hasattr(buf, "__array_interface__"):
        import numpy

        # Not `as_tensor`, which makes a copy on the default device.
        return torch.from_numpy(numpy.asarray(buf))
    raise TypeError(
        f"a buffer is a tensor or an array of numpy, not {type(buf).__name__}; objects have methods in small letters"
    )


def _in_place(buf: Any, call: Callable[[Tensor], Any]) -> None:
    """Calls with the elements of a buffer, dense, whose result they become."""
    tensor = tensor_of(buf)
    dense = tensor.contiguous()
    call(dense)
    if dense.data_ptr() != tensor.data_ptr():
        tensor.copy_(dense)


def _fill(recvbuf: Any, parts: Sequence[Tensor]) -> None:
    out = tensor_of(recvbuf)
    out.copy_(torch.stack(list(parts)).view(out.shape))
