"""Make a lock file: every wheel that a set of requirements needs on Linux x86_64, by version and sha256.

    python -m ddtree_bench.environments.lock envs/sglang/cpu.in

writes envs/sglang/cpu.lock, and leaves out what envs/sglang/cpu-left-out.in names, where there is one. `--pythons`
says for which Pythons, where not for all that the workflow runs on. Needs `uv`.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import tomllib
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from ddtree_bench.environments.recipes import EnvironmentFailed

PYTHONS = ("3.11", "3.12", "3.13")
PLATFORM = "x86_64-manylinux_2_34"
"""The oldest C library for which SGLang's own wheels are made."""

HEADER = """\
# Made from {source} by `python -m ddtree_bench.environments.lock`.
# Wheels for Linux x86_64 with glibc 2.34 or newer, Python {pythons}.
"""


class Pin(NamedTuple):
    """A distribution at a version."""

    name: str
    version: str


Resolution = Mapping[Pin, frozenset[str]]
"""The wheels' sha256 of every pin, for one Python."""


def resolve(requirements: Path, left_out: Path | None, python: str) -> Resolution:
    """Ask the index for what that `requirements` need on a Python. Raises EnvironmentFailed in the resolver's words."""
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "pylock.toml"
        argv = [_uv(), "pip", "compile", "--quiet", "--format", "pylock.toml", "--only-binary", ":all:"]
        argv += ["--python-version", python, "--python-platform", PLATFORM, "--output-file", str(output)]
        argv += ["--excludes", str(left_out)] if left_out else []
        result = subprocess.run([*argv, str(requirements)], capture_output=True, text=True, check=False)
        if result.returncode != 0:
            raise EnvironmentFailed(f"{requirements}: cannot be resolved for Python {python}: {result.stderr.strip()}")
        return parse(output.read_text())


def parse(pylock: str) -> Resolution:
    """Read the pins and their wheels' sha256 from the text of a pylock.toml."""
    return {
        Pin(package["name"], package["version"]): frozenset(w["hashes"]["sha256"] for w in package["wheels"])
        for package in tomllib.loads(pylock)["packages"]
    }


def lock_text(source: str, resolutions: Mapping[str, Resolution]) -> str:
    """Return the lock of what was resolved for each Python: pip's requirements with hashes, none of any index.

    A pin that not every Python needs has a marker with those that do.
    """
    pythons: dict[Pin, list[str]] = defaultdict(list)
    hashes: dict[Pin, set[str]] = defaultdict(set)
    for python, resolution in resolutions.items():
        for pin, digests in resolution.items():
            pythons[pin].append(python)
            hashes[pin] |= digests
    header = HEADER.format(source=source, pythons=", ".join(resolutions))
    return header + "".join(
        _entry(pin, sorted(hashes[pin]), [] if len(pythons[pin]) == len(resolutions) else pythons[pin])
        for pin in sorted(pythons)
    )


def _entry(pin: Pin, hashes: Sequence[str], pythons: Sequence[str]) -> str:
    marker = " or ".join(f'python_version == "{python}"' for python in pythons)
    requirement = f"{pin.name}=={pin.version}" + (f" ; {marker}" if marker else "")
    return " \\\n".join([requirement, *(f"    --hash=sha256:{digest}" for digest in hashes)]) + "\n"


def _uv() -> str:
    found = os.environ.get("UV") or shutil.which("uv")
    if found is None:
        raise EnvironmentFailed("uv: is not on PATH; `pip install uv`, or set UV to where it is")
    return found


def main(arguments: Sequence[str]) -> None:
    """Write the lock file beside a file of requirements."""
    parser = argparse.ArgumentParser(prog="python -m ddtree_bench.environments.lock", description=__doc__)
    parser.add_argument("requirements", type=Path)
    parser.add_argument("--pythons", nargs="+", default=PYTHONS)
    options = parser.parse_args(arguments)
    requirements: Path = options.requirements
    left_out = requirements.with_name(f"{requirements.stem}-left-out.in")
    excluded = left_out if left_out.exists() else None
    resolutions = {python: resolve(requirements, excluded, python) for python in options.pythons}
    requirements.with_suffix(".lock").write_text(lock_text(requirements.name, resolutions))


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except EnvironmentFailed as error:
        sys.exit(f"error: {error}")
