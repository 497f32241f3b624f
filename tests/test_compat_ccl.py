"""Scripts of torch-ccl: its backend name, its variables, and the steps of its examples."""

import textwrap

import pytest
import torch
import torch.distributed as dist
from support import BACKEND, launchers, on_ranks
from support.scripts import free_port, run_script
from torch_accl.compat._ccl_variables import settings_of, without_effect

pytestmark = pytest.mark.skipif(BACKEND != "accl", reason="about this package only")


def test_what_ccl_variables_say_is_said_in_accls_settings():
    assert settings_of({}) == {"profile_names": "ccl"}
    said = {
        "CCL_LOG_LEVEL": "error",
        "CCL_WORKER_COUNT": "0",
        "CCL_WORKER_AFFINITY": "3,5",
        "CCL_KVS_IFACE": "eth1",
        "CCL_ALLREDUCE": "recursive_doubling:0-8192;rabenseifner:8193-1048576;ring:1048577-max",
        "CCL_BCAST": "naive",
    }
    assert settings_of(said) == {
        "profile_names": "ccl",
        "log": "off",
        "worker_count": "0",
        "worker_affinity": "3,5",
        "socket_ifname": "=eth1",
        "algorithm": "all_reduce=recursive_doubling:0-8192,all_reduce=rabenseifner:8193-1048576,all_reduce=ring:1048577-,broadcast=flat",
    }
    ours = {
        "ACCL_LOG": "info",
        "ACCL_WORKER_COUNT": "2",
        "ACCL_WORKER_AFFINITY": "0",
        "ACCL_PROFILE_NAMES": "pg",
        "ACCL_ALGORITHM": "",
    }
    assert settings_of(said | ours) == {"socket_ifname": "=eth1"}


def test_every_algorithm_that_a_name_of_onecl_stands_for_is_there():
    from torch_accl import _native
    from torch_accl.compat._ccl_variables import _ALGORITHMS

    known = {(row["collective"], row["name"]) for row in _native.algorithms()}
    assert {(collective, name) for collective, names in _ALGORITHMS.values() for name in names.values()} <= known


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("CCL_LOG_LEVEL", "loud"),
        ("CCL_WORKER_COUNT", "many"),
        ("CCL_ALLREDUCE", "quick"),
        ("CCL_ALLREDUCE", "ring:8192"),
    ],
)
def test_what_onecl_would_not_take_is_refused_by_name(name, value):
    with pytest.raises(ValueError, match=f"{name}={value!r}: expected"):
        settings_of({name: value})


def test_variables_without_effect_are_known():
    said = {
        "CCL_ROOT": "/opt/ccl",
        "CCL_ALLREDUCE": "ring",
        "CCL_REDUCE": "ring",
        "CCL_FUSION": "1",
        "CCL_ATL_TRANSPORT": "ofi",
        "CCL_WORKER_AFFINITY": "",
        "ONECCL_BINDINGS_FOR_PYTORCH_ENV_VERBOSE": "1",
        "PATH": "/bin",
    }
    assert without_effect(said) == [
        "CCL_ATL_TRANSPORT",
        "CCL_FUSION",
        "CCL_REDUCE",
        "ONECCL_BINDINGS_FOR_PYTORCH_ENV_VERBOSE",
    ]


# The steps of oneCCL's guide for PyTorch: rank and size copied, a tiny model, three steps.
TRAIN = """
import os
import torch
import torch.nn as nn
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch_accl.compat import ccl

os.environ["RANK"] = str(os.environ.get("PMI_RANK", 0))
os.environ["WORLD_SIZE"] = str(os.environ.get("PMI_SIZE", 1))
dist.init_process_group("ccl")
torch.manual_seed(dist.get_rank())
model = DistributedDataParallel(nn.Linear(4, 5))
optimizer = torch.optim.SGD(model.parameters(), lr=0.001)
for _ in range(3):
    loss = nn.MSELoss()(model(torch.randn(3, 4)), torch.randn(3, 5))
    loss.backward()
    optimizer.step()
weights = [torch.zeros(5, 4) for _ in range(dist.get_world_size())]
dist.all_gather(weights, model.module.weight.detach())
said = (dist.get_rank(), dist.get_world_size(), dist.get_backend(), all(torch.equal(weights[0], other) for other in weights))
# A single write: several ranks share the pipe.
os.write(1, (" ".join(map(str, said)) + chr(10)).encode())
dist.destroy_process_group()
"""

# The steps of the first example of torch-ccl's README: the script sets the address and passes rank and size.
USAGE = """
import os
import torch
import torch.distributed as dist
from torch_accl.compat import ccl

os.environ["MASTER_ADDR"] = "127.0.0.1"
os.environ["MASTER_PORT"] = "FREE_ONE"
os.environ["RANK"] = str(os.environ.get("PMI_RANK", 0))
os.environ["WORLD_SIZE"] = str(os.environ.get("PMI_SIZE", 1))
dist.init_process_group("ccl", init_method="env://", rank=int(os.environ["RANK"]), world_size=int(os.environ["WORLD_SIZE"]))
tensor = torch.full((2, 2), dist.get_rank() + 1.0)
dist.all_reduce(tensor)
dist.barrier()
os.write(1, f"{dist.get_rank()} {dist.get_world_size()} {tensor.sum().item()}\\n".encode())
dist.destroy_process_group()
"""

# The steps of the second example: what the profiler shows for calls of two sizes.
PROFILED = """
import os
import torch
import torch.distributed as dist
from torch_accl.compat import ccl

os.environ["RANK"] = str(os.environ.get("PMI_RANK", 0))
os.environ["WORLD_SIZE"] = str(os.environ.get("PMI_SIZE", 1))
dist.init_process_group("ccl")
small, large = torch.ones(2, 2), torch.ones(4, 4)
with torch.autograd.profiler.profile(record_shapes=True) as profile:
    for _ in range(10):
        dist.all_reduce(small)
        dist.all_reduce(large)
dist.barrier()
rows = profile.key_averages(group_by_input_shape=True)
assert rows.table(sort_by="self_cpu_time_total")
calls = sorted((str(row.input_shapes), row.count) for row in rows if row.key == "oneccl_bindings_for_pytorch::allreduce")
waits = sum(row.count for row in rows if row.key == "oneccl_bindings_for_pytorch::wait::cpu::allreduce")
os.write(1, f"{dist.get_rank()} {calls} {waits}\\n".encode())
dist.destroy_process_group()
"""
LAUNCHERS = {
    "hydra": ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
    "openmpi": (
        "OMPI_COMM_WORLD_RANK",
        "OMPI_COMM_WORLD_SIZE",
        "OMPI_COMM_WORLD_LOCAL_RANK",
        "OMPI_COMM_WORLD_LOCAL_SIZE",
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("launcher", sorted(LAUNCHERS))
def test_the_demo_of_onecls_guide_trains_in_the_environment_of_each_launcher(launcher):
    rank, world, local_rank, local_world = LAUNCHERS[launcher]
    env = launchers.UNSET | {rank: [0, 1], world: 2, local_rank: [0, 1], local_world: 2}
    ranks = run_script(TRAIN, 2, env=env)
    assert [one.stdout.strip() for one in ranks] == [f"{number} 2 ccl True" for number in range(2)], ranks[0].stderr


@pytest.mark.parametrize("name", sorted(launchers.COMMANDS))
def test_the_examples_of_torch_ccl_run_under_a_launcher_that_is_installed(name, tmp_path):
    usage = USAGE.replace("FREE_ONE", str(free_port()))
    # The script that sets an address comes last, because the other scripts set none.
    ended = launchers.run_under(name, TRAIN + PROFILED + usage, 2, tmp_path)
    assert ended.returncode == 0, ended.stderr
    shapes = "[('[[2, 2]]', 10), ('[[4, 4]]', 10)] 20"
    assert sorted(ended.stdout.splitlines()) == sorted(
        line for rank in range(2) for line in (f"{rank} 2 ccl True", f"{rank} {shapes}", f"{rank} 2 12.0")
    )


@pytest.mark.slow
def test_the_profiler_shows_calls_and_waits_by_torch_ccls_names_and_a_variable_without_effect_is_listed_once():
    code = textwrap.dedent("""
        import torch
        import torch.distributed as dist
        from torch_accl.compat import ccl

        dist.init_process_group("ccl")
        other = dist.new_group(backend="ccl")
        tensor = torch.ones(2, 10)
        with torch.autograd.profiler.profile(record_shapes=True) as profile:
            dist.all_reduce(tensor)
            dist.all_reduce(tensor, async_op=True, group=other).wait()
        print(profile.key_averages(group_by_input_shape=True).table(sort_by="self_cpu_time_total"))
        dist.destroy_process_group()
    """)
    ranks = run_script(code, 2, env={"CCL_FUSION": "1", "CCL_ATL_TRANSPORT": "ofi"})
    assert [rank.exitcode for rank in ranks] == [0, 0], ranks[0].stderr
    for name in ("oneccl_bindings_for_pytorch::allreduce", "oneccl_bindings_for_pytorch::wait::cpu::allreduce"):
        assert name[:50] in ranks[0].stdout
    listed = "these variables of oneCCL have no effect on accl: CCL_ATL_TRANSPORT, CCL_FUSION"
    assert ranks[0].stderr.count(listed) == 1 and listed not in ranks[1].stderr


@pytest.mark.slow
def test_an_algorithm_that_ccl_named_is_taken():
    code = textwrap.dedent("""
        import torch
        import torch.distributed as dist
        from torch_accl.compat import ccl

        dist.init_process_group("ccl")
        backend = dist.group.WORLD._get_backend(torch.device("cpu"))
        for count in (16, 1 << 20):
            tensors = [torch.ones(count)]
            print(backend.algorithm_of("all_reduce", [], tensors, dist.ReduceOp.SUM, 0))
        dist.destroy_process_group()
    """)
    ranks = run_script(
        code, 2, env={"CCL_ALLREDUCE": "recursive_doubling:0-1024;ring:1025-max", "MASTER_PORT": free_port()}
    )
    assert ranks[0].stdout.split() == ["recursive_doubling", "ring"], ranks[0].stderr


@on_ranks(1, 2, 3)
def test_torch_distributed_has_a_process_group_ccl_that_ranks_construct_themselves(rank, world):
    from torch_accl.compat import ccl

    assert dist.ProcessGroupCCL is ccl.ProcessGroupCCL
    group = dist.ProcessGroupCCL(
        dist.PrefixStore("constructed", dist.distributed_c10d._get_default_store()), rank, world
    )
    assert (group.rank(), group.size(), group.name()) == (rank, world, "custom")
    root = world - 1
    total = world * (world + 1) / 2

    def mine(*shape):
        return torch.full(shape or (1,), rank + 1.0)

    sent = mine(3)
    options = dist.BroadcastOptions()
    options.rootRank, options.rootTensor = root, 0
    group.broadcast([sent], options).wait()
    assert sent.tolist() == [root + 1.0] * 3
    group.broadcast(one := mine(), root=0).wait()
    assert one.item() == 1
    group.allreduce([summed := mine()]).wait()
    for _ in range(5):
        group.allreduce_coalesced(both := [mine(2), mine(3)])
        assert [one.sum().item() for one in both] == [2 * total, 3 * total], "read without waiting"
    blocking = dist.AllreduceCoalescedOptions()
    blocking.asyncOp = False
    group.allreduce_coalesced(both := [mine(2)], blocking)
    assert both[0].sum().item() == 2 * total, "a blocking call has no work"
    reduce_options = dist.ReduceOptions()
    reduce_options.rootRank = root
    group.reduce([reduced := mine()], reduce_options).wait()
    assert summed.item() == total
    assert rank != root or reduced.item() == total
    gather_options, scatter_options = dist.GatherOptions(), dist.ScatterOptions()
    gather_options.rootRank = scatter_options.rootRank = root
    parts = [mine() for _ in range(world)]
    group.gather([parts] if rank == root else [], [mine()], gather_options).wait()
    group.scatter([part := mine()], [parts] if rank == root else [], scatter_options).wait()
    assert part.item() == rank + 1
    group.allgather([parts], [mine()]).wait()
    group._allgather_base(whole := torch.zeros(world), mine()).wait()
    assert [part.item() for part in parts] == whole.tolist() == list(range(1, world + 1))
    group.reduce_scatter([part], [parts]).wait()
    group._reduce_scatter_base(other := torch.zeros(1), whole).wait()
    assert part.item() == other.item() == world * (rank + 1)
    group.alltoall_base(turned := torch.zeros(world), mine(world), [], []).wait()
    group.alltoall(parts, [mine() for _ in range(world)]).wait()
    assert turned.tolist() == [part.item() for part in parts] == list(range(1, world + 1))
    group.barrier().wait()
    group.shutdown()
    dist.all_reduce(again := mine())
    assert again.item() == total, "torch's own group is none the worse"


@on_ranks(1, fresh=True, init=False)
def test_a_constructed_group_refuses_arguments_in_torch_ccls_words(rank):
    from torch_accl.compat.ccl import ProcessGroupCCL

    group = ProcessGroupCCL(dist.HashStore(), 0, 1)
    for kind, call in (
        (dist.BroadcastOptions, lambda options: group.broadcast([torch.zeros(1)], options)),
        (dist.ReduceOptions, lambda options: group.reduce([torch.zeros(1)], options)),
        (dist.GatherOptions, lambda options: group.gather([[torch.zeros(1)]], [torch.zeros(1)], options)),
        (dist.ScatterOptions, lambda options: group.scatter([torch.zeros(1)], [[torch.zeros(1)]], options)),
    ):
        options = kind()
        options.rootRank = -1
        with pytest.raises(ValueError, match=r"invalid root rank: -1 \(unexpected rank\)"):
            call(options)
    whole = torch.zeros(1, dtype=torch.int64)
    for call in (
        lambda: group._allgather_base(whole, torch.zeros(1)),
        lambda: group._reduce_scatter_base(whole, torch.zeros(1)),
        lambda: group.allgather([[whole]], [torch.zeros(1)]),
        lambda: group.reduce_scatter([whole], [[torch.zeros(1)]]),
    ):
        with pytest.raises(RuntimeError, match="Tensors are not equal in data type"):
            call()
    with pytest.raises(RuntimeError, match="output tensor size must be equal to world_size times input tensor size"):
        group._allgather_base(torch.zeros(2), torch.zeros(1))
    group.allreduce([torch.zeros(1)]).wait()
    for rank, size in ((-1, 2), (2, 2), (0, 0)):
        with pytest.raises(ValueError, match=r"expected a rank from 0 to size - 1"):
            ProcessGroupCCL(dist.HashStore(), rank, size)
