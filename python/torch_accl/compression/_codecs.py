"""Facts about a codec with its settings, from the table of codecs. No code in this package decides by a codec's name."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from .. import _native

__all__ = ["Facts", "candidates", "facts", "for_feedback", "needs_feedback"]


@dataclass(frozen=True)
class Facts:
    """The table's facts about a codec with its settings.

    Attributes:
        text: the codec with all its settings.
        name: name of its row in the table.
        is_exact: whether it loses nothing.
        is_coarse: whether results lose so much that error feedback keeps a residual of sums, too.
        is_divergent: whether it loses more than the value itself, so that residuals of error feedback grow without bound.
        is_cast: whether it converts elements one by one, at the speed of memory.
        needs_feedback: whether it is useful only if its loss is added to the next encoded values (error feedback).
        hides_magnitudes: whether all elements of a bucket decode to the same magnitude.
        next_finer: the codec with the next smaller loss; None if this one loses nothing.
    """

    text: str
    name: str
    is_exact: bool
    is_coarse: bool
    is_divergent: bool
    is_cast: bool
    needs_feedback: bool
    hides_magnitudes: bool
    next_finer: str | None

    @property
    def short(self) -> str:
        """Name and bits, without other settings."""
        return self.text.partition(",")[0]


@lru_cache(maxsize=1024)
def facts(codec: str) -> Facts:
    """Returns the facts about a codec.

    Raises:
        ValueError: the text is not a codec; the message lists what is accepted.
    """
    return Facts(**_native.codec_facts(codec))


def needs_feedback(codec: str) -> bool:
    """Whether a text is a codec that is useful only with error feedback."""
    try:
        return facts(codec).needs_feedback
    except ValueError:
        return False


def candidates() -> list[str]:
    """Returns the codecs that `codec="auto"` tries, in the order of the table."""
    return [codec for row in _native.codecs() for codec in row["auto"]]


def for_feedback() -> str:
    """Returns a codec that is made for error feedback."""
    return next(row["spelled"] for row in _native.codecs() if row["needs_feedback"])
