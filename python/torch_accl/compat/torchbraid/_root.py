"""The output on rank 0.

Owns the two messages that are needed because torchbraid computes the loss on rank 0: the last state from the last rank
to rank 0, and its gradient back. `layer_parallel`, whose output is on the last rank, does the rest.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from ...layer_parallel.extension import Form, Leaf, Wire, is_state, of_backward, ordered, outside_of_transforms, tried

__all__ = ["at_root"]


def at_root(
    output: Any,
    form: Form,
    wire: Wire,
    device: torch.device,
    refuse: Callable[[Exception], None],
    *,
    is_everywhere: bool = False,
) -> Any:
    """Returns the output of the last rank on rank 0 and on the last rank. Other ranks get zeros like it, or also the
    output.

    On all ranks `backward()` leads to the net's backward pass, in which rank 0's gradient counts. On ranks other than
    the last, `output` is the tensor that the net returned as the start of `backward()`. `refuse` makes the net's
    backward pass raise an error on all ranks.
    """
    if wire.size == 1:
        return output
    transfer = _RootTransfer(form, wire, device, refuse, is_everywhere=is_everywhere)
    leaves = pytree.tree_leaves(output)
    states = [leaf for leaf in leaves if is_state(leaf)]
    constants = [leaf for leaf in leaves if not is_state(leaf)] if transfer.is_last else []
    moved: Sequence[Tensor] = _ToRoot.apply(transfer, *states)
    return form.joined(moved, transfer.forward(constants, form.constants))


class _RootTransfer:
    """The transfer from the last rank to the first, and back."""

    def __init__(
        self,
        form: Form,
        wire: Wire,
        device: torch.device,
        refuse: Callable[[Exception], None],
        *,
        is_everywhere: bool,
    ) -> None:
        self.form = form
        self.refuse = refuse
        self.wire = wire
        self.device = device
        self.is_first = wire.rank == 0
        self.is_last = wire.is_last
        # Ranks that get the output of the last rank.
        self._receivers = range(wire.size - 1) if is_everywhere else range(1)

    def forward(self, tensors: Sequence[Tensor], leaves: Sequence[Leaf]) -> list[Tensor]:
        """Returns the last rank's tensors; zeros on ranks that do not receive them."""
        what = "sending the output from the last rank to rank 0 of the layers"
        if self.is_last:
            for receiver in self._receivers:
                self._send(tensors, leaves, receiver, "forward", what)
            return [tensor.detach() for tensor in tensors]
        found = [self._empty(leaf) for leaf in leaves]
        if self.wire.rank in self._receivers:
            self._receive(found, self.wire.size - 1, "forward", what)
            return found
        return [tensor.zero_() for tensor in found]

    def backward(self, cotangents: Sequence[Tensor | None]) -> list[Tensor] | None:
        """Returns rank 0's gradients on the last rank; None on the others."""
        what = "sending the output's gradient from rank 0 to the last rank of the layers"
        leaves = self.form.states
        if self.is_first:
            given = [
                self._empty(leaf).zero_() if cotangent is None else cotangent.to(leaf.dtype)
                for cotangent, leaf in zip(cotangents, leaves)
            ]
            self._send(given, leaves, self.wire.size - 1, "adjoint", what)
        if not self.is_last:
            return None
        found = [self._empty(leaf) for leaf in leaves]
        self._receive(found, 0, "adjoint", what)
        return found

    def _empty(self, leaf: Leaf) -> Tensor:
        return torch.empty(leaf.shape, dtype=leaf.dtype, device=self.device, memory_format=leaf.format)

    def _send(self, tensors: Sequence[Tensor], leaves: Sequence[Leaf], to: int, pass_: str, what: str) -> None:
        # An expanded gradient, such as the gradient of a sum, is made dense for the message.
        dense = [ordered(tensor.detach(), leaf) for tensor, leaf in zip(tensors, leaves)]
        works = tried(what, lambda: [self.wire.send(tensor, to, pass_) for tensor in dense])
        tried(what, lambda: [work.wait() for work in works])

    def _receive(self, into: Sequence[Tensor], source: int, pass_: str, what: str) -> None:
        works = tried(what, lambda: [self.wire.receive(tensor, source, pass_) for tensor in into])
        tried(what, lambda: [work.wait() for work in works])


class _ToRoot(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, transfer: _RootTransfer, *states: Tensor) -> tuple[Tensor, ...]:
        ctx.transfer = transfer
        ctx.set_materialize_grads(False)
        return tuple(transfer.forward(states if transfer.is_last else (), transfer.form.states))

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor | None) -> tuple[Tensor | None, ...]:
        refusal = of_backward(cotangents)
        if refusal is not None:
            # The last rank waits for a gradient. It gets zeros, and all ranks learn of the refusal from the net's pass.
            ctx.transfer.refuse(refusal)
            cotangents = (None,) * len(cotangents)
        with torch.no_grad(), outside_of_transforms():
            found = ctx.transfer.backward(cotangents)
        # On ranks other than the last, the gradient is a meaningless number: it only starts the net's own backward
        # pass.
        return (None, *(found if found is not None else [torch.zeros((), dtype=torch.float32, device="cpu")]))
