"""What names one start of a launcher: the same for all its ranks on a host, and for no other start.

Owns where such a name is found. A name says nothing of what the job is.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path

__all__ = ["job", "slurm_job"]

# The process by which hydra, MPICH's and Intel's, starts the ranks of a host.
_HYDRA_PROXY = "hydra_pmi_proxy"


def job(launcher: str, environment: Mapping[str, str]) -> str | None:
    """The name of the job of this launcher that this process is a rank of, on this host; None where nothing names it."""
    if launcher == "Open MPI":
        # The first may be the same for two jobs in containers; the second is an address of the one's own daemon.
        names = [name for name in ("PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid") if environment.get(name)]
        servers = sorted(name for name in environment if name.startswith("PMIX_SERVER_URI"))
        if names:
            return "ompi-" + "-".join(environment[name] for name in [names[0], *servers[:1]])
    elif launcher == "PMI" and (proxy := _hydra_proxy()):
        return f"hydra-{proxy}"
    elif launcher in ("PMI", "Slurm") and (step := slurm_job(environment)):
        return step
    elif launcher == "torchrun":
        # Whoever sets its variables sets MASTER_ADDR, too.
        return None
    # What else has started the ranks of this host is the parent of each.
    return next((f"parent-{pid}-{start}" for pid, _, start in _ancestors()), None)


def slurm_job(environment: Mapping[str, str]) -> str | None:
    """The job and step of Slurm, which are the same on all hosts."""
    ids = [environment.get(name, "") for name in ("SLURM_JOB_ID", "SLURM_STEP_ID")]
    return "slurm-" + ".".join(ids) if all(ids) else None


def _hydra_proxy() -> str | None:
    """The number of the proxy that started this process, and when it began: numbers are used again."""
    return next((f"{pid}-{start}" for pid, name, start in _ancestors() if name == _HYDRA_PROXY), None)


def _ancestors() -> Iterator[tuple[int, str, str]]:
    """Number, name and start of the process's parents, the nearest first."""
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
