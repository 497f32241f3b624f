"""What goes wrong in a solve.

Owns the exception that all ranks raise, and the sentence of one rank.
"""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["LayerParallelError", "described", "sentence"]


# A list of what went wrong on many ranks helps nobody: what went wrong on the first has often made the others fail.
_SHOWN = 3


class LayerParallelError(RuntimeError):
    """A layer, the loss or the input of one rank made a solve impossible. All ranks of the layers raise it, and the group can go on.

    With replicas, those of all replicas raise it where `layer_parallel.step` was given the wrapped net, and those of one replica otherwise.
    """


def described(error: BaseException) -> str:
    """An exception in a line."""
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def sentence(
    causes: Sequence[str | None], remedy: str = "No gradient was taken over; mend it and go on with the next batch."
) -> str:
    """What all ranks say, given each rank's own cause."""
    # One sentence for what is the same everywhere.
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
