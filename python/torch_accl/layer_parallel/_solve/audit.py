"""The error of an inexact batch.

Owns the figures that compare two sets of gradients of the same batch, summed layer by layer over all ranks.
`passes.py` computes the second set.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

__all__ = ["Audit", "Excess", "Probe", "audit_of", "factor_of", "figures", "relative"]

# The reaction to an audit that finds an error above the limit.
Excess = Literal["warn", "more", "exact"]


@dataclass(frozen=True)
class Audit:
    """Comparison of a batch with its exact rerun; the same on all ranks.

    batch: number of the batch.
    loss, exact_loss: losses of the batch and of its rerun. None if the caller computed the loss; then both runs used
        the caller's gradient of the output.
    output_error: relative error of the last layer's output, in the 2-norm.
    gradient_error: relative error of the gradients of all parameters, in the 2-norm.
    cosine: cosine of the angle between the two gradients.
    residuals: residual norms of the forward solve, by iteration.
    factor: last residual norm divided by the one before; None if there are fewer than two, or the divisor is 0.
    """

    batch: int
    loss: float | None
    exact_loss: float | None
    output_error: float
    gradient_error: float
    cosine: float
    residuals: tuple[float, ...]
    factor: float | None

    def __str__(self) -> str:
        factor = "" if self.factor is None else f", convergence factor {self.factor:.2g}"
        losses = "for the given output gradient"
        if self.loss is not None and self.exact_loss is not None:
            losses = f"loss {self.loss:.6g} instead of {self.exact_loss:.6g}"
        return f"batch {self.batch}: gradients {self.gradient_error:.2%} off (cosine {self.cosine:.4f}), output {self.output_error:.2%} off, {losses}{factor}"


@dataclass(frozen=True)
class Probe:
    """Convergence of a batch that ran with twice as many iterations, at least three; the same on all ranks.

    forward, backward: factor by which the last iteration changed the residual norm of the pass. None if the pass had
        fewer than two norms. From 1 on, more iterations do not help.
    """

    batch: int
    forward: float | None
    backward: float | None

    @property
    def factor(self) -> float:
        """Larger of the two factors, or 0 if there is none.

        Infinite if a factor is NaN, which norms that are not finite give.
        """
        known = [factor for factor in (self.forward, self.backward) if factor is not None]
        return math.inf if any(math.isnan(factor) for factor in known) else max([0.0, *known])

    def __str__(self) -> str:
        both = {"forward": self.forward, "backward": self.backward}
        shown = " and ".join(f"{name} {factor:.2g}" for name, factor in both.items() if factor is not None)
        return f"batch {self.batch}: a probe with twice the iterations ended with residual factors {shown}"


def factor_of(residuals: Sequence[float]) -> float | None:
    """Returns the last norm divided by the one before.

    None if there are fewer than two norms, or the divisor is 0.
    """
    return residuals[-1] / residuals[-2] if len(residuals) > 1 and residuals[-2] != 0 else None


def figures(pairs: Sequence[tuple[Tensor | None, Tensor | None]]) -> tuple[float, float, float]:
    """Compares pairs of a found tensor and the right one; None counts as zeros.

    Returns the squared 2-norm of the difference, the squared 2-norm of the right tensors, and the inner product of
    both.
    """
    difference, exact, product = 0.0, 0.0, 0.0
    for found, right in pairs:
        if found is None and right is None:
            continue
        a = torch.zeros_like(right) if found is None else found  # type: ignore[arg-type]
        b = torch.zeros_like(a) if right is None else right
        a, b = (t.to_dense() if t.layout != torch.strided else t for t in (a.detach(), b.detach()))
        a, b = (torch.view_as_real(t) if t.is_complex() else t for t in (a, b))
        a, b = a.double().flatten(), b.double().flatten()
        difference += float(torch.dot(a - b, a - b))
        exact += float(torch.dot(b, b))
        product += float(torch.dot(a, b))
    return difference, exact, product


def audit_of(batch: int, numbers: Sequence[float], residuals: Sequence[float], *, has_loss: bool) -> Audit:
    """Builds an audit from figures that all ranks know.

    `numbers` has four entries per layer: the three results of `figures`, then the squared 2-norm of the found
    gradients. After the layers come the loss, the exact loss, and the squared 2-norms of the output's difference and of
    the exact output.
    """
    *layers, loss, exact_loss, output_difference, output = numbers
    difference, exact, product, own = (sum(layers[which::4]) for which in range(4))
    length = math.sqrt(exact) * math.sqrt(own)
    return Audit(
        batch=batch,
        loss=loss if has_loss else None,
        exact_loss=exact_loss if has_loss else None,
        output_error=relative(output_difference, output),
        gradient_error=relative(difference, exact),
        cosine=product / length if length > 0 else float(difference == 0),
        residuals=tuple(residuals),
        factor=factor_of(residuals),
    )


def relative(difference: float, exact: float) -> float:
    """Returns the relative error in the 2-norm, from the squares of the difference and of the exact value."""
    if exact == 0:
        return 0.0 if difference == 0 else math.inf
    return math.sqrt(difference / exact)
