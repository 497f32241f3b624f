"""torch_cgx by its own names, on accl: `from torch_accl.compat import cgx as torch_cgx`.

Importing registers the backend name `cgx`. A group of that name is a group of accl that compresses plain all_reduces:
by SUM, of at least 16 elements of float32, float16 or bfloat16. CGX's variables are read at each call:
`CGX_COMPRESSION_QUANTIZATION_BITS` (32 by default, uncompressed), `CGX_COMPRESSION_BUCKET_SIZE` (512) and
`CGX_COMPRESSION_SKIP_INCOMPLETE_BUCKETS`. Rounding is to the nearest level, and a bucket's minimum and step have the
tensor's type. Every rank ends with the same bits. Tensors may be on the CPU or on an accelerator.

    from torch_accl.compat import cgx as torch_cgx

    dist.init_process_group("cgx")
    model = DistributedDataParallel(net)
    state = torch_cgx.CGXState(None, compression_params={"bits": 4, "bucket_size": 1024})
    model.register_comm_hook(state, torch_cgx.cgx_hook)

**With a hook**, once a state exists, all other all_reduces are exact.

**With registered layers** and no hook, an all_reduce that has as many elements as a registered bucket is cut into the
layers of that bucket. All others are exact.

**With a registered model** and no hook, an all_reduce is compressed if it has as many elements as successive layers of
the model. None of these may be excluded.

If the size fits several with different settings, the all_reduce is sent uncompressed, with a warning. Tables belong to
the process: `reset` forgets them.

`docs/migrating-cgx.md` has every variable and function, and the differences from CGX.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Unpack

import torch
from torch import nn

from .._register import register_name
from ..compression import CompressionState
from ._cgx_group import NAME, create_group
from ._cgx_group import registry as _registry
from ._cgx_hook import CGXState, cgx_hook
from ._cgx_hook import states as _states
from ._cgx_layers import Changes, Layer, check_bits, check_index
from ._cgx_variables import check_bucket_size

__all__ = [
    "NAME",
    "CGXState",
    "Layer",
    "Registered",
    "cgx_hook",
    "exclude_layer",
    "register_layer",
    "register_model",
    "registered",
    "reset",
    "set_quantization_bits",
    "set_quantization_bucket_size",
]


@dataclass(frozen=True)
class Registered:
    """The layers and names that were registered.

    Attributes:
        layers: the layers of each bucket, as set by `register_layer` and the setters.
        names: the names passed to `register_model`.
        excluded: the texts passed to `exclude_layer`.
    """

    layers: tuple[tuple[Layer, ...], ...]
    names: tuple[str, ...]
    excluded: tuple[str, ...]


def register_layer(bucket_idx: int, layer_idx: int, numel: int, bits: int, bucket_size: int) -> None:
    """Adds a layer to the table of buckets. Buckets and their layers are registered in order, from 0.

    Args:
        bucket_idx: index of the bucket of DistributedDataParallel.
        layer_idx: index of the layer in the bucket.
        numel: number of elements of the layer.
        bits: 1 to 8; 9 to 32 mean uncompressed, 0 and less take the environment's.
        bucket_size: elements that share a minimum and a step: a multiple of 8 from 8 to 8192.

    Raises:
        ValueError: an argument has an invalid value.
    """
    _registry.register_layer(bucket_idx, layer_idx, numel, bits, bucket_size)


def set_quantization_bits(bucket_idx: int, layer_idx: int, bits: int) -> None:
    """Changes the bits of a registered layer, else of a layer of the only `CGXState`.

    Raises:
        ValueError: the bits are invalid, or there is no such layer. Also if several states exist; use their setters.
    """
    value = check_bits(bits)
    if not _is_changed(bucket_idx, layer_idx, bits=value):
        _only_state(bucket_idx, layer_idx).set_quantization_bits(bucket_idx, layer_idx, bits)


def set_quantization_bucket_size(bucket_idx: int, layer_idx: int, bucket_size: int) -> None:
    """Changes the bucket size of a registered layer, else of a layer of the only `CGXState`.

    Raises:
        ValueError: the size is invalid, or there is no such layer. Also if several states exist; use their setters.
    """
    value = check_bucket_size("bucket_size", bucket_size)
    if not _is_changed(bucket_idx, layer_idx, bucket_size=value):
        _only_state(bucket_idx, layer_idx).set_quantization_bucket_size(bucket_idx, layer_idx, bucket_size)


def register_model(layers: nn.Module | Iterable[tuple[str, int | torch.Tensor]]) -> None:
    """Registers the names of layers, in the order of the forward pass.

    Args:
        layers: a model, or pairs of a name and either the parameter or its number of elements. With a model or with
            parameters, `cgx_hook` identifies each gradient by name; with numbers, by its size. Registering the same
            layers again has no effect; other layers are added.

    Raises:
        ValueError: `layers` is neither a model nor such pairs.
    """
    _registry.register_model(layers)


def exclude_layer(name: str) -> None:
    """Sends layers whose names contain `name` uncompressed. Warns if no registered name contains it.

    Raises:
        ValueError: `name` is not a text, or is empty.
    """
    if not _registry.exclude(name):
        warnings.warn(f"cgx: exclude_layer({name!r}) matches no registered layer", stacklevel=2)


def registered() -> Registered:
    """Returns the registered tables. A hook's layers are in the `layers` of its state."""
    return Registered(_registry.buckets, _registry.names, _registry.excluded)


def reset() -> None:
    """Forgets the registered tables, and that hooks existed. Hooks in use keep working."""
    _registry.clear()
    _states.clear()
    CompressionState.is_any_made = False


def _is_changed(bucket_idx: int, layer_idx: int, **changes: Unpack[Changes]) -> bool:
    return _registry.change(check_index("bucket_idx", bucket_idx), check_index("layer_idx", layer_idx), **changes)


def _only_state(bucket_idx: int, layer_idx: int) -> CGXState:
    if len(_states) == 1:
        return next(iter(_states))
    found = (
        f"there are {len(_states)} states; call the method of one of them"
        if _states
        else "register it with register_layer first"
    )
    raise ValueError(f"there is no layer {layer_idx} of bucket {bucket_idx}: {found}")


register_name(NAME, create_group)
