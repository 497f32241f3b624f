"""The layers behind all_reduces that scripts described with `register_layer`, `register_model` and `exclude_layer`.

Owns the tables and the lookup of an all_reduce by its number of elements. The tables belong to the process, as in CGX.
`_cgx_hook.py` knows the gradients of a hook. Tables are replaced as a whole, so that a thread in the middle of a call
sees a consistent table.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import TypedDict, Unpack

import torch
from torch import nn

from ..compression.extension import names_of
from ._cgx_variables import MOST_BITS, check_bucket_size

__all__ = ["Changes", "Layer", "Registry", "Unclear", "check_bits", "check_index"]


@dataclass(frozen=True)
class Layer:
    """One layer of a bucket.

    Attributes:
        numel: number of elements.
        bits: bits per element; None takes `CGX_COMPRESSION_QUANTIZATION_BITS`, 9 and more mean uncompressed.
        bucket_size: elements that share a minimum and a step.
    """

    numel: int
    bits: int | None
    bucket_size: int


class Changes(TypedDict, total=False):
    """Fields of a `Layer` that a setter changes."""

    bits: int | None
    bucket_size: int


@dataclass(frozen=True)
class _Model:
    """Names and sizes in the order of the forward pass; the parameters themselves where the caller passed them."""

    names: tuple[str, ...]
    numels: tuple[int, ...]
    parameters: tuple[torch.Tensor | None, ...]


@dataclass(frozen=True)
class Unclear:
    """An all_reduce that fits layers of different settings, so its elements cannot be assigned to layers."""

    why: str


class Registry:
    """The tables of a process."""

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        """Forgets everything."""
        self.buckets: tuple[tuple[Layer, ...], ...] = ()
        self.excluded: tuple[str, ...] = ()
        self._models: tuple[_Model, ...] = ()

    @property
    def is_empty(self) -> bool:
        """Whether no layers and no model were registered."""
        return not self.buckets and not self._models

    @property
    def names(self) -> tuple[str, ...]:
        """The names that were passed to `register_model`."""
        return tuple(name for model in self._models for name in model.names)

    def register_layer(self, bucket_idx: int, layer_idx: int, numel: int, bits: int, bucket_size: int) -> None:
        """See `torch_accl.compat.cgx.register_layer`."""
        check_index("bucket_idx", bucket_idx)
        check_index("layer_idx", layer_idx)
        layer = Layer(_positive("numel", numel), check_bits(bits), check_bucket_size("bucket_size", bucket_size))
        if bucket_idx > len(self.buckets):
            raise ValueError(
                f"bucket_idx is {bucket_idx}, and {_count(len(self.buckets), 'bucket')} registered; expected {len(self.buckets)}"
            )
        layers = self.buckets[bucket_idx] if bucket_idx < len(self.buckets) else ()
        if layer_idx < len(layers):
            raise ValueError(
                f"layer {layer_idx} of bucket {bucket_idx} is already registered; change it with set_quantization_bits "
                "and set_quantization_bucket_size, or clear all registrations with reset()"
            )
        if layer_idx > len(layers):
            raise ValueError(
                f"layer_idx is {layer_idx}, and {_count(len(layers), 'layer')} of bucket {bucket_idx} registered; expected {len(layers)}"
            )
        self._replace(bucket_idx, (*layers, layer))

    def change(self, bucket_idx: int, layer_idx: int, **changes: Unpack[Changes]) -> bool:
        """Changes a registered layer; False if there is none."""
        if not (bucket_idx < len(self.buckets) and layer_idx < len(self.buckets[bucket_idx])):
            return False
        layers = list(self.buckets[bucket_idx])
        layers[layer_idx] = replace(layers[layer_idx], **changes)
        self._replace(bucket_idx, tuple(layers))
        return True

    def register_model(self, layers: nn.Module | Iterable[tuple[str, int | torch.Tensor]]) -> None:
        """See `torch_accl.compat.cgx.register_model`."""
        model = _of_module(layers) if isinstance(layers, nn.Module) else _of_pairs(layers)
        same = [
            known
            for known in self._models
            if (known.names, known.numels) == (model.names, model.numels)
            and all(a is b for a, b in zip(known.parameters, model.parameters, strict=True))
        ]
        if not same:
            self._models = (*self._models, model)

    def exclude(self, part: str) -> bool:
        """Adds a substring of names to exclude; returns False if names are known and none contains it."""
        if not isinstance(part, str) or not part:
            raise ValueError(f"exclude_layer: expected a part of a name, not {part!r}")
        if part not in self.excluded:
            self.excluded = (*self.excluded, part)
        return not self._models or any(part in name for name in self.names)

    def is_excluded(self, parameter: torch.Tensor) -> bool:
        """Returns whether a parameter is sent uncompressed because of its name.

        A parameter whose name was registered with a size only is matched by its size. If one layer of that size is
        excluded, all are.

        Raises:
            RuntimeError: a name is excluded, and no registered layer fits the parameter.
        """
        if not self.excluded:
            return False
        rows = [row for model in self._models for row in zip(model.names, model.numels, model.parameters, strict=True)]
        own = [name for name, _, known in rows if known is parameter]
        names = own or [name for name, numel, known in rows if known is None and numel == parameter.numel()]
        if not names:
            raise RuntimeError(
                f"exclude_layer was called with {', '.join(map(repr, self.excluded))}, but a parameter of shape "
                f"{tuple(parameter.shape)} has no registered name; call register_model(model) first"
            )
        return any(self._is_name_excluded(name) for name in names)

    def layers_of(self, numel: int) -> tuple[Layer, ...] | Unclear | None:
        """Returns the registered layers of an all_reduce of `numel` elements; None if there is no such bucket."""
        fitting = {layers for layers in self.buckets if sum(layer.numel for layer in layers) == numel}
        if len(fitting) > 1:
            return Unclear(
                f"{_count(len(fitting), 'registered bucket')} of this size ({numel} elements) but have different layers"
            )
        return fitting.pop() if fitting else None

    def model_of(self, numel: int) -> bool | Unclear:
        """Returns whether an all_reduce of `numel` elements holds the gradients of successive layers of a registered
        model.

        DistributedDataParallel fills its buckets backwards, and within a layer in the order in which gradients are
        ready. The size of a bucket determines its layers, but not where each begins. So a bucket with an excluded layer
        is unclear.
        """
        found = False
        for model in self._models:
            for first, last in _runs(model.numels, numel):
                found = True
                if bad := [name for name in model.names[first:last] if self._is_name_excluded(name)]:
                    return Unclear(
                        f"it may contain the gradient of {bad[0]}, which is excluded, at an unknown position"
                    )
        return found

    def _is_name_excluded(self, name: str) -> bool:
        return any(part in name for part in self.excluded)

    def _replace(self, bucket_idx: int, layers: tuple[Layer, ...]) -> None:
        self.buckets = (*self.buckets[:bucket_idx], layers, *self.buckets[bucket_idx + 1 :])


def check_bits(bits: object) -> int | None:
    """Returns the bits of a layer; None for 0 and less, which take the default.

    Raises:
        ValueError: the number of bits is invalid.
    """
    if type(bits) is not int or bits > MOST_BITS:
        raise ValueError(
            f"bits is {bits!r}; expected 1 to 8, 9 to {MOST_BITS} for uncompressed, or 0 for the environment's value"
        )
    return bits if bits > 0 else None


def check_index(name: str, value: object) -> int:
    """Returns the index of a bucket or layer.

    Raises:
        ValueError: it is not an integer of at least 0.
    """
    if type(value) is not int or value < 0:
        raise ValueError(f"{name} is {value!r}; expected a number of at least 0")
    return value


def _positive(name: str, value: object) -> int:
    if type(value) is not int or value < 1:
        raise ValueError(f"{name} is {value!r}; expected a number of at least 1")
    return value


def _count(count: int, thing: str) -> str:
    return f"1 {thing} is" if count == 1 else f"{count} {thing}s are"


def _of_module(module: nn.Module) -> _Model:
    names = names_of(module)
    parameters = [parameter for parameter in module.parameters() if parameter.requires_grad]
    return _Model(
        tuple(names[id(parameter)] for parameter in parameters),
        tuple(parameter.numel() for parameter in parameters),
        tuple(parameters),
    )


def _of_pairs(layers: Iterable[tuple[str, int | torch.Tensor]]) -> _Model:
    names: list[str] = []
    numels: list[int] = []
    parameters: list[torch.Tensor | None] = []
    for row in layers:
        if not (isinstance(row, (tuple, list)) and len(row) == 2 and isinstance(row[0], str)):
            raise ValueError(
                f"register_model: expected a model, or pairs of a name and a number of elements, not {row!r}"
            )
        name, size = row
        names.append(name)
        if isinstance(size, torch.Tensor):
            parameters.append(size)
            numels.append(size.numel())
        else:
            parameters.append(None)
            numels.append(_positive(f"register_model: the number of elements of {name!r}", size))
    if not names:
        raise ValueError("register_model: expected at least one layer, got none")
    return _Model(tuple(names), tuple(numels), tuple(parameters))


def _runs(numels: tuple[int, ...], total: int) -> Iterator[tuple[int, int]]:
    """Yields all ranges of successive layers that have `total` elements together."""
    first, sum_of_run = 0, 0
    for last, numel in enumerate(numels, 1):
        sum_of_run += numel
        while sum_of_run > total:
            sum_of_run -= numels[first]
            first += 1
        if sum_of_run == total and first < last:
            yield first, last
