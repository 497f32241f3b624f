"""Settings of a net that users give as values: audits, and the end of a converging pass.

Owns these values, and the old keywords for them. `cycle.py` has the settings of one pass.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import wraps
from typing import Any, TypeVar

from .audit import Excess
from .cycle import check_whole

__all__ = ["Audits", "Stop", "with_old_keywords", "without_old_keywords"]


_REACTIONS = ("warn", "more", "exact")


@dataclass(frozen=True)
class Audits:
    """Which batches of an inexact mode are checked, and the reaction to a bad result.

    every: in every `every`-th batch, `step` runs the batch again, exactly, with the same random numbers. `net.audits`
        then says how wrong the batch was. That takes the time of a wave and the memory of a second set of gradients.
        0: never.
    limit, on_excess: reaction if gradients are wrong by more than this share. `"warn"` warns. `"more"` also adds an
        iteration to both passes. `"exact"` also changes to `exact-pipeline` if `micro_batches` is given and divides the
        batch, otherwise to `exact-wave`.
    probe_every, on_stall: every `probe_every`-th batch has twice as many iterations, at least three. `net.probes` then
        says by which factor the last one made residuals smaller. If it did not make them smaller, `on_stall` says what
        to do, as `on_excess` does. 0: never.

    Raises:
        ValueError: a value is not accepted.
    """

    every: int = 0
    limit: float = 0.5
    on_excess: Excess = "warn"
    probe_every: int = 0
    on_stall: Excess = "warn"

    def __post_init__(self) -> None:
        check_whole("Audits", every=self.every, probe_every=self.probe_every)
        for name in ("every", "probe_every"):
            if getattr(self, name) < 0:
                raise ValueError(f"Audits({name}={getattr(self, name)}): give a number of batches, or 0 for never")
        for name in ("on_excess", "on_stall"):
            if getattr(self, name) not in _REACTIONS:
                raise ValueError(f"Audits({name}={getattr(self, name)!r}): give one of {', '.join(_REACTIONS)}")
        if not self.limit >= 0:
            raise ValueError(f"Audits(limit={self.limit}): give a share of the gradients' norm, of at least 0")


@dataclass(frozen=True)
class Stop:
    """When a pass of the mode `"converged"` ends.

    A pass ends when its residual norm is at most `tolerance` times its first one, or after `max_iterations` iterations,
    with a warning. If the norm stalls or is not finite, the pass is run exactly instead.

    Raises:
        ValueError: a value is not accepted.
    """

    tolerance: float = 1e-4
    max_iterations: int = 30

    def __post_init__(self) -> None:
        if not 0 <= self.tolerance < 1:
            raise ValueError(
                f"Stop(tolerance={self.tolerance}): give a fraction of the first residual norm, at least 0 and below 1"
            )
        check_whole("Stop", max_iterations=self.max_iterations)
        if self.max_iterations < 1:
            raise ValueError(f"Stop(max_iterations={self.max_iterations}): give 1 or more")


# For each keyword of a value, its old keywords with the names of the value's settings. They are accepted for one release.
_OLD_KEYWORDS = {
    "audit": {
        "audit_every": "every",
        "audit_limit": "limit",
        "on_excess": "on_excess",
        "probe_every": "probe_every",
        "on_stall": "on_stall",
    },
    "stop": {"tolerance": "tolerance", "max_iterations": "max_iterations"},
}

_Class = TypeVar("_Class", bound=type)


def without_old_keywords(
    given: Mapping[str, Any],
    who: str,
    *,
    audit: Audits = Audits(),
    stop: Stop = Stop(),
    stacklevel: int,
) -> dict[str, Any]:
    """Returns keyword arguments with new keywords in the place of old ones, each of which causes a DeprecationWarning.

    who: name of the called function.
    audit, stop: the values that old keywords change.

    Raises:
        ValueError: an old and a new keyword are given for the same setting.
    """
    renamed = dict(given)
    values: dict[str, Any] = {"audit": audit, "stop": stop}
    for keyword, names in _OLD_KEYWORDS.items():
        old = {name: renamed.pop(name) for name in names if name in renamed}
        if not old:
            continue
        value = values[keyword]
        changed = ", ".join(f"{names[name]}=..." for name in old)
        remedy = f"{keyword}={type(value).__name__}({changed})"
        if keyword in renamed:
            raise ValueError(f"{who}: {', '.join(old)} and {keyword} are both given; give {remedy} alone")
        warnings.warn(
            f"{who}({', '.join(f'{name}=...' for name in old)}) is deprecated; use {remedy}",
            DeprecationWarning,
            stacklevel=stacklevel + 1,
        )
        renamed[keyword] = replace(value, **{names[name]: setting for name, setting in old.items()})
    return renamed


def with_old_keywords(net: _Class) -> _Class:
    """Makes the constructor of a net accept the old keywords."""
    made: Any = net.__init__  # type: ignore[misc]

    @wraps(made)
    def init(self: Any, *values: Any, **given: Any) -> None:
        made(self, *values, **without_old_keywords(given, net.__name__, stacklevel=2))

    net.__init__ = init  # type: ignore[misc]
    return net
