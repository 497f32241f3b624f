"""Plans of a net for one rank, built once for each way to solve it.

Owns the requests to the native planner, and what a rank needs in addition to its list of operations. That is which
messages include constants, and the order in which receives are posted.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from torch_accl import _native

from .._net.kinds import LayerKind
from .cycle import Cycle

__all__ = ["ConstantsKey", "Converging", "Net", "Passes", "Plans", "Program", "Receive", "specs_of"]


Op = tuple[Any, ...]
# A layer as the native module takes it: the kind whose operations make its steps, and whether it is apart.
LayerSpec = tuple[str, bool]
# Key of constants: a segment and a micro-batch. A segment is 0, or the number of a plain layer plus one.
ConstantsKey = tuple[int, int]


def specs_of(layers: Iterable[tuple[LayerKind, bool]]) -> list[LayerSpec]:
    """Returns layers as the native module takes them."""
    return [(kind.plan_kind, is_apart) for kind, is_apart in layers]


@dataclass(frozen=True)
class Net:
    """All that a plan depends on: kind of each layer and whether it is apart, and the number of layers of each rank."""

    layers: tuple[tuple[LayerKind, bool], ...]
    counts: tuple[int, ...]

    @property
    def specs(self) -> list[LayerSpec]:
        """The layers as the native module takes them."""
        return specs_of(self.layers)

    @property
    def ranks(self) -> int:
        """Number of ranks."""
        return len(self.counts)

    def owner(self, layer: int) -> int:
        """Returns the rank that has a layer."""
        for rank, count in enumerate(self.counts):
            if layer < count:
                return rank
            layer -= count
        raise IndexError(layer)

    def owned(self, rank: int) -> range:
        """Returns the layers of a rank."""
        first = sum(self.counts[:rank])
        return range(first, first + self.counts[rank])


@dataclass(frozen=True)
class Receive:
    """A state that another rank sends."""

    pass_: str
    source: int
    value: int
    # Key of the constants that arrive before the state; None if none do.
    constants_key: ConstantsKey | None


@dataclass(frozen=True)
class Program:
    """One rank's part of a plan."""

    plan: _native.LayerPlan
    ops: list[Op]
    points: list[int]
    # The mesh of states that each value is on.
    meshes: list[int]
    # The coarsest mesh.
    coarsest: int
    inputs: list[int]
    outputs: list[int]
    # guesses: values that a guess provides, each a state of the point `points[value]`.
    # states: final values of the same points if there is no final sweep.
    guesses: list[int]
    states: list[int]
    receives: list[Receive]
    # For the position of a send: the key of the constants that are sent with it.
    carrying: dict[int, ConstantsKey]
    # Whether no state is ever a difference of other states, as in a wave or a pipeline.
    is_exact: bool


@dataclass(frozen=True)
class Converging:
    """A pass that continues until its residual is small.

    `first` and `more` end with states of C-points, and `last` is the final sweep.
    """

    first: Program
    more: Program
    last: Program
    # Replaces the whole pass if more iterations do not help.
    exact: Program
    # tolerance: share of the first norm at which the pass has converged. limit: maximum number of iterations.
    tolerance: float
    limit: int
    # Numbers of iterations of `first` and of each `more`.
    iterations: tuple[int, int]

    @property
    def is_exact(self) -> bool:
        """Whether no state is ever a difference of other states."""
        return self.first.is_exact

    @property
    def coarsest(self) -> int:
        """The coarsest mesh that states are on."""
        return max(self.first.coarsest, self.more.coarsest)


Passes = Program | Converging


class Plans:
    """All plans of a net for one rank."""

    def __init__(self, net: Net, rank: int) -> None:
        self.net = net
        self.rank = rank
        self._segments = [0]
        for layer, (kind, _) in enumerate(net.layers):
            self._segments.append(self._segments[-1] if kind.is_step else layer + 1)
        self._made: dict[Any, Program] = {}

    def __deepcopy__(self, memo: dict[int, Any]) -> Plans:
        """Returns the plans themselves: a copy of the net has the same plans."""
        return self

    def segment(self, point: int) -> int:
        """Returns the segment of a point.

        It is the number plus one of the plain layer that made the form of the point's state, or 0 for the input.
        """
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
        """Returns a solve by multigrid; with one level it is a wave.

        If not `is_whole`, it ends with states of C-points, without the final sweep.
        """
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
                self.net.specs, factors, list(self.net.counts), pass_, settings, cycle.coarser_levels()
            )
            self._made[key] = self._program(plan, is_exact=not factors)
        return self._made[key]

    def pipeline(self, schedule: str, micro_batches: int) -> Program:
        """Returns a pipeline with `micro_batches` micro-batches."""
        key = (schedule, micro_batches)
        if key not in self._made:
            plan = _native.LayerPlan.pipeline(self.net.specs, list(self.net.counts), schedule, micro_batches)
            self._made[key] = self._program(plan, is_exact=True)
        return self._made[key]

    def _program(self, plan: _native.LayerPlan, *, is_exact: bool) -> Program:
        ops, points = plan.ops(self.rank), plan.points
        carrying: dict[int, ConstantsKey] = {}
        receives = []
        known: set[tuple[str, int, ConstantsKey]] = set()
        micro_batch = 0
        for position, op in enumerate(ops):
            if op[0] == "phase":
                # In a pipeline, these phases are of one micro-batch each, which has its own constants.
                micro_batch = op[3] if op[1] in ("chunk", "loss") else 0
            elif op[0] in ("send", "recv"):
                name, pass_, peer, value = op
                constants_key = (self.segment(points[value]), micro_batch)
                is_first = pass_ == "forward" and (name, peer, constants_key) not in known
                known.add((name, peer, constants_key))
                if name == "recv":
                    receives.append(Receive(pass_, peer, value, constants_key if is_first else None))
                elif is_first:
                    carrying[position] = constants_key

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
