"""PEP 517 build backend: maturin, and the one torch minor that a wheel serves.

The environment variable TORCH (2.15 or 2.15.0; default below) names the torch to build for. This wrapper asks for it as a
build requirement, and writes it into the wheel: `Requires-Dist`, and the entry point by which that torch finds backends.
Everything else is maturin's. Tried first and rejected: a generated pyproject.toml, which a second build could overwrite.
"""

from __future__ import annotations

import base64
import hashlib
import os
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

DEFAULT_TORCH = "2.15"
MATURIN = "maturin>=1.9.4,<2"
# torch's own description of how to build against it needs it.
SETUPTOOLS = "setuptools>=77.0.3"
# The first torch that finds backends by their own entry points.
FIRST_WITH_ENTRY_POINTS = (2, 14)

# Written into the source tree by the build of the native module.
BUILD_INFO = "torch_accl/_build_info.py"

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

    # The given metadata is adapted already, and maturin checks it against its own.
    name = maturin.build_wheel(wheel_directory, config_settings, None)
    adapt_wheel(Path(wheel_directory) / name, torch_minor())
    return name


def build_editable(
    wheel_directory: str, config_settings: Settings = None, metadata_directory: str | None = None
) -> str:
    """PEP 660 hook."""
    import maturin

    name = maturin.build_editable(wheel_directory, config_settings, None)
    adapt_wheel(Path(wheel_directory) / name, torch_minor())
    return name


def build_sdist(sdist_directory: str, config_settings: Settings = None) -> str:
    """PEP 517 hook."""
    import maturin

    return maturin.build_sdist(sdist_directory, config_settings)


def adapt_wheel(path: Path, minor: str) -> None:
    """Rewrites the wheel's metadata for one torch minor, with their lines in RECORD."""
    adapted = path.with_suffix(".adapted")
    with zipfile.ZipFile(path) as old, zipfile.ZipFile(adapted, "w", zipfile.ZIP_DEFLATED) as new:
        changed: dict[str, bytes] = {}
        record = next(name for name in old.namelist() if name.endswith(".dist-info/RECORD"))
        for item in old.infolist():
            if item.filename == record:
                continue
            data = old.read(item)
            if item.filename == BUILD_INFO and f'"{minor}"' not in data.decode():
                raise SystemExit(
                    f"{item.filename} is not of torch {minor}: another build wrote it meanwhile; build again"
                )
            if ".dist-info/" in item.filename:
                adapted_data = adapt(item.filename.rsplit("/", 1)[1], data, minor)
                if adapted_data != data:
                    data = changed[item.filename] = adapted_data
            new.writestr(item, data)
        lines = old.read(record).decode().splitlines()
        new.writestr(old.getinfo(record), "".join(_record_line(line, changed) + "\n" for line in lines))
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


def _record_line(line: str, changed: dict[str, bytes]) -> str:
    data = changed.get(line.split(",", 1)[0])
    if data is None:
        return line
    digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
    return f"{line.split(',', 1)[0]},sha256={digest},{len(data)}"


def _requested_torch() -> str:
    """2.15 asks for the newest of that minor, 2.15.0 for exactly that one."""
    asked = os.environ.get("TORCH") or DEFAULT_TORCH
    return f"{torch_minor()}.*" if asked.count(".") < 2 else asked
