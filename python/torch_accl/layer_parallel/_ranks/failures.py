"""Errors in a solve.

Owns the exception that all ranks raise, and the text that describes the causes.
"""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["LayerParallelError", "described", "sentence"]


# Number of distinct causes that are shown. A long list does not help: the first error has often caused the others.
_SHOWN = 3


class LayerParallelError(RuntimeError):
    """A layer, the loss or the input of one rank made a solve impossible.

    All ranks of the layers raise it, and the group remains usable. With replicas, the ranks of all replicas raise it if
    `layer_parallel.step` got the wrapped net. Otherwise the ranks of one replica raise it.
    """


def described(error: BaseException) -> str:
    """Describes an exception in one line."""
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def sentence(
    causes: Sequence[str | None],
    remedy: str = "No gradients were accumulated; fix the cause and continue with the next batch.",
) -> str:
    """Returns the message that all ranks raise, from each rank's own cause."""
    # Ranks with the same cause share a sentence.
    of_cause: dict[str, list[int]] = {}
    for rank, cause in enumerate(causes):
        if cause is not None:
            of_cause.setdefault(cause, []).append(rank)
    failed = [f"{_ranks(ranks)} of the layers failed in {cause}" for cause, ranks in of_cause.items()]
    more = sum(len(ranks) for ranks in list(of_cause.values())[_SHOWN:])
    return f"{'; '.join(failed[:_SHOWN])}{f'; and {more} more ranks' if more else ''}. {remedy}"


def _ranks(ranks: Sequence[int]) -> str:
    *first, last = ranks
    return f"ranks {', '.join(map(str, first))} and {last}" if first else f"rank {last}"
