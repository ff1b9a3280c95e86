"""Acceptance of a drafter in real decoding: tokens committed per verify round on held-out prompts, by category."""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ddtree_reference import assets, decode, drafter, gguf, lossless, model, startup, tokenizer, toy
from ddtree_reference.assets import ModelName
from ddtree_reference.decode import Engine
from ddtree_reference.method import Method
from ddtree_reference.model import Target
from ddtree_reference.sequence import Request
from ddtree_reference.tokenizer import Tokenizer
from ddtree_training.progress import Progress

RESAMPLES = 2000
SEED = 0


@dataclass(frozen=True)
class Counted:
    """One answer decoded with one drafter and method: tokens that its verify rounds committed, and the rounds.

    The prompt's own pass, which gives the first token, is no round. `drafter` is the SHA-256 of the drafter's file.
    """

    drafter: str
    method: str
    prompt: str
    category: str
    tokens: int
    rounds: int


@dataclass(frozen=True)
class Evaluation:
    """What is measured: `methods` on `prompts` (id, category, prompt), answers of up to `max_tokens`."""

    model: ModelName
    prompts: tuple[Mapping[str, str], ...]
    methods: tuple[Method, ...]
    max_tokens: int


def with_categories(path: Path, prompts: Sequence[Mapping[str, str]]) -> tuple[Mapping[str, str], ...]:
    """The prompts of a file; raises ValueError if one has no category."""
    without = [prompt["id"] for prompt in prompts if not prompt.get("category")]
    if without:
        raise ValueError(f'{path}: {", ".join(without)}: no "category"; give each prompt one')
    return tuple(prompts)


def run(evaluation: Evaluation, drafter_file: Path, compared: Path | None, output: Path) -> dict[str, Any]:
    """Measure one drafter, and another one on the same prompts, and write the result as JSON.

    Answers that an ended run has measured are taken from a file beside the output and not decoded again. Raises
    ValueError if a drafter does not fit the target.
    """
    files = [drafter_file, *([compared] if compared else [])]
    digests = [hashlib.sha256(file.read_bytes()).hexdigest() for file in files]
    if len(set(digests)) == 1:  # a drafter is not compared with itself
        files, digests = files[:1], digests[:1]
    target, words = _open(evaluation.model)
    notes = output.with_name(f"{output.name}.counts-{_digest(evaluation)}.jsonl")
    notes.parent.mkdir(parents=True, exist_ok=True)
    done = {(c.drafter, c.method, c.prompt): c for c in _read(notes)}
    total = len(set(digests)) * len(evaluation.methods) * len(evaluation.prompts)
    progress = Progress("evaluation", "answers", total - sum(key[0] in digests for key in done))
    width = max(method.verify_width for method in evaluation.methods)
    with notes.open("a", encoding="utf-8") as file:
        for path, digest in zip(files, digests, strict=True):
            engine = decode.new_engine(target, drafter.load(path, target), width)
            for method in evaluation.methods:
                for prompt in evaluation.prompts:
                    if (digest, lossless.name_of(method), prompt["id"]) in done:
                        continue
                    counted = _count(engine, words, digest, method, prompt, evaluation.max_tokens)
                    done[counted.drafter, counted.method, counted.prompt] = counted
                    file.write(json.dumps(asdict(counted)) + "\n")
                    file.flush()
                    progress.add(1)
    result = summarise(evaluation, list(done.values()), files, digests) | {"numerics": target.numerics}
    part = output.with_name(output.name + ".tmp")
    part.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    part.replace(output)
    return result


def summarise(
    evaluation: Evaluation, counts: Sequence[Counted], files: Sequence[Path], digests: Sequence[str]
) -> dict[str, Any]:
    """Pooled acceptance of each drafter and method, and the first drafter against the second, prompt by prompt."""
    names = [lossless.name_of(method) for method in evaluation.methods]
    of = {
        (digest, name): [c for c in counts if (c.drafter, c.method) == (digest, name)]
        for digest in digests
        for name in names
    }
    categories = sorted({prompt["category"] for prompt in evaluation.prompts})
    drafters = [
        {
            "file": file.name,
            "sha256": digest,
            "methods": {name: _pooled_by_category(of[digest, name], categories) for name in names},
        }
        for file, digest in zip(files, digests, strict=True)
    ]
    result: dict[str, Any] = {
        "model": evaluation.model,
        "prompts": len(evaluation.prompts),
        "prompts_by_category": {c: sum(p["category"] == c for p in evaluation.prompts) for c in categories},
        "max_tokens": evaluation.max_tokens,
        "drafter": drafters[0],
    }
    if len(files) > 1:
        result["compared_with"] = drafters[1]
        result["comparison"] = {name: ratio(of[digests[0], name], of[digests[1], name]) for name in names}
    return result


def pooled(counts: Iterable[Counted]) -> dict[str, float]:
    """Tokens, rounds and tokens a round of answers together; raises ValueError if none of them had a round."""
    kept = list(counts)
    tokens, rounds = sum(c.tokens for c in kept), sum(c.rounds for c in kept)
    if not rounds:
        ids = ", ".join(sorted({c.prompt for c in kept}))
        raise ValueError(f"prompts {ids}: all answers end with their first token; evaluate with more tokens or prompts")
    return {"tokens": tokens, "rounds": rounds, "accept_length": tokens / rounds}


def ratio(counts: Sequence[Counted], others: Sequence[Counted]) -> dict[str, float]:
    """Ratio of the pooled acceptance to that of another drafter, with a 95 % percentile bootstrap over prompts.

    Both drafters answer the same prompts, and a resample takes a prompt for both.
    """
    paired = {c.prompt: c for c in others}
    table = np.array([(c.tokens, c.rounds, paired[c.prompt].tokens, paired[c.prompt].rounds) for c in counts])
    drawn = np.random.default_rng(SEED).integers(len(table), size=(RESAMPLES, len(table)))
    sums = np.concatenate([table.sum(0)[None], table[drawn].sum(1)]).astype(float)  # [1 + resamples, 4]
    ratios = sums[:, 0] / sums[:, 1] / (sums[:, 2] / sums[:, 3])
    low, high = np.percentile(ratios[1:], [2.5, 97.5])
    return {"ratio": float(ratios[0]), "low": float(low), "high": float(high)}


def _pooled_by_category(counts: Sequence[Counted], categories: Sequence[str]) -> dict[str, Any]:
    by_category = {category: pooled(c for c in counts if c.category == category) for category in categories}
    return pooled(counts) | {"by_category": by_category}


def _open(name: ModelName) -> tuple[Target, Tokenizer]:
    """The target in mixed numerics: acceptance does not depend on whether its rows are bit-identical."""
    if name == "toy":
        return toy.build_target("mixed", startup.MAX_CONTEXT), toy.build_tokenizer()
    file = gguf.read(assets.weight_files(name)["model"])
    return model.from_gguf(file, "mixed", startup.MAX_CONTEXT), tokenizer.from_gguf(file.metadata)


def _count(
    engine: Engine, words: Tokenizer, digest: str, method: Method, prompt: Mapping[str, str], max_tokens: int
) -> Counted:
    text = tokenizer.render_chat(words, [{"role": "user", "content": prompt["prompt"]}])
    request = Request(tuple(tokenizer.encode(words, text)), max_tokens, words.eos)
    rounds = [step for step in decode.generate(engine, method, request) if step.width > 0]
    tokens = sum(len(step.tokens) for step in rounds)
    return Counted(digest, lossless.name_of(method), prompt["id"], prompt["category"], tokens, len(rounds))


def _digest(evaluation: Evaluation) -> str:
    """What an answer's counts depend on besides drafter, method and prompt id."""
    text = json.dumps([evaluation.model, evaluation.max_tokens, [dict(prompt) for prompt in evaluation.prompts]])
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def _read(notes: Path) -> list[Counted]:
    """Counts of an ended run; a last line that was not finished is cut off the file."""
    if not notes.exists():
        return []
    whole = notes.read_bytes().rpartition(b"\n")[0]
    notes.write_bytes(whole + b"\n" if whole else b"")
    return [Counted(**json.loads(line)) for line in whole.splitlines()]


def print_table(result: Mapping[str, Any]) -> None:
    """The result as lines of text, a drafter and a method each."""
    for key in ("drafter", "compared_with"):
        for name, entry in result.get(key, {}).get("methods", {}).items():
            by_category = ", ".join(f"{c} {v['accept_length']:.2f}" for c, v in entry["by_category"].items())
            print(
                f"{result[key]['file']} {name}: {entry['accept_length']:.3f} tokens a round "
                f"({entry['tokens']} tokens, {entry['rounds']} rounds; {by_category})",
                file=sys.stdout,
            )
    for name, entry in result.get("comparison", {}).items():
        print(
            f"{name}: {entry['ratio']:.3f} times the other's, 95 % interval {entry['low']:.3f} to {entry['high']:.3f}"
        )
