"""What a wheelhouse asks of the machine that it is installed on: read from its wheels before any of them is sent."""

from __future__ import annotations

import re
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ddtree_bench.environments import manifest
from ddtree_bench.environments.manifest import Manifest
from ddtree_bench.environments.recipes import EnvironmentFailed, recipe_of

LEGACY_GLIBC = {"manylinux1": (2, 5), "manylinux2010": (2, 12), "manylinux2014": (2, 17)}
"""The C library of the tags that were names before they were versions (PEP 600)."""

PLATFORM = re.compile(r"(?P<libc>linux|manylinux1|manylinux20\d\d|manylinux_(?P<version>\d+_\d+))_(?P<machine>\w+)")
NO_GLIBC = (0, 0)

SPARE_BYTES = 128 * 2**20
"""For an interpreter that may have to be sent, and for what else grows there meanwhile."""


@dataclass(frozen=True)
class WheelPlatform:
    """What a wheel runs on: the machine, as `uname -m` calls it, and the oldest glibc, major and minor."""

    machine: str
    glibc: tuple[int, int]


@dataclass(frozen=True)
class Needs:
    """What a machine must have for a wheelhouse.

    Attributes
    ----------
    machines : dict
        Machine by wheel, for wheels that hold machine code.
    glibc : tuple of int
        The oldest C library, major and minor; (0, 0) where none is asked for.
    glibc_wheel : str
        The wheel that asks for it.
    driver : int or None
        The oldest branch of NVIDIA's driver.
    n_bytes, n_files : int
        Room for what is in the wheels and, where they are sent, for the wheels themselves.
    """

    machines: dict[str, str]
    glibc: tuple[int, int]
    glibc_wheel: str
    driver: int | None
    n_bytes: int
    n_files: int


def needs_of(wheelhouse: Path, built: Manifest, sent: bool) -> Needs:
    """Return what the machine must have on which a wheelhouse is installed; `sent` when its wheels are sent there.

    Raises EnvironmentFailed for a wheel that is damaged.
    """
    wheels = [manifest.wheels_folder(wheelhouse) / wheel.file for wheel in built.wheels]
    platforms = {path.name: platform for path in wheels if (platform := wheel_platform(path.name)) is not None}
    glibc_wheel = max(platforms, key=lambda name: platforms[name].glibc, default="")
    n_bytes, n_files = _unpacked(wheels)
    return Needs(
        machines={name: platform.machine for name, platform in platforms.items()},
        glibc=platforms[glibc_wheel].glibc if glibc_wheel else NO_GLIBC,
        glibc_wheel=glibc_wheel,
        driver=recipe_of(built.environment).driver,
        n_bytes=n_bytes + SPARE_BYTES + (sum(path.stat().st_size for path in wheels) if sent else 0),
        n_files=len(wheels) + n_files,
    )


def wheel_platform(name: str) -> WheelPlatform | None:
    """Return what a wheel, by its file's name, runs on; None for one that runs on any machine.

    Of several platforms that it names, which are alternatives, it is the one that asks for the oldest glibc.
    """
    tags = name.removesuffix(".whl").rpartition("-")[2].split(".")
    found = [WheelPlatform(match["machine"], _glibc(match)) for tag in tags if (match := PLATFORM.fullmatch(tag))]
    return min(found, key=lambda platform: platform.glibc, default=None)


def _glibc(match: re.Match[str]) -> tuple[int, int]:
    if match["version"] is not None:
        major, minor = match["version"].split("_")
        return int(major), int(minor)
    return LEGACY_GLIBC.get(match["libc"], NO_GLIBC)


def _unpacked(wheels: Sequence[Path]) -> tuple[int, int]:
    """Bytes and files of what is in wheels; each module is compiled into another file of about its size."""
    sizes: list[int] = []
    for path in wheels:
        try:
            with zipfile.ZipFile(path) as archive:
                items = archive.infolist()
        except zipfile.BadZipFile as error:
            raise EnvironmentFailed(f"{path}: is damaged ({error}); build the environment again") from error
        sizes += [item.file_size for item in items]
        sizes += [item.file_size for item in items if item.filename.endswith(".py")]
    return sum(sizes), len(sizes)
