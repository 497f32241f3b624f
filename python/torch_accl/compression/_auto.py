"""The choice of `codec="auto"`: for each parameter the fastest codec whose error is within the budget.

Both are measured in the group that trains, once: the time of calls on numbers of no meaning, the error of sums of the gradients
themselves, added up by each codec in turn as they will be (those of FSDP2 too, whose sums are then encoded only once: their
error is smaller than what is said). All ranks choose by the greatest figure of any.
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
from ._scope import accl_backend, codecs_of, encoded, exact
from ._settings import RAW, Compression, tensor_id

__all__ = ["Choice", "choose"]

# Codecs that are not coarse can keep a budget of a few hundredths; the others are tried only where it was raised.
_DEFAULT_BUDGET = 0.05

# Elements that tell the bits of each.
_MANY = 1 << 20

# A codec must save so much of the time to be worth its error.
_WORTH = 0.95

# Elements of a timed call: the nearest of these to those of the call that is decided about. Beyond the greatest, time grows with
# elements, and below the least it is latency.
_TIMED = tuple(1 << bits for bits in range(12, 21, 2))
# Rounds of them: of the large ones, and of those whose time is shorter than what comes between.
_ROUNDS = 7
_ROUNDS_OF_SMALL = 21
_SMALL = 1 << 16


@dataclass(frozen=True)
class Choice:
    """What a parameter takes, and why.

    Attributes:
        codec: its codec; `raw`: it travels as it is.
        errors: predicted squared error of sums by their square, by codec.
        times: measured time of a call, in nanoseconds for each element, by codec.
    """

    codec: str
    errors: dict[str, float]
    times: dict[str, float]

    def explain(self) -> str:
        """In a line."""
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
    """The choice for the waiting ones of these parameters, whose gradients (contributions of this rank) make up a call.

    `times` of calls of about as many elements, by type and codec, are measured if there are none yet. Parameters whose gradients are zeros or not finite are left out: what
    is to be chosen for them is not known yet.
    """
    dtype = next(iter(gradients.values())).dtype
    candidates = [RAW, *_candidates(dtype, compression.error_budget, group)]
    size = timed_elements([gradient.nbytes for gradient in gradients.values()], dtype, compression.fusion_bytes)
    untimed = [codec for codec in candidates if (size, dtype, codec) not in times]
    if untimed:
        times.update(((size, dtype, codec), nanos) for codec, nanos in _times(untimed, size, dtype, group).items())
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
    # Memory is faster than any codec that packs bits.
    [[is_far]] = reduced([[float(not _is_near(group))]], group, dist.ReduceOp.MAX)
    return codecs if is_far else [codec for codec in codecs if facts(codec).is_cast]


def _saves_bytes(codec: str, dtype: torch.dtype) -> bool:
    sent, _ = codecs_of(((RAW, codec, codec, 0),)).encoded_bytes(0, str(dtype).removeprefix("torch."), _MANY)
    return sent < _MANY * dtype.itemsize


def _is_near(group: dist.ProcessGroup) -> bool:
    """Whether this rank shares memory with all others."""
    lines = accl_backend(group).describe().splitlines()
    links = [line for line in lines if line.startswith("rank ") and ": " in line]
    return all(": shm" in line for line in links)


def timed_elements(sizes: Sequence[int], dtype: torch.dtype, most_bytes: int | None) -> int:
    """How many elements a call is timed with, to decide about tensors of these sizes in calls of at most so many bytes."""
    largest = max(sum(sizes[own]) for own in cut(sizes, most_bytes)) / dtype.itemsize
    return min(_TIMED, key=lambda elements: abs(math.log2(elements) - math.log2(max(largest, 1))))


def _times(codecs: Sequence[str], size: int, dtype: torch.dtype, group: dist.ProcessGroup) -> dict[str, float]:
    """Nanoseconds for each element of a call of so many by each codec: medians of calls by turns."""
    drawn = torch.Generator().manual_seed(1)
    numbers = torch.randn(size, generator=drawn, dtype=torch.float32, device="cpu").to(dtype)
    seconds: dict[str, list[float]] = {codec: [] for codec in codecs}
    for turn in range((_ROUNDS if size > _SMALL else _ROUNDS_OF_SMALL) + 1):
        for codec in codecs:
            tensor = numbers.clone()
            with exact():
                dist.barrier(group)
            begin = time.perf_counter()
            _add([tensor], [codec], [0], turn, group)
            if turn > 0:
                seconds[codec].append(time.perf_counter() - begin)
    [medians] = reduced([[statistics.median(taken) for taken in seconds.values()]], group, dist.ReduceOp.MAX)
    return {codec: 1e9 * median / size for codec, median in zip(codecs, medians, strict=True)}


def _errors(
    waiting: Collection[str],
    gradients: Mapping[str, torch.Tensor],
    codecs: Sequence[str],
    most_bytes: int | None,
    group: dist.ProcessGroup,
) -> list[list[float]]:
    """Of each gradient and codec, squared error of the sum by its square; an infinity where there is no such number."""
    ids = [tensor_id(name) for name in gradients]
    exact_sums = [gradient.detach().clone() for gradient in gradients.values()]
    _add(exact_sums, [RAW] * len(ids), ids, 0, group, most_bytes)
    rows: list[list[float]] = [[] for _ in ids]
    for codec in codecs:
        sums = [gradient.detach().clone() for gradient in gradients.values()]
        _add(sums, [codec if name in waiting else RAW for name in gradients], ids, 0, group, most_bytes)
        for row, found, wanted in zip(rows, sums, exact_sums, strict=True):
            error = (found.double() - wanted.double()).square().sum() / wanted.double().square().sum()
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
    """Adds up the tensors of all ranks, in place, by a codec each, in calls of at most so many bytes."""
    options = dist.AllreduceCoalescedOptions()
    options.asyncOp = True
    is_raw = set(codecs) == {RAW}
    for own in cut([tensor.nbytes for tensor in tensors], most_bytes):
        coded = zip(codecs[own], ids[own], strict=True)
        made = codecs_of(tuple((RAW, codec, codec, id) for codec, id in coded))
        with exact() if is_raw else encoded(made, 0, step):
            group.allreduce_coalesced(tensors[own], options).wait()
