"""A target as a project plans to measure it: what its checks hold against what is there."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from ddtree_bench.config.models import Target
from ddtree_bench.environments.recipes import adopted_suffix
from ddtree_bench.plan import Server
from ddtree_bench.project import Project
from ddtree_bench.target_checks.findings import Finding, Level
from ddtree_bench.targets import lease
from ddtree_bench.targets.external import lease_name


@dataclass(frozen=True)
class PlannedTarget:
    """A target by its key in `targets`."""

    project: Project
    name: str

    @property
    def spec(self) -> Target:
        """What the configuration says of it."""
        return self.project.config.targets[self.name]

    @cached_property
    def servers(self) -> list[Server]:
        """The servers that are planned there."""
        return [server for server in self.project.plan.servers if server.target == self.name]

    @property
    def engines(self) -> list[str]:
        """What is deployed there: engines, and the load client where it runs there."""
        return [engine for name, engine in self.project.environment_keys if name == self.name]

    @property
    def lease(self) -> Path:
        """The lease's file: on the target, or for an external endpoint on this machine."""
        name = lease_name(self.spec.url or "") if self.spec.launcher == "external" else "machine"
        return lease.path_of(name, Path(self.spec.lease_dir) if self.spec.lease_dir else lease.DEFAULT_DIRECTORY)

    @cached_property
    def model_paths(self) -> dict[str, str]:
        """Where it keeps models, by the key of the configuration that says so; not those that the workflow trains."""
        found = {}
        for server in self.servers:
            if self.project.micro_model(server) is None:
                key, places = f"models.{self.project.model_name(server)}", self.project.model_paths(server)
                found[f"{key}.paths.{self.name}"] = places["model_path"]
                found[f"{key}.drafter.paths.{self.name}"] = places["drafter_path"]
        return {key: path for key, path in found.items() if path is not None}

    def receipts(self, root: str) -> dict[str, str]:
        """Where it keeps the receipts of what the plan deploys there, by engine, below the root of deployments."""
        return {
            engine: f"{root}/{self.project.environment_name(self.name, engine)}"
            f"{adopted_suffix(self.project.adopted(self.name, engine))}/receipt.json"
            for engine in self.engines
        }

    @cached_property
    def names_and_revisions(self) -> dict[str, str]:
        """What the models and drafters that it serves are called, by the key of the configuration that says so."""
        found: dict[str, str] = {}
        for key in dict.fromkeys(self.project.model_name(server) for server in self.servers):
            model = self.project.config.models[key]
            found |= {f"models.{key}.name": model.name, f"models.{key}.revision": model.revision}
            if model.drafter is not None:
                found[f"models.{key}.drafter.name"] = model.drafter.name
                found[f"models.{key}.drafter.revision"] = model.drafter.revision
        return found

    def finding(self, what: str, level: Level, words: str, remedy: str = "") -> Finding:
        """A finding about it."""
        return Finding(self.name, what, level, words, remedy)
