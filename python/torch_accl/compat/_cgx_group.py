"""The process group of the backend name `cgx`: a group of accl that compresses plain sums of floats as CGX did.

Owns the treatment of an all_reduce for which no codec was specified. It is decided for each call, because scripts
change the variables between calls. It also covers the calls that DistributedDataParallel issues in C++.
`Options(compressed_calls="all")` does not fit: it is fixed when the group is created. A per-thread setting does not fit
either: it would apply to all groups. So the group is a `ProcessGroup` in Python, which torch calls from Python and from
C++. Its `allreduce` reads the settings, sets the call's codec (`compression._scope`) and continues in the base class,
whose backend is accl's. Everything else is inherited.

Compressed are all_reduces by SUM of at least 16 elements of float32, float16 or bfloat16, each a tensor of one call.
CGX raised an error for coalesced calls and for other operators and types; here they are sent uncompressed.
"""

from __future__ import annotations

import hashlib
import os
import warnings
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Store, Work

from .. import _native
from .._gate import minor_of
from .._register import connect, options_of, serve_devices, settle_cgx
from ..compression import CompressionState
from ..compression.extension import (
    FLOATS,
    RAW,
    Coded,
    WorkOfSeveral,
    accl_backend,
    codecs_of,
    cut,
    encoded,
    has_override,
)
from ._cgx_agreement import check_same
from ._cgx_layers import Layer, Registry, Unclear
from ._cgx_variables import (
    DEFAULT_BUCKET_SIZE,
    INNER_REDUCTION,
    RAW_FROM_BITS,
    CallSettings,
    GroupSettings,
    codec_text,
    warn_of_what_differs,
)

__all__ = [
    "LEAST_ELEMENTS",
    "NAME",
    "CGXProcessGroup",
    "coded",
    "create_group",
    "is_exact",
    "registry",
]

NAME = "cgx"

# CGX sent all_reduces of fewer elements uncompressed, whatever was registered.
LEAST_ELEMENTS = 16

registry = Registry()

# torch before 2.14 constructs a Python subclass of ProcessGroup without a store only.
_TAKES_STORE = tuple(map(int, minor_of(torch.__version__).split("."))) >= (2, 14)


def create_group(group: Any, pg_options: _native.BackendOptions | None) -> dist.ProcessGroup:
    """Creates one rank's group of the name `cgx`; torch calls this on every rank of it.

    Raises:
        ValueError: a variable of CGX has an invalid value.
        RuntimeError: ranks have different variables.
    """
    settle_cgx()
    settings = GroupSettings.now()
    if group.group_rank == 0:
        warn_of_what_differs()
    options = options_of(group, pg_options)
    if settings.algorithm is not None:
        given = options.settings.get("algorithm") or os.environ.get("ACCL_ALGORITHM", "")
        # The last rule that fits a call wins, so accl's own rules come last.
        options.settings = {**options.settings, "algorithm": ",".join(filter(None, (settings.algorithm, given)))}
    try:
        backend = connect(group, options)
    except ValueError as error:
        # The ranks compare accl's setting when they connect; the error names it, so add CGX's variable.
        if "all_reduce=ring" not in str(error):
            raise
        raise ValueError(f"{error} ({INNER_REDUCTION}=Ring stands for algorithm=all_reduce=ring)") from None
    return CGXProcessGroup(group, backend, settings)


def is_exact(settings: GroupSettings, group: dist.ProcessGroup) -> bool:
    """Returns whether a group compresses nothing. The check is collective if traffic inside a host is not compressed,
    and all ranks decide alike because they have compared their settings."""
    return settings.is_dummy or (not settings.inside_hosts and _is_on_one_host(group))


def coded(layer: Layer, dtype: torch.dtype, now: CallSettings, settings: GroupSettings) -> Coded:
    """Returns the codecs of a layer in a group that compresses. No codec needs a seed (hence 0): rounding is to the
    nearest level."""
    bits = now.bits if layer.bits is None else layer.bits
    if bits >= RAW_FROM_BITS or layer.numel <= settings.minimal_size:
        return (RAW, RAW, RAW, 0)
    codec = codec_text(bits, layer.bucket_size, str(dtype).removeprefix("torch."), now.skip_incomplete)
    return (codec if settings.inside_hosts else RAW, codec, codec, 0)


class CGXProcessGroup(dist.ProcessGroup):
    """A group of the name `cgx`.

    Attributes:
        settings: the values of CGX's variables when the group was created.
        is_exact: whether the group compresses nothing.
    """

    def __init__(self, group: Any, backend: _native.Backend, settings: GroupSettings) -> None:
        if _TAKES_STORE:
            super().__init__(group.store, group.group_rank, group.group_size)
        else:
            super().__init__(group.group_rank, group.group_size)
        self._store: Store = group.store
        self._set_default_backend(dist.ProcessGroup.BackendType.CUSTOM)
        serve_devices(self, backend, NAME)
        self.settings = settings
        self._warned: set[str] = set()
        # Ranks compare their settings first, because the exchange that follows depends on them.
        self.is_exact = True
        check_same(settings.said(), self)
        self.is_exact = is_exact(settings, self)

    def get_group_store(self) -> Store:
        """Returns the group's store, also where torch does not keep it."""
        return self._store

    def split_group(self, *arguments: Any, **named: Any) -> dist.ProcessGroup | None:
        """Splits the group as the base class does.

        Raises:
            NotImplementedError: torch is older than 2.14; its `split_group` needs the store.
        """
        if not _TAKES_STORE:
            raise NotImplementedError(
                f"cgx: torch {torch.__version__} cannot split groups of this backend; create one with new_group"
            )
        return super().split_group(*arguments, **named)

    def allreduce(self, *arguments: Any, **named: Any) -> Work | None:  # type: ignore[override]  # torch's type excludes None
        """Sums tensors over all ranks, compressed where the settings say so."""
        # `super()` is called in this very function: torch recognises by its name that it must not call back into it.
        # Arguments follow torch: options, or an operator and a timeout; one tensor or a list.
        given = dict(zip(("tensors", "opts", "timeout"), arguments, strict=False)) | named
        tensors, options = given.get("tensors", given.get("tensor")), given.get("opts", given.get("op"))
        tensors = [tensors] if isinstance(tensors, torch.Tensor) else list(tensors or ())
        layers = self._layers(tensors, getattr(options, "reduceOp", options))
        if layers is None:
            return super().allreduce(*arguments, **named)
        if len(layers) == 1:
            with encoded(codecs_of((layers[0][1],)), 0, 0):
                return super().allreduce(*arguments, **named)
        parts = list(tensors[0].detach().view(-1).split([numel for numel, _ in layers]))
        cuts = cut([part.nbytes for part in parts], self.settings.fusion_bytes)
        coalesced = dist.AllreduceCoalescedOptions()
        coalesced.reduceOp = dist.ReduceOp.SUM
        # Several calls are in flight together; torch would wait for the Work of a synchronous call.
        coalesced.asyncOp = getattr(options, "asyncOp", True) or len(cuts) > 1
        timeout = getattr(options, "timeout", given.get("timeout"))
        if timeout is not None:
            coalesced.timeout = timeout
        works = []
        for own in cuts:
            with encoded(codecs_of(tuple(codecs for _, codecs in layers[own])), 0, 0):
                works.append(super().allreduce_coalesced(parts[own], coalesced))
        return None if works[0] is None else WorkOfSeveral(works, tensors)

    def _layers(self, tensors: list[torch.Tensor], op: Any) -> list[tuple[int, Coded]] | None:
        """Returns the parts of a call and their codecs; None if the call is sent uncompressed."""
        if self.is_exact or self.size() == 1 or len(tensors) != 1 or not (op is None or op == dist.ReduceOp.SUM):
            return None
        tensor = tensors[0]
        if tensor.dtype not in FLOATS or tensor.layout is not torch.strided:
            return None
        if _may_be_complex(tensor) or tensor.numel() < LEAST_ELEMENTS or has_override() or CompressionState.is_any_made:
            return None
        now = CallSettings.now()
        layers = self._layers_of(tensor, now)
        if layers is None:
            return None
        parts = [(layer.numel, coded(layer, tensor.dtype, now, self.settings)) for layer in layers]
        return parts if any(codecs[1] != RAW for _, codecs in parts) else None

    def _layers_of(self, tensor: torch.Tensor, now: CallSettings) -> tuple[Layer, ...] | None:
        """Returns the layers of a tensor: those registered, else the tensor as one layer. None if its layers are
        unknown or ambiguous."""
        numel = tensor.numel()
        whole = (Layer(numel, None, now.bucket_size or DEFAULT_BUCKET_SIZE),)
        if registry.is_empty:
            if registry.excluded:
                self._say_unclear(numel, "exclude_layer was called, but no layer names are registered")
            return None if registry.excluded else whole
        layers = registry.layers_of(numel)
        if layers is None:
            found = registry.model_of(numel)
            layers = found if isinstance(found, Unclear) else whole if found else None
        if isinstance(layers, Unclear):
            self._say_unclear(numel, layers.why)
            return None
        if layers is not None and len(layers) > 1 and not tensor.is_contiguous():
            return None
        return layers

    def _say_unclear(self, numel: int, why: str) -> None:
        if self.rank() == 0 and why not in self._warned:
            self._warned.add(why)
            warnings.warn(
                f"cgx: an all_reduce of {numel} elements is sent uncompressed: {why}; a hook identifies layers: "
                "use ddp.register_comm_hook(CGXState(None), cgx_hook), and register_model(model) for names",
                stacklevel=2,
            )


def _is_on_one_host(group: dist.ProcessGroup) -> bool:
    """Returns whether all ranks of a group share a host. Collective."""
    # torch's stub of a backend lacks its collectives.
    backend: Any = accl_backend(group)
    said = backend.options.settings.get("host_id") or os.environ.get("ACCL_HOST_ID")
    name = said or _native.host_facts()["host_id"]
    hashed = int.from_bytes(hashlib.sha256(name.encode()).digest()[:7])
    mine = torch.tensor([hashed], dtype=torch.int64, device="cpu")
    hosts = [torch.empty_like(mine) for _ in range(group.size())]
    # The group may serve the CPU with another backend, or not at all.
    backend.allgather([hosts], [mine]).wait()
    return len({int(host) for host in hosts}) == 1


def _may_be_complex(tensor: torch.Tensor) -> bool:
    """Returns whether a real tensor may be the view of a complex tensor, which torch passes in place of the tensor.

    Its base is complex, or the view has a last dimension of two adjacent elements. In the second case the base does not show
    it: the complex tensor may be a view of a real tensor itself, and a view that was made in inference mode has no base.
    """
    if tensor._base is not None and tensor._base.is_complex():
        return True
    is_view = tensor._base is not None or tensor.is_inference()
    return is_view and tensor.dim() > 0 and tensor.shape[-1] == 2 and tensor.stride(-1) == 1
