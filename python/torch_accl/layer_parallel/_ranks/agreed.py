"""Operations that all ranks of a net do together outside a batch.

Owns two rules: an error on one rank is raised on all, and tensors go from any rank to any other without a cyclic wait.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import TypeVar

from torch import Tensor

from .failures import LayerParallelError, described, sentence
from .wire import Wire, tried

__all__ = ["agreed", "exchange"]


_T = TypeVar("_T")


def agreed(wire: Wire, what: str, remedy: str, call: Callable[[], _T], *, is_for_all: bool = False) -> list[_T]:
    """Returns the results of `call` on all ranks, in rank order. If `call` raises on any rank, all ranks raise.

    With `is_for_all`, an error with the same text on all ranks is raised unchanged instead of as `LayerParallelError`.
    """
    found, error = None, None
    try:
        found = call()
    except Exception as caught:
        error = caught
    of_all = wire.gathered((found, None if error is None else f"{what}: {described(error)}"))
    causes = [cause for _, cause in of_all]
    if any(cause is not None for cause in causes):
        if is_for_all and error is not None and len(set(causes)) == 1:
            raise error
        raise LayerParallelError(sentence(causes, remedy)) from error
    return [each for each, _ in of_all]


def exchange(
    wire: Wire, sends: Sequence[tuple[int, Tensor]], receives: Sequence[tuple[int, Tensor]], what: str
) -> None:
    """Sends tensors to ranks and receives others into dense tensors.

    For each pair of ranks, both must list their tensors in the same order. Empty tensors are not sent.
    """
    # One direction is completed before the other begins: a backend may complete operations in the order of their start.
    for pass_, sign in (("adjoint", -1), ("forward", 1)):
        # This list keeps the tensors alive until they are sent.
        leaving = [
            (to, tensor.detach().contiguous()) for to, tensor in sends if (to - wire.rank) * sign > 0 and tensor.numel()
        ]
        coming = [(source, tensor) for source, tensor in receives if (wire.rank - source) * sign > 0 and tensor.numel()]

        def run(pass_: str, leaving: Sequence[tuple[int, Tensor]], coming: Sequence[tuple[int, Tensor]]) -> None:
            works = [wire.receive(tensor, source, pass_) for source, tensor in coming]
            works += [wire.send(tensor, to, pass_) for to, tensor in leaving]
            for work in works:
                work.wait()

        tried(what, functools.partial(run, pass_, leaving, coming))
