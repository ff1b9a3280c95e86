"""SGLang's own sizing functions, driven with DDTREE's arguments."""

import pytest

pytest.importorskip("sglang.srt")

from micro_folders import write_drafter, write_target
from sglang.srt.mem_cache import allocation_sizing
from sglang.srt.plugins import load_plugins
from sglang.srt.runtime_context import (
    get_spec,
    max_speculative_num_draft_tokens,
    publish,
    reset_context,
)
from sglang.srt.server_args import ServerArgs
from sglang.srt.speculative.spec_info import SpeculativeAlgorithm
from sglang.srt.speculative.spec_utils import resolve_num_tokens_per_req

from sglang_ddtree import options, reserve, server_checks
from sglang_ddtree.algorithm import DDTreeAlgorithm
from sglang_ddtree.options import Options

BUDGETS = (1, 7, 8, 15, 16, 32, 64)
BLOCKS = (8, 10, 16)

load_plugins()


@pytest.fixture
def server_args(tmp_path):
    """Arguments of a DDTREE server, by default one that can be served."""

    def make(block=8, **values):
        defaults = {
            "model_path": str(write_target(tmp_path / "target")),
            "speculative_draft_model_path": str(write_drafter(tmp_path / "drafter", block)),
            "speculative_algorithm": "DDTREE",
            "device": "cpu",
            "dtype": "float32",
            "attention_backend": "triton",
        }
        return ServerArgs(**(defaults | values))

    return make


@pytest.fixture
def published(server_args):
    """Resolve and publish the arguments of a DDTREE server, as its scheduler does."""

    def publish_server(block, budget, topk_cap=None, **values):
        args = options.attach(server_args(block, **values), Options(budget=budget, topk_cap=topk_cap))
        publish(args, role="scheduler")
        return args

    yield publish_server
    reset_context()


def width(*, is_draft_worker):
    algorithm = SpeculativeAlgorithm.from_string("DDTREE")
    return resolve_num_tokens_per_req(phase="target_verify", spec_algorithm=algorithm, is_draft_worker=is_draft_worker)


@pytest.mark.parametrize("budget", BUDGETS)
@pytest.mark.parametrize("block", BLOCKS)
def test_graphs_are_as_wide_as_their_forwards(published, block, budget):
    published(block, budget)
    assert width(is_draft_worker=False) == budget + 1
    assert width(is_draft_worker=True) == block


@pytest.mark.parametrize("budget", BUDGETS)
@pytest.mark.parametrize("block", BLOCKS)
@pytest.mark.parametrize("page_size", [1, 16])
def test_a_round_has_slots_for_both_forwards_and_overlap_for_two_rounds(published, block, budget, page_size):
    published(block, budget, page_size=page_size)
    widest = max(budget + 1, block)
    assert max_speculative_num_draft_tokens() == widest
    assert allocation_sizing.get_alloc_len_per_decode() == widest
    headroom = reserve.row_headroom(allocation_sizing.get_req_to_token_extra_context_len())
    assert headroom >= 2 * widest + page_size - 1


@pytest.mark.parametrize("block", BLOCKS)
def test_the_accept_rate_counts_the_budget(published, block):
    published(block, 32)
    assert get_spec().speculative_num_draft_tokens - 1 == 32
    assert get_spec().speculative_dflash_block_size == block


def test_the_old_rule_would_reserve_too_little(published, monkeypatch):
    """One width, the block, for both forwards: 8 rows captured and 8 slots reserved where 33 are written."""
    published(8, 32)
    monkeypatch.setattr(DDTreeAlgorithm, "get_num_tokens_per_req_for_target_verify", lambda *_args: 8)
    assert width(is_draft_worker=False) == 8 < get_spec().speculative_num_draft_tokens
    reset_context()
    monkeypatch.setattr(DDTreeAlgorithm, "resolve_max_speculative_num_draft_tokens", lambda *_args: 8)
    with pytest.raises(ValueError, match="below the configured"):  # SGLang sees this half of the fault by itself
        published(8, 32)


@pytest.mark.parametrize(("cap", "topk"), [(None, 4), (2, 2), (1, 2)])
def test_backends_are_told_of_a_tree_even_at_a_cap_of_one(published, cap, topk):
    published(8, 4, topk_cap=cap)
    assert get_spec().speculative_eagle_topk == topk


def test_a_budget_that_no_tree_can_hold_is_cut(published):
    args = published(8, 32, topk_cap=1)
    assert options.of(args).budget == 7
    assert width(is_draft_worker=False) == 8


def test_the_block_is_by_default_the_drafters(published):
    published(10, 16)
    assert width(is_draft_worker=True) == 10


def test_a_cap_above_the_vocabulary_is_cut_to_it(published):
    args = published(8, 400)
    assert options.of(args).effective_cap == 320


@pytest.mark.parametrize(
    ("values", "named"),
    [
        ({"pp_size": 2}, "--pp-size 2"),
        ({"speculative_draft_model_path": None}, "--speculative-draft-model-path"),
        ({"attention_backend": "torch_native"}, "--attention-backend torch_native"),
        ({"speculative_draft_window_size": 64}, "--speculative-draft-window-size 64"),
        ({"speculative_num_draft_tokens": 33}, "--speculative-num-draft-tokens 33"),
        ({"speculative_accept_threshold_single": 0.5}, "--speculative-accept-threshold-single 0.5"),
        ({"speculative_accept_threshold_acc": 0.5}, "--speculative-accept-threshold-acc 0.5"),
        ({"speculative_use_rejection_sampling": True}, "--speculative-use-rejection-sampling"),
    ],
)
def test_what_cannot_be_served_is_refused_by_name_before_anything_is_loaded(server_args, values, named):
    with pytest.raises(options.OptionError, match=named):
        server_args(**values).resolve_once()


def test_sglang_itself_leaves_too_little_room_at_the_end_of_a_row(published):
    """The reason for `row_headroom`: should a release mend it, the hook can go."""
    published(8, 64)
    reserved = allocation_sizing.get_alloc_reserve_per_decode()
    alone = 4 + max_speculative_num_draft_tokens()
    assert alone < reserved <= reserve.row_headroom(alone)


@pytest.mark.parametrize(
    ("backend", "page_size", "right"),
    [("fa3", 1, True), ("fa3", 16, False), ("triton", 1, False), ("flashinfer", 1, False)],
)
def test_a_sliding_window_needs_a_backend_that_gives_nodes_their_positions(backend, page_size, right):
    if right:
        server_checks.check_window(backend, page_size, "gpt-oss")
    else:
        with pytest.raises(options.OptionError, match="--model-path gpt-oss: a target with a sliding window"):
            server_checks.check_window(backend, page_size, "gpt-oss")


def test_a_round_log_that_cannot_be_written_is_refused_without_making_anything(server_args, tmp_path):
    (tmp_path / "file").write_text("")
    path = tmp_path / "file" / "rounds.jsonl"
    args = options.attach(server_args(), Options(round_log=str(path)))
    with pytest.raises(options.OptionError, match="--speculative-ddtree-round-log"):
        args.resolve_once()
    good = tmp_path / "new" / "rounds.jsonl"
    options.attach(server_args(), Options(round_log=str(good))).resolve_once()
    assert not good.parent.exists()
