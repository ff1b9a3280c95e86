"""Candidates from SGLang's own vocabulary-parallel head, split over real gloo ranks."""

import os
import subprocess
from pathlib import Path

import pytest
import torch

SCRIPT = Path(__file__).with_name("candidates_ranks.py")
PLUGIN = Path(__file__).parents[2] / "envs" / "sglang" / "plugin"
ROWS, HIDDEN_SIZE, VOCABULARY, CAP = 12, 32, 321, 8


def run_ranks(python, folder, ranks, cases, **server_args):
    """Answer the cases on real ranks; returns a list of results for each rank."""
    torch.save({"cases": cases, "server_args": server_args}, folder / "request.pt")
    env = {**os.environ, "PYTHONPATH": str(PLUGIN), "OMP_NUM_THREADS": "1", "TRITON_INTERPRET": "1"}
    done = subprocess.run(
        [python, SCRIPT, str(ranks), folder], env=env, capture_output=True, text=True, timeout=240, check=False
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return [torch.load(folder / f"{rank}.pt") for rank in range(ranks)]


def make_case(seed, *, groups=1, dtype=torch.float32, scale=None, softcap=None, fp32=False):
    generator = torch.Generator().manual_seed(seed)
    return {
        "weight": (torch.randn(VOCABULARY, HIDDEN_SIZE, generator=generator) * 0.3).to(dtype),
        "hidden": [torch.randn(ROWS, HIDDEN_SIZE, generator=generator).to(dtype) for _ in range(groups)],
        "cap": CAP,
        "scale": scale,
        "softcap": softcap,
        "fp32": fp32,
    }


def assert_best_of_gathered_logits(result, softcap):
    """The result is the whole vocabulary's ranking by (logit descending, id ascending), with its log-probabilities."""
    logits = result["logits"]
    assert logits.shape[-1] == VOCABULARY
    capped = logits.double() if softcap is None else softcap * torch.tanh(logits.double() / softcap)
    log_probs = torch.log_softmax(capped, dim=-1)
    order = logits.sort(dim=-1, descending=True, stable=True).indices[:, :CAP]
    assert torch.equal(result["ids"], order)
    assert result["log_probs"].dtype == torch.float32
    torch.testing.assert_close(result["log_probs"].double(), log_probs.gather(-1, order), rtol=0, atol=2e-6)


CASES = {
    "plain": {},
    "scaled and soft-capped": {"scale": 0.5, "softcap": 5.0},
    "float32 head of bfloat16 weights": {"dtype": torch.bfloat16, "fp32": True},
}


@pytest.mark.parametrize("ranks", [2, 4])
def test_candidates_are_the_best_of_sglangs_gathered_logits_on_every_rank(sglang_python, tmp_path, ranks):
    results = run_ranks(
        sglang_python, tmp_path, ranks, [make_case(seed, **options) for seed, options in enumerate(CASES.values())]
    )

    real = [result[0]["real_rows"] for result in results]
    assert sum(real) == VOCABULARY, "the shards hold the vocabulary once"
    assert real[-1] < results[-1][0]["shard_logits"].shape[-1], "the last shard has padding"
    for result in results[0]:
        expected = result["shard_logits"][:, :CAP].double().logsumexp(dim=-1)
        torch.testing.assert_close(result["kernel_log_sums"].double(), expected, rtol=0, atol=2e-6)
    for index, (name, options) in enumerate(CASES.items()):
        assert_best_of_gathered_logits(results[0][index], options.get("softcap"))
        for result in results[1:]:
            assert torch.equal(result[index]["ids"], results[0][index]["ids"]), name
            assert torch.equal(result[index]["log_probs"], results[0][index]["log_probs"]), name


def test_a_head_of_the_attention_group_ranks_each_data_parallel_ranks_own_rows(sglang_python, tmp_path):
    case = make_case(5, groups=2)
    results = run_ranks(sglang_python, tmp_path, 4, [case], dp_size=2, enable_dp_attention=True, enable_dp_lm_head=True)

    for rank in range(4):
        logits = case["hidden"][rank // 2] @ case["weight"].T
        assert torch.equal(results[rank][0]["ids"], logits.sort(descending=True, stable=True).indices[:, :CAP])
    assert not torch.equal(results[0][0]["ids"], results[2][0]["ids"])
