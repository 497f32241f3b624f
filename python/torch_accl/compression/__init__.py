"""Compressed gradients: collectives whose messages have 1 to 8 bits per element instead of 16 or 32.

Compression is requested call by call: by the hook of DistributedDataParallel (`CompressionState`, `ddp_hook`), by the hook of
FSDP2 (`apply_fsdp2`), or by explicit calls such as `all_reduce_quantized`. All other calls stay exact.

    state = compression.CompressionState(compression.Compression("maxmin:4"), model)
    model.register_comm_hook(state, compression.ddp_hook)

All ranks end every call with the same bits. Sums are computed in float32, in the order of ranks. If a bucket has a NaN or an
infinity on any rank, it becomes NaN on all ranks, so that a gradient scaler sees it. Integers, float64 and operators other
than sums are sent unchanged. `docs/compression.md` says when compression pays.
"""

import warnings
from typing import Any

from ._call_measures import CallMeasures, call_measures, call_summary
from ._calls import all_gather_quantized, all_reduce_quantized, all_to_all_quantized, reduce_scatter_quantized
from ._ddp import ddp_hook
from ._fsdp import apply_fsdp2
from ._measures import Measures
from ._reproducible import Reproducible, all_reduce_reproducible, reproducible_hook
from ._settings import Compression
from ._state import CompressionState

__all__ = [
    "CallMeasures",
    "Compression",
    "CompressionState",
    "Measures",
    "Reproducible",
    "all_gather_quantized",
    "all_reduce_quantized",
    "all_reduce_reproducible",
    "all_to_all_quantized",
    "apply_fsdp2",
    "call_measures",
    "call_summary",
    "ddp_hook",
    "reduce_scatter_quantized",
    "reproducible_hook",
]


def __getattr__(name: str) -> Any:
    if name == "State":
        warnings.warn(
            "compression.State is deprecated; use compression.CompressionState", DeprecationWarning, stacklevel=2
        )
        return CompressionState
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
