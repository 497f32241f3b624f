"""The `accl` backend of torch.distributed.

Importing chooses the native module that fits the running torch and registers the backend; nothing else. With torch 2.14 and
newer not even the import is needed: `torch.distributed.init_process_group("accl")` finds the package by its entry point. Under
mpirun or srun it is: the import sets torch's rank variables where they are unset, and ranks meet without MASTER_ADDR.
"""

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

__all__ = [
    "Backend",
    "InvalidArgumentError",
    "InvalidTypeError",
    "Options",
    "__version__",
    "get_include",
    "init_from_mpi",
    "register",
    "register_transport",
]
