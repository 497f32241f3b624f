"""Chooses the native module that was built for the running torch, and refuses a torch without such a module.

The layout of c10d's classes changes with every minor version of torch. A module built for another version may load and then
call the wrong function. Versions are therefore compared by name, and nothing is tried. There are two comparisons. The file
name of each module contains torch's minor version, so that modules for several torches can lie in one folder. The values
that a module reports (`built_for()`) are compared before it defines the first class that derives from a torch class.
"""

from __future__ import annotations

import importlib.machinery
import importlib.util
import os
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

__all__ = ["built", "difference", "load_native", "minor_of", "refusal"]

# Name by which all code imports the module, whatever the name of its file is.
_MODULE = f"{__package__}._native"
_HERE = Path(__file__).parent
# `_native_torch_2_15.cpython-311-x86_64-linux-gnu.so`: torch's minor version, then the suffix of the interpreter.
_FILE = re.compile(r"_native_torch_(\d+)_(\d+)(\..+)")
_SUFFIX = importlib.machinery.EXTENSION_SUFFIXES[0]
# The oldest torch that is supported. With the variable, a module for an older one loads: for tests with a GPU alone.
_FIRST = (2, 13)
_OLD_TORCH = "ACCL_TEST_OLD_TORCH"


def load_native() -> ModuleType:
    """Returns the native module for the running torch, and makes it importable as `torch_accl._native`.

    Raises:
        ImportError: no module fits the running torch, torch is missing, or it has no torch.distributed.
    """
    if _MODULE in sys.modules:
        return sys.modules[_MODULE]
    torch = _import_torch()
    why = refusal(torch.__version__, built(_HERE))
    if why is not None:
        raise ImportError(why)
    if not torch.distributed.is_available():
        raise ImportError("this torch was built without torch.distributed, which torch_accl extends")
    path = _HERE / f"_native_torch_{minor_of(torch.__version__).replace('.', '_')}{_SUFFIX}"
    loader = importlib.machinery.ExtensionFileLoader(_MODULE, str(path))
    spec = importlib.util.spec_from_file_location(_MODULE, path, loader=loader)
    assert spec is not None
    try:
        module = importlib.util.module_from_spec(spec)
        loader.exec_module(module)
    except ImportError as error:
        raise ImportError(f"{path.name} does not load with torch {torch.__version__}: {error}") from error
    why = difference(module.built_for(), torch, module._finds_pybind11())
    if why is not None:
        raise ImportError(f"{path} {why}; {_remedy(minor_of(torch.__version__))}")
    module._define()
    sys.modules[_MODULE] = module
    return module


def built(folder: Path) -> list[str]:
    """Returns the torch minor versions for which `folder` has a module that this interpreter can load, oldest first."""
    found = [match for path in folder.iterdir() if (match := _FILE.fullmatch(path.name))]
    minors = sorted((int(match[1]), int(match[2])) for match in found if match[3] == _SUFFIX)
    if found and not minors:
        others = ", ".join(sorted(match[0] for match in found))
        raise ImportError(f"torch_accl was built for another Python: found {others}, but this Python loads *{_SUFFIX}")
    return [f"{major}.{minor}" for major, minor in minors]


def refusal(running: str, built_for: list[str]) -> str | None:
    """Returns why builds for `built_for` cannot run with torch `running`, or None if one of them can."""
    minor = minor_of(running)
    if minor in built_for:
        if tuple(map(int, minor.split("."))) >= _FIRST or _OLD_TORCH in os.environ:
            return None
        return (
            f"torch {running} is older than torch {_FIRST[0]}.{_FIRST[1]}, the oldest that torch_accl supports; this build of "
            "torch_accl is for tests with a GPU alone, so install a newer torch and build torch_accl for it"
        )
    if not built_for:
        return (
            f"torch_accl was not built: this is its source folder. Install it with `TORCH={minor} pip install .` or "
            f"`make wheel TORCH={minor}`"
        )
    return (
        f"torch_accl was built for torch {' and '.join(built_for)}, but torch {running} is running. Either install the "
        f"torch it was built for (pip install 'torch=={built_for[-1]}.*'), or {_remedy(minor)}"
    )


def difference(built_for: Mapping[str, Any], torch: Any, finds_pybind11: bool) -> str | None:
    """Returns how a module, by the values it reports, differs from the running torch; None if it fits."""
    if minor_of(built_for["torch"]) != minor_of(torch.__version__):
        return (
            f"was built for torch {built_for['torch']}, despite its file name, but torch {torch.__version__} is running"
        )
    if built_for["cxx11_abi"] != bool(torch._C._GLIBCXX_USE_CXX11_ABI):
        kinds = {True: "new", False: "old"}
        return (
            f"uses the {kinds[built_for['cxx11_abi']]} C++ ABI of the standard library, but this torch {torch.__version__} "
            f"uses the {kinds[not built_for['cxx11_abi']]} one"
        )
    if not finds_pybind11:
        return (
            f"was built with {built_for['pybind11'].strip('_')}, but this torch {torch.__version__} was built with "
            "another pybind11 or compiler"
        )
    return None


def minor_of(version: str) -> str:
    """Returns major and minor version: `2.15` of `2.15.0+cpu` or `2.15.0a0+git1234`."""
    return ".".join(str(version).split("+", 1)[0].split(".")[:2])


def _remedy(minor: str) -> str:
    return f"rebuild it for this torch (TORCH={minor} pip install . or make wheel TORCH={minor} in its source folder)"


def _import_torch() -> Any:
    try:
        import torch
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        minors = built(_HERE)
        wanted = f"torch {minors[-1]}: pip install 'torch=={minors[-1]}.*'" if minors else "torch"
        raise ImportError(
            f"no torch is installed for {sys.executable}; torch_accl needs {wanted}", name="torch"
        ) from None
    return torch
