"""How a process that a launcher has started learns its rank, and where rank 0 is.

It stands beside `torch_accl` and not in it: importing anything of that package imports torch, and `accl` commands ask where they stand
before they know whether they need it. Who imports `torch_accl` gets both by themselves (`env.prepare`).

`places` knows the launchers' variables, `jobs` what names one start of a launcher, `meeting` how rank 0 tells the others where its store
is, and `env` what of this torch sees: variables of the environment, and its `env://` handler. Each imports only those before it.
"""

from .env import find_store
from .places import LaunchError, Place, place

__all__ = ["LaunchError", "Place", "find_store", "place"]
