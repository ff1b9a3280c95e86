"""What a wheelhouse holds: the manifest beside its wheels."""

from __future__ import annotations

import json
import os
import sysconfig
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from ddtree_bench.environments.key import sha256
from ddtree_bench.environments.recipes import Environment, EnvironmentFailed, environment_name, wheels_tag

SCHEMA = 1
NAME = "manifest.json"


@dataclass(frozen=True)
class Wheel:
    """A wheel of the wheelhouse, by file name; `sha256` is that of its content."""

    name: str
    version: str
    file: str
    sha256: str

    @classmethod
    def of(cls, path: Path) -> Wheel:
        """The wheel in a file, whose name starts with its distribution's name and version."""
        name, version = path.name.split("-")[:2]
        return cls(name.lower().replace("_", "-"), version, path.name, sha256(path))


@dataclass(frozen=True)
class Manifest:
    """A wheelhouse: for which environment, key, Python and platform, with which wheels, patches and source of ours."""

    engine: str
    key: str
    python: str
    platform: str
    wheels: tuple[Wheel, ...]
    patches: Mapping[str, str]
    sources: Mapping[str, str]
    build: str = ""
    schema: int = SCHEMA

    @property
    def environment(self) -> Environment:
        """The engine and its build."""
        return Environment(self.engine, self.build)

    @property
    def name(self) -> str:
        """The name of the environment's folders."""
        return environment_name(self.environment, self.key, self.python)

    @property
    def versions(self) -> dict[str, str]:
        """Version by distribution."""
        return {wheel.name: wheel.version for wheel in self.wheels}

    def write(self, folder: Path) -> Path:
        """Write the manifest into the wheelhouse in one step; returns its path."""
        path = folder / NAME
        partial = path.with_suffix(".partial")
        # The manifest of an engine with one build stays as it was before there were builds, and so do deployments.
        content = {name: value for name, value in asdict(self).items() if (name, value) != ("build", "")}
        with partial.open("w") as file:
            json.dump(content, file, indent=1, sort_keys=True)
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
        return path

    def problems(self, folder: Path, environment: Environment, key: str) -> list[str]:
        """Why the wheelhouse in `folder` is not what `environment` and `key` need here; empty when it is."""
        found = [
            f"{name} is {seen}, wanted {wanted}"
            for name, seen, wanted in (
                ("schema", self.schema, SCHEMA),
                ("engine", self.engine, environment.engine),
                ("build", self.build, environment.build),
                ("key", self.key, key),
                ("python", self.python, wheels_tag(environment)),
                ("platform", self.platform, sysconfig.get_platform()),
            )
            if seen != wanted
        ]
        for wheel in self.wheels:
            path = wheels_folder(folder) / wheel.file
            if not path.is_file():
                found.append(f"{wheel.file} is missing")
            elif sha256(path) != wheel.sha256:
                found.append(f"{wheel.file} has changed")
        return found


def read(folder: Path) -> Manifest:
    """Read the manifest of a wheelhouse; raises EnvironmentFailed when there is none or it cannot be read."""
    path = folder / NAME
    try:
        content = json.loads(path.read_text())
        wheels = tuple(Wheel(**wheel) for wheel in content.pop("wheels"))
        return Manifest(wheels=wheels, **content)
    except FileNotFoundError:
        raise EnvironmentFailed(f"{path}: there is no wheelhouse; build the environment first") from None
    except (ValueError, KeyError, TypeError) as error:
        raise EnvironmentFailed(f"{path}: is no manifest ({error}); build the environment again") from error


def wheels_folder(folder: Path) -> Path:
    """Where the wheels of a wheelhouse lie."""
    return folder / "wheels"
