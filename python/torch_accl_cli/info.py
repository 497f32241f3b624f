"""`accl info`: facts about this installation and this machine; under a launcher, about the ranks of the job."""

from __future__ import annotations

import argparse
import json
import sys
from importlib.metadata import EntryPoint
from typing import Any

from ._listing import add_json, print_found
from ._package import load_native
from ._wrong import WrongInput

__all__ = ["NAME", "SUMMARY", "add_arguments", "run"]

NAME = "info"
SUMMARY = "versions and properties of this machine, or of the ranks of a job"

_DESCRIPTION = """\
Prints versions, the properties that a process on this machine offers its peers, and the constants by which it chooses algorithms.
Under torchrun, mpirun or srun, or with --ranks: prints the ranks, the cores that each may use, the links between them, and the
algorithms of float32 calls."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the command's arguments."""
    parser.description = _DESCRIPTION
    add_json(parser)
    parser.add_argument("--calibrate", action="store_true", help="measure the constants of the cost model again")
    parser.add_argument("--ranks", type=int, metavar="N", help="start N ranks as `accl run` does, and show them")
    parser.add_argument(
        "--connect-all",
        action="store_true",
        help="with several ranks, create all links first; a new group has only some links, and calls create the others",
    )


def run(given: argparse.Namespace) -> int:
    """Prints the facts."""
    # The next import loads torch, which may be missing or refused.
    load_native()
    from .bench.rank_info import given_rank_info

    rank_info = given_rank_info()
    if given.ranks is not None:
        if rank_info is not None:
            # All ranks find the same error, and only rank 0 reports it.
            if rank_info.rank != 0:
                return 2
            raise WrongInput(
                f"--ranks: {rank_info.launcher} has already started {rank_info.world} ranks; leave out --ranks"
            )
        return _start_ranks(given)
    if rank_info is not None and rank_info.world > 1 and not given.calibrate:
        return _run_in_job(given, rank_info)
    if given.connect_all:
        raise WrongInput("--connect-all: needs several ranks; start them with torchrun, mpirun, srun or --ranks")
    return print_found(given, lambda native: facts(native, given.calibrate), _show)


def _start_ranks(given: argparse.Namespace) -> int:
    """Starts ranks of this same command, each on its own cores."""
    import os

    from .run.agent import Order, run_here

    if given.ranks < 2 or given.calibrate:
        raise WrongInput(
            "--calibrate: measures in one process; leave out --ranks"
            if given.calibrate
            else f"--ranks: expected 2 or more, got {given.ranks}"
        )
    options = [
        option for option, is_given in (("--json", given.json), ("--connect-all", given.connect_all)) if is_given
    ]

    def report(**what: Any) -> None:
        if what.get("status"):
            print(f"accl info: rank {what['ended']} has failed", file=sys.stderr)

    command = [sys.executable, "-m", "torch_accl_cli", "info", *options]
    return run_here(Order(command, os.getcwd(), environment={}, ranks=given.ranks, world=given.ranks), report)


def _run_in_job(given: argparse.Namespace, rank_info: Any) -> int:
    """Runs as a rank of a job; rank 0 prints."""
    from . import _job
    from .bench.processes import one_sentence

    try:
        job = _job.find(rank_info, given.connect_all)
    except WrongInput:
        # All ranks find the same error, and only rank 0 reports it.
        if rank_info.rank != 0:
            return 2
        raise
    except (RuntimeError, ValueError, OSError) as error:
        print(f"accl info: rank {rank_info.rank}: {one_sentence(error)}", file=sys.stderr)
        return 1
    if rank_info.rank == 0:
        print(json.dumps(job, indent=2) if given.json else _job.show(job))
    return 0


def facts(native: Any, calibrate: bool) -> dict[str, Any]:
    """Returns versions, what a process on this machine would offer its peers, and the constants for choosing algorithms."""
    import platform

    import torch
    from torch_accl._transports import announce_transports

    packages = announce_transports()
    built_for = native.built_for()
    return {
        "torch_accl": built_for["version"],
        "built_for_torch": ".".join(built_for["torch"].split(".")[:2]),
        "torch": torch.__version__,
        "python": platform.python_version(),
        **native.host_facts(),
        **_accelerators(native),
        # A package's requirements are known only when it is loaded, and loading it may involve all ranks of a job.
        "loaded_with_the_first_group": [f"{one.name} of {_package(one)}" for one in packages],
        "calibration": native.calibration(calibrate),
    }


def _accelerators(native: Any) -> dict[str, Any]:
    """Returns the accelerators that torch finds here, and how calls on their tensors go; else why there are none."""
    import torch

    kind = torch.accelerator.current_accelerator()
    count = torch.accelerator.device_count() if kind is not None else 0
    if kind is None or not count:
        missing = (
            "this torch was built for CPU tensors alone"
            if kind is None
            else f"torch finds no device of its type {kind.type}"
        )
        return {"accelerators": f"none: {missing}"}
    name_of = getattr(torch.get_device_module(kind), "get_device_name", lambda index: "")

    def shown(index: int) -> str:
        try:
            name = name_of(index)
        except RuntimeError as error:
            # A driver that is too old, or a device that another process has for itself.
            name = f"(cannot be used: {str(error).splitlines()[0]})"
        return f"{kind.type}:{index} {name}".strip()

    [setting] = [row["value"] for row in native.config_rows() if row["name"] == "ACCL_GPU_ROUTE"]
    return {
        "accelerators": [shown(index) for index in range(count)],
        "accelerator_route": "staged: copies to pinned host memory and back",
        "accelerator_route_inside_a_host": _route_inside_a_host(kind.type, setting),
        "accelerator_codecs": (
            "on the GPU, by kernels that the first call compiles; else on the CPU"
            if kind.type in _WITH_DRIVERS
            else f"on the CPU: there are no kernels for {kind.type}"
        ),
    }


# Types of devices whose driver the native module can call. torch names ROCm's devices cuda, too.
_WITH_DRIVERS = ("cuda",)


def _route_inside_a_host(kind: str, setting: str) -> str:
    """Returns how large collectives go if all ranks are on one host, for a value of ACCL_GPU_ROUTE. Opens no device."""
    if setting == "staged":
        return "staged, by ACCL_GPU_ROUTE=staged"
    failure = {"auto": "staged if it fails", "peer": "an error if it fails"}[setting]
    if kind not in _WITH_DRIVERS:
        failure = {"auto": "staged", "peer": "refused"}[setting]
        return f"{failure}, by ACCL_GPU_ROUTE={setting}: devices of the type {kind} do not share memory"
    return f"peer memory, tried by the first large collective of a group; {failure}, by ACCL_GPU_ROUTE={setting}"


def _package(entry: EntryPoint) -> str:
    return f"{entry.dist.name} {entry.dist.version}" if entry.dist is not None else entry.module


def _show(facts: dict[str, Any]) -> str:
    if not facts["loaded_with_the_first_group"]:
        facts = {name: value for name, value in facts.items() if name != "loaded_with_the_first_group"}

    def text(value: Any) -> str:
        return ", ".join(map(str, value)) if isinstance(value, list) else str(value)

    calibration = facts["calibration"]
    age = "" if calibration["age_s"] is None else f", written {_age(calibration['age_s'])} ago"
    shown = {**facts, "calibration": calibration["source"] + age}
    bounds = dict.fromkeys(calibration["at_bounds"], " (at its bound: the measurement does not determine it)")
    shown |= {f"  {name}": text(value) + bounds.get(name, "") for name, value in calibration["constants"].items()}
    width = max(map(len, shown))
    return "\n".join(f"{name.ljust(width)}  {text(value)}" for name, value in shown.items())


def _age(seconds: int) -> str:
    for unit, name in ((86400, "days"), (3600, "hours"), (60, "minutes")):
        if seconds >= 2 * unit:
            return f"{seconds // unit} {name}"
    return f"{seconds} seconds"
