"""Transports from other packages: the example in C, built with the header that is installed, and what is refused."""

import ctypes
import os
import shutil
import signal
import subprocess
import sysconfig
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from support import BACKEND, init_group, run_ranks
from support.runner import check

pytestmark = pytest.mark.skipif(BACKEND != "accl", reason="about this package only")

EXAMPLE = Path(__file__).parent.parent / "examples" / "transport" / "datagrams.c"


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    """The example as a shared library."""
    import torch_accl

    compiler = os.environ.get("CC") or (sysconfig.get_config_var("CC") or "cc").split()[0]
    if shutil.which(compiler) is None:
        pytest.skip(f"there is no C compiler {compiler!r}")
    path = tmp_path_factory.mktemp("transport") / "datagrams.so"
    include = f"-I{torch_accl.get_include()}"
    warnings = ["-Wall", "-Wextra", "-Werror", "-std=c11"]
    subprocess.run([compiler, "-shared", "-fPIC", "-O2", *warnings, include, EXAMPLE, "-o", path], check=True)
    return str(path)


def register(library):
    import torch_accl

    functions = ctypes.CDLL(library)
    functions.datagrams_transport.restype = ctypes.c_void_p
    return torch_accl.register_transport(functions.datagrams_transport())


def test_a_group_runs_over_a_transport_of_another_package(library):
    def body(rank):
        assert register(library) == "datagrams"
        init_group()
        values = torch.arange(100_000, dtype=torch.float32) + rank
        dist.all_reduce(values)
        assert torch.equal(values, 3 * torch.arange(100_000, dtype=torch.float32) + 3)
        pieces = [torch.empty(5) for _ in range(3)]
        dist.all_gather(pieces, torch.full((5,), float(rank)))
        assert [piece[0].item() for piece in pieces] == [0.0, 1.0, 2.0]
        return dist.group.WORLD._get_backend(torch.device("cpu")).describe()

    outcomes = run_ranks(body, 3, env={"ACCL_TRANSPORTS": "datagrams"}, init=False)
    assert all(": datagrams, " in text for text in check(outcomes))


def test_the_death_of_a_peer_over_a_transport_of_another_package_is_noticed(library):
    def body(rank):
        register(library)
        init_group()
        dist.barrier()
        if rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        with pytest.raises(dist.DistNetworkError, match="rank 1") as raised:
            dist.all_reduce(torch.ones(10))
        return str(raised.value)

    first, _ = run_ranks(body, 2, env={"ACCL_TRANSPORTS": "datagrams"}, init=False)
    assert first.status == "ok", first.describe()
    assert "closed the link or died" in first.value, first.value


def test_a_transport_that_was_not_registered_is_refused_with_those_that_there_are():
    import torch_accl

    with pytest.raises(ValueError, match="ACCL_TRANSPORTS.*no transport `datagrams`.*expected .* shm, tcp"):
        torch_accl.Options(transports="datagrams,tcp")


def test_what_is_no_table_is_refused():
    import torch_accl

    with pytest.raises(TypeError, match="expected a capsule or the address"):
        torch_accl.register_transport("datagrams")
    with pytest.raises(ValueError, match="at address 0"):
        torch_accl.register_transport(0)
    old = (ctypes.c_uint32 * 2)(99, 8)
    with pytest.raises(ValueError, match="version 99 and 8 bytes"):
        torch_accl.register_transport(ctypes.addressof(old))


def test_a_transport_is_registered_once(library):
    def body(rank):
        register(library)
        with pytest.raises(ValueError, match="there is a transport `datagrams` already"):
            register(library)

    check(run_ranks(body, 1, init=False))
