"""The target's own greedy answers: what a drafter is trained on."""

from __future__ import annotations

from collections.abc import Sequence
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


def generate(
    engine: Engine, words: Tokenizer, prompts: Sequence[Prompt], tokens: int, max_tokens: int, path: Path
) -> int:
    """Append answers to the file at `path` until it holds `tokens` answer tokens; returns how many it holds.

    Prompts are taken in order, those that the file has an answer to are left out, so that a run that was ended goes on.
    An answer ends with the target's end-of-sequence token or after `max_tokens`.
    """
    done = answers_file.read(path)
    held, answered = sum(len(answer.answer_tokens) for answer in done), {answer.id for answer in done}
    scheduler: Scheduler[str] = Scheduler(engine, Method("AR"))
    waiting = iter([prompt for prompt in prompts if prompt.id not in answered])
    open_prompts: dict[str, tuple[Prompt, list[int], list[int]]] = {}
    progress = Progress("answers", "tokens", tokens - held)
    with answers_file.appending(path) as append:
        while held < tokens:
            while len(open_prompts) < engine.pool.total and (prompt := next(waiting, None)) is not None:
                text = tokenizer.render_chat(words, [{"role": "user", "content": prompt.text}])
                ids = tokenizer.encode(words, text)
                open_prompts[prompt.id] = (prompt, ids, [])
                scheduler.add(prompt.id, Request(tuple(ids), max_tokens, words.eos))
            if not open_prompts:
                break
            for advance in scheduler.step():
                prompt, ids, answer = open_prompts[advance.key]
                answer += advance.round.tokens
                if advance.finished:
                    del open_prompts[advance.key]
                    append(Answer(prompt.id, prompt.category, prompt.text, ids, answer))
                    held += len(answer)
                    progress.add(len(answer))
    return held
