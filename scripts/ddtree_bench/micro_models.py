"""Micro models: trained by the workflow itself, each in a folder named by all that decides its weights."""

from __future__ import annotations

import importlib.util
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import ModuleType

from ddtree_bench.config.models import Config, Model
from ddtree_bench.targets.launcher import Launcher, TargetError

PROJECT = Path("envs") / "sglang" / "micro_models"
"""The training's project, below the repository."""

PACKAGE = "sglang_micro_models"
FINISHED = "micro_model.json"
THREADS = 1
"""Threads of the training, which fixes them: their number decides the last bits of the weights."""
TIMEOUT_S = 3600.0


@dataclass(frozen=True)
class MicroModel:
    """A micro model and its drafter: `digest` names the recipe, `folder` holds `target` and `drafter`."""

    kind: str
    block_size: int
    digest: str
    folder: Path
    root: Path

    @property
    def target(self) -> Path:
        """The target model's folder, with its tokenizer."""
        return self.folder / "target"

    @property
    def drafter(self) -> Path:
        """The drafter's folder."""
        return self.folder / "drafter"

    @property
    def finished(self) -> Path:
        """The file that shows that it is trained: the training puts the whole folder there in one step."""
        return self.folder / FINISHED

    @property
    def receipt(self) -> Path:
        """What the workflow waits for, beside the folder: Snakemake may remove it without taking the weights along."""
        return self.folder.with_name(f"{self.folder.name}.trained.json")

    @property
    def rule(self) -> str:
        """The name of the rule that trains it."""
        return f"train_micro_model_{self.kind}_{self.digest}"

    def argv(self, python: str) -> list[str]:
        """The command that trains it, with the Python of a deployed environment."""
        cache = self.folder.parent.absolute()
        options = ["--kind", self.kind, "--block-size", str(self.block_size), "--out", str(cache)]
        return ["env", f"PYTHONPATH={(self.root / PROJECT).absolute()}", python, "-m", PACKAGE, *options]


def micro_model(model: Model, root: Path, results: Path) -> MicroModel | None:
    """Return the micro model that a part of the configuration asks for; `root` is the repository."""
    if model.micro is None or model.drafter is None:
        return None
    name, digest = _named(root, model.micro, model.drafter.block_size)
    return MicroModel(model.micro, model.drafter.block_size, digest, results / "micro_models" / name, root)


def with_micro_models(config: Config, root: Path, results: Path) -> Config:
    """Return the configuration with the revisions of its micro models, and the paths they have on local targets."""
    local = [name for name, target in config.targets.items() if target.launcher == "local"]
    models = dict(config.models)
    for name, model in config.models.items():
        micro = micro_model(model, root, results)
        if micro is not None:
            models[name] = _located(model, micro, local)
    return config.model_copy(update={"models": models})


def train(micro: MicroModel, launcher: Launcher, python: str, report: Callable[[str], None]) -> None:
    """Train a micro model where its weights are not there yet; `python` is that of SGLang's environment.

    What lies in its folder without being finished is removed. Raises TargetError with what the training said when it
    fails.
    """
    if micro.finished.is_file():
        return
    # The training puts its folder in place of an empty one alone.
    shutil.rmtree(micro.folder, ignore_errors=True)
    report(f"{micro.folder}: training the {micro.kind} micro model and its drafter")
    result = launcher.run_command(micro.argv(python), timeout_s=TIMEOUT_S, report=report)
    if result.exit_code != 0 or not micro.finished.is_file():
        said = result.stderr.strip()[-1000:]
        raise TargetError(f"{micro.folder}: the {micro.kind} micro model could not be trained: {said}")


def _located(model: Model, micro: MicroModel, targets: list[str]) -> Model:
    assert model.drafter is not None
    drafter = model.drafter.model_copy(
        update={"revision": micro.digest, "paths": dict.fromkeys(targets, str(micro.drafter.absolute()))}
    )
    target = str(micro.target.absolute())
    paths = dict.fromkeys(targets, target)
    changes = {"revision": micro.digest, "paths": paths, "drafter": drafter, "tokenizer": target}
    return model.model_copy(update=changes)


@cache
def _named(root: Path, kind: str, block_size: int) -> tuple[str, str]:
    """The name of a recipe's folder and its digest, by the training's own package: its sources are read once."""
    module = _identity(root)
    identity = module.Identity(kind, block_size)
    return str(module.folder_name(identity)), str(module.digest(*identity))


def _identity(root: Path) -> ModuleType:
    """The module that names a recipe: it needs the standard library alone, unlike the package that it belongs to."""
    path = root / PROJECT / PACKAGE / "identity.py"
    spec = importlib.util.spec_from_file_location(f"{PACKAGE}_identity", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
