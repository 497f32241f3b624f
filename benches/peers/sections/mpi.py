"""The transport `mpi` compared with its MPI library: frames with messages, sums with MPI_Allreduce."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
from collections.abc import Mapping
from functools import partial
from typing import Any

from torch_accl_cli._sizes import show_size

from ..build import ROOT, SOURCES, Unavailable, Workshop, finish
from ..libraries import BY_NAME, title_of
from ..report import Bench, Section
from ..tables import Table, Target, plain, ratio

PROGRAM = SOURCES / "mpi_frames.py"
LIBRARIES = ("openmpi", "mpich")
# Segments of the group: the default, and the size that docs/mpi.md recommends.
SEGMENTS = {"64KiB": {}, "512KiB": {"ACCL_SEGMENT_BYTES": "512KiB"}}
SUMS = (1 << 20, 16 << 20, 64 << 20)
# Key next to the segments: collectives that MPI runs as a whole.
WHOLE = "whole"
ABOVE_TRIP_US, OF_BANDWIDTH, OF_ALL_REDUCE, OF_ITS_OWN, IDLE_US = 2.0, 0.7, 2.0, 1.15, 0.0
STEPPED = {"all_reduce": "MPI_Iallreduce", "broadcast": "MPI_Ibcast", "all_gather": "MPI_Iallgather"}
TURNS, LIMIT_S = 11, 300


def collect(bench: Bench) -> dict[str, Any]:
    """Returns, for each library, the output of rank 0 of two, by the size of segments."""
    found: dict[str, Any] = {}
    for library in LIBRARIES:
        if library not in bench.libraries:
            continue
        try:
            measured, package = make(bench.shop, library)
            for segment, environment in SEGMENTS.items():
                bench.say(f"{title_of(library)}, segments of {segment}")
                turns = min(TURNS, bench.effort.turns)
                one = start(
                    bench.shop,
                    library,
                    [measured, str(turns), "carried", *map(str, SUMS)],
                    environment | {"PYTHONPATH": package, "ACCL_TRANSPORTS": "mpi"},
                )
                found.setdefault(library, {})[segment] = one
            bench.say(f"{title_of(library)}, collectives that it runs as a whole")
            found[library][WHOLE] = start(
                bench.shop,
                library,
                [measured, str(turns), "stepped", *map(str, SUMS)],
                {"PYTHONPATH": package},
            )
        except Unavailable as why:
            bench.missing[library] = str(why)
    if not found:
        raise Unavailable(
            "; ".join(f"{title_of(name)}: {why}" for name, why in bench.missing.items()) or "no MPI library"
        )
    return {"libraries": found}


def make(shop: Workshop, library: str) -> tuple[str, str]:
    """Builds the measuring library and the package for this MPI library; returns their paths."""
    compiler = f"mpicc.{library}"
    # The library was installed before, to be measured itself.
    if library in shop.missing:
        raise Unavailable(shop.missing[library])
    measured = shop.folder / f"frames_{library}.so"
    flags = ["-O3", "-march=native", "-Wall", "-Wextra", "-shared", "-fPIC"]
    shop.compile(
        measured,
        [compiler, *flags, f"-I{ROOT / 'python/torch_accl/include'}"],
        [SOURCES / "frames.c"],
        [],
    )
    package = ROOT / ".make" / f"mpi-{library}"
    shop.say(f"build torch-accl-mpi for {title_of(library)}")
    finish(
        [str(ROOT / ".ci" / "mpi"), "--target", str(package)],
        "torch-accl-mpi does not build",
        environment=os.environ | {"MPICC": compiler},
    )
    return str(measured), str(package)


def start(shop: Workshop, library: str, arguments: list[str], environment: Mapping[str, str]) -> dict[str, Any]:
    """Runs two ranks under the library's launcher; returns rank 0's measurements."""
    row = BY_NAME[library]
    program = shutil.which(row.launcher[0])
    if program is None:
        raise Unavailable(f"`{row.launcher[0]}` not found")
    command = [
        program,
        *row.launcher[1:],
        "-n",
        "2",
        shop.names["python"],
        str(PROGRAM),
        *arguments,
    ]
    variables = {**row.environment, **environment}
    # In a separate process group, which can be killed as a whole, whatever happens to the launcher.
    process = subprocess.Popen(
        command,
        env=os.environ | variables,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        printed, errors = process.communicate(timeout=LIMIT_S)
    except subprocess.TimeoutExpired:
        raise Unavailable(f"two ranks under `{row.launcher[0]}` took more than {LIMIT_S} s") from None
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    lines = [line for line in printed.splitlines() if line.startswith("{")]
    if not lines or process.returncode != 0:
        said = [line for line in errors.splitlines() if "Error" in line] or errors.splitlines() or ["no error message"]
        raise Unavailable(f"two ranks under `{row.launcher[0]}` have failed: {said[-1]}")
    measured: dict[str, Any] = json.loads(lines[0])
    return measured


def tables(data: dict[str, Any]) -> list[Table]:
    """Returns a table for each library: the transport, MPI, and the target."""
    return [table(found) for found in data.get("libraries", {}).values()]


def table(found: Mapping[str, Any]) -> Table:
    """Returns a table with a row for each run, even for measurements that do not depend on the group's segments: runs
    differ."""
    runs = {segment: found[segment] for segment in SEGMENTS if segment in found}
    first = next(iter(runs.values()))
    shown = Table([f"2 ranks, {first['library']}", "transport `mpi`", "MPI", "target"])
    for segment, one in runs.items():
        trip, rate = one["trip_us"], one["bytes_per_us"]
        row = partial(add_row, shown, f"group with segments of {segment}")
        row("round trip of an empty frame, us", trip, Target(trip[0] - trip[1], at_most=ABOVE_TRIP_US, unit=" us more"))
        row("stream of 64 KiB frames, MB/s", rate, Target(ratio(*rate), at_least=OF_BANDWIDTH, unit=" of MPI"))
        for size in SUMS:
            pair = one[f"all_reduce_{size}_us"]
            row(
                f"all_reduce of {show_size(size)}, us",
                pair,
                Target(ratio(*pair), at_most=OF_ALL_REDUCE, unit=" times MPI"),
            )
    for name, own in STEPPED.items():
        for size in SUMS:
            pair = found.get(WHOLE, {}).get(f"{name}_{size}_us")
            if pair is not None:
                target = Target(ratio(*pair), at_most=OF_ITS_OWN, unit=" times MPI")
                shown.row(
                    f"{name} of {show_size(size)} by `ACCL_SIDESTEP`, compared with `{own}`, us",
                    [*map(plain, pair), target],
                )
    idle = max(one["idle_us"] for one in runs.values())
    shown.row("processor time in 2 s without calls, us", [plain(idle), "", Target(idle, at_most=IDLE_US)])
    return shown


def add_row(table: Table, run: str, label: str, pair: list[float], target: Target) -> None:
    """Adds a row: the transport, MPI, and the target."""
    table.row(f"{label} ({run})", [*map(plain, pair), target])


SECTION = Section(
    name="mpi",
    title="Over MPI",
    text=(
        "Two ranks run on one host under the library's launcher, each on its own core. Both columns are measured "
        "alternately in the same processes; figures are medians.\n\n"
        "* Frames: the transport copies a frame into its buffer and out of it, as in the engine. MPI messages "
        "(`MPI_Isend`, `MPI_Irecv`, 64 in flight) are not copied.\n"
        "* Sums: `dist.all_reduce` with `ACCL_TRANSPORTS=mpi` is compared with `MPI_Allreduce`, in float32.\n"
        "* `ACCL_SIDESTEP`: a collective that MPI runs as a whole is compared with the same non-blocking "
        "collective in C. Links use `shm`.\n\n"
        "Each run is a separate job, and a figure is the median of its turns. These turns take longer than the last line "
        "of this section mentions, and they count even if the host has moved the cores. On one host, `shm` is faster than "
        "both columns; this section shows the additional cost of the transport."
    ),
    collect=collect,
    tables=tables,
)
