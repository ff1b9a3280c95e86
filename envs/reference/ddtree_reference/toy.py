"""A toy target and drafter that start at once: seeded random weights, bytes as tokens, the same code paths.

For testing pipelines. The text is gibberish that repeats itself in runs; the drafter bets on recent tokens, so that
some drafts are accepted and some are not. Nothing measured with it means anything.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ddtree_reference import drafter as dflash
from ddtree_reference import linear, model, tokenizer
from ddtree_reference.drafter import Drafter
from ddtree_reference.model import Numerics, Target
from ddtree_reference.tokenizer import Tokenizer

SPECIAL = ("<|im_start|>", "<|im_end|>")
EOS = 257
DIM, HEAD_DIM, N_HEADS, N_KV_HEADS, HIDDEN_DIM, N_LAYERS = 64, 16, 4, 2, 128, 2
GAIN = 1.5  # how much the layers add to a token's own embedding: runs get shorter as it grows
SEED = 2
TOKEN_MARK, MASK_MARK = 0, 1  # coordinates that tell tokens from the drafter's masks; they carry no meaning
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def build_tokenizer() -> Tokenizer:
    """One token a byte, and two special tokens."""
    characters = sorted(tokenizer.byte_alphabet().items(), key=lambda item: item[1])
    tokens = [character for character, _ in characters] + list(SPECIAL)
    return tokenizer.build(tokens, [], [EOS - 1, EOS], EOS, CHAT_TEMPLATE)


def build_target(numerics: Numerics, max_context: int) -> Target:
    """A target whose embeddings of printable ASCII are random and of all else zero, so that it answers in ASCII."""
    random = torch.Generator().manual_seed(SEED)
    dtype = model.weight_dtype(numerics)

    def matrix(rows: int, columns: int, gain: float) -> Tensor:
        values: Tensor = torch.randn(rows, columns, generator=random) * gain / columns**0.5
        return values.to(dtype)

    def layer() -> model.Layer:
        return model.Layer(
            qkv=linear.pack(matrix((N_HEADS + 2 * N_KV_HEADS) * HEAD_DIM, DIM, 2.0)),
            out=linear.pack(matrix(DIM, N_HEADS * HEAD_DIM, GAIN)),
            gate_up=linear.pack(matrix(2 * HIDDEN_DIM, DIM, 1.0)),
            down=linear.pack(matrix(DIM, HIDDEN_DIM, GAIN)),
            attention_norm=torch.ones(DIM),
            ffn_norm=torch.ones(DIM),
        )

    config = model.Config(
        n_layers=N_LAYERS,
        dim=DIM,
        n_heads=N_HEADS,
        n_kv_heads=N_KV_HEADS,
        head_dim=HEAD_DIM,
        hidden_dim=HIDDEN_DIM,
        vocab_size=256 + len(SPECIAL),
        rope_base=10_000.0,
        norm_eps=1e-5,
        max_context=max_context,
    )
    embedding = torch.randn(config.vocab_size, DIM, generator=random)
    head = embedding.clone()
    embedding[:, TOKEN_MARK], embedding[:, MASK_MARK] = 1.0, 0.0
    head[:, [TOKEN_MARK, MASK_MARK]] = 0.0
    head[[i for i in range(config.vocab_size) if not 32 <= i < 127]] = 0.0
    layers = [layer() for _ in range(N_LAYERS)]
    return model.assemble(config, numerics, embedding.to(dtype), head.to(dtype), torch.ones(DIM), layers)


def build_drafter(target: Target) -> Drafter:
    """A drafter of one layer that bets that a run goes on.

    Masks ask for tokens and see nothing but distance (constant queries and keys under rope): they average what the
    latest tokens stood for.
    """
    config = dflash.Config(
        n_layers=1,
        dim=DIM,
        n_heads=N_HEADS,
        n_kv_heads=N_HEADS,
        head_dim=HEAD_DIM,
        hidden_dim=HIDDEN_DIM,
        feature_layers=(0, N_LAYERS - 1),
        rope_base=target.config.rope_base,
        norm_eps=target.config.norm_eps,
        max_block_size=16,
    )
    queries, keys = torch.zeros(DIM, DIM), torch.zeros(DIM, DIM)
    queries[:, MASK_MARK], keys[:, TOKEN_MARK] = 0.25, 1.0
    mask_embedding = torch.zeros(DIM)
    mask_embedding[MASK_MARK] = 1.0
    weights = {
        "fc": torch.cat([torch.zeros(DIM, DIM), torch.eye(DIM)], 1),
        "context_norm": torch.ones(DIM),
        "mask_embedding": mask_embedding,
        "norm": torch.ones(DIM),
        "layers.0.q": queries,
        "layers.0.kv": torch.cat([keys, torch.eye(DIM)]),
        "layers.0.out": torch.eye(DIM),
        "layers.0.gate_up": torch.zeros(2 * HIDDEN_DIM, DIM),
        "layers.0.down": torch.zeros(DIM, HIDDEN_DIM),
        "layers.0.attention_norm": torch.ones(DIM),
        "layers.0.ffn_norm": torch.ones(DIM),
    }
    return dflash.assemble(config, weights, torch.arange(target.config.vocab_size), target)
