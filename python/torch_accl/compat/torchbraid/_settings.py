"""XBraid's settings of one direction, forward or backward, by torchbraid's names: what a script reaches as `fwd_app` and `bwd_app`.

Owns what each of them means as a `Cycle`, and says of each that means nothing here why not.
"""

from __future__ import annotations

import operator
import warnings
import weakref
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ... import _native
from ...layer_parallel import Cycle
from ._communicator import Comm
from ._timers import ContextTimerManager

__all__ = ["App", "say_once"]

# What XBraid says where no residual norm was taken.
_NO_NORM = -1.0
# Every level that nothing else is said of.
_ALL = -1

_has_said: set[str] = set()


def say_once(comm: Comm, text: str) -> None:
    """A warning of rank 0, once for a process."""
    if comm.Get_rank() == 0 and text not in _has_said:
        _has_said.add(text)
        warnings.warn(f"torchbraid: {text}", stacklevel=2)


class App:
    """The settings of one direction. `name` begins the names of its timers."""

    def __init__(
        self,
        name: str,
        comm: Comm,
        timers: ContextTimerManager,
        steps: Sequence[tuple[str, bool]],
        Tf: float,
        max_levels: int,
        max_iters: int,
    ) -> None:
        self.name = name
        self.comm = comm
        self.timer_manager = timers
        self.Tf = Tf
        self.dt = Tf / len(steps)
        # Of the last batch, where that is what makes them.
        self.steps = list(steps)
        self.max_levels = self._at_least("max_levels", max_levels, 1)
        self.max_iters = self._at_least("max_iters", max_iters, 1)
        self.cfactor: int | dict[int, int] = 2
        self.skip_downcycle = False
        self.print_level = 0
        self.tb_print_level = 0
        # 0: nothing is timed. 1: whole passes. 2: each evaluation of a layer as well.
        self.timings = 1
        self._relax = {_ALL: 0}
        self._min_coarse = 2
        self._is_full = False
        # Of the states, which the net has.
        self.has_guess = False
        # From which levels states become coarser on the way to the next.
        self.coarsened: tuple[int, ...] = ()
        # Of a cell with `reduceX` and `fastForward`: whether they are used.
        self.has_fastforward = False
        self._residual_compute = 1
        self._stats = (0, _NO_NORM)
        self._made: tuple[object, Cycle] | None = None
        # Asked for when they are wanted, and given by who has them.
        self.points: Callable[[], tuple[list[float], list[Any]]] | None = None
        self.owner: Callable[[int], int] | None = None
        self._file: weakref.finalize[Any, Any] | None = None

    def __repr__(self) -> str:
        return f"<{self.name}: {self.cycle()}>"

    @property
    def num_steps(self) -> int:
        """How many steps there are."""
        return len(self.steps)

    @property
    def _is_forward(self) -> bool:
        return self.name == "ForWD"

    def _at_least(self, what: str, given: int, least: int) -> int:
        try:
            number = operator.index(given)
        except TypeError:
            number = least - 1
        if number < least:
            raise ValueError(f"torchbraid: {what}={given!r}: give a whole number from {least}")
        return number

    # ---- what there is of each setting

    def setMaxIters(self, max_iters: int) -> None:
        """So many iterations. The first is the way down alone where the down-cycle is skipped."""
        self.max_iters = self._at_least("max_iters", max_iters, 1)

    def getMaxIters(self) -> int:
        """How many iterations."""
        return self.max_iters

    def setCFactor(self, cfactor: int | Mapping[int, int]) -> None:
        """How many steps of a level are one of the next: a number, or one by level, of which -1 is of all the others."""
        if isinstance(cfactor, Mapping):
            found = {
                self._at_least("level", level, _ALL): self._at_least("cfactor", factor, 2)
                for level, factor in cfactor.items()
            }
            self.cfactor = {**self._factors(), **found}
        else:
            self.cfactor = self._at_least("cfactor", cfactor, 2)

    def _factors(self) -> dict[int, int]:
        return {_ALL: self.cfactor} if isinstance(self.cfactor, int) else self.cfactor

    def _factor(self, level: int) -> int:
        factors = self._factors()
        return factors.get(level, factors[_ALL])

    def setNumRelax(self, relax: int, level: int = _ALL) -> None:
        """How often C-points are relaxed: 0 is F-relaxation, 1 FCF. Of one level, or of all of which nothing is said by themselves."""
        self._relax[self._at_least("level", level, _ALL)] = self._at_least("relax", relax, 0)

    def setSkipDowncycle(self, skip: bool | int) -> None:
        """Whether the first iteration is the way down alone. Without it, as many cycles follow as there are iterations."""
        self.skip_downcycle = bool(skip)
        if not skip and self.max_levels > 1:
            say_once(
                self.comm,
                "setSkipDowncycle(False): cycles start from the solution of the coarsest level all the same, and one more is made; the states "
                "of the batch before, which torchbraid starts from, are another batch's",
            )

    def setFMG(self) -> None:
        """F-cycles, after a start that is improved on every level."""
        self._is_full = True

    def setMinCoarse(self, mc: int) -> None:
        """No level has fewer steps."""
        self._min_coarse = self._at_least("min_coarse", mc, 1)

    def setResidualCompute(self, residual_compute: bool | int) -> None:
        """Whether norms of residuals are taken."""
        self._residual_compute = int(residual_compute)

    def getResidualCompute(self) -> int:
        """Whether they are."""
        return self._residual_compute

    def setPrintLevel(self, print_level: int, tb_print: bool = False) -> None:
        """From 1 on rank 0 prints residuals by iteration after each pass; with `tb_print`, a line for each pass."""
        if tb_print:
            self.tb_print_level = int(print_level)
        else:
            self.print_level = int(print_level)

    def setTimerFile(self, filestem: str) -> None:
        """When the net is gone, or the program at its end, each rank writes its table of this direction's timers to `<filestem>_<rank>.txt`."""
        if self._file is not None:
            self._file.detach()
        path = Path(f"{filestem}_{self.comm.Get_rank():04d}.txt")
        self._file = weakref.finalize(self, _write, path, self.timer_manager, f"{self.name}::")

    def resetBraidTimer(self) -> None:
        """Forgets what was timed of this direction."""
        kept = {
            name: timer for name, timer in self.timer_manager.timers.items() if not name.startswith(f"{self.name}::")
        }
        self.timer_manager.timers = kept

    def setBraidTimers(self, flag: int) -> None:
        """0: nothing is timed. 1: whole passes. 2: each evaluation of a layer as well."""
        self.timings = self._at_least("timers", flag, 0)

    def finalRelax(self) -> None:
        """Nothing to be done: every solve ends with a sweep over all layers, in which they count."""

    # ---- what there is not

    def setAbsTol(self, abs_tol: float) -> None:
        """No effect, but for a warning."""
        say_once(
            self.comm,
            f"setAbsTol({abs_tol}) has no effect: as many iterations are made as are asked for; with net.body.mode = 'converged' a pass goes on until its residual "
            "is a share of the first one, and getFwdStats() has the residual",
        )

    def setRelTol(self, rel_tol: float) -> None:
        """No effect, but for a warning."""
        say_once(
            self.comm,
            f"setRelTol({rel_tol}) has no effect: as many iterations are made as are asked for; net.body.mode = 'converged' is for that",
        )

    def setStorage(self, storage: int) -> None:
        """No effect, but for a warning: it changes no result."""
        say_once(
            self.comm,
            f"setStorage({storage}) has no effect: a plan keeps each state as long as something needs it and no longer; no result depends on it",
        )

    def setCRelaxWt(self, CWt: float) -> None:
        """Only that of a relaxation without weights.

        Raises:
            NotImplementedError: another weight.
        """
        if CWt != 1.0:
            raise NotImplementedError(
                f"setCRelaxWt({CWt}): C-relaxation has no weights here, in neither direction; leave it at 1.0"
            )

    def setRelaxOnlyCG(self, flag: bool | int) -> None:
        """No effect, but for a warning where it is asked for."""
        if flag:
            say_once(
                self.comm,
                "setRelaxOnlyCG has no effect: the coarsest level is solved, which is more exact than relaxing it, and takes as long as its steps one after the other",
            )

    def setRevertedRanks(self, reverted: bool | int) -> None:
        """Nothing to be done: the adjoint of a layer is evaluated where the layer is."""

    # ---- as a cycle

    def cycle(self) -> Cycle:
        """What is solved, with as many levels as the net allows."""
        said = (
            len(self.steps),
            self.max_levels,
            self.max_iters,
            self.skip_downcycle,
            dict(self._factors()),
            dict(self._relax),
            self._min_coarse,
            self._is_full,
            self.has_guess,
            self.coarsened,
            self._residual_compute,
        )
        if self._made is None or self._made[0] != said:
            self._made = (said, self._cycle())
        return self._made[1]

    def _cycle(self) -> Cycle:
        factors = self._coarsened()
        if not factors:
            return Cycle(levels=1)
        relax = tuple(self._relax.get(level, self._relax[_ALL]) for level in range(len(factors)))
        return Cycle(
            levels=len(factors) + 1,
            factor=tuple(factors),
            # What a guess takes the place of is an iteration that has no cycle.
            iterations=self.max_iters + (0 if self.skip_downcycle or self.has_guess else 1),
            relax=relax,
            shape="F" if self._is_full else "V",
            start="guess" if self.has_guess else "full" if self._is_full else "coarsest",
            norms="lagged" if self._residual_compute else "none",
            coarser=tuple(level + 1 for level in self.coarsened if level < len(factors)),
        )

    def _coarsened(self) -> list[int]:
        """The factors of as many levels as are asked for and there is room for."""
        factors: list[int] = []
        why = ""
        while len(factors) < self.max_levels - 1:
            longer = [*factors, self._factor(len(factors))]
            try:
                levels = _native.layer_levels(self.steps, longer)
            except ValueError:
                why = "no step could be made longer"
                break
            if len(levels[-1]) - 1 < self._min_coarse:
                why = f"the next would have fewer than {self._min_coarse} steps"
                break
            factors = longer
        if why and self.max_levels > 1:
            say_once(
                self.comm,
                f"{len(factors) + 1} {'levels' if factors else 'level'} instead of {self.max_levels}: {self.num_steps} layers by factors of "
                f"{[self._factor(level) for level in range(len(factors) + 1)]}, and {why}",
            )
        return factors

    # ---- what became of it

    def solved(self, norms: Mapping[int, float], iterations: int | None) -> None:
        """Takes over how a pass has gone, and prints it where that is wanted. Without a number of iterations, norms tell it."""
        if iterations is None:
            iterations = max(norms, default=0)
        self._stats = (iterations, list(norms.values())[-1] if norms else _NO_NORM)
        if self.comm.Get_rank() != 0:
            return
        what = "forward" if self._is_forward else "backward"
        before = None
        # The start counts as none where a whole cycle is the first one.
        start = self.cycle().iterations - self.max_iters
        for iteration, norm in norms.items() if self.print_level > 0 else ():
            factor = f", factor {norm / before:.3g}" if before else ""
            print(f"{what}: iteration {iteration - start}, residual {norm:.6e}{factor}", flush=True)
            before = norm
        if self.tb_print_level > 0:
            residual = f", residual {self._stats[1]:.6e}" if norms else ""
            print(f"{what}: {iterations} {'iteration' if iterations == 1 else 'iterations'}{residual}", flush=True)

    def getBraidStats(self) -> tuple[int, float]:
        """How many iterations the last pass had, and its last residual norm; -1 where none was taken."""
        return self._stats

    # ---- where and when

    def getMPIComm(self) -> Comm:
        """The ranks."""
        return self.comm

    def getNumSteps(self) -> int:
        """How many steps there are."""
        return self.num_steps

    def getFineTimeIndex(self, tidx: int, level: int) -> int:
        """The point of the finest level that a point of another one is."""
        for below in range(level):
            tidx *= self._factor(below)
        return tidx

    def getLevelNumSteps(self, level: int) -> int:
        """How many steps a level has, the last of which may be shorter."""
        count = self.num_steps
        for below in range(level):
            count = -(-count // self._factor(below))
        return count

    def getTimePointProc(self, level: int, index: int) -> int:
        """The rank that computes a point: that of the layer before it."""
        assert self.owner is not None, "whoever makes the net says whose its layers are"
        return self.owner(max(self.getFineTimeIndex(index, level) - 1, 0))

    def getTimePoints(self, level: int = 0) -> tuple[list[float], list[Any]]:
        """The times of this rank's points, and their states in the last forward pass.

        Raises:
            NotImplementedError: of a coarser level, whose states are not kept.
            RuntimeError: nobody has asked for states to be kept.
        """
        if level != 0 or self.points is None:
            raise NotImplementedError(
                f"getTimePoints({level}): states of the forward pass's finest level are the only ones that are kept"
            )
        return self.points()


def _write(path: Path, timers: ContextTimerManager, prefix: str) -> None:
    path.write_text(timers.getResultString(prefix))
