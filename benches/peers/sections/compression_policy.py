"""The cost of auditing compressed sums, and whether the choice of `auto` is ever slower than no compression."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from typing import Any

from torch_accl_cli._sizes import show_size

from ..build import SOURCES, Unavailable
from ..jobs import HERE, Host
from ..libraries import title_of
from ..report import Bench, Section
from ..tables import Table, Target
from .costs import answers_of

PROGRAM = SOURCES / "policy.py"
RANKS = 2
LIBRARY = "accl_torch"
LIMIT_S = 300
SHAPED_BITS = 10**9
SHM, TCP, SHAPED = "shared memory", "TCP in the machine", "TCP, 1 Gbit/s"
AUDITED, AUTO = 1.01, 0.97


def collect(bench: Bench) -> dict[str, Any]:
    """Runs one start over each kind of link."""
    if LIBRARY not in bench.libraries:
        raise Unavailable(f"{title_of(LIBRARY)} was not selected")
    if reason := bench.shop.missing.get(LIBRARY):
        raise Unavailable(f"{title_of(LIBRARY)}: {reason}")
    python = bench.shop.names["python"]
    found = {}
    for place, transport in ((SHM, "shm"), (TCP, "tcp")):
        bench.say(f"compression policy over {place}")
        found[place] = start(python, transport, HERE)
    bench.say(f"compression policy over {SHAPED}")
    with bench.network(SHAPED_BITS) as link:
        found[SHAPED] = start(python, "tcp", link.hosts)
    return {"places": found}


def start(python: str, transport: str, hosts: Sequence[Host]) -> dict[str, Any]:
    """Returns, by size in bytes, the measurements of the ranks."""
    with tempfile.TemporaryDirectory(prefix="accl-peers-policy-") as folder:
        command = [python, str(PROGRAM), folder, transport]
        found = answers_of(command, RANKS, {"OMP_NUM_THREADS": "1"}, hosts, LIMIT_S)
    if not all(found):
        raise Unavailable("a rank has failed")
    return found[0]


def tables(data: dict[str, Any]) -> list[Table]:
    """Returns a table with a column for each size."""
    places = data["places"]
    sizes = list(next(iter(places.values()), {}))
    table = Table(["2 ranks", *(show_size(int(size)) for size in sizes)])
    for place, found in places.items():
        table.row(f"{place}: audited / not audited", [Target(found[size]["audit"], at_most=AUDITED) for size in sizes])
        table.row(f"{place}: raw / auto", [Target(found[size]["auto"], at_least=AUTO) for size in sizes])
        table.row(f"{place}: auto chooses", [f"`{found[size]['codec']}`" for size in sizes])
    return [table]


SECTION = Section(
    name="compression_policy",
    title="Cost of the compression policy",
    text=(
        "Two ranks reduce one float32 gradient by `compression.ddp_hook`, alternately by two methods. A round "
        "gives the ratio of the slower rank's times, and a figure is the median of these ratios.\n\n"
        "* Audited: `maxmin:4` with an audit, compared with `maxmin:4` without. The audit compares one element in "
        "1,940 with the exact sum (at most 1/250 of the bytes). Target: at most 1 % longer.\n"
        '* Auto: the time without compression, divided by the time with the choice of `Compression("auto")`. '
        "Target: at least 0.97."
    ),
    collect=collect,
    tables=tables,
)
