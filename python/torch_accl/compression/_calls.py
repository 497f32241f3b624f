"""Explicit calls: collectives that are compressed because the caller requests it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import lru_cache

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _world

from .. import _native
from ._call_measures import row_of, totals
from ._call_numbers import call_numbers
from ._codecs import needs_feedback
from ._scope import FLOATS, Op, accl_group, codec_of_group, codecs_of, exact, takes_part
from ._settings import AUTO, RAW, Compression, default_codec, tensor_id

__all__ = [
    "all_gather_quantized",
    "all_reduce_quantized",
    "all_to_all_quantized",
    "checked_group",
    "reduce_scatter_quantized",
    "refuse_coalescing",
]

# Number of elements of a tensor from which the encoded bits per element are computed.
_MANY = 1 << 20

# Operators whose results may be compressed.
_SUMS = (dist.ReduceOp.SUM, dist.ReduceOp.AVG, dist.ReduceOp.PREMUL_SUM)


def all_reduce_quantized(
    tensor: torch.Tensor,
    op: Op = dist.ReduceOp.SUM,
    group: dist.ProcessGroup | None = None,
    async_op: bool = False,
    *,
    compression: str | Compression | None = None,
    key: str = "",
    step: int | None = None,
) -> dist.Work | None:
    """Works like `torch.distributed.all_reduce`, with compressed messages; all ranks end with the same bits.

    Args:
        tensor: float32, float16 or bfloat16, of any shape, on a device that accl serves in this group; it is overwritten with the
            result. The call is exact for other types, for sparse tensors, for an `op` other than SUM, AVG and PREMUL_SUM, and with
            one rank.
        op: how contributions are combined.
        group: None is the default group; its backend for the tensor's device must be accl.
        async_op: return a Work at once instead of waiting.
        compression: a codec such as `"maxmin:4"`, or a `Compression`, of which codec, reduce, result, intra_node, seed and audit are used. A
            codec alone has no audit. All ranks must give the same. None takes the codec of the group's `Options`, else of
            `ACCL_CODEC`, else `maxmin:4`. No residual is kept between calls: with `"sign"` and `"topk:BITS"` the caller must
            apply error feedback.
        key: a name for the tensor. Tensors with different names have different random numbers and separate figures
            (`call_measures`).
        step: a number from 0 to 2^64 - 1 that no other call on this key has. None numbers the calls on this key in this group
            that were given no step, from 0. A refused call is not counted.

    Returns:
        A Work with `async_op`, else None.

    Raises:
        ValueError: an unknown codec or `"auto"`, or an invalid key or step.
        RuntimeError: the group has another backend for the tensor's device, or the call is inside torch's coalescing manager, whose block it then ends.
            Also whatever `all_reduce` raises.
    """
    with _scope("all_reduce", tensor, lambda _: (tensor.numel(),), group, compression, key, step, op):
        return dist.all_reduce(tensor, op, group, async_op)


def reduce_scatter_quantized(
    output: torch.Tensor,
    input: torch.Tensor,
    op: Op = dist.ReduceOp.SUM,
    group: dist.ProcessGroup | None = None,
    async_op: bool = False,
    *,
    compression: str | Compression | None = None,
    key: str = "",
    step: int | None = None,
) -> dist.Work | None:
    """Works like `torch.distributed.reduce_scatter_tensor`, with compressed messages (codec `reduce`). Results are not encoded.

    Arguments and errors are the same as for `all_reduce_quantized`, shapes the same as for `reduce_scatter_tensor`. Buckets
    start at the first element of each rank's part.
    """

    def sizes(world: int) -> tuple[int, ...]:
        return (output.numel(),) * world

    with _scope("reduce_scatter", output, sizes, group, compression, key, step, op):
        return dist.reduce_scatter_tensor(output, input, op, group, async_op)


def all_gather_quantized(
    output: torch.Tensor,
    input: torch.Tensor,
    group: dist.ProcessGroup | None = None,
    async_op: bool = False,
    *,
    compression: str | Compression | None = None,
    key: str = "",
    step: int | None = None,
) -> dist.Work | None:
    """Works like `torch.distributed.all_gather_into_tensor`, with compressed messages (codec `result`).

    Every rank, the sender included, gets the decoded values, so all ranks have the same. Arguments and errors are the same as
    for `all_reduce_quantized`.
    """
    with _scope("all_gather", output, lambda _: (input.numel(),), group, compression, key, step):
        return dist.all_gather_into_tensor(output, input, group, async_op)


def all_to_all_quantized(
    output: torch.Tensor,
    input: torch.Tensor,
    output_split_sizes: list[int] | None = None,
    input_split_sizes: list[int] | None = None,
    group: dist.ProcessGroup | None = None,
    async_op: bool = False,
    *,
    compression: str | Compression | None = None,
    key: str = "",
    step: int | None = None,
) -> dist.Work | None:
    """Works like `torch.distributed.all_to_all_single`, with compressed messages (codec `result`). A rank's own block is exact.

    Arguments and errors are the same as for `all_reduce_quantized`.
    """

    def sizes(world: int) -> tuple[int, ...]:
        counts = input_split_sizes or [input.shape[0] // world] * world
        others = (count for rank, count in enumerate(counts) if rank != dist.get_rank(group))
        return tuple(count * (input.numel() // input.shape[0]) for count in others if count)

    with _scope("all_to_all", output, sizes, group, compression, key, step):
        return dist.all_to_all_single(output, input, output_split_sizes, input_split_sizes, group, async_op)


def checked_group(tensor: torch.Tensor, group: dist.ProcessGroup | None) -> dist.ProcessGroup:
    """Returns the group of a call on the tensor.

    Raises:
        RuntimeError: the group reduces tensors on this device with another backend than accl, or has none for the device; or the
            call is inside torch's coalescing manager.
    """
    refuse_coalescing(group)
    return accl_group(group, tensor.device)


def refuse_coalescing(group: dist.ProcessGroup | None) -> None:
    """Refuses a call inside torch's coalescing manager, before any other check.

    torch keeps a list for each group that is being coalesced, and removes it only at the end of the block. If an error left the
    list there, it would swallow every later call of the group. This function therefore removes it and ends the block.

    Raises:
        RuntimeError: the call is inside such a block.
    """
    found = dist.group.WORLD if group is None else group
    if found not in _world.pg_coalesce_state:
        return
    del _world.pg_coalesce_state[found]
    # With a device, a backend of the group collects works as well. `_end_coalescing` raises if it has no open block.
    for device in found._device_types:
        with contextlib.suppress(RuntimeError, ValueError):
            found._end_coalescing(device)
    raise RuntimeError(
        "torch's coalescing manager issues its calls at the end of its block, with one codec for all; issue this call "
        "outside. The block ends here"
    )


def _scope(
    collective: str,
    tensor: torch.Tensor,
    sizes: Callable[[int], tuple[int, ...]],
    group: dist.ProcessGroup | None,
    compression: str | Compression | None,
    key: str,
    step: int | None,
    op: Op = dist.ReduceOp.SUM,
) -> AbstractContextManager[None]:
    """Returns the scope in which a call is encoded and measured.

    `sizes` maps the world size to the sizes, in elements, of the tensors that this rank sends.
    """
    if not takes_part(group):
        # The call itself reports that this rank is not in the group.
        return nullcontext()
    found = checked_group(tensor, group)
    if not isinstance(key, str):
        raise ValueError(f"key is {key!r}; expected a name")
    if step is not None and (type(step) is not int or not 0 <= step < 1 << 64):
        raise ValueError(f"step is {step!r}; expected an integer from 0 to 2^64 - 1")
    if compression is None:
        compression = codec_of_group(found, tensor.device) or default_codec()
    if isinstance(compression, Compression):
        settings, is_audited = compression.of_group(codec_of_group(found, tensor.device)), True
    else:
        settings, is_audited = _settings(compression), False
    if settings.codec == AUTO:
        raise ValueError(
            'codec="auto" chooses codecs by the gradients of a model, only for ddp_hook and apply_fsdp2; name a codec '
            "for this call"
        )
    if tensor.is_complex() or tensor.layout is not torch.strided:
        # torch issues calls on float32 views of these tensors, which the engine cannot distinguish from other float32 tensors.
        return exact()
    codecs = codecs_of(((*(settings.default or (RAW, RAW, RAW)), tensor_id(key)),))
    number = call_numbers.of(found, key) if step is None else step

    def counted() -> None:
        if step is None:
            call_numbers.count(found, key)

    is_sum_of_floats = tensor.dtype in FLOATS and any(op == known for known in _SUMS)
    if settings.default is None or not is_sum_of_floats or found.size() == 1:
        return _Made(_native.Encoding(codecs, settings.seed, number), counted)
    row, is_part = row_of(found, collective, key), collective in ("all_reduce", "reduce_scatter")
    _, reduce, result = settings.default
    one_in = 0
    if is_audited:
        elements, sent = totals(codecs, tensor.dtype, (_MANY,), True)
        one_in = settings.one_in(elements * tensor.dtype.itemsize, sent)
    encoding = _native.Encoding(codecs, settings.seed, number, None, row.stats, one_in)

    def made() -> None:
        counted()
        row.enter(codecs, reduce if is_part else result, sizes(found.size()), tensor.dtype, is_part)

    return _Made(encoding, made)


class _Made:
    """Like `encoded`, but calls `made` after a call without an error. A generator would double the cost of a small call."""

    __slots__ = ("_before", "_encoding", "_made")

    def __init__(self, encoding: _native.Encoding, made: Callable[[], None]) -> None:
        self._encoding = encoding
        self._made = made

    def __enter__(self) -> None:
        self._before = _native.encode_calls(self._encoding)

    def __exit__(self, error: type[BaseException] | None, *_: object) -> None:
        _native.encode_calls(self._before)
        if error is None:
            self._made()


@lru_cache(maxsize=64)
def _settings(codec: str) -> Compression:
    # A single call may use a codec that hooks refuse without error feedback; its loss is up to the caller.
    return Compression(codec, error_feedback=isinstance(codec, str) and needs_feedback(codec))
