"""Timing: runs a case on several contestants in turn, on all ranks at once.

This module owns how a time is determined. Each of the `alternations` rounds times every contestant once, one after the other.
The time of a round is a median over samples, and the time of a case is the median over its rounds. Read `measure` first.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, field
from statistics import median
from typing import Protocol

import torch.distributed as dist
from torch_accl import _native
from torch_accl.compression._scope import accl_backend, encoded

from .cases import Prepared
from .processes import Failed
from .request import Request
from .team import Team

__all__ = ["Compressed", "Contestant", "InEngine", "ThroughTorch", "Timed", "backend_of", "measure"]

# Maximum samples per round. A sample has several calls, so that a rank that is alternately ahead and behind counts with its
# average.
_SAMPLES = 20
# The number of calls per round is derived from the first batch that takes at least this long.
_ENOUGH_NS = 2_000_000
_MOST_CALLS = 1 << 20
_FEWEST_CALLS = 3


class Contestant(Protocol):
    """Anything that can run the call of a case: a backend, the engine, or a codec."""

    name: str

    def call(self, prepared: Prepared) -> None:
        """Issues the call once."""

    def samples(self, prepared: Prepared, samples: int, calls: int) -> list[int]:
        """Returns the nanoseconds of `samples` samples of `calls` calls. Rooted samples each follow an untimed barrier."""


class ThroughTorch:
    """A backend, used through torch's API."""

    def __init__(self, name: str, group: dist.ProcessGroup | None) -> None:
        self.name, self.group = name, group

    def call(self, prepared: Prepared) -> None:
        """See `Contestant`."""
        prepared.through_torch(self.group)()

    def samples(self, prepared: Prepared, samples: int, calls: int) -> list[int]:
        """See `Contestant`."""
        call, fenced, clock = prepared.through_torch(self.group), prepared.case.collective.rooted, time.perf_counter_ns
        found = []
        prepared.synchronize()
        for _ in range(samples):
            if fenced:
                dist.barrier(group=self.group)
            begun = clock()
            for _ in range(calls):
                call()
            prepared.synchronize()
            found.append(clock() - begun)
        return found


class InEngine:
    """accl's engine without torch: blocking calls in a loop of the native module."""

    def __init__(self, name: str, group: dist.ProcessGroup | None) -> None:
        self.name, self.backend = name, backend_of(group)

    def call(self, prepared: Prepared) -> None:
        """See `Contestant`."""
        self.samples(prepared, 1, 1)

    def samples(self, prepared: Prepared, samples: int, calls: int) -> list[int]:
        """See `Contestant`."""
        fenced = prepared.case.collective.rooted
        return self.backend.time_calls(**prepared.in_engine(), samples=samples, calls=calls, fenced=fenced)


class Compressed:
    """A contestant that runs another one with compressed messages."""

    def __init__(self, codec: str, raw: Contestant) -> None:
        self.name, self._raw = codec, raw
        self._codecs = _native.Codecs([("raw", codec, codec, 0)])

    def call(self, prepared: Prepared) -> None:
        """See `Contestant`."""
        with encoded(self._codecs, 0, 0):
            self._raw.call(prepared)

    def samples(self, prepared: Prepared, samples: int, calls: int) -> list[int]:
        """See `Contestant`."""
        with encoded(self._codecs, 0, 0):
            return self._raw.samples(prepared, samples, calls)


def backend_of(group: dist.ProcessGroup | None) -> _native.Backend:
    """Returns accl's native backend of a torch group."""
    found = group or dist.group.WORLD
    assert found is not None, "a run must first create the default process group"
    return accl_backend(found)


@dataclass
class Timed:
    """Results of one contestant in one case."""

    # Median of each round, in microseconds per call.
    rounds_us: list[float] = field(default_factory=list)
    # Calls per round.
    iterations: int = 0
    # Wrong elements on all ranks after one call.
    wrong: int = 0
    # Reason why the contestant does not support such calls, or None.
    refused: str | None = None
    # For a codec: norm of the error divided by the norm of the exact result.
    error: float | None = None

    @property
    def time_us(self) -> float:
        """Median of the rounds' medians, in microseconds."""
        return median(self.rounds_us)


def measure(team: Team, prepared: Prepared, contestants: list[Contestant], request: Request) -> dict[str, Timed]:
    """Checks each contestant's result, then times in turn those that support the call. Collective over all ranks.

    Raises:
        Failed: accl refused the call, or only some of the ranks were refused.
    """
    found = {one.name: _checked(team, prepared, one, request) for one in contestants if one.name not in request.codecs}
    for one in contestants:
        if one.name in request.codecs:
            found[one.name] = _compared(team, prepared, contestants[0], one)
    prepared.clear()
    running = [contestant for contestant in contestants if found[contestant.name].refused is None]
    for contestant in running:
        found[contestant.name].iterations = _iterations(team, prepared, contestant, request)
    for _ in range(request.alternations):
        for contestant in running:
            timed = found[contestant.name]
            timed.rounds_us.append(_round(team, prepared, contestant, timed.iterations) / 1000)
    return found


def _checked(team: Team, prepared: Prepared, contestant: Contestant, request: Request) -> Timed:
    prepared.fill()
    refused = None
    try:
        contestant.call(prepared)
    except (RuntimeError, ValueError, TypeError) as error:
        # Only the first line is kept: c10d appends the position in its source.
        refused = str(error).partition("\n")[0]
    wrong = 0 if refused else prepared.wrong()
    reports = team.collect((refused, wrong))
    sentences = [sentence for sentence, _ in reports if sentence]
    if sentences and (len(sentences) < team.world or contestant.name not in request.peers):
        raise Failed(f"{contestant.name} failed at {prepared.case}: {sentences[0]}")
    return Timed(refused=refused, wrong=sum(wrong for _, wrong in reports))


def _compared(team: Team, prepared: Prepared, exact: Contestant, coded: Contestant) -> Timed:
    """Returns the error of a codec on Gaussian values, compared with the same call without a codec."""
    results = []
    for contestant in (exact, coded):
        prepared.fill_gaussian()
        contestant.call(prepared)
        results.append(prepared.target.cpu().double())
    difference = results[1] - results[0]
    shares = team.collect(
        [float(difference.square().sum()), float(results[0].square().sum()), int(difference.isnan().sum())]
    )
    error, norm, wrong = (sum(column) for column in zip(*shares))
    return Timed(wrong=wrong, error=math.sqrt(error / norm) if norm else 0.0)


def _iterations(team: Team, prepared: Prepared, contestant: Contestant, request: Request) -> int:
    """Returns the calls per round, equal on all ranks and divisible into samples. The warm-up calls are issued here, too."""
    if request.warmup:
        contestant.samples(prepared, 1, request.warmup)
    if request.iterations is not None:
        return _whole(request.iterations)
    calls, took = 1, 0
    while calls < _MOST_CALLS:
        took = max(team.collect(contestant.samples(prepared, 1, calls)[0]))
        if took >= _ENOUGH_NS:
            break
        calls *= 8
    fitting = request.seconds * 1e9 / request.alternations / max(took / calls, 1.0)
    return _whole(math.ceil(min(max(fitting, _FEWEST_CALLS), _MOST_CALLS)))


def _whole(iterations: int) -> int:
    return iterations if iterations < _SAMPLES else iterations // _SAMPLES * _SAMPLES


def _round(team: Team, prepared: Prepared, contestant: Contestant, iterations: int) -> float:
    """Runs one round. Returns nanoseconds per call."""
    rooted = prepared.case.collective.rooted
    samples, calls = (iterations, 1) if rooted else (min(_SAMPLES, iterations), max(1, iterations // _SAMPLES))
    # This call is not timed: no rank starts before all others have finished earlier work.
    contestant.call(prepared)
    taken = contestant.samples(prepared, samples, calls)
    if not rooted:
        slowest: float = max(team.collect(median(taken)))
        return slowest / calls
    # A root that only sends is done early, so the time of a call is the time of its slowest rank.
    last: list[int] = [max(ends) for ends in zip(*team.collect(taken))]
    return median(last)
