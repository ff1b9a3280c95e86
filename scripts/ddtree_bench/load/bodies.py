"""What is sent: the JSON body of a request, sampling in full."""

from __future__ import annotations

from typing import Any

from ddtree_bench.load.prompts import Prompt
from ddtree_bench.plan import Workload

PATHS = {"chat": "/v1/chat/completions", "completions": "/v1/completions"}
"""Where a request goes, by endpoint."""


OPTIONAL = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "n",
    "seed",
    "ignore_eos",
    "stream_options",
    "return_spec_tokens_details",
)
"""Fields that may be left out for a server that refuses them."""


def request_body(workload: Workload, prompt: Prompt, model: str) -> dict[str, Any]:
    """Return the JSON body for one prompt.

    Every sampling parameter is sent: a server takes its defaults from the model's generation config, where a
    repetition penalty or a top_k of 1 changes what is measured without a word. Raises ValueError for a prompt of
    messages that is to go to completions.
    """
    return {
        "model": model,
        **_asked(workload, prompt),
        "max_tokens": workload.max_tokens,
        "temperature": workload.temperature,
        "top_p": workload.top_p,
        "top_k": workload.top_k,
        "min_p": 0.0,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "repetition_penalty": 1.0,
        "n": 1,
        "seed": workload.seed,
        "ignore_eos": workload.ignore_eos,
        "stream": True,
        "stream_options": {"include_usage": True, "continuous_usage_stats": True},
        "return_spec_tokens_details": True,
    }


def _asked(workload: Workload, prompt: Prompt) -> dict[str, Any]:
    if workload.endpoint == "chat":
        return {"messages": list(prompt.messages or [{"role": "user", "content": prompt.text}])}
    if prompt.messages:
        raise ValueError(f"prompt {prompt.id}: messages need the chat endpoint; give a prompt of text, or use chat")
    return {"prompt": prompt.text}
