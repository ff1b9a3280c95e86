"""Input embeddings in the model's own dtype.

`model_executor/model_runner.py:1772` casts `input_embeds` to bfloat16 whatever the model computes in. A DFlash drafter
is fed by `input_embeds`, so that a float32 one fails on mixed dtypes (and a bfloat16 one would be wrong here).
"""

from __future__ import annotations

from typing import Any


def keep_model_dtype() -> None:
    """Wrap `ModelRunner._extend_forward_kwargs` so that `input_embeds` has the runner's dtype. Safe to repeat."""
    from sglang.srt.model_executor.model_runner import ModelRunner

    original = ModelRunner._extend_forward_kwargs
    if getattr(original, "keeps_model_dtype", False):
        return

    def extend_forward_kwargs(self: Any, forward_batch: Any, pp_proxy_tensors: Any) -> dict[str, Any]:
        kwargs = original(self, forward_batch, pp_proxy_tensors)
        if forward_batch.input_embeds is not None:
            kwargs["input_embeds"] = _embeds(forward_batch, self.dtype)
        return kwargs

    extend_forward_kwargs.keeps_model_dtype = True  # type: ignore[attr-defined]
    ModelRunner._extend_forward_kwargs = extend_forward_kwargs


def _embeds(forward_batch: Any, dtype: Any) -> Any:
    """[tokens, hidden] embeddings with the batch's replacements put in, as the wrapped method does it."""
    embeds = forward_batch.input_embeds.to(dtype)
    if forward_batch.replace_embeds is None or forward_batch.replace_positions is None:
        return embeds
    embeds = embeds.clone()
    embeds[forward_batch.replace_positions] = forward_batch.replace_embeds.to(dtype)
    return embeds
