"""`accl plan`: predictions of layer-parallel steps."""

import json

import pytest
from support import BACKEND, run_command

pytestmark = pytest.mark.skipif(BACKEND != "accl", reason="about this package only")

# No message takes any time, as in the model of the closed formula.
FREE = ("--link", "100Tbit/s,0us", "--layer", "1ms,1ms,2ms,2ms")


def accl(*arguments: str, status: int = 0):
    ended = run_command(["plan", *arguments])
    assert ended.returncode == status, ended.stderr
    return ended


def settings(*arguments: str) -> dict:
    document = json.loads(accl(*arguments, "--json").stdout)
    return {(row["name"], row["factor"], row["levels"]): row for row in document["settings"]}


def test_every_setting_that_there_is_has_a_time():
    found = settings("--layers", "64", "--ranks", "4")
    assert {name for name, *_ in found} == {"wave", "gpipe", "1f1b", "multigrid"}
    assert ("multigrid", 4, 3) in found and ("multigrid", 32, 4) not in found
    assert found["wave", 0, 1]["speedup"] == pytest.approx(1, abs=0.01)
    # With 16 micro-batches on 4 ranks.
    assert found["gpipe", 0, 1]["speedup"] == pytest.approx(4 * 16 / 19, rel=0.02)
    assert found["1f1b", 0, 1]["graph_bytes"] < found["gpipe", 0, 1]["graph_bytes"]


@pytest.mark.parametrize(("ranks", "factor"), [(2, 4), (4, 8), (8, 8), (4, 16)])
def test_a_solve_is_never_slower_than_the_closed_formula(ranks, factor):
    row = settings("--layers", "64", "--ranks", str(ranks), "--factor", str(factor), *FREE)["multigrid", factor, 2]
    assert row["speedup"] >= 3 / (4 / ranks + 1 / (factor * ranks) + 4 / factor) * 0.999


@pytest.mark.slow
@pytest.mark.parametrize(("ranks", "factor"), [(2, 4), (4, 8), (8, 8)])
def test_coarser_states_leave_of_a_coarse_step_what_their_share_is(ranks, factor):
    arguments = ("--layers", "64", "--ranks", str(ranks), "--factor", str(factor), *FREE)
    key = ("multigrid", factor, 2)
    fine = settings(*arguments)[key]
    same, less = (settings(*arguments, "--coarser", "1", "--share", share)[key] for share in ("1", "0.1"))
    assert less["speedup"] > fine["speedup"]
    # Nothing is shared between meshes, so states of the same size gain nothing.
    assert same["speedup"] <= fine["speedup"]
    # Coarse steps: the first march (coarsest-level solve), then right-hand sides and marches of a cycle. The adjoint's
    # coarse steps are recorded first and need only a march.
    coarse = 64 // factor
    least = 64 * 3 / (64 / ranks * (1 + 1 + 2) + 0.1 * (coarse + coarse / ranks + coarse + 3 * coarse))
    assert less["speedup"] >= least * 0.999
    assert less["state_bytes"] < same["state_bytes"]


def test_the_text_draws_each_rank_in_each_pass():
    lines = accl("--layers", "64", "--ranks", "4", "--factor", "8").stdout.splitlines()
    assert lines[0].startswith("# 64 layers on 4 ranks; serial on one: 192.00 ms")
    bars = [line.split()[1] for line in lines if line[:5].strip().isdigit()]
    assert len(bars) == 8 and all(len(bar) == 96 and set(bar) <= set(".mrcfS") for bar in bars)
    # The march goes from the first rank to the last, and all ranks end with their layers.
    assert bars[0].startswith("m") and bars[3].startswith(".") and bars[3].endswith("S")


def test_a_step_has_what_each_rank_does_when():
    document = json.loads(accl("--layers", "16", "--ranks", "2", "--factor", "4", "--json").stdout)
    assert [step["name"] for step in document["steps"]] == ["forward", "backward"]
    for step in document["steps"]:
        assert len(step["ranks"]) == len(step["operations"]) == 2
        for activities in step["ranks"]:
            ends = [each["end_ms"] for each in activities]
            assert ends == sorted(ends) and ends[-1] <= step["ms"]
    assert sum(operations["eval"] for operations in document["steps"][0]["operations"]) > 16


@pytest.mark.slow
def test_worlds_larger_than_this_machine_are_planned(tmp_path):
    pytest.importorskip("matplotlib", reason="matplotlib is not installed")
    picture = tmp_path / "plan.png"
    arguments = ("--layers", "1024", "--ranks", "128", "--factor", "8", "--levels", "3", "--micro-batches", "128")
    found = settings(*arguments, "--plot", str(picture))
    assert max(row["speedup"] for row in found.values() if row["name"] == "multigrid") > 10
    assert picture.read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
def test_of_several_worlds_the_best_setting_of_each_is_shown():
    arguments = ("--layers", "256", "--ranks", "2,8,64", "--relax", "0,1", *FREE)
    worlds = json.loads(accl(*arguments, "--json").stdout)["worlds"]
    assert [world["ranks"] for world in worlds] == [2, 8, 64]
    lines = accl(*arguments).stdout.splitlines()[2:]
    for world, line in zip(worlds, lines, strict=True):
        assert {row["name"] for row in world["settings"]} == {"multigrid"}
        best = max(world["settings"], key=lambda row: row["speedup"])
        assert line.split()[:3] == [str(world["ranks"]), str(best["factor"]), str(best["levels"])]
        # A single world gives the same result.
        alone = settings(*arguments[:2], "--ranks", str(world["ranks"]), *arguments[4:])
        assert alone["multigrid", best["factor"], best["levels"]]["speedup"] == best["speedup"]


@pytest.mark.slow
def test_each_level_has_relaxations_of_its_own():
    def time(relax: str) -> float:
        return settings("--layers", "256", "--ranks", "8", "--relax", relax, *FREE)["multigrid", 4, 3]["milliseconds"]

    assert time("0") < time("0,1") < time("1")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--layers", "8", "--ranks", "0"], "--ranks: expected a number above zero, got 0"),
        (
            ["--layers", "8", "--ranks", "2,two"],
            "--ranks: expected a number or a comma-separated list of numbers, got '2,two'",
        ),
        (["--layers", "8", "--ranks", "2", "--relax", "-1"], "--relax: expected a number of at least 0, got -1"),
        (["--layers", "8", "--ranks", "2,4", "--plot", "plan.png"], "--plot: draws the step for one number of ranks"),
        (["--layers", "1", "--ranks", "2,4"], "--layers: 1 layers have no coarser level"),
        (["--layers", "0", "--ranks", "2"], "--layers: expected a number above zero, got 0"),
        (["--layers", "8", "--ranks", "2", "--levels", "3"], "--levels: needs --factor"),
        (["--layers", "8", "--ranks", "2", "--factor", "1"], "a coarsening factor of 1"),
        (["--layers", "8", "--ranks", "2", "--factor", "2", "--levels", "9"], "allow at most 4"),
        (["--layers", "8", "--ranks", "2", "--share", "0"], "--share: expected a number above 0 and at most 1, got 0"),
        (["--layers", "8", "--ranks", "2", "--coarser", "0"], "--coarser: expected a number above zero, got 0"),
        (
            ["--layers", "8", "--ranks", "2", "--factor", "2", "--coarser", "2"],
            "--coarser: expected levels below 2 (the finest is level 0), got 2",
        ),
        (["--layers", "8", "--ranks", "2", "--layer", "1ms"], "--layer: '1ms' has 1 times; give 4"),
        (["--layers", "8", "--ranks", "2", "--layer", "1,1,1,1"], "--layer: expected a time such as 1.5ms, got '1'"),
        (["--layers", "8", "--ranks", "2", "--state", "big"], "--state: expected a size such as 64KiB, got 'big'"),
        (
            ["--layers", "8", "--ranks", "2", "--link", "fast"],
            "--link: expected RATE,TIME such as 100Gbit/s,2us, got 'fast'",
        ),
        (["--layers", "8", "--ranks", "2", "--plot", "no/where.png"], "does not exist"),
    ],
)
def test_what_makes_no_sense_is_refused_in_one_sentence(arguments, said):
    ended = accl(*arguments, status=2)
    assert said in ended.stderr and len(ended.stderr.splitlines()) == 1 and ended.stdout == ""
