"""Sets environment variables before torch is imported, defines the markers, and closes the rank pools at the end."""

import os
import sys
from pathlib import Path

# Ranks are forked from this process, so it must have one thread. The ranks share two cores.
os.environ["OMP_NUM_THREADS"] = "1"
os.environ.setdefault("TORCH_NUM_THREADS", "1")
# If this were unset, the machine's own calibration would choose the algorithms. A test about calibrations sets its own
# value.
os.environ.setdefault("ACCL_CALIBRATION", "off")
# At a process's first failure torch would write the flight recorder's stacks with their symbols, which takes seconds.
os.environ.setdefault("TORCH_FR_DUMP_ON_TIMEOUT", "0")
sys.path.insert(0, str(Path(__file__).parent))

import pytest

pytest.register_assert_rewrite("support")

from support import cover, gaps, runner, scripts, sharing, versions  # noqa: F401  versions names functions of an old torch

collect_ignore = ["peers"]


def pytest_configure(config):
    config.addinivalue_line(
        "markers", "large: needs several GiB of memory; skipped with the reason where there is less"
    )
    config.addinivalue_line(
        "markers",
        "alone: has bounds of tenths of a second, or looks at the whole machine; no other test runs at the same time",
    )
    config.addinivalue_line(
        "markers",
        "slow: takes a second or more; ACCL_TEST_COVER=pairs runs every sixth of them, others each day, and values runs none",
    )
    if directory := os.environ.get("ACCL_TEST_SHARED"):
        config.pluginmanager.register(sharing.Sharing(directory))


COVER = os.environ.get("ACCL_TEST_COVER", "all")
COVER_SEED = int(os.environ.get("ACCL_TEST_COVER_SEED", "0"))


def pytest_report_header():
    part = "" if COVER == "all" else f", of matrices and slow tests the part {COVER} of seed {COVER_SEED}"
    return f"accl tests: backend {runner.BACKEND}, calibration {os.environ['ACCL_CALIBRATION']}{part}"


def pytest_collection_modifyitems(config, items):
    items[:], left_out = cover.select(items, COVER, COVER_SEED)
    items.sort(key=lambda item: not sharing.is_on_standin(item))
    if left_out:
        config.hook.pytest_deselected(items=left_out)
    if runner.BACKEND == "gloo":
        for item in items:
            if reason := gaps.gloo_gap(item.nodeid):
                item.add_marker(pytest.mark.skip(reason=f"gloo: {reason}"))


@pytest.fixture(autouse=True)
def no_engine_in_this_process():
    """Fails a test that creates an engine in this process.

    Ranks are forked from this process and would inherit the log level of such an engine.
    """
    yield
    assert not _has_engine(), "the test created a group in pytest's own process: use on_ranks(1) or run_ranks"


def _has_engine() -> bool:
    """Whether this process holds an engine's shared memory, which every engine creates to wake its threads."""
    for descriptor in os.listdir("/proc/self/fd"):
        try:
            if os.readlink(f"/proc/self/fd/{descriptor}").startswith("/memfd:accl"):
                return True
        except FileNotFoundError:
            pass
    return False


def pytest_sessionfinish():
    runner.close_pools()
    scripts.close_scripts()
