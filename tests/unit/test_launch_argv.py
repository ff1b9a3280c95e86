"""The reference server's command line."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ddtree_bench.plan import ModelRef, Server
from ddtree_bench.servers.command_line import Place, launch_argv, reference_model, served_model_name

PLACE = Place(python="/env/bin/python", port=8123, start_id="s1")
COMMON = ["/env/bin/python", "-m", "ddtree_reference", "serve", "--host", "127.0.0.1", "--port", "8123"]
COMMON += ["--model", "smollm2", "--served-model-name", "SmolLM2-135M-Instruct"]


def server(**more: object) -> Server:
    plain = Server("s", "local", "reference", "e" * 64, ModelRef("SmolLM2-135M-Instruct", "1"), None, "AR")
    return replace(plain, **more)  # type: ignore[arg-type]


def test_autoregressive() -> None:
    assert launch_argv(server(), PLACE) == [*COMMON, "--max-running-requests", "1", "--start-id", "s1"]


def test_linear_verify() -> None:
    argv = launch_argv(server(method="DFLASH", block_size=8), PLACE)
    speculation = ["--speculative-algorithm", "DFLASH", "--speculative-dflash-block-size", "8"]
    assert argv == [*COMMON, *speculation, "--max-running-requests", "1", "--start-id", "s1"]


def test_tree_verify_with_flags_and_a_switch() -> None:
    flags = (("threads", "2"), ("--verbose", ""))
    argv = launch_argv(server(method="DDTREE", block_size=8, budget=16, topk_cap=4, flags=flags), PLACE)
    speculation = ["--speculative-algorithm", "DDTREE", "--speculative-dflash-block-size", "8"]
    speculation += ["--speculative-ddtree-budget", "16", "--speculative-ddtree-topk-cap", "4"]
    end = ["--max-running-requests", "1", "--start-id", "s1", "--threads", "2", "--verbose"]
    assert argv == [*COMMON, *speculation, *end]


def test_the_requests_admitted_at_once_are_those_of_the_configuration() -> None:
    argv = launch_argv(server(max_running_requests=8), PLACE)
    assert argv[argv.index("--max-running-requests") + 1] == "8"


def test_models_of_the_reference_engine() -> None:
    assert reference_model("SmolLM2-135M-Instruct") == "smollm2" and reference_model("toy") == "toy"
    with pytest.raises(ValueError, match=r"'SmolLM2-360M-Instruct' is not one .* it has SmolLM2-135M-Instruct, toy"):
        reference_model("SmolLM2-360M-Instruct")


def test_an_engine_that_cannot_be_started_names_those_that_can() -> None:
    with pytest.raises(ValueError, match="'vllm' cannot be started; engines: reference"):
        launch_argv(server(engine="vllm"), PLACE)


def test_served_name() -> None:
    assert served_model_name(server()) == "SmolLM2-135M-Instruct"
