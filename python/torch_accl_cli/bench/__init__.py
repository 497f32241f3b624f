"""`accl bench`: times collectives between processes, over accl and other backends in turn.

This module owns the command line. `wanted.py` checks its values, `rank.py` runs a rank, and `measure.py` takes the times.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

from .._package import load_native
from .._wrong import WrongInput

__all__ = ["NAME", "SUMMARY", "add_arguments", "run"]

NAME = "bench"
SUMMARY = "time collectives, beside other backends"

_DESCRIPTION = """\
Times collectives between processes of this machine, or between those that torchrun, mpirun or srun started.
Backends take turns within one run and never run at once; a time is the median of the medians of the rounds."""

_EPILOG = """\
columns:
  size     bytes of the largest buffer of the call: the whole output of an all_gather or gather, the whole input of a
           reduce_scatter, scatter or all_to_all, the tensor of the others; rounded down to whole elements for each rank
  count    elements of it, or of one rank's block where the call has blocks
  time     one call. all_reduce, reduce_scatter, all_gather, all_to_all and barrier follow one another, and the slowest
           rank counts. A rooted call (broadcast, reduce, gather, scatter; the root is rank 0) is made after a barrier
           that is not counted and lasts until its last rank is done
  algbw    size / time, in GB/s of 10^9 bytes
  busbw    algbw times 2(n-1)/n for all_reduce, (n-1)/n for calls with blocks, 1 for broadcast and reduce, n ranks
  #wrong   elements with a wrong value on all ranks, of one call before the timing
  ratio    time of the other backend or codec over that of accl; with --try-all, of the choice over the best algorithm
  error    of a codec: norm of the error over that of the exact result, of one call on Gaussian values

exit status: 0; 1 when a result is wrong or a rank failed; 2 when the arguments are wrong or something is missing

examples:
  accl bench --against gloo --sizes 4-64MiB:x4
  accl bench all_reduce all_gather --dtype float32,bfloat16 --ranks 4 --json
  accl bench --codec maxmin:4 --codec maxmin:8,bucket=128 --sizes 1MiB,25MiB
  accl bench all --try-all --sizes 4,16KiB,1MiB
  torchrun --nproc-per-node 2 --no-python accl bench --against gloo --plot speed.png"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the command's arguments."""
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.description, parser.epilog = _DESCRIPTION, _EPILOG
    add = parser.add_argument
    add("collectives", nargs="*", metavar="COLLECTIVE", help="such as all_reduce (the default); all for all of them")
    add("--sizes", default="4-64MiB:x4", help="sizes and ranges, such as 4,1KiB or 4-64MiB:x4 (default %(default)s)")
    add("--dtype", default="float32", help="types, such as float32,bfloat16 (default %(default)s)")
    add("--op", default="sum", help="operators of what reduces, such as sum,max (default %(default)s)")
    add("--ranks", type=int, help="processes to start (default 2; under a launcher, those that it started)")
    add("--against", metavar="BACKENDS", help="other backends to time, such as gloo or gloo,mpi")
    add(
        "--codec",
        action="append",
        metavar="CODEC",
        help="also time accl with compressed messages, such as maxmin:4 or bf16; give it again for another",
    )
    add("--algorithm", metavar="NAME", help="let accl take this algorithm (`accl algorithms` lists them)")
    add("--try-all", action="store_true", help="time every algorithm in the engine and judge the engine's choice")
    add("--engine", action="store_true", help="time accl without torch; peers still through torch")
    how_long = parser.add_mutually_exclusive_group()
    how_long.add_argument("--iterations", type=int, metavar="N", help="calls in each round (default: by --time)")
    how_long.add_argument(
        "--time", type=float, default=0.2, metavar="S", help="seconds for a case and backend (default %(default)s)"
    )
    add("--alternations", type=int, default=5, metavar="N", help="rounds of all backends in turn (default %(default)s)")
    add("--warmup", type=int, default=5, metavar="N", help="calls before the first round (default %(default)s)")
    add(
        "--pin",
        action=argparse.BooleanOptionalAction,
        help="keep each rank on a core of its own (default: if there are enough, and no launcher did it)",
    )
    add("--json", action="store_true", help="print one JSON document instead of the table")
    add("--plot", type=Path, metavar="FILE", help="draw time and bus bandwidth over size, such as speed.png")
    add("--timeout", type=float, default=60, metavar="S", help="seconds that a call may take (default %(default)s)")


def run(given: argparse.Namespace) -> int:
    """Runs the benchmark: as a rank if a launcher started this process, otherwise by starting ranks."""
    # The next imports load torch, which may be missing or refused.
    load_native()
    from .place import meet, place_given
    from .processes import Failed, run_ranks, said_by
    from .rank import run_rank
    from .wanted import check_pin, check_plot, check_ranks, wanted

    place = None
    try:
        place = place_given()
        asked = wanted(given)
        if place is None:
            ranks = 2 if given.ranks is None else given.ranks
            check_ranks(ranks)
            check_pin(asked.pin, ranks, len(os.sched_getaffinity(0)))
            check_plot(asked.plot)
            asked.check_memory(ranks, ranks)
            return run_ranks(ranks, asked.timeout_s, lambda place, store: run_rank(asked, place, store))
        if given.ranks not in (None, place.world):
            raise WrongInput(f"--ranks: {place.launcher} started {place.world} ranks, so there cannot be {given.ranks}")
        return run_rank(asked, place, meet(place, asked.timeout_s))
    except WrongInput:
        # All ranks of a launcher find the same error, and only rank 0 reports it.
        if place is not None and place.rank != 0:
            return 2
        raise
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        raise
    except (Failed, RuntimeError, ValueError, OSError) as error:
        where = f"rank {place.rank}: " if place is not None else ""
        print(f"accl bench: {where}{said_by(error)}", file=sys.stderr)
        return 1
