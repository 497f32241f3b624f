"""What is known of a codec with its settings. The table of codecs answers: nobody here decides by a codec's name."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from .. import _native

__all__ = ["Facts", "candidates", "facts", "for_feedback", "needs_feedback"]


@dataclass(frozen=True)
class Facts:
    """What the table says of a codec with its settings.

    Attributes:
        text: the codec with all its settings.
        name: of its row.
        is_exact: whether it loses nothing.
        is_coarse: whether sums lose so much on their way back that error feedback has a residual of these, too.
        is_divergent: whether it loses more than there is, so that with error feedback the residual grows without end.
        is_cast: whether it converts elements one by one, as fast as memory is.
        needs_feedback: whether it is of use only where what it loses is added to what is encoded next.
        hides_magnitudes: whether all elements of a bucket decode to one magnitude.
        next_finer: the codec that loses less; None where nothing is lost.
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
        """Name and bits."""
        return self.text.partition(",")[0]


@lru_cache(maxsize=1024)
def facts(codec: str) -> Facts:
    """What is known of a codec.

    Raises:
        ValueError: it is none; the message says what is accepted.
    """
    return Facts(**_native.codec_facts(codec))


def needs_feedback(codec: str) -> bool:
    """Whether a text is a codec that is of use only with error feedback."""
    try:
        return facts(codec).needs_feedback
    except ValueError:
        return False


def candidates() -> list[str]:
    """What the choice by measurement tries, by the order of the table."""
    return [codec for row in _native.codecs() for codec in row["auto"]]


def for_feedback() -> str:
    """A codec that is made for error feedback."""
    return next(row["spelled"] for row in _native.codecs() if row["needs_feedback"])
