"""Files that are made from the code are in step with it."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from ddtree_bench.config import ConfigError, read_files, validate
from ddtree_bench.config.demo import DEMO
from ddtree_bench.config.generate import default_yaml, generated_files
from ddtree_bench.load.prompts import read, select

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize(
    "name", ["config/schemas/config.schema.json", "docs/configuration.md", "docs/tables.md", "docs/metrics-json.md"]
)
def test_generated_files_are_in_step(name: str) -> None:
    assert (ROOT / name).read_text() == generated_files(ROOT)[ROOT / name], "run: python -m ddtree_bench generate"


def test_the_commented_default_file_says_what_the_demo_is() -> None:
    assert yaml.safe_load(default_yaml()) == DEMO


@pytest.mark.parametrize("path", sorted((ROOT / "config").rglob("*.yaml")), ids=lambda path: path.name)
def test_every_configuration_that_is_shipped_is_valid(path: Path) -> None:
    try:
        _, points = validate(read_files([ROOT / "config" / "config.yaml", path]), ROOT)
    except ConfigError as error:
        pytest.fail(str(error))
    assert points


def test_the_demo_measures_every_method_at_every_concurrency_on_the_same_prompts() -> None:
    config, points = validate(DEMO, ROOT)
    measured: dict[str, set[int]] = {}
    for point in points:
        measured.setdefault(f"{point.method} {point.budget or ''}".strip(), set()).add(point.concurrency)
        assert point.concurrency <= point.max_running_requests
    assert set(measured) == {"AR", "DFLASH", "DDTREE 4", "DDTREE 8", "DDTREE 16"}
    assert all(loads == {1, 2, 4, 8} for loads in measured.values())
    spec = config.workloads["heldout"]
    prompts = read(ROOT / spec.prompts)
    chosen = [select(prompts, spec.blocks, spec.n_min, load) for load in (1, 2, 4, 8)]
    assert all(some == chosen[0] and len(some) == 32 for some in chosen)
