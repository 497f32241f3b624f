"""Ranks that share one card, for parts that measure.

Owns the processes, their group, and what becomes of their errors. Knows no measurement.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch.distributed as dist
import torch_accl
from support import init_group, run_ranks, standin

from .device import Device
from .report import check

RANKS = 2


def on_a_card(
    body: Callable[[Device], Any],
    kind: str,
    ranks: int = RANKS,
    has_kernels: bool = False,
    order: str = "early",
    options: Mapping[str, Any] | None = None,
) -> list[Any]:
    """Returns what `body` returns on each rank, or raises an error that shows all ranks.

    With `has_kernels`, the stand-in can run kernels. `order` is the order of its streams. `options` are the group's.
    """

    def rank_body(rank: int) -> Any:
        device = Device(kind, order, seed=rank + 1)
        if has_kernels and not device.is_card:
            standin.lend_driver(device.module)
        init_group("accl", pg_options=torch_accl.Options(**options or {}))
        found = body(device)
        dist.barrier()
        dist.destroy_process_group()
        return found

    outcomes = run_ranks(rank_body, ranks, init=False, deadline=90)
    check(outcomes)
    return [outcome.value for outcome in outcomes]
