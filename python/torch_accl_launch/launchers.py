"""Rank and world size that launchers give to a process in environment variables.

Each launcher has a family of variables, which is used completely or not at all. Families are tried in the order in which
launchers start one another: torchrun under srun describes this process better than srun does. This module owns the names of
the variables and the checks for contradictions. It does not handle hosts, or how ranks meet.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

__all__ = ["LaunchError", "RankInfo", "detect_launcher", "expand"]

Environment = Mapping[str, str]


class LaunchError(ValueError):
    """One sentence on a missing variable or a contradiction of a launcher's variables, with the remedy."""


@dataclass(frozen=True)
class RankInfo:
    """Rank and world size that a launcher has assigned."""

    # "torchrun", "Open MPI", "PMI" or "Slurm".
    launcher: str
    rank: int
    world: int
    # Rank among the ranks of this host, and their number; None if the launcher does not specify it.
    local_rank: int | None = None
    local_world: int | None = None
    # Names of the variables of rank and world size, for messages.
    rank_name: str = ""
    world_name: str = ""

    @property
    def is_on_one_host(self) -> bool:
        """Whether all ranks are known to be on this host."""
        return self.local_world == self.world


@dataclass(frozen=True)
class _Family:
    """The variables of a launcher. If a tuple has two names, both must have the same value."""

    launcher: str
    rank: tuple[str, ...]
    world: tuple[str, ...]
    local_rank: tuple[str, ...]
    local_world: tuple[str, ...]
    # Whether the variables describe this process, and not a process that has passed them on.
    holds: Callable[[Environment], bool] = lambda environment: True


# First id of Slurm's special steps, which run no program: batch scripts, shells of salloc, steps that srun adds to a job.
_FIRST_SPECIAL_STEP = 0xFFFFFFF0


def _is_step_of_srun(environment: Environment) -> bool:
    step = environment.get("SLURM_STEP_ID", "")
    # A batch script that a rank submitted inherits that rank's step variables, but has the task count of its own job.
    counts = {environment.get(name) for name in ("SLURM_TASKS_PER_NODE", "SLURM_STEP_TASKS_PER_NODE")} - {None, ""}
    return step.isdecimal() and int(step) < _FIRST_SPECIAL_STEP and len(counts) < 2


_TORCHRUN = _Family("torchrun", ("RANK",), ("WORLD_SIZE",), ("LOCAL_RANK",), ("LOCAL_WORLD_SIZE",))
_FAMILIES = (
    _TORCHRUN,
    # Under srun, PMIx sets only the rank.
    _Family(
        "Open MPI",
        ("OMPI_COMM_WORLD_RANK", "PMIX_RANK"),
        ("OMPI_COMM_WORLD_SIZE",),
        ("OMPI_COMM_WORLD_LOCAL_RANK",),
        ("OMPI_COMM_WORLD_LOCAL_SIZE",),
    ),
    # MPICH, Intel MPI and other launchers that use hydra; also srun --mpi=pmi2.
    _Family("PMI", ("PMI_RANK",), ("PMI_SIZE",), ("MPI_LOCALRANKID",), ("MPI_LOCALNRANKS",)),
    _Family(
        "Slurm",
        ("SLURM_PROCID",),
        ("SLURM_STEP_NUM_TASKS",),
        ("SLURM_LOCALID",),
        ("SLURM_STEP_TASKS_PER_NODE",),
        _is_step_of_srun,
    ),
)


def detect_launcher(environment: Environment) -> RankInfo | None:
    """Returns rank and world size that a launcher gave this process; None without a launcher.

    Raises:
        LaunchError: the variables are not numbers, or contradict each other.
    """
    found = [_read(family, environment) for family in _FAMILIES if _is_whole(family, environment)]
    if not found:
        return None
    chosen, others = found[0], found[1:]
    if chosen.launcher != _TORCHRUN.launcher:
        _check_torchs(chosen, environment)
    elif "TORCHELASTIC_RUN_ID" not in environment and any(
        _rank_and_world(other) == _rank_and_world(chosen) for other in others
    ):
        # RANK and WORLD_SIZE are copies of another launcher's variables, made by a script or by `env.prepare`. They may stem from
        # a process that has started another launcher, whose own variables are more precise.
        chosen, *others = others
    _check_nested(chosen, others)
    if chosen.local_world is None:
        # Under srun --mpi=pmi2, the PMI family lacks the local values, which srun's own family has.
        alike = (
            other
            for other in others
            if _rank_and_world(other) == _rank_and_world(chosen) and other.local_world is not None
        )
        if (other := next(alike, None)) is not None:
            return replace(chosen, local_rank=other.local_rank, local_world=other.local_world)
    return chosen


def _rank_and_world(of: RankInfo) -> tuple[int, int]:
    return of.rank, of.world


def _check_nested(chosen: RankInfo, others: list[RankInfo]) -> None:
    """Refuses two nested MPI launchers, because the variables do not show which one is the inner one."""
    for other in others:
        # hydra sets the number of ranks on a host, srun's PMI does not. An MPI launcher inside srun is not a contradiction.
        if (
            (chosen.launcher, other.launcher) == ("Open MPI", "PMI")
            and other.local_world is not None
            and _rank_and_world(other) != _rank_and_world(chosen)
        ):
            raise LaunchError(
                f"{chosen.rank_name}={chosen.rank} and {other.rank_name}={other.rank} come from two nested launchers; start the inner "
                f"launcher without the outer one's variable: `env -u {chosen.rank_name} mpirun ...` or `env -u {other.rank_name} mpirun ...`"
            )


def _is_whole(family: _Family, environment: Environment) -> bool:
    return (
        environment.get(family.rank[0], "") != ""
        and environment.get(family.world[0], "") != ""
        and family.holds(environment)
    )


def _read(family: _Family, environment: Environment) -> RankInfo:
    rank, rank_name = _one_number(family.rank, environment)
    world, world_name = _one_number(family.world, environment)
    assert rank is not None and world is not None, "the family is whole"
    if not 0 <= rank < world:
        raise LaunchError(
            f"{rank_name}={rank} is not a rank of {world_name}={world}; unset both, or set them as the launcher does"
        )
    local_rank, local_rank_name = _one_number(family.local_rank, environment)
    local_world, local_world_name = _local_world(family, environment)
    if local_world is not None and not 0 < local_world <= world:
        raise LaunchError(
            f"{local_world_name}={local_world} does not fit {world_name}={world}; unset the one that is not the launcher's"
        )
    if local_rank is not None and not 0 <= local_rank < (local_world or world):
        name, of = (local_world_name, local_world) if local_world is not None else (world_name, world)
        raise LaunchError(
            f"{local_rank_name}={local_rank} is not a rank of {name}={of}; unset the one that is not the launcher's"
        )
    return RankInfo(family.launcher, rank, world, local_rank, local_world, rank_name, world_name)


def _one_number(names: tuple[str, ...], environment: Environment) -> tuple[int | None, str]:
    """Returns the value of these variables and the first name that has it; None and an empty string if all are unset."""
    said = [(_number(name, environment[name]), name) for name in names if environment.get(name, "") != ""]
    for number, name in said[1:]:
        if number != said[0][0]:
            raise LaunchError(
                f"{said[0][1]}={said[0][0]} and {name}={number} contradict each other; unset the one that is not the launcher's"
            )
    return said[0] if said else (None, "")


def _number(name: str, text: str) -> int:
    if not re.fullmatch(r"-?[0-9]+", text):
        raise LaunchError(f"{name}={text!r} is not a number; unset it, or set it as the launcher does")
    return int(text)


def _local_world(family: _Family, environment: Environment) -> tuple[int | None, str]:
    name = family.local_world[0]
    if family.launcher != "Slurm":
        return _one_number(family.local_world, environment)
    # Slurm lists one number per node, such as "2(x3),1". The entry with the index of this node is the one wanted.
    counts = expand_counts(environment.get(name, ""))
    node = environment.get("SLURM_NODEID", "")
    is_known = node.isdecimal() and int(node) < len(counts)
    return (counts[int(node)] if is_known else None), name


def expand_counts(text: str) -> list[int]:
    """Returns the numbers of `2(x3),1`: 2, 2, 2, 1. Returns an empty list for any other text."""
    counts: list[int] = []
    for part in filter(None, text.split(",")):
        match = re.fullmatch(r"([0-9]+)(?:\(x([0-9]+)\))?", part)
        if match is None:
            return []
        counts += [int(match[1])] * int(match[2] or 1)
    return counts


def _check_torchs(chosen: RankInfo, environment: Environment) -> None:
    """Checks that torchrun's variables, if set, agree with the other launcher's values, which are about to be copied to them."""
    for (name,), own, value in (
        (_TORCHRUN.rank, chosen.rank_name, chosen.rank),
        (_TORCHRUN.world, chosen.world_name, chosen.world),
    ):
        if environment.get(name, "") != "" and _number(name, environment[name]) != value:
            raise LaunchError(
                f"{name}={environment[name]} and {own}={value} contradict each other; unset {name}, or set both RANK and WORLD_SIZE"
            )


def expand(hosts: str) -> list[str]:
    """Returns the names in a host list of Slurm: `a[1-2,07],b` is a1, a2, a07, b."""
    # Splits at commas outside brackets.
    return [name for part in re.findall(r"(?:[^,\[]|\[[^\]]*\])+", hosts) for name in _expand_one(part)]


def _expand_one(part: str) -> list[str]:
    match = re.match(r"([^\[]*)\[([^\]]*)\](.*)", part)
    if match is None:
        return [part]
    head, ranges, tail = match.groups()
    names = []
    for piece in ranges.split(","):
        first, _, last = piece.partition("-")
        numbers = [str(number).zfill(len(first)) for number in range(int(first), int(last or first) + 1)]
        names += [head + number + rest for number in numbers for rest in _expand_one(tail)]
    return names
