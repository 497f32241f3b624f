"""Main paths under other states of torch, such as a default device without memory or another default type.

Each path must return what it returns without that state.
"""

import contextlib
import copy
import io
import runpy
import warnings
from pathlib import Path

import numpy
import pytest
import torch
import torch._dynamo  # imported once here: optimizers load it, which takes seconds in every rank
import torch.distributed as dist
from support import BACKEND, init_group, on_ranks
from support.training import Model, batch, contribution
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils import _pytree as pytree
from torch.utils._device import _device_constructors
from torch_accl import compression, layer_parallel
from torch_accl.compat import cgx
from torch_accl.compat.torchbraid import MPI, utils
from torch_accl.compression import Compression, Reproducible
from torch_accl.layer_parallel import Cycle, LayerParallel, MGOpt, RecurrentParallel, ode, plain, refined, timed

pytestmark = pytest.mark.skipif(BACKEND != "accl", reason="about this package only")
F32 = {"dtype": torch.float32, "device": "cpu"}


@contextlib.contextmanager
def defaults(device, dtype):
    """Sets torch's default device and default type."""
    before = torch.get_default_dtype()
    torch.set_default_device(device)
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_device(None)
        torch.set_default_dtype(before)


@contextlib.contextmanager
def strict():
    """Makes torch refuse nondeterministic algorithms and detect anomalies in backward passes."""
    torch.use_deterministic_algorithms(True)
    try:
        with warnings.catch_warnings(action="ignore"), torch.autograd.detect_anomaly():
            yield
    finally:
        torch.use_deterministic_algorithms(False)


# A default device and a default type. Either gives a wrong result wherever code picks it up.
DEFAULTS = {
    "meta and bfloat16": lambda: defaults("meta", torch.bfloat16),
    "float64": lambda: defaults(None, torch.float64),
}
STATES = {**DEFAULTS, "strict": strict}
# States for code that computes no gradients.
OF_CALLS = {
    **STATES,
    "no_grad": torch.no_grad,
    "inference_mode": torch.inference_mode,
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
}


def check_states_are_ignored(prepare, states=STATES):
    """Checks that a program returns the same bits in any state of torch, and draws no random numbers.

    `prepare` creates the program's inputs and returns a function that runs it.
    """
    wanted = pytree.tree_leaves(prepare()())
    for name, state in states.items():
        run = prepare()
        drawn = torch.get_rng_state()
        try:
            with state():
                found = pytree.tree_leaves(run())
            check_same(found, wanted)
            assert torch.equal(torch.get_rng_state(), drawn)
        except Exception as error:
            error.add_note(f"torch's state was {name}")
            raise


def check_same(found, wanted):
    assert len(wanted) == len(found) > 0
    for one, other in zip(found, wanted, strict=True):
        if isinstance(other, torch.Tensor):
            assert (one.dtype, one.device, one.shape) == (other.dtype, other.device, other.shape)
            assert torch.equal(one, other)
        else:
            assert one == other


def test_the_gate_knows_what_the_default_device_of_torch_changes():
    factory = runpy.run_path(str(Path(__file__).parent.parent / ".ci/check_factories"))["FACTORY"]
    # torch gives functions of its submodules other names, and `fill` fills a given tensor.
    names = {call.__name__.replace("fft_", "fft.", 1) for call in _device_constructors()} - {"fill"}
    names = {f"nested.{name}" if "nested" in name else name for name in names}
    assert len(names) > 30 and [name for name in sorted(names) if not factory.fullmatch(name)] == []


# ---- groups and calls


@on_ranks(2, init=False)
@pytest.mark.parametrize("backend", ["accl", "cgx"])
def test_groups_are_made(rank, world, backend):
    for name, state in DEFAULTS.items():
        with state():
            init_group(backend)
            tensor = torch.full((64,), rank + 1.0, **F32)
            dist.all_reduce(tensor)
            dist.barrier()
            dist.new_group([0, 1], backend=backend)
        assert tensor.tolist() == [3.0] * 64, name
        dist.destroy_process_group()


@on_ranks(3)
def test_collectives(rank, world):
    def run():
        mine = torch.arange(6, **F32) + rank
        found = [mine.clone() for _ in range(4)]
        dist.all_reduce(found[0])
        dist.all_reduce(found[1], dist.ReduceOp.AVG)
        dist.broadcast(found[2], 1)
        dist.reduce(found[3], 2, dist.ReduceOp.MAX)
        rows = torch.empty(18, **F32)
        dist.all_gather_into_tensor(rows, mine)
        part = torch.empty(2, **F32)
        dist.reduce_scatter_tensor(part, mine)
        swapped = torch.empty(6, **F32)
        dist.all_to_all_single(swapped, mine)
        sparse = torch.sparse_coo_tensor(torch.tensor([[rank, 4]], device="cpu"), mine[:2], (6,), device="cpu")
        dist.all_reduce(sparse)
        came = torch.empty(6, **F32)
        for work in dist.batch_isend_irecv(
            [dist.P2POp(dist.isend, mine, (rank + 1) % world), dist.P2POp(dist.irecv, came, (rank - 1) % world)]
        ):
            work.wait()
        dist.barrier()
        return [*found, rows, part, swapped, sparse.to_dense(), came]

    check_states_are_ignored(lambda: run, OF_CALLS)


@on_ranks(3)
def test_object_collectives(rank, world):
    def run():
        of_all = [None] * world
        dist.all_gather_object(of_all, {"rank": rank})
        one = ["text" if rank == 0 else None]
        dist.broadcast_object_list(one)
        own = [None]
        dist.scatter_object_list(own, list(range(world)) if rank == 1 else None, src=1)
        gathered = [None] * world if rank == 2 else None
        dist.gather_object(rank, gathered, dst=2)
        came = [rank]
        if rank == 0:
            dist.send_object_list(came, dst=1)
        elif rank == 1:
            dist.recv_object_list(came, src=0)
        return of_all, one, own, gathered, came

    check_states_are_ignored(lambda: run, OF_CALLS)


# ---- compression


@on_ranks(3)
def test_compressed_and_reproducible_sums(rank, world):
    def prepare():
        mine = [contribution(rank, 5003).to(dtype) for dtype in (torch.float32, torch.float16, torch.bfloat16)]
        mine[1][7] = torch.inf

        def run():
            found = []
            for tensor in mine:
                for bits in (8, 16, 32):
                    found.append(tensor.clone())
                    compression.all_reduce_reproducible(found[-1], bits=bits)
                for codec in ("maxmin:4", "raw"):
                    found.append(tensor.clone())
                    compression.all_reduce_quantized(found[-1], compression=codec)
            return [tensor.nan_to_num(nan=-1.0) for tensor in found]

        return run

    check_states_are_ignored(prepare, OF_CALLS)


@on_ranks(2)
def test_tensors_of_inference_mode_are_summed_outside_of_it(rank, world):
    with torch.inference_mode():
        mine = [contribution(rank) for _ in range(3)]
    dist.all_reduce(mine[0])
    compression.all_reduce_quantized(mine[1], compression="raw")
    compression.all_reduce_reproducible(mine[2], bits=32)
    assert torch.equal(mine[0], mine[1])
    torch.testing.assert_close(mine[2], mine[0])


HOOKS = {
    "raw": lambda ddp: (compression.CompressionState(Compression("raw"), ddp), compression.ddp_hook),
    "maxmin": lambda ddp: (
        compression.CompressionState(Compression("maxmin:4", min_elements=64, error_feedback=True), ddp),
        compression.ddp_hook,
    ),
    "auto": lambda ddp: (compression.CompressionState(Compression("auto"), ddp), compression.ddp_hook),
    "reproducible": lambda ddp: (Reproducible(), compression.reproducible_hook),
    "cgx": lambda ddp: (
        cgx.CGXState(ddp.process_group, 64, {"bits": 4, "bucket_size": 64}),
        cgx.cgx_hook,
    ),
}


@on_ranks(2)
@pytest.mark.parametrize("hook", list(HOOKS))
def test_hooks_of_ddp(rank, world, hook):
    def prepare():
        torch.manual_seed(7)
        model, batches = Model(), [batch(rank, step) for step in range(2)]

        def run():
            ddp = DistributedDataParallel(model)
            ddp.register_comm_hook(*HOOKS[hook](ddp))
            for inputs, targets in batches:
                (ddp(inputs) - targets).square().mean().backward()
            gradients = [parameter.grad for parameter in ddp.parameters()]
            # The fastest codec may change from run to run.
            return [gradient.dtype for gradient in gradients] if hook == "auto" else gradients

        return run

    check_states_are_ignored(prepare)


@on_ranks(2)
def test_compression_of_fsdp2(rank, world):
    def prepare():
        torch.manual_seed(7)
        model = fully_shard(Model())
        batches = [batch(rank, step) for step in range(2)]

        def run():
            compression.apply_fsdp2(
                model, compression.CompressionState(Compression("maxmin:4", min_elements=64), model)
            )
            for inputs, targets in batches:
                (model(inputs) - targets).square().mean().backward()
            return [parameter.grad.to_local() for parameter in model.parameters()]

        return run

    check_states_are_ignored(prepare)


# ---- layers on several ranks


class Step(nn.Module):
    """A step of an ODE, with dropout."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(6, 6)

    def forward(self, x, dt):
        return x + dt * nn.functional.dropout(torch.tanh(self.inner(x)), 0.2, self.training)


def layers(dtype):
    torch.manual_seed(5)
    made = [plain(nn.Linear(4, 6)), *(ode(nn.Sequential(nn.Linear(6, 6), nn.Tanh())) for _ in range(3))]
    made += [*(timed(Step()) for _ in range(3)), plain(nn.Linear(6, 3))]
    for block in made:
        block.module.to(dtype)
    return made


def squared(y, target):
    return (y - target).square().mean()


def seeded(number, *shape, dtype=torch.float32):
    return torch.randn(shape, generator=torch.Generator().manual_seed(number), dtype=torch.float64).to(dtype)


def gradients_of(module):
    return {key: parameter.grad for key, parameter in module.named_parameters()}


MODES = ["exact-wave", "exact-pipeline", "exact-forward", "inexact", "converged", "auto"]


@pytest.mark.slow
@on_ranks(2)
@pytest.mark.parametrize("mode", MODES)
def test_steps_of_layer_parallel_nets(rank, world, mode):
    def prepare():
        made, x, target = layers(torch.float32), seeded(1, 8, 4), seeded(2, 8, 3)

        def run():
            cycle = Cycle(factor=2, iterations=2)
            net = LayerParallel(copy.deepcopy(made), mode=mode, micro_batches=2, fwd=cycle, bwd=cycle)
            found = [net.step(x, target, squared)]
            norm = layer_parallel.clip_grad_norm_(net, 0.1)
            output = net(x)
            (output.sum() if net.is_last else output).backward()
            found += [norm, output.detach(), *gradients_of(net).values()]
            evaluated = net.eval().evaluate(x, target, squared)
            # The fastest mode may change from run to run.
            if mode == "auto":
                return [one.dtype for one in found]
            return [found, evaluated.loss, net.norms.forward, net.norms.backward]

        return run

    check_states_are_ignored(prepare)


@on_ranks(3)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
def test_the_norm_of_clipped_gradients_has_the_type_of_their_norm(rank, world, dtype):
    def prepare():
        made, x, target = layers(dtype), seeded(1, 8, 4, dtype=dtype), seeded(2, 8, 3, dtype=dtype)

        def run():
            net = LayerParallel(copy.deepcopy(made), mode="exact-wave")
            net.step(x, target, squared)
            norm = layer_parallel.clip_grad_norm_(net, 0.1)
            # With bfloat16, torch's norm has 16 bits. This norm is not computed from such norms.
            assert norm.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
            return norm

        return run

    check_states_are_ignored(prepare, DEFAULTS)


@on_ranks(2)
def test_scaled_steps_tied_layers_and_saved_nets(rank, world):
    def prepare():
        made, x, target = layers(torch.float32), seeded(1, 8, 4), seeded(2, 8, 3)
        # Ties two layers that are on different ranks.
        made[6].module.inner.weight = made[1].module[0].weight

        def run():
            net = LayerParallel(copy.deepcopy(made), mode="exact-wave")
            scaler = layer_parallel.GradScaler(net, init_scale=16.0)
            optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
            for _ in range(2):
                optimizer.zero_grad()
                net.step(x, target, squared, loss_scale=scaler.get_scale())
                scaler.step(optimizer)
                scaler.update()
            file = io.BytesIO()
            torch.save(net.state_dict(), file)
            file.seek(0)
            net.load_state_dict(torch.load(file))
            serial = net.to_serial()
            return [scaler.get_scale(), net.step(x, target, squared), *gradients_of(net).values()] + [
                parameter.detach() for parameter in (serial.parameters() if serial is not None else [])
            ]

        return run

    check_states_are_ignored(prepare)


@on_ranks(2)
def test_cycles_over_nets_of_other_depths(rank, world):
    def prepare():
        torch.manual_seed(5)
        steps = [ode(nn.Sequential(nn.Linear(6, 6), nn.Tanh())) for _ in range(4)]
        x, target = seeded(1, 8, 6), seeded(2, 8, 6)

        def run():
            net = LayerParallel(copy.deepcopy(steps), mode="exact-wave")
            finer = refined(net, 2)
            cycle = MGOpt(net, torch.optim.SGD(net.parameters(), lr=0.05))
            found = float(cycle.step(x, target, squared))
            return [found, finer.step(x, target, squared), *(p.detach() for p in net.parameters())]

        return run

    check_states_are_ignored(prepare)


@pytest.mark.slow
@on_ranks(3)
@pytest.mark.parametrize(("kind", "mode"), [("LSTM", "exact-wave"), ("GRU", "inexact")])
def test_recurrent_nets(rank, world, mode, kind):
    def prepare():
        torch.manual_seed(3)
        rnn, tail = getattr(nn, kind)(3, 5, 2, batch_first=True), nn.Linear(5, 2)
        counts = [2, 0, 3]
        x, target = seeded(1 + rank, 4, counts[rank], 3), seeded(9, 4, 2)

        def run():
            cycle = Cycle(factor=4, iterations=2)
            net = RecurrentParallel(copy.deepcopy(rnn), copy.deepcopy(tail), mode=mode, fwd=cycle, bwd=cycle)
            loss = net.step(x, target, squared)
            outputs, last = net(x)
            (outputs.sum() + last.sum()).backward()
            # A rank without steps has no outputs; its empty tensor has the default type.
            return [loss, outputs.detach() if counts[rank] else 0, *gradients_of(net).values()]

        return run

    check_states_are_ignored(prepare)


# ---- the compatibility module of torchbraid


@on_ranks(2)
def test_buffers_of_numpy(rank, world):
    comm = MPI.COMM_WORLD

    def run():
        own, found = numpy.full(4, rank + 1.0), [numpy.zeros(4) for _ in range(2)]
        comm.Allreduce(own, found[0], op=MPI.SUM)
        comm.Allreduce(MPI.IN_PLACE, own, op=MPI.MAX)
        comm.Bcast(found[1] if rank else own, root=0)
        rows, turned = numpy.zeros((world, 4)), numpy.zeros(world)
        comm.Allgather(own, rows)
        comm.Alltoall(numpy.full(world, float(rank)), turned)
        came = numpy.zeros(4, dtype=numpy.int64)
        comm.Send(numpy.full(4, rank), dest=1 - rank, tag=3)
        comm.Recv(came, source=1 - rank, tag=3)
        assert came.tolist() == [1 - rank] * 4 and found[0].tolist() == [3.0] * 4
        comm.send({"from": rank}, dest=1 - rank)
        texts = [comm.recv(source=1 - rank), comm.allgather(rank), comm.bcast("text" if rank else None, root=1)]
        return [own.tolist(), [each.tolist() for each in found], rows.tolist(), turned.tolist(), texts]

    check_states_are_ignored(lambda: run, OF_CALLS)


@on_ranks(2)
def test_helpers_of_torchbraid(rank, world):
    def prepare():
        torch.manual_seed(5)
        net = nn.Linear(3, 3)
        state = seeded(4, 3, 2)

        def run():
            kept = utils.MeanInitialGuessStorage(3, 0.5)
            kept.addState(0.5, state, [0, 2, 2])
            packed = utils.pack_buffer(state)
            into = torch.empty_like(state)
            utils.unpack_buffer(into, packed)
            return [kept.getState(0.5, [2, 0]), into, utils.l2_reg(net, MPI.COMM_WORLD).detach(), utils.pack_buffer([])]

        return run

    check_states_are_ignored(prepare, OF_CALLS)
