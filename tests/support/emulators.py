"""Emulated engines behind sockets, as child processes of a test."""

import contextlib
import os
import random
import signal
import socket
import subprocess
import sys
import time

START_S = 60


def free_ports(count: int) -> int:
    """The first of `count` consecutive ports on which no process listens."""
    for _ in range(1000):
        first = random.randrange(20_000, 32_000 - count)
        with contextlib.ExitStack() as stack:
            try:
                for port in range(first, first + count):
                    stack.enter_context(socket.create_server(("127.0.0.1", port)))
            except OSError:
                continue
            return first
    raise RuntimeError(f"no {count} free ports in a row")


class Emulator:
    """An emulator process with the engines of `ranks` ranks, listening from `port` on.

    `comms` is the design. `arguments` are further options of `accl emulator`.
    """

    def __init__(self, ranks: int, comms: str, *arguments: str, port: int | None = None):
        self.port = free_ports(4 * ranks) if port is None else port
        command = [sys.executable, "-m", "torch_accl_cli", "emulator"]
        command += ["--ranks", str(ranks), "--port", str(self.port), "--comms", comms, *arguments]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        line = self.process.stdout.readline()
        if "listen from port" not in line:
            self.process.kill()
            raise RuntimeError(f"the emulator does not start: {line!r}, exit status {self.process.wait()}")
        self.url = f"emulator://127.0.0.1:{self.port}?design={comms}"

    def stop(self):
        """Stops the process: it answers no more requests, but its sockets stay open."""
        self.process.send_signal(signal.SIGSTOP)

    def kill(self):
        """Ends the process as the system would."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.process.pid, signal.SIGKILL)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.kill()
        self.process.wait()
        self.process.stdout.close()


def wait_until(what: str, is_so, patience_s: float = 20):
    """Waits until another process has made `is_so()` true; fails after `patience_s` seconds."""
    end = time.monotonic() + patience_s
    while not is_so():
        if time.monotonic() > end:
            raise AssertionError(f"not within {patience_s} s: {what}")
        time.sleep(0.005)
