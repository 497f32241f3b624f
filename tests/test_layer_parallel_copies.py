"""Parameters of which several ranks of a net have a copy: tied parameters, and the cell of a recurrent net."""

import copy
import warnings

import pytest
import torch
import torch.distributed as dist
from support import BACKEND, gloo_group, on_ranks, run_script
from support.nets import alone
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel
from torch_accl import compression, layer_parallel
from torch_accl.layer_parallel import (
    LayerParallel,
    LayerParallelError,
    RecurrentParallel,
    ode,
    plain,
)
from torch_accl.layer_parallel._net.copies import hash_of

WORDS, WIDTH, STEPS, ROWS = 331, 96, 20, 6
TIE = [("layers.0.weight", "layers.5.weight")]
HIDDEN, PARTS = 33, 3
# Number of batches at the start after which the copies are compared.
LOOKED = 3


class Embedding(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(9)
        self.weight = nn.Parameter(torch.randn(WORDS, WIDTH) / 4)

    def forward(self, x):
        return x @ self.weight


class Unembedding(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(WORDS, WIDTH))
        self.bias = nn.Parameter(torch.zeros(WORDS))

    def forward(self, x):
        return functional.linear(x, self.weight, self.bias)


def small(number):
    torch.manual_seed(number)
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh())


def tied(**settings):
    blocks = [plain(Embedding()), *(ode(small(number)) for number in range(4)), plain(Unembedding())]
    return LayerParallel(blocks, mode="exact-wave", tie=TIE, **settings)


def recurrent(**settings):
    torch.manual_seed(3)
    return RecurrentParallel(
        nn.GRU(WORDS, HIDDEN, batch_first=True), nn.Linear(HIDDEN, WORDS), mode="exact-wave", **settings
    )


def batch(net, number, replicas, part):
    """Returns the rows of replica `part` out of `replicas`. For a recurrent net, they contain only the steps of this
    rank.
    """
    # Random integers are the same on all processors.
    generator = torch.Generator().manual_seed(number)
    rows = slice(part * ROWS, (part + 1) * ROWS)
    if isinstance(net, RecurrentParallel):
        # The total number of steps does not depend on the number of ranks.
        x = torch.randint(-3, 4, (replicas * ROWS, 2 * PARTS, WORDS), generator=generator).float()
        count = 2 * PARTS // net.wire.size
        x = x[rows, net.wire.rank * count : (net.wire.rank + 1) * count]
    else:
        x = torch.randint(4, (replicas * ROWS, WORDS), generator=generator)[rows] / 64
    return x, torch.randint(WORDS, (replicas * ROWS,), generator=generator)[rows]


def grid(dp, lp):
    """Returns the mesh and the index of this rank's replica."""
    mesh = init_device_mesh("cpu", (dp, lp), mesh_dim_names=("dp", "lp"))
    return mesh, mesh.get_local_rank("dp")


def copies_of(net):
    """Returns the copies on all ranks of the layers, by the name of the parameter."""
    if isinstance(net, RecurrentParallel):
        mine = [(name, value) for name, value in net.cell.named_parameters()]
    else:
        mine = [("tied", net.get_parameter(name)) for name in net.tied_names()]
    local = [(name, value.to_local() if isinstance(value, DTensor) else value) for name, value in mine]
    found = {}
    for name, value in (
        each for part in net.wire.gathered([(n, v.detach().clone()) for n, v in local]) for each in part
    ):
        found.setdefault(name, []).append(value)
    return found


def are_equal(net):
    """Returns whether all copies are equal bit for bit. Zeros of different sign count as different."""
    bits = [[copy.view(torch.int32) for copy in copies] for copies in copies_of(net).values()]
    return all(torch.equal(copies[0], other) for copies in bits for other in copies[1:])


def trained(net, wrapped, replicas=1, part=0, rate=0.5, count=STEPS):
    """Trains for `count` batches. Returns the losses, and whether the copies ever differed after one of the first
    batches.
    """
    optimizer = torch.optim.SGD(net.parameters(), lr=rate, momentum=0.9)
    losses, drifted = [], False
    for number in range(count):
        optimizer.zero_grad()
        x, target = batch(net, number, replicas, part)
        losses.append(float(layer_parallel.step(wrapped, x, target, functional.cross_entropy)))
        optimizer.step()
        drifted = drifted or (number < LOOKED and not are_equal(net))
    return losses, drifted


def settled(net):
    """Runs one evaluation batch, which makes the copies equal at its start as every batch does."""
    net.eval()
    with torch.no_grad():
        net(batch(net, 0, 1, 0)[0])


def serial(make, replicas, rate=0.5):
    """Returns the net after the same training on one rank, with the rows of all replicas in one batch."""
    net = make(group=alone())
    optimizer = torch.optim.SGD(net.parameters(), lr=rate, momentum=0.9)
    for number in range(STEPS):
        optimizer.zero_grad()
        parts = [batch(net, number, replicas, part) for part in range(replicas)]
        net.step(*(torch.cat(each) for each in zip(*parts)), functional.cross_entropy)
        optimizer.step()
    return net


# A float32 sum in another order is 1e-7 off. Momentum adds up the errors of ten steps, and training itself enlarges
# them.
ROUNDING = dict(rtol=1e-3, atol=1e-5)


@pytest.mark.slow
@on_ranks(3)
@pytest.mark.parametrize("way", ["accl", "gloo"])
def test_tied_parameters_and_three_replicas_train_on_after_the_first_batch(rank, world, way):
    net = tied(group="alone")
    group = gloo_group() if way == "gloo" else None
    wrapped = DistributedDataParallel(net, process_group=group)
    _, drifted = trained(net, wrapped, 3, rank)
    assert drifted
    settled(net)
    assert are_equal(net)
    one = serial(tied, 3)
    for name, parameter in net.named_parameters():
        torch.testing.assert_close(parameter, one.get_parameter(name), **ROUNDING)


@pytest.mark.slow
@on_ranks(4)
@pytest.mark.parametrize("make, codec", [(tied, "maxmin:4"), (recurrent, "maxmin:8")])
def test_compressed_gradients_of_replicas_leave_copies_equal(rank, world, make, codec):
    mesh, dp = grid(2, 2)
    group = mesh["dp"].get_group()
    nets = [make(mesh=mesh["lp"]) for _ in range(2)]
    wrapped, exact = (DistributedDataParallel(net, process_group=group) for net in nets)
    state = compression.CompressionState(compression.Compression(codec, min_elements=1), wrapped, group)
    wrapped.register_comm_hook(state, compression.ddp_hook)
    losses, drifted = trained(nets[0], wrapped, 2, dp, rate=0.1)
    assert drifted
    settled(nets[0])
    assert are_equal(nets[0])
    # The replicas must be equal as well.
    flat = torch.cat([parameter.detach().flatten() for parameter in nets[0].parameters()])
    both = [torch.empty_like(flat) for _ in range(2)]
    dist.all_gather(both, flat, group=group)
    assert torch.equal(*both)
    # A 4-bit gradient is off by at most 1/30 of its bucket's range, and the errors of 20 steps have a mean of zero.
    wanted, _ = trained(nets[1], exact, 2, dp, rate=0.1)
    torch.testing.assert_close(losses, wanted, rtol=2e-3, atol=0)


@pytest.mark.slow
@on_ranks(4, deadline=80)
def test_copies_that_are_sharded_over_replicas_stay_equal(rank, world):
    mesh, dp = grid(2, 2)
    for policy in (None, MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)):
        nets = [tied(mesh=mesh["lp"]) for _ in range(2)]
        for net in nets:
            options = {} if policy is None else {"mp_policy": policy}
            fully_shard(net, mesh=mesh["dp"], reshard_after_forward=False, **options)
        settings = compression.Compression("maxmin:4,rounding=stochastic", min_elements=1)
        compression.apply_fsdp2(nets[0], compression.CompressionState(settings, nets[0], mesh["dp"].get_group()))
        losses, drifted = trained(nets[0], nets[0], 2, dp, rate=0.1, count=STEPS if policy is None else 4)
        assert drifted
        saved = nets[0].state_dict()
        assert are_equal(nets[0]) and all(isinstance(value, DTensor) for value in saved.values())
        if policy is None:
            wanted, _ = trained(nets[1], nets[1], 2, dp, rate=0.1, count=5)
            torch.testing.assert_close(losses[:5], wanted, rtol=2e-3, atol=0)


@on_ranks(2)
def test_copies_that_are_sharded_in_different_ways_are_refused_on_all_ranks(rank, world):
    mesh, _ = grid(1, 2)
    net = tied(mesh=mesh["lp"])
    fully_shard(
        net,
        mesh=mesh["dp"],
        reshard_after_forward=False,
        shard_placement_fn=lambda parameter: Shard(rank) if parameter.dim() > 1 else None,
    )
    with pytest.raises(ValueError, match="shard their copies of layers.0.weight, layers.5.weight in different ways"):
        layer_parallel.step(net, *batch(net, 0, 1, 0), functional.cross_entropy)


OTHER_PROCESSOR = """
import os
if os.environ["RANK"] == "1":
    os.environ["ATEN_CPU_CAPABILITY"] = "default"
import torch, torch.distributed as dist
from torch import nn
from torch_accl.layer_parallel import LayerParallel, RecurrentParallel, plain
torch.set_num_threads(1)
assert (torch.backends.cpu.get_cpu_capability() == "DEFAULT") == (os.environ["RANK"] == "1")
dist.init_process_group({backend!r})

def are_equal(net):
    mine = torch.cat([copy.detach().flatten() for copied in net.copied() for copy in copied.mine])
    return len(set(net.wire.gathered(mine.numpy().tobytes()))) == 1

def squared(y, target):
    return (y - target).square().mean()

names = [("layers.0.weight", "layers.1.weight")]
tied = LayerParallel([plain(nn.Linear(64, 64)) for _ in range(2)], mode="exact-wave", tie=names)
torch.manual_seed(3)
recurrent = RecurrentParallel(nn.GRU(64, 64, batch_first=True), mode="exact-wave")
assert are_equal(recurrent)
for net, x in ((tied, torch.ones(4, 64)), (recurrent, torch.ones(4, 3, 64))):
    drifted = False
    for _ in range(4):
        net.zero_grad()
        net.step(x, torch.zeros(4, 64), squared)
        assert are_equal(net)
        with torch.no_grad():
            for parameter in net.parameters():
                parameter.add_(parameter.grad, alpha=-0.1)
        drifted = drifted or not are_equal(net)
    print("drifted" if drifted else "equal")
dist.destroy_process_group()
"""


@pytest.mark.slow
def test_copies_stay_equal_on_ranks_whose_processors_round_in_other_ways():
    for script in run_script(OTHER_PROCESSOR.format(backend=BACKEND), 2, timeout=60):
        assert script.exitcode == 0, script.stderr
        assert script.stdout.split() == ["drifted", "drifted"]


@on_ranks(2, 3)
def test_a_cell_that_is_another_on_one_rank_is_refused_when_the_net_is_built(rank, world):
    torch.manual_seed(rank // (world - 1))
    with pytest.raises(
        ValueError,
        match=rf"building the net: copies of cell.weight_ih_l0 \(and of 3 more parameters\) have different values: rank {world - 1} .*rank 0; set the same torch seed",
    ):
        RecurrentParallel(nn.GRU(3, 4, batch_first=True))
    with pytest.raises(ValueError, match="have cells with different parameters"):
        RecurrentParallel(nn.GRU(3, 4 if rank == 0 else 5, batch_first=True))


@on_ranks(2, 3)
@pytest.mark.parametrize("make", [tied, recurrent])
def test_copies_that_are_loaded_and_differ_are_refused_on_all_ranks(rank, world, make):
    net = make()
    wanted = net.state_dict()
    saved = copy.deepcopy(wanted)
    name = "cell.weight_hh_l0" if make is recurrent else "layers.5.weight"
    if rank == world - 1:
        saved[name][1, 2] += 1
    message = rf"load_state_dict.*copies of .*{name}.* have different values: rank {world - 1} of the layers differs from rank 0"
    with pytest.raises(ValueError, match=message):
        net.load_state_dict(saved)
    with pytest.raises(ValueError, match=f"start of batch 0: copies of .*{name}"):
        net.step(*batch(net, 0, 1, 0), functional.cross_entropy)
    if make is tied:
        # Saving the refused values is refused as well.
        with pytest.raises(ValueError, match=rf"state_dict.*copies of .*{name}.* have different values"):
            net.state_dict()
    net.load_state_dict(make().state_dict())
    net.step(*batch(net, 0, 1, 0), functional.cross_entropy)


@on_ranks(2)
def test_tied_parameters_that_are_loaded_are_compared_bit_for_bit(rank, world):
    net = tied()
    saved = copy.deepcopy(net.state_dict())
    if rank == 1:
        saved["layers.5.weight"].view(torch.int32)[3, 4] ^= 1
    with pytest.raises(ValueError, match="layers.0.weight, layers.5.weight have different values"):
        net.load_state_dict(saved)


@on_ranks(2)
@pytest.mark.parametrize("make", [tied, recurrent])
def test_what_is_saved_after_a_step_that_rounded_can_be_loaded(rank, world, make):
    net, other = make(), make()
    name = "cell.weight_hh_l0" if make is recurrent else f"layers.{5 * rank}.weight"
    if rank == 1:
        with torch.no_grad():
            net.get_parameter(name).view(torch.int32)[3, 4] ^= 1
    if make is recurrent:
        # `state_dict` of a recurrent net is not collective: one rank may call it alone.
        assert rank == 0 or net.state_dict()
    other.load_state_dict(net.state_dict())
    assert are_equal(other)
    x, target = batch(net, 0, 1, 0)
    assert torch.equal(other.step(x, target, functional.cross_entropy), net.step(x, target, functional.cross_entropy))
    assert are_equal(net)


@on_ranks(3)
@pytest.mark.parametrize("make", [tied, recurrent])
def test_a_copy_that_is_further_off_than_rounding_is_warned_of_once(rank, world, make):
    net = make()
    name = "cell.weight_hh_l0" if make is recurrent else "layers.5.weight"
    found = []
    for number in range(3):
        if rank == 2:
            with torch.no_grad():
                net.get_parameter(name).mul_(1.01 if number else 1.0001)
        with warnings.catch_warnings(record=True) as each:
            warnings.simplefilter("always")
            net.step(*batch(net, number, 1, 0), functional.cross_entropy)
        found.append([str(warning.message) for warning in each if "copy of" in str(warning.message)])
        assert are_equal(net)
    assert [len(messages) for messages in found] == ([0, 1, 0] if rank == 2 else [0, 0, 0])
    if rank == 2:
        assert (
            "batch 1: the copy of " in found[1][0]
            and name in found[1][0]
            and "rank 2 of the layers was 0.01 " in found[1][0]
        )


@on_ranks(2)
def test_copies_on_the_meta_device_are_compared_in_the_first_batch(rank, world):
    with torch.device("meta"):
        net = tied()
    net.to_empty(device="cpu")
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.fill_(1.0 + rank)
    with pytest.raises(ValueError, match="start of batch 0: copies of layers.0.weight, layers.5.weight have different"):
        net.step(*batch(net, 0, 1, 0), functional.cross_entropy)
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.fill_(1.0)
    net.step(*batch(net, 0, 1, 0), functional.cross_entropy)


@on_ranks(3)
def test_a_net_from_the_meta_device_is_saved_where_a_rank_has_no_copy(rank, world):
    with torch.device("meta"):
        net = tied()
    assert all(value.is_meta for value in net.state_dict().values())
    net.to_empty(device="cpu")
    # Fill the tensors in place, as loading a checkpoint does.
    for value in (found := net.state_dict()).values():
        value.fill_(1.0)
    net.load_state_dict(found)
    net.step(*batch(net, 0, 1, 0), functional.cross_entropy)


@on_ranks(2)
def test_copies_that_differ_in_signs_of_zeros_become_equal(rank, world):
    net = tied()
    for value in net.tied_names():
        with torch.no_grad():
            net.get_parameter(value)[:3] = -0.0 if rank else 0.0
    assert not are_equal(net)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        net.step(*batch(net, 0, 1, 0), functional.cross_entropy)
    assert are_equal(net)


@on_ranks(2, 3)
@pytest.mark.parametrize("make", [tied, recurrent])
def test_copies_of_other_shapes_or_types_are_refused_on_all_ranks(rank, world, make):
    net = make()
    own = net.cell if make is recurrent else net.layers["5"] if rank == world - 1 else None

    def put(module):
        if make is recurrent:
            net.cell = module
        else:
            net.layers["5"] = module

    if make is recurrent:
        others = [
            nn.GRU(WORDS, HIDDEN + 1, batch_first=True),
            nn.GRU(WORDS, HIDDEN, 2, batch_first=True),
        ]
        name = "cell"
    else:
        others, name = (
            [Unembedding(), Unembedding().double()],
            "layers.0.weight, layers.5.weight",
        )
        others[0].weight = nn.Parameter(torch.zeros(WORDS, WIDTH + 3))
    for other in others:
        if rank == world - 1:
            put(other)
        message = rf"start of batch 0: copies of {name}.* have different shapes or types: .* on rank 0, .* on rank {world - 1} of the layers"
        with pytest.raises(ValueError, match=message):
            net.step(*batch(net, 0, 1, 0), functional.cross_entropy)
        if rank == world - 1:
            put(own)
        net.step(*batch(net, 0, 1, 0), functional.cross_entropy)
        net.batch = 0


@on_ranks(2, 3)
def test_a_copy_that_a_rank_does_not_find_is_named_on_all_ranks(rank, world):
    net = tied()
    if rank == world - 1:
        own, net.layers["5"] = (
            net.layers["5"],
            nn.Linear(WIDTH, WORDS).requires_grad_(False),
        )
        del net.layers["5"].weight
    for call in (
        lambda: net.step(*batch(net, 0, 1, 0), functional.cross_entropy),
        net.state_dict,
    ):
        with pytest.raises(
            LayerParallelError,
            match=rf"rank {world - 1} of the layers failed in .*weight",
        ):
            call()
    if rank == world - 1:
        net.layers["5"] = own
    net.step(*batch(net, 0, 1, 0), functional.cross_entropy)


@on_ranks(2, 3)
def test_a_net_with_tied_parameters_is_called_with_other_tensors(rank, world):
    net = tied()
    given = {name: (2 * parameter.detach()).requires_grad_() for name, parameter in net.named_parameters()}
    x, target = batch(net, 0, 1, 0)
    y = torch.func.functional_call(net, given, (x,))
    loss = functional.cross_entropy(y, target) if net.is_last else y.sum() * 0
    loss.backward()
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.mul_(2)
    torch.testing.assert_close(
        net.step(x, target, functional.cross_entropy),
        net.wire.pass_on(loss.detach(), world - 1),
    )
    for name, parameter in net.named_parameters():
        torch.testing.assert_close(given[name].grad, parameter.grad)


@on_ranks(2)
def test_tied_parameters_are_compressed_by_one_key(rank, world):
    net = tied()
    settings = compression.Compression("maxmin:4", min_elements=1, layers={"layers.0.weight": "maxmin:8"})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        state = compression.CompressionState(settings, net)
    assert [state.codec_of(name).split(",")[0] for name in net.tied_names()] == ["maxmin:8"]
    assert net.tied_names() == {f"layers.{5 * rank}.weight": "layers.0.weight"}


INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
DTYPES = [
    torch.float64,
    torch.float32,
    torch.bfloat16,
    torch.float16,
    torch.float8_e4m3fn,
    torch.complex64,
]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_copy_of_which_one_bit_or_all_signs_differ_has_another_hash(dtype):
    # A table of several rows, followed by less than one row.
    count = (3 * 2048 + 256) // dtype.itemsize
    real = torch.randn(
        count * (2 if dtype.is_complex else 1),
        generator=torch.Generator().manual_seed(5),
    )
    value = torch.view_as_complex(real.view(-1, 2)) if dtype.is_complex else real.to(dtype)
    whole = torch.view_as_real(value).flatten() if dtype.is_complex else value
    bits = whole.view(INTEGERS[whole.itemsize])
    before = hash_of(value)
    # Flip bits at each position that an element can have in a word, inside the table and after it.
    for place in [*range(16), *range(len(bits) - 16, len(bits))]:
        for bit in range(8 * bits.itemsize):
            flip = torch.tensor(1, dtype=bits.dtype) << bit
            bits[place] ^= flip
            one = hash_of(value)
            bits[(place + 101) % len(bits)] ^= flip
            both = hash_of(value)
            bits[place] ^= flip
            bits[(place + 101) % len(bits)] ^= flip
            assert before not in (one, both) and one != both, (place, bit)
    assert hash_of(value) == before
    # Other lengths: tables of one, two, four and 64 rows.
    for rows in (1, 2, 4, 64):
        long = torch.ones(rows * 2048 // dtype.itemsize, dtype=dtype)
        bits = (torch.view_as_real(long).flatten() if dtype.is_complex else long).view(INTEGERS[whole.itemsize])
        plus = hash_of(long)
        bits ^= torch.tensor(1, dtype=bits.dtype) << (8 * bits.itemsize - 1)
        assert hash_of(long) != plus, rows
