"""What a hook knows of a model: names of parameters, their codecs, and the step."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from .. import _native
from ._scope import Addresses, accl_group
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
    # Addresses of what is carried over, with error feedback, and the tensors that are there.
    residuals: Addresses | None = None
    losses: tuple[torch.Tensor, ...] = ()


class State:
    """The state of `ddp_hook` or of `apply_fsdp2`, for one model.

    Args:
        compression: what is compressed and how; the same on all ranks.
        model: the model, wrapped or not; its parameters must not change afterwards.
        process_group: the group of the gradients; None is the default group. Its backend must be accl.

    Attributes:
        world: ranks of the group.
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
        self.world = self.process_group.size()
        self.step = 0
        self.traffic = Traffic()
        self._names = _names_of(model)
        # The names are by identity: parameters must live as long.
        self._parameters = list(model.parameters())
        self._plans: dict[tuple[object, ...], Plan] = {}
        # By name: float32 of what was lost of contributions, and of sums.
        self._losses: dict[str, torch.Tensor] = {}
        self._losses_of_sums: dict[str, torch.Tensor] = {}
        # Of FSDP2: calls of each module.
        self._calls: dict[str, int] = {}
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

    def plan(
        self, parameters: Sequence[torch.Tensor], elements: Sequence[int], dtype: torch.dtype, blocks: int = 1
    ) -> Plan:
        """How gradients of these parameters are encoded, of which each block of a call has so many elements each."""
        key = (dtype, blocks, *map(id, parameters), *elements)
        if key not in self._plans:
            self._plans[key] = self._make_plan(parameters, elements, dtype, blocks)
        return self._plans[key]

    def rescale(self, factor: float) -> None:
        """Multiplies what is carried over: call it with the ratio of the new loss scale to the old one when that changes."""
        for losses in (self._losses, self._losses_of_sums):
            for loss in losses.values():
                loss.mul_(factor)

    def state_dict(self) -> dict[str, Any]:
        """Step, and what this rank carries over: to be saved by each rank for itself."""
        return {
            "step": self.step,
            "world": self.world,
            "calls": dict(self._calls),
            "losses": {name: loss.clone() for name, loss in self._losses.items()},
            "losses_of_sums": {name: loss.clone() for name, loss in self._losses_of_sums.items()},
        }

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        """Goes on from a `state_dict` of the same rank. Of another number of ranks, nothing is carried over, with a warning."""
        self.step, self._calls = saved["step"], dict(saved["calls"])
        self._plans.clear()
        self._losses, self._losses_of_sums = {}, {}
        if saved["world"] != self.world:
            if saved["losses"]:
                warnings.warn(
                    f"compression: what {saved['world']} ranks carried over cannot be shared out among {self.world}: "
                    "error feedback begins anew",
                    stacklevel=2,
                )
            return
        self._losses, self._losses_of_sums = _checked(saved["losses"]), _checked(saved["losses_of_sums"])

    def next_call(self, module: str) -> int:
        """The number of a module's call, from 0."""
        call = self._calls.get(module, 0)
        self._calls[module] = call + 1
        self.step = max(self.step, call + 1)
        return call

    def count(self, plan: Plan, is_encoded: bool) -> None:
        """Adds a call to the traffic."""
        self.traffic.raw += plan.raw_bytes
        self.traffic.sent += plan.sent_bytes if is_encoded else plan.raw_bytes

    def is_on(self, plan: Plan, step: int) -> bool:
        """Whether a call of this step is encoded."""
        return plan.codecs is not None and step >= self.compression.start_step

    def _codec(self, parameter: torch.Tensor) -> tuple[str, str, str] | None:
        return self.compression.codec_of(self.name_of(parameter), parameter.numel(), parameter.dim())

    def _make_plan(
        self, parameters: Sequence[torch.Tensor], elements: Sequence[int], dtype: torch.dtype, blocks: int
    ) -> Plan:
        raw_bytes = blocks * sum(elements) * dtype.itemsize
        chosen = [self._codec(parameter) for parameter in parameters]
        if dtype not in (torch.float32, torch.float16, torch.bfloat16) or not any(chosen):
            return Plan(None, raw_bytes, raw_bytes)
        names = [self.name_of(parameter) for parameter in parameters]
        ids = [tensor_id(name) for name in names]
        codecs = _native.Codecs([(*(codec or (RAW, RAW, RAW)), id) for codec, id in zip(chosen, ids, strict=True)])
        kind = str(dtype).removeprefix("torch.")
        sent = blocks * sum(codecs.encoded_bytes(position, kind, count)[0] for position, count in enumerate(elements))
        if not self.compression.error_feedback:
            return Plan(codecs, raw_bytes, sent)
        rows, sums, losses = [], [], []
        for name, codec, count in zip(names, chosen, elements, strict=True):
            row, of_sum = [0] * blocks, 0
            if codec is not None:
                loss = _loss(self._losses, name, blocks, count)
                losses.append(loss)
                row = [part.data_ptr() for part in loss]
                if blocks == 1 and _is_coarse(codec[2]):
                    loss = _loss(self._losses_of_sums, name, 1, count)
                    losses.append(loss)
                    of_sum = loss.data_ptr()
            rows.append(row)
            sums.append(of_sum)
        addresses = [row[block] for block in range(blocks) for row in rows], sums
        return Plan(codecs, raw_bytes, sent, addresses, tuple(losses))


def _loss(losses: dict[str, torch.Tensor], name: str, blocks: int, elements: int) -> torch.Tensor:
    """What is carried over of a parameter, a row for each block: zeros at first. The engine writes to its memory."""
    if name not in losses:
        losses[name] = torch.zeros(blocks, elements, dtype=torch.float32, device="cpu")
    loss = losses[name]
    if loss.shape != (blocks, elements):
        raise RuntimeError(
            f"compression: what was carried over of {name} is for {tuple(loss.shape)} elements, and its gradient has "
            f"{(blocks, elements)} now; load a state of the same model and kind of parallelism, or make a new State"
        )
    return loss


def _checked(saved: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Copies of what was saved, as the engine needs them."""
    return {name: loss.detach().to("cpu", torch.float32, copy=True).contiguous() for name, loss in saved.items()}


def _is_coarse(codec: str) -> bool:
    """Whether sums lose so much on their way back that it is carried over, too."""
    return codec.startswith(("maxmin:1,", "maxmin:2,", "absmax:2,", "hadamard:1,", "hadamard:2,", "sign,", "topk:"))


_WRAPPERS = ("module", "_orig_mod", "_checkpoint_wrapped_module")


def _names_of(model: nn.Module) -> dict[int, str]:
    """The name that each parameter has in the model that was wrapped, by identity."""
    found = [(id(parameter), name.split(".")) for name, parameter in model.named_parameters()]
    plain = {identity: ".".join(part for part in parts if part not in _WRAPPERS) for identity, parts in found}
    # A model may have a part of such a name: then all keep theirs.
    return plain if len(set(plain.values())) == len(plain) else {identity: ".".join(parts) for identity, parts in found}
