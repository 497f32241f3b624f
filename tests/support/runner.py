"""Runs a test body on every rank of a world, each rank a process forked from the warm pytest process.

There are two ways. A *pool* keeps one set of rank processes per world size, with a live default group between tests, so
that a test costs milliseconds. *Fresh* ranks are forked for one test and may exit, be killed, or abort their group.

A rank that overruns the deadline gets a signal to dump its stacks and is killed. A pool in which anything failed is
discarded. Nothing here starts a thread: forking is safe only while the pytest process has one thread.
"""

import ctypes
import dataclasses
import faulthandler
import functools
import gc
import inspect
import os
import pickle
import re
import signal
import socket
import sys
import tempfile
import time
import traceback
from datetime import timedelta
from multiprocessing.connection import Connection, Pipe, wait

import pytest
import torch
import torch.distributed as dist

from . import staged

BACKEND = os.environ.get("ACCL_TEST_BACKEND", "accl")

# Timeout of the groups in seconds. Shorter than the deadline of a test, so that a backend that notices a hang can
# report it.
GROUP_TIMEOUT = 20.0
DEADLINE = 40.0

PR_SET_PDEATHSIG = 1

# In a stack dump: from the first frame of this file down to the interpreter's entry.
_HARNESS_FRAMES = re.compile(rf'(?:  File "{re.escape(__file__)}".*\n)(?:  File .*\n)*')


@dataclasses.dataclass
class Outcome:
    """Result of one rank: `status` is ok, failed, skipped, died or hung."""

    rank: int
    pid: int
    status: str
    value: object = None
    trace: str = ""
    exitcode: int | None = None
    output: str = ""

    def describe(self) -> str:
        parts = [f"--- rank {self.rank} (pid {self.pid}): {self.status}"]
        if self.exitcode is not None:
            parts[0] += f", exit status {self.exitcode}"
        parts += [text.rstrip() for text in (self.trace, self.output and f"output:\n{self.output}") if text]
        return "\n".join(parts)


class Rendezvous:
    """Rendezvous of one world: a file, or a listening socket that rank 0's TCPStore takes over.

    The default is a file: every client of a TCPStore asks for the name of its server's address, which takes seconds
    where no name server answers.
    """

    def __init__(self, kind: str):
        self.kind = kind
        if kind == "tcp":
            self.listener = socket.create_server(("127.0.0.1", 0))
            self.port = self.listener.getsockname()[1]
        else:
            self.path = tempfile.mktemp(prefix="accl-store-")

    def store(self, rank: int, world: int) -> dist.Store:
        if self.kind == "file":
            return dist.FileStore(self.path, world)
        timeout = timedelta(seconds=GROUP_TIMEOUT)
        if rank == 0:
            fd = os.dup(self.listener.fileno())
            return dist.TCPStore("127.0.0.1", self.port, world, True, timeout, False, master_listen_fd=fd)
        # If this rank kept the socket open, it would accept connections for a rank 0 that has exited.
        self.listener.close()
        return dist.TCPStore("127.0.0.1", self.port, world, False, timeout, False)

    def close(self):
        if self.kind == "tcp":
            self.listener.close()
        elif os.path.exists(self.path):
            os.unlink(self.path)


@dataclasses.dataclass
class RankContext:
    """The settings of this process as a rank. `_context` is None in the pytest process itself."""

    rank: int
    world: int
    rendezvous: Rendezvous
    store: dist.Store | None = None
    inits: int = 0


_context: RankContext | None = None

# Whether ranks see a torch without any accelerator, see `accelerators.py`; set in the pytest process.
is_cpu_build = False
_current_accelerator = torch.accelerator.current_accelerator


def _build_as(cpu: bool):
    torch.accelerator.current_accelerator = (lambda check_available=False: None) if cpu else _current_accelerator


def init_group(backend: str | None = None, **options) -> None:
    """Creates the default group of this rank; may be called again after a destroy, over the same store."""
    context = _context
    if context.store is None:
        context.store = context.rendezvous.store(context.rank, context.world)
    context.inits += 1
    options.setdefault("timeout", timedelta(seconds=GROUP_TIMEOUT))
    options.setdefault("rank", context.rank)
    options.setdefault("world_size", context.world)
    options.setdefault("store", dist.PrefixStore(f"init{context.inits}", context.store))
    dist.init_process_group(backend or BACKEND, **options)


def stderr_to(path):
    """Redirects this process's standard error to a file, including lines that native code writes."""
    with open(path, "w") as file:
        os.dup2(file.fileno(), 2)


def gloo_group(backend: str = "gloo") -> dist.ProcessGroup:
    """Creates a group whose backend has gloo in it, in addition to the default group.

    Ranks of gloo connect with each other during creation. A rank that exits early breaks the creation on the others, so
    every rank waits until all ranks have the group.
    """
    group = dist.new_group(backend=backend)
    dist.barrier()
    return group


class RankProcess:
    """One forked rank, with a pipe for jobs and results and a file for its output."""

    def __init__(self, rank: int, world: int, rendezvous: Rendezvous, serve):
        self.rank = rank
        self.log = tempfile.TemporaryFile()
        self.pipe, child_end = Pipe()
        sys.stdout.flush()
        sys.stderr.flush()
        self.pid = os.fork()
        if self.pid == 0:
            _become_rank(rank, world, rendezvous, self.log, self.pipe)
            code = 70
            try:
                code = serve(child_end)
            finally:
                sys.stdout.flush()
                sys.stderr.flush()
                os._exit(code)
        child_end.close()
        self.exitcode = None

    def reap(self) -> int:
        if self.exitcode is None:
            self.exitcode = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
            self.pipe.close()
        return self.exitcode

    def kill(self):
        if self.exitcode is None:
            os.kill(self.pid, signal.SIGKILL)
            self.reap()

    def output(self) -> str:
        self.log.seek(0)
        text = re.sub(_HARNESS_FRAMES, "", self.log.read().decode(errors="replace"))
        return text if len(text) < 20_000 else text[:10_000] + "\n[...]\n" + text[-10_000:]

    def clear_output(self):
        self.log.seek(0)
        self.log.truncate()

    def stacks(self) -> str:
        """Requests the Python stacks (they go to the log) and returns where the native threads sleep."""
        lines = []
        try:
            for task in sorted(os.listdir(f"/proc/{self.pid}/task")):
                base = f"/proc/{self.pid}/task/{task}"
                name, where, call = (_read(f"{base}/{file}") for file in ("comm", "wchan", "syscall"))
                lines.append(f"thread {task} {name}: {where or 'running'}, syscall {call.split(' ')[0]}")
            os.kill(self.pid, signal.SIGUSR1)
        except (FileNotFoundError, ProcessLookupError):
            pass
        return "\n".join(lines)


def _read(path: str) -> str:
    try:
        with open(path) as file:
            return file.read().strip()
    except OSError:
        return ""


def _become_rank(rank, world, rendezvous, log, parent_pipe):
    global _context
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    gc.freeze()
    parent_pipe.close()
    os.dup2(log.fileno(), 1)
    os.dup2(log.fileno(), 2)
    os.lseek(1, 0, os.SEEK_SET)
    sys.stdout = os.fdopen(os.dup(1), "w", buffering=1)
    sys.stderr = os.fdopen(os.dup(2), "w", buffering=1)
    faulthandler.enable(log)
    faulthandler.register(signal.SIGUSR1, log, all_threads=True)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.environ["RANK"], os.environ["WORLD_SIZE"] = str(rank), str(world)
    os.environ["LOCAL_RANK"], os.environ["LOCAL_WORLD_SIZE"] = str(rank), str(world)
    _context = RankContext(rank, world, rendezvous)
    if order := os.environ.get("ACCL_TEST_ORDER"):
        staged.install(order, rank)


def _attempt(body, arguments) -> tuple[str, object, str]:
    """Runs the body and returns status, value and trace, which all go through a pipe."""
    try:
        torch.manual_seed(0)
        value = body(**arguments)
        pickle.dumps(value)
        return "ok", value, ""
    except pytest.skip.Exception as skip:
        return "skipped", str(skip), ""
    except BaseException as error:
        return "failed", None, _trace(error)


def _trace(error: BaseException) -> str:
    """The traceback from the first frame outside this file on."""
    frames = error.__traceback__
    while frames is not None and frames.tb_next is not None and frames.tb_frame.f_code.co_filename == __file__:
        frames = frames.tb_next
    return "".join(traceback.format_exception(type(error), error, frames))


def _collect(ranks: list[RankProcess], deadline: float) -> list[Outcome]:
    """Waits for one result from every rank, at most until the deadline, and kills ranks that have none by then."""
    outcomes: dict[int, Outcome] = {}
    by_pipe = {process.pipe: process for process in ranks}
    end = time.monotonic() + deadline
    while by_pipe:
        ready = wait(list(by_pipe), timeout=max(0.0, end - time.monotonic()))
        if not ready:
            break
        for pipe in ready:
            process = by_pipe.pop(pipe)
            try:
                status, value, trace = pipe.recv()
                outcomes[process.rank] = Outcome(process.rank, process.pid, status, value, trace)
            except (EOFError, ConnectionResetError):
                outcomes[process.rank] = Outcome(process.rank, process.pid, "died", exitcode=process.reap())
        # Once a rank has failed, the others usually wait for it: give them time to notice, not the whole deadline.
        if any(o.status == "failed" for o in outcomes.values()):
            end = min(end, time.monotonic() + GROUP_TIMEOUT / 2)
    if by_pipe:
        stacks = {process.rank: process.stacks() for process in by_pipe.values()}
        time.sleep(0.5)
        for process in by_pipe.values():
            process.kill()
            outcomes[process.rank] = Outcome(process.rank, process.pid, "hung", trace=stacks[process.rank])
    for process in ranks:
        outcomes[process.rank].output = process.output()
    return [outcomes[rank] for rank in sorted(outcomes)]


class Pool:
    """Ranks of one world size that keep their default group from test to test."""

    def __init__(self, world: int):
        self.rendezvous = Rendezvous("file")
        self.ranks = [RankProcess(rank, world, self.rendezvous, _serve_pool) for rank in range(world)]

    def run(self, key: tuple[str, str], arguments: list[dict], deadline: float) -> list[Outcome]:
        for process, own in zip(self.ranks, arguments, strict=True):
            process.clear_output()
            process.pipe.send((key, own, is_cpu_build))
        return _collect(self.ranks, deadline)

    def close(self):
        for process in self.ranks:
            process.kill()
        self.rendezvous.close()


_pools: dict[int, Pool] = {}


def close_pools():
    """Closes all pools; the next test creates new ones."""
    while _pools:
        _pools.popitem()[1].close()


def _serve_pool(pipe: Connection) -> int:
    while True:
        try:
            (module, name), arguments, cpu = pipe.recv()
        except EOFError:
            return 0
        body = functools.reduce(getattr, name.split("."), sys.modules[module]).body
        _build_as(cpu)
        pipe.send(_attempt(functools.partial(_in_pool, body), arguments))


def _in_pool(body, **arguments):
    if not dist.is_initialized():
        init_group()
    before = dist.group.WORLD
    value = body(**arguments)
    # A subgroup left behind would affect the next test.
    for group in list(dist.distributed_c10d._world.pg_map):
        if group is not dist.group.WORLD:
            dist.destroy_process_group(group)
    # So would another default group, or another timeout.
    if dist.group.WORLD is not before:
        raise AssertionError(
            "this test ended or replaced the default group that later tests share: it needs fresh=True"
        )
    if before._get_backend(torch.device("cpu")).options._timeout != timedelta(seconds=GROUP_TIMEOUT):
        raise AssertionError(
            "this test changed the timeout of the default group that later tests share: it needs fresh=True"
        )
    return value


def run_ranks(body, world, arguments=None, *, init=True, deadline=DEADLINE, store="file", env=None) -> list[Outcome]:
    """Runs `body(rank, **arguments)` on `world` fresh ranks and returns each rank's outcome; a failure does not raise.

    With `init` each rank has its default group before the body and destroys it after the body. `env` is set in each
    rank first.
    """
    rendezvous = Rendezvous(store)

    def serve(pipe):
        result = _attempt(lambda: _in_fresh(body, arguments or {}, init, env or {}), {})
        pipe.send(result)
        return 0

    ranks = [RankProcess(rank, world, rendezvous, serve) for rank in range(world)]
    try:
        outcomes = _collect(ranks, deadline)
    finally:
        # A rank that reported may still be exiting; give it a moment before the kill.
        end = time.monotonic() + 2
        for process in ranks:
            while process.exitcode is None and time.monotonic() < end:
                pid, status = os.waitpid(process.pid, os.WNOHANG)
                if pid:
                    process.exitcode = os.waitstatus_to_exitcode(status)
                    process.pipe.close()
                else:
                    time.sleep(0.001)
            process.kill()
        rendezvous.close()
    for outcome, process in zip(outcomes, ranks, strict=True):
        outcome.exitcode = process.exitcode
    return outcomes


def _in_fresh(body, arguments, init, env):
    os.environ.update(env)
    _build_as(is_cpu_build)
    if init:
        init_group()
    value = body(_context.rank, **arguments)
    if init and dist.is_initialized():
        dist.destroy_process_group()
    return value


def check(outcomes: list[Outcome]) -> list:
    """Returns the ranks' values, or fails the test with a report of every rank."""
    if all(outcome.status == "ok" for outcome in outcomes):
        return [outcome.value for outcome in outcomes]
    bad = [outcome for outcome in outcomes if outcome.status not in ("ok", "skipped")]
    if not bad:
        pytest.skip(next(str(o.value) for o in outcomes if o.status == "skipped"))
    pytest.fail("\n".join(outcome.describe() for outcome in outcomes), pytrace=False)


def on_ranks(
    *worlds: int, fresh: bool = False, init: bool = True, deadline: float = DEADLINE, store: str = "file", env=None
):
    """Turns a body that every rank of each of `worlds` runs into a test.

    The body takes `rank`, may take `world`, and any parameters and fixtures with picklable values. It has the default
    group unless `init` is false. `fresh` forks ranks for this test only; a body that ends a group needs it.
    """

    def decorate(body):
        wanted = inspect.signature(body).parameters
        own = [p for p in wanted.values() if p.name not in ("rank", "world")]
        key = (body.__module__, body.__qualname__)

        @functools.wraps(body)
        def test(world, **arguments):
            if "world" in wanted:
                arguments["world"] = world
            if fresh or not init or env:
                options = dict(init=init, deadline=deadline, store=store, env=env)
                check(run_ranks(lambda rank, **kw: body(**_with_rank(wanted, rank, kw)), world, arguments, **options))
                return
            if world not in _pools:
                _pools[world] = Pool(world)
            outcomes = _pools[world].run(key, [_with_rank(wanted, rank, arguments) for rank in range(world)], deadline)
            if any(outcome.status not in ("ok", "skipped") for outcome in outcomes):
                _pools.pop(world).close()
            check(outcomes)

        keyword = inspect.Parameter.KEYWORD_ONLY
        parameters = [p.replace(kind=keyword) for p in own] + [inspect.Parameter("world", keyword)]
        test.__signature__ = inspect.Signature(parameters)
        test.body = body
        return pytest.mark.parametrize("world", worlds, ids=[f"world{w}" for w in worlds])(test)

    return decorate


def _with_rank(wanted, rank, arguments):
    return {**arguments, "rank": rank} if "rank" in wanted else arguments
