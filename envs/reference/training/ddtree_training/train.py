"""Training of the drafter: steps whose batches, learning rate and result follow from settings and data alone."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ddtree_reference import drafter
from ddtree_training import batches, checkpoint, dataset, features, network, objective, targets, validation
from ddtree_training.batches import Shape
from ddtree_training.dataset import Split
from ddtree_training.network import Network
from ddtree_training.progress import Progress
from ddtree_training.teacher import Teacher

CURVE = "curve.jsonl"
BETAS = (0.9, 0.97)
LOG_EVERY = 50


@dataclass(frozen=True)
class Settings:
    """What a training is; two trainings of equal settings and data give equal weights on one machine.

    `sequences` x `anchors` blocks of `block` tokens a step, in `long_share` of the steps half as many of twice the
    length. The learning rate rises to `peak_lr` in `warmup` steps and falls as a cosine to `floor` of it at `steps`.
    """

    steps: int
    seed: int = 0
    n_layers: int = 2
    vocabulary: int = 8192
    sequences: int = 8
    anchors: int = 24
    block: int = 8
    long_share: float = 0.2
    soft_share: float = 0.5
    position_decay: float = 4.0
    peak_lr: float = 1.5e-3
    warmup: int = 100
    floor: float = 0.03
    weight_decay: float = 0.01
    clip: float = 1.0
    ema_decay: float = 0.999
    held_out: float = 0.025


@dataclass(frozen=True)
class Intervals:
    """How often things are done, in steps; they change nothing in the result."""

    checkpoint: int = 100
    validation: int = 250


@dataclass(frozen=True)
class Trainer:
    """Everything a step needs. `ema` is the moving average of the network's weights, which is what is exported."""

    settings: Settings
    data: str
    split: Split
    lengths: tuple[int, ...]
    network: Network
    ema: Network
    optimizer: torch.optim.AdamW
    vocabulary: Tensor
    index: Tensor
    embedding: Tensor
    head: Tensor


def learning_rate(settings: Settings, step: int) -> float:
    """The rate of step `step`, from 0: linear warm-up, then a cosine."""
    rise = min(1.0, (step + 1) / max(1, settings.warmup))
    cosine = 0.5 * (1.0 + math.cos(math.pi * step / settings.steps))
    return settings.peak_lr * rise * (settings.floor + (1.0 - settings.floor) * cosine)


def run(source: Teacher, shards: Sequence[Path], folder: Path, settings: Settings, intervals: Intervals) -> Path:
    """Train to the last step, going on from the checkpoint in `folder`; returns the checkpoint's path.

    Raises ValueError if the checkpoint is of other settings or other data.
    """
    folder.mkdir(parents=True, exist_ok=True)
    trainer = _prepare(source, shards, settings)
    step = _resume(trainer, folder)
    curve = folder / CURVE
    _keep_until(curve, step)
    progress = Progress("training", "steps", settings.steps - step)
    losses: list[float] = []
    while step < settings.steps:
        losses.append(_step(trainer, step))
        step += 1
        last = step == settings.steps
        progress.add(1, f", step {step:,}, loss {sum(losses) / len(losses):.3f}")
        if step % LOG_EVERY == 0 or last:
            _log(curve, {"step": step, "loss": sum(losses) / len(losses), "lr": learning_rate(settings, step - 1)})
            losses = []
        if step % intervals.validation == 0 or last:
            _log(curve, {"step": step, "accept": validate(trainer)}, show=True)
        if step % intervals.checkpoint == 0 or last:
            _save(trainer, folder, step)
    return folder / checkpoint.NAME


def validate(trainer: Trainer) -> dict[str, float]:
    """Tokens a round of the averaged weights on held-out answers."""
    return validation.accept_lengths(
        trainer.ema, trainer.split.validation, trainer.embedding, trainer.head, trainer.index, trainer.settings.block
    )


def _prepare(source: Teacher, shards: Sequence[Path], settings: Settings) -> Trainer:
    answers = dataset.load(shards)
    split = dataset.split(answers, settings.held_out)
    vocabulary = dataset.commonest_tokens(split.training, source.config.vocab_size, settings.vocabulary)
    config = drafter_config(source, settings, features.feature_layers_of(shards[0]))
    trained, ema = (Network(config, source.cos, source.sin) for _ in range(2))
    network.initialise(trained, source, settings.seed)
    ema.load_state_dict(trained.state_dict())
    ema.requires_grad_(False)
    matrices = [weight for weight in trained.parameters() if weight.dim() == 2]
    vectors = [weight for weight in trained.parameters() if weight.dim() < 2]
    groups = [
        {"params": matrices, "weight_decay": settings.weight_decay},
        {"params": vectors, "weight_decay": 0.0},
    ]
    return Trainer(
        settings=settings,
        data="\n".join(shard.name for shard in shards),
        split=split,
        lengths=tuple(answer.length for answer in split.training),
        network=trained,
        ema=ema,
        optimizer=torch.optim.AdamW(groups, lr=settings.peak_lr, betas=BETAS, fused=True),
        vocabulary=vocabulary,
        index=targets.draft_index(vocabulary, source.config.vocab_size),
        embedding=source.embedding,
        head=source.head[vocabulary].contiguous(),
    )


def drafter_config(source: Teacher, settings: Settings, feature_layers: tuple[int, ...]) -> drafter.Config:
    """A drafter of the target's own shape; the longest block is that of the long steps."""
    config = source.config
    return drafter.Config(
        n_layers=settings.n_layers,
        dim=config.dim,
        n_heads=config.n_heads,
        n_kv_heads=config.n_kv_heads,
        head_dim=config.head_dim,
        hidden_dim=config.hidden_dim,
        feature_layers=feature_layers,
        rope_base=config.rope_base,
        norm_eps=config.norm_eps,
        max_block_size=2 * settings.block if settings.long_share > 0 else settings.block,
    )


def _step(trainer: Trainer, step: int) -> float:
    """One update of the weights and their average; the loss before it, in nats."""
    settings = trainer.settings
    shape: Shape = batches.shape_of(
        step, settings.seed, settings.sequences, settings.anchors, settings.block, settings.long_share
    )
    answers, blocks = batches.answers_and_blocks(trainer.split.training, trainer.lengths, step, settings.seed, shape)
    wanted = targets.build(blocks, answers, trainer.index, settings.soft_share, settings.position_decay)
    hidden = trainer.network(blocks.features, blocks.anchors, trainer.embedding[blocks.anchor_tokens], shape.block)
    rows = hidden.flatten(0, 2)[blocks.rows]
    loss = objective.head_loss(rows, trainer.head, wanted.ids, wanted.weights / wanted.total)
    trainer.optimizer.zero_grad(set_to_none=True)
    loss.backward()  # type: ignore[no-untyped-call]
    torch.nn.utils.clip_grad_norm_(trainer.network.parameters(), settings.clip)
    for group in trainer.optimizer.param_groups:
        group["lr"] = learning_rate(settings, step)
    trainer.optimizer.step()
    _average(trainer, step)
    return float(loss.detach())


@torch.no_grad()
def _average(trainer: Trainer, step: int) -> None:
    """Move the averaged weights towards the new ones, faster at first: the start should not linger in them."""
    decay = min(trainer.settings.ema_decay, (1 + step) / (10 + step))
    averaged: list[Tensor] = list(trainer.ema.parameters())
    weights: list[Tensor] = list(trainer.network.parameters())
    torch._foreach_lerp_(averaged, weights, 1.0 - decay)


def _save(trainer: Trainer, folder: Path, step: int) -> None:
    state = {
        "settings": asdict(trainer.settings),
        "data": trainer.data,
        "config": asdict(trainer.network.config),
        "step": step,
        "vocabulary": trainer.vocabulary,
        "network": trainer.network.state_dict(),
        "ema": trainer.ema.state_dict(),
        "optimizer": trainer.optimizer.state_dict(),
    }
    checkpoint.save(folder, state)


def _resume(trainer: Trainer, folder: Path) -> int:
    """Take over the checkpoint's state if there is one: the number of steps done."""
    state = checkpoint.load(folder)
    if state is None:
        return 0
    if state["settings"] != asdict(trainer.settings):
        changed = [name for name, value in asdict(trainer.settings).items() if state["settings"].get(name) != value]
        raise ValueError(
            f"{folder / checkpoint.NAME}: a training with another {', '.join(changed)}; remove the folder or train "
            "into another one"
        )
    if state["data"] != trainer.data:
        raise ValueError(
            f"{folder / checkpoint.NAME}: a training on other answers; remove the folder or train into another one"
        )
    trainer.network.load_state_dict(state["network"])
    trainer.ema.load_state_dict(state["ema"])
    trainer.optimizer.load_state_dict(state["optimizer"])
    return int(state["step"])


def _keep_until(curve: Path, step: int) -> None:
    """Drop the curve's lines that belong to steps which will be done again."""
    if curve.exists():
        lines = curve.read_text().split("\n")[:-1]  # what follows the last newline is unfinished
        kept = [line for line in lines if json.loads(line)["step"] <= step]
        part = curve.with_name(curve.name + ".tmp")
        part.write_text("".join(line + "\n" for line in kept))
        part.replace(curve)


def _log(curve: Path, entry: dict[str, Any], show: bool = False) -> None:
    line = json.dumps(entry | {"time": round(time.time(), 1)})
    with curve.open("a") as file:
        file.write(line + "\n")
    if show:
        print(line, flush=True)
