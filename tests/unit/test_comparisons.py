"""What may be compared, what the best budget is, and whether answers are the same: through the tables."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from store_factory import AR, DFLASH, SMALL, Simulation, build, one, tree

from ddtree_bench import budgets, comparisons, stats


def test_sides_that_answered_other_prompts_have_no_ratio(tmp_path: Path) -> None:
    simulation = replace(SMALL, servers=(AR, DFLASH, tree(8)), failing_requests={("ddtree-b8-k8", 2): (1,)})
    built = build(tmp_path, simulation)
    row = one(built["speedup"], server="ddtree-b8-k8", baseline="AR")
    assert (row["comparison"], row["pairing"]) == ("unequal_work", None)
    counts = "11 of 12 requests of ddtree-b8-k8 succeeded against 12 of 12 requests of ar"
    assert row["reason"] == f"not the same prompts were answered: {counts}"
    assert np.isnan(row["speedup"])
    assert one(built["speedup"], server="dflash", baseline="AR")["comparison"] == "ok"
    budget = one(built["budget"], server="ddtree-b8-k8")
    assert (budget["requests_ok"], budget["requests"]) == (11, 12)


def test_the_same_number_of_other_prompts_is_unequal_work(tmp_path: Path) -> None:
    missing = {("ddtree-b8-k8", 2): (1,), ("ar", 2): (3,)}
    simulation = replace(SMALL, servers=(AR, tree(8)), failing_requests=missing)
    assert set(build(tmp_path / "other", simulation)["speedup"].dropna(subset="reason")["comparison"]) == {
        "unequal_work",
        "no_baseline",
    }
    same = replace(simulation, failing_requests={("ddtree-b8-k8", 2): (1,), ("ar", 2): (1,)})
    assert one(build(tmp_path / "same", same)["speedup"], baseline="AR")["comparison"] == "ok"


@pytest.mark.parametrize(
    ("said", "reason"),
    [
        ({"numerics": "fp32"}, "numerics is fp32 against mixed of the baseline"),
        ({"threads": 1}, "threads is 1 against 2 of the baseline"),
        ({"bit_exact": False}, "bit_exact is False against True of the baseline"),
        ({"version": "0.2.0"}, "engine_version is 0.2.0 against 0.1.0 of the baseline"),
    ],
)
def test_servers_that_say_other_things_of_themselves_are_refused(
    tmp_path: Path, said: dict[str, object], reason: str
) -> None:
    simulation = replace(SMALL, servers=(AR, tree(8)), repeats=1, server_info={"ddtree-b8-k8": said})
    built = build(tmp_path, simulation)
    row = one(built["speedup"], baseline="AR")
    assert row["comparison"] == "refused" and reason in row["reason"]
    column = reason.partition(" ")[0]
    assert one(built["cells"], method="DDTREE")[column] == next(iter(said.values()))


def test_runs_of_one_server_that_disagree_are_refused(demo: dict[str, pd.DataFrame]) -> None:
    cells = demo["cells"].copy()
    cells.loc[(cells["method"] == "AR") & (cells["repeat"] == 2), "numerics"] = "fp32"
    reasons = {row["reason"] for row in comparisons.speedup_rows(cells) if row["baseline"] == "AR"}
    assert reasons == {"no ratio of unlike cells: in the runs of ar numerics is mixed and fp32"}


def test_a_tree_is_compared_with_the_chain_of_its_own_block_size(tmp_path: Path) -> None:
    chains = [replace(DFLASH, name=f"dflash-{block}", block_size=block) for block in (4, 8)]
    speedup = build(tmp_path, replace(SMALL, servers=(*chains, tree(8)), repeats=1))["speedup"]
    assert one(speedup, method="DDTREE", baseline="DFLASH")["baseline_server"] == "dflash-8"
    alone = build(tmp_path / "4", replace(SMALL, servers=(chains[0], tree(8)), repeats=1))["speedup"]
    row = one(alone, method="DDTREE", baseline="DFLASH")
    assert row["comparison"] == "refused" and "block_size is 8 against 4 of the baseline" in row["reason"]


def test_several_equal_baselines_are_refused_by_name(demo: dict[str, pd.DataFrame]) -> None:
    cells = demo["cells"][demo["cells"]["concurrency"] == 1]
    twin = cells[cells["method"] == "AR"].assign(server="ar-again")
    rows = comparisons.speedup_rows(pd.concat([cells, twin], ignore_index=True))
    reasons = {row["reason"] for row in rows if row["baseline"] == "AR"}
    assert reasons == {"several baselines are alike: ar, ar-again; keep one of them"}


def test_what_the_server_counted_is_held_against_the_client(tmp_path: Path) -> None:
    simulation = replace(SMALL, servers=(AR, DFLASH, tree(8)), repeats=1, overcount={"dflash": 1.05, "ar": 1.005})
    cells = build(tmp_path, simulation)["cells"]
    assert one(cells, server="ddtree-b8-k8")["server_generation_tokens"] == 4 * 24
    assert one(cells, server="ddtree-b8-k8")["server_verify_calls"] == one(cells, server="ddtree-b8-k8")["rounds"]
    assert cells.set_index("server")["counter_mismatch"].to_dict() == {
        "ar": False,
        "dflash": True,
        "ddtree-b8-k8": False,
    }


def test_answers_are_held_against_those_of_ar(tmp_path: Path) -> None:
    texts = {("ddtree-b8-k8", 2): "x x y", ("ddtree-b8-k8", 3): "x x x x y"}
    speedup = build(tmp_path, replace(SMALL, servers=(AR, DFLASH, tree(8)), repeats=2, texts=texts))["speedup"]
    same = one(speedup, server="dflash")
    assert (same["prompts_compared"], same["identical_share"]) == (4, 1.0) and pd.isna(same["first_divergence"])
    other = one(speedup, server="ddtree-b8-k8", baseline="AR")
    assert (other["prompts_compared"], other["identical_share"], other["first_divergence"]) == (4, 0.5, 4)
    assert pd.isna(one(speedup, server="ddtree-b8-k8", baseline="DFLASH")["identical_share"])


def test_only_answers_that_both_sides_gave_are_compared(tmp_path: Path) -> None:
    simulation = replace(SMALL, servers=(AR, DFLASH), repeats=1, failing_requests={("ar", 1): (0,)})
    assert one(build(tmp_path, simulation)["speedup"])["prompts_compared"] == 3


SWEEP = (AR, *(tree(budget) for budget in (2, 4, 8, 16, 32, 64, 128)))


def test_the_best_of_noisy_equal_budgets_is_no_gain(tmp_path: Path) -> None:
    """Seven budgets as fast as AR, 3 % between runs, three repeats: the best mean looks faster, the table does not."""
    cells = build(tmp_path, Simulation(servers=SWEEP, n_prompts=1, max_tokens=4))["cells"]
    generator = np.random.default_rng(2026)
    naive, honest = [], []
    for _ in range(30):
        speed = 100 * np.exp(generator.normal(0, 0.03, len(cells)))
        table = pd.DataFrame(
            budgets.budget_rows(cells.assign(throughput_steady_tok_s=speed, throughput_full_tok_s=speed))
        )
        trees = table[table["method"] == "DDTREE"]
        naive.append(trees["throughput_tok_s"].max() / table.loc[table["method"] == "AR", "throughput_tok_s"].item())
        assert trees["chosen_over_ar"].nunique() == 1 and set(trees["chosen_n"].dropna()) == {3}
        honest.append(trees["chosen_over_ar"].dropna().iloc[0])
    # What equal budgets must show is 1; the deviation of a mean of 30 is 0.5 %.
    assert stats.mean_interval(naive).low > 1.01
    claimed = stats.mean_interval(honest)
    assert claimed.low < 1.0 < claimed.high


def test_failures_of_the_chosen_budget_are_counted(demo: dict[str, pd.DataFrame]) -> None:
    cells = demo["cells"][demo["cells"]["concurrency"] == 1].copy()
    best = cells["server"] == "ddtree-b8-k8"
    cells.loc[best, ["throughput_full_tok_s", "throughput_steady_tok_s"]] *= 2
    cells.loc[best & (cells["repeat"] == 2), "status"] = "failed"
    cells.loc[best & (cells["repeat"] == 3), "requests_ok"] = 3
    row = one(pd.DataFrame(budgets.budget_rows(cells)), server="ddtree-b8-k8")
    # Chosen for repeats 2 and 3, where it gave nothing; repeat 1 chose another, whose score is the only pair.
    assert (row["chosen_repeats"], row["chosen_failed"], row["chosen_n"]) == (2, 2, 1)


def test_sweeps_of_unlike_servers_are_chosen_from_apart(tmp_path: Path) -> None:
    other = [replace(server, name=f"{server.name}-m1", max_running_requests=1) for server in (tree(4), tree(8))]
    budget = build(tmp_path, replace(SMALL, servers=(AR, tree(4), tree(8), *other)))["budget"]
    trees = budget[budget["method"] == "DDTREE"]
    assert trees.groupby("max_running_requests")["chosen_repeats"].sum().to_dict() == {1: 3, 8: 3}
    # The baseline admits 8 requests, so the other sweep has no ratio.
    assert trees.loc[trees["max_running_requests"] == 1, "chosen_over_ar"].isna().all()
    assert (
        trees.loc[(trees["max_running_requests"] == 8) & (trees["chosen_repeats"] > 0), "chosen_over_ar"].notna().all()
    )


def test_a_comparison_can_be_named_at_one_concurrency(tmp_path: Path) -> None:
    simulation = replace(SMALL, servers=(AR, tree(8)), concurrencies=(1, 2))
    named = [comparisons.Named("DDTREE", "AR", concurrency=2)]
    speedup = build(tmp_path, simulation, named=named)["speedup"]
    assert speedup[speedup["baseline"] == "AR"].set_index("concurrency")["named"].to_dict() == {1: False, 2: True}
