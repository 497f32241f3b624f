"""The command line. Wrong arguments end with one sentence and exit code 2; run as a program, this module only checks
them."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

from .build import ROOT
from .libraries import LIBRARIES
from .sections import SECTIONS


class Parser(argparse.ArgumentParser):
    """Prints errors as one sentence without usage."""

    def error(self, message: str) -> NoReturn:
        """Exits with one sentence."""
        self.exit(2, f"bench-peers: {message}\n")


def parse(arguments: list[str]) -> argparse.Namespace:
    """Parses the arguments; exits if they are invalid."""
    parser = Parser(
        prog="make bench-peers", description="Compares the speed with other libraries and writes docs/performance.md."
    )
    parser.add_argument(
        "--sections",
        type=chosen("section", [one.name for one in SECTIONS]),
        metavar="A,B",
        help="measure only these sections: %s" % listed(SECTIONS),
    )
    parser.add_argument(
        "--contenders",
        dest="libraries",
        type=chosen("library", [one.name for one in LIBRARIES]),
        metavar="A,B",
        help="measure only these libraries: %s" % listed(LIBRARIES),
    )
    parser.add_argument("--quick", action="store_true", help="use shorter turns, for a first impression")
    parser.add_argument("--offline", action="store_true", help="download and install nothing")
    parser.add_argument(
        "--page-only", action="store_true", help="measure nothing; write the page from the stored results"
    )
    parser.add_argument(
        "--exchange-ns",
        type=positive,
        metavar="NS",
        help="if the host moves cores, count turns whose 4-byte exchange takes about this time (default: the fastest frequent time)",
    )
    parser.add_argument(
        "--output", type=folder, default=ROOT / "docs", metavar="DIR", help="folder for the page (default: docs/)"
    )
    parser.add_argument(
        "--selftest",
        action="store_true",
        help="measure one tiny cell with libraries that need no download; write no page",
    )
    found = parser.parse_args(arguments)
    found.sections = found.sections or [one.name for one in SECTIONS]
    found.libraries = found.libraries or [one.name for one in LIBRARIES]
    return found


def listed(rows: tuple[Any, ...]) -> str:
    """Returns the names of rows as a list in words."""
    return ", ".join(one.name for one in rows)


def chosen(what: str, known: list[str]) -> Callable[[str], list[str]]:
    """Returns a parser of lists of names."""

    def names(text: str) -> list[str]:
        words = text.split(",")
        for word in words:
            if word not in known:
                raise argparse.ArgumentTypeError(f"unknown {what} `{word}`; expected some of {', '.join(known)}")
        return words

    return names


def positive(text: str) -> float:
    """Parses a number above zero."""
    try:
        value = float(text)
    except ValueError:
        value = 0
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"expected a number above zero, got `{text}`")
    return value


def folder(text: str) -> Path:
    """Parses a folder, and creates it now rather than after hours of measuring."""
    try:
        Path(text).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise argparse.ArgumentTypeError(f"cannot create folder `{text}`: {error.strerror}") from None
    return Path(text)


if __name__ == "__main__":
    parse(sys.argv[1:])
