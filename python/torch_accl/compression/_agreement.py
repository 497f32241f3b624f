"""Agreement between ranks: exact calls on a few numbers, which all ranks issue at the same point."""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch
import torch.distributed as dist

from ._scope import exact, host_all_reduce

__all__ = ["Progress", "check_progress", "check_settings", "reduced"]

# Maximum number of ranks that a message names.
_MOST_NAMED = 8


def reduced(
    rows: Sequence[Sequence[float]], group: dist.ProcessGroup, op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM
) -> list[list[float]]:
    """Returns the rows of all ranks, combined element by element with `op`: the same result on all ranks."""
    numbers = torch.tensor(rows, dtype=torch.float64, device="cpu")
    with exact():
        host_all_reduce(numbers, op, group)
    return numbers.tolist()


def check_settings(settings: Any, group: dist.ProcessGroup, variables: Mapping[str, str] | None = None) -> None:
    """Compares a dataclass of settings over all ranks. `variables` maps settings to the environment variables that set them.

    Raises:
        RuntimeError: the settings differ. All ranks raise it; the message has the differing settings of two ranks.
    """
    text = repr(settings)
    hashed = zlib.crc32(text.encode())
    [[most, least]] = reduced([[hashed, -hashed]], group, dist.ReduceOp.MAX)
    if most == -least:
        return
    rows: list[dict[str, str]] = [{}] * group.size()
    with exact():
        dist.all_gather_object(
            rows, {field.name: repr(getattr(settings, field.name)) for field in fields(settings)}, group
        )
    other = next(rank for rank, theirs in enumerate(rows) if theirs != rows[0])
    names = [name for name, value in rows[0].items() if rows[other].get(name) != value]
    by = {name: f" ({variable})" for name, variable in (variables or {}).items()}
    has = [", ".join(f"{name}={rows[rank].get(name)}{by.get(name, '')}" for name in names) for rank in (0, other)]
    raise RuntimeError(
        f"compression: rank {group.rank()} cannot go on, since ranks have different settings: rank 0 has {has[0]}, and rank {other} "
        f"has {has[1]}; give all ranks the same"
    )


@dataclass(frozen=True)
class Progress:
    """How far a rank has come, and whose saved state it continues from.

    Attributes:
        rank: rank in the group of its state.
        step: step of the call that is about to be issued.
        version: format version of the loaded state; 0 if nothing was loaded.
        residual_rank: rank whose residuals were loaded; None if there are none.
        residual_step: step of these residuals, or None.
    """

    rank: int
    step: int
    version: int = 0
    residual_rank: int | None = None
    residual_step: int | None = None

    @property
    def numbers(self) -> tuple[int, int, int]:
        """The numbers that must be the same on all ranks."""
        return self.step, self.version, -1 if self.residual_step is None else self.residual_step

    @property
    def is_of_another(self) -> bool:
        """Whether this rank loaded the residuals of another rank."""
        return self.residual_rank not in (None, self.rank)


def check_progress(mine: Progress, group: dist.ProcessGroup) -> None:
    """Checks that every rank continues from its own state, and all from the same step.

    Raises:
        RuntimeError: they do not. All ranks raise it; the message has the numbers of the ranks that differ.
    """
    numbers = [*mine.numbers, *(-number for number in mine.numbers), int(mine.is_of_another)]
    [[*most, is_of_another]] = reduced([numbers], group, dist.ReduceOp.MAX)
    if not is_of_another and most[:3] == [-number for number in most[3:]]:
        return
    rows: list[Any] = [None] * group.size()
    with exact():
        dist.all_gather_object(
            rows, (mine.rank, mine.step, mine.version, mine.residual_rank, mine.residual_step), group
        )
    all_ranks = [Progress(*row) for row in rows]
    wrong = [
        f"rank {each.rank} loaded the residuals of rank {each.residual_rank}"
        for each in all_ranks
        if each.is_of_another
    ]
    if wrong:
        cause = _some(wrong) + "; a sum would contain them as often as they were loaded"
    else:
        first = all_ranks[0]
        other = next(each for each in all_ranks if each.numbers != first.numbers)
        cause = f"{_described(first, other)}, and {_described(other, first)}"
    raise RuntimeError(
        f"compression: rank {mine.rank} cannot go on, since {cause}; save and load a separate state on each rank, at "
        "the same step, or use torch.distributed.checkpoint"
    )


def _described(one: Progress, other: Progress) -> str:
    if one.step != other.step:
        return f"rank {one.rank} is at step {one.step}"
    if one.version != other.version:
        return f"rank {one.rank} loaded " + (f"a state of version {one.version}" if one.version else "no state")
    return f"rank {one.rank} has " + (
        "no residuals" if one.residual_step is None else f"residuals of step {one.residual_step}"
    )


def _some(texts: Sequence[str]) -> str:
    more = len(texts) - _MOST_NAMED
    return ", ".join(texts[:_MOST_NAMED]) + (f" and {more} more" if more > 0 else "")
