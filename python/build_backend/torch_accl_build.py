"""PEP 517 build backend: maturin, and the one torch minor that a wheel serves.

The environment variable TORCH (2.15 or 2.15.0; default below) names the torch to build for. This wrapper asks for it as a
build requirement, and writes it into the wheel: `Requires-Dist`, the entry point by which that torch finds backends, and
the name of the native module's file, which the version gate (`torch_accl/_gate.py`) goes by. Everything else is maturin's.
Tried first and rejected: a generated pyproject.toml, which a second build could overwrite.
"""

from __future__ import annotations

import base64
import contextlib
import fcntl
import hashlib
import os
import re
import zipfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

DEFAULT_TORCH = "2.15"
MATURIN = "maturin>=1.9.4,<2"
# torch's own description of how to build against it needs it.
SETUPTOOLS = "setuptools>=77.0.3"
# The first torch that finds backends by their own entry points.
FIRST_WITH_ENTRY_POINTS = (2, 14)

# Native modules in a wheel or in the source tree: maturin's own name for the one it has built, and ours for any torch.
NATIVE = re.compile(r"torch_accl/_native(_torch_\d+_\d+)?(\.[^/]*\.so)")

Settings = Mapping[str, Any] | None


def torch_minor() -> str:
    """The torch minor version to build for."""
    parts = (os.environ.get("TORCH") or DEFAULT_TORCH).split(".")
    if len(parts) < 2 or not all(part.isdigit() for part in parts[:2]):
        raise SystemExit(
            f"TORCH={os.environ['TORCH']}: expected a version such as {DEFAULT_TORCH} or {DEFAULT_TORCH}.0"
        )
    return ".".join(parts[:2])


def get_requires_for_build_wheel(config_settings: Settings = None) -> list[str]:
    """PEP 517 hook."""
    return [MATURIN, SETUPTOOLS, f"torch=={_requested_torch()}"]


def get_requires_for_build_sdist(config_settings: Settings = None) -> list[str]:
    """PEP 517 hook."""
    return [MATURIN]


def get_requires_for_build_editable(config_settings: Settings = None) -> list[str]:
    """PEP 660 hook."""
    return get_requires_for_build_wheel(config_settings)


def prepare_metadata_for_build_wheel(metadata_directory: str, config_settings: Settings = None) -> str:
    """PEP 517 hook."""
    import maturin

    name = maturin.prepare_metadata_for_build_wheel(metadata_directory, config_settings)
    folder = Path(metadata_directory) / name
    for path in (folder / "METADATA", folder / "entry_points.txt"):
        path.write_bytes(adapt(path.name, path.read_bytes(), torch_minor()))
    return name


def prepare_metadata_for_build_editable(metadata_directory: str, config_settings: Settings = None) -> str:
    """PEP 660 hook."""
    return prepare_metadata_for_build_wheel(metadata_directory, config_settings)


def build_wheel(wheel_directory: str, config_settings: Settings = None, metadata_directory: str | None = None) -> str:
    """PEP 517 hook."""
    import maturin

    with alone():
        # The given metadata is adapted already, and maturin checks it against its own.
        name = maturin.build_wheel(wheel_directory, config_settings, None)
        adapt_wheel(Path(wheel_directory) / name, torch_minor())
    return name


def build_editable(
    wheel_directory: str, config_settings: Settings = None, metadata_directory: str | None = None
) -> str:
    """PEP 660 hook."""
    import maturin

    with alone():
        name = maturin.build_editable(wheel_directory, config_settings, None)
        adapt_wheel(Path(wheel_directory) / name, torch_minor())
        adapt_tree(Path("python"), torch_minor())
    return name


def build_sdist(sdist_directory: str, config_settings: Settings = None) -> str:
    """PEP 517 hook."""
    import maturin

    return maturin.build_sdist(sdist_directory, config_settings)


@contextlib.contextmanager
def alone() -> Iterator[None]:
    """Lets one build of this source tree run at a time: all leave their module under one name before it gets its own."""
    tree = os.open(".", os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(tree, fcntl.LOCK_EX)
        yield
    finally:
        os.close(tree)


def adapt_tree(python: Path, minor: str) -> None:
    """Gives the module that an editable build has left in the source tree the name of its torch; others stay beside it."""
    for path in (python / "torch_accl").glob("_native.*.so"):
        refuse_other_module(path.name, path.read_bytes(), minor)
        path.replace(path.with_name(native_name(path.name, minor)))


def native_name(name: str, minor: str) -> str:
    """The name of a native module's file, for one torch minor."""
    return re.sub(r"_native\.", f"_native_torch_{minor.replace('.', '_')}.", name)


def refuse_other_module(name: str, data: bytes, minor: str) -> None:
    """Ends the build when a native module says that it was built for another torch."""
    if f"native module of torch_accl, built for torch {minor}.".encode() not in data:
        raise SystemExit(f"{name} was not built for torch {minor}: another build wrote it meanwhile; build again")


def adapt_wheel(path: Path, minor: str) -> None:
    """Rewrites the wheel for one torch minor: metadata and the native module's name, with their lines in RECORD."""
    adapted = path.with_suffix(".adapted")
    with zipfile.ZipFile(path) as old, zipfile.ZipFile(adapted, "w", zipfile.ZIP_DEFLATED) as new:
        changed: dict[str, bytes] = {}
        renamed: dict[str, str] = {}
        left_out: set[str] = set()
        record = next(name for name in old.namelist() if name.endswith(".dist-info/RECORD"))
        for item in old.infolist():
            if item.filename == record:
                continue
            data = old.read(item)
            if native := NATIVE.fullmatch(item.filename):
                if native[1] is not None:
                    # Of an editable installation in this source tree, perhaps for another torch.
                    left_out.add(item.filename)
                    continue
                refuse_other_module(item.filename, data, minor)
                renamed[item.filename] = item.filename = native_name(item.filename, minor)
            if ".dist-info/" in item.filename:
                adapted_data = adapt(item.filename.rsplit("/", 1)[1], data, minor)
                if adapted_data != data:
                    data = changed[item.filename] = adapted_data
            new.writestr(item, data)
        lines = old.read(record).decode().splitlines()
        kept = (line for line in lines if line.split(",", 1)[0] not in left_out)
        new.writestr(old.getinfo(record), "".join(_record_line(line, changed, renamed) + "\n" for line in kept))
    adapted.replace(path)


def adapt(name: str, data: bytes, minor: str) -> bytes:
    """The metadata file `name` for one torch minor; other files as they are."""
    text = data.decode() if name in ("METADATA", "entry_points.txt") else ""
    if name == "METADATA":
        # Headers end with the first empty line.
        headers, gap, body = text.partition("\n\n")
        return f"{headers}\nRequires-Dist: torch=={minor}.*{gap}{body}".encode()
    if name == "entry_points.txt" and tuple(map(int, minor.split("."))) < FIRST_WITH_ENTRY_POINTS:
        text = text.replace("[torch.distributed.backends]", "[torch.backends]")
        return text.replace("torch_accl:register", "torch_accl_autoload:register").encode()
    return data


def _record_line(line: str, changed: dict[str, bytes], renamed: dict[str, str]) -> str:
    name, _, rest = line.partition(",")
    data = changed.get(name)
    if data is None:
        return f"{renamed.get(name, name)},{rest}"
    digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
    return f"{name},sha256={digest},{len(data)}"


def _requested_torch() -> str:
    """2.15 asks for the newest of that minor, 2.15.0 for exactly that one."""
    asked = os.environ.get("TORCH") or DEFAULT_TORCH
    return f"{torch_minor()}.*" if asked.count(".") < 2 else asked
