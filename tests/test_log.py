"""`ACCL_LOG` if writes to standard error fail: log lines are lost, and nothing else is."""

import os
import subprocess
import sys

import pytest

PROGRAM = """
import os, sys
import torch, torch.distributed as dist
found = open(sys.argv[1], "w")
dist.init_process_group("accl", store=dist.HashStore(), rank=0, world_size=1)
for _ in range(3):
    tensor = torch.ones(4)
    dist.all_reduce(tensor, async_op=True).wait()
    assert tensor.sum() == 4
dist.destroy_process_group()
print("done", file=found)
found.close()
"""


def ended(tmp_path, level, **streams):
    found = tmp_path / "found"
    environment = {**os.environ, "ACCL_LOG": level}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(found)], env=environment, stdin=subprocess.DEVNULL, timeout=60, **streams
    )
    return done.returncode, found.read_text()


@pytest.mark.slow
@pytest.mark.parametrize("level", ["info", "trace"])
def test_a_full_disk_under_standard_error_loses_lines_only(tmp_path, level):
    with open("/dev/full", "w") as full:
        assert ended(tmp_path, level, stderr=full) == (0, "done\n")


@pytest.mark.slow
@pytest.mark.parametrize("level", ["info", "trace"])
def test_a_pipe_without_a_reader_loses_only_lines(tmp_path, level):
    reading, writing = os.pipe()
    os.close(reading)
    try:
        assert ended(tmp_path, level, stderr=writing) == (0, "done\n")
    finally:
        os.close(writing)


@pytest.mark.slow
def test_lines_do_not_go_into_a_file_that_has_the_descriptor_of_a_closed_standard_error(tmp_path):
    assert ended(tmp_path, "trace", preexec_fn=lambda: os.close(2)) == (0, "done\n")
