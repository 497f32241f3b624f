"""The case `import`: the time that importing torch_accl takes in a process that has imported torch."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path

from .pairs import Timer
from .trees import installed

SERVER = Path(__file__).with_name("import_server.py")


@contextmanager
def timers(trees: list[Path], case: str) -> Iterator[list[Timer]]:
    """Yields functions that time the import, one for each tree. There is one such case."""
    with ExitStack() as ends:
        servers = []
        for tree in trees:
            # torch would load the package by itself.
            environment = {"PYTHONPATH": str(installed(tree)), "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
            server = ends.enter_context(
                subprocess.Popen(
                    [sys.executable, str(SERVER)],
                    env=os.environ | environment,
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    text=True,
                )
            )
            # Runs before the end of the block that waits for the process.
            ends.callback(server.kill)
            servers.append(server)
        yield [partial(nanoseconds, server, case) for server in servers]


def nanoseconds(server: subprocess.Popen[str], case: str, seconds: float) -> float:
    """Returns the median time of one import in nanoseconds, measured for `seconds`."""
    assert server.stdin and server.stdout, "both are pipes"
    print(seconds, file=server.stdin, flush=True)
    answer = server.stdout.readline()
    if not answer:
        raise SystemExit(f"{case}: the process that imports has ended with exit status {server.wait()}")
    return float(answer)
