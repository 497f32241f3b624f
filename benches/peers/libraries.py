"""The libraries and set-ups that are compared, one row each. Owns names and how ranks are started;
`build.py` builds the programs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from types import MappingProxyType


class Level(Enum):
    """The layer at which a library is called."""

    ENGINE = "C, C++ or Rust, without torch"
    TORCH = "through torch"


@dataclass(frozen=True)
class Library:
    """A row: `title` is for the page, `name` for files, settings and results."""

    name: str
    title: str
    level: Level
    # The program, and its arguments before and after `DIR RANK RANKS CORE`; `{...}` are replaced by names from
    # `Workshop`.
    program: tuple[str, ...]
    after: tuple[str, ...] = ()
    # A launcher starts all ranks, each as a separate application, because rank and core are arguments.
    launcher: tuple[str, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    # Added when there are more ranks than cores.
    crowded: tuple[str, ...] = ()
    # Needs no download, and no compiler that `make test` does not need.
    at_home: bool = False
    # Remark on the set-up for the page.
    note: str = ""


TORCH_RANK = str(Path(__file__).resolve().parent / "ranks" / "torch_rank.py")


def through_torch(
    name: str,
    title: str,
    note: str = "",
    at_home: bool = False,
    backend: str = "",
    environment: Mapping[str, str] = MappingProxyType({}),
) -> Library:
    """Returns a row for `torch_rank.py`."""
    return Library(
        name,
        title,
        Level.TORCH,
        ("{python}", TORCH_RANK),
        (backend or name, "{libraries}"),
        environment={"OMP_NUM_THREADS": "1", **environment},
        at_home=at_home,
        note=note,
    )


def with_algorithm(algorithm: str) -> Library:
    """Returns a row for accl with a fixed algorithm."""
    environment = {"ACCL_ALGORITHM": f"all_reduce={algorithm}"}
    note = f"`ACCL_ALGORITHM=all_reduce={algorithm}`"
    name, title = f"accl_{algorithm}", f"accl through torch, `{algorithm}`"
    return through_torch(name, title, note, at_home=True, backend="accl", environment=environment)


def with_codec(backend: str, codec: str, note: str) -> Library:
    """Returns a row for a backend with compressed messages."""
    title = f"{backend} through torch, {codec}"
    return through_torch(f"{backend}_{codec}", title, note, at_home=True, backend=f"{backend}+{codec}")


def with_group_codec(codec: str) -> Library:
    """Returns a row for an accl group that compresses all calls."""
    name, title = f"accl_all_{codec}", f"accl through torch, all calls {codec}"
    note = f'`Options(compression="{codec}", compressed_calls="all")`'
    return through_torch(name, title, note, at_home=True, backend=f"accl+all:{codec}")


# Codecs for the section that compares them, from fine to coarse.
CODECS = ("bf16", "maxmin:8", "maxmin:4", "maxmin:2")
CASTS = ("fp16", "bf16")
GROUP_CODECS = tuple(map(with_group_codec, CODECS[:-1]))
# Other compression hooks of torch.
HOOKS = {
    "int8": "the operations of torch's `quantization_pertensor_hook`: all_gather of bytes, one scale per tensor",
    "powersgd": "torch's `powerSGD_hook`, rank 1 (its default), on one matrix",
}

# Numbers of worker threads per rank, in the section that compares them.
HELPERS = (1, 3, 7, 15)
ENCODED_HELPERS = (0, *HELPERS)


def helpers(count: str) -> str:
    """Returns a number of worker threads as text for the page."""
    return {"0": "no worker", "1": "1 worker", "auto": "`auto`"}.get(count, f"{count} workers")


def with_helpers(way: str, count: str, codec: str = "") -> Library:
    """Returns a row for the engine with worker threads, over one transport; with a codec, its group compresses all
    calls."""
    environment = {"ACCL_WORKER_COUNT": count, "ACCL_TRANSPORTS": way}
    note = " ".join(f"`{name}={value}`" for name, value in environment.items())
    name, title = f"accl_{codec or way}_{count}", f"accl engine, {codec or way}, {helpers(count)}"
    after = (codec,) if codec else ()
    return Library(name, title, Level.ENGINE, ("{accl}",), after, environment=environment, at_home=True, note=note)


WITH_HELPERS = tuple(with_helpers(way, count) for way in ("shm", "tcp") for count in ("0", *map(str, HELPERS), "auto"))
ENCODED_WITH_HELPERS = tuple(with_helpers("shm", str(count), "maxmin:4") for count in ENCODED_HELPERS)


def helpers_of(name: str) -> int:
    """Returns a library's number of worker threads; 0 if it is chosen automatically."""
    count = name.rpartition("_")[2]
    return int(count) if count.isdigit() else 0


# Algorithms for sections that compare them.
FORCED = ("two_level", "recursive_doubling", "ring")

ONECCL = {
    "CCL_ATL_TRANSPORT": "ofi",
    "CCL_PROCESS_LAUNCHER": "none",
    "CCL_LOCAL_RANK": "{rank}",
    "CCL_LOCAL_SIZE": "{ranks}",
    "CCL_LOG_LEVEL": "error",
    "CCL_ROOT": "{prefix}",
    "LD_LIBRARY_PATH": "{lib}",
}

# Ranks pin themselves, all in the same way, so launchers must not.
LIBRARIES = (
    Library("accl", "accl engine", Level.ENGINE, ("{accl}",), at_home=True, note="`Group::submit_blocking`, no torch"),
    Library(
        "accl_unchecked",
        "accl engine without signature checks",
        Level.ENGINE,
        ("{accl_unchecked}",),
        at_home=True,
        note="the same, built with `--cfg accl_without_signatures`",
    ),
    Library(
        "sketch", "C baseline", Level.ENGINE, ("{sketch}",), at_home=True, note="`benches/peers/ranks/c_baseline.c`"
    ),
    Library(
        "openmpi",
        "Open MPI",
        Level.ENGINE,
        ("{openmpi}",),
        launcher=("mpirun.openmpi", "--bind-to", "none"),
        environment={"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"},
        # With this option, waiting ranks yield.
        crowded=("--oversubscribe",),
        note="`mpirun --bind-to none`, otherwise default settings",
    ),
    Library("mpich", "MPICH", Level.ENGINE, ("{mpich}",), launcher=("mpiexec.mpich",), note="default settings"),
    Library(
        "intelmpi",
        "Intel MPI",
        Level.ENGINE,
        ("{intelmpi}",),
        launcher=("{bin}/mpiexec.hydra",),
        environment={"I_MPI_FABRICS": "shm", "I_MPI_PIN": "0", "I_MPI_ROOT": "{prefix}", "LD_LIBRARY_PATH": "{lib}"},
        note="`I_MPI_FABRICS=shm`, `I_MPI_PIN=0`",
    ),
    Library(
        "oneccl",
        "oneCCL",
        Level.ENGINE,
        ("{oneccl}",),
        environment=ONECCL | {"CCL_WORKER_OFFLOAD": "0"},
        note="`CCL_ATL_TRANSPORT=ofi`, `CCL_WORKER_OFFLOAD=0`: its worker threads would take the ranks' cores",
    ),
    Library(
        "oneccl_workers",
        "oneCCL with workers",
        Level.ENGINE,
        ("{oneccl}",),
        environment=ONECCL | {"CCL_WORKER_COUNT": "{share}"},
        note="`CCL_ATL_TRANSPORT=ofi`, `CCL_WORKER_COUNT` is the number of cores of a rank",
    ),
    through_torch("accl_torch", "accl through torch", at_home=True, backend="accl"),
    through_torch("gloo", "gloo through torch", at_home=True),
    through_torch("noop", "no-op through torch", "`benches/peers/ranks/noop.cpp`, a c10d backend that does nothing"),
    through_torch(
        "noop_yielding",
        "no-op through torch, yielding",
        "the same, but a rank yields its core after each call; shows the cost of ranks that share a core",
    ),
    through_torch("deepspeed", "DeepSpeed's op", "`csrc/cpu/comm/shm*.cpp` of its package, called as a torch op"),
    through_torch(
        "deepspeed_threads",
        "DeepSpeed's op with threads",
        "the same; `OMP_NUM_THREADS` is the number of cores of a rank",
        backend="deepspeed",
        environment={"OMP_NUM_THREADS": "{share}"},
    ),
    *WITH_HELPERS,
    *ENCODED_WITH_HELPERS,
    *map(with_algorithm, FORCED),
    *(with_codec("accl", codec, "`all_reduce_quantized`") for codec in CODECS),
    *GROUP_CODECS,
    *(with_codec("gloo", cast, f"the operations of torch's `{cast}_compress_hook` on a bucket") for cast in CASTS),
    *(with_codec("gloo", hook, note) for hook, note in HOOKS.items()),
)

BY_NAME = {library.name: library for library in LIBRARIES}


def title_of(name: str) -> str:
    """Returns a library's title for the page."""
    return BY_NAME[name].title
