"""A configuration opened in a working folder: the plan, and the places where its files lie."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import astuple, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from ddtree_bench import keys, plan
from ddtree_bench.config import Config, validate
from ddtree_bench.environments import Environment, environment_key
from ddtree_bench.environments.recipes import CLIENT, adopted_suffix, environment_name, environment_of, wheels_tag
from ddtree_bench.load.tokenizer_file import file_of
from ddtree_bench.micro_models import MicroModel, micro_model, with_micro_models
from ddtree_bench.plan import Plan, Run, Server
from ddtree_bench.records.files import sha256_file

Report = Callable[[str], None]
"""Takes a line that tells people how far a command is."""

REMOTE_ROOT = "~/ddtree-bench"

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

    `root` is the repository, `config_files` what was laid over the default configuration. `environment_keys` has the
    key of what each engine of the plan runs in on each target, by target and engine.
    """

    config: Config
    plan: Plan
    folders: Folders
    root: Path
    environment_keys: Mapping[tuple[str, str], str]
    config_files: tuple[str, ...] = ()

    def environment(self, target: str, engine: str) -> Environment:
        """What an engine runs in on a target: the build that the target takes, or one that adopts what is there."""
        return target_environment(self.config, target, engine)

    def environment_name(self, target: str, engine: str) -> str:
        """The name of an engine's environment on a target: engine, build if it has one, key, and its wheels' tag."""
        environment = self.environment(target, engine)
        return environment_name(environment, self.environment_keys[target, engine], wheels_tag(environment))

    def manifest(self, target: str, engine: str) -> Path:
        """The manifest of the wheelhouse of an engine's environment on a target."""
        return self.folders.environments / self.environment_name(target, engine) / "manifest.json"

    def receipt(self, target: str, engine: str) -> Path:
        """The receipt of an engine's deployment on a target; one for each installation that was ever adopted there."""
        name = self.environment_name(target, engine) + adopted_suffix(self.adopted(target, engine))
        return self.folders.results / "targets" / target / f"deployed-{name}.json"

    def adopted(self, target: str, engine: str) -> str | None:
        """The installation on a target that an engine's deployment there adopts; None where it installs its own."""
        return self.config.targets[target].adopt if engine == "sglang" else None

    def receipts(self, target: str) -> list[Path]:
        """The receipts of all engines that the plan uses on a target; none where nothing is deployed."""
        found = [path for server in self.plan.servers if server.target == target for path in self.receipts_of(server)]
        return list(dict.fromkeys(found))

    def receipts_of(self, server: Server) -> list[Path]:
        """The receipts of what a server runs on, and of the load client beside it; none for one that is up already."""
        engines = () if server.external else (server.engine, CLIENT) if server.client == "target" else (server.engine,)
        return [self.receipt(server.target, engine) for engine in engines]

    def host_record(self, target: str) -> Path:
        """The probed record of a target."""
        return self.folders.results / "targets" / f"{target}.json"

    def endpoint_keys(self, target: str) -> str:
        """What the configuration says of a target whose engine is there already that its record depends on, as JSON.

        The external endpoint, or the installation that is adopted; "" of all others.
        """
        spec = self.config.targets[target]
        if spec.launcher != "external":
            return "" if spec.adopt is None else keys.canonical({"adopt": spec.adopt})
        return keys.canonical({name: getattr(spec, name) for name in ("url", "served_model", "flush_cache")})

    def hosts_of(self, engine: str, name: str) -> list[str]:
        """The targets over SSH on which an engine's environment of a name is to be deployed."""
        return [
            target
            for target, used in self.environment_keys
            if used == engine and self.over_ssh(target) and self.environment_name(target, engine) == name
        ]

    def over_ssh(self, target: str) -> bool:
        """Whether a target is a host that is reached over SSH."""
        return self.config.targets[target].launcher == "ssh"

    def deploy_root(self, target: str) -> str:
        """The folder on the target that holds deployed environments; its launcher expands it."""
        spec = self.config.targets[target]
        by_default = REMOTE_ROOT if spec.launcher == "ssh" else self.folders.environments / "installed"
        return spec.root or str(by_default)

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

    def micro_model(self, server: Server) -> MicroModel | None:
        """The micro model that a server serves; None where it serves another."""
        return micro_model(self.config.models[self.model_name(server)], self.root, self.folders.results)

    @cached_property
    def micro_models(self) -> dict[MicroModel, Server]:
        """The micro models of the plan, each with a server that serves it."""
        found = ((self.micro_model(server), server) for server in self.plan.servers)
        return {micro: server for micro, server in found if micro is not None}

    def micro_receipts(self, servers: Iterable[Server]) -> list[str]:
        """The receipts of the micro models that servers serve, each once; none where they serve others."""
        found = [self.micro_model(server) for server in servers]
        return list(dict.fromkeys(str(micro.receipt) for micro in found if micro))

    def tokenizer_path(self, server: Server) -> Path | None:
        """Where this machine keeps the tokenizer of a server's model, below the repository unless it is absolute.

        None for a micro model that is not trained yet.
        """
        given = self.config.models[self.model_name(server)].tokenizer
        path = given.get(server.target) if isinstance(given, dict) else given
        micro = self.micro_model(server)
        if path is None or (micro is not None and not micro.target.is_dir()):
            return None
        return self.root / Path(path).expanduser()

    def views(self, run: Run) -> list[str]:
        """The views of a run's cells."""
        return [str(self.folders.results / cell.view) for cell in run.cells]

    @cached_property
    def tables_plan(self) -> str:
        """Path, below the results folder, of the list of what the tables hold; its name changes with the plan."""
        comparisons = [comparison.model_dump() for comparison in self.config.comparisons]
        slos = {name: work.slos.model_dump() for name, work in self.config.workloads.items() if work.slos}
        views = [cell.view for cell in self.plan.cells]
        # A micro model's tokenizer is told by the model's revision, and need not be there yet.
        tokenizers = {
            server.key: sha256_file(file_of(path))
            for server in self.plan.servers
            if self.micro_model(server) is None and (path := self.tokenizer_path(server)) is not None
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
    used = dict.fromkeys((p.target, p.engine) for p in points if config.targets[p.target].launcher != "external")
    used |= dict.fromkeys((target, CLIENT) for target, _ in used if config.targets[target].client == "target")
    environments = {place: target_environment(config, *place) for place in used}
    known = {environment: environment_key(environment, root / "envs") for environment in set(environments.values())}
    environment_keys = {place: known[environment] for place, environment in environments.items()}
    folders = Folders.below(results)
    config = with_micro_models(config, root, folders.results)
    planned = plan.build(config, points, root, environment_keys)
    return Project(config, planned, folders, root, environment_keys, tuple(config_files))


def target_environment(config: Config, target: str, engine: str) -> Environment:
    """Return what an engine runs in on a target of a configuration."""
    spec = config.targets[target]
    return environment_of(engine, spec.sglang_build, adopted=spec.adopt is not None)


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
