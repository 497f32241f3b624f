"""One rank of a library that is called through torch; the protocol is described in `rank.c`.

Started as `torch_rank.py DIR RANK RANKS CORE BACKEND LIBRARIES`, where LIBRARIES is the folder with the output of
`build.py`. BACKEND is a name of `torch.distributed`, `noop`, `noop_yielding` or `deepspeed`. A compression may follow
after `+`: a codec of accl, or for gloo a type to cast to, `int8` or `powersgd`.
"""

from __future__ import annotations

import ctypes
import importlib.util
import os
import re
import signal
import socket
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch_accl_cli.bench.cases import Prepared

PR_SET_PDEATHSIG = 1
# Largest relative error of a lossy result. PowerSGD adds errors of earlier calls; a result of zero would have error 1.
LARGEST_ERROR, LARGEST_OF_RANK_1 = 0.5, 0.9
# Types to which gloo's messages are cast.
CASTS = {"fp16": "float16", "bf16": "bfloat16"}

Call = Callable[[], object]


def main() -> None:
    """Connects to the driver and the other ranks, then follows orders until `quit` or the end of the driver."""
    place, backend, libraries = sys.argv[1:5], sys.argv[5], Path(sys.argv[6])
    folder, rank, ranks, core = Path(place[0]), int(place[1]), int(place[2]), int(place[3])
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if core >= 0:
        # Pin before torch starts threads, which inherit the affinity.
        os.sched_setaffinity(0, [core])
    driver = socket.socket(socket.AF_UNIX)
    driver.connect(str(folder / "socket"))
    lines = driver.makefile("rw", buffering=1)
    print("pid", rank, os.getpid(), file=lines)
    # Load torch, which takes seconds, only after the driver knows of this process.
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
    member = open_member(folder, rank, ranks, backend, libraries)
    print("ready", member.version, file=lines)
    for line in lines:
        if line.strip() == "quit":
            break
        print(member.obey(line), file=lines)
    member.close()


def load(name: str, libraries: Path) -> ModuleType:
    """Loads an extension module that was compiled for this run."""
    spec = importlib.util.spec_from_file_location(name, libraries / name / f"{name}.so")
    assert spec and spec.loader, f"{name} has a loader"
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def open_member(folder: Path, rank: int, ranks: int, backend: str, libraries: Path) -> Member:
    """Loads torch and connects the ranks over the backend."""
    import torch

    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    if backend == "deepspeed":
        return DeepSpeed(folder, rank, ranks, libraries)
    return Distributed(folder, rank, ranks, libraries, backend)


class Member:
    """A running rank; the subclasses know how a collective is called."""

    # Whether calls compute results.
    computes = True
    # Name of the compression that makes results inexact; empty if they are exact.
    loses = ""
    version = ""

    def __init__(self, folder: Path, rank: int, ranks: int, libraries: Path) -> None:
        import board
        import torch

        self.torch, self.board_module = torch, board
        self.rank, self.ranks = rank, ranks
        self.board = board.attach(folder / "board")
        library = ctypes.CDLL(str(libraries / "board.so"))
        library.open_board.restype = ctypes.c_void_p
        memory = ctypes.c_void_p(library.open_board(str(folder / "board").encode()))
        self.meet = lambda: library.meet(memory, rank, ranks)

    def call_of(self, asked: Asked) -> Call | None:
        """Returns a function that makes one call; None if the call does not exist."""
        raise NotImplementedError

    def close(self) -> None:
        """Ends the backend, if it needs that."""

    def obey(self, line: str) -> str:
        """Carries out an order; returns the answer."""
        verb, name, dtype, size, *rest = line.split()
        asked = Asked.of(name, dtype, int(size), self.rank, self.ranks)
        call = self.call_of(asked) if asked else None
        if asked is None or call is None:
            return "none"
        try:
            if verb == "check":
                return self.check(asked, call)
            batches, calls, meet = map(int, rest)
            for one in asked.prepared:
                one.clear()
            return self.run(call, batches, calls, bool(meet))
        except Exception as error:
            return "wrong " + " ".join(str(error).split())

    def run(self, call: Call, batches: int, calls: int, meet: bool) -> str:
        """Times batches of calls."""
        clock = time.monotonic_ns
        self.meet()
        for _ in range(batches * calls // 10 + 1):
            call()
        rows = []
        each = range(calls)
        for batch in range(batches):
            if meet or batch == 0:
                self.meet()
            begin = clock()
            for _ in each:
                call()
            rows.append((begin, clock()))
        self.board_module.write_spans(self.board, self.rank, rows)
        return "ok"

    def check(self, asked: Asked, call: Call) -> str:
        """Makes one call and checks the result."""
        for one in asked.prepared:
            one.fill()
        self.meet()
        if asked.name == "barrier":
            return self.check_barrier(call)
        call()
        if not self.computes:
            return "ok"
        for one in asked.prepared:
            if self.loses:
                error = one.error()
                if not error < (LARGEST_OF_RANK_1 if self.loses == "powersgd" else LARGEST_ERROR):
                    return f"wrong {asked.name}: its error is {error:.2g} times the expected error"
            elif wrong := one.wrong():
                return f"wrong {asked.name}: {wrong} elements are wrong"
        return "ok"

    def check_barrier(self, call: Call) -> str:
        marks = self.board_module.MARKS_AT
        at = [marks + rank * self.board_module.LINE_BYTES for rank in range(self.ranks)]
        mark = self.board[at[self.rank]] + 1
        # One byte suffices: a mark is read soon after it was set.
        self.board[at[self.rank]] = mark & 0xFF
        call()
        early = [rank for rank in range(self.ranks) if (self.board[at[rank]] - mark) & 0x80]
        if early and self.computes:
            return f"wrong barrier completed before rank {early[0]} arrived"
        return "ok"


@dataclass
class Asked:
    """The calls of one order: a collective, or several that count as one.

    As in `src/order.rs`, `*100` stands for a hundred calls one after the other, `&100` for a hundred outstanding
    together.
    """

    name: str
    # One for each call.
    prepared: list[Prepared]
    # Empty, `*` or `&`.
    many: str

    @staticmethod
    def of(text: str, dtype: str, size: int, rank: int, ranks: int) -> Asked | None:
        """Parses an order; returns None if there is no such call here."""
        from torch_accl_cli.bench.cases import Prepared, cases
        from torch_accl_cli.bench.collectives import COLLECTIVES

        found = re.fullmatch(r"(\w+)(?:([*&])(\d+))?", text)
        if found is None or found[1] not in COLLECTIVES:
            return None
        [case] = cases([found[1]], [size], [dtype], ["sum"], ranks)
        prepared = [Prepared(case, rank, ranks) for _ in range(int(found[3] or 1))]
        return Asked(found[1], prepared, found[2] or "")

    @property
    def is_one_all_reduce(self) -> bool:
        """Whether the order is a single all_reduce, which all libraries have."""
        return self.name == "all_reduce" and not self.many


class Distributed(Member):
    """A backend of `torch.distributed`, called as in user programs."""

    def __init__(self, folder: Path, rank: int, ranks: int, libraries: Path, backend: str) -> None:
        super().__init__(folder, rank, ranks, libraries)
        import torch.distributed as dist

        self.dist = dist
        backend, _, self.codec = backend.partition("+")
        self.backend, self.loses = backend, self.codec
        options = None
        # States of PowerSGD, by the number of elements.
        self.states: dict[int, object] = {}
        # In a collective, a rank needs the other ranks of its core: the core changes hands at least once a call.
        self.yields = backend == "noop_yielding"
        if self.yields:
            backend = "noop"
        if backend == "noop":
            self.computes = False
            noop = load("peers_noop", libraries)

            def make(store: object, rank: int, size: int, timeout: timedelta) -> object:
                return noop.make(rank, size)

            dist.Backend.register_backend("noop", make, devices=["cpu"])
        elif backend == "accl":
            # Import explicitly, since a run must fail, not fall back, if the wheel is missing.
            import torch_accl

            self.version = torch_accl.__version__ + ", "
            # The group itself compresses, and calls are plain ones.
            if self.codec.startswith("all:"):
                codec, self.codec = self.codec.removeprefix("all:"), ""
                options = torch_accl.Options(compression=codec, compressed_calls="all")
        dist.init_process_group(
            backend,
            init_method=f"file://{folder / 'store'}",
            rank=rank,
            world_size=ranks,
            timeout=timedelta(seconds=120),
            pg_options=options,
        )
        self.version += f"torch {self.torch.__version__}"

    def call_of(self, asked: Asked) -> Call | None:
        dist, whole = self.dist, asked.prepared[0].target
        if self.codec:
            return self.smaller(whole) if asked.is_one_all_reduce else None
        if self.yields:
            return (lambda: (dist.all_reduce(whole), os.sched_yield())) if asked.is_one_all_reduce else None
        calls = [one.through_torch(None) for one in asked.prepared]
        if not asked.many:
            return calls[0]
        if asked.many == "*":
            return lambda: [call() for call in calls]
        if asked.name != "all_reduce":
            return None
        all_of_them = [one.target for one in asked.prepared]
        return lambda: [work.wait() for work in [dist.all_reduce(one, async_op=True) for one in all_of_them]]

    def smaller(self, whole: object) -> Call:
        """Returns an all_reduce with compressed messages."""
        if self.codec == "int8":
            return partial(self.gather_bytes, whole)
        if self.codec == "powersgd":
            return self.power_sgd(whole)
        if self.backend == "gloo":
            return partial(self.cast, whole, getattr(self.torch, CASTS[self.codec]))
        from torch_accl.compression import all_reduce_quantized

        return partial(all_reduce_quantized, whole, compression=self.codec)

    def cast(self, whole: object, dtype: object) -> None:
        """Reduces in a smaller type, as the cast hooks of DistributedDataParallel do."""
        small = whole.to(dtype)
        self.dist.all_reduce(small)
        whole.copy_(small)

    def gather_bytes(self, whole: object) -> None:
        """Gathers quantized bytes of all ranks, as torch's hook with a scale for each tensor does."""
        torch, dist = self.torch, self.dist
        least, most = torch.aminmax(whole)
        scale = torch.clamp((most - least) / 255, min=1e-30)
        mine = torch.stack([scale, least])
        scales = [torch.empty_like(mine) for _ in range(self.ranks)]
        dist.all_gather(scales, mine)
        codes = torch.round((whole - least) / scale).clamp_(0, 255).to(torch.uint8)
        gathered = [torch.empty_like(codes) for _ in range(self.ranks)]
        dist.all_gather(gathered, codes)
        whole.zero_()
        for (scale, least), codes in zip(scales, gathered):
            whole.add_(codes.to(whole.dtype).mul_(scale).add_(least))

    def power_sgd(self, whole: object) -> Call:
        """Returns torch's hook on a bucket of one matrix, as nearly square as the number of elements allows."""
        from bucket import Bucket
        from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as hooks

        count = whole.numel()
        rows = next(rows for rows in range(max(int(count**0.5), 1), 0, -1) if count % rows == 0)
        bucket = Bucket(whole, whole.view(rows, -1))
        is_new = count not in self.states
        if is_new:
            self.states[count] = hooks.PowerSGDState(None, matrix_approximation_rank=1, start_powerSGD_iter=2)
        state = self.states[count]

        def call() -> None:
            hooks.powerSGD_hook(state, bucket).wait()
            # The hook averages, so turn the mean into a sum.
            whole.mul_(self.ranks)

        # The first two calls of a state are uncompressed.
        for _ in range(2 * is_new):
            call()
        return call

    def close(self) -> None:
        self.dist.destroy_process_group()


class DeepSpeed(Member):
    """DeepSpeed's shared-memory op, called as a torch op, as its inference engine does."""

    def __init__(self, folder: Path, rank: int, ranks: int, libraries: Path) -> None:
        super().__init__(folder, rank, ranks, libraries)
        # DeepSpeed names its shared memory after these variables.
        os.environ.update(LOCAL_SIZE=str(ranks), MASTER_ADDR=folder.name, MASTER_PORT=str(os.getppid()))
        op = load("peers_deepspeed", libraries)
        # 2: all types; 1: float32; 0: none.
        self.level = op.vector_kernel_level()
        op.initialize(ranks, rank)
        self.version = (libraries / "peers_deepspeed" / "version").read_text()

    def call_of(self, asked: Asked) -> Call | None:
        whole, op = asked.prepared[0].target, self.torch.ops.deepspeed.inference_all_reduce_
        needed = 1 if whole.dtype is self.torch.float32 else 2
        if not asked.is_one_all_reduce or self.level < needed:
            return None
        return partial(op, whole)


if __name__ == "__main__":
    main()
