from types import SimpleNamespace

import pytest

from sglang_ddtree.widths import Widths

BUDGETS = (1, 7, 8, 15, 16, 32, 64)
BLOCKS = (8, 10, 16)


@pytest.mark.parametrize("budget", BUDGETS)
@pytest.mark.parametrize("block", BLOCKS)
def test_target_and_draft_have_widths_of_their_own(budget, block):
    widths = Widths(block, budget)
    assert widths.verify == budget + 1
    assert widths.draft == block
    assert widths.reserve >= widths.verify
    assert widths.reserve >= widths.draft


def test_widths_are_found_again_in_resolved_arguments():
    resolved = SimpleNamespace(speculative_dflash_block_size=8, speculative_num_draft_tokens=33)
    assert Widths.resolved(resolved) == Widths(block=8, budget=32)


def test_a_tree_is_no_deeper_than_the_block_and_than_its_nodes():
    assert Widths(block=8, budget=32).depth == 7
    assert Widths(block=8, budget=4).depth == 4
    assert Widths(block=16, budget=15).depth == 15


def test_the_case_that_crashed_reserves_what_it_writes():
    assert Widths(block=8, budget=32).reserve == 33
