"""Types of the native module."""

from typing import Any

from torch import distributed as dist
from torch._C._distributed_c10d import Backend as _TorchBackend

class BackendOptions(_TorchBackend.Options):
    """Options of a backend: torch's own, and settings by the names of `torch_accl.Options`."""

    settings: dict[str, str]
    def __init__(self) -> None: ...
    def __copy__(self) -> BackendOptions: ...
    def __deepcopy__(self, memo: dict[int, Any], /) -> BackendOptions: ...

class Backend(_TorchBackend):
    """One rank's backend of one group, as `group._get_backend(device)` returns it."""

    @property
    def options(self) -> BackendOptions: ...
    def describe(self) -> str:
        """Facts about the group, one a line."""

    def first_error(self) -> str:
        """The sentence of the cause that made the group unusable, or an empty string."""

class Runtime:
    """The process's engine; one per process."""

    def __init__(self) -> None: ...
    def create_backend(self, store: dist.Store, rank: int, size: int, options: BackendOptions) -> Backend:
        """Makes a backend: collective over all ranks; blocks until they are connected or the timeout passed."""

    def shutdown(self) -> None:
        """Says goodbye to all peers and stops the threads. Bounded, silent, any number of times."""

def built_for_torch() -> str:
    """The torch minor version this module was built for, such as `2.15`."""

def config_rows() -> list[dict[str, Any]]:
    """The rows of the configuration table, with the values that the environment gives."""

def algorithms() -> list[dict[str, Any]]:
    """The rows of the table of algorithms."""

def host_facts() -> dict[str, Any]:
    """What this process would offer its peers: instruction set, transports, interfaces."""

def check_option(option: str, value: str) -> None:
    """Raises ValueError for an unknown option or a value that is not accepted."""

def _bridged_functions() -> list[str]: ...
def _panic_for_test(name: str) -> None: ...
