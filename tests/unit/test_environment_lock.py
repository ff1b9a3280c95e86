"""Lock files: versions and hashes of every wheel, for each Python, and nothing of any index."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from ddtree_bench.environments.build import pinned
from ddtree_bench.environments.lock import Pin, lock_text, parse
from ddtree_bench.environments.recipes import RECIPES

ENGINES = Path(__file__).parents[2] / "envs"
LOCKS = [ENGINES / environment.engine / recipe.lock for environment, recipe in RECIPES.items() if recipe.lock]
PYLOCK = """
[[packages]]
name = "numpy"
version = "2.4"
wheels = [
    { url = "https://index.test/numpy-2.4-cp311.whl", hashes = { sha256 = "bb" } },
    { url = "https://index.test/numpy-2.4-any.whl", hashes = { sha256 = "aa" } },
]
"""


def test_wheels_are_read_by_hash() -> None:
    assert parse(PYLOCK) == {Pin("numpy", "2.4"): frozenset({"aa", "bb"})}


def test_a_pin_has_the_hashes_of_all_pythons_and_a_marker_where_they_differ() -> None:
    numpy, newer, scipy = Pin("numpy", "2.4"), Pin("numpy", "2.5"), Pin("scipy", "1")
    text = lock_text(
        "cpu.in",
        {
            "3.11": {numpy: frozenset({"a"}), scipy: frozenset({"s"})},
            "3.12": {newer: frozenset({"b"}), scipy: frozenset({"s", "t"})},
            "3.13": {newer: frozenset({"c"}), scipy: frozenset({"s"})},
        },
    )
    assert text.partition("\nnumpy")[0].startswith("# Made from cpu.in") and "Python 3.11, 3.12, 3.13." in text
    assert [line for line in text.splitlines() if not line.startswith("#")] == [
        'numpy==2.4 ; python_version == "3.11" \\',
        "    --hash=sha256:a",
        'numpy==2.5 ; python_version == "3.12" or python_version == "3.13" \\',
        "    --hash=sha256:b \\",
        "    --hash=sha256:c",
        "scipy==1 \\",
        "    --hash=sha256:s \\",
        "    --hash=sha256:t",
    ]


@pytest.mark.parametrize("lock", LOCKS, ids=lambda path: f"{path.parent.name}-{path.stem}")
def test_every_pin_of_a_lock_has_hashes_and_none_names_an_index(lock: Path) -> None:
    text = lock.read_text()
    entries = re.split(r"(?m)^(?=[A-Za-z0-9])", text)[1:]
    assert len(entries) == len(pinned(lock)) > 20
    assert all(re.search(r"--hash=sha256:[0-9a-f]{64}", entry) for entry in entries)
    assert "://" not in text and "--index" not in text and "--find-links" not in text


@pytest.mark.parametrize("build", ["cpu", "cuda13"])
def test_the_locks_of_sglang_hold_the_release_that_the_plugin_is_for(build: str) -> None:
    plugin = (ENGINES / "sglang" / "plugin" / "sglang_ddtree" / "release.py").read_text()
    (release,) = re.findall(r'^RELEASE = "(.+)"$', plugin, re.MULTILINE)
    assert f"sglang=={release}" in pinned(ENGINES / "sglang" / f"{build}.lock")


def test_what_the_cpu_set_leaves_out_is_not_in_its_lock() -> None:
    folder = ENGINES / "sglang"
    left_out = {line for line in (folder / "cpu-left-out.in").read_text().splitlines() if line and line[0] != "#"}
    locked = {pin.partition("==")[0] for pin in pinned(folder / "cpu.lock")}
    assert left_out and not left_out & locked
