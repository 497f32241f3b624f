"""`accl device` and `accl emulator`."""

import json
import subprocess

import pytest
from support import BACKEND, run_command
from support.emulators import Emulator, free_ports

pytestmark = pytest.mark.skipif(BACKEND != "accl", reason="about this package only")


def accl(*arguments: str, status: int = 0) -> subprocess.CompletedProcess:
    ended = run_command(list(arguments))
    assert ended.returncode == status, (ended.stdout, ended.stderr)
    return ended


@pytest.mark.slow
def test_info_says_who_does_what_and_why():
    found = json.loads(accl("device", "info", "sim://?design=udp&eager=1MiB", "--ranks", "3", "--json").stdout)
    assert found["ranks"] == 3 and found["eager_bytes"] == 1 << 20 and "design=udp" in found["agreed"]
    routes = {(row["collective"], row["op"], row["dtype"]): row for row in found["routes"]}
    assert routes["all_reduce", "SUM", "float32"]["device"] and routes["broadcast", None, "bool"]["device"]
    assert routes["all_reduce", "AVG", "float32"]["why"] == "a device supports only SUM and MAX"
    assert not routes["all_to_all", None, "float32"]["device"]
    text = accl("device", "info", "sim").stdout
    assert "all_gather      device" in text and "barrier         host: " in text


def test_help_lists_every_key():
    from torch_accl import _native

    text = accl("device", "--help").stdout
    missing = [name for name, _, _ in _native.device_keys() if f"  {name} " not in text]
    assert not missing


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("info", "simm"), "did you mean sim"),
        (("info", "none"), "expected a device such as sim"),
        (("info", "sim", "--ranks", "0"), "rank 0 does not exist among 0 ranks"),
        (("dump", "sim"), "exist only in the processes of their ranks"),
        (("reset", "emulator://h:5500", "--rank", "2", "--ranks", "2"), "rank 2 does not exist among 2 ranks"),
    ],
)
def test_what_makes_no_sense_is_one_sentence(arguments, words):
    said = accl("device", *arguments, status=2).stderr
    assert words in said and said.count("\n") == 1 and "Traceback" not in said, said


def test_an_unused_port_is_one_sentence():
    port = free_ports(1)
    said = accl("device", "dump", f"emulator://127.0.0.1:{port}", status=1).stderr
    assert f"127.0.0.1:{port}" in said and said.count("\n") == 1, said


@pytest.mark.slow
def test_an_emulator_is_dumped_and_reset():
    with Emulator(2, "tcp") as emulator:
        dump = json.loads(accl("device", "dump", emulator.url, "--rank", "1", "--json").stdout)
        assert f"127.0.0.1:{emulator.port + 1}" in dump["device"] and not dump["is_set_up"]
        words = {register["name"]: register["value"] for register in dump["registers"]}
        assert words["hardware_id"] == 0 and words["is_configured"] == 0
        assert "is reset" in accl("device", "reset", emulator.url).stdout


@pytest.mark.slow
def test_the_emulator_says_what_it_takes_and_what_it_does_not():
    text = accl("emulator", "--help").stdout
    assert "accl emulator" in text and "--faithful" in text and "--trace" in text
    assert "--faithful: expected numbers from 1 to 13, got `14`" in accl("emulator", "--faithful=14", status=2).stderr
    assert "--rank: rank 4 is not below --ranks, which is 2" in accl("emulator", "-s", "2", "-r", "4", status=2).stderr
    assert "--clock" in accl("emulator", "--clock", "fast", status=2).stderr
