"""What is measured on: facts that a figure is worth nothing without."""

from __future__ import annotations

import os
import platform
import subprocess
from collections.abc import Iterable
from pathlib import Path

from .build import ROOT


def facts() -> dict[str, str]:
    """Name of a fact and its value, in the order in which the page has them."""
    cpu = lines_of(["lscpu"], ":")
    memory = lines_of(["cat", "/proc/meminfo"], ":").get("MemTotal", "0 kB").split()[0]
    found = {
        "processor": cpu.get("Model name", platform.processor() or "unknown")
        + f", family {cpu.get('CPU family', '?')} model {cpu.get('Model', '?')}",
        "cores": f"{len(os.sched_getaffinity(0))} usable, {cpu.get('Thread(s) per core', '?')} thread(s) a core",
        "caches": ", ".join(f"{name} {cpu[name + ' cache']}" for name in ("L1d", "L2", "L3") if name + " cache" in cpu),
        "vector instructions": ", ".join(flag for flag in VECTORS if flag in cpu.get("Flags", "").split()),
        "virtual machine": cpu.get("Hypervisor vendor", "no"),
        "frequency governor": governor(),
        "memory": f"{int(memory) / 2**20:.0f} GiB",
        "system": f"{platform.system()} {platform.release()}, {system_name()}",
        "compilers": "; ".join(filter(None, (first_line(["cc", "--version"]), first_line(["rustc", "--version"])))),
        "Python": platform.python_version(),
    }
    return {name: value for name, value in found.items() if value}


VECTORS = ("avx2", "f16c", "fma", "avx512f", "avx512bw", "avx512_bf16", "avx512_fp16")


def commit() -> str:
    """What was measured, with a plus when the tree has changes beside."""
    short = first_line(["git", "-C", str(ROOT), "rev-parse", "--short", "HEAD"])
    outputs = [
        f":!docs/{page}{end}" for page in ("performance", "compression", "layer-parallel") for end in (".md", "")
    ]
    changed = output_of(["git", "-C", str(ROOT), "status", "--porcelain", "--", ".", *outputs])
    return short + "+" * bool(changed)


class Quiet:
    """How much of the cores others took while this was on: whoever has read `share` and `stolen` knows whether to believe."""

    def __init__(self, pids: Iterable[int]) -> None:
        self.pids = list(pids)
        self.ticks, self.own = cpu_ticks(), self.own_ticks()

    def figures(self) -> tuple[float, float, float]:
        """Ticks since the start: all that the cores had, those of other processes, and those that the host took."""
        total, busy, stolen = (now - before for now, before in zip(cpu_ticks(), self.ticks))
        return total, max(busy - (self.own_ticks() - self.own), 0), stolen

    def own_ticks(self) -> int:
        """Of this process and its children that have ended, and of those that it watches; one of these that is gone counts no more."""
        ended = os.times()
        of_children = round((ended.children_user + ended.children_system) * os.sysconf("SC_CLK_TCK"))
        return of_children + sum(process_ticks(pid) for pid in [os.getpid(), *self.pids])


def cpu_ticks() -> tuple[int, int, int]:
    """Of all cores since the machine began: all, busy, taken by the host."""
    user, nice, system, idle, wait, irq, soft, steal = map(int, Path("/proc/stat").read_text().split()[1:9])
    busy = user + nice + system + irq + soft
    return busy + idle + wait + steal, busy, steal


def process_ticks(pid: int) -> int:
    """Of all threads of a process."""
    try:
        words = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0
    return int(words[11]) + int(words[12])


def governor() -> str:
    """Of the first core; virtual machines have none."""
    try:
        return Path("/sys/devices/system/cpu/cpu0/cpufreq/scaling_governor").read_text().strip()
    except OSError:
        return "not visible"


def system_name() -> str:
    """The distribution."""
    return platform.freedesktop_os_release().get("PRETTY_NAME", "unknown")


def output_of(command: list[str]) -> str:
    """What a command prints, or nothing."""
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return ""


def first_line(command: list[str]) -> str:
    """The first line of what it prints."""
    return output_of(command).partition("\n")[0]


def lines_of(command: list[str], separator: str) -> dict[str, str]:
    """Lines of `name: value`."""
    parts = (line.partition(separator) for line in output_of(command).splitlines())
    return {name.strip(): value.strip() for name, _, value in parts}
