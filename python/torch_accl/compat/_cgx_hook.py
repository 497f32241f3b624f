"""The communication hook of the CGX facade, for DistributedDataParallel.

The hook identifies gradients by their parameters and their places in buckets. So nothing depends on the order of calls,
and each model may have its own state. `compression.ddp_hook` does the averaging and encoding.

The annotations of the hook are evaluated objects, because DistributedDataParallel compares them.
"""

import warnings
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any, Unpack

import torch
import torch.distributed as dist
from torch import nn
from torch._C._distributed_c10d import GradBucket

from ..compression import Compression, CompressionState, ddp_hook
from ..compression.extension import FLOATS, RAW, Coded, Plan, plan_of
from ._cgx_agreement import Said, check_same
from ._cgx_group import LEAST_ELEMENTS, CGXProcessGroup, coded, is_exact, registry
from ._cgx_layers import Changes, Layer, check_bits, check_index
from ._cgx_variables import (
    BITS,
    BUCKET_SIZE,
    MINIMAL_SIZE,
    MOST_BITS,
    SKIP_INCOMPLETE,
    CallSettings,
    GroupSettings,
    check_bucket_size,
)

__all__ = ["CGXState", "cgx_hook", "states"]

# The bucket size of a state for which neither an argument nor a variable gives one.
DEFAULT_BUCKET_SIZE = 1024

# From this step on, buckets keep their layout: DistributedDataParallel rebuilds them after the first step.
SETTLED = 2


class CGXState(CompressionState):
    """The state of `cgx_hook`, for one model.

    Args:
        process_group: the group of the gradients, of backend cgx or accl; None is the default group.
        layer_min_size: gradients with fewer elements are sent uncompressed, as are gradients of less than two
            dimensions.
        compression_params: `bits` and `bucket_size`. An omitted key takes the value of
            `CGX_COMPRESSION_QUANTIZATION_BITS` (default 32, uncompressed) or `CGX_COMPRESSION_BUCKET_SIZE` (default
            1024), read at every call.

    Attributes:
        step: number of times that all gradients were reduced.
        traffic: bytes before and after compression.

    Once a state exists, all_reduces of cgx groups that no hook issues are exact.

    Raises:
        ValueError: an argument or a variable of CGX has an invalid value.
        RuntimeError: there is no group, or its backend is neither cgx nor accl.
    """

    def __init__(
        self,
        process_group: dist.ProcessGroup | None = None,
        layer_min_size: int = 1024,
        compression_params: Mapping[str, int] | None = None,
    ) -> None:
        given = dict(compression_params or {})
        if unknown := set(given) - {"bits", "bucket_size"}:
            raise ValueError(
                f"compression_params has {', '.join(map(repr, sorted(unknown)))}; expected bits and bucket_size"
            )
        bits, bucket_size = given.get("bits"), given.get("bucket_size")
        self._bits = None if bits is None else check_bits(bits)
        self._bucket_size = None if bucket_size is None else check_bucket_size("bucket_size", bucket_size)
        least = check_index("layer_min_size", layer_min_size)
        # The base class needs no names of parameters; `plan` decides what is compressed.
        super().__init__(Compression(RAW), nn.Module(), process_group)
        group = self.process_group
        if isinstance(group, CGXProcessGroup):
            self._settings, self._is_exact = group.settings, group.is_exact
        else:
            # For a group of accl, `plan` sets this after the ranks have compared their settings.
            self._settings, self._is_exact = GroupSettings.now(), False
        self._least = max(least, self._settings.minimal_size)
        self._layer_min_size = least
        # The parameters of each bucket of the last backward pass.
        self._buckets: dict[int, tuple[torch.Tensor, ...]] = {}
        # Values from the setters, by identity of a parameter. `_kept` holds these parameters, so that an identity stays
        # unique.
        self._changes: dict[int, Changes] = {}
        self._kept: dict[int, torch.Tensor] = {}
        self._index = 0
        self._is_checked = False
        self._warned: set[int] = set()
        states.add(self)

    @property
    def layers(self) -> dict[int, tuple[Layer, ...]]:
        """The layers of each bucket of the last backward pass, as the next one will treat them."""
        return {index: self._layers(index, parameters) for index, parameters in sorted(self._buckets.items())}

    def set_quantization_bits(self, bucket_idx: int, layer_idx: int, bits: int) -> None:
        """Sets the bits of a gradient, which keeps them when buckets are rebuilt; 0 takes the environment's.

        Raises:
            ValueError: the bits are invalid, or the last backward pass had no such layer.
        """
        self._change(bucket_idx, layer_idx, bits=check_bits(bits))

    def set_quantization_bucket_size(self, bucket_idx: int, layer_idx: int, bucket_size: int) -> None:
        """Sets the number of elements of a gradient that share a minimum and a step.

        Raises:
            ValueError: the size is invalid, or the last backward pass had no such layer.
        """
        self._change(bucket_idx, layer_idx, bucket_size=check_bucket_size("bucket_size", bucket_size))

    def plan(self, parameters: Sequence[torch.Tensor], elements: Sequence[int], dtype: torch.dtype, *_: object) -> Plan:
        """Returns the encoding of the gradients in the hook's current bucket. In the first call, ranks compare their
        settings."""
        if not self._is_checked:
            check_same(self._said(), self.process_group)
            if not isinstance(self.process_group, CGXProcessGroup):
                self._is_exact = is_exact(self._settings, self.process_group)
            self._is_checked = True
        now = CallSettings.now()
        if self._is_exact or dtype not in FLOATS or sum(elements) < LEAST_ELEMENTS:
            return _plan((), tuple(elements), dtype, self._settings.fusion_bytes)
        layers = self._layers(self._index, parameters)
        codecs = tuple(coded(layer, dtype, now, self._settings) for layer in layers)
        return _plan(codecs, tuple(elements), dtype, self._settings.fusion_bytes)

    def see(self, bucket: GradBucket) -> None:
        """Records a bucket that is about to be reduced."""
        # A copy counts as in use from its first gradients on: the copy inside an averaged model never gets any.
        states.add(self)
        self._index = bucket.index()
        self._buckets[self._index] = tuple(bucket.parameters())
        if bucket.is_last():
            self._buckets = {index: kept for index, kept in self._buckets.items() if index <= self._index}

    def _said(self) -> dict[str, Said]:
        """Returns the settings that apply to gradients at this call, each with the text that gave it."""
        now = CallSettings.now()
        said: dict[str, Said] = {}
        if not isinstance(self.process_group, CGXProcessGroup):
            said = self._settings.said()
            # Remove settings that apply only to groups of the name cgx; `layer_min_size` below covers the minimal size.
            del said["algorithm"], said["minimal_size"]
        bits = f"compression_params bits={self._bits}" if self._bits else f"{BITS}={now.bits}"
        said["bits"] = Said(str(self._bits or now.bits), bits)
        size = self._bucket_size or now.bucket_size or DEFAULT_BUCKET_SIZE
        variable = f"{BUCKET_SIZE}={size}"
        said["bucket_size"] = Said(
            str(size), f"compression_params bucket_size={size}" if self._bucket_size else variable
        )
        said["skip_incomplete"] = Said(str(now.skip_incomplete), f"{SKIP_INCOMPLETE}={int(now.skip_incomplete)}")
        is_own = self._layer_min_size >= self._settings.minimal_size
        said["layer_min_size"] = Said(
            str(self._least), f"layer_min_size={self._least}" if is_own else f"{MINIMAL_SIZE}={self._least}"
        )
        return said

    def _portable(self) -> dict[str, Any]:
        # Stored with the parameters themselves, because a copy has other parameters.
        changes = [(parameter, self._changes[key].copy()) for key, parameter in self._kept.items()]
        return {
            **super()._portable(),
            "_changes": changes,
            "_kept": None,
            "_warned": set(self._warned),
            "_is_checked": False,
        }

    def _restore(self, parts: Mapping[str, Any]) -> None:
        super()._restore(parts)
        self._kept = {id(parameter): parameter for parameter, _ in parts["_changes"]}
        self._changes = {id(parameter): changes for parameter, changes in parts["_changes"]}

    def _layers(self, index: int, parameters: Sequence[torch.Tensor]) -> tuple[Layer, ...]:
        registered = self._registered(index, parameters)
        return tuple(
            self._layer(parameter, registered[position] if registered else None)
            for position, parameter in enumerate(parameters)
        )

    def _layer(self, parameter: torch.Tensor, layer: Layer | None) -> Layer:
        if layer is None:
            is_small = parameter.dim() < 2 or parameter.numel() < self._least
            bucket_size = self._bucket_size or CallSettings.now().bucket_size or DEFAULT_BUCKET_SIZE
            layer = Layer(parameter.numel(), MOST_BITS if is_small else self._bits, bucket_size)
        layer = replace(layer, **self._changes.get(id(parameter), {}))
        is_exact = registry.is_excluded(parameter) or parameter.is_complex()
        return replace(layer, bits=MOST_BITS) if is_exact else layer

    def _registered(self, index: int, parameters: Sequence[torch.Tensor]) -> tuple[Layer, ...] | None:
        """Returns the layers of a bucket from `register_layer`, if they have the sizes of these gradients."""
        layers = registry.buckets[index] if index < len(registry.buckets) else None
        if layers is None or [layer.numel for layer in layers] == [parameter.numel() for parameter in parameters]:
            return layers
        if self.step >= SETTLED and index not in self._warned:
            self._warned.add(index)
            warnings.warn(
                f"cgx: the layers registered for bucket {index} have {[layer.numel for layer in layers]} elements, "
                f"but its gradients have {[parameter.numel() for parameter in parameters]}: the state's settings apply",
                stacklevel=2,
            )
        return None

    def _change(self, bucket_idx: int, layer_idx: int, **changes: Unpack[Changes]) -> None:
        check_index("bucket_idx", bucket_idx)
        check_index("layer_idx", layer_idx)
        parameters = self._buckets.get(bucket_idx, ())
        if layer_idx >= len(parameters):
            seen = {index: len(kept) for index, kept in sorted(self._buckets.items())}
            raise ValueError(
                f"there is no layer {layer_idx} of bucket {bucket_idx}: "
                + (f"layer counts by bucket are {seen}" if seen else "layers are known after the first backward pass")
            )
        parameter = parameters[layer_idx]
        self._kept[id(parameter)] = parameter
        self._changes.setdefault(id(parameter), {}).update(changes)


def cgx_hook(state: CGXState, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Averages a bucket of gradients, compressed as the state specifies.

    Use it as `DistributedDataParallel.register_comm_hook(state, cgx_hook)`. Layers are compressed from the first step
    on. CGX used the variables' settings for two steps, since it identified layers by counting calls.
    """
    if isinstance(bucket, tuple):
        raise NotImplementedError(
            "cgx_hook: torch's Python reducer passes one gradient at a time, but CGX's settings apply to buckets; use "
            'torch_accl.compression.ddp_hook, or set torch._dynamo.config.optimize_ddp = "ddp_optimizer"'
        )
    state.see(bucket)
    return ddp_hook(state, bucket)


# States in use. Functions that name no state apply to the only one.
states: "weakref.WeakSet[CGXState]" = weakref.WeakSet()


@lru_cache(maxsize=1024)
def _plan(layers: tuple[Coded, ...], elements: tuple[int, ...], dtype: torch.dtype, most_bytes: int) -> Plan:
    chosen = [None if codecs[1] == RAW else codecs[:3] for codecs in layers]
    return plan_of([], chosen, [number for *_, number in layers], elements, dtype, most_bytes=most_bytes)
