"""all_reduce of large tensors over several lanes: worker threads of accl, compared with peers that use more than one
core."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

from torch_accl_cli._sizes import show_size

from ..build import Unavailable
from ..jobs import Host
from ..libraries import ENCODED_HELPERS, HELPERS, helpers_of
from ..measure import Cell
from ..report import Bench, Figures, Section, as_rows, cells_of
from ..tables import Table, Target, ratio

RANKS = (2, 4)
SIZES = (1 << 20, 4 << 20, 16 << 20, 64 << 20)
CELLS = cells_of("all_reduce", SIZES)
# Limit relative to one lane, if lanes share cores, and for `auto`, which must notice that.
OF_ONE_LANE = 1.10
CROWDED_CORES = 2
# Speed-up of two ranks with four lanes each at the largest size, and the machine that it needs.
TIMES_ONE_LANE = 2.5
CORES_FOR_IT, HELPERS_FOR_IT = 8, 3
PEERS = ("intelmpi", "oneccl_workers", "deepspeed_threads")
WAYS = {"shm": "shared memory", "tcp": "tcp"}


def libraries(way: str, most: int) -> list[str]:
    """Returns the libraries if a rank has cores for `most` worker threads; one worker thread is always measured."""
    plain = [f"accl_{way}_{count}" for count in HELPERS if count <= max(most, 1)]
    if way != "shm":
        return [f"accl_{way}_0", *plain, f"accl_{way}_auto"]
    encoded = [f"accl_maxmin:4_{count}" for count in ENCODED_HELPERS if count <= max(most, 1)]
    return ["accl_shm_0", *plain, "accl_shm_auto", *PEERS, *encoded]


def collect_crowded(bench: Bench) -> dict[str, Any]:
    """Measures on `CROWDED_CORES` cores, even if there are more."""
    return measured_on(bench, sorted(os.sched_getaffinity(0))[:CROWDED_CORES])


def collect(bench: Bench) -> dict[str, Any]:
    """Measures on all cores of a machine that has enough."""
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < CORES_FOR_IT:
        raise Unavailable(f"needs {CORES_FOR_IT} cores, found {len(cores)}")
    return measured_on(bench, cores)


def measured_on(bench: Bench, cores: Sequence[int]) -> dict[str, Any]:
    """Measures all numbers of worker threads alternately; each rank has its share of the cores."""
    data: dict[str, Any] = {"cores": len(cores), "sets": []}
    for ranks in RANKS:
        share = len(cores) // ranks
        hosts = tuple(
            Host(cores=tuple(cores[rank * share : (rank + 1) * share] if share else cores)) for rank in range(ranks)
        )
        for way in WAYS:
            rows = as_rows(bench.figures(ranks, libraries(way, share - 1), CELLS, hosts))
            data["sets"].append({"ranks": ranks, "way": way, **rows})
    return data


def tables(data: dict[str, Any]) -> list[Table]:
    """Returns a table for each number of ranks and transport: microseconds, then the targets."""
    return [table_of(data["cores"], one) for one in data.get("sets", [])]


def table_of(cores: int, data: dict[str, Any]) -> Table:
    """Returns the table of one set."""
    figures, ranks, way = Figures(data["figures"]), data["ranks"], data["way"]
    table = figures.table(CELLS, f"{ranks} ranks over {WAYS[way]}, us")
    one, auto = f"accl_{way}_0", f"accl_{way}_auto"

    def times(name: str, cell: Cell) -> float | None:
        return ratio(figures.us(name, cell), figures.us(one, cell))

    if cores < 2 * ranks:
        # Two lanes of each rank need more cores than there are.
        table.row(
            "1 worker / no worker",
            (Target(times(f"accl_{way}_1", cell), at_most=OF_ONE_LANE) for cell in CELLS),
        )
    table.row("`auto` / no worker", (Target(times(auto, cell), at_most=OF_ONE_LANE) for cell in CELLS))
    if ranks == 2 and way == "shm" and cores >= CORES_FOR_IT:
        four, largest = f"accl_shm_{HELPERS_FOR_IT}", CELLS[-1]
        best = figures.best(PEERS, largest)
        ahead = ratio(figures.us(four, largest), best[1] if best else None)
        blank = [""] * (len(CELLS) - 1)
        gain = ratio(figures.us(one, largest), figures.us(four, largest))
        table.row(f"no worker / {HELPERS_FOR_IT} workers", [*blank, Target(gain, at_least=TIMES_ONE_LANE)])
        table.row(f"{HELPERS_FOR_IT} workers / best other library", [*blank, Target(ahead, at_most=1)])
    measured = [name for name in figures.libraries(CELLS) if name.startswith(f"accl_{way}_")]
    left = [count for count in HELPERS if count > max(map(helpers_of, measured), default=0)]
    if left:
        table.caption = (
            f"The ranks had {cores} cores, so these numbers of workers were not measured: {', '.join(map(str, left))}."
        )
    return table


SETTING = (
    "Sums of float32. `ACCL_WORKER_COUNT` sets the number of worker threads of each rank; all numbers are "
    "measured alternately. "
)
ALL = (
    Section(
        name="lanes",
        title="all_reduce with worker threads",
        text=(
            f"{SETTING}Every rank has its own share of the cores, also for its worker threads. The section needs "
            f"{CORES_FOR_IT} cores. Targets:\n\n"
            f"* `auto` takes at most {OF_ONE_LANE:g} times the time without workers.\n"
            f"* Two ranks with {HELPERS_FOR_IT} workers each at {show_size(SIZES[-1])} are at least {TIMES_ONE_LANE:g} "
            "times as fast as without workers.\n"
            "* They are also faster than Intel MPI, than oneCCL with as many workers as cores, and than DeepSpeed's "
            "op with as many threads."
        ),
        collect=collect,
        tables=tables,
    ),
    Section(
        name="lanes_crowded",
        title="all_reduce with worker threads on shared cores",
        text=(
            f"{SETTING}The ranks share {CROWDED_CORES} cores, fewer than their channels need. Targets:\n\n"
            f"* One worker takes at most {OF_ONE_LANE:g} times the time without workers.\n"
            "* The same holds for `auto`."
        ),
        collect=collect_crowded,
        tables=tables,
    ),
)
