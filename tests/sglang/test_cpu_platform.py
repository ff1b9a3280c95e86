"""The CPU platform on the real server: right answers, one-line refusals, and nothing done where it is not active."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest
from hugging_face_greedy import greedy
from lossless import prompts, tokens_per_round
from sglang_server import ENVIRONMENT, ServerDied, SGLangServer, living_members
from trained_models import ModelPair

pytestmark = pytest.mark.sglang

TOKENS = 40
GREEDY = {"temperature": 0, "max_new_tokens": TOKENS, "ignore_eos": True}

# What this platform has changed in a process that imports what a scheduler's process does.
FACTS = """
import json, sys, torch
recorded = torch.Tensor.record_stream
try:
    import sglang.srt.managers.scheduler, sglang.srt.model_executor.model_runner
    failure = None
except ModuleNotFoundError as error:
    failure = error.name
from sglang.srt.platforms import current_platform
spec_tree = sys.modules.get("sglang.kernels.ops.speculative.spec_tree")
runner = sys.modules.get("sglang.srt.model_executor.model_runner")
print(json.dumps({
    "platform": type(current_platform).__name__,
    "finders": [type(f).__module__ for f in sys.meta_path if type(f).__module__.startswith("sglang_cpu_platform")],
    "imported": sorted(m for m in sys.modules if m.startswith("sglang_cpu_platform")),
    "torchvision": sorted(m for m in sys.modules if m.startswith("torchvision")),
    "record_stream": torch.Tensor.record_stream is not recorded,
    "spec_tree": bool(spec_tree and spec_tree._is_xpu),
    "runner": bool(runner and hasattr(runner.ModelRunner._extend_forward_kwargs, "keeps_model_dtype")),
    "failure": failure,
}))
"""


@pytest.fixture(scope="module")
def inputs(plain_model: ModelPair) -> list[list[int]]:
    return prompts(plain_model.target, 4)


@pytest.fixture(scope="module")
def expected(sglang_python: Path, plain_model: ModelPair, inputs: list[list[int]]) -> list[list[int]]:
    return greedy(sglang_python, plain_model.target, inputs, TOKENS)


def test_greedy_ar_equals_hugging_face_in_float32(
    plain_model: ModelPair, inputs: list[list[int]], expected: list[list[int]], tmp_path: Path
) -> None:
    with SGLangServer(plain_model.target, log_path=tmp_path / "log") as server:
        answers = server.generate(input_ids=inputs, sampling_params=GREEDY)
        alone = server.generate(input_ids=inputs[0], sampling_params=GREEDY)
        info = server.server_info()
    assert [answer["output_ids"] for answer in answers] == expected
    assert alone["output_ids"] == expected[0]
    assert (info["dtype"], info["device"], info["attention_backend"]) == ("float32", "cpu", "triton")


def test_dflash_equals_hugging_face_and_accepts_drafts(
    plain_model: ModelPair, inputs: list[list[int]], expected: list[list[int]], tmp_path: Path
) -> None:
    with SGLangServer(
        plain_model.target, drafter_path=plain_model.drafter, algorithm="DFLASH", log_path=tmp_path / "log"
    ) as server:
        answers = server.generate(input_ids=inputs, sampling_params=GREEDY)
    assert [answer["output_ids"] for answer in answers] == expected
    assert tokens_per_round(answers) > 1.5


def test_the_releases_own_draft_tree_equals_hugging_face_and_is_accepted(
    plain_model: ModelPair, inputs: list[list[int]], expected: list[list[int]], tmp_path: Path
) -> None:
    # The target as its own drafter, and a tree of all that three steps of two candidates propose: with the target's own
    # three tokens in it, every round accepts a path from end to end.
    tree = ("--speculative-num-steps", "3", "--speculative-eagle-topk", "2", "--speculative-num-draft-tokens", "11")
    with SGLangServer(
        plain_model.target,
        drafter_path=plain_model.target,
        algorithm="STANDALONE",
        extra_args=tree,
        log_path=tmp_path / "log",
    ) as server:
        answer = server.generate(input_ids=inputs[3], sampling_params=GREEDY)
    assert answer["output_ids"] == expected[3]
    assert answer["meta_info"]["spec_accept_length"] > 3


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            ("--dtype", "bfloat16"),
            "--dtype bfloat16: Triton's interpreter computes bfloat16 wrongly; use --dtype float32",
        ),
        (("--dtype", "auto"), "--dtype auto means bfloat16 for "),
    ],
)
def test_bfloat16_is_refused_in_one_line(
    plain_model: ModelPair, tmp_path: Path, options: tuple[str, ...], message: str
) -> None:
    model = tmp_path / "model"
    model.mkdir()
    for file in plain_model.target.iterdir():
        (model / file.name).symlink_to(file)
    config = json.loads((plain_model.target / "config.json").read_text())
    (model / "config.json").unlink()
    (model / "config.json").write_text(json.dumps(config | {"dtype": "bfloat16"}))
    server = SGLangServer(model, extra_args=options, log_path=tmp_path / "log")
    with pytest.raises(ServerDied), server:
        pass
    assert server.log().splitlines()[-1].startswith(message)
    assert "Traceback" not in server.log()


def test_no_process_outlives_the_block_nor_an_error_in_it(plain_model: ModelPair, tmp_path: Path) -> None:
    server = SGLangServer(plain_model.target, log_path=tmp_path / "log")
    with pytest.raises(KeyboardInterrupt), server:
        group = server.pid
        assert len(living_members(group)) >= 3
        raise KeyboardInterrupt
    assert living_members(group) == []


def _facts(python: Path, **environment: str) -> dict[str, object]:
    """What this platform has changed in a process with these variables in its environment."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("SGLANG_", "TRITON_"))}
    done = subprocess.run(
        [python, "-c", FACTS],
        env=kept | environment,
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    facts: dict[str, object] = json.loads(done.stdout.splitlines()[-1])
    return facts


def test_nothing_is_changed_where_the_platform_is_not_active(sglang_python: Path) -> None:
    facts = _facts(sglang_python)
    assert facts["platform"] != "InterpretedCpuPlatform"
    # The entry point's own module and the one that it imports, both of which only define things.
    assert facts["imported"] == [
        "sglang_cpu_platform",
        "sglang_cpu_platform.activation",
        "sglang_cpu_platform.torchvision_window",
    ]
    assert (facts["finders"], facts["torchvision"]) == ([], [])
    assert not facts["record_stream"] and not facts["spec_tree"] and not facts["runner"]
    assert facts["failure"] == "torchvision"


def test_the_active_platform_lets_the_scheduler_be_imported_without_torchvision(sglang_python: Path) -> None:
    facts = _facts(sglang_python, TRITON_INTERPRET=ENVIRONMENT["TRITON_INTERPRET"])
    assert facts["platform"] == "InterpretedCpuPlatform"
    assert facts["failure"] is None
    assert facts["torchvision"] == []
    assert facts["record_stream"]
