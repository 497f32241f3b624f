"""The study of inexact layer-parallel training: its runs and pictures, the rules by which runs continue exactly, and
its page.
"""

import copy
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from support import BACKEND, run_file

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "examples")]

import layer_parallel_plan as plan
import layer_parallel_report as report
import layer_parallel_study as study
from layer_parallel_plan import BY_NAME, EXACT, INEXACT, TASKS, Setting
from torch_accl.layer_parallel import Audits

from benches import blocks

EXAMPLE = ROOT / "examples" / "layer_parallel_study.py"
FIGURES = ROOT / "docs" / "layer-parallel"

pytestmark = pytest.mark.skipif(BACKEND != "accl", reason="about this package only")


def ran(folder, *arguments, ranks=None):
    """Runs the study in one process that starts others (`ranks=None`), or on `ranks` ranks of a launcher."""
    arguments = ["--quick", "--plot", str(folder), *arguments]
    if ranks is None:
        command = [sys.executable, str(EXAMPLE), *arguments]
        ended = subprocess.run(command, capture_output=True, text=True, timeout=150)
    else:
        ended = run_file(EXAMPLE, *arguments, world=ranks, timeout=150)
    assert ended.returncode == 0, ended.stderr
    return ended


@pytest.fixture(scope="module")
def quick(tmp_path_factory):
    """Runs all studies, each run in a process of its own. Returns the folder with the figures, and the printed text."""
    folder = tmp_path_factory.mktemp("quick")
    return folder, ran(folder).stdout


def shared(folder, study, ranks):
    """Returns the runs of a study with the first seed. Each run uses all ranks."""
    ended = ran(folder, "--study", study, "--seeds", "1", "--json", ranks=ranks)
    return json.loads(ended.stdout)["studies"][study]["runs"]


def alone(quick, study):
    """Returns the same runs from `quick`, where each run had a process of its own."""
    found = json.loads((quick[0] / "study.json").read_text())["studies"][study]["runs"]
    return [run for run in found if run["seed"] == 0]


@pytest.mark.slow
def test_a_quick_study_has_every_run_and_a_picture(quick):
    folder, printed = quick
    found = json.loads((folder / "study.json").read_text())["studies"]
    for task in (task.quick() for task in TASKS):
        runs = found[task.name]["runs"]
        wanted = [(setting.name, seed) for seed in range(task.seeds) for setting in task.settings]
        assert [(run["setting"], run["seed"]) for run in runs] == wanted
        for run in runs:
            assert [mark["step"] for mark in run["marks"]] == [0, 2, 4]
            for mark in run["marks"]:
                assert all(value is not None for key, value in mark.items() if key != "loss" or mark["step"])
        assert f"**{task.title}**" in printed
        assert (folder / f"study-{task.name}.svg").stat().st_size > 1000
        # All runs of a seed begin with the same weights and see the same batches.
        first = {(run["seed"], run["marks"][0]["held_loss"]) for run in runs}
        assert len(first) == task.seeds


@pytest.mark.slow
def test_figures_do_not_depend_on_the_number_of_ranks_by_a_bit(quick, tmp_path):
    found = [alone(quick, "digits"), shared(tmp_path, "digits", 2)]
    for run in found[0] + found[1]:
        del run["seconds"]
    assert found[0] == found[1]


@pytest.mark.slow
def test_a_sequence_on_several_ranks_is_learnt_as_on_one_but_for_rounding(quick, tmp_path):
    for one, other in zip(alone(quick, "gru"), shared(tmp_path, "gru", 3), strict=True):
        assert (one["setting"], one["seed"]) == (other["setting"], other["seed"])
        for mark, same in zip(one["marks"], other["marks"], strict=True):
            for key in ("held_loss", "inexact_held_loss", "cosine"):
                assert same[key] == pytest.approx(mark[key], rel=1e-5)
            # These figures are differences of numbers near 1 in float32, so their tolerance is wider.
            for key in ("gradient_error", "forward_factor", "backward_factor"):
                assert same[key] == pytest.approx(mark[key], rel=1e-3, abs=1e-5)


def test_the_net_of_sequences_is_torchs_own_and_its_loss_that_of_all_steps():
    task = BY_NAME["gru"].quick()
    data = task.data()
    text, targets = data.inputs[:4], data.targets[:4]
    net = task.net(task.depth, EXACT, 0)
    loss = net.step(text, targets, study.loss_of)
    found = [parameter.grad.clone() for parameter in net.parameters()]
    net.zero_grad()
    scores = net.scores(net.cell(net.symbols(text))[0])
    wanted = study.loss_of(scores, targets)
    wanted.backward()
    assert text.shape == (4, task.depth) and torch.equal(text[:, 1:], targets[:, :-1])
    torch.testing.assert_close(loss, wanted.detach())
    for gradient, parameter in zip(found, net.parameters(), strict=True):
        torch.testing.assert_close(gradient, parameter.grad, rtol=1e-4, atol=1e-7)
    net.eval()
    with torch.no_grad():
        torch.testing.assert_close(net(text), scores)


def test_a_setting_is_what_nets_of_both_kinds_are_solved_by():
    setting = Setting("other", levels=3, factor=2, forward=5, backward=4)
    for name in ("digits", "gru"):
        task = BY_NAME[name].quick()
        net = task.net(task.depth, setting, 0)
        assert (net.mode, net.fwd) == ("inexact", plan.Cycle(levels=3, factor=2, iterations=5))
        assert net.bwd == plan.Cycle(levels=3, factor=2, iterations=4)


@pytest.mark.slow
def test_a_look_at_a_net_says_what_its_own_audit_does():
    task = BY_NAME["digits"].quick()
    data = task.data()
    looked = task.net(task.depth, INEXACT, 0)
    seen = study.look(looked, data.inputs[:8], data.targets[:8])
    layers = plan.convolutions(task.depth)
    audited = plan.LayerParallel(layers, horizon=4.0, seed=0, audit=Audits(every=1, limit=100.0), **INEXACT.solve())
    audited.step(data.inputs[:8], data.targets[:8], study.loss_of)
    assert seen["gradient_error"] > 1e-4
    assert seen["gradient_error"] == pytest.approx(audited.audits[-1].gradient_error, rel=1e-6)
    assert seen["cosine"] == pytest.approx(audited.audits[-1].cosine, rel=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("reason, limit", [("audit", "MOST_OFF"), ("factor", "MOST_FACTOR")])
def test_a_run_that_goes_on_exactly_from_the_first_batch_is_the_exact_one(monkeypatch, reason, limit):
    task = BY_NAME["digits"].quick()
    exact, inexact = (study.train(task, setting, seed=0) for setting in (EXACT, INEXACT))
    monkeypatch.setattr(plan, limit, 0.0)
    switched = study.train(task, Setting("switched", switch=reason), seed=0)
    assert switched["switched"] == 0 and exact["switched"] is None
    for key in ("loss", "held_loss", "gradient_error", "forward_factor"):
        assert [mark[key] for mark in switched["marks"]] == [mark[key] for mark in exact["marks"]]
    assert inexact["loss"] != exact["loss"]


@pytest.mark.slow
def test_a_look_at_a_net_changes_nothing_of_its_training():
    task = BY_NAME["digits"].quick()
    often, seldom = (
        study.train(plan.replace(task, every=every), INEXACT, seed=0)["marks"][-1] for every in (1, task.steps)
    )
    for key in ("held_loss", "inexact_held_loss", "gradient_error", "backward_factor"):
        assert often[key] == seldom[key]


def mark(step, loss, **others):
    figures = {"forward_factor": 0.1, "backward_factor": 0.1, "gradient_error": 0.1, "cosine": 1.0}
    held = {
        "held_loss": loss,
        "held_accuracy": 0.5,
        "inexact_held_loss": loss,
        "inexact_held_accuracy": 0.5,
    }
    return {"step": step, "loss": loss if step else None, **figures, **held, **others}


def record(**losses):
    runs = [
        {
            "setting": name,
            "seed": 0,
            "loss": values[-1],
            "switched": None,
            "seconds": 1.0,
            "marks": [mark(step, loss) for step, loss in enumerate(values)],
        }
        for name, values in losses.items()
    ]
    facts = {"date": "2026-01-01", "commit": "0", "torch": "2", "processor": "p", "data": "d"}
    return {**facts, "seeds": 1, "steps": 4, "every": 1, "depth": 8, "runs": runs}


def test_a_run_has_departed_where_its_loss_is_higher_to_the_end():
    exact = [3.0, 2.0, 1.5, 1.2, 1.0]
    for losses, first in (
        (exact, None),
        ([3.0, 2.04, 1.54, 1.24, 1.04], None),
        ([3.0, 2.5, 1.5, 1.3, 1.1], 3),
        ([3.0, 2.5, 2.0, 2.0, 1.0], None),
        ([3.0, 2.0, None, None, None], 2),
    ):
        assert report.Found(record(exact=exact, other=losses)).departed("other") == [first]


@pytest.mark.slow
def test_diverged_runs_are_reported_and_drawn_with_the_rest(tmp_path):
    found = record(exact=[3.0, 2.0, 1.5, 1.2, 1.0], inexact=[3.0, 2.0, None, None, None])
    for one in found["runs"][1]["marks"][2:]:
        one.update(dict.fromkeys(("held_loss", "inexact_held_loss", "gradient_error", "backward_factor")))
    text = "\n".join(report.tables({"studies": {"transformer": found}}))
    (row,) = (line for line in text.splitlines() if line.startswith("| inexact |"))
    # A value that is no longer finite counts as over every limit.
    assert row == "| inexact | lost | lost | lost | lost | 2 | 2 | 2 |  |"
    report.draw(found, BY_NAME["transformer"], tmp_path / "lost.svg")
    assert (tmp_path / "lost.svg").stat().st_size > 1000


def test_an_indicator_that_is_no_number_is_a_reason_to_go_on_exactly():
    for reason, key in (("audit", "gradient_error"), ("factor", "forward_factor"), ("factor", "backward_factor")):
        setting = Setting("switched", switch=reason)
        assert not setting.is_over(mark(1, 1.0))
        assert setting.is_over(mark(1, 1.0, **{key: 1.01})) and setting.is_over(mark(1, 1.0, **{key: None}))
        assert not INEXACT.is_over(mark(1, 1.0, **{key: None}))


@pytest.mark.parametrize(
    "given, said",
    [
        (["--study", "digit"], "invalid choice: 'digit'"),
        (["--quick", "--write-docs"], "--quick"),
        (["--seeds", "0"], "--seeds: expected 1 or more"),
        (["--page-only", "--plot", "nowhere"], "nowhere/study.json has no figures of these studies"),
    ],
)
def test_wrong_arguments_of_the_study_are_one_sentence(capsys, given, said):
    with pytest.raises(SystemExit) as ended:
        study.arguments(given)
    assert ended.value.code == 2 and said in capsys.readouterr().err


def test_the_page_has_what_was_measured():
    page = (FIGURES / "study.md").read_text()
    found = json.loads((FIGURES / "study.json").read_text())
    assert set(found["studies"]) == set(BY_NAME)
    assert blocks.replaced(page, study.NAME, study.COMMAND, study.block(copy.deepcopy(found))) == page
    for name in BY_NAME:
        assert f"study-{name}.svg" in page and (FIGURES / f"study-{name}.svg").exists()
