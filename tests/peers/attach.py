"""Placeholder that mpirun starts instead of a rank, which is forked elsewhere.

Lends its place in the MPI job to that rank, and exits after the rank has exited. Usage: `attach.py SOCKET`. Imports
only modules that load quickly.
"""

import array
import json
import os
import socket
import sys

# Prefixes of the environment variables that launchers and their libraries set for a process.
PREFIXES = (
    "OMPI_",
    "OPAL_",
    "ORTE_",
    "PRTE_",
    "PMIX_",
    "PMI_",
    "MPI_",
    "MPIR_",
    "MPICH_",
    "HYDRA_",
    "HYDI_",
    "GFORTRAN_",
)


def main() -> int:
    variables = {name: value for name, value in os.environ.items() if name.startswith(PREFIXES)}
    # hydra communicates with its processes over a descriptor that they inherit.
    descriptors = [int(variables["PMI_FD"])] if "PMI_FD" in variables else []
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as connection:
        connection.connect(sys.argv[1])
        passed = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", descriptors))] if descriptors else []
        connection.sendmsg([json.dumps(variables).encode()], passed)
        # The other end of the socket is closed once the rank has exited.
        while connection.recv(1):
            pass
    return 0


if __name__ == "__main__":
    sys.exit(main())
