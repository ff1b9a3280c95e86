"""An answer as a client sees it grow: the text of its tokens, cut at stop strings, and the counts of its rounds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from ddtree_reference.decode import Round
from ddtree_reference.method import Method
from ddtree_reference.stats import SpecCounts
from ddtree_reference.tokenizer import Detokeniser, StopStrings, Tokenizer
from ddtree_reference.walk import TokenLogprob

FinishReason = Literal["stop", "length"]


@dataclass(frozen=True)
class Update:
    """News of an answer: its new text and all tokens so far. The last one has `finish_reason` or `error`.

    `logprobs` are those of the new tokens, `cached_tokens` counts prompt tokens taken from the prefix cache.
    """

    text: str
    completion_tokens: int
    finish_reason: FinishReason | None = None
    spec: dict[str, Any] | None = None
    logprobs: tuple[TokenLogprob, ...] = ()
    cached_tokens: int = 0
    error: str | None = None

    @property
    def last(self) -> bool:
        """Whether no more updates follow."""
        return self.finish_reason is not None or self.error is not None


class Answer:
    """Turns the rounds of one request into updates."""

    def __init__(
        self, tokenizer: Tokenizer, method: Method, max_tokens: int, eos: int | None, stops: Sequence[str]
    ) -> None:
        self._detokeniser = Detokeniser(tokenizer)
        self._stops = StopStrings(stops)
        self._method = method
        self._max_tokens = max_tokens
        self._eos = eos
        self._spec = SpecCounts()
        self.tokens = 0
        self.rounds = 0

    def push(self, committed: Round, cached: int) -> Update:
        """What a round's tokens add; with `finish_reason` if they end the answer, maybe before the last of them."""
        text, stopped, ended, taken = "", False, False, 0
        for token in committed.tokens:
            shown, stopped = self._stops.push(self._detokeniser.push(token))
            text, taken, ended = text + shown, taken + 1, stopped or token == self._eos
            if ended:
                break
        self.tokens += taken
        self.rounds += 1
        self._spec.add(committed)
        logprobs = committed.logprobs[:taken]
        if not ended and self.tokens < self._max_tokens:
            return Update(text, self.tokens, logprobs=logprobs, cached_tokens=cached)
        return Update(
            text if stopped else text + self._stops.flush(),
            self.tokens,
            finish_reason="stop" if ended else "length",
            spec=self._spec.details(self._method, self.tokens),
            logprobs=logprobs,
            cached_tokens=cached,
        )
