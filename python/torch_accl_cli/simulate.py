"""`accl simulate`: predicted time of each algorithm, and the chosen one, for any number of ranks."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from ._figures import empty_figure, save
from ._package import load_native
from ._quantities import parse_link
from ._sizes import parse_sizes, show_size
from ._wrong import WrongInput, nearest

__all__ = ["NAME", "SUMMARY", "add_arguments", "run"]

NAME = "simulate"
SUMMARY = "predict the time of collectives for any number of ranks"

_DESCRIPTION = """\
Predicts the time of each algorithm, and the algorithm that accl would choose. Uses the counts of the algorithms' schedules, and
the constants of this machine (`accl info` shows them). Sends nothing."""

_EPILOG = """\
exit status: 0; 1 if this installation cannot be loaded; 2 if an argument is invalid

examples:
  accl simulate --ranks 4096 --ranks-per-host 8 --link 100Gbit/s,2us
  accl simulate --ranks 16 --ranks-per-host 16 --cores-per-host 4 --collective all_gather --sizes 4-64MiB
  accl simulate --ranks 1024 --ranks-per-host 8 --machine other.txt --json"""

_DEFAULT_SIZES = "4-64MiB:x4"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the command's arguments."""
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.description, parser.epilog = _DESCRIPTION, _EPILOG
    add = parser.add_argument
    add("--ranks", type=int, required=True, metavar="N", help="number of ranks")
    add("--ranks-per-host", type=int, metavar="N", help="ranks on each host (default: all on one host)")
    add("--cores-per-host", type=int, metavar="N", help="cores that a host's ranks share (default: one for each)")
    add("--link", metavar="RATE,TIME", help="the network between hosts, such as 100Gbit/s,2us (default: as measured)")
    add("--collective", default="all_reduce", metavar="NAME", help="one or several, or all (default %(default)s)")
    add("--sizes", default=_DEFAULT_SIZES, help="sizes and ranges, such as 4,1KiB or 4-64MiB:x4 (default %(default)s)")
    add("--machine", metavar="FILE", help="constants to use instead of this machine's, in the cache's format")
    add("--json", action="store_true", help="print one JSON document instead of tables")
    add("--plot", type=Path, metavar="FILE", help="draw time over size into a file such as curves.png")


def run(given: argparse.Namespace) -> int:
    """Prints the predictions."""
    per_host = given.ranks if given.ranks_per_host is None else given.ranks_per_host
    cores = per_host if given.cores_per_host is None else given.cores_per_host
    for name, value in (("--ranks", given.ranks), ("--ranks-per-host", per_host), ("--cores-per-host", cores)):
        if value < 1:
            raise WrongInput(f"{name}: expected a number above zero, got {value}")
    sizes = parse_sizes(given.sizes)
    link = None if given.link is None else parse_link(given.link)
    figure = empty_figure(given.plot)
    native = load_native()
    known = list(dict.fromkeys(row["collective"] for row in native.algorithms()))
    world = {"ranks": given.ranks, "ranks_per_host": per_host, "cores_per_host": cores}
    found = {}
    try:
        for name in _collectives(given.collective, known):
            of = [0] if name == "barrier" else sizes
            found[name] = native.simulate(name, of, (given.ranks, per_host, cores), link, given.machine)
    except (ValueError, OverflowError) as error:
        raise WrongInput(str(error)) from None
    if figure is not None:
        _draw(figure, found, given)
    print(json.dumps({**world, "predictions": found}, indent=2) if given.json else _tables(found, world))
    return 0


def _collectives(text: str, known: list[str]) -> list[str]:
    if text == "all":
        return known
    names = [name.strip() for name in text.split(",")]
    for name in names:
        if name not in known:
            raise WrongInput(f"--collective: unknown collective {name!r}{nearest(name, known)}")
    return names


def _tables(found: dict[str, list[dict[str, Any]]], world: dict[str, int]) -> str:
    lines = []
    for name, predictions in found.items():
        algorithms = list(dict.fromkeys(key for prediction in predictions for key in prediction["times_us"]))
        hosts = -(-world["ranks"] // world["ranks_per_host"])
        lines.append(f"# {name}: {world['ranks']} ranks on {hosts} hosts; microseconds, * marks the chosen algorithm")
        rows = [["size", *algorithms]]
        for prediction in predictions:
            rows.append([show_size(prediction["bytes"]), *(_cell(prediction, key) for key in algorithms)])
        widths = [max(map(len, column)) + 2 for column in zip(*rows)]
        # Columns keep their former minimum widths, because scripts cut these lines by position.
        widths = [max(least, width) for least, width in zip([10, *(14 for _ in algorithms)], widths)]
        lines += ["".join(f"{cell:>{width}}" for cell, width in zip(row, widths)) for row in rows]
        lines.append("")
    return "\n".join(lines).rstrip()


def _cell(prediction: dict[str, Any], name: str) -> str:
    time_us = prediction["times_us"].get(name)
    mark = "*" if name == prediction["chosen"] else " "
    return "-" if time_us is None else f"{time_us:.2f}{mark}"


def _draw(figure: Any, found: dict[str, list[dict[str, Any]]], given: argparse.Namespace) -> None:
    figure.set_size_inches(8, 4.5 * len(found))
    for picture, (name, predictions) in zip(figure.subplots(len(found), 1, squeeze=False)[:, 0], found.items()):
        for key in dict.fromkeys(key for prediction in predictions for key in prediction["times_us"]):
            points = [(row["bytes"], row["times_us"][key]) for row in predictions if key in row["times_us"]]
            picture.plot(*zip(*points), label=key, alpha=0.7)
        chosen = [(row["bytes"], row["times_us"][row["chosen"]]) for row in predictions]
        picture.plot(*zip(*chosen), "ko", markersize=4, label="chosen")
        picture.set(title=f"{name}, {given.ranks} ranks, predicted", xlabel="size (B)", ylabel="time (us)")
        picture.set_xscale("symlog", base=2)
        picture.set_yscale("log")
        picture.grid(alpha=0.3)
        picture.legend()
    save(figure, given.plot)
