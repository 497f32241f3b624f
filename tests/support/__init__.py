"""Shared helpers of the tests: ranks as forked processes, seeded inputs with exact results, scripts with a real exit.

Start with `runner.on_ranks`, the decorator that turns a test body into a body that every rank runs.
"""

from .oracle import (
    bound,
    bytes_equal,
    contribution,
    contributions,
    expected_reduction,
    noise,
    premul_sum,
    reduce_op,
)
from .runner import BACKEND, GROUP_TIMEOUT, Outcome, gloo_group, init_group, on_ranks, run_ranks, stderr_to
from .scripts import command_code, run_command, run_file, run_script, start_script

__all__ = [
    "BACKEND",
    "GROUP_TIMEOUT",
    "Outcome",
    "bound",
    "bytes_equal",
    "command_code",
    "contribution",
    "contributions",
    "expected_reduction",
    "gloo_group",
    "init_group",
    "noise",
    "on_ranks",
    "premul_sum",
    "reduce_op",
    "run_command",
    "run_file",
    "run_ranks",
    "run_script",
    "start_script",
    "stderr_to",
]
