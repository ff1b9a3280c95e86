from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ddtree_reference import tokenizer, toy
from ddtree_reference.startup import Opened
from ddtree_reference.tokenizer import Detokeniser, StopStrings

TEXTS = [
    "Write a Python function fibonacci(n) using iteration",
    "1234567890 3.14159",
    "  spaces,\ttabs\nand\n\nnewlines  ",
    "naïve café — “quotes” 日本語 🙂👩‍👩‍👧 Ωmega",
]
TOY = toy.build_tokenizer()


@pytest.mark.parametrize("text", TEXTS)
def test_round_trip(smollm2: Opened, text: str) -> None:
    ids = tokenizer.encode(smollm2.tokenizer, text)
    assert tokenizer.decode(smollm2.tokenizer, ids) == text


def test_known_ids(smollm2: Opened) -> None:
    words = smollm2.tokenizer
    assert tokenizer.encode(words, "<|im_start|>user\n<|im_end|>")[0] == 1
    assert words.eos == 2
    assert len(tokenizer.encode(words, "12345")) == 5, "digits are split one by one"
    assert tokenizer.decode(words, [1, *tokenizer.encode(words, "Hello"), 2]) == "Hello"


def test_chat_template(smollm2: Opened) -> None:
    text = tokenizer.render_chat(smollm2.tokenizer, [{"role": "user", "content": "2+2?"}])
    assert text == (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
        "<|im_start|>user\n2+2?<|im_end|>\n<|im_start|>assistant\n"
    )
    own = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
    assert tokenizer.render_chat(smollm2.tokenizer, own).startswith("<|im_start|>system\nBe brief.<|im_end|>\n")


@given(st.text(max_size=60).filter(lambda text: "<|" not in text))  # names of special tokens have no text
@settings(max_examples=200, deadline=None)
def test_every_prefix_is_a_prefix_of_the_text(text: str) -> None:
    ids = tokenizer.encode(TOY, text)
    detokeniser = Detokeniser(TOY)
    so_far = ""
    for token in ids:
        so_far += detokeniser.push(token)
        assert text.startswith(so_far)
        assert "\ufffd" not in so_far or "\ufffd" in text
    assert so_far == text


def test_an_unfinished_character_waits_and_is_never_shown_broken() -> None:
    detokeniser = Detokeniser(TOY)
    assert [detokeniser.push(byte) for byte in "é🙂".encode()] == ["", "é", "", "", "", "🙂"]
    assert tokenizer.decode(TOY, "ab🙂".encode()[:-1]) == "ab"


def test_bytes_that_can_never_be_text_become_the_replacement_character() -> None:
    assert tokenizer.decode(TOY, [0xFF, ord("a")]) == "\ufffda"


@pytest.mark.parametrize(
    ("stops", "pieces", "shown", "stopped"),
    [
        ((), ["a", "b"], "ab", False),
        (("END",), ["say E", "ND and more"], "say ", True),
        (("END",), ["say E", "NGINE"], "say ENGINE", False),
        (("\n\n",), ["a\n", "b\n", "\nc"], "a\nb", True),
        (("xy", "y"), ["x", "y"], "", True),
        (("aab",), ["aa", "ab"], "a", True),
    ],
)
def test_stop_strings(stops: tuple[str, ...], pieces: list[str], shown: str, stopped: bool) -> None:
    finder = StopStrings(stops)
    text, ended = "", False
    for piece in pieces:
        part, ended = finder.push(piece)
        text += part
        if ended:
            break
    assert (text + finder.flush(), ended) == (shown, stopped)
