"""Network namespaces that meet at a bridge, so that a rank's host can vanish from the network without a word.

Owns their names and addresses, and the end of all of it. What runs there is not known here.
"""

import contextlib
import itertools
import os
import shutil
import subprocess

# Of the block that is set aside for benchmarks (RFC 2544), so nobody else's route goes there.
NETWORK = "198.18.0.0/28"
CLONE_NEWNET = 0x40000000

_numbers = itertools.count()


def lacking() -> str | None:
    """Why there can be no namespaces here."""
    if os.geteuid() != 0:
        return "only root can make network namespaces"
    if shutil.which("ip") is None:
        return "`ip` is not there; it is part of iproute2"
    name = f"accl-test-{os.getpid()}-probe"
    try:
        _run("ip", "netns", "add", name)
        _run("ip", "netns", "delete", name)
    except subprocess.CalledProcessError as error:
        return f"no network namespace can be made: {error.stderr.strip()}"
    return None


class Hosts:
    """Namespaces at one bridge, by number."""

    def __init__(self, names: list[str], bridge: str):
        self.names, self.bridge = names, bridge

    def enter(self, number: int) -> str:
        """Code that moves the thread that runs it, and those that it starts, to a namespace."""
        return (
            "import ctypes, os\n"
            f"fd = os.open('/run/netns/{self.names[number]}', os.O_RDONLY)\n"
            f"assert ctypes.CDLL(None, use_errno=True).setns(fd, {CLONE_NEWNET}) == 0\n"
        )

    def vanish(self, number: int):
        """From now on nothing gets to this host or comes from it; its own interface and those of others stay up."""
        _run("ip", "netns", "exec", self.bridge, "ip", "link", "set", f"port{number}", "down")


@contextlib.contextmanager
def hosts(count: int):
    """Makes the namespaces, and removes them."""
    prefix = f"accl-test-{os.getpid()}-{next(_numbers)}"
    bridge, names = f"{prefix}-bridge", [f"{prefix}-{number}" for number in range(count)]
    try:
        for name in [bridge, *names]:
            _run("ip", "netns", "add", name)
        inside = ("ip", "netns", "exec", bridge)
        _run(*inside, "ip", "link", "add", "bridge0", "type", "bridge")
        _run(*inside, "ip", "link", "set", "bridge0", "up")
        for number, name in enumerate(names):
            port = f"port{number}"
            _run(
                "ip",
                "link",
                "add",
                "name",
                "host0",
                "netns",
                name,
                "type",
                "veth",
                "peer",
                "name",
                port,
                "netns",
                bridge,
            )
            _run(*inside, "ip", "link", "set", port, "master", "bridge0", "up")
            for change in (
                "link set lo up",
                f"address add 198.18.0.{number + 1}/28 dev host0",
                "link set host0 up",
            ):
                _run("ip", "-n", name, *change.split())
        yield Hosts(names, bridge)
    finally:
        for name in [bridge, *names]:
            with contextlib.suppress(subprocess.CalledProcessError):
                _run("ip", "netns", "delete", name)


def _run(*words: str):
    subprocess.run(words, check=True, capture_output=True, text=True, timeout=20)
