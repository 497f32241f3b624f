"""torchbraid's vector of a state by the name of its own module: the value of `getFineTimePoints` for each point."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from torch import Tensor

__all__ = ["BraidVector"]


class BraidVector:
    """The tensors of a state, in order. Weights belong to the layers and are never part of it."""

    def __init__(self, tensor: Tensor | Iterable[Tensor]) -> None:
        self._tensors = _tuple_of(tensor)

    def tensor(self, i: int = 0) -> Tensor:
        """Returns tensor number `i`."""
        return self._tensors[i]

    def tensors(self) -> tuple[Tensor, ...]:
        """Returns all tensors."""
        return self._tensors

    def __iter__(self) -> Iterator[Tensor]:
        return iter(self._tensors)

    def replaceTensor(self, tensor: Tensor | Iterable[Tensor], i: int = 0) -> Tensor | tuple[Tensor, ...]:
        """Replaces one tensor by a tensor, or all by several, and returns the replaced ones."""
        before = self._tensors
        if not isinstance(tensor, Tensor):
            self._tensors = _tuple_of(tensor)
            return before
        self._tensors = (*before[:i], tensor, *before[i + 1 :])
        return before[i]

    def clone(self) -> BraidVector:
        """Returns a copy with its own memory and without a graph."""
        return BraidVector(tensor.detach().clone() for tensor in self._tensors)

    def __repr__(self) -> str:
        return f"<BraidVector {[list(tensor.shape) for tensor in self._tensors]}>"


def _tuple_of(given: Tensor | Iterable[Tensor]) -> tuple[Tensor, ...]:
    found = (given,) if isinstance(given, Tensor) else tuple(given)
    for each in found:
        if not isinstance(each, Tensor):
            raise TypeError(f"BraidVector: expected a tensor or several tensors, got {type(each).__name__}")
    return found
