"""What ranks settle together: exact calls of a few numbers, which all ranks make at the same place."""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any

import torch
import torch.distributed as dist

from ._scope import exact

__all__ = ["check_settings", "reduced"]


def reduced(
    rows: Sequence[Sequence[float]], group: dist.ProcessGroup, op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM
) -> list[list[float]]:
    """The rows of all ranks combined: the same on all of them."""
    numbers = torch.tensor(rows, dtype=torch.float64, device="cpu")
    with exact():
        dist.all_reduce(numbers, op, group)
    return numbers.tolist()


def check_settings(settings: Any, group: dist.ProcessGroup, variables: Mapping[str, str] | None = None) -> None:
    """Compares a dataclass of settings over all ranks. `variables` are those of the environment that say them, by setting.

    Raises:
        RuntimeError: they differ; on all ranks, with those of two.
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
