"""A warm interpreter that forks itself for every script that it is asked to run; see `scripts.py`.

The child leaves the serving loop and runs the code at the top level of this very file, so that it exits as any script
does. The parent has one thread and creates no group, and reports each child's exit status.
"""

import ctypes
import gc
import json
import os
import resource
import signal
import socket
import sys

import torch
import torch.distributed as dist


def _serve(channel: socket.socket) -> dict | None:
    """Forks children until the channel closes.

    Returns in each child with the child's request, and in the parent with None at the end.
    """
    wake_read, wake_write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    signal.set_wakeup_fd(wake_write, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    import select

    while True:
        ready, _, _ = select.select([channel, wake_read], [], [])
        if wake_read in ready:
            os.read(wake_read, 4096)
        while (ended := _reaped()) is not None:
            channel.send(json.dumps({"ended": ended[0], "status": ended[1]}).encode())
        if channel not in ready:
            continue
        data, fds, _, _ = socket.recv_fds(channel, 1 << 20, 2)
        if not data:
            return None
        pid = os.fork()
        if pid == 0:
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            # A shell starts background jobs with interrupts ignored, and children inherit that.
            signal.signal(signal.SIGINT, signal.default_int_handler)
            for fd in (wake_read, wake_write):
                os.close(fd)
            channel.close()
            ctypes.CDLL(None).prctl(1, signal.SIGKILL)
            os.dup2(fds[0], 1)
            os.dup2(fds[1], 2)
            for fd in fds:
                os.close(fd)
            return json.loads(data)
        for fd in fds:
            os.close(fd)
        channel.send(json.dumps({"started": pid}).encode())


def _reaped():
    try:
        pid, status = os.waitpid(-1, os.WNOHANG)
    except ChildProcessError:
        return None
    return (pid, os.waitstatus_to_exitcode(status)) if pid else None


# Garbage collections at a child's exit would touch, and so copy, every object that came with torch.
gc.collect()
gc.freeze()
_job = _serve(socket.socket(fileno=int(sys.argv[1])))
if _job is not None:
    sys.argv = ["script.py"]
    sys.stdout.reconfigure(line_buffering=True)
    os.environ.update(_job["env"])
    for _name, _value in _job["limits"].items():
        _limit = getattr(resource, _name)
        resource.setrlimit(_limit, (_value, resource.getrlimit(_limit)[1]))
    exec(compile(_job["code"], "script.py", "exec"))
