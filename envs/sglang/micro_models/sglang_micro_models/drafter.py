"""The DFlash drafter: its network for training, and its file as SGLang's `DFlashDraftModel` loads it.

Keys and values of every layer come from the target's hidden states of the tokens before the block and from the block
itself; attention inside the block is not causal (DFlash, https://github.com/z-lab/dflash).
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from sglang_micro_models import tokenizer

NORM_EPS = 1e-6
ROPE_THETA = 10_000.0


@dataclass(frozen=True)
class DrafterConfig:
    """Sizes; `hidden` and `vocab` are the target's, whose embedding and head the drafter uses."""

    hidden: int
    block_size: int
    target_layers: int
    feature_layers: tuple[int, ...]
    layers: int = 2
    heads: int = 2
    kv_heads: int = 1
    head_dim: int = 32
    intermediate: int = 128


class RMSNorm(nn.Module):
    """x / rms(x) * weight over the last dimension."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))

    def forward(self, x: Tensor) -> Tensor:
        """Same shape as `x`."""
        return F.rms_norm(x, self.weight.shape, self.weight, NORM_EPS)


class Attention(nn.Module):
    """Attention of a block's tokens to the context's features and to the block."""

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        self.config = config
        self.q_proj = _linear(config.hidden, config.heads * config.head_dim)
        self.k_proj = _linear(config.hidden, config.kv_heads * config.head_dim)
        self.v_proj = _linear(config.hidden, config.kv_heads * config.head_dim)
        self.o_proj = _linear(config.heads * config.head_dim, config.hidden)
        self.q_norm = RMSNorm(config.head_dim)
        self.k_norm = RMSNorm(config.head_dim)

    def forward(self, block: Tensor, context: Tensor, where: Tensor, context_where: Tensor, mask: Tensor) -> Tensor:
        """`block` [B, Q, hidden] and `context` [B, S, hidden] at positions [B, Q] and [B, S]; `mask` [B, Q, S + Q]."""
        rows = torch.cat([context, block], 1)
        q = rotate(self.q_norm(self._heads(self.q_proj(block))), where)
        k = rotate(self.k_norm(self._heads(self.k_proj(rows))), torch.cat([context_where, where], 1))
        v = self._heads(self.v_proj(rows))
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        attended = F.scaled_dot_product_attention(q, k, v, attn_mask=mask[:, None], enable_gqa=True)
        return self.o_proj(attended.transpose(1, 2).flatten(2))

    def _heads(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (-1, self.config.head_dim))


class MLP(nn.Module):
    """The gated feed-forward network of Qwen3."""

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        self.gate_proj = _linear(config.hidden, config.intermediate)
        self.up_proj = _linear(config.hidden, config.intermediate)
        self.down_proj = _linear(config.intermediate, config.hidden)

    def forward(self, x: Tensor) -> Tensor:
        """Same shape as `x`."""
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    """One pre-norm layer."""

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        self.self_attn = Attention(config)
        self.mlp = MLP(config)
        self.input_layernorm = RMSNorm(config.hidden)
        self.post_attention_layernorm = RMSNorm(config.hidden)

    def forward(self, x: Tensor, context: Tensor, where: Tensor, context_where: Tensor, mask: Tensor) -> Tensor:
        """As `Attention.forward`, with the residual added."""
        x = x + self.self_attn(self.input_layernorm(x), context, where, context_where, mask)
        return x + self.mlp(self.post_attention_layernorm(x))


class Drafter(nn.Module):
    """The network; its parameters carry the names of the saved file."""

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        self.config = config
        self.layers = nn.ModuleList([Layer(config) for _ in range(config.layers)])
        self.norm = RMSNorm(config.hidden)
        self.hidden_norm = RMSNorm(config.hidden)
        self.fc = _linear(len(config.feature_layers) * config.hidden, config.hidden)

    def forward(self, features: Tensor, anchors: Tensor, embedded: Tensor) -> Tensor:
        """Hidden states of the masks of A blocks a row, [B, A, block - 1, hidden].

        `features` [B, S, features * hidden] of the row's tokens; `anchors` int64 [B, A], the positions of the blocks'
        first tokens, whose contexts are the tokens before; `embedded` [B, A, block, hidden].
        """
        batch, n_blocks = anchors.shape
        block, n_context = self.config.block_size, features.shape[1]
        context = self.hidden_norm(self.fc(features))
        where = (anchors[:, :, None] + torch.arange(block)).flatten(1)  # [B, A * block]
        context_where = torch.arange(n_context).expand(batch, -1)
        owner = torch.arange(n_blocks).repeat_interleave(block)
        inside = (owner[:, None] == owner[None, :]).expand(batch, -1, -1)
        before = context_where[:, None, :] < anchors.repeat_interleave(block, 1)[:, :, None]
        mask = torch.cat([before, inside], -1)  # [B, A * block, S + A * block]
        x = embedded.flatten(1, 2)
        for layer in self.layers:
            x = layer(x, context, where, context_where, mask)
        return self.norm(x).unflatten(1, (n_blocks, block))[:, :, 1:]


def rotate(x: Tensor, where: Tensor) -> Tensor:
    """Rotary position embedding, halves paired (NeoX style): `x` [B, S, heads, head_dim] at positions [B, S]."""
    half = x.shape[-1] // 2
    rates = ROPE_THETA ** (-torch.arange(half).float() / half)
    angles = (where[..., None].float() * rates)[:, :, None]  # [B, S, 1, half]
    a, b = x[..., :half], x[..., half:]
    return torch.cat([a * angles.cos() - b * angles.sin(), b * angles.cos() + a * angles.sin()], -1)


def save(drafter: Drafter, folder: Path) -> None:
    """Write config.json, weights and tokenizer into `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(hugging_face_config(drafter.config), indent=2) + "\n")
    weights = {name: weight.detach().contiguous() for name, weight in drafter.state_dict().items()}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    tokenizer.save(folder)


def load(folder: Path) -> Drafter:
    """The drafter that `save` wrote into `folder`."""
    written = json.loads((folder / "config.json").read_text())
    drafter = Drafter(
        DrafterConfig(
            hidden=written["hidden_size"],
            block_size=written["block_size"],
            target_layers=written["num_target_layers"],
            feature_layers=tuple(written["dflash_config"]["target_layer_ids"]),
            layers=written["num_hidden_layers"],
            heads=written["num_attention_heads"],
            kv_heads=written["num_key_value_heads"],
            head_dim=written["head_dim"],
            intermediate=written["intermediate_size"],
        )
    )
    drafter.load_state_dict(load_file(folder / "model.safetensors"))
    return drafter.eval().requires_grad_(False)


def hugging_face_config(config: DrafterConfig) -> dict[str, object]:
    """The drafter's config.json: a Qwen3 with the keys of SGLang's DFLASH (`dflash_config`, `block_size`)."""
    return {
        "architectures": ["DFlashDraftModel"],
        "model_type": "qwen3",
        "dtype": "float32",
        "vocab_size": tokenizer.VOCAB_SIZE,
        "hidden_size": config.hidden,
        "intermediate_size": config.intermediate,
        "num_hidden_layers": config.layers,
        "layer_types": ["full_attention"] * config.layers,
        "num_attention_heads": config.heads,
        "num_key_value_heads": config.kv_heads,
        "head_dim": config.head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": NORM_EPS,
        "rope_parameters": {"rope_type": "default", "rope_theta": ROPE_THETA},
        "max_position_embeddings": 2048,
        "attention_bias": False,
        "tie_word_embeddings": False,
        "bos_token_id": tokenizer.BEGIN_ID,
        "eos_token_id": tokenizer.END_ID,
        "pad_token_id": tokenizer.PAD_ID,
        "block_size": config.block_size,
        "num_target_layers": config.target_layers,
        "dflash_config": {
            "mask_token_id": tokenizer.MASK_ID,
            "target_layer_ids": list(config.feature_layers),
        },
    }


def _linear(inputs: int, outputs: int) -> nn.Linear:
    return nn.Linear(inputs, outputs, bias=False)
