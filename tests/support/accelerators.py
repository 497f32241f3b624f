"""Runs every test of a module twice: with the installed torch, and as if torch had been built for the CPU alone.

A CUDA build reports an accelerator even on a machine without one, and torch asks for it in places that concern every
backend. A module takes part by importing the fixture.
"""

import pytest

from . import runner, scripts

PATCH = "import torch; torch.accelerator.current_accelerator = lambda check_available=False: None; "


@pytest.fixture(autouse=True, params=["as_built", "cpu_build"])
def accelerator(request):
    """Sets whether ranks and scripts of this test see an accelerator in torch."""
    runner.is_cpu_build = request.param == "cpu_build"
    scripts.prelude = PATCH if runner.is_cpu_build else ""
    yield
    runner.is_cpu_build, scripts.prelude = False, ""
