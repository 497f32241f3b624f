"""What a state is saved as, and what is read of it.

Owns the format of `state_dict`. It goes through `torch.save` (also with `weights_only`) and through
`torch.distributed.checkpoint`, which makes a key of every path of dicts, keeps one value of all ranks for each key, and fills in
only the keys that are there before. So what ranks have in common is a value for each key, whatever is in it (a tuple is not looked
into), and what a rank has for itself is under a key with its number.
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

# The first had no number: dicts of what one rank carried over, and nothing that said which rank's they were.
VERSION = 2

Residuals = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Saved:
    """What is kept of a state.

    Attributes:
        world: ranks of the group.
        step: how many times all gradients went through.
        calls: of each module of FSDP2.
        decided: codecs that were decided on while training went on.
        choices: those of `codec="auto"`.
        scale: of the gradient scaler; None if there was none.
        residuals: what a rank carried over of its contributions, by name.
        residuals_of_sums: and of sums.
        rank: that rank; None if it is not known, or if nothing was carried over.
        carried_at: the step of these; None as of `rank`.
        version: of the format.
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
        """To be saved by each rank for itself, or of all ranks together by `torch.distributed.checkpoint`."""
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
        """What this rank goes on from.

        Raises:
            ValueError: it is of a newer format, or names a codec that there is not.
        """
        version = saved.get("version", 1)
        if version > VERSION:
            raise ValueError(
                f"compression: the state was saved in version {version}; this version of torch_accl knows up to {VERSION}"
            )
        if version == 1:
            carried = (None, None, saved["losses"].items(), saved["losses_of_sums"].items())
        else:
            # One that another rank saved for itself has no such key, and is told by its number.
            rows = saved["residuals"]
            carried = rows.get(f"rank {rank}") or next(iter(rows.values()), (None, None, (), ()))
        of_rank, carried_at, residuals, residuals_of_sums = carried
        return cls(
            world=saved["world"],
            step=saved["step"],
            calls=dict(saved["calls"]),
            decided={name: None if codec is None else _known(*codec) for name, codec in _items(saved["decided"])},
            choices={name: _known_choice(choice) for name, choice in _items(saved["choices"])},
            scale=saved.get("scale"),
            residuals=_as_written_to(residuals),
            residuals_of_sums=_as_written_to(residuals_of_sums),
            rank=of_rank if residuals else None,
            carried_at=carried_at if residuals else None,
            version=version,
        )


def _items(rows: Any) -> Any:
    return rows.items() if isinstance(rows, Mapping) else rows


def _known(*codecs: str) -> Any:
    for codec in codecs:
        try:
            facts(codec)
        except ValueError as error:
            raise ValueError(
                f"compression: the state was saved with a codec that this version of torch_accl does not know ({error}); load it with "
                "the version that saved it"
            ) from None
    return codecs


def _known_choice(choice: Mapping[str, Any]) -> Choice:
    _known(choice["codec"])
    return Choice(**choice)


def _pairs(residuals: Residuals) -> tuple[tuple[str, torch.Tensor], ...]:
    return tuple((name, residual.clone()) for name, residual in residuals.items())


def _as_written_to(pairs: Any) -> Residuals:
    """Copies, as the engine needs them."""
    return {name: residual.detach().to("cpu", torch.float32, copy=True).contiguous() for name, residual in pairs}
