"""The settings of a solve, as a user gives them.

Owns the settings of one pass. The crate `accl-multigrid` defines their meaning for a plan.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

__all__ = ["Cycle", "check_backward", "check_type", "check_whole"]


Reuse = Literal["auto", "nothing", "values", "all"]


@dataclass(frozen=True)
class Cycle:
    """A solve by multigrid over layers (MGRIT).

    levels: number of levels, including the finest. One level is a wave, which is exact.
    factor: number of steps of a level that make one step of the next level: one number, or one for each level but the
        coarsest.
    iterations: number of iterations, the start included.
    relax: `"F"`, `"FCF"`, or how often C-points are relaxed in addition. Give one value for all levels, or one for each
        level from the finest on; the last one holds for all later levels.
    shape: `"V"` or `"F"`.
    start: `"coarsest"` begins with the solution of the coarsest level, and `"full"` improves it on every level.
        `"guess"` begins with the states that the net's `guess` returns; only then may `iterations` be 0.
    norms: `"lagged"`: residuals are known one iteration later, and no rank waits for them. `"blocking"`: each iteration
        waits for its norm. `"none"`: no norms.
    coarser: levels, from 1 on, whose states the net's `spatial` makes coarser than the states of the level before.
    reuse: results that are not computed a second time: `"nothing"`, `"values"` or `"all"`. The setting changes no bit
        of a result. `"auto"` takes the fastest for the number of ranks.

    Raises:
        ValueError: a value is not accepted; the message says what to give.
    """

    levels: int = 2
    factor: int | Sequence[int] = 4
    iterations: int = 2
    relax: str | int | Sequence[str | int] = "F"
    shape: Literal["V", "F"] = "V"
    start: Literal["coarsest", "full", "guess"] = "coarsest"
    norms: Literal["lagged", "blocking", "none"] = "lagged"
    coarser: int | Sequence[int] = ()
    reuse: Reuse = "auto"

    def __post_init__(self) -> None:
        for name in ("factor", "relax"):
            given = getattr(self, name)
            if not isinstance(given, int | str):
                # Plans are cached by their cycle, so its fields must be hashable.
                object.__setattr__(self, name, tuple(given))
        object.__setattr__(self, "coarser", (self.coarser,) if isinstance(self.coarser, int) else tuple(self.coarser))
        check_whole("Cycle", levels=self.levels, iterations=self.iterations)
        if self.levels < 1:
            raise ValueError(f"Cycle(levels={self.levels}): give 1 or more")
        if self.iterations < 1 and (self.start != "guess" or self.iterations < 0):
            raise ValueError(
                f"Cycle(iterations={self.iterations}): the first iteration computes the start, so give 1 or more"
            )
        self.factors()
        self.relaxations()
        self.coarser_levels()
        choices = {
            "shape": ("V", "F"),
            "start": ("coarsest", "full", "guess"),
            "norms": ("lagged", "blocking", "none"),
            "reuse": ("auto", "nothing", "values", "all"),
        }
        for name, known in choices.items():
            if getattr(self, name) not in known:
                raise ValueError(f"Cycle({name}={getattr(self, name)!r}): give one of {', '.join(known)}")

    def factors(self) -> list[int]:
        """Returns one factor for each level but the coarsest."""
        factors = [self.factor] * (self.levels - 1) if isinstance(self.factor, int) else list(self.factor)
        if len(factors) != self.levels - 1:
            raise ValueError(
                f"Cycle(levels={self.levels}, factor={factors}): give {self.levels - 1} factors, or one number for all"
            )
        for factor in factors:
            if factor < 2:
                raise ValueError(f"Cycle(factor={self.factor}): a coarsening factor is 2 or more")
        return factors

    def coarser_levels(self) -> list[bool]:
        """Returns for each level but the finest whether its states are coarser than the states of the level before."""
        given = self.coarser if isinstance(self.coarser, tuple) else ()
        wrong = [level for level in given if not 1 <= level < self.levels]
        if wrong:
            raise ValueError(
                f"Cycle(levels={self.levels}, coarser={list(given)}): give levels from 1 to {self.levels - 1}"
            )
        return [level in given for level in range(1, self.levels)]

    def relaxations(self) -> list[int]:
        """Returns how often C-points are relaxed, from the finest level on."""
        each = [self.relax] if isinstance(self.relax, str | int) else list(self.relax)
        return [self._relaxations_of(relax) for relax in each]

    def _relaxations_of(self, relax: str | int) -> int:
        if isinstance(relax, str):
            # Accepts F, FCF, FCFCF and so on.
            if relax == "F" + "CF" * (len(relax) // 2):
                return len(relax) // 2
        elif relax >= 0:
            return relax
        raise ValueError(f"Cycle(relax={self.relax!r}): give F, FCF, or a number of at least 0")

    def reuse_for(self, ranks: int, *, is_adjoint: bool) -> str:
        """Returns `reuse`, with `"auto"` resolved for the number of ranks.

        With `"all"`, the coarsest-level solve makes final evaluations. Other ranks wait longer for it, and save a part
        of the last sweep.
        """
        if self.reuse != "auto":
            return self.reuse
        # A recorded evaluation costs little more than one that is not recorded. Gradients of parameters cost about as
        # much as gradients of the input.
        return "all" if ranks <= (1 if is_adjoint else 8) else "values"


def check_type(name: str, value: Any, kind: type, example: str) -> None:
    """Raises `TypeError` unless the argument `name` is of this type."""
    if not isinstance(value, kind):
        raise TypeError(f"{name}={value!r}: give a {kind.__name__}, such as {example}")


def check_whole(who: str, **numbers: Any) -> None:
    """Raises `TypeError` unless all these arguments are integers."""
    for name, number in numbers.items():
        if isinstance(number, bool) or not hasattr(number, "__index__"):
            raise TypeError(f"{who}({name}={number!r}): give an integer")


def check_backward(cycle: Cycle) -> None:
    """Raises `ValueError` for a cycle that a backward pass cannot use."""
    check_type("bwd", cycle, Cycle, "Cycle(iterations=1)")
    if cycle.start == "guess":
        raise ValueError("bwd=Cycle(start='guess'): a guess provides states, not gradients; give another start")
