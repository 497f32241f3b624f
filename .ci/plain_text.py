"""The text that the prose gates read: comments, messages and names of sources and paragraphs of pages, with the line of each.

Owns how text is found in a file. The gates, `.ci/words` and `.ci/prose`, own what is wrong with a text. Needs nothing but Python.
"""

from __future__ import annotations

import ast
import functools
import io
import re
import subprocess
import tokenize
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
C_LIKE = (".rs", ".c", ".h", ".cpp")
# Where prose of ours is, as patterns of git.
PATTERNS = (
    "crates",
    "cpp_shim",
    "python",
    "benches",
    "tests",
    "examples",
    "docs",
    "README.md",
    "CONTRIBUTING.md",
    ".ci",
    "Makefile",
    "*.toml",
)
# Pages that programs write as a whole. Their text stands in strings of the programs, which the gates do not read.
GENERATED = ("docs/environment.md", "docs/algorithms.md", "docs/device-tables.md", "docs/performance.md")
# Between these marks a program has written.
WRITTEN = re.compile(r"<!-- [^>]*written by.*?(?=<!-- end|\Z)", re.S)


class Text(NamedTuple):
    """A comment, a docstring or a paragraph: text without its marks, and where it begins."""

    path: str
    line: int
    text: str
    # `///` and docstrings document an item; readers of a hover see nothing else.
    documents: bool = False


def tracked(*patterns: str) -> list[str]:
    """Returns the tracked files that match git's patterns, by path."""
    listed = subprocess.run(["git", "ls-files", "--", *patterns], cwd=ROOT, capture_output=True, text=True, check=True)
    return [path for path in listed.stdout.splitlines() if (ROOT / path).is_file()]


@functools.cache
def of_file(path: str, source: str) -> tuple[Text, ...]:
    """Returns the comments or paragraphs of a file. Cached, because `.ci/prose` checks their form and their words."""
    return tuple(_texts(path, source))


def _texts(path: str, source: str) -> Iterator[Text]:
    """Yields the texts of a file, by the kind that its name or first line shows."""
    if path.endswith(".md"):
        yield from paragraphs(path, source)
    elif path.endswith(C_LIKE):
        yield from joined(path, c_comments(source))
    elif path.endswith((".py", ".pyi")) or source.startswith("#!/usr/bin/env python"):
        yield from joined(path, python_comments(source))
        yield from docstrings(path, source)
    else:
        lines = enumerate(source.splitlines(), 1)
        yield from joined(path, ((n, "#", m[1]) for n, line in lines if (m := re.match(r"\s*#(?!!) ?(.*)", line))))


# A comment, a string or a character literal of Rust or C.
C_TOKEN = re.compile(
    r'(?P<mark>//[/!]?)(?P<text>[^\n]*)|/\*.*?\*/|b?r(?P<hashes>#*)"(?P<raw>.*?)"(?P=hashes)|"(?P<string>(?:\\.|[^"\\])*)"'
    r"|'(?:\\u\{[^}]*\}|\\x..|\\.|[^\\'\n])'",
    re.S,
)


def c_tokens(source: str) -> Iterator[tuple[int, re.Match[str]]]:
    """Yields each comment, string and character literal with its line."""
    line, last = 1, 0
    for match in C_TOKEN.finditer(source):
        line += source.count("\n", last, match.start())
        last = match.start()
        yield line, match


def c_comments(source: str) -> Iterator[tuple[int, str, str]]:
    """Yields line, mark and text of each `//` comment."""
    for line, match in c_tokens(source):
        if match["mark"]:
            yield line, match["mark"], match["text"].strip()


def messages(path: str, source: str) -> Iterator[Text]:
    """Yields each text of at least three words in a string literal, which a user may see. Docstrings are comments."""
    for line, text in c_strings(source) if path.endswith(C_LIKE) else python_strings(source):
        if len(re.findall(r"[A-Za-z]{2,}", text)) >= 3 and " " in text.strip():
            yield Text(path, line, text)


def c_strings(source: str) -> Iterator[tuple[int, str]]:
    """Yields line and content of each string literal, with its lines joined."""
    for line, match in c_tokens(source):
        content = match["raw"] if match["raw"] is not None else match["string"]
        if content is not None:
            yield line, re.sub(r"\\\n\s*", "", content).replace("\\n", " ")


def python_strings(source: str) -> Iterator[tuple[int, str]]:
    """Yields line and content of each string; in an f-string, values are shown as X."""
    skipped = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Expr):
            skipped.add(node.value)
        elif isinstance(node, ast.JoinedStr):
            skipped.update(node.values)
            yield node.lineno, "".join(part.value if isinstance(part, ast.Constant) else "X" for part in node.values)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and node not in skipped:
            yield node.lineno, node.value


def names(path: str, source: str) -> Iterator[Text]:
    """Yields each identifier of a source once, with the first line on which it stands."""
    if path.endswith(C_LIKE):
        code = C_TOKEN.sub(lambda match: re.sub(r"[^\n]", " ", match[0]), source)
        found = (
            (line, name) for line, text in enumerate(code.split("\n"), 1) for name in re.findall(r"[A-Za-z_]\w*", text)
        )
    else:
        tokens = tokenize.generate_tokens(io.StringIO(source).readline)
        found = ((token.start[0], token.string) for token in tokens if token.type == tokenize.NAME)
    seen = set()
    for line, name in found:
        if name not in seen:
            seen.add(name)
            yield Text(path, line, name)


def words_of(name: str) -> list[str]:
    """Returns the words of an identifier, in lower case."""
    return [word.lower() for word in re.findall(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])", name)]


def python_comments(source: str) -> Iterator[tuple[int, str, str]]:
    """Yields line, mark and text of each comment."""
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT and not token.string.startswith("#!"):
            yield token.start[0], "#", token.string[1:].strip()


def docstrings(path: str, source: str) -> Iterator[Text]:
    """Yields each paragraph of each docstring."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            first = node.body[0] if node.body else None
            if (
                isinstance(first, ast.Expr)
                and isinstance(first.value, ast.Constant)
                and isinstance(first.value.value, str)
            ):
                yield from (
                    text._replace(line=text.line + first.lineno - 1, documents=True)
                    for text in paragraphs(path, first.value.value)
                )


def joined(path: str, comments: Iterator[tuple[int, str, str]]) -> Iterator[Text]:
    """Joins comments of following lines with the same mark into paragraphs; list items and empty lines begin new ones."""
    begin, mark, parts, last = 0, "", [], -1
    fenced = False
    for line, own, text in comments:
        if text.startswith("```"):
            fenced = not fenced
            text = ""
        elif fenced:
            text = ""
        if line != last + 1 or own != mark or not text or re.match(r"[*|#-] |\d+\. ", text):
            if parts:
                yield Text(path, begin, " ".join(parts), mark != "//" and mark.startswith("//"))
            begin, mark, parts = line, own, []
        if text:
            parts.append(text)
        last = line
    if parts:
        yield Text(path, begin, " ".join(parts), mark != "//" and mark.startswith("//"))


def paragraphs(path: str, page: str) -> Iterator[Text]:
    """Yields the paragraphs and list items of a page, without code, tables, headings and parts that programs write."""
    blank = lambda match: "\n" * match[0].count("\n")  # noqa: E731, as it is used by two substitutions
    page = WRITTEN.sub(blank, page)
    page = re.sub(r"(?ms)^\s*```.*?^\s*```|<!--.*?-->", blank, page)
    begin, parts = 0, []
    for number, line in enumerate([*page.splitlines(), ""], 1):
        stripped = line.strip()
        is_text = bool(stripped) and not re.match(r"[|#]", stripped)
        if parts and (not is_text or re.match(r"(?:[*-]|\d+\.) ", stripped)):
            yield Text(path, begin, " ".join(parts))
            parts = []
        if is_text:
            begin = begin if parts else number
            parts.append(re.sub(r"^(?:[*-]|\d+\.) ", "", stripped))


def plain(text: str) -> str:
    """Returns the text with code, links and citations replaced by one word each."""
    return re.sub(r"`[^`]*`|\]\([^)]*\)|\[`?[A-Za-z_:]+`?\]", "X", text)


def sentences(text: str) -> list[str]:
    """Splits a paragraph after the marks that end a sentence."""
    return re.split(r"(?<=[.!?]) ", plain(text))
