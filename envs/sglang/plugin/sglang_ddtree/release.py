"""The release of SGLang that the plugin is written for, and whether an installation is that release, unchanged."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path

RELEASE = "0.5.23"
TABLE = Path(__file__).with_name("release.json")


class WrongRelease(RuntimeError):
    """SGLang is not the one that the plugin is written for; one line that says what was found."""


def hooked_files() -> Mapping[str, str]:
    """sha256 of every file of SGLang that the plugin hooks, subclasses or relies on, by path below site-packages."""
    table: dict[str, dict[str, str]] = json.loads(TABLE.read_text())
    return table["files"]


def check_version() -> None:
    """Raise WrongRelease unless the installed SGLang has the version the plugin is written for."""
    try:
        found = metadata.version("sglang")
    except metadata.PackageNotFoundError:
        raise WrongRelease(f"sglang_ddtree: SGLang is not installed; install sglang=={RELEASE}") from None
    if found.split("+")[0] != RELEASE:
        raise WrongRelease(f"sglang_ddtree is written for SGLang {RELEASE}, but {found} is installed")


def changed_files(site_packages: Path) -> list[str]:
    """The files of an installation that are not those of the release, or missing."""
    return [name for name, sha256 in hooked_files().items() if _sha256(site_packages / name) != sha256]


def _sha256(path: Path) -> str | None:
    try:
        return hashlib.sha256(path.read_bytes()).hexdigest()
    except OSError:
        return None
