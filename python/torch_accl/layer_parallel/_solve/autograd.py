"""The passes of a batch as functions of autograd.

Owns these functions, whose inputs are the parameters and the user's tensors. `passes.py` runs the passes.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .._net.blocks import undisturbed
from .batch import Batch
from .opening import close, opened
from .passes import run_forward, run_rest, run_step
from .unserved import of_backward, once, outside_of_transforms

__all__ = ["ForwardPass", "WholeBatch"]


class ForwardPass(torch.autograd.Function):
    """Autograd function of a net: the forward pass, and in its backward pass the adjoint."""

    @staticmethod
    def forward(ctx: Any, batch: Batch, anchor: Tensor, *tensors: Tensor) -> tuple[Tensor, ...]:
        with opened(batch, is_recorded=True):
            states = run_forward(batch, batch.plan.forward)
            # Aliases, because an output tensor refers to its graph, which refers to `batch`.
            batch.states = [[state.detach() for state in of_micro_batch] for of_micro_batch in states]
            outputs = batch.tried_outputs(states)
        batch.forward_is_over()
        ctx.batch = batch
        ctx.set_materialize_grads(False)
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor | None) -> tuple[Tensor | None, ...]:
        batch: Batch = ctx.batch
        if batch.is_over:
            raise RuntimeError(
                "backward() of a layer-parallel net a second time: the values saved by its layers are freed; run forward again"
            )
        batch.is_over = True
        refusal = of_backward(cotangents)
        if refusal is not None:
            # Other ranks learn of the refusal at the end of the pass. This rank runs it with zeros.
            batch.fail(f"the backward pass, batch {batch.number}", refusal)
            cotangents = (None,) * len(cotangents)
        with torch.no_grad(), outside_of_transforms(), undisturbed():
            gradients = run_rest(batch, cotangents)
            close(batch)
        batch.on_end(batch)
        # Only once the batch is closed: other ranks would wait for a rank that fails here.
        return None, None, *batch.gradients_of_given(gradients), *batch.evaluation.gradients


class WholeBatch(torch.autograd.Function):
    """Autograd function of a whole batch.

    Its forward pass runs both passes of the net, and its backward pass returns the gradients.
    """

    @staticmethod
    def forward(ctx: Any, batch: Batch, anchor: Tensor, *tensors: Tensor) -> Tensor:
        refusal = batch.inputs.loss.refusal(batch.solver.wire, batch.micro_batches)
        with opened(batch, is_recorded=True, refusal=refusal):
            gradients = run_step(batch)
        batch.forward_is_over()
        batch.on_end(batch)
        batch.inputs.result.loss = batch.known_loss
        # Only once the batch is closed: other ranks would wait for a rank that fails here.
        ctx.gradients = [*batch.gradients_of_given(gradients), *batch.evaluation.gradients]
        return anchor.detach().clone()

    @staticmethod
    @once
    def backward(ctx: Any, scale: Tensor) -> tuple[Tensor | None, ...]:
        gradients: list[Tensor | None] = ctx.gradients
        by = float(scale)
        if by != 1.0:
            gradients = [None if gradient is None else gradient * by for gradient in gradients]
        return None, None, *gradients
