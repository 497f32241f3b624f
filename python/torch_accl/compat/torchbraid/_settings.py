"""XBraid's settings of one direction, forward or backward, by torchbraid's names: a script reaches them as `fwd_app`
and `bwd_app`.

Owns the translation of the settings to a `Cycle`, and the warnings for settings without effect.
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

# XBraid's value for a residual norm that was not computed.
_NO_NORM = -1.0
# Key for all levels without a setting of their own.
_ALL = -1

_has_said: set[str] = set()


def say_once(comm: Comm, text: str) -> None:
    """Warns on rank 0, once per process for each text."""
    if comm.Get_rank() == 0 and text not in _has_said:
        _has_said.add(text)
        warnings.warn(f"torchbraid: {text}", stacklevel=2)


class App:
    """The settings of one direction. `name` is the prefix of the names of its timers."""

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
        # Steps; for a recurrent net, the steps of the last batch.
        self.steps = list(steps)
        self.max_levels = self._at_least("max_levels", max_levels, 1)
        self.max_iters = self._at_least("max_iters", max_iters, 1)
        self.cfactor: int | dict[int, int] = 2
        self.skip_downcycle = False
        self.print_level = 0
        self.tb_print_level = 0
        # 0: nothing is timed. 1: whole passes. 2: also each evaluation of a layer.
        self.timings = 1
        self._relax = {_ALL: 0}
        self._min_coarse = 2
        self._is_full = False
        # Whether the net has an initial guess for the states, which it stores itself.
        self.has_guess = False
        # Levels from which states become coarser on the way to the next.
        self.coarsened: tuple[int, ...] = ()
        # For a cell with `reduceX` and `fastForward`: whether they are used.
        self.has_fastforward = False
        self._residual_compute = 1
        self._stats = (0, _NO_NORM)
        self._made: tuple[object, Cycle] | None = None
        # Callbacks of the net that owns the points and the layers.
        self.points: Callable[[], tuple[list[float], list[Any]]] | None = None
        self.owner: Callable[[int], int] | None = None
        self._file: weakref.finalize[Any, Any] | None = None

    def __repr__(self) -> str:
        return f"<{self.name}: {self.cycle()}>"

    @property
    def num_steps(self) -> int:
        """The number of steps."""
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
            raise ValueError(f"torchbraid: {what}={given!r}: give an integer of at least {least}")
        return number

    # ---- settings with an effect

    def setMaxIters(self, max_iters: int) -> None:
        """Sets the number of iterations. If the down-cycle is skipped, the first iteration is the start alone, without
        a cycle."""
        self.max_iters = self._at_least("max_iters", max_iters, 1)

    def getMaxIters(self) -> int:
        """Returns the number of iterations."""
        return self.max_iters

    def setCFactor(self, cfactor: int | Mapping[int, int]) -> None:
        """Sets how many steps of a level make one of the next: a number, or one by level, where -1 stands for all other
        levels."""
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
        """Sets how often C-points are relaxed, for one level or, with -1, for all levels without their own: 0 is
        F-relaxation, 1 FCF."""
        self._relax[self._at_least("level", level, _ALL)] = self._at_least("relax", relax, 0)

    def setSkipDowncycle(self, skip: bool | int) -> None:
        """Sets whether the first iteration is the start from the coarsest level alone. If not, `max_iters` cycles
        follow that start."""
        self.skip_downcycle = bool(skip)
        if not skip and self.max_levels > 1:
            say_once(
                self.comm,
                "setSkipDowncycle(False): cycles still start from the solution of the coarsest level, and one more cycle runs. torchbraid starts from "
                "the previous batch's states, which belong to another batch",
            )

    def setFMG(self) -> None:
        """Selects F-cycles, after a start that is improved on every level."""
        self._is_full = True

    def setMinCoarse(self, mc: int) -> None:
        """Sets the minimum number of steps of a level."""
        self._min_coarse = self._at_least("min_coarse", mc, 1)

    def setResidualCompute(self, residual_compute: bool | int) -> None:
        """Sets whether residual norms are computed."""
        self._residual_compute = int(residual_compute)

    def getResidualCompute(self) -> int:
        """Returns whether residual norms are computed, as 0 or 1."""
        return self._residual_compute

    def setPrintLevel(self, print_level: int, tb_print: bool = False) -> None:
        """Sets how much rank 0 prints. From 1 on it prints residuals by iteration after each pass; with `tb_print`, a
        line for each pass."""
        if tb_print:
            self.tb_print_level = int(print_level)
        else:
            self.print_level = int(print_level)

    def setTimerFile(self, filestem: str) -> None:
        """Sets a file for timers: when the net is deleted or the program ends, each rank writes this direction's table
        to `<filestem>_<rank>.txt`."""
        if self._file is not None:
            self._file.detach()
        path = Path(f"{filestem}_{self.comm.Get_rank():04d}.txt")
        self._file = weakref.finalize(self, _write, path, self.timer_manager, f"{self.name}::")

    def resetBraidTimer(self) -> None:
        """Deletes this direction's measurements."""
        kept = {
            name: timer for name, timer in self.timer_manager.timers.items() if not name.startswith(f"{self.name}::")
        }
        self.timer_manager.timers = kept

    def setBraidTimers(self, flag: int) -> None:
        """Sets what is timed. 0: nothing. 1: whole passes. 2: also each evaluation of a layer."""
        self.timings = self._at_least("timers", flag, 0)

    def finalRelax(self) -> None:
        """Does nothing: every solve ends with a sweep over all layers, whose evaluations are the final ones."""

    # ---- settings without effect

    def setAbsTol(self, abs_tol: float) -> None:
        """Has no effect but a warning."""
        say_once(
            self.comm,
            f"setAbsTol({abs_tol}) has no effect: a pass runs the requested number of iterations; with net.body.mode = 'converged' it runs until its residual "
            "is a fraction of the first residual. getFwdStats() returns the residual",
        )

    def setRelTol(self, rel_tol: float) -> None:
        """Has no effect but a warning."""
        say_once(
            self.comm,
            f"setRelTol({rel_tol}) has no effect: a pass runs the requested number of iterations; net.body.mode = 'converged' stops at a relative tolerance",
        )

    def setStorage(self, storage: int) -> None:
        """Has no effect but a warning; it would change no result."""
        say_once(
            self.comm,
            f"setStorage({storage}) has no effect: a plan keeps each state only as long as an operation needs it; results do not depend on this setting",
        )

    def setCRelaxWt(self, CWt: float) -> None:
        """Accepts 1.0 only, a relaxation without weights.

        Raises:
            NotImplementedError: another weight.
        """
        if CWt != 1.0:
            raise NotImplementedError(
                f"setCRelaxWt({CWt}): weights of C-relaxation are not supported, in either direction; leave it at 1.0"
            )

    def setRelaxOnlyCG(self, flag: bool | int) -> None:
        """Has no effect but a warning if `flag` is true."""
        if flag:
            say_once(
                self.comm,
                "setRelaxOnlyCG has no effect: the coarsest level is solved, which is more exact than relaxing it and takes the time of its steps in sequence",
            )

    def setRevertedRanks(self, reverted: bool | int) -> None:
        """Does nothing: the adjoint of a layer is evaluated where the layer is."""

    # ---- the settings as a cycle

    def cycle(self) -> Cycle:
        """Returns the cycle of these settings, with as many levels as the net allows."""
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
            # `Cycle` counts the start as an iteration. It is one of `max_iters` if the down-cycle is skipped, and a
            # guess needs none.
            iterations=self.max_iters + (0 if self.skip_downcycle or self.has_guess else 1),
            relax=relax,
            shape="F" if self._is_full else "V",
            start="guess" if self.has_guess else "full" if self._is_full else "coarsest",
            norms="lagged" if self._residual_compute else "none",
            coarser=tuple(level + 1 for level in self.coarsened if level < len(factors)),
        )

    def _coarsened(self) -> list[int]:
        """Returns the factors of up to `max_levels` levels, as far as the steps allow."""
        factors: list[int] = []
        why = ""
        while len(factors) < self.max_levels - 1:
            longer = [*factors, self._factor(len(factors))]
            try:
                levels = _native.layer_levels(self.steps, longer)
            except ValueError:
                why = "no step can be coarsened further"
                break
            if len(levels[-1]) - 1 < self._min_coarse:
                why = f"the next level would have fewer than {self._min_coarse} steps"
                break
            factors = longer
        if why and self.max_levels > 1:
            say_once(
                self.comm,
                f"{len(factors) + 1} {'levels' if factors else 'level'} instead of {self.max_levels}: {self.num_steps} layers by factors of "
                f"{[self._factor(level) for level in range(len(factors) + 1)]}, and {why}",
            )
        return factors

    # ---- results

    def solved(self, norms: Mapping[int, float], iterations: int | None) -> None:
        """Records the result of a pass, and prints it if asked to. If `iterations` is None, the norms give the
        number."""
        if iterations is None:
            iterations = max(norms, default=0)
        self._stats = (iterations, list(norms.values())[-1] if norms else _NO_NORM)
        if self.comm.Get_rank() != 0:
            return
        what = "forward" if self._is_forward else "backward"
        before = None
        # If the first iteration is a whole cycle, the start before it is not counted.
        start = self.cycle().iterations - self.max_iters
        for iteration, norm in norms.items() if self.print_level > 0 else ():
            factor = f", factor {norm / before:.3g}" if before else ""
            print(f"{what}: iteration {iteration - start}, residual {norm:.6e}{factor}", flush=True)
            before = norm
        if self.tb_print_level > 0:
            residual = f", residual {self._stats[1]:.6e}" if norms else ""
            print(f"{what}: {iterations} {'iteration' if iterations == 1 else 'iterations'}{residual}", flush=True)

    def getBraidStats(self) -> tuple[int, float]:
        """Returns the number of iterations of the last pass, and its last residual norm, or -1 if none was computed."""
        return self._stats

    # ---- ranks and times

    def getMPIComm(self) -> Comm:
        """Returns the communicator."""
        return self.comm

    def getNumSteps(self) -> int:
        """Returns the number of steps."""
        return self.num_steps

    def getFineTimeIndex(self, tidx: int, level: int) -> int:
        """Returns the point of the finest level that corresponds to a point of another level."""
        for below in range(level):
            tidx *= self._factor(below)
        return tidx

    def getLevelNumSteps(self, level: int) -> int:
        """Returns the number of steps of a level, the last of which may be shorter."""
        count = self.num_steps
        for below in range(level):
            count = -(-count // self._factor(below))
        return count

    def getTimePointProc(self, level: int, index: int) -> int:
        """Returns the rank that computes a point: the rank of the layer before it."""
        assert self.owner is not None, "the net sets the owners of its layers"
        return self.owner(max(self.getFineTimeIndex(index, level) - 1, 0))

    def getTimePoints(self, level: int = 0) -> tuple[list[float], list[Any]]:
        """Returns the times of this rank's points, and their states in the last forward pass.

        Raises:
            NotImplementedError: a coarser level was requested, whose states are not kept.
            RuntimeError: the states are not kept or no longer exist.
        """
        if level != 0 or self.points is None:
            raise NotImplementedError(
                f"getTimePoints({level}): only states of the forward pass's finest level are kept"
            )
        return self.points()


def _write(path: Path, timers: ContextTimerManager, prefix: str) -> None:
    path.write_text(timers.getResultString(prefix))
