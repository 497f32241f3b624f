"""Layers as bytes.

Owns that layers with parametrizations, such as weight_norm and spectral_norm, can be sent to other ranks, although
torch refuses to pickle them. Their classes are created while a program runs, and are created again where the bytes
arrive.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Iterable
from types import FunctionType
from typing import Any

import torch
from torch import nn
from torch.nn.utils import parametrize

__all__ = ["loaded", "saved"]


# The hook that weight_norm registers for checkpoints of its predecessor. It is a nested function over a parameter's
# name.
_HOOK = "weight_norm.<locals>._weight_norm_compat_hook"


class Pickler(pickle.Pickler):
    """pickle's pickler, extended to modules with parametrizations."""

    def reducer_override(self, value: Any) -> Any:
        """Reduces a parametrized module to its original class and its attributes.

        Everything else is pickled as usual.
        """
        if isinstance(value, FunctionType) and value.__qualname__ == _HOOK:
            return _hook_of, tuple(cell.cell_contents for cell in value.__closure__ or ())
        if not isinstance(value, nn.Module) or not parametrize.is_parametrized(value):
            return NotImplemented
        kind = parametrize.type_before_parametrizations(value)
        return _empty, (kind,), dict(value.__dict__), None, None, _fill


def saved(value: Any) -> bytes:
    """Saves a value for `loaded`."""
    buffer = io.BytesIO()
    torch.save(value, buffer, pickle_module=_Module)
    return buffer.getvalue()


def loaded(data: bytes, modules: Iterable[nn.Module]) -> Any:
    """Loads a value that any rank has saved. Tensors of an accelerator come to the device of this rank's `modules`.

    Without parameters in these, tensors come to the current device of their type; to the CPU if this rank has none.
    """
    own = {parameter.device.type: parameter.device for module in modules for parameter in module.parameters()}

    def located(storage: Any, location: str) -> Any:
        kind, _, index = location.partition(":")
        if not index:
            return None
        device = own.get(kind, next(iter(own.values()), None))
        if device is None:
            found = torch.accelerator.current_accelerator(check_available=True)
            here = kind if found is not None and found.type == kind else "cpu"
            device = torch.empty(0, dtype=torch.uint8, device=here).device
        return torch.serialization.default_restore_location(storage, str(device))  # type: ignore[no-untyped-call]

    return torch.load(io.BytesIO(data), map_location=located, weights_only=False)


class _Module:
    """The object that `torch.save` takes instead of the module `pickle`."""

    Pickler = Pickler


def _empty(kind: type[nn.Module]) -> nn.Module:
    return kind.__new__(kind)


def _fill(module: nn.Module, state: dict[str, Any]) -> None:
    nn.Module.__setstate__(module, state)  # type: ignore[no-untyped-call]
    parametrize._inject_new_class(module)
    for name in module.parametrizations:  # type: ignore[union-attr]
        parametrize._inject_property(module, name)


def _hook_of(name: str) -> Any:
    module = nn.Module()
    module.register_parameter(name, nn.Parameter(torch.ones(1, dtype=torch.float32, device="cpu")))
    nn.utils.parametrizations.weight_norm(module, name)
    wrapped: Any = next(iter(module._load_state_dict_pre_hooks.values()))
    return wrapped.hook
