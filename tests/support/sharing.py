"""Several pytest processes share a run: each takes the next file of tests that none of them has begun.

Much of a run waits for who was killed or is late, and another process works meanwhile. `.ci/pytest` starts the processes, and names a
directory of theirs in `ACCL_TEST_SHARED`: a file is taken by making its name there. Tests marked `alone` come last, one after the other
in one process, when the others have nothing left. Owns the choice of the process. (Workers of pytest-xdist have a second thread, and ranks are
forked from the process that runs the tests.)
"""

import fcntl
import os
import sys

import pytest

# Those that take longest begin first, so that no process is left with one when the others have ended.
LONG = [
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
    """A pytest plugin: of all tests that were collected, those that this process runs."""

    def __init__(self, directory: str):
        self.directory = directory
        self.is_mine: dict[str, bool] = {}
        # Held by all who run what is shared, and then by one after the other.
        self.lock = os.open(os.path.join(directory, "lock"), os.O_CREAT | os.O_RDWR)
        fcntl.lockf(self.lock, fcntl.LOCK_SH)
        self.is_alone = False

    @staticmethod
    def pytest_collection_modifyitems(items):
        def place(item):
            name = item.path.name
            return _is_alone(item), LONG.index(name) if name in LONG else len(LONG)

        items.sort(key=place)

    # Around the time limit of the test, too.
    @pytest.hookimpl(wrapper=True, tryfirst=True, specname="pytest_runtest_protocol")
    def wait_until_alone(self, item):
        if _is_alone(item) and not self.is_alone:
            sys.stdout.flush()
            # Who held on to the first while it asks for the second would wait for who does the same.
            fcntl.lockf(self.lock, fcntl.LOCK_UN)
            fcntl.lockf(self.lock, fcntl.LOCK_EX)
            self.is_alone = True
        return (yield)

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_protocol(self, item):
        # Anything but None: nobody has to run it here.
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
