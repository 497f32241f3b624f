"""Steps of a layer-parallel net: the possible settings, and the predicted time of each.

This module owns how a setting becomes plans, and which costs of the net the plans get. The caller provides the times of
layers, and shows the results.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

__all__ = ["FACTORS", "Costs", "LayerTimes", "Planner", "Setting"]

# Picoseconds of a layer: plain, recorded, vector-Jacobian product of the input, vector-Jacobian product of everything.
LayerTimes = tuple[int, int, int, int]

_PASSES = ("forward", "adjoint")
FACTORS = (2, 4, 8, 16, 32)
_MOST_LEVELS = 5


@dataclass(frozen=True)
class Setting:
    """One way to run a training step."""

    name: str
    factor: int = 0
    levels: int = 1
    forward: int = 1
    backward: int = 1

    @property
    def is_pipeline(self) -> bool:
        """Whether the setting is a pipeline; `forward` is then the number of micro-batches."""
        return self.name in ("gpipe", "1f1b")

    @property
    def micro_batches(self) -> int:
        """Number of micro-batches that a batch is split into."""
        return self.forward if self.is_pipeline else 1


@dataclass(frozen=True)
class Costs:
    """Costs of a net. Times are in picoseconds, or in picoseconds per KiB if the name ends in `_per_kib`."""

    # Times of each layer.
    layers: Sequence[LayerTimes]
    state_bytes: int
    add_per_kib: int = 0
    # Time that a message costs its ranks, and time on the network.
    message: int = 0
    latency: int = 0
    wire_per_kib: int = 0
    # Thousandths of a state's bytes, and of a layer's time, that remain on a coarser mesh compared with the next finer mesh.
    share: int = 1000

    @property
    def serial(self) -> int:
        """Time of a step in one process, with one sum of states per layer in each pass."""
        adding = 2 * len(self.layers) * self.state_bytes * self.add_per_kib // 1024
        return sum(recorded + full for _, recorded, _, full in self.layers) + adding

    def of_a_part(self, parts: int) -> Costs:
        """Returns the costs of one of `parts` parts of a batch: layer times and state bytes divided by `parts`."""

        def share(time: int) -> int:
            return max(time // parts, 1)

        shares = [(share(a), share(b), share(c), share(d)) for a, b, c, d in self.layers]
        return replace(self, layers=shares, state_bytes=max(self.state_bytes // parts, 1))


class Planner:
    """Plans for a net of steps `x + dt * f(x)` on `ranks` ranks.

    relax: number of additional C-point relaxations by level, the finest first; the last entry holds for the remaining levels.
    coarser: levels whose states are coarser than the states of the level before. Levels that a setting does not have are
        ignored.
    """

    def __init__(
        self, native: Any, ranks: int, costs: Costs, relax: Sequence[int] = (0,), coarser: Sequence[int] = ()
    ) -> None:
        self.native = native
        self.ranks = ranks
        self.costs = costs
        self.layers = [("ode", False)] * len(costs.layers)
        self._relax = list(relax)
        self._coarser = frozenset(coarser)
        # Thousandths of the finest mesh's bytes and time that remain on each coarser mesh.
        self.shares = [1000 * costs.share**mesh // 1000**mesh for mesh in range(1, len(self._coarser) + 1)]

    def multigrid(self, forward: int, backward: int, factors: Iterable[int] = FACTORS) -> Iterator[Setting]:
        """Yields the settings for which the net has enough layers."""
        for factor in factors:
            for levels in range(2, _MOST_LEVELS + 1):
                try:
                    self.native.layer_levels(self.layers, [factor] * (levels - 1))
                except ValueError:
                    break
                yield Setting("multigrid", factor, levels, forward, backward)

    def plans(self, setting: Setting) -> list[Any]:
        """Returns the plans of a step, in the order in which they run."""
        if setting.is_pipeline:
            return [self.native.LayerPlan.pipeline(self.layers, self._counts([]), setting.name, setting.forward)]
        factors = [setting.factor] * (setting.levels - 1)
        return [
            self.native.LayerPlan.mgrit(
                self.layers,
                factors,
                self._counts(factors),
                pass_,
                (iterations, "V", self._relax, "coarsest", "lagged", True, self._reuse(pass_)),
                [level in self._coarser for level in range(1, setting.levels)],
            )
            for pass_, iterations in zip(_PASSES, (setting.forward, setting.backward))
        ]

    def _counts(self, factors: list[int]) -> list[int]:
        counts: list[int] = self.native.layer_placement(self.layers, factors, self.ranks, "aligned")
        return counts

    def _reuse(self, pass_: str) -> str:
        """Returns the reuse mode that pays with this number of ranks."""
        from torch_accl.layer_parallel import Cycle

        return Cycle().reuse_for(self.ranks, is_adjoint=pass_ == "adjoint")

    def simulate(self, setting: Setting) -> Iterator[tuple[Any, int, Any]]:
        """Yields, for each plan of the setting, the plan, its time in picoseconds, and the timeline of each rank."""
        costs = self.costs.of_a_part(setting.micro_batches)
        # The last rate is a norm: it crosses the network in both directions.
        rates = (costs.add_per_kib, costs.message, costs.latency, costs.wire_per_kib, 2 * costs.latency)
        shares = [(share, share) for share in self.shares]
        states = [costs.state_bytes] * (len(self.layers) + 1)
        for plan in self.plans(setting):
            total, ranks = plan.simulate(list(costs.layers), states, rates, shares)
            yield plan, total, ranks

    def time(self, setting: Setting) -> list[int]:
        """Returns the time of each plan in picoseconds."""
        return [total for _, total, _ in self.simulate(setting)]
