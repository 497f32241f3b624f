"""Provides the libraries' programs: downloads Python packages, installs Debian packages if permitted, and compiles the
rank programs.

Owns the reasons why a library is missing; a missing library never ends the run. All files go to `.make/peers/`. A
program is compiled again when its sources, its flags or its compiler have changed.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import sysconfig
import tarfile
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path

from .libraries import BY_NAME, CASTS, CODECS, ENCODED_WITH_HELPERS, FORCED, GROUP_CODECS, HOOKS, WITH_HELPERS

ROOT = Path(__file__).resolve().parents[2]
SOURCES = Path(__file__).resolve().parent / "ranks"
OPTIMISED = ("-O3", "-march=native", "-Wall", "-Wextra")
DOWNLOAD_S = 900
BENCH_S = 900


class Unavailable(Exception):
    """The reason why a library cannot take part, or a section cannot be measured, as a clause for the page."""


@dataclass
class Workshop:
    """The folders, and the result for each library: names that rows of `libraries.py` use, or the reason why it is
    missing."""

    folder: Path
    say: Callable[[str], None]
    # Whether packages may be downloaded and installed.
    online: bool
    # If false, accl's programs are built as tests are.
    is_timed: bool = True
    names: dict[str, str] = field(default_factory=dict)
    missing: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        prefix = Path(sys.prefix)
        self.names |= {
            "python": sys.executable,
            "libraries": str(self.folder),
            "prefix": str(prefix),
            "bin": str(prefix / "bin"),
            "lib": str(prefix / "lib"),
        }

    @property
    def accl(self) -> list[str]:
        """accl's command, from the installed wheel."""
        make_accl_torch(self)
        return [sys.executable, "-m", "torch_accl_cli"]

    def prepare(self, wanted: Iterable[str]) -> None:
        """Builds the libraries' rank programs, or records why one is missing."""
        compile_board(self)
        for name in wanted:
            self.say(f"prepare {BY_NAME[name].title}")
            try:
                MAKERS[name](self)
            except Unavailable as reason:
                self.missing[name] = str(reason)

    def program(self, name: str, compiler: Iterable[str], sources: Iterable[str], flags: Iterable[str]) -> None:
        """Compiles a program from `sources`, with which the library `name` is started."""
        target = self.folder / name
        self.compile(target, [*compiler, *OPTIMISED], [SOURCES / source for source in sources], flags)
        self.names[name] = str(target)

    def compile(self, target: Path, compiler: list[str], sources: list[Path], flags: Iterable[str]) -> None:
        """Runs a compiler unless nothing has changed since the last run."""
        if shutil.which(compiler[0]) is None:
            raise Unavailable(f"`{compiler[0]}` not found")
        command = [*compiler, *map(str, sources), "-o", str(target), *flags]
        headers = sorted(SOURCES.glob("*.h"))
        state = hashed(command, [*sources, *headers])
        stamp = target.with_name(target.name + ".state")
        if target.exists() and stamp.exists() and stamp.read_text() == state:
            return
        finish(command, f"{target.name} does not compile")
        stamp.write_text(state)

    def install(self, *packages: str) -> None:
        """Installs Python packages into the current environment."""
        if all(installed(package) for package in packages):
            return
        if not self.online:
            raise Unavailable(
                f"the Python packages {', '.join(packages)} are not installed, and downloads are disabled"
            )
        self.say(f"download {', '.join(packages)}")
        finish([*PIP, "install", "--quiet", *packages], "pip cannot install the package", DOWNLOAD_S)

    def install_debian(self, program: str, *packages: str) -> None:
        """Installs Debian packages, if this runs as root on Debian."""
        if shutil.which(program):
            return
        how = f"needs the Debian packages {' '.join(packages)}"
        if not self.online or os.geteuid() != 0 or shutil.which("apt-get") is None:
            raise Unavailable(f"`{program}` not found; {how}")
        self.say(f"install {' '.join(packages)}")
        environment = os.environ | {"DEBIAN_FRONTEND": "noninteractive"}
        finish(["apt-get", "update", "-qq"], how, DOWNLOAD_S, environment)
        finish(["apt-get", "install", "-y", "-qq", *packages], how, DOWNLOAD_S, environment)


PIP = (sys.executable, "-m", "pip", "--disable-pip-version-check")


def finish(command: list[str], otherwise: str, limit_s: float = 600, environment: dict[str, str] | None = None) -> str:
    """Runs a command to its end and returns its output."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=limit_s, env=environment)
    except subprocess.TimeoutExpired:
        raise Unavailable(f"{otherwise}: `{command[0]}` took more than {limit_s:.0f} s") from None
    except OSError as why:
        raise Unavailable(f"{otherwise}: {why}") from None
    if done.returncode:
        lines = [line.strip() for line in (done.stderr + done.stdout).splitlines()]
        errors = (
            [line for line in lines if "error" in line.lower()] or [line for line in lines if line] or ["no message"]
        )
        print(done.stderr, file=sys.stderr)
        raise Unavailable(f"{otherwise}: {errors[0]}")
    return done.stdout


def cargo_bench(program: str, argument: str, otherwise: str, environment: dict[str, str] | None = None) -> str:
    """Builds one of accl's microbenchmarks, runs it with an argument and returns its output."""
    command = ["cargo", "bench", "--locked", "--package", "accl-benches", "--bench", program]
    command += ["--manifest-path", str(ROOT / "Cargo.toml"), "--", argument]
    return finish(command, otherwise, BENCH_S, environment)


def hashed(command: list[str], files: list[Path]) -> str:
    """Returns a hash that changes when a command, its program's version or a file changes."""
    version = subprocess.run([command[0], "--version"], capture_output=True).stdout
    state = hashlib.sha256("\0".join(command).encode() + version)
    for file in files:
        state.update(file.read_bytes())
    return state.hexdigest()


def installed(package: str) -> bool:
    """Returns whether a Python package is installed."""
    from importlib import metadata

    try:
        metadata.version(package)
    except metadata.PackageNotFoundError:
        return False
    return True


def compile_board(shop: Workshop) -> None:
    """Compiles the library with which ranks in Python wait for one another on the board."""
    shop.compile(shop.folder / "board.so", ["cc", *OPTIMISED, "-shared", "-fPIC"], [SOURCES / "board.c"], [])


def make_accl(shop: Workshop) -> None:
    """Builds the engine's rank program."""
    target = Path(os.environ.get("CARGO_TARGET_DIR", ROOT / "target"))
    shop.names["accl"] = engine(target, is_timed=shop.is_timed)


def make_accl_unchecked(shop: Workshop) -> None:
    """Builds it without signature checks, in a separate folder: otherwise different flags would make each build
    recompile everything."""
    shop.names["accl_unchecked"] = engine(shop.folder / "accl_unchecked", "--cfg accl_without_signatures")


def engine(target: Path, flags: str = "", is_timed: bool = True) -> str:
    """Builds the engine's rank program below `target`, with `flags` for the compiler in addition to this run's."""
    command = ["cargo", "build", "--release", "--locked", "--package", "accl-benches", "--bin", "accl-peers-rank"]
    if not is_timed:
        # Build as `.ci/bench --test` does, with a benchmark: all dependencies have the same features then, so nothing
        # is built twice.
        command = ["cargo", "test", "--workspace", "--exclude", "accl-py", "--locked", "--bench", "kernel_shares"]
        command += ["--no-run"]
    if shutil.which("cargo") is None:
        raise Unavailable("`cargo` not found")
    environment = os.environ | {"CARGO_TARGET_DIR": str(target)}
    if flags:
        environment["RUSTFLAGS"] = f"{os.environ.get('RUSTFLAGS', '')} {flags}".strip()
    manifest = ["--manifest-path", str(ROOT / "Cargo.toml")]
    finish([*command, *manifest], "the engine does not compile", DOWNLOAD_S, environment)
    return str(target / ("release" if is_timed else "debug") / "accl-peers-rank")


def make_c_baseline(shop: Workshop) -> None:
    """Compiles the C baseline."""
    shop.program("sketch", ["cc"], ["rank.c", "c_baseline.c"], [])


def make_openmpi(shop: Workshop) -> None:
    """Compiles the rank program with Open MPI from Debian."""
    shop.install_debian("mpicc.openmpi", "openmpi-bin", "libopenmpi-dev")
    shop.program("openmpi", ["mpicc.openmpi"], ["rank.c", "mpi.c"], [])


def make_mpich(shop: Workshop) -> None:
    """Compiles the rank program with MPICH from Debian."""
    shop.install_debian("mpicc.mpich", "mpich", "libmpich-dev")
    shop.program("mpich", ["mpicc.mpich"], ["rank.c", "mpi.c"], [])


def make_intelmpi(shop: Workshop) -> None:
    """Compiles the rank program with Intel MPI from the Python package index, without its `mpicc`, which names folders
    that the package lacks."""
    shop.install("impi-rt", "impi-devel")
    flags = prefix_flags("mpi")
    shop.program("intelmpi", ["cc"], ["rank.c", "mpi.c"], flags)


def make_oneccl(shop: Workshop) -> None:
    """Compiles the rank program with oneCCL from the Python package index."""
    shop.install("oneccl", "oneccl-devel")
    driver = shop.folder / "rank.o"
    shop.compile(driver, ["cc", *OPTIMISED, "-c"], [SOURCES / "rank.c"], [])
    flags = [str(driver), *prefix_flags("ccl")]
    shop.program("oneccl", ["c++", "-std=c++17", "-Wno-deprecated-declarations"], ["oneccl.cpp"], flags)


def prefix_flags(library: str) -> list[str]:
    """Returns the flags for a library that a package has installed into this environment."""
    prefix = Path(sys.prefix)
    lib = prefix / "lib"
    return [f"-I{prefix / 'include'}", f"-L{lib}", f"-l{library}", f"-Wl,-rpath,{lib}", f"-Wl,-rpath-link,{lib}"]


def make_accl_torch(shop: Workshop) -> None:
    """Checks for the installed wheel."""
    if not installed("torch-accl"):
        raise Unavailable("the wheel is not installed; run `.ci/install`")


def make_gloo(shop: Workshop) -> None:
    """Checks for torch, which contains gloo."""
    if not installed("torch"):
        raise Unavailable("torch is not installed; run `.ci/venv`")


def make_noop(shop: Workshop) -> None:
    """Compiles a c10d backend against the installed torch."""
    shop.install("ninja")
    extension(shop, "peers_noop", [SOURCES / "noop.cpp"], ["-O2"])


def make_deepspeed(shop: Workshop) -> None:
    """Compiles DeepSpeed's sources from its source distribution, with the flags of its own builder."""
    shop.install("ninja")
    unpacked = shop.folder / "deepspeed"
    if not list(unpacked.glob("deepspeed-*/csrc")):
        if not shop.online:
            raise Unavailable("its sources are missing, and downloads are disabled")
        shop.say("download deepspeed")
        command = [*PIP, "download", "--quiet", "--no-deps", "--no-binary", ":all:"]
        finish([*command, "--dest", str(unpacked), "deepspeed"], "pip cannot download the package", DOWNLOAD_S)
        for archive in unpacked.glob("deepspeed-*.tar.gz"):
            with tarfile.open(archive) as packed:
                packed.extractall(unpacked, filter="data")
    source = max(unpacked.glob("deepspeed-*/csrc"), key=lambda path: path.stat().st_mtime)
    files = [source / "cpu/comm/shm_interface.cpp", source / "cpu/comm/shm.cpp"]
    # The flags of its `ShareMemCommBuilder`.
    extension(shop, "peers_deepspeed", files, ["-O2", "-fopenmp", f"-I{source / 'cpu/includes'}"])
    (shop.folder / "peers_deepspeed" / "version").write_text(source.parent.name.removeprefix("deepspeed-"))


def extension(shop: Workshop, name: str, sources: list[Path], flags: list[str]) -> None:
    """Compiles a torch extension in a separate process, because loading it here would load torch into the driver."""
    folder = shop.folder / name
    folder.mkdir(exist_ok=True)
    arguments = dict(
        name=name,
        sources=list(map(str, sources)),
        extra_cflags=flags,
        build_directory=str(folder),
        is_python_module=False,
    )
    code = f"from torch.utils.cpp_extension import load; load(**{arguments!r}, with_cuda=False)"
    # Ninja is installed next to this interpreter, which may not be on the path.
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    include = sysconfig.get_paths()["include"]
    environment = os.environ | {"PATH": path, "CPATH": include, "MAX_JOBS": "2"}
    finish([sys.executable, "-c", code], f"{name} does not compile", DOWNLOAD_S, environment)


MAKERS: dict[str, Callable[[Workshop], None]] = {
    "accl": make_accl,
    "accl_unchecked": make_accl_unchecked,
    "sketch": make_c_baseline,
    "openmpi": make_openmpi,
    "mpich": make_mpich,
    "intelmpi": make_intelmpi,
    "oneccl": make_oneccl,
    "accl_torch": make_accl_torch,
    "gloo": make_gloo,
    "noop": make_noop,
    "noop_yielding": make_noop,
    "deepspeed": make_deepspeed,
    "oneccl_workers": make_oneccl,
    "deepspeed_threads": make_deepspeed,
    **{one.name: make_accl for one in (*WITH_HELPERS, *ENCODED_WITH_HELPERS)},
    **{one.name: make_accl_torch for one in GROUP_CODECS},
    **{f"accl_{choice}": make_accl_torch for choice in (*FORCED, *CODECS)},
    **{f"gloo_{smaller}": make_gloo for smaller in (*CASTS, *HOOKS)},
}
