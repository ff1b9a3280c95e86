"""Whether a target can take what the plan deploys there: platform, driver, and room below its root."""

from __future__ import annotations

import platform
from collections.abc import Iterator, Mapping, Sequence

from ddtree_bench.environments import manifest, target_fit
from ddtree_bench.environments.needs import NO_GLIBC, Needs, needs_of
from ddtree_bench.environments.recipes import CLIENT, Environment, is_adopted, recipe_of
from ddtree_bench.target_checks.findings import Finding
from ddtree_bench.target_checks.planned import PlannedTarget
from ddtree_bench.targets.launcher import Launcher

GIB = 2**30

AT_LEAST_GIB: Mapping[Environment, float] = {
    Environment("reference"): 1.0,
    Environment(CLIENT): 0.3,
    Environment("sglang", "cpu"): 2.5,
    Environment("sglang", "cuda13"): 9.0,
}
"""Room that environments take in any case, GiB, for those whose wheels are not here yet to be looked at."""


def check_room(target: PlannedTarget, launcher: Launcher, root: str, missing: Sequence[str]) -> Iterator[Finding]:
    """See that the environments of the engines that are `missing` on a target fit there; `root` is made if need be."""
    if not missing:
        yield target.finding("room", "ok", f"{root}: all is deployed")
        return
    facts = target_fit.ask(launcher, root, f"{root}/none")
    problems = dict.fromkeys(
        problem
        for engine in missing
        for problem in target_fit.problems(
            facts, root, _needs(target, engine, not launcher.shares_files), driver_may_be_missing=launcher.shares_files
        )
    )
    yield from (target.finding("room", "problem", problem) for problem in problems)
    if not problems:
        yield target.finding("room", "ok", f"{root}: {facts.free_bytes / GIB:.0f} GiB are free")


def _needs(target: PlannedTarget, engine: str, sent: bool) -> Needs:
    """What an environment needs by its wheels; where they are not here yet, as far as its recipe tells."""
    wheelhouse = target.project.manifest(target.name, engine).parent
    if (wheelhouse / manifest.NAME).exists():
        return needs_of(wheelhouse, manifest.read(wheelhouse), sent)
    environment = target.project.environment(target.name, engine)
    return Needs(
        machines={} if is_adopted(environment) else {f"the environment of {environment}": platform.machine()},
        glibc=NO_GLIBC,
        glibc_wheel="",
        driver=recipe_of(environment).driver,
        n_bytes=int(AT_LEAST_GIB.get(environment, 0) * GIB),
        n_files=0,
    )
