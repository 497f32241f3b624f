"""What a hook knows of a model: names of parameters, their codecs, and the step."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn

from .. import _native
from ._scope import accl_group
from ._settings import RAW, Compression, tensor_id

__all__ = ["State", "Traffic"]


@dataclass
class Traffic:
    """Bytes of the gradients that a rank contributed, since the state was made: as they are, and as they were sent."""

    raw: int = 0
    sent: int = 0

    @property
    def ratio(self) -> float:
        """How many times fewer bytes were sent; 1.0 before the first call."""
        return self.raw / self.sent if self.sent else 1.0


@dataclass(frozen=True)
class Plan:
    """How the tensors of one call are encoded; without codecs they travel as they are."""

    codecs: _native.Codecs | None
    raw_bytes: int
    sent_bytes: int


class State:
    """The state of `ddp_hook` or of `apply_fsdp2`, for one model.

    Args:
        compression: what is compressed and how; the same on all ranks.
        model: the model, wrapped or not; its parameters must not change afterwards.
        process_group: the group of the gradients; None is the default group. Its backend must be accl.

    Attributes:
        step: how many times all gradients went through, or those of the module of FSDP2 that had most.
        traffic: bytes before and after.

    A key of `layers` or `exclude` that fits no parameter is a warning.
    """

    def __init__(
        self, compression: Compression, model: nn.Module, process_group: dist.ProcessGroup | None = None
    ) -> None:
        if not isinstance(compression, Compression):
            raise TypeError(f"compression must be a Compression, not {type(compression).__name__}")
        self.compression = compression
        self.process_group = accl_group(process_group)
        self.step = 0
        self.traffic = Traffic()
        self._names = {id(parameter): _plain(name) for name, parameter in model.named_parameters()}
        # The names are by identity: parameters must live as long.
        self._parameters = list(model.parameters())
        self._plans: dict[tuple[int, ...], Plan] = {}
        for key in compression.unmatched(self._names.values()):
            warnings.warn(f"compression: {key!r} fits no parameter of the model", stacklevel=2)

    def codec_of(self, name: str) -> str | None:
        """The codec of a parameter's parts of sums; None if it travels as it is. To look at before training."""
        for parameter in self._parameters:
            if self._names[id(parameter)] == name:
                codec = self._codec(parameter)
                return None if codec is None else codec[1]
        raise KeyError(name)

    def name_of(self, parameter: torch.Tensor) -> str:
        """The name of a parameter.

        Raises:
            RuntimeError: it was not a parameter of the model when the state was made.
        """
        try:
            return self._names[id(parameter)]
        except KeyError:
            raise RuntimeError(
                f"a gradient belongs to a parameter of shape {tuple(parameter.shape)} that the model did not have when its "
                "compression.State was made; make a new State after changing the model"
            ) from None

    def plan(self, parameters: Sequence[torch.Tensor], elements: Sequence[int], dtype: torch.dtype) -> Plan:
        """How gradients of these parameters are encoded, of which a call sends so many elements each."""
        key = (*map(id, parameters), *elements)
        if key not in self._plans:
            self._plans[key] = self._make_plan(parameters, elements, dtype)
        return self._plans[key]

    def count(self, plan: Plan, is_encoded: bool) -> None:
        """Adds a call to the traffic."""
        self.traffic.raw += plan.raw_bytes
        self.traffic.sent += plan.sent_bytes if is_encoded else plan.raw_bytes

    def is_on(self, plan: Plan, step: int) -> bool:
        """Whether a call of this step is encoded."""
        return plan.codecs is not None and step >= self.compression.start_step

    def _codec(self, parameter: torch.Tensor) -> tuple[str, str, str] | None:
        return self.compression.codec_of(self.name_of(parameter), parameter.numel(), parameter.dim())

    def _make_plan(self, parameters: Sequence[torch.Tensor], elements: Sequence[int], dtype: torch.dtype) -> Plan:
        raw_bytes = sum(elements) * dtype.itemsize
        chosen = [self._codec(parameter) for parameter in parameters]
        if dtype not in (torch.float32, torch.float16, torch.bfloat16) or not any(chosen):
            return Plan(None, raw_bytes, raw_bytes)
        ids = [tensor_id(self.name_of(parameter)) for parameter in parameters]
        codecs = _native.Codecs([(*(codec or (RAW, RAW, RAW)), id) for codec, id in zip(chosen, ids, strict=True)])
        name = str(dtype).removeprefix("torch.")
        sent = sum(codecs.encoded_bytes(position, name, count)[0] for position, count in enumerate(elements))
        return Plan(codecs, raw_bytes, sent)


def _plain(name: str) -> str:
    """The name that a parameter has in the model that was wrapped."""
    return ".".join(
        part for part in name.split(".") if part not in ("module", "_orig_mod", "_checkpoint_wrapped_module")
    )
