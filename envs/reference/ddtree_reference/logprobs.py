"""Log probabilities of an answer's tokens in the forms of OpenAI's two endpoints."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ddtree_reference.tokenizer import Detokeniser, Tokenizer
from ddtree_reference.walk import TokenLogprob

LEAST = -9999.0  # what OpenAI sends for "very unlikely": JSON has no infinity


class LogprobForm:
    """Turns the tokens of one choice, in order, into the objects of its events, or of its whole answer.

    A token is shown as its text; as its name if it is special; as escaped bytes if it is only part of a character.
    `text_offset` counts the characters of the answer before the one that the token begins or goes on with.
    """

    def __init__(self, tokenizer: Tokenizer, chat: bool) -> None:
        self._tokenizer = tokenizer
        self._chat = chat
        self._detokeniser = Detokeniser(tokenizer)
        self._offset = 0

    def of(self, tokens: Sequence[TokenLogprob]) -> dict[str, Any]:
        """The `logprobs` object of the next tokens of the choice."""
        return self._of_chat(tokens) if self._chat else self._of_completion(tokens)

    def _of_chat(self, tokens: Sequence[TokenLogprob]) -> dict[str, Any]:
        return {
            "content": [
                self._named(token.token, token.logprob)
                | {"top_logprobs": [self._named(*likely) for likely in token.top]}
                for token in tokens
            ]
        }

    def _of_completion(self, tokens: Sequence[TokenLogprob]) -> dict[str, Any]:
        return {
            "tokens": [self._text(token.token) for token in tokens],
            "token_logprobs": [_finite(token.logprob) for token in tokens],
            "top_logprobs": [self._likely(token) for token in tokens],
            "text_offset": [self._advance(token.token) for token in tokens],
        }

    def _likely(self, token: TokenLogprob) -> dict[str, float]:
        """The likeliest tokens and the answer's own, so up to one more than was asked for, as OpenAI has it."""
        return {self._text(one): _finite(logprob) for one, logprob in (*token.top, (token.token, token.logprob))}

    def _named(self, token: int, logprob: float) -> dict[str, Any]:
        token_bytes = self._tokenizer.token_bytes[token]
        return {
            "token": self._text(token),
            "logprob": _finite(logprob),
            "bytes": list(token_bytes) if token_bytes else None,
        }

    def _text(self, token: int) -> str:
        token_bytes = self._tokenizer.token_bytes[token]
        if not token_bytes:
            return self._tokenizer.bpe.id_to_token(token) or ""
        try:
            return token_bytes.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in token_bytes)

    def _advance(self, token: int) -> int:
        at = self._offset
        self._offset += len(self._detokeniser.push(token))
        return at


def _finite(logprob: float) -> float:
    return max(logprob, LEAST)
