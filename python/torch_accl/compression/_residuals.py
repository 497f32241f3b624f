"""Residuals of gradients: the memory that they are kept in, and their addresses for the engine.

This module owns the tensors and on which device they lie. Residuals lie where their gradients are encoded: on the gradients'
device, or in host memory if the host encodes these. The engine reads and writes them until a call completes or, if it copies
gradients to host memory, until a wait for the call returns. `_feedback.py` owns when residuals are added.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from .. import _native
from ._scope import CPU, Addresses, OnDevice
from ._zeros import zeros_among

__all__ = ["Placed", "ResidualStore", "ResidualsOfCall", "TensorResiduals"]

# After the host has had to encode this many calls of one kind although their residuals were on a device, it places the residuals
# of these calls in host memory.
_MOST_MOVES = 3

# Residuals of calls that have failed, by identity, if kernels may still use their memory.
_LOST: dict[int, torch.Tensor] = {}


@dataclass
class TensorResiduals:
    """Which residuals a tensor of a call has. A tensor without a name has none."""

    name: str | None
    elements: int
    has_sum: bool = False


@dataclass
class ResidualsOfCall:
    """Residuals of one kind of call, whose blocks have these tensors."""

    tensors: tuple[TensorResiduals, ...]
    blocks: int
    # Of contributions, and of sums.
    addresses: Addresses = field(default_factory=lambda: ([], []))
    # Where they lie, and the state of the store that they were taken from.
    device: torch.device | None = None
    version: int = -1
    # How often the host had to encode although they were on a device.
    moves: int = 0


class ResidualStore:
    """Residuals in float32, by name: of contributions, with a row for each block, and of sums."""

    def __init__(
        self, contributions: Mapping[str, torch.Tensor] | None = None, sums: Mapping[str, torch.Tensor] | None = None
    ) -> None:
        self.contributions: dict[str, torch.Tensor] = dict(contributions or {})
        self.sums: dict[str, torch.Tensor] = dict(sums or {})
        # Counts the changes after which addresses that were taken before may be wrong.
        self._version = 0

    def __bool__(self) -> bool:
        """Whether there are residuals of contributions."""
        return bool(self.contributions)

    def copies(self) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
        """Returns copies in host memory: of contributions, and of sums."""
        return _copies(self.contributions), _copies(self.sums)

    def rescale(self, factor: float) -> None:
        """Multiplies all residuals by a factor."""
        for residual in (*self.contributions.values(), *self.sums.values()):
            residual.mul_(factor)

    def take_contribution(self, name: str) -> torch.Tensor | None:
        """Removes the residual of a contribution, and returns it."""
        self._version += 1
        return self.contributions.pop(name, None)

    def move_sum(self, name: str, factor: float) -> None:
        """Removes the residual of a sum, if there is one, and adds it, times `factor`, to the residual of the contribution."""
        of_sum = self.sums.pop(name, None)
        if of_sum is None:
            return
        self._version += 1
        # A contribution residual exists wherever a sum residual exists, except in a state that was edited by hand.
        residual = self.contributions.setdefault(name, torch.zeros_like(of_sum))
        residual.add_(of_sum.to(residual.device), alpha=factor)

    def check(self, name: str, blocks: int, elements: int) -> bool:
        """Returns whether a parameter has residuals. They must fit a gradient of `blocks` blocks of `elements` elements.

        Raises:
            RuntimeError: they do not.
        """
        kept = [residuals[name] for residuals in (self.contributions, self.sums) if name in residuals]
        for residual in kept:
            _check_shape(residual, name, blocks, elements)
        return bool(kept)

    def of_call(self, call: ResidualsOfCall, gradients: Sequence[torch.Tensor]) -> Placed:
        """Places the residuals of a call that is about to be issued. The residual of a gradient of zeros is not used."""
        device = gradients[0].device if gradients and call.moves < _MOST_MOVES else CPU
        try:
            self._place(call, device)
            return Placed(self, call, gradients)
        except torch.OutOfMemoryError:
            if device == CPU:
                raise
            # The device has no room for residuals, but the host can encode.
            call.moves = _MOST_MOVES
            self._place(call, CPU)
            return Placed(self, call, gradients)

    def to_host(self, call: ResidualsOfCall) -> None:
        """Moves the residuals of a call to host memory, which has to encode it."""
        call.moves += 1
        self._place(call, CPU)

    def owners(self, call: ResidualsOfCall) -> tuple[torch.Tensor, ...]:
        """Returns the tensors that own the memory of a call."""
        names = [tensor.name for tensor in call.tensors if tensor.name is not None]
        return tuple(of[name] for of in (self.contributions, self.sums) for name in names if name in of)

    def _place(self, call: ResidualsOfCall, device: torch.device) -> None:
        """Moves the residuals of a call to a device, and sets their addresses."""
        if (call.version, call.device) == (self._version, device):
            return
        rows: list[list[int]] = []
        sums: list[int] = []
        for tensor in call.tensors:
            row, of_sum = [0] * call.blocks, 0
            if tensor.name is not None:
                residual = self._kept(self.contributions, tensor.name, call.blocks, tensor.elements, device)
                row = [block.data_ptr() for block in residual]
                if tensor.has_sum:
                    of_sum = self._kept(self.sums, tensor.name, 1, tensor.elements, device).data_ptr()
            rows.append(row)
            sums.append(of_sum)
        call.addresses = [row[block] for block in range(call.blocks) for row in rows], sums
        call.device, call.version = device, self._version

    def _kept(
        self, residuals: dict[str, torch.Tensor], name: str, blocks: int, elements: int, device: torch.device
    ) -> torch.Tensor:
        """Returns the residual of a parameter on a device, a row per block, initially zeros. The engine writes to its memory."""
        if name not in residuals:
            residuals[name] = torch.zeros(blocks, elements, dtype=torch.float32, device=device)
        residual = residuals[name]
        _check_shape(residual, name, blocks, elements)
        if residual.device != device:
            residual = residuals[name] = residual.to(device)
            self._version += 1
        return residual


class Placed:
    """Residuals of one call, from the time when it is issued until it ends."""

    def __init__(self, store: ResidualStore, call: ResidualsOfCall, gradients: Sequence[torch.Tensor]) -> None:
        self._store, self._call, self._gradients = store, call, gradients
        self._owners = store.owners(call)
        self.on_device: OnDevice | None = None
        if call.device == CPU:
            self.addresses = self._of_used()
            return
        # The host does not wait for the answer: kernels read it.
        are_used = torch.stack([gradient.any() for gradient in gradients])
        self._owners += (are_used,)
        first, count = are_used.data_ptr(), len(gradients)
        flags = [first + place % count for place in range(len(call.addresses[0]))]
        # The engine may keep the function longer than this object should live.
        self.addresses, self.on_device = call.addresses, (flags, partial(_to_host, weakref.ref(self)))

    def to_host(self) -> Addresses:
        """Moves the residuals to host memory. Returns their addresses. The engine calls this while the call is issued."""
        self._store.to_host(self._call)
        self._owners = self._store.owners(self._call)
        return self._of_used()

    def issued(self) -> None:
        """Ends what is needed only while the call is issued."""
        self._gradients = ()

    def let_go(self, done: torch.futures.Future[Any]) -> None:
        """Ends the use of the residuals by a call whose future has completed."""
        try:
            done.value()
        except Exception as error:
            self.fail(error)

    def fail(self, error: BaseException) -> None:
        """Ends the use of the residuals by a call that has failed. If kernels may still use memory of a device, it is never freed."""
        if _native._holds_memory(str(error)):
            _LOST.update({id(owner): owner for owner in self._owners if owner.device != CPU})

    def _of_used(self) -> Addresses:
        """Returns the addresses with 0 for the contributions of gradients that are all zeros."""
        unused, count = zeros_among(self._gradients), len(self._gradients)
        contributions, sums = self._call.addresses
        if not unused:
            return contributions, sums
        return [0 if place % count in unused else address for place, address in enumerate(contributions)], sums


def _to_host(placed: weakref.ref[Placed]) -> Addresses:
    found = placed()
    assert found is not None, "the thread that issues the call holds it"
    return found.to_host()


def _check_shape(residual: torch.Tensor, name: str, blocks: int, elements: int) -> None:
    if residual.shape != (blocks, elements):
        raise RuntimeError(
            f"compression: the residual of {name} has {tuple(residual.shape)} elements, but its gradient has "
            f"{(blocks, elements)} now; load a state of the same model and kind of parallelism, or create a new one"
        )


def _copies(residuals: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: residual.to("cpu", copy=True) for name, residual in residuals.items()}
