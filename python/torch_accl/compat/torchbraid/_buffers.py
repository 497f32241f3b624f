"""Buffers in the forms that mpi4py accepts: an array or a tensor alone, or in a list with counts, displacements and a
type.

Owns the forms, and the checks that a form fits its memory. `simple` and `vector` parse a form; a `Part` holds the
elements that it selects. Calls that move elements are in `_communicator.py`.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, Final

import torch
from torch import Tensor

__all__ = ["BYTE", "IN_PLACE", "Datatype", "Part", "simple", "tensor_of", "vector"]

IN_PLACE: Final = "IN_PLACE"

_FORMS = (
    "expected a buffer, [buffer, count], [buffer, type], [buffer, count, type], [buffer, (count, displacement), type] or "
    "[buffer, count, displacement, type]"
)


@dataclass(frozen=True)
class Datatype:
    """An element type by MPI's name. `dtype` is torch's type; None stands for bytes, which fit any buffer."""

    name: str
    dtype: torch.dtype | None

    def Get_name(self) -> str:
        """Returns MPI's name of the type."""
        return f"MPI_{self.name}"

    def Get_size(self) -> int:
        """Returns the bytes of an element."""
        return 1 if self.dtype is None else self.dtype.itemsize

    def __str__(self) -> str:
        return f"MPI.{self.name}"


BYTE = Datatype("BYTE", None)

# Type codes of numpy and of Python's arrays, which mpi4py accepts as types.
_CODES = {
    "?": torch.bool,
    "b": torch.int8,
    "B": torch.uint8,
    "h": torch.int16,
    "i": torch.int32,
    "l": torch.int64,
    "q": torch.int64,
    "e": torch.float16,
    "f": torch.float32,
    "d": torch.float64,
    "F": torch.complex64,
    "D": torch.complex128,
    "i1": torch.int8,
    "u1": torch.uint8,
    "i2": torch.int16,
    "i4": torch.int32,
    "i8": torch.int64,
    "f2": torch.float16,
    "f4": torch.float32,
    "f8": torch.float64,
    "c8": torch.complex64,
    "c16": torch.complex128,
}


@dataclass(frozen=True)
class Part:
    """`count` elements of a tensor from `start` on, in the order of its indices."""

    tensor: Tensor
    start: int
    count: int

    @property
    def dtype(self) -> torch.dtype:
        """The type of the elements."""
        return self.tensor.dtype

    def read(self) -> Tensor:
        """Returns the elements, dense and in one dimension: the buffer's own memory, or a copy if that is not dense."""
        # `reshape` does not copy a strided tensor of one dimension, so make it contiguous.
        return self.tensor.reshape(-1)[self.start : self.start + self.count].contiguous()

    def sent(self) -> Tensor:
        """Returns the elements as `read` does, as the numbers that a lazily conjugated or negated view shows."""
        return self.read().resolve_conj().resolve_neg()

    def write(self, found: Tensor) -> None:
        """Writes at most `count` elements to the start of this part."""
        # torch changes a tensor made in inference mode in that mode only.
        with torch.inference_mode(self.tensor.is_inference()):
            if self.tensor.is_contiguous():
                self.read()[: found.numel()].copy_(found)
                return
            whole = self.tensor.reshape(-1)
            whole[self.start : self.start + found.numel()].copy_(found)
            self.tensor.copy_(whole.view(self.tensor.shape))

    def block(self, number: int, blocks: int) -> Part:
        """Returns part `number` of `blocks` equal parts."""
        count = self.count // blocks
        return Part(self.tensor, self.start + number * count, count)

    def check_like(self, other: Part, call: str, blocks: int = 1) -> None:
        """Checks that the buffer that is sent fits the buffer that receives it, which has room for `blocks` of it.

        Raises:
            TypeError: the elements have different types.
            ValueError: the numbers of elements differ.
        """
        if other.dtype != self.dtype:
            raise TypeError(
                f"{call}: the send buffer has {self.dtype}, the receive buffer {other.dtype}; give buffers of one type"
            )
        if other.count != self.count * blocks:
            raise ValueError(
                f"{call}: it sends {self.count} elements{f' from each of {blocks} ranks' if blocks > 1 else ''} but receives {other.count}; give equal counts"
            )


def tensor_of(buf: Any, call: str, *, is_written: bool) -> Tensor:
    """Returns a buffer as a tensor of the same memory. A read-only array that is only sent may be copied.

    A buffer in C's or Fortran's order becomes a tensor in the order of memory, as in MPI. Other buffers keep the order of
    their indices.

    Raises:
        TypeError: it is neither a tensor nor a numpy array, or the call writes to it and it cannot be written.
    """
    if isinstance(buf, Tensor):
        tensor = buf.detach()
    elif hasattr(buf, "__array_interface__"):
        import numpy

        if is_written and isinstance(buf, numpy.generic):
            raise TypeError(
                f"{call}: the receive buffer is a number ({type(buf).__name__}), which cannot be written; give an array, such as a[i : i + 1]"
            )
        array = numpy.asarray(buf)
        if not array.flags.writeable:
            if is_written:
                raise TypeError(f"{call}: the receive buffer is a read-only array; give a writable one")
            # torch has no read-only tensors, and warns of memory that must not be written.
            array = array.copy()
        # `as_tensor` may need a type; `from_numpy` takes the array's own.
        tensor = torch.from_numpy(array)
    else:
        raise TypeError(
            f"{call}: expected a tensor or a numpy array as buffer, got {type(buf).__name__}; methods in lower case take objects"
        )
    if is_written and _overlaps(tensor):
        raise TypeError(
            f"{call}: elements of the receive buffer share memory, as after expand(); give a buffer of {tensor.numel()} separate elements"
        )
    turned = tensor.permute(tuple(reversed(range(tensor.ndim))))
    return turned if turned.is_contiguous() and not tensor.is_contiguous() else tensor


def _overlaps(tensor: Tensor) -> bool:
    """Returns whether elements share memory. Rare layouts whose elements interleave without overlap count as shared."""
    reach = 0
    for stride, size in sorted((stride, size) for stride, size in zip(tensor.stride(), tensor.shape) if size > 1):
        if stride <= reach:
            return tensor.numel() > 0
        reach += (size - 1) * stride
    return False


def simple(buf: Any, call: str, blocks: int = 1, *, is_written: bool, is_reduced: bool = False) -> Part:
    """Returns the elements that a form selects. A count is the count of one of `blocks` equal parts, as in MPI.

    Raises:
        TypeError: a form or a type that does not fit the buffer, or memory that cannot be written.
        ValueError: more elements than the buffer has.
    """
    tensor, counts, displs = _unpacked(buf, call, is_vector=False, is_written=is_written, is_reduced=is_reduced)
    start = 0 if displs is None else _number(displs, call, "displacement")
    if counts is None:
        total = tensor.numel() - start
        if total % blocks:
            raise ValueError(f"{call}: {total} elements cannot be split into {blocks} equal parts, one for each rank")
    else:
        total = _number(counts, call, "count") * blocks
    return _fitting(tensor, start, total, call)


def vector(buf: Any, call: str, blocks: int, *, is_written: bool) -> list[Part]:
    """Returns the elements that a form selects for each of `blocks` ranks. Without counts the parts are equal; without
    displacements they follow one another.

    Raises:
        TypeError: a form or a type that does not fit the buffer, or memory that cannot be written.
        ValueError: more elements than the buffer has, or counts for another number of ranks.
    """
    tensor, given, displs = _unpacked(buf, call, is_vector=True, is_written=is_written, is_reduced=False)
    if given is None:
        if tensor.numel() % blocks:
            raise ValueError(
                f"{call}: {tensor.numel()} elements cannot be split into {blocks} equal parts; give a count for each rank"
            )
        given = tensor.numel() // blocks
    counts = _numbers(given, call, "count", blocks)
    starts: Sequence[int]
    if displs is None:
        starts = list(accumulate(counts, initial=0))[:-1]
    else:
        starts = _numbers(displs, call, "displacement", blocks, is_distance=True)
    return [_fitting(tensor, start, count, call) for start, count in zip(starts, counts)]


def _unpacked(buf: Any, call: str, *, is_vector: bool, is_written: bool, is_reduced: bool) -> tuple[Tensor, Any, Any]:
    """Returns the memory in elements of the form's type, the counts and the displacements."""
    if not isinstance(buf, list | tuple):
        return tensor_of(buf, call, is_written=is_written), None, None
    if not buf:
        raise TypeError(f"{call}: got an empty list; {_FORMS}")
    data, *rest = buf
    kind = rest.pop() if rest and isinstance(rest[-1], Datatype | str) else None
    if len(rest) > (1 if kind is None else 2):
        raise TypeError(f"{call}: the last of {len(buf)} list entries is not a type; {_FORMS}")
    counts, displs = rest if len(rest) == 2 else (rest[0] if rest else None, None)
    # A single list is the counts by rank where a call takes such counts.
    if len(rest) == 1 and isinstance(counts, tuple if is_vector else list | tuple):
        if len(counts) != 2:
            raise TypeError(f"{call}: expected (count, displacement), got {counts!r}; {_FORMS}")
        counts, displs = counts
    return _typed(tensor_of(data, call, is_written=is_written), kind, call, is_reduced=is_reduced), counts, displs


def _typed(tensor: Tensor, kind: Datatype | str | None, call: str, *, is_reduced: bool) -> Tensor:
    if kind is None:
        return tensor
    if isinstance(kind, str) and kind not in _CODES:
        raise TypeError(f"{call}: type {kind!r}; expected an MPI type such as MPI.DOUBLE, or one of {' '.join(_CODES)}")
    wanted = _CODES[kind] if isinstance(kind, str) else kind.dtype
    if wanted == tensor.dtype:
        return tensor
    if wanted is not None:
        raise TypeError(
            f"{call}: type {kind} is {wanted}, but the buffer has {tensor.dtype}; omit the type or give the buffer's type"
        )
    if is_reduced or not tensor.is_contiguous():
        why = "bytes cannot be summed" if is_reduced else "the buffer is not contiguous"
        raise TypeError(f"{call}: type {kind} of a buffer of {tensor.dtype}: {why}; omit the type")
    return tensor.view(-1).view(torch.uint8)


def _fitting(tensor: Tensor, start: int, count: int, call: str) -> Part:
    if start + count > tensor.numel() or count < 0:
        raise ValueError(
            f"{call}: elements {start} to {start + count} exceed the buffer's {tensor.numel()} elements; give a smaller count"
        )
    return Part(tensor, start, count)


def _number(given: Any, call: str, what: str) -> int:
    try:
        number = operator.index(given)
    except TypeError:
        raise TypeError(f"{call}: {what} {given!r}; expected an integer; {_FORMS}") from None
    if number < 0:
        raise ValueError(f"{call}: {what} {number}; expected at least 0")
    return number


def _numbers(given: Any, call: str, what: str, blocks: int, *, is_distance: bool = False) -> Sequence[int]:
    """Returns a number for each of `blocks` ranks, from a list, an array or a tensor of them. A single integer is the
    number of each rank, or with `is_distance` the distance between the numbers of two ranks."""
    try:
        # Arrays and tensors of several numbers have `__index__` too.
        several = list(given)
    except TypeError:
        number = _number(given, call, what)
        return [rank * number if is_distance else number for rank in range(blocks)]
    try:
        numbers = [_number(each, call, what) for each in several]
    except TypeError:
        raise TypeError(f"{call}: {what}s {given!r}; expected an integer for each of {blocks} ranks") from None
    if len(numbers) != blocks:
        raise ValueError(f"{call}: {len(numbers)} {what}s for {blocks} ranks; give one for each")
    return numbers
