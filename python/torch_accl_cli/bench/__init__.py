"""`accl bench`: times collectives between processes, over accl and other backends in turn.

This module owns the command line. `request.py` checks its values, `rank.py` runs a rank, and `measure.py` takes the times.
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
SUMMARY = "time collectives over accl and other backends"

_DESCRIPTION = """\
Times collectives between processes of this machine, or between the ranks that torchrun, mpirun or srun started.
Backends take turns within one run and never run at once. A time is the median of the medians of the rounds."""

_EPILOG = """\
columns:
  size     bytes of the largest buffer of the call, rounded down to whole elements for each rank: the whole output of
           all_gather or gather, the whole input of reduce_scatter, scatter or all_to_all, the tensor of other calls
  count    elements of this buffer, or of one rank's block if the call has blocks
  time     time of one call. all_reduce, reduce_scatter, all_gather, all_to_all and barrier are issued back to back,
           and the slowest rank counts. A rooted call (broadcast, reduce, gather, scatter) has rank 0 as root. It
           follows an untimed barrier and lasts until it has completed on the last rank
  algbw    size / time, in GB/s of 10^9 bytes
  busbw    algbw times a factor, with n ranks: 2(n-1)/n for all_reduce, (n-1)/n for calls with blocks, 1 for broadcast
           and reduce
  #wrong   elements with a wrong value, summed over all ranks, in one call before the timing
  ratio    time of the other backend or codec over the time of accl; with --try-all, time of the engine's choice over
           the time of the best algorithm
  error    of a codec: norm of the error over the norm of the exact result, in one call on Gaussian values

exit status: 0; 1 if a result is wrong or a rank failed; 2 if an argument is invalid or something is missing

examples:
  accl bench --against gloo --sizes 4-64MiB:x4
  accl bench all_reduce all_gather --dtype float32,bfloat16 --ranks 4 --json
  accl bench --codec maxmin:4 --codec maxmin:8,bucket=128 --sizes 1MiB,25MiB
  accl bench all --try-all --sizes 4,16KiB,1MiB
  accl bench --device cuda --against nccl,gloo
  torchrun --nproc-per-node 2 --no-python accl bench --against gloo --plot speed.png"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the command's arguments."""
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.description, parser.epilog = _DESCRIPTION, _EPILOG
    add = parser.add_argument
    add("collectives", nargs="*", metavar="COLLECTIVE", help="collectives such as all_reduce (the default), or all")
    add("--sizes", default="4-64MiB:x4", help="sizes and ranges, such as 4,1KiB or 4-64MiB:x4 (default %(default)s)")
    add("--dtype", default="float32", help="data types, such as float32,bfloat16 (default %(default)s)")
    add("--op", default="sum", help="reduction operators, such as sum,max (default %(default)s)")
    add("--ranks", type=int, help="processes to start (default 2; under a launcher, its number of ranks)")
    add("--against", metavar="BACKENDS", help="other backends to time, such as gloo or gloo,mpi")
    add(
        "--codec",
        action="append",
        metavar="CODEC",
        help="also time accl with this codec, such as maxmin:4 or bf16; repeat the option for further codecs",
    )
    add(
        "--device",
        default="cpu",
        metavar="TYPE",
        help="type of device that has the tensors, such as cuda, or one device such as cuda:0 for all ranks (default %(default)s)",
    )
    add("--algorithm", metavar="NAME", help="force accl to use this algorithm (`accl algorithms` lists them)")
    add("--try-all", action="store_true", help="time every algorithm in the engine and judge the engine's choice")
    add("--engine", action="store_true", help="time accl without torch; other backends still run through torch")
    how_long = parser.add_mutually_exclusive_group()
    how_long.add_argument("--iterations", type=int, metavar="N", help="calls in each round (default: set by --time)")
    how_long.add_argument(
        "--time", type=float, default=0.2, metavar="S", help="seconds for each case and backend (default %(default)s)"
    )
    add("--alternations", type=int, default=5, metavar="N", help="rounds of all backends in turn (default %(default)s)")
    add("--warmup", type=int, default=5, metavar="N", help="calls before the first round (default %(default)s)")
    add(
        "--pin",
        action=argparse.BooleanOptionalAction,
        help="bind each rank to its own core (default: if there are enough cores and no launcher has bound the ranks)",
    )
    add("--json", action="store_true", help="print one JSON document instead of the table")
    add("--plot", type=Path, metavar="FILE", help="draw time and bus bandwidth over size into a file such as speed.png")
    add("--timeout", type=float, default=60, metavar="S", help="timeout of a call in seconds (default %(default)s)")


def run(given: argparse.Namespace) -> int:
    """Runs the benchmark: as a rank if a launcher started this process, otherwise by starting ranks."""
    # The next imports load torch, which may be missing or refused.
    load_native()
    from .processes import Failed, one_sentence, run_ranks
    from .rank import run_rank
    from .rank_info import given_rank_info, meet
    from .request import check_pin, check_plot, check_ranks, checked_request

    rank_info = None
    try:
        rank_info = given_rank_info()
        asked = checked_request(given)
        if rank_info is None:
            ranks = 2 if given.ranks is None else given.ranks
            check_ranks(ranks)
            check_pin(asked.pin, ranks, len(os.sched_getaffinity(0)))
            check_plot(asked.plot)
            asked.check_memory(ranks, ranks)
            return run_ranks(ranks, asked.timeout_s, lambda rank_info, store: run_rank(asked, rank_info, store))
        if given.ranks not in (None, rank_info.world):
            raise WrongInput(
                f"--ranks: expected {rank_info.world}, as started by {rank_info.launcher}, got {given.ranks}"
            )
        return run_rank(asked, rank_info, meet(rank_info, asked.timeout_s))
    except WrongInput:
        # All ranks of a launcher find the same error, and only rank 0 reports it.
        if rank_info is not None and rank_info.rank != 0:
            return 2
        raise
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        raise
    except (Failed, RuntimeError, ValueError, OSError) as error:
        where = f"rank {rank_info.rank}: " if rank_info is not None else ""
        print(f"accl bench: {where}{one_sentence(error)}", file=sys.stderr)
        return 1
