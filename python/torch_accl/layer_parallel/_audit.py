"""How wrong an inexact batch was.

Owns the figures that compare two sets of gradients of the same batch, summed layer by layer over all ranks; who makes the second set is in `_solve.py`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

__all__ = ["Audit", "Excess", "Probe", "audit_of", "factor_of", "figures", "relative"]

# What is done when an audit finds more than the limit.
Excess = Literal["warn", "more", "exact"]


@dataclass(frozen=True)
class Audit:
    """A batch beside its exact rerun, the same on all ranks.

    batch: its number. loss, exact_loss: of both; None where the loss is the caller's, and both had the gradient of the output that came from it. output_error: of what the last layer returned, relative, in the 2-norm. gradient_error: the same of the
    gradients of all parameters. cosine: of the angle between the two. residuals: norms of the forward solve by iteration; factor: the last one
    divided by the one before, where there are two.
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
        losses = "for the gradient of the output that was given"
        if self.loss is not None and self.exact_loss is not None:
            losses = f"loss {self.loss:.6g} instead of {self.exact_loss:.6g}"
        return f"batch {self.batch}: gradients {self.gradient_error:.2%} off (cosine {self.cosine:.4f}), output {self.output_error:.2%} off, {losses}{factor}"


@dataclass(frozen=True)
class Probe:
    """A batch with twice as many iterations: by what the last of them made the residual norms of both passes smaller, the same on all ranks. From 1 on, iterations
    do not help any more. None where a pass had no two norms.
    """

    batch: int
    forward: float | None
    backward: float | None

    @property
    def factor(self) -> float:
        """The worse one; of norms that are no finite numbers it is infinite."""
        known = [factor for factor in (self.forward, self.backward) if factor is not None]
        return math.inf if any(math.isnan(factor) for factor in known) else max([0.0, *known])

    def __str__(self) -> str:
        both = {"forward": self.forward, "backward": self.backward}
        shown = " and ".join(f"{name} {factor:.2g}" for name, factor in both.items() if factor is not None)
        return f"batch {self.batch}: the last of twice as many iterations made residuals {shown} times as large"


def factor_of(residuals: Sequence[float]) -> float | None:
    """The last norm divided by the one before, where there are two."""
    return residuals[-1] / residuals[-2] if len(residuals) > 1 and residuals[-2] != 0 else None


def figures(pairs: Sequence[tuple[Tensor | None, Tensor | None]]) -> tuple[float, float, float]:
    """Of tensors and what they ought to be: the squares of their difference and of what they ought to be, and the product of both; None is zero."""
    difference, exact, product = 0.0, 0.0, 0.0
    for found, right in pairs:
        if found is None and right is None:
            continue
        a = torch.zeros_like(right) if found is None else found  # type: ignore[arg-type]
        b = torch.zeros_like(a) if right is None else right
        a, b = (torch.view_as_real(t) if t.is_complex() else t for t in (a.detach(), b.detach()))
        a, b = a.double().flatten(), b.double().flatten()
        difference += float(torch.dot(a - b, a - b))
        exact += float(torch.dot(b, b))
        product += float(torch.dot(a, b))
    return difference, exact, product


def audit_of(batch: int, numbers: Sequence[float], residuals: Sequence[float], *, has_loss: bool) -> Audit:
    """From the figures of all layers, one after the other, each followed by the squares of what was found; then both losses, and the figures of the output."""
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
    """An error in the 2-norm, of squares."""
    if exact == 0:
        return 0.0 if difference == 0 else math.inf
    return math.sqrt(difference / exact)
