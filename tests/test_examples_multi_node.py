"""The commands of examples/multi_node: each launcher starts ranks on two hosts of one machine."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from support import BACKEND, namespaces

pytestmark = pytest.mark.skipif(BACKEND != "accl", reason="about this package only")

FOLDER = Path(__file__).parent.parent / "examples" / "multi_node"
HOSTS = FOLDER / "hosts"
FIRST, SECOND = "198.18.0.1", "198.18.0.2"
PYTHON = sys.executable
TRAIN = f"{PYTHON} {FOLDER / 'train.py'}"
MEETS = {"MASTER_ADDR": FIRST, "MASTER_PORT": "29500"}
LIMIT_S = 90

OPENMPI = f"mpirun.openmpi --mca plm_rsh_agent {HOSTS} --host {FIRST}:1,{SECOND}:1 -n 2 " + " ".join(
    f"-x {name}={value}" for name, value in MEETS.items()
)
MPICH = f"mpiexec.mpich -launcher-exec {HOSTS} -iface net0 -hosts {FIRST},{SECOND} -ppn 1 -n 2 " + " ".join(
    f"-genv {name} {value}" for name, value in MEETS.items()
)


@pytest.fixture(scope="module", autouse=True)
def two_hosts():
    lacking = namespaces.lacking() or (
        "there is no `tc`; it is part of iproute2" if shutil.which("tc") is None else None
    )
    if lacking is not None:
        pytest.skip(lacking)
    # A unique prefix keeps the test's hosts apart from hosts that a user has made by hand.
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HOSTS_PREFIX", f"accl-test-{os.getpid()}")
        subprocess.run([HOSTS, "make"], check=True, timeout=30)
        yield
        subprocess.run([HOSTS, "remove"], check=True, timeout=30)


def start(command: list[str]) -> subprocess.Popen:
    root_may = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    return subprocess.Popen(
        command,
        env=os.environ | root_may | {"ACCL_CALIBRATION": "off"},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def check(*commands: list[str]):
    """Checks that all commands exit with status 0 and that rank 0 reported the agreement and the TCP link."""
    running = [start(command) for command in commands]
    try:
        ended = [(*one.communicate(timeout=LIMIT_S), one.returncode) for one in running]
    finally:
        for one in running:
            one.kill()
            one.wait()
    assert all(status == 0 for _, _, status in ended), ended
    said = "".join(output for output, _, _ in ended)
    assert "2 ranks, parameters agree; linked by tcp 198.18.0.1:" in said and f"-> {SECOND}:" in said, ended


@pytest.mark.slow
def test_accl_run_starts_ranks_on_two_hosts():
    places = ["--hosts", f"{FIRST},{SECOND}", "-n", "1", "--master-addr", FIRST, "--ssh", str(HOSTS)]
    check([PYTHON, "-m", "torch_accl_cli", "run", *places, str(FOLDER / "train.py")])


@pytest.mark.slow
def test_torchrun_starts_ranks_on_two_hosts():
    where = f"--nnodes 2 --nproc-per-node 1 --master-addr {FIRST} --master-port 29500"
    lines = [f"{PYTHON} -m torch.distributed.run {where} --node-rank {rank} {FOLDER / 'train.py'}" for rank in (0, 1)]
    check(*([str(HOSTS), host, line] for host, line in zip((FIRST, SECOND), lines)))


@pytest.mark.parametrize("line", [OPENMPI, MPICH], ids=["openmpi", "mpich"])
def test_mpirun_starts_ranks_on_two_hosts(line):
    program = line.split()[0]
    if shutil.which(program) is None:
        pytest.skip(f"there is no {program}")
    check([str(HOSTS), FIRST, f"{line} {TRAIN}"])


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ((), "expected an address and a command"),
        (("198.18.0.1",), "expected an address and a command"),
        (("198.18.0.9", "true"), "there is no host 198.18.0.9"),
        (("make",), "198.18.0.1 exists already"),
    ],
)
def test_what_hosts_cannot_do_is_one_sentence(arguments, said):
    ended = subprocess.run([HOSTS, *arguments], capture_output=True, text=True, timeout=30)
    assert ended.returncode == 1 and said in ended.stderr.splitlines()[-1], ended.stderr
