"""Steps of a layer-parallel net: the settings that there are, and how long each takes.

Owns how a setting becomes plans and what these are told of the net's costs. Where times of layers come from, and how what is found is shown, is the caller's matter.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

__all__ = ["FACTORS", "Costs", "LayerTimes", "Planner", "Setting"]

# Plain, recorded, vector-Jacobian product of the input, and of everything; in picoseconds.
LayerTimes = tuple[int, int, int, int]

_PASSES = ("forward", "adjoint")
FACTORS = (2, 4, 8, 16, 32)
_MOST_LEVELS = 5


@dataclass(frozen=True)
class Setting:
    """One way to run a step."""

    name: str
    factor: int = 0
    levels: int = 1
    forward: int = 1
    backward: int = 1

    @property
    def is_pipeline(self) -> bool:
        """Whether `forward` are micro-batches."""
        return self.name in ("gpipe", "1f1b")

    @property
    def micro_batches(self) -> int:
        """Parts of a batch."""
        return self.forward if self.is_pipeline else 1


@dataclass(frozen=True)
class Costs:
    """What a net costs: times in picoseconds, of a KiB where they say so."""

    # Of each layer.
    layers: Sequence[LayerTimes]
    state_bytes: int
    add_per_kib: int = 0
    # Of a rank's own time, and of the way.
    message: int = 0
    latency: int = 0
    wire_per_kib: int = 0
    # Thousandths of bytes and of a layer's time that a coarser mesh of states has of the mesh before.
    share: int = 1000

    @property
    def serial(self) -> int:
        """A step of one process, with as many sums of states as layers in each pass."""
        adding = 2 * len(self.layers) * self.state_bytes * self.add_per_kib // 1024
        return sum(recorded + full for _, recorded, _, full in self.layers) + adding

    def of_a_part(self, parts: int) -> Costs:
        """Those of a part of a batch: of layers a share of the time."""

        def share(time: int) -> int:
            return max(time // parts, 1)

        shares = [(share(a), share(b), share(c), share(d)) for a, b, c, d in self.layers]
        return replace(self, layers=shares, state_bytes=max(self.state_bytes // parts, 1))


class Planner:
    """Plans of a net of steps `x + dt * f(x)` on so many ranks.

    relax: how often C-points are relaxed besides, from the finest level, the last for the rest.
    coarser: levels whose states are coarser than those of the level before; those that a setting has not do not count.
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
        # Thousandths that each coarser mesh has of the finest.
        self.shares = [1000 * costs.share**mesh // 1000**mesh for mesh in range(1, len(self._coarser) + 1)]

    def multigrid(self, forward: int, backward: int, factors: Iterable[int] = FACTORS) -> Iterator[Setting]:
        """The settings that the net has layers enough for."""
        for factor in factors:
            for levels in range(2, _MOST_LEVELS + 1):
                try:
                    self.native.layer_levels(self.layers, [factor] * (levels - 1))
                except ValueError:
                    break
                yield Setting("multigrid", factor, levels, forward, backward)

    def plans(self, setting: Setting) -> list[Any]:
        """The plans of a step, one after the other."""
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
        """What pays with so many ranks."""
        from torch_accl.layer_parallel import Cycle

        return Cycle().reuse_for(self.ranks, is_adjoint=pass_ == "adjoint")

    def simulate(self, setting: Setting) -> Iterator[tuple[Any, int, Any]]:
        """Of each plan: the plan, its time, and what each rank does when."""
        costs = self.costs.of_a_part(setting.micro_batches)
        # A norm goes there and back.
        rates = (costs.add_per_kib, costs.message, costs.latency, costs.wire_per_kib, 2 * costs.latency)
        shares = [(share, share) for share in self.shares]
        states = [costs.state_bytes] * (len(self.layers) + 1)
        for plan in self.plans(setting):
            total, ranks = plan.simulate(list(costs.layers), states, rates, shares)
            yield plan, total, ranks

    def time(self, setting: Setting) -> list[int]:
        """Of each plan, in picoseconds."""
        return [total for _, total, _ in self.simulate(setting)]
