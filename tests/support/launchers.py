"""Scripts under the launchers of MPI that are installed, for which ranks are processes of nobody here."""

import os
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

# Each with what it needs to start more ranks than the machine has cores; before `-n`.
COMMANDS = {
    "mpirun.mpich": ["mpirun.mpich"],
    "mpirun.openmpi": ["mpirun.openmpi", "--allow-run-as-root", "--oversubscribe"],
    "mpiexec.hydra": ["mpiexec.hydra"],
}
# What torchrun, or a test, may have set around this one.
OF_A_JOB = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
# For scripts that `support.scripts` starts: as those that no torchrun has started.
UNSET = dict.fromkeys(OF_A_JOB, "")


def run_under(name: str, code: str, ranks: int, folder: Path, **env: str) -> subprocess.CompletedProcess:
    """Runs the code as a script of so many ranks; skips the test where the launcher is not installed."""
    command = COMMANDS[name]
    if shutil.which(command[0]) is None:
        pytest.skip(f"{command[0]} is not installed")
    script = folder / "script.py"
    script.write_text(textwrap.dedent(code))
    environment = {key: value for key, value in os.environ.items() if key not in OF_A_JOB}
    return subprocess.run(
        [*command, "-n", str(ranks), sys.executable, str(script)],
        capture_output=True,
        text=True,
        timeout=120,
        env=environment | env,
    )
