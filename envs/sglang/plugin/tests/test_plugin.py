import argparse
import inspect
import logging
import sys
from array import array

import pytest

pytest.importorskip("sglang.srt")

from micro_folders import write_drafter, write_target
from sglang.srt.arg_groups.overrides import record_foreign_defaults
from sglang.srt.plugins.hook_registry import HookRegistry
from sglang.srt.sampling.sampling_params import SamplingParams
from sglang.srt.server_args import ServerArgs, prepare_server_args

from sglang_ddtree import algorithm, options, plugin, release, requests
from sglang_ddtree.options import OptionError, Options

NAMES = ("budget", "topk-cap", "allow-hybrid-unsafe", "round-log")


@pytest.fixture(scope="module", autouse=True)
def loaded():
    from sglang.srt.plugins import load_plugins

    load_plugins()


def test_sglangs_own_parser_knows_the_options():
    parser = argparse.ArgumentParser()
    ServerArgs.add_cli_args(parser)
    for name in NAMES:
        assert f"--speculative-ddtree-{name}" in parser.format_help()


def test_the_command_line_reaches_the_record(tmp_path):
    args = prepare_server_args(
        ["--model-path", str(tmp_path), "--speculative-algorithm", "DDTREE", "--speculative-ddtree-budget", "32"]
    )
    assert options.of(args) == Options(budget=32)


def test_a_config_file_reaches_the_record(tmp_path):
    file = tmp_path / "server.yaml"
    file.write_text(
        f"model-path: {tmp_path}\nspeculative-algorithm: DDTREE\nspeculative-ddtree-budget: 32\n"
        "speculative-ddtree-topk-cap: 4\nspeculative-ddtree-allow-hybrid-unsafe: true\n"
    )
    args = prepare_server_args(["--config", str(file)])
    assert options.of(args) == Options(budget=32, topk_cap=4, allow_hybrid_unsafe=True)


def test_options_of_another_algorithm_are_refused(tmp_path):
    with pytest.raises(OptionError, match="needs --speculative-algorithm DDTREE"):
        prepare_server_args(["--model-path", str(tmp_path), "--speculative-ddtree-budget", "32"])


def test_an_engine_takes_the_options_as_keywords(tmp_path):
    import sglang.srt.entrypoints.engine as engine

    from sglang_ddtree import hooks

    previous = engine.Engine.__dict__["server_args_class"]
    try:
        engine.Engine.server_args_class = ServerArgs
        hooks._accept_engine_options(engine)
        made = engine.Engine.server_args_class(
            model_path=str(tmp_path), speculative_algorithm="DDTREE", speculative_ddtree_budget=9
        )
        assert options.of(made) == Options(budget=9)
        with pytest.raises(OptionError, match="--speculative-ddtree-topk-cap 0"):
            engine.Engine.server_args_class(
                model_path=str(tmp_path), speculative_algorithm="DDTREE", speculative_ddtree_topk_cap=0
            )
    finally:
        engine.Engine.server_args_class = previous


def test_server_info_echoes_the_resolved_options(tmp_path):
    args = ServerArgs(
        model_path=str(write_target(tmp_path / "target")),
        speculative_draft_model_path=str(write_drafter(tmp_path / "drafter", 8)),
        speculative_algorithm="DDTREE",
        device="cpu",
        dtype="float32",
        attention_backend="triton",
    )
    options.attach(args, Options(budget=32, topk_cap=8)).resolve_once()
    shown = args.resolved_dict()
    assert shown["speculative_ddtree_budget"] == 32
    assert shown["speculative_ddtree_topk_cap"] == 8
    assert shown["speculative_num_draft_tokens"] == 33
    assert shown["speculative_dflash_block_size"] == 8


@pytest.fixture
def wrong_release(monkeypatch):
    monkeypatch.setattr(release, "RELEASE", "9.9.9")
    hooks = {name: list(found) for name, found in HookRegistry._hooks.items()}
    yield
    HookRegistry._hooks.clear()
    HookRegistry._hooks.update(hooks)


def test_a_release_it_is_not_written_for_leaves_sglang_alone(wrong_release, monkeypatch, caplog):
    monkeypatch.setattr(sys, "argv", ["launch_server", "--model-path", "m"])
    with caplog.at_level(logging.ERROR):
        plugin.load()
    [record] = caplog.records
    assert "written for SGLang 9.9.9" in record.message
    assert "\n" not in record.message


@pytest.mark.parametrize(
    "arguments",
    [
        ["--speculative-ddtree-budget", "8"],
        ["--speculative-ddtree-budget=8"],
        ["--speculative-algorithm", "ddtree"],
        ["--speculative-algorithm=DDTREE"],
    ],
)
def test_a_release_it_is_not_written_for_ends_a_ddtree_server_in_one_line(wrong_release, monkeypatch, arguments):
    monkeypatch.setattr(sys, "argv", ["launch_server", "--model-path", "m", *arguments])
    with pytest.raises(SystemExit) as ended:
        plugin.load()
    assert str(ended.value).startswith("sglang_ddtree cannot be loaded: ")
    assert "9.9.9" in str(ended.value)


@pytest.mark.parametrize(
    "arguments",
    [["--model-path", "models/ddtree-bench/target"], ["--speculative-algorithm", "DFLASH", "--log-file", "ddtree"]],
)
def test_a_path_that_contains_the_name_asks_for_nothing(wrong_release, monkeypatch, arguments):
    monkeypatch.setattr(sys, "argv", ["launch_server", *arguments])
    plugin.load()


@pytest.mark.parametrize("name", NAMES)
def test_options_of_a_plugin_that_cannot_load_are_refused_with_the_reason(name, capsys):
    parser = argparse.ArgumentParser()
    plugin._add_refused_options(parser, "sglang_ddtree cannot be loaded: because")
    with pytest.raises(SystemExit):
        parser.parse_args([f"--speculative-ddtree-{name}"])
    assert "cannot be loaded: because" in capsys.readouterr().err
    assert parser.parse_args([]) is not None


def test_the_installed_files_are_those_of_the_release():
    from pathlib import Path

    import sglang

    assert release.changed_files(Path(sglang.__file__).parents[1]) == []


def test_a_changed_or_missing_file_is_named(tmp_path):
    found = release.changed_files(tmp_path)
    assert set(found) == set(release.hooked_files())


NEUTRAL = {
    "frequency_penalty": 0.5,
    "presence_penalty": -0.5,
    "repetition_penalty": 1.1,
    "min_new_tokens": 3,
}
ASKED = {
    "custom_logit_processor": "x",
    "return_hidden_states": True,
    "return_routed_experts": True,
    "return_indexer_topk": True,
    "return_sampling_mask": True,
}
SERVED = {
    *("return_logprob", "return_flat_raw_top_logprobs", "return_pooled_hidden_states"),
}
"""What a request may ask to be returned: logprobs are checked on a real server; pooling is of embedding models."""


def request(params=None, **asked):
    from sglang.srt.managers.schedule_batch import Req

    sampling = SamplingParams(**(params or {}))
    return Req("r", "", array("q", [1, 2]), sampling, vocab_size=320, **asked)


@pytest.fixture
def deterministic(monkeypatch):
    """Whether the server draws by seeds; it does not."""
    monkeypatch.setattr(requests, "seeded", lambda: False)
    return lambda: monkeypatch.setattr(requests, "seeded", lambda: True)


def test_an_ordinary_request_is_served(deterministic):
    assert requests.refuse(None, request(), True) is None
    served = {"logit_bias": {"5": 1.0}, "min_p": 0.1, "regex": "a+", "sampling_seed": 3}
    assert requests.refuse(None, request(served, return_logprob=True), True) is None


def test_min_p_is_refused_where_sglang_draws_by_seeds(deterministic):
    deterministic()
    assert "min_p with --enable-deterministic-inference" in requests.refuse(None, request({"min_p": 0.1}), True)
    assert requests.refuse(None, request({"sampling_seed": 3}), True) is None


@pytest.mark.parametrize(("name", "value"), NEUTRAL.items())
def test_a_penalty_is_refused_by_name(name, value):
    assert name in requests.refuse(None, request({name: value}), True)


@pytest.mark.parametrize(("name", "value"), ASKED.items())
def test_what_is_kept_by_slot_or_changes_logits_is_refused_by_name(name, value):
    assert name in requests.refuse(None, request(**{name: value}), True)


def test_everything_a_request_can_ask_to_be_returned_is_either_served_or_refused():
    """A release that adds something to return has to be looked at."""
    from sglang.srt.managers.schedule_batch import Req

    returned = {name for name in inspect.signature(Req.__init__).parameters if name.startswith("return_")}
    assert returned == SERVED | {name for name in ASKED if name.startswith("return_")}


def test_what_dflash_refuses_is_refused_under_our_name():
    assert requests.refuse("DFLASH does not", request(), True) == "DDTREE does not"


def test_the_record_behind_sglangs_stand_in_is_found(tmp_path):
    """Our options ride on the record, and SGLang hands an algorithm a stand-in that knows declared fields alone."""
    args = options.attach(ServerArgs(model_path=str(tmp_path)), Options(budget=3))
    found = record_foreign_defaults(args, "test", algorithm._record_behind)
    assert found is args
