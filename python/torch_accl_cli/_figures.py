"""Pictures that commands draw with matplotlib, if it is installed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ._wrong import WrongInput

__all__ = ["empty_figure", "save"]


def empty_figure(path: Path | None) -> Any:
    """Returns an empty figure, after checking that it can be drawn and written; None without a path."""
    if path is None:
        return None
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise WrongInput("--plot: matplotlib is not installed; run `pip install matplotlib`") from None
    figure = Figure(layout="constrained")
    if path.suffix.lstrip(".").lower() not in figure.canvas.get_supported_filetypes():
        raise WrongInput(f"--plot: expected a file name with a picture suffix such as .png or .svg, got {str(path)!r}")
    if not path.parent.is_dir():
        raise WrongInput(f"--plot: the directory of {str(path)!r} does not exist")
    return figure


def save(figure: Any, path: Path) -> None:
    """Writes a figure to `path`."""
    try:
        figure.savefig(path)
    except OSError as error:
        raise WrongInput(f"--plot: {str(path)!r} cannot be written: {error.strerror}") from None
