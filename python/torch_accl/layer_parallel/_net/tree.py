"""States: the leaves that are passed from layer to layer and computed with, and their form.

Owns the form of a point's state. Floating-point and complex leaves are the state; integer and bool leaves are constants
of a solve.
"""

from __future__ import annotations

import functools
import hashlib
import pickle
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

__all__ = ["Form", "Leaf", "digest", "form_of", "is_state", "ordered", "packed", "zeros"]


_SHORT = {torch.float16, torch.bfloat16}


@dataclass(frozen=True)
class Leaf:
    """The form of one tensor of a state."""

    shape: torch.Size
    dtype: torch.dtype
    format: torch.memory_format

    @property
    def is_state(self) -> bool:
        """Whether the tensor is computed with."""
        return self.dtype.is_floating_point or self.dtype.is_complex

    def work_dtype(self, *, is_exact: bool) -> torch.dtype:
        """Returns the dtype in which the solver computes: differences of states need more than 16 bits."""
        return torch.float32 if self.dtype in _SHORT and not is_exact else self.dtype

    def __str__(self) -> str:
        return f"{str(self.dtype).removeprefix('torch.')}{list(self.shape)}"


@dataclass(frozen=True)
class Form:
    """The form of a point's state."""

    leaves: tuple[Leaf, ...]
    tree: pytree.TreeSpec

    def __reduce__(self) -> tuple[type[Form], tuple[Any, ...]]:
        # Cached properties are left out, so that the bytes are the same on all ranks.
        return Form, (self.leaves, self.tree)

    @functools.cached_property
    def states(self) -> list[Leaf]:
        """The leaves that are computed with."""
        return [leaf for leaf in self.leaves if leaf.is_state]

    @functools.cached_property
    def constants(self) -> list[Leaf]:
        """The leaves that are constants."""
        return [leaf for leaf in self.leaves if not leaf.is_state]

    @functools.cached_property
    def is_single(self) -> bool:
        """Whether the value is a single tensor, which is a state."""
        return self.tree.is_leaf() and self.leaves[0].is_state

    def joined(self, states: Sequence[Tensor], constants: Sequence[Tensor]) -> Any:
        """Returns the value that a layer gets."""
        if self.is_single:
            return states[0]
        left, right = iter(states), iter(constants)
        return pytree.tree_unflatten([next(left if leaf.is_state else right) for leaf in self.leaves], self.tree)

    def __str__(self) -> str:
        return ", ".join(map(str, self.leaves))


def is_state(value: Any) -> bool:
    """Returns whether a leaf is computed with."""
    return isinstance(value, Tensor) and (value.is_floating_point() or value.is_complex())


def form_of(value: Any, what: str) -> tuple[Form, list[Tensor], list[Tensor]]:
    """Returns the form of a value, its states and its constants."""
    leaves, tree = pytree.tree_flatten(value)
    for leaf in leaves:
        if not isinstance(leaf, Tensor):
            raise TypeError(f"{what} has a leaf of type {type(leaf).__name__}; all leaves must be tensors")
    form = Form(tuple(Leaf(leaf.shape, leaf.dtype, format_of(leaf)) for leaf in leaves), tree)
    states = [leaf for leaf, like in zip(leaves, form.leaves) if like.is_state]
    return form, states, [leaf for leaf, like in zip(leaves, form.leaves) if not like.is_state]


def format_of(tensor: Tensor) -> torch.memory_format:
    """Returns the memory format of a tensor that is preserved."""
    if tensor.is_contiguous():
        return torch.contiguous_format
    for dims, other in ((4, torch.channels_last), (5, torch.channels_last_3d)):
        if tensor.dim() == dims and tensor.is_contiguous(memory_format=other):
            return other
    return torch.contiguous_format


def ordered(tensor: Tensor, leaf: Leaf) -> Tensor:
    """Returns the tensor in the memory format of its leaf.

    A layer's result then does not depend on the source of its input.
    """
    if leaf.dtype.is_complex:
        tensor = tensor.resolve_conj().resolve_neg()
    return tensor if tensor.is_contiguous(memory_format=leaf.format) else tensor.contiguous(memory_format=leaf.format)


def packed(forms: Any) -> bytes:
    """Pickles forms for other ranks of the same program."""
    return pickle.dumps(forms)


def digest(data: bytes) -> int:
    """Returns 63 bits of a hash."""
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "little") >> 1


def zeros(form: Form, device: torch.device) -> tuple[list[Tensor], list[Tensor]]:
    """Returns states and constants of this form, all zero."""
    made = [
        torch.zeros(leaf.shape, dtype=leaf.dtype, device=device).contiguous(memory_format=leaf.format)
        for leaf in form.leaves
    ]
    return [t for t, leaf in zip(made, form.leaves) if leaf.is_state], [
        t for t, leaf in zip(made, form.leaves) if not leaf.is_state
    ]
