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
    failed = [f"rank {rank} of the layers failed in {cause}" for rank, cause in enumerate(causes) if cause is not None]
    more = f"; and {len(failed) - _SHOWN} more ranks" if len(failed) > _SHOWN else ""
    return f"{'; '.join(failed[:_SHOWN])}{more}. {remedy}"
