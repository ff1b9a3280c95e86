"""Refusal of bfloat16, which Triton 3.7.0's interpreter computes wrongly and without a word.

Greedy tokens of a bfloat16 model differ from Hugging Face's at the first position, while AR and speculative decoding
still agree with each other, so no comparison of two servers shows it. float32 and float16 are right.
"""

from __future__ import annotations

from typing import Any

import torch

_WHY = "Triton's interpreter computes bfloat16 wrongly"


def refuse_bfloat16_options(server_args: Any) -> None:
    """Check the options of a server before anything is loaded.

    Args:
        server_args: SGLang's `ServerArgs`, or the view of it that a platform is handed. `dtype` may be `auto`: the
            checkpoint's own dtype then counts.

    Raises:
        SystemExit: the model or the KV cache would be bfloat16.
    """
    if server_args.kv_cache_dtype in ("bf16", "bfloat16"):
        raise SystemExit(
            f"--kv-cache-dtype {server_args.kv_cache_dtype}: {_WHY}; leave it out or use --kv-cache-dtype float32"
        )
    if server_args.dtype == "bfloat16":
        raise SystemExit(f"--dtype bfloat16: {_WHY}; use --dtype float32")
    if server_args.dtype == "auto" and _checkpoint_dtype(server_args) is torch.bfloat16:
        raise SystemExit(f"--dtype auto means bfloat16 for {server_args.model_path}: {_WHY}; use --dtype float32")


def refuse_bfloat16_weights(model: torch.nn.Module) -> None:
    """Check a loaded model: some architectures are forced to bfloat16 whatever `--dtype` says.

    Raises:
        ValueError: a parameter is bfloat16.
    """
    for name, parameter in model.named_parameters():
        if parameter.dtype is torch.bfloat16:
            raise ValueError(f"{type(model).__name__}.{name} is bfloat16: {_WHY}; use --dtype float32")


def _checkpoint_dtype(server_args: Any) -> torch.dtype:
    """The dtype that SGLang makes of `auto`, by its own rule (`configs/model_config.py:_get_and_verify_dtype`)."""
    from sglang.srt.configs.model_config import _get_and_verify_dtype
    from sglang.srt.utils.hf_transformers_utils import get_config

    config = get_config(server_args.model_path, trust_remote_code=server_args.trust_remote_code)
    return _get_and_verify_dtype(config.get_text_config(), "auto")
