"""Tokens of answers whose server does not count them, by the model's own tokenizer."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import tokenizers
from tokenizers.processors import ByteLevel

from ddtree_bench.load.tokenizer_file import FILE, file_of


class TokenizerError(ValueError):
    """A path that holds no usable tokenizer; the message names it and says what to give."""


class Tokenizer:
    """The fast tokenizer of a model, as its file tokenizer.json defines it."""

    def __init__(self, tokenizer: tokenizers.Tokenizer) -> None:
        self._tokenizer = tokenizer
        # A file may ask for a length; here every token counts.
        tokenizer.no_truncation()
        tokenizer.no_padding()
        # Offsets without the blanks of a token would put the end of a line break and its indent before the indent came.
        # What else a post-processor does is to add special tokens, which no answer's text has.
        tokenizer.post_processor = ByteLevel(trim_offsets=False)

    @classmethod
    def from_path(cls, path: str | Path) -> Tokenizer:
        """Load a tokenizer from a model's folder with a tokenizer.json, or from that file.

        Raises TokenizerError when there is no such file or it cannot be read as one.
        """
        given = Path(path)
        file = file_of(given)
        if not file.is_file():
            wanted = f"a folder with a {FILE}, or that file"
            raise TokenizerError(f"tokenizer {given}: {file.name} does not exist there; name {wanted}")
        try:
            return cls(tokenizers.Tokenizer.from_file(str(file)))
        except Exception as error:  # the library raises plain Exceptions
            reason = f"it cannot be read as a tokenizer ({error})"
            raise TokenizerError(f"tokenizer {file}: {reason}; name the {FILE} of a fast tokenizer") from error

    def counts(self, texts: Sequence[str]) -> list[int]:
        """Return how many tokens of the whole text came with each of its parts.

        The parts are tokenized as one text, because a token may begin in one part and end in the next; it belongs to
        the part in which its last character came. Special tokens are not added.

        >>> words = tokenizers.models.WordLevel({"ab": 0, "c": 1}, unk_token="c")
        >>> tokenizer = tokenizers.Tokenizer(words)
        >>> tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
        >>> Tokenizer(tokenizer).counts(["a", "b ", "c"])
        [0, 1, 1]
        """
        ends = np.cumsum([len(text) for text in texts])
        if not len(texts) or not ends[-1]:
            return [0] * len(texts)
        offsets = self._tokenizer.encode("".join(texts), add_special_tokens=False).offsets
        last_characters = np.array([max(0, end - 1) for _, end in offsets], dtype=np.int64)
        parts = np.searchsorted(ends, last_characters, side="right")
        return [int(n) for n in np.bincount(parts, minlength=len(texts))]
