"""Command line of the peers suite; see `--help`.

One process loads the suite for one backend and one world. With several backends or worlds, this process runs the others
as children.
"""

from __future__ import annotations

import argparse
import os
import platform
import re
import subprocess
import sys
import time
from collections.abc import Container
from pathlib import Path
from typing import Any

from . import compare

BASELINES = Path(__file__).parent / "baseline"
# Names that each backend answers to, so that the suite does not skip by name tests that the backend can run.
ALIASES = {"accl": "gloo,mpi"}


def main() -> int:
    """Runs the requested tests; returns 1 if a test is lost."""
    args = _arguments()
    # Ranks share the cores of one machine. Set before torch is loaded, here and in every child.
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
        os.environ.setdefault(name, "1")
    # The machine's own calibration must not choose the algorithms, unless the caller names one.
    os.environ.setdefault("ACCL_CALIBRATION", "off")
    os.environ.setdefault("TORCH_FR_DUMP_ON_TIMEOUT", "0")
    if len(args.world) == 1:
        return _one_world(args, args.world[0])
    extra = ["--baseline", args.baseline, *_as(args.alias), *(["--store-baseline"] if args.store_baseline else [])]
    codes = [_child(args, args.backend, world, extra).returncode for world in args.world]
    _print_comparison(args)
    print(f"worlds {', '.join(map(str, args.world))}: {'ok' if not any(codes) else 'lost, see above'}")
    return int(any(codes))


def _print_comparison(args: argparse.Namespace) -> None:
    """Prints one line per world and backend, read from the JSON files that the children wrote."""
    print(f"{'world':>5}  {'backend':<8} {'pass':>5} {'skip':>5} {'fail':>5} {'seconds':>8}")
    alias = ALIASES.get(args.backend, "") if args.alias is None else args.alias
    aliases = tuple(filter(None, alias.split(",")))
    for world in args.world:
        paths = [_default_path(args.backend, aliases, world, args.mpi), _default_path("gloo", (), world)]
        if args.baseline == "stored" and args.backend != "gloo" and paths[0].exists():
            stored = _stored(compare.load(paths[0])["torch"], world)
            paths[1:] = [stored] if stored.exists() else paths[1:]
        for path in dict.fromkeys(path for path in paths if path.exists()):
            run = compare.load(path)
            number = run["counts"]
            bad = sum(number[kind] for kind in compare.BAD)
            seconds = f"{run['seconds']:.0f}" if "seconds" in run else "stored"
            print(f"{world:>5}  {run['backend']:<8} {number['pass']:>5} {number['skip']:>5} {bad:>5} {seconds:>8}")


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m tests.peers",
        description="Runs PyTorch's own DistributedTest suite, which ships in the torch wheel, on a backend, and "
        "compares the result with gloo. Ends with 1 if anything that passes on gloo is lost, if a test fails that is "
        "not a known failure, or if the counts of a whole run differ from the targets.",
    )
    parser.add_argument("--backend", default="accl", help="backend to test (default: accl)")
    parser.add_argument(
        "--world", type=_worlds, default=[2], help="number of ranks, or several: 2,3,4 (default: 2)", metavar="N[,N]"
    )
    parser.add_argument(
        "--as",
        dest="alias",
        default=None,
        metavar="NAMES",
        help="backend names the suite takes this one for; '' for none (default: gloo,mpi for accl, else none)",
    )
    parser.add_argument("-k", "--select", metavar="REGEX", help="only tests whose name matches")
    parser.add_argument("--exclude", metavar="REGEX", help="not the tests whose name matches")
    parser.add_argument(
        "--gap", action="append", default=[], help="declare a gap: a key of DistTestCases.skip_collective, e.g. reduce"
    )
    parser.add_argument("--timeout", type=float, default=120.0, help="seconds per test (default: 120)")
    parser.add_argument("--json", type=Path, help="write the run here (default: in .make/peers)")
    parser.add_argument(
        "--baseline",
        default="stored",
        metavar="stored|run|none|FILE",
        help="the gloo run to compare with: the one kept in tests/peers/baseline if it fits this torch, world and "
        "machine, else a fresh one (stored); always a fresh one (run); none; or a file (default: stored)",
    )
    parser.add_argument(
        "--direct-monitored-barrier",
        action="store_true",
        help="call monitored_barrier on the group: torch 2.13 refuses dist.monitored_barrier by backend name",
    )
    parser.add_argument(
        "--store-baseline",
        action="store_true",
        help="keep this gloo run in tests/peers/baseline, without times and texts",
    )
    parser.add_argument(
        "--mpi",
        metavar="MPIRUN[:FOLDER]",
        help="give each test's ranks places in a job of this mpirun and use the transport mpi alone, of the package in FOLDER, which was "
        "built for its library (make test-mpi does)",
    )
    parser.add_argument(
        "--one-card",
        action="store_true",
        help="let all ranks use card 0, and report a card for each rank to the suite",
    )
    parser.add_argument(
        "--shard", type=_shard, default=(1, 1), metavar="I/N", help="only every Nth test, from the Ith on"
    )
    parser.add_argument("--seconds", type=float, default=float("inf"), help="begin no test after this time")
    parser.add_argument("--list", action="store_true", help="list the tests and stop")
    parser.add_argument("-v", "--verbose", action="store_true", help="one line per test")
    return parser.parse_args()


def _worlds(text: str) -> list[int]:
    worlds = [int(part) for part in text.split(",")]
    if any(world < 1 for world in worlds):
        raise argparse.ArgumentTypeError("a world has at least one rank")
    return worlds


def _shard(text: str) -> tuple[int, int]:
    first, _, number = text.partition("/")
    if not (first.isdecimal() and number.isdecimal() and 1 <= int(first) <= int(number)):
        raise argparse.ArgumentTypeError(f"expected I/N with I from 1 to N, got {text}")
    return int(first), int(number)


def _as(alias: str | None) -> list[str]:
    return [] if alias is None else ["--as", alias]


def _one_world(args: argparse.Namespace, world: int) -> int:
    import torch

    from .suite import Setup, Suite

    alias = ALIASES.get(args.backend, "") if args.alias is None else args.alias
    setup = Setup(
        backend=args.backend,
        aliases=tuple(filter(None, alias.split(","))),
        world=world,
        timeout_s=args.timeout,
        gaps=tuple(args.gap),
        direct_monitored_barrier=args.direct_monitored_barrier,
        mpirun=_mpirun(args.mpi),
        one_card=args.one_card,
    )
    # With one card for all ranks, this process must not ask for cards: its forked ranks could not use CUDA.
    gpus = world if args.one_card else torch.cuda.device_count()
    suite = Suite(setup)
    every = suite.names()
    first, number = args.shard
    chosen = [name for name in every if _chosen(name, args.select, args.exclude)][first - 1 :: number]
    if args.list:
        print("\n".join(chosen))
        return 0
    title = f"{setup.backend}{' as ' + '+'.join(setup.aliases) if setup.aliases else ''}, world {world}"
    print(f"{title}: {len(chosen)} of {len(every)} tests, torch {torch.__version__}", flush=True)
    begin = time.monotonic()
    known = compare.known(setup.backend, torch.__version__, setup.direct_monitored_barrier)
    tests = _run_tests(suite, chosen, known, args.verbose, begin + args.seconds)
    run: dict[str, Any] = {
        "backend": setup.backend,
        "aliases": list(setup.aliases),
        "world": world,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "gpus": gpus,
        "start": "fork",
        "gaps": list(setup.gaps),
        "direct_monitored_barrier": setup.direct_monitored_barrier,
        "whole": len(chosen) == len(every),
        "seconds": round(time.monotonic() - begin, 1),
        "counts": compare.counts(tests),
        "tests": tests,
    }
    path = args.json or _default_path(setup.backend, setup.aliases, world, args.mpi)
    compare.save(run, path)
    number = ", ".join(f"{count} {kind}" for kind, count in run["counts"].items() if count or kind in ("pass", "skip"))
    print(f"{title}: {number}; {run['seconds']:.0f} s; written to {path}", flush=True)
    if args.store_baseline:
        if setup.backend != "gloo" or setup.aliases or not run["whole"]:
            sys.exit("a baseline is a whole run of stock gloo")
        compare.save(compare.slim(run), _stored(torch.__version__, world))
    verdict = compare.judge(run, _baseline(args, world, torch.__version__, gpus))
    for line in verdict.lines:
        print(f"  {line}")
    for line in verdict.bad:
        print(f"  LOST {line}")
    return int(bool(verdict.bad))


def _mpirun(text: str | None) -> str | None:
    """Returns the mpirun command after preparing this process for the `mpi` transport; None if `text` is None."""
    if text is None:
        return None
    mpirun, _, folder = text.partition(":")
    if folder:
        sys.path.insert(0, folder)
    os.environ["ACCL_TRANSPORTS"] = "mpi"
    return mpirun


def _chosen(name: str, select: str | None, exclude: str | None) -> bool:
    return (not select or re.search(select, name) is not None) and not (exclude and re.search(exclude, name))


def _run_tests(
    suite: Any, names: list[str], known: Container[str], verbose: bool, until: float
) -> dict[str, dict[str, Any]]:
    tests: dict[str, dict[str, Any]] = {}
    live = sys.stdout.isatty() and not verbose
    for index, name in enumerate(names, 1):
        if time.monotonic() > until:
            print(f"time is up: {len(names) - index + 1} tests are left out", flush=True)
            break
        if live:
            print(f"\r\033[K[{index}/{len(names)}] {name}", end="", flush=True)
        outcome = suite.run(name, until)
        if outcome.kind == "timeout" and time.monotonic() > until:
            print(f"time is up: {name} was ended, {len(names) - index} tests are left out", flush=True)
            break
        tests[name] = {"outcome": outcome.kind, "seconds": round(outcome.seconds, 2), "reason": outcome.reason}
        if live:
            print("\r\033[K", end="")
        if outcome.kind in compare.BAD and name in known:
            print(f"known failure {name} ({outcome.seconds:.1f} s); its output is in the JSON", flush=True)
        elif outcome.kind in compare.BAD:
            print(f"{outcome.kind.upper()} {name} ({outcome.seconds:.1f} s)")
            print("  " + outcome.reason.strip().replace("\n", "\n  "), flush=True)
        elif verbose:
            print(f"{outcome.kind} {name} ({outcome.seconds:.1f} s) {outcome.reason}", flush=True)
        elif not live and index % 60 == 0:
            print(f"  [{index}/{len(names)}]", flush=True)
    return tests


def _default_path(backend: str, aliases: tuple[str, ...], world: int, mpirun: str | None = None) -> Path:
    kind = "-as-" + "-".join(aliases) if aliases and backend not in ALIASES else ""
    if mpirun is not None:
        kind += "-" + Path(mpirun.partition(":")[0]).name
    return Path(".make") / "peers" / f"{backend}{kind}-world{world}.json"


def _stored(torch_version: str, world: int) -> Path:
    return BASELINES / f"gloo-torch{compare.minor(torch_version)}-world{world}.json"


def _baseline(args: argparse.Namespace, world: int, torch_version: str, gpus: int) -> dict[str, Any] | None:
    if args.baseline == "none" or args.backend == "gloo":
        return None
    if args.baseline not in ("stored", "run"):
        return compare.load(Path(args.baseline))
    stored = _stored(torch_version, world)
    if args.baseline == "stored" and stored.exists():
        baseline = compare.load(stored)
        if compare.reusable(baseline, torch_version, world, gpus):
            return baseline
    path = _default_path("gloo", (), world)
    if _child(args, "gloo", world, ["--as", "", "--baseline", "none", "--json", str(path)]).returncode != 0:
        print("  the gloo baseline itself has failures", flush=True)
    return compare.load(path)


def _child(args: argparse.Namespace, backend: str, world: int, extra: list[str]) -> subprocess.CompletedProcess[bytes]:
    command = [sys.executable, "-m", str(__package__), "--backend", backend, "--world", str(world), *extra]
    command += ["--timeout", str(args.timeout)]
    for flag, value in (("--select", args.select), ("--exclude", args.exclude)):
        if value:
            command += [flag, value]
    for gap in args.gap if backend == args.backend else []:
        command += ["--gap", gap]
    if args.direct_monitored_barrier and backend == args.backend:
        command.append("--direct-monitored-barrier")
    if args.mpi and backend == args.backend:
        command += ["--mpi", args.mpi]
    if args.verbose:
        command.append("--verbose")
    return subprocess.run(command, check=False)


if __name__ == "__main__":
    sys.exit(main())
