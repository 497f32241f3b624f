"""Runs scripts under the MPI launchers that are installed; their ranks are not children of the test process."""

import os
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

# Each command with the options that let it start more ranks than the machine has cores; `-n` follows.
COMMANDS = {
    "mpirun.mpich": ["mpirun.mpich"],
    "mpirun.openmpi": ["mpirun.openmpi", "--allow-run-as-root", "--oversubscribe"],
    "mpiexec.hydra": ["mpiexec.hydra"],
}
# Variables that torchrun, or a test, may have set for this process.
OF_A_JOB = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
# For scripts that `support.scripts` starts: hides these variables, as if torchrun had not started them.
UNSET = dict.fromkeys(OF_A_JOB, "")


def run_under(name: str, code: str, ranks: int, folder: Path, **env: str) -> subprocess.CompletedProcess:
    """Runs the code as a script of `ranks` ranks; skips the test if the launcher is not installed."""
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
