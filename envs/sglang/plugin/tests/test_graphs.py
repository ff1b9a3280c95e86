from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("sglang.srt")

from sglang_ddtree import graphs
from sglang_ddtree.candidates import Candidates
from sglang_ddtree.sampling import DDTreeVerifyInput
from sglang_ddtree.widths import Widths


def runner(width, *, is_draft_worker=False, mask=None):
    return SimpleNamespace(
        model_runner=SimpleNamespace(is_draft_worker=is_draft_worker),
        buffers=SimpleNamespace(custom_mask=mask),
        captured_req_width=width,
        attn_backend=SimpleNamespace(topk=8),
    )


def original(*_args):
    return "DFLASH's"


def test_the_verify_graph_is_captured_with_the_tree_mask_and_the_type_that_replays_bring():
    mask = torch.ones(10, dtype=torch.bool)
    info = graphs.spec_info(original, runner(33, mask=mask), 33)
    assert isinstance(info, DDTreeVerifyInput)
    assert info.custom_mask is mask
    assert info.draft_token_num == info.num_tokens_per_req == 33
    assert info.topk > 1


def test_the_draft_graph_is_captured_as_dflash_captures_it():
    assert graphs.spec_info(original, runner(8, is_draft_worker=True), 8) == "DFLASH's"


MASK = torch.ones(1, dtype=torch.bool)


def test_graphs_of_the_two_widths_pass():
    graphs.check_captured(runner(33, mask=MASK), runner(8), Widths(block=8, budget=32))


def test_runners_without_graphs_pass():
    graphs.check_captured(SimpleNamespace(), None, Widths(block=8, budget=32))


@pytest.mark.parametrize(
    ("target", "draft", "said"),
    [
        (runner(8, mask=MASK), runner(8), "verify graph was captured for 8 rows a request, not 33"),
        (runner(33, mask=MASK), runner(33), "draft graph was captured for 33 rows a request, not 8"),
        (runner(33), runner(8), "without a tree mask"),
    ],
)
def test_a_graph_of_the_wrong_width_or_without_mask_ends_the_start(target, draft, said):
    with pytest.raises(RuntimeError, match=said):
        graphs.check_captured(target, draft, Widths(block=8, budget=32))


class Head:
    """Candidates that tell which hidden state they came from."""

    cap = 2

    def __call__(self, hidden):
        ids = hidden[:, :1].long() * 10 + torch.arange(2)
        return Candidates(ids, -ids.float())


def test_candidates_of_a_replay_are_those_of_the_masks_behind_the_anchor():
    widths = Widths(block=4, budget=2)  # a tree of two nodes is at most two deep: the third mask is not needed
    folded = graphs.GraphCandidates(Head(), widths, max_batch=3, device="cpu")
    hidden = torch.arange(8.0)[:, None].expand(8, 5)  # two requests of four rows
    folded(hidden, None)
    found = folded.read(2)
    assert found.ids[:, 0].tolist() == [10, 20, 50, 60]
    assert found.log_probs.tolist() == (-found.ids.float()).tolist()


def test_a_smaller_replay_reads_its_own_requests_alone():
    folded = graphs.GraphCandidates(Head(), Widths(block=4, budget=3), max_batch=3, device="cpu")
    folded(torch.ones(12, 5), None)
    folded(torch.full((4, 5), 7.0), None)
    assert folded.read(1).ids[:, 0].tolist() == [70, 70, 70]
