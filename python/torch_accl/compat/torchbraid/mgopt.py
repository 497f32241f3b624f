"""What scripts of torchbraid take from its module `mgopt`.

Owns the two small functions. MG/Opt itself, an optimizer over nets of several depths, is not here.
"""

from __future__ import annotations

from typing import Any

__all__ = ["compute_levels", "mgopt_solver", "root_print"]


def compute_levels(num_steps: int, min_coarse_size: int, cfactor: int) -> int:
    """As many levels as leave at least `min_coarse_size` steps on the coarsest; at least one.

    Raises:
        ValueError: a factor that makes nothing coarser, or no size.
    """
    if cfactor < 2 or min_coarse_size < 1:
        raise ValueError(
            f"compute_levels(min_coarse_size={min_coarse_size}, cfactor={cfactor}): give at least 1 and at least 2"
        )
    levels = 1
    while min_coarse_size * cfactor**levels <= num_steps:
        levels += 1
    return levels


def root_print(rank: int, printlevel_cutoff: int, importance: int, s: object) -> None:
    """Prints on rank 0 what is important enough."""
    if rank == 0 and importance <= printlevel_cutoff:
        print(s, flush=True)


class mgopt_solver:
    """Not here."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        raise NotImplementedError(
            "mgopt_solver: neither MG/Opt nor nested iteration is in torch_accl.compat.torchbraid; train the finest net by itself"
        )
