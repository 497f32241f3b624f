"""Started by mpirun in place of a rank that is forked elsewhere: lends that its place in the MPI job, and ends when the rank has.

`attach.py SOCKET`. Imports nothing that takes time.
"""

import array
import json
import os
import socket
import sys

# What launchers and their libraries tell a process.
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
    told = {name: value for name, value in os.environ.items() if name.startswith(PREFIXES)}
    # hydra speaks to its processes over a descriptor that they inherit.
    descriptors = [int(told["PMI_FD"])] if "PMI_FD" in told else []
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as connection:
        connection.connect(sys.argv[1])
        passed = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", descriptors))] if descriptors else []
        connection.sendmsg([json.dumps(told).encode()], passed)
        # The other end is closed when the rank has ended.
        while connection.recv(1):
            pass
    return 0


if __name__ == "__main__":
    sys.exit(main())
