"""The communication hook of the CGX facade, for DistributedDataParallel.

Its gradients are known by their parameters and places in buckets, so that nothing is told by the order of calls, and every
model may have a state of its own. Averaging and encoding are those of `compression.ddp_hook`.

The annotations of the hook are objects: DistributedDataParallel compares them.
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

from ..compression import Compression, ddp_hook
from ..compression._plans import Plan, plan_of
from ..compression._scope import FLOATS, Coded
from ..compression._settings import RAW
from ..compression._state import CompressionState
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

# Of a state that neither it nor a variable says otherwise.
DEFAULT_BUCKET_SIZE = 1024

# After so many steps, buckets are as they stay: DistributedDataParallel makes them anew after the first.
SETTLED = 2


class CGXState(CompressionState):
    """The state of `cgx_hook`, for one model.

    Args:
        process_group: the group of the gradients, of the name cgx or accl; None is the default group.
        layer_min_size: gradients with fewer elements travel as they are, as do those of less than two dimensions.
        compression_params: `bits` and `bucket_size`. What is left out is that of `CGX_COMPRESSION_QUANTIZATION_BITS` (32,
            uncompressed, by default) and of `CGX_COMPRESSION_BUCKET_SIZE` (1024), which are read at every call.

    Attributes:
        step: how many times all gradients went through.
        traffic: bytes before and after.

    From the first state on, all_reduces of groups of the name cgx that are not those of a hook are exact.

    Raises:
        ValueError: an argument or a variable of CGX is not what is expected.
        RuntimeError: there is no group, or its backend is another.
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
        # Of names nothing is known here; what is compressed is said by `plan`.
        super().__init__(Compression(RAW), nn.Module(), process_group)
        group = self.process_group
        if isinstance(group, CGXProcessGroup):
            self._settings, self._is_exact = group.settings, group.is_exact
        else:
            # A group of accl finds out when ranks have compared their settings.
            self._settings, self._is_exact = GroupSettings.now(), False
        self._least = max(least, self._settings.minimal_size)
        self._layer_min_size = least
        # The parameters of each bucket of the last backward pass.
        self._buckets: dict[int, tuple[torch.Tensor, ...]] = {}
        # What setters have said, by identity of a parameter that the buckets keep.
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
        """Sets the bits of a gradient, which keeps them when buckets are made anew; 0 takes those of the environment.

        Raises:
            ValueError: no such bits, or no such layer in the last backward pass.
        """
        self._change(bucket_idx, layer_idx, bits=check_bits(bits))

    def set_quantization_bucket_size(self, bucket_idx: int, layer_idx: int, bucket_size: int) -> None:
        """Sets how many elements of a gradient share a minimum and a step.

        Raises:
            ValueError: no such size, or no such layer in the last backward pass.
        """
        self._change(bucket_idx, layer_idx, bucket_size=check_bucket_size("bucket_size", bucket_size))

    def plan(self, parameters: Sequence[torch.Tensor], elements: Sequence[int], dtype: torch.dtype, *_: object) -> Plan:
        """How the gradients of the bucket that the hook has now are encoded. The first time, ranks compare their settings."""
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
        """Takes notice of a bucket that is about to be reduced."""
        # A copy is in use from its first gradients on: that of an averaged model is never.
        states.add(self)
        self._index = bucket.index()
        self._buckets[self._index] = tuple(bucket.parameters())
        if bucket.is_last():
            self._buckets = {index: kept for index, kept in self._buckets.items() if index <= self._index}

    def _said(self) -> dict[str, Said]:
        """What counts for gradients at this call, and what says so."""
        now = CallSettings.now()
        said: dict[str, Said] = {}
        if not isinstance(self.process_group, CGXProcessGroup):
            said = self._settings.said()
            # It names the algorithm of groups of the name cgx only.
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
        # By parameter: a copy has others.
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
        """What `register_layer` was told of a bucket, if its layers have the sizes of these gradients."""
        layers = registry.buckets[index] if index < len(registry.buckets) else None
        if layers is None or [layer.numel for layer in layers] == [parameter.numel() for parameter in parameters]:
            return layers
        if self.step >= SETTLED and index not in self._warned:
            self._warned.add(index)
            warnings.warn(
                f"cgx: the layers registered for bucket {index} have {[layer.numel for layer in layers]} elements, and its "
                f"gradients {[parameter.numel() for parameter in parameters]}: those of the state count",
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
                + (f"layers by bucket are {seen}" if seen else "the hook knows them from the first backward pass on")
            )
        parameter = parameters[layer_idx]
        self._kept[id(parameter)] = parameter
        self._changes.setdefault(id(parameter), {}).update(changes)


def cgx_hook(state: CGXState, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Averages a bucket of gradients, those compressed that the state says.

    For `DistributedDataParallel.register_comm_hook(state, cgx_hook)`. Layers are compressed from the first step on: CGX took two
    steps with the variables' settings, since it knew layers by counting calls.
    """
    state.see(bucket)
    return ddp_hook(state, bucket)


# Those that are in use: the functions that name no state are for the only one.
states: "weakref.WeakSet[CGXState]" = weakref.WeakSet()


@lru_cache(maxsize=1024)
def _plan(layers: tuple[Coded, ...], elements: tuple[int, ...], dtype: torch.dtype, most_bytes: int) -> Plan:
    chosen = [None if codecs[1] == RAW else codecs[:3] for codecs in layers]
    return plan_of([], chosen, [number for *_, number in layers], elements, dtype, most_bytes=most_bytes)
