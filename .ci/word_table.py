"""The table of words that strangers misread, .ci/words.toml, and its use on comments, pages, messages and names.

Owns the table's format. `.ci/words` and `.ci/prose` are the gates that use it.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import plain_text
from plain_text import ROOT, Text

TABLE = Path(__file__).resolve().parent / "words.toml"
SUFFIXES = (*plain_text.C_LIKE, ".py", ".pyi", ".md", ".toml", "")
# Texts in the strings of tests are not seen by users.
NO_MESSAGES = re.compile(r"(^|/)tests/|/(accl-world/src|loom_tests)\b|_tests?\.rs$|^\.ci/selftest\.py$")


def findings(named: Sequence[str]) -> Iterator[str]:
    """Yields a line for each finding in the named files; without names, in all tracked ones."""
    files = named or [path for path in plain_text.tracked(*plain_text.PATTERNS) if wanted(path)]
    table = tomllib.loads(TABLE.read_text())
    prose, names = [], []
    for path in files:
        source = (ROOT / path).read_text()
        prose += plain_text.of_file(path, source)
        if is_code(path, source):
            names += plain_text.names(path, source)
            if not NO_MESSAGES.search(path):
                prose += plain_text.messages(path, source)
    used: set[int] = set()
    yield from check(prose, table, used)
    yield from check_names(names, table, used)
    if not named:
        yield from unused(table, used)


def wanted(path: str) -> bool:
    """Whether a file has text of ours: not the table itself, nor what programs write, nor recordings."""
    return path not in plain_text.GENERATED and path != ".ci/words.toml" and Path(path).suffix in SUFFIXES


def is_code(path: str, source: str) -> bool:
    """Whether a file is in Rust, C or Python."""
    return path.endswith((*plain_text.C_LIKE, ".py", ".pyi")) or source.startswith("#!/usr/bin/env python")


def check(texts: Iterable[Text], table: dict[str, Any], used: set[int]) -> Iterator[str]:
    """Yields a line for each word in a comment, page or message that may not stand where it is."""
    words = [(re.compile(rf"\b(?:{word['find']})\b", re.I), word["use"]) for word in table["word"]]
    for text in texts:
        # Names of the program stand in backticks.
        prose = plain_text.plain(text.text)
        for pattern, use in words:
            for match in pattern.finditer(prose):
                if not excepted(table, text, match[0], used):
                    near = " ".join(prose[max(0, match.start() - 30) : match.end() + 30].split())
                    yield f'{text.path}:{text.line}: `{match[0]}` in "...{near}...": write {use}'


def check_names(names: Iterable[Text], table: dict[str, Any], used: set[int]) -> Iterator[str]:
    """Yields a line for each identifier with a word that a stranger misreads."""
    words = {word: row["use"] for row in table["word"] for word in row.get("names", [])}
    for name in names:
        for word in plain_text.words_of(name.text):
            if word in words and not excepted(table, name, word, used):
                yield f"{name.path}:{name.line}: the name `{name.text}` has the word `{word}`: use {words[word]}"


def excepted(table: dict[str, Any], text: Text, word: str, used: set[int]) -> bool:
    """Returns whether an exception covers a word, and notes its number in `used`."""
    found = [
        number
        for number, one in enumerate(table.get("exception", []))
        if one["path"] in (text.path, "*") and one["text"] in text.text and word.lower() in one["text"].lower()
    ]
    used.update(found)
    return bool(found)


def unused(table: dict[str, Any], used: set[int]) -> Iterator[str]:
    """Yields a line for each exception that nothing needs."""
    for number, one in enumerate(table.get("exception", [])):
        if number not in used:
            yield f'{TABLE.name}: the exception for {one["path"]} ("{one["text"]}") has nothing to except: remove it'
