"""`accl plan`: predicts the timeline of each rank in a layer-parallel step, its time, and the best setting."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ._figures import empty_figure, save
from ._layer_plans import FACTORS, Costs, Planner, Setting
from ._package import load_native
from ._quantities import parse_link, parse_time
from ._sizes import parse_size, show_size
from ._wrong import WrongInput

__all__ = ["NAME", "SUMMARY", "add_arguments", "run"]

NAME = "plan"
SUMMARY = "predict a layer-parallel training step, and draw the timeline of each rank"

_DESCRIPTION = """\
Predicts a training step of a net whose layers are distributed over several ranks: serially, as pipelines, and by multigrid over layers. Tries
multigrid with several factors and numbers of levels, or only with those that --factor and --levels give. Draws the best setting of multigrid.
With several numbers of ranks, shows the best setting for each number. Computes and sends nothing. Measure the times of a layer while all ranks
compute. In pipelines, the time of a micro-batch is assumed to be its share of the batch's time; small kernels take longer."""

_EPILOG = """\
exit status: 0; 1 if this installation cannot be loaded; 2 if an argument is invalid

examples:
  accl plan --layers 64 --ranks 4
  accl plan --layers 64 --ranks 4 --factor 8 --forward 2 --backward 1 --layer 0.9ms,0.95ms,1.2ms,2.5ms --state 800KiB
  accl plan --layers 1024 --ranks 128 --link 100Gbit/s,2us --plot plan.png
  accl plan --layers 1024 --ranks 2,8,32,128,512 --relax 0,1
  accl plan --layers 64 --ranks 8 --coarser 1 --share 0.25"""

_COLUMNS = 96
_SYMBOLS = {
    "coarse march": "m",
    "restriction": "r",
    "C-relaxation": "c",
    "F-relaxation": "f",
    "final sweep": "S",
    "chunk": "S",
    "loss": "l",
}
_FORECAST = 64


@dataclass(frozen=True)
class _Found:
    """Predicted figures of one setting."""

    setting: Setting
    milliseconds: float
    speedup: float
    # Maximum bytes on any rank at one time: of states, and of autograd graphs.
    state_bytes: int
    graph_bytes: int


class _Net(Planner):
    """The net that the arguments describe."""

    def __init__(self, given: argparse.Namespace, native: Any, ranks: int) -> None:
        times = [parse_time("--layer", part) for part in given.layer.split(",")]
        if len(times) != 4:
            raise WrongInput(
                f"--layer: {given.layer!r} has {len(times)} times; give 4: plain, recorded, VJP of the input, VJP of everything"
            )
        per_kib, latency = parse_link(given.link)
        state = parse_size("--state", given.state)
        costs = Costs(
            [(times[0], times[1], times[2], times[3])] * given.layers,
            state,
            # Sums of states are not counted here.
            latency=latency,
            wire_per_kib=per_kib,
            share=_thousandths(given.share),
        )
        coarser = _numbers("--coarser", given.coarser, least=1) if given.coarser else ()
        if given.factor is not None and any(level >= (given.levels or 2) for level in coarser):
            raise WrongInput(
                f"--coarser: expected levels below {given.levels or 2} (the finest is level 0), got {given.coarser}"
            )
        super().__init__(native, ranks, costs, _numbers("--relax", given.relax), coarser)
        self.state, self.graph = state, parse_size("--graph", given.graph)

    def looked_at(self) -> Sequence[int]:
        """The ranks whose memory is predicted: all, or with many ranks the first, the middle and the last one."""
        return range(self.ranks) if self.ranks <= _FORECAST else (0, self.ranks // 2, self.ranks - 1)

    def find(self, setting: Setting) -> _Found:
        total_ps, states, graphs = 0, 0, 0
        micro = setting.micro_batches
        for plan, total, _ in self.simulate(setting):
            total_ps += total
            sizes = [self.state // micro] * (len(self.layers) + 1), [self.graph // micro] * len(self.layers)
            for rank in self.looked_at():
                state, graph = plan.memory(rank, *sizes, self.shares)
                states, graphs = max(states, state), max(graphs, graph)
        return _Found(setting, total_ps / 1e9, self.costs.serial / total_ps, states, graphs)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the command's arguments."""
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.description, parser.epilog = _DESCRIPTION, _EPILOG
    add = parser.add_argument
    add("--layers", type=int, required=True, metavar="N", help="number of layers of the net")
    add("--ranks", required=True, metavar="P[,P...]", help="ranks that hold the layers; several numbers are compared")
    add("--factor", type=int, metavar="C", help="coarsening factor (default: the best)")
    add("--levels", type=int, metavar="L", help="number of levels, with --factor (default: 2)")
    add("--forward", type=int, default=2, metavar="K", help="iterations of the forward pass (default %(default)s)")
    add("--backward", type=int, default=1, metavar="K", help="iterations of the backward pass (default %(default)s)")
    add(
        "--relax",
        default="0",
        metavar="N[,N...]",
        help="C-relaxations by level, the finest first; the last holds for further levels; 0 is F, 1 is FCF (default %(default)s)",
    )
    add(
        "--coarser",
        metavar="L[,L...]",
        help="levels, from 1 on, whose states are coarser than the states of the level before (default: none)",
    )
    add(
        "--share",
        type=float,
        default=0.25,
        metavar="S",
        help="fraction of a state's bytes, and of a layer's time, that is left where states become coarser (default %(default)s)",
    )
    add("--micro-batches", type=int, metavar="M", help="micro-batches in pipelines (default: 4 times the ranks)")
    add(
        "--layer",
        default="1ms,1ms,1ms,2ms",
        metavar="TIMES",
        help="times of one layer: plain, recorded, VJP of its input, VJP of everything (default %(default)s)",
    )
    add("--state", default="1MiB", metavar="SIZE", help="bytes of the state of a batch (default %(default)s)")
    add("--graph", default="4MiB", metavar="SIZE", help="bytes that a recorded layer keeps (default %(default)s)")
    add("--link", default="100Gbit/s,10us", metavar="RATE,TIME", help="network between ranks (default %(default)s)")
    add("--json", action="store_true", help="print one JSON document instead of text")
    add("--plot", type=Path, metavar="FILE", help="draw the step into a file such as plan.png")


def run(given: argparse.Namespace) -> int:
    """Prints the prediction. Returns the exit status."""
    for name in ("layers", "forward", "backward", "micro_batches"):
        value = getattr(given, name)
        if value is not None and value < 1:
            raise WrongInput(f"--{name.replace('_', '-')}: expected a number above zero, got {value}")
    if given.levels is not None and given.factor is None:
        raise WrongInput("--levels: needs --factor; without --factor all numbers of levels are tried")
    worlds = _numbers("--ranks", given.ranks, least=1)
    if len(worlds) > 1 and given.plot is not None:
        raise WrongInput(f"--plot: draws the step for one number of ranks, and --ranks has {len(worlds)}")
    figure = empty_figure(given.plot)
    nets = [_Net(given, load_native(), ranks) for ranks in worlds]
    try:
        found = [[net.find(setting) for setting in _settings(given, net, len(worlds) == 1)] for net in nets]
    except (ValueError, OverflowError) as error:
        raise WrongInput(str(error)) from None
    if len(worlds) > 1:
        _show_worlds(given, nets, found)
        return 0
    net = nets[0]
    shown = _best(found[0])
    if figure is not None:
        _draw(figure, net, shown)
        save(figure, given.plot)
    if given.json:
        steps = list(_steps(net, shown))
        print(json.dumps({"serial_ms": net.costs.serial / 1e9, "settings": _rows(found[0]), "steps": steps}, indent=2))
    else:
        print(_text(net, found[0], shown))
    return 0


def _numbers(name: str, text: str, least: int = 0) -> list[int]:
    """Returns the integers of a comma-separated list."""
    try:
        found = [int(word) for word in text.split(",")]
    except ValueError:
        raise WrongInput(f"{name}: expected a number or a comma-separated list of numbers, got {text!r}") from None
    for number in found:
        if number < least:
            raise WrongInput(
                f"{name}: expected {'a number above zero' if least else 'a number of at least 0'}, got {number}"
            )
    return found


def _thousandths(share: float) -> int:
    if not 0 < share <= 1:
        raise WrongInput(f"--share: expected a number above 0 and at most 1, got {share}")
    return max(round(1000 * share), 1)


def _settings(given: argparse.Namespace, net: _Net, is_one_world: bool) -> Iterator[Setting]:
    if is_one_world:
        yield Setting("wave")
        micro = given.micro_batches or 4 * net.ranks
        yield Setting("gpipe", forward=micro)
        yield Setting("1f1b", forward=micro)
    if given.factor is not None:
        yield Setting("multigrid", given.factor, given.levels or 2, given.forward, given.backward)
    else:
        yield from net.multigrid(given.forward, given.backward, FACTORS)


def _best(found: Sequence[_Found]) -> _Found:
    """Returns the fastest multigrid setting, or the fastest of all if the net is too small for multigrid."""
    solved = [each for each in found if each.setting.name == "multigrid"]
    return min(solved or found, key=lambda each: each.milliseconds)


def _rows(found: Sequence[_Found]) -> list[dict[str, Any]]:
    return [
        {**asdict(each.setting), **{name: value for name, value in asdict(each).items() if name != "setting"}}
        for each in found
    ]


def _show_worlds(given: argparse.Namespace, nets: Sequence[_Net], found: Sequence[Sequence[_Found]]) -> None:
    """Prints the best setting for each number of ranks."""
    serial_ms = nets[0].costs.serial / 1e9
    if not all(found):
        raise WrongInput(
            f"--layers: {given.layers} layers have no coarser level, which multigrid needs; with several numbers of ranks, only multigrid is compared"
        )
    if given.json:
        worlds = [{"ranks": net.ranks, "settings": _rows(each)} for net, each in zip(nets, found)]
        print(json.dumps({"serial_ms": serial_ms, "worlds": worlds}, indent=2))
        return
    lines = [f"# {given.layers} layers; serial on one rank: {serial_ms:.2f} ms"]
    lines.append(f"{'ranks':>10}{'factor':>8}{'levels':>8}{'time, ms':>12}{'speed-up':>10}{'states':>10}{'graphs':>10}")
    for net, best in zip(nets, map(_best, found)):
        setting = best.setting
        lines.append(
            f"{net.ranks:>10}{setting.factor:>8}{setting.levels:>8}{best.milliseconds:>12.2f}{best.speedup:>10.2f}"
            f"{show_size(best.state_bytes):>10}{show_size(best.graph_bytes):>10}"
        )
    print("\n".join(lines))


def _text(net: _Net, found: Sequence[_Found], shown: _Found) -> str:
    lines = [f"# {len(net.layers)} layers on {net.ranks} ranks; serial on one: {net.costs.serial / 1e9:.2f} ms"]
    lines.append(f"{'':>10}{'factor':>8}{'levels':>8}{'time, ms':>12}{'speed-up':>10}{'states':>10}{'graphs':>10}")
    for each in sorted(found, key=lambda each: each.milliseconds):
        setting = each.setting
        factor, levels = (setting.factor, setting.levels) if setting.name == "multigrid" else ("-", "-")
        mark = "*" if each is shown else " "
        lines.append(
            f"{setting.name:>10}{factor:>8}{levels:>8}{each.milliseconds:>12.2f}{each.speedup:>9.2f}{mark}"
            f"{show_size(each.state_bytes):>10}{show_size(each.graph_bytes):>10}"
        )
    lines.append("")
    lines.append(
        f"* is drawn below: {_named(shown.setting)}; . waits, {', '.join(f'{s} {n}' for n, s in _SYMBOLS.items() if n not in ('chunk', 'loss'))}"
    )
    for name, (_, total, ranks), symbols in _timelines(net, shown):
        lines.append(f"{name}, {total / 1e9:.2f} ms")
        for rank, activities in enumerate(ranks):
            lines.append(f"{rank:>5} {_bar(activities, symbols[rank], total)}")
    return "\n".join(lines)


def _named(setting: Setting) -> str:
    if setting.name != "multigrid":
        return setting.name
    return f"factor {setting.factor}, {setting.levels} levels, {setting.forward} forward and {setting.backward} backward iterations"


def _timelines(net: _Net, shown: _Found) -> Iterator[tuple[str, tuple[Any, int, Any], list[list[str]]]]:
    """Yields, for each plan of a step, its name, its simulation, and the phase of each operation of each rank."""
    names = ("step",) if shown.setting.is_pipeline else ("forward", "backward")
    for name, simulated in zip(names, net.simulate(shown.setting)):
        parts = []
        for rank in range(net.ranks):
            part, of = "", []
            for op in simulated[0].ops(rank):
                part = op[1] if op[0] == "phase" else part
                of.append(part)
            parts.append(of)
        yield name, simulated, parts


def _bar(activities: Sequence[tuple[int, int, int]], parts: Sequence[str], total: int) -> str:
    cells = ["."] * _COLUMNS
    for op, begin, end in activities:
        first, last = begin * _COLUMNS // total, max(end * _COLUMNS // total, begin * _COLUMNS // total + 1)
        for cell in range(first, min(last, _COLUMNS)):
            cells[cell] = _SYMBOLS.get(parts[op], "?")
    return "".join(cells)


def _steps(net: _Net, shown: _Found) -> Iterator[dict[str, Any]]:
    for name, (plan, total, ranks), parts in _timelines(net, shown):
        yield {
            "name": name,
            "ms": total / 1e9,
            "operations": [plan.counts(rank) for rank in range(net.ranks)],
            "ranks": [
                [
                    {"part": parts[rank][op], "begin_ms": begin / 1e9, "end_ms": end / 1e9}
                    for op, begin, end in activities
                ]
                for rank, activities in enumerate(ranks)
            ],
        }


def _draw(figure: Any, net: _Net, shown: _Found) -> None:
    timelines = list(_timelines(net, shown))
    figure.set_size_inches(10, 1.2 + len(timelines) * (0.8 + 0.28 * net.ranks))
    names = [name for name in _SYMBOLS if name not in ("chunk", "loss")]
    colours = {name: f"C{number}" for number, name in enumerate(names)} | {"chunk": "C4", "loss": "C5"}
    for picture, (name, (_, total, ranks), parts) in zip(
        figure.subplots(len(timelines), 1, squeeze=False)[:, 0], timelines
    ):
        for rank, activities in enumerate(ranks):
            bars = [(begin / 1e9, (end - begin) / 1e9) for _, begin, end in activities]
            picture.broken_barh(bars, (rank - 0.4, 0.8), facecolors=[colours[parts[rank][op]] for op, *_ in activities])
        picture.set(title=f"{name}: {_named(shown.setting)}", xlabel="time (ms)", ylabel="rank", xlim=(0, total / 1e9))
        picture.invert_yaxis()
        for part in dict.fromkeys(parts[rank][op] for rank, activities in enumerate(ranks) for op, *_ in activities):
            picture.plot([], [], "s", color=colours[part], label=part)
        picture.legend(loc="upper left", bbox_to_anchor=(1, 1))
