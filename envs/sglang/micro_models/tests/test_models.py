"""Training from a seed, the saved form, the cache. Needs the SGLang environment's transformers."""

from __future__ import annotations

import json
import math
from hashlib import sha256
from pathlib import Path

import pytest

pytest.importorskip("transformers")
pytest.importorskip("tokenizers")

import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from sglang_micro_models import (
    acceptance,
    cache,
    cli,
    corpus,
    drafter,
    identity,
    reference,
    targets,
    tokenizer,
    training,
)

SHORT = training.Recipe(target_steps=3, drafter_steps=3, rows_per_step=4, rows=16, warm_up=1)
QUESTIONS = [
    "Explain how a refrigerator works",
    "What is 17*24?",
    "Write a haiku about bread",
    "seso meku",
    "node rale",
]


@pytest.fixture(scope="module", params=identity.KINDS)
def saved(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return cache.ensure(tmp_path_factory.mktemp("cache"), identity.Identity(request.param), SHORT)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, training.Pair]:
    folder = cache.ensure(tmp_path_factory.mktemp("cache"), identity.Identity("plain"))
    model = AutoModelForCausalLM.from_pretrained(folder / "target", dtype=torch.float32).eval()
    layers = drafter.load(folder / "drafter").config.feature_layers
    return folder, training.Pair(targets.Target(model, layers), drafter.load(folder / "drafter"))


def test_the_space_is_token_0_and_common_in_answers() -> None:
    encoder = tokenizer.build()
    assert encoder(" ")["input_ids"] == [0]
    assert (corpus.rows(0, 50) == 0).float().mean() > 0.1


def test_any_text_survives_the_tokenizer_and_a_syllable_is_one_token() -> None:
    encoder = tokenizer.build()
    for text in ("sebi meku dero.", "Größe? 17*24 = 408!\n", "日本"):
        assert encoder.decode(encoder(text)["input_ids"]) == text
    assert len(encoder("sebi meku")["input_ids"]) == 5
    assert len(encoder) == tokenizer.VOCAB_SIZE
    assert tokenizer.VOCAB_SIZE % 64 != 0


def test_the_chat_template_opens_an_answer_and_matches_the_corpus() -> None:
    encoder = tokenizer.build()
    ids = encoder.apply_chat_template([{"role": "user", "content": "a"}], add_generation_prompt=True)["input_ids"]
    assert encoder.decode(ids) == "<|begin|><|user|>a<|end|><|assistant|>"
    assert ids[:2] in corpus.rows(0, 20)[:, :2].tolist()


def test_the_same_seed_gives_the_same_weights_and_another_seed_others(tmp_path: Path) -> None:
    digests = []
    for name, seed in (("a", 0), ("b", 0), ("c", 1)):
        folder = cache.ensure(tmp_path / name, identity.Identity("plain", seed=seed), SHORT)
        files = [folder / part / "model.safetensors" for part in ("target", "drafter")]
        digests.append([sha256(file.read_bytes()).hexdigest() for file in files])
    assert digests[0] == digests[1]
    assert digests[0][0] != digests[2][0]
    assert digests[0][1] != digests[2][1]


def test_a_second_call_does_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    chosen = identity.Identity("plain")
    folder = cache.ensure(tmp_path, chosen, SHORT)
    monkeypatch.setattr(training, "train", lambda *_: pytest.fail("trained again"))
    assert cache.ensure(tmp_path, chosen, SHORT) == folder
    assert [path.name for path in tmp_path.iterdir()] == [folder.name]


def test_a_failed_training_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("out of memory")

    monkeypatch.setattr(training, "train", fail)
    with pytest.raises(RuntimeError, match="out of memory"):
        cache.ensure(tmp_path, identity.Identity("plain"), SHORT)
    assert list(tmp_path.iterdir()) == []


def test_an_unfinished_folder_in_the_way_is_refused_by_name(tmp_path: Path) -> None:
    chosen = identity.Identity("plain")
    name = cache.ensure(tmp_path / "a", chosen, SHORT).name
    (tmp_path / "b" / name / "target").mkdir(parents=True)
    with pytest.raises(FileExistsError, match=name):
        cache.ensure(tmp_path / "b", chosen, SHORT)


def test_a_saved_pair_loads_and_has_the_keys_that_dflash_reads(saved: Path) -> None:
    target = AutoConfig.from_pretrained(saved / "target")
    assert target.vocab_size == len(AutoTokenizer.from_pretrained(saved / "target")) == tokenizer.VOCAB_SIZE
    draft = json.loads((saved / "drafter" / "config.json").read_text())
    assert draft["architectures"] == ["DFlashDraftModel"]
    assert draft["dflash_config"]["mask_token_id"] == tokenizer.MASK_ID
    assert draft["num_target_layers"] == target.num_hidden_layers
    assert max(draft["dflash_config"]["target_layer_ids"]) < target.num_hidden_layers - 1
    weights = load_file(saved / "drafter" / "model.safetensors")
    n_features = len(draft["dflash_config"]["target_layer_ids"])
    assert weights["fc.weight"].shape == (draft["hidden_size"], n_features * draft["hidden_size"])
    assert weights["layers.1.self_attn.q_proj.weight"].shape == (64, 64)
    assert {tensor.dtype for tensor in weights.values()} == {torch.float32}
    assert json.loads((saved / cache.DONE).read_text())["digest"] in saved.name


def test_a_saved_target_says_the_same_as_the_trained_one(saved: Path) -> None:
    kind = json.loads((saved / cache.DONE).read_text())["kind"]
    pair = training.train(identity.Identity(kind), SHORT)
    ids = corpus.rows(0, 1)[:, :40]
    with torch.inference_mode():
        logits = pair.target.model(input_ids=ids, use_cache=False).logits[0, -1]
    (law,) = reference.next_distribution(saved / "target", ids.tolist())
    assert torch.allclose(logits.double().softmax(-1), torch.tensor(law, dtype=torch.float64), atol=1e-6)


def test_drafts_depend_on_the_context_before_the_block_only() -> None:
    torch.manual_seed(0)
    target = targets.build("plain")
    network = training.new_drafter(target, 8)
    rows = corpus.rows(0, 2)[:, :60]
    anchors, first = torch.tensor([[20, 40], [20, 40]]), rows[:, [20, 40]]
    changed = rows.clone()
    changed[:, 30:] = 5
    with torch.no_grad():
        before = training.draft_logits(network, target, training.features(target, rows), anchors, first)
        after = training.draft_logits(network, target, training.features(target, changed), anchors, first)
    assert before.shape == (2, 2, 7, tokenizer.VOCAB_SIZE)
    assert torch.allclose(before[:, 0], after[:, 0], atol=1e-5)
    assert not torch.allclose(before[:, 1], after[:, 1], atol=1e-5)


def test_greedy_reference_is_not_misled_by_token_0_or_the_pad_token(saved: Path) -> None:
    model = reference.load(str(saved / "target"))
    prompt = [0, 0, tokenizer.PAD_ID, 260, 0]
    (ids,) = reference.greedy(saved / "target", [prompt], 3)
    with torch.inference_mode():
        embedded = model.get_input_embeddings()(torch.tensor([prompt]))  # no ids, so nothing that an id could mask
        assert ids[0] == int(model(inputs_embeds=embedded, use_cache=False).logits[0, -1].argmax())


def test_wrong_options_end_with_one_line_and_status_2(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert cli.main(["--kind", "dense", "--out", str(tmp_path)]) == 2
    error = capsys.readouterr().err
    assert "--kind dense" in error
    assert error.count("\n") == 1


@pytest.mark.slow
def test_the_plain_pair_accepts_some_drafts_and_not_all(trained: tuple[Path, training.Pair]) -> None:
    _, pair = trained
    prompts = reference.chat_ids(trained[0] / "target", QUESTIONS)
    chain, tree = (_mean_round(pair, prompts, 0.0, budget) for budget in (None, 16))
    assert 3 < chain < 6.5
    assert tree > 1.05 * chain
    assert (_mean_round(pair, prompts, 1.0, None) - 1) / 7 > 0.3


@pytest.mark.slow
def test_the_plain_target_leaves_several_likely_tokens(trained: tuple[Path, training.Pair]) -> None:
    folder, pair = trained
    prompts = reference.chat_ids(folder / "target", QUESTIONS)
    texts = acceptance.write(pair, prompts, 24, temperature=1.0)
    laws = reference.next_distribution(folder / "target", [text[:n] for text in texts for n in range(20, len(text))])
    entropies = [-sum(p * math.log(p) for p in law if p > 0) for law in laws]
    assert sum(entropy > 0.5 for entropy in entropies) > 0.2 * len(entropies)
    assert any(text.count(0) >= 3 for text in texts)


def _mean_round(pair: training.Pair, prompts: list[list[int]], temperature: float, budget: int | None) -> float:
    rounds = []
    for prompt, text in zip(prompts, acceptance.write(pair, prompts, 64, temperature), strict=True):
        end = text.index(tokenizer.END_ID, len(prompt)) + 1 if tokenizer.END_ID in text[len(prompt) :] else len(text)
        rounds += acceptance.tokens_per_round(pair, text[:end], len(prompt), budget)
    return sum(rounds) / len(rounds)
