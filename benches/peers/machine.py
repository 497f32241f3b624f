"""The machine that is measured on: facts without which a figure has no value."""

from __future__ import annotations

import os
import platform
import subprocess
from collections.abc import Iterable
from pathlib import Path

from .build import ROOT


def facts() -> dict[str, str]:
    """Returns facts by name, in the page's order."""
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
    """Returns the current commit, with a plus if the tree has other changes than generated pages."""
    short = first_line(["git", "-C", str(ROOT), "rev-parse", "--short", "HEAD"])
    outputs = [
        f":!docs/{page}{end}" for page in ("performance", "compression", "layer-parallel") for end in (".md", "")
    ]
    changed = output_of(["git", "-C", str(ROOT), "status", "--porcelain", "--", ".", *outputs])
    return short + "+" * bool(changed)


class Quiet:
    """Measures how much of the cores others used while it exists, which shows whether figures can be trusted."""

    def __init__(self, pids: Iterable[int]) -> None:
        self.pids = list(pids)
        self.ticks, self.own = cpu_ticks(), self.own_ticks()

    def figures(self) -> tuple[float, float, float]:
        """Returns ticks of the cores since the start: all, used by other processes, and taken by the host."""
        total, busy, stolen = (now - before for now, before in zip(cpu_ticks(), self.ticks))
        return total, max(busy - (self.own_ticks() - self.own), 0), stolen

    def own_ticks(self) -> int:
        """Returns the ticks of this process, its ended children and the watched processes. A watched process that has
        ended counts no more."""
        ended = os.times()
        of_children = round((ended.children_user + ended.children_system) * os.sysconf("SC_CLK_TCK"))
        return of_children + sum(process_ticks(pid) for pid in [os.getpid(), *self.pids])


def cpu_ticks() -> tuple[int, int, int]:
    """Returns ticks of all cores since the machine started: all, busy, taken by the host."""
    user, nice, system, idle, wait, irq, soft, steal = map(int, Path("/proc/stat").read_text().split()[1:9])
    busy = user + nice + system + irq + soft
    return busy + idle + wait + steal, busy, steal


def process_ticks(pid: int) -> int:
    """Returns the ticks of all threads of a process; 0 if it has ended."""
    try:
        words = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0
    return int(words[11]) + int(words[12])


def governor() -> str:
    """Returns the governor of the first core; virtual machines have none."""
    try:
        return Path("/sys/devices/system/cpu/cpu0/cpufreq/scaling_governor").read_text().strip()
    except OSError:
        return "not visible"


def system_name() -> str:
    """Returns the name of the distribution."""
    return platform.freedesktop_os_release().get("PRETTY_NAME", "unknown")


def output_of(command: list[str]) -> str:
    """Returns the output of a command, or an empty text."""
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return ""


def first_line(command: list[str]) -> str:
    """Returns the first line of a command's output."""
    return output_of(command).partition("\n")[0]


def lines_of(command: list[str], separator: str) -> dict[str, str]:
    """Returns lines of `name: value` as a dictionary."""
    parts = (line.partition(separator) for line in output_of(command).splitlines())
    return {name.strip(): value.strip() for name, _, value in parts}
