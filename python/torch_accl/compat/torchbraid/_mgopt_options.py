"""The options of torchbraid's MG/Opt: names, or names with arguments, for all levels at once or for each level.

Owns the list of options, and the loss functions and optimizers that they name. `_mgopt_levels.py` and `_mgopt_cycle.py`
use them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.optim import Optimizer

__all__ = [
    "Criterion",
    "LineSearch",
    "Option",
    "Restriction",
    "criterion_of",
    "factory_arguments",
    "interpolation_of",
    "levelled",
    "line_search_of",
    "optimizer_of",
    "restriction_of",
    "shown",
    "states_of",
]


# A name, or in some places a function, and its arguments.
Option = tuple[Any, dict[str, Any]]
Restriction = Literal["injection", "linear", "transposed"]

_INTERPOLATIONS: Mapping[str, Literal["constant", "linear"]] = {
    "tb_get_injection_interp_params": "constant",
    "tb_parallel_get_injection_interp_params": "constant",
    "tb_get_linear_interp_params": "linear",
}
_RESTRICTIONS: Mapping[str, Restriction] = {
    "tb_get_injection_restrict_params": "injection",
    "tb_parallel_get_injection_restrict_params": "injection",
    "tb_get_linear_restrict_params": "linear",
}
# torchbraid has no restriction with which both objectives change alike to first order; this package adds one.
_OF_GRADIENTS: Mapping[str, Restriction] = {**_RESTRICTIONS, "accl_transposed_interp_params": "transposed"}
# Arguments that torchbraid overrides.
_ITS_OWN = ("cf", "deep_copy", "grad")
_LINE_SEARCHES: Mapping[str, tuple[str, ...]] = {
    "tb_simple_backtrack_ls": ("n_line_search", "alpha", "c1"),
    "tb_simple_ls": ("alphas",),
    "tb_simple_weighting": ("alpha",),
    "tb_adam_no_ls": (),
}


# ---- names and arguments


def levelled(what: str, given: Any, count: int) -> list[Option]:
    """Returns one option for each level, level 0 first. The last entry of a short list is repeated; a single option
    serves all levels.

    Raises:
        ValueError: the list is empty.
        TypeError: an option is neither a name nor a pair of a name and a dictionary.
    """
    each = list(given) if isinstance(given, list) else [given]
    if not each:
        raise ValueError(f"{what}=[]: give an option, or one for each level")
    options = [_option(what, option) for option in each]
    return [(name, dict(arguments)) for name, arguments in (options + [options[-1]] * count)[:count]]


def _option(what: str, given: Any) -> Option:
    name, arguments = given if isinstance(given, tuple) and len(given) == 2 else (given, {})
    if not (isinstance(name, str) or callable(name)) or not isinstance(arguments, Mapping):
        raise TypeError(f"{what}={given!r}: give a name, or a pair of a name and a dictionary, or a list of these")
    return name, dict(arguments)


def shown(option: Option) -> str:
    """Returns an option as text for a table."""
    name, arguments = option
    text = name if isinstance(name, str) else getattr(name, "__qualname__", type(name).__name__)
    # torchbraid passes the net itself as an argument of losses.
    parts = [f"{key}={value!r}" for key, value in arguments.items() if key != "model"]
    return f"{text} ({', '.join(parts)})" if parts else text


def _known(what: str, option: Option, known: Mapping[str, Any], arguments: tuple[str, ...]) -> Any:
    name, _ = option
    if not isinstance(name, str) or name not in known:
        raise ValueError(f"{what}={shown((name, {}))!r}: give one of {', '.join(known)}")
    _check_arguments(what, option, arguments)
    return known[name]


def _check_arguments(what: str, option: Option, known: tuple[str, ...]) -> None:
    wrong = sorted(set(option[1]) - set(known))
    if wrong:
        raise ValueError(
            f"{what}: {shown((option[0], {}))} has no argument {', '.join(wrong)}; it takes {', '.join(known) if known else 'none'}"
        )


# ---- transfers between levels


def interpolation_of(option: Option) -> Literal["constant", "linear"]:
    """Returns how parameters are interpolated to the finer level."""
    found: Literal["constant", "linear"] = _known("interp_params", option, _INTERPOLATIONS, _ITS_OWN)
    return found


def restriction_of(what: str, option: Option) -> Restriction:
    """Returns how parameters, or gradients, are restricted to the coarser level."""
    known = _OF_GRADIENTS if what == "restrict_grads" else _RESTRICTIONS
    found: Restriction = _known(what, option, known, _ITS_OWN)
    return found


def states_of(what: str, option: Option) -> None:
    """Checks the name of an option for states, which stay on their level as in torchbraid."""
    name = {
        "restrict_states": "tb_injection_restrict_network_state",
        "interp_states": "tb_injection_interp_network_state",
    }[what]
    _known(what, option, {name: None}, _ITS_OWN)


def factory_arguments(option: Option) -> dict[str, Any]:
    """Returns the keyword arguments of the function that creates a level's model."""
    if option[0] != "Factory":
        raise ValueError(
            f"networks={shown((option[0], {}))!r}: give 'Factory', or a pair of 'Factory' and a dictionary"
        )
    return option[1]


# ---- line searches


@dataclass(frozen=True)
class LineSearch:
    """How far a correction is followed."""

    name: str
    # Lengths to try: all of them, or one that is halved up to `trials` times.
    lengths: tuple[float, ...] = ()
    trials: int = 0
    # Minimum gain, as a share of the decrease that the slope predicts.
    gain: float = 0.0


def line_search_of(option: Option) -> LineSearch:
    """Returns the line search for a name and its arguments."""
    name, given = option
    known = _known("line_search", (name, {}), _LINE_SEARCHES, ())
    arguments = dict(given)
    # torchbraid nests them in `ls_params`, except in its default.
    inner = arguments.pop("ls_params", None)
    arguments |= dict(inner or {})
    _check_arguments("line_search", (name, arguments), known)
    missing = [key for key in known if key not in arguments]
    if missing:
        wanted = ", ".join(f"{key!r}: ..." for key in known)
        raise ValueError(
            f"line_search: {name} lacks {', '.join(missing)}; give ({name!r}, {{'ls_params': {{{wanted}}}}})"
        )
    lengths = [arguments["alpha"]] if "alpha" in known else arguments.get("alphas", ())
    trials = int(arguments.get("n_line_search", 0))
    if name != "tb_adam_no_ls" and not len(lengths):
        raise ValueError("line_search: alphas=[]; give at least one")
    if name == "tb_simple_backtrack_ls" and trials < 1:
        raise ValueError(f"line_search: n_line_search={trials}; give 1 or more")
    return LineSearch(name, tuple(float(length) for length in lengths), trials, float(arguments.get("c1", 0.0)))


# ---- optimizers


def optimizer_of(option: Option, model: nn.Module) -> Optimizer:
    """Creates an optimizer for a model's parameters on this rank, which may be none."""
    name, arguments = option
    make: Callable[..., Optimizer] = (
        name
        if callable(name)
        else _known("optims", (name, {}), {"pytorch_sgd": torch.optim.SGD, "pytorch_adam": torch.optim.Adam}, ())
    )
    return make([{"params": list(model.parameters())}], **arguments)


# ---- losses


@dataclass(frozen=True)
class Criterion:
    """A loss of the output, and the weight of the squared difference of neighbouring layers' parameters.

    The weight is divided by 4 dt.
    """

    loss: Callable[[Any, Any], Tensor]
    continuity: float = 0.0


def criterion_of(option: Option) -> Criterion:
    """Returns the criterion for a loss's name, or for a function `loss(output, target)`."""
    name, arguments = option
    arguments.pop("model", None)
    if callable(name):
        return Criterion(lambda output, target: name(output, target, **arguments))
    losses = {
        "tb_mgopt_cross_ent": functional.cross_entropy,
        "tb_mgopt_cross_ent_plus_continuity": functional.cross_entropy,
        "tb_mgopt_regression": functional.mse_loss,
    }
    is_continuous = name == "tb_mgopt_cross_ent_plus_continuity"
    loss = _known("criterions", option, losses, ("continuity_constant",) if is_continuous else ())
    return Criterion(loss, float(arguments.get("continuity_constant", 1e-4)) if is_continuous else 0.0)
