"""Where the built programs are. `cargo xtask test` says it; alone, cargo is asked, so that a target directory of the
user's own is found as well."""

import json
import os
import subprocess
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]


@cache
def binaries() -> Path:
    """The folder of the release binaries."""
    if given := os.environ.get("TETHER_BIN_DIR"):
        return Path(given)
    command = [os.environ.get("CARGO", "cargo"), "metadata", "--format-version", "1", "--no-deps", "--offline"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True, timeout=120)
    return Path(json.loads(done.stdout)["target_directory"]) / "release"


def binary(name: str) -> Path:
    path = binaries() / name
    assert path.is_file(), f"{path} is not built; run `cargo build --release`"
    return path
