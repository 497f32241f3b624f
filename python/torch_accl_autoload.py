"""Registers the `accl` backend at `import torch`, for torch before 2.14, which has no entry points for backends.

The function runs inside every `import torch`, so it must be cheap and must not fail. It imports nothing of torch_accl, which
may be missing or broken, until a group is created. Newer wheels do not contain this file's entry point.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch_accl._native import Backend, BackendOptions

__all__ = ["register"]


def register() -> None:
    """Entry point of the group `torch.backends`."""
    try:
        import torch.distributed as dist

        if dist.is_available() and "ACCL" not in dist.Backend._plugins:
            dist.Backend.register_backend("accl", _create_backend, extended_api=True, devices=["cpu", "cuda", "xpu"])
    except Exception as error:
        # `import torch` must not fail because of this module. A program that requests the backend gets an error then.
        import warnings

        warnings.warn(f"torch_accl could not register its backend: {error}", stacklevel=2)


def _create_backend(group: Any, pg_options: BackendOptions | None) -> Backend:
    # This import raises the actual reason if the package is missing, broken, or built for another torch.
    from torch_accl._register import create_backend

    return create_backend(group, pg_options)
