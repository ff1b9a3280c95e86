"""What workflow tests share: the deployed environment, and a clone in which everything has been measured once."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from clone import ENVIRONMENTS, REPOSITORY, Clone

from ddtree_bench.environments import Environment, environment_key, python_tag
from ddtree_bench.environments.build import build
from ddtree_bench.environments.deploy import deploy
from ddtree_bench.environments.recipes import environment_name
from ddtree_bench.targets.local import LocalLauncher


@pytest.fixture(scope="session")
def deployed(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Build and deploy the reference environment, which is a no-op after `make setup`."""
    reference = Environment("reference")
    key = environment_key(reference, REPOSITORY / "envs")
    wheelhouse = ENVIRONMENTS / environment_name(reference, key, python_tag())
    build(reference, REPOSITORY / "envs", wheelhouse)
    launcher = LocalLauncher(tmp_path_factory.mktemp("leases"), "machine")
    deploy(launcher, wheelhouse, str(ENVIRONMENTS / "installed"))


@pytest.fixture(scope="session")
def measured_once(deployed: None, tmp_path_factory: pytest.TempPathFactory) -> Clone:
    """A clone in which the whole workflow has run; tests work on duplicates of it."""
    clone = Clone.make(tmp_path_factory.mktemp("measured") / "clone")
    clone.snakemake()
    return clone


@pytest.fixture
def measured(measured_once: Clone, tmp_path: Path) -> Iterator[Clone]:
    """A clone of one's own in which everything has been measured."""
    clone = measured_once.duplicate(tmp_path / "clone")
    yield clone
    end_all(clone)


@pytest.fixture
def fresh(deployed: None, tmp_path: Path) -> Iterator[Clone]:
    """A clone in which nothing has been measured yet."""
    clone = Clone.make(tmp_path / "clone")
    yield clone
    end_all(clone)


def end_all(clone: Clone) -> None:
    """Kill what a failed test may have left, so that no other test meets it."""
    left = clone.processes()
    for process in left:
        process.kill()
    psutil.wait_procs(left, timeout=10)
