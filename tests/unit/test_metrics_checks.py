"""Checks of a cell where it is hard to say what they should say: short, capped, overloaded, retracted, undeclared."""

from __future__ import annotations

from typing import Any

import pytest
from raw_rows import details, failed, frame, row, steady_stream
from test_metrics_load import OPEN, arriving, cell, check, document

from ddtree_bench import metrics
from ddtree_bench.load import server_samples
from ddtree_bench.plan import Load

approx = pytest.approx

CHAIN = {"spec_tree_nodes": 16, "spec_tree_branching_nodes": 0}


def sampled(*samples: tuple[float, float, float]) -> Any:
    return server_samples.frame(list(samples))


def in_flight(n: int) -> list[dict[str, Any]]:
    """n requests of 4 s that are all sent at once."""
    return [steady_stream(40, 0.1, index=i) for i in range(n)]


# The load


def test_a_few_samples_are_no_proof_of_another_load() -> None:
    """Three samples that all met 15 of 16 requests may have met one moment between two; 35 did not."""
    few = document(*in_flight(16), load=Load(16), server_samples=sampled((0.6, 15, 0), (1.6, 15, 0), (2.6, 15, 0)))
    assert check(few, "delivered_load")[0] is None
    assert "too uncertain to tell (± 0.58); measure longer" in check(few, "delivered_load")[1]
    many = sampled(*[(0.1 * i, 14.0, 0.0) for i in range(1, 36)])
    assert check(document(*in_flight(16), load=Load(16), server_samples=many), "delivered_load")[0] is False


def test_only_samples_that_met_all_requests_tell_how_many_were_admitted() -> None:
    """The server was met with 1 + 3 of 16 requests: that it runs no more than 1 is not shown by this."""
    ramp = sampled((0.6, 1, 3), (1.6, 1, 3), (2.6, 1, 3))
    assert check(document(*in_flight(16), load=Load(16), server_samples=ramp), "admitted") == (
        None,
        "in none of 3 samples were 16 requests on the server",
    )
    few = document(*in_flight(16), load=Load(16), server_samples=sampled((0.6, 1, 3), (1.6, 12, 4), (2.6, 12, 4)))
    assert check(few, "admitted")[0] is None
    assert "mean of 2 samples with all; 10 are needed" in check(few, "admitted")[1]
    full = sampled((0.6, 1, 3), *[(1.0 + 0.2 * i, 12, 4) for i in range(10)])
    assert check(document(*in_flight(16), load=Load(16), server_samples=full), "admitted") == (
        False,
        "at most 12 of 16 ran at once, 4.0 waited, mean of 10 samples with all",
    )


def queueing(n: int, every: float, took: float, concurrency: int) -> list[dict[str, Any]]:
    """An open loop whose most in flight keeps requests from their start: each place takes the next when it is free."""
    free, rows = [0.0] * concurrency, []
    for i in range(n):
        place = free.index(min(free))
        sent = max(every * i, free[place] + 1e-4)
        raw = steady_stream(11, took / 11, t_send=sent, first=took / 11, index=i, intended_start=every * i)
        free[place] = raw["t_end"]
        rows.append(raw)
    return rows


def test_an_open_loop_whose_most_in_flight_binds_is_none() -> None:
    """4 requests a second that take 1 s each need 4 places; with 2 every one but the first two waits."""
    load = Load(2, "open", 4.0, "constant")
    ok, detail = check(document(*queueing(20, 0.25, 1.0, 2), load=load), "delivered_load")
    assert ok is False
    assert detail.startswith("18 of 20 requests waited, up to 4.5")
    assert detail.endswith("the load was no open loop; raise --concurrency or lower the rate")
    free = document(*queueing(20, 0.25, 1.0, 8), load=Load(8, "open", 4.0, "constant"))
    assert check(free, "delivered_load")[0] is None, "there are no samples"


def test_a_client_that_sends_late_beside_free_places_has_not_capped_the_load() -> None:
    assert check(document(*arriving(20, late=0.3), load=OPEN), "delivered_load")[0] is None


def test_an_open_loop_above_what_the_server_completes_is_told_so() -> None:
    """Each request takes 1 s longer than the one before, and they arrive every 0.5 s."""
    rows = [
        steady_stream(11, 0.1 + 0.1 * i, first=0.2, t_send=0.5 * i, index=i, intended_start=0.5 * i) for i in range(20)
    ]
    ok, detail = check(document(*rows, load=OPEN), "steady_window")
    assert ok is False
    assert "with each second of arrivals requests took 2.0 s longer" in detail
    assert "the rate is above what the server completes" in detail and "send more" not in detail
    short = check(document(*arriving(3), load=OPEN), "steady_window")
    assert short[0] is False and short[1].endswith("send more requests")


def test_a_closed_loop_with_a_failed_request_has_its_steady_window_and_is_not_complete() -> None:
    rows = [*in_flight(2), failed("timeout", index=2, t_send=0.0, t_end=3.0)]
    found = document(*rows, load=Load(3))
    assert found["steady_window_s"] == approx(3.0)
    assert found["throughput_steady_tok_s"] == approx(2 * 29 / 3.0)
    assert [check(found, name)[0] for name in ("steady_window", "complete")] == [True, False]


# The method


def test_rounds_in_an_ar_cell_are_shown_and_fail_it() -> None:
    found = document(steady_stream(5, 0.1, spec=details([1, 0, 1])), method="AR")
    assert check(found, "method") == (False, "2 rounds in an AR cell")
    assert (found["rounds"], found["accept_length"], found["identity_broken"]) == (2, approx(2), 0)
    assert found["round_time_s"] == approx(0.2)
    assert check(found, "identity")[0] is True


@pytest.mark.parametrize(("method", "rounds", "ok"), [("AR", 0, True), ("AR", 7, False), ("DFLASH", 0, False)])
def test_the_servers_count_of_rounds_decides_where_answers_tell_of_none(method: str, rounds: int, ok: bool) -> None:
    counted = {"values": {"verify_calls_total": float(rounds)}, "missing": {}}
    found = document(steady_stream(5, 0.1), method=method, counters=counted)
    assert check(found, "method") == (ok, f"{rounds} rounds in a{'n' if method == 'AR' else ''} {method} cell")


def test_a_drafting_method_without_rounds_fails_unless_none_was_needed() -> None:
    none = {"spec_verify_ct": 0}
    assert check(document(steady_stream(5, 0.1, spec=none), method="DDTREE"), "method")[0] is False
    short = document(row([(1.0, "x", 1)], tokens=1, spec=none), method="DDTREE")
    assert check(short, "method") == (None, "no answer was longer than the prefill's token")
    assert check(document(steady_stream(5, 0.1)), "method") == (None, "the method was not given")


def test_chains_of_a_method_that_was_not_given_are_no_fault() -> None:
    chain = steady_stream(5, 0.1, spec=details([1, 0, 1], **CHAIN))
    assert check(document(chain), "tree_branches") == (
        None,
        "all trees were chains, which is right for DFLASH; give --method",
    )
    assert check(document(chain, method="DDTREE"), "tree_branches")[0] is False


def test_what_is_known_of_the_servers_release_is_told_beside_what_is_missing() -> None:
    note = "SGLang 0.5.16 ignores return_spec_tokens_details"
    counted = {"values": {}, "missing": {}, "notes": [note]}
    found = document(steady_stream(5, 0.1), method="DDTREE", counters=counted)
    assert found["server"]["notes"] == [note]
    assert check(found, "identity")[1].endswith(note)
    assert check(found, "method")[1].endswith(note)


# Retractions


def retracted(n: float, *rows: dict[str, Any]) -> dict[str, Any]:
    return document(*rows, method="DDTREE", counters={"values": {"retractions_total": n}, "missing": {}})


def test_retractions_that_only_the_server_counts_are_prefills_of_the_cell() -> None:
    """5 = 1 + 2 + 2, and 6 with the token of a second prefill: 4 + 4 tokens in 2 + 2 rounds."""
    rows = [steady_stream(6, 0.1, spec=details([1, 0, 1])), steady_stream(5, 0.1, index=1, spec=details([1, 0, 1]))]
    found = retracted(1.0, *rows)
    assert found["accept_length"] == approx(2.0)
    assert found["identity_broken"] == 0
    assert check(found, "identity") == (
        True,
        "N is not prefills + rounds + accepted drafts in 0 of 2 requests; 1 retractions by the server's count",
    )
    without = retracted(0.0, *rows)
    assert (without["accept_length"], without["identity_broken"]) == (approx(9 / 4), 1)
    more = retracted(1.0, steady_stream(7, 0.1, spec=details([1, 0, 1])), rows[1])
    assert check(more, "identity")[0] is False, "two tokens more, one retraction"


def test_retractions_beside_failed_requests_may_have_been_theirs() -> None:
    rows = [steady_stream(6, 0.1, spec=details([1, 0, 1])), failed("timeout", index=1)]
    found = retracted(1.0, *rows)
    assert (found["accept_length"], found["identity_broken"]) == (None, None)
    assert check(found, "identity") == (
        None,
        "1 retractions, and whether of requests that are ok the server does not tell",
    )


def test_retractions_that_answers_tell_of_are_not_taken_twice() -> None:
    told = steady_stream(6, 0.1, spec=details([1, 0, 1], spec_retractions=1))
    assert retracted(1.0, told)["accept_length"] == approx(2.0)
    assert retracted(5.0, told)["identity_broken"] == 0


# Rounds that some answers did not need, and numbers that some do not tell


def test_an_answer_of_one_token_without_details_had_no_round() -> None:
    """SGLang tells nothing of such an answer; without this the whole cell would have no rounds."""
    drafted = steady_stream(5, 0.1, spec=details([1, 0, 1], **CHAIN))
    at_once = row([(2.0, "x", 1)], tokens=1, index=1, t_send=1.9)
    found = cell(drafted, at_once, method="DFLASH")
    names = ("rounds", "accepted_drafts", "accept_length", "accept_length_macro", "identity_broken", "tree_is_chain")
    assert [found[name] for name in names] == [2, 2, approx(2), approx(2), 0, True]
    assert metrics.request_metrics(frame(drafted, at_once))["rounds"].tolist() == [2, 0]
    longer = row([(2.0, "x", 2)], tokens=2, index=1, t_send=1.9)
    assert cell(drafted, longer, method="DFLASH")["rounds"] is None, "a second token came from some round"
    assert cell(at_once, method="DFLASH")["rounds"] is None, "nothing says that the server tells of rounds"


def test_numbers_that_one_answer_lacks_are_not_those_of_the_cell() -> None:
    told = steady_stream(5, 0.1, spec=details([1, 0, 1], spec_tree_max_depth=4))
    silent = {"spec_verify_ct": 2}
    both = cell(told, steady_stream(5, 0.1, index=1, spec=silent), method="DDTREE")
    names = ("accepted_drafts", "proposed_drafts", "tree_max_depth")
    assert [both[name] for name in names] == [None, None, None]
    assert [cell(told, method="DDTREE")[name] for name in names] == [2, 4, 4]


def test_accepted_drafts_are_known_without_a_histogram() -> None:
    plain = steady_stream(5, 0.1, spec={"spec_verify_ct": 2, "spec_num_correct_drafts": 2})
    assert cell(plain, method="DDTREE")["accepted_drafts"] == 2
    assert metrics.request_metrics(frame(plain))["accepted_drafts"].tolist() == [2]


# Prompts


@pytest.mark.parametrize(
    ("prompt", "cached", "ok"), [(24, 20, True), (60, 59, True), (100, 65, False), (200, 90, True)]
)
def test_a_template_that_is_most_of_a_short_prompt_was_not_seen_before(prompt: int, cached: int, ok: bool) -> None:
    rows = [steady_stream(4, 0.1, index=i, prompt_tokens=prompt, cached_prompt_tokens=cached) for i in range(3)]
    assert check(document(*rows), "cached_prompts")[0] is ok
