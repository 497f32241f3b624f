"""The `accl` backend of torch.distributed.

Importing checks that this build fits the running torch and registers the backend; nothing else. With torch 2.14 and newer
not even the import is needed: `torch.distributed.init_process_group("accl")` finds the package by its entry point.
"""

from ._gate import refuse_other_torch

refuse_other_torch()

from . import _native  # noqa: E402  the gate comes first
from ._build_info import VERSION as __version__  # noqa: E402
from ._options import Options  # noqa: E402
from ._register import register  # noqa: E402

register()

Backend = _native.Backend

__all__ = ["Backend", "Options", "__version__", "register"]
