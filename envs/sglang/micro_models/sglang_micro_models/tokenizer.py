"""The tokenizer: bytes, the toy language's syllables, and six special tokens.

Id 0 is the space, which most answers contain: a server that takes id 0 for padding goes wrong at once. There are 317
ids, which is no multiple of 64, so that SGLang's padding of the vocabulary is exercised.
"""

from __future__ import annotations

from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from sglang_micro_models.language import SYLLABLES

SPACE = "Ġ"  # how byte-level tokenizers write a space
BEGIN, END, PAD, MASK, USER, ASSISTANT = SPECIAL_TOKENS = (
    "<|begin|>",
    "<|end|>",
    "<|pad|>",
    "<|mask|>",
    "<|user|>",
    "<|assistant|>",
)
CHAT_TEMPLATE = (
    "{{ '<|begin|>' }}{% for message in messages %}"
    "{% if message['role'] == 'assistant' %}{{ '<|assistant|>' }}{% else %}{{ '<|user|>' }}{% endif %}"
    "{{ message['content'] }}{{ '<|end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)


def vocabulary() -> dict[str, int]:
    """Token to id: the space, the other 255 bytes, the syllables, the special tokens."""
    others = sorted(set(pre_tokenizers.ByteLevel.alphabet()) - {SPACE})
    return {token: i for i, token in enumerate([SPACE, *others, *SYLLABLES, *SPECIAL_TOKENS])}


VOCABULARY = vocabulary()
VOCAB_SIZE = len(VOCABULARY)
BEGIN_ID, END_ID, PAD_ID, MASK_ID = (VOCABULARY[token] for token in (BEGIN, END, PAD, MASK))


def build() -> PreTrainedTokenizerFast:
    """The tokenizer as transformers and SGLang load it, chat template included."""
    text_tokens = {token: i for token, i in VOCABULARY.items() if token not in SPECIAL_TOKENS}
    tokenizer = Tokenizer(models.BPE(vocab=text_tokens, merges=[(s[0], s[1]) for s in SYLLABLES]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=BEGIN,
        eos_token=END,
        pad_token=PAD,
        mask_token=MASK,
        chat_template=CHAT_TEMPLATE,
        model_max_length=2048,
    )


def save(folder: Path) -> None:
    """Write the tokenizer's files into `folder`."""
    build().save_pretrained(folder)
