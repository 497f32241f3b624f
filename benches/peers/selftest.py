"""Shows that the machinery works, with what a build of this repository has anyway: starts, turns, checks, ends. Looks at no
time.
"""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path

from .build import Workshop
from .fleet import Fleet
from .measure import TINY, Cell, measure

CONTENDERS = ("accl", "sketch", "gloo")
CELL = Cell("all_reduce", "float32", 4096)


def run() -> int:
    """The exit code."""
    complaints = []
    with tempfile.TemporaryDirectory() as folder:
        shop = Workshop(Path(folder), print, online=False)
        shop.prepare(CONTENDERS)
        complaints += [f"{name}: {reason}" for name, reason in shop.missing.items()]
        with Fleet(2, print) as fleet:
            fleet.start(CONTENDERS, shop.names)
            figures = measure(fleet, [CELL], CONTENDERS, TINY, lambda cell, name: None)
            pids = [rank.pid for crew in fleet.crews.values() for rank in crew.members]
            complaints += [f"{name}: {reason}" for name, reason in fleet.missing.items()]
    measured = {figure.contender for figure in figures if figure.us > 0}
    complaints += [f"{name}: no figure" for name in CONTENDERS if name not in measured]
    complaints += [f"process {pid} has stayed" for pid in pids if alive(pid)]
    for complaint in complaints:
        print(complaint, file=sys.stderr)
    print(f"peers: {len(measured)} contenders took turns, {len(complaints)} complaints")
    return int(bool(complaints))


def alive(pid: int) -> bool:
    """Whether a process is there."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True
