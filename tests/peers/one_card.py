"""Makes the suite's ranks share card 0, although the suite wants a card for each rank.

In a process that has called `install`, torch reports as many cards as the world has ranks, and every index of a card means
card 0. A rank enters `Mapped` for its life. Nothing else of torch changes.
"""

from __future__ import annotations

import importlib
import os
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

# Functions of `torch.accelerator` that take the index of a card. Functions of `torch.cuda` ask `_get_device_index`.
_INDEXED = ("set_device_index", "synchronize", "current_stream")
# Modules that have a name for the function that turns a device into an index.
_ASKING = ("torch._utils", "torch.cuda", "torch.cuda._utils", "torch.cuda.streams", "torch.nn.parallel.distributed")


def install(world: int) -> None:
    """Reports `world` cards, and maps the indices that functions of `torch.cuda` and `torch.accelerator` take."""
    for module in (torch.cuda, torch.accelerator):
        module.device_count = lambda: world
    for name in _INDEXED:
        setattr(torch.accelerator, name, _mapped(getattr(torch.accelerator, name)))
    for path in _ASKING:
        module = importlib.import_module(path)
        if hasattr(module, "_get_device_index"):
            module._get_device_index = _lowest(module._get_device_index)  # type: ignore[attr-defined]


def is_spoilt() -> bool:
    """Whether this process has begun to use CUDA, even to count cards. Its forked children then cannot use it."""
    child = os.fork()
    if child == 0:
        os._exit(int(torch.cuda._is_in_bad_fork()))
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) != 0


def on_card_0(value: Any) -> Any:
    """Returns a device, or the text of one, with card 0 instead of another card; any other value is unchanged."""
    if isinstance(value, torch.device):
        return torch.device("cuda:0") if value.type == "cuda" and value.index else value
    if isinstance(value, str) and value.startswith("cuda:"):
        return "cuda:0"
    return value


class Mapped(TorchFunctionMode):
    """While active in a thread, torch's functions get card 0 instead of another card."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # A number means a card to these methods, and to every argument named `device`.
        takes_number = getattr(function, "__name__", "") in ("cuda", "to")
        args = tuple(
            _index_0(value) if takes_number and place else on_card_0(value) for place, value in enumerate(args)
        )
        kwargs = {
            key: _index_0(value) if key == "device" else on_card_0(value) for key, value in (kwargs or {}).items()
        }
        return on_card_0(function(*args, **kwargs))


def _mapped(function: Any) -> Any:
    def call(*args: Any, **kwargs: Any) -> Any:
        args = tuple(_index_0(value) for value in args)
        return function(*args, **{key: _index_0(value) for key, value in kwargs.items()})

    return call


def _index_0(value: Any) -> Any:
    return 0 if isinstance(value, int) and not isinstance(value, bool) and value > 0 else on_card_0(value)


def _lowest(function: Any) -> Any:
    """Returns 0 instead of a larger index; -1, which means the CPU or no change, stays."""

    def call(*args: Any, **kwargs: Any) -> Any:
        return min(0, function(*args, **kwargs))

    return call
