"""Small launchers: ranks forked over a store that outlives them, which die at a chosen moment and are restarted.

`survive` runs one case; `train` is the work of each rank. Moments are counted in requests that a rank makes to its
store, so that a case is the same on every machine.
"""

import contextlib
import os
import signal
import tempfile
import time
from multiprocessing.connection import wait

import torch
import torch.distributed as dist

from .dying_store import TIMEOUT, DeathPoint, DyingStore
from .runner import BACKEND, RankProcess, _attempt

WORLD = 3
# Seconds from the last process's connection to the store until all ranks must have trained. (A client of a TCPStore
# asks for the name of its server's address first, which takes seconds where a name server does not answer.)
SOON = 5.0

# The kinds of launchers: the ranks of each agent, and whether a restart in one agent restarts the ranks of all.
LAUNCHERS = {
    "one": ([[0, 1, 2]], False),
    "two-static": ([[0, 1], [2]], False),
    "two-c10d": ([[0, 1], [2]], True),
}


def train(rank: int, store: dist.Store) -> int:
    """The work of each rank: a reduction in the default group, in a group of all ranks and in a group of two.

    Returns the number of keys that are left in the store.
    """
    dist.init_process_group(BACKEND, store=store, rank=rank, world_size=WORLD, timeout=TIMEOUT)
    assert _sum() == WORLD
    everybody = dist.new_group(list(range(WORLD)))
    assert _sum(everybody) == WORLD
    pair = dist.new_group([0, 1])
    if rank < 2:
        assert _sum(pair) == 2
    dist.barrier()
    return store.num_keys()


def _sum(group=None) -> float:
    ones = torch.ones(1)
    dist.all_reduce(ones, group=group)
    return ones.item()


class _Surviving:
    """A store that outlives the ranks: a server in a process of its own, as a launcher has it, or a file."""

    def __init__(self, kind: str):
        self.kind, self.server = kind, None
        if kind == "file":
            self.path = tempfile.mktemp(prefix="accl-store-")
            return
        read, write = os.pipe()
        self.server = os.fork()
        if self.server == 0:
            with contextlib.suppress(BaseException):
                store = dist.TCPStore("127.0.0.1", 0, None, True, TIMEOUT, wait_for_workers=False)
                os.write(write, store.port.to_bytes(2, "little"))
                signal.pause()
            os._exit(0)
        os.close(write)
        self.port = int.from_bytes(os.read(read, 2), "little")
        os.close(read)

    def store(self) -> dist.Store:
        if self.kind == "file":
            return dist.FileStore(self.path, WORLD)
        return dist.TCPStore("127.0.0.1", self.port, None, False, TIMEOUT, wait_for_workers=False)

    def close(self):
        if self.server is not None:
            os.kill(self.server, signal.SIGKILL)
            os.waitpid(self.server, 0)
        elif os.path.exists(self.path):
            os.unlink(self.path)


def survive(launchers: str, death: DeathPoint, store: str = "tcp"):
    """Starts the ranks and restarts them as launchers do until all have trained; fails if that takes too long."""
    agents, restarts_all = LAUNCHERS[launchers]
    agents = [[rank for agent in agents for rank in agent]] if restarts_all else agents
    surviving = _Surviving(store)
    ranks: dict[int, RankProcess] = {}
    results: dict[int, tuple] = {}
    connecting: set[int] = set()
    story = []
    last_change = 0.0

    def start(rank: int, dies: bool):
        def serve(pipe):
            own = surviving.store()
            pipe.send(("connected", None, ""))
            pipe.send(_attempt(train, {"rank": rank, "store": DyingStore(own, death) if dies else own}))
            # Stay until the launcher has received everything, because the message of a rank that exits may be lost.
            with contextlib.suppress(EOFError):
                pipe.recv()
            return 0

        nonlocal last_change
        connecting.add(rank)
        ranks[rank] = RankProcess(rank, WORLD, surviving, serve)
        last_change = time.monotonic()

    try:
        for rank in range(WORLD):
            start(rank, rank == death.rank)
        while len(results) < WORLD:
            waiting = {process.pipe: rank for rank, process in ranks.items() if rank not in results}
            patience = 60.0 if connecting else SOON
            ready = wait(list(waiting), timeout=max(0.0, last_change + patience - time.monotonic()))
            if not ready:
                for process in ranks.values():
                    process.stacks()
                time.sleep(0.5)
                stuck = "\n".join(f"rank {rank}: {ranks[rank].output()}" for rank in waiting.values())
                raise AssertionError(f"{death}: no group {patience} s after the last change; {story}\n{stuck}")
            rank = waiting[ready[0]]
            try:
                status, value, trace = ready[0].recv()
            except (EOFError, ConnectionResetError):
                status, value, trace = "died", None, ""
            connecting.discard(rank)
            if status == "connected":
                last_change = time.monotonic()
                continue
            story.append((rank, status, trace[-300:]))
            if status == "ok":
                results[rank] = value
                continue
            mates = next(agent for agent in agents if rank in agent)
            for mate in mates:
                ranks[mate].kill()
                results.pop(mate, None)
            for mate in mates:
                start(mate, False)
            assert len(story) < 20, story
        return list(results.values())
    finally:
        for process in ranks.values():
            process.kill()
        surviving.close()
