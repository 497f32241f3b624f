"""State that a resumed run needs, in addition to a net's weights and the optimizer's state.

Owns the form in which mode, cycles and batch are saved. Audits and probes may have changed them since the net was
built, so the net's arguments do not determine them.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping
from dataclasses import fields
from typing import TYPE_CHECKING, Any

from .._net.evaluation import Layers
from .auto import Choice
from .cycle import Cycle, check_backward
from .solver import Shared

if TYPE_CHECKING:
    from .._model import Model

__all__ = ["SolverState"]


_FORMAT = 1
_KEYS = ("mode", "evaluation", "fwd", "bwd", "batch", "evaluations", "choices")


class SolverState:
    """The solver settings from the next batch on: mode, cycles, batch numbers, and the choices of the mode `auto`.

    It is the same on all ranks. It has the interface that `torch.distributed.checkpoint` requires of an object to save,
    and `torch.save` takes its `state_dict()`.
    """

    def __init__(self, net: Model) -> None:
        self._net = net

    @property
    def layers(self) -> Layers:
        """This rank's layers."""
        return self._net.current.layers

    @property
    def shared(self) -> Shared:
        """The state that does not depend on the form of a batch."""
        return self._net.current.shared

    def state_dict(self) -> dict[str, Any]:
        """Returns plain numbers, strings and tuples. Parameters are not included; `net.state_dict()` has them."""
        net, shared = self._net, self.shared
        return {
            "format": _FORMAT,
            "mode": net.mode,
            "evaluation": net.evaluation,
            "fwd": _plain(net.fwd),
            "bwd": _plain(net.bwd),
            "batch": shared.number,
            "evaluations": shared.evaluations,
            # Not a dict, because its keys would differ between runs, and a checkpoint is loaded by the keys that exist.
            "choices": tuple((key, c.mode, tuple(c.seconds.items())) for key, c in net._choices.items()),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continues as the saved net would have. All ranks load the same state.

        Raises:
            ValueError: the state has another format, or does not fit this net. The net stays as it was.
        """
        if state.get("format") != _FORMAT:
            raise ValueError(
                f"the saved state of a solver has format {state.get('format')}, and this version reads format {_FORMAT}; give the result of net.solver.state_dict()"
            )
        missing = [key for key in _KEYS if key not in state]
        if missing:
            raise ValueError(
                f"the saved state of a solver lacks {', '.join(missing)}; give the result of net.solver.state_dict()"
            )
        net = self._net
        try:
            cycles = {"forward": _cycle(state["fwd"]), "adjoint": _cycle(state["bwd"])}
            for name, cycle in cycles.items():
                # An unchanged cycle is not checked: in an exact mode it may have more levels than the net.
                if cycle != net._cycles[name]:
                    net.check_cycle(cycle)
            check_backward(cycles["adjoint"])
            net.check_mode(state["mode"], cycles)
            net.check_evaluation(state["evaluation"], cycles)
            batch, evaluations = (_count(state, name) for name in ("batch", "evaluations"))
            choices = {}
            for key, mode, seconds in state["choices"]:
                net.check_mode(mode, cycles)
                choices[operator.index(key)] = Choice(
                    mode, {str(of): float(each) for of, each in dict(seconds).items()}
                )
        except Exception as error:
            raise ValueError(f"the saved state of a solver does not fit this net: {error}") from error
        net._cycles, net._mode, net._evaluation = cycles, state["mode"], state["evaluation"]
        net.batch, self.shared.evaluations = batch, evaluations
        net._choices = choices
        # The choices hold for the net as it is at its next batch.
        net._state_of_choices = None


def _plain(cycle: Cycle) -> dict[str, Any]:
    return {each.name: getattr(cycle, each.name) for each in fields(cycle)}


def _cycle(saved: Mapping[str, Any]) -> Cycle:
    return Cycle(**saved)


def _count(state: Mapping[str, Any], name: str) -> int:
    number = operator.index(state[name])
    if number < 0:
        raise ValueError(f"{name}={number}: give a batch number of at least 0")
    return number
