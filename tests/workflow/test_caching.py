"""Only what changed is measured, and each server with something to measure starts once a repeat."""

from __future__ import annotations

import os
import re
import shutil
import time
from pathlib import Path

import pytest
from clone import Clone, labels

NOTHING = "Nothing to be done"


def test_everything_is_there_and_nothing_runs_twice(measured: Clone) -> None:
    results = measured.root / "results"
    servers = ["toy-ar", "toy-ddtree-b4-k4", "toy-dflash"]
    assert labels(list(measured.views().values())) == [(server, "first", 1) for server in servers]
    for table in ("cells", "runs", "speedup", "acceptance", "budget", "requests"):
        assert len((results / "tables" / f"{table}.csv").read_text().splitlines()) > 1
    for figure in ("budget_sweep", "speedup", "acceptance"):
        for ending in ("pdf", "png", "svg", "csv"):
            assert (results / "figures" / f"{figure}.{ending}").stat().st_size > 200
    assert "toy-ddtree-b4-k4" in (results / "report.html").read_text()
    before = measured.starts()
    assert len(before) == 3
    assert NOTHING in measured.snakemake()
    assert measured.starts() == before


def test_one_budget_more_and_less(measured: Clone) -> None:
    before, records = measured.starts(), len(measured.records())
    measured.block["budget"] = [4, 8]
    dry = measured.snakemake("-n")
    assert dry.count("toy-ddtree-b8-k8/first-c1-r1.") >= 1
    assert "run-local-toy-ddtree-b8-k8-r1" in dry
    assert "run-local-toy-ar-r1" not in dry
    measured.measure()
    assert [name.split("-r1")[0] for name in measured.starts() - before] == ["toy-ddtree-b8-k8"]
    assert len(measured.records()) == records + 1
    after = measured.starts()
    measured.block["budget"] = [4]
    measured.measure()
    assert measured.starts() == after
    assert "toy-ddtree-b8" not in (measured.root / "results" / "tables" / "cells.csv").read_text()


def test_one_prompt_block_more_and_less(measured: Clone) -> None:
    before = measured.starts()
    measured.block["workload"] = ["first", "second"]
    measured.measure()
    new = measured.starts() - before
    assert sorted(name.split("-r1")[0] for name in new) == ["toy-ar", "toy-ddtree-b4-k4", "toy-dflash"]
    assert [r["labels"]["workload"] for r in measured.records()].count("first") == 3
    after = measured.starts()
    measured.block["workload"] = ["first"]
    measured.measure()
    assert measured.starts() == after


def test_a_longer_list_of_blocks_is_more_work_for_every_server(measured: Clone) -> None:
    before = measured.starts()
    measured.config["workloads"]["first"]["blocks"] = [1, 2]
    measured.measure()
    assert len(measured.starts() - before) == 3
    assert {view["identity"]["workload"]["n_prompts"] for view in measured.views().values()} >= {8}
    after = measured.starts()
    measured.config["workloads"]["first"]["blocks"] = [1]
    measured.measure()
    assert measured.starts() == after


def test_prompts_beyond_those_a_cell_takes_do_not_matter(measured: Clone) -> None:
    prompts = measured.root / "config" / "prompts" / "heldout.jsonl"
    line = prompts.read_text().splitlines()[-1]
    more = line.replace('"id": "', '"id": "more-').replace('"prompt": "', '"prompt": "Once more: ')
    prompts.write_text(prompts.read_text() + more + "\n")
    before = measured.starts()
    measured.measure()
    assert measured.starts() == before


def test_what_the_numbers_do_not_depend_on_starts_nothing(measured: Clone) -> None:
    before = measured.starts()
    measured.config["description"] = "another description"
    measured.config["targets"]["local"]["description"] = "another"
    elsewhere = {"launcher": "ssh", "engine": "sglang", "ssh_host": "h.example", "scope": "user"}
    measured.config["targets"]["elsewhere"] = elsewhere
    measured.config["models"]["toy"]["paths"] = {"elsewhere": "models/toy"}
    measured.config["models"]["toy"]["paths"] |= {"local": "models/toy"}
    measured.config["targets"]["local"]["start_timeout_s"] = 61
    measured.config["seed"] = 9
    measured.comment = "# a comment, which is no part of any identity\n"
    measured.measure()
    assert measured.starts() == before


def test_lost_metadata_and_touched_scripts_start_nothing(measured: Clone) -> None:
    before = measured.starts()
    shutil.rmtree(measured.root / ".snakemake")
    measured.measure()
    later = time.time() + 60
    for path in (measured.root / "scripts").rglob("*.py"):
        os.utime(path, (later, later))
    measured.measure()
    assert measured.starts() == before


def test_tables_follow_the_plan_without_snakemakes_metadata(measured: Clone) -> None:
    shutil.rmtree(measured.root / ".snakemake")
    measured.block["method"] = ["AR", "DFLASH"]
    measured.measure()
    assert "toy-ddtree" not in (measured.root / "results" / "tables" / "cells.csv").read_text()


def test_an_environment_that_was_changed_on_the_target_is_deployed_again(measured: Clone) -> None:
    measured.config["targets"]["local"]["root"] = str(measured.root / "installed")
    measured.block["budget"] = [4, 8]
    measured.measure()
    record = next(r for r in measured.records() if r["labels"]["server"] == "toy-ddtree-b8-k8")
    assert record["server_info"]["speculative_ddtree_budget"] == 8
    assert record["environment"]["python"].startswith(str(measured.root / "installed"))


def test_lost_views_come_back_from_the_store(measured: Clone) -> None:
    before, views = measured.starts(), measured.views()
    shutil.rmtree(measured.root / "results" / "cells")
    measured.measure()
    assert measured.starts() == before
    assert measured.views() == views


def test_a_fresh_clone_that_shares_the_store_starts_nothing(measured: Clone, tmp_path: Path) -> None:
    other = Clone.make(tmp_path / "other", store=measured.store)
    try:
        other.measure()
        assert other.starts() == set()
        assert other.views() == measured.views()
    finally:
        assert other.processes() == []


def test_swapped_budget_and_cap_are_both_measured(measured: Clone) -> None:
    def trees(first: tuple[int, int], second: tuple[int, int]) -> None:
        budget, cap = first
        measured.block.update(budget=[budget], topk_cap=[cap])
        budget, cap = second
        measured.block["include"] = [{"method": "DDTREE", "budget": budget, "topk_cap": cap}]

    trees((8, 3), (6, 2))
    measured.measure()
    before = measured.starts()
    trees((8, 2), (6, 3))
    measured.measure()
    new = {name.split("-r1")[0] for name in measured.starts() - before}
    assert new == {"toy-ddtree-b8-k2", "toy-ddtree-b6-k3"}
    for view in measured.views().values():
        info, server = view["server_info"], view["identity"]["server"]
        assert info["speculative_ddtree_budget"] == server["budget"]
        assert info["speculative_ddtree_topk_cap"] == server["topk_cap"]


def test_one_cell_can_be_asked_for_by_its_path(measured: Clone) -> None:
    path = next((measured.root / "results" / "cells" / "local" / "toy-dflash").glob("first-*.json"))
    path.unlink()
    before = measured.starts()
    measured.snakemake(str(path.relative_to(measured.root)))
    assert path.exists()
    assert measured.starts() == before


def test_repeats_and_order(fresh: Clone) -> None:
    fresh.config["repeats"] = 2
    fresh.block["budget"] = [2, 4]
    planned = fresh.snakemake("-n")
    fresh.measure()
    records = sorted(fresh.records(), key=lambda record: record["started_at"])
    assert [record["identity"]["repeat"] for record in records] == [1] * 4 + [2] * 4
    orders = [[r["labels"]["server"] for r in records if r["identity"]["repeat"] == repeat] for repeat in (1, 2)]
    assert sorted(orders[0]) == sorted(orders[1])
    assert len({record["start_id"] for record in records}) == 8
    assert len({record["block"] for record in records}) == 2
    assert planned.count("heldout") == 0 and planned.count("first-c1-r2.") >= 4


@pytest.mark.parametrize("example", ["ct200", "b300"])
def test_the_studys_configurations_validate_and_plan(fresh: Clone, example: str) -> None:
    output = fresh.snakemake("--configfile", f"config/{example}.yaml", "--", "plan")
    assert re.search(r"kimi_k26-ddtree-b32-k8-tp8 +│ 33 ", output)
    assert "33" in output
    dry = fresh.snakemake("-n", "--configfile", f"config/{example}.yaml")
    assert f"run-{example}-kimi_k26-ddtree-b32-k8-tp8-r1" in dry
