"""Several pytest processes share a run: each takes the next test file that no process has begun.

Much of a run waits for ranks that were killed or are late; another process works in the meantime. `.ci/pytest` starts
the processes and passes them a shared directory in `ACCL_TEST_SHARED`. A process takes a file by creating its name in
that directory. Tests marked `alone` run last, one after the other in one process, when no other process has work left.

Owns the choice of the process. (Workers of pytest-xdist have a second thread, and ranks are forked from the process
that runs the tests.)
"""

import fcntl
import os
import sys

import pytest

# The files that take longest begin first, so that no process is left with one when the others have finished.
LONG = [
    "test_accelerator.py",
    "test_accelerator_training.py",
    "test_gpu_bundle.py",
    "test_compression_on_devices.py",
    "test_exit.py",
    "test_layer_parallel.py",
    "test_cli_bench.py",
    "test_elastic.py",
    "test_compression_calls.py",
    "test_lost_peers.py",
    "test_examples_device.py",
    "test_device.py",
]


class Sharing:
    """A pytest plugin that selects, from all collected tests, those that this process runs."""

    def __init__(self, directory: str):
        self.directory = directory
        self.is_mine: dict[str, bool] = {}
        # Processes that run shared files hold a shared lock. A process that runs tests marked `alone` holds an
        # exclusive one.
        self.lock = os.open(os.path.join(directory, "lock"), os.O_CREAT | os.O_RDWR)
        fcntl.lockf(self.lock, fcntl.LOCK_SH)
        self.is_alone = False

    @staticmethod
    def pytest_collection_modifyitems(items):
        def place(item):
            name = item.path.name
            return _is_alone(item), not is_on_standin(item), LONG.index(name) if name in LONG else len(LONG)

        items.sort(key=place)

    # Wraps the test's time limit too, so that waiting for the lock does not count towards it.
    @pytest.hookimpl(wrapper=True, tryfirst=True, specname="pytest_runtest_protocol")
    def wait_until_alone(self, item):
        if _is_alone(item) and not self.is_alone:
            sys.stdout.flush()
            # Release the first lock before asking for the second: two processes that both held on to it would deadlock.
            fcntl.lockf(self.lock, fcntl.LOCK_UN)
            fcntl.lockf(self.lock, fcntl.LOCK_EX)
            self.is_alone = True
        return (yield)

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_protocol(self, item):
        # Any value other than None makes pytest skip the test in this process.
        return None if self._takes(item.path.name + (".alone" if _is_alone(item) else "")) else True

    def _takes(self, name: str) -> bool:
        if name not in self.is_mine:
            try:
                os.close(os.open(os.path.join(self.directory, name), os.O_CREAT | os.O_EXCL))
                self.is_mine[name] = True
            except FileExistsError:
                self.is_mine[name] = False
        return self.is_mine[name]


def _is_alone(item) -> bool:
    return item.get_closest_marker("alone") is not None


def is_on_standin(item) -> bool:
    """Whether the test's file uses the stand-in for an accelerator. Such files run before all others.

    torch's autograd serves the types of devices that exist at the first backward pass of a process, and ranks are forked
    from this one.
    """
    return hasattr(getattr(item, "module", None), "standin")
