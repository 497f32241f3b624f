"""Layer-parallel training on two ranks: multigrid and pipelines, accl's and torch's, compared with one process and with
predictions."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from torch_accl_cli._layer_plans import Costs, LayerTimes, Planner, Setting
from torch_accl_cli._package import load_native

from .. import board
from ..build import SOURCES, Unavailable
from ..libraries import title_of
from ..machine import Quiet
from ..report import Bench, Section
from ..tables import Table, Target, plain
from .costs import answers_of

PROGRAM = SOURCES / "layer_parallel.py"
LIBRARIES = ("accl_torch", "gloo")
RANKS = 2
# Values of the rank program.
LAYERS, STATE_BYTES, FACTORS = 64, 32 * 8 * 28 * 28 * 4, (4, 8, 16)
FORWARD, BACKWARD = 2, 1
LAYER_COSTS = ("plain", "recorded", "input_vjp", "full_vjp")
# Number of starts, and the limit of one in seconds. In a round each method has a turn of up to half a second.
STARTS, LIMIT_S = 3, 600
SPEEDUPS = {4: 1.25, 8: 1.35, 16: 1.45}
OVER_GLOO, CLOSE = 1, 0.15
SERIAL = "serial"
TITLES = {
    SERIAL: "one process, one thread",
    "threads": "one process, a thread for each core",
    **{
        f"{backend} {factor}": f"multigrid over {backend}, c = {factor}"
        for backend in ("accl", "gloo")
        for factor in FACTORS
    },
    "wave": "`exact-wave`",
    "gpipe": "`exact-pipeline`, GPipe",
    "1f1b": "`exact-pipeline`, 1F1B",
    "torch gpipe": "torch's GPipe over accl",
    "torch 1f1b": "torch's 1F1B over accl",
}


def collect(bench: Bench) -> dict[str, Any]:
    """Returns the rounds of all starts, one after the other."""
    for name in LIBRARIES:
        if name not in bench.libraries:
            raise Unavailable(f"{title_of(name)} was not selected")
        if reason := bench.shop.missing.get(name):
            raise Unavailable(f"{title_of(name)}: {reason}")
    starts = []
    quiet = Quiet([])
    for turn in range(STARTS):
        bench.say(f"layer-parallel, start {turn + 1} of {STARTS}")
        starts.append(start(bench))
    bench.ticks = tuple(map(sum, zip(bench.ticks, quiet.figures())))
    costs = {
        name: [joined(one["costs_us"][name][rank] for one in starts) for rank in range(RANKS)]
        for name in starts[0]["costs_us"]
    }
    return {
        "ms": {
            name: {part: joined(one["ms"][name][part] for one in starts) for part in parts}
            for name, parts in starts[0]["ms"].items()
        },
        "errors": starts[0]["errors"],
        "costs_us": {name: {str(rank): of for rank, of in enumerate(ranks)} for name, ranks in costs.items()},
        "predicted_ms": {"of two": predicted(costs, RANKS, ""), "of one": predicted(costs, 1, "alone ")},
    }


def start(bench: Bench) -> dict[str, Any]:
    """Runs as many rounds as other sections have turns."""
    names = bench.shop.names
    with tempfile.TemporaryDirectory(prefix="accl-peers-layers-") as folder:
        board.create(Path(folder) / "board").close()
        command = [names["python"], str(PROGRAM), folder, names["libraries"], str(bench.effort.turns)]
        found = answers_of(command, RANKS, {}, limit_s=LIMIT_S)
    if not all(found):
        raise Unavailable("a rank has failed")
    return found[0]


def joined(lists: Any) -> list[float]:
    """Joins lists."""
    return [value for values in lists for value in values]


def predicted(costs: dict[str, list[list[float]]], ranks: int, prefix: str) -> dict[str, list[float]]:
    """Returns, by factor, the planner's prediction for each round, from the times of layers and messages in the same
    round."""
    native = load_native()
    planners = [
        Planner(native, ranks, costs_of_turn(costs, turn, ranks, prefix))
        for turn in range(len(next(iter(costs.values()))[0]))
    ]
    settings = {str(factor): Setting("multigrid", factor, 2, FORWARD, BACKWARD) for factor in FACTORS}
    return {
        name: [round(sum(planner.time(setting)) / 1e9, 3) for planner in planners] for name, setting in settings.items()
    }


def costs_of_turn(costs: dict[str, list[list[float]]], turn: int, ranks: int, prefix: str) -> Costs:
    """Returns the costs of a round: each rank's own layer times, and the mean over ranks for everything else."""

    def ps(name: str, rank: int) -> int:
        return round(1e6 * costs[name][rank][turn])

    def mean(name: str) -> int:
        return sum(ps(name, rank) for rank in range(ranks)) // ranks

    layers: list[LayerTimes] = []
    for rank in range(ranks):
        plain_, recorded, input_vjp, full_vjp = (ps(prefix + name, rank) for name in LAYER_COSTS)
        layers += [(plain_, recorded, input_vjp, full_vjp)] * (LAYERS // ranks)
    kib = STATE_BYTES / 1024
    empty, state = ps("empty_trip", 0), ps("state_trip", 0)
    return Costs(
        layers,
        STATE_BYTES,
        add_per_kib=round(mean(f"{prefix}add") / kib),
        message=mean("message"),
        latency=max(empty - mean("message"), 0),
        wire_per_kib=round(max(state - empty, 0) / kib),
    )


# ---- tables


def tables(data: dict[str, Any]) -> list[Table]:
    """Returns tables of times with targets, of accl and gloo, of predictions, and of the costs behind them."""
    ms = data.get("ms", {})
    if not ms:
        return []
    return [times(ms, data["errors"]), backends(ms), predictions(data), layers(data["costs_us"])]


def paired(above: Sequence[float], below: Sequence[float]) -> float:
    """Returns the median of the rounds' quotients."""
    return median(one / other for one, other in zip(above, below))


def times(ms: dict[str, Any], errors: dict[str, Any]) -> Table:
    """Returns a table with a row for each method."""
    table = Table(
        [
            f"{RANKS} ranks, per batch, ms",
            "forward",
            "backward",
            "both",
            "both, least",
            "speed-up over one thread",
            "speed-up of least times",
            "error of output",
            "error of gradients",
        ]
    )
    serial = ms[SERIAL]["sum"]
    for name, title in TITLES.items():
        forward, together = ms[name]["forward"], ms[name]["sum"]
        passes = ["", ""]
        if forward != together:
            backward = [whole - part for part, whole in zip(forward, together)]
            passes = [plain(median(forward)), plain(median(backward))]
        speedup = paired(serial, together)
        backend, _, factor = name.partition(" ")
        is_ours = backend == "accl" and factor.isdigit()
        shown = Target(speedup, at_least=SPEEDUPS[int(factor)]) if is_ours else plain(speedup)
        off = [scientific(errors[name][what]) for what in ("output", "gradient")]
        least = plain(min(serial) / min(together))
        table.row(title, [*passes, plain(median(together)), plain(min(together)), shown, least, *off])
    return table


def scientific(value: float) -> str:
    """Returns two digits in scientific notation."""
    return f"{value:.1e}" if value else "0"


def backends(ms: dict[str, Any]) -> Table:
    """Returns a table of the same multigrid over both backends."""
    table = Table(["time of a batch", *(f"c = {factor}" for factor in FACTORS)])
    shares = (paired(ms[f"accl {factor}"]["sum"], ms[f"gloo {factor}"]["sum"]) for factor in FACTORS)
    table.row("accl / gloo", [Target(share, at_most=OVER_GLOO) for share in shares])
    return table


def predictions(data: dict[str, Any]) -> Table:
    """Returns a table of predictions and measurements of the same rounds."""
    table = Table(["per batch, ms", *(f"c = {factor}" for factor in FACTORS)])
    for place, prefix, title in (("of one", "one rank", "1 rank"), ("of two", "accl", f"{RANKS} ranks")):
        costs_of_turn = [data["predicted_ms"][place][str(factor)] for factor in FACTORS]
        found = [data["ms"][f"{prefix} {factor}"]["sum"] for factor in FACTORS]
        table.row(f"{title}: predicted", [plain(median(rounds)) for rounds in costs_of_turn])
        table.row(f"{title}: measured", [plain(median(rounds)) for rounds in found])
        off = [abs(paired(mine, theirs) - 1) for mine, theirs in zip(found, costs_of_turn)]
        table.row(f"{title}: relative error", [Target(value, at_most=CLOSE) for value in off])
    return table


def layers(costs: dict[str, dict[str, list[float]]]) -> Table:
    """Returns a table of the costs from which predictions are computed."""
    head = ["forward", "forward, recorded", "VJP of the input", "VJP of input and parameters", "sum of states"]
    table = Table(
        ["per layer, us", *head, "send of an empty message", "half a round trip, empty", "half a round trip, state"]
    )
    names = (*LAYER_COSTS, "add")

    def of_all(name: str) -> str:
        return plain(median(joined(costs[name].values())))

    def of_first(name: str) -> str:
        return plain(median(costs[name]["0"]))

    shown: tuple[tuple[str, Callable[[str], str], str], ...] = (
        ("one rank computes", of_first, "alone "),
        ("both ranks compute", of_all, ""),
    )
    for title, of, prefix in shown:
        messages = [] if prefix else [of_all("message"), of_first("empty_trip"), of_first("state_trip")]
        table.row(title, [*(of(prefix + name) for name in names), *(messages or [""] * 3)])
    return table


SECTION = Section(
    name="layer_parallel",
    title="Layer-parallel training",
    text=(
        f"A batch of 32 passes through {LAYERS} steps x + f(x)/{LAYERS} in float32, forward and backward without "
        "an optimizer. The function f is two convolutions of 8 channels with ReLU on 28 x 28.\n\n"
        "Method:\n\n"
        "* There are two processes, each with one thread on its own core. The slower rank determines the time.\n"
        "* All methods use the same modules and alternate in one loop, in changing order. While one process "
        "computes alone, the other process sleeps.\n"
        "* Times are the median and the least time of the rounds. The speed-up over one thread is the median of "
        "the quotients of each round.\n"
        "* Multigrid has two levels, F-relaxation, two forward iterations and one backward iteration. A coarse "
        "step replaces c layers.\n"
        "* Pipelines have 4 micro-batches and use accl.\n"
        "* Errors are relative to one process, in the 2-norm, over all parameters.\n\n"
        "Targets:\n\n"
        "* Median speed-ups of multigrid over accl: "
        f"{', '.join(f'{target} for c = {factor}' for factor, target in SPEEDUPS.items())}.\n"
        "* Multigrid is not slower over accl than over gloo.\n"
        f"* Predictions are within {CLOSE:.0%}. `_native.LayerPlan.simulate` computes them from the times of "
        "layers, sums of states and messages in the same round. While these times are measured, as many ranks "
        "compute as the prediction assumes.\n\n"
        "The same setting was also measured on another machine of two cores. The least times of torchbraid over "
        "MPI were 0.82, 1.03 and 1.21 times as fast as one thread for c = 4, 8 and 16. Medians of a prototype of "
        "this solver over gloo were 1.32, 1.42 and 1.53."
    ),
    collect=collect,
    tables=tables,
)
