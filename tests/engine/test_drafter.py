from __future__ import annotations

from pathlib import Path

import pytest
import torch

from ddtree_reference import assets, drafter, linear
from ddtree_reference.drafter import Context
from ddtree_reference.startup import Opened


def weight_of(layer: linear.Linear, width: int) -> torch.Tensor:
    """The weight [out, in] that a layer of `width` inputs multiplies with."""
    return linear.apply(layer, torch.eye(width, dtype=torch.bfloat16)).T


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
    assert torch.equal(weight_of(loaded.head, 64), toy.engine.target.head[10:20])
    quants, scale = drafter.quantise_rows(weights["layers.0.down"])
    assert torch.equal(weight_of(loaded.layers[0].down, 128), (quants.float() * scale[:, None]).bfloat16())
    assert torch.equal(loaded.norm, weights["norm"].bfloat16().float())


def test_a_drafter_of_another_target_is_refused(toy: Opened) -> None:
    with pytest.raises(ValueError, match="made for a target of dim 576 with layer 28; the target has dim 64"):
        drafter.load(assets.DRAFTER, toy.engine.target)


def test_what_is_drafted_depends_on_committed_tokens_alone(toy: Opened) -> None:
    model, cache = toy.engine.drafter, drafter.new_cache(toy.engine.drafter, 256)
    features = torch.randn(5, 128, generator=torch.Generator().manual_seed(3)).to(model.dtype)

    def extend(base: int, start: int, end: int) -> None:
        places = torch.arange(start, end)
        drafter.extend(model, cache, features[start:end], places, places + base)

    def propose(*contexts: Context) -> torch.Tensor:
        hidden = drafter.propose(model, cache, contexts, [65] * len(contexts), 8)
        return drafter.draft_logits(model, hidden)

    extend(0, 0, 2)
    before = propose(Context(0, 2))
    assert before.shape == (7, model.vocabulary.numel())
    assert torch.equal(propose(Context(0, 2)), before), "a proposal leaves no trace"
    extend(0, 2, 5)
    extend(128, 0, 5)
    in_parts, whole = propose(Context(0, 5), Context(128, 5)).chunk(2)
    assert torch.allclose(in_parts, whole, atol=1e-2)
    assert torch.allclose(whole, propose(Context(128, 5)), atol=1e-2), "other sequences of a batch change nothing"
    assert not torch.allclose(before, whole, atol=1e-2)


def test_the_weights_are_small_and_of_the_shape_the_card_states(smollm2: Opened) -> None:
    assert assets.DRAFTER.stat().st_size < 9_000_000
    config = smollm2.engine.drafter.config
    assert (config.n_layers, config.dim, config.feature_layers) == (2, 576, (2, 9, 16, 22, 28))
    assert smollm2.engine.drafter.vocabulary.numel() == len(set(smollm2.engine.drafter.vocabulary.tolist())) == 8192
