"""`accl run`: starts the ranks of a script, on this host or several, each on its own cores.

This module owns the command line and the output. `agent` starts and ends ranks, `hosts` reaches agents on other hosts, and `layout`
chooses the cores of each rank.
"""

from __future__ import annotations

import argparse
import io
import math
import os
import sys
from typing import Any, TextIO

from .._wrong import WrongInput

__all__ = ["NAME", "SUMMARY", "add_arguments", "run"]

NAME = "run"
SUMMARY = "start the ranks of a script, each on its own cores"

_DESCRIPTION = """\
Starts a script once for each rank, on its own cores and with the variables that torchrun sets. If a rank fails, all others are ended."""

_EPILOG = """\
On other hosts, ssh starts this command with the same interpreter and in the same folder. ssh must not ask for a password. Ranks get the
variables whose names begin with ACCL_, CCL_, OMP_, KMP_, MKL_, TORCH or PYTHON; --env adds others.

A rank gets whole cores, with all their hardware threads. If possible, a rank's cores are on one NUMA node. If there are more ranks than
cores, ranks are not bound. If OMP_NUM_THREADS is unset, it becomes the number of a rank's cores.

exit status: 0; the status of the rank that failed first (128 plus the signal's number if a signal killed it); 2 if an argument is invalid;
127 if the script cannot be started

examples:
  accl run -n 2 train.py --lr 0.1
  accl run -n 4 --hosts a,b:2 train.py
  accl run -n 2 -m package.train
  accl run -n 2 --no-python ./benchmark"""

_FORWARDED = ("ACCL_", "CCL_", "OMP_", "KMP_", "MKL_", "TORCH", "PYTHON")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the command's arguments."""
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.description, parser.epilog = _DESCRIPTION, _EPILOG
    # With abbreviations, an argument of the script such as --n would be taken for an option of this command.
    parser.allow_abbrev = False
    add = parser.add_argument
    add("-n", "--ranks", type=int, default=2, metavar="N", help="ranks on each host (default %(default)s)")
    add("--hosts", metavar="HOSTS", help="hosts, such as a,b or a:4,b:2 with numbers of ranks (default: this host)")
    add(
        "--bind",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="bind each rank to its own cores (the default)",
    )
    add(
        "--env",
        action="append",
        default=[],
        metavar="NAME[=VALUE]",
        help="environment variable for all ranks; repeat the option for further variables",
    )
    add("--prefix", action=argparse.BooleanOptionalAction, help="put the rank before each line (default: with --hosts)")
    add(
        "--grace",
        type=float,
        default=5,
        metavar="S",
        help="seconds until ranks are killed after one has failed (default %(default)s)",
    )
    add("--master-addr", default="", metavar="HOST", help="address of rank 0 for the other ranks (default: its host)")
    add("--master-port", type=int, default=0, metavar="PORT", help="port of rank 0's store (default: a free port)")
    add("--ssh", metavar="COMMAND", help="command to reach a host, such as `ssh -p 2222` (default: ssh, in batch mode)")
    add("--quiet", action="store_true", help="do not show where the ranks run")
    how = parser.add_mutually_exclusive_group()
    how.add_argument("-m", "--module", action="store_true", help="the script is a Python module")
    how.add_argument("--no-python", action="store_true", help="the script is a program, not a Python script")
    add("script", nargs="?", metavar="SCRIPT", help="a Python script")
    add("arguments", nargs=argparse.REMAINDER, metavar="...", help="its arguments")
    # Set when this command starts itself on another host.
    add("--agent", action="store_true", help=argparse.SUPPRESS)


def run(given: argparse.Namespace) -> int:
    """Runs the script. Returns the exit status."""
    from .agent import Order, run_here, serve
    from .hosts import Unreachable, hosts_of, run_on, ssh_command

    if given.agent:
        return serve()
    _check(given)
    prefixes = bool(given.hosts) if given.prefix is None else given.prefix
    passes_on = prefixes or bool(given.hosts)
    order = Order(
        command=_command(given, passes_on),
        directory=os.getcwd(),
        environment=_environment(given.env),
        ranks=given.ranks,
        world=given.ranks,
        master=given.master_addr,
        port=given.master_port,
        binds=given.bind,
        grace_s=given.grace,
        passes_on=passes_on,
    )
    shown = _Shown(given, prefixes)
    if given.hosts:
        try:
            hosts = hosts_of(given.hosts, given.ranks)
        except ValueError as error:
            raise WrongInput(f"--hosts: {error}") from None
        try:
            return run_on(hosts, order, ssh_command(given.ssh), shown)
        except Unreachable as error:
            print(f"accl run: {error}", file=sys.stderr)
            return 1
    return run_here(order, shown)


def _check(given: argparse.Namespace) -> None:
    if given.script is None:
        raise WrongInput("a script is missing; see `accl run --help`")
    if given.ranks < 1:
        raise WrongInput(f"-n: expected 1 or more ranks, got {given.ranks}")
    if not 0 <= given.master_port < 1 << 16:
        raise WrongInput(f"--master-port: expected a port number, got {given.master_port}")
    if not 0 <= given.grace < math.inf:
        raise WrongInput(f"--grace: expected a finite number of seconds, at least 0, got {given.grace:g}")
    if not given.module and not given.no_python and not given.hosts and not os.path.exists(given.script):
        raise WrongInput(
            f"{given.script}: no such script in {os.getcwd()}; use -m for a module and --no-python for a program"
        )


def _command(given: argparse.Namespace, passes_on: bool) -> list[str]:
    if given.no_python:
        return [given.script, *given.arguments]
    # Into a pipe Python would write whole blocks. With `-u` its output comes at once, and this process assembles the lines. At a
    # terminal Python itself writes line by line.
    python = [sys.executable, *(["-u"] if passes_on else [])]
    return [*python, *(["-m"] if given.module else []), given.script, *given.arguments]


def _environment(named: list[str]) -> dict[str, str]:
    # torchrun's own variables refer to a store other than the one that `accl run` gives to ranks.
    found = {
        name: value
        for name, value in os.environ.items()
        if name.startswith(_FORWARDED) and not name.startswith("TORCHELASTIC_")
    }
    for item in named:
        name, is_given, value = item.partition("=")
        if not is_given and name not in os.environ:
            raise WrongInput(f"--env: {name} is not set here; give its value as {name}=VALUE")
        found[name] = value if is_given else os.environ[name]
    return found


class _Shown:
    """Prints what happens to the ranks: where each runs, what it prints, and which failed first."""

    def __init__(self, given: argparse.Namespace, prefixes: bool) -> None:
        self._is_quiet, self._prefixes = given.quiet, prefixes
        # A character that the output's encoding lacks must not raise an error.
        for out in (sys.stdout, sys.stderr):
            if isinstance(out, io.TextIOWrapper):
                out.reconfigure(errors="backslashreplace")
        self._hosts = bool(given.hosts)
        self._pids: dict[int, int] = {}
        self._has_failed = False

    def __call__(self, *, host: str = "", **what: Any) -> None:
        at = f" on {host}" if host and self._hosts else ""
        if "line" in what:
            out = sys.stdout if what["stream"] == "out" else sys.stderr
            before = f"[{what['rank']}] " if self._prefixes else ""
            _say(before + what["line"], out)
        elif "started" in what:
            self._pids[what["started"]] = what["pid"]
            if not self._is_quiet:
                _say(f"accl run: rank {what['started']}{at}: process {what['pid']}, {_place(what)}", sys.stderr)
        elif "signalled" in what:
            # The sender of the signal knows the reason, so nothing is printed.
            self._has_failed = True
        elif "failed" in what:
            self._has_failed = True
            _say(f"accl run: {host + ': ' if at else ''}{what['failed']}", sys.stderr)
        elif what.get("status") and not self._has_failed:
            self._has_failed = True
            rank = what["ended"]
            pid, how = self._pids[rank], _end(what["status"])
            _say(f"accl run: rank {rank}{at} (process {pid}) {how}; the other ranks are ended", sys.stderr)


def _say(line: str, out: TextIO) -> None:
    try:
        print(line, file=out, flush=True)
    except BrokenPipeError:
        # Python would flush the unwritten text again at exit, fail, and change the exit status.
        os.dup2(os.open(os.devnull, os.O_WRONLY), out.fileno())
        raise


def _place(what: dict[str, Any]) -> str:
    if not what["cores"]:
        return "not bound"
    nodes = what["nodes"]
    plural = "" if what["cores"] == 1 else "s"
    return f"{what['cores']} core{plural} (CPUs {what['threads']}), NUMA node{'' if len(nodes) == 1 else 's'} {', '.join(map(str, nodes))}"


def _end(status: int) -> str:
    import signal

    if status > 0:
        return f"ended with exit status {status}"
    try:
        return f"was killed by {signal.Signals(-status).name}"
    except ValueError:
        return f"was killed by signal {-status}"
