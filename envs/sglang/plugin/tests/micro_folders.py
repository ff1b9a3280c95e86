"""Model folders that hold a configuration alone: enough for SGLang to resolve its arguments."""

import json
from pathlib import Path

SHAPE = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "vocab_size": 320,
    "max_position_embeddings": 1024,
}


def write_target(folder: Path, **changed) -> Path:
    return _write(folder, {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", **SHAPE, **changed})


def write_drafter(folder: Path, block: int) -> Path:
    drafting = {"block_size": block, "dflash_config": {"mask_token_id": 319, "target_layer_ids": [0, 1]}}
    return _write(folder, {"architectures": ["DFlashDraftModel"], "model_type": "qwen3", **SHAPE, **drafting})


def _write(folder: Path, config: dict) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    return folder
