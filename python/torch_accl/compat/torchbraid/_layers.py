"""Layers that depend on the solve.

Owns dropout with a mask for each sample, and batch norm under torchbraid's name. `layer_parallel` decides when running
statistics are updated: it evaluates a layer on copies of its buffers until the last sweep.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ...layer_parallel.extension import SEEDING_THEMSELVES, Drawing, drawn_for, mixed

__all__ = ["LPBatchNorm2d", "LPDropout"]


class LPBatchNorm2d(nn.BatchNorm2d):
    """`torch.nn.BatchNorm2d` for inputs of two or more dimensions; its running statistics are updated once a batch.

    The running statistics are its only buffers. It loads checkpoints of torch's layer and of torchbraid's.
    """

    def __init__(self, channels: int, momentum: float = 0.1, eps: float = 1e-5) -> None:
        if momentum is None:
            raise ValueError("LPBatchNorm2d(momentum=None): a mean over all batches is not supported; give a number")
        super().__init__(channels, eps=eps, momentum=momentum)
        # Only a mean over all batches needs their number.
        self.num_batches_tracked = None

    @property
    def mean(self) -> Tensor | None:
        """The running mean."""
        return self.running_mean

    @property
    def var(self) -> Tensor | None:
        """The running variance."""
        return self.running_var

    def reset_running_stats(self) -> None:
        """Resets the running statistics to a new layer's."""
        assert self.running_mean is not None and self.running_var is not None, "running statistics are tracked"
        self.running_mean.zero_()
        self.running_var.fill_(1)

    def _check_input_dim(self, input: Tensor) -> None:
        if input.dim() < 2:
            raise ValueError(
                f"LPBatchNorm2d: the input has the shape {list(input.shape)}; give at least the dimensions samples and channels"
            )

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *others: Any) -> None:
        # torch's number of batches and torchbraid's flag have no counterpart here.
        for name in ("num_batches_tracked", "done_flag"):
            state_dict.pop(f"{prefix}{name}", None)
        for theirs, ours in (("mean", "running_mean"), ("var", "running_var")):
            if f"{prefix}{theirs}" in state_dict:
                state_dict[f"{prefix}{ours}"] = state_dict.pop(f"{prefix}{theirs}")
        # Skip the base class's method, which adds a number of batches.
        nn.Module._load_from_state_dict(self, state_dict, prefix, *others)


class LPDropout(nn.Module):
    """Dropout whose mask is the same for all evaluations of a layer in a batch.

    Each batch, layer and sample has another mask, and the mask does not depend on how a batch is cut into
    micro-batches. Outside of a layer-parallel net it draws as torch does. `t` selects other masks of the same seed.
    """

    def __init__(self, p: float = 0.2, t: int = 0) -> None:
        super().__init__()
        if not 0 <= p <= 1:
            raise ValueError(f"LPDropout(p={p}): give a probability from 0 to 1")
        self.p = p
        self.t = t

    def forward(self, input: Tensor) -> Tensor:
        """Applies the mask; the first dimension is the samples."""
        if not self.training or self.p == 0:
            return input
        mask: Tensor = torch.ops.torch_accl_torchbraid.sample_mask(input.detach(), self.p, self.t)
        return input * mask

    def extra_repr(self) -> str:
        """Returns the arguments as text."""
        return f"p={self.p}" + (f", t={self.t}" if self.t else "")


def _sample_mask(like: Tensor, p: float, t: int) -> Tensor:
    """Returns a mask: 0 with probability p, else the factor that keeps the mean."""
    mask = torch.empty(like.shape, dtype=like.dtype, device=like.device)
    what = drawn_for()
    if what is None:
        mask.bernoulli_(1 - p)
    else:
        _draw_rows(mask, p, t, what)
    return mask if p == 1 else mask.mul_(1 / (1 - p))


def _draw_rows(mask: Tensor, p: float, t: int, what: Drawing) -> None:
    call, what.calls = what.calls, what.calls + 1
    rows = mask.unbind(0) if mask.dim() else (mask,)
    # All micro-batches have the same size.
    first = what.micro_batch * len(rows)
    generator = torch.Generator(device=mask.device)
    for number, row in enumerate(rows, first):
        generator.manual_seed(mixed(what.key, what.layer, call, t, number))
        row.bernoulli_(1 - p, generator=generator)


def _form_of_mask(like: Tensor, p: float, t: int) -> Tensor:
    return torch.empty(like.shape, dtype=like.dtype, device="meta")


# An operator, so that code compiled by torch.compile draws again each time, and never merges two draws.
_OPERATORS = torch.library.Library("torch_accl_torchbraid", "DEF")  # type: ignore[no-untyped-call]
_OPERATORS.define(  # type: ignore[no-untyped-call]
    "sample_mask(Tensor like, float p, int t) -> Tensor", tags=(torch.Tag.nondeterministic_seeded,)
)
# The operator seeds its own generator by the layer that is being evaluated.
SEEDING_THEMSELVES.add("torch_accl_torchbraid::sample_mask")
for _device in ("CPU", "CUDA", "XPU", "PrivateUse1"):
    _OPERATORS.impl("sample_mask", _sample_mask, _device)  # type: ignore[no-untyped-call]
_OPERATORS.impl("sample_mask", _form_of_mask, "Meta")  # type: ignore[no-untyped-call]
