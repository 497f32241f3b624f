"""Programs of the Rust benches, in the release profile. Owns building and finding them."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path


def built(tree: Path, bench: str) -> str:
    """Builds a bench in a source tree, which has its own build directory, and returns the path of the program.

    Raises:
        CalledProcessError: the build fails; cargo has printed the cause.
    """
    command = ["cargo", "bench", "--locked", "--package", "accl-benches", "--bench", bench, "--no-run"]
    environment = {name: value for name, value in os.environ.items() if name != "CARGO_TARGET_DIR"}
    done = subprocess.run(
        [*command, "--message-format=json"], cwd=tree, env=environment, check=True, stdout=subprocess.PIPE, text=True
    )
    messages = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    [program] = {message["executable"] for message in messages if message.get("target", {}).get("name") == bench}
    return str(program)
