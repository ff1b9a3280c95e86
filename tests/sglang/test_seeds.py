"""A request with a seed gets from DDTREE the very tokens that AR gives it, whatever cuts its distribution."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lossless
import pytest
from sglang_server import SGLangServer
from trained_models import ModelPair

pytestmark = [pytest.mark.sglang, pytest.mark.slow]

TOKENS = 24
# With a seed and min_p, the release's own sampler fails, in AR too.
CUTS: tuple[dict[str, Any], ...] = ({}, {"top_p": 0.9, "top_k": 5}, {"top_p": 0.7}, {"top_k": 2})
OPTIONS = ("--enable-deterministic-inference",)


def seeded(model: Path, seed: int) -> dict[str, Any]:
    """One request for each of the CUTS."""
    prompts = lossless.prompts(model, len(CUTS) + lossless.STRANGE)[: len(CUTS)]
    parameters = [
        {"temperature": 1.0, "max_new_tokens": TOKENS, "ignore_eos": True, "sampling_seed": seed + number, **cut}
        for number, cut in enumerate(CUTS)
    ]
    return {"input_ids": prompts, "sampling_params": parameters}


def test_a_seed_gives_the_tokens_of_ar(plain_model: ModelPair, tmp_path: Path) -> None:
    model, drafter = plain_model
    with SGLangServer(model, extra_args=OPTIONS, log_path=tmp_path / "ar.log") as server:
        expected = [answer["output_ids"] for answer in server.generate(**seeded(model, 7))]
        others = [answer["output_ids"] for answer in server.generate(**seeded(model, 8))]
    with SGLangServer(
        model, drafter_path=drafter, algorithm="DDTREE", budget=8, extra_args=OPTIONS, log_path=tmp_path / "log"
    ) as server:
        answers = server.generate(**seeded(model, 7))
    assert [answer["output_ids"] for answer in answers] == expected
    assert expected != others, "the seed decides"
    assert sum(answer["meta_info"]["spec_num_correct_drafts"] for answer in answers) > 0
