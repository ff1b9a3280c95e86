"""The configuration: typed models, reading, sweep expansion, semantic checks."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ddtree_bench.config import checks, flag_checks, model_checks, ssh_checks
from ddtree_bench.config.load import ConfigError, parse, read_files
from ddtree_bench.config.models import Config
from ddtree_bench.config.sweep import Coordinates, expand

__all__ = ["Config", "ConfigError", "Coordinates", "expand", "read_files", "validate"]


def validate(tree: Mapping[str, Any], root: Path) -> tuple[Config, list[Coordinates]]:
    """Return the typed configuration and the points of its sweep; `root` is where prompt paths start.

    Raises ConfigError with every problem found.
    """
    problems = checks.check_secrets(tree)
    if problems:
        raise ConfigError(problems)
    config = parse(tree)
    problems = checks.check_references(config) + checks.check_local_targets(config)
    problems += checks.check_external_targets(config) + ssh_checks.check_ssh_targets(config)
    problems += checks.check_arrivals(config)
    if problems:
        raise ConfigError(problems)
    points = expand(config)
    if not points:
        raise ConfigError(["sweep: nothing is left to measure; `exclude` takes every point out"])
    problems += flag_checks.check_flags(config, points)
    problems += checks.check_engines(config, points)
    problems += ssh_checks.check_ssh_models(config, points)
    problems += checks.check_sglang_builds(config, points, root)
    problems += checks.check_one_server_each(config, points)
    problems += model_checks.check_models(config, points)
    problems += checks.check_methods(config, points)
    problems += model_checks.check_tree_sizes(points)
    problems += model_checks.check_parallelism(points)
    problems += checks.check_concurrency(points)
    problems += checks.check_graph_memory(config, points)
    problems += checks.check_baselines(config, points)
    problems += checks.check_engine_limits(config, points)
    problems += checks.check_prompts(config, points, root)
    problems += checks.check_tokenizers(config, points, root)
    if problems:
        raise ConfigError(problems)
    return config, points
