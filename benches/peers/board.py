"""The board of `ranks/board.h` in Python: created by the driver, written by ranks, read by the driver."""

from __future__ import annotations

import mmap
import struct
from pathlib import Path

RANKS = 64
BATCHES = 4096
LINE_BYTES = 64
MARKS_AT = RANKS * LINE_BYTES
SPANS_AT = 2 * MARKS_AT
SPAN_BYTES = 16
BOARD_BYTES = SPANS_AT + RANKS * BATCHES * SPAN_BYTES

Span = tuple[int, int]


def create(path: Path) -> mmap.mmap:
    """Creates the file, all zero, and maps it."""
    with path.open("wb") as file:
        file.truncate(BOARD_BYTES)
    return attach(path)


def attach(path: Path) -> mmap.mmap:
    """Maps the file that the driver has created."""
    with path.open("r+b") as file:
        return mmap.mmap(file.fileno(), BOARD_BYTES)


def row_of(rank: int) -> int:
    """Returns the offset of a rank's spans."""
    return SPANS_AT + rank * BATCHES * SPAN_BYTES


def spans(board: mmap.mmap, rank: int, batches: int) -> list[Span]:
    """Returns begin and end of each batch on this rank, in nanoseconds of the host's clock."""
    at = row_of(rank)
    return list(struct.iter_unpack("=QQ", board[at : at + batches * SPAN_BYTES]))


def write_spans(board: mmap.mmap, rank: int, rows: list[Span]) -> None:
    """Writes a rank's spans."""
    at = row_of(rank)
    board[at : at + len(rows) * SPAN_BYTES] = b"".join(struct.pack("=QQ", *row) for row in rows)
