"""Generated blocks in pages that are otherwise written by hand. Owns the lines that mark them."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path


def marks(name: str, command: str) -> tuple[str, str]:
    """Returns the lines before and behind a block; the first names the command that writes it."""
    return f"<!-- {name}: written by `{command}`, not edited by hand -->", f"<!-- end of {name} -->"


def replaced(page: str, name: str, command: str, lines: Iterable[str]) -> str:
    """Returns the text of a page with other lines in one of its blocks.

    Raises:
        ValueError: the page does not have the block's two marks once each, in their order.
    """
    first, last = marks(name, command)
    before, found, rest = page.partition(first + "\n")
    _, ended, after = rest.partition(last + "\n")
    if not (found and ended) or first in rest or last in before + after:
        raise ValueError(f"the page needs these two lines, once each and in this order: {first} and {last}")
    return "\n".join([before + first, "", *lines, "", last + "\n" + after])


def write(page: Path, name: str, command: str, lines: Iterable[str]) -> None:
    """Replaces a block of a page.

    Raises:
        ValueError: see `replaced`.
    """
    page.write_text(replaced(page.read_text(), name, command, lines))
