"""What the target thinks along its answers: hidden states and likely tokens, in shards that training maps to memory."""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from ddtree_training import answers_file, teacher
from ddtree_training.answers_file import Answer
from ddtree_training.progress import Progress
from ddtree_training.teacher import Teacher

SHARD_ANSWERS = 200
TOP = 16  # likely tokens kept a position
ROWS_PER_FORWARD = 2048
HEAD_ROWS = 32  # rows of one pass of the head: their logits stay in cache
SPARE_BYTES = 1 << 30

log = logging.getLogger("ddtree_training")


@dataclass(frozen=True)
class Entry:
    """Where an answer lies in a shard: `length` tokens from `start`, the answer's own from `answer_start` among all."""

    id: str
    category: str
    prompt: str
    prompt_length: int
    start: int
    length: int
    answer_start: int


def usable(answers: Sequence[Answer]) -> list[Answer]:
    """Answers with something to predict behind their first token, that fit into the context."""
    return [
        answer
        for answer in answers
        if len(answer.answer_tokens) >= 2
        and len(answer.prompt_tokens) + len(answer.answer_tokens) <= teacher.MAX_CONTEXT
    ]


def extract(
    source: Teacher, answers: Sequence[Answer], feature_layers: tuple[int, ...], folder: Path, model: str
) -> list[Path]:
    """Write the shards of `answers` that `folder` lacks, remove those of other answers, return all, in order.

    A shard's name holds the digest of its answers and of how it was made. Raises ValueError if no answer is usable and
    OSError if the disk has no room.
    """
    kept = usable(answers)
    if not kept:
        raise ValueError(f"{len(answers)} answers, none of 2 tokens or more within the context; generate answers first")
    folder.mkdir(parents=True, exist_ok=True)
    shards = {
        folder / _shard_name(number, part, feature_layers, model): part for number, part in enumerate(_parts(kept))
    }
    for stale in set(folder.glob("features-*.safetensors*")) - set(shards):
        stale.unlink()
    missing = {path: part for path, part in shards.items() if not path.exists()}
    _check_room(folder, list(missing.values()), len(feature_layers) * source.config.dim)
    progress = Progress("features", "tokens", sum(_length(answer) for part in missing.values() for answer in part))
    for path, part in missing.items():
        _write_shard(source, part, feature_layers, path, progress)
    return list(shards)


def find(folder: Path) -> list[Path]:
    """The shards in a folder, in order. Raises ValueError if there is none."""
    shards = sorted(folder.glob("features-*.safetensors"))
    if not shards:
        raise ValueError(f"{folder}: no shards of features; record them with the command 'features' first")
    return shards


def entries(shard: Path) -> list[Entry]:
    """The answers in a shard."""
    with safe_open(shard, framework="pt") as file:
        return [Entry(**fields) for fields in json.loads(file.metadata()["answers"])]


def feature_layers_of(shard: Path) -> tuple[int, ...]:
    """The layers of the target whose outputs a shard holds."""
    with safe_open(shard, framework="pt") as file:
        return tuple(json.loads(file.metadata()["feature_layers"]))


def _length(answer: Answer) -> int:
    return len(answer.prompt_tokens) + len(answer.answer_tokens)


def _parts(answers: Sequence[Answer]) -> Iterator[Sequence[Answer]]:
    for start in range(0, len(answers), SHARD_ANSWERS):
        yield answers[start : start + SHARD_ANSWERS]


def _shard_name(number: int, part: Sequence[Answer], feature_layers: tuple[int, ...], model: str) -> str:
    recipe = Answer(model, str(feature_layers), str(TOP), (), ())
    return f"features-{number:05d}-{answers_file.digest([recipe, *part])[:16]}.safetensors"


def _check_room(folder: Path, parts: Sequence[Sequence[Answer]], width: int) -> None:
    """Log the bytes to be written; raise OSError if they do not fit."""
    tokens = sum(_length(answer) for part in parts for answer in part)
    in_answers = sum(len(answer.answer_tokens) for part in parts for answer in part)
    needed = tokens * (2 * width + 4) + in_answers * TOP * 6
    free = shutil.disk_usage(folder).free
    log.info("features: %d shards to write, %.2f GB, %.1f GB free", len(parts), needed / 1e9, free / 1e9)
    if needed + SPARE_BYTES > free:
        raise OSError(
            f"{folder}: {needed / 1e9:.1f} GB of features and {SPARE_BYTES / 1e9:.1f} GB to spare do not fit into "
            f"{free / 1e9:.1f} GB; free some disk space, use another folder, or train with fewer answers"
        )


def _write_shard(
    source: Teacher, part: Sequence[Answer], feature_layers: tuple[int, ...], path: Path, progress: Progress
) -> None:
    """Compute a shard, longest answers together, and put it in place whole."""
    results: dict[int, tuple[Tensor, Tensor, Tensor]] = {}
    for batch in _batches(part):
        answers = [part[i] for i in batch]
        for i, result in zip(batch, _record(source, answers, feature_layers), strict=True):
            results[i] = result
        progress.add(sum(_length(answer) for answer in answers))
    features, ids, log_probs = (torch.cat([results[i][n] for i in range(len(part))]) for n in range(3))
    tokens = [token for answer in part for token in (*answer.prompt_tokens, *answer.answer_tokens)]
    tensors = {
        "tokens": torch.tensor(tokens, dtype=torch.int32),
        "features": features,
        "top_ids": ids,
        "top_log_probs": log_probs,
    }
    metadata = {
        "answers": json.dumps([asdict(entry) for entry in _layout(part)]),
        "feature_layers": json.dumps(feature_layers),
    }
    unfinished = path.with_name(path.name + ".tmp")
    save_file(tensors, unfinished, metadata=metadata)
    unfinished.replace(path)


def _layout(part: Sequence[Answer]) -> Iterator[Entry]:
    start = answer_start = 0
    for answer in part:
        prompt_length, length = len(answer.prompt_tokens), _length(answer)
        yield Entry(answer.id, answer.category, answer.prompt, prompt_length, start, length, answer_start)
        start += length
        answer_start += length - prompt_length


def _batches(part: Sequence[Answer]) -> Iterator[list[int]]:
    """Indices of answers that go through the target together: of about one length, so that little is padding."""
    batch: list[int] = []
    for i in sorted(range(len(part)), key=lambda i: -_length(part[i])):
        if batch and (len(batch) + 1) * _length(part[batch[0]]) > ROWS_PER_FORWARD:
            yield batch
            batch = []
        batch.append(i)
    if batch:
        yield batch


def _record(
    source: Teacher, answers: Sequence[Answer], feature_layers: tuple[int, ...]
) -> list[tuple[Tensor, Tensor, Tensor]]:
    """Features [n - 1, features * dim], likely ids and their log-probabilities [n - P, 16] of each answer."""
    rows = [torch.tensor((*answer.prompt_tokens, *answer.answer_tokens)[:-1]) for answer in answers]
    tokens = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
    hidden, features = teacher.forward(source, tokens, feature_layers)
    results = []
    for i, answer in enumerate(answers):
        n_rows = rows[i].shape[0]
        deciding = hidden[i, len(answer.prompt_tokens) - 1 : n_rows]  # rows whose next token is the answer's
        found = [teacher.top_log_probs(source, chunk, TOP) for chunk in torch.split(deciding, HEAD_ROWS)]
        ids = torch.cat([top for top, _ in found]).to(torch.int32)
        log_probs = torch.cat([values for _, values in found]).to(torch.float16)
        results.append((features[i, :n_rows].clone(), ids, log_probs))
    return results
