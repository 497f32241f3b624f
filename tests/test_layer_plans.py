"""Possible gains of layer-parallel training: plans compared with the closed formula, and the page that shows them."""

import sys
from pathlib import Path

import pytest
from support import BACKEND

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from torch_accl_cli._layer_plans import Setting

from benches import blocks, layer_plans

pytestmark = pytest.mark.skipif(BACKEND != "accl", reason="about this package only")

# Layers, coarsening factor, levels, and the speed-ups on 2, 4, 8, ... ranks, rounded to one or two decimals.
KNOWN = [
    (64, 4, 2, [0.96, 1.5, 2.0, 2.4]),
    (64, 8, 2, [1.17, 2.0, 3.0]),
    (64, 16, 2, [1.32, 2.4]),
    (256, 4, 3, [1.0, 1.8, 3.2, 5.0, 6.5, 7.5]),
    (1024, 8, 3, [1.2, 2.4, 4.5, 8.2, 12.7, 17.6, 21.6]),
]


def setting(factor, levels):
    return Setting("multigrid", factor, levels, layer_plans.FORWARD, layer_plans.BACKWARD)


@pytest.mark.parametrize(("layers", "factor", "levels", "speedups"), KNOWN)
def test_the_closed_formula_gives_the_known_speedups(layers, factor, levels, speedups):
    worlds = [2 << power for power in range(len(speedups) + 1)]
    found = [layer_plans.closed(layers, ranks, setting(factor, levels)) for ranks in worlds]
    assert found[:-1] == pytest.approx(speedups, abs=0.051)
    # With twice as many ranks, a rank has less than one interval, and the formula does not apply.
    assert found[-1] is None


def test_on_two_levels_the_formula_is_the_short_one():
    for ranks, factor in ((2, 4), (4, 8), (8, 16)):
        short = 3 / (4 / ranks + 1 / (factor * ranks) + 4 / factor)
        assert layer_plans.closed(1024, ranks, setting(factor, 2)) == pytest.approx(short)


@pytest.mark.parametrize("layers", [64, 256])
def test_a_plan_is_never_slower_than_the_formula(layers):
    for ranks in (2, 4, 16, 64):
        net = layer_plans.Net(layers, ranks)
        for each in net.multigrid(layer_plans.FORWARD, layer_plans.BACKWARD):
            formula = layer_plans.closed(layers, ranks, each)
            assert formula is None or net.speedup(each) >= formula * 0.9999, each


@pytest.mark.slow
def test_the_page_has_what_plans_say():
    page = layer_plans.PAGE.read_text()
    lines = page.splitlines()
    # Tables of large nets take long to compute.
    made = [line for line in layer_plans.tables(layers=(64, 256)) if line]
    assert [line for line in made if line not in lines] == []
    # The block is between its markers.
    assert blocks.replaced(page, layer_plans.NAME, layer_plans.COMMAND, []) != page
