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
SUMMARY = "start the ranks of a script, each on cores of its own"

_DESCRIPTION = """\
Starts a script once for each rank, with the variables that torchrun sets, on cores of its own, and ends all ranks when one fails."""

_EPILOG = """\
On several hosts, this command is started by ssh, which must not ask for a password, with the same interpreter and in the same folder.
Variables whose names begin with ACCL_, CCL_, OMP_, KMP_, MKL_, TORCH or PYTHON go with the ranks; others by --env.

Cores are shared out whole, with all their hardware threads, and no rank's span two NUMA nodes where that can be. Ranks that outnumber
the cores are not bound. OMP_NUM_THREADS, where it is unset, is the number of a rank's cores.

exit status: that of the rank that failed first (128 and the signal's number for one that was killed); 0; 2 when the arguments are wrong;
127 when the script cannot be started

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
    add("--hosts", metavar="HOSTS", help="hosts, such as a,b or a:4,b:2 with numbers of ranks (default: this one)")
    add(
        "--bind",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="keep each rank on cores of its own (the default)",
    )
    add(
        "--env",
        action="append",
        default=[],
        metavar="NAME[=VALUE]",
        help="a variable for all ranks; give it again for another",
    )
    add("--prefix", action=argparse.BooleanOptionalAction, help="put the rank before each line (default: with --hosts)")
    add(
        "--grace",
        type=float,
        default=5,
        metavar="S",
        help="seconds that ranks have to end when one has failed (default %(default)s)",
    )
    add("--master-addr", default="", metavar="HOST", help="where rank 0 is, for the others (default: its host)")
    add("--master-port", type=int, default=0, metavar="PORT", help="the port of its store (default: a free one)")
    add("--ssh", metavar="COMMAND", help="what reaches a host, such as `ssh -p 2222` (default: ssh, in batch mode)")
    add("--quiet", action="store_true", help="do not show where the ranks run")
    how = parser.add_mutually_exclusive_group()
    how.add_argument("-m", "--module", action="store_true", help="the script is a Python module")
    how.add_argument("--no-python", action="store_true", help="the script is a program, and no Python script")
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
        raise WrongInput(f"-n: there cannot be {given.ranks} ranks")
    if not 0 <= given.master_port < 1 << 16:
        raise WrongInput(f"--master-port: {given.master_port} is not a port")
    if not 0 <= given.grace < math.inf:
        raise WrongInput(f"--grace: {given.grace:g} is not a number of seconds")
    if not given.module and not given.no_python and not given.hosts and not os.path.exists(given.script):
        raise WrongInput(
            f"{given.script}: there is no such script in {os.getcwd()}; -m is for modules, and --no-python for programs"
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
