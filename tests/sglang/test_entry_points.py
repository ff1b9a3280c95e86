"""The ways in: command lines, a configuration file and `sgl.Engine`, with clear ends for what cannot be served."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from hugging_face_greedy import greedy as hugging_face
from lossless import greedy, in_one_batch, prompts
from sglang_server import ARGUMENTS, ENVIRONMENT, UNSET, SGLangServer
from trained_models import ModelPair

pytestmark = [pytest.mark.sglang, pytest.mark.slow]

TOKENS = 40
DDTREE = ("--speculative-algorithm", "DDTREE")
ENGINE = """
import json, sys

import sglang

if __name__ == "__main__":
    request = json.load(sys.stdin)
    engine = sglang.Engine(**request["engine"])
    answers = engine.generate(**request["generate"])
    shown = engine.get_server_info()
    engine.shutdown()
    print(json.dumps({
        "ids": [answer["output_ids"] for answer in answers],
        "rounds": [answer["meta_info"]["spec_verify_ct"] for answer in answers],
        "budget": shown["speculative_ddtree_budget"],
    }))
"""


class ServedByConfig(SGLangServer):
    """A server by `sglang serve MODEL --config FILE`, with `options` in the file."""

    def __init__(self, model_path: Path, python: Path, options: Mapping[str, object], folder: Path) -> None:
        super().__init__(model_path, log_path=folder / "log")
        config = folder / "server.yaml"
        config.write_text("".join(f"{name}: {value}\n" for name, value in options.items()))
        self._command = [str(python.with_name("sglang")), "serve", str(model_path), "--port", str(self._port)]
        self._command += [*ARGUMENTS, "--config", str(config)]


def environment() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name not in UNSET} | ENVIRONMENT


def launch(python: Path, arguments: tuple[str, ...]) -> subprocess.CompletedProcess[str]:
    """Run `sglang.launch_server` to its end, which comes before any model is loaded."""
    command = [python, "-m", "sglang.launch_server", *arguments]
    return subprocess.run(command, check=False, capture_output=True, text=True, timeout=240, env=environment())


@pytest.fixture(scope="module")
def ended(sglang_python: Path, plain_model: ModelPair) -> dict[str, subprocess.CompletedProcess[str]]:
    """What command lines that end by themselves did, two of them at a time."""
    served = ("--model-path", str(plain_model.target), *ARGUMENTS, *DDTREE)
    drafted = (*served, "--speculative-draft-model-path", str(plain_model.drafter))
    lines = {
        "help": ("--help",),
        "budget": (*drafted, "--speculative-ddtree-budget", "0"),
        "drafter": served,
        "backend": (*drafted, "--attention-backend", "torch_native"),
        "pipeline": (*drafted, "--pp-size", "2"),
        "algorithm": ("--model-path", str(plain_model.target), *ARGUMENTS, "--speculative-ddtree-budget", "8"),
    }
    with ThreadPoolExecutor(2) as users:
        done = users.map(lambda line: launch(sglang_python, line), lines.values())
        return dict(zip(lines, done, strict=True))


def last_line(done: subprocess.CompletedProcess[str]) -> str:
    return (done.stdout + done.stderr).strip().splitlines()[-1]


def test_help_shows_the_options(ended: dict[str, subprocess.CompletedProcess[str]]) -> None:
    assert ended["help"].returncode == 0
    for name in ("budget", "topk-cap", "allow-hybrid-unsafe"):
        assert f"--speculative-ddtree-{name}" in ended["help"].stdout


def test_a_budget_of_0_ends_with_one_line_that_names_it(ended: dict[str, subprocess.CompletedProcess[str]]) -> None:
    done = ended["budget"]
    assert done.returncode == 2
    assert last_line(done).endswith("error: argument --speculative-ddtree-budget: 0 is below 1")
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("case", "message"),
    [
        ("drafter", "--speculative-algorithm DDTREE needs --speculative-draft-model-path, the DFlash drafter"),
        (
            "backend",
            "--attention-backend torch_native: cannot mask a tree; use one of triton, flashinfer, fa3",
        ),
        ("pipeline", "--pp-size 2: DDTREE runs without pipeline parallelism only; use --pp-size 1"),
        ("algorithm", "--speculative-ddtree-budget needs --speculative-algorithm DDTREE, not None"),
    ],
)
def test_what_cannot_be_served_is_said_before_a_model_is_loaded(
    ended: dict[str, subprocess.CompletedProcess[str]], case: str, message: str
) -> None:
    done = ended[case]
    assert done.returncode not in (0, None)
    assert last_line(done).endswith(message)
    assert "Load weight" not in done.stdout + done.stderr


def test_sglang_serve_takes_the_options_from_a_config_file(
    sglang_python: Path, plain_model: ModelPair, tmp_path: Path
) -> None:
    options = {
        "speculative-algorithm": "DDTREE",
        "speculative-draft-model-path": plain_model.drafter,
        "speculative-ddtree-budget": 8,
        "speculative-ddtree-topk-cap": 4,
    }
    inputs = prompts(plain_model.target, 3)
    with ServedByConfig(plain_model.target, sglang_python, options, tmp_path) as server:
        answers = in_one_batch(server, inputs, TOKENS)
        info = server.server_info()
    assert (info["speculative_ddtree_budget"], info["speculative_ddtree_topk_cap"]) == (8, 4)
    wanted = hugging_face(sglang_python, plain_model.target, inputs, TOKENS)
    assert [answer["output_ids"] for answer in answers] == wanted


def test_an_engine_takes_the_options_as_keywords(sglang_python: Path, plain_model: ModelPair, tmp_path: Path) -> None:
    inputs = prompts(plain_model.target, 3)
    engine = {
        "model_path": str(plain_model.target),
        "speculative_algorithm": "DDTREE",
        "speculative_draft_model_path": str(plain_model.drafter),
        "speculative_ddtree_budget": 8,
        "device": "cpu",
        "dtype": "float32",
        "attention_backend": "triton",
        "cuda_graph_backend_decode": "disabled",
        "cuda_graph_backend_prefill": "disabled",
        "max_total_tokens": 8192,
        "mem_fraction_static": 0.5,
        "grammar_backend": "none",
    }
    script = tmp_path / "use_engine.py"
    script.write_text(ENGINE)
    request = {"engine": engine, "generate": {"input_ids": inputs, "sampling_params": greedy(TOKENS)}}
    done = subprocess.run(
        [sglang_python, script],
        check=False,
        input=json.dumps(request),
        capture_output=True,
        text=True,
        timeout=280,
        env=environment(),
    )
    assert done.returncode == 0, done.stderr[-3000:]
    answer = json.loads(done.stdout.splitlines()[-1])
    assert answer["ids"] == hugging_face(sglang_python, plain_model.target, inputs, TOKENS)
    assert all(rounds < TOKENS - 1 for rounds in answer["rounds"])
    assert answer["budget"] == 8
