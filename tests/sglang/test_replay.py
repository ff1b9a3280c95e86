"""Real rounds, saved by the server, against the embedded engine: the same trees, the same accepted paths."""

from __future__ import annotations

from collections.abc import Iterator

import lossless
import probed
import pytest
import replay
from trained_models import ModelPair

pytestmark = [pytest.mark.sglang, pytest.mark.slow]

BUDGET = 32
PROMPTS = 8
TOKENS = 48


@pytest.fixture(scope="module")
def rounds(plain_model: ModelPair, tmp_path_factory: pytest.TempPathFactory) -> list[list[replay.Step]]:
    """The rounds of a greedy batch, and that its texts are those that the clients got."""
    folder = tmp_path_factory.mktemp("replay")
    prompts = lossless.prompts(plain_model.target, PROMPTS)
    with probed.probed_server(plain_model, BUDGET, folder) as server, probed.saved_rounds(folder) as saved:
        answers = lossless.in_one_batch(server, prompts, TOKENS)
    found = [list(replay.steps(path)) for path in sorted(saved.glob("*.pt"))]
    written = sorted(text[:TOKENS] for text in replay.texts(found).values())
    assert written == sorted(answer["output_ids"] for answer in answers)
    return found


def all_steps(rounds: list[list[replay.Step]]) -> Iterator[replay.Step]:
    return (step for one in rounds for step in one)


def test_every_tree_and_every_accepted_path_is_that_of_the_embedded_engine(rounds: list[list[replay.Step]]) -> None:
    checked = 0
    for step in all_steps(rounds):
        replay.check(step)
        checked += 1
    assert checked > 50
    assert sum(len(step.accepted) for step in all_steps(rounds)) > 2 * checked, "drafts are accepted"


def test_a_wrong_node_and_a_wrong_path_are_found(rounds: list[list[replay.Step]]) -> None:
    step = next(step for step in all_steps(rounds) if len(step.accepted) > 1)
    other_ranks = [*step.ranks[:-1], step.ranks[-1] + 1]
    with pytest.raises(AssertionError, match="the tree is not"):
        replay.check(step._replace(ranks=other_ranks))
    with pytest.raises(AssertionError, match="accepted"):
        replay.check(step._replace(accepted=step.accepted[:-1], committed=step.committed[:-1]))


def test_a_tree_is_part_of_every_larger_one(rounds: list[list[replay.Step]]) -> None:
    for step in list(all_steps(rounds))[::5]:
        smaller: set[tuple[int, ...]] = set()
        for budget in range(1, BUDGET + 1):
            larger = replay.nodes(step, budget)
            assert len(larger) == budget and smaller < larger
            smaller = larger


def test_a_budget_of_32_accepts_at_least_what_8_does(rounds: list[list[replay.Step]]) -> None:
    lengths = replay.accept_lengths(rounds, (8, 32))
    assert lengths[32] >= 0.99 * lengths[8] > 0.99
