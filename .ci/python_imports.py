"""Imports between the files of the Python packages, and the imports that point upwards through an order.

Owns which imports count and how a finding reads. The caller, `.ci/check_layers`, owns the order. Needs nothing but Python.

An import inside a function counts. An import for the type checker alone (`if TYPE_CHECKING`, stubs) does not. The import
of a submodule also runs the `__init__` files of its folders; these runs do not count.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

# A file, by its path below the folder `python`: ("torch_accl", "_gate"), ("torch_accl", "__init__").
File = tuple[str, ...]
ROOT = "python"
# Files that are above all others of their folder, and need no place in its row.
TOP = ("__main__", "__init__")


class Import(NamedTuple):
    """A file that imports another, and the line of the import."""

    source: File
    line: int
    target: File

    def __str__(self) -> str:
        return f"{shown(self.source)} -> {shown(self.target)}"

    @property
    def location(self) -> str:
        return f"{ROOT}/{shown(self.source)}.py:{self.line}"


def shown(file: File) -> str:
    """Returns the path of a file or folder below the folder `python`, without suffix."""
    return "/".join(file)


def sources_in(root: Path) -> dict[File, str]:
    """Returns the text of each file of the packages in the folder `python` of a source tree. A stub is a file without
    imports."""
    folder = root / ROOT
    stubs = folder.glob("torch_accl*/**/*.pyi")
    found = {path.relative_to(folder).with_suffix("").parts: "" for path in sorted(stubs)}
    for path in sorted([*folder.glob("*.py"), *folder.glob("torch_accl*/**/*.py")]):
        found[path.relative_to(folder).with_suffix("").parts] = path.read_text()
    return found


def breaches(sources: Mapping[File, str], order: Mapping[str, list[str]], exempt: Mapping[str, str]) -> Iterator[str]:
    """Yields files without a place, imports that point upwards, and rows that nothing needs.

    Args:
        order: by folder, its files and folders, the topmost first. Each may import only those after it.
        exempt: imports that may point upwards, as `source -> target`, with the reason.
    """
    yield from misplaced(sources, order)
    imports = list(imports_of(sources))
    upward = [each for each in imports if points_up(each, order)]
    for lost in sorted(set(exempt) - {str(each) for each in upward}):
        yield f"{lost}: not an upward import; remove it from PYTHON_EXEMPT in .ci/check_layers"
    counted = [each for each in imports if str(each) not in exempt]
    for each in upward:
        if str(each) in exempt:
            continue
        *folder, name = each.target
        if name == "__init__" and each.source[: len(folder)] == tuple(folder):
            yield (
                f"{each.location}: imports {shown(each.target)}, which is above all files of its folder; import from the file that "
                "defines the name"
            )
        elif circle := route(each.target, each.source, counted):
            yield (
                f"{each.location}: imports {shown(each.target)} in a circle: {' -> '.join(map(shown, [each.source, *circle]))}; "
                "move the code that both need to a file below them"
            )
        else:
            yield (
                f"{each.location}: imports {shown(each.target)}, which is above it; move the code that it needs to a file below it, or "
                "correct PYTHON_ORDER in .ci/check_layers"
            )


def intrusions(sources: Mapping[File, str], facades: Mapping[str, list[str]]) -> Iterator[str]:
    """Yields imports of a package's internal files by a facade. The path of an internal file has a leading underscore.

    Args:
        facades: by folder, the packages of which its files import public names alone.
    """
    for each in imports_of(sources):
        of_facade = [packages for folder, packages in facades.items() if shown(each.source).startswith(f"{folder}/")]
        for package in (package for packages in of_facade for package in packages):
            parts = shown(each.target).removeprefix(package).split("/")
            if not parts[0] and any(part.startswith("_") and part not in TOP for part in parts):
                yield (
                    f"{each.location}: imports {shown(each.target)}, which is internal; import from {package} or "
                    f"{package}/extension"
                )


def misplaced(sources: Mapping[File, str], order: Mapping[str, list[str]]) -> Iterator[str]:
    """Yields files and folders that have no place in the row of their folder, and places without a file."""
    entries: dict[str, set[str]] = {}
    for file in sources:
        for depth, name in enumerate(file):
            entries.setdefault("/".join((ROOT, *file[:depth])), set()).add(name)
    for folder in sorted({*entries, *order}):
        row, existing = set(order.get(folder, ())), entries.get(folder, set()) - set(TOP)
        for name in sorted(existing - row):
            yield f"{folder}/{name}: no place in PYTHON_ORDER of .ci/check_layers; give it one above the files that it imports"
        for name in sorted(row - existing):
            yield f"{folder}/{name}: no such file; remove it from PYTHON_ORDER in .ci/check_layers"


def points_up(each: Import, order: Mapping[str, list[str]]) -> bool:
    """Returns whether an import points upwards in the folder that has both files. A name without a place is `misplaced`."""
    depth = next(depth for depth, (a, b) in enumerate(zip(each.source, each.target)) if a != b)
    row = [*TOP, *order.get("/".join((ROOT, *each.source[:depth])), ())]
    source, target = each.source[depth], each.target[depth]
    return source in row and target in row and row.index(target) < row.index(source)


def route(start: File, end: File, imports: list[Import]) -> list[File]:
    """Returns the files on a shortest route of imports from start to end; empty if there is none."""
    routes = [[start]]
    seen = {start}
    for files in routes:
        if files[-1] == end:
            return files
        for each in imports:
            if each.source == files[-1] and each.target not in seen:
                seen.add(each.target)
                routes.append([*files, each.target])
    return []


def imports_of(sources: Mapping[File, str]) -> Iterator[Import]:
    """Yields the imports of files by one another. A package stands for its `__init__`."""
    for file, text in sources.items():
        for line, path in paths_in(ast.parse(text), file[:-1]):
            # The last part is a file or a name that a file defines.
            candidates = (part for parts in (path, path[:-1]) for part in (parts, (*parts, "__init__")))
            target = next((part for part in candidates if part in sources), file)
            if target != file:
                yield Import(file, line, target)


def paths_in(node: ast.AST, package: File) -> Iterator[tuple[int, File]]:
    """Yields the line and the absolute path of each name that the code of a package's file imports."""
    children: Iterable[ast.AST] = ast.iter_child_nodes(node)
    match node:
        case ast.Import():
            yield from ((node.lineno, tuple(alias.name.split("."))) for alias in node.names)
        case ast.ImportFrom():
            module = absolute("." * node.level + (node.module or ""), package)
            yield from ((node.lineno, (*module, alias.name)) for alias in node.names)
        # A name that is computed is not known here.
        case ast.Call(
            func=ast.Name(id="import_module") | ast.Attribute(attr="import_module"), args=[ast.Constant(str(name)), *_]
        ):
            yield node.lineno, absolute(name, package)
        case ast.If(test=ast.Name(id="TYPE_CHECKING") | ast.Attribute(attr="TYPE_CHECKING")):
            children = node.orelse
    for child in children:
        yield from paths_in(child, package)


def absolute(name: str, package: File) -> File:
    """Returns the path of a module's name, which is relative to the package if dots precede it."""
    path = name.lstrip(".")
    level = len(name) - len(path)
    base = package[: len(package) - level + 1] if level else ()
    return (*base, *path.split(".")) if path else base
