"""Gets what the contenders need: downloads into the own environment, Debian packages when this may install them, and
compiles the rank programs. Owns the reasons why a contender is not there; never ends the run for one that is not.

All goes to `.make/peers/`. A program is compiled again when its sources, its flags or its compiler have changed.
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

from .contenders import BY_NAME, CASTS, CODECS, ENCODED_WITH_HELPERS, FORCED, GROUP_CODECS, HOOKS, WITH_HELPERS

ROOT = Path(__file__).resolve().parents[2]
SOURCES = Path(__file__).resolve().parent / "ranks"
OPTIMISED = ("-O3", "-march=native", "-Wall", "-Wextra")
DOWNLOAD_S = 900
BENCH_S = 900


class Unavailable(Exception):
    """Why a contender cannot take part, or a section be measured, as a clause for the page."""


@dataclass
class Workshop:
    """The folders, and what has come of each contender: names that rows of `contenders.py` use, or a reason."""

    folder: Path
    say: Callable[[str], None]
    # Whether packages may be downloaded and installed.
    online: bool
    # Without, our own programs are built as tests are.
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
        """Our own command, from the installed wheel."""
        make_accl_torch(self)
        return [sys.executable, "-m", "torch_accl_cli"]

    def prepare(self, wanted: Iterable[str]) -> None:
        """Makes the rank programs of the contenders, or notes why one is missing."""
        compile_board(self)
        for name in wanted:
            self.say(f"prepare {BY_NAME[name].title}")
            try:
                MAKERS[name](self)
            except Unavailable as reason:
                self.missing[name] = str(reason)

    def program(self, name: str, compiler: Iterable[str], sources: Iterable[str], flags: Iterable[str]) -> None:
        """Compiles a program of `sources`, which the contender `name` is started with."""
        target = self.folder / name
        self.compile(target, [*compiler, *OPTIMISED], [SOURCES / source for source in sources], flags)
        self.names[name] = str(target)

    def compile(self, target: Path, compiler: list[str], sources: list[Path], flags: Iterable[str]) -> None:
        """Runs a compiler unless nothing has changed since."""
        if shutil.which(compiler[0]) is None:
            raise Unavailable(f"`{compiler[0]}` is not there")
        command = [*compiler, *map(str, sources), "-o", str(target), *flags]
        headers = sorted(SOURCES.glob("*.h"))
        state = hashed(command, [*sources, *headers])
        stamp = target.with_name(target.name + ".state")
        if target.exists() and stamp.exists() and stamp.read_text() == state:
            return
        finish(command, f"{target.name} does not compile")
        stamp.write_text(state)

    def install(self, *packages: str) -> None:
        """Python packages into the environment that this runs in, without what they only need for other uses."""
        if all(installed(package) for package in packages):
            return
        if not self.online:
            raise Unavailable(f"the Python packages {', '.join(packages)} are not installed, and nothing is downloaded")
        self.say(f"download {', '.join(packages)}")
        finish([*PIP, "install", "--quiet", *packages], "pip cannot install it", DOWNLOAD_S)

    def install_debian(self, program: str, *packages: str) -> None:
        """Debian packages, when this is root on Debian."""
        if shutil.which(program):
            return
        how = f"needs the Debian packages {' '.join(packages)}"
        if not self.online or os.geteuid() != 0 or shutil.which("apt-get") is None:
            raise Unavailable(f"`{program}` is not there; {how}")
        self.say(f"install {' '.join(packages)}")
        environment = os.environ | {"DEBIAN_FRONTEND": "noninteractive"}
        finish(["apt-get", "update", "-qq"], how, DOWNLOAD_S, environment)
        finish(["apt-get", "install", "-y", "-qq", *packages], how, DOWNLOAD_S, environment)


PIP = (sys.executable, "-m", "pip", "--disable-pip-version-check")


def finish(command: list[str], otherwise: str, limit_s: float = 600, environment: dict[str, str] | None = None) -> str:
    """Runs a command to its end and returns what it printed."""
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
    """Builds one of our microbenchmarks, runs it with an argument and returns what it printed."""
    command = ["cargo", "bench", "--locked", "--package", "accl-benches", "--bench", program]
    command += ["--manifest-path", str(ROOT / "Cargo.toml"), "--", argument]
    return finish(command, otherwise, BENCH_S, environment)


def hashed(command: list[str], files: list[Path]) -> str:
    """Changes when a command, its program's version or a file changes."""
    version = subprocess.run([command[0], "--version"], capture_output=True).stdout
    state = hashlib.sha256("\0".join(command).encode() + version)
    for file in files:
        state.update(file.read_bytes())
    return state.hexdigest()


def installed(package: str) -> bool:
    """Whether a Python package is there."""
    from importlib import metadata

    try:
        metadata.version(package)
    except metadata.PackageNotFoundError:
        return False
    return True


def compile_board(shop: Workshop) -> None:
    """What ranks in Python meet with."""
    shop.compile(shop.folder / "board.so", ["cc", *OPTIMISED, "-shared", "-fPIC"], [SOURCES / "board.c"], [])


def make_accl(shop: Workshop) -> None:
    """The engine's rank program."""
    target = Path(os.environ.get("CARGO_TARGET_DIR", ROOT / "target"))
    shop.names["accl"] = engine(target, is_timed=shop.is_timed)


def make_accl_unchecked(shop: Workshop) -> None:
    """The same without signature checks, in a folder of its own: other flags would have each build compile all anew."""
    shop.names["accl_unchecked"] = engine(shop.folder / "accl_unchecked", "--cfg accl_without_signatures")


def engine(target: Path, flags: str = "", is_timed: bool = True) -> str:
    """Builds the engine's rank program below `target`, with these flags of the compiler besides those of this run."""
    command = ["cargo", "build", "--release", "--locked", "--package", "accl-benches", "--bin", "accl-peers-rank"]
    if not is_timed:
        # As `.ci/bench --test` builds it, with a benchmark: the same features of all that is below, so nothing is built twice.
        command = ["cargo", "test", "--workspace", "--exclude", "accl-py", "--locked", "--bench", "kernel_shares"]
        command += ["--no-run"]
    if shutil.which("cargo") is None:
        raise Unavailable("`cargo` is not there")
    environment = os.environ | {"CARGO_TARGET_DIR": str(target)}
    if flags:
        environment["RUSTFLAGS"] = f"{os.environ.get('RUSTFLAGS', '')} {flags}".strip()
    manifest = ["--manifest-path", str(ROOT / "Cargo.toml")]
    finish([*command, *manifest], "the engine does not compile", DOWNLOAD_S, environment)
    return str(target / ("release" if is_timed else "debug") / "accl-peers-rank")


def make_sketch(shop: Workshop) -> None:
    """The sketch."""
    shop.program("sketch", ["cc"], ["rank.c", "sketch.c"], [])


def make_openmpi(shop: Workshop) -> None:
    """From Debian."""
    shop.install_debian("mpicc.openmpi", "openmpi-bin", "libopenmpi-dev")
    shop.program("openmpi", ["mpicc.openmpi"], ["rank.c", "mpi.c"], [])


def make_mpich(shop: Workshop) -> None:
    """From Debian."""
    shop.install_debian("mpicc.mpich", "mpich", "libmpich-dev")
    shop.program("mpich", ["mpicc.mpich"], ["rank.c", "mpi.c"], [])


def make_intelmpi(shop: Workshop) -> None:
    """From the Python package index; its own `mpicc` names folders that the package does not have."""
    shop.install("impi-rt", "impi-devel")
    flags = prefix_flags("mpi")
    shop.program("intelmpi", ["cc"], ["rank.c", "mpi.c"], flags)


def make_oneccl(shop: Workshop) -> None:
    """From the Python package index."""
    shop.install("oneccl", "oneccl-devel")
    driver = shop.folder / "rank.o"
    shop.compile(driver, ["cc", *OPTIMISED, "-c"], [SOURCES / "rank.c"], [])
    flags = [str(driver), *prefix_flags("ccl")]
    shop.program("oneccl", ["c++", "-std=c++17", "-Wno-deprecated-declarations"], ["oneccl.cpp"], flags)


def prefix_flags(library: str) -> list[str]:
    """For a library that a package has put into this environment."""
    prefix = Path(sys.prefix)
    lib = prefix / "lib"
    return [f"-I{prefix / 'include'}", f"-L{lib}", f"-l{library}", f"-Wl,-rpath,{lib}", f"-Wl,-rpath-link,{lib}"]


def make_accl_torch(shop: Workshop) -> None:
    """The installed wheel."""
    if not installed("torch-accl"):
        raise Unavailable("the wheel is not installed; `.ci/install` does it")


def make_gloo(shop: Workshop) -> None:
    """Part of torch."""
    if not installed("torch"):
        raise Unavailable("torch is not installed; `.ci/venv` does it")


def make_noop(shop: Workshop) -> None:
    """A c10d backend, compiled against the installed torch."""
    shop.install("ninja")
    extension(shop, "peers_noop", [SOURCES / "noop.cpp"], ["-O2"])


def make_deepspeed(shop: Workshop) -> None:
    """Its own sources, from the source distribution, with the flags of its own builder."""
    shop.install("ninja")
    unpacked = shop.folder / "deepspeed"
    if not list(unpacked.glob("deepspeed-*/csrc")):
        if not shop.online:
            raise Unavailable("its sources are not there, and nothing is downloaded")
        shop.say("download deepspeed")
        command = [*PIP, "download", "--quiet", "--no-deps", "--no-binary", ":all:"]
        finish([*command, "--dest", str(unpacked), "deepspeed"], "pip cannot download it", DOWNLOAD_S)
        for archive in unpacked.glob("deepspeed-*.tar.gz"):
            with tarfile.open(archive) as packed:
                packed.extractall(unpacked, filter="data")
    source = max(unpacked.glob("deepspeed-*/csrc"), key=lambda path: path.stat().st_mtime)
    files = [source / "cpu/comm/shm_interface.cpp", source / "cpu/comm/shm.cpp"]
    # As its `ShareMemCommBuilder` has them.
    extension(shop, "peers_deepspeed", files, ["-O2", "-fopenmp", f"-I{source / 'cpu/includes'}"])
    (shop.folder / "peers_deepspeed" / "version").write_text(source.parent.name.removeprefix("deepspeed-"))


def extension(shop: Workshop, name: str, sources: list[Path], flags: list[str]) -> None:
    """Compiles a torch extension in a process of its own: loading it here would load torch into the driver."""
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
    # Ninja is beside this interpreter, which need not be on the path.
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    include = sysconfig.get_paths()["include"]
    environment = os.environ | {"PATH": path, "CPATH": include, "MAX_JOBS": "2"}
    finish([sys.executable, "-c", code], f"{name} does not compile", DOWNLOAD_S, environment)


MAKERS: dict[str, Callable[[Workshop], None]] = {
    "accl": make_accl,
    "accl_unchecked": make_accl_unchecked,
    "sketch": make_sketch,
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
