"""Whether drawn answers follow a law: how they are drawn from a server, and the test that rejects."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

from hugging_face_law import TOKENS, Law
from scipy import stats
from sglang_server import SGLangServer

REJECT_BELOW = 0.001
LEAST_EXPECTED = 5
SAMPLED = {"temperature": 1.0, "max_new_tokens": TOKENS, "ignore_eos": True}


class Draws(NamedTuple):
    """How often each joint outcome of tokens 2 to TOKENS came, and what the drafts were worth."""

    counts: Counter[tuple[int, ...]]
    accepted: int
    proposed: int
    rounds: int

    @property
    def acceptance(self) -> float:
        """The acceptance rate: accepted drafts by proposed ones, every node of every tree counted."""
        return self.accepted / self.proposed


def draw(server: SGLangServer, prompt: Sequence[int], draws: int, batch: int) -> Draws:
    """`draws` unseeded answers to one prompt at temperature 1, `batch` requests at a time."""
    counts: Counter[tuple[int, ...]] = Counter()
    accepted = proposed = rounds = 0
    for start in range(0, draws, batch):
        inputs = [list(prompt)] * min(batch, draws - start)
        for answer in server.generate(input_ids=inputs, sampling_params=SAMPLED):
            meta = answer["meta_info"]
            counts[tuple(answer["output_ids"][1:])] += 1
            accepted += meta["spec_num_correct_drafts"]
            proposed += meta["spec_num_proposed_drafts"]
            rounds += meta["spec_verify_ct"]
    return Draws(counts, accepted, proposed, rounds)


def p_value(law: Law, counts: Counter[tuple[int, ...]]) -> float:
    """Chi-square of the counts; outcomes expected less than five times, and all others, are put together."""
    draws = counts.total()
    common = [path for path, p in law.items() if p * draws >= LEAST_EXPECTED]
    expected = [law[path] * draws for path in common]
    observed = [counts[path] for path in common]
    rare = draws - sum(expected)
    if rare >= LEAST_EXPECTED:
        expected.append(rare)
        observed.append(draws - sum(observed))
    return float(stats.chisquare(observed, expected, sum_check=False).pvalue)
