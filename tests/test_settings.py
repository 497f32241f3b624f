"""Settings by environment and by `Options`: values that are refused, the error texts, and that the argument takes
precedence.
"""

import contextlib
import copy
import importlib.util
import inspect
import os
import pickle
import re
import socket
import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from support import BACKEND, init_group, on_ranks, run_command, run_ranks, run_script, stderr_to
from support.runner import check

pytestmark = pytest.mark.skipif(BACKEND != "accl", reason="about this package only")


def refused(env=None, **options):
    """Creates a group of one rank. Returns class name and text of the error, or `("made", "")`."""

    def body(rank):
        import torch_accl

        try:
            init_group(pg_options=torch_accl.Options(**options) if options else None)
        except Exception as error:
            return type(error).__name__, str(error)
        return "made", ""

    return check(run_ranks(body, 1, init=False, env=env))[0]


@pytest.mark.parametrize(
    ("name", "value", "nearest"),
    [
        ("ACCL_PORTRANGE", "1-2", "ACCL_PORT_RANGE"),
        ("ACCL_SOCKET_IFNAMES", "eth0", "ACCL_SOCKET_IFNAME"),
        ("ACCL_TRANSPORT", "tcp", "ACCL_TRANSPORTS"),
    ],
)
def test_an_unknown_variable_is_refused_with_the_nearest_name(name, value, nearest):
    kind, sentence = refused({name: value})
    assert kind == "ValueError" and name in sentence and f"did you mean {nearest}?" in sentence, sentence


OFFLOADS = [
    ("sidestep", "all_reduce=host,broadcast=mpx", "`broadcast=mpx`: `mpx` cannot run collectives; did you mean mpi?"),
    ("device", "simm://", "device `simm://`: unknown scheme `simm`; did you mean sim?"),
]


@pytest.mark.parametrize(("option", "value", "why"), OFFLOADS)
def test_a_component_that_does_not_exist_is_refused_by_groups(option, value, why):
    variable = {f"ACCL_{option.upper()}": value}
    # An option takes precedence over a variable, but does not hide a variable that nothing accepts.
    for arguments in (
        {"env": variable},
        {option: value},
        {"env": variable, option: "all=host" if option == "sidestep" else "none"},
    ):
        kind, sentence = refused(**arguments)
        assert kind == "ValueError" and why in sentence, sentence


@pytest.mark.parametrize("command", [["config"], ["info"], ["simulate", "--ranks", "4"]])
@pytest.mark.parametrize(("option", "value", "why"), OFFLOADS)
def test_a_component_that_does_not_exist_is_refused_by_commands(command, option, value, why):
    ended = run_command(command, env={f"ACCL_{option.upper()}": value})
    assert ended.returncode in (1, 2) and why in ended.stderr, ended.stderr


def test_a_variable_that_is_not_ours_is_one_warning_on_rank_0_and_no_error():
    env = {"ACCL_DEVICE_ID": "0", "ACCL_PROFILER_OUTPUT_DIR": "/tmp", "ACCL_TX_DEPTH": "512", "ACCL_DB_PATH": "/tmp/db"}

    def body(rank):
        # Each rank is the first rank of a group of its own.
        for alone in (0, 1):
            dist.new_group([alone])
        # A second engine in this process does not repeat the warning.
        dist.destroy_process_group()
        init_group()

    outcomes = run_ranks(body, 2, env=env)
    check(outcomes)
    for name in env:
        assert [outcome.output.count(name) for outcome in outcomes] == [1, 0], outcomes


def test_variables_that_kubernetes_sets_for_services_are_silent():
    of_service = {
        "{}_SERVICE_HOST": "10.0.0.7",
        "{}_SERVICE_PORT": "29500",
        "{}_SERVICE_PORT_METRICS": "9090",
        "{}_PORT": "tcp://10.0.0.7:29500",
        "{}_PORT_29500_TCP": "tcp://10.0.0.7:29500",
        "{}_PORT_29500_TCP_PROTO": "tcp",
        "{}_PORT_29500_TCP_PORT": "29500",
        "{}_PORT_29500_TCP_ADDR": "10.0.0.7",
        "{}_PORT_53_UDP": "udp://10.0.0.7:53",
        "{}_PORT_53_SCTP_PORT": "53",
    }
    services = ("ACCL", "ACCL_TRAIN", "ACCL_PORT", "ACCL_MIN")
    env = {name.format(service): value for service in services for name, value in of_service.items()}
    # These names look like variables of a service, but they are not. They may be meant for this package.
    env |= {"ACCL_LISTEN_PORT": "29500", "ACCL_PORT_29500_TCPX": ""}
    (outcome,) = run_ranks(lambda rank: None, 1, env=env)
    check([outcome])
    warned = [name for name in env if re.search(rf"\b{name}\b", outcome.output)]
    assert warned == ["ACCL_LISTEN_PORT", "ACCL_PORT_29500_TCPX"], outcome.output


def test_a_setting_without_a_variable_is_refused_as_one():
    kind, sentence = refused({"ACCL_COMPRESSED_CALLS": "all"})
    assert kind == "ValueError" and "Options(compressed_calls=...)" in sentence, sentence


def test_accl_config_names_variables_that_have_no_effect():
    env = {"ACCL_TX_DEPTH": "512", "ACCL_PORT": "tcp://10.0.0.7:29500"}
    listed = run_command(["config"], env=env)
    assert "ACCL_TX_DEPTH" in listed.stderr and "ACCL_PORT " not in listed.stderr, listed


WRONG = [
    ("ACCL_PORT_RANGE", "port_range", "9-5"),
    ("ACCL_PORT_RANGE", "port_range", "70000-80000"),
    ("ACCL_PORT_RANGE", "port_range", "abc"),
    ("ACCL_PORT_RANGE", "port_range", "0-10"),
    ("ACCL_TRANSPORTS", "transports", "udp"),
    ("ACCL_LOG", "log", "loud"),
    ("ACCL_RING_BYTES", "ring_bytes", "12"),
    ("ACCL_RING_BYTES", "ring_bytes", "1XiB"),
    ("ACCL_SEGMENT_BYTES", "segment_bytes", "-1"),
    ("ACCL_EAGER_BYTES", "eager_bytes", "1TiB"),
    ("ACCL_SPIN_US", "spin_us", "fast"),
    ("ACCL_WORKER_COUNT", "worker_count", "-1"),
    ("ACCL_WORKER_COUNT", "worker_count", "many"),
    ("ACCL_WORKER_AFFINITY", "worker_affinity", "3-1"),
    ("ACCL_DETERMINISTIC", "deterministic", "maybe"),
    ("ACCL_TIMING", "timing", "2"),
    ("ACCL_HOST_ID", "host_id", "two words"),
    ("ACCL_HOST_ID", "host_id", "h" * 129),
    ("ACCL_ALGORITHM", "algorithm", "all_reduce"),
    ("ACCL_ALGORITHM", "algorithm", "allreduce=ring"),
]


@pytest.mark.parametrize(("name", "option", "value"), WRONG)
def test_a_wrong_value_is_refused_with_what_is_accepted(name, option, value):
    kind, sentence = refused({name: value})
    assert kind == "ValueError" and name in sentence and value in sentence and "expected" in sentence, sentence
    kind, sentence = refused(**{option: value})
    assert kind == "ValueError" and option in sentence and value in sentence and "expected" in sentence, sentence


def test_an_unknown_algorithm_is_refused_with_the_nearest_name():
    kind, sentence = refused(algorithm="all_reduce=rign")
    assert kind == "ValueError" and "rign" in sentence and "ring" in sentence.replace("rign", ""), sentence


def test_an_unknown_option_is_refused():
    kind, sentence = refused(port_rnage="1-2")
    assert kind == "TypeError" and "port_rnage" in sentence


@pytest.mark.parametrize("value", [[1], [1, 2, 3], 5, ("a", "b")])
def test_a_port_range_that_is_no_pair_of_numbers_is_refused(value):
    kind, sentence = refused(port_range=value)
    assert kind == "ValueError" and "port_range" in sentence and "expected" in sentence, sentence


def test_a_port_range_may_be_a_pair_or_a_list():
    import torch_accl

    assert torch_accl.Options(port_range=[20000, 20100]).settings["port_range"] == "20000-20100"
    assert torch_accl.Options(port_range=(20000, 20100)).settings["port_range"] == "20000-20100"


@on_ranks(1, fresh=True, init=False)
def test_options_for_another_backend_of_a_mixed_group_are_left_alone(rank, world):
    options = dist.ProcessGroupGloo._Options()
    options._timeout = timedelta(seconds=7)
    init_group(pg_options=options)
    dist.all_reduce(torch.ones(3))


@on_ranks(1, fresh=True, init=False)
def test_options_of_another_type_are_refused(rank, world):
    with pytest.raises(TypeError, match="torch_accl.Options"):
        init_group(pg_options={"timing": True})


@on_ranks(1, fresh=True, init=False)
def test_options_can_be_copied_and_pickled(rank, world):
    import torch_accl

    options = torch_accl.Options(timeout=timedelta(seconds=7), algorithm="all_reduce=ring", timing=True)
    options.group_name = "named"
    for copied in (pickle.loads(pickle.dumps(options)), copy.copy(options), copy.deepcopy(options)):
        assert type(copied) is torch_accl.Options and repr(copied) == repr(options)
        assert (copied.timeout, copied._timeout, copied.group_name) == (timedelta(seconds=7),) * 2 + ("named",)
    assert pickle.loads(pickle.dumps(torch_accl.Options())).timeout is None
    init_group(pg_options=pickle.loads(pickle.dumps(options)))
    made = dist.group.WORLD._get_backend(torch.device("cpu")).options
    again = pickle.loads(pickle.dumps(made))
    assert (again.settings, again._timeout) == (made.settings, made._timeout) and made.settings == options.settings


@on_ranks(1, fresh=True, init=False)
def test_a_timeout_of_another_type_is_refused(rank, world):
    import torch_accl

    with pytest.raises(TypeError, match="timedelta"):
        torch_accl.Options(timeout=5)


@on_ranks(1, fresh=True, init=False)
def test_an_option_wins_over_its_variable(rank, world):
    import os

    import torch_accl

    os.environ["ACCL_TIMING"] = "0"
    init_group(pg_options=torch_accl.Options(timing=True))
    work = dist.all_reduce(torch.ones(3), async_op=True)
    work.wait()
    assert work._get_duration() >= 0


@on_ranks(1, fresh=True, init=False, env={"ACCL_TIMING": "1"})
def test_a_variable_works_without_options(rank, world):
    init_group()
    work = dist.all_reduce(torch.ones(3), async_op=True)
    work.wait()
    assert work._get_duration() >= 0


@on_ranks(2, fresh=True, init=False)
def test_options_can_be_copied_and_shown(rank, world):
    import copy

    import torch_accl

    options = torch_accl.Options(segment_bytes="16KiB", deterministic=True)
    assert copy.deepcopy(options).settings == copy.copy(options).settings == options.settings
    assert "segment_bytes='16KiB'" in repr(options)
    init_group(pg_options=options)
    dist.all_reduce(torch.ones(100_000))
    dist.barrier()
    dist.destroy_process_group()


def test_ranks_with_different_settings_get_both_values():
    def body(rank):
        import torch_accl

        try:
            init_group(pg_options=torch_accl.Options(eager_bytes=1024 * (1 + rank)))
        except Exception as error:
            return type(error).__name__, str(error)
        return "made", ""

    for kind, sentence in check(run_ranks(body, 2, init=False)):
        assert kind == "ValueError" and "eager_bytes" in sentence, (kind, sentence)
        assert "rank 0" in sentence and "rank 1" in sentence and "1KiB" in sentence and "2KiB" in sentence, sentence


def test_the_port_of_the_process_comes_from_the_range():
    def body(rank):
        import os

        start = 23_400 + 50 * (os.getpid() % 100)
        os.environ["ACCL_PORT_RANGE"] = f"{start}-{start + 49}"
        os.environ["ACCL_TRANSPORTS"] = "tcp"
        init_group()
        dist.all_reduce(torch.ones(3))
        with open("/proc/net/tcp") as four, open("/proc/net/tcp6") as six:
            lines = [line.split() for line in [*four.readlines()[1:], *six.readlines()[1:]]]
        inodes = {
            os.readlink(f"/proc/self/fd/{fd}")
            for fd in os.listdir("/proc/self/fd")
            if os.path.exists(f"/proc/self/fd/{fd}")
        }
        ports = [
            int(line[1].split(":")[1], 16) for line in lines if line[3] == "0A" and f"socket:[{line[9]}]" in inodes
        ]
        dist.barrier()
        dist.destroy_process_group()
        return start, ports

    for start, ports in check(run_ranks(body, 2, init=False)):
        assert any(start <= port < start + 50 for port in ports), (start, ports)


def test_a_range_without_a_free_port_is_refused_with_its_name():
    with socket.socket(socket.AF_INET6) as taken:
        taken.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        taken.bind(("::", 0))
        taken.listen()
        port = taken.getsockname()[1]
        kind, sentence = refused({"ACCL_PORT_RANGE": f"{port}-{port}", "ACCL_TRANSPORTS": "tcp"})
    assert kind in ("DistNetworkError", "ValueError"), (kind, sentence)
    assert "ACCL_PORT_RANGE" in sentence and str(port) in sentence, sentence


def test_an_interface_that_does_not_exist_is_refused_with_those_that_do():
    kind, sentence = refused({"ACCL_SOCKET_IFNAME": "=nosuch0", "ACCL_TRANSPORTS": "tcp"})
    assert kind in ("DistNetworkError", "ValueError"), (kind, sentence)
    assert "nosuch0" in sentence and re.search(r"\blo\b|\beth", sentence), sentence


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "value", "others"), [("ACCL_LOG", "loud", "warn"), ("ACCL_TRANSPORTS", "mpi,shm,tcp", "shm,tcp")]
)
def test_a_rank_whose_setting_is_refused_fails_the_others_with_its_cause(name, value, others):
    if name == "ACCL_TRANSPORTS" and importlib.util.find_spec("torch_accl_mpi"):
        pytest.skip("this transport is installed")
    code = """
import torch.distributed as dist
try:
    dist.init_process_group("accl")
except (RuntimeError, ValueError) as error:
    print(error)
"""
    scripts = run_script(code, world=3, env={name: [others, value, others]})
    for rank, script in enumerate(scripts):
        assert value in script.stdout, (script.stdout, script.stderr)
        assert ("rank 1 could not create the group" in script.stdout) == (rank != 1)


def test_a_later_group_may_not_change_what_is_fixed_for_the_process():
    def body(rank):
        import torch_accl

        init_group(pg_options=torch_accl.Options(ring_bytes="256KiB"))
        dist.barrier()
        try:
            dist.new_group(pg_options=torch_accl.Options(ring_bytes="512KiB"))
        except ValueError as error:
            return str(error)
        return "made"

    for sentence in check(run_ranks(body, 2, init=False)):
        assert "ring_bytes" in sentence and "256KiB" in sentence and "512KiB" in sentence, sentence


def test_every_setting_is_an_option_and_every_option_a_setting():
    import torch_accl

    parameters = set(inspect.signature(torch_accl.Options.__init__).parameters) - {"self"}
    options = {row["option"] for row in torch_accl._native.config_rows()}
    # The deadline is torch's own `timeout`, and `scope` is the older name of `compressed_calls`.
    assert parameters - {"timeout", "scope"} == options


def documented_options() -> dict[str, str]:
    """Returns the lines of the arguments in the documentation of `Options`, by name."""
    import torch_accl

    _, _, after = inspect.getdoc(torch_accl.Options).partition("\nArgs:\n")
    lines = after.partition("\n\n")[0].splitlines()
    return dict(re.fullmatch(r"    (\w+): (.+)", line).groups() for line in lines)


def test_every_option_has_a_line_of_its_own_in_the_documentation():
    import torch_accl

    assert list(documented_options()) == list(inspect.signature(torch_accl.Options).parameters)


def test_the_documentation_of_options_has_the_limits_of_the_table():
    import torch_accl

    limits = re.compile(r"from \w+ to \w+")
    rows = {row["option"]: limits.findall(row["accepted"]) for row in torch_accl._native.config_rows()}
    assert {name: limits.findall(line) for name, line in documented_options().items() if name in rows} == rows


def test_every_option_reaches_the_settings_of_its_group():
    import torch_accl

    for row in torch_accl._native.config_rows():
        options = torch_accl.Options(**{row["option"]: row["default"]})
        assert set(options.settings) == {row["option"]}, row["option"]


def bound_threads() -> list[str]:
    """Returns the CPUs of each progress thread whose affinity differs from the affinity of the process."""
    found = []
    for task in Path("/proc/self/task").iterdir():
        # The thread may have exited.
        with contextlib.suppress(OSError):
            if (task / "comm").read_text().strip() == "accl-progress":
                found.append(os.sched_getaffinity(int(task.name)))
    return sorted(",".join(map(str, sorted(cpus))) for cpus in found if cpus != os.sched_getaffinity(0))


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="this process may use one CPU, and the test wants two")
def test_threads_for_parts_of_calls_have_the_cpus_that_a_setting_names_in_the_order_of_ranks():
    cpus = sorted(os.sched_getaffinity(0))[:2]

    def body(rank):
        dist.all_reduce(torch.ones(1 << 20))
        deadline = time.monotonic() + 20
        while not (found := bound_threads()) and time.monotonic() < deadline:
            time.sleep(0.01)
        return found

    env = {"ACCL_WORKER_COUNT": "1", "ACCL_WORKER_AFFINITY": f"{cpus[1]},{cpus[0]}"}
    assert check(run_ranks(body, 2, env=env)) == [[str(cpus[1])], [str(cpus[0])]]


def test_a_cpu_that_is_not_there_or_too_few_of_them_are_a_line_and_no_error(tmp_path):
    def body(rank):
        stderr_to(tmp_path / f"stderr-{rank}")
        init_group()
        tensor = torch.ones(1 << 20)
        dist.all_reduce(tensor)
        assert tensor.eq(2).all()
        deadline = time.monotonic() + 20
        while "ACCL_WORKER_AFFINITY" not in (text := (tmp_path / f"stderr-{rank}").read_text()):
            assert time.monotonic() < deadline
            time.sleep(0.01)
        return text, bound_threads()

    env = {"ACCL_WORKER_COUNT": "1", "ACCL_WORKER_AFFINITY": "100000"}
    (first, bound), (second, also_bound) = check(run_ranks(body, 2, init=False, env=env))
    assert "CPU 100000 is not available" in first and bound == also_bound == [], first
    assert "lists 1 CPUs, but the ranks of this host up to this rank have 2 worker threads" in second, second
