"""`accl bench`: its output, what it refuses, and how its ranks end. No test here checks a time."""

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator

import pytest
import torch
from support import run_command, standin
from support.oracle import offered

BENCH = [sys.executable, "-m", "torch_accl_cli", "bench"]
BRIEF = ["--iterations", "3", "--alternations", "2", "--warmup", "1"]
TIMEOUT_S = 90
# Enough iterations for the ranks to be in the middle of the run when the test disturbs them.
LONG = ["--sizes", "4", "--iterations", "10000000"]


def bench(*arguments: str, status: int = 0, env: dict | None = None) -> str:
    """Runs the command, which must end with `status`, and returns its output."""
    ended = command(*arguments, env=env)
    assert ended.returncode == status, ended.stderr
    return ended.stdout


def command(*arguments: str, env: dict | None = None) -> subprocess.CompletedProcess:
    """Runs the command in a process that has already loaded torch."""
    return run_command(["bench", *arguments], env, TIMEOUT_S)


def run(command: list[str], env: dict | None = None) -> subprocess.CompletedProcess:
    return subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        env=os.environ | (env or {}),
        stdin=subprocess.DEVNULL,
    )


def rows(printed: str) -> list[list[str]]:
    return [line.split() for line in printed.splitlines() if line and not line.startswith("#")]


def test_the_table_has_a_row_for_each_size_and_a_column_for_each_backend():
    printed = bench("--sizes", "4,1KiB", "--against", "gloo", *BRIEF)
    (head,) = {line for line in printed.splitlines() if "algbw" in line}
    names = head.removeprefix("#").split()
    assert names == ["size", "count", "type", "redop", "algorithm", "time", "algbw", "busbw", "#wrong", "gloo", "ratio", "#wrong"]  # fmt: skip
    found = rows(printed)
    assert [row[:4] for row in found] == [["4", "1", "float32", "sum"], ["1024", "256", "float32", "sum"]]
    for row in found:
        assert len(row) == len(names)
        assert row[8] == row[11] == "0"
        assert all(float(row[column]) >= 0 for column in (5, 6, 7, 9, 10))


@pytest.mark.slow
def test_codecs_are_columns_next_to_the_raw_call_with_their_error():
    codecs = ["maxmin:8,bucket=64", "raw"]
    arguments = ["--sizes", "64KiB", *(word for codec in codecs for word in ("--codec", codec)), *BRIEF]
    printed = bench("all_reduce", "all_gather", *arguments)
    heads = [line.removeprefix("#").split() for line in printed.splitlines() if "algbw" in line]
    assert [head[9:] for head in heads] == [[codecs[0], "ratio", "error", codecs[1], "ratio", "error"]] * 2
    for row in rows(printed):
        assert 1e-3 < float(row[11]) < 3e-2 and float(row[14]) == 0
    for way in ([], ["--engine"]):
        document = json.loads(bench(*arguments, *way, "--json"))
        assert document["settings"]["codecs"] == codecs
        (cell,) = document["cells"]
        assert list(cell["backends"]) == ["accl", *codecs]
        assert 1e-3 < cell["backends"][codecs[0]]["error"] < 3e-2 and cell["backends"]["raw"]["error"] == 0


@pytest.mark.slow
def test_every_collective_gives_right_results_and_a_row_of_its_own_size():
    document = json.loads(
        bench("all", "--sizes", "7,1KiB-4KiB:x2", "--dtype", "int32", "--ranks", "3", "--json", *BRIEF)
    )
    sizes = {}
    for cell in document["cells"]:
        assert cell["backends"]["accl"]["wrong"] == 0
        sizes.setdefault(cell["collective"], []).append(cell["size_bytes"])
    # Whole elements of 4 bytes; collectives with blocks have equally many elements for each of three ranks.
    whole = {name: [4, 1024, 2048, 4096] for name in ("all_reduce", "broadcast", "reduce")}
    names = ("reduce_scatter", "all_gather", "gather", "scatter", "all_to_all")
    assert sizes == whole | {name: [12, 1020, 2040, 4092] for name in names} | {"barrier": [0]}


@pytest.mark.slow
def test_the_json_document_has_every_round_of_every_backend():
    printed = bench("all_reduce", "broadcast", "--sizes", "4,64KiB", "--dtype", "float32,int16", "--against", "gloo", "--json", *BRIEF)  # fmt: skip
    document = json.loads(printed)
    assert document["format"] == 1
    assert set(document) == {"format", "machine", "versions", "ranks", "settings", "cells"}
    assert document["versions"]["torch"] == torch.__version__
    assert {one["rank"] for one in document["ranks"]} == {0, 1}
    assert {cell["collective"] for cell in document["cells"]} == {"all_reduce", "broadcast"}
    assert len(document["cells"]) == 2 * 2 * 2
    for cell in document["cells"]:
        mine, theirs = cell["backends"]["accl"], cell["backends"]["gloo"]
        assert (cell["op"] is None) == (cell["collective"] == "broadcast")
        assert mine["wrong"] == 0 and mine["time_us"] > 0 and mine["iterations"] == 3
        assert len(mine["rounds_us"]) == 2
        # gloo does not know int16. The document reports that instead of ending the run.
        if cell["dtype"] == "int16":
            assert list(theirs) == ["refused"]
        else:
            assert theirs["wrong"] == 0 and theirs["ratio"] == theirs["time_us"] / mine["time_us"]


@pytest.mark.slow
def test_the_algorithm_is_the_engines_own_answer():
    free = rows(bench("--sizes", "4", *BRIEF))
    forced = rows(bench("--sizes", "4", "--algorithm", "ring", *BRIEF))
    assert forced[0][4] == "ring" != free[0][4]


@pytest.mark.slow
def test_try_all_compares_every_algorithm_that_the_ranks_can_run():
    document = json.loads(bench("all_reduce", "reduce", "--sizes", "4,64KiB", "--try-all", "--json", *BRIEF))
    for cell in document["cells"]:
        # On one host there are no two levels.
        assert len(cell["algorithms"]) > 2 and "two_level" not in cell["algorithms"]
        assert cell["algorithm"] in cell["algorithms"]
        times = {name: timed["time_us"] for name, timed in cell["algorithms"].items()}
        assert cell["best"] == min(times, key=times.get)
        assert cell["choice_is_good"] == (cell["choice"]["time_us"] <= 1.1 * times[cell["best"]] + 0.2)
        assert all(timed["wrong"] == 0 for timed in (cell["choice"], *cell["algorithms"].values()))
    printed = bench("barrier", "broadcast", "--sizes", "1KiB", "--try-all", *BRIEF)
    last = re.fullmatch(r"# (\d+) of 2 cells: .*", printed.splitlines()[-1])
    assert int(last[1]) == [row[9] for row in rows(printed)].count("yes")


@pytest.mark.slow
def test_a_wrong_result_is_counted_and_is_status_1():
    # Stands in for a broken backend: one element is spoiled on one rank.
    spoil = """
        import sys
        from torch_accl import cli
        from torch_accl_cli.bench import measure

        call = measure.ThroughTorch.call

        def spoiled(self, prepared):
            call(self, prepared)
            if prepared.rank == 1:
                prepared.target[-1] += 1

        measure.ThroughTorch.call = spoiled
        sys.exit(cli.main(sys.argv[1:]))
    """
    ended = run([sys.executable, "-c", textwrap.dedent(spoil), "bench", "--sizes", "1KiB", *BRIEF])
    assert ended.returncode == 1, ended.stderr
    assert rows(ended.stdout)[0][8] == "1"
    assert ended.stdout.splitlines()[-1] == "# 1 wrong values"


def reduced(op: str, tensors: list[torch.Tensor]) -> torch.Tensor:
    """The reduction by torch's own arithmetic, one rank after the other."""
    if op == "avg":
        return (sum(tensor.double() for tensor in tensors) / len(tensors)).to(tensors[0].dtype)
    step = {"sum": torch.add, "product": torch.mul, "min": torch.minimum, "max": torch.maximum}
    step |= {"band": torch.bitwise_and, "bor": torch.bitwise_or, "bxor": torch.bitwise_xor}
    result = tensors[0]
    for tensor in tensors[1:]:
        result = step[op](result, tensor)
    return result


# Reductions that torch itself computes with; it averages complex numbers in another type.
COMPUTED = [
    (op.lower(), dtype) for op, dtype in offered() if not dtype.startswith(("uint16", "uint32", "uint64", "complex"))
]


@pytest.mark.parametrize("op, dtype", COMPUTED)
def test_the_check_accepts_the_right_reduction_and_counts_a_wrong_element(op, dtype):
    from torch_accl_cli.bench.cases import Prepared, cases

    for world in (1, 2, 3, 7):
        (case,) = cases(["all_reduce"], [611 * getattr(torch, dtype).itemsize], [dtype], [op], world)
        ranks = [Prepared(case, rank, world) for rank in range(world)]
        for rank in ranks:
            rank.fill()
        result = reduced(op, [rank.target.clone() for rank in ranks])
        for rank in ranks:
            rank.target.copy_(result)
            assert rank.wrong() == 0
        # Flips a bit in the highest byte of the last element; in a float it belongs to the exponent, so the change
        # exceeds rounding.
        ranks[-1].target.view(torch.uint8)[-1] ^= 1 if dtype == "bool" else 64
        assert ranks[-1].wrong() == 1


def test_the_check_notices_blocks_that_change_places():
    from torch_accl_cli.bench.cases import Prepared, cases

    world = 3
    for name in ("all_gather", "all_to_all"):
        (case,) = cases([name], [611 * 4 * world], ["float32"], ["sum"], world)
        ranks = [Prepared(case, rank, world) for rank in range(world)]
        for rank in ranks:
            rank.fill()
        for rank in ranks:
            for sender, block in zip(ranks, rank.outputs):
                block.copy_(sender.inputs[rank.rank if name == "all_to_all" else 0])
            assert rank.wrong() == 0
            rank.outputs[0].copy_(rank.outputs[1].clone())
            assert rank.wrong() > 300


# The arguments of a wrong command line, and words that its error message contains.
WRONG = {
    "collective": (["allreduce"], "unknown collective 'allreduce' (did you mean all_reduce?)"),
    "negative size": (["--sizes", "-4"], "'-4' is not a size above zero"),
    "zero size": (["--sizes", "0"], "'0' is not a size above zero"),
    "no size": (["--sizes", "many"], "'many' is not a size"),
    "range": (["--sizes", "8-4"], "ends before it begins"),
    "step": (["--sizes", "4-64:x1"], "not a factor of at least 2"),
    "too large": (["--sizes", "900TiB"], "GiB are available here"),
    "no ranks": (["--ranks", "0"], "--ranks: expected 1 or more, got 0"),
    "too many ranks": (["--ranks", "100000000"], ", got 100000000: "),
    "dtype": (["--dtype", "flot32"], "did you mean float32?"),
    "op": (["--op", "summ"], "did you mean sum?"),
    "op of the dtype": (["--op", "band"], "band is not defined for float32; this type supports sum"),
    "moved only": (["--dtype", "float8_e5m2"], "this type can only be moved, not reduced"),
    "backend": (["--against", "glo"], "did you mean gloo?"),
    "missing backend": (["--against", "mpi"], "this installation of torch was built without mpi"),
    "backend of devices": (
        ["--against", "nccl"],
        "nccl does not accept CPU tensors; it accepts tensors of cuda; give --device cuda",
    ),
    "no device": (["--device", "gpu0"], "--device: unknown device 'gpu0'; expected cpu, or a device such as cuda"),
    "device without memory": (
        ["--device", "meta"],
        "--device: accl does not accept meta tensors; expected one of cpu",
    ),
    "device and engine": (
        ["--device", "cuda", "--engine"],
        "time calls on host memory: leave them out, or leave out --device",
    ),
    "backend of another device": (["--device", "xpu", "--against", "nccl"], "nccl does not accept xpu tensors"),
    "algorithm": (["--algorithm", "rng"], "did you mean ring?"),
    "codec": (["--codec", "maxmin:9"], "--codec: codec maxmin: bits is 9; expected 1 to 8"),
    "codec's setting": (["--codec", "maxmin:4,buckt=64"], "did you mean `bucket`?"),
    "algorithm of one": (["broadcast", "all_reduce", "--algorithm", "ring"], "broadcast has no algorithm 'ring'"),
    "pins": (["--pin", "--ranks", str(os.cpu_count() + 1)], "ranks cannot have a core each"),
    "iterations": (["--iterations", "0"], "--iterations: expected a number above zero, got 0"),
    "time": (["--time", "nan"], "--time: expected a number above zero, got nan"),
    "warm-up": (["--warmup", "-1"], "--warmup: expected a number of at least 0, got -1"),
    "two questions": (["--try-all", "--against", "gloo"], "leave out --against"),
    "no such argument": (["--bogus"], "unrecognized arguments: --bogus"),
    "no number": (["--ranks", "two"], "invalid int value: 'two'"),
    "plot without matplotlib": (["--plot", "speed.png"], "needs matplotlib"),
}


@pytest.fixture(scope="module")
def refusals() -> dict[str, tuple[int, str, str]]:
    """Runs every wrong command line and returns its status, standard output and standard error.

    All run in one process, because loading torch takes longer than refusing.
    """
    script = """
        import contextlib, importlib.util, io, json, sys
        from torch_accl import cli

        find_spec = importlib.util.find_spec
        importlib.util.find_spec = lambda name, *rest: None if name == "matplotlib" else find_spec(name, *rest)
        answers = {}
        for name, (arguments, _) in json.loads(sys.argv[1]).items():
            with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.redirect_stderr(io.StringIO()) as err:
                try:
                    status = cli.main(["bench", *arguments])
                except SystemExit as ended:
                    status = ended.code
            answers[name] = status, out.getvalue(), err.getvalue()
        print(json.dumps(answers))
    """
    ended = run([sys.executable, "-c", textwrap.dedent(script), json.dumps(WRONG)])
    assert ended.returncode == 0, ended.stderr
    return json.loads(ended.stdout)


@pytest.mark.parametrize("name", WRONG)
def test_wrong_input_is_one_sentence_and_status_2(name, refusals):
    status, out, err = refusals[name]
    assert (status, out) == (2, "")
    assert len(err.splitlines()) == 1
    assert WRONG[name][1] in err


@pytest.mark.skipif(torch.accelerator.is_available(), reason="this machine has an accelerator")
def test_a_device_that_is_missing_is_refused_by_the_ranks():
    ended = command("--device", "cuda", *BRIEF)
    assert (ended.returncode, ended.stdout) == (2, "")
    said = "--device: cuda is not available: this machine has no accelerator that torch can use; see `accl info`"
    assert said in ended.stderr
    assert len(ended.stderr.splitlines()) == 1


@pytest.mark.skipif(torch.__version__ < "2.15", reason="the stand-in is written for the interfaces of torch 2.15")
def test_tensors_may_be_on_a_device():
    standin.build()
    script = """
        import sys
        from support import standin

        standin.register("random")
        from torch_accl import cli

        sys.exit(cli.main(["bench", *sys.argv[1:]]))
    """
    tests = os.path.dirname(__file__)
    arguments = "all --device standin --codec bf16 --dtype float32,bfloat16 --sizes 4,64KiB --json"
    ended = run([sys.executable, "-c", textwrap.dedent(script), *arguments.split(), *BRIEF], {"PYTHONPATH": tests})
    assert ended.returncode == 0, ended.stderr
    document = json.loads(ended.stdout)
    assert document["settings"]["device"] == "standin"
    timed = [each for cell in document["cells"] for each in cell["backends"].values()]
    assert len(timed) == 2 * (8 * 4 + 1) and all(each["wrong"] == 0 and each["time_us"] > 0 for each in timed)


@pytest.mark.slow
def test_a_plot_that_cannot_be_written_is_refused_before_measuring(tmp_path):
    pytest.importorskip("matplotlib", reason="matplotlib is not installed, so nothing is drawn")
    for path in (tmp_path / "missing" / "speed.png", tmp_path / "speed.xyz", tmp_path):
        ended = command("--plot", str(path))
        assert (ended.returncode, ended.stdout) == (2, "")
        assert "--plot" in ended.stderr and len(ended.stderr.splitlines()) == 1
    bench("--sizes", "4,1KiB", "--plot", str(tmp_path / "speed.png"), *BRIEF)
    assert (tmp_path / "speed.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
def test_more_ranks_than_ports_are_refused():
    ended = command("--ranks", "3", env={"ACCL_PORT_RANGE": "20000-20001"})
    assert (ended.returncode, ended.stdout) == (2, "")
    assert "--ranks: expected at most 2, got 3: there are no ports for more" in ended.stderr


@pytest.mark.slow
def test_an_algorithm_that_these_ranks_cannot_run_is_refused():
    ended = command("--algorithm", "two_level", env={"ACCL_CALIBRATION": "off"})
    assert (ended.returncode, ended.stdout) == (2, "")
    assert "two_level of all_reduce does not apply" in ended.stderr and len(ended.stderr.splitlines()) == 1


@pytest.mark.slow
def test_torchruns_ranks_are_used_and_only_rank_0_prints():
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    ended = run([*launcher, "-m", "torch_accl_cli", "bench", "--sizes", "4", "--against", "gloo", *BRIEF])
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.count("# 2 ranks") == 1
    assert len(rows(ended.stdout)) == 1


@pytest.mark.slow
@pytest.mark.parametrize(
    "names",
    [
        ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE"),
        ("PMI_RANK", "PMI_SIZE", "MPI_LOCALNRANKS"),
        ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_STEP_TASKS_PER_NODE"),
    ],
)
def test_ranks_of_other_launchers_meet_on_one_host_without_an_address(names, tmp_path):
    env = {name: value for name, value in os.environ.items() if not name.startswith("MASTER_")}
    env |= {"TMPDIR": str(tmp_path), "SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0", "SLURM_NODEID": "0"}
    places = [env | dict(zip(names, (str(rank), "2", "2"))) for rank in range(2)]
    ranks = [
        subprocess.Popen(
            [*BENCH, "--sizes", "4", *BRIEF], env=place, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        for place in places
    ]
    printed = [rank.communicate(timeout=TIMEOUT_S) for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0], printed
    assert len(rows(printed[0][0])) == 1 and printed[1][0] == ""
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_ranks_on_several_hosts_without_an_address_get_the_missing_setting():
    places = {"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_LOCAL_SIZE": "1"}
    ended = command("--sizes", "4", env=places | {"MASTER_ADDR": "", "MASTER_PORT": ""})
    assert (ended.returncode, ended.stdout) == (2, "")
    assert "MASTER_ADDR" in ended.stderr and len(ended.stderr.splitlines()) == 1


def at_a_terminal() -> None:
    # A shell that runs the tests in the background ignores SIGINT, and the command would inherit that.
    signal.signal(signal.SIGINT, signal.SIG_DFL)


@pytest.fixture
def start() -> Iterator[Callable[..., tuple[subprocess.Popen, list[int]]]]:
    """A function that starts a run in a process group of its own.

    It returns the run in the middle of its first case, and the process IDs of the ranks.
    """
    commands = []

    def start(*arguments: str) -> tuple[subprocess.Popen, list[int]]:
        command = subprocess.Popen(
            [*BENCH, *LONG, *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
            preexec_fn=at_a_terminal,
        )
        commands.append(command)
        # The last line before the first case contains "ranks".
        while "ranks" not in (line := command.stdout.readline()):
            assert line, command.communicate()
        with open(f"/proc/{command.pid}/task/{command.pid}/children") as children:
            return command, [int(pid) for pid in children.read().split()]

    yield start
    for command in commands:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(command.pid, signal.SIGKILL)


def is_running(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as stat:
            return stat.read().rpartition(")")[2].split()[0] not in "ZX"
    except FileNotFoundError:
        return False


def all_end(pids: list[int]) -> bool:
    deadline = time.monotonic() + 10
    while any(map(is_running, pids)):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.01)
    return True


@pytest.mark.slow
@pytest.mark.parametrize("dead", [0, 1])
def test_a_rank_that_dies_ends_the_run_and_is_named(dead, start):
    command, ranks = start("--against", "gloo")
    os.kill(ranks[dead], signal.SIGKILL)
    _, err = command.communicate(timeout=30)
    assert command.returncode == 1
    assert f"accl bench: rank {dead} (process {ranks[dead]}) was killed by SIGKILL" in err.splitlines()
    assert "Traceback" not in err
    assert all_end(ranks)


@pytest.mark.slow
def test_interruption_ends_all_ranks_without_a_word(start):
    command, ranks = start("--against", "gloo")
    os.killpg(command.pid, signal.SIGINT)
    _, err = command.communicate(timeout=10)
    assert (command.returncode, err) == (130, "")
    assert all_end(ranks)


@pytest.mark.slow
def test_no_rank_outlives_the_command(start):
    command, ranks = start()
    command.kill()
    command.communicate(timeout=10)
    assert all_end(ranks)


@pytest.mark.slow
def test_a_reader_that_has_seen_enough_ends_the_run(start):
    command, ranks = start("--sizes", "4-1MiB:x2", "--iterations", "100")
    command.stdout.close()
    command.stdout = None
    _, err = command.communicate(timeout=60)
    assert (command.returncode, err) == (0, "")
    assert all_end(ranks)
