"""Accept length, acceptance by depth, the identity of tokens and rounds, and round time, computed by hand."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import strategies as st
from laws import law
from raw_rows import details, failed, frame, row, steady_stream

from ddtree_bench import metrics
from ddtree_bench.metrics.speculation import details as parse
from ddtree_bench.metrics.speculation import identity_holds
from ddtree_bench.plan import Load

approx = pytest.approx


def cell(*rows: dict[str, Any], method: str = "DDTREE") -> dict[str, Any]:
    return metrics.cell_metrics(frame(*rows), Load(1), method)


def request(tokens: int, spec: dict[str, Any] | None, **fields: Any) -> dict[str, Any]:
    return steady_stream(tokens, 0.01, spec=spec, **fields)


def test_fault_08_ratio_of_sums_and_mean_of_requests_are_two_numbers() -> None:
    """4 x 512 tokens in 128 rounds, 4 x 3 in one: 3.98 pooled, 3.00 as a mean; 3.50 counts the prefill's token."""
    long = details([0, 0, 1, 127])  # 511 = 127 x 4 + 3
    short = details([0, 1])  # 2 = 1 x 2
    of_cell = cell(
        *[request(512, long, index=i) for i in range(4)], *[request(3, short, index=4 + i) for i in range(4)]
    )
    assert of_cell["accept_length"] == approx((4 * 511 + 4 * 2) / (4 * 129)) == approx(3.98, abs=0.005)
    assert of_cell["accept_length_macro"] == approx((511 / 128 + 2) / 2) == approx(3.00, abs=0.005)
    assert of_cell["accept_length_rounds"] == approx(of_cell["accept_length"])
    assert of_cell["identity_broken"] == 0
    assert (of_cell["rounds"], of_cell["accepted_drafts"]) == (516, 4 * 383 + 4)


def test_the_cut_of_the_last_round_is_in_the_pooled_form_only() -> None:
    """Three rounds of 3, 0 and 4 accepted drafts would give 1 + 10 tokens; max_tokens 8 cuts three of them."""
    of_cell = cell(request(8, details([1, 0, 0, 1, 1])))
    assert of_cell["accept_length"] == approx(7 / 3)
    assert of_cell["accept_length_rounds"] == approx(10 / 3)
    assert of_cell["identity_broken"] == 0


@pytest.mark.parametrize(
    ("tokens", "histogram", "rounds", "holds"),
    [
        (11, [1, 0, 0, 1, 1], 3, True),
        (7, [1, 0, 0, 1, 1], 3, True),  # the most that a last round of 4 accepted drafts can lose
        (6, [1, 0, 0, 1, 1], 3, False),  # more is cut than one round can lose
        (12, [1, 0, 0, 1, 1], 3, False),  # more tokens than were committed
        (11, [1, 0, 0, 1, 1], 4, False),  # a round without an entry
        (3, [2], 2, True),
        (2, [2], 2, False),  # rounds without an accepted draft have nothing to cut
        (1, [], 0, True),  # the prefill's token was the last
    ],
)
def test_identity_of_tokens_rounds_and_accepted_drafts(
    tokens: int, histogram: list[int], rounds: int, holds: bool
) -> None:
    spec = details(histogram, spec_verify_ct=rounds)
    assert identity_holds(parse(request(1, spec)), tokens) is holds
    assert cell(request(tokens, spec))["identity_broken"] == (0 if holds else 1)
    assert metrics.request_metrics(frame(request(tokens, spec)))["identity_holds"].tolist() == [holds]


@pytest.mark.parametrize("name", ["spec_retractions", "num_retractions"])
def test_each_retraction_adds_a_prefill_whose_token_no_round_committed(name: str) -> None:
    """Two retractions: 3 prefills + 3 rounds + 7 accepted drafts."""
    spec = details([1, 0, 0, 1, 1])
    retracted = request(13, spec | {name: 2})
    of_cell = cell(retracted, request(11, spec, index=1))
    assert of_cell["identity_broken"] == 0
    assert of_cell["accept_length"] == of_cell["accept_length_rounds"] == approx(20 / 6)
    assert metrics.request_metrics(frame(retracted))["accept_length"].tolist() == [approx(10 / 3)]
    assert cell(request(13, spec))["identity_broken"] == 1


@pytest.mark.parametrize("retractions", [None, 0, "2", [2], -1])
def test_retractions_that_the_server_does_not_tell_of_are_none(retractions: Any) -> None:
    spec = parse(request(1, details([1, 0, 0, 1, 1], spec_retractions=retractions)))
    assert spec.prefills == 1
    assert identity_holds(spec, 11) is True


def test_a_retraction_before_any_round_leaves_two_prefills() -> None:
    spec = {"spec_verify_ct": 0, "spec_correct_drafts_histogram": None, "spec_retractions": 1}
    assert identity_holds(parse(request(1, spec)), 2) is True
    assert identity_holds(parse(request(1, spec)), 1) is None


def test_fault_09_acceptance_rate_and_accept_length_are_apart() -> None:
    """More proposed drafts: the rate falls while the accept length rises. Neither stands for the other."""
    narrow = cell(request(31, details([0, 0, 10], spec_num_proposed_drafts=40)))
    wide = cell(request(41, details([0, 0, 0, 10], spec_num_proposed_drafts=160)))
    assert (narrow["acceptance_rate"], wide["acceptance_rate"]) == (approx(0.5), approx(30 / 160))
    assert (narrow["accept_length"], wide["accept_length"]) == (approx(3), approx(4))


def test_fault_10_older_names_of_the_details_are_understood() -> None:
    old = {
        "spec_verify_ct": 2,
        "spec_accept_histogram": [1, 0, 1],
        "spec_accepted_drafts": 2,
        "spec_proposed_drafts": 14,
    }
    of_cell = cell(request(5, old))
    assert (of_cell["accept_length_rounds"], of_cell["acceptance_rate"]) == (approx(2), approx(1 / 7))


@pytest.mark.parametrize(
    "spec",
    [
        None,
        {"spec_verify_ct": None, "spec_correct_drafts_histogram": None},
        {"spec_verify_ct": "9", "spec_correct_drafts_histogram": [1, None]},
        {"spec_verify_ct": 2**70, "spec_correct_drafts_histogram": [2**70, -1]},
    ],
)
def test_fault_10_details_that_are_null_or_absent_are_unknown(spec: dict[str, Any] | None) -> None:
    known = request(4, details([1, 1]))
    of_cell = cell(known, request(4, spec, index=1))
    names = (
        "rounds",
        "accept_length",
        "accept_length_rounds",
        "accept_length_macro",
        "round_time_s",
        "identity_broken",
    )
    assert [of_cell[name] for name in names] == [None] * len(names)
    assert of_cell["identity_broken"] is None
    assert of_cell["throughput_full_tok_s"] is not None


def test_an_answer_of_the_prefills_token_alone_takes_nothing_from_the_cell() -> None:
    at_once = request(1, {"spec_verify_ct": 0, "spec_correct_drafts_histogram": None}, index=1)
    of_cell = cell(request(4, details([1, 1])), at_once)
    assert (of_cell["accept_length"], of_cell["accept_length_rounds"]) == (approx(1.5), approx(1.5))
    assert (of_cell["accept_length_macro"], of_cell["identity_broken"]) == (approx(1.5), 0)


def test_failed_requests_are_in_no_accept_length() -> None:
    bad = request(9, details([0, 0, 0, 2]), index=1, status="truncated")
    assert cell(request(4, details([1, 1])), bad)["accept_length"] == approx(1.5)
    assert metrics.acceptance_by_depth(frame(request(4, details([1, 1])), bad))["rounds"].tolist() == [2]


def test_ar_has_a_step_time_and_no_accept_length() -> None:
    spec = {"spec_verify_ct": 0, "spec_correct_drafts_histogram": None}
    of_cell = cell(steady_stream(10, 0.02, spec=spec), method="AR")
    assert of_cell["rounds"] == 0
    assert (of_cell["accept_length"], of_cell["accept_length_macro"], of_cell["identity_broken"]) == (None, None, None)
    assert of_cell["round_time_s"] == of_cell["decode_s_per_token"] == approx(0.02)


def test_speed_up_of_decoding_is_accept_length_times_the_ratio_of_step_times() -> None:
    """Rounds of 30 ms with 3 tokens; the first event brings the prefill's token and the first round's."""
    ends = [4, 7, 10, 13]
    tree = cell(row([(0.1 + 0.03 * i, "x", n) for i, n in enumerate(ends)], tokens=13, spec=details([0, 0, 4])))
    ar = cell(steady_stream(13, 0.02), method="AR")
    assert tree["round_time_s"] == approx(0.03)
    assert tree["decode_s_per_token"] == approx(0.01)
    assert ar["decode_s_per_token"] / tree["decode_s_per_token"] == approx(
        tree["accept_length"] * ar["round_time_s"] / tree["round_time_s"]
    )


def test_tree_proof_by_round() -> None:
    spec = details([1, 1], spec_tree_nodes=16, spec_tree_branching_nodes=3, spec_tree_max_depth=5)
    deep = details([0, 2], spec_tree_nodes=16, spec_tree_branching_nodes=1, spec_tree_max_depth=6)
    of_cell = cell(request(4, spec), request(5, deep, index=1))
    assert (of_cell["tree_nodes_per_round"], of_cell["tree_branching_nodes_per_round"]) == (8, 1)
    assert (of_cell["tree_max_depth"], of_cell["tree_is_chain"]) == (6, False)


def test_a_tree_that_never_branched_was_a_chain() -> None:
    spec = details([1, 1], spec_tree_nodes=16, spec_tree_branching_nodes=0, spec_tree_max_depth=8)
    assert cell(request(4, spec))["tree_is_chain"] is True
    assert cell(request(4, details([1, 1])))["tree_is_chain"] is None


def test_acceptance_by_depth_by_hand() -> None:
    found = metrics.acceptance_by_depth(
        frame(request(9, details([1, 2, 1])), request(9, details([1, 0, 0, 5]), index=1), failed("timeout", index=2))
    )
    assert found["depth"].tolist() == [1, 2, 3]
    assert found["probability"].tolist() == [approx(8 / 10), approx(6 / 10), approx(5 / 10)]
    assert found["rounds"].tolist() == [10, 10, 10]


def test_acceptance_by_depth_without_rounds_is_empty_with_its_columns() -> None:
    for rows in (frame(), frame(request(3, None)), frame(request(1, details([0, 0])))):
        found = metrics.acceptance_by_depth(rows)
        assert found.empty
        assert list(found.columns) == ["depth", "probability", "rounds"]


@law(st.lists(st.lists(st.integers(0, 50), min_size=1, max_size=9).filter(any), min_size=1, max_size=6))
def test_accept_length_is_one_plus_the_sum_of_acceptance_by_depth(histograms: list[list[int]]) -> None:
    rows = [request(1, details(h), index=i) for i, h in enumerate(histograms)]
    by_depth = metrics.acceptance_by_depth(frame(*rows))
    assert cell(*rows)["accept_length_rounds"] == approx(1 + by_depth["probability"].sum())
    assert (np.diff(by_depth["probability"]) <= 1e-12).all()


@law(
    accepted=st.lists(st.integers(0, 7), min_size=1, max_size=40),
    cut=st.integers(0, 7),
)
def test_identity_holds_for_every_cut_that_a_last_round_can_have(accepted: list[int], cut: int) -> None:
    spec = parse(request(1, details(np.bincount(accepted).tolist())))
    committed = 1 + sum(accepted) + len(accepted)
    assert identity_holds(spec, committed - min(cut, accepted[-1])) is True
    assert identity_holds(spec, committed + 1) is False
