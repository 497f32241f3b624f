"""Times `import torch_accl` in children of a process that has imported torch. Reads seconds, writes nanoseconds.

A child imports in the state in which a program's process would: nothing of the package is loaded. Owns one
measurement. `imports.py` starts this program with each commit's wheel.
"""

from __future__ import annotations

import os
import statistics
import struct
import sys
import time

import torch.distributed


def one() -> int:
    """Returns the nanoseconds that one import took."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        before = time.perf_counter_ns()
        import torch_accl

        took = time.perf_counter_ns() - before
        os.write(writing, struct.pack("=q", took if torch_accl.__version__ else -1))
        os._exit(0)
    os.close(writing)
    answer = os.read(reading, 8)
    os.close(reading)
    os.waitpid(child, 0)
    [nanoseconds] = struct.unpack("=q", answer)
    return int(nanoseconds)


def main() -> None:
    """Serves until its input ends."""
    assert "torch_accl" not in sys.modules and torch.distributed.is_available(), "only torch is loaded"
    for line in sys.stdin:
        until = time.monotonic() + float(line)
        found = [one()]
        while time.monotonic() < until:
            found.append(one())
        print(statistics.median(found), flush=True)


if __name__ == "__main__":
    main()
