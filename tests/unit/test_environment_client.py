"""The load client's environment on a target: what it imports, at the versions that it runs on here."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from packaging.markers import Marker

from ddtree_bench.environments import Environment
from ddtree_bench.environments.build import pinned
from ddtree_bench.environments.recipes import CLIENT, RECIPES, environment_of

REPOSITORY = Path(__file__).parents[2]
LOCK = REPOSITORY / "envs" / "client" / "client.lock"

IMPORTED = """\
import importlib.metadata, json, sys
before = set(sys.modules)
import ddtree_bench.load.on_target
owners = importlib.metadata.packages_distributions()
modules = {name.partition(".")[0] for name in sys.modules if name not in before}
print(json.dumps(sorted({owner for module in modules for owner in owners.get(module, ())})))
"""


def versions(lock: Path, python: str) -> dict[str, str]:
    """Version by distribution of the pins of a lock that are for a Python, as 3.11, on Linux."""
    found = {}
    for pin in pinned(lock):
        requirement, _, marker = pin.partition(" ; ")
        name, _, version = requirement.partition("==")
        names = {"python_version": python, "python_full_version": f"{python}.0", "sys_platform": "linux"}
        names |= {"platform_machine": "x86_64", "platform_python_implementation": "CPython", "os_name": "posix"}
        if not marker or Marker(marker).evaluate(names):
            found[name] = version
    return found


def test_its_versions_are_those_of_the_workflow() -> None:
    for python in ("3.11", "3.12", "3.13"):
        locked, ours = versions(LOCK, python), versions(REPOSITORY / "requirements.lock", python)
        assert locked and locked == {name: ours[name] for name in locked}


def test_all_that_the_client_imports_is_in_it() -> None:
    imported = json.loads(subprocess.check_output([sys.executable, "-c", IMPORTED], text=True))
    locked = set(versions(LOCK, f"{sys.version_info.major}.{sys.version_info.minor}"))
    names = {name.lower().replace("_", "-") for name in imported} - {"ddtree-bench"}
    assert {"pandas", "requests", "pyarrow", "tokenizers"} <= names <= locked


def test_nothing_of_ours_is_built_into_it() -> None:
    assert environment_of(CLIENT, "cuda13", adopted=True) == Environment(CLIENT)
    assert RECIPES[Environment(CLIENT)].sources == ()
