"""Pictures as SVG files, the same bytes for the same figures."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any


def save(figure: Any, target: Path) -> None:
    """Writes a figure of matplotlib. A path is a line, and not one for each of its points."""
    figure.savefig(target, metadata=dict.fromkeys(("Creator", "Date", "Format", "Type")))
    target.write_text(re.sub(r"\s*\n\s*(?=[A-Za-z\"])", " ", target.read_text()))
