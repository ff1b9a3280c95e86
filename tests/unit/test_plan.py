"""Plan keys and the order of runs."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from configurations import tree, write_project, write_prompts

from ddtree_bench import keys, plan
from ddtree_bench.config import ConfigError, validate
from ddtree_bench.plan import Cell, Plan
from ddtree_bench.project import Folders, Project

KEYS = {"reference": "e" * 64, "sglang": "f" * 64}
ENVIRONMENTS = {(target, engine): key for target in ("local", "a", "a_b") for engine, key in KEYS.items()}


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (tmp_path / "tokenizer.json").write_text("{}")
    return write_project(tmp_path)


def build(config: dict[str, Any], root: Path, environments: dict[tuple[str, str], str] = ENVIRONMENTS) -> Plan:
    return plan.build(*validate(config, root), root, environments)


def cell_keys(built: Plan) -> set[str]:
    return {cell.key for cell in built.cells}


def edit(path: str, value: Any) -> Callable[[dict[str, Any]], None]:
    *parents, last = path.split("/")

    def change(config: dict[str, Any]) -> None:
        place: Any = config
        for part in parents:
            place = place[int(part) if part.isdecimal() else part]
        place[last] = value

    return change


@pytest.mark.parametrize(
    "change",
    [
        edit("description", "another"),
        edit("targets/local/description", "another"),
        edit("targets/local/port", 31000),
        edit("targets/local/root", "elsewhere"),
        edit("targets/local/start_timeout_s", 7),
        edit("models/toy/paths", {"local": "elsewhere"}),
        edit("targets/unrelated", {"launcher": "ssh", "engine": "sglang", "ssh_host": "h.example", "scope": "user"}),
        edit("seed", 2),
        edit("max_restarts", 0),
        edit("retry_failed", True),
        edit("models/toy/tokenizer", "tokenizer.json"),
        edit("workloads/short/slos", {"ttft_s": 0.5}),
        edit("workloads/short/request_timeout_s", 7),
        edit("workloads/short/cell_timeout_s", 7),
    ],
)
def test_what_the_numbers_do_not_depend_on_is_not_keyed(root: Path, change: Callable[[dict[str, Any]], None]) -> None:
    config = tree()
    change(config)
    assert cell_keys(build(config, root)) == cell_keys(build(tree(), root))


@pytest.mark.parametrize(
    "change",
    [
        edit("models/toy/revision", "2"),
        edit("models/toy/name", "SmolLM2-135M-Instruct"),
        edit("targets/local/flags", {"threads": "2"}),
        edit("workloads/short/max_tokens", 9),
        edit("workloads/short/n_min", 5),
        edit("workloads/short/blocks", [2]),
        edit("workloads/short/ignore_eos", True),
        edit("workloads/short/seed", 7),
        edit("workloads/short/top_p", 0.9),
        edit("workloads/short/top_k", 40),
        edit("workloads/short/endpoint", "completions"),
        edit("warmup/max_tokens", 4),
    ],
)
def test_what_the_numbers_depend_on_is_keyed(root: Path, change: Callable[[dict[str, Any]], None]) -> None:
    config = tree()
    change(config)
    assert not cell_keys(build(config, root)) & cell_keys(build(tree(), root))


def test_the_drafter_is_no_part_of_the_baseline(root: Path) -> None:
    config = tree()
    config["models"]["toy"]["drafter"]["revision"] = "2"
    common = cell_keys(build(config, root)) & cell_keys(build(tree(), root))
    assert common == {cell.key for cell in build(tree(), root).cells if cell.server.method == "AR"}


def test_the_environment_is_keyed(root: Path) -> None:
    assert not cell_keys(build(tree(), root)) & cell_keys(build(tree(), root, {("local", "reference"): "0" * 64}))


def test_prompts_are_keyed_by_what_is_sent(root: Path) -> None:
    before = cell_keys(build(tree(), root))
    write_prompts(root / "prompts.jsonl", 9)
    assert cell_keys(build(tree(), root)) == before
    text = (root / "prompts.jsonl").read_text()
    (root / "prompts.jsonl").write_text(text.replace('"measured haiku 1"', '"measured haiku, changed"'))
    assert not cell_keys(build(tree(), root)) & before


def test_renaming_the_workload_moves_the_view_and_keeps_the_key(root: Path) -> None:
    config = tree()
    config["workloads"] = {"renamed": config["workloads"]["short"]}
    config["sweep"][0]["workload"] = "renamed"
    renamed, before = build(config, root), build(tree(), root)
    assert cell_keys(renamed) == cell_keys(before)
    assert renamed.cells[0].view != before.cells[0].view


def test_swapped_budget_and_cap_are_other_cells(root: Path) -> None:
    config = tree()
    config["sweep"][0] |= {"budget": 8, "topk_cap": 4}
    config["sweep"].append({**config["sweep"][0], "budget": 6, "topk_cap": 3})
    swapped = tree()
    swapped["sweep"][0] |= {"budget": 8, "topk_cap": 3}
    swapped["sweep"].append({**swapped["sweep"][0], "budget": 6, "topk_cap": 4})
    both = cell_keys(build(config, root)) & cell_keys(build(swapped, root))
    assert len(both) == 4
    assert all(cell.server.method != "DDTREE" for cell in build(config, root).cells if cell.key in both)


def test_equal_configurations_written_differently_have_one_key(root: Path) -> None:
    config = tree()
    config["sweep"][0]["topk_cap"] = ["budget", 64]
    reordered = json.loads(json.dumps(config, sort_keys=True))
    assert cell_keys(build(reordered, root)) == cell_keys(build(tree(), root))


def test_one_run_holds_all_cells_of_a_server_and_repeat(root: Path) -> None:
    config = tree()
    config["workloads"]["second"] = {**config["workloads"]["short"], "blocks": [3]}
    config["sweep"][0]["workload"] = ["short", "second"]
    built = build(config, root)
    assert len(built.runs) == 4 * 2
    assert all(len(run.cells) == 2 for run in built.runs)
    assert len({run.name for run in built.runs}) == len(built.runs)
    assert len({cell.view for cell in built.cells}) == len(built.cells) == 16


def test_repeats_follow_each_other_in_an_order_drawn_for_each(root: Path) -> None:
    config = tree()
    config |= {"repeats": 6}
    config["sweep"][0]["budget"] = [1, 2, 3, 4, 5, 6, 7, 8]
    runs = build(config, root).runs
    assert [run.repeat for run in runs] == sorted(run.repeat for run in runs)
    assert [run.priority for run in runs] == sorted((run.priority for run in runs), reverse=True)
    orders = {tuple(run.server.name for run in runs if run.repeat == repeat) for repeat in range(1, 7)}
    assert len(orders) == 6


def test_a_server_more_does_not_change_the_order_of_the_others(root: Path) -> None:
    config = tree()
    config["sweep"][0]["budget"] = [4, 8, 16]
    longer = [(run.repeat, run.server.name) for run in build(config, root).runs if "b16" not in run.server.name]
    assert longer == [(run.repeat, run.server.name) for run in build(tree(), root).runs]


def test_the_seed_changes_the_order(root: Path) -> None:
    config = tree()
    config |= {"repeats": 5, "seed": 2}
    other = tree() | {"repeats": 5}
    assert [r.name for r in build(config, root).runs] != [r.name for r in build(other, root).runs]


def test_servers_that_differ_in_flags_alone_have_names_of_their_own(root: Path) -> None:
    config = tree()
    config["sweep"].append({**config["sweep"][0], "flags": {"threads": "2"}})
    built = build(config, root)
    assert len({server.name for server in built.servers}) == len(built.servers) == 8


def test_one_cell_under_two_names_is_refused(root: Path) -> None:
    config = tree()
    config["workloads"]["again"] = config["workloads"]["short"]
    config["sweep"][0]["workload"] = ["short", "again"]
    with pytest.raises(ConfigError, match=r"toy-ar/short-c1-r1.* and .*toy-ar/again-c1-r1.* are the same cell"):
        build(config, root)


def test_names_of_runs_do_not_collide(root: Path) -> None:
    config = tree()
    config["targets"] |= {"a": config["targets"]["local"], "a_b": config["targets"]["local"]}
    config["models"] |= {"b_c": config["models"]["toy"], "c": config["models"]["toy"]}
    first = {**config["sweep"][0], "target": "a", "model": "b_c"}
    config["sweep"] = [first, {**first, "target": "a_b", "model": "c"}]
    names = [run.name for run in build(config, root).runs]
    assert len(set(names)) == len(names)


def test_a_run_is_found_by_its_identity(root: Path) -> None:
    built = build(tree(), root)
    wanted = built.runs[3]
    assert built.run(json.loads(keys.canonical(wanted.identity))) == wanted
    with pytest.raises(ConfigError, match="changed since this pass began"):
        built.run({"server": "x", "repeat": 1, "cells": []})


def test_a_cells_view_carries_its_key(root: Path) -> None:
    cell: Cell = build(tree(), root).cells[0]
    assert cell.view == f"cells/local/toy-ar/short-c1-r1.{cell.key[:12]}.json"


def test_canonical_json_refuses_what_json_does_not_have() -> None:
    with pytest.raises(ValueError, match="JSON"):
        keys.canonical({"x": float("nan")})
    with pytest.raises(TypeError):
        keys.canonical({"x": Path("a")})
    assert keys.canonical({"b": 1, "a": [1.5, "é"]}) == '{"a":[1.5,"é"],"b":1}'


def open_loop(**block: Any) -> dict[str, Any]:
    config = tree()
    config["workloads"]["short"]["open_loop_s"] = 3
    config["sweep"][0] |= {"rate": [2]} | block
    return config


def test_an_open_loop_takes_as_many_prompts_as_arrive(root: Path) -> None:
    cells = build(open_loop(rate=[0.5, 2, 5.1]), root).cells
    assert {(cell.load.rate, cell.workload.n_prompts) for cell in cells} == {(0.5, 4), (2.0, 6), (5.1, 16)}
    assert {cell.load.kind for cell in cells} == {"open"}


def test_blocks_are_taken_in_full_by_an_open_loop_too(root: Path) -> None:
    config = open_loop()
    config["workloads"]["short"]["blocks"] = [1, 3]
    assert {cell.workload.n_prompts for cell in build(config, root).cells} == {8}


@pytest.mark.parametrize(
    "change", [{"rate": [3]}, {"arrivals": "constant"}, {"concurrency": 8}, {"rate": None, "concurrency": 1}]
)
def test_the_load_is_keyed(root: Path, change: dict[str, Any]) -> None:
    assert not cell_keys(build(open_loop(**change), root)) & cell_keys(build(open_loop(), root))


def test_how_long_requests_arrive_counts_by_the_prompts_it_takes(root: Path) -> None:
    config = open_loop()
    config["workloads"]["short"]["open_loop_s"] = 2.9
    assert cell_keys(build(config, root)) == cell_keys(build(open_loop(), root))
    config["workloads"]["short"]["open_loop_s"] = 3.1
    assert not cell_keys(build(config, root)) & cell_keys(build(open_loop(), root))


def test_arrivals_are_the_same_for_all_servers_of_a_repeat(root: Path) -> None:
    seeds = {(cell.repeat, cell.arrival_seed) for cell in build(open_loop(), root).cells}
    assert seeds == {(1, 1), (2, 2)}


def test_the_seed_of_arrivals_is_keyed_where_something_arrives(root: Path) -> None:
    opened, closed = build(open_loop(), root).cells[0], build(tree(), root).cells[0]
    assert opened.identity["load"]["arrival_seed"] == 1
    assert closed.identity["load"] == {"concurrency": 1, "kind": "closed", "rate": None, "arrivals": None}


def test_views_of_open_loops_name_the_rate(root: Path) -> None:
    cells = build(open_loop(rate=[0.5, 2], concurrency=8, arrivals="constant"), root).cells
    assert {cell.view.rpartition("/")[2].split("-r1")[0] for cell in cells if cell.repeat == 1} == {
        "short-q0.5k-c8",
        "short-q2k-c8",
    }


def test_two_rates_never_share_a_name() -> None:
    rates = (1.0000001, 1.0000002, 0.1, 4.0, 256.0, 1e-7)
    names = [plan.Load(8, "open", rate, "poisson").name for rate in rates]
    assert names == ["q1.0000001-c8", "q1.0000002-c8", "q0.1-c8", "q4-c8", "q256-c8", "q1e-07-c8"]


def test_a_changed_tokenizer_makes_the_tables_anew_and_no_cell(root: Path) -> None:
    def opened(content: str | None) -> tuple[str, tuple[str, ...]]:
        config = tree()
        if content is not None:
            (root / "tokenizer.json").write_text(content)
            config["models"]["toy"]["tokenizer"] = "tokenizer.json"
        parsed, points = validate(config, root)
        built = plan.build(parsed, points, root, ENVIRONMENTS)
        project = Project(parsed, built, Folders.below(root / "results"), root, ENVIRONMENTS)
        return project.tables_plan, tuple(project.all_views())

    plans, views = zip(*(opened(content) for content in (None, "{}", "{ }")), strict=True)
    assert len(set(plans)) == 3 and len(set(views)) == 1


def test_an_external_server_has_no_environment_and_stays_itself_at_another_address(root: Path) -> None:
    config = tree()
    config["targets"]["there"] = {"launcher": "external", "engine": "sglang", "url": "http://127.0.0.1:1"}
    config["sweep"][0] |= {"target": "there", "method": "DDTREE", "budget": 8}
    built = build(config, root, {})
    assert [(server.environment, server.external) for server in built.servers] == [("external", True)]
    config["targets"]["there"] |= {"url": "http://127.0.0.1:2", "served_model": "x", "api_key_env": "KEY"}
    assert cell_keys(build(config, root, {})) == cell_keys(built)
