"""Text to token ids and back: byte-level BPE built from GGUF metadata, and the chat template."""

from __future__ import annotations

import codecs
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from jinja2 import Template
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import AddedToken, models, pre_tokenizers
from tokenizers import Tokenizer as BPE

_CONTROL = 3  # the GGUF token type of special tokens


@dataclass(frozen=True)
class Tokenizer:
    """A vocabulary and its chat template.

    `token_bytes[i]` are the bytes token i stands for (none for a special token), `longest` is the most characters a
    token can stand for, and `eos` ends an answer.
    """

    bpe: BPE
    token_bytes: tuple[bytes, ...]
    longest: int
    eos: int
    chat_template: str


def byte_alphabet() -> dict[str, int]:
    """The printable character GPT-2's byte-level BPE uses for each byte (character -> byte)."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}


def build(
    tokens: Sequence[str], merges: Sequence[str], special: Sequence[int], eos: int, chat_template: str
) -> Tokenizer:
    """Build a byte-level BPE tokenizer; single digits are split as SmolLM2 does ("smollm" in llama.cpp)."""
    vocabulary = {token: i for i, token in enumerate(tokens)}
    bpe = BPE(models.BPE(vocab=vocabulary, merges=[(a, b) for a, _, b in (m.partition(" ") for m in merges)]))
    bpe.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    bpe.add_special_tokens([AddedToken(tokens[i], special=True) for i in special])
    alphabet = byte_alphabet()
    is_special = set(special)
    token_bytes = tuple(
        b"" if i in is_special else bytes(alphabet[char] for char in token) for i, token in enumerate(tokens)
    )
    return Tokenizer(bpe, token_bytes, max(map(len, tokens)), eos, chat_template)


def from_gguf(metadata: Mapping[str, Any]) -> Tokenizer:
    """Build the tokenizer a GGUF file describes. Raises KeyError if the metadata holds none."""
    kinds = metadata["tokenizer.ggml.token_type"]
    return build(
        tokens=metadata["tokenizer.ggml.tokens"],
        merges=metadata["tokenizer.ggml.merges"],
        special=[i for i, kind in enumerate(kinds) if kind == _CONTROL],
        eos=metadata["tokenizer.ggml.eos_token_id"],
        chat_template=metadata["tokenizer.chat_template"],
    )


def encode(tokenizer: Tokenizer, text: str) -> list[int]:
    """Token ids of `text`; the names of special tokens in it become special tokens."""
    ids: list[int] = tokenizer.bpe.encode(text, add_special_tokens=False).ids
    return ids


def render_chat(tokenizer: Tokenizer, messages: Sequence[Mapping[str, str]]) -> str:
    """The prompt of a conversation ({"role", "content"} each), ready for the assistant's answer."""
    return _compile(tokenizer.chat_template).render(messages=messages, add_generation_prompt=True)


@cache
def _compile(chat_template: str) -> Template:
    return ImmutableSandboxedEnvironment().from_string(chat_template)


def decode(tokenizer: Tokenizer, ids: Sequence[int]) -> str:
    """The text of token ids; bytes that are not UTF-8 become U+FFFD, an unfinished last character is left out."""
    detokeniser = Detokeniser(tokenizer)
    return "".join(detokeniser.push(token) for token in ids)


class Detokeniser:
    """Text of a growing answer. Only whole characters leave it: bytes of an unfinished one wait for the next token."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._token_bytes = tokenizer.token_bytes
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token: int) -> str:
        """Return the text that `token` completes."""
        return self._utf8.decode(self._token_bytes[token])


class StopStrings:
    """Cuts a growing text before the first stop string. Text that may be the beginning of one is held back."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._held = ""

    def push(self, text: str) -> tuple[str, bool]:
        """Return the text that may be shown now, and whether a stop string has ended the answer."""
        if not self._stops:
            return text, False
        held = self._held + text
        found = [at for at in (held.find(stop) for stop in self._stops) if at >= 0]
        if found:
            self._held = ""
            return held[: min(found)], True
        keep = max(_overlap(held, stop) for stop in self._stops)
        self._held = held[len(held) - keep :]
        return held[: len(held) - keep], False

    def flush(self) -> str:
        """Return the text held back, when the answer ends without a stop string."""
        held, self._held = self._held, ""
        return held


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that is a proper beginning of `stop`."""
    return next((n for n in range(min(len(text), len(stop) - 1), 0, -1) if text.endswith(stop[:n])), 0)
