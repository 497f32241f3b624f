"""Pictures as SVG files, with the same bytes for the same figures."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any


def save(figure: Any, target: Path) -> None:
    """Writes a figure of matplotlib. Each path is written on one line instead of a line for each point."""
    figure.savefig(target, metadata=dict.fromkeys(("Creator", "Date", "Format", "Type")))
    target.write_text(re.sub(r"\s*\n\s*(?=[A-Za-z\"])", " ", target.read_text()))
