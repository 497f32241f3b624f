"""Loads `torch.testing._internal.distributed.distributed_test` for one backend and one world, and runs single tests.

The suite reads its environment while its classes are being defined, so one process can load it only once. For another
backend or world, start another process (`__main__.py` does). Every test runs in a forked child, which leads its own
process group and forks the ranks. Nothing here compares results; see `compare.py`.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import json
import os
import select
import signal
import sys
import tempfile
import time
import unittest
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from . import mpi, one_card
from .alias import Alias, plain

MODULE = "torch.testing._internal.distributed.distributed_test"
# Number of characters kept from the end of a failing test's output.
LOG_TAIL_CHARS = 6000
# Seconds that the supervisor waits beyond the suite's own time limit, so that the suite can print its stacks first.
GRACE_S = 20.0
_TOKEN = "peers-backend-under-test"


@dataclass(frozen=True)
class Setup:
    """The settings of one process."""

    backend: str
    aliases: tuple[str, ...]
    world: int
    timeout_s: float
    gaps: tuple[str, ...] = ()
    direct_monitored_barrier: bool = False
    # Command that starts MPI jobs; None if the ranks have no places in an MPI job.
    mpirun: str | None = None
    # Whether all ranks use card 0, and the suite takes it for several cards.
    one_card: bool = False


@dataclass(frozen=True)
class Outcome:
    """Result of one test: `kind` is `pass`, `skip`, `fail`, `error` or `timeout`."""

    kind: str
    seconds: float
    reason: str = ""


class Suite:
    """The loaded suite."""

    def __init__(self, setup: Setup) -> None:
        self.setup = setup
        self._scratch = tempfile.TemporaryDirectory(prefix="accl-peers-")
        self._module = _load(setup, self._scratch.name)
        self._case = _case_class(self._module, setup)

    def names(self) -> list[str]:
        """All tests, in the order in which the suite's loader finds them."""
        return list(unittest.defaultTestLoader.getTestCaseNames(self._case))

    def run(self, name: str, until: float = float("inf")) -> Outcome:
        """Runs one test under the time limit, at most until then on the monotonic clock, and leaves no process behind."""
        begin = time.monotonic()
        method = getattr(self._case, name)
        if getattr(method, "__unittest_skip__", False):
            return Outcome("skip", 0.0, method.__unittest_skip_why__)
        log_path = os.path.join(self._scratch.name, "log")
        reader, writer = os.pipe()
        sys.stdout.flush()
        sys.stderr.flush()
        child = os.fork()
        if child == 0:
            os.close(reader)
            _child(self._case, name, writer, log_path)
        os.close(writer)
        raw = _read_until_end(reader, min(begin + self.setup.timeout_s, until) + GRACE_S)
        os.close(reader)
        # The child leads a process group, so this also ends ranks that a broken test left behind.
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(child, signal.SIGKILL)
        with contextlib.suppress(ProcessLookupError):
            os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        seconds = time.monotonic() - begin
        if raw is None:
            return Outcome("timeout", seconds, f"not finished after {seconds:.0f} s\n{_tail(log_path)}")
        if not raw:
            return Outcome("error", seconds, f"the test process died\n{_tail(log_path)}")
        kind, reason = json.loads(raw)
        if kind in ("fail", "error"):
            if "timed out after" in reason:
                kind = "timeout"
            reason = f"{reason}\n--- output ---\n{_tail(log_path)}"
        return Outcome(kind, seconds, reason)


def _child(case: type[unittest.TestCase], name: str, writer: int, log_path: str) -> None:
    os.setsid()
    log = os.open(log_path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    for stream in (1, 2):
        os.dup2(log, stream)
    result = unittest.TestResult()
    try:
        test = case(name)
        test.run(result)
        kind, reason = _verdict(test, result)
    except BaseException as error:  # whatever the error is, the supervisor must receive it
        kind, reason = "error", repr(error)
    sys.stdout.flush()
    sys.stderr.flush()
    with os.fdopen(writer, "w") as out:
        out.write(json.dumps([kind, reason]))
    os._exit(0)


def _verdict(test: unittest.TestCase, result: unittest.TestResult) -> tuple[str, str]:
    if result.errors:
        return "error", result.errors[0][1]
    if result.failures:
        return "fail", result.failures[0][1]
    if result.skipped:
        return "skip", result.skipped[0][1]
    if result.expectedFailures:
        return "pass", "expected failure"
    if result.unexpectedSuccesses:
        return "fail", "unexpected success"
    # Stock classes whose world is the number of GPUs start no process without a GPU, and would count as passed.
    if not getattr(test, "started", 0):
        return "skip", "started no process"
    return "pass", ""


def _read_until_end(reader: int, deadline: float) -> bytes | None:
    """Returns everything up to the end of file, or None if the deadline passes first.

    A rank that inherited the pipe keeps it open, so a complete answer also counts as the end.
    """
    data = b""
    while True:
        left = deadline - time.monotonic()
        if left <= 0 or not select.select([reader], [], [], left)[0]:
            return None
        piece = os.read(reader, 1 << 16)
        data += piece
        if not piece:
            return data
        with contextlib.suppress(ValueError):
            json.loads(data)
            return data


def _tail(path: str) -> str:
    try:
        with open(path, errors="replace") as log:
            return log.read()[-LOG_TAIL_CHARS:]
    except OSError:
        return ""


def _load(setup: Setup, scratch: str) -> ModuleType:
    os.mkdir(os.path.join(scratch, "barrier"))
    os.environ.update(
        WORLD_SIZE=str(setup.world),
        TEMP_DIR=scratch,
        # Replaced in each rank. It must name a file, else the tests that re-initialise are not loaded.
        INIT_METHOD=f"file://{scratch}/unused",
        DISTRIBUTED_TESTS_DEFAULT_TIMEOUT=str(int(setup.timeout_s)),
        BACKEND=_TOKEN,
    )
    if setup.one_card:
        # Ranks are forked, and a process that has begun to use CUDA cannot pass it on.
        os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"
        one_card.install(setup.world)
    _register(setup.backend)
    common = importlib.import_module("torch.testing._internal.common_distributed")
    common.TIMEOUT_OVERRIDE.clear()
    alias = Alias(setup.backend, setup.aliases)
    if setup.aliases:
        _allow(common.DistTestCases, alias)
    for gap in setup.gaps:
        common.DistTestCases.skip_collective[gap].update({alias, setup.backend})
    with _environment_shows(_TOKEN, alias):
        module = importlib.import_module(MODULE)
    if setup.one_card and one_card.is_spoilt():
        raise RuntimeError(
            "the suite's import has begun to use CUDA, so forked ranks cannot; find the import that does"
        )
    os.environ["BACKEND"] = setup.backend
    for table in ("PROFILING_SUPPORTED_BACKENDS", "CUDA_PROFILING_SUPPORTED_BACKENDS"):
        getattr(module, table).append(setup.backend)
    module.SEND_RECV_PROFILING_SUPPORTED_BACKENDS.append(setup.backend)
    _keep_alias_out_of_torch()
    if setup.direct_monitored_barrier:
        _replace_monitored_barrier()
    return module


def _register(backend: str) -> None:
    """Imports the backend's package, so that parent and ranks know the backend even if torch does not discover it."""
    if backend == "accl":
        importlib.import_module("torch_accl")


def _allow(cases: Any, alias: Alias) -> None:
    for feature in ("gpu", "cuda", "ddp", "subgroup", "plugin"):
        # Both names: the sets are searched for the alias and for the plain name that `dist.Backend(...)` returns.
        cases.backend_feature[feature].update({alias, str(alias)})


@contextlib.contextmanager
def _environment_shows(token: str, alias: Alias) -> Iterator[None]:
    """While active, an environment variable whose text is `token` reads as `alias`."""
    stock = os.environ.decodevalue
    os.environ.decodevalue = lambda raw: alias if stock(raw) == token else stock(raw)
    try:
        yield
    finally:
        os.environ.decodevalue = stock


def _keep_alias_out_of_torch() -> None:
    """Passes the real name to group creation, because torch compares it with the same literals as the suite does."""
    dist = importlib.import_module("torch.distributed")

    def unaliased(function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            return function(*map(plain, args), **{key: plain(value) for key, value in kwargs.items()})

        return call

    for name in ("init_process_group", "new_group"):
        setattr(dist, name, unaliased(getattr(dist, name)))


def _replace_monitored_barrier() -> None:
    """Calls the group's own method, because torch 2.13 refuses `dist.monitored_barrier` by backend name."""
    dist = importlib.import_module("torch.distributed")

    def monitored_barrier(group: Any = None, timeout: Any = None, wait_all_ranks: bool = False) -> Any:
        if group is dist.GroupMember.NON_GROUP_MEMBER:
            return None
        # A timeout of zero is a timeout, unlike None.
        timeout = dist.default_pg_timeout if timeout is None else timeout
        return (group or dist.group.WORLD).monitored_barrier(timeout, wait_all_ranks)

    dist.monitored_barrier = monitored_barrier


def _case_class(module: ModuleType, setup: Setup) -> type[unittest.TestCase]:
    multiprocessing = importlib.import_module("torch.multiprocessing")
    jobs: list[mpi.Job] = []

    class PeersTest(module.TestDistBackend, module.DistributedTest._DistTestBase):  # type: ignore[name-defined,misc]
        started = 0

        def setUp(self) -> None:
            super().setUp()
            if setup.mpirun is not None:
                # Start the job before the ranks: they are forked with the places of all ranks, and each adopts its own.
                jobs.append(mpi.start(setup.mpirun, int(self.world_size)))
            self._start_processes(multiprocessing.get_context("fork").Process)
            self.started = len(self.processes)

        def tearDown(self) -> None:
            super().tearDown()
            while jobs:
                jobs.pop().end()

        @classmethod
        def _run(cls, rank: int, test_name: str, file_name: str, pipe: Any, **kwargs: Any) -> None:
            # The module was imported before this test's own rendezvous file existed.
            module.INIT_METHOD = os.environ["INIT_METHOD"]
            if jobs:
                jobs[0].processes[rank].adopt()
                for connection in jobs[0].connections:
                    connection.close()
            with one_card.Mapped() if setup.one_card else contextlib.nullcontext():
                super()._run(rank, test_name, file_name, pipe, **kwargs)

    return PeersTest
