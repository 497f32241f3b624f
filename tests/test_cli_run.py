"""`accl run`: which cores ranks get, what they see, and how all ranks end if one ends."""

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from support import BACKEND
from torch_accl_cli.run.hosts import Host, hosts_of, ssh_command
from torch_accl_cli.run.layout import Core, numbers, ranges, share_out, topology

pytestmark = pytest.mark.skipif(BACKEND != "accl", reason="about this package only")

RUN = [sys.executable, "-m", "torch_accl_cli", "run"]
TIMEOUT_S = 60
VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK")


def cores(nodes: int, each: int, threads: int = 2) -> list[Core]:
    """Cores whose second hardware threads are numbered after all first threads."""
    count = nodes * each
    return [
        Core(node, node, number, tuple(node * each + number + count * thread for thread in range(threads)))
        for node in range(nodes)
        for number in range(each)
    ]


def test_cores_are_shared_out_whole_and_one_after_the_other():
    placements = share_out(cores(1, 8), 3)
    assert [placement.threads for placement in placements] == [(0, 1, 8, 9), (2, 3, 10, 11), (4, 5, 12, 13)]
    assert [placement.cores for placement in placements] == [2, 2, 2] and {
        placement.nodes for placement in placements
    } == {(0,)}


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_no_ranks_cores_span_two_nodes_where_they_can_be_dealt_evenly(ranks):
    placements = share_out(cores(2, 8), ranks)
    assert all(len(placement.nodes) == 1 and placement.cores == 16 // ranks for placement in placements)
    assert len({thread for placement in placements for thread in placement.threads}) == 32


def test_fewer_ranks_than_nodes_get_whole_nodes():
    assert [placement.nodes for placement in share_out(cores(4, 4), 2)] == [(0, 1), (2, 3)]
    assert [placement.cores for placement in share_out(cores(4, 4), 3)] == [5, 5, 5]


def test_ranks_that_outnumber_the_cores_are_not_bound():
    assert share_out(cores(1, 2), 3) == share_out([], 3)
    assert {placement.threads for placement in share_out(cores(1, 2), 3)} == {()}


def test_nodes_of_which_few_cores_are_allowed_take_no_more_ranks_than_they_have():
    lopsided = [*cores(2, 8)[:1], *cores(2, 8)[8:]]
    placements = share_out(lopsided, 4)
    assert [placement.cores for placement in placements] == [2] * 4
    assert len({thread for placement in placements for thread in placement.threads}) == 16


def test_the_topology_is_the_systems(tmp_path):
    for cpu, (package, core) in enumerate([(0, 0), (0, 1), (1, 0), (1, 1), (0, 0), (0, 1), (1, 0), (1, 1)]):
        folder = tmp_path / f"cpu/cpu{cpu}/topology"
        folder.mkdir(parents=True)
        (folder / "physical_package_id").write_text(f"{package}\n")
        (folder / "core_id").write_text(f"{core}\n")
    for node, cpus in enumerate(["0-1,4-5", "2-3,6-7"]):
        (tmp_path / f"node/node{node}").mkdir(parents=True)
        (tmp_path / f"node/node{node}/cpulist").write_text(cpus + "\n")
    assert topology([0, 4, 1, 2, 3, 7], tmp_path) == [
        Core(0, 0, 0, (0, 4)),
        Core(0, 0, 1, (1,)),
        Core(1, 1, 0, (2,)),
        Core(1, 1, 1, (3, 7)),
    ]
    # If the system provides no topology, each thread counts as a core.
    assert [core.threads for core in topology([3, 1], tmp_path / "nothing")] == [(1,), (3,)]


def test_lists_of_cores_are_read_and_written_as_the_system_writes_them():
    assert numbers("0-3,8") == [0, 1, 2, 3, 8] and numbers("") == []
    assert ranges([8, 0, 1, 3, 2]) == "0-3,8" and ranges([]) == ""
    with pytest.raises(ValueError, match="'1-' is not a number"):
        numbers("0,1-")


def test_hosts_have_numbers_of_their_own_or_the_common_one():
    found = hosts_of("a,me@b:4, [fd00::1]:2,me@[fd00::2]", 3)
    assert found == [Host("a", 3), Host("me@b", 4), Host("fd00::1", 2), Host("me@fd00::2", 3)]
    for wrong in ("a,", "a:", "a:0", "a:x", "fd00::1"):
        with pytest.raises(ValueError, match="expected HOST or HOST:RANKS such as a:4, got "):
            hosts_of(wrong, 2)
    with pytest.raises(ValueError, match="a is listed twice; give its number of ranks as a:4"):
        hosts_of("a,b,a", 2)


def test_ssh_asks_for_nothing_whatever_port_it_is_given():
    quiet = ["ssh", "-o", "BatchMode=yes"]
    assert ssh_command("ssh -p 2222")[:3] == quiet and ssh_command("ssh -p 2222")[-2:] == ["-p", "2222"]
    assert ssh_command(None)[:3] == quiet
    assert ssh_command("./reach 'a b'") == ["./reach", "a b"]


def run(*arguments, cwd, env=None, timeout=TIMEOUT_S):
    environment = {key: value for key, value in os.environ.items() if key not in (*VARIABLES, "OMP_NUM_THREADS")}
    return subprocess.run(
        [*RUN, *map(str, arguments)],
        cwd=cwd,
        env=environment | (env or {}),
        capture_output=True,
        text=True,
        timeout=timeout,
    )


# One write per line, because several ranks write to the same pipe.
SAY = """import os, signal, sys, time
def say(*what):
    os.write(1, (" ".join(map(str, what)) + "\\n").encode())
"""


def script(folder: Path, text: str) -> str:
    (folder / "script.py").write_text(SAY + text)
    return "script.py"


SHOW = f"say(*[os.environ[name] for name in {VARIABLES}], os.environ['MASTER_ADDR'], sys.argv[1:])"


def test_ranks_see_the_variables_that_torchrun_would_set(tmp_path):
    # None of these options belongs to `accl run`, although `--n` could abbreviate several of its options.
    theirs = ["--lr", "0.1", "-n", "--n", "3", "--no-python"]
    ended = run("-n", 2, script(tmp_path, SHOW), *theirs, cwd=tmp_path)
    assert ended.returncode == 0, ended.stderr
    assert sorted(ended.stdout.splitlines()) == [f"{r} 2 {r} 2 0 127.0.0.1 {theirs}" for r in range(2)]


def test_ranks_run_where_the_layout_says(tmp_path):
    code = "say(os.environ['RANK'], ','.join(map(str, sorted(os.sched_getaffinity(0)))), os.environ.get('OMP_NUM_THREADS'))"
    wanted = share_out(topology(os.sched_getaffinity(0)), 1)
    ended = run("-n", 1, script(tmp_path, code), cwd=tmp_path)
    assert ended.stdout.split() == ["0", ",".join(map(str, wanted[0].threads)), str(wanted[0].cores)], ended.stderr
    assert f"CPUs {ranges(wanted[0].threads)}" in ended.stderr
    many = len(os.sched_getaffinity(0)) + 1
    ended = run("-n", many, script(tmp_path, code), cwd=tmp_path)
    everywhere = ",".join(map(str, sorted(os.sched_getaffinity(0))))
    assert sorted(ended.stdout.splitlines()) == [f"{rank} {everywhere} None" for rank in range(many)]
    assert ended.stderr.count("not bound") == many
    ended = run("-n", 1, "--no-bind", "--quiet", script(tmp_path, code), cwd=tmp_path, env={"OMP_NUM_THREADS": "7"})
    assert (ended.stdout.split(), ended.stderr) == (["0", everywhere, "7"], "")


@pytest.mark.parametrize("how", ["exit", "signal"])
def test_a_rank_that_fails_ends_the_others_and_is_named(how, tmp_path):
    end = {"exit": "sys.exit(7)", "signal": "os.kill(os.getpid(), signal.SIGKILL)"}[how]
    code = f"""
if os.environ["RANK"] == "1":
    time.sleep(0.5)
    {end}
time.sleep(60)
"""
    start = time.monotonic()
    ended = run("-n", 3, script(tmp_path, code), cwd=tmp_path)
    assert time.monotonic() - start < 30
    assert ended.returncode == {"exit": 7, "signal": 137}[how]
    said = {"exit": "ended with exit status 7", "signal": "was killed by SIGKILL"}[how]
    failures = [line for line in ended.stderr.splitlines() if "the other ranks are ended" in line]
    assert len(failures) == 1 and "rank 1 " in failures[0] and said in failures[0]


def test_ranks_that_do_not_end_when_asked_are_killed_with_what_they_have_started(tmp_path):
    code = """
import subprocess
signal.signal(signal.SIGTERM, signal.SIG_IGN)
child = subprocess.Popen([sys.executable, "-c", "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(60)"])
open("child" + os.environ["RANK"], "w").write(str(child.pid))
if os.environ["RANK"] == "1":
    while not all(os.path.exists(f"child{rank}") and open(f"child{rank}").read() for rank in range(2)):
        time.sleep(0.01)
    os._exit(1)
time.sleep(60)
"""
    start = time.monotonic()
    ended = run("-n", 2, "--grace", 0.5, script(tmp_path, code), cwd=tmp_path)
    assert ended.returncode == 1 and time.monotonic() - start < 30
    assert not any(is_alive(int((tmp_path / f"child{rank}").read_text())) for rank in range(2))


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


WAITING = """
try:
    open("here" + os.environ["RANK"], "w").write(str(os.getpid()))
    time.sleep(60)
except KeyboardInterrupt:
    say("interrupted")
"""


def begin(tmp_path, *more, text=WAITING, before=()):
    process = subprocess.Popen(
        ["env", "--default-signal=INT,HUP", *before, *RUN, "-n", "2", *more, script(tmp_path, text)],
        cwd=tmp_path,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    end = time.monotonic() + 20
    while not all((tmp_path / f"here{rank}").exists() and (tmp_path / f"here{rank}").read_text() for rank in range(2)):
        assert time.monotonic() < end and process.poll() is None, process.communicate()
        time.sleep(0.01)
    return process, [int((tmp_path / f"here{rank}").read_text()) for rank in range(2)]


def test_an_interrupt_reaches_every_rank_once(tmp_path):
    process, _ = begin(tmp_path)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=30)
    assert process.returncode == 130 and out.count("interrupted") == 2
    assert "Traceback" not in err and "the other ranks" not in err


def test_ranks_die_with_who_started_them(tmp_path):
    process, ranks = begin(tmp_path)
    process.kill()
    process.communicate(timeout=30)
    end = time.monotonic() + 10
    while any(map(is_alive, ranks)):
        assert time.monotonic() < end
        time.sleep(0.01)


FAKE_SSH = """#!/bin/sh
# Runs commands for other hosts on this host. The host "nowhere" does not exist.
host=$1
shift
echo "$host" >>hosts
if [ "$host" = nowhere ]; then
  echo "ssh: Could not resolve hostname nowhere: Name or service not known" >&2
  exit 255
fi
SSH_CONNECTION="192.0.2.9 5 192.0.2.1 22"
export SSH_CONNECTION
echo "Welcome to $host"
printf '\\033]0;a title\\007'
[ "$host" = cut ] && (until [ -s here0 ] && [ -s here1 ]; do sleep 0.1; done; kill -9 $$) &
case $host in
late) sleep 3; eval "$@" ;;
dies) sh -c "$*" </dev/null ;;
old) eval "$@" | sed -u 's/"version": "[^"]*"/"version": "0.0.1"/' ;;
me@* | loop*) SSH_CONNECTION="127.0.0.1 5 127.0.1.1 22" exec sh -c "$*" ;;
local*) SSH_CONNECTION= exec sh -c "$*" ;;
*) eval "$@" ;;
esac
"""


@pytest.fixture
def ssh(tmp_path):
    path = tmp_path / "ssh"
    path.write_text(FAKE_SSH)
    path.chmod(0o755)
    return path


def test_hosts_are_reached_by_ssh_and_their_lines_have_the_rank(tmp_path, ssh):
    code = (
        "say('of', os.environ['ACCL_SEGMENT_BYTES'], os.environ.get('OTHER')); print('to stderr', file=sys.stderr)\n"
        + SHOW
    )
    env = {"ACCL_SEGMENT_BYTES": "65536", "OTHER": "one", "UNSEEN": "x"}
    ended = run(
        "-n", 1, "--hosts", "a,b:2", "--ssh", ssh, "--env", "OTHER", script(tmp_path, code), cwd=tmp_path, env=env
    )
    assert ended.returncode == 0, ended.stderr
    lines = ended.stdout.splitlines()
    for rank, local, local_world, host in [(0, 0, 1, 0), (1, 0, 2, 1), (2, 1, 2, 1)]:
        assert f"[{rank}] of 65536 one" in lines and f"[{rank}] to stderr" in ended.stderr.splitlines()
        assert f"[{rank}] {rank} 3 {local} {local_world} {host} 192.0.2.1 []" in lines
    assert sorted((tmp_path / "hosts").read_text().split()) == ["a", "b"]
    assert "rank 2 on b: process" in ended.stderr


def test_a_host_that_is_not_there_is_named_and_nothing_runs(tmp_path, ssh):
    ended = run("--hosts", "a,nowhere", "--ssh", ssh, script(tmp_path, "open('ran', 'w')"), cwd=tmp_path)
    assert ended.returncode == 1 and not (tmp_path / "ran").exists()
    assert "accl run: nowhere: ssh: Could not resolve hostname nowhere" in ended.stderr


@pytest.mark.slow
def test_a_failure_on_one_host_ends_the_ranks_of_the_others(tmp_path, ssh):
    code = "time.sleep(60 if os.environ['RANK'] == '0' else 0.3); sys.exit(5)"
    start = time.monotonic()
    ended = run("-n", 1, "--hosts", "a,b", "--ssh", ssh, script(tmp_path, code), cwd=tmp_path)
    assert ended.returncode == 5 and time.monotonic() - start < 30
    assert "rank 1 on b" in ended.stderr and "ended with exit status 5" in ended.stderr


def test_a_connection_that_is_cut_ends_all_ranks(tmp_path, ssh):
    start = time.monotonic()
    ended = run("-n", 1, "--hosts", "a,cut", "--ssh", ssh, script(tmp_path, WAITING), cwd=tmp_path)
    assert ended.returncode != 0 and time.monotonic() - start < 40
    for rank in range(2):
        assert not is_alive(int((tmp_path / f"here{rank}").read_text()))


def test_an_interrupt_ends_ranks_on_hosts(tmp_path, ssh):
    process, ranks = begin(tmp_path, "--hosts", "a:1,b:1", "--ssh", str(ssh))
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=30)
    assert (process.returncode, out.count("interrupted")) == (130, 2), err
    assert not any(map(is_alive, ranks))


def test_hosts_whose_agent_ends_before_it_has_started_anything_are_a_failure(tmp_path, ssh):
    ended = run("-n", 1, "--hosts", "a,dies", "--ssh", ssh, script(tmp_path, "time.sleep(60)"), cwd=tmp_path)
    # The loss is noticed either before or after all hosts have answered.
    said = ("dies: the connection ended", "lost the connection to dies, and with it rank 1")
    assert ended.returncode == 1 and any(words in ended.stderr for words in said), ended.stderr


def test_a_host_that_is_lost_before_all_have_answered_is_named(tmp_path, ssh):
    ended = run("-n", 1, "--hosts", "late,dies", "--ssh", ssh, script(tmp_path, "open('ran', 'w')"), cwd=tmp_path)
    assert ended.returncode == 1 and "accl run: dies: the connection ended without an error message" in ended.stderr
    assert not (tmp_path / "ran").exists()


def test_an_agent_that_is_ended_from_outside_ends_all(tmp_path, ssh):
    code = """
signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
if os.environ["RANK"] == "1":
    os.kill(os.getppid(), signal.SIGTERM)
time.sleep(60)
"""
    start = time.monotonic()
    ended = run("-n", 1, "--hosts", "a,b", "--ssh", ssh, script(tmp_path, code), cwd=tmp_path)
    assert ended.returncode == 143 and time.monotonic() - start < 30


def test_another_version_on_a_host_is_named_before_anything_runs(tmp_path, ssh):
    ended = run("--hosts", "a,old", "--ssh", ssh, script(tmp_path, "open('ran', 'w')"), cwd=tmp_path)
    assert ended.returncode == 1 and "old has torch-accl 0.0.1, and this host" in ended.stderr
    assert not (tmp_path / "ran").exists()


@pytest.mark.slow
def test_hosts_are_not_sent_to_their_own_loopback(tmp_path, ssh):
    say = script(tmp_path, "say(os.environ['MASTER_ADDR'])")
    ended = run("-n", 1, "--hosts", "localhost,b", "--ssh", ssh, say, cwd=tmp_path)
    assert {line.split()[1] for line in ended.stdout.splitlines()} == {socket.gethostname()}, ended.stderr
    ended = run("-n", 1, "--hosts", f"me@{socket.gethostname()},b", "--ssh", ssh, say, cwd=tmp_path)
    assert {line.split()[1] for line in ended.stdout.splitlines()} == {socket.gethostname()}, ended.stderr


@pytest.mark.slow
def test_names_that_only_ssh_knows_for_this_host_are_not_what_ranks_meet_at(tmp_path, ssh):
    say = script(tmp_path, "say(os.environ['MASTER_ADDR'])")
    ended = run("-n", 1, "--hosts", "loop-a,loop-b", "--ssh", ssh, say, cwd=tmp_path)
    assert {line.split()[1] for line in ended.stdout.splitlines()} == {"127.0.0.1"}, ended.stderr


@pytest.mark.parametrize("named", ["127.0.0.1", "localhost"])
def test_a_meeting_place_that_is_named_is_taken_as_it_is(named, tmp_path, ssh):
    say = script(tmp_path, "say(os.environ['MASTER_ADDR'])")
    ended = run("-n", 1, "--master-addr", named, "--hosts", "local-a,b", "--ssh", ssh, say, cwd=tmp_path)
    assert {line.split()[1] for line in ended.stdout.splitlines()} == {named}, ended.stderr


IMPATIENT = """
import torch_accl_cli.run.agent as agent
agent._SILENCE_S, agent.ALIVE_S = 2.0, 0.2
"""


def impatient(tmp_path):
    """Returns an environment in which agents and their starter wait for seconds instead of minutes."""
    (tmp_path / "patched").mkdir()
    (tmp_path / "patched" / "sitecustomize.py").write_text(IMPATIENT)
    return {**os.environ, "PYTHONPATH": str(tmp_path / "patched")}


@pytest.mark.slow
def test_ranks_on_hosts_go_on_while_their_output_is_not_read(tmp_path, ssh):
    code = "[say('x' * 1000) for _ in range(2000)]"
    command = [*RUN, "-n", "1", "--hosts", "a,b", "--ssh", str(ssh), script(tmp_path, code)]
    process = subprocess.Popen(
        list(map(str, command)),
        cwd=tmp_path,
        env=impatient(tmp_path),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    time.sleep(6)
    out, err = process.communicate(timeout=TIMEOUT_S)
    assert process.returncode == 0 and len(out.splitlines()) == 4000, err


@pytest.mark.slow
def test_an_agent_without_messages_reports_it_and_ends_its_ranks(tmp_path, ssh):
    code = "open('here' + os.environ['RANK'], 'w').close(); time.sleep(60)"
    command = [*RUN, "-n", "1", "--grace", "1", "--hosts", "a,b", "--ssh", str(ssh), script(tmp_path, code)]
    process = subprocess.Popen(
        list(map(str, command)), cwd=tmp_path, env=impatient(tmp_path), stderr=subprocess.PIPE, text=True
    )
    end = time.monotonic() + TIMEOUT_S
    while len(list(tmp_path.glob("here*"))) < 2:
        assert time.monotonic() < end
        time.sleep(0.05)
    process.send_signal(signal.SIGSTOP)
    time.sleep(6)
    process.send_signal(signal.SIGCONT)
    _, err = process.communicate(timeout=TIMEOUT_S)
    assert process.returncode and "no message from `accl run`, which started the ranks, for 2 s" in err, err


@pytest.mark.parametrize("more", [[], ["--master-addr", "no.such.name.invalid"]])
def test_a_meeting_place_without_an_address_is_named_before_anything_runs(more, tmp_path, ssh):
    # The name of the first host is known only to ssh, and the second host is another machine.
    start = time.monotonic()
    ended = run(
        "-n", 1, "--hosts", "loop.invalid,b", *more, "--ssh", ssh, script(tmp_path, "open('ran', 'w')"), cwd=tmp_path
    )
    name = more[1] if more else "loop.invalid"
    assert ended.returncode == 127 and time.monotonic() - start < 60
    assert f"{name}, the address of rank 0, cannot be resolved here" in ended.stderr and "--master-addr" in ended.stderr
    assert not (tmp_path / "ran").exists()


@pytest.fixture
def real_ssh(tmp_path):
    """Returns an ssh command that reaches this host as `a` and `b`, through a server that this fixture starts."""
    server = shutil.which("sshd", path=f"{os.environ['PATH']}:/usr/sbin")
    if server is None or shutil.which("ssh") is None:
        pytest.skip("there is no sshd or no ssh on this machine (Debian's openssh-server and openssh-client)")
    for name in ("host", "user"):
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", tmp_path / name], check=True)
    with socket.create_server(("127.0.0.1", 0)) as holder:
        port = holder.getsockname()[1]
    (tmp_path / "sshd").write_text(
        f"Port {port}\nListenAddress 127.0.0.1\nHostKey {tmp_path}/host\nAuthorizedKeysFile {tmp_path}/user.pub\n"
        "PermitRootLogin yes\nStrictModes no\nUsePAM no\nPasswordAuthentication no\nPidFile none\n"
    )
    (tmp_path / "config").write_text(
        f"Host a b\n  HostName 127.0.0.1\nHost *\n  Port {port}\n  IdentityFile {tmp_path}/user\n  IdentitiesOnly yes\n"
        f"  UserKnownHostsFile {tmp_path}/known\n  StrictHostKeyChecking accept-new\n"
    )
    with contextlib.suppress(OSError):
        os.makedirs("/run/sshd", exist_ok=True)
    daemon = subprocess.Popen([server, "-D", "-f", tmp_path / "sshd", "-E", tmp_path / "log"])
    command = f"ssh -F {tmp_path}/config"
    try:
        end = time.monotonic() + 30
        while subprocess.run([*command.split(), "-o", "BatchMode=yes", "a", "true"], capture_output=True).returncode:
            if daemon.poll() is not None or time.monotonic() > end:
                pytest.skip(f"no sshd of our own can be reached here: {(tmp_path / 'log').read_text().strip()[-300:]}")
            time.sleep(0.1)
        yield command
    finally:
        daemon.terminate()
        daemon.wait()


def test_ranks_on_hosts_that_a_real_sshd_serves_sum(tmp_path, real_ssh):
    code = (
        "import torch, torch.distributed as dist, torch_accl\n"
        "dist.init_process_group('accl')\n"
        "tensor = torch.ones(3) * (dist.get_rank() + 1)\n"
        "dist.all_reduce(tensor)\n"
        "say(tensor.tolist())\n"
        "dist.destroy_process_group()"
    )
    ended = run("--hosts", "a:2,b:1", "--ssh", real_ssh, script(tmp_path, code), cwd=tmp_path)
    assert ended.returncode == 0, ended.stderr
    assert sorted(ended.stdout.splitlines()) == [f"[{rank}] [6.0, 6.0, 6.0]" for rank in range(3)]


def test_a_key_that_a_real_sshd_does_not_know_is_named_and_asks_for_nothing(tmp_path, real_ssh):
    (tmp_path / "config").write_text((tmp_path / "config").read_text().replace("/user\n", "/host\n"))
    ended = run("--hosts", "a,b", "--ssh", real_ssh, script(tmp_path, "open('ran', 'w')"), cwd=tmp_path)
    assert ended.returncode == 1 and "Permission denied" in ended.stderr, ended.stderr
    assert not (tmp_path / "ran").exists()


@pytest.mark.slow
@pytest.mark.parametrize("hosts", [[], ["--hosts", "a:1,b:1"]], ids=["here", "hosts"])
def test_signals_of_batch_systems_reach_the_ranks_and_end_nothing(hosts, tmp_path, ssh):
    code = """
signal.signal(signal.SIGUSR1, lambda *_: say("saved"))
open("here" + os.environ["RANK"], "w").write(str(os.getpid()))
end = time.monotonic() + 4
while time.monotonic() < end:
    time.sleep(0.1)
"""
    process, _ = begin(tmp_path, *([*hosts, "--ssh", str(ssh)] if hosts else []), text=code)
    process.send_signal(signal.SIGUSR1)
    out, err = process.communicate(timeout=30)
    assert (process.returncode, out.count("saved")) == (0, 2), err


@pytest.mark.slow
def test_a_run_under_nohup_outlives_the_terminal(tmp_path):
    process, _ = begin(tmp_path, text=WAITING.replace("sleep(60)", "sleep(2)"), before=("nohup",))
    process.send_signal(signal.SIGHUP)
    _, err = process.communicate(timeout=30)
    assert process.returncode == 0, err


def test_a_reader_that_has_seen_enough_ends_the_ranks_in_their_grace(tmp_path):
    code = """
def end(*_):
    open("ended" + os.environ["RANK"], "w")
    os._exit(0)
signal.signal(signal.SIGTERM, end)
open("here" + os.environ["RANK"], "w")
while not all(os.path.exists(f"here{rank}") for rank in range(2)):
    time.sleep(0.01)
while True:
    say("a line")
    time.sleep(0.01)
"""
    command = f"set -o pipefail; {' '.join(RUN)} -n 2 --prefix --quiet {script(tmp_path, code)} | head -1"
    ended = subprocess.run(["bash", "-c", command], cwd=tmp_path, capture_output=True, text=True, timeout=TIMEOUT_S)
    assert ended.returncode == 141, ended.stderr
    assert sorted(path.name for path in tmp_path.glob("ended*")) == ["ended0", "ended1"]


def test_torchruns_own_variables_are_not_the_ranks(tmp_path):
    env = {"TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RUN_ID": "x"}
    say = script(tmp_path, "say(*[name for name in os.environ if 'ELASTIC' in name])")
    ended = run("-n", 1, say, cwd=tmp_path, env=env)
    assert ended.stdout.strip() == "", ended.stderr


def test_lines_are_passed_on_whole_whatever_is_in_them(tmp_path):
    code = """
def write(data):
    while data:
        data = data[os.write(1, data):]
write(b"".join(b"%d\\n" % number for number in range(20000)))
write(b"10%\\r20%\\r\\n" + "wide: \\u2028 \\u00e9\\n".encode() + b"x" * 100000 + b"\\nlast")
"""
    code = code.replace("\\\\", "\\")
    ended = run("-n", 1, "--prefix", "--quiet", script(tmp_path, code), cwd=tmp_path)
    lines = ended.stdout.split("\n")
    assert lines[:20000] == [f"[0] {number}" for number in range(20000)]
    assert lines[20000:20003] == ["[0] 10%", "[0] 20%", "[0] wide: \u2028 \u00e9"]
    assert "".join(line.removeprefix("[0] ") for line in lines[20003:-2]) == "x" * 100000
    assert lines[-2:] == ["[0] last", ""]
    ascii_only = {"PYTHONIOENCODING": "ascii"}
    ended = run("-n", 1, "--prefix", "--quiet", script(tmp_path, code), cwd=tmp_path, env=ascii_only)
    assert ended.returncode == 0 and "[0] last" in ended.stdout


@pytest.mark.slow
def test_a_child_of_a_rank_that_saves_has_the_grace_as_well(tmp_path):
    (tmp_path / "child.py").write_text(SAVING)
    code = """
import subprocess
if os.environ["RANK"] == "1":
    while not os.path.exists("child"):
        time.sleep(0.01)
    sys.exit(3)
subprocess.Popen([sys.executable, "child.py"])
time.sleep(60)
"""
    ended = run("-n", 2, script(tmp_path, code), cwd=tmp_path)
    assert ended.returncode == 3 and (tmp_path / "saved").exists(), ended.stderr


SAVING = """
import signal, sys, time
def save(*_):
    time.sleep(1)
    open("saved", "w")
    sys.exit(0)
signal.signal(signal.SIGTERM, save)
open("child", "w")
time.sleep(60)
"""


def test_a_module_and_a_program_can_be_run(tmp_path):
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "train.py").write_text("import os; print('module', os.environ['RANK'])")
    ended = run("-n", 1, "-m", "package.train", cwd=tmp_path)
    assert ended.stdout == "module 0\n", ended.stderr
    ended = run("-n", 1, "--no-python", "sh", "-c", "echo program $RANK", cwd=tmp_path)
    assert ended.stdout == "program 0\n", ended.stderr


def test_the_port_is_free_for_rank_0s_store(tmp_path):
    code = """
import socket
if os.environ["RANK"] == "0":
    with socket.create_server((os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))):
        print("served")
"""
    ended = run("-n", 2, script(tmp_path, code), cwd=tmp_path)
    assert ended.stdout == "served\n", ended.stderr


@pytest.mark.parametrize(
    ("arguments", "said", "status"),
    [
        ([], "a script is missing", 2),
        (["nowhere.py"], "nowhere.py: no such script in ", 2),
        (["-n", "0", "x.py"], "-n: expected 1 or more ranks, got 0", 2),
        (["--master-port", "70000", "x.py"], "--master-port: expected a port number, got 70000", 2),
        (["--grace", "-1", "x.py"], "--grace: expected a finite number of seconds, at least 0, got -1", 2),
        (["--grace", "inf", "x.py"], "--grace: expected a finite number of seconds, at least 0, got inf", 2),
        (["--hosts", "a,,b", "x.py"], "--hosts: expected HOST or HOST:RANKS such as a:4, got ''", 2),
        (["--env", "NOT_THERE", "-m", "x"], "--env: NOT_THERE is not set here", 2),
        (["--no-python", "./nothing"], "./nothing cannot be started: No such file", 127),
    ],
)
def test_what_cannot_be_run_is_refused_in_one_sentence(arguments, said, status, tmp_path):
    ended = run(*arguments, cwd=tmp_path)
    assert ended.returncode == status and said in ended.stderr and ended.stdout == ""
    assert len(ended.stderr.splitlines()) == 1, ended.stderr
