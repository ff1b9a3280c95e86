"""What each build of each engine is made of, and how the place of an environment is called."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from ddtree_bench import keys

ADOPTED = "adopted"

CLIENT = "client"
"""The load client where it runs on the target, beside the engines: its packages alone, for our code comes by itself."""

PURE_TAG = "py3"
"""The tag of environments whose wheels run on any Python."""

LINUX = "linux-x86_64"
"""The platform of SGLang's locks, in the words of sysconfig.get_platform()."""


class EnvironmentFailed(RuntimeError):
    """An environment could not be built or deployed; the message names the file or package and the remedy."""


class Environment(NamedTuple):
    """What servers run in: an engine, and which build of it; the build is "" where there is but one.

    What the load client runs in on a target has the engine CLIENT.
    """

    engine: str
    build: str = ""

    def __str__(self) -> str:
        return f"{self.engine} ({self.build})" if self.build else self.engine


@dataclass(frozen=True)
class Recipe:
    """What of an engine's folder an environment is made from.

    `lock` pins wheels of the index by hash, `torch` pins torch by version, since its builds differ by platform.
    `sources` become the wheels that we build ourselves, of `projects`. `patched` is the distribution that the patches
    are applied to. `pythons` are the Pythons that all wheels of the lock exist for, `platform` the only platform.
    `driver` is the oldest branch of NVIDIA's driver that its CUDA runs on, None where no GPU is used.
    """

    projects: tuple[str, ...]
    sources: tuple[str, ...]
    lock: str | None = None
    torch: str | None = None
    patched: str | None = None
    pythons: tuple[str, ...] = ("cp311", "cp312", "cp313")
    platform: str | None = None
    driver: int | None = None

    @property
    def pins(self) -> tuple[str, ...]:
        """The files that pin what comes from the index."""
        return tuple(name for name in (self.lock, self.torch) if name is not None)


RECIPES: Mapping[Environment, Recipe] = {
    Environment("reference"): Recipe(
        projects=(".",), sources=("pyproject.toml", "ddtree_reference"), lock="requirements.lock", torch="torch.in"
    ),
    Environment("sglang", "cpu"): Recipe(
        projects=("plugin", "cpu_platform"),
        sources=("plugin", "cpu_platform"),
        lock="cpu.lock",
        torch="cpu-torch.in",
        patched="sglang",
        platform=LINUX,
    ),
    Environment("sglang", "cuda13"): Recipe(
        projects=("plugin",),
        sources=("plugin",),
        lock="cuda13.lock",
        patched="sglang",
        # outlines-core 0.1.26, which the release pins, has no wheel for later ones.
        pythons=("cp311", "cp312"),
        platform=LINUX,
        # CUDA 13.x, minor versions included: NVIDIA, CUDA Compatibility, "Minor Version Compatibility", table 1.
        driver=580,
    ),
    Environment("sglang", ADOPTED): Recipe(projects=("plugin",), sources=("plugin",)),
    Environment("sglang", f"{ADOPTED}-cpu"): Recipe(
        projects=("plugin", "cpu_platform"), sources=("plugin", "cpu_platform")
    ),
    Environment(CLIENT): Recipe(projects=(), sources=(), lock="client.lock", platform=LINUX),
}


def recipe_of(environment: Environment) -> Recipe:
    """Return the recipe of an environment; raises EnvironmentFailed for an engine or a build that does not exist."""
    found = RECIPES.get(environment)
    if found is not None:
        return found
    engines = sorted({known.engine for known in RECIPES} - {CLIENT})
    if environment.engine not in engines:
        raise EnvironmentFailed(f"engine: {environment.engine!r} does not exist; engines: {', '.join(engines)}")
    builds = [known.build for known in RECIPES if known.engine == environment.engine and known.build]
    raise EnvironmentFailed(
        f"engine {environment.engine}: has no build {environment.build!r}; builds: {', '.join(builds) or 'one alone'}"
    )


def environment_of(engine: str, build: str, adopted: bool) -> Environment:
    """Return the environment of an engine on a target whose configuration wants a build, or adopts an installation."""
    if engine != "sglang":
        return Environment(engine)
    if adopted:
        return Environment(engine, f"{ADOPTED}-cpu" if build == "cpu" else ADOPTED)
    return Environment(engine, build)


def missing_wheels(environment: Environment, tag: str, platform: str) -> str | None:
    """Why an environment cannot be had for a Python, such as cp311, and a platform, with the remedy; None if it can."""
    recipe = recipe_of(environment)
    if not is_adopted(environment) and tag not in recipe.pythons:
        return f"not all of its wheels exist for {tag}; run the workflow with a Python of {', '.join(recipe.pythons)}"
    if recipe.platform not in (None, platform):
        return (
            f"its wheels are for {recipe.platform}, and this machine is {platform}; run the workflow on such a "
            "machine, or name an installation of the target in `adopt`"
        )
    return None


def is_adopted(environment: Environment) -> bool:
    """Whether an environment puts our wheels beside an installation that is there already."""
    return environment.build.startswith(ADOPTED)


def python_tag() -> str:
    """The tag of the running Python, such as cp311."""
    return f"cp{sys.version_info.major}{sys.version_info.minor}"


def wheels_tag(environment: Environment) -> str:
    """The Python that an environment's wheels are for: the running one, or any where none but ours are in it."""
    return PURE_TAG if is_adopted(environment) else python_tag()


def environment_name(environment: Environment, key: str, tag: str) -> str:
    """The name of an environment's folders: engine, build if it has one, short key and the wheels' tag."""
    return "-".join(part for part in (*environment, keys.short(key), tag) if part)


def adopted_suffix(adopt: str | None) -> str:
    """What tells the deployments that adopt different installations of a target apart; "" where none is adopted."""
    return "" if adopt is None else f"-{keys.digest(adopt)[:6]}"


def build_named(name: str) -> str:
    """The build in an environment's name without its engine; "" where there is none."""
    return name.rsplit("-", 2)[0] if name.count("-") > 1 else ""
