"""Figures of the explicit calls (`all_reduce_quantized` and its kin), by group, collective and key.

Owns the rows that calls are entered in, and how many there may be. What the engine measures of a call it adds to the row's stats
when the call is done; how many bytes it has is known when it is made.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from dataclasses import dataclass, field
from functools import lru_cache
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

from .. import _native
from ._measures import Totals, table
from ._scope import accl_group

__all__ = ["MOST_ROWS", "CallMeasures", "Row", "call_measures", "call_summary", "row_of", "totals"]

# Rows of a group.
MOST_ROWS = 1024


@dataclass(frozen=True)
class CallMeasures:
    """Figures of this rank's compressed explicit calls of a collective with a key.

    Attributes:
        collective: `all_reduce`, `reduce_scatter`, `all_gather` or `all_to_all`.
        key: what was given to the calls; empty for all that had none.
        codec: of the messages that ranks contribute, in the last call.
        calls: compressed calls that were made.
        bits: bits for each element that was sent, metadata included.
        raw_bytes: bytes of what this rank contributed, as `CompressionState.traffic` counts them; of an all_to_all, what it sends to others.
        sent_bytes: bytes that they became.
        error: squared error of sums by their square, of the elements that were compared with exact sums; None of none: calls
            without `Compression(audit=...)`, and those that do not add up. That of a scattered sum is of this rank's part.
        compared: how many elements these are.
        not_finite: buckets that this rank sent as NaN for a NaN or an infinity in them.
        too_large: buckets that this rank sent as NaN because their metadata cannot hold their range.
        codec_seconds: time of this rank for encoding, decoding and adding.

    Error, buckets that became NaN and time are those of calls that are done.
    """

    collective: str
    key: str
    codec: str
    calls: int
    bits: float
    raw_bytes: int
    sent_bytes: int
    error: float | None
    compared: int
    not_finite: int
    too_large: int
    codec_seconds: float

    # Nothing is carried over by the calls themselves.
    carried = None


@dataclass
class Row:
    """Where calls of a collective with a key are entered."""

    stats: _native.ErrorStats = field(default_factory=lambda: _native.ErrorStats(1))
    codec: str = ""
    calls: int = 0
    elements: int = 0
    raw_bytes: int = 0
    sent_bytes: int = 0

    def enter(
        self, codecs: _native.Codecs, codec: str, sizes: tuple[int, ...], dtype: torch.dtype, is_part: bool
    ) -> None:
        """A call was made that sends tensors of so many elements, encoded as parts of sums or as results."""
        elements, sent = totals(codecs, dtype, sizes, is_part)
        with _lock:
            self.codec = codec
            self.calls += 1
            self.elements += elements
            self.raw_bytes += elements * dtype.itemsize
            self.sent_bytes += sent


_lock = threading.Lock()
_rows: WeakKeyDictionary[dist.ProcessGroup, OrderedDict[tuple[str, str], Row]] = WeakKeyDictionary()


def row_of(group: dist.ProcessGroup, collective: str, key: str) -> Row:
    """The row of such calls, which is now the one that was used last; the one that was used longest ago makes room for a new one."""
    with _lock:
        rows = _rows.get(group)
        if rows is None:
            rows = _rows[group] = OrderedDict()
        row = rows.get((collective, key))
        if row is None:
            if len(rows) >= MOST_ROWS:
                rows.popitem(last=False)
            row = rows[collective, key] = Row()
        else:
            rows.move_to_end((collective, key))
        return row


def call_measures(group: dist.ProcessGroup | None = None) -> list[CallMeasures]:
    """Figures of the explicit calls in a group, a row for each collective and key, the one that was used last at the end.

    Calls that travel as they are (other types and operators, one rank, codec `raw`) are not among them. A group keeps 1,024 rows:
    beyond that the one that was used longest ago is forgotten, so give keys to tensors and not to steps.

    Args:
        group: None is the default group; its backend must be accl.

    Raises:
        RuntimeError: there is no group, or its backend is another.
    """
    found = accl_group(group)
    with _lock:
        rows = list(_rows.get(found, {}).items())
        return [_measures(collective, key, row) for (collective, key), row in rows if row.calls]


def call_summary(group: dist.ProcessGroup | None = None) -> str:
    """`call_measures` as a table to print."""
    return table(call_measures(group), {"collective": lambda row: row.collective, "key": lambda row: row.key})


def _measures(collective: str, key: str, row: Row) -> CallMeasures:
    [measured] = row.stats.read()
    since = Totals().plus(measured)
    return CallMeasures(
        collective=collective,
        key=key,
        codec=row.codec,
        calls=row.calls,
        bits=8 * row.sent_bytes / row.elements if row.elements else 0.0,
        raw_bytes=row.raw_bytes,
        sent_bytes=row.sent_bytes,
        error=since.relative_error,
        compared=since.compared,
        not_finite=since.not_finite,
        too_large=since.too_large,
        codec_seconds=since.nanos / 1e9,
    )


@lru_cache(maxsize=1024)
def totals(codecs: _native.Codecs, dtype: torch.dtype, sizes: tuple[int, ...], is_part: bool) -> tuple[int, int]:
    """Elements of tensors, and bytes that they become as parts of sums, or as results."""
    kind, way = str(dtype).removeprefix("torch."), 0 if is_part else 1
    return sum(sizes), sum(codecs.encoded_bytes(0, kind, size)[way] for size in sizes)
