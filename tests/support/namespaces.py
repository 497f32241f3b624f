"""Network namespaces connected by a bridge, so that a rank's host can vanish from the network without disconnecting.

Owns the namespaces' names and addresses, and removes the namespaces. Knows nothing about the programs in them.
"""

import contextlib
import itertools
import os
import shutil
import subprocess

# From the block reserved for benchmarks (RFC 2544), so no other route leads there.
NETWORK = "198.18.0.0/28"
CLONE_NEWNET = 0x40000000

_numbers = itertools.count()


def lacking() -> str | None:
    """The reason why namespaces cannot be created here, or None."""
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
    """Namespaces at one bridge, addressed by number."""

    def __init__(self, names: list[str], bridge: str):
        self.names, self.bridge = names, bridge

    def enter(self, number: int) -> str:
        """Returns code that moves the thread that runs it, and threads that it starts later, to a namespace."""
        return (
            "import ctypes, os\n"
            f"fd = os.open('/run/netns/{self.names[number]}', os.O_RDONLY)\n"
            f"assert ctypes.CDLL(None, use_errno=True).setns(fd, {CLONE_NEWNET}) == 0\n"
        )

    def vanish(self, number: int):
        """Cuts this host off from the network; its own interface and the other hosts' interfaces stay up."""
        _run("ip", "netns", "exec", self.bridge, "ip", "link", "set", f"port{number}", "down")


@contextlib.contextmanager
def hosts(count: int):
    """Creates `count` namespaces, and removes them at the end."""
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
