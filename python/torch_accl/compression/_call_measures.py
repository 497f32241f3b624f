"""Figures of explicit calls such as `all_reduce_quantized`, by group, collective and key.

This module owns the rows that record calls, and their maximum number. The number of bytes of a call is known when it is
issued. The engine adds its measurements to the row's stats when the call completes.
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

# Maximum rows of a group.
MOST_ROWS = 1024


@dataclass(frozen=True)
class CallMeasures:
    """Figures of this rank's compressed explicit calls of one collective with one key.

    Attributes:
        collective: `all_reduce`, `reduce_scatter`, `all_gather` or `all_to_all`.
        key: the key given to the calls; empty for all calls without a key.
        codec: codec of the messages that ranks contribute, in the last call.
        calls: compressed calls that were issued.
        bits: bits sent per element, metadata included.
        raw_bytes: uncompressed bytes that this rank contributed, as `CompressionState.traffic` counts them; for all_to_all, the bytes
            for other ranks.
        sent_bytes: compressed size of these bytes.
        error: squared error of sums divided by their square, over the elements that were compared with exact sums. None if no
            element was compared: calls without `Compression(audit=...)`, and calls that do not sum. For a reduce_scatter it
            covers this rank's part.
        compared: number of elements that were compared.
        not_finite: buckets that this rank sent as NaN because they contained a NaN or an infinity.
        too_large: buckets that this rank sent as NaN because their metadata cannot hold their range.
        codec_seconds: seconds that this rank spent on encoding, decoding and adding.

    `error`, `compared`, the NaN buckets and `codec_seconds` cover only calls that have completed.
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

    # Explicit calls have no residuals. `table` reads this attribute of every row.
    carried = None


@dataclass
class Row:
    """Record of the calls of one collective with one key."""

    stats: _native.ErrorStats = field(default_factory=lambda: _native.ErrorStats(1))
    codec: str = ""
    calls: int = 0
    elements: int = 0
    raw_bytes: int = 0
    sent_bytes: int = 0

    def enter(
        self, codecs: _native.Codecs, codec: str, sizes: tuple[int, ...], dtype: torch.dtype, is_part: bool
    ) -> None:
        """Records an issued call on tensors of `sizes` elements, encoded as parts of sums (`is_part`) or as results."""
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
    """Returns the row for these calls and marks it as the most recently used. A new row may evict the least recently used one."""
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
    """Returns figures of the explicit calls in a group: one row per collective and key, the most recently used row last.

    Calls that are sent uncompressed (other types and operators, one rank, codec `raw`) are not included. A group keeps 1,024
    rows and then drops the least recently used one. Therefore derive keys from tensors, not from steps.

    Args:
        group: None is the default group; its backend must be accl.

    Raises:
        RuntimeError: there is no group, or its backend is not accl.
    """
    found = accl_group(group)
    with _lock:
        rows = list(_rows.get(found, {}).items())
        return [_measures(collective, key, row) for (collective, key), row in rows if row.calls]


def call_summary(group: dist.ProcessGroup | None = None) -> str:
    """Returns `call_measures` as a table to print."""
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
    """Returns the number of elements of the tensors, and their encoded bytes as parts of sums (`is_part`) or as results."""
    kind, way = str(dtype).removeprefix("torch."), 0 if is_part else 1
    return sum(sizes), sum(codecs.encoded_bytes(0, kind, size)[way] for size in sizes)
