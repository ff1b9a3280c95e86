"""Reading and checking a configuration: every message names the key, the value and the remedy."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from configurations import tree, write_project, write_prompts

from ddtree_bench.config import ConfigError, read_files, validate
from ddtree_bench.config.load import merge, parse


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return write_project(tmp_path)


def problems(config: dict[str, Any], root: Path) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        validate(config, root)
    return caught.value.problems


def only_problem(config: dict[str, Any], root: Path) -> str:
    found = problems(config, root)
    assert len(found) == 1, found
    return found[0]


def test_a_valid_tree_gives_its_points(root: Path) -> None:
    config, points = validate(tree(), root)
    assert config.repeats == 2
    assert [(p.method, p.budget, p.topk_cap, p.block_size) for p in points] == [
        ("AR", None, None, None),
        ("DFLASH", None, None, 8),
        ("DDTREE", 4, 4, 8),
        ("DDTREE", 8, 8, 8),
    ]


def test_unknown_keys_name_the_nearest_known_one(root: Path) -> None:
    config = tree()
    config["sweep"][0]["bugdet"] = [4]
    config["repets"] = 3
    config["targets"]["local"]["lauchner"] = "local"
    assert problems(config, root) == [
        "targets.local.lauchner: unknown key; did you mean 'launcher'?",
        "sweep[0].bugdet: unknown key; did you mean 'budget'?",
        "repets: unknown key; did you mean 'repeats'?",
    ]


def test_an_unknown_key_like_no_other_lists_those_there_are(root: Path) -> None:
    config = tree()
    config["models"]["toy"]["drafter"]["zzz"] = 1
    assert only_problem(config, root) == (
        "models.toy.drafter.zzz: unknown key; known keys here: block_size, name, paths, revision"
    )


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("budget", [0], "sweep[0].budget[0]: 0 is not allowed; input should be greater than or equal to 1"),
        (
            "topk_cap",
            [0],
            "sweep[0].topk_cap[0]: 0 is not allowed; "
            "input should be greater than or equal to 1 or input should be 'budget'",
        ),
        ("block_size", [1], "sweep[0].block_size[0]: 1 is not allowed; input should be greater than or equal to 2"),
        ("concurrency", [0], "sweep[0].concurrency[0]: 0 is not allowed; input should be greater than or equal to 1"),
        ("method", ["TREE"], "sweep[0].method[0]: 'TREE' is not allowed; input should be 'AR', 'DFLASH' or 'DDTREE'"),
    ],
)
def test_values_out_of_range(root: Path, key: str, value: list[Any], message: str) -> None:
    config = tree()
    config["sweep"][0][key] = value
    assert only_problem(config, root) == message


def test_missing_keys_and_bad_names(root: Path) -> None:
    config = tree()
    del config["workloads"]["short"]["max_tokens"]
    config["models"]["a-b"] = config["models"]["toy"]
    assert problems(config, root) == [
        "models.a-b: 'a-b' is not a name; use letters, digits and underscores, a letter first",
        "workloads.short.max_tokens: is missing; add this key",
    ]


@pytest.mark.parametrize(("key", "wrong", "near"), [("target", "locl", "local"), ("model", "toi", "toy")])
def test_references_name_the_nearest(root: Path, key: str, wrong: str, near: str) -> None:
    config = tree()
    config["sweep"][0][key] = wrong
    assert only_problem(config, root) == f"sweep[0].{key}: {wrong!r} is not in {key}s; did you mean {near!r}?"


def test_a_reference_like_no_other_lists_those_there_are(root: Path) -> None:
    config = tree()
    config["sweep"][0]["include"] = [{"workload": "xyz"}]
    assert only_problem(config, root) == "sweep[0].workload: 'xyz' is not in workloads; known: short"


def test_ddtree_needs_a_budget(root: Path) -> None:
    config = tree()
    del config["sweep"][0]["budget"]
    assert only_problem(config, root) == (
        "sweep[0].budget: is missing, but DDTREE is planned; give a list of budgets such as [8, 16, 32]"
    )


def test_drafted_methods_need_a_drafter(root: Path) -> None:
    config = tree()
    del config["models"]["toy"]["drafter"]
    assert problems(config, root) == [
        "models.toy.drafter: is missing, but sweep[0] plans DFLASH; name the drafter",
        "models.toy.drafter: is missing, but sweep[0] plans DDTREE; name the drafter",
    ]


def test_a_block_beyond_the_drafters_training(root: Path) -> None:
    config = tree()
    config["sweep"][0]["block_size"] = 16
    assert only_problem(config, root) == (
        "sweep[0].block_size: 16 is more than the drafter was trained for; "
        "use at most models.toy.drafter.block_size = 8"
    )


def test_hybrid_models_are_refused_unless_allowed(root: Path) -> None:
    config = tree()
    config["models"]["toy"]["hybrid"] = True
    assert only_problem(config, root) == (
        "models.toy.hybrid: true, but sweep[0] plans DDTREE, which recurrent layers cannot verify exactly; "
        "take DDTREE out or set models.toy.allow_hybrid_unsafe: true"
    )
    config["models"]["toy"]["allow_hybrid_unsafe"] = True
    validate(config, root)


def sglang(config: dict[str, Any]) -> dict[str, Any]:
    config["targets"]["local"]["engine"] = "sglang"
    config["models"]["toy"]["paths"] = {"local": "/models/toy"}
    config["models"]["toy"]["drafter"]["paths"] = {"local": "/models/toy-dflash"}
    return config


def test_graph_rows_beyond_the_memory(root: Path) -> None:
    config = sglang(tree())
    config["targets"]["local"]["graph_memory_gib"] = 0.5
    config["models"]["toy"]["vocab_size"] = 163840
    config["sweep"][0] |= {"budget": [4, 32], "max_running_requests": 128}
    assert only_problem(config, root) == (
        "sweep[0].budget: 32 needs 128 x 33 graph rows, 2.6 GiB of logits, but targets.local.graph_memory_gib is 0.5; "
        "lower max_running_requests or the budget, or raise graph_memory_gib"
    )


def test_a_method_without_its_baseline(root: Path) -> None:
    config = tree()
    config["sweep"][0]["method"] = ["DDTREE"]
    assert only_problem(config, root) == (
        "sweep[0].method: DDTREE on local with toy (TP1, EP1), short at concurrency 1 has no AR baseline; "
        "add AR with the same values to the sweep, or set allow_missing_baseline: true"
    )
    config["allow_missing_baseline"] = True
    validate(config, root)


def test_a_baseline_with_other_parallelism_does_not_count(root: Path) -> None:
    config = sglang(tree())
    config["sweep"][0]["method"] = ["AR"]
    config["sweep"].append({**config["sweep"][0], "method": "DFLASH", "tensor_parallel": 8})
    assert "(TP8, EP1), short at concurrency 1 has no AR baseline" in only_problem(config, root)


@pytest.mark.parametrize("engine", ["reference", "sglang"])
def test_more_in_flight_than_a_server_admits_is_refused_whatever_serves(root: Path, engine: str) -> None:
    config = sglang(tree()) if engine == "sglang" else tree()
    config["sweep"][0] |= {"concurrency": [1, 4], "max_running_requests": 2}
    assert only_problem(config, root) == (
        "sweep[0].concurrency: 4 is more than max_running_requests = 2, so requests would only queue; "
        "set sweep[0].max_running_requests to at least 4"
    )
    config["sweep"][0]["max_running_requests"] = 4
    assert {p.concurrency for p in validate(config, root)[1]} == {1, 4}


@pytest.mark.parametrize("key", ["tensor_parallel", "expert_parallel"])
def test_the_reference_engine_is_one_process(root: Path, key: str) -> None:
    config = tree()
    config["sweep"][0][key] = 2
    values = "2 / 1" if key == "tensor_parallel" else "1 / 2"
    assert only_problem(config, root) == (
        f"sweep[0].tensor_parallel / expert_parallel: {values}, but the reference engine is one process; use 1"
    )
    config["sweep"][0]["tensor_parallel"] = 2
    validate(sglang(config), root)


def test_the_reference_engine_has_models_of_its_own(root: Path) -> None:
    config = tree()
    config["models"]["toy"]["name"] = "SmolLM2-360M-Instruct"
    assert only_problem(config, root) == (
        "models.toy.name: 'SmolLM2-360M-Instruct' is not a model that the reference engine brings; "
        "use SmolLM2-135M-Instruct or toy"
    )


def test_numbers_as_flag_values_are_taken_as_text(root: Path) -> None:
    config = tree()
    config["targets"]["local"]["flags"] = {"threads": 2}
    assert validate(config, root)[1][0].flags == (("threads", "2"),)


def test_the_reference_engine_samples(root: Path) -> None:
    config = tree()
    config["workloads"]["short"] |= {"temperature": 0.7, "top_p": 0.9, "top_k": 40, "seed": 3}
    spec = validate(config, root)[0].workloads["short"]
    assert (spec.temperature, spec.top_p, spec.top_k, spec.seed) == (0.7, 0.9, 40, 3)


@pytest.mark.parametrize(
    ("key", "value", "rule"),
    [
        ("temperature", -0.1, "greater than or equal to 0"),
        ("top_p", 0.0, "greater than 0"),
        ("top_p", 1.5, "less than or equal to 1"),
        ("top_k", -2, "greater than or equal to -1"),
    ],
)
def test_sampling_out_of_range(root: Path, key: str, value: float, rule: str) -> None:
    config = tree()
    config["workloads"]["short"][key] = value
    assert only_problem(config, root) == (f"workloads.short.{key}: {value} is not allowed; input should be {rule}")


def test_too_few_prompts(root: Path) -> None:
    config = tree()
    config["sweep"][0] |= {"concurrency": [1, 5], "max_running_requests": 5}
    message = only_problem(config, root)
    assert message.startswith("workloads.short: ")
    assert "20" in message and "16" in message and "repeat_prompts: true" in message
    config["workloads"]["short"]["repeat_prompts"] = True
    validate(config, root)


def test_too_few_prompts_for_a_rate(root: Path) -> None:
    config = tree()
    config["sweep"][0] |= {"rate": [0.5, 2]}
    assert only_problem(config, root) == (
        "workloads.short: rate: 2 for open_loop_s: 30 needs 60 prompts, and there are 16; "
        "lower them, add prompts or blocks, or set repeat_prompts: true"
    )
    config["workloads"]["short"]["open_loop_s"] = 8
    validate(config, root)


def test_a_block_of_an_open_loop_that_the_file_does_not_have(root: Path) -> None:
    config = tree()
    config["workloads"]["short"] |= {"blocks": [9], "open_loop_s": 1}
    config["sweep"][0] |= {"rate": 1}
    assert "blocks: [9] not in the prompt file" in only_problem(config, root)


def test_an_open_loop_may_have_more_in_flight_than_a_server_admits(root: Path) -> None:
    config = tree()
    config["sweep"][0] |= {"rate": 0.5, "max_running_requests": 2}
    assert {p.concurrency for p in validate(config, root)[1]} == {256}


def test_an_open_loop_needs_its_baseline_at_the_same_rate(root: Path) -> None:
    config = tree()
    config["sweep"][0] |= {"method": "AR", "rate": 0.4}
    config["sweep"].append({**config["sweep"][0], "method": "DFLASH", "rate": 0.5})
    assert "short at rate 0.5 has no AR baseline" in only_problem(config, root)


@pytest.mark.parametrize("key", ["ttft_s", "tpot_s", "e2e_s"])
def test_objectives_are_above_zero(root: Path, key: str) -> None:
    config = tree()
    config["workloads"]["short"]["slos"] = {key: 0}
    assert only_problem(config, root) == (
        f"workloads.short.slos.{key}: 0 is not allowed; input should be greater than 0"
    )


def test_an_unknown_objective_names_the_nearest(root: Path) -> None:
    config = tree()
    config["workloads"]["short"]["slos"] = {"tttf_s": 1}
    assert only_problem(config, root) == "workloads.short.slos.tttf_s: unknown key; did you mean 'ttft_s'?"


def test_prompts_that_occur_twice(root: Path) -> None:
    path = root / "prompts.jsonl"
    first = path.read_text().splitlines()[0]
    path.write_text(path.read_text() + first.replace("measured-code-1", "again") + "\n")
    assert "measured code 1" in only_problem(tree(), root)


def test_a_prompt_file_that_is_missing(root: Path) -> None:
    config = tree()
    config["workloads"]["short"]["prompts"] = "nowhere.jsonl"
    message = only_problem(config, root)
    assert message.startswith("workloads.short.prompts: ") and "nowhere.jsonl" in message


def test_a_block_that_the_file_does_not_have(root: Path) -> None:
    config = tree()
    config["workloads"]["short"]["blocks"] = [9]
    message = only_problem(config, root)
    assert message.startswith("workloads.short: blocks: ") and "9" in message and "1 to 4" in message


def test_warm_up_prompts_must_not_be_measured(root: Path) -> None:
    write_prompts(root / "warmup.jsonl", 1)
    found = problems(tree(), root)
    assert found[0] == (
        "warmup.prompts: 'measured-code-1' in warmup.jsonl is prompt 'measured-code-1' of workloads.short; "
        "take it out of one of the files"
    )


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("hf_token", "abc"),
        ("api_key", "xyz"),
        ("api_key", 12345),
        ("comment", "hf_" + "a" * 24),
        ("note", "-----BEGIN RSA PRIVATE KEY-----"),
    ],
)
def test_secrets_are_refused_without_being_shown(root: Path, key: str, value: Any) -> None:
    config = tree()
    config["targets"]["local"]["flags"] = {key: value}
    message = only_problem(config, root)
    assert message.startswith(f"targets.local.flags.{key}: looks like a secret")
    assert str(value) not in message


def test_words_that_only_resemble_secrets_pass(root: Path) -> None:
    config = tree()
    config["targets"]["local"]["flags"] = {"max-total-tokens": "4096", "tokenizer": "fast"}
    validate(config, root)


def test_all_problems_are_named_at_once(root: Path) -> None:
    config = tree()
    config["sweep"][0] |= {"block_size": 16, "concurrency": 2, "tensor_parallel": 2}
    assert len(problems(config, root)) == 3


def test_merge_is_snakemakes(tmp_path: Path) -> None:
    base = tmp_path / "base.yaml"
    overlay = tmp_path / "overlay.yaml"
    base.write_text(yaml.safe_dump({"a": {"x": 1, "y": [1, 2]}, "b": 1}))
    overlay.write_text(yaml.safe_dump({"a": {"y": [3]}, "c": 2}))
    assert read_files([base, overlay]) == {"a": {"x": 1, "y": [3]}, "b": 1, "c": 2}
    assert merge({"a": 1}, {"a": {"b": 2}}) == {"a": {"b": 2}}


@pytest.mark.parametrize(("text", "part"), [("- 1\n", "not a mapping"), ("a: [", "not valid YAML")])
def test_files_that_hold_no_configuration(tmp_path: Path, text: str, part: str) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=part):
        read_files([path])
    with pytest.raises(ConfigError, match="cannot be read"):
        read_files([tmp_path / "absent.yaml"])


@pytest.mark.parametrize("value", [True, "4", 4.0])
def test_numbers_must_be_numbers(value: Any) -> None:
    with pytest.raises(ConfigError, match=f"repeats: {value!r} is not allowed; input should be a valid integer"):
        parse({**tree(), "repeats": value})


def test_flags_may_not_say_what_keys_say(root: Path) -> None:
    config = tree()
    config["sweep"][0]["flags"] = {"speculative-ddtree-budget": "9", "threads": "1"}
    assert only_problem(config, root) == (
        "sweep[0].flags (or the target's): 'speculative-ddtree-budget' is set by the workflow itself; "
        "use the key of the configuration that stands for it"
    )


def test_a_local_target_is_on_the_loopback_address(root: Path) -> None:
    config = tree()
    config["targets"]["local"]["host"] = "10.0.0.5"
    assert only_problem(config, root) == (
        "targets.local.host: '10.0.0.5', but the local launcher serves on 127.0.0.1 only; leave the key out"
    )


def test_a_sweep_that_excludes_everything(root: Path) -> None:
    config = tree()
    config["sweep"][0]["exclude"] = [{"target": "local"}]
    assert only_problem(config, root) == "sweep: nothing is left to measure; `exclude` takes every point out"


def test_a_prompt_file_that_is_not_utf8(root: Path) -> None:
    (root / "prompts.jsonl").write_bytes(b"\xff\xfe")
    assert "is not UTF-8" in only_problem(tree(), root)


@pytest.mark.parametrize("key", ["rate", "include"])
def test_arrivals_without_a_rate_are_refused(root: Path, key: str) -> None:
    config = tree()
    config["workloads"]["short"]["open_loop_s"] = 4
    config["sweep"][0]["arrivals"] = "constant"
    assert only_problem(config, root) == (
        "sweep[0].arrivals: constant without a rate, so nothing arrives; add `rate`, or take it out"
    )
    config["sweep"][0][key] = 2 if key == "rate" else [{"rate": 2, "method": "AR"}]
    validate(config, root)


def test_a_tokenizer_must_be_there(root: Path) -> None:
    config = tree()
    config["models"]["toy"]["tokenizer"] = "nowhere"
    assert only_problem(config, root) == (
        "models.toy.tokenizer: there is no tokenizer.json at nowhere; mend the path, or take the key out"
    )
    (root / "nowhere").mkdir()
    assert "models.toy.tokenizer: there is no tokenizer.json" in only_problem(config, root)
    (root / "nowhere" / "tokenizer.json").write_text("{}")
    validate(config, root)


def test_tokenizers_by_target_name_targets_that_exist(root: Path) -> None:
    config = tree()
    config["models"]["toy"]["tokenizer"] = {"locl": "nowhere", "local": "here.json"}
    assert problems(config, root) == [
        "models.toy.tokenizer.locl: 'locl' is not in targets; did you mean 'local'?",
        "models.toy.tokenizer.local: there is no tokenizer.json at here.json; mend the path, or take the key out",
    ]


def test_a_tokenizer_of_a_model_that_is_not_planned_may_be_elsewhere(root: Path) -> None:
    config = tree()
    config["models"]["other"] = {"name": "other", "revision": "1", "tokenizer": "nowhere"}
    validate(config, root)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        *(("port", 1), ("host", "10.0.0.1"), ("root", "x"), ("stop_grace_s", 1), ("graph_memory_gib", 1)),
        ("pass_env", ["A"]),
    ],
)
def test_an_external_endpoint_has_nothing_that_is_started(root: Path, key: str, value: Any) -> None:
    assert only_problem(external({key: value}), root) == (
        f"targets.there.{key}: is for servers that are started, and an external endpoint is up already; take it out"
    )


@pytest.mark.parametrize("value", ["sesame open", "9LIVES", "", "k-3y", 314159])
def test_the_name_of_the_keys_variable_is_never_shown(root: Path, value: Any) -> None:
    message = only_problem(external({"api_key_env": value}), root)
    assert message.startswith("targets.there.api_key_env: ")
    assert not value or str(value) not in message


def test_the_key_of_an_endpoint_belongs_into_a_variable(root: Path) -> None:
    message = only_problem(external({"api_key": "abc"}), root)
    assert (
        "in targets.<name>.api_key_env when it is the key of an external endpoint" in message and "abc" not in message
    )


def external(target: dict[str, Any]) -> dict[str, Any]:
    """A configuration whose only target is an endpoint with further keys."""
    config = tree()
    config["targets"] = {"there": {"launcher": "external", "engine": "sglang", "url": "http://127.0.0.1:9"} | target}
    config["sweep"][0] |= {"target": "there", "method": "AR"}
    return config
