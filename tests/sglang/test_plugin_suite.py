"""The tests of the packages below envs/sglang, run where they belong: by the SGLang environment's interpreter."""

from __future__ import annotations

import os
import re
import subprocess
from importlib import metadata
from pathlib import Path

import pytest
from sglang_server import ENVIRONMENT

pytestmark = [pytest.mark.sglang, pytest.mark.slow]

REPOSITORY = Path(__file__).parents[2]
SUITES = ("plugin", "cpu_platform", "micro_models")
REFERENCE = REPOSITORY / "envs/reference"
"""The embedded engine, whose tree builder is the plugin's oracle."""
TRAINING = REPOSITORY / "envs/sglang/micro_models"
"""The one package that the environment does not have."""
PYTEST = ("pytest", "pluggy", "iniconfig")


@pytest.fixture(scope="module")
def pytest_alone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with this interpreter's pytest, for one that has none; what else it needs, SGLang needs too."""
    folder = tmp_path_factory.mktemp("pytest")
    for name in PYTEST:
        distribution = metadata.distribution(name)
        tops = {file.parts[0] for file in distribution.files or () if not file.parts[0].startswith((".", "__"))}
        for top in tops:
            (folder / top).symlink_to(distribution.locate_file(top))
    return folder


def run_tests(python: Path, tests: Path, imports: Path) -> subprocess.CompletedProcess[str]:
    """Run a folder of tests; what they test is what the environment has, not this repository's."""
    arguments = ["-p", "no:cacheprovider", "-o", f"pythonpath={tests} {REFERENCE} {TRAINING}", "-rfEs", tests]
    return subprocess.run(
        [python, "-m", "pytest", *arguments],
        check=False,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        cwd=REPOSITORY,
        env=os.environ | ENVIRONMENT | {"PYTHONPATH": str(imports)},
        timeout=290,
    )


def summary(done: subprocess.CompletedProcess[str]) -> str:
    """The line of counts that pytest ends with; libraries may say something after it."""
    lines = done.stdout.strip().splitlines()
    return next((line for line in reversed(lines) if re.search(r" in [\d.]+s", line)), lines[-1])


@pytest.mark.parametrize("suite", SUITES)
def test_a_package_passes_its_own_tests(sglang_python: Path, pytest_alone: Path, suite: str) -> None:
    done = run_tests(sglang_python, REPOSITORY / "envs/sglang" / suite / "tests", pytest_alone)
    print(done.stdout)
    assert done.returncode == 0, summary(done)
    assert " passed" in summary(done)
    assert "could not import" not in done.stdout  # a module skipped for want of SGLang


def test_a_test_that_fails_there_fails_here(sglang_python: Path, pytest_alone: Path, tmp_path: Path) -> None:
    (tmp_path / "test_wrong.py").write_text("def test_wrong():\n    assert 1 == 2\n")
    done = run_tests(sglang_python, tmp_path, pytest_alone)
    assert done.returncode == 1
    assert "1 failed" in summary(done)
