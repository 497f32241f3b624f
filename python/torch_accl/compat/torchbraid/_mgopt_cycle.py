"""The V-cycle of torchbraid's MG/Opt, over models of different depth inside a batch.

Owns the order of the models' steps, and the line searches that scale a coarser model's correction. `_mgopt_levels.py`
evaluates a model on a batch. The cycle follows `torch_accl.layer_parallel.MGOpt`, but heads, tails and losses lie on
the first rank, and restrictions and searches are torchbraid's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from ...layer_parallel.extension import Field, combined
from ._mgopt_levels import Batch, Level, Point, Transfer
from ._mgopt_options import LineSearch, Restriction

__all__ = ["Cycle", "LevelPair"]


@dataclass
class LevelPair:
    """The transfer between a level and the next coarser one, and the line search for its corrections."""

    transfer: Transfer
    parameters: Restriction
    gradients: Restriction
    search: LineSearch
    # Length of each correction; None if the optimizer chose it.
    lengths: list[float | None] = field(default_factory=list)


class Cycle:
    """V-cycles over levels, the finest first. `say` receives messages to print: their importance and text."""

    def __init__(
        self,
        levels: Sequence[Level],
        pairs: Sequence[LevelPair],
        *,
        pre: int,
        post: int,
        coarse: int,
        say: Callable[[int, str], None],
    ) -> None:
        self._levels, self._pairs = levels, pairs
        self._pre, self._post, self._coarse = pre, post, coarse
        self._say = say

    def run(self, batch: Batch) -> float:
        """Runs one V-cycle with a batch. Returns the loss before the finest model's last step, or, without such a step,
        the loss of the model's final parameters."""
        for level in self._levels:
            level.correction = level.origin = None
            level.begin()
        finest = self._levels[0]
        try:
            last = self._cycle(0, None, batch)
            return finest.objective(batch) if last is None else last.objective
        finally:
            for level in self._levels:
                level.model.zero_grad(set_to_none=True)

    def _cycle(self, at: int, point: Point | None, batch: Batch) -> Point | None:
        level = self._levels[at]
        if at == len(self._levels) - 1:
            return level.relax(point, batch, self._coarse, self._reporter(at, "relaxation"))
        if self._pre:
            level.relax(point, batch, self._pre, self._reporter(at, "pre-relaxation"))
            point = None
        point = self._corrected(at, level.evaluate(batch) if point is None else point, batch)
        return level.relax(point, batch, self._post, self._reporter(at, "post-relaxation"))

    def _reporter(self, at: int, what: str) -> Callable[[float], None]:
        return lambda loss: self._say(2, f"level {at}: {what}, loss {loss:.9g}")

    def _corrected(self, at: int, point: Point, batch: Batch) -> Point | None:
        """Runs the coarser levels and applies their correction; returns the point reached, or None if it was not
        evaluated."""
        level, below, pair = self._levels[at], self._levels[at + 1], self._pairs[at]
        self._cycle(at + 1, self._descend(at, point, batch), batch)
        assert below.origin is not None
        changes = combined(below.values(), below.origin, lambda now, before: now - before)
        change = pair.transfer.interpolated(changes)
        slope = level.product(point.gradients, change, "the slope along a correction")
        start = level.values()
        try:
            length, found = self._searched(at, point, start, change, slope, batch)
        except BaseException:
            level.move(start, change, 0.0)
            raise
        pair.lengths.append(length)
        shown = "by the optimizer" if length is None else f"of length {length:.4g}"
        self._say(2, f"level {at}: correction {shown}, loss before it {point.objective:.9g}, slope {slope:.4e}")
        return found

    def _descend(self, at: int, point: Point, batch: Batch) -> Point:
        """Sets the coarser model to the restricted parameters, and its linear term so that its gradient is the
        restricted one."""
        above, below, pair = self._levels[at], self._levels[at + 1], self._pairs[at]
        below.set(pair.transfer.restricted(above.values(), pair.parameters))
        restricted = pair.transfer.restricted(point.gradients, pair.gradients)
        below.correction = None
        found = below.evaluate(batch)
        # Parameters that the coarse model does not use have no gradient there.
        wanted = combined(restricted, found.gradients, lambda r, _: r)
        below.correction = combined(wanted, found.gradients, lambda r, g: r - g)
        below.origin = below.values()
        return Point(found.objective, wanted, found.buffers)

    # ---- line searches

    def _searched(
        self, at: int, point: Point, start: Field, change: Field, slope: float, batch: Batch
    ) -> tuple[float | None, Point | None]:
        """Applies a correction; returns its length, and the point reached or None."""
        level, search = self._levels[at], self._pairs[at].search
        if search.name == "tb_adam_no_ls":
            level.follow(combined(change, change, lambda step, _: -step))
            return None, None
        if search.name == "tb_simple_backtrack_ls":
            return self._halved(at, point, start, change, slope, batch)
        length = search.lengths[0]
        if search.name == "tb_simple_ls":
            losses = []
            for length in search.lengths:
                level.move(start, change, length)
                losses.append(level.objective(batch))
                self._say(2, f"level {at}: a correction of length {length:.4g} has the loss {losses[-1]:.9g}")
            # The first of the lowest losses; NaN never counts.
            best = min((loss for loss in losses if loss == loss), default=None)
            if best is None:
                level.move(start, change, 0.0)
                return 0.0, None
            length = search.lengths[losses.index(best)]
        level.move(start, change, length)
        return length, None

    def _halved(
        self, at: int, point: Point, start: Field, change: Field, slope: float, batch: Batch
    ) -> tuple[float, Point]:
        level, search = self._levels[at], self._pairs[at].search
        length = search.lengths[0]
        for _ in range(search.trials if slope < 0 else 0):
            level.move(start, change, length)
            found = level.evaluate(batch)
            if found.objective < point.objective + search.gain * length * slope:
                return length, found
            length /= 2
        level.move(start, change, 0.0)
        level.restore(point.buffers)
        return 0.0, point
