"""What unit tests share: a launcher with a lease of its own, and the tables of small simulated results."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pandas as pd
import pytest
from hypothesis import settings
from store_factory import SMALL, build

from ddtree_bench.targets.local import LocalLauncher

# How long an example takes says what else the machine does.
settings.register_profile("unhurried", deadline=None)
settings.load_profile("unhurried")


@pytest.fixture(autouse=True)
def common_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Configurations are checked as on a machine for which there are wheels of every build."""
    monkeypatch.setattr("ddtree_bench.config.checks.python_tag", lambda: "cp312")
    monkeypatch.setattr("ddtree_bench.config.checks.get_platform", lambda: "linux-x86_64")


@pytest.fixture
def launcher(tmp_path: Path) -> Iterator[LocalLauncher]:
    """A local launcher that holds its lease and is stopped at the end."""
    launcher = LocalLauncher(tmp_path / "leases", "test")
    with launcher.acquire("test", 0, print):
        yield launcher
        launcher.stop()


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> dict[str, pd.DataFrame]:
    """The tables of small results at two concurrencies."""
    return build(tmp_path_factory.mktemp("demo"), replace(SMALL, concurrencies=(1, 2)))
