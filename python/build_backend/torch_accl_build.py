"""PEP 517 build backend: maturin, plus what ties a wheel to one minor version of torch.

The environment variable TORCH (2.15 or 2.15.0; default below) names the torch to build for. This wrapper requests that torch
as a build requirement. It also writes the version into the wheel: into `Requires-Dist`, into the entry point by which that
torch finds backends, and into the file name of the native module. The version gate (`torch_accl/_gate.py`) reads that file
name. maturin does everything else. Rejected alternative: a generated pyproject.toml, because a second build could overwrite it.
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
# torch's own build support for extensions (`torch.utils.cpp_extension`) imports setuptools.
SETUPTOOLS = "setuptools>=77.0.3"
# First torch version that finds backends by an entry point group of their own.
FIRST_WITH_ENTRY_POINTS = (2, 14)

# Native modules in a wheel or in the source tree. maturin's name for the module that it has built has no version part. This
# wrapper's name has one, for any torch.
NATIVE = re.compile(r"torch_accl/_native(_torch_\d+_\d+)?(\.[^/]*\.so)")

Settings = Mapping[str, Any] | None


def torch_minor() -> str:
    """Returns the torch minor version to build for, such as `2.15`."""
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
        # `metadata_directory` is not passed on: its files are adapted already, and maturin compares them with its own.
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
    """Holds a lock, so that one build of this source tree runs at a time.

    Every build writes its native module under the same name before `adapt_tree` or `adapt_wheel` renames it.
    """
    tree = os.open(".", os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(tree, fcntl.LOCK_EX)
        yield
    finally:
        os.close(tree)


def adapt_tree(python: Path, minor: str) -> None:
    """Renames the module that an editable build left in the source tree after its torch. Modules for other torches stay."""
    for path in (python / "torch_accl").glob("_native.*.so"):
        refuse_other_module(path.name, path.read_bytes(), minor)
        path.replace(path.with_name(native_name(path.name, minor)))


def native_name(name: str, minor: str) -> str:
    """Returns the file name of a native module for one torch minor version."""
    return re.sub(r"_native\.", f"_native_torch_{minor.replace('.', '_')}.", name)


def refuse_other_module(name: str, data: bytes, minor: str) -> None:
    """Ends the build if the native module was built for another torch than `minor`; the module's docstring names its torch."""
    if f"native module of torch_accl, built for torch {minor}.".encode() not in data:
        raise SystemExit(f"{name} was not built for torch {minor}: another build wrote it meanwhile; build again")


def adapt_wheel(path: Path, minor: str) -> None:
    """Rewrites a wheel for one torch minor version: the metadata, the native module's name, and their lines in RECORD."""
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
                    # An editable installation in this source tree left this module, perhaps for another torch.
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
    """Returns the contents of the metadata file `name` for one torch minor version. Other files are returned unchanged."""
    text = data.decode() if name in ("METADATA", "entry_points.txt") else ""
    if name == "METADATA":
        # The first empty line ends the headers.
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
    """Returns the version to require: for TORCH=2.15 the newest release of that minor, for TORCH=2.15.0 exactly that one."""
    asked = os.environ.get("TORCH") or DEFAULT_TORCH
    return f"{torch_minor()}.*" if asked.count(".") < 2 else asked
