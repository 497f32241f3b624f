"""What a command says when it cannot do what it was asked."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

__all__ = ["WrongInput", "nearest"]


class WrongInput(Exception):
    """One sentence about the command line, a setting or what is missing here; the exit status is 2."""


def nearest(word: str, known: Iterable[str]) -> str:
    """A hint such as ` (did you mean all_reduce?)`, or nothing when no known word is near."""
    near = difflib.get_close_matches(word, list(known), n=1)
    return f" (did you mean {near[0]}?)" if near else ""
