"""Requests of autograd and of torch's transforms that a layer-parallel net cannot serve.

Owns how such a request is recognized, and the sentence that refuses it. The passes of a net leave no graph that could be differentiated again, and states that are sent to
other ranks carry no tangent and no batch of vmap.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch._functorch import pyfunctorch
from torch.autograd import forward_ad

__all__ = ["TRACED", "of_backward", "of_forward", "once", "outside_of_transforms", "refuse_traced"]


_INSTEAD = "train `net.to_serial()`, which is an ordinary module of one rank, or leave the request out"
TRACED = (
    "torch.compile, torch.export and torch.jit.trace cannot take a layer-parallel net as a whole: a batch sends states to other ranks; compile its layers "
    "instead, as ode(torch.compile(block)), or the module that `net.to_serial()` returns"
)


def of_forward(tensors: Iterable[Tensor]) -> Exception | None:
    """The refusal of a forward pass with these inputs and parameters, if a transform has wrapped one of them."""
    is_dual = forward_ad._current_level >= 0
    for tensor in tensors:
        if _is_wrapped(tensor):
            return _refusal("torch.func's transforms (grad, vmap, jvp, jacrev and the like)")
        if is_dual and forward_ad.unpack_dual(tensor).tangent is not None:  # type: ignore[no-untyped-call]
            return _refusal("forward-mode derivatives (a dual tensor)")
    return None


def of_backward(cotangents: Iterable[Tensor | None]) -> Exception | None:
    """The refusal of a backward pass, if autograd wants more than its gradients once."""
    if torch.is_grad_enabled():
        # autograd switches gradients on in a backward pass for this alone.
        return _refusal("create_graph=True, as gradient penalties, hessian() and functional.jvp() need it,")
    if any(_is_wrapped(cotangent) for cotangent in cotangents if cotangent is not None):
        return _refusal("is_grads_batched=True, or jacobian(vectorize=True),")
    return None


def once(backward: Callable[..., Any]) -> Callable[..., Any]:
    """The backward pass of an autograd function that no other rank takes part in; raises for what it cannot serve."""

    @functools.wraps(backward)
    def checked(ctx: Any, *cotangents: Tensor | None) -> Any:
        refusal = of_backward(cotangents)
        if refusal is not None:
            raise refusal
        return backward(ctx, *cotangents)

    return checked


def outside_of_transforms() -> AbstractContextManager[Any]:
    """torch.func's transforms do not see what happens meanwhile: messages between ranks are plain tensors."""
    if torch._C._functorch.peek_interpreter_stack() is None:
        return nullcontext()
    return pyfunctorch.temporarily_clear_interpreter_stack()


def refuse_traced() -> None:
    """Raises if the caller is being compiled, exported or traced."""
    if torch.compiler.is_compiling() or torch._C._get_tracing_state() is not None:
        _refuse_traced()


def _refuse_traced() -> NoReturn:
    raise NotImplementedError(TRACED)


# As `torch.compiler.disable` has it, whose import takes seconds: the graph ends here, and the exception is ours.
_refuse_traced._torchdynamo_disable = True  # type: ignore[attr-defined]
_refuse_traced._torchdynamo_disable_msg = TRACED  # type: ignore[attr-defined]


def _is_wrapped(tensor: Tensor) -> bool:
    functorch = torch._C._functorch
    return functorch.is_functorch_wrapped_tensor(tensor) or functorch.is_legacy_batchedtensor(tensor)


def _refusal(what: str) -> NotImplementedError:
    return NotImplementedError(f"{what} cannot be served by a layer-parallel net; {_INSTEAD}")
