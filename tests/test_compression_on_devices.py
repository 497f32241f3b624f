"""Compression of tensors on an accelerator, on the stand-in: each program gives the bits and figures of the CPU.

Programs run twice in one group, on tensors of the CPU and of the stand-in. `test_compression_devices.py` has the devices
that another backend serves.
"""

import copy
import ctypes
import gc
import io
import time
import warnings
from dataclasses import replace
from datetime import timedelta

import pytest
import torch
import torch._dynamo  # DistributedDataParallel imports it; without this, each rank would take a second for that
import torch.distributed as dist
from support import init_group, on_ranks, standin
from support.training import contribution, decide, residuals_of, same_on_all
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch_accl import Options, _native, compression
from torch_accl.compat import accl_process_group, ccl, cgx
from torch_accl.compression import Compression, Reproducible, _auto, _residuals, _state
from torch_accl.compression._futures import WorkOfSeveral, future_of
from torch_accl.compression.extension import codecs_of, encoded, exact

ORDERS = pytest.mark.parametrize("order", standin.ORDERS)

pytestmark = pytest.mark.skipif(
    torch.__version__ < "2.15", reason="the stand-in is written for the interfaces of torch 2.15"
)

FEEDBACK = Compression("maxmin:2,bucket=64", error_feedback=True, min_elements=64, audit=4, fusion_bytes=1 << 14)


# Where calls on the device are encoded: on the host, from copies, or by kernels on the device.
ROUTES = pytest.mark.parametrize("route", ["host", "kernels"])


@pytest.fixture(autouse=True, scope="module")
def module():
    """Compiles the stand-ins once."""
    standin.build()
    standin.build_driver()


def start(rank, order="random", backend=None, route="host", **options):
    """Registers the stand-in and creates the default group. Returns the module that controls the device."""
    module = standin.register(order, seed=rank)
    if route == "kernels":
        standin.lend_driver(module)
    init_group(backend, **options)
    return module


def check_route(route):
    """Checks that kernels ran if they should."""
    assert (standin.driver_counts().launches > 0) == (route == "kernels")


def check_alike(program):
    """Runs a program on tensors of both devices, and compares the results. Returns them."""
    on_host, on_device = program("cpu"), program("standin")
    assert_equal(on_host, on_device)
    return on_host


def assert_equal(one, other, place="result"):
    """Compares nested results to the bit."""
    if isinstance(one, torch.Tensor):
        same = one.dtype == other.dtype and one.shape == other.shape
        assert same and one.cpu().view(-1).view(torch.uint8).equal(other.cpu().view(-1).view(torch.uint8)), place
    elif isinstance(one, dict):
        assert list(one) == list(other), place
        for name in one:
            assert_equal(one[name], other[name], f"{place} {name}")
    elif isinstance(one, list | tuple):
        assert len(one) == len(other), place
        for index, (left, right) in enumerate(zip(one, other, strict=True)):
            assert_equal(left, right, f"{place} {index}")
    else:
        assert one == other, place


def check_no_faults(module, models=0):
    """Checks the device's faults. DistributedDataParallel itself copies from memory that is not pinned, twice per model."""
    faults = {name: module.counts()[name] for name in ("pageable", "wrong_device", "after_free")}
    assert faults == {"pageable": 2 * models, "wrong_device": 0, "after_free": 0}


def rounded(figure):
    """Returns a sum over calls, or over parts of a call, which may add to it in any order."""
    return figure and float(f"{figure:.9g}")


def figures_of(state):
    """Figures of a state but for times."""
    rows = [(row.name, row.codec, row.calls, row.bits, row.raw_bytes, row.sent_bytes) for row in state.measures()]
    errors = [(rounded(row.error), row.compared, row.not_finite, row.too_large) for row in state.measures()]
    carried = [rounded(row.carried) for row in state.measures()]
    return {"traffic": (state.traffic.raw, state.traffic.sent), "rows": rows, "errors": errors, "carried": carried}


class Layer(nn.Module):
    """Parameters whose gradients are computed element by element, so that both devices compute the same bits."""

    def __init__(self, rows, columns):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(rows, columns))
        self.bias = nn.Parameter(torch.randn(rows))

    def forward(self, weight, bias):
        return (self.weight - weight).square().sum() + (self.bias - bias).square().sum()


class Net(nn.Module):
    """Two layers that are large enough to be compressed, and a small one."""

    def __init__(self):
        super().__init__()
        self.up = Layer(96, 48)
        self.down = Layer(48, 96)
        self.head = Layer(5, 48)

    def forward(self, targets):
        pairs = zip(targets[::2], targets[1::2], strict=True)
        return sum(layer(*pair) for layer, pair in zip(self.children(), pairs, strict=True))


def net(device):
    torch.manual_seed(7)
    return Net().to(device)


def made(device, **options):
    return DistributedDataParallel(net(device), bucket_cap_mb=0.02, **options)


def step_of(model, rank, number, device):
    """Runs one backward pass."""
    drawn = torch.Generator().manual_seed(1000 * rank + number)
    shapes = [parameter.shape for parameter in model.parameters()]
    targets = [torch.randn(shape, generator=drawn).to(device) for shape in shapes]
    model(targets).backward()


def train(model, rank, device, steps):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    for number in steps:
        optimizer.zero_grad()
        step_of(model, rank, number, device)
        optimizer.step()
    return {name: whole(parameter).cpu() for name, parameter in model.named_parameters()}


def whole(tensor):
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor.detach()


def compressed(device, settings=FEEDBACK, **options):
    model = made(device)
    state = compression.CompressionState(settings, model, **options)
    model.register_comm_hook(state, compression.ddp_hook)
    return model, state


# --- hooks ---


@on_ranks(2, fresh=True, init=False)
@ORDERS
@ROUTES
def test_a_model_trains_alike_on_both_devices(rank, world, route, order):
    module = start(rank, order, route=route)

    def program(device):
        model, state = compressed(device)
        parameters = train(model, rank, device, range(4))
        return {"parameters": parameters, **residuals_of(state), **figures_of(state)}

    found = check_alike(program)
    # A rank does not encode its contribution to sums that it computes itself.
    assert any(kept.count_nonzero() for of in ("residuals", "residuals_of_sums") for kept in found[of].values())
    assert found["errors"][0][1] > 0
    check_no_faults(module, models=1)
    check_route(route)


@on_ranks(2, fresh=True, init=False)
@ROUTES
def test_ranks_with_gradients_on_different_devices_train_together(rank, world, route, monkeypatch):
    start(rank, route=route)
    monkeypatch.setattr(_auto, "_times", lambda codecs, *_: {codec: 100.0 - len(codec) for codec in codecs})

    def program(device):
        model, state = compressed(device)
        parameters = train(model, rank, device, range(3))
        model, chosen = compressed(device, Compression("auto", min_elements=64))
        return parameters, residuals_of(state), train(model, rank, device, range(3)), chosen.explain()

    assert_equal(program("cpu"), program("standin" if rank else "cpu"))
    check_route(route if rank else "host")


@on_ranks(2, fresh=True, init=False)
@pytest.mark.parametrize(
    ("kernels", "moves", "device"), [("work", 0, "standin:0"), ("fail once", 1, "standin:0"), ("lack", 3, "cpu")]
)
def test_residuals_lie_where_gradients_are_encoded(rank, world, kernels, moves, device):
    """Kernels need them on the device. If the host encodes, they come to it, and go back at most three times."""
    module = start(rank, "late", route="host" if kernels == "lack" else "kernels")

    def program(device):
        model, state = compressed(device, replace(FEEDBACK, fusion_bytes=1 << 20))
        if kernels == "fail once" and device == "standin":
            ctypes.CDLL(str(standin.build_driver())).accl_standin_fail(b"cuModuleLoadData", 0, 209)
        parameters = train(model, rank, device, range(6))
        return state, {"parameters": parameters, **residuals_of(state), **figures_of(state)}

    (_, on_host), (state, on_device) = program("cpu"), program("standin")
    assert_equal(on_host, on_device)
    kept = state._residual_store
    assert {str(residual.device) for residual in (*kept.contributions.values(), *kept.sums.values())} == {device}
    assert max(part.residuals.moves for plan in state._plans.values() for part in plan.parts) == moves
    check_no_faults(module, models=1)


@on_ranks(2, fresh=True, init=False)
def test_a_hook_with_error_feedback_does_not_wait_for_the_device(rank, world, monkeypatch):
    """It asked which gradients are zeros. Kernels read the answer now."""
    start(rank, route="kernels")
    model, state = compressed("standin")
    train(model, rank, "standin", range(2))
    asked = []
    monkeypatch.setattr(torch.Tensor, "tolist", lambda tensor: asked.append(tensor))
    monkeypatch.setattr(torch.Tensor, "__bool__", lambda tensor: asked.append(tensor))
    step_of(model, rank, 2, "standin")
    monkeypatch.undo()
    assert not asked and state.step == 3


@on_ranks(2, fresh=True, init=False)
def test_a_device_without_room_for_residuals_leaves_them_and_the_encoding_to_the_host(rank, world, monkeypatch):
    start(rank, route="kernels")
    zeros = torch.zeros

    def full(*shape, **options):
        if torch.device(options.get("device", "cpu")).type == "standin":
            raise torch.OutOfMemoryError("the device is full")
        return zeros(*shape, **options)

    def program(device):
        model, state = compressed(device)
        monkeypatch.setattr(torch, "zeros", full)
        parameters = train(model, rank, device, range(3))
        monkeypatch.setattr(torch, "zeros", zeros)
        return {"parameters": parameters, **residuals_of(state), **figures_of(state)}

    check_alike(program)


@on_ranks(2, fresh=True, init=False)
def test_residuals_of_a_failed_call_stay_if_kernels_may_still_write_to_them(rank, world):
    start(rank, "late", route="kernels")
    # The first call compares the ranks' settings, and waits for that.
    model = nn.Linear(64, 512).to("standin")
    works, tensors, state = in_flight(rank, model)
    for work in works:
        work.wait()
    dist.barrier()
    if rank == 0:
        # The second launch. The device still shows when the first one is done.
        ctypes.CDLL(str(standin.build_driver())).accl_standin_fail(b"cuLaunchKernel", 1, 719)
    with pytest.raises(dist.DistBackendError):
        # The failure of one rank may come before the other one has issued its call.
        for work in in_flight(rank, model, state)[0]:
            work.wait()
    assert not _residuals._LOST
    [plan] = state._plans.values()
    placed = state._residual_store.of_call(plan.parts[0].residuals, tensors[plan.parts[0].tensors])
    placed.fail(
        RuntimeError(
            "accl: late; the tensors of this call may still be written to, and their memory is never freed: "
            "do not use them, and end this process when you can"
        )
    )
    lost = {residual.data_ptr() for residual in _residuals._LOST.values()}
    assert lost & {residual.data_ptr() for residual in state._residual_store.contributions.values()}


@on_ranks(2, fresh=True, init=False)
@ORDERS
@ROUTES
def test_modules_of_fsdp2_train_alike_on_both_devices(rank, world, route, order):
    module = start(rank, order, route=route)

    def program(device, shape, dtype=None):
        names = ("replicate", "shard")[-len(shape) :]
        mesh = init_device_mesh(device, shape, mesh_dim_names=names)
        model = net(device)
        for part in (model.up, model.down, model):
            fully_shard(part, mesh=mesh, mp_policy=MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=dtype))
        state = compression.CompressionState(FEEDBACK, model)
        compression.apply_fsdp2(model, state)
        parameters = train(model, rank, device, range(3))
        return {"parameters": parameters, **residuals_of(state), **figures_of(state)}

    for shape, dtype in (((world,), None), ((world, 1), None), ((world, 1), torch.bfloat16)):
        found = check_alike(lambda device, shape=shape, dtype=dtype: program(device, shape, dtype))
        assert found["traffic"][0] > 2 * found["traffic"][1] > 0
    check_no_faults(module)
    check_route(route)


@on_ranks(2, fresh=True, init=False)
@ROUTES
def test_gradients_of_offloaded_parameters_are_reduced_on_the_device_of_their_mesh(rank, world, route):
    start(rank, "late", "standin:accl", route=route)
    mesh = init_device_mesh("standin", (world,))
    model = fully_shard(net("standin"), mesh=mesh, offload_policy=CPUOffloadPolicy(pin_memory=False))
    state = compression.CompressionState(replace(FEEDBACK, audit=0), model)
    compression.apply_fsdp2(model, state)
    step_of(model, rank, 0, "standin")
    assert next(model.parameters()).grad.device.type == "cpu" and state.traffic.ratio > 2
    check_route(route)


@on_ranks(2, fresh=True, init=False)
@ROUTES
def test_gradients_of_zeros_and_gradients_sent_uncompressed_treat_residuals_alike(rank, world, route):
    start(rank, route=route)

    def program(device):
        model, state = compressed(device)
        train(model, rank, device, range(2))
        decide(state, {"up.weight": None})
        for parameter in model.parameters():
            parameter.register_hook(lambda gradient: gradient * 0)
        train(model, rank, device, range(2, 3))
        kept = residuals_of(state)
        model, other = compressed(device)
        train(model, rank, device, range(2))
        decide(other, {"down.weight": None})
        parameters = train(model, rank, device, range(2, 4))
        return kept, parameters, residuals_of(other)

    kept, _, left = check_alike(program)
    assert "up.weight" in kept["residuals"] and "down.weight" not in left["residuals"]
    check_route(route)


@on_ranks(2, fresh=True, init=False)
@ROUTES
def test_a_changed_loss_scale_rescales_residuals_alike(rank, world, route):
    start(rank, route=route)

    class Scaler:
        scale = 1.0

        def get_scale(self):
            return self.scale

    def program(device):
        scaler = Scaler()
        model, state = compressed(device, scaler=scaler)
        train(model, rank, device, range(2))
        scaler.scale = 4.0
        return train(model, rank, device, range(2, 4)), residuals_of(state)

    check_alike(program)
    check_route(route)


@on_ranks(2, fresh=True, init=False)
@ROUTES
def test_codecs_change_alike_when_errors_are_too_large(rank, world, route, monkeypatch):
    start(rank, route=route)
    monkeypatch.setattr(_state, "CHECK_EVERY", 2)

    def program(device):
        settings = Compression("maxmin:2,bucket=64", min_elements=64, audit=2, error_limit=0.05)
        model, state = compressed(device, settings)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            parameters = train(model, rank, device, range(5))
        warned = sorted(str(warning.message) for warning in caught if "error_limit" in str(warning.message))
        return parameters, dict(state._decided), warned

    _, decided, warned = check_alike(program)
    assert decided and len(warned) == len(decided) and set(decided.values()) == {None}
    check_route(route)


@on_ranks(2, fresh=True, init=False, env={"ACCL_TRANSPORTS": "tcp"})
@ROUTES
def test_auto_chooses_alike(rank, world, route, monkeypatch):
    start(rank, route=route)
    for device in ("cpu", "standin"):
        found = _auto._times(["raw", "bf16"], 4096, torch.float32, dist.group.WORLD, torch.device(device))
        assert set(found) == {"raw", "bf16"} and all(nanos > 0 for nanos in found.values())
    monkeypatch.setattr(_auto, "_times", lambda codecs, *_: {codec: 100.0 - len(codec) for codec in codecs})

    def program(device):
        model, state = compressed(device, Compression("auto", min_elements=64, start_step=1))
        parameters = train(model, rank, device, range(3))
        return parameters, state.explain(), {name: choice.errors for name, choice in state._choices.items()}

    _, text, _ = check_alike(program)
    assert "maxmin:4" in text or "maxmin:8" in text
    check_route(route)


@on_ranks(2, fresh=True, init=False)
@ROUTES
def test_a_state_moves_between_devices(rank, world, route):
    start(rank, "late", route=route)

    def saved_after(device, steps):
        model, state = compressed(device)
        train(model, rank, device, steps)
        file = io.BytesIO()
        torch.save({"model": model.state_dict(), "state": state.state_dict()}, file)
        return file

    def continued(file, device, steps, map_location):
        file.seek(0)
        saved = torch.load(file, map_location=map_location)
        model, state = compressed(device)
        model.load_state_dict(saved["model"])
        state.load_state_dict(saved["state"])
        train(model, rank, device, steps)
        second = io.BytesIO()
        torch.save({"model": model.state_dict(), "state": state.state_dict()}, second)
        return second, (train(model, rank, device, range(9, 10)), residuals_of(state), state.step)

    results = []
    for devices in (("cpu", "cpu", "cpu"), ("standin", "cpu", "standin"), ("cpu", "standin", "cpu")):
        file = saved_after(devices[0], range(2))
        file, _ = continued(file, devices[1], range(2, 4), devices[1])
        _, result = continued(file, devices[2], range(4, 5), "cpu")
        results.append(result)
    assert_equal(results[0], results[1])
    assert_equal(results[0], results[2])
    assert results[0][2] == 6
    check_route(route)


@on_ranks(2, fresh=True, init=False)
@ORDERS
@ROUTES
def test_a_state_may_be_released_while_its_calls_are_in_flight(rank, world, route, order):
    module = start(rank, order, route=route)
    if route == "kernels":
        # Memory for sums and figures of kernels stays for the life of the process.
        release_in_flight(rank)
        dist.barrier()
        standin.wait_until_idle(module)
    with standin.nothing_is_lost(module):
        for _ in range(3):
            release_in_flight(rank)
            dist.barrier()
    check_no_faults(module)
    check_route(route)


def release_in_flight(rank):
    """Drops a state, its plan and its residuals between the issue of its calls and the wait for them."""
    works, tensors, state = in_flight(rank)
    del state
    gc.collect()
    for work in works:
        work.wait()
    assert (tensors[0].cpu() == 2).all()


def in_flight(rank, model=None, state=None):
    """Issues the calls of a model's gradients. Returns them, the gradients and the state."""
    model = nn.Linear(64, 512).to("standin") if model is None else model
    state = compression.CompressionState(FEEDBACK, model) if state is None else state
    tensors = [torch.full(parameter.shape, 0.5 + rank, device="standin") for parameter in model.parameters()]
    elements, group = [tensor.numel() for tensor in tensors], dist.group.WORLD
    plan = state.plan(list(model.parameters()), elements, torch.float32, 0, lambda: tensors, group)
    options = dist.AllreduceCoalescedOptions()
    options.asyncOp = True
    works = state.send(plan, 0, lambda part, _: group.allreduce_coalesced(tensors[part.tensors], options))
    return works, tensors, state


@on_ranks(2, fresh=True, init=False)
@ROUTES
def test_a_copy_of_a_model_on_a_device_has_its_own_residuals(rank, world, route):
    start(rank, "late", route=route)

    def program(device):
        model, state = compressed(device)
        train(model, rank, device, range(2))
        copied = copy.deepcopy(model)
        [(hook, second)] = copied._comm_hooks
        copied.register_comm_hook(second, hook)
        return train(copied, rank, device, range(2, 4)), residuals_of(second), residuals_of(state)

    check_alike(program)
    check_route(route)


# --- explicit calls, and all calls of a group ---


def contributions(rank, device, count=5003, dtype=torch.float32):
    return contribution(rank, count).to(dtype).to(device)


@on_ranks(2, fresh=True, init=False)
@ORDERS
def test_explicit_calls_give_alike_results(rank, world, order):
    module = start(rank, order)
    audited = Compression("maxmin:4,bucket=64", audit=2)

    def program(device):
        results = []
        for dtype in (torch.float32, torch.bfloat16):
            for how in (audited, "hadamard:4", "topk:2", None):
                for is_async in (False, True):
                    total = contributions(rank, device, 300_000, dtype)
                    named = {"compression": how, "key": f"{device} {how} {dtype}", "async_op": is_async}
                    named["key"] = f"{dtype} {is_async} {getattr(how, 'codec', how)}"
                    wait(compression.all_reduce_quantized(total, dist.ReduceOp.AVG, step=1, **named))
                    row = contributions(rank, device, 4000 * world, dtype)
                    part = torch.empty(4000, dtype=dtype, device=device)
                    wait(compression.reduce_scatter_quantized(part, row, step=2, **named))
                    gathered = torch.empty(4000 * world, dtype=dtype, device=device)
                    wait(compression.all_gather_quantized(gathered, part, step=3, **named))
                    exchanged = torch.empty_like(row)
                    wait(compression.all_to_all_quantized(exchanged, row, step=4, **named))
                    results += [tensor.cpu() for tensor in (total, part, gathered, exchanged)]
        integers = torch.arange(2000, device=device)
        compression.all_reduce_quantized(integers, compression="maxmin:4")
        strided = contributions(rank, device)[::3]
        compression.all_reduce_quantized(strided, compression="maxmin:4", step=5)
        return [*results, integers.cpu(), strided.cpu().contiguous()]

    check_alike(program)
    check_no_faults(module)


def wait(work):
    if work is not None:
        work.wait()


@on_ranks(2, fresh=True, init=False)
@ORDERS
@ROUTES
def test_explicit_calls_are_measured_alike(rank, world, route, order):
    start(rank, order, route=route)

    def program(device):
        group = dist.new_group()
        for number in range(3):
            for is_async in (False, True):
                tensor = contributions(rank, device, 40_000) + number
                wait(
                    compression.all_reduce_quantized(
                        tensor, group=group, compression=Compression("maxmin:2", audit=2), async_op=is_async
                    )
                )
        [row] = compression.call_measures(group)
        return row.calls, row.bits, row.raw_bytes, row.sent_bytes, rounded(row.error), row.compared

    calls, *_, compared = check_alike(program)
    assert calls == 6 and compared > 0
    check_route(route)


@on_ranks(2, fresh=True, init=False)
def test_a_group_that_compresses_all_calls_does_so_on_both_devices(rank, world):
    module = start(rank, pg_options=Options(compression="maxmin:4,bucket=64", compressed_calls="all"))

    def program(device):
        # Groups number their calls, and random numbers depend on the number.
        group = dist.new_group(pg_options=Options(compression="maxmin:4,bucket=64", compressed_calls="all"))
        total = contributions(rank, device)
        dist.all_reduce(total, group=group)
        work = dist.all_reduce(total, group=group, async_op=True)
        work.wait()
        part = torch.empty(5000, device=device)
        dist.reduce_scatter_tensor(part, contributions(rank, device, 5000 * world), group=group)
        gathered = torch.empty(5000 * world, device=device)
        dist.all_gather_into_tensor(gathered, part, group=group)
        with exact():
            unchanged = contributions(rank, device)
            dist.all_reduce(unchanged, group=group)
        return [tensor.cpu() for tensor in (total, part, gathered, unchanged)]

    total, _, _, unchanged = check_alike(program)
    plain = sum(contribution(other) for other in range(world))
    assert unchanged.equal(plain) and not total.equal(world * plain)
    check_no_faults(module)


@on_ranks(2, fresh=True, init=False)
def test_a_scope_encodes_calls_on_both_devices(rank, world):
    start(rank, "late")

    def program(device):
        codecs = codecs_of((("maxmin:4,bucket=64",) * 3 + (9,),))
        tensor = contributions(rank, device)
        with encoded(codecs, 3, 1):
            dist.all_reduce(tensor)
        return tensor.cpu()

    assert not check_alike(program).equal(sum(contribution(other) for other in range(world)))


@on_ranks(1, 2, fresh=True, init=False)
@ORDERS
def test_reproducible_sums_are_alike_on_both_devices(rank, world, order):
    module = start(rank, order)

    def program(device):
        results = []
        for bits, dtype in ((8, torch.float32), (32, torch.bfloat16), (16, torch.complex64)):
            tensor = contributions(rank, device, dtype=dtype)
            compression.all_reduce_reproducible(tensor, dist.ReduceOp.AVG, bits=bits)
            work = compression.all_reduce_reproducible(tensor, async_op=True, bits=bits)
            work.synchronize()
            results.append(tensor.cpu())
        model = made(device)
        model.register_comm_hook(Reproducible(), compression.reproducible_hook)
        return results, train(model, rank, device, range(3))

    check_alike(program)
    check_no_faults(module, models=1)


@on_ranks(2, fresh=True, init=False)
@pytest.mark.parametrize("collective", ["all_reduce", "reduce_scatter"])
def test_the_figures_of_a_call_are_there_when_a_wait_for_it_returns(rank, world, collective):
    """They came when the call was through. So a decision during training depended on how far the device was behind."""
    module = start(rank, "late")
    store = dist.distributed_c10d._get_default_store()
    tensor, part = contributions(rank, "standin", 300_000 * world), torch.empty(300_000, device="standin")
    named = {"compression": Compression("maxmin:2", audit=2), "async_op": True}
    if rank == 1:
        store.wait(["frozen"])
    if collective == "all_reduce":
        work = compression.all_reduce_quantized(tensor, **named)
    else:
        work = compression.reduce_scatter_quantized(part, tensor, **named)
    if rank == 0:
        # The contribution has been copied, and from now on the device does nothing by itself.
        time.sleep(0.2)
        module.freeze(True)
        store.set("frozen", "")
    work.wait()
    is_through = work.is_completed()
    [row] = compression.call_measures()
    module.freeze(False)
    assert row.compared > 0 and row.error > 0 and (rank == 1 or not is_through)


@on_ranks(2, 3, fresh=True, init=False)
@ORDERS
@ROUTES
def test_the_sample_of_a_measured_reduce_scatter_does_not_shift_its_tensors(rank, world, route, order):
    """The sample counted among the tensors, so that each block copied tensors of the next one, and the last panicked."""
    start(rank, order, route=route)

    def program(device):
        codecs = codecs_of(tuple(("maxmin:4,bucket=64",) * 3 + (number,) for number in range(3)))
        inputs = [contributions(rank, device, count * world) + count for count in (100, 4000, 33)]
        outputs = [torch.empty(tensor.numel() // world, device=device) for tensor in inputs]
        stats = _native.ErrorStats(3)
        options = dist.ReduceScatterOptions()
        with encoded(codecs, 3, 1, None, stats, 2):
            dist.group.WORLD.reduce_scatter_tensor_coalesced(outputs, inputs, options).wait()
        return [tensor.cpu() for tensor in outputs]

    check_alike(program)
    check_route(route)


# --- streams and futures ---


@on_ranks(2, fresh=True, init=False)
@ORDERS
def test_the_future_of_several_calls_completes_behind_all_results(rank, world, order):
    module = start(rank, order)
    for how in ("wait", "future", "then", "block"):
        tensors = [torch.full((count,), rank + 1.0, device="standin") for count in (1000, 100_000, 10)]
        module.compute(5)
        works = [dist.all_reduce(tensor, async_op=True) for tensor in tensors]
        whole, stream = WorkOfSeveral(works, tensors), torch.Stream("standin")
        if how == "block":
            whole.block_current_stream()
            results = [tensor + 1 for tensor in tensors]
            whole.wait()
        else:
            with stream:
                if how == "wait":
                    whole.wait()
                    results = [tensor + 1 for tensor in tensors]
                elif how == "future":
                    results = [tensor + 1 for tensor in whole.get_future().wait()]
                else:
                    results = whole.get_future().then(lambda done: [tensor + 1 for tensor in done.value()]).wait()
        stream.synchronize()
        torch.accelerator.synchronize()
        assert all((result.cpu() == 4).all() for result in results), how
    check_no_faults(module)


class Call:
    """A Work whose call completes when the test sets its future."""

    def __init__(self, device):
        self.future = torch.futures.Future(devices=[device])

    def get_future(self):
        return self.future


@on_ranks(1, fresh=True, init=False)
@ORDERS
def test_the_future_of_several_calls_waits_for_the_streams_of_all(rank, world, order):
    module, device = start(rank, order), torch.device("standin", 0)
    source, result, other, seen = (torch.full((9,), value, device=device) for value in (7.0, 0.0, 0.0, 0.0))
    calls, streams = [Call(device), Call(device)], [torch.Stream(device) for _ in range(3)]
    joined = future_of(calls, lambda: result, device)
    torch.accelerator.synchronize()
    for call, stream, target, steps in zip(calls, streams, (result, other), (50, 0), strict=False):
        with stream:
            module.compute(steps)
            target.copy_(source)
            call.future.set_result([target])
    with streams[2]:
        seen.copy_(joined.wait())
    streams[2].synchronize()
    assert (seen.cpu() == 7).all()


@on_ranks(2, fresh=True, init=False)
def test_the_future_of_several_calls_on_a_device_has_the_first_error(rank, world):
    start(rank)
    device = torch.device("standin", 0)
    calls = [Call(device) for _ in range(3)]
    joined = future_of(calls, lambda: "joined", device)
    calls[2].future.set_exception(ValueError("third"))
    calls[1].future.set_exception(ValueError("second"))
    assert not joined.done()
    calls[0].future.set_result([torch.ones(3, device=device)])
    with pytest.raises(Exception, match="second"):
        joined.wait()
    assert future_of([], lambda: torch.ones(2, device=device), device).wait().cpu().equal(torch.ones(2))


@on_ranks(2, fresh=True, init=False)
def test_a_lost_peer_ends_the_backward_pass_of_a_model_on_a_device(rank, world):
    start(rank, timeout=timedelta(seconds=2))
    model, _ = compressed("standin")
    step_of(model, rank, 0, "standin")
    if rank == 1:
        return
    began = time.monotonic()
    with pytest.raises(Exception, match="rank 1"):
        step_of(model, rank, 1, "standin")
    assert time.monotonic() - began < 20


# --- groups ---


@on_ranks(2, fresh=True, init=False)
@pytest.mark.parametrize("backend", ["standin:accl", "cpu:gloo,standin:accl"])
def test_a_group_in_which_accl_serves_only_the_device_compresses_there(rank, world, backend):
    start(rank, "late", backend)
    model, state = compressed("standin", Compression("maxmin:4,bucket=64", min_elements=64, error_feedback=True))
    train(model, rank, "standin", range(2))
    assert state.traffic.ratio > 2
    tensor = contributions(rank, "standin")
    compression.all_reduce_quantized(tensor, compression="maxmin:4")
    compression.all_reduce_reproducible(tensor)
    assert len(compression.call_measures()) == 1
    state = cgx.CGXState(None, compression_params={"bits": 4})
    model = made("standin")
    model.register_comm_hook(state, cgx.cgx_hook)
    train(model, rank, "standin", range(2))
    assert state.traffic.ratio > 2
    what = "needs a group of the accl backend, but this group has " + ("gloo" if "gloo" in backend else "no backend")
    for call in (
        lambda: compression.CompressionState(Compression("maxmin:4"), Net()),
        lambda: compression.all_reduce_quantized(torch.ones(4)),
        lambda: compression.all_reduce_reproducible(torch.ones(4)),
    ):
        with pytest.raises(RuntimeError, match=what):
            call()


@on_ranks(2, fresh=True, init=False, env={"TORCH_DISTRIBUTED_DEBUG": "DETAIL"})
@ROUTES
def test_calls_and_hooks_work_with_detailed_debugging_on_devices(rank, world, route):
    dist.set_debug_level_from_env()
    start(rank, route=route)
    assert hasattr(dist.group.WORLD._get_backend(torch.device("standin")), "wrapped_pg")

    def program(device):
        model, _ = compressed(device)
        tensor = contributions(rank, device)
        compression.all_reduce_quantized(tensor, compression="maxmin:4", step=1)
        compression.all_reduce_reproducible(tensor)
        return tensor.cpu(), train(model, rank, device, range(2))

    check_alike(program)
    check_route(route)


@on_ranks(2, fresh=True, init=False)
def test_tensors_on_a_device_that_another_backend_serves_are_refused(rank, world):
    start(rank, backend="cpu:accl,standin:gloo")
    sentence = "on standin:0, which the group reduces with gloo, uncompressed; move them, omit compression, or create"
    for call in (
        lambda: compression.CompressionState(Compression("maxmin:4"), Net().to("standin")),
        lambda: compression.all_reduce_quantized(torch.ones(4, device="standin")),
        lambda: compression.all_reduce_reproducible(torch.ones(4, device="standin")),
    ):
        with pytest.raises(RuntimeError, match=sentence):
            call()
    state = compression.CompressionState(Compression("maxmin:4"), Net())
    with pytest.raises(RuntimeError, match=sentence):
        state.check_device(torch.device("standin", 0))


# --- facades ---


@on_ranks(2, fresh=True, init=False, env={"CGX_COMPRESSION_QUANTIZATION_BITS": "4"})
@ORDERS
@ROUTES
def test_scripts_of_torch_cgx_train_alike_on_both_devices(rank, world, route, order):
    module = start(rank, order, "cgx", route=route)
    assert dist.get_backend() == "cgx"

    def program(device):
        cgx.reset()
        plain = contributions(rank, device)
        dist.all_reduce(plain)
        without_hook = train(made(device), rank, device, range(2))
        # Registered layers cut a call into several tensors.
        sizes = [parameter.numel() for parameter in Net().parameters()]
        for layer, numel in enumerate(sizes[:2]):
            cgx.register_layer(0, layer, numel, 2 + layer, 64)
        cut = contributions(rank, device, sum(sizes[:2]))
        work = dist.all_reduce(cut, async_op=True)
        work.get_future().wait()
        cut += 1
        cgx.reset()
        # As in the README of torch_cgx, where the second argument names the rank's GPU.
        model = made(device, device_ids=None if device == "cpu" else [0])
        state = cgx.CGXState(None, layer_min_size=64, compression_params={"bits": 2, "bucket_size": 64})
        model.register_comm_hook(state, cgx.cgx_hook)
        parameters = train(model, rank, device, range(3))
        exact = contributions(rank, device)
        dist.all_reduce(exact)
        return plain.cpu(), without_hook, cut.cpu(), parameters, state.traffic.sent, exact.cpu()

    plain, *_, exact_sum = check_alike(program)
    assert not plain.equal(exact_sum) and same_on_all(plain)
    check_no_faults(module, models=2)
    check_route(route)


@on_ranks(2, fresh=True, init=False)
def test_groups_of_ccl_take_tensors_of_devices(rank, world):
    start(rank, "late", "ccl")
    assert str(dist.get_backend_config()) == "cpu:ccl,standin:ccl"

    def program(device):
        total = contributions(rank, device)
        dist.all_reduce(total)
        total += 1
        return total.cpu()

    check_alike(program)
    store = dist.PrefixStore("ccl", dist.distributed_c10d._get_default_store())
    group = ccl.ProcessGroupCCL(store, rank, world)
    tensors = [contributions(rank, "standin"), contributions(rank, "standin", 10)]
    group.allreduce_coalesced(tensors, dist.AllreduceCoalescedOptions())
    assert tensors[1].cpu().equal(sum(contribution(other, 10) for other in range(world)))
    group.shutdown()


@on_ranks(2, fresh=True, init=False)
def test_the_facade_of_accl_finds_a_group_that_serves_no_cpu(rank, world):
    start(rank, backend="standin:accl")
    assert accl_process_group._group_text() is None
    with pytest.raises(RuntimeError, match="there is no group with a device"):
        accl_process_group.initialize()
