"""Scripts that end as a user's script does: the interpreter's own exit, with `atexit` hooks and static destructors.

`run_script` forks each rank from a small warm interpreter (`fork_server.py`) that has imported only torch. The child
runs the code as `__main__`. It sets environment, limits and rendezvous before the code runs.
"""

import contextlib
import dataclasses
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

_FORK_SERVER = Path(__file__).with_name("fork_server.py")


@dataclasses.dataclass
class Script:
    """One running rank of a script."""

    rank: int
    pid: int
    out: object
    err: object
    exitcode: int | None = None

    def wait(self, timeout: float = 30.0) -> int:
        """Returns the exit status (negative: the signal); kills the script and fails if it takes too long."""
        end = time.monotonic() + timeout
        while self.exitcode is None:
            _fork_server().poll()
            if time.monotonic() > end:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(self.pid, signal.SIGKILL)
                raise AssertionError(f"rank {self.rank} did not end within {timeout} s\n{self.stdout}\n{self.stderr}")
            time.sleep(0.002)
        return self.exitcode

    def wait_for(self, text: str, timeout: float = 20.0):
        """Waits until the script has printed `text`."""
        end = time.monotonic() + timeout
        while text not in self.stdout:
            _fork_server().poll()
            if time.monotonic() > end or self.exitcode is not None:
                raise AssertionError(f"rank {self.rank} never printed {text!r}\n{self.stdout}\n{self.stderr}")
            time.sleep(0.002)

    @property
    def stdout(self) -> str:
        return _contents(self.out)

    @property
    def stderr(self) -> str:
        return _contents(self.err)


def _contents(file) -> str:
    return os.pread(file.fileno(), 1 << 20, 0).decode(errors="replace")


class _ForkServer:
    def __init__(self):
        self.socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        command = [sys.executable, str(_FORK_SERVER), str(theirs.fileno())]
        self.process = subprocess.Popen(command, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL)
        theirs.close()
        self.running: dict[int, Script] = {}

    def start(self, request: dict) -> Script:
        out, err = tempfile.TemporaryFile(), tempfile.TemporaryFile()
        socket.send_fds(self.socket, [json.dumps(request).encode()], [out.fileno(), err.fileno()])
        while True:
            message = json.loads(self.socket.recv(1 << 16))
            if "started" in message:
                script = Script(request["rank"], message["started"], out, err)
                self.running[script.pid] = script
                return script
            self._ended(message)

    def poll(self):
        while True:
            try:
                data = self.socket.recv(1 << 16, socket.MSG_DONTWAIT)
            except BlockingIOError:
                return
            if not data:
                raise AssertionError("the script server is gone")
            self._ended(json.loads(data))

    def _ended(self, message):
        self.running.pop(message["ended"]).exitcode = message["status"]

    def close(self):
        self.poll()
        for pid in self.running:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.socket.close()
        self.process.wait(10)


_the_fork_server: _ForkServer | None = None


def _fork_server() -> _ForkServer:
    global _the_fork_server
    if _the_fork_server is None:
        _the_fork_server = _ForkServer()
    return _the_fork_server


def close_scripts():
    """Ends the server and all scripts that still run."""
    global _the_fork_server
    if _the_fork_server is not None:
        _the_fork_server.close()
        _the_fork_server = None


# Prepended to the first line of every script's code; see `accelerators.py`.
prelude = ""


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return listener.getsockname()[1]


def start_script(code: str, world: int = 1, env: dict | None = None, limits: dict | None = None) -> list[Script]:
    """Starts `code` on `world` ranks, with RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT set as torchrun sets them.

    A value in `env` may be a list with one value per rank. `limits` names soft limits of `resource`, such as
    RLIMIT_NOFILE.
    """
    shared = {"WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port()}
    scripts = []
    for rank in range(world):
        own = {key: value[rank] if isinstance(value, list) else value for key, value in (env or {}).items()}
        variables = {**shared, "RANK": rank, "LOCAL_RANK": rank, **own}
        request = {
            "code": prelude + code,
            "rank": rank,
            "env": {k: str(v) for k, v in variables.items()},
            "limits": limits or {},
        }
        scripts.append(_fork_server().start(request))
    return scripts


def run_script(code: str, world: int = 1, timeout: float = 30.0, **options) -> list[Script]:
    """Runs `code` on `world` ranks to the end."""
    scripts = start_script(code, world, **options)
    for script in scripts:
        script.wait(timeout)
    return scripts


def run_file(path: Path, *arguments: str, world: int = 1, timeout: float = 120.0) -> subprocess.CompletedProcess:
    """Runs a file as `torchrun path arguments` does, but on ranks that have already loaded torch.

    Loading torch takes seconds in each of torchrun's processes. The result has the first status that is not 0, and the
    output of all ranks, rank by rank.
    """
    line = [str(path), *map(str, arguments)]
    code = f"import runpy, sys; sys.argv = {line!r}; sys.path[0:0] = [{str(path.parent)!r}]; runpy.run_path({str(path)!r}, run_name='__main__')"
    ranks = start_script(code, world)
    statuses = [rank.wait(timeout) for rank in ranks]
    status = next((status for status in statuses if status), 0)
    return subprocess.CompletedProcess(
        line, status, "".join(rank.stdout for rank in ranks), "".join(rank.stderr for rank in ranks)
    )


def command_code(arguments: list[str]) -> str:
    """Returns a script that runs the `accl` command with these arguments."""
    return f"import sys, torch_accl_cli; sys.exit(torch_accl_cli.main({arguments!r}))"


def run_command(arguments: list[str], env: dict | None = None, timeout: float = 60.0) -> subprocess.CompletedProcess:
    """Runs the `accl` command in a child that has loaded torch, because loading takes longer than most commands."""
    request = {
        "code": command_code(arguments),
        "rank": 0,
        "env": {key: str(value) for key, value in (env or {}).items()},
        "limits": {},
    }
    script = _fork_server().start(request)
    script.wait(timeout)
    return subprocess.CompletedProcess(["accl", *arguments], script.exitcode, script.stdout, script.stderr)
