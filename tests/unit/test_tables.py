"""The tables, built from a store filled with simulated runs."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import tokenizers
from store_factory import AR, DEMO, DFLASH, SMALL, Made, build, make_results, one, tree

from ddtree_bench import columns, comparisons, metrics, tables
from ddtree_bench.load.tokenizer import Tokenizer
from ddtree_bench.plan import Load
from ddtree_bench.records.store import REQUESTS
from ddtree_bench.table_rows import Counting

CRASH = "the server exited with code 3 during chat at c1"


@pytest.fixture(scope="module")
def failing(tmp_path_factory: pytest.TempPathFactory) -> dict[str, pd.DataFrame]:
    broken = {("ddtree-b16-k8", r): CRASH for r in (1, 2, 3)} | {("ddtree-b4-k4", 2): CRASH}
    return build(tmp_path_factory.mktemp("failing"), replace(SMALL, failing=broken))


def test_one_row_a_cell_with_the_metrics_of_its_requests(tmp_path: Path) -> None:
    made = make_results(tmp_path, replace(SMALL, servers=(tree(8),), repeats=1))
    built = tables.build_tables(made.views, made.store)
    row = built["cells"].iloc[0]
    raw = pd.read_parquet(next(made.store.rglob(REQUESTS)))
    expected = metrics.cell_metrics(raw, Load(1), "DDTREE")
    assert row["output_tokens"] == 4 * 24
    assert row["throughput_full_tok_s"] == pytest.approx(expected["throughput_full_tok_s"])
    assert (row["method"], row["budget"], row["topk_cap"], row["verify_width"]) == ("DDTREE", 8, 8, 9)
    assert len(built["requests"]) == 4 and built["requests"]["index"].tolist() == [0, 1, 2, 3]


def test_every_column_of_every_table_is_documented(demo: dict[str, pd.DataFrame]) -> None:
    for name, frame in demo.items():
        assert list(frame.columns) == list(columns.TABLES[name])
        for column in frame.columns:
            meaning = columns.TABLES[name][column].meaning
            assert meaning.endswith(".") and len(meaning) > 5, f"{name}.{column}"


def test_units_in_names_agree_with_the_documentation() -> None:
    for name, known in columns.TABLES.items():
        for column, documented in known.items():
            if column.endswith("_tok_s"):
                assert documented.unit == "tokens/s", f"{name}.{column}"
            elif column.endswith(("_req_s", "_per_s")):
                assert documented.unit == "requests/s", f"{name}.{column}"
            elif column.endswith("_s"):
                assert documented.unit in ("s", "s/token"), f"{name}.{column}"


def test_the_page_about_tables_is_in_step() -> None:
    page = Path(__file__).parents[2] / "docs" / "tables.md"
    assert page.read_text() == columns.document(), "run: python -m ddtree_bench generate"


def test_an_undocumented_column_is_an_error() -> None:
    with pytest.raises(KeyError, match="table cells: speed_of_light not documented"):
        tables.typed([{"speed_of_light": 1.0}], "cells")


def test_csv_gives_back_the_same_tables_and_bytes(failing: dict[str, pd.DataFrame], tmp_path: Path) -> None:
    first = tables.write_tables(failing, tmp_path / "a")
    back = tables.read_tables(tmp_path / "a")
    for name in tables.TABLES:
        pd.testing.assert_frame_equal(back[name], failing[name])
    second = tables.write_tables(back, tmp_path / "b")
    assert [path.name for path in first] == [f"{name}.csv" for name in tables.TABLES]
    assert [path.read_bytes() for path in first] == [path.read_bytes() for path in second]


def test_the_order_of_views_does_not_matter(tmp_path: Path) -> None:
    made = make_results(tmp_path, replace(SMALL, repeats=2))
    forward = tables.build_tables(made.views, made.store)
    backward = tables.build_tables(made.views[::-1], made.store)
    for name in tables.TABLES:
        pd.testing.assert_frame_equal(forward[name], backward[name])


def test_warm_up_views_are_passed_over(tmp_path: Path) -> None:
    made = make_results(tmp_path, replace(SMALL, repeats=1))
    warmups = list(tmp_path.rglob("warmup-*.json"))
    assert len(warmups) == len(DEMO)
    assert len(tables.build_tables([*made.views, *warmups], made.store)["cells"]) == len(DEMO)


def test_a_view_given_twice_counts_once_and_two_views_of_a_cell_are_refused(tmp_path: Path) -> None:
    made = _made(tmp_path)
    assert len(tables.build_tables(made.views * 2, made.store)["cells"]) == 1
    stale = made.views[0].with_name("old-name.json")
    stale.write_bytes(made.views[0].read_bytes())
    with pytest.raises(tables.TablesError, match=r"chat-c1-r1\..*\.json and .*old-name\.json stand for the same cell"):
        tables.build_tables([*made.views, stale], made.store)


def test_no_views_give_empty_tables() -> None:
    empty = tables.build_tables([], Path("nowhere"))
    assert all(frame.empty and list(frame.columns) == list(columns.TABLES[name]) for name, frame in empty.items())


def test_an_absent_table_is_named(tmp_path: Path) -> None:
    with pytest.raises(tables.TablesError, match=r"cells\.csv: no such table; `snakemake make_tables` makes it"):
        tables.read_tables(tmp_path)


def test_a_table_of_another_version_is_named(demo: dict[str, pd.DataFrame], tmp_path: Path) -> None:
    tables.write_tables(demo, tmp_path)
    demo["runs"].rename(columns={"kernel": "kernel_release"}).to_csv(tmp_path / "runs.csv", index=False)
    with pytest.raises(
        tables.TablesError, match=r"runs\.csv: of another version, .*: kernel, kernel_release;|in kernel"
    ):
        tables.read_tables(tmp_path)
    assert issubclass(tables.MissingEntry, tables.TablesError)


def _made(folder: Path) -> Made:
    return make_results(folder, replace(SMALL, servers=(AR,), repeats=1))


def test_a_view_without_its_entry_is_named(tmp_path: Path) -> None:
    made = _made(tmp_path)
    next(made.store.rglob("record.json")).unlink()
    with pytest.raises(tables.MissingEntry, match=f"{made.views[0].name}: its entry is not in the store"):
        tables.build_tables(made.views, made.store)


def test_a_view_of_other_content_is_named(tmp_path: Path) -> None:
    made = _made(tmp_path)
    view = json.loads(made.views[0].read_text()) | {"content_sha256": "0" * 64}
    made.views[0].write_text(json.dumps(view))
    with pytest.raises(tables.MissingEntry, match=f"{made.views[0].name}: its entry .* is not what it was copied from"):
        tables.build_tables(made.views, made.store)


@pytest.mark.parametrize("damage", [lambda path: path.unlink(), lambda path: path.write_bytes(b"other")])
def test_damaged_requests_are_named(tmp_path: Path, damage: object) -> None:
    made = _made(tmp_path)
    damage(next(made.store.rglob(REQUESTS)))  # type: ignore[operator]
    with pytest.raises(tables.MissingEntry, match=r"requests\.parquet is missing or damaged"):
        tables.build_tables(made.views, made.store)


def test_the_three_factors_multiply_to_the_speedup(demo: dict[str, pd.DataFrame]) -> None:
    speedup = demo["speedup"]
    assert set(speedup["baseline"]) == {"AR", "DFLASH"} and (speedup["comparison"] == "ok").all()
    product = speedup["accept_length_factor"] * speedup["step_time_factor"] * speedup["residual_factor"]
    np.testing.assert_allclose(product, speedup["speedup"], rtol=1e-9)
    against_ar = speedup[(speedup["baseline"] == "AR") & (speedup["concurrency"] == 1)]
    lengths = demo["budget"].set_index(["server", "concurrency"])["accept_length"]
    for _, row in against_ar.iterrows():
        assert row["accept_length_factor"] == pytest.approx(lengths[row["server"], 1])


def test_the_speedup_is_the_geometric_mean_of_pairs(demo: dict[str, pd.DataFrame]) -> None:
    cells = demo["cells"][demo["cells"]["concurrency"] == 1]
    row = one(demo["speedup"], server="ddtree-b8-k8", baseline="AR", concurrency=1)
    speeds = cells.pivot(index="repeat", columns="server", values=f"throughput_{row['window']}_tok_s")
    ratios = speeds["ddtree-b8-k8"] / speeds["ar"]
    assert row["speedup"] == pytest.approx(np.exp(np.log(ratios).mean()))
    assert row["speedup_low"] < row["speedup"] < row["speedup_high"]
    assert (row["pairing"], row["n"], row["n_baseline"], row["n_left_out"]) == ("paired", 3, 3, 0)
    pairs = comparisons.run_ratios(demo["cells"], row)
    np.testing.assert_allclose(pairs["speedup"], ratios)


def test_ratios_never_cross_loads(demo: dict[str, pd.DataFrame]) -> None:
    cells = demo["cells"].set_index(["server", "concurrency", "repeat"])["throughput_full_tok_s"].sort_index()
    for concurrency in (1, 2):
        row = one(demo["speedup"], server="dflash", baseline="AR", concurrency=concurrency)
        assert row["baseline_throughput_tok_s"] == pytest.approx(cells["ar", concurrency].mean(), rel=0.05)


def test_failed_cells_stay_as_rows_without_metrics(failing: dict[str, pd.DataFrame]) -> None:
    failed = failing["cells"][failing["cells"]["status"] == "failed"]
    assert len(failed) == 4 and len(failing["cells"]) == 15
    assert set(failed["reason"]) == {CRASH}
    assert failed["log_tail"].str.contains("FATAL").all()
    assert failed["throughput_full_tok_s"].isna().all()
    budget = one(failing["budget"], server="ddtree-b4-k4")
    assert (budget["n"], budget["n_failed"]) == (2, 1)
    assert budget["throughput_tok_s"] > 0 and np.isnan(budget["throughput_low_tok_s"])


def test_failed_cells_enter_no_ratio(failing: dict[str, pd.DataFrame]) -> None:
    gone = one(failing["speedup"], server="ddtree-b16-k8", baseline="AR")
    assert (gone["comparison"], gone["reason"]) == ("no_runs", "no run of ddtree-b16-k8 succeeded")
    assert np.isnan(gone["speedup"])
    some = one(failing["speedup"], server="ddtree-b4-k4", baseline="AR")
    assert (some["comparison"], some["n"]) == ("ok", 2)
    assert np.isnan(some["speedup_low"])


def test_runs_say_what_started_and_what_failed(failing: dict[str, pd.DataFrame]) -> None:
    runs = failing["runs"]
    assert len(runs) == 15
    assert (runs["cells_ok"].sum(), runs["cells_failed"].sum()) == (11, 4)
    assert set(runs["numerics"]) == {"mixed"} and set(runs["cpu_model"]) == {"Xeon 8480"}


def test_a_budget_measured_in_another_block_is_unpaired(tmp_path: Path) -> None:
    speedup = build(tmp_path, replace(SMALL, blocks={"ddtree-b16-k8": "later"}))["speedup"]
    later = one(speedup, server="ddtree-b16-k8", baseline="AR")
    assert (later["pairing"], later["n"], later["n_baseline"]) == ("unpaired", 3, 3)
    product = later["accept_length_factor"] * later["step_time_factor"] * later["residual_factor"]
    assert product == pytest.approx(later["speedup"])
    assert set(speedup.loc[speedup["server"] != "ddtree-b16-k8", "pairing"]) == {"paired"}


def test_pairs_of_one_block_are_kept_when_one_repeat_was_measured_later(tmp_path: Path) -> None:
    made = build(tmp_path, replace(SMALL, servers=(AR, tree(8)), repeats=4))["cells"]
    made.loc[(made["server"] == "ddtree-b8-k8") & (made["repeat"] == 4), "block"] = "later-r4"
    row = comparisons.speedup_rows(made)[0]
    assert (row["pairing"], row["n"], row["n_left_out"]) == ("paired", 3, 1)


def test_a_missing_baseline_is_said(tmp_path: Path) -> None:
    speedup = build(tmp_path, replace(SMALL, servers=(tree(4), tree(8)), repeats=1))["speedup"]
    assert set(speedup["comparison"]) == {"no_baseline"}
    assert set(speedup["reason"]) == {
        "no AR cell in this target, workload and load",
        "no DFLASH cell in this target, workload and load",
    }


def test_an_unlike_baseline_is_refused_with_its_keys(tmp_path: Path) -> None:
    small_ar = replace(AR, max_running_requests=1, flags=(("threads", "1"),))
    row = build(tmp_path, replace(SMALL, servers=(small_ar, tree(8)), repeats=3))["speedup"].iloc[0]
    assert row["comparison"] == "refused"
    assert 'flags is {} against {"threads":"1"}' in row["reason"]
    assert "max_running_requests is 8 against 1 of the baseline" in row["reason"]


def test_the_like_baseline_is_found_among_several(tmp_path: Path) -> None:
    other = replace(AR, name="ar-m1", max_running_requests=1)
    speedup = build(tmp_path, replace(SMALL, servers=(other, AR, tree(8)), repeats=1))["speedup"]
    assert one(speedup, server="ddtree-b8-k8", baseline="AR")["baseline_server"] == "ar"


def test_named_comparisons_are_corrected_and_others_are_exploratory(tmp_path: Path) -> None:
    named = [comparisons.Named("DDTREE", "AR", budget=4), comparisons.Named("DDTREE", "AR", budget=8)]
    speedup = build(tmp_path, SMALL, named=named)["speedup"]
    chosen = speedup[speedup["named"]]
    assert set(chosen["server"]) == {"ddtree-b4-k4", "ddtree-b8-k8"} and set(chosen["baseline"]) == {"AR"}
    smallest = chosen.loc[chosen["p_value"].idxmin()]
    assert smallest["p_holm"] == pytest.approx(2 * smallest["p_value"])
    assert speedup.loc[~speedup["named"], "p_holm"].isna().all()


def test_the_best_budget_is_chosen_without_the_repeat_it_is_scored_on(demo: dict[str, pd.DataFrame]) -> None:
    sweep = demo["budget"][(demo["budget"]["method"] == "DDTREE") & (demo["budget"]["concurrency"] == 1)]
    assert sweep["chosen_repeats"].sum() == 3
    best = sweep.loc[sweep["chosen_repeats"].idxmax()]
    assert 0 < best["chosen_throughput_tok_s"] <= sweep["throughput_tok_s"].max() * 1.1
    baselines = demo["budget"][demo["budget"]["method"] != "DDTREE"]
    assert baselines["chosen_repeats"].isna().all()


def test_acceptance_falls_with_depth_and_sums_to_the_accept_length(demo: dict[str, pd.DataFrame]) -> None:
    for key, group in demo["acceptance"].groupby("plan_key"):
        probabilities = group.sort_values("depth")["probability"]
        assert probabilities.is_monotonic_decreasing
        cell = one(demo["cells"], plan_key=key)
        assert 1 + probabilities.sum() == pytest.approx(cell["accept_length_rounds"])
    assert "AR" not in set(demo["cells"].set_index("plan_key").loc[demo["acceptance"]["plan_key"], "method"])


def test_windows_agree_inside_a_ratio(tmp_path: Path) -> None:
    cells = build(tmp_path, replace(SMALL, servers=(AR, DFLASH)))["cells"]
    cells.loc[(cells["method"] == "AR") & (cells["repeat"] == 2), "throughput_window"] = "full"
    row = comparisons.speedup_rows(cells)[0]
    full = cells.pivot(index="repeat", columns="method", values="throughput_full_tok_s")
    assert row["window"] == "full"
    assert row["speedup"] == pytest.approx(np.exp(np.log(full["DFLASH"] / full["AR"]).mean()))


def test_a_file_that_is_no_view_is_named(tmp_path: Path) -> None:
    (tmp_path / "x.json").write_text('{"status": "ok"}')
    with pytest.raises(tables.TablesError, match=r"x\.json: is no view of a cell or a run"):
        tables.build_tables([tmp_path / "x.json"], tmp_path)


def test_a_cell_that_was_broken_off_is_counted_as_such_everywhere(tmp_path: Path) -> None:
    deadline = "the cell's deadline of 3 s was reached"
    simulation = replace(SMALL, servers=(AR, DFLASH), records={("dflash", 2): {"aborted": deadline}})
    built = build(tmp_path, replace(simulation, failing={("dflash", 3): CRASH}))
    cells = built["cells"].query("server == 'dflash'").set_index("repeat")
    assert cells["status"].to_dict() == {1: "ok", 2: "aborted", 3: "failed"}
    assert cells["reason"].dropna().to_dict() == {2: deadline, 3: CRASH}
    assert cells.loc[2, "output_tokens"] == 4 * 24 and pd.isna(cells.loc[3, "output_tokens"])
    runs = built["runs"].query("server == 'dflash'").set_index("repeat")
    counts = runs[["cells_ok", "cells_aborted", "cells_failed"]]
    assert counts.to_numpy().tolist() == [[1, 0, 0], [0, 1, 0], [0, 0, 1]]
    assert set(built["acceptance"].query("server == 'dflash'")["repeat"]) == {1}
    assert one(built["budget"], server="dflash")["n_failed"] == 2


def test_where_the_client_was_and_how_far_from_the_server(tmp_path: Path) -> None:
    trips = {"median": 0.012, "p90": 0.02, "max": 0.35, "n": 40}
    records = {
        ("ar", 1): {"client_place": "here", "link": {"round_trip_s": trips}},
        ("ar", 2): {"client_place": "target"},
    }
    cells = build(tmp_path, replace(SMALL, servers=(AR,), records=records))["cells"].set_index("repeat")
    told = cells[["client_place", "link_round_trip_p50_s", "link_round_trip_max_s"]]
    assert told.loc[1].tolist() == ["here", 0.012, 0.35]
    assert told.loc[2, "client_place"] == "target" and told.loc[2].isna().sum() == 2
    assert told.loc[3].isna().all(), "as in records of earlier versions"


def words() -> tokenizers.Tokenizer:
    """A tokenizer that takes each word as a token, as the answers of the factory have them."""
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel({"x": 0, "?": 1}, unk_token="?"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    return made


def test_a_tokenizer_counts_stored_answers_when_tables_are_made(tmp_path: Path) -> None:
    made = make_results(tmp_path, replace(SMALL, servers=(AR,), repeats=1, usage=False))
    without = tables.build_tables(made.views, made.store)["cells"].iloc[0]
    assert pd.isna(without["output_tokens"]) and without["checks_failed"] == "tokens_known"
    assert without["tokenizer_sha256"] is None
    given = {("local", AR.model.name, AR.model.revision): Counting(Tokenizer(words()), "d" * 64)}
    counted = tables.build_tables(made.views, made.store, countings=given)["cells"].iloc[0]
    requests = pd.read_parquet(next(made.store.rglob(REQUESTS)))
    events = sum(list(kinds).count("token") for kinds in requests["event_kinds"])
    assert (counted["output_tokens"], counted["token_source"]) == (events, "tokenizer")
    assert counted["tokenizer_sha256"] == "d" * 64 and counted["throughput_full_tok_s"] > 0
    other = {("elsewhere", AR.model.name, AR.model.revision): given["local", AR.model.name, AR.model.revision]}
    assert pd.isna(tables.build_tables(made.views, made.store, countings=other)["cells"].iloc[0]["output_tokens"])
