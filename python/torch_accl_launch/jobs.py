"""The name of one start of a launcher: the same for all its ranks on a host, and different for every other start.

This module owns where such a name is found. The name does not describe the job.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path

__all__ = ["job", "slurm_job"]

# Process name of the proxy by which hydra (MPICH, Intel MPI) starts the ranks of a host.
_HYDRA_PROXY = "hydra_pmi_proxy"


def job(launcher: str, environment: Mapping[str, str]) -> str | None:
    """Returns the name of the launcher's job that this process belongs to, on this host; None if there is no such name."""
    if launcher == "Open MPI":
        # In containers, the namespace may be the same for two jobs. The server URI is an address of the job's own daemon.
        names = [name for name in ("PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid") if environment.get(name)]
        servers = sorted(name for name in environment if name.startswith("PMIX_SERVER_URI"))
        if names:
            return "ompi-" + "-".join(environment[name] for name in [names[0], *servers[:1]])
    elif launcher == "PMI" and (proxy := _hydra_proxy()):
        return f"hydra-{proxy}"
    elif launcher in ("PMI", "Slurm") and (step := slurm_job(environment)):
        return step
    elif launcher == "torchrun":
        # torchrun sets MASTER_ADDR, and so does a user who sets torchrun's variables.
        return None
    # Any other launcher is the parent process of all its ranks on this host.
    return next((f"parent-{pid}-{start}" for pid, _, start in _ancestors()), None)


def slurm_job(environment: Mapping[str, str]) -> str | None:
    """Returns a name from Slurm's job and step, which is the same on all hosts."""
    ids = [environment.get(name, "") for name in ("SLURM_JOB_ID", "SLURM_STEP_ID")]
    return "slurm-" + ".".join(ids) if all(ids) else None


def _hydra_proxy() -> str | None:
    """Returns process id and start time of the proxy that started this process. The system reuses process ids."""
    return next((f"{pid}-{start}" for pid, name, start in _ancestors() if name == _HYDRA_PROXY), None)


def _ancestors() -> Iterator[tuple[int, str, str]]:
    """Yields process id, name and start time of this process's ancestors, the nearest first."""
    pid = os.getppid()
    while pid > 1:
        try:
            stat = Path(f"/proc/{pid}/stat").read_text()
        except OSError:
            return
        name, _, rest = stat.partition("(")[2].rpartition(")")
        fields = rest.split()
        yield pid, name, fields[19]
        pid = int(fields[1])
