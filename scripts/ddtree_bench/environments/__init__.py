"""The environments that engines run in: their keys, how they are built into a wheelhouse and deployed to a target."""

from __future__ import annotations

from ddtree_bench.environments.key import EnvironmentFailed, environment_key, python_tag

__all__ = ["EnvironmentFailed", "environment_key", "python_tag"]
