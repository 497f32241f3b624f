"""Sums that do not depend on how they are computed: sums of integers, after ranks have agreed on their scale.

For each bucket, ranks first agree on the largest magnitude of any rank, with an exact MAX. Each rank then sends its elements
as integers, `round(x / unit)`, and the integers are summed exactly. Units are chosen so that no sum overflows the integer
type: `unit = greatest / top`. `top` is the largest number of the type divided by the number of ranks, at most 2^22. An
element of the result is its integer times the unit. Integers may be added in any order. The same contributions therefore
have the same sum with every algorithm, on any number of hosts, and with any assignment of contributions to ranks.

This is the shared-scale sum of Mishchenko et al., IntSGD: Adaptive Floatless Compression of Stochastic Gradients, 2021, with a
scale for each bucket, and with rounding to nearest instead of random rounding.

torch does the arithmetic in float32, in host memory: devices may divide by another rule. Gradients on an accelerator are
copied there and back. Going there: a quotient, rounded to nearest even. Going back: the unit (for means divided
by the number of ranks) times the integer, rounded; in float64 with 32 bits. A unit is at least 2^-100. Denormal numbers,
which some processes flush to zero, therefore become 0 on all ranks.

Annotations in this file are objects, not strings: DistributedDataParallel checks the annotations of its hook.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import GradBucket
from torch._compile import _disable_dynamo

from ._buckets import gradients_of
from ._calls import checked_group, refuse_coalescing
from ._futures import future_of
from ._scope import FLOATS, exact, host_all_reduce, takes_part
from ._work import WorkWithEnd

__all__ = ["Reproducible", "all_reduce_reproducible", "reproducible_hook"]

_LEAST_UNIT = 2.0**-100
_INFINITY_BITS = 0x7F80_0000
_TYPES = {8: torch.int8, 16: torch.int16, 32: torch.int32}
# float32 rounds integers of this magnitude exactly, with a margin.
_MOST_LEVELS = 1 << 22
# Elements of temporary tensors: few enough to stay in the cache.
_BLOCK = 1 << 15


@dataclass(frozen=True)
class Reproducible:
    """Settings of reproducible sums. They must be the same on all ranks, which is checked at each call.

    Args:
        bits: bits per element as sent: 8, 16 or 32. With 8, each of 4 ranks has 31 levels on each side of zero, each of 16 has 7.
        bucket: elements that share a unit, a multiple of 8 from 8 to 8,192. Buckets start at the first element of each tensor.
        process_group: group for `reproducible_hook`; None is the default group.

    Raises:
        ValueError: `bits` or `bucket` has another value.
    """

    bits: int = 8
    bucket: int = 512
    process_group: dist.ProcessGroup | None = None

    def __post_init__(self) -> None:
        if type(self.bits) is not int or self.bits not in _TYPES:
            raise ValueError(f"bits is {self.bits!r}; expected 8, 16 or 32")
        if type(self.bucket) is not int or not 8 <= self.bucket <= 8192 or self.bucket % 8:
            raise ValueError(f"bucket is {self.bucket!r}; expected a multiple of 8 from 8 to 8192")

    def _top(self, world: int) -> int:
        """Returns the largest level of a rank.

        Raises:
            ValueError: the sum of `world` ranks does not fit into `bits`.
        """
        top = torch.iinfo(_TYPES[self.bits]).max // world
        if top == 0:
            raise ValueError(f"bits is {self.bits}; a sum of {world} ranks needs more bits")
        return min(top, _MOST_LEVELS)


def all_reduce_reproducible(
    tensor: torch.Tensor,
    op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM,
    group: dist.ProcessGroup | None = None,
    async_op: bool = False,
    *,
    bits: int = 8,
    bucket: int = 512,
) -> dist.Work | None:
    """Works like `torch.distributed.all_reduce`, on integers: the same bits for any algorithm, hosts and order of ranks.

    An element of the result differs from the exact sum by at most ranks / 2 units of its bucket, plus its own rounding. A unit
    is the largest magnitude on any rank divided by `(2^(bits - 1) - 1) // ranks`, or by 2^22 if that is less; it is at least
    2^-100. If a bucket has a NaN or an infinity on any rank, it becomes NaN on all. With one rank the call is exact.

    Args:
        tensor: float32, float16, bfloat16 or complex64, of any shape, on a device that accl serves in this group; it is overwritten
            with the result.
        op: SUM or AVG.
        group: None is the default group; its backend for the tensor's device must be accl.
        async_op: return a Work once ranks have agreed on their units, instead of waiting for sums.
        bits: bits per element as sent, see `Reproducible`.
        bucket: as for `Reproducible`.

    Returns:
        A Work with `async_op`, else None.

    Raises:
        ValueError: the tensor, the operator, `bits` or `bucket` is not accepted, or `bits` are too few for the number of ranks.
        RuntimeError: the group's backend is not accl, or ranks have different settings. Also whatever `all_reduce` raises.
    """
    refuse_coalescing(group)
    settings = Reproducible(bits, bucket)
    if op not in (dist.ReduceOp.SUM, dist.ReduceOp.AVG):
        raise ValueError(
            f"reproducible sum: expected SUM or AVG, got {op}; MIN, MAX and integer sums are reproducible in all_reduce, too"
        )
    if not takes_part(group):
        # The call itself reports that this rank is not in the group.
        return dist.all_reduce(tensor, op, group, async_op)
    found = checked_group(tensor, group)
    call = _Sum([tensor], op == dist.ReduceOp.AVG, found, settings)
    if found.size() == 1:
        with exact():
            return dist.all_reduce(tensor, op, group, async_op)
    work = call.start()
    if async_op:
        return work
    work.wait()
    return None


def reproducible_hook(state: Reproducible, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Averages a bucket of gradients reproducibly, for `DistributedDataParallel.register_comm_hook(Reproducible(), reproducible_hook)`.

    Each gradient starts a new bucket of `Reproducible`. Averages therefore do not depend on how DistributedDataParallel groups
    gradients. Gradients are dense float32, float16, bfloat16 or complex64.

    Returns:
        A future of the bucket's buffer, which is overwritten with the averages.

    Raises:
        ValueError: a gradient is not accepted, or `bits` are too few for the number of ranks.
        RuntimeError: the group's backend is not accl, or ranks have different settings. Also whatever `all_reduce` raises.
    """
    if isinstance(bucket, tuple):
        return _mean_of_one(state, bucket[0])
    buffer = bucket.buffer()
    group = checked_group(buffer, state.process_group)
    if group.size() == 1:
        return future_of([], lambda: buffer, buffer.device)
    # A sparse gradient has no memory other than the buffer.
    work = _Sum([buffer] if buffer.is_sparse else gradients_of(bucket)[1], True, group, state).start()
    return work.get_future().then(lambda future: _after(future, buffer))


# The compiler traces the backward pass and its hooks into one graph, and cannot trace calls of the native module.
@_disable_dynamo
def _mean_of_one(state: Reproducible, gradient: torch.Tensor) -> torch.futures.Future[torch.Tensor]:
    """Averages one gradient in place. It waits for the call itself, because torch's Python reducer does not wait for the future."""
    group = checked_group(gradient, state.process_group)
    if group.size() > 1:
        _Sum([gradient], True, group, state).start().wait()
    return future_of([], lambda: gradient, gradient.device)


def _after(future: torch.futures.Future[list[torch.Tensor]], buffer: torch.Tensor) -> torch.Tensor:
    # `value` raises an error of the call, which then reaches the backward pass.
    future.value()
    return buffer


class _Sum:
    """One call: all tensors in sequence, each split into rows of one bucket."""

    def __init__(
        self, tensors: Sequence[torch.Tensor], is_mean: bool, group: dist.ProcessGroup, settings: Reproducible
    ) -> None:
        for tensor in tensors:
            if tensor.dtype not in (*FLOATS, torch.complex64) or tensor.layout is not torch.strided:
                raise ValueError(
                    "reproducible sum: expected a dense float32, float16, bfloat16 or complex64 tensor, got "
                    f"{tensor.dtype} ({str(tensor.layout).removeprefix('torch.')})"
                )
        self.tensors = list(tensors)
        # `reshape` copies tensors that are not contiguous, `_real` copies conjugate tensors, and `cpu` tensors of accelerators.
        self.flat = [_real(tensor.detach()).reshape(-1).cpu() for tensor in tensors]
        self.divisor = group.size() if is_mean else 1
        self.group = group
        self.settings = settings
        self._room = torch.empty(max(_BLOCK, settings.bucket), dtype=torch.float32, device="cpu")
        self.units: torch.Tensor
        self.levels: torch.Tensor

    def start(self) -> WorkWithEnd:
        """Agrees with the other ranks on units, and starts the sum."""
        bucket = self.settings.bucket
        self.units = self._units(sum(-(-flat.numel() // bucket) for flat in self.flat))
        elements = sum(flat.numel() for flat in self.flat)
        self.levels = torch.empty(elements, dtype=_TYPES[self.settings.bits], device="cpu")
        is_finite = bool(self.units.isfinite().all())
        for values, buckets, own in self._rows():
            units = self.units[buckets, None]
            scaled = torch.div(values, units, out=self._room_of(values)).round_()
            if not is_finite:
                # Elements of a bucket that will become NaN are sent as zeros.
                scaled.masked_fill_(~units.isfinite(), 0)
            self.levels[own].view_as(values).copy_(scaled)
        with exact():
            work = host_all_reduce(self.levels, dist.ReduceOp.SUM, self.group, async_op=True)
        assert work is not None, "the call is asynchronous"
        return WorkWithEnd(work, self.tensors, self._end)

    def _units(self, buckets: int) -> torch.Tensor:
        settings, top = self.settings, self.settings._top(self.group.size())
        # The bits of magnitudes, as integers, have the order of the magnitudes, with infinity and NaN on top. The last four numbers
        # show whether the settings of ranks differ.
        agreed = torch.empty(buckets + 4, dtype=torch.int32, device="cpu")
        said = [settings.bits, -settings.bits, settings.bucket, -settings.bucket]
        agreed[buckets:] = torch.tensor(said, dtype=torch.int32, device="cpu")
        greatest = agreed[:buckets].view(torch.float32)
        for values, here, _ in self._rows():
            torch.amax(self._room_of(values).copy_(values).abs_(), 1, out=greatest[here])
        with exact():
            host_all_reduce(agreed, dist.ReduceOp.MAX, self.group)
        most = agreed[buckets:].tolist()
        if most != said:
            spread = [(name, -most[at + 1], most[at]) for name, at in (("bits", 0), ("bucket", 2))]
            ranges = [f"{name} from {low} to {high}" for name, low, high in spread if low < high]
            raise RuntimeError(
                f"reproducible sum: rank {self.group.rank()} cannot go on, since ranks have different settings: {' and '.join(ranges)}; "
                "give all ranks the same"
            )
        units = (greatest / top).clamp_(min=_LEAST_UNIT)
        return units.masked_fill_(agreed[:buckets] >= _INFINITY_BITS, torch.nan)

    def _room_of(self, values: torch.Tensor) -> torch.Tensor:
        return self._room[: values.numel()].view_as(values)

    def _rows(self) -> Iterator[tuple[torch.Tensor, slice, slice]]:
        """Yields groups of buckets: a matrix with one bucket per row, the indices of the buckets, and the range of elements."""
        bucket = self.settings.bucket
        most = max(1, _BLOCK // bucket)
        first, start = 0, 0
        for flat in self.flat:
            whole = flat.numel() // bucket
            blocks = [(at, min(most, whole - at), bucket) for at in range(0, whole, most)]
            if flat.numel() > whole * bucket:
                blocks.append((whole, 1, flat.numel() - whole * bucket))
            for at, rows, columns in blocks:
                values = flat[at * bucket : at * bucket + rows * columns]
                elements = slice(start + at * bucket, start + at * bucket + rows * columns)
                yield values.view(rows, columns), slice(first + at, first + at + rows), elements
            first += -(-flat.numel() // bucket)
            start += flat.numel()

    @torch.inference_mode()
    def _end(self) -> None:
        # `inference_mode` allows writing to a tensor that was created in inference mode, as all_reduce does.
        # float32 holds integers of 16 bits exactly.
        scale = (self.units.double() if self.settings.bits == 32 else self.units) / self.divisor
        for values, buckets, elements in self._rows():
            torch.mul(self.levels[elements].view_as(values), scale[buckets, None], out=values)
        for tensor, flat in zip(self.tensors, self.flat, strict=True):
            if flat.data_ptr() != tensor.data_ptr():
                tensor.detach().copy_(flat.view(tensor.dtype).view(tensor.shape))


def _real(tensor: torch.Tensor) -> torch.Tensor:
    """Returns complex numbers as pairs of real and imaginary parts. The parts are neighbours, so they share a unit."""
    return torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor
