"""Transports from other packages: the example in C, built with the installed header, and packages that are refused."""

import ctypes
import json
import os
import shutil
import signal
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from support import BACKEND, init_group, run_ranks
from support.runner import check
from support.scripts import run_script

pytestmark = pytest.mark.skipif(BACKEND != "accl", reason="about this package only")

EXAMPLE = Path(__file__).parent.parent / "examples" / "transport" / "datagrams.c"


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    """Builds the example and returns the path of the shared library."""
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


@pytest.mark.slow
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

    with pytest.raises(ValueError, match="ACCL_TRANSPORTS.*unknown transport `datagrams`.*expected .* shm, tcp"):
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
        with pytest.raises(ValueError, match="a transport `datagrams` already exists"):
            register(library)

    check(run_ranks(body, 1, init=False))


@pytest.fixture
def package(library, tmp_path):
    """Returns a folder that contains the example as an installed package: a module, and a metadata folder with its
    entry points.
    """
    (tmp_path / "pigeons.py").write_text(
        "import ctypes, torch_accl\n"
        f"functions = ctypes.CDLL({library!r})\n"
        "functions.datagrams_transport.restype = ctypes.c_void_p\n"
        "def transport():\n"
        "    return functions.datagrams_transport(), lambda: print('the transport has ended', flush=True)\n"
    )
    facts = tmp_path / "pigeons-1.0.dist-info"
    facts.mkdir()
    (facts / "METADATA").write_text("Metadata-Version: 2.1\nName: pigeons\nVersion: 1.0\n")
    (facts / "entry_points.txt").write_text("[torch_accl.transports]\ndatagrams = pigeons:transport\n")
    return tmp_path


@pytest.mark.slow
def test_a_transport_that_a_package_has_is_found_by_its_entry_point_and_ended_after_the_groups(package):
    code = f"""
import sys
sys.path.insert(0, {str(package)!r})
import torch, torch.distributed as dist, torch_accl
dist.init_process_group("accl")
values = torch.ones(10)
dist.all_reduce(values)
text = dist.group.WORLD._get_backend(torch.device("cpu")).describe()
dist.barrier()
print("summed" if values.eq(2).all() and ": datagrams, " in text else text, flush=True)
"""
    for script in run_script(code, 2, env={"ACCL_TRANSPORTS": "datagrams"}):
        assert script.exitcode == 0, script.stderr
        assert script.stdout.splitlines() == ["summed", "the transport has ended"]


def command(package, transports, *arguments):
    """Runs `accl` in a separate Python process that finds the package."""
    env = {"ACCL_TRANSPORTS": transports, "PYTHONPATH": str(package), "ACCL_CALIBRATION": "off"}
    line = [sys.executable, "-m", "torch_accl_cli", *arguments]
    return subprocess.run(line, env=os.environ | env, capture_output=True, text=True, timeout=90)


@pytest.mark.slow
def test_the_command_names_a_transport_of_a_package_without_loading_it(package):
    (package / "pigeons.py").write_text("raise ImportError('it was loaded')\n")
    found = command(package, "datagrams,shm", "info", "--json")
    assert found.returncode == 0, found.stderr
    facts = json.loads(found.stdout)
    assert facts["transports"] == ["datagrams", "shm"]
    assert facts["loaded_with_the_first_group"] == ["datagrams of pigeons 1.0"]
    assert "datagrams,shm" in command(package, "datagrams,shm", "config").stdout
    simulated = command(package, "datagrams,shm", "simulate", "--ranks", "2", "--sizes", "4")
    assert simulated.returncode == 0, simulated.stderr
    # A command that reads no settings accepts an unknown transport.
    assert command(package, "pigeons", "algorithms").returncode == 0
    refused = command(package, "pigeons", "info")
    assert refused.returncode == 1 and "unknown transport `pigeons`" in refused.stderr, refused.stderr


@pytest.mark.slow
def test_the_benchmark_runs_over_a_transport_of_a_package(package):
    brief = ["--sizes", "4KiB", "--iterations", "2", "--alternations", "2", "--warmup", "1"]
    ended = command(package, "datagrams", "bench", "all_reduce", "--ranks", "2", *brief)
    assert ended.returncode == 0, ended.stderr
    assert " 4096 " in ended.stdout, ended.stdout
