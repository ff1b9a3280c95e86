"""The command lines of the reference server and of SGLang."""

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
    with pytest.raises(ValueError, match="'vllm' cannot be started; engines: reference, sglang"):
        launch_argv(server(engine="vllm"), PLACE)


def test_served_name() -> None:
    assert served_model_name(server()) == "SmolLM2-135M-Instruct"


HERE = Place("/env/bin/python", 8123, "s1", model_path="/m/target", drafter_path="/m/drafter", build="cuda13")
SGLANG = ["/env/bin/python", "-m", "sglang.launch_server", "--model-path", "/m/target"]
SGLANG += ["--served-model-name", "Kimi", "--host", "127.0.0.1", "--port", "8123"]
REPORTS = ["--enable-metrics", "--enable-cache-report"]


def sglang(**more: object) -> Server:
    plain = Server("s", "ct200", "sglang", "e" * 64, ModelRef("Kimi", "1"), None, "AR", max_running_requests=64)
    drafted = {} if more.get("method", "AR") == "AR" else {"drafter": ModelRef("Kimi-DFlash", "1"), "block_size": 8}
    return replace(plain, **{**drafted, **more})  # type: ignore[arg-type]


def test_sglang_autoregressive_knows_no_drafter() -> None:
    argv = launch_argv(sglang(tensor_parallel=8, expert_parallel=4), HERE)
    assert argv == [*SGLANG, "--max-running-requests", "64", "--tp-size", "8", "--ep-size", "4", *REPORTS]


def test_sglang_linear_verify() -> None:
    argv = launch_argv(sglang(method="DFLASH"), HERE)
    speculation = ["--speculative-algorithm", "DFLASH", "--speculative-dflash-block-size", "8"]
    speculation += ["--speculative-draft-model-path", "/m/drafter"]
    rest = ["--max-running-requests", "64", "--tp-size", "1", "--ep-size", "1", *REPORTS]
    assert argv == [*SGLANG, *speculation, *rest]


def test_sglang_tree_verify_with_flags_and_a_switch() -> None:
    flags = (("mem-fraction-static", "0.8"), ("trust-remote-code", ""))
    argv = launch_argv(sglang(method="DDTREE", budget=32, topk_cap=8, flags=flags), HERE)
    speculation = ["--speculative-algorithm", "DDTREE", "--speculative-dflash-block-size", "8"]
    speculation += ["--speculative-ddtree-budget", "32", "--speculative-ddtree-topk-cap", "8"]
    speculation += ["--speculative-draft-model-path", "/m/drafter"]
    rest = ["--max-running-requests", "64", "--tp-size", "1", "--ep-size", "1", *REPORTS]
    assert argv == [*SGLANG, *speculation, *rest, "--mem-fraction-static", "0.8", "--trust-remote-code"]


@pytest.mark.parametrize(("method", "given"), [("AR", False), ("DFLASH", False), ("DDTREE", True)])
def test_consent_to_a_tree_on_a_hybrid_model_goes_to_the_tree_alone(method: str, given: bool) -> None:
    tree = {"budget": 8, "topk_cap": 8} if method == "DDTREE" else {}
    argv = launch_argv(sglang(method=method, **tree), replace(HERE, allow_hybrid_unsafe=True))
    assert ("--speculative-ddtree-allow-hybrid-unsafe" in argv) is given


def test_the_cpu_build_gets_what_it_cannot_do_without_before_the_flags() -> None:
    argv = launch_argv(sglang(flags=(("max-total-tokens", "8192"),)), replace(HERE, build="cpu"))
    cpu = ["--device", "cpu", "--dtype", "float32", "--attention-backend", "triton"]
    cpu += ["--cuda-graph-backend-decode", "disabled", "--cuda-graph-backend-prefill", "disabled"]
    assert argv[argv.index("--enable-cache-report") + 1 :] == [*cpu, "--max-total-tokens", "8192"]


@pytest.mark.parametrize(
    ("missing", "message"),
    [("model_path", "model Kimi: has no path"), ("drafter_path", "model Kimi-DFlash: has no path")],
)
def test_sglang_needs_the_paths_of_its_models(missing: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        launch_argv(sglang(method="DFLASH"), replace(HERE, **{missing: None}))  # type: ignore[arg-type]
