"""Random numbers of accelerators, each of whose devices has a default generator.

Owns how a layer seeds the generators of devices, and that a solve leaves them as they were. `own_generator.py` is for the
CPU, where other threads may draw at the same time.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Protocol, cast

import torch
from torch import Tensor

__all__ = ["all_devices", "generator_of", "has_numbers", "kept_numbers", "seed_devices"]


class Generator(Protocol):
    """The methods of a generator that a solve uses."""

    def manual_seed(self, seed: int, /) -> Any:
        """Seeds the generator."""

    def get_state(self) -> Tensor:
        """Returns the state."""

    def set_state(self, state: Tensor, /) -> Any:
        """Sets the state."""


class _OfModule:
    """The default generator of a device whose package shows only the state of it."""

    def __init__(self, module: Any, device: torch.device) -> None:
        self._module = module
        self._device = device
        # The package of MPS has one device, and takes none.
        self._given = () if device.type == "mps" else (device,)

    def manual_seed(self, seed: int, /) -> None:
        self.set_state(torch.Generator(self._device).manual_seed(seed).get_state())

    def get_state(self) -> Tensor:
        return cast(Tensor, self._module.get_rng_state(*self._given))

    def set_state(self, state: Tensor, /) -> None:
        self._module.set_rng_state(state, *self._given)


# The states of generators before the innermost `kept_numbers`, of the devices that were seeded inside. None outside.
_before: ContextVar[dict[torch.device, Tensor] | None] = ContextVar("torch_accl_device_numbers", default=None)


def has_numbers(device: torch.device) -> bool:
    """Returns whether a device has a generator of its own: neither the CPU nor the meta device has."""
    return device.type not in ("cpu", "meta")


@functools.cache
def generator_of(device: torch.device) -> Generator:
    """Returns the default generator of a device with an index.

    Raises:
        NotImplementedError: the device's package does not show it, so a layer's numbers cannot be drawn again.
    """
    try:
        module = torch.get_device_module(device)
    except RuntimeError:
        module = None
    if init := getattr(module, "init", None):
        # Packages have their generators once they are initialized.
        init()
    generators = getattr(module, "default_generators", ())
    if device.index is not None and device.index < len(generators):
        return cast(Generator, generators[device.index])
    if all(hasattr(module, name) for name in ("get_rng_state", "set_rng_state")):
        return _OfModule(module, device)
    raise NotImplementedError(
        f"layers are on {device}, but torch.{device.type} has neither `default_generators` nor `get_rng_state` and `set_rng_state`, "
        "so a layer's random numbers could not be drawn again; use a package of the device that has them, or move the net to the CPU"
    )


def all_devices() -> list[torch.device]:
    """Returns the devices of the accelerator; none in a child that was forked after its first use."""
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is None or getattr(torch.get_device_module(accelerator), "_is_in_bad_fork", bool)():
        return []
    return [torch.device(accelerator.type, index) for index in range(torch.accelerator.device_count())]


def _current() -> torch.device | None:
    """Returns the accelerator's current device. None before the first use, which this must not be."""
    accelerator = torch.accelerator.current_accelerator()
    if accelerator is None:
        return None
    module = torch.get_device_module(accelerator)
    if not getattr(module, "is_initialized", module.is_available)():
        return None
    return torch.device(accelerator.type, torch.accelerator.current_device_index())


def seed_devices(devices: Iterable[torch.device], seed: int) -> None:
    """Seeds the generators of devices. The end of the innermost `kept_numbers` restores their states."""
    before = _before.get()
    for device in devices:
        generator = generator_of(device)
        if before is not None and device not in before:
            before[device] = generator.get_state()
        generator.manual_seed(seed)


@contextmanager
def kept_numbers() -> Iterator[None]:
    """Inside the context, draws leave no trace in the generators of the current device and of devices that are seeded."""
    before: dict[torch.device, Tensor] = {}
    if (device := _current()) is not None:
        # A package without generators is refused where a layer is evaluated.
        with contextlib.suppress(NotImplementedError):
            before[device] = generator_of(device).get_state()
    token = _before.set(before)
    try:
        yield
    finally:
        _before.reset(token)
        for each, state in before.items():
            generator_of(each).set_state(state)
