"""Output of the build backend, from maturin's wheels and from the source tree."""

import sys
import zipfile
from pathlib import Path

import pytest
from support import BACKEND

pytestmark = pytest.mark.skipif(BACKEND != "accl", reason="about this package only")

sys.path.append(str(Path(__file__).parent.parent / "python/build_backend"))
import torch_accl_build as backend

SUFFIX = ".cpython-311-x86_64-linux-gnu.so"
MODULE = f"torch_accl/_native{SUFFIX}"
INFO = "torch_accl-1.0.dist-info"


def library(minor: str) -> bytes:
    return f"\x7fELF...The native module of torch_accl, built for torch {minor}.\0...".encode()


def wheel_of(path: Path, files: dict[str, bytes]) -> Path:
    files = {
        f"{INFO}/METADATA": b"Name: torch-accl\n\nText\n",
        f"{INFO}/entry_points.txt": b"[torch.distributed.backends]\n",
    } | files
    with zipfile.ZipFile(path, "w") as wheel:
        for name, data in files.items():
            wheel.writestr(name, data)
        wheel.writestr(
            f"{INFO}/RECORD",
            "".join(f"{name},sha256=x,{len(data)}\n" for name, data in files.items()) + f"{INFO}/RECORD,,\n",
        )
    return path


def adapted(path: Path, minor: str) -> tuple[dict[str, bytes], list[str]]:
    backend.adapt_wheel(path, minor)
    with zipfile.ZipFile(path) as wheel:
        files = {name: wheel.read(name) for name in wheel.namelist()}
    return files, files.pop(f"{INFO}/RECORD").decode().splitlines()


def test_the_native_module_of_a_wheel_gets_the_name_of_its_torch(tmp_path):
    files, record = adapted(wheel_of(tmp_path / "a.whl", {MODULE: library("2.14")}), "2.14")
    assert files[f"torch_accl/_native_torch_2_14{SUFFIX}"] == library("2.14") and MODULE not in files
    assert {line.split(",")[0] for line in record} == {*files, f"{INFO}/RECORD"}
    assert b"Requires-Dist: torch==2.14.*" in files[f"{INFO}/METADATA"]


def test_modules_of_an_editable_installation_stay_out_of_a_wheel(tmp_path):
    other = f"torch_accl/_native_torch_2_13{SUFFIX}"
    files, record = adapted(wheel_of(tmp_path / "a.whl", {other: library("2.13"), MODULE: library("2.15")}), "2.15")
    assert [name for name in files if name.endswith(".so")] == [f"torch_accl/_native_torch_2_15{SUFFIX}"]
    assert not [line for line in record if "2_13" in line]


@pytest.mark.parametrize("said", ["2.14", "2.1", "2.155"])
def test_a_wheel_with_the_module_of_another_torch_is_not_made(tmp_path, said):
    with pytest.raises(SystemExit, match=r"not built for torch 2\.15"):
        adapted(wheel_of(tmp_path / "a.whl", {MODULE: library(said)}), "2.15")


def test_editable_builds_for_several_torches_lie_in_one_folder(tmp_path):
    package = tmp_path / "torch_accl"
    package.mkdir()
    for minor in ("2.13", "2.15", "2.15"):
        (tmp_path / MODULE).write_bytes(library(minor))
        backend.adapt_tree(tmp_path, minor)
    assert {path.name: path.read_bytes() for path in package.iterdir()} == {
        f"_native_torch_2_13{SUFFIX}": library("2.13"),
        f"_native_torch_2_15{SUFFIX}": library("2.15"),
    }


def test_what_did_not_change_in_a_wheel_keeps_its_line(tmp_path):
    files, record = adapted(wheel_of(tmp_path / "a.whl", {"torch_accl/a.py": b"1", MODULE: library("2.13")}), "2.13")
    assert "torch_accl/a.py,sha256=x,1" in record
    assert b"[torch.backends]" in files[f"{INFO}/entry_points.txt"]
