"""A configuration opened in a working folder: the plan, and the places where its files lie."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable, Mapping, Sequence
from dataclasses import astuple, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from ddtree_bench import keys, plan
from ddtree_bench.config import Config, validate
from ddtree_bench.environments import environment_key, python_tag
from ddtree_bench.load.tokenizer_file import file_of
from ddtree_bench.plan import Plan, Run, Server
from ddtree_bench.records.files import sha256_file

Report = Callable[[str], None]
"""Takes a line that tells people how far a command is."""

STORE_VARIABLE = "DDTREE_BENCH_STORE"
ENVIRONMENTS_VARIABLE = "DDTREE_BENCH_ENVIRONMENTS"


@dataclass(frozen=True)
class Folders:
    """Folders of the results. The store and the environments can be shared between clones."""

    results: Path
    store: Path
    environments: Path

    @classmethod
    def below(cls, results: Path) -> Folders:
        """The places below a results folder, unless environment variables name shared ones."""
        return cls(
            results,
            Path(os.environ.get(STORE_VARIABLE) or results / "store"),
            Path(os.environ.get(ENVIRONMENTS_VARIABLE) or results / "environments"),
        )


@dataclass(frozen=True)
class Project:
    """A validated configuration, its plan and its places.

    `root` is the repository, `config_files` what was laid over the default configuration.
    """

    config: Config
    plan: Plan
    folders: Folders
    root: Path
    environment_keys: Mapping[str, str]
    config_files: tuple[str, ...] = ()

    def environment_name(self, engine: str) -> str:
        """The name of an engine's environment for this Python: engine, key and tag."""
        return f"{engine}-{keys.short(self.environment_keys[engine])}-{python_tag()}"

    def manifest(self, engine: str) -> Path:
        """The manifest of an engine's wheelhouse."""
        return self.folders.environments / self.environment_name(engine) / "manifest.json"

    def receipt(self, target: str, engine: str) -> Path:
        """The receipt of an engine's deployment on a target."""
        return self.folders.results / "targets" / target / f"deployed-{self.environment_name(engine)}.json"

    def receipts(self, target: str) -> list[Path]:
        """The receipts of all engines that the plan uses on a target; none where nothing is deployed."""
        found = [path for server in self.plan.servers if server.target == target for path in self.receipts_of(server)]
        return list(dict.fromkeys(found))

    def receipts_of(self, server: Server) -> list[Path]:
        """The receipt of what a server runs on; none for one that is up already."""
        return [] if server.external else [self.receipt(server.target, server.engine)]

    def host_record(self, target: str) -> Path:
        """The probed record of a target."""
        return self.folders.results / "targets" / f"{target}.json"

    def endpoint_keys(self, target: str) -> str:
        """What the configuration says of an external endpoint that its record depends on, as JSON; "" of others."""
        spec = self.config.targets[target]
        if spec.launcher != "external":
            return ""
        return keys.canonical({name: getattr(spec, name) for name in ("url", "served_model", "flush_cache")})

    def deploy_root(self, target: str) -> str:
        """The folder on the target that holds deployed environments."""
        configured = self.config.targets[target].root
        folder = Path(configured).expanduser() if configured else self.folders.environments / "installed"
        return str(folder.absolute())

    def model_name(self, server: Server) -> str:
        """The key under which the configuration has a server's model."""
        return next(k for k, m in self.config.models.items() if (m.name, m.revision) == astuple(server.model))

    def model_paths(self, server: Server) -> dict[str, str | None]:
        """Where a target keeps a server's models; None where the engine brings them."""
        model = self.config.models[self.model_name(server)]
        drafter = model.drafter if server.drafter else None
        return {
            "model_path": model.paths.get(server.target),
            "drafter_path": drafter.paths.get(server.target) if drafter else None,
        }

    def tokenizer_path(self, server: Server) -> Path | None:
        """Where this machine keeps the tokenizer of a server's model, below the repository unless it is absolute."""
        given = self.config.models[self.model_name(server)].tokenizer
        path = given.get(server.target) if isinstance(given, dict) else given
        return None if path is None else self.root / Path(path).expanduser()

    def views(self, run: Run) -> list[str]:
        """The views of a run's cells."""
        return [str(self.folders.results / cell.view) for cell in run.cells]

    @cached_property
    def tables_plan(self) -> str:
        """Path, below the results folder, of the list of what the tables hold; its name changes with the plan."""
        comparisons = [comparison.model_dump() for comparison in self.config.comparisons]
        slos = {name: work.slos.model_dump() for name, work in self.config.workloads.items() if work.slos}
        views = [cell.view for cell in self.plan.cells]
        tokenizers = {
            server.key: sha256_file(file_of(path))
            for server in self.plan.servers
            if (path := self.tokenizer_path(server)) is not None
        }
        digest = keys.digest([views, comparisons, self.config.description, slos, tokenizers])
        return f"tables/plan.{keys.short(digest)}.json"

    def all_views(self) -> list[str]:
        """The views of every cell of the plan."""
        return [str(self.folders.results / cell.view) for cell in self.plan.cells]


def open_project(
    tree: Mapping[str, Any], root: Path, results: Path = Path("results"), config_files: Sequence[str] = ()
) -> Project:
    """Validate a configuration tree and plan it; `root` is the repository, `results` the results folder.

    Raises ConfigError with every problem of the configuration.
    """
    config, points = validate(tree, root)
    engines = dict.fromkeys(p.engine for p in points if config.targets[p.target].launcher != "external")
    environment_keys = {engine: environment_key(engine, root / "envs") for engine in engines}
    planned = plan.build(config, points, root, environment_keys)
    return Project(config, planned, Folders.below(results), root, environment_keys, tuple(config_files))


def git_commit(root: Path) -> str | None:
    """Return the commit of the repository, marked when files differ from it; None where there is no repository."""
    described = subprocess.run(
        ["git", "describe", "--always", "--dirty", "--abbrev=12", "--exclude", "*"],
        cwd=root,
        capture_output=True,
        text=True,
        check=False,
    )
    return described.stdout.strip() or None if described.returncode == 0 else None
