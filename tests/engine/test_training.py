"""Training of the drafter on the toy target: the stages go on where they were ended, the network is the drafter."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from ddtree_reference import drafter as dflash
from ddtree_reference import model, toy
from ddtree_training import (
    answers_file,
    batches,
    checkpoint,
    dataset,
    export,
    features,
    network,
    objective,
    targets,
    teacher,
    train,
    validation,
)
from ddtree_training.answers_file import Answer
from ddtree_training.network import Network
from ddtree_training.teacher import Teacher
from ddtree_training.train import Intervals, Settings

SETTINGS = Settings(steps=12, n_layers=2, vocabulary=64, sequences=2, anchors=4, block=4, long_share=0.5, warmup=3)
INTERVALS = Intervals(checkpoint=5, validation=6)


def answers(count: int = 12) -> list[Answer]:
    random = torch.Generator().manual_seed(3)

    def text(length: int) -> tuple[int, ...]:
        return tuple(torch.randint(97, 110, (length,), generator=random).tolist())

    return [Answer(f"a{i}", "code", f"prompt {i}", text(5 + i % 3), text(12 + 3 * (i % 4))) for i in range(count)]


@pytest.fixture(scope="module")
def source() -> Teacher:
    return teacher.load("toy")


@pytest.fixture(scope="module")
def shards(source: Teacher, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    return features.extract(source, answers(), (0, 1), tmp_path_factory.mktemp("features"), "toy")


def random_network(source: Teacher, compute: torch.dtype) -> Network:
    config = train.drafter_config(source, SETTINGS, (0, 1))
    made = Network(config, source.cos, source.sin, compute)
    random = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for weight in made.parameters():
            scale = weight.shape[-1] ** -0.5 if weight.dim() == 2 else 1.0
            weight.copy_(torch.randn(weight.shape, generator=random) * scale)
    return made


def drafted(drafter: dflash.Drafter, recorded: dataset.Recorded, anchor: int, block: int) -> torch.Tensor:
    cache = dflash.new_cache(drafter, 128)
    places = torch.arange(anchor)
    dflash.extend(drafter, cache, recorded.features[:anchor].to(drafter.dtype), places, places)
    token = int(recorded.tokens[anchor])
    return dflash.draft_logits(drafter, dflash.propose(drafter, cache, [dflash.Context(0, anchor)], [token], block))


def test_the_teacher_is_the_target_in_bf16(source: Teacher) -> None:
    target = toy.build_target("fp32", teacher.MAX_CONTEXT)
    tokens = torch.tensor([answers()[0].prompt_tokens + answers()[0].answer_tokens])
    hidden, found = teacher.forward(source, tokens, (0, 1))
    rows = tokens.shape[1]
    span = model.causal_span(target, 0, 0, rows)
    expected, wanted = model.forward(
        target, model.new_cache(target, rows), tokens[0], torch.arange(rows), [span], (0, 1)
    )
    assert wanted is not None
    assert (found[0] - wanted).abs().max() < 0.05 * wanted.abs().max()
    chosen = teacher.top_log_probs(source, hidden[0], 1)[0][:, 0].tolist()
    greedy = model.pick(target, *model.logits(target, expected))
    agreeing = sum(a == b for a, b in zip(chosen, greedy, strict=True))
    assert agreeing >= rows - 1


@pytest.mark.parametrize(
    ("compute", "numerics", "tolerance"), [(torch.float32, "fp32", 1e-4), (torch.bfloat16, "mixed", 0.05)]
)
def test_the_network_is_the_drafter(
    source: Teacher, shards: list[Path], compute: torch.dtype, numerics: Any, tolerance: float
) -> None:
    trained = random_network(source, compute)
    target = toy.build_target(numerics, teacher.MAX_CONTEXT)
    recorded = dataset.load(shards)[:3]
    vocabulary = torch.arange(90, 120)
    drafter = dflash.assemble(trained.config, dict(trained.state_dict()), vocabulary, target)
    anchors = [[a.prompt_length, a.prompt_length + 4, a.length - 2] for a in recorded]
    blocks = batches.lay_out(recorded, anchors, 4)
    with torch.no_grad():
        hidden = trained(blocks.features, blocks.anchors, target.embedding[blocks.anchor_tokens], 4)
        logits = (hidden @ target.head[vocabulary].to(compute).T).float()
    for i, answer in enumerate(recorded):
        for j, anchor in enumerate(anchors[i]):
            expected = drafted(drafter, answer, anchor, 4)
            assert (logits[i, j] - expected).abs().max() < tolerance * expected.abs().max()


def test_the_exported_file_is_the_average_of_the_weights(source: Teacher, shards: list[Path], tmp_path: Path) -> None:
    train.run(source, shards, tmp_path / "training", SETTINGS, INTERVALS)
    assert export.run(tmp_path / "training", tmp_path / "drafter.safetensors") == SETTINGS.steps
    target = toy.build_target("fp32", teacher.MAX_CONTEXT)
    loaded = dflash.load(tmp_path / "drafter.safetensors", target)
    state = checkpoint.load(tmp_path / "training")
    assert state is not None
    unquantised = dflash.assemble(loaded.config, state["ema"], state["vocabulary"], target)
    answer = dataset.load(shards)[0]
    expected = drafted(unquantised, answer, answer.prompt_length, 4)
    assert (drafted(loaded, answer, answer.prompt_length, 4) - expected).abs().max() < 0.1 * expected.abs().max()


def test_a_training_that_was_killed_ends_with_the_same_weights(
    source: Teacher, shards: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    train.run(source, shards, tmp_path / "whole", SETTINGS, INTERVALS)
    step = train._step

    def killed_at_eight(trainer: train.Trainer, number: int) -> float:
        if number == 8:
            (tmp_path / "parts" / "checkpoint.pt.tmp").write_bytes(b"half")
            raise KeyboardInterrupt
        return step(trainer, number)

    monkeypatch.setattr(train, "_step", killed_at_eight)
    with pytest.raises(KeyboardInterrupt):
        train.run(source, shards, tmp_path / "parts", SETTINGS, INTERVALS)
    monkeypatch.undo()
    train.run(source, shards, tmp_path / "parts", SETTINGS, INTERVALS)
    whole, parts = checkpoint.load(tmp_path / "whole"), checkpoint.load(tmp_path / "parts")
    assert whole is not None and parts is not None
    for name in ("network", "ema"):
        assert all(torch.equal(whole[name][key], parts[name][key]) for key in whole[name])

    def curve(folder: str) -> list[dict[str, Any]]:
        lines = (tmp_path / folder / train.CURVE).read_text().splitlines()
        return [{k: v for k, v in json.loads(line).items() if k not in ("time", "loss")} for line in lines]

    assert curve("parts") == curve("whole")
    assert [entry["step"] for entry in curve("whole") if "accept" in entry] == [6, 12]


def test_a_curve_keeps_its_whole_lines_and_loses_those_of_steps_to_come(tmp_path: Path) -> None:
    curve = tmp_path / train.CURVE
    curve.write_text('{"step": 1, "accept": {"A": 1}}\n{"step": 9, "loss": 1}\n{"step": 2, "accept": {"A": 1}')
    train._keep_until(curve, 5)
    assert curve.read_text() == '{"step": 1, "accept": {"A": 1}}\n'


def test_a_checkpoint_of_another_training_is_refused(source: Teacher, shards: list[Path], tmp_path: Path) -> None:
    train.run(source, shards, tmp_path, replace(SETTINGS, steps=1), INTERVALS)
    with pytest.raises(ValueError, match="another steps, seed; remove the folder"):
        train.run(source, shards, tmp_path, replace(SETTINGS, seed=1), INTERVALS)
    others = [tmp_path / "features-other.safetensors"]
    shutil.copy(shards[0], others[0])
    with pytest.raises(ValueError, match="other answers"):
        train.run(source, others, tmp_path, replace(SETTINGS, steps=1), INTERVALS)


def test_shards_that_are_there_are_not_made_again(
    source: Teacher, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(features, "SHARD_ANSWERS", 5)
    made: list[int] = []
    record = features._record

    def counted(source: Teacher, part: Sequence[Answer], layers: tuple[int, ...]) -> Any:
        made.extend(range(len(part)))
        if len(made) == 10:  # the second shard's answers are computed, but it is not written
            raise KeyboardInterrupt
        return record(source, part, layers)

    monkeypatch.setattr(features, "_record", counted)
    with pytest.raises(KeyboardInterrupt):
        features.extract(source, answers(), (0, 1), tmp_path, "toy")
    assert len(features.find(tmp_path)) == 1
    made[:] = [0] * 100
    shards = features.extract(source, answers(), (0, 1), tmp_path, "toy")
    assert len(made) == 107
    assert shards == features.find(tmp_path)
    assert [entry.id for shard in shards for entry in features.entries(shard)] == [a.id for a in answers()]
    changed = [replace(answers()[0], answer_tokens=(98, 99, 100)), *answers()[1:]]
    again = features.extract(source, changed, (0, 1), tmp_path, "toy")
    assert again[1:] == shards[1:] and again[0] != shards[0] and not shards[0].exists()


def test_features_without_room_are_refused(source: Teacher, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(features, "SPARE_BYTES", 1 << 60)
    with pytest.raises(OSError, match="free some disk space"):
        features.extract(source, answers(), (0, 1), tmp_path, "toy")


def test_a_shard_holds_what_the_target_thought(source: Teacher, shards: list[Path]) -> None:
    for answer, recorded in zip(answers(), dataset.load(shards), strict=True):
        tokens = [*answer.prompt_tokens, *answer.answer_tokens]
        assert recorded.tokens.tolist() == tokens
        hidden, found = teacher.forward(source, torch.tensor([tokens[:-1]]), (0, 1))
        assert (recorded.features - found[0]).abs().max() < 0.1
        ids, log_probs = teacher.top_log_probs(source, hidden[0, len(answer.prompt_tokens) - 1 :], features.TOP)
        assert recorded.top_ids.shape == (len(answer.answer_tokens), features.TOP)
        assert (recorded.top_log_probs[:, 0] - log_probs[:, 0]).abs().max() < 0.1
        assert (recorded.top_ids[:, 0] == ids[:, 0]).float().mean() > 0.8


def test_an_unfinished_last_line_of_answers_is_cut(tmp_path: Path) -> None:
    path = tmp_path / "answers.jsonl"
    assert answers_file.read(path) == []
    with answers_file.appending(path) as append:
        append(answers()[0])
        append(answers()[1])
    whole = path.read_bytes()
    path.write_bytes(whole + whole[: len(whole) // 4])
    assert [answer.id for answer in answers_file.read(path)] == ["a0", "a1"]
    with answers_file.appending(path) as append:
        append(answers()[2])
    assert [answer.id for answer in answers_file.read(path)] == ["a0", "a1", "a2"]
    path.write_text('{"id": "x"}\n')
    with pytest.raises(ValueError, match=r"answers\.jsonl:1: not an answer"):
        answers_file.read(path)


def test_every_epoch_takes_each_answer_once() -> None:
    lengths = tuple(range(10, 34))
    for epoch in range(2):
        taken = [i for step in range(8) for i in batches.answers_of(8 * epoch + step, 5, lengths, 3)]
        assert sorted(taken) == list(range(24))
    assert batches.answers_of(3, 5, lengths, 3) != batches.answers_of(3, 6, lengths, 3)
    long = [batches.shape_of(step, 0, 8, 24, 8, 0.2).block == 16 for step in range(1000)]
    assert 150 < sum(long) < 250


def test_no_prompt_is_trained_on_and_validated_on(shards: list[Path]) -> None:
    recorded = dataset.load(shards)
    twice = [*recorded, *(replace(answer, id=answer.id + "b") for answer in recorded)]
    split = dataset.split(twice, 0.2)
    assert len(split.validation) == 6  # three prompts of twelve, each with two answers
    assert not {a.prompt for a in split.training} & {a.prompt for a in split.validation}


def test_the_loss_is_the_cross_entropy_and_so_is_its_gradient() -> None:
    random = torch.Generator().manual_seed(0)
    hidden = torch.randn(300, 8, generator=random, requires_grad=True)
    head = torch.randn(20, 8, generator=random)
    ids = torch.randint(20, (300, 3), generator=random)
    wanted = torch.rand(300, 3, generator=random)
    dense = torch.zeros(300, 20).scatter_add_(1, ids, wanted)
    expected = -(dense * (hidden @ head.T).log_softmax(-1)).sum()
    (expected_slope,) = torch.autograd.grad(expected, hidden)
    loss = objective.head_loss(hidden, head, ids, wanted)
    (slope,) = torch.autograd.grad(loss, hidden)
    assert loss.item() == pytest.approx(expected.item(), rel=1e-5)
    assert torch.allclose(slope, expected_slope, atol=1e-5)


def test_targets_weigh_greedy_and_likely_tokens_by_depth(shards: list[Path]) -> None:
    recorded = dataset.load(shards)[:1]
    index = targets.draft_index(torch.arange(toy.EOS + 1), toy.EOS + 1)
    blocks = batches.lay_out(recorded, [[recorded[0].prompt_length]], 4)
    wanted = targets.build(blocks, recorded, index, soft_share=0.25, decay=2.0)
    first = recorded[0].prompt_length + 1
    assert wanted.ids[:, 0].tolist() == recorded[0].tokens[first : first + 3].tolist()
    assert wanted.weights.sum(-1).tolist() == pytest.approx(torch.exp(-torch.arange(3) / 2.0).tolist())
    assert wanted.weights[0, 0].item() == pytest.approx(0.75)
    none = targets.build(blocks, recorded, torch.full_like(index, -1), soft_share=0.25, decay=2.0)
    assert none.total == 0.0


def test_accept_lengths_count_what_trees_would_accept() -> None:
    logits = torch.tensor([[3.0, 2.9, 0.0, 0.0], [0.0, 4.0, 0.0, 0.0], [0.0, 0.0, 2.0, 1.9]])
    assert validation._accepted(logits, torch.tensor([0, 1, 2])) == {"DFLASH": 3, "DDTREE:8": 3, "DDTREE:16": 3}
    assert validation._accepted(logits, torch.tensor([1, 1, 3]))["DFLASH"] == 0
    assert validation._accepted(logits, torch.tensor([1, 1, 3]))["DDTREE:8"] == 3
    assert validation._accepted(logits, torch.tensor([-1, 1, 2])) == {"DFLASH": 0, "DDTREE:8": 0, "DDTREE:16": 0}


def test_training_lowers_the_loss(source: Teacher, shards: list[Path], tmp_path: Path) -> None:
    train.run(source, shards, tmp_path, replace(SETTINGS, steps=100, peak_lr=3e-3), Intervals(1000, 1000))
    lines = [json.loads(line) for line in (tmp_path / train.CURVE).read_text().splitlines()]
    losses = [line["loss"] for line in lines if "loss" in line]
    assert losses[-1] < 0.8 * losses[0]


def test_the_start_is_the_targets_last_layers(source: Teacher) -> None:
    made = Network(train.drafter_config(source, SETTINGS, (0, 1)), source.cos, source.sin)
    network.initialise(made, source, seed=0)
    assert torch.equal(made.get_parameter("layers.1.down"), source.layers[1].down.float())
    assert torch.diagonal(made.fc[:, -made.config.dim :]).mean() > 0.9
