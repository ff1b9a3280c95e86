"""The environments that engines run in: their keys, how they are built into a wheelhouse and deployed to a target."""

from __future__ import annotations

from ddtree_bench.environments.key import environment_key
from ddtree_bench.environments.recipes import Environment, EnvironmentFailed, python_tag

__all__ = ["Environment", "EnvironmentFailed", "environment_key", "python_tag"]
