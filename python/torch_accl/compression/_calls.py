"""Collectives that are compressed because the caller says so."""

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
from ._codecs import needs_feedback
from ._scope import FLOATS, Op, accl_group, codec_of_group, codecs_of, exact, takes_part
from ._settings import AUTO, RAW, Compression, default_codec, tensor_id
from ._steps import steps

__all__ = [
    "all_gather_quantized",
    "all_reduce_quantized",
    "all_to_all_quantized",
    "checked_group",
    "reduce_scatter_quantized",
    "refuse_coalescing",
]

# Elements that tell the bits of each.
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
    """As `torch.distributed.all_reduce`, with compressed messages; all ranks end with the same bits.

    Args:
        tensor: float32, float16 or bfloat16 on the CPU, of any shape; it is overwritten with the result. Of other types, if it
            is sparse, with another `op` than SUM, AVG and PREMUL_SUM, and with one rank, the call is exact.
        op: how contributions are combined.
        group: None is the default group; its backend must be accl.
        async_op: return a Work at once instead of waiting.
        compression: a codec such as `"maxmin:4"`, or a `Compression`, of which codec, up, down, inner, seed and audit count; a
            codec alone has no audit. All ranks must give the same. None is that of the group's `Options`, else that of
            `ACCL_CODEC`, else `maxmin:4`. Nothing is carried over from call to call: with `"sign"` and `"topk:BITS"`, that is
            for the caller to do.
        key: a name for the tensor: those with different names have different random numbers, and figures of their own
            (`call_measures`).
        step: a number that no other call on this key has; None counts the calls on this key in this group that were given none,
            from 0. A call that is refused does not count.

    Returns:
        A Work with `async_op`, else None.

    Raises:
        ValueError: no such codec, key or step, or a tensor that is not on the CPU.
        RuntimeError: the group has another backend, the call is inside torch's coalescing manager, whose block it then ends, or what
            `all_reduce` raises.
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
    """As `torch.distributed.reduce_scatter_tensor`, with compressed messages (codec `up`); sums themselves are exact.

    Arguments and errors are those of `all_reduce_quantized`; shapes are those of `reduce_scatter_tensor`. Buckets begin at
    the first element of each rank's part.
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
    """As `torch.distributed.all_gather_into_tensor`, with compressed messages (codec `down`).

    Every rank, the sender too, gets what the bytes decode to: all have the same values. Arguments and errors are those of
    `all_reduce_quantized`.
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
    """As `torch.distributed.all_to_all_single`, with compressed messages (codec `down`); what a rank keeps is exact.

    Arguments and errors are those of `all_reduce_quantized`.
    """

    def sizes(world: int) -> tuple[int, ...]:
        counts = input_split_sizes or [input.shape[0] // world] * world
        others = (count for rank, count in enumerate(counts) if rank != dist.get_rank(group))
        return tuple(count * (input.numel() // input.shape[0]) for count in others if count)

    with _scope("all_to_all", output, sizes, group, compression, key, step):
        return dist.all_to_all_single(output, input, output_split_sizes, input_split_sizes, group, async_op)


def checked_group(tensor: torch.Tensor, group: dist.ProcessGroup | None) -> dist.ProcessGroup:
    """The group of a call on the tensor.

    Raises:
        ValueError: the tensor is not on the CPU.
        RuntimeError: the group has another backend than accl, or the call is inside torch's coalescing manager.
    """
    refuse_coalescing(group)
    if tensor.device.type != "cpu":
        raise ValueError(f"only tensors on the CPU are compressed, and this one is on {tensor.device}")
    return accl_group(group)


def refuse_coalescing(group: dist.ProcessGroup | None) -> None:
    """Refuses a call inside torch's coalescing manager, before anything else is looked at.

    torch keeps a list for each group that is being coalesced, and takes it away at the end of the block only: left there by an
    error, it would swallow every later call of the group. So it is taken away here, and the block must end.

    Raises:
        RuntimeError: the call is inside of such a block.
    """
    found = dist.group.WORLD if group is None else group
    if found not in _world.pg_coalesce_state:
        return
    del _world.pg_coalesce_state[found]
    # With a device, the group collects works as well. There may be no such block: that is what it says then.
    with contextlib.suppress(RuntimeError, ValueError):
        found._end_coalescing(torch.device("cpu"))
    raise RuntimeError(
        "calls inside torch's coalescing manager are made when it ends, by one codec for all; call outside of it. The block ends here"
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
    """How a call is encoded and measured, of which this rank sends tensors of these `sizes`, in elements, in a world of so many."""
    if not takes_part(group):
        # The call itself says that this rank takes no part.
        return nullcontext()
    found = checked_group(tensor, group)
    if not isinstance(key, str):
        raise ValueError(f"key is {key!r}; expected a name")
    if step is not None and (type(step) is not int or not 0 <= step < 1 << 64):
        raise ValueError(f"step is {step!r}; expected an integer from 0 to 2^64 - 1")
    if compression is None:
        compression = codec_of_group(found) or default_codec()
    if isinstance(compression, Compression):
        settings, is_audited = compression.of_group(codec_of_group(found)), True
    else:
        settings, is_audited = _settings(compression), False
    if settings.codec == AUTO:
        raise ValueError(
            'codec="auto" is chosen by what a model\'s gradients are like, for ddp_hook and apply_fsdp2; name a codec here'
        )
    if tensor.is_complex() or tensor.layout is not torch.strided:
        # torch makes calls on tensors of float32 of these, which the engine cannot tell from others.
        return exact()
    codecs = codecs_of(((*(settings.default or (RAW, RAW, RAW)), tensor_id(key)),))
    number = steps.of(found, key) if step is None else step

    def counted() -> None:
        if step is None:
            steps.count(found, key)

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
    """As `encoded`, but that a call that was made is told. A generator would take as long as the rest of a small call."""

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
    # What a single call loses is its caller's matter, also with a codec that hooks refuse without error feedback.
    return Compression(codec, error_feedback=isinstance(codec, str) and needs_feedback(codec))
