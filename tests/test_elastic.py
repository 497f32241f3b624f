"""Elastic restarts: ranks die while groups are created over a store that outlives them, and the next attempt trains.

`ACCL_TEST_ELASTIC=all .ci/pytest tests/test_elastic.py` runs every combination of rank, moment, group, store and kind
of launcher. Without it, a subset runs that contains each pair of these values.
"""

import itertools
import os
import random
import re
import subprocess
import sys
import textwrap
import time

import pytest
from support import BACKEND
from support.elastic import LAUNCHERS, WORLD, DeathPoint, survive
from support.scripts import free_port

# Number of moments, which are counted in kinds of store requests. A rank makes fewer kinds for one group, so the last
# moments never come.
MOMENTS = 12
STORES = ["tcp", "file"]
# The default process group, a group of the same ranks, and a group of two ranks.
GROUPS = ["0", "1", "2"]

EVERYTHING = list(itertools.product(LAUNCHERS, range(WORLD), GROUPS, STORES, range(MOMENTS)))


def _pairwise(cases):
    """Returns a subset of `cases` that contains each pair of values that occurs together in some case."""
    pairs = [{(i, case[i], j, case[j]) for i, j in itertools.combinations(range(len(case)), 2)} for case in cases]
    wanted, chosen = set().union(*pairs), []
    order = list(range(len(cases)))
    random.Random(1).shuffle(order)
    while wanted:
        best = max(order, key=lambda index: len(pairs[index] & wanted))
        wanted -= pairs[best]
        chosen.append(best)
    return [cases[index] for index in sorted(chosen)]


ALL = os.environ.get("ACCL_TEST_ELASTIC") == "all"
CASES = EVERYTHING if ALL else _pairwise(EVERYTHING)


@pytest.mark.parametrize(("launchers", "rank", "group", "store", "moment"), CASES)
def test_a_rank_that_dies_does_not_keep_the_next_attempt_from_forming(launchers, rank, group, store, moment):
    survive(launchers, DeathPoint(rank, group, moment), store)


WORKER = """
    import os, sys, time
    sys.path.insert(0, os.environ["SUPPORT"])
    import torch
    import torch.distributed as dist
    from dying_store import DeathPoint, DyingStore

    rank, world, notes = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), os.environ["NOTES"]
    is_first = not os.path.exists(notes + "/died")
    store, _, _ = next(dist.rendezvous("env://"))
    if rank == 1 and is_first:
        open(notes + "/died", "w").close()
        moment = int(os.environ["MOMENT"])
        if moment == 0:
            sys.exit(3)
        store = DyingStore(store, DeathPoint(1, "0", moment))
    start = time.time()
    dist.init_process_group(os.environ["BACKEND"], store=store, rank=rank, world_size=world)
    ones = torch.ones(1)
    dist.all_reduce(ones)
    pair = dist.new_group([0, 1])
    if rank < 2:
        dist.all_reduce(ones, group=pair)
    dist.barrier()
    # A single write: ranks share the launcher's output.
    print(f"TRAINED {rank} {ones.item()} {start:.3f} {time.time():.3f}\\n", end="", flush=True)
    dist.destroy_process_group()
"""


def _torchrun(tmp_path, moment, *, nodes, **options):
    """Runs the worker under `nodes` launchers. Returns the rank and the sum that each rank of the successful attempt
    printed.
    """
    script = tmp_path / "worker.py"
    script.write_text(textwrap.dedent(WORKER))
    support = os.path.join(os.path.dirname(os.path.abspath(__file__)), "support")
    own = {"SUPPORT": support, "BACKEND": BACKEND, "NOTES": str(tmp_path), "MOMENT": str(moment)}
    env = {**os.environ, **own, "OMP_NUM_THREADS": "1"}
    launchers = []
    for node in range(nodes):
        own = {"max_restarts": 2, **options, **({"node_rank": node} if "master_port" in options else {})}
        arguments = [f"--{name.replace('_', '-')}={value}" for name, value in own.items()]
        command = [sys.executable, "-m", "torch.distributed.run", f"--nnodes={nodes}", *arguments, str(script)]
        with open(tmp_path / f"node{node}", "w") as log:
            launchers.append(subprocess.Popen(command, env=env, stdout=log, stderr=log))
    end = time.monotonic() + 110
    try:
        codes = [launcher.wait(max(1, end - time.monotonic())) for launcher in launchers]
    except subprocess.TimeoutExpired:
        codes = []
    finally:
        for launcher in launchers:
            launcher.terminate()
            launcher.wait(60)
    text = "".join((tmp_path / f"node{node}").read_text() for node in range(nodes))
    assert codes == [0] * nodes, text[-6000:]
    trained = re.findall(r"TRAINED (\d) (\d+\.\d+) (\d+\.\d+) (\d+\.\d+)", text)
    starts, ends = [float(line[2]) for line in trained], [float(line[3]) for line in trained]
    # This takes five seconds on an idle machine. The limit is far from every deadline in any case.
    assert max(ends) - max(starts) < 20, trained
    return sorted((int(rank), float(value)) for rank, value, *_ in trained)


# With real launchers most of the time goes into starting torch. By default one case stands for all: two launchers that
# restart together. `make test-elastic` runs the others. The cases above already cover one launcher whose ranks leave.
@pytest.mark.skipif(not ALL, reason="one launcher of torch's own: make test-elastic")
@pytest.mark.parametrize("moment", [0, 3], ids=["before", "during"])
def test_torchrun_restarts_when_a_rank_leaves_before_or_during_init(tmp_path, moment):
    got = _torchrun(tmp_path, moment, nodes=1, nproc_per_node=3, master_port=free_port())
    assert got == [(0, 6.0), (1, 6.0), (2, 3.0)]


@pytest.mark.slow
@pytest.mark.parametrize("how", ["static", "c10d"] if ALL else ["c10d"])
def test_two_torchruns_restart_when_a_rank_of_one_dies_during_init(tmp_path, how):
    port = free_port()
    options = (
        {"master_addr": "127.0.0.1", "master_port": port}
        if how == "static"
        else {"rdzv_backend": "c10d", "rdzv_endpoint": f"127.0.0.1:{port}", "rdzv_id": "elastic"}
    )
    got = _torchrun(tmp_path, 3, nodes=2, nproc_per_node=1, **options)
    assert got == [(0, 4.0), (1, 4.0)]


@pytest.mark.skipif(BACKEND != "accl", reason="about this package only")
def test_makings_leave_no_keys_in_the_store():
    left = survive("one", DeathPoint(0, "none", 0))
    assert left == [0] * 3, left
