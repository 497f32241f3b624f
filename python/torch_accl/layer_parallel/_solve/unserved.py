"""Requests of autograd and of torch's transforms that a layer-parallel net cannot serve.

Owns the detection of such a request, and the message that refuses it. The passes of a net leave no graph that could be
differentiated again. States that are sent to other ranks have no tangent and no batch dimension of vmap.
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


_INSTEAD = "train `net.to_serial()`, an ordinary module of one rank, or drop the request"
TRACED = (
    "torch.compile, torch.export and torch.jit.trace cannot take a layer-parallel net as a whole: a batch sends states to other ranks; compile its layers "
    "instead, as ode(torch.compile(block)), or the module that `net.to_serial()` returns"
)


def of_forward(tensors: Iterable[Tensor]) -> Exception | None:
    """Returns the refusal of a forward pass if a transform has wrapped one of its tensors; otherwise None."""
    is_dual = forward_ad._current_level >= 0
    for tensor in tensors:
        if _is_wrapped(tensor):
            return _refusal("torch.func's transforms (grad, vmap, jvp, jacrev and the like)")
        if is_dual and forward_ad.unpack_dual(tensor).tangent is not None:  # type: ignore[no-untyped-call]
            return _refusal("forward-mode derivatives (a dual tensor)")
    return None


def of_backward(cotangents: Iterable[Tensor | None]) -> Exception | None:
    """Returns the refusal of a backward pass if autograd asks for more than first derivatives, once; otherwise None."""
    if torch.is_grad_enabled():
        # autograd enables gradients in a backward pass only for `create_graph=True`.
        return _refusal("create_graph=True (needed by gradient penalties, hessian() and functional.jvp())")
    if any(cotangent.layout != torch.strided for cotangent in cotangents if cotangent is not None):
        return TypeError(
            "the gradient of a layer-parallel net's output is sparse; give a dense one, as from to_dense()"
        )
    if any(_is_wrapped(cotangent) for cotangent in cotangents if cotangent is not None):
        return _refusal("is_grads_batched=True or jacobian(vectorize=True)")
    return None


def once(backward: Callable[..., Any]) -> Callable[..., Any]:
    """Decorates the backward pass of an autograd function in which no other rank takes part.

    The decorated function raises for a request that it cannot serve.
    """

    @functools.wraps(backward)
    def checked(ctx: Any, *cotangents: Tensor | None) -> Any:
        refusal = of_backward(cotangents)
        if refusal is not None:
            raise refusal
        return backward(ctx, *cotangents)

    return checked


def outside_of_transforms() -> AbstractContextManager[Any]:
    """Inside the context, torch.func's transforms see nothing: messages between ranks are plain tensors."""
    if torch._C._functorch.peek_interpreter_stack() is None:
        return nullcontext()
    return pyfunctorch.temporarily_clear_interpreter_stack()


def refuse_traced() -> None:
    """Raises `NotImplementedError` if the caller is being compiled, exported or traced."""
    if torch.compiler.is_compiling() or torch._C._get_tracing_state() is not None:
        _refuse_traced()


def _refuse_traced() -> NoReturn:
    raise NotImplementedError(TRACED)


# Does what `torch.compiler.disable` does, whose import takes seconds. The graph ends here, and our own exception is
# raised.
_refuse_traced._torchdynamo_disable = True  # type: ignore[attr-defined]
_refuse_traced._torchdynamo_disable_msg = TRACED  # type: ignore[attr-defined]


def _is_wrapped(tensor: Tensor) -> bool:
    functorch = torch._C._functorch
    return functorch.is_functorch_wrapped_tensor(tensor) or functorch.is_legacy_batchedtensor(tensor)


def _refusal(what: str) -> NotImplementedError:
    return NotImplementedError(f"a layer-parallel net does not support {what}; {_INSTEAD}")
