"""Errors of codecs: of one encoding, and of sums over several ranks, compared with reference values.

    python -m benches.compression_errors

The error is the squared error over the sum of squares, of a million random numbers. The reference values were measured
with other implementations of the same arithmetic. The exit status is 1 if a value is off by more than its tolerance.
Owns the values and the tables. Calls run between processes of this machine, as in user programs. No times are measured.
"""

from __future__ import annotations

import os

# Set before numpy and torch are loaded: ranks share the machine, and are forked from this process.
os.environ.update(OMP_NUM_THREADS="1", OPENBLAS_NUM_THREADS="1", MKL_NUM_THREADS="1")

import argparse
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch_accl import Options, _native
from torch_accl.compression import all_gather_quantized, all_reduce_quantized
from torch_accl_cli.bench.processes import Failed, run_ranks

from . import blocks
from .peers import machine
from .peers.tables import Table

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs" / "compression"
PAGE = ROOT / "docs" / "compression-accuracy.md"
NAME = "errors"
COMMAND = "make codec-errors ARGS=--write-docs"
TIMEOUT_S = 120

SAMPLES = 1 << 20
SEED = 12345
SHAPES = ("Gaussian", "Laplace", "mixed scales")
ROW = 256

BITS = range(1, 9)
BUCKETS = (64, 128, 512, 1024, 2048, 8192)
# Reference values by shape and bucket, for `ONCE_BITS` bits, rounded to nearest.
ONCE_BITS = (1, 2, 3, 4, 5, 6, 8)
ONCE = {
    ("Gaussian", 64): (2.74, 0.203, 3.70e-2, 8.05e-3, 1.88e-3, 4.57e-4, 2.78e-5),
    ("Gaussian", 128): (3.56, 0.250, 4.57e-2, 9.94e-3, 2.33e-3, 5.64e-4, 3.44e-5),
    ("Gaussian", 512): (5.38, 0.348, 6.32e-2, 1.375e-2, 3.23e-3, 7.82e-4, 4.76e-5),
    ("Gaussian", 1024): (6.31, 0.398, 7.20e-2, 1.57e-2, 3.67e-3, 8.86e-4, 5.42e-5),
    ("Gaussian", 2048): (7.28, 0.451, 8.08e-2, 1.76e-2, 4.11e-3, 9.96e-4, 6.08e-5),
    ("Gaussian", 8192): (9.32, 0.564, 9.84e-2, 2.15e-2, 5.02e-3, 1.22e-3, 7.39e-5),
    ("Laplace", 128): (6.86, 0.443, 7.79e-2, 1.70e-2, 3.97e-3, 9.61e-4, 5.87e-5),
    ("Laplace", 512): (12.8, 0.811, 0.131, 2.84e-2, 6.66e-3, 1.61e-3, 9.84e-5),
    ("Laplace", 1024): (16.4, 1.05, 0.161, 3.51e-2, 8.23e-3, 1.99e-3, 1.21e-4),
}
# Reference values by codec, for the first two shapes; a build may lack some codecs. Mixed scales have none: a few rows
# of the largest scale dominate the sum of squares, and two draws of the scales differ by 5 %.
FORMATS = {
    "bf16": (2.8e-6, 2.7e-6),
    "maxmin:4,bucket=64,meta=float16": (8.05e-3, 1.23e-2),
    "maxmin:4,bucket=128,meta=float16": (9.94e-3, 1.70e-2),
    "absmax:4,bucket=32": (9.4e-3, 1.47e-2),
    "absmax:4,bucket=128": (1.37e-2, 2.57e-2),
    "absmax:4,bucket=512": (1.81e-2, 3.96e-2),
    "absmax:8,bucket=128": (4.2e-5, 8.0e-5),
    "mxfp4": (1.32e-2, 1.61e-2),
    "nvfp4": (9.0e-3, 8.6e-3),
    "hadamard:4,bucket=1024": (1.57e-2, 1.57e-2),
    "hadamard:2,bucket=1024,rounding=nearest": (0.400, 0.399),
    "mxfp8": (8.6e-4, 1.0e-3),
    "e4m3": (6.8e-4, 6.5e-4),
}
WITHIN = 0.05
RATIO, VARIANCE = "stochastic relative to nearest", "relative to its variance"
# Limits of the ratio of stochastic rounding to nearest, for rows of `ONCE`: about 2 from 3 bits on. With 2 bits many
# values are near a level instead of spread evenly between two, so the ratio differs. In large buckets of Laplace values
# it differs even more.
TWICE = (2.0 * 0.98, 2.0 * 1.02)
TWO_BITS = (1.8, 2.02)
# Tolerance of stochastic rounding, relative to its variance for these very numbers.
OF_VARIANCE = 0.02

WORLDS = (2, 4, 8)
SUM_BUCKET = 512
# Algorithms of all_reduce. The columns of `SUMS` have the same order.
ALGORITHMS = ("direct_two_phase", "ring", "rabenseifner", "double_binary_tree", "direct")
# Reference values by bits, correlation between ranks, and number of ranks. Columns: two phases, ring, a binomial tree's
# partial sums (halving has the same), double binary tree, one shot; then two phases with stochastic rounding. A double
# binary tree adds in another order, so it has no reference.
SUMS = {
    (4, 0.0, 2): (2.07e-2, 2.08e-2, 2.07e-2, None, 1.38e-2, 4.2e-2),
    (4, 0.0, 4): (2.42e-2, 3.50e-2, 2.76e-2, None, 1.38e-2, 4.9e-2),
    (4, 0.0, 8): (2.59e-2, 6.38e-2, 3.49e-2, None, 1.38e-2, 5.2e-2),
    (4, 0.5, 2): (None,) * 6,
    (4, 0.5, 4): (None,) * 6,
    (4, 0.5, 8): (1.66e-2, 4.75e-2, 2.17e-2, None, 3.1e-3, 3.3e-2),
    (8, 0.0, 2): (None,) * 6,
    (8, 0.0, 4): (None,) * 6,
    (8, 0.0, 8): (8.9e-5, 2.1e-4, 1.2e-4, None, 4.8e-5, 1.8e-4),
}


@dataclass(frozen=True)
class Check:
    """A value and its permitted range."""

    label: str
    value: float
    least: float
    most: float

    @property
    def is_met(self) -> bool:
        """Whether the value is in the range; false for NaN."""
        return self.least <= self.value <= self.most

    def __str__(self) -> str:
        return f"{self.label}: {self.value:.4g}, expected {self.least:.4g} to {self.most:.4g}"


def near(label: str, value: float, expected: float, within: float = WITHIN) -> Check:
    """Returns a check that a value is near another."""
    return Check(label, value, expected * (1 - within), expected * (1 + within))


def samples(count: int = SAMPLES) -> list[torch.Tensor]:
    """Returns random numbers of each shape. With mixed scales, rows have Gaussian values, and each row its own
    scale."""
    random = np.random.default_rng(SEED)
    found = [random.standard_normal(count), random.laplace(size=count)]
    scales = random.lognormal(sigma=1.5, size=(-(-count // ROW), 1))
    found.append((random.standard_normal((len(scales), ROW)) * scales).ravel()[:count])
    return [torch.from_numpy(values.astype(np.float32)) for values in found]


def nmse(found: torch.Tensor, exact: torch.Tensor) -> float:
    """Returns the squared error over the sum of squares."""
    wide = exact.double()
    return ((found.double() - wide).square().sum() / wide.square().sum()).item()


def of_all(own: float, group: dist.ProcessGroup | None = None) -> list[float]:
    """Returns each rank's value, on all ranks."""
    of_ranks = torch.empty(dist.get_world_size(group), dtype=torch.float64)
    dist.all_gather_into_tensor(of_ranks, torch.tensor([own], dtype=torch.float64), group)
    return of_ranks.tolist()


def error_once(codec: str, own: torch.Tensor, group: dist.ProcessGroup | None = None) -> list[float]:
    """Returns the error of one encoding of each rank's values, as that rank decodes them; all ranks decode the same
    bits."""
    output = torch.empty(dist.get_world_size(group) * len(own))
    all_gather_quantized(output, own, group, compression=codec, step=0)
    place = dist.get_group_rank(group or dist.group.WORLD, dist.get_rank())
    return of_all(nmse(output.split(len(own))[place], own), group)


def stochastic_variance(values: torch.Tensor, bits: int, bucket: int) -> float:
    """Returns the mean error of stochastic rounding: a value between two levels rounds to each with the other's
    relative distance as probability."""
    rows = values.double().view(-1, bucket)
    least = rows.amin(1, keepdim=True)
    unit = (rows.amax(1, keepdim=True) - least) / (2**bits - 1)
    part = ((rows - least) / unit).frac()
    return ((unit.square() * part * (1 - part)).sum() / rows.square().sum()).item()


def error_of_sum(codec: str, correlation: float, count: int = SAMPLES, group: dist.ProcessGroup | None = None) -> float:
    """Returns the error of an all_reduce of Gaussian values that are correlated between ranks. The same on all
    ranks."""
    shared, own = (np.random.default_rng([SEED, place]).standard_normal(count) for place in (0, 1 + dist.get_rank()))
    mine = torch.from_numpy((correlation**0.5 * shared + (1 - correlation) ** 0.5 * own).astype(np.float32))
    exact = mine.double()
    # float64 is sent uncompressed.
    dist.all_reduce(exact, group=group)
    all_reduce_quantized(mine, group=group, compression=codec, step=0)
    return nmse(mine, exact)


def once_codec(bits: int, bucket: int, rounding: str) -> str:
    """Returns the codec of a cell in the table of one encoding."""
    return f"maxmin:{bits},bucket={bucket},rounding={rounding}"


def listed() -> list[str]:
    """Returns every codec of this build with default settings, with 2, 4 and 8 bits where bits apply, and all codecs of
    `FORMATS`."""
    found = [codec for row in _native.codecs() for codec in variants(row["name"])]
    return list(dict.fromkeys([*found, *filter(is_known, FORMATS)]))


def variants(name: str) -> list[str]:
    """Returns a codec's settings: its name, or its name with 2, 4 and 8 bits if it needs them."""
    return [name] if is_known(name) else [codec for bits in (2, 4, 8) if is_known(codec := f"{name}:{bits}")]


def is_known(codec: str) -> bool:
    """Returns whether this build accepts a codec."""
    try:
        _native.check_codec(codec)
    except ValueError:
        return False
    return True


def bits_of(codec: str) -> float:
    """Returns the bits sent per element of a large tensor, headers included."""
    codecs = _native.Codecs([("raw", codec, codec, 0)])
    return 8 * codecs.encoded_bytes(0, "float32", SAMPLES)[0] / SAMPLES


def calls() -> Iterator[tuple[str, Any]]:
    """Yields the measurements in their order: kind and arguments."""
    for bucket in BUCKETS:
        for bits in BITS:
            for rounding in ("nearest", "stochastic"):
                yield "once", once_codec(bits, bucket, rounding)
            yield "variance", (bits, bucket)
    for codec in listed():
        yield "format", codec
    for bits, correlation, world in SUMS:
        for algorithm in ALGORITHMS:
            yield "sum", (bits, correlation, world, algorithm, "nearest")
        yield "sum", (bits, correlation, world, ALGORITHMS[0], "stochastic")


def measure(rank: int, world: int, tick: Callable[[int, int], None]) -> dict[str, Any]:
    """Returns all values by kind. Values of calls in which this rank takes no part are missing."""
    shapes = samples()
    few = dist.new_group(list(range(len(shapes))))
    groups = {
        (size, algorithm): dist.new_group(list(range(size)), pg_options=Options(algorithm=[f"all_reduce={algorithm}"]))
        for size in WORLDS
        for algorithm in ALGORITHMS
    }
    found: dict[str, Any] = {"once": {}, "variance": {}, "format": {}, "sum": {}}
    wanted = list(calls())
    for done, (kind, what) in enumerate(wanted):
        tick(done, len(wanted))
        if kind == "sum":
            bits, correlation, size, algorithm, rounding = what
            if rank < size:
                group = groups[size, algorithm]
                found[kind][sum_key(*what)] = error_of_sum(
                    once_codec(bits, SUM_BUCKET, rounding), correlation, group=group
                )
        elif rank < len(shapes) and kind == "variance":
            found[kind][once_codec(*what, "stochastic")] = of_all(stochastic_variance(shapes[rank], *what), few)
        elif rank < len(shapes):
            found[kind][what] = error_once(what, shapes[rank], few)
    tick(len(wanted), len(wanted))
    dist.barrier()
    return found


def sum_key(bits: int, correlation: float, world: int, algorithm: str, rounding: str) -> str:
    """Returns the key of a sum in the file of results."""
    return f"{bits} bits, correlation {correlation:g}, {world} ranks, {algorithm}, {rounding}"


def checks(found: dict[str, Any]) -> list[Check]:
    """Returns all checks of the measured values."""
    made = []
    for (shape, bucket), row in ONCE.items():
        for bits, expected in zip(ONCE_BITS, row):
            codec = once_codec(bits, bucket, "nearest")
            if codec in found["once"]:
                made.append(near(f"{shape}, {codec}", found["once"][codec][SHAPES.index(shape)], expected))
    for bits, bucket, shape, ratio in ratios(found):
        if bits > 1 and (shape, bucket) in ONCE:
            limits = TWO_BITS if bits == 2 else TWICE
            made.append(Check(f"{shape}, {bits} bits, bucket {bucket}, {RATIO}", ratio, *limits))
    for codec, row in found["variance"].items():
        for shape, value, expected in list(zip(SHAPES, found["once"][codec], row))[:2]:
            made.append(near(f"{shape}, {codec}, {VARIANCE}", value, expected, OF_VARIANCE))
    for codec, row in FORMATS.items():
        for shape, value, expected in zip(SHAPES, found["format"].get(codec, ()), row):
            made.append(near(f"{shape}, {codec}", value, expected))
    for (bits, correlation, world), row in SUMS.items():
        roundings = [*((algorithm, "nearest") for algorithm in ALGORITHMS), (ALGORITHMS[0], "stochastic")]
        for (algorithm, rounding), expected in zip(roundings, row):
            key = sum_key(bits, correlation, world, algorithm, rounding)
            if expected is not None and key in found["sum"]:
                made.append(near(key, found["sum"][key], expected))
    return made


def ratios(found: dict[str, Any]) -> Iterator[tuple[int, int, str, float]]:
    """Yields bits, bucket, shape, and the error of stochastic rounding over the error of rounding to nearest."""
    for bucket in BUCKETS:
        for bits in BITS:
            nearest, stochastic = (
                found["once"].get(once_codec(bits, bucket, how)) for how in ("nearest", "stochastic")
            )
            if nearest and stochastic:
                # Only Gaussian and Laplace: mixed scales do not affect a ratio.
                for shape, above, below in list(zip(SHAPES, stochastic, nearest))[:2]:
                    yield bits, bucket, shape, above / below


def tables(results: dict[str, Any]) -> list[str]:
    """Returns the results as Markdown."""
    found = results["figures"]
    made = checks(found)
    missed = [check for check in made if not check.is_met]
    furthest = max(abs(2 * check.value / (check.least + check.most) - 1) for check in made if is_of_others(check))
    return [
        f"The error is the squared error divided by the sum of squares, for {SAMPLES:,} numbers in float32 with seed {SEED}. "
        f"{len(made) - len(missed)} of {len(made)} figures are in their expected range:",
        "",
        f"* Figures with a reference: within {WITHIN:.0%} of the figures of other implementations of the same arithmetic. The "
        f"furthest is {furthest:.1%} off.",
        f"* Stochastic rounding: within {OF_VARIANCE:.0%} of its variance for these numbers.",
        "* Stochastic rounding relative to rounding to nearest, in the rows with a reference: 2.0 within 2 % from 3 bits on, and "
        f"{TWO_BITS[0]} to {TWO_BITS[1]} with 2 bits.",
        "",
        *(f"* **missed**: {check}" for check in missed),
        *([""] if missed else []),
        "One encoding by `maxmin`, rounded to nearest:",
        "",
        *once_table(found).lines(),
        "",
        "Stochastic rounding: the error as a multiple of the error above:",
        "",
        *ratio_table(found).lines(),
        "",
        "All codecs with their default settings, which round stochastically below 4 bits. Mixed scales are Gaussian values in "
        f"rows of {ROW}, where each row has its own log-normal scale; they have no reference:",
        "",
        *format_table(results).lines(),
        "",
        f"Sums of Gaussian values by `all_reduce` with `maxmin` and buckets of {SUM_BUCKET}, with and without correlation between "
        "the ranks' values:",
        "",
        *sum_table(found).lines(),
        "",
        f"Figures: {results['date']}, commit {results['commit']}, {results['processor']}.",
    ]


def is_of_others(check: Check) -> bool:
    """Returns whether the expected value comes from other implementations."""
    return not check.label.endswith((RATIO, VARIANCE))


def once_table(found: dict[str, Any]) -> Table:
    """Returns a table with a row for each shape and bucket."""
    table = Table(("", *(f"{bits} bits" if bits > 1 else "1 bit" for bits in BITS)))
    for place, shape in enumerate(SHAPES[:2]):
        for bucket in BUCKETS:
            row = [found["once"][once_codec(bits, bucket, "nearest")][place] for bits in BITS]
            table.row(f"{shape}, bucket {bucket}", map(short, row))
    return table


def ratio_table(found: dict[str, Any]) -> Table:
    """Returns a table of the ratios as ranges over buckets."""
    table = Table(("", *(f"{bits} bits" if bits > 1 else "1 bit" for bits in BITS)))
    for shape in SHAPES[:2]:
        columns = [[one[3] for one in ratios(found) if (one[0], one[2]) == (bits, shape)] for bits in BITS]
        table.row(f"{shape}, buckets 64 to 8192", (f"{min(column):.2f} to {max(column):.2f}" for column in columns))
    return table


def format_table(results: dict[str, Any]) -> Table:
    """Returns a table with a row for each codec, the fewest bits first."""
    table = Table(("", "bits per element", *SHAPES))
    found, bits = results["figures"]["format"], results["bits"]
    for codec in sorted(found, key=lambda codec: (bits[codec], codec)):
        table.row(f"`{codec}`", [f"{bits[codec]:.2f}", *map(short, found[codec])])
    return table


def sum_table(found: dict[str, Any]) -> Table:
    """Returns a table with a row for each combination of bits, correlation and ranks."""
    table = Table(("", *(f"`{algorithm}`" for algorithm in ALGORITHMS), f"`{ALGORITHMS[0]}`, stochastic"))
    for bits, correlation, world in SUMS:
        keys = [sum_key(bits, correlation, world, algorithm, "nearest") for algorithm in ALGORITHMS]
        keys.append(sum_key(bits, correlation, world, ALGORITHMS[0], "stochastic"))
        row = [short(found["sum"][key]) for key in keys]
        table.row(f"{bits} bits, correlation {correlation:g}, {world} ranks", row)
    return table


def short(value: float) -> str:
    """Returns three digits, in scientific notation if the value is small."""
    return f"{value:.3g}" if value == 0 or value >= 0.1 else f"{value:.2e}".replace("e-0", "e-")


def finish(results: dict[str, Any], asked: argparse.Namespace) -> int:
    """Writes the values and, if asked, the page, and prints the tables. Returns the exit status."""
    asked.out.mkdir(parents=True, exist_ok=True)
    (asked.out / f"{NAME}.json").write_text(json.dumps(results, indent=1, allow_nan=False) + "\n")
    lines = tables(results)
    print("\n".join(lines))
    if asked.write_docs:
        blocks.write(PAGE, NAME, COMMAND, lines)
    missed = [check for check in checks(results["figures"]) if not check.is_met]
    for check in missed:
        print(f"missed: {check}", file=sys.stderr)
    return 1 if missed else 0


def run(place: Any, store: Any, asked: argparse.Namespace) -> int:
    """Runs a rank. Returns the exit status; rank 0 also writes all results."""
    torch.set_num_threads(1)
    dist.init_process_group(
        "accl",
        store=dist.PrefixStore("errors", store),
        rank=place.rank,
        world_size=place.world,
        timeout=timedelta(seconds=TIMEOUT_S),
    )
    with_bar = place.rank == 0 and sys.stderr.isatty()
    figures = measure(place.rank, place.world, bar if with_bar else lambda done, total: None)
    dist.destroy_process_group()
    if place.rank != 0:
        return 0
    facts = {
        "format": 1,
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
        "commit": machine.commit(),
        "processor": machine.facts()["processor"],
        "bits": {codec: bits_of(codec) for codec in figures["format"]},
    }
    return finish(facts | {"figures": figures}, asked)


def bar(done: int, total: int) -> None:
    """Shows the progress on a line of its own."""
    print(f"\r{done} of {total} calls" + ("\n" if done == total else ""), end="", file=sys.stderr, flush=True)


def arguments(given: Sequence[str] | None = None) -> argparse.Namespace:
    """Parses the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m benches.compression_errors",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--out", type=Path, help="folder for the figures as JSON (default: demo-output)")
    parser.add_argument(
        "--write-docs", action="store_true", help="write the figures to docs/compression, and the page's tables"
    )
    parser.add_argument(
        "--page-only", action="store_true", help="measure nothing; write the page from existing figures"
    )
    asked = parser.parse_args(given)
    if asked.write_docs and asked.out:
        parser.error("--write-docs cannot be combined with --out")
    asked.out = DOCS if asked.write_docs else asked.out or Path("demo-output")
    if asked.page_only and not (asked.out / f"{NAME}.json").exists():
        parser.error(f"--page-only: {asked.out / NAME}.json does not exist")
    return asked


def main() -> int:
    """Measures, or writes existing results again. Returns 1 if a value is out of its range."""
    asked = arguments()
    if asked.page_only:
        return finish(json.loads((asked.out / f"{NAME}.json").read_text()), asked)
    try:
        return run_ranks(max(WORLDS), TIMEOUT_S, lambda place, store: run(place, store, asked))
    except Failed as error:
        print(f"compression_errors: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main())
