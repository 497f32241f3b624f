"""The choice of `codec="auto"`: for each parameter the fastest codec whose error is within the budget.

Times and errors are measured once, in the group that trains: times of calls on random numbers, errors of sums of the gradients
themselves. Each codec sums them in turn, as in training. Sums of FSDP2 are encoded only once, so their error in training is
smaller than the error measured here. All ranks choose by the largest figure of any rank.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from ._agreement import reduced
from ._codecs import candidates, facts
from ._plans import cut
from ._scope import CPU, accl_backend, codecs_of, encoded, exact
from ._settings import RAW, Compression, tensor_id

__all__ = ["Choice", "choose"]

# Codecs that are not coarse can keep a budget of a few hundredths. The others are tried only if the budget was raised.
_DEFAULT_BUDGET = 0.05

# Number of elements of a tensor from which the encoded bits per element are computed.
_MANY = 1 << 20

# A codec is chosen only if its time is at most this fraction of the uncompressed time.
_WORTH = 0.95

# Elements of timed calls. A call is represented by the nearest of these sizes. Above the largest, time is proportional to
# the number of elements; below the smallest, latency dominates.
_TIMED = tuple(1 << bits for bits in range(12, 21, 2))
# Rounds of timed calls: for large calls, and for calls so short that their time is shorter than the interruptions between them.
_ROUNDS = 7
_ROUNDS_OF_SMALL = 21
_SMALL = 1 << 16


@dataclass(frozen=True)
class Choice:
    """The codec chosen for a parameter, and the figures behind the choice.

    Attributes:
        codec: the chosen codec; `raw` means that the parameter is sent unchanged.
        errors: predicted squared error of sums divided by their square, by codec.
        times: measured time of a call in nanoseconds per element, by codec.
    """

    codec: str
    errors: dict[str, float]
    times: dict[str, float]

    def explain(self) -> str:
        """Returns the choice and its figures as one line of text."""
        others = ", ".join(
            f"{codec.partition(',')[0]} {self.times[codec]:.2f} ns an element with error {error:.2g}"
            for codec, error in self.errors.items()
        )
        return f"{self.codec} ({others})"


def choose(
    waiting: Collection[str],
    gradients: Mapping[str, torch.Tensor],
    compression: Compression,
    group: dist.ProcessGroup,
    times: dict[tuple[int, torch.dtype, str], float],
) -> dict[str, Choice]:
    """Returns choices for the `waiting` parameters. All given gradients (this rank's contributions) are sent in one call.

    `times` holds nanoseconds per element by call size, type and codec; missing entries are measured and added. Parameters whose
    gradients are zeros or not finite get no choice yet, because their error is not known.
    """
    first = next(iter(gradients.values()))
    dtype = first.dtype
    candidates = [RAW, *_candidates(dtype, compression.error_budget, group)]
    size = timed_elements([gradient.nbytes for gradient in gradients.values()], dtype, compression.fusion_bytes)
    untimed = [codec for codec in candidates if (size, dtype, codec) not in times]
    if untimed:
        found = _times(untimed, size, dtype, group, first.device)
        times.update(((size, dtype, codec), nanos) for codec, nanos in found.items())
    known = {codec: times[size, dtype, codec] for codec in candidates}
    choices = {}
    measured = _errors(waiting, gradients, candidates, compression.fusion_bytes, group)
    for name, errors in zip(gradients, measured, strict=True):
        if name in waiting and all(map(math.isfinite, errors)):
            by_codec = dict(zip(candidates, errors, strict=True))
            within = [codec for codec in candidates if by_codec[codec] <= compression.error_budget]
            best = min(within, key=known.__getitem__)
            is_worth = known[best] <= _WORTH * known[RAW]
            choices[name] = Choice(best if is_worth else RAW, by_codec, known)
    return choices


def _candidates(dtype: torch.dtype, budget: float, group: dist.ProcessGroup) -> list[str]:
    codecs = [codec for codec in candidates() if not facts(codec).is_coarse or budget > _DEFAULT_BUDGET]
    codecs = [codec for codec in codecs if _saves_bytes(codec, dtype)]
    # Shared memory is faster than any codec that packs bits.
    [[is_far]] = reduced([[float(not _is_near(group))]], group, dist.ReduceOp.MAX)
    return codecs if is_far else [codec for codec in codecs if facts(codec).is_cast]


def _saves_bytes(codec: str, dtype: torch.dtype) -> bool:
    sent, _ = codecs_of(((RAW, codec, codec, 0),)).encoded_bytes(0, str(dtype).removeprefix("torch."), _MANY)
    return sent < _MANY * dtype.itemsize


def _is_near(group: dist.ProcessGroup) -> bool:
    """Whether this rank reaches all other ranks through shared memory."""
    lines = accl_backend(group).describe().splitlines()
    links = [line for line in lines if line.startswith("rank ") and ": " in line]
    return all(": shm" in line for line in links)


def timed_elements(sizes: Sequence[int], dtype: torch.dtype, most_bytes: int | None) -> int:
    """Returns the elements of the timed call that represents calls of at most `most_bytes` on tensors of `sizes` bytes."""
    largest = max(sum(sizes[own]) for own in cut(sizes, most_bytes)) / dtype.itemsize
    return min(_TIMED, key=lambda elements: abs(math.log2(elements) - math.log2(max(largest, 1))))


def _times(
    codecs: Sequence[str], size: int, dtype: torch.dtype, group: dist.ProcessGroup, device: torch.device = CPU
) -> dict[str, float]:
    """Returns nanoseconds per element of a call on `size` elements, by codec. Codecs take turns; medians are compared.

    A call on an accelerator takes until its results are there.
    """
    drawn = torch.Generator().manual_seed(1)
    numbers = torch.randn(size, generator=drawn, dtype=torch.float32, device="cpu").to(device, dtype)
    seconds: dict[str, list[float]] = {codec: [] for codec in codecs}
    for turn in range((_ROUNDS if size > _SMALL else _ROUNDS_OF_SMALL) + 1):
        for codec in codecs:
            tensor = numbers.clone()
            with exact():
                dist.barrier(group)
            _await_stream(device)
            begin = time.perf_counter()
            _add([tensor], [codec], [0], turn, group)
            _await_stream(device)
            if turn > 0:
                seconds[codec].append(time.perf_counter() - begin)
    [medians] = reduced([[statistics.median(taken) for taken in seconds.values()]], group, dist.ReduceOp.MAX)
    return {codec: 1e9 * median / size for codec, median in zip(codecs, medians, strict=True)}


def _await_stream(device: torch.device) -> None:
    """Waits until an accelerator has done what is enqueued in its current stream."""
    if device.type != "cpu":
        torch.accelerator.current_stream(device).synchronize()


def _errors(
    waiting: Collection[str],
    gradients: Mapping[str, torch.Tensor],
    codecs: Sequence[str],
    most_bytes: int | None,
    group: dist.ProcessGroup,
) -> list[list[float]]:
    """Returns, for each gradient and codec, the squared error of the sum divided by its square; infinity where it is undefined."""
    ids = [tensor_id(name) for name in gradients]
    exact_sums = [gradient.detach().clone() for gradient in gradients.values()]
    _add(exact_sums, [RAW] * len(ids), ids, 0, group, most_bytes)
    rows: list[list[float]] = [[] for _ in ids]
    for codec in codecs:
        sums = [gradient.detach().clone() for gradient in gradients.values()]
        _add(sums, [codec if name in waiting else RAW for name in gradients], ids, 0, group, most_bytes)
        for row, found, wanted in zip(rows, sums, exact_sums, strict=True):
            # In host memory, because devices may sum in another order, or have no float64.
            total, whole = found.cpu().double(), wanted.cpu().double()
            error = (total - whole).square().sum() / whole.square().sum()
            row.append(error.nan_to_num(nan=math.inf).item())
    return reduced(rows, group, dist.ReduceOp.MAX)


def _add(
    tensors: list[torch.Tensor],
    codecs: Sequence[str],
    ids: Sequence[int],
    step: int,
    group: dist.ProcessGroup,
    most_bytes: int | None = None,
) -> None:
    """Sums the tensors over all ranks in place, each with its codec, in calls of at most `most_bytes`."""
    options = dist.AllreduceCoalescedOptions()
    options.asyncOp = True
    is_raw = set(codecs) == {RAW}
    for own in cut([tensor.nbytes for tensor in tensors], most_bytes):
        coded = zip(codecs[own], ids[own], strict=True)
        made = codecs_of(tuple((RAW, codec, codec, id) for codec, id in coded))
        with exact() if is_raw else encoded(made, 0, step):
            group.allreduce_coalesced(tensors[own], options).wait()
