"""Settings that are given as values, `Audits` and `Stop`, and the old keywords for them."""

import warnings

import pytest
import torch
from support import on_ranks
from torch import nn
from torch_accl.layer_parallel import (
    Audits,
    Cycle,
    LayerParallel,
    MGOpt,
    RecurrentParallel,
    Stop,
    coarsened,
    ode,
    refined,
)

OLD = dict(
    audit_every=3,
    audit_limit=0.25,
    on_excess="more",
    probe_every=5,
    on_stall="exact",
    tolerance=0.125,
    max_iterations=7,
)
AUDIT = Audits(every=3, limit=0.25, on_excess="more", probe_every=5, on_stall="exact")
STOP = Stop(tolerance=0.125, max_iterations=7)
CYCLES = dict(fwd=Cycle(factor=2), bwd=Cycle(factor=2, iterations=1))


def made(**settings):
    return LayerParallel([ode(nn.Linear(4, 4)) for _ in range(8)], group="alone", **CYCLES, **settings)


@pytest.mark.parametrize("kind", ["layers", "sequence"])
def test_old_keywords_set_the_values_and_warn_with_the_new_ones(kind):
    layers, cell = [ode(nn.Linear(4, 4)) for _ in range(8)], nn.GRU(2, 3, batch_first=True)
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        net = (
            LayerParallel(layers, group="alone", **OLD)
            if kind == "layers"
            else RecurrentParallel(cell, group="alone", **OLD)
        )
    assert (net._audit, net._stop) == (AUDIT, STOP)
    name = type(net).__name__
    texts = [str(each.message) for each in seen if each.category is DeprecationWarning]
    assert len(texts) == 2
    assert texts[0].startswith(f"{name}(audit_every=..., audit_limit=..., on_excess=...,")
    assert "; use audit=Audits(every=..., limit=..., on_excess=..., probe_every=..., on_stall=...)" in texts[0]
    assert texts[1].endswith("; use stop=Stop(tolerance=..., max_iterations=...)")
    # The warning names the line of the caller, where Python's default filter shows it once.
    assert {each.filename for each in seen if each.category is DeprecationWarning} == {__file__}


def test_new_keywords_do_not_warn():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        net = made(audit=AUDIT, stop=STOP)
        refined(net, 2)
        MGOpt(net, torch.optim.SGD(net.parameters(), lr=0.1))


@pytest.mark.parametrize("call", [refined, coarsened])
def test_old_keywords_of_a_derived_net_change_one_setting_of_the_net(call):
    net = made(audit=AUDIT, stop=STOP)
    with pytest.warns(DeprecationWarning, match=rf"{call.__name__}\(audit_every=...\) is deprecated") as seen:
        other = call(net, 2, audit_every=9)
    assert [each.filename for each in seen] == [__file__]
    assert (other._audit.every, other._audit.limit, other._stop) == (9, 0.25, STOP)
    assert call(net, 2)._audit == AUDIT


def test_old_keywords_of_from_serial_warn_at_its_caller():
    with pytest.warns(DeprecationWarning, match=r"from_serial\(max_iterations=...\) is deprecated") as seen:
        net = LayerParallel.from_serial(made().to_serial(), group="alone", max_iterations=7)
    assert [each.filename for each in seen] == [__file__] and net._stop == Stop(max_iterations=7)


def test_old_keywords_of_mgopt_are_for_its_coarse_nets():
    net = made(audit=AUDIT)
    with pytest.warns(DeprecationWarning, match=r"MGOpt\(probe_every=...\) is deprecated") as seen:
        coarse = MGOpt(net, torch.optim.SGD(net.parameters(), lr=0.1), probe_every=4).nets[1]
    assert [each.filename for each in seen] == [__file__]
    assert coarse._audit == Audits(probe_every=4) and net._audit == AUDIT


def test_an_old_and_a_new_keyword_together_are_refused():
    text = r"LayerParallel: audit_every and audit are both given; give audit=Audits\(every=...\) alone"
    with pytest.raises(ValueError, match=text):
        made(audit_every=1, audit=AUDIT)
    with pytest.raises(ValueError, match="refined: tolerance and stop are both given"):
        refined(made(), 2, tolerance=0.5, stop=STOP)
    with pytest.raises(TypeError, match="unexpected keyword argument 'audit_evry'"):
        made(audit_evry=1)


@on_ranks(2)
def test_an_old_and_a_new_keyword_on_one_rank_are_refused_on_all(rank, world):
    net = LayerParallel([ode(nn.Linear(4, 4)) for _ in range(8)], **CYCLES)
    settings = dict(tolerance=0.5, stop=STOP) if rank == 1 else {}
    with pytest.raises((ValueError, RuntimeError), match="tolerance and stop are both given"):
        refined(net, 2, **settings)


@on_ranks(2)
def test_values_that_differ_between_ranks_are_refused_on_all(rank, world):
    net = LayerParallel([ode(nn.Linear(4, 4)) for _ in range(8)], audit=Audits(every=rank), **CYCLES)
    x = torch.ones(2, 4)
    with pytest.raises(ValueError, match=r"differ in `audit Audits\(every=0, .*` and `audit Audits\(every=1, "):
        net.step(x, x, nn.functional.mse_loss)


@pytest.mark.parametrize(
    ("value", "settings", "text"),
    [
        (Audits, dict(every=-1), r"Audits\(every=-1\): give a number of batches, or 0 for never"),
        (Audits, dict(probe_every=-2), r"Audits\(probe_every=-2\): give a number of batches"),
        (Audits, dict(on_excess="stop"), r"Audits\(on_excess='stop'\): give one of warn, more, exact"),
        (Audits, dict(on_stall="all"), r"Audits\(on_stall='all'\): give one of warn, more, exact"),
        (Audits, dict(limit=float("nan")), r"Audits\(limit=nan\): give a share"),
        (Stop, dict(tolerance=1.0), r"Stop\(tolerance=1.0\): give a fraction"),
        (Stop, dict(max_iterations=0), r"Stop\(max_iterations=0\): give 1 or more"),
    ],
)
def test_values_that_make_no_sense_are_refused_by_name(value, settings, text):
    with pytest.raises(ValueError, match=text):
        value(**settings)
