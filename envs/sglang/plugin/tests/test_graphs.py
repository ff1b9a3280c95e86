from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("sglang.srt")

from sglang.srt.layers.attention.triton_backend import TritonAttnBackend
from sglang.srt.model_executor.runner.decode_cuda_graph_runner import DecodeCudaGraphRunner
from sglang.srt.plugins import load_plugins
from sglang.srt.plugins.hook_registry import HookRegistry
from sglang.srt.speculative import spec_info
from sglang.srt.speculative.dflash_info import DFlashVerifyInput
from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

from sglang_ddtree import graphs, hooks
from sglang_ddtree.candidates import Candidates
from sglang_ddtree.sampling import DDTreeVerifyInput
from sglang_ddtree.widths import Widths

load_plugins()
hooks.install_in_scheduler()


WIDTHS = Widths(block=8, budget=32)
MASK = torch.ones(10, dtype=torch.bool)


@pytest.fixture(autouse=True)
def published(monkeypatch):
    """What SGLang holds of a server with a budget of 32, a cap of 8 and a block of 8."""
    spec = SimpleNamespace(speculative_dflash_block_size=8, speculative_num_draft_tokens=33, speculative_eagle_topk=8)
    monkeypatch.setattr(graphs, "get_spec", lambda: spec)


def runner(width, *, is_draft_worker=False):
    """A graph runner of SGLang's that was not captured yet; its backend has no `topk`, as FlashInfer's has none."""
    made = object.__new__(DecodeCudaGraphRunner)
    made.model_runner = SimpleNamespace(
        is_draft_worker=is_draft_worker, spec_algorithm=SpeculativeAlgorithm.DFLASH, attn_backend=object()
    )
    made.attn_backend = object()
    made.buffers = SimpleNamespace(custom_mask=MASK)
    made.captured_req_width = width
    made._capture_ragged_verify_layout = lambda _num_tokens: None
    return made


def captured(made):
    graphs.spec_info(DecodeCudaGraphRunner.get_spec_info.__wrapped__, made, made.captured_req_width)
    return made


def test_sglang_captures_the_verify_graph_with_the_tree_mask_and_the_type_that_replays_bring():
    info = runner(33).get_spec_info(33)
    assert isinstance(info, DDTreeVerifyInput)
    assert info.custom_mask is MASK
    assert info.draft_token_num == info.num_tokens_per_req == 33
    assert (info.topk, info.max_tree_depth) == (8, 8)


def test_without_the_hook_it_would_capture_a_chain():
    """The reason for the hook: DFLASH's own rule gives no mask to a backend that verifies a chain by causality."""
    made = runner(33)
    made.model_runner.attn_backend = object.__new__(TritonAttnBackend)
    info = DecodeCudaGraphRunner.get_spec_info.__wrapped__(made, 33)
    assert type(info) is DFlashVerifyInput
    assert info.custom_mask is None


def test_the_draft_graph_is_captured_as_dflash_captures_it():
    info = runner(8, is_draft_worker=True).get_spec_info(8)
    assert type(info) is DFlashVerifyInput
    assert info.custom_mask is None


def test_kernels_are_warmed_up_with_a_tree_mask():
    algorithm = SpeculativeAlgorithm.from_string("DDTREE")
    info = spec_info.create_dummy_verify_input(algorithm, MASK, 33, False)
    assert isinstance(info, DDTreeVerifyInput)
    assert info.custom_mask is MASK


def test_graphs_of_the_two_widths_pass():
    graphs.check_captured(captured(runner(33)), runner(8, is_draft_worker=True), WIDTHS)


def test_runners_without_graphs_pass():
    graphs.check_captured(SimpleNamespace(), None, WIDTHS)


@pytest.mark.parametrize(
    ("target", "draft", "said"),
    [(8, 8, "verify graph was captured for 8 rows"), (33, 33, "draft graph was captured for 33 rows")],
)
def test_a_graph_of_the_wrong_width_ends_the_start(target, draft, said):
    with pytest.raises(RuntimeError, match=said):
        graphs.check_captured(captured(runner(target)), runner(draft, is_draft_worker=True), WIDTHS)


def test_a_verify_graph_that_was_captured_past_the_hook_ends_the_start():
    made = runner(33)
    DecodeCudaGraphRunner.get_spec_info.__wrapped__(made, 33)
    with pytest.raises(RuntimeError, match="without a tree mask"):
        graphs.check_captured(made, runner(8, is_draft_worker=True), WIDTHS)


def test_a_hook_that_cannot_be_put_in_place_ends_the_start(monkeypatch):
    monkeypatch.setattr(HookRegistry, "_patched", HookRegistry._patched - {f"{hooks.GRAPH_RUNNER}.get_spec_info"})
    monkeypatch.setattr(HookRegistry, "_apply_target", classmethod(refuse))
    monkeypatch.setattr(HookRegistry, "register", lambda *_args, **_kwargs: None)
    with pytest.raises(RuntimeError, match="get_spec_info"):
        hooks.install_in_scheduler()


def refuse(*_args):
    raise AttributeError("moved")


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
