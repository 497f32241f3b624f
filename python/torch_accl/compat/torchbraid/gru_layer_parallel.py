"""`GRU_Parallel` and `GRU_Serial` by the name of torchbraid's own module."""

from ._recurrent import GRU_Parallel, GRU_Serial

__all__ = ["GRU_Parallel", "GRU_Serial"]
