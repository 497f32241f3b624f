"""The lists that ranks walk, made once for each way to solve.

Owns what is asked of the native planner and what a rank needs of the answer beside the list: which messages bring constants along, and
in what order receives are to be posted.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch_accl import _native

from ._cycle import Cycle

__all__ = ["Lot", "Net", "Plans", "Program", "Receive"]


Op = tuple[Any, ...]
# Which constants: those of a segment (0, or a plain layer's number and one more), and of a micro-batch.
Lot = tuple[int, int]


@dataclass(frozen=True)
class Net:
    """What a plan depends on: the layers, each by kind and whether it is apart, and how many each rank has."""

    layers: tuple[tuple[str, bool], ...]
    counts: tuple[int, ...]

    @property
    def ranks(self) -> int:
        """Number of ranks."""
        return len(self.counts)

    def owner(self, layer: int) -> int:
        """The rank that has a layer."""
        for rank, count in enumerate(self.counts):
            if layer < count:
                return rank
            layer -= count
        raise IndexError(layer)

    def owned(self, rank: int) -> range:
        """The layers of a rank."""
        first = sum(self.counts[:rank])
        return range(first, first + self.counts[rank])


@dataclass(frozen=True)
class Receive:
    """A state that comes from another rank."""

    pass_: str
    source: int
    value: int
    # The constants that come before it.
    lot: Lot | None


@dataclass(frozen=True)
class Program:
    """One rank's share of a plan."""

    plan: _native.LayerPlan
    ops: list[Op]
    points: list[int]
    # By value, on which mesh of states it is.
    meshes: list[int]
    # The coarsest of these.
    coarsest: int
    inputs: list[int]
    outputs: list[int]
    # What a guess gives, with the points that these are states of, and what C-points have at the end where there is no final sweep: the same ones.
    guesses: list[int]
    states: list[int]
    receives: list[Receive]
    # By the position of a send: the lot whose constants go along.
    carrying: dict[int, Lot]
    # Whether states are differences of one another somewhere.
    is_exact: bool


class Plans:
    """All plans of a net for one rank."""

    def __init__(self, net: Net, rank: int) -> None:
        self.net = net
        self.rank = rank
        self._segments = [0]
        for layer, (kind, _) in enumerate(net.layers):
            self._segments.append(layer + 1 if kind == "plain" else self._segments[-1])
        self._made: dict[Any, Program] = {}

    def __deepcopy__(self, memo: dict[int, Any]) -> Plans:
        """Those of the same net."""
        return self

    def segment(self, point: int) -> int:
        """Which plain layer has made the form of a point's state: its number and one more, 0 for the input."""
        return self._segments[point]

    def solve(
        self,
        pass_: str,
        cycle: Cycle,
        *,
        iterations: int | None = None,
        start: str | None = None,
        is_whole: bool = True,
    ) -> Program:
        """A solve by multigrid; of one level a wave. Not whole, it ends with states of C-points, without the sweep that counts."""
        iterations = cycle.iterations if iterations is None else iterations
        start = cycle.start if start is None else start
        key = (pass_, cycle, iterations, start, is_whole)
        if key not in self._made:
            factors = cycle.factors()
            settings = (
                iterations,
                cycle.shape,
                cycle.relaxations(),
                start,
                cycle.norms,
                is_whole,
                cycle.reuse_for(self.net.ranks, is_adjoint=pass_ == "adjoint"),
            )
            plan = _native.LayerPlan.mgrit(
                list(self.net.layers), factors, list(self.net.counts), pass_, settings, cycle.coarser_levels()
            )
            self._made[key] = self._program(plan, is_exact=not factors)
        return self._made[key]

    def pipeline(self, schedule: str, micro_batches: int) -> Program:
        """A pipeline of so many micro-batches."""
        key = (schedule, micro_batches)
        if key not in self._made:
            plan = _native.LayerPlan.pipeline(list(self.net.layers), list(self.net.counts), schedule, micro_batches)
            self._made[key] = self._program(plan, is_exact=True)
        return self._made[key]

    def _program(self, plan: _native.LayerPlan, *, is_exact: bool) -> Program:
        ops, points = plan.ops(self.rank), plan.points
        carrying: dict[int, Lot] = {}
        receives = []
        known: set[tuple[str, int, Lot]] = set()
        micro_batch = 0
        for position, op in enumerate(ops):
            if op[0] == "phase":
                # Those of a pipeline are micro-batches, each with constants of its own.
                micro_batch = op[3] if op[1] in ("chunk", "loss") else 0
            elif op[0] in ("send", "recv"):
                name, pass_, peer, value = op
                lot = (self.segment(points[value]), micro_batch)
                is_first = pass_ == "forward" and (name, peer, lot) not in known
                known.add((name, peer, lot))
                if name == "recv":
                    receives.append(Receive(pass_, peer, value, lot if is_first else None))
                elif is_first:
                    carrying[position] = lot

        def mine(values: Sequence[tuple[int, int]]) -> list[int]:
            return [value for rank, value in values if rank == self.rank]

        meshes = plan.meshes
        return Program(
            plan=plan,
            ops=ops,
            points=points,
            meshes=meshes,
            coarsest=max(meshes, default=0),
            inputs=mine(plan.inputs),
            outputs=mine(plan.outputs),
            guesses=mine(plan.guesses),
            states=mine(plan.states),
            receives=receives,
            carrying=carrying,
            is_exact=is_exact,
        )
