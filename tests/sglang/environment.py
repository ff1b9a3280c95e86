"""The CPU environment of SGLang that the tests share with the workflow: built and deployed once."""

from __future__ import annotations

import tempfile
from functools import cache
from pathlib import Path

from ddtree_bench.environments import Environment, environment_key
from ddtree_bench.environments.build import build
from ddtree_bench.environments.deploy import deploy
from ddtree_bench.environments.recipes import environment_name, wheels_tag
from ddtree_bench.project import Folders
from ddtree_bench.targets.local import LocalLauncher

REPOSITORY = Path(__file__).parents[2]
ENGINES = REPOSITORY / "envs"
CPU = Environment("sglang", "cpu")


@cache
def wheelhouse() -> Path:
    """Build the wheelhouse where the workflow has its own, which is a no-op when it is there; returns its folder."""
    name = environment_name(CPU, environment_key(CPU, ENGINES), wheels_tag(CPU))
    folder = (Folders.below(REPOSITORY / "results").environments / name).absolute()
    build(CPU, ENGINES, folder)
    return folder


@cache
def sglang_python() -> Path:
    """The interpreter of the deployed CPU environment, which is built and deployed on the first call."""
    folder = wheelhouse()
    with tempfile.TemporaryDirectory() as leases:
        launcher = LocalLauncher(Path(leases), "machine")
        receipt = deploy(launcher, folder, str(folder.parent / "installed"))
    return Path(receipt["python"])
