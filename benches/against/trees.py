"""Source trees of two commits, and wheels built from them. Owns their folders, which are kept for later runs."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
BUILDS = ROOT / "target" / "against"


def git(*words: str) -> str:
    """Returns the output of a git command."""
    return subprocess.run(["git", *words], cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True).stdout.strip()


def checked_out(revision: str) -> Path:
    """Returns a folder with the files of a commit."""
    commit = git("rev-parse", "--verify", f"{revision}^{{commit}}")
    tree = BUILDS / commit[:12]
    if not tree.exists():
        BUILDS.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=BUILDS) as folder:
            archive = Path(folder, "archive.tar")
            git("archive", "--output", str(archive), commit)
            files = Path(folder, "files")
            files.mkdir()
            subprocess.run(["tar", "-xf", archive, "-C", files], check=True)
            files.rename(tree)
    return tree


@cache
def installed(tree: Path) -> Path:
    """Returns a folder with the packages of a tree's release wheel, for PYTHONPATH. The wheel is built for the torch of
    this interpreter's environment.

    Raises:
        CalledProcessError: the build or the installation fails; its output has the cause.
    """
    own = ("ACCL_WHEEL", "CARGO_TARGET_DIR", "PYTHONPATH")
    environment = {name: value for name, value in os.environ.items() if name not in own}
    built = subprocess.run(
        [tree / ".ci" / "wheel"],
        cwd=tree,
        env=environment | {"VENV": sys.prefix},
        check=True,
        stdout=subprocess.PIPE,
        text=True,
    )
    wheel = Path(tree, built.stdout.splitlines()[-1])
    site = BUILDS / "sites" / ("here" if tree == ROOT else tree.name)
    shutil.rmtree(site, ignore_errors=True)
    install = [sys.executable, "-m", "pip", "--disable-pip-version-check", "install", "--quiet", "--no-deps"]
    subprocess.run([*install, "--target", site, wheel], env=environment, check=True)
    return site
