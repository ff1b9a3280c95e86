"""The target's own greedy answers: what a drafter is trained on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from ddtree_reference import tokenizer
from ddtree_reference.decode import Engine
from ddtree_reference.method import Method
from ddtree_reference.scheduler import Scheduler
from ddtree_reference.sequence import Request
from ddtree_reference.tokenizer import Tokenizer
from ddtree_training import answers_file
from ddtree_training.answers_file import Answer
from ddtree_training.progress import Progress
from ddtree_training.prompts import Prompt


@dataclass
class _Open:
    """A prompt in the batch, and its answer so far."""

    prompt: Prompt
    ids: list[int]
    answer: list[int] = field(default_factory=list)


def generate(
    engine: Engine, words: Tokenizer, prompts: Sequence[Prompt], tokens: int, max_tokens: int, path: Path
) -> int:
    """Answer prompts in order until the file at `path` holds `tokens` answer tokens; returns how many it holds.

    An answer ends with the target's end-of-sequence token or after `max_tokens`. Answers are appended as they finish,
    and those that the file has are not made again, so that a run that was ended goes on. At the end the file is
    rewritten as the shortest beginning of the list of prompts that has `tokens`: neither a kill nor the number of
    answers at a time decides what is trained on.
    """
    done = {answer.id: answer for answer in answers_file.read(path)}
    scheduler: Scheduler[str] = Scheduler(engine, Method("AR"))
    in_batch: dict[str, _Open] = {}
    progress = Progress("answers", "tokens", tokens)
    reached = passed = 0  # tokens of finished answers among the first `passed` prompts
    with answers_file.appending(path) as append:
        while True:
            while reached < tokens and passed < len(prompts) and len(in_batch) < engine.pool.total:
                prompt, passed = prompts[passed], passed + 1
                if prompt.id in done:
                    reached += len(done[prompt.id].answer_tokens)
                    continue
                text = tokenizer.render_chat(words, [{"role": "user", "content": prompt.text}])
                in_batch[prompt.id] = _Open(prompt, tokenizer.encode(words, text))
                scheduler.add(prompt.id, Request(tuple(in_batch[prompt.id].ids), max_tokens, words.eos))
            if not in_batch:
                break
            for advance in scheduler.step():
                one = in_batch[advance.key]
                one.answer += advance.round.tokens
                if advance.finished:
                    del in_batch[advance.key]
                    answer = Answer(one.prompt.id, one.prompt.category, one.prompt.text, one.ids, one.answer)
                    append(answer)
                    done[answer.id] = answer
                    reached += len(one.answer)
                    progress.add(len(one.answer))
    chosen = _beginning(done, prompts, tokens)
    answers_file.replace(path, chosen)
    return sum(len(answer.answer_tokens) for answer in chosen)


def _beginning(answers: dict[str, Answer], prompts: Sequence[Prompt], tokens: int) -> list[Answer]:
    """The answers to the first prompts, in their order, up to the one that reaches `tokens`."""
    chosen: list[Answer] = []
    held = 0
    for prompt in prompts:
        if held >= tokens or prompt.id not in answers:
            break
        chosen.append(answers[prompt.id])
        held += len(answers[prompt.id].answer_tokens)
    return chosen
