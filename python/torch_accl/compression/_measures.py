"""Figures of what compression did to each parameter, or to each kind of explicit call, measured during training."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields
from typing import Any

from .. import _native

__all__ = ["Measures", "Totals", "table"]


@dataclass(frozen=True)
class Measures:
    """Figures of one parameter since its state was created.

    Attributes:
        name: name of the parameter.
        codec: codec of parts of its sums; None if it is sent unchanged.
        calls: number of its gradients that were sent compressed.
        bits: bits per element as part of a sum, metadata included.
        raw_bytes: uncompressed bytes of these gradients.
        sent_bytes: compressed bytes of these gradients.
        error: squared error of sums divided by their square, over the elements that were compared with exact sums; None if no
            element was compared. For a reduce_scatter it covers this rank's part.
        compared: number of elements that were compared.
        carried: with error feedback, norm of this rank's residual divided by the norm of its gradient, as the mean over calls;
            None without error feedback.
        not_finite: buckets that this rank sent as NaN because they contained a NaN or an infinity.
        too_large: buckets that this rank sent as NaN because their metadata cannot hold their range.
        codec_seconds: seconds that this rank spent on encoding, decoding and adding.
    """

    name: str
    codec: str | None
    calls: int
    bits: float
    raw_bytes: int
    sent_bytes: int
    error: float | None
    compared: int
    carried: float | None
    not_finite: int
    too_large: int
    codec_seconds: float


@dataclass(frozen=True)
class Totals:
    """Sums of the engine's measurements of one tensor; the fields are the same as in `_native.Measured`."""

    calls: int = 0
    compared: int = 0
    error: float = 0.0
    square: float = 0.0
    carried_calls: int = 0
    carried: float = 0.0
    not_finite: int = 0
    too_large: int = 0
    nanos: int = 0

    def plus(self, other: _native.Measured | Totals, by: int = 1) -> Totals:
        """Returns the sum of these totals and `by` times the others."""
        names = [field.name for field in fields(Totals)]
        return Totals(**{name: getattr(self, name) + by * getattr(other, name) for name in names})

    @property
    def relative_error(self) -> float | None:
        """Squared error divided by the square of the exact values; None if nothing was compared."""
        return self.error / self.square if self.square else None

    @property
    def mean_carried(self) -> float | None:
        """Mean over calls of the residual's norm divided by the gradient's norm; None without such calls."""
        return self.carried / self.carried_calls if self.carried_calls else None


_NAMES: Mapping[str, Callable[[Any], str]] = {"parameter": lambda row: row.name}

_COLUMNS: Mapping[str, Callable[[Any], str]] = {
    "codec": lambda row: (row.codec or "raw").partition(",")[0],
    "calls": lambda row: f"{row.calls}",
    "bits": lambda row: f"{row.bits:.2f}" if row.calls else "",
    "sent MB": lambda row: f"{row.sent_bytes / 1e6:.2f}",
    "of MB": lambda row: f"{row.raw_bytes / 1e6:.2f}",
    "error": lambda row: "" if row.error is None else f"{row.error:.2g}",
    "carried": lambda row: "" if row.carried is None else f"{row.carried:.2g}",
    "NaN buckets": lambda row: f"{row.not_finite + row.too_large}" if row.not_finite + row.too_large else "",
    "codec ms": lambda row: f"{1e3 * row.codec_seconds:.1f}" if row.calls else "",
}


def table(rows: Iterable[Any], names: Mapping[str, Callable[[Any], str]] = _NAMES) -> str:
    """Returns the rows as a table to print. `names` are the first columns; `error` is squared error divided by the square."""
    columns = {**names, **_COLUMNS}
    lines = [list(columns), *([show(row) for show in columns.values()] for row in rows)]
    widths = [max(len(line[column]) for line in lines) for column in range(len(columns))]
    texts = len(names) + 1
    return "\n".join(
        "  ".join(
            cell.ljust(width) if column < texts else cell.rjust(width) for column, (cell, width) in enumerate(cells)
        )
        for cells in (zip(line, widths, strict=True) for line in lines)
    )
