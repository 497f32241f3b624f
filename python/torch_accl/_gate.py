"""Refuses a torch that this build was not made for, before the native module is loaded.

c10d's classes change their layout with every minor version of torch. A module built for another one may load and then
call the wrong function, so the versions are compared by name and not by trying.
"""

from __future__ import annotations


def refuse_other_torch() -> None:
    """Raises ImportError unless torch's minor version is the one this build is for."""
    try:
        from ._build_info import BUILT_FOR_TORCH
    except ModuleNotFoundError as error:
        raise ImportError(
            "torch_accl was not built: this is its source folder. Install it with `pip install .` or `make wheel`"
        ) from error
    import torch

    why = refusal(torch.__version__, BUILT_FOR_TORCH)
    if why is not None:
        raise ImportError(why)
    if not torch.distributed.is_available():
        raise ImportError("this torch was built without torch.distributed, which torch_accl extends")


def refusal(running: str, built_for: str) -> str | None:
    """Why a build for `built_for` cannot run with torch `running`, or None when it can."""
    minor = minor_of(running)
    if minor == built_for:
        return None
    return (
        f"torch_accl was built for torch {built_for}, but torch {running} is running. Either install the torch it was "
        f"built for (pip install 'torch=={built_for}.*'), or rebuild it for this one (TORCH={minor} pip install . or "
        f"make wheel TORCH={minor} in its source folder)"
    )


def minor_of(version: str) -> str:
    """`2.15` of `2.15.0+cpu` or `2.15.0a0+git1234`."""
    return ".".join(str(version).split("+", 1)[0].split(".")[:2])
