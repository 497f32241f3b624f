"""A rank's part of a run, from pinning to the last row. Rank 0 also shows the progress and prints."""

from __future__ import annotations

import json
from typing import Any

import torch
from torch._C._distributed_c10d import Store
from torch_accl import __version__

from .cases import Case, Prepared
from .measure import Compressed, Contestant, InEngine, ThroughTorch, backend_of, measure
from .plot import draw
from .progress import progress, unseen
from .rank_info import RankInfo
from .report import CHOICE, AlgorithmTable, BackendTable, Cell, as_json
from .request import Request, check_plot
from .team import Team, machine

__all__ = ["run_rank"]


def run_rank(request: Request, rank_info: RankInfo, store: Store) -> int:
    """Measures what `request` names. Returns the exit status. Collective over all ranks.

    Raises:
        WrongInput: on all ranks, for input errors that only ranks can find.
    """
    team = Team(rank_info, store)
    team.check(lambda: check_plot(request.plot if team.rank == 0 else None))
    placements = team.pin_ranks(request)
    device = team.device(request)
    team.open(request)
    field = _Field(team, request)
    table = AlgorithmTable() if request.try_all else BackendTable(request.peers, request.codecs)
    prints = team.rank == 0 and not request.json
    if prints:
        _print(_preface(request, placements))
    cells: list[Cell] = []
    cases = request.cases(team.world)
    watch = progress(len(cases)) if team.rank == 0 else unseen()
    for case in cases:
        with watch(case):
            prepared = Prepared(case, team.rank, team.world, device)
            timed = measure(team, prepared, field.contestants(prepared), request)
            cell = Cell(case, team.world, field.algorithm(prepared), timed)
        if prints:
            is_first = not cells or cells[-1].case.collective != case.collective
            _print([*(_heading(case, table) if is_first else []), table.row(cell)])
        cells.append(cell)
    if prints and (last := table.last(cells)):
        _print(["#", *last])
    if team.rank == 0 and request.json:
        print(json.dumps(_document(request, placements, cells), indent=2), flush=True)
    if team.rank == 0 and request.plot is not None:
        draw(cells, request.plot)
    team.close()
    return 1 if any(cell.wrong for cell in cells) else 0


class _Field:
    """The contestants of a run. Groups are created on first use, at the same time on all ranks."""

    def __init__(self, team: Team, request: Request) -> None:
        self._team, self._request = team, request
        mine: Contestant = InEngine(CHOICE, None) if request.engine else ThroughTorch(CHOICE, None)
        peers = [ThroughTorch(peer, team.group(peer)) for peer in request.peers]
        coded = [Compressed(codec, mine) for codec in request.codecs]
        self._own = [mine, *peers, *coded]
        # Contestants by algorithm rule; None for an algorithm that these ranks cannot run.
        self._forced: dict[str, InEngine | None] = {}

    def contestants(self, prepared: Prepared) -> list[Contestant]:
        """Returns the contestants of a case, accl first."""
        if not self._request.try_all:
            return list(self._own)
        from torch_accl import _native

        collective = prepared.case.collective.name
        names = [row["name"] for row in _native.algorithms() if row["collective"] == collective]
        forced = [self._force(collective, name) for name in names]
        return [*self._own, *(one for one in forced if one is not None and _takes(one, prepared))]

    def algorithm(self, prepared: Prepared) -> str:
        """Returns the engine's own choice for a case. Calls on an accelerator are staged, and use the CPU's algorithm."""
        if prepared.device.type != "cpu":
            prepared = Prepared(prepared.case, prepared.rank, prepared.world)
        return backend_of(None).algorithm_of(**prepared.in_engine())

    def _force(self, collective: str, name: str) -> InEngine | None:
        rule = f"{collective}={name}"
        if rule not in self._forced:
            try:
                self._forced[rule] = InEngine(name, self._team.group("accl", [rule]))
            except (RuntimeError, ValueError):
                # All ranks get here: the engine refuses, on every rank, a rule that does not fit them.
                self._forced[rule] = None
        return self._forced[rule]


def _takes(forced: InEngine, prepared: Prepared) -> bool:
    """Whether a call of this case would use the forced algorithm: some algorithms depend on more than the ranks."""
    try:
        return forced.backend.algorithm_of(**prepared.in_engine()) == forced.name
    except (RuntimeError, ValueError):
        return False


def _print(lines: list[str]) -> None:
    print("\n".join(lines), flush=True)


def _heading(case: Case, table: AlgorithmTable | BackendTable) -> list[str]:
    rooted = ", root 0: each call follows a barrier and ends on its last rank" if case.collective.rooted else ""
    return ["#", f"# {case.collective.name}{rooted}", *table.head()]


def _preface(request: Request, placements: list[dict[str, Any]]) -> list[str]:
    facts = machine()
    hosts = list(dict.fromkeys(placement["host"] for placement in placements))
    pinned = "one core each" if all(len(placement["cores"]) == 1 for placement in placements) else "not pinned"
    through = "in the engine, without torch" if request.engine else "through torch"
    on = f", tensors on {request.device}" if request.is_on_accelerator else ""
    return [
        f"# torch-accl {__version__}, torch {torch.__version__}; {facts['cpu']}, {facts['kernel']}",
        f"# {len(placements)} rank{'s' if len(placements) > 1 else ''}, {pinned}, on {', '.join(hosts)}{on}; accl {through}; median of {request.alternations} rounds",
    ]


def _document(request: Request, placements: list[dict[str, Any]], cells: list[Cell]) -> dict[str, Any]:
    return {
        "format": 1,
        "machine": machine(),
        "versions": {"torch_accl": __version__, "torch": torch.__version__},
        "ranks": placements,
        "settings": {
            "through": "engine" if request.engine else "torch",
            "device": request.device,
            "against": request.peers,
            "codecs": request.codecs,
            "forced": request.rules,
            "try_all": request.try_all,
            "alternations": request.alternations,
            "warmup": request.warmup,
        },
        "cells": [as_json(cell, request.try_all) for cell in cells],
    }
