from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

import ddtree_reference
from ddtree_reference import assets, drafter, lossless
from ddtree_reference.startup import Opened

TRAINING_PROMPTS = Path(ddtree_reference.__file__).parent.parent / "training" / "training_prompts.txt"
HELDOUT = Path(__file__).parents[2] / "config" / "prompts" / "heldout.jsonl"


def test_quantised_rows_are_within_half_a_step() -> None:
    weight = torch.randn(7, 33, generator=torch.Generator().manual_seed(1))
    quants, scale = drafter.quantise_rows(weight)
    assert quants.dtype == torch.int8
    assert ((quants.float() * scale[:, None] - weight).abs() <= 0.5001 * scale[:, None]).all()
    assert (quants.abs().amax(1) == 127).all()


def test_saved_weights_load_as_they_were_quantised(tmp_path: Path, toy: Opened) -> None:
    genuine = toy.engine.drafter
    config = genuine.config
    shapes = {"fc": (64, 128), "context_norm": (64,), "mask_embedding": (64,), "norm": (64,)}
    shapes |= {"layers.0.q": (64, 64), "layers.0.kv": (128, 64), "layers.0.out": (64, 64)}
    shapes |= {"layers.0.gate_up": (256, 64), "layers.0.down": (64, 128)}
    shapes |= {"layers.0.attention_norm": (64,), "layers.0.ffn_norm": (64,)}
    generator = torch.Generator().manual_seed(2)
    weights = {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}
    path = tmp_path / "d.safetensors"
    drafter.save(path, config, weights, torch.arange(10, 20))
    loaded = drafter.load(path, toy.engine.target)
    assert loaded.config == config
    assert loaded.vocabulary.tolist() == list(range(10, 20))
    assert torch.equal(loaded.head, toy.engine.target.head[10:20])
    quants, scale = drafter.quantise_rows(weights["layers.0.down"])
    assert torch.equal(loaded.layers[0].down, (quants.float() * scale[:, None]).bfloat16())
    assert torch.equal(loaded.norm, weights["norm"].bfloat16().float())


def test_a_drafter_of_another_target_is_refused(toy: Opened) -> None:
    with pytest.raises(ValueError, match="made for a target of dim 576 with layer 28; the target has dim 64"):
        drafter.load(assets.DRAFTER, toy.engine.target)


def test_the_context_grows_with_committed_tokens_only(toy: Opened) -> None:
    engine = toy.engine
    context = drafter.new_context(engine.drafter, 64)
    features = torch.randn(5, 128, generator=torch.Generator().manual_seed(3))
    drafter.extend(engine.drafter, context, features[:2])
    before = drafter.propose(engine.drafter, context, 65, 8)
    assert before.shape == (7, engine.drafter.vocabulary.numel())
    assert context.length == 2
    assert torch.equal(drafter.propose(engine.drafter, context, 65, 8), before), "a proposal leaves no trace"
    drafter.extend(engine.drafter, context, features[2:])
    assert context.length == 5
    whole = replace(drafter.new_context(engine.drafter, 64))
    drafter.extend(engine.drafter, whole, features)
    assert torch.allclose(
        drafter.propose(engine.drafter, context, 65, 8), drafter.propose(engine.drafter, whole, 65, 8), atol=1e-2
    )


def test_the_weights_are_small_and_of_the_shape_the_card_states(smollm2: Opened) -> None:
    assert assets.DRAFTER.stat().st_size < 9_000_000
    config = smollm2.engine.drafter.config
    assert (config.n_layers, config.dim, config.feature_layers) == (2, 576, (2, 9, 16, 22, 28))
    assert smollm2.engine.drafter.vocabulary.numel() == len(set(smollm2.engine.drafter.vocabulary.tolist())) == 8192


def test_training_prompts_are_listed_and_the_held_out_prompts_are_not_among_them() -> None:
    training = TRAINING_PROMPTS.read_text(encoding="utf-8").splitlines()
    assert len(training) == len(set(training)) == 1897
    assert {entry["prompt"] for entry in lossless.read_prompts(HELDOUT)}.isdisjoint(training)
