"""The drafter's training as the workflow sees it: its stages, where their files lie, and their command lines.

Folders are named after what decides their content, so that a changed setting keeps what it does not touch: the data by
prompts, seed and lengths, below it a training by its steps, below that an evaluation by what it measures.
"""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from pathlib import Path

from ddtree_bench import keys
from ddtree_bench.config.training import Training
from ddtree_bench.environments.key import sha256
from ddtree_bench.project import Project

ENGINE = Path("envs") / "reference"
TEMPLATES = ENGINE / "training" / "prompts"
CARD_TEMPLATE = ENGINE / "training" / "MODEL_CARD.md.j2"
COMMITTED_CARD = ENGINE / "MODEL_CARD.md"
COMMITTED_WEIGHTS = ENGINE / "ddtree_reference" / "data" / "drafter.safetensors"
MEASURED_PROMPTS = Path("config") / "prompts"
"""Prompts to be measured lie here: none that is trained on may come near one of them."""

FINISHED = "finished"
"""Marks the folder of a stage that has ended. What lies beside it is not declared to Snakemake, which would remove it
when the stage is killed."""


Option = str | Path | int


@dataclass(frozen=True)
class Stage:
    """A command of `ddtree_training`: what it reads, what it leaves, its arguments.

    `output` is a marker, made when the command has ended, if `marked`; else a file that the command writes. A
    `parallel` one takes the number of its threads.
    """

    name: str
    description: str
    inputs: tuple[Path, ...]
    output: Path
    options: tuple[Option, ...]
    marked: bool = False
    parallel: bool = False

    def arguments(self, threads: int) -> list[str]:
        """The arguments behind `python -m ddtree_training`."""
        options = (*self.options, "--threads", threads) if self.parallel else self.options
        return [self.name, *map(str, options)]


@dataclass(frozen=True)
class DrafterTraining:
    """A training of `settings`; `root` is the repository.

    `folder` holds prompts, answers and features, and below it what is made of them.
    """

    settings: Training
    root: Path
    folder: Path

    @classmethod
    def of(cls, project: Project) -> DrafterTraining:
        """The training that a project's configuration describes."""
        settings, root = project.config.training, project.root
        name = f"{settings.model}-{keys.short(_data_digest(settings, root))}"
        return cls(settings, root, project.folders.results / "drafter" / name)

    @property
    def stages(self) -> tuple[Stage, ...]:
        """All stages in their order."""
        return (
            self._prompts(),
            self._answers(),
            self._features(),
            self._train(),
            self._export(),
            self._evaluate(),
            self._card(),
        )

    def stage(self, name: str) -> Stage:
        """The stage of a name."""
        return next(stage for stage in self.stages if stage.name == name)

    @property
    def installation(self) -> str:
        """The commands that put weights and card in the place of the committed ones, for a shell in the repository."""
        weights, card = self._export().output, self._card().output
        if not self._committed:
            return f"weights: {weights}\ncard: {card}"
        pairs = ((weights, COMMITTED_WEIGHTS), (card, COMMITTED_CARD))
        copies = [f"  cp {shlex.quote(str(new))} {shlex.quote(str(old))}" for new, old in pairs]
        return "\n".join([f"{card} compares the drafter with the committed one. To take it:", *copies])

    @property
    def _evaluated_prompts(self) -> Path:
        return self.root / self.settings.evaluate_prompts

    @property
    def _committed(self) -> bool:
        """Whether the repository has weights of this model's drafter: the toy's is made of random numbers."""
        return self.settings.model != "toy"

    @property
    def _trained(self) -> Path:
        return self.folder / f"steps-{self.settings.steps}"

    @property
    def _evaluated(self) -> Path:
        s = self.settings
        identity = [s.evaluate_prompts, s.evaluate_limit, s.evaluate_tokens]
        return self._trained / f"evaluation-{keys.short(keys.digest(identity))}"

    @property
    def _answers_file(self) -> Path:
        return self.folder / "answers" / "answers.jsonl"

    def _prompts(self) -> Stage:
        output = self.folder / "prompts.jsonl"
        measured = _measured_prompts(self.settings, self.root)
        return Stage(
            name="prompts",
            description="Listing the prompts to train on",
            inputs=(*_template_files(self.root), *measured),
            output=output,
            options=(
                *("--templates", self.root / TEMPLATES, "--seed", self.settings.seed, "--exclude"),
                *measured,
                *("--output", output),
            ),
        )

    def _answers(self) -> Stage:
        s, prompts = self.settings, self._prompts().output
        return Stage(
            name="answers",
            description="Letting the target answer the prompts",
            inputs=(prompts,),
            output=self._answers_file.with_name(FINISHED),
            options=(
                *("--model", s.model, "--prompts", prompts, "--tokens", s.answer_tokens),
                *("--max-tokens", s.max_answer_tokens, "--batch", s.batch, "--output", self._answers_file),
            ),
            marked=True,
            parallel=True,
        )

    def _features(self) -> Stage:
        folder = self.folder / "features"
        return Stage(
            name="features",
            description="Recording the target's hidden states along its answers",
            inputs=(self._answers().output,),
            output=folder / FINISHED,
            options=("--model", self.settings.model, "--answers", self._answers_file, "--output", folder),
            marked=True,
            parallel=True,
        )

    def _train(self) -> Stage:
        s, features, folder = self.settings, self._features().output, self._trained / "training"
        return Stage(
            name="train",
            description="Training the drafter",
            inputs=(features,),
            output=folder / FINISHED,
            options=(
                *("--model", s.model, "--features", features.parent),
                *("--steps", s.steps, "--seed", s.seed, "--output", folder),
            ),
            marked=True,
            parallel=True,
        )

    def _export(self) -> Stage:
        trained, output = self._train().output, self._trained / "drafter.safetensors"
        return Stage(
            name="export",
            description="Writing the drafter's weights as int8",
            inputs=(trained,),
            output=output,
            options=("--training", trained.parent, "--output", output),
        )

    def _evaluate(self) -> Stage:
        s, weights, output = self.settings, self._export().output, self._evaluated / "evaluation.json"
        # The committed weights are no input: once they are replaced, the comparison would be with themselves.
        compared: tuple[Option, ...] = ("--compare", self.root / COMMITTED_WEIGHTS) if self._committed else ()
        limit: tuple[Option, ...] = ("--limit", s.evaluate_limit) if s.evaluate_limit is not None else ()
        return Stage(
            name="evaluate",
            description="Measuring the drafter's acceptance",
            inputs=(weights, self._evaluated_prompts),
            output=output,
            options=(
                *("--model", s.model, "--drafter", weights, *compared, "--prompts", self._evaluated_prompts),
                *(*limit, "--tokens", s.evaluate_tokens, "--output", output),
            ),
            parallel=True,
        )

    def _card(self) -> Stage:
        weights, evaluation = self._export().output, self._evaluate().output
        output = evaluation.with_name("MODEL_CARD.md")
        template, trained = self.root / CARD_TEMPLATE, self._train().output.parent
        return Stage(
            name="card",
            description="Writing the model card",
            inputs=(template, evaluation),
            output=output,
            options=(
                *("--model", self.settings.model, "--template", template, "--answers", self._answers_file),
                *("--training", trained, "--drafter", weights, "--evaluation", evaluation, "--output", output),
            ),
        )


def _template_files(root: Path) -> list[Path]:
    return sorted((root / TEMPLATES).glob("*.toml"))


def _measured_prompts(settings: Training, root: Path) -> list[Path]:
    return sorted({*(root / MEASURED_PROMPTS).glob("*.jsonl"), root / settings.evaluate_prompts})


def _data_digest(settings: Training, root: Path) -> str:
    """Of what the answers are made: not of how many are decoded at a time, on how many threads."""
    files = (path for path in (*_template_files(root), *_measured_prompts(settings, root)) if path.is_file())
    identity = {
        "model": settings.model,
        "seed": settings.seed,
        "answer_tokens": settings.answer_tokens,
        "max_answer_tokens": settings.max_answer_tokens,
        "files": sorted([path.name, sha256(path)] for path in files),
    }
    return keys.digest(identity)
