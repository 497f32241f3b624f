"""The error of a command that cannot do what its arguments request."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

__all__ = ["WrongInput", "nearest"]


class WrongInput(Exception):
    """One sentence about the command line, a setting or something missing on this machine; the exit status is 2."""


def nearest(word: str, known: Iterable[str]) -> str:
    """Returns a hint such as ` (did you mean all_reduce?)`, or an empty string if no known word is similar."""
    near = difflib.get_close_matches(word, list(known), n=1)
    return f" (did you mean {near[0]}?)" if near else ""
