"""Programs of the Rust benches, built as they are released. Owns how one is asked for and found."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path


def built(tree: Path, bench: str) -> str:
    """The program of a bench in a source tree, which has a build directory of its own.

    Raises:
        CalledProcessError: it cannot be built; cargo has said why.
    """
    command = ["cargo", "bench", "--locked", "--package", "accl-benches", "--bench", bench, "--no-run"]
    environment = {name: value for name, value in os.environ.items() if name != "CARGO_TARGET_DIR"}
    done = subprocess.run(
        [*command, "--message-format=json"], cwd=tree, env=environment, check=True, stdout=subprocess.PIPE, text=True
    )
    messages = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    [program] = {message["executable"] for message in messages if message.get("target", {}).get("name") == bench}
    return program
