"""The kernels that let conjugate and negative views through: when and where they are registered. Other backends must
see no change.
"""

import torch
from support import BACKEND, on_ranks, run_script

HAS = """
def has(name="c10d::allreduce_"):
    return [torch._C._dispatch_has_kernel_for_dispatch_key(name, key) for key in ("Conjugate", "Negative")]
"""


def test_importing_us_leaves_the_dispatch_table_of_torch_alone():
    code = f"""
import torch, torch.distributed as dist
{HAS}
before = has()
import torch_accl
assert has() == before == [False, False]
dist.init_process_group("gloo")
assert has() == before
dist.new_group(backend={BACKEND!r})
assert has() == [True, True]
dist.new_group(backend={BACKEND!r})
dist.destroy_process_group()
"""
    if BACKEND != "accl":
        return
    (script,) = run_script(code, 1)
    assert script.exitcode == 0, script.stderr


@on_ranks(1)
def test_every_operation_of_c10d_that_moves_tensors_has_the_kernels(rank):
    if BACKEND != "accl":
        return
    names = {name for name in torch._C._dispatch_get_all_op_names() if name.startswith("c10d::")}
    # These operations have no tensors of the user, or no group.
    for name in names - {"c10d::barrier", "c10d::monitored_barrier_", "c10d::check_for_nan"}:
        for key in ("Conjugate", "Negative"):
            assert torch._C._dispatch_has_kernel_for_dispatch_key(name, key), (name, key)


OUTCOMES = """
import os, torch, torch.distributed as dist
dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
group = dist.new_group(backend="gloo")

def views():
    base = torch.arange(6.0) + rank
    complex_base = torch.complex(base, -base)
    yield "negative", lambda: torch._neg_view(base.clone())
    yield "conjugate", lambda: complex_base.clone().conj()
    yield "imaginary", lambda: complex_base.clone().conj().imag
    yield "both", lambda: torch._neg_view(complex_base.clone().conj())

def calls(make):
    zeros = lambda count=6: torch.zeros(count, dtype=make().dtype)
    lists = lambda: [zeros() for _ in range(world)]
    options = dist.AllreduceOptions()
    yield "all_reduce", lambda t: (dist.all_reduce(t, group=group), [t])[1]
    yield "raw_all_reduce", lambda t: (group.allreduce([t], options).wait(), [t])[1]
    yield "coalesced", lambda t: (group.allreduce_coalesced([t, make()]).wait(), [t])[1]
    yield "broadcast", lambda t: (dist.broadcast(t, 0, group=group), [t])[1]
    yield "reduce", lambda t: (dist.reduce(t, 0, group=group), [t])[1]
    def gathered(t, out):
        dist.all_gather(out, t, group=group)
        return [t, *out]
    yield "all_gather", lambda t: gathered(t, lists())
    yield "all_gather_into_views", lambda t: gathered(t, [make() for _ in range(world)])
    def single(t, out):
        dist.all_gather_single(out, t, group=group) if hasattr(dist, "all_gather_single") else dist.all_gather_into_tensor(out, t, group=group)
        return [t, out]
    yield "all_gather_single", lambda t: single(t, zeros(6 * world))
    def gather(t, out):
        dist.gather(t, out if rank == 0 else None, group=group)
        return [t, *out]
    yield "gather", lambda t: gather(t, lists())
    def scatter(t, parts):
        dist.scatter(t, parts if rank == 0 else None, group=group)
        return [t, *parts]
    yield "scatter", lambda t: scatter(t, [make() for _ in range(world)])
    def reduce_scatter(t, parts):
        dist.reduce_scatter(t, parts, group=group)
        return [t, *parts]
    yield "reduce_scatter", lambda t: reduce_scatter(t, [make() for _ in range(world)])
    def exchange(t, out):
        dist.all_to_all_single(out, t, group=group)
        return [t, out]
    yield "all_to_all_single", lambda t: exchange(t, zeros())
    yield "all_to_all_into_a_view", lambda t: exchange(zeros(), t)
    def message(t):
        work = dist.isend(t, 1 - rank, group=group)
        into = make()
        dist.recv(into, 1 - rank, group=group)
        work.wait()
        return [t, into]
    yield "message", message

def outcomes():
    found = {}
    for kind, make in views():
        for name, call in calls(make):
            try:
                result = [(t.is_conj(), t.is_neg(), t.resolve_conj().resolve_neg().numpy().tobytes()) for t in call(make())]
            except Exception as error:
                result = type(error).__name__
            dist.barrier()
            found[kind, name] = result
    return found
"""


def test_other_backends_have_the_same_outcomes_to_the_bit_before_and_after():
    if BACKEND != "accl":
        return
    code = (
        OUTCOMES
        + """
before = outcomes()
dist.new_group(backend="accl")
after = outcomes()
assert sum(isinstance(result, list) for result in before.values()) > 20
changed = [name for name in before if before[name] != after[name]]
assert not changed, changed
dist.destroy_process_group()
"""
    )
    for script in run_script(code, world=2, timeout=60):
        assert script.exitcode == 0, script.stderr
