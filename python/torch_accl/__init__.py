"""The `accl` backend of torch.distributed.

Importing the package loads the native module that fits the running torch and registers the backend. With torch 2.14 and newer
`torch.distributed.init_process_group("accl")` needs no import: torch finds the package by its entry point. Under mpirun or
srun the import is needed: it sets torch's rank variables that are unset, and ranks then meet without MASTER_ADDR.
"""

import importlib
from typing import TYPE_CHECKING, Any

from torch_accl_launch import env

from ._gate import load_native

load_native()

from . import _native  # noqa: E402  what the gate has loaded
from ._errors import InvalidArgumentError, InvalidTypeError  # noqa: E402  the gate comes first
from ._from_mpi import init_from_mpi, store_by_mpi  # noqa: E402
from ._options import Options  # noqa: E402
from ._register import register  # noqa: E402
from ._transports import get_include, register_transport  # noqa: E402

register()
env.prepare(store_by_mpi)

Backend = _native.Backend
__version__: str = _native.built_for()["version"]

if TYPE_CHECKING:
    from . import layer_parallel
    from .layer_parallel import LayerParallel

__all__ = [
    "Backend",
    "InvalidArgumentError",
    "InvalidTypeError",
    "LayerParallel",
    "Options",
    "__version__",
    "get_include",
    "init_from_mpi",
    "layer_parallel",
    "register",
    "register_transport",
]


def __getattr__(name: str) -> Any:
    # Few programs need these modules, so they are loaded on first use.
    if name == "layer_parallel":
        return importlib.import_module(".layer_parallel", __name__)
    if name == "LayerParallel":
        return importlib.import_module(".layer_parallel", __name__).LayerParallel
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
