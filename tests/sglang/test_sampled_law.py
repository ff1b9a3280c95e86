"""DDTREE at temperature 1 leaves the law of the text as it is: answers of the real server against AR's exact law."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import hugging_face_law
import law
import probed
import pytest
from hugging_face_greedy import greedy
from hugging_face_law import Law
from sglang_server import SGLangServer
from trained_models import ModelPair

pytestmark = [pytest.mark.sglang, pytest.mark.slow]

# A question in the micro model's chat template, and the first syllable of an answer. The next word may be one of
# several that end differently, so a walk that goes wrong there is seen, and its beginning can be drafted.
PROMPT = (311, 315, 296, 282, 312, 316, 293)
BUDGET = 4
BATCH = 100
DRAWS = 2000
MUTANT_DRAWS = 700


@pytest.fixture(scope="module")
def exact(sglang_python: Path, plain_model: ModelPair) -> Law:
    found = hugging_face_law.joint_law(sglang_python, plain_model.target, PROMPT)
    assert 0.99 < sum(found.values()) <= 1 + 1e-9, "what is left out hardly ever comes"
    return found


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("sampled")


@pytest.fixture(scope="module")
def server(plain_model: ModelPair, folder: Path) -> Iterator[SGLangServer]:
    with probed.probed_server(plain_model, BUDGET, folder, ("--max-running-requests", str(BATCH))) as started:
        yield started


def test_the_joint_law_of_tokens_2_to_4_is_that_of_ar(server: SGLangServer, exact: Law) -> None:
    drawn = law.draw(server, PROMPT, DRAWS, BATCH)
    assert drawn.counts.total() == DRAWS
    assert drawn.acceptance >= 0.3
    assert law.p_value(exact, drawn.counts) > law.REJECT_BELOW


@pytest.mark.parametrize("name", ["prefers_drafts", "siblings_row"])
def test_walks_that_change_the_law_are_found(server: SGLangServer, exact: Law, folder: Path, name: str) -> None:
    with probed.mutant(folder, name):
        drawn = law.draw(server, PROMPT, MUTANT_DRAWS, BATCH)
    assert law.p_value(exact, drawn.counts) < law.REJECT_BELOW


def test_greedy_answers_with_attention_in_torch_are_right(
    server: SGLangServer, sglang_python: Path, plain_model: ModelPair
) -> None:
    prompts = [list(PROMPT), list(PROMPT[:5])]
    answers = server.generate(
        input_ids=prompts, sampling_params={"temperature": 0, "max_new_tokens": 40, "ignore_eos": True}
    )
    assert [answer["output_ids"] for answer in answers] == greedy(sglang_python, plain_model.target, prompts, 40)
