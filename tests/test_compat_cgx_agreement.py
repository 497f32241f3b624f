"""Ranks whose CGX variables differ: each rank gets an error that names the variable and both values, and none hangs."""

import os

import pytest
import torch
import torch.distributed as dist
from support import init_group, on_ranks
from support.training import Model, batch, train
from torch.nn.parallel import DistributedDataParallel
from torch_accl.compat import cgx

BITS = "CGX_COMPRESSION_QUANTIZATION_BITS"


def hooked(*given):
    torch.manual_seed(7)
    model = DistributedDataParallel(Model())
    model.register_comm_hook(cgx.CGXState(None, *given), cgx.cgx_hook)
    return model


def disagreement(first, second):
    return f"different settings: rank 0 has {first}, and rank 1 has {second}; give all ranks the same"


# The values of rank 0 and rank 1, by variable.
OF_GROUPS = {
    "CGX_INTRA_COMPRESS": ("1", "0"),
    "CGX_DEBUG_DUMMY_COMPRESSION": ("1", "0"),
    "CGX_COMPRESSION_MINIMAL_SIZE": ("16", "5000"),
    "CGX_INNER_REDUCTION_TYPE": ("SRA", "Ring"),
    "CGX_FUSION_BUFFER_SIZE_MB": ("1", "64"),
}


@on_ranks(2, fresh=True, init=False, env={BITS: "4"})
@pytest.mark.parametrize("variable", list(OF_GROUPS))
def test_a_variable_that_differs_is_named_when_a_group_of_cgx_is_made(rank, world, variable):
    os.environ[variable] = OF_GROUPS[variable][rank]
    # The algorithm variable becomes a setting of accl, which ranks compare at rendezvous.
    is_of_accl = "REDUCTION" in variable
    with pytest.raises(ValueError if is_of_accl else RuntimeError) as caught:
        init_group("cgx")
    message = disagreement(*(f"{variable}={value}" for value in OF_GROUPS[variable]))
    assert (f"{variable}=Ring stands for" if is_of_accl else message) in str(caught.value)
    # The ranks continue together with a group that ignores the variable.
    init_group("accl")
    with pytest.raises((RuntimeError, ValueError), match=variable):
        dist.new_group(backend="cgx")
    dist.barrier()
    dist.destroy_process_group()


@on_ranks(3, fresh=True, init=False, env={BITS: "4"})
@pytest.mark.parametrize("variable", [name for name in OF_GROUPS if "REDUCTION" not in name])
def test_a_variable_that_differs_is_named_by_the_hook_in_a_group_of_accl(rank, world, variable):
    os.environ[variable] = OF_GROUPS[variable][rank == 1]
    # The minimal size counts only where it exceeds layer_min_size, so one side reports layer_min_size.
    first, second = (f"{variable}={value}" for value in OF_GROUPS[variable])
    if "MINIMAL" in variable:
        first = "layer_min_size=1024"
    init_group("accl")
    with pytest.raises(RuntimeError, match=disagreement(first, second)):
        train(rank, hooked(), steps=1)
    dist.destroy_process_group()


@on_ranks(2, fresh=True, init=False, env={BITS: "4"})
def test_a_variable_without_effect_in_a_group_of_accl_may_differ(rank, world):
    os.environ["CGX_INNER_REDUCTION_TYPE"] = ("SRA", "Ring")[rank]
    init_group("accl")
    model = hooked()
    inputs, targets = batch(rank, 0)
    (model(inputs) - targets).square().mean().backward()
    dist.destroy_process_group()


OF_HOOKS = {
    BITS: ("4", "5"),
    "CGX_COMPRESSION_BUCKET_SIZE": ("64", "128"),
    "CGX_COMPRESSION_SKIP_INCOMPLETE_BUCKETS": ("0", "1"),
}


@on_ranks(2, fresh=True, init=False, env={BITS: "4"})
@pytest.mark.parametrize("backend", ["cgx", "accl"])
@pytest.mark.parametrize("variable", list(OF_HOOKS))
def test_a_variable_that_is_read_at_every_call_is_named_where_it_differs(rank, world, variable, backend):
    init_group(backend)
    os.environ[variable] = OF_HOOKS[variable][rank]
    with pytest.raises(RuntimeError, match=disagreement(*(f"{variable}={value}" for value in OF_HOOKS[variable]))):
        train(rank, hooked(), steps=1)
    dist.destroy_process_group()


ARGUMENTS = {
    "bits": (((1024, {"bits": 4}), (1024, {"bits": 5})), ("compression_params bits=4", "compression_params bits=5")),
    "variable": (((1024, {}), (1024, {"bits": 5})), (f"{BITS}=4", "compression_params bits=5")),
    "bucket": (((1024, {"bucket_size": 64}), (1024,)), ("compression_params bucket_size=64", ".*BUCKET_SIZE=1024")),
    "least": (((1024,), (2048,)), ("layer_min_size=1024", "layer_min_size=2048")),
}


@on_ranks(2, fresh=True, init=False, env={BITS: "4"})
@pytest.mark.parametrize("what", list(ARGUMENTS))
def test_an_argument_of_the_state_that_differs_is_named(rank, world, what):
    given, message = ARGUMENTS[what]
    init_group("cgx")
    with pytest.raises(RuntimeError, match=disagreement(*message)):
        train(rank, hooked(*given[rank]), steps=1)
    dist.destroy_process_group()


@on_ranks(2, fresh=True, init=False)
def test_the_same_bits_from_a_variable_and_an_argument_are_no_difference(rank, world):
    init_group("cgx")
    if rank:
        os.environ[BITS] = "4"
    train(rank, hooked(1024, {"bits": 0 if rank else 4}), steps=2)
    dist.destroy_process_group()
