"""Rank and rendezvous of a process that a launcher has started: how it finds its rank, and the address of rank 0.

This package is separate from `torch_accl`: importing any module of `torch_accl` imports torch, and `accl` commands determine their
rank before they know whether they need torch. `import torch_accl` loads this package as well, through `env.prepare`.

`launchers` knows the launchers' variables. `jobs` names one start of a launcher. `meeting` is how rank 0 announces the address of its
store. `env` is the part that torch sees: environment variables, and torch's `env://` handler. Each module imports only the
modules before it.
"""

from .env import find_store
from .launchers import LaunchError, RankInfo, detect_launcher

__all__ = ["LaunchError", "RankInfo", "detect_launcher", "find_store"]
