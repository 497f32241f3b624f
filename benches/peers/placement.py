"""The current placement of the machine's cores, seen as the time in which two of them exchange four bytes.

The host moves a virtual machine's cores: onto one physical core, onto two that share a cache, or onto two that do not.
The same call then takes one, two or five times as long. So the smallest all_reduce of the C baseline is timed before
and after each turn. A turn counts if the cores were placed as in their usual best case. On a machine that leaves cores
alone all turns count.
"""

from __future__ import annotations

import signal
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

from .jobs import Job, Lost
from .libraries import BY_NAME

# Exchanges of a probe, which takes about half a millisecond.
CALLS = 2000
ORDER = f"run all_reduce float32 4 5 {CALLS // 5} 0"
SURVEY_S = 3.0
PAUSE_S = 0.01
# The fastest placement with at least this share of probes counts: the most frequent one varies from run to run.
OFTEN = 0.2
# Probes of one placement differ by less than this factor from its centre.
NEAR = 1.35
# Longest wait for a placement to return.
PATIENCE_S = 0.5


@dataclass(frozen=True)
class Cluster:
    """A placement that was seen: its exchange time in nanoseconds, and the share of probes that found it."""

    ns: float
    share: float

    def has(self, ns: float) -> bool:
        """Returns whether a probe belongs to this placement."""
        return self.ns / NEAR <= ns <= self.ns * NEAR


class Placement:
    """The probe, and the placement that counts."""

    def __init__(self, names: dict[str, str], wanted_ns: float | None, say: Callable[[str], None]) -> None:
        self.job = Job(BY_NAME["sketch"], 2, True, names)
        try:
            self.job.gather(time.monotonic() + 10)
            self.job.signal(signal.SIGSTOP)
            self.clusters = clusters_of(self.survey())
        except BaseException:
            self.job.close()
            raise
        if wanted_ns is None:
            self.usual = min((one for one in self.clusters if one.share >= OFTEN), default=self.clusters[0], key=by_ns)
        else:
            self.usual = min(self.clusters, key=lambda cluster: abs(cluster.ns - wanted_ns))
        seen = ", ".join(f"{one.ns:.0f} ns ({one.share:.0%})" for one in self.clusters)
        say(f"two cores exchange 4 bytes in {seen}; turns count if it takes about {self.usual.ns:.0f} ns")

    def probe(self) -> float:
        """Returns the nanoseconds of an exchange now."""
        self.job.order(ORDER)
        slowest: list[int] = [max(end - begin for begin, end in row) for row in zip(*self.job.spans(5))]
        return statistics.median(slowest) / (CALLS // 5)

    def survey(self) -> list[float]:
        """Returns probes over `SURVEY_S` seconds."""
        found = []
        deadline = time.monotonic() + SURVEY_S
        while time.monotonic() < deadline:
            found.append(self.probe())
            time.sleep(PAUSE_S)
        return found

    def is_usual(self) -> bool:
        """Returns whether the cores are placed as usual."""
        return self.usual.has(self.probe())

    def wait(self, limit_s: float) -> bool:
        """Waits for the usual placement, at most `limit_s` or `PATIENCE_S` seconds, and probes at least once. Returns
        whether it was found."""
        deadline = time.monotonic() + min(limit_s, PATIENCE_S)
        while not self.is_usual():
            if time.monotonic() > deadline:
                return False
        return True

    def as_json(self) -> dict[str, object]:
        """Returns the placements for the file of results."""
        seen = [{"ns": round(one.ns), "share": round(one.share, 2)} for one in self.clusters]
        return {"usual_ns": round(self.usual.ns), "seen": seen}

    def close(self) -> None:
        """Ends the probe."""
        self.job.close()


def by_ns(cluster: Cluster) -> float:
    """Returns the sort key of placements."""
    return cluster.ns


def clusters_of(probes: list[float]) -> list[Cluster]:
    """Groups probes that are near each other, fastest first."""
    groups: list[list[float]] = []
    for ns in sorted(probes):
        if groups and ns <= statistics.median(groups[-1]) * NEAR:
            groups[-1].append(ns)
        else:
            groups.append([ns])
    if not groups:
        raise Lost("no exchange between cores was measured")
    return [Cluster(statistics.median(group), len(group) / len(probes)) for group in groups]
