"""The saved form of a state, and what is read from it.

This module owns the format of `state_dict`. The format must survive `torch.save` (also with `weights_only`) and
`torch.distributed.checkpoint`. The latter makes a key of every path of dicts, and keeps one value for each key over all ranks.
It loads only keys that exist already. Data that ranks have in common is therefore one value per key, with tuples in place of
dicts, because tuples are not traversed. Data of one rank is under a key that contains its number.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

import torch

from ._auto import Choice
from ._codecs import facts
from ._settings import Codec

__all__ = ["VERSION", "Saved"]

VERSION = 2

Residuals = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Saved:
    """The parts of a state that are saved.

    Attributes:
        world: number of ranks of the group.
        step: how many times all gradients were sent.
        calls: number of calls of each FSDP2 module.
        decided: codecs that were changed during training, by parameter.
        choices: choices of `codec="auto"`.
        scale: scale of the gradient scaler; None if there was none.
        residuals: a rank's residuals of contributions, by name.
        residuals_of_sums: a rank's residuals of sums, by name.
        rank: the rank that these residuals belong to; None if there are no residuals.
        carried_at: the step of the residuals; None like `rank`. Pickled states have this name.
        version: version of the format.
    """

    world: int
    step: int
    calls: dict[str, int]
    decided: dict[str, Codec | None]
    choices: dict[str, Choice]
    scale: float | None
    residuals: Residuals = field(default_factory=dict)
    residuals_of_sums: Residuals = field(default_factory=dict)
    rank: int | None = None
    carried_at: int | None = None
    version: int = VERSION

    def written(self) -> dict[str, Any]:
        """Returns the dict to save: each rank saves its own, or `torch.distributed.checkpoint` combines the dicts of all ranks."""
        return {
            "version": VERSION,
            "world": self.world,
            "step": self.step,
            "calls": tuple(self.calls.items()),
            "decided": tuple(self.decided.items()),
            "choices": tuple((name, asdict(choice)) for name, choice in self.choices.items()),
            "scale": self.scale,
            "residuals": {
                f"rank {self.rank}": (self.rank, self.step, _pairs(self.residuals), _pairs(self.residuals_of_sums))
            },
        }

    @classmethod
    def read(cls, saved: Mapping[str, Any], rank: int) -> Saved:
        """Returns the saved state for rank `rank`.

        Raises:
            ValueError: the format is another one, or a codec in it does not exist.
        """
        version = saved.get("version")
        if version != VERSION:
            raise ValueError(
                f"compression: the state was saved in version {version}; this version of torch_accl supports version "
                f"{VERSION}"
            )
        # A state that another rank saved for itself lacks this key. The number in its row then shows the other rank.
        rows = saved["residuals"]
        loaded = rows.get(f"rank {rank}") or next(iter(rows.values()), (None, None, (), ()))
        of_rank, carried_at, residuals, residuals_of_sums = loaded
        return cls(
            world=saved["world"],
            step=saved["step"],
            calls=dict(saved["calls"]),
            decided={name: None if codec is None else _known(*codec) for name, codec in saved["decided"]},
            choices={name: _known_choice(choice) for name, choice in saved["choices"]},
            scale=saved["scale"],
            residuals=_as_written_to(residuals),
            residuals_of_sums=_as_written_to(residuals_of_sums),
            rank=of_rank if residuals else None,
            carried_at=carried_at if residuals else None,
        )


def _known(*codecs: str) -> Any:
    for codec in codecs:
        try:
            facts(codec)
        except ValueError as error:
            raise ValueError(
                "compression: the state was saved with a codec that this version of torch_accl does not support "
                f"({error}); load it with the version that saved it"
            ) from None
    return codecs


def _known_choice(choice: Mapping[str, Any]) -> Choice:
    _known(choice["codec"])
    return Choice(**choice)


def _pairs(residuals: Residuals) -> tuple[tuple[str, torch.Tensor], ...]:
    return tuple((name, residual.to("cpu", copy=True)) for name, residual in residuals.items())


def _as_written_to(pairs: Any) -> Residuals:
    """Returns contiguous float32 copies on the CPU, as the engine needs them."""
    return {name: residual.detach().to("cpu", torch.float32, copy=True).contiguous() for name, residual in pairs}
