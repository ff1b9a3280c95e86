"""DDTREE under tensor parallelism: two ranks with half of the vocabulary each, over gloo on this machine's CPU."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from hugging_face_greedy import greedy as hugging_face
from lossless import differing, in_one_batch, prompts, tokens_per_round
from safetensors.numpy import load_file, save_file
from sglang_server import SGLangServer
from trained_models import ModelPair

pytestmark = [pytest.mark.sglang, pytest.mark.slow]

TOKENS = 40
# SGLang wants to know which cores are whose where there are more ranks than NUMA nodes; both may share one.
CORES = {"SGLANG_CPU_OMP_THREADS_BIND": "0|0"}


def with_two_kv_heads(model: Path, folder: Path) -> Path:
    """A copy of a model with one KV head, which has two equal ones and so computes the same.

    On a CPU the release pads heads that the ranks do not divide (`model_executor/model_runner.py:1301`), but loads
    padded weights with SGLANG_USE_CPU_ENGINE=1 alone.
    """
    shutil.copytree(model, folder)
    weights = load_file(folder / "model.safetensors")
    for name, weight in weights.items():
        if name.endswith(("k_proj.weight", "v_proj.weight")):
            weights[name] = np.concatenate([weight, weight])
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    assert config["num_key_value_heads"] == 1
    (folder / "config.json").write_text(json.dumps(config | {"num_key_value_heads": 2}))
    return folder


def test_two_ranks_equal_hugging_face(sglang_python: Path, plain_model: ModelPair, tmp_path: Path) -> None:
    inputs = prompts(plain_model.target, 4)
    with SGLangServer(
        with_two_kv_heads(plain_model.target, tmp_path / "target"),
        drafter_path=with_two_kv_heads(plain_model.drafter, tmp_path / "drafter"),
        algorithm="DDTREE",
        budget=8,
        extra_args=["--tp-size", "2", "--max-running-requests", "4"],
        env=CORES,
        log_path=tmp_path / "log",
    ) as server:
        answers = in_one_batch(server, inputs, TOKENS)
        info = server.server_info()
    assert info["tp_size"] == 2
    assert differing(answers, hugging_face(sglang_python, plain_model.target, inputs, TOKENS)) == 0
    assert tokens_per_round(answers) > 1.5
